"""Matrices of whole numbers in Hugging Face folders: GPTQ, AWQ, those of compressed-tensors, and of 8 bits those of
bitsandbytes.

A weight is (code - zero point) * scale, with a zero point and a scale for each group of columns. The difference is a
whole number, too: where the columns of a block share a group, Q4_0, Q5_0 and Q8_0 hold it exactly, and the scale in
F16. Other matrices become F16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import Shape
from powerinfer.errors import ModelError
from powerinfer.formats.folder_modules import SCALES, Module, Settings, as_f16, fill, finite, numbers
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, Float32, block_type, pack_numbers
from powerinfer.formats.tensors import MadeTensor, RawTensor

_BLOCK = 32
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class _IntMatrix:
    """A matrix as a folder has it.

    title: the beginning of an error; group: columns of a group; type: of the matrix that is made. unpack: the codes of
    rows from the first on to an end, of all data; unpack_zeros: zero points [rows, groups], None: all are the middle of
    the codes; must_be_middle: those that are stored are. scales_by_column: scales are [groups, rows] in the file, else
    [rows, groups or more]; divisor: of all scales. indexed: each column has the number of its group. order: that in
    which columns are made, so that those of a group are neighbours, as of a `RawTensor`; None: as they are, which must
    be the order of their groups if `in_order`.
    """

    title: str
    rows: int
    cols: int
    group: int
    bits: int
    type: str
    unpack: Callable[[_IntMatrix, Bytes, int, int], Bytes]
    scale_type: str
    scales_by_column: bool
    unpack_zeros: Callable[[_IntMatrix, Bytes], Bytes] | None = None
    must_be_middle: bool = False
    indexed: bool = False
    order: Int32 | None = None
    in_order: bool = True
    divisor: float = 1.0

    def make(self, codes: Bytes, scales: Bytes, *more: Bytes) -> Bytes:
        """The data of the matrix."""
        rest = list(more)
        groups, middle = self.cols // self.group, 1 << (self.bits - 1)
        factors = finite(self.title, numbers(scales, self.scale_type)) / np.float32(self.divisor)
        if len(factors) == 1:
            factors = np.repeat(factors, self.rows)
        by_group = factors.reshape(groups, self.rows).T if self.scales_by_column else factors.reshape(self.rows, -1)
        factors = by_group[:, :groups]
        zeros = np.full((self.rows, groups), middle, np.uint8)
        if self.unpack_zeros is not None:
            zeros = self.unpack_zeros(self, rest.pop(0))
        if self.must_be_middle and (zeros != middle).any():
            raise ModelError(f"{self.title} has zero points other than {middle}, though its folder states sym")
        group_of = self._group_of(rest.pop(0).view("<i4") if self.indexed else None)
        make = self._floats if self.type == "F16" else self._blocks
        return make(codes, factors, zeros, group_of)

    def _group_of(self, index: Int32 | None) -> Int32:
        """The group of each column. ModelError unless every group has as many as it should, and all are in order where
        they must be."""
        usual = np.arange(self.cols, dtype=np.int32) // self.group
        if index is None or self.order is not None:
            return usual
        check_index(self.title, index, self.cols // self.group, self.group)
        if self.in_order and (index != usual).any():
            raise ModelError(f"{self.title} has columns out of the order of their groups, though its folder says not")
        return index

    def _differences(self, codes: Bytes, zeros: Bytes, group_of: Int32, begin: int, end: int) -> NDArray[np.int16]:
        """Codes less their zero points."""
        fields = self.unpack(self, codes, begin, end)
        difference = (fields if self.order is None else fields.take(self.order, axis=1)).astype(np.int16)
        difference -= zeros[begin:end].take(group_of, axis=1)
        return difference

    def _floats(self, codes: Bytes, factors: Float32, zeros: Bytes, group_of: Int32) -> Bytes:
        def values(begin: int, end: int) -> Float32:
            difference = self._differences(codes, zeros, group_of, begin, end)
            result: Float32 = difference * factors[begin:end, group_of]
            return result

        return as_f16(self.title, self.rows, self.cols, values)

    def _blocks(self, codes: Bytes, factors: Float32, zeros: Bytes, group_of: Int32) -> Bytes:
        with np.errstate(over="ignore"):
            scales = factors.astype(np.float16)
        if not np.isfinite(scales).all():
            raise ModelError(f"{self.title} has scales that are too large for F16")
        out = np.empty((self.rows, block_type(self.type).row_bytes(self.cols)), np.uint8)

        def pack(begin: int, end: int) -> None:
            difference = self._differences(codes, zeros, group_of, begin, end).astype(np.int8)
            out[begin:end] = pack_numbers(difference, scales[begin:end, group_of[::_BLOCK]], self.type)

        fill(self.rows, self.cols, pack)
        return out.reshape(-1)


def check_index(title: str, index: Int32, groups: int, group: int) -> None:
    """ModelError unless each group has so many columns."""
    if index.min() < 0 or index.max() >= groups:
        raise ModelError(f"{title} has columns of a group that it has not: groups are 0 to {groups - 1}")
    if (np.bincount(index, minlength=groups) != group).any():
        raise ModelError(f"{title} has groups of more or fewer than {group} columns")


def _chosen_type(bits: int, symmetric: bool, cols: int, group: int) -> str:
    """The type that holds codes less zero points exactly; F16 where there is none."""
    if cols % _BLOCK or group % _BLOCK:
        return "F16"
    if bits < 4 or (bits == 4 and symmetric):
        return "Q4_0"
    if bits == 4:
        return "Q5_0"
    return "Q8_0" if symmetric else "F16"


def _fields(data: Bytes, bits: int) -> Bytes:
    """Codes of each row, of its bytes: those in the low bits are first."""
    if bits == 8:
        return data
    if bits == 3:  # some lie in two bytes
        triples = np.unpackbits(data, axis=-1, bitorder="little").reshape(*data.shape[:-1], -1, 3)
        fields: Bytes = np.bitwise_or.reduce(triples << np.arange(3, dtype=np.uint8), axis=-1)
        return fields
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Bytes = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def _column_words(data: Bytes, rows: int, begin: int, end: int) -> Bytes:
    """Bytes of the rows of a matrix of words [words, rows], which hold neighbours of a row."""
    words = data.view("<u4").reshape(-1, rows)[:, begin:end]
    return np.ascontiguousarray(words.T).view(np.uint8)


def _group_size(module: Module, settings: Settings, cols: int) -> int:
    size = settings.get("group_size")
    if type(size) is not int or (size != -1 and size < 1):
        raise module.bad(f"is quantised in groups of {shown(size)}, which is no number of columns")
    size = cols if size == -1 else size
    if cols % size:
        raise module.bad(f"has {cols} columns, which are not whole groups of {size}")
    return size


def _check_shape(module: Module, end: str, tensor: RawTensor, shape: Shape) -> RawTensor:
    if tensor.shape != shape:
        raise module.bad(f"has {end} of shape {list(tensor.shape)}, not {list(shape)}")
    return tensor


# --- GPTQ ------------------------------------------------------------------------------------------------------------


def _gptq_codes(matrix: _IntMatrix, data: Bytes, begin: int, end: int) -> Bytes:
    return _fields(_column_words(data, matrix.rows, begin, end), matrix.bits)


def _gptq_zeros(matrix: _IntMatrix, data: Bytes) -> Bytes:
    return _fields(data.reshape(matrix.cols // matrix.group, -1), matrix.bits).T


def _gptq_zeros_less_one(matrix: _IntMatrix, data: Bytes) -> Bytes:
    return (_gptq_zeros(matrix, data) + np.uint8(1)) & np.uint8((1 << matrix.bits) - 1)


def problem_of_gptq(settings: Settings) -> str | None:
    """The part of the settings that is not read."""
    if type(settings.get("bits")) is not int or settings["bits"] not in (2, 3, 4, 8):
        return f"has {shown(settings.get('bits'))} bits, which are not read (only 2, 3, 4 and 8)"
    stated = settings.get("checkpoint_format", "gptq")
    return None if stated in ("gptq", "gptq_v2") else f"has the checkpoint_format {shown(stated)}, which is not read"


def read_gptq(module: Module, settings: Settings) -> MadeTensor:
    """`qweight` [words, rows], `qzeros` [groups, words], `scales` [groups, rows], perhaps `g_idx` [columns].

    Zero points are stored less one, in version 2 as they are.
    """
    bits = settings["bits"]
    codes, words, rows = module.matrix("qweight", "I32")
    cols = words * 32 // bits
    if words * 32 % bits:
        raise module.bad(f"has columns of {words} words, which are not whole codes of {bits} bits")
    group = _group_size(module, settings, cols)
    groups = cols // group
    if rows * bits % 32:
        raise module.bad(f"has {rows} rows, whose zero points of {bits} bits are not whole words")
    scales = _check_shape(module, "scales", module.take("scales", *SCALES), (groups, rows))
    zeros = _check_shape(module, "qzeros", module.take("qzeros", "I32"), (groups, rows * bits // 32))
    symmetric = settings.get("sym") is True
    index = module.find("g_idx", "I32")
    order = None if index is None else _order(module, index, cols, group, settings)
    matrix = _IntMatrix(
        module.title, rows, cols, group, bits, _chosen_type(bits, symmetric, cols, group), _gptq_codes, scales.type,
        scales_by_column=True,
        unpack_zeros=_gptq_zeros if settings.get("checkpoint_format") == "gptq_v2" else _gptq_zeros_less_one,
        must_be_middle=symmetric, indexed=index is not None, order=order,
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales, zeros, index)


def _order(module: Module, index: RawTensor, cols: int, group: int, settings: Settings) -> Int32 | None:
    """The order in which columns of a group are neighbours; None: they are. Only a folder that may have others
    (act-order) is looked at."""
    _check_shape(module, "g_idx", index, (cols,))
    if settings.get("desc_act") is False:
        return None
    numbers_of_groups = index.gathered().data.view("<i4")
    check_index(module.title, numbers_of_groups, cols // group, group)
    if (numbers_of_groups == np.arange(cols) // group).all():
        return None
    return np.argsort(numbers_of_groups, kind="stable").astype(np.int32)


def _make_tensor(matrix: _IntMatrix, *sources: RawTensor | None) -> MadeTensor:
    """The tensor of a matrix. What becomes F16 keeps its columns where they are."""
    if matrix.type == "F16":
        matrix = replace(matrix, order=None, in_order=matrix.order is None)
    present = tuple(source for source in sources if source is not None)
    return MadeTensor(matrix.type, (matrix.rows, matrix.cols), present, matrix.make, order=matrix.order)


# --- AWQ -------------------------------------------------------------------------------------------------------------

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of 8 neighbours in their word."""


def _awq_fields(data: Bytes, rows: int) -> Bytes:
    """Codes [n, rows], of words [n, rows / 8]."""
    fields = _fields(data, 4).reshape(-1, rows // 8, 8)
    return fields[..., _AWQ_PLACES].reshape(-1, rows)


def _awq_codes(matrix: _IntMatrix, data: Bytes, begin: int, end: int) -> Bytes:
    first, last = begin // 8, -(-end // 8)
    words = np.ascontiguousarray(data.view("<u4").reshape(matrix.cols, -1)[:, first:last])
    codes = _awq_fields(words.view(np.uint8), (last - first) * 8)
    return codes[:, begin - first * 8 : end - first * 8].T


def _awq_zeros(matrix: _IntMatrix, data: Bytes) -> Bytes:
    return _awq_fields(data.reshape(matrix.cols // matrix.group, -1), matrix.rows).T


def problem_of_awq(settings: Settings) -> str | None:
    """The part of the settings that is not read."""
    if settings.get("bits") != 4:
        return f"has {shown(settings.get('bits'))} bits, which are not read (only 4)"
    version = _awq_version(settings)
    return None if version in ("gemm", "gemv") else f"has the version {version}, which is not read (only gemm, gemv)"


def _awq_version(settings: Settings) -> str:
    stated = settings.get("version", "gemm")
    return stated.lower() if type(stated) is str and stated.lower() in ("gemm", "gemv") else shown(stated)


def _gemv_zeros(matrix: _IntMatrix, data: Bytes) -> Bytes:
    return _fields(data.reshape(matrix.rows, -1), 4)[:, : matrix.cols // matrix.group]


def _read_gemv(module: Module, settings: Settings) -> MadeTensor:
    """`qweight` [rows, words], and `qzeros` and `scales` for each row, of more groups than there are."""
    codes, rows, words = module.matrix("qweight", "I32")
    cols = words * 8
    group = _group_size(module, settings, cols)
    zeros, _, words = module.matrix("qzeros", "I32")
    if words * 8 < cols // group:
        raise module.bad(f"has qzeros of {words * 8} groups, not {cols // group}")
    _check_shape(module, "qzeros", zeros, (rows, words))
    scales = _check_shape(module, "scales", module.take("scales", *SCALES), (rows, words * 8))
    matrix = _IntMatrix(
        module.title, rows, cols, group, 4, _chosen_type(4, False, cols, group), _packed_codes, scales.type,
        scales_by_column=False, unpack_zeros=_gemv_zeros,
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales, zeros)


def read_awq(module: Module, settings: Settings) -> MadeTensor:
    """`qweight` [columns, words], `scales` [groups, rows], `qzeros` [groups, words]; gemv has them by row."""
    if _awq_version(settings) == "gemv":
        return _read_gemv(module, settings)
    codes, cols, words = module.matrix("qweight", "I32")
    rows = words * 8
    group = _group_size(module, settings, cols)
    scales = _check_shape(module, "scales", module.take("scales", *SCALES), (cols // group, rows))
    zeros = _check_shape(module, "qzeros", module.take("qzeros", "I32"), (cols // group, words))
    matrix = _IntMatrix(
        module.title, rows, cols, group, 4, _chosen_type(4, False, cols, group), _awq_codes, scales.type,
        scales_by_column=True, unpack_zeros=_awq_zeros,
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales, zeros)


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def _packed_codes(matrix: _IntMatrix, data: Bytes, begin: int, end: int) -> Bytes:
    return _fields(data.reshape(matrix.rows, -1)[begin:end], matrix.bits)[:, : matrix.cols]


def _packed_zeros(matrix: _IntMatrix, data: Bytes) -> Bytes:
    groups = matrix.cols // matrix.group
    return _fields(_column_words(data, groups, 0, groups), matrix.bits)[:, : matrix.rows].T


def _signed_codes(matrix: _IntMatrix, data: Bytes, begin: int, end: int) -> Bytes:
    return data.reshape(matrix.rows, -1)[begin:end] ^ np.uint8(0x80)


def _signed_zeros(matrix: _IntMatrix, data: Bytes) -> Bytes:
    zeros = np.repeat(data, matrix.rows) if len(data) == 1 else data
    return zeros.reshape(matrix.rows, -1) ^ np.uint8(0x80)


def read_packed(module: Module, settings: Settings) -> MadeTensor:
    """`weight_packed` [rows, words], `weight_scale` [rows, groups], `weight_shape`; perhaps `weight_zero_point`
    [words, groups] and `weight_g_idx` [columns]."""
    codes, rows, words = module.matrix("weight_packed", "I32")
    shape = module.take("weight_shape", "I64", "I32")
    if tuple(shape.shape) != (2,):
        raise module.bad(f"has a weight_shape of the shape {list(shape.shape)}")
    stated = shape.gathered().data.view("<i8" if shape.type == "I64" else "<i4").tolist()
    if stated[0] != rows:
        raise module.bad(f"has the weight_shape {stated}, but {rows} rows")
    cols = stated[1]
    bits = next((bits for bits in (4, 8) if cols > 0 and -(-cols * bits // 32) == words), None)
    if bits is None:
        raise module.bad(f"has {words} words for each row of {cols} weights, which are of neither 4 nor 8 bits")
    scales, group = _take_scales(module, rows, cols)
    groups = cols // group
    zeros = module.find("weight_zero_point", "I32")
    if zeros is not None:
        _check_shape(module, "weight_zero_point", zeros, (-(-rows * bits // 32), groups))
    index = module.find("weight_g_idx", "I32")
    matrix = _IntMatrix(
        module.title, rows, cols, group, bits, _chosen_type(bits, zeros is None, cols, group), _packed_codes,
        scales.type, scales_by_column=False, unpack_zeros=None if zeros is None else _packed_zeros,
        indexed=index is not None, order=None if index is None else _order(module, index, cols, group, {}),
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales, zeros, index)


def read_int8(module: Module, settings: Settings) -> MadeTensor:
    """`weight` of signed numbers, `weight_scale`, perhaps `weight_zero_point`, which has the shape of the scales."""
    codes, rows, cols = module.matrix("weight", "I8")
    scales, group = _take_scales(module, rows, cols)
    zeros = module.find("weight_zero_point", "I8")
    if zeros is not None:
        _check_shape(module, "weight_zero_point", zeros, scales.shape)
    matrix = _IntMatrix(
        module.title, rows, cols, group, 8, _chosen_type(8, zeros is None, cols, group), _signed_codes, scales.type,
        scales_by_column=False, unpack_zeros=None if zeros is None else _signed_zeros,
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales, zeros)


def read_bitsandbytes_int8(module: Module, settings: Settings) -> MadeTensor:
    """`weight` of signed numbers, and `SCB`, the largest weight of each row, which is 127 in codes."""
    codes, rows, cols = module.matrix("weight", "I8")
    order = module.find("weight_format", "U8")
    if order is not None and (order.size != 1 or order.gathered().data[0]):
        raise module.bad("has a weight_format other than 0, rows as they are")
    scales = _check_shape(module, "SCB", module.take("SCB", "F32"), (rows,))
    matrix = _IntMatrix(
        module.title, rows, cols, cols, 8, _chosen_type(8, True, cols, cols), _signed_codes, scales.type,
        scales_by_column=False, divisor=127.0,
    )  # fmt: skip
    return _make_tensor(matrix, codes, scales)


def _take_scales(module: Module, rows: int, cols: int) -> tuple[RawTensor, int]:
    """(scales, columns of a group), of scales for all, for each row, or for each group of a row."""
    scales = module.take("weight_scale", *SCALES)
    if scales.size == 1 or scales.shape == (rows,):
        return scales, cols
    if len(scales.shape) != 2 or scales.shape[0] != rows or not scales.size or cols % scales.shape[1]:
        raise module.bad(f"has scales of shape {list(scales.shape)}, which do not go with {rows} x {cols} weights")
    return scales, cols // scales.shape[1]
