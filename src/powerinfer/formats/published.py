"""`PWRI` files, the format of PowerInfer's models: GGUF files with another magic.

A file has a predictor for every layer (`fc1`, `fc2`) and stores the down
projection neuron by neuron (`ffn_down_t`). Its FFN is always rectified, whatever its architecture.
"""

from __future__ import annotations

from dataclasses import replace

from powerinfer.errors import ModelError
from powerinfer.formats.families import GGUFS
from powerinfer.formats.fields import Fields
from powerinfer.formats.gguf import GGUFFile
from powerinfer.formats.gguf_model import fused, names_of, read_config, stored_tensors
from powerinfer.formats.layout import MAX_SCALE
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Source, collect, predictor_shapes

GPU_INDEX = "says which neurons PowerInfer put on a GPU; this engine does not need it: name the model itself"


def open_published(file: GGUFFile) -> Source:
    """The model in a PWRI file; ModelError if it is not one this engine runs."""
    if file.metadata.get("general.architecture") == "generic.gpu_index":
        raise ModelError(f"{file.path} {GPU_INDEX}")
    config = read_config(file, published=True)
    threshold = _threshold(file)
    names = names_of(file, config)
    inner = {"predictor_in": "fc1", "predictor_out": "fc2", "down": "ffn_down_t", "down_rows": "ffn_down_t"}
    names = replace(names, inner=names.inner | inner)
    stored = stored_tensors(file, config)
    predictors = predictor_shapes(config, stored, names)
    tensors = collect(config, stored, names, str(file.path), predictors, fused(file, config))
    metadata, pre_tokenizer = file.metadata, GGUFS[config.architecture].pre_tokenizer
    if pre_tokenizer is not None:  # the converter wrote no name, as there was one for each architecture
        metadata = {"tokenizer.ggml.pre": pre_tokenizer} | metadata
    notes = [f"a file of PowerInfer's: activation {config.activations}, predictors with threshold {threshold:g}"]
    return Source("gguf", file.path, config, metadata, tensors, file.files, notes, threshold)


def _threshold(file: GGUFFile) -> float:
    """The threshold of the predictors' outputs."""
    fields = Fields(file.metadata, str(file.path), prefix="powerinfer.")
    threshold = fields.number("sparse_threshold", -MAX_SCALE, MAX_SCALE, 0.0)
    unread = fields.unread()
    if unread:
        raise fields.bad(shown(unread[0])[1:-1], "is set, and this engine does not know what it means")
    return float(threshold)
