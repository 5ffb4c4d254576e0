"""The model in a Hugging Face folder as what `quantize` makes a GGUF file of."""

from __future__ import annotations

import numpy as np

from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.gguf import encoded
from powerinfer.formats.layout import draft_shapes, is_matrix, is_router, shapes
from powerinfer.formats.quantised_file import Original, describe, written_factors
from powerinfer.formats.tensors import RawTensor, float32_tensor
from powerinfer_train.as_gguf import ARCHITECTURES, AsGGUF
from powerinfer_train.recipes import StoredTypes

_DIVISORS = "rope_freqs.weight"


class _Written(AsGGUF):
    """A folder's model in the terms of GGUF."""

    families = ARCHITECTURES | {"glm4_moe": "glm4moe"}

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"{self._path}: {reason}; llama.cpp's convert_hf_to_gguf.py may make a GGUF file of it")


def folder_original(checkpoint: Checkpoint) -> Original:
    """The model in a folder, with its draft head, the metadata and the tokenizer of a GGUF file. RequestError for one
    that a GGUF file cannot hold, or not as it is."""
    form, config = _Written(checkpoint, StoredTypes("bf16")), checkpoint.config
    canonical, stored, factors = {}, {}, {}
    for listed, names in ((shapes(config), form.names), (draft_shapes(config), form.draft_names)):
        for name, shape in listed:
            matrix = is_matrix(name, shape) and not is_router(name)
            canonical[names(name)] = name
            stored[names(name)] = (checkpoint.taken_type(name) if matrix else "F32", shape)
            stated = written_factors(*stored[names(name)], checkpoint.factors(name))
            if stated is not None and checkpoint.order(name) is None:
                factors[names(name)] = stated
    if form.divisors is not None:
        stored[_DIVISORS] = ("F32", form.divisors.shape)

    def take(name: str) -> RawTensor:
        if name == _DIVISORS:
            assert form.divisors is not None
            return float32_tensor(form.divisors)
        tensor, (kind, _) = checkpoint.take(canonical[name]), stored[name]
        checkpoint.release()
        scaled = tensor.scales is not None and name not in factors
        if kind != tensor.type or scaled or tensor.order is not None:
            return float32_tensor(form.reordered(canonical[name], tensor.float32()))
        rows = form.reordered(canonical[name], tensor.rows())
        return RawTensor(kind, tensor.shape, np.ascontiguousarray(rows).reshape(-1), tensor.scales)

    activation = {} if config.activations == "silu" else {f"{form.architecture}.hidden_act": config.activations}
    metadata = {key: encoded(value) for key, value in (form.metadata | activation).items()}
    matrices = describe(stored, form.metadata)
    return Original(checkpoint.path, metadata, matrices, take, checkpoint.files, is_gguf=False, factors=factors)
