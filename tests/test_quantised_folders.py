"""Quantised Hugging Face folders: every matrix has the values that its codes and scales say, and what does not go
together is refused.

Each way of storing is written here by a packer of its own, element by element as its definition has it, which also
gives the values in float64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from model_files import as_stored, hf_name, safetensors_bytes, tiny_config, weights

from benchmarks.models.vocabulary import write_tokenizer_files
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.safetensors_file import read_safetensors
from powerinfer.formats.tensors import RawTensor
from powerinfer.models import load

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
Packed = tuple[Stored, np.ndarray]
"""The tensors of a module by the ends of their names, and the values in float64."""
Packer = Callable[[np.random.Generator, int, int], Packed]
Shuffled = Literal["alike", "apart"] | None
"""Columns out of the order of their groups: in the same order in all matrices as wide, or each in one of its own."""
PARTS = ("q", "k", "v", "o", "gate", "up", "down")


def folder(path: Path, packer: Packer, settings: dict[str, Any], change: Callable[[Stored], Any] | None = None) -> Path:
    """A llama all of whose linear layers are packed; `expected.npz` beside it has their values."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny_config() | {"quantization_config": settings}))
    rng = np.random.default_rng(8)
    stored: Stored = {}
    expected = {}
    for name, values in weights("llama").items():
        if name.rpartition(".")[2] not in PARTS:
            stored |= as_stored({name: values})
            continue
        tensors, expected[name] = packer(rng, *values.shape)
        module = hf_name(name).removesuffix(".weight")
        stored |= {f"{module}.{end}": tensor for end, tensor in tensors.items()}
    if change is not None:
        change(stored)
    (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    np.savez(path / "expected.npz", **expected)
    return path


def errors(path: Path, type_name: str) -> tuple[float, float]:
    """(largest, root of the mean square) difference of the matrices from their values, as a part of the largest weight
    and of their mean square. All must be of that type."""
    checkpoint: Checkpoint = open_checkpoint(path)
    largest, squares = 0.0, []
    for name, exact in np.load(path / "expected.npz").items():
        tensor = checkpoint.take(name)
        assert (tensor.type, tensor.shape) == (type_name, exact.shape)
        difference = tensor.float32().astype(np.float64) - exact
        largest = max(largest, np.abs(difference).max() / np.abs(exact).max())
        squares.append(np.square(difference).mean() / np.square(exact).mean())
    return largest, float(np.sqrt(np.mean(squares)))


def tensor(kind: str, values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    if kind == "BF16":
        values = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return kind, values.shape, values.tobytes()


def float64(stored: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    """The values of scales."""
    kind, shape, raw = stored
    if kind == "BF16":
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind == "F8_E8M0":
        values = 2.0 ** (np.frombuffer(raw, np.uint8).astype(np.float64) - 127)
    else:
        values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[kind])
    return values.astype(np.float64).reshape(shape)


def e4m3(code: int) -> float:
    """By the definition: a sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = np.array([e4m3(code) for code in range(256)])


def random_e4m3(rng: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of numbers, their values."""
    codes = rng.integers(0, 127, (rows, cols), np.uint8) | rng.integers(0, 2, (rows, cols), np.uint8) << np.uint8(7)
    return codes, E4M3[codes]


# --- FP8 -------------------------------------------------------------------------------------------------------------


def fp8(shape: str, kind: str, end: str) -> Packer:
    """shape: of scales, "tensor", "channel" or "block" (of 40 x 48, which does not divide the matrices)."""

    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        codes, values = random_e4m3(rng, rows, cols)
        size = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 40), -(-cols // 48))}[shape]
        if kind == "F8_E8M0":
            scales = tensor(kind, rng.integers(110, 125, size, np.uint8))
        else:
            scales = tensor(kind, rng.uniform(1e-4, 1e-2, size).astype(np.float16 if kind == "F16" else np.float32))
        row, col = np.indices((rows, cols))
        at = {"tensor": (0 * row,), "channel": (row, 0 * col), "block": (row // 40, col // 48)}[shape]
        return {"weight": tensor("F8_E4M3", codes), end: scales}, values * float64(scales)[at]

    return pack


BLOCKS = {"quant_method": "fp8", "weight_block_size": [40, 48], "activation_scheme": "dynamic"}
CHANNELS: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
IN_GROUPS = CHANNELS | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [40, 48]}}}}
ROUNDED_F16 = 2**-11 + 2**-24


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (fp8("block", "F32", "weight_scale_inv"), BLOCKS),
        (fp8("block", "F8_E8M0", "weight_scale_inv"), BLOCKS | {"scale_fmt": "ue8m0"}),
        (fp8("block", "BF16", "weight_scale"), IN_GROUPS),
        (fp8("channel", "BF16", "weight_scale"), CHANNELS),
        (fp8("channel", "F32", "weight_scale"), {"quant_method": "fbgemm_fp8"}),
        (fp8("tensor", "F32", "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ],
)
def test_fp8_is_rounded_to_f16(packer: Packer, settings: dict[str, Any], tmp_path: Path) -> None:
    def add_activations(stored: Stored) -> None:
        stored["model.layers.0.mlp.up_proj.input_scale"] = tensor("F32", np.ones(1, np.float32))

    path = folder(tmp_path / "model", packer, settings, add_activations)
    largest, mean = errors(path, "F16")
    assert largest <= ROUNDED_F16
    assert mean <= 2.3e-4
    exact = "ue8m0" in settings.values()
    assert (mean < 1e-6) == exact, "scales that are powers of two round nothing but the smallest numbers"
    notes = open_checkpoint(path).notes
    line = r"14 FP8 matrices are computed in F16, which takes (1.9|2.0) times the memory; --quantize q8_0 takes half .*"
    assert sum(re.fullmatch(line, note) is not None for note in notes) == 1
    small = open_checkpoint(path, quantize="q8_0").take("layers.1.down")
    exact_values = np.load(path / "expected.npz")["layers.1.down"]
    assert small.type == "Q8_0"
    assert np.abs(small.float32() - exact_values).max() <= np.abs(exact_values).max() / 220  # its scale is rounded, too


def changed(name: str, kind: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Stored], None]:
    """A tensor of the folder with other contents."""

    def apply(stored: Stored) -> None:
        _, shape, raw = stored[name]
        numpy_type = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}.get(kind, np.uint8)
        stored[name] = tensor(kind, change(np.frombuffer(raw, numpy_type).reshape(shape).copy()))

    return apply


def filled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def fill(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[3 % values.size] = value
        return values

    return fill


def refused(path: Path, why: str) -> None:
    """Opening, or taking all matrices."""
    with pytest.raises(ModelError, match=why) as caught:
        checkpoint = open_checkpoint(path)
        for name in list(checkpoint.names()):
            checkpoint.take(name)
    assert "\n" not in str(caught.value)


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: stored.pop(f"{UP}weight_scale_inv"), "up_proj' has no weight_scale"),
        (changed(f"{UP}weight", "F8_E4M3", lambda codes: codes[:48]), r"do not go with 48 x 64 weights in .* 40 x 48"),
        (changed(f"{UP}weight", "F8_E4M3", lambda codes: codes[:90]), "tensors? .*up_proj.weight has shape"),
        (changed(f"{UP}weight", "F8_E4M3", lambda codes: codes.reshape(-1)), "not of a matrix"),
        (changed(f"{UP}weight", "F8_E4M3", filled(0x7F)), "weights that are not numbers"),
        (changed(f"{UP}weight", "F8_E4M3", filled(0xFF)), "weights that are not numbers"),
        (changed(f"{UP}weight_scale_inv", "F32", filled(np.nan)), "scales that are infinite or not numbers"),
        (changed(f"{UP}weight_scale_inv", "F32", filled(-np.inf)), "scales that are infinite or not numbers"),
        (changed(f"{UP}weight_scale_inv", "F32", lambda scales: scales + 1e6), "too large for F16"),
        (changed(f"{UP}weight_scale_inv", "I32", lambda scales: scales), "weight_scale_inv of type I32"),
        (changed(f"{UP}weight_scale_inv", "F32", lambda scales: scales[:0]), r"scales of shape \[0, 2\]"),
    ],
)
def test_fp8_that_is_refused(change: Callable[[Stored], None], why: str, tmp_path: Path) -> None:
    refused(folder(tmp_path / "model", fp8("block", "F32", "weight_scale_inv"), BLOCKS, change), why)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq', which is not read in folders"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ("fp8", "quant_method 'None'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        (CHANNELS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        (CHANNELS | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"do not go with 64 x 64 weights$"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, r"do not go with 64 x 64 weights$"),
        (CHANNELS | {"config_groups": [3]}, r"do not go with 64 x 64 weights$"),
    ],
)
def test_settings_that_are_refused(settings: Any, why: str, tmp_path: Path) -> None:
    refused(folder(tmp_path / "model", fp8("block", "F32", "weight_scale_inv"), settings), why)


# --- GPTQ ------------------------------------------------------------------------------------------------------------


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of the last axis: the first field is in the lowest bits, and a field may be in two words."""
    stream = (fields[..., None] >> np.arange(bits) & 1).reshape(*fields.shape[:-1], -1, 32)
    return (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=-1).astype(np.uint32).view(np.int32)


def columns(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored.T)


def groups_of_columns(rng: np.random.Generator, cols: int, groups: int, shuffled: Shuffled) -> np.ndarray:
    """The group of each column."""
    of_column = np.arange(cols, dtype=np.int32) // (cols // groups)
    if shuffled is None:
        return of_column
    return (rng if shuffled == "apart" else np.random.default_rng(cols)).permutation(of_column)


def gptq(
    bits: int, group: int, symmetric: bool, *, version: int = 1, shuffled: Shuffled = None, index: bool = True
) -> Packer:
    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        groups = cols // group
        codes = rng.integers(0, 1 << bits, (rows, cols))
        zeros = rng.integers(0, 1 << bits, (rows, groups))
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        scales = tensor("F16", rng.uniform(1e-3, 1e-2, (groups, rows)).astype(np.float16))
        of_column = groups_of_columns(rng, cols, groups, shuffled)
        values = (codes - zeros[:, of_column]) * float64(scales).T[:, of_column]
        stored_zeros = (zeros - (version == 1)) % (1 << bits)
        stored = {
            "qweight": tensor("I32", columns(words(codes, bits))),
            "qzeros": tensor("I32", words(columns(stored_zeros), bits)),
            "scales": scales,
        }
        return stored | ({"g_idx": tensor("I32", of_column)} if index else {}), values

    return pack


def gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False} | more


@pytest.mark.parametrize(
    ("packer", "settings", "type_name"),
    [
        (gptq(4, 32, True), gptq_settings(4, 32), "Q4_0"),
        (gptq(4, 32, True, version=2), gptq_settings(4, 32, checkpoint_format="gptq_v2"), "Q4_0"),
        (gptq(4, 32, False), gptq_settings(4, 32, sym=False, checkpoint_format="gptq"), "Q5_0"),
        (gptq(4, 32, False, index=False), gptq_settings(4, 32, sym=False), "Q5_0"),
        (gptq(2, 32, False), gptq_settings(2, 32, sym=False), "Q4_0"),
        (gptq(3, 32, False), gptq_settings(3, 32, sym=False), "Q4_0"),
        (gptq(3, 32, True, version=2), gptq_settings(3, 32, checkpoint_format="gptq_v2"), "Q4_0"),
        (gptq(8, 32, True), gptq_settings(8, 32), "Q8_0"),
        (gptq(4, 32, True), gptq_settings(4, 32, desc_act=True), "Q4_0"),
    ],
)
def test_gptq_exactly(packer: Packer, settings: dict[str, Any], type_name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", packer, settings)
    assert errors(path, type_name) == (0, 0)
    assert any(note.startswith(f"14 GPTQ matrices are computed in {type_name}") for note in open_checkpoint(path).notes)


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (gptq(8, 32, False, shuffled="alike"), gptq_settings(8, 32, sym=False, desc_act=True)),
        (gptq(4, 16, True, shuffled="apart"), gptq_settings(4, 16, desc_act=True)),
        (gptq(8, 32, False), gptq_settings(8, 32, sym=False)),
        (gptq(4, 16, True), gptq_settings(4, 16)),
    ],
)
def test_gptq_rounded_to_f16(packer: Packer, settings: dict[str, Any], tmp_path: Path) -> None:
    largest, mean = errors(folder(tmp_path / "model", packer, settings), "F16")
    assert 1e-5 < largest <= ROUNDED_F16 and mean <= 2.3e-4


def test_whole_rows_are_groups(tmp_path: Path) -> None:
    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        return gptq(4, cols, True)(rng, rows, cols)

    assert errors(folder(tmp_path / "model", pack, gptq_settings(4, -1)), "Q4_0") == (0, 0)


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (None, {"bits": 5}, "'5' bits"),
        (None, {"bits": 3}, "not whole codes of 3 bits|not whole words|whole groups"),
        (None, {"bits": 4.0}, "'4.0' bits"),
        (None, {"bits": 8}, "not whole words|shape"),
        (None, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (None, {"group_size": 48}, "64 columns, which are not whole groups of 48"),
        (None, {"group_size": 0}, "groups of '0'"),
        (None, {"group_size": "32"}, "no number of columns"),
        (None, {"group_size": 64}, "96 columns, which are not whole|has scales of shape"),
        (lambda stored: stored.pop(f"{UP}qzeros"), {}, "up_proj' has no qzeros"),
        (lambda stored: stored.pop(f"{UP}scales"), {}, "up_proj' has no scales"),
        (changed(f"{UP}qzeros", "I32", filled(0x77777771)), {}, "zero points other than 8"),
        (changed(f"{UP}qzeros", "I32", lambda zeros: zeros[:, :-1]), {}, r"qzeros of shape \[2, 11\], not \[2, 12\]"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:-1]), {}, "56 columns, which are not whole groups"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:, :-1]), {}, "95 rows, whose zero points"),
        (changed(f"{UP}scales", "F16", filled(np.nan)), {}, "scales that are infinite or not numbers"),
        (changed(f"{UP}scales", "F16", lambda scales: scales[:1]), {}, "scales of shape"),
        (lambda stored: stored.update({f"{UP}scales": stored[f"{UP}g_idx"]}), {}, "scales of type I32"),
        (changed(f"{UP}g_idx", "I32", filled(2)), {}, "groups are 0 to 1"),
        (changed(f"{UP}g_idx", "I32", filled(2)), {"desc_act": True}, "groups are 0 to 1"),
        (changed(f"{UP}g_idx", "I32", filled(-1)), {"desc_act": True}, "groups are 0 to 1"),
        (changed(f"{UP}g_idx", "I32", filled(1)), {"desc_act": True}, "more or fewer than 32 columns"),
        (changed(f"{UP}g_idx", "I32", lambda index: index[:-1]), {"desc_act": True}, "g_idx of shape"),
        (changed(f"{UP}g_idx", "I32", lambda index: index[::-1].copy()), {}, "out of the order of their groups"),
    ],
)
def test_gptq_that_is_refused(
    change: Callable[[Stored], None] | None, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", gptq(4, 32, True), gptq_settings(4, 32) | settings, change)
    refused(path, why)


# --- AWQ -------------------------------------------------------------------------------------------------------------


def awq(group: int) -> Packer:
    """Of 8 neighbouring rows a word has first those of even places, then the others."""

    def interleaved(fields: np.ndarray) -> np.ndarray:
        eights = fields.reshape(len(fields), -1, 8)
        return words(np.concatenate([eights[..., ::2], eights[..., 1::2]], axis=-1).reshape(len(fields), -1), 4)

    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        codes = rng.integers(0, 16, (rows, cols))
        zeros = rng.integers(0, 16, (rows, cols // group))
        scales = tensor("F16", rng.uniform(1e-3, 1e-2, (cols // group, rows)).astype(np.float16))
        spread = np.repeat(zeros, group, axis=1), np.repeat(float64(scales).T, group, axis=1)
        stored = {
            "qweight": tensor("I32", interleaved(columns(codes))),
            "qzeros": tensor("I32", interleaved(columns(zeros))),
            "scales": scales,
        }
        return stored, (codes - spread[0]) * spread[1]

    return pack


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_awq_exactly(tmp_path: Path) -> None:
    assert errors(folder(tmp_path / "model", awq(32), AWQ), "Q5_0") == (0, 0)
    largest, mean = errors(folder(tmp_path / "other", awq(16), AWQ | {"group_size": 16, "version": "GEMM"}), "F16")
    assert 1e-5 < largest <= ROUNDED_F16 and mean <= 2.3e-4


def gemv(group: int, padding: int) -> Packer:
    """Rows of codes in their order; zero points and scales of each row, and of so many groups that there are not."""

    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        groups = cols // group
        codes = rng.integers(0, 16, (rows, cols))
        zeros = rng.integers(0, 16, (rows, groups))
        scales = rng.uniform(1e-3, 1e-2, (rows, groups)).astype(np.float16)
        wide = -(-groups // 8) * 8 + padding
        stored = {
            "qweight": tensor("I32", words(codes, 4)),
            "qzeros": tensor("I32", words(np.pad(zeros, ((0, 0), (0, wide - groups))), 4)),
            "scales": tensor("F16", np.pad(scales, ((0, 0), (0, wide - groups)))),
        }
        difference = codes - np.repeat(zeros, group, axis=1)
        return stored, difference * np.repeat(scales.astype(np.float64), group, axis=1)

    return pack


@pytest.mark.parametrize("padding", [0, 24])
def test_gemv_exactly(padding: int, tmp_path: Path) -> None:
    assert errors(folder(tmp_path / "model", gemv(32, padding), AWQ | {"version": "gemv"}), "Q5_0") == (0, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: stored.pop(f"{UP}scales"), "up_proj' has no scales"),
        (changed(f"{UP}qzeros", "I32", lambda zeros: zeros[:-1]), "qzeros of shape"),
        (changed(f"{UP}qzeros", "I32", lambda zeros: zeros[:, :0]), "not of a matrix"),
        (changed(f"{UP}scales", "F16", lambda scales: scales[:, :2]), r"scales of shape \[96, 2\], not \[96, 8\]"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:-1]), "qzeros of shape"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:, :-1]), "56 columns, which are not whole groups"),
        (changed(f"{UP}qweight", "I32", lambda codes: np.tile(codes, 40)), "qzeros of 8 groups, not 80"),
        (changed(f"{UP}scales", "F16", filled(np.nan)), "scales that are infinite or not numbers"),
    ],
)
def test_gemv_that_is_refused(change: Callable[[Stored], None], why: str, tmp_path: Path) -> None:
    refused(folder(tmp_path / "model", gemv(32, 0), AWQ | {"version": "gemv"}, change), why)


def test_pieces_of_rows_are_the_same_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made in pieces, which here are cut within words."""
    monkeypatch.setattr("powerinfer.formats.tensors._PIECE", 64 * 13)
    assert errors(folder(tmp_path / "awq", awq(32), AWQ), "Q5_0") == (0, 0)
    assert errors(folder(tmp_path / "gptq", gptq(4, 32, False), gptq_settings(4, 32, sym=False)), "Q5_0") == (0, 0)
    largest, _ = errors(folder(tmp_path / "fp8", fp8("block", "F32", "weight_scale_inv"), BLOCKS), "F16")
    assert largest <= ROUNDED_F16


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (None, {"bits": 8}, "'8' bits, which are not read"),
        (None, {"version": "gemv_fast"}, "version 'gemv_fast'"),
        (None, {"version": 3}, "version '3'"),
        (None, {"group_size": 48}, "64 columns, which are not whole groups of 48"),
        (lambda stored: stored.pop(f"{UP}qzeros"), {}, "up_proj' has no qzeros"),
        (changed(f"{UP}qzeros", "I32", lambda zeros: zeros[:, :-1]), {}, "qzeros of shape"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:-1]), {}, "63 columns, which are not whole"),
        (changed(f"{UP}qweight", "I32", lambda codes: codes[:, :-1]), {}, "scales of shape"),
        (changed(f"{UP}scales", "F16", filled(np.inf)), {}, "scales that are infinite or not numbers"),
    ],
)
def test_awq_that_is_refused(
    change: Callable[[Stored], None] | None, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    refused(folder(tmp_path / "model", awq(32), AWQ | settings, change), why)


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def packed(
    bits: int, group: int | None, *, zero_points: bool = False, shuffled: Shuffled = None, kind: str = "BF16"
) -> Packer:
    """group: None: a scale for each row. Rows and columns need not fill their words."""

    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        groups = 1 if group is None else cols // group
        of_column = groups_of_columns(rng, cols, groups, shuffled)
        codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, (rows, cols))
        zeros = rng.integers(-(1 << bits - 1), 1 << bits - 1, (rows, groups)) * zero_points
        scales = tensor(kind, rng.uniform(1e-3, 1e-2, (rows, groups)).astype(np.float32))
        middle = 1 << bits - 1
        stored = {
            "weight_packed": tensor("I32", words(codes + middle, bits)),
            "weight_scale": scales,
            "weight_shape": tensor("I64", np.array([rows, cols], np.int64)),
        }
        if zero_points:
            stored["weight_zero_point"] = tensor("I32", columns(words(columns(zeros) + middle, bits)))
        if shuffled is not None:
            stored["weight_g_idx"] = tensor("I32", of_column)
        return stored, (codes - zeros[:, of_column]) * float64(scales)[:, of_column]

    return pack


def int8(group: int | None, zero_points: bool = False) -> Packer:
    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        groups = 1 if group is None else cols // group
        codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
        zeros = rng.integers(-128, 128, (rows, groups)).astype(np.int8)
        scales = tensor("BF16", rng.uniform(1e-3, 1e-2, (rows, groups)))
        stored = {"weight": tensor("I8", codes), "weight_scale": scales}
        if zero_points:
            stored["weight_zero_point"] = tensor("I8", zeros)
        difference = codes.astype(np.int64) - np.repeat(zeros * zero_points, cols // groups, axis=1)
        return stored, difference * np.repeat(float64(scales), cols // groups, axis=1)

    return pack


PACK: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT8: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized"}


@pytest.mark.parametrize(
    ("packer", "settings", "type_name"),
    [
        (packed(4, 32), PACK, "Q4_0"),
        (packed(4, None), PACK, "Q4_0"),
        (packed(4, 32, zero_points=True), PACK, "Q5_0"),
        (packed(8, 32), PACK, "Q8_0"),
        (int8(None), INT8, "Q8_0"),
        (int8(32), INT8, "Q8_0"),
        (packed(4, 16), PACK, "F16"),
    ],
)
def test_compressed_tensors_exactly(packer: Packer, settings: dict[str, Any], type_name: str, tmp_path: Path) -> None:
    assert errors(folder(tmp_path / "model", packer, settings), type_name) == (0, 0)


@pytest.mark.parametrize(
    ("packer", "settings", "type_name", "bound"),
    [
        (packed(8, 32, zero_points=True), PACK, "F16", ROUNDED_F16),
        (int8(32, zero_points=True), INT8, "F16", ROUNDED_F16),
        (packed(4, 32, kind="F32"), PACK, "Q4_0", ROUNDED_F16),  # scales of 24 bits
    ],
)
def test_compressed_tensors_rounded(
    packer: Packer, settings: dict[str, Any], type_name: str, bound: float, tmp_path: Path
) -> None:
    largest, mean = errors(folder(tmp_path / "model", packer, settings), type_name)
    assert 1e-6 < largest <= bound and mean <= 3e-4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: stored.pop(f"{UP}weight_shape"), "up_proj' has no weight_shape"),
        (lambda stored: stored.pop(f"{UP}weight_scale"), "up_proj' has no weight_scale"),
        (changed(f"{UP}weight_shape", "I64", lambda shape: shape[::-1].copy()), "weight_shape .64, 96., but 96 rows"),
        (changed(f"{UP}weight_shape", "I64", filled(-64)), "neither 4 nor 8 bits"),
        (changed(f"{UP}weight_shape", "I64", filled(1 << 62)), "neither 4 nor 8 bits"),
        (changed(f"{UP}weight_shape", "I64", filled(57)), "scales of shape"),
        (changed(f"{UP}weight_shape", "I64", filled(62)), "g_idx of shape .64., not .62."),
        (changed(f"{UP}weight_packed", "I32", lambda codes: codes[:, :-1]), "neither 4 nor 8 bits"),
        (changed(f"{UP}weight_zero_point", "I32", lambda zeros: zeros[:-1]), "weight_zero_point of shape"),
        (changed(f"{UP}weight_g_idx", "I32", filled(2)), "groups are 0 to 1"),
        (changed(f"{UP}weight_g_idx", "I32", lambda index: index * 0), "more or fewer than 32 columns"),
        (lambda stored: stored.update({f"{UP}weight_scale": tensor("F32", np.full((96, 2), np.nan, np.float32))}),
         "scales that are infinite"),
        (lambda stored: stored.update({f"{UP}weight_scale": tensor("F32", np.ones((96, 3), np.float32))}),
         "do not go with 96 x 64 weights"),
    ],
)  # fmt: skip
def test_compressed_tensors_that_are_refused(change: Callable[[Stored], None], why: str, tmp_path: Path) -> None:
    packer = packed(4, 32, shuffled="apart", zero_points=True)
    refused(folder(tmp_path / "model", packer, PACK, change), why)


# --- columns out of the order of their groups ------------------------------------------------------------------------


def taken(path: Path) -> dict[str, tuple[RawTensor, np.ndarray]]:
    """The matrices of a folder, and their values, whose neurons are in the order of the columns of down."""
    checkpoint, values = open_checkpoint(path), dict(np.load(path / "expected.npz"))
    stored, _, _ = read_safetensors(path / "model.safetensors")
    for layer in range(2):
        ends = [f"model.layers.{layer}.mlp.down_proj.{end}" for end in ("g_idx", "weight_g_idx")]
        (index,) = (stored[end] for end in ends if end in stored)
        order = np.argsort(index.data.view(np.int32), kind="stable")
        for part in ("gate", "up"):
            values[f"layers.{layer}.{part}"] = values[f"layers.{layer}.{part}"][order]
        values[f"layers.{layer}.down"] = values[f"layers.{layer}.down"][:, order]
    return {name: (checkpoint.take(name), exact) for name, exact in values.items()}


@pytest.mark.parametrize(
    ("packer", "settings", "type_name"),
    [
        (gptq(4, 32, True), gptq_settings(4, 32), "q4_0"),
        (gptq(4, 32, False), gptq_settings(4, 32, sym=False), "q5_0"),
        (gptq(8, 32, True), gptq_settings(8, 32), "q8_0"),
    ],
)
def test_a_gguf_file_of_a_folder_keeps_its_codes(
    packer: Packer, settings: dict[str, Any], type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/quantize.md says; q and k have another order of rows there."""
    monkeypatch.setattr("model_files.VOCAB", 1200)
    path, made = folder(tmp_path / "model", packer, settings), tmp_path / "m.gguf"
    write_tokenizer_files(path, 1200)
    rest = ("--tensor-type", "^(output|token_embd)=bf16")
    assert main(["quantize", str(path), type_name, "--pure", *rest, "-o", str(made)]) == 0
    before, after = open_checkpoint(path), open_checkpoint(made)
    for layer in range(2):
        for part in ("v", "o", "gate", "up", "down"):
            of_folder, of_file = (one.take(f"layers.{layer}.{part}") for one in (before, after))
            assert of_file.type == type_name.upper() and np.array_equal(of_file.data, of_folder.data), part


@pytest.mark.parametrize(
    ("packer", "settings", "type_name"),
    [
        (gptq(4, 32, True, shuffled="alike"), gptq_settings(4, 32, desc_act=True), "Q4_0"),
        (gptq(4, 32, False, shuffled="alike"), gptq_settings(4, 32, desc_act=True, sym=False), "Q5_0"),
        (gptq(2, 32, False, shuffled="alike"), gptq_settings(2, 32, desc_act=True, sym=False), "Q4_0"),
        (gptq(8, 32, True, shuffled="alike"), gptq_settings(8, 32, desc_act=True), "Q8_0"),
        (packed(4, 32, shuffled="alike", zero_points=True), PACK, "Q5_0"),
    ],
)
def test_act_order_exactly(packer: Packer, settings: dict[str, Any], type_name: str, tmp_path: Path) -> None:
    """Columns of down are in the order of the neurons, those of others have one that is told."""
    for name, (tensor, exact) in taken(folder(tmp_path / "model", packer, settings)).items():
        assert tensor.type == type_name, name
        assert (tensor.order is None) == name.endswith(".down")
        assert np.array_equal(tensor.float32(), exact), name


def test_orders_that_nobody_reads_in(tmp_path: Path) -> None:
    """Where q, k and v have different ones, or gate and up, nothing can be in the order of all: they become F16."""
    packer = gptq(4, 32, True, shuffled="apart")
    for name, (tensor, exact) in taken(folder(tmp_path / "model", packer, gptq_settings(4, 32, desc_act=True))).items():
        assert tensor.type == ("Q4_0" if name.endswith((".down", ".o")) else "F16"), name
        assert np.abs(tensor.float32() - exact).max() <= np.abs(exact).max() * ROUNDED_F16
    notes = " ".join(open_checkpoint(tmp_path / "model").notes)
    assert "10 GPTQ matrices are computed in F16" in notes and "4 GPTQ matrices are computed in Q4_0" in notes


def test_scales_beyond_f16_are_refused(tmp_path: Path) -> None:
    scales = tensor("F32", np.full((96, 2), 1e6, np.float32))
    change: Callable[[Stored], None] = lambda stored: stored.update({f"{UP}weight_scale": scales})  # noqa: E731
    refused(folder(tmp_path / "model", packed(4, 32), PACK, change), "scales that are too large for F16")


# --- FP4 -------------------------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def neighbours(codes: np.ndarray) -> np.ndarray:
    """Two codes to a byte, the first in the low bits."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(method: str) -> Packer:
    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        codes = rng.integers(0, 16, (rows, cols))
        scales = rng.integers(0, 127, (rows, cols // 16), np.uint8)
        factor = np.array([rng.uniform(1e-4, 1e-3)], np.float32)
        values = E2M1[codes] * np.repeat(E4M3[scales], 16, axis=1)
        ends = {"weight_scale": tensor("F8_E4M3", scales)}
        if method == "modelopt":
            ends |= {"weight": tensor("U8", neighbours(codes)), "weight_scale_2": tensor("F32", factor.reshape(()))}
            return ends, values * factor.astype(np.float64)
        ends |= {"weight_packed": tensor("U8", neighbours(codes)), "weight_global_scale": tensor("F32", 1 / factor)}
        return ends, values / (1 / factor).astype(np.float64)

    return pack


def mxfp4(kind: str) -> Packer:
    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        codes = rng.integers(0, 16, (rows, cols))
        scales = rng.integers(110, 130, (rows, cols // 32), np.uint8)
        values = E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
        return {"weight_packed": tensor("U8", neighbours(codes)), "weight_scale": tensor(kind, scales)}, values

    return pack


NVFP4: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MXFP4: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("packer", "settings"), [(nvfp4("compressed-tensors"), NVFP4), (nvfp4("modelopt"), MODELOPT)]
)
def test_nvfp4_exactly(packer: Packer, settings: dict[str, Any], tmp_path: Path) -> None:
    """But for the global scale, which is a number of float32. Rows of 96 are not whole blocks of 64."""
    path = folder(tmp_path / "model", packer, settings)
    checkpoint = open_checkpoint(path)
    for name, exact in np.load(path / "expected.npz").items():
        matrix = checkpoint.take(name)
        down = name.endswith("down")
        assert matrix.type == ("F16" if down else "NVFP4")
        assert np.abs(matrix.float32() - exact).max() <= np.abs(exact).max() * (ROUNDED_F16 if down else 2**-22)


def test_settings_of_older_modelopt(tmp_path: Path) -> None:
    """They are in a file of their own."""
    path = folder(tmp_path / "model", nvfp4("modelopt"), MODELOPT)
    metadata = json.loads((path / "config.json").read_text())
    del metadata["quantization_config"]
    (path / "config.json").write_text(json.dumps(metadata))
    for algorithm in ("NVFP4", "W4A16_NVFP4"):
        stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "exclude_modules": []}}
        (path / "hf_quant_config.json").write_text(json.dumps(stated))
        checkpoint = open_checkpoint(path)
        assert checkpoint.take("layers.0.up").type == "NVFP4"
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    refused(path, "quant_algo 'NVFP4_AWQ', which is not read")
    (path / "hf_quant_config.json").write_text("[]")
    refused(path, "hf_quant_config.json")


def test_a_weight_beside_its_codes_is_refused(tmp_path: Path) -> None:
    floats = tensor("F32", np.zeros((96, 64), np.float32))
    change: Callable[[Stored], None] = lambda stored: stored.update({f"{UP}weight": floats})  # noqa: E731
    refused(folder(tmp_path / "model", packed(4, 32), PACK, change), "has a weight beside its codes")


@pytest.mark.parametrize("kind", ["U8", "F8_E8M0"])
def test_mxfp4_exactly(kind: str, tmp_path: Path) -> None:
    assert errors(folder(tmp_path / "model", mxfp4(kind), MXFP4), "MXFP4") == (0, 0)


@pytest.mark.parametrize(
    ("packer", "settings", "change", "why"),
    [
        (nvfp4("x"), NVFP4, lambda stored: stored.pop(f"{UP}weight_global_scale"), "no weight_global_scale"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_global_scale", "F32", filled(0)), "no positive number"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_global_scale", "F32", filled(np.nan)), "no positive number"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_global_scale", "F32", filled(1e-45)), "no positive number"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_scale", "F8_E4M3", filled(0x7F)), "negative or not numbers"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_scale", "F8_E4M3", filled(0x88)), "negative or not numbers"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_scale", "F8_E4M3", lambda s: s[:, :-1]), "96 x 64 weights in groups"),
        (nvfp4("x"), NVFP4, changed(f"{UP}weight_packed", "U8", lambda codes: codes[:, :-1]), "96 x 62 weights"),
        (nvfp4("modelopt"), MODELOPT, lambda stored: stored.pop(f"{UP}weight_scale"), "no weight_scale"),
        (nvfp4("modelopt"), MODELOPT, changed(f"{UP}weight_scale_2", "F32", filled(-1)), "no positive number"),
        (mxfp4("U8"), MXFP4, changed(f"{UP}weight_scale", "U8", filled(255)), "not numbers"),
        (mxfp4("U8"), MXFP4, changed(f"{UP}weight_scale", "U8", lambda scales: scales[:-1]), "do not go with"),
    ],
)
def test_fp4_that_is_refused(
    packer: Packer, settings: dict[str, Any], change: Callable[[Stored], None], why: str, tmp_path: Path
) -> None:
    refused(folder(tmp_path / "model", packer, settings, change), why)


# --- NF4 -------------------------------------------------------------------------------------------------------------

STATE = "weight.quant_state.bitsandbytes__nf4"


def nf4(nested: bool, block: int = 64, kind: str = "nf4", **changes: Any) -> Packer:
    """changes: of the state."""

    def pack(rng: np.random.Generator, rows: int, cols: int) -> Packed:
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        codes = rng.integers(0, 16, rows * cols)
        padded = np.append(codes, 0)[: len(codes) + len(codes) % 2]
        blocks = -(-len(codes) // block)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, cols]}
        ends = {
            "weight": tensor("U8", (padded[::2] << 4 | padded[1::2]).astype(np.uint8)[:, None]),
            "weight.quant_map": tensor("F32", table),
        }
        scales = rng.uniform(1e-2, 1, blocks).astype(np.float32)
        exact = scales.astype(np.float64)
        if nested:
            indices = rng.integers(0, 256, blocks, np.uint8)
            of_scales = rng.uniform(-1, 1, 256).astype(np.float32)
            factors = rng.uniform(0.01, 0.2, -(-blocks // 8)).astype(np.float32)
            state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.3}
            exact = of_scales[indices].astype(np.float64) * factors[np.arange(blocks) // 8] + 0.3
            ends |= {"weight.absmax": tensor("U8", indices), "weight.nested_absmax": tensor("F32", factors)}
            ends |= {"weight.nested_quant_map": tensor("F32", of_scales)}
        else:
            ends |= {"weight.absmax": tensor("F32", scales)}
        raw = json.dumps(state | changes).encode()
        ends[STATE.replace("nf4", kind)] = tensor("U8", np.frombuffer(raw, np.uint8))
        values = table.astype(np.float64)[codes] * exact[np.arange(len(codes)) // block]
        return ends, values.reshape(rows, cols)

    return pack


BITS: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


FP4 = BITS | {"bnb_4bit_quant_type": "fp4"}


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (nf4(nested=True), BITS),
        (nf4(nested=False), BITS),
        (nf4(nested=True, block=100), BITS),
        (nf4(nested=True, kind="fp4"), FP4),
    ],
)
def test_nf4_is_rounded_to_f16(
    packer: Packer, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powerinfer.formats.tensors._PIECE", 64 * 13)
    largest, mean = errors(folder(tmp_path / "model", packer, settings), "F16")
    assert largest <= ROUNDED_F16 and mean <= 2.3e-4


LLM_INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def llm_int8(rng: np.random.Generator, rows: int, cols: int) -> Packed:
    codes = rng.integers(-127, 128, (rows, cols)).astype(np.int8)
    largest = rng.uniform(0.05, 2, rows).astype(np.float32)
    ends = {"weight": tensor("I8", codes), "SCB": tensor("F32", largest)}
    ends["weight_format"] = tensor("U8", np.zeros((), np.uint8))
    return ends, codes * (largest.astype(np.float64) / 127)[:, None]


def test_llm_int8_keeps_its_codes(tmp_path: Path) -> None:
    """Scales are rounded to F16."""
    path = folder(tmp_path / "model", llm_int8, LLM_INT8)
    largest, mean = errors(path, "Q8_0")
    assert 1e-5 < largest <= ROUNDED_F16 and mean <= 3e-4
    up = open_checkpoint(path).take("layers.0.up").rows().reshape(-1, 34)
    stored, _, _ = read_safetensors(path / "model.safetensors")
    assert np.array_equal(up[:, 2:].reshape(-1), stored[f"{UP}weight"].data)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: stored.pop(f"{UP}SCB"), "up_proj' has no SCB"),
        (changed(f"{UP}SCB", "F32", lambda scales: scales[1:]), r"SCB of shape \[95\], not \[96\]"),
        (changed(f"{UP}SCB", "F32", filled(np.inf)), "scales that are infinite or not numbers"),
        (changed(f"{UP}SCB", "F32", filled(1e30)), "too large for F16"),
        (changed(f"{UP}weight_format", "U8", lambda kind: kind + 1), "weight_format other than 0"),
        (changed(f"{UP}weight", "I8", lambda codes: codes[:-1]), "SCB of shape"),
        (changed(f"{UP}weight", "U8", lambda codes: codes), "SCB|U8|does not have"),
    ],
)
def test_llm_int8_that_is_refused(change: Callable[[Stored], None], why: str, tmp_path: Path) -> None:
    refused(folder(tmp_path / "model", llm_int8, LLM_INT8, change), why)


@pytest.mark.parametrize(
    ("packer", "settings", "change", "why"),
    [
        (nf4(True), {"bnb_4bit_quant_type": "int4"}, None, "but neither nf4"),
        (nf4(True), {"bnb_4bit_quant_type": "fp4"}, None, "has no weight.quant_state.bitsandbytes__fp4"),
        (nf4(True), {"load_in_4bit": False}, None, "but neither nf4"),
        (nf4(True), {"load_in_4bit": False, "load_in_8bit": True}, None, r"weight has shape \[2048, 1\]"),
        (nf4(True), {"bnb_4bit_quant_storage": "bfloat16"}, None, "bnb_4bit_quant_storage 'bfloat16'"),
        (nf4(True), {}, lambda stored: stored.pop(f"{UP}weight.absmax"), "has no weight.absmax"),
        (nf4(True), {}, lambda stored: stored.pop(f"{UP}{STATE}"), "has no weight.quant_state"),
        (nf4(True), {}, lambda stored: stored.pop(f"{UP}weight.nested_absmax"), "has no weight.nested_absmax"),
        (nf4(True), {}, changed(f"{UP}{STATE}", "U8", lambda state: state[:-1]), "JSON|json"),
        (nf4(True), {}, changed(f"{UP}{STATE}", "U8", lambda state: np.resize(state, 5000)), "no JSON object"),
        (nf4(True, shape=[64, -64]), {}, None, "shape .* in its quant_state"),
        (nf4(True, shape=[1 << 40, 1]), {}, None, "shape .* in its quant_state"),
        (nf4(True, blocksize=0), {}, None, "blocksize '0'"),
        (nf4(True, blocksize=32), {}, None, "64 numbers of absmax, not 128"),
        (nf4(True, nested_offset="0"), {}, None, "nested_offset '0'"),
        (nf4(True, nested_offset=1e300), {}, None, "nested_offset"),
        (nf4(True), {}, changed(f"{UP}weight", "U8", lambda codes: codes[:-1]), "bytes of codes, which do not go with"),
        (nf4(False), {}, changed(f"{UP}weight.absmax", "F32", filled(np.nan)), "scales that are infinite"),
        (nf4(True), {}, changed(f"{UP}weight.nested_absmax", "F32", filled(np.inf)), "scales that are infinite"),
        (nf4(False), {}, changed(f"{UP}weight.quant_map", "F32", lambda table: table[:15]), "15 numbers of quant_map"),
    ],
)
def test_nf4_that_is_refused(
    packer: Packer, settings: dict[str, Any], change: Callable[[Stored], None] | None, why: str, tmp_path: Path
) -> None:
    refused(folder(tmp_path / "model", packer, BITS | settings, change), why)


# --- whole models ----------------------------------------------------------------------------------------------------


def write(path: Path, config: dict[str, Any], stored: Stored) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    return path


def logits(path: Path) -> np.ndarray:
    executor = load(open_checkpoint(path), EngineConfig(threads=1, context=64, kv_type="f32"))
    try:
        span = np.arange(7, dtype=np.int32)
        batch = Batch(
            tokens=np.array([3, 1, 4, 1, 5, 9, 2], np.int32), positions=span, rows=np.zeros(7, np.int32),
            page_table=np.zeros((1, 1), np.int32), logit_rows=span, read_states=np.zeros(1, np.int32),
            states=np.zeros(1, np.int32),
        )  # fmt: skip
        return executor.forward(batch).copy()
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (fp8("block", "F32", "weight_scale_inv"), BLOCKS),
        (gptq(4, 32, True), gptq_settings(4, 32)),
        (gptq(4, 32, False, shuffled="apart"), gptq_settings(4, 32, sym=False, desc_act=True)),
        (gptq(4, 32, False, shuffled="alike"), gptq_settings(4, 32, sym=False, desc_act=True)),
        (awq(32), AWQ),
        (packed(8, None), PACK),
        (nvfp4("modelopt"), MODELOPT),
        (nf4(nested=True), BITS),
    ],
)
def test_models_compute_what_their_weights_say(packer: Packer, settings: dict[str, Any], tmp_path: Path) -> None:
    """The same model with the values in F32, but for activations of 8 bits; any other order gives other logits."""
    path = folder(tmp_path / "model", packer, settings)
    values = weights("llama") | {n: v.astype(np.float32) for n, v in np.load(path / "expected.npz").items()}
    exact = logits(write(tmp_path / "exact", tiny_config(), as_stored(values)))
    difference = logits(path) - exact
    assert np.sqrt(np.square(difference).mean()) < 0.1 * np.sqrt(np.square(exact).mean())


@pytest.mark.parametrize(
    ("packer", "settings"),
    [(fp8("channel", "F32", "weight_scale"), CHANNELS), (awq(32), AWQ), (nvfp4("modelopt"), MODELOPT)],
)
def test_matrices_in_one_tensor_are_cut(packer: Packer, settings: dict[str, Any], tmp_path: Path) -> None:
    """q, k and v of Phi-3, and gate and up, which are quantised together."""
    rng = np.random.default_rng(2)
    config = tiny_config() | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    config |= {"original_max_position_embeddings": 128, "quantization_config": settings}
    values = weights("llama")
    stored = as_stored({name: array for name, array in values.items() if name.rpartition(".")[2] not in PARTS})
    expected = {}
    for layer in range(2):
        prefix = f"layers.{layer}."
        together = {"self_attn.qkv_proj": "qkv", "self_attn.o_proj": "o", "mlp.gate_up_proj": ("gate", "up")}
        for module, parts in (together | {"mlp.down_proj": ("down",)}).items():
            rows = [len(values[f"{prefix}{part}"]) for part in parts]
            ends, exact = packer(rng, sum(rows), values[f"{prefix}{parts[0]}"].shape[1])
            stored |= {f"model.{prefix}{module}.{end}": one for end, one in ends.items()}
            cut = np.split(exact, np.cumsum(rows)[:-1])
            expected |= {f"{prefix}{part}": piece for part, piece in zip(parts, cut, strict=True)}
    checkpoint = open_checkpoint(write(tmp_path / "model", config, stored))
    for name, exact in expected.items():
        assert np.abs(checkpoint.take(name).float32() - exact).max() <= np.abs(exact).max() * ROUNDED_F16, name


@pytest.mark.parametrize(
    ("packer", "settings", "type_name"),
    [
        (fp8("tensor", "F32", "weight_scale"), CHANNELS, "F16"),
        (gptq(4, 32, True), gptq_settings(4, 32), "Q4_0"),
        (nvfp4("compressed-tensors"), NVFP4, "NVFP4"),  # each expert has a global scale of its own
    ],
)
def test_experts(packer: Packer, settings: dict[str, Any], type_name: str, tmp_path: Path) -> None:
    """Experts of Qwen3, of which each is quantised by itself: all of a layer, and some."""
    rng = np.random.default_rng(3)
    experts, width = 5, 64
    config = tiny_config("qwen3", tied=False) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    values = weights("qwen3", tied=False)
    stored = as_stored({name: array for name, array in values.items() if name.rpartition(".")[2] not in PARTS[4:]})
    expected: dict[str, np.ndarray] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        stored[f"{prefix}gate.weight"] = tensor("F32", rng.standard_normal((experts, 64)).astype(np.float32))
        for part in PARTS[4:]:
            exact = np.empty((experts, width, 64))
            for expert in range(experts):
                ends, exact[expert] = packer(rng, width, 64)
                stored |= {f"{prefix}experts.{expert}.{part}_proj.{end}": one for end, one in ends.items()}
            expected[f"layers.{layer}.experts_{part}"] = exact
    checkpoint = open_checkpoint(write(tmp_path / "model", config | {"quantization_config": settings}, stored))
    for name, exact in expected.items():
        taken = checkpoint.take(name)
        some = checkpoint.take_some(name, np.array([4, 1]))
        assert taken.type == some.type == type_name
        bound = np.abs(exact).max() * (ROUNDED_F16 if type_name == "F16" else 2**-22)
        assert np.abs(taken.float32() - exact).max() <= bound
        assert np.array_equal(some.float32(), taken.float32()[[4, 1]])
        assert checkpoint.resting(name) is None, "it is not in the file as it is computed"
    logits(checkpoint.path)


@pytest.mark.parametrize(
    ("packer", "settings", "kind", "most"),
    [
        (nvfp4("modelopt"), MODELOPT, "nvfp4", 0.0),  # with the factors that it has
        (gptq(4, 32, True, shuffled="alike"), gptq_settings(4, 32, desc_act=True), "f16", ROUNDED_F16),
    ],
)
def test_files_of_them(packer: Packer, settings: dict[str, Any], kind: str, most: float, tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).standard_normal((1000, 64)).astype(np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    change: Callable[[Stored], None] = lambda stored: stored.update({name: tensor("F32", tokens) for name in names})  # noqa: E731
    path, made = folder(tmp_path / "model", packer, settings, change), tmp_path / "made.gguf"
    metadata = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(metadata | {"vocab_size": len(tokens)}))
    write_tokenizer_files(path, len(tokens))
    assert main(["quantize", str(path), kind, "-o", str(made)]) == 0
    before, after = open_checkpoint(path), open_checkpoint(made)
    for name in ("layers.0.o", "layers.1.up"):
        values, written = before.take(name).float32(), after.take(name).float32()
        assert np.abs(values - written).max() <= most * np.abs(values).max(), name
