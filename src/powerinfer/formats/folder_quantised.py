"""Quantised Hugging Face folders: the tensors of each quantised matrix become one tensor, in a type that kernels take.

Which way a matrix is stored follows from its tensors; `quantization_config` says what they do not show. Only headers
are read, and single small numbers: a matrix is made when it is taken, rows at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from powerinfer.formats.family import Tensors
from powerinfer.formats.folder_modules import Module, Settings
from powerinfer.formats.fp4_weights import read_fp4, read_modelopt_fp4
from powerinfer.formats.fp8_weights import read_fp8
from powerinfer.formats.int_weights import (
    problem_of_awq,
    problem_of_gptq,
    read_awq,
    read_bitsandbytes_int8,
    read_gptq,
    read_int8,
    read_packed,
)
from powerinfer.formats.mapped import shown
from powerinfer.formats.nf4_weights import problem_of_bitsandbytes, read_nf4
from powerinfer.formats.source import SingleTensor
from powerinfer.formats.tensors import MadeTensor, StackedTensor, StoredTensor
from powerinfer.formats.ternary_weights import is_made_ternary, make_ternary, problem_of_bitnet, read_ternary

Reader = Callable[[Module, Settings], MadeTensor]

_OF_ACTIVATIONS = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
    ".activation_scale", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
"""The ends of the names of scales and zero points by which others round activations and caches, which are not rounded
so here."""


_FORMATS = (
    "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
"""Formats of compressed-tensors, in names of its own."""


def _problem_of_compressed(settings: Settings) -> str | None:
    stated = settings.get("format")
    if type(stated) is not str or stated not in _FORMATS:
        return f"has the format {shown(stated)}, which is not read (only {', '.join(_FORMATS)})"
    sparsity = settings.get("sparsity_config")
    if type(sparsity) is dict and sparsity.get("format") not in (None, "dense"):
        return f"has a sparsity_config of format {shown(sparsity['format'])}, which is not read"
    return "has a transform_config, which is not computed" if settings.get("transform_config") else None


def _problem_of_modelopt(settings: Settings) -> str | None:
    stated = settings.get("quant_algo")
    algorithms = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "NVFP4", "W4A16_NVFP4")
    if stated in algorithms:
        return None
    return f"has the quant_algo {shown(stated)}, which is not read (only {', '.join(algorithms)})"


def settings_of_modelopt(document: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of folders in which ModelOpt wrote it to hf_quant_config.json alone."""
    stated = document.get("quantization")
    return {"quant_method": "modelopt"} | (stated if type(stated) is dict else {})


_METHODS: Mapping[str, Callable[[Settings], str | None]] = {
    "awq": problem_of_awq,
    "bitnet": problem_of_bitnet,
    "bitsandbytes": problem_of_bitsandbytes,
    "compressed-tensors": _problem_of_compressed,
    "fbgemm_fp8": lambda settings: None,
    "fp8": lambda settings: None,
    "gptq": problem_of_gptq,
    "modelopt": _problem_of_modelopt,
}
"""The part of the settings of each `quant_method` that is not read; None: all is."""


def problem(settings: Any) -> str | None:
    """The fault of a `quantization_config`, behind its name; None where folders with it are read."""
    method = settings.get("quant_method") if type(settings) is dict else None
    if type(method) is not str or method not in _METHODS:
        names = ", ".join(sorted(_METHODS))
        return f"has the quant_method {shown(method)}, which is not read in folders (only {names}); GGUF files are"
    return _METHODS[method](settings)


def unpack(stored: Tensors, settings: Settings, source: str) -> None:
    """Replaces the tensors of quantised matrices by `MadeTensor`s, as `NAME.weight`.

    ModelError if the tensors do not go together.
    """
    for name in list(stored):
        tensor = stored.get(name)
        reader = None if tensor is None else _reader(name, tensor, settings)
        if reader is None:
            continue
        module = Module(stored, name.rpartition(".")[0], source)
        kind, read = reader
        weight = f"{module.name}.weight"
        if weight in stored and weight != name:
            raise module.bad("has a weight beside its codes")
        matrix = read(module, settings)
        stored[weight] = replace(matrix, kind=kind)
    for name in [name for name in stored if name.endswith(_OF_ACTIVATIONS)]:
        del stored[name]


def _reader(name: str, tensor: SingleTensor, settings: Settings) -> tuple[str, Reader] | None:
    """(kind of matrix, its reader), of the tensor that holds the codes of one; None of others."""
    match name.rpartition(".")[2], tensor.type:
        case "weight", "F8_E4M3":
            return "FP8", read_fp8
        case "weight", "I8" if settings["quant_method"] == "bitsandbytes":
            return "int8", read_bitsandbytes_int8
        case "weight", "I8":
            return "int8", read_int8
        case "weight_packed", "U8":
            return "FP4", read_fp4
        case "weight", "U8" if settings["quant_method"] == "bitnet":
            return "ternary", read_ternary
        case "weight", _ if len(tensor.shape) == 2 and is_made_ternary(name, settings):
            return "absmean", make_ternary
        case "weight", "U8" if settings["quant_method"] == "modelopt":
            return "FP4", read_modelopt_fp4
        case "weight", "U8" if settings["quant_method"] == "bitsandbytes" and settings.get("load_in_4bit") is True:
            return str(settings["bnb_4bit_quant_type"]).upper(), read_nf4
        case "weight_packed", "I32":
            return "packed", read_packed
        case "qweight", _ if settings["quant_method"] == "gptq":
            return "GPTQ", read_gptq
        case "qweight", _ if settings["quant_method"] == "awq":
            return "AWQ", read_awq
    return None


def describe(tensors: Iterable[StoredTensor]) -> list[str]:
    """Lines for the user: what the quantised matrices of a model become."""
    matrices: dict[tuple[str, str], list[MadeTensor]] = defaultdict(list)
    for tensor in tensors:
        for part in tensor.parts if isinstance(tensor, StackedTensor) else (tensor,):
            if isinstance(part, MadeTensor) and part.kind:
                matrices[part.kind, part.type].append(part)
    return [_note(kind, type_name, several) for (kind, type_name), several in sorted(matrices.items())]


def _note(kind: str, type_name: str, matrices: list[MadeTensor]) -> str:
    sources = {source.data.ctypes.data: source.nbytes for matrix in matrices for source in matrix.sources}
    before = sum(sources.values())  # once where matrices are made of the same
    factor = sum(matrix.nbytes for matrix in matrices) / before
    grows = f", which takes {factor:.1f} times the memory" if factor > 1.05 else ""
    smaller = "; --quantize q8_0 takes half of that" if type_name == "F16" else ""
    return f"{len(matrices)} {kind} matrices are computed in {type_name}{grows}{smaller}"
