"""The types of a described model's matrices: one for all, or the mix that llama.cpp writes under a name such as Q4_K_M.

llama.cpp gives some matrices more bits than the name says: the output head, and in a part of the layers v and down.
Where rows are not whole blocks of 256 a type with blocks of 32 stands in.
"""

from __future__ import annotations

from powerinfer.config import AttentionKind, ExpertsConfig, ModelConfig
from powerinfer.errors import RequestError, did_you_mean
from powerinfer.formats.mapped import shown
from powerinfer.formats.mixes import MIXES, Mix, ModelMatrices, fitting, weighed_type
from powerinfer.formats.quant import block_type

_FEW_BITS = {
    name.lower(): mix
    for name, mix in MIXES.items()
    if mix.type.startswith(("IQ1", "IQ2", "IQ3", "TQ", "NVFP4", "Q1_0", "Q2_0"))
}
DTYPES = {
    **{name.lower(): name for name in ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")},
    **dict.fromkeys(("q2_k",), "Q2_K"),
    **dict.fromkeys(("q3_k_s", "q3_k_m", "q3_k_l"), "Q3_K"),
    **dict.fromkeys(("q4_k_s", "q4_k_m"), "Q4_K"),
    **dict.fromkeys(("q5_k_s", "q5_k_m"), "Q5_K"),
    **{"q6_k": "Q6_K", "iq4_xs": "IQ4_XS", "iq4_nl": "IQ4_NL"},
    **{name: mix.type for name, mix in _FEW_BITS.items()},
}
"""Weight types of a model that is only described, and the type of most of its matrices; all of them are native."""

_MIXED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL")
_SMALLER_BLOCKS = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
_OF_VALUES = ("v", "delta_q", "delta_k", "delta_v")  # llama.cpp has DeltaNet's three in one matrix
_KINDS = {"k": "key", "q": "query", "o": "out", "gate": "gate", "up": "up", "down": "down"}
_IN_ONE = ("phi3",)  # whose files have q, k and v in one matrix
_OF_ONE = {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}
_EIGHT = 8  # Mixtral's experts
_LARGE = 80  # layers of the models of 70B


def read_dtype(text: str) -> str:
    """A name of `DTYPES`, in any case; also of a file's quantisation: UD-Q4_K_XL counts as Q4_K_M.

    RequestError for another.
    """
    name = text.lower().removeprefix("ud-").replace("_xl", "_m").removesuffix("_moe")
    if name not in DTYPES:
        near = did_you_mean(name, DTYPES)
        raise RequestError(f"--dtype {shown(text)}: no type of weights{near or '; one of ' + ', '.join(DTYPES)}")
    return name


def usual_dtype(config: ModelConfig) -> str:
    """The type in which most people have such a model."""
    if config.architecture == "gpt_oss":
        return "mxfp4"
    return "q4_0" if config.rectified else "q4_k_m"  # whose bundles keep the type


def stored_type(config: ModelConfig, dtype: str, tensor: str, cols: int) -> str:
    """The type of a matrix in a file of this type, one of `DTYPES`."""
    if dtype in _FEW_BITS:
        return fitting(_few_bits_type(config, _FEW_BITS[dtype], tensor), cols)
    base = DTYPES[dtype]
    if base == "MXFP4" and config.experts and ".experts_" not in tensor:
        base = "Q8_0"  # as in published files
    chosen = _mixed(config, dtype, base, tensor) if base in _MIXED else base
    if cols % block_type(chosen).block:
        chosen = _SMALLER_BLOCKS.get(chosen, "F16")
    return "F16" if cols % block_type(chosen).block else chosen


def _few_bits_type(config: ModelConfig, mix: Mix, tensor: str) -> str:
    """The type of a matrix, which is quantised with an imatrix, if its rows are whole blocks."""
    if tensor == "head" or (tensor == "embed" and config.tied_embeddings):
        return mix.head
    if tensor == "embed":
        return mix.embedding or mix.type
    outer, _, rest = tensor.partition(".")
    if outer != "layers":
        return mix.type
    number, _, name = rest.partition(".")
    attention = config.layers[int(number)].attention
    grouped = bool(attention.n_kv_heads) and attention.n_heads // attention.n_kv_heads >= 4
    large = config.n_layers == _LARGE and not config.experts
    kind = "value" if name in _OF_VALUES else _KINDS.get(name.rpartition("_")[2], "")
    matrices = ModelMatrices({}, config.n_layers, _n_experts(config), grouped, large)
    return weighed_type(mix, kind, int(number), matrices)


def _mixed(config: ModelConfig, dtype: str, base: str, tensor: str) -> str:
    """The type that llama.cpp chooses; see its `llama_tensor_get_type`."""
    if tensor == "head" or (tensor == "embed" and config.tied_embeddings):
        return "Q6_K"
    outer, _, rest = tensor.partition(".")
    if outer != "layers":
        return base
    number, _, name = rest.partition(".")
    layer, layers = int(number), config.n_layers
    if name in ("q", "k", "v") and config.architecture in _IN_ONE:
        return _OF_ONE.get(dtype, base)
    eight = name in ("k", "o", *_OF_VALUES) and _n_experts(config) == _EIGHT
    if name in _OF_VALUES:
        more = _of_values(config.layers[layer].attention, dtype, base, layer, layers)
        more = "Q5_K" if layers == _LARGE and not config.experts and more in ("Q3_K", "Q4_K") else more
        return "Q8_0" if eight else more
    if name == "k" and eight:
        return "Q8_0"
    if name.endswith("down"):
        return _of_down(config.architecture == "falcon", dtype, base, layer, layers)
    if name == "o" and config.architecture != "falcon":
        if eight:
            return "Q5_K" if dtype in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_xs", "iq4_nl") else base
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(dtype, base)
    return base


def _of_values(attention: AttentionKind, dtype: str, base: str, layer: int, layers: int) -> str:
    shared = attention.n_heads // attention.n_kv_heads >= 4 if attention.n_kv_heads else False
    if dtype == "q2_k":
        return "Q4_K" if shared else "Q3_K"
    if dtype == "q3_k_m":
        return "Q5_K" if layer < 2 else "Q4_K"
    if dtype == "q3_k_l":
        return "Q5_K"
    if base in ("IQ4_XS", "IQ4_NL"):
        return "Q5_K" if shared else base
    if dtype in ("q4_k_m", "q5_k_m"):
        return "Q6_K" if _more_bits(layer, layers) else base
    return "Q5_K" if dtype == "q4_k_s" and layer < 4 else base


def _of_down(falcon: bool, dtype: str, base: str, layer: int, layers: int) -> str:
    more = _more_bits(layer, layers)
    if dtype == "q2_k":
        return "Q3_K"
    if dtype == "q3_k_m":
        return "Q5_K" if layer < layers // 16 else "Q4_K" if not falcon or more else base
    if dtype == "q3_k_l":
        return "Q4_K" if falcon else "Q5_K"
    if dtype == "q4_k_m" and falcon:
        return "Q6_K" if layer < layers // 16 else "Q5_K" if more else base
    if dtype in ("q4_k_m", "q5_k_m"):
        return "Q6_K" if more else base
    early = layer < layers // 8 and not falcon
    return "Q5_K" if early and dtype in ("q4_k_s", "iq4_xs", "iq4_nl") else base


def _more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is one of the first or last eighth, or every third of the others."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _n_experts(config: ModelConfig) -> int:
    return max((one.ffn.n_experts for one in config.layers if isinstance(one.ffn, ExpertsConfig)), default=0)
