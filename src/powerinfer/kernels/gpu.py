"""Kernels over torch tensors: plain torch on any device, or Triton on a GPU, chosen by the device of the tensors.

Activations are float32 between operators; weights are stored in their own type and dequantised within products, whose
sums are float32. The plain functions here define what the Triton kernels must compute. Every sum has a
fixed order: the same arguments give the same bits. Many tokens at once, of a prompt, are multiplied in the narrow
types of tensor cores, on a GPU.

torch is imported inside the functions: the sizes below are used without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import BANK, AttentionConfig, FfnConfig
from powerinfer.formats.bundle_memory import cuts, gather, some_bytes, whole
from powerinfer.formats.prepared import LINE
from powerinfer.formats.quant import ALMOST_HALF, Bytes, Float32, as_q8_0, block_type
from powerinfer.formats.tensors import RawTensor, convert
from powerinfer.formats.weight_types import BLOCKS, FLOAT_TYPES, STORED_ROWS, WEIGHT_TYPES
from powerinfer.formats.weight_types import GPU_TYPES as GPU_TYPES
from powerinfer.kernels import gpu_words
from powerinfer.kernels.activations import Activations, plain_halves
from powerinfer.kernels.cpu import bundle_row_order, code_bytes
from powerinfer.kernels.gpu_types import CUT as CUT
from powerinfer.kernels.gpu_types import DELTA_CHUNK as DELTA_CHUNK
from powerinfer.kernels.gpu_types import FACTORED as FACTORED
from powerinfer.kernels.gpu_types import FEW as FEW
from powerinfer.kernels.gpu_types import (
    FLOAT16_MAX,
    GELU_CUBIC,
    GELU_SCALE,
    MADE_CODES,
    OAI_LIMIT,
    OAI_SCALE,
    Q8_STEP,
    piece_elements,
)
from powerinfer.kernels.gpu_types import INTEGERS as INTEGERS
from powerinfer.kernels.gpu_types import K_CODES as K_CODES
from powerinfer.kernels.gpu_types import PAGE as PAGE
from powerinfer.kernels.gpu_types import PIECE as _PIECE
from powerinfer.kernels.gpu_types import SCAN_CHUNK as SCAN_CHUNK
from powerinfer.kernels.gpu_types import SHARING as SHARING
from powerinfer.kernels.gpu_types import UNPACKED as UNPACKED
from powerinfer.kernels.gpu_types import Cached as Cached
from powerinfer.kernels.gpu_types import Contexts as Contexts
from powerinfer.kernels.gpu_types import HeadNorms as HeadNorms
from powerinfer.kernels.gpu_types import Limit as Limit
from powerinfer.kernels.gpu_types import Neurons as Neurons
from powerinfer.kernels.gpu_types import NewHeads as NewHeads
from powerinfer.kernels.gpu_types import Weight as Weight
from powerinfer.kernels.torch_attention import attend_pages
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, NeuronVectors
from powerinfer.system import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import CallAnswer

_SLAB = 1 << 19  # elements that are converted at a time: by a thread, in whose cache they stay, or on a device

_LOADED = 1 << 24  # bytes of bundles uploaded at a time

_SIGNS = np.uint8(0x88)  # converts two codes with an offset of 8 into two's complement, and back

_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]

_WIDE_CODES = ("Q8_0", "Q8_0X32")  # types with a code in a byte

_NARROW = ["cuda"]  # devices that multiply many tokens in float16 or bfloat16

_forced: list[bool | None] = [None]


def force_triton(on: bool | None) -> None:
    """Whether to use Triton kernels, for tensors of any device: for tests, and for Triton's interpreter, which runs on
    the CPU. None: where they are on a GPU."""
    _forced[0] = on


def which(tensor: Tensor) -> str:
    """ "triton" or "torch": the kind of kernel used for tensors on the device of this one."""
    return "triton" if _triton(tensor) else "torch"


def _triton(tensor: Tensor) -> bool:
    forced = _forced[0]
    return (tensor.is_cuda and _has_triton()) if forced is None else forced


def _kernels() -> Any:
    from powerinfer.kernels import triton_kernels

    return triton_kernels


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def gpu_type(type_name: str, k: int = 32) -> str:
    """The type in which a matrix with rows of k elements, stored as `type_name`, gets on a GPU."""
    if type_name in GPU_TYPES:
        return type_name
    if block_type(type_name).block == 1:  # F64 and the like
        return "F32"
    return "Q8_0" if k % 32 == 0 else "F16"


def neuron_type(type_name: str, k: int) -> str:
    """The same of the rows of bundles: `gpu_type`, but Q4_0X32 stays; others across neurons, and those of long blocks,
    become Q8_0."""
    if type_name in BLOCKS or type_name in STORED_ROWS:
        return type_name if type_name == "Q4_0X32" else "Q8_0"
    return gpu_type(type_name, k)


def weight_bytes(type_name: str, rows: int, k: int) -> int:
    """Bytes on a GPU of a matrix [rows, k] that is stored as `type_name`; they are those of the type it gets there."""
    kind = gpu_type(type_name, k)
    return rows * (block_type(kind).row_bytes(k) + 4 * (kind == FACTORED))


def neuron_bytes(layout: BundleLayout) -> int:
    """Bytes of a neuron's rows on a GPU."""
    first, last = (neuron_type(kind, layout.d_model) for kind in (layout.gate_type, layout.down_type))
    down = layout.d_model // 2 if last == "Q4_0X32" else weight_bytes(last, 1, layout.d_model)
    return (2 if layout.gated else 1) * weight_bytes(first, 1, layout.d_model) + down


def upload(tensor: RawTensor, device: Any, row_map: NDArray[np.int32] | None = None) -> Weight:
    """A stored matrix [rows, k] on a torch device, in the type that `gpu_type` gives; Q5_0 keeps its values.

    row_map: int32 [n], row r of the result is row row_map[r] of the tensor, zeros where it is -1. ModelError for values
    that the type cannot hold; what torch raises when the device has no room.
    """
    return upload_together([(tensor, row_map)], device)


def upload_together(parts: Sequence[tuple[RawTensor, NDArray[np.int32] | None]], device: Any) -> Weight:
    """Several matrices, with their row maps as in `upload`, as one: the rows of the first, then those of the next.

    Their rows must be equally long, and their types the same on a GPU.
    """
    (first, _), *_ = parts
    kind, k = gpu_type(first.type, first.shape[1]), first.shape[1]
    counts = [tensor.shape[0] if row_map is None else len(row_map) for tensor, row_map in parts]
    weight, at = empty(kind, sum(counts), k, device), 0
    for (tensor, row_map), count in zip(parts, counts, strict=True):
        assert (gpu_type(tensor.type, k), tensor.shape[1]) == (kind, k)
        _fill(weight, at, tensor, row_map)
        at += count
    return weight


def stored(kind: str, rows: int, k: int, raw: Tensor, factors: Float32 | None = None) -> Weight:
    """A weight of a type of `GPU_TYPES` from rows as a file stores them: uint8 on the device. factors: of rows of
    `FACTORED`."""
    import torch

    if kind in FLOAT_TYPES:
        return Weight(kind, rows, k, raw.view(_dtypes()[kind]).view(rows, k))
    blocks = raw.view(rows, -1, block_type(kind).nbytes)
    if kind in CUT:
        begin, end = CUT[kind]
        header = torch.cat((blocks[..., :begin], blocks[..., end:]), dim=-1).view(rows, -1)
        if kind == FACTORED:
            of_rows = torch.from_numpy(np.ones(rows, np.float32) if factors is None else factors).to(raw.device)
            header = torch.cat((header, of_rows.view(-1, 1).view(torch.uint8)), dim=-1)
        gpu_words.table(kind, raw.device)
        return Weight(kind, rows, k, blocks[..., begin:end].reshape(rows, -1).contiguous(), header)
    if kind == "MXFP4":
        return Weight(kind, rows, k, blocks[..., 1:].contiguous().view(rows, k // 2), blocks[..., 0].contiguous())
    scales, codes = blocks[..., :2].contiguous().view(torch.float16).view(rows, -1), blocks[..., 2:]
    if kind == "Q8_0":
        return Weight(kind, rows, k, codes.contiguous().view(torch.int8).view(rows, k), scales)
    return Weight(kind, rows, k, (codes ^ int(_SIGNS)).view(rows, k // 2), scales)


def _dtypes() -> dict[str, Any]:
    import torch

    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def overwrite(weight: Weight, at: int, tensor: RawTensor) -> None:
    """Rows of a weight from `at` on become those of a tensor [rows, k] of a type that gets the weight's."""
    assert (gpu_type(tensor.type, tensor.shape[1]), tensor.shape[1]) == (weight.type, weight.k)
    _fill(weight, at, tensor, None, threads=1)  # on the stream of this thread


def _fill(
    weight: Weight, at: int, tensor: RawTensor, row_map: NDArray[np.int32] | None, threads: int | None = None
) -> None:
    """Rows of the weight from `at` on get those of the tensor."""
    rows, k = tensor.shape
    stored, scales_of = tensor.gathered().rows(), tensor.row_scales()
    source = np.arange(rows, dtype=np.int32) if row_map is None else row_map

    def slab(begin: int, end: int) -> None:
        part = source[begin:end]
        raw = stored[part[0] : part[-1] + 1] if row_map is None else stored[np.maximum(part, 0)]
        if row_map is not None:
            raw[part < 0] = 0  # zero in every type that is stored: its scales are
        of_part = None if scales_of is None else scales_of[np.maximum(part, 0)]
        if tensor.type == "Q5_0":
            raw = as_q8_0(raw, tensor.type)
        elif weight.type != tensor.type:
            rows_ = RawTensor(tensor.type, (len(part), k), raw.reshape(-1), of_part)
            raw = convert(rows_, weight.type, lambda _: None).rows()
        codes, scales = _split(weight.type, raw, of_part)
        _put(weight.data, at + begin, codes)
        _put(weight.scales, at + begin, scales)

    _by_slabs(len(source), k, slab, threads)


def _by_slabs(rows: int, k: int, work: Callable[[int, int], None], threads: int | None = None) -> None:
    """Calls work(begin, end) for some rows at a time, in several threads: numpy copies without the GIL."""
    slabs = list(pieces(rows, k, _SLAB))
    threads = 1 if len(slabs) < 2 else threads or min(len(slabs), 8, usable_cores()[0])
    if threads < 2:
        for begin, end in slabs:
            work(begin, end)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, *zip(*slabs, strict=True)):
            pass


def empty(kind: str, rows: int, k: int, device: Any) -> Weight:
    """Room for a matrix [rows, k] of a type of `Weight`."""
    import torch

    def new(columns: int, dtype: Any) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=device)

    if kind in FLOAT_TYPES:
        return Weight(kind, rows, k, new(k, _dtypes()[kind]))
    if kind in CUT:
        begin, end = CUT[kind]
        blocks, header = k // block_type(kind).block, block_type(kind).nbytes - (end - begin)
        codes = new(blocks * (end - begin), torch.uint8)
        gpu_words.table(kind, codes.device)  # before a step is recorded
        return Weight(kind, rows, k, codes, new(blocks * header + 4 * (kind == FACTORED), torch.uint8))
    scales = None
    if kind not in SHARING.values():
        scales = new(k // 32, torch.uint8 if kind == "MXFP4" else torch.float16)
    return Weight(kind, rows, k, new(k, torch.int8) if kind in _WIDE_CODES else new(k // 2, torch.uint8), scales)


def _split(kind: str, raw: Bytes, factors: Float32 | None) -> tuple[Bytes, Bytes | None]:
    """Rows as they are stored -> the bytes of their codes and of their scales. factors: of rows of `FACTORED`."""
    if kind in FLOAT_TYPES:
        return raw, None
    blocks = raw.reshape(len(raw), -1, block_type(kind).nbytes)
    if kind in CUT:
        begin, end = CUT[kind]
        header = np.concatenate((blocks[..., :begin], blocks[..., end:]), axis=-1).reshape(len(raw), -1)
        if kind == FACTORED:
            of_rows = np.ones(len(raw), np.float32) if factors is None else factors
            header = np.concatenate((header, of_rows[:, None].view(np.uint8)), axis=-1)
        return blocks[..., begin:end].reshape(len(raw), -1), header
    scale = 1 if kind == "MXFP4" else 2
    codes, scales = blocks[..., scale:].reshape(len(raw), -1), blocks[..., :scale].reshape(len(raw), -1)
    return (codes ^ _SIGNS if kind == "Q4_0" else codes), scales


def _put(out: Tensor | None, first: int, rows: Bytes | None) -> None:
    """Write these bytes to the rows of `out` from `first` on."""
    import torch

    if out is None or rows is None or not rows.size:
        return
    own = out[first : first + len(rows)]
    host = torch.empty_like(own, device="cpu") if own.device.type != "cpu" else own
    host.view(torch.uint8).numpy()[...] = rows
    if host is not own:
        own.copy_(host)


def pieces(rows: int, k: int, elements: int | None = None, tokens: int = 0) -> Iterator[tuple[int, int]]:
    """(begin, end) of as many rows of k elements at a time as are multiplied with that number of tokens, or `elements`,
    together; at least one."""
    step = max(1, (elements or piece_elements(tokens, _PIECE)) // k)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def values(weight: Weight, begin: int = 0, end: int | None = None, scales: Tensor | None = None) -> Tensor:
    """Rows begin .. end of a weight as float32 [end - begin, k]. scales: of a type of `SHARING`, [end - begin, k]."""
    import torch

    data = weight.data[begin:end]
    if weight.type in FLOAT_TYPES:
        return data.float()
    if weight.type in K_CODES:
        assert weight.scales is not None
        return _k_values(weight.type, data, weight.scales[begin:end]).view(-1, weight.k)
    if weight.type in UNPACKED:
        assert weight.scales is not None
        return gpu_words.values(weight.type, weight.k, data, weight.scales[begin:end])
    blocks = weight.k // 32
    if weight.type == "MXFP4":
        assert weight.scales is not None
        pairs = data.view(-1, blocks, 16)
        table = torch.tensor(_E2M1, device=data.device)
        codes = table[torch.cat((pairs & 15, pairs >> 4), dim=-1).long()]
        exponents = weight.scales[begin:end].int() - 127
        return torch.ldexp(codes, exponents[..., None]).view(-1, weight.k)
    if weight.type not in _WIDE_CODES:
        pairs = data.view(-1, blocks, 16)
        data = torch.cat(((pairs << 4).view(torch.int8) >> 4, pairs.view(torch.int8) >> 4), dim=-1)
    codes = data.view(-1, blocks, 32).float()
    if weight.scales is not None:
        return (codes * weight.scales[begin:end].float()[..., None]).view(-1, weight.k)
    assert scales is not None
    return codes.view(-1, weight.k) * scales.float()


def _k_values(kind: str, data: Tensor, scales: Tensor) -> Tensor:
    """The values of rows of K-quants, float32 [n, 256]."""
    import torch

    begin, end = K_CODES[kind]
    codes = data.view(-1, end - begin)
    header = scales.view(-1, block_type(kind).nbytes - (end - begin))
    if kind == "Q6_K":  # by halves of 128 elements: 4 bits of two in each of 64 bytes, 2 of four in each of 32
        four, two = codes[:, :128].view(-1, 2, 64), codes[:, 128:].view(-1, 2, 32)
        high = torch.cat([two >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
        wide = (torch.cat((four & 15, four >> 4), dim=-1) | high << 4).view(-1, 16, 16).float() - 32
        scale = header[:, 16:].contiguous().view(torch.float16).float() * header[:, :16].view(torch.int8).float()
        return wide * scale[..., None]
    pairs = codes[:, -128:].view(-1, 4, 32)
    wide = torch.stack((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32)
    if kind == "Q5_K":
        bits = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
        wide = wide | (codes[:, None, :32] >> bits & 1) << 4
    first, second, third = header[:, 4:].view(-1, 3, 4).unbind(dim=1)  # 8 scales and 8 minima of 6 bits
    scale = torch.cat((first & 63, (third & 15) | first >> 6 << 4), dim=-1).float()
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1).float()
    both = header[:, :4].contiguous().view(torch.float16).float()
    return wide.float() * (both[:, :1] * scale)[..., None] - (both[:, 1:] * least)[..., None]


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def linear(
    w: Weight, activations: Tensor | Activations, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """x . W^T + bias, float32 [T, rows]; or `into`, contiguous and not x, that much more.

    activations: x, float32 [T, k], or what several products make something of once; bias: float32 [rows].
    """
    activations = activations_of(activations)
    x = activations.x
    assert into is None or (into.is_contiguous() and into.data_ptr() != x.data_ptr())  # others add while x is read
    if x.shape[0] <= FEW and _triton(x):
        return _kernels().linear(w, x, bias, into)
    import torch

    cut = list(pieces(w.rows, w.k, tokens=len(x)))
    if len(cut) == 1:
        out = activations.product(operand(w, 0, w.rows).T)
    else:
        out = torch.empty((x.shape[0], w.rows), dtype=torch.float32, device=x.device)
        for begin, end in cut:
            out[:, begin:end] = activations.product(operand(w, begin, end).T)
    out = out if bias is None else out.add_(bias)
    return out if into is None else into.add_(out)


def multiplies_narrow(w: Weight) -> bool:
    """Whether a device multiplies many tokens with a weight in float16 or bfloat16."""
    return w.data.device.type in _NARROW and w.type != "F32"


def taken_by_many(w: Weight, activations: Activations) -> tuple[Tensor, Tensor | None]:
    """Activations in the type in which a device multiplies many of them with a weight, and what each row of the
    products is multiplied by, None: by nothing."""
    import torch

    if not multiplies_narrow(w):
        return activations.x, None
    return activations.narrowed(torch.bfloat16 if w.type == "BF16" else torch.float16)


def operand(w: Weight, begin: int, end: int, neurons: Neurons | None = None) -> Tensor:
    """Rows of a weight in the type in which a device multiplies many tokens with them. neurons: whose down w is."""
    if multiplies_narrow(w):
        if w.type in FLOAT_TYPES:
            return w.data[begin:end]
        if _triton(w.data):
            shared, group = (None, None) if neurons is None else (neurons.shared, neurons.group)
            half: Tensor = _kernels().values(w, begin, end, shared, group)
            return half
        return values(w, begin, end, _scales_of(neurons, begin, end)).half()
    return values(w, begin, end, _scales_of(neurons, begin, end))


def _scales_of(neurons: Neurons | None, begin: int, end: int) -> Tensor | None:
    if neurons is None or neurons.shared is None or neurons.group is None:
        return None
    return neurons.shared[neurons.group[begin:end].long()]


def activations_of(x: Tensor | Activations) -> Activations:
    """Activations as they are, or of a tensor."""
    return x if isinstance(x, Activations) else Activations(x, _halves)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels().narrowed(x) if _triton(x) else plain_halves(x)


def product(x: Tensor | Activations, w: Tensor, columns: slice | None = None) -> Tensor:
    """`Activations.product` of many tokens."""
    return activations_of(x).product(w, columns)


def forget_codes(x: Tensor) -> None:
    """What a kernel made of its result x `for_codes` is not used any more."""
    vars(x).pop(MADE_CODES, None)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    into: Tensor | None = None,
    for_codes: bool = False,
    sent: Tensor | None = None,
) -> Tensor:
    """x / rms(x) * weight over the last axis; layer: (x - mean(x)) / deviation(x) * weight + bias. float32.

    into: where the result goes, of x's shape, contiguous. for_codes: it is multiplied with weights of `INTEGERS`. sent:
    memory of the host (`gpu_host`) that gets it, too.
    """
    if _triton(x):
        return _kernels().norm(x, weight, bias, eps, layer, into, for_codes, sent)
    import torch

    centred = x - x.mean(dim=-1, keepdim=True) if layer else x
    out = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight
    out = out if bias is None else out + bias
    if sent is not None:
        sent.copy_(out)
    return out if into is None else into.copy_(out)


def activate(
    activation: str,
    x: Tensor,
    up: Tensor | None = None,
    limit: Limit | Tensor = 0.0,
    kept: int = 0,
    product_limits: Tensor | None = None,
    for_codes: bool = False,
) -> Tensor:
    """The FFN's product h of gate . n and up . n or, without a gate, of up . n alone (here x); of their shape.

    limit: the threshold of fatrelu and cats, of all neurons or float32 [neurons] of each, as topk has, or the curve
    of xielu; kept: neurons of a bank, of topk; product_limits: float32 [neurons], with up: h that does not exceed it in
    magnitude is zero. for_codes: h is multiplied with weights of `INTEGERS`.
    """
    if isinstance(limit, float | tuple) and product_limits is None and _triton(x):
        from powerinfer.kernels import triton_neurons

        return triton_neurons.activate(activation, x, up, limit, for_codes)
    if activation == "swiglu_oai":
        assert up is not None
        gate = x.clamp(max=OAI_LIMIT)
        return gate * (OAI_SCALE * gate).sigmoid() * (up.clamp(-OAI_LIMIT, OAI_LIMIT) + 1)
    h = activated(x, activation, limit)
    if activation == "topk":
        assert not isinstance(limit, float | tuple)
        h = _keep_largest(h, limit, kept)
    if up is None:
        return h
    return _above(h.mul_(up.relu() if activation == "drelu" else up), product_limits)


def exceeding(gates: Tensor, deviations: float) -> Tensor:
    """The excess of gates float32 [T, neurons] over the cutoff of their token, else 0: the mean of its gates and so
    many of their standard deviations. NaN makes all of a token's NaN."""
    centred = gates - gates.mean(dim=-1, keepdim=True)
    return (centred - deviations * centred.square().mean(dim=-1, keepdim=True).sqrt()).relu()


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
    """Rotary embedding in place: pairs (i, i + pairs) of every head turn by position * frequency. Returns x.

    x: float32 [T, heads, head_dim], dimensions from 2 * pairs on stay as they are; positions: int32 [T]; frequencies:
    float32 [pairs], radians per position; factor: what sine and cosine are multiplied by.
    """
    if _triton(x):
        return _kernels().rotate(x, positions, frequencies, factor)
    import torch

    n = frequencies.shape[0]
    angle = positions.float()[:, None, None] * frequencies
    c, s = torch.cos(angle) * factor, torch.sin(angle) * factor
    first, second = x[..., :n].clone(), x[..., n : 2 * n].clone()
    x[..., :n] = first * c - second * s
    x[..., n : 2 * n] = first * s + second * c
    return x


def kv_bytes(kv_type: str, head_dim: int) -> int:
    """Bytes of a head's key or value in a cache of type f16, f32 or q8_0."""
    return {"f16": 2 * head_dim, "f32": 4 * head_dim, "q8_0": head_dim + 2 * -(-head_dim // 32)}[kv_type]


def new_cache(kv_type: str, pages: int, kv_heads: int, head_dim: int, device: Any) -> Cached:
    """An empty cache, of zeros: attention multiplies masked values by zero, so they must not be NaN."""
    import torch

    kind = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kv_type]
    shape = (pages, PAGE, kv_heads)
    data = torch.zeros((*shape, head_dim), dtype=kind, device=device)
    if kv_type != "q8_0":
        return Cached(data)
    return Cached(data, torch.zeros((*shape, -(-head_dim // 32)), dtype=torch.float16, device=device))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] in 8 bits as the CPU's cache has them: (int8 [..., n], scales float16 [..., ceil(n / 32)]).

    Each 32 share the scale of their largest, rounded to float16, by which they are divided and rounded to even.
    """
    import torch

    n = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -n % 32)).unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(dim=-1) * Q8_STEP).clamp_max_(FLOAT16_MAX).half()
    wide = scales.float()[..., None]
    codes = (blocks * torch.where(wide > 0, 1 / wide, 0.0)).round_().clamp_(-128, 127)
    return codes.to(torch.int8).flatten(-2)[..., :n], scales


def store_kv(cache_k: Cached, cache_v: Cached, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store the keys and values of T tokens in their slots of a layer's cache.

    k, v: float32 [T, kv_heads, head_dim]; slots: int64 [T], page * PAGE + place, no two alike; a token whose slot is
    negative is not stored. Values beyond float16 are clipped; int8 as in `quantised`.
    """
    if _triton(k):
        _kernels().store_kv(cache_k, cache_v, k, v, slots)
        return
    store(cache_k, k, slots)
    store(cache_v, v, slots)


def store(cached: Cached, new: Tensor, slots: Tensor) -> None:
    """`store_kv` of keys, or of values, alone, in plain torch."""
    kept = slots >= 0
    if cached.scales is not None:
        new, scales = quantised(new)
        cached.scales.view(-1, *scales.shape[1:])[slots[kept]] = scales[kept]
    elif cached.data.dtype != new.dtype:
        new = new.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(cached.data.dtype)
    cached.data.view(-1, *new.shape[1:])[slots[kept]] = new[kept]


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, float],
    cache: tuple[Cached, Cached],
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> None:
    """`rotate` of q in place and of k, then `store_kv`; k is undefined afterwards. rotation: frequencies and factor;
    norms: of heads, before that."""
    if _triton(q):
        _kernels().rotate_and_store(q, k, v, positions, rotation, cache, slots, norms)
        return
    if norms is not None:
        q.copy_(norm(q, norms.q, None, norms.eps, False))
        k = norm(k, norms.k, None, norms.eps, False)
    rotate(q, positions, *rotation)
    store_kv(*cache, rotate(k, positions, *rotation), v, slots)


def attention(
    q: Tensor,
    cache: tuple[Cached, Cached],
    contexts: Contexts,
    settings: AttentionConfig,
    sinks: Tensor | None = None,
    for_codes: bool = False,
    arrived: Tensor | None = None,
) -> Tensor:
    """Attention of T tokens of several sequences over a layer's paged cache, float32 [T, heads * head_dim].

    q: float32 [T, heads, head_dim]; cache: as in `store_kv`, with this step's keys and values in it. A token sees what
    is up to its position, as the layer's settings say; one that stands for nothing gets zeros. sinks: float32 [heads],
    a score more in the softmax of each head, which belongs to no value. for_codes: the result is multiplied with
    weights of `INTEGERS`. arrived: int32 [FEW * kv_heads], zero but while a kernel counts by it; None: there is none.
    """
    if _triton(q):
        return cast("Tensor", _kernels().attention(q, cache, contexts, settings, sinks, for_codes, arrived))
    return attend_pages(q, cache, contexts, settings, sinks)


def attend(
    q: Tensor, new: NewHeads, cache: tuple[Cached, Cached], contexts: Contexts, settings: AttentionConfig,
    sinks: Tensor | None = None, for_codes: bool = False, arrived: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`rotate_and_store`, then `attention`; of one token by one Triton kernel. q and new.k are undefined afterwards."""
    if len(q) == 1 and _triton(q):
        return cast("Tensor", _kernels().attention(q, cache, contexts, settings, sinks, for_codes, arrived, new))
    rotate_and_store(q, new.k, new.v, contexts.positions, new.rotation, cache, new.slots, new.norms)
    return attention(q, cache, contexts, settings, sinks, for_codes, arrived)


def rearrange(w: Weight, rows: NDArray[np.int32]) -> None:
    """Give a weight its rows in another order: int [rows], the number that each had."""
    import torch

    order = torch.from_numpy(rows.astype(np.int64)).to(w.data.device)
    parts = [part for part in (w.data, w.scales) if part is not None]
    moved = [part.index_select(0, order) for part in parts]  # all, or nothing changes where there is no memory
    for part, own in zip(parts, moved, strict=True):
        part.copy_(own)


def hide(inner: Weight, x: Tensor) -> Tensor:
    """relu(inner . x), float32 [T, rank], of a predictor's first matrix [rank, d_model] and x, float32 [T, d_model]."""
    if x.shape[0] <= FEW and _triton(x):
        return cast("Tensor", _kernels().linear(inner, x, relu=True))
    return linear(inner, x).relu_()


def settle(cold: Tensor, answer: CallAnswer) -> None:
    """Answer a call of the CPU if none of its terms is selected. cold: bool, of any shape, of each whether it is."""
    answer.counters[0].copy_(cold.sum())
    number = answer.answered.new_full((1,), answer.number)
    answer.answered.copy_(number.where(answer.counters[:1] == 0, answer.answered))


def predict(
    inner: Weight,
    outer: Weight,
    numbers: Tensor,
    x: Tensor,
    threshold: float,
    floor: int,
    into: tuple[Tensor, Tensor],
    answer: CallAnswer | None = None,
) -> None:
    """Write the neurons that a predictor selects for each token: 1 or 0, into two uint8 tensors, [T, n] for the first n
    rows of `outer` and [T, d_ff - n] for the others.

    inner: [rank, d_model]; outer: [d_ff, rank]; numbers: int32 [d_ff], its rows' neurons; x: float32 [T, d_model]. A
    neuron is selected when z = outer . relu(inner . x) is at least `threshold` (or NaN); if fewer than `floor` are, the
    `floor` of largest z are, ties by number. answer: to settle where the others are the CPU's, of at most FEW tokens.
    """
    if x.shape[0] <= FEW and _triton(x):
        _kernels().predict(inner, outer, numbers, x, threshold, floor, into, answer)
        return
    import torch

    z = linear(outer, hide(inner, x))
    selected = ~(z < threshold)
    floor = min(floor, outer.rows)
    if floor:
        by_number = torch.argsort(numbers)
        first = z.nan_to_num_(nan=float("inf")).index_select(1, by_number).argsort(dim=-1, descending=True, stable=True)
        selected.scatter_(1, by_number[first[:, :floor]], True)
    split = into[0].shape[1]
    into[0].copy_(selected[:, :split])
    into[1].copy_(selected[:, split:])
    if answer is not None:
        settle(selected[:, split:], answer)


# ---------------------------------------------------------------------------------------------------------------------
# Neurons


def resident(
    layout: BundleLayout,
    groups: Bytes,
    index: NDArray[np.int32],
    device: Any,
    ffn: FfnConfig,
    vectors: NeuronVectors = (),
) -> Neurons:
    """Some neurons of a layer on a torch device, from their bundles.

    groups: uint8 [groups, layout.group_bytes], a layer of a BundleFile; index: int32 [n] ascending, the neurons.
    """
    import torch

    assert groups.ndim == 2 and groups.shape[1] == layout.group_bytes

    def own(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    counts = np.bincount(index // BUNDLE_GROUP, minlength=len(groups)).astype(np.int32)
    present = counts[counts > 0]
    group = own(np.repeat(np.arange(len(present), dtype=np.int32), present)) if layout.shared_bytes else None
    of_index = [None if values is None else own(values[index].astype(np.float32)) for values in vectors]
    neurons = empty_neurons(layout, len(index), len(present), device, ffn, group, of_index)
    memory = np.empty(min(some_bytes(layout, index), max(_LOADED, layout.group_bytes)), np.uint8)
    row = first = 0
    for begin, end in cuts(layout, counts, _LOADED):
        some = index[row : row + int(counts[begin:end].sum())]
        if len(some):
            piece = whole(layout, gather(layout, groups, some, memory))
            of, beside = own(piece.group), own(piece.shared)
            unpack(layout, own(piece.rows), own(piece.at), of, beside, neurons, row, first)
            row, first = row + len(some), first + len(piece.shared)
    return neurons


def empty_neurons(
    layout: BundleLayout,
    n: int,
    groups: int,
    device: Any,
    ffn: FfnConfig,
    group: Tensor | None,
    vectors: Sequence[Tensor | None] = (),
) -> Neurons:
    """Room for n neurons in `groups` groups, for `unpack`. group: as in `Neurons`; vectors: as `NeuronVectors`, of
    these neurons.

    Rows are in the type that `neuron_type` gives. ValueError for neurons that compete in banks, which may not all be
    there.
    """
    import torch

    if ffn.activation == "topk":
        raise ValueError("neurons of the activation topk are not computed one by one")
    k = layout.d_model
    first, last = (neuron_type(kind, k) for kind in (layout.gate_type, layout.down_type))
    gate = empty(first, n, k, device) if layout.gated else None
    up, down = (empty(kind, n, k, device) for kind in (first, last))
    shared = None
    if last == "Q4_0X32":
        shared = torch.empty((groups, k), dtype=torch.float16, device=device)
    of = None if shared is None else group
    every: list[Tensor | None] = [*vectors, *[None] * (4 - len(vectors))]
    gate_bias, up_bias, limits, product_limits = every
    activation = ffn.activation, ffn.limit
    return Neurons(gate, up, down, shared, of, gate_bias, up_bias, *activation, limits, product_limits)


def unpack(
    layout: BundleLayout,
    rows: Tensor,
    at: Tensor,
    groups: Tensor | None,
    shared: Tensor,
    neurons: Neurons,
    row: int = 0,
    group: int = 0,
) -> None:
    """Rows of weights from bundles on the device, which are in the CPU's order (csrc/table.h).

    rows: uint8 [bytes], a multiple of a line's; at: int32 [n], the line at which each bundle begins; shared: int32 [g],
    the line at which the scales of each group begin; groups: int32 [n], which of these is a neuron's, None: not needed.
    They become the rows of `neurons` from `row` on, and its shared scales from `group` on. Those of Q4_1 and of long
    blocks, and those across neurons but of Q4_0, are rounded to Q8_0.
    """
    matrices = [(neurons.up, "dot", layout.gate_type, layout.up_at)]
    matrices.append((neurons.down, "add", layout.down_type, layout.down_at))
    if neurons.gate is not None:
        matrices.append((neurons.gate, "dot", layout.gate_type, layout.gate_at))
    for weight, use, kind, offset in matrices:
        if kind in STORED_ROWS:
            _unpack_stored(kind, rows, at, offset, weight, row)
            continue
        if kind == "Q4_1" or (kind in BLOCKS and kind != "Q4_0X32"):
            _unpack_rounded(kind, rows, at, offset, groups, shared, weight, row)
            continue
        data = weight.data[row : row + len(at)]
        order, unit = _order(weight.type, use, weight.k, rows.device)
        _take(rows, at, offset, data, unit, order)
        if weight.scales is not None:
            scales = weight.scales[row : row + len(at)]
            _take(rows, at, offset + code_bytes(weight.type, weight.k), scales, 2)
    if neurons.shared is not None:
        _take(rows, shared, 0, neurons.shared[group : group + len(shared)], 2)


def _unpack_stored(kind: str, rows: Tensor, at: Tensor, offset: int, weight: Weight, row: int) -> None:
    """Rows of long blocks, as in `_unpack_rounded`."""
    import torch

    size = block_type(kind).row_bytes(weight.k)
    for begin, end in pieces(len(at), weight.k, _SLAB):
        raw = torch.empty((end - begin, size), dtype=torch.int8, device=rows.device)
        _take(rows, at[begin:end], offset, raw, 2)
        _to_q8_0(values(stored(kind, end - begin, weight.k, raw.view(torch.uint8))), weight, row + begin)


def _unpack_rounded(
    kind: str, rows: Tensor, at: Tensor, offset: int, groups: Tensor | None, shared: Tensor, weight: Weight, row: int
) -> None:
    """Rows of Q4_1, or whose blocks lie across neurons, that begin `offset` bytes behind lines `at` of `rows`, to a
    weight in Q8_0 from `row` on; the others as in `unpack`. A few at a time: their values take much more memory than
    they do."""
    import torch

    k, across = weight.k, kind in BLOCKS
    facts = WEIGHT_TYPES[BLOCKS.get(kind, kind)]
    powers = not facts.halves  # scales are exponents of powers of two
    # d and m of a group's columns, or of a row's blocks: `count` of each, the second `pad` values behind the first
    begins, first, count, pad = (
        (shared, 0, k, -(-k // 128) * 128) if across else (at, offset + code_bytes(kind, k), k // 32, -(-k // 512) * 16)
    )
    numbers = pad + count if len(facts.halves) > 1 else count
    scales = torch.empty((len(begins), numbers), dtype=torch.int8 if powers else torch.float16, device=rows.device)
    _take(rows, begins, first, scales, 1 if powers else 2)
    scales = scales.view(torch.uint8) if powers else scales
    for begin, end in pieces(len(at), k, _SLAB):
        wide = _code_values(kind, rows, at[begin:end], offset, k).view(end - begin, -1, 1 if across else 32)
        if across:
            assert groups is not None
            row_scales = scales[groups[begin:end].long()]
        else:
            row_scales = scales[begin:end]
        factors = row_scales[:, :count, None]
        # of exponents halves of powers, since the entries of E2M1 are doubled
        wide.mul_(torch.ldexp(torch.ones_like(wide), factors.int() - 128) if powers else factors.float())
        if len(facts.halves) > 1:
            wide.add_(row_scales[:, pad:, None].float())
        _to_q8_0(wide.view(end - begin, k), weight, row + begin)


def _code_values(kind: str, rows: Tensor, at: Tensor, offset: int, k: int) -> Tensor:
    """Values that the codes of such rows stand for, without their scales: float32 [n, k]."""
    import torch

    facts, n, device = WEIGHT_TYPES[BLOCKS.get(kind, kind)], len(at), rows.device
    order, unit = _order(kind, "add" if kind in BLOCKS else "dot", k, device)
    if facts.codes == facts.block:
        whole = torch.empty((n, k), dtype=torch.int8, device=device)
        _take(rows, at, offset, whole, unit, order)
        return whole.float()
    low = torch.empty((n, k // 2), dtype=torch.uint8, device=device)
    _take(rows, at, offset, low, unit, order)
    pairs = (low ^ int(_SIGNS)).view(n, -1, 1, 16)
    codes = torch.cat((pairs & 15, pairs >> 4), dim=2).view(n, k)
    if facts.codes * 8 == 5 * facts.block:  # the fifth bits, see csrc/table.h
        columns = torch.arange(k, device=device, dtype=torch.int32)
        places = columns // 512 * 64 + columns % 16 // 4 * 16 + columns % 512 // 128 * 4 + columns % 4
        fifths = torch.empty((n, -(-k // 512) * 64), dtype=torch.int8, device=device)
        _take(rows, at, offset + -(-k // 128) * 64, fifths, 1)
        bits = fifths.view(torch.uint8)[:, places.long()] >> (columns % 128 // 16).to(torch.uint8)
        codes = codes | (bits & 1) << 4
    if facts.entries:
        return torch.tensor(facts.entries, dtype=torch.float32, device=device)[codes.long()]
    return codes.float() - facts.offset


def _to_q8_0(values: Tensor, weight: Weight, row: int) -> None:
    """Round float32 [n, k] to rows of a weight in Q8_0, from `row` on, as `formats.quant.quantize` does."""
    import torch

    assert weight.scales is not None
    blocks = values.view(len(values), -1, 32)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
    codes = blocks * scales.reciprocal().masked_fill_(scales == 0, 0)
    codes += torch.copysign(codes.new_tensor(float(ALMOST_HALF)), blocks)
    weight.data[row : row + len(values)] = codes.to(torch.int8).view(len(values), -1)
    weight.scales[row : row + len(values)] = scales[..., 0].half()


@cache
def _order(kind: str, use: str, k: int, device: Any) -> tuple[Tensor | None, int]:
    """Where a row of a `Weight` lies in a bundle's row: (int32 [units], bytes of a unit); None: in order.

    A unit is 4, 2 or 1 bytes that are adjacent in both orders.
    """
    import torch

    places = bundle_row_order(kind, use, k)  # of elements; those of the bytes of a row of `Weight.data` are:
    if kind in FLOAT_TYPES:
        places = np.add.outer(places, np.arange(2, dtype=np.int32)).reshape(-1)
    elif kind not in _WIDE_CODES:
        places = places.reshape(-1, 2, 16)[:, 0].reshape(-1)  # of the low code; the high one is in the same byte
    unit = next(unit for unit in (4, 2, 1) if _together(places, unit))
    order = places[::unit] // unit
    in_order = np.array_equal(order, np.arange(len(order)))
    return None if in_order else torch.from_numpy(order).to(device), unit


def _together(places: NDArray[np.int32], unit: int) -> bool:
    """Whether each `unit` bytes in turn lie adjacent and aligned."""
    first = places[::unit, None]
    return not (first % unit).any() and np.array_equal((first + np.arange(unit)).reshape(-1), places)


def _take(rows: Tensor, at: Tensor, offset: int, out: Tensor, unit: int, order: Tensor | None = None) -> None:
    """out[i, j] = unit number order[j], or j, of the row that begins `offset` bytes behind line at[i] of `rows`.

    unit: its bytes. Codes of 4 bits become two's complement.
    """
    import torch

    if not len(out):
        return
    name = {1: "uint8", 2: "int16", 4: "int32"}[unit]
    dtype: torch.dtype = getattr(torch, name)
    flip = int(np.full(unit, _SIGNS).view(name)[0]) if out.dtype == torch.uint8 else 0
    own = out.view(dtype)
    if _triton(rows):
        from powerinfer.kernels import triton_bundles

        triton_bundles.take(rows.view(dtype), at, offset // unit, own, order, flip)
        return
    width = own.shape[1]
    lines = torch.arange(offset // LINE, -(-(offset + width * unit) // LINE), device=out.device)
    for begin, end in pieces(len(out), width):
        places = (at[begin:end, None] + lines).view(-1)
        taken = rows.view(-1, LINE).index_select(0, places).view(end - begin, -1).view(dtype)
        taken = taken[:, :width] if order is None else taken.index_select(1, order)
        own[begin:end] = taken ^ flip if flip else taken


def neuron_sum(
    neurons: Neurons,
    activations: Tensor | Activations,
    selected: Tensor | None = None,
    threshold: float = 0.0,
    into: Tensor | None = None,
    fired: Tensor | None = None,
    fused: bool = False,
    dense: bool = False,
) -> tuple[Tensor, Tensor]:
    """The neurons' sum for T tokens: (float32 [T, d_model], int32 [n] tokens that each fired for).

    into: what the sum is added to, fired: the counts, int32 or int64 [n], are added to; these are returned then.

    activations: float32 [T, d_model], or what several sums make something of once; selected: uint8 [T, n], 0 for a
    neuron that does not count for a token; None: all count. An activation of at most `threshold` in magnitude counts as
    zero. A neuron fires for a token when its product h is not zero. fused: by one Triton kernel where there is one
    token; its sum is rounded otherwise. dense: they are all of a layer, and several tokens together need nearly all of
    them, so nothing is looked up, and down is multiplied as a matrix; likewise.
    """
    import torch

    x = activations_of(activations).x
    if fired is None:
        fired = torch.zeros(neurons.n, dtype=torch.int32, device=x.device)
    as_matrices = dense and neurons.down.type in FLOAT_TYPES
    if 0 < x.shape[0] <= FEW and neurons.n and not as_matrices and _triton(x):
        from powerinfer.kernels import triton_fused, triton_neurons

        if fused and x.shape[0] == 1:
            return triton_fused.fused_sum(neurons, x, selected, threshold, into, fired), fired
        dense = dense and x.shape[0] > 1
        return triton_neurons.neuron_sum(neurons, x, selected, threshold, into, fired, dense), fired
    total = torch.zeros((x.shape[0], neurons.down.k), dtype=torch.float32, device=x.device) if into is None else into
    if not neurons.n or not x.shape[0]:
        return total, fired
    h = products(neurons, activations, selected, threshold)
    fired += torch.sum(h != 0, dim=0, dtype=torch.int32)
    return add_down(neurons, h, total), fired


def add_down(neurons: Neurons, h: Tensor, total: Tensor) -> Tensor:
    """total, float32 [T, d_model], with the neurons' columns of down times their h, float32 [T, n], added up."""
    activations = activations_of(h)
    for begin, end in pieces(neurons.n, neurons.down.k, tokens=len(h)):
        total += activations.product(operand(neurons.down, begin, end, neurons), slice(begin, end))
    return total


def products(
    neurons: Neurons, activations: Tensor | Activations, selected: Tensor | None, threshold: float
) -> Tensor:
    """h of all neurons, float32 [T, n], with arguments as `neuron_sum`."""

    x = activations_of(activations)
    first = neurons.up if neurons.gate is None else neurons.gate
    h = linear(first, x, neurons.up_bias if neurons.gate is None else neurons.gate_bias)
    h = activated(h, neurons.activation, neurons.threshold if neurons.limits is None else neurons.limits)
    if selected is not None:
        h = h.masked_fill_(selected == 0, 0)
    if threshold > 0:
        h = h.masked_fill_(h.abs() <= threshold, 0)
    if neurons.gate is not None:
        up = linear(neurons.up, x, neurons.up_bias)
        up = up.relu_() if neurons.activation == "drelu" else up
        h.mul_(up.masked_fill_(h == 0, 0))  # where gate is zero, up is ignored, even NaN
    return _above(h, neurons.product_limits)


def _above(h: Tensor, product_limits: Tensor | None) -> Tensor:
    """h [..., neurons], a temporary, with zeros where it does not exceed its neuron's threshold in magnitude."""
    return h if product_limits is None else h.masked_fill_(h.abs() <= product_limits, 0)


def _keep_largest(h: Tensor, unit: Tensor, kept: int) -> Tensor:
    """h [..., neurons] where it is among the `kept` largest of its bank in magnitude, as multiples of unit [neurons],
    else 0; the first among equals, NaN before all others."""
    import torch

    ranked = (h.abs() / unit).unflatten(-1, (-1, BANK)).sort(dim=-1, descending=True, stable=True).indices
    keeps = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, ranked[..., :kept], True)
    return h.masked_fill(~keeps.flatten(-2), 0)


def activated(x: Tensor, activation: str, limit: Limit | Tensor = 0.0) -> Tensor:
    """The activation, a tensor of its own; of drelu, the gate's half; of topk without its selection. NaN propagates."""
    if activation in ("silu", "topk"):
        return x.sigmoid().mul_(x)
    if activation == "gelu_tanh":
        return x * (GELU_SCALE * (x + GELU_CUBIC * x * x * x)).sigmoid()
    if activation == "fatrelu":
        return x.masked_fill(x <= limit, 0)
    if activation == "cats":
        s = x.sigmoid().mul_(x)
        return s.masked_fill_(s.abs() <= limit, 0)
    if activation == "xielu":
        import torch

        above, below, beta, least = cast(tuple[float, ...], limit)
        line, m = beta * x, x.clamp(max=least)
        return torch.where(x > 0, above * x * x + line, below * (m.expm1() - x) + line)
    kept = x.relu()
    return kept.square_() if activation == "relu2" else kept
