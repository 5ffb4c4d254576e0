"""`powerinfer quantize`: the error of each type, and the files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import gguf_name, plain_folder, tiny_folder, tiny_gguf, weights

from benchmarks.models.gguf_writer import Builder
from benchmarks.models.vocabulary import write_tokenizer_files
from powerinfer.cli.main import main
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats import quantised_file
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.gguf import read_gguf
from powerinfer.formats.gguf_model import NAMES
from powerinfer.formats.importance import Importance, read_importance, write_importance
from powerinfer.formats.mixes import MIXES, ModelMatrices, fitting, target_types, wanted_types
from powerinfer.formats.quant import block_type, dequantize
from powerinfer.formats.quant import quantize as quantise_plainly
from powerinfer.formats.quantised_file import file_size, gguf_original, write_quantised
from powerinfer.formats.scale_search import SEARCHED, WRITTEN, searched
from powerinfer.formats.sized_types import main_number, sized_types
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.prepare.corpus import Windows
from powerinfer.progress import silent
from powerinfer.runtime.engine import LLM
from powerinfer.sizes import read_size
from powerinfer.text.bpe import score_merges
from powerinfer.text.model_text import tokenizer_of
from powerinfer_train.sensitivity import _Noisy, measure_sensitivity
from powerinfer_train.torch_model import TorchModel, load

# Of types whose scales are numbers of parts of a block, too: elements of a part, the numbers of codes from lowest to
# highest (with a minimum: from 0), the largest of the parts' whole numbers.
PARTS = {
    "Q2_K": (16, 0, 3, 15), "Q4_K": (32, 0, 15, 63), "Q5_K": (32, 0, 31, 63),
    "Q3_K": (16, -4, 3, 32), "Q6_K": (16, -32, 31, 128), "IQ4_XS": (32, -127, 113, 32),
}  # fmt: skip
PLAIN = {
    "Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-127, 127),
    "IQ4_NL": (-127, 113), "Q4_1": (0, 15), "Q5_1": (0, 31),
}  # fmt: skip


def nearest(scaled: np.ndarray, type_name: str, low: int, high: int) -> np.ndarray:
    if type_name.startswith("IQ4"):
        entries = np.array(WEIGHT_TYPES["IQ4_NL"].entries, np.float64)
        return entries[np.abs(scaled[..., None] - entries).argmin(axis=-1)]
    return np.clip(np.rint(scaled), low, high)


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


def rounded(x: np.ndarray, type_name: str) -> np.ndarray:
    """The values of plain rounding to nearest, with scales that the extremes of a block, or of its parts, give."""
    size, low, high, largest = PARTS.get(type_name, (32, *PLAIN.get(type_name, (0, 0)), 0))
    parts = x.astype(np.float64).reshape(-1, (256 if largest else size) // size, size)
    half = lambda numbers: numbers.astype(np.float16).astype(np.float64)  # noqa: E731
    if low:
        peak = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], axis=-1)
        scale, floor = peak / low, np.zeros_like(peak)
    else:
        floor = np.minimum(parts.min(axis=-1, keepdims=True), 0 if largest else np.inf)
        scale = (parts.max(axis=-1, keepdims=True) - floor) / high
    if largest:  # the parts' own, as whole multiples of the block's
        of_block = half(np.abs(scale).max(axis=1, keepdims=True) / largest)
        scale = np.clip(np.rint(ratio(scale, of_block)), -largest, largest - (low < 0)) * of_block
        of_block = half(-floor.min(axis=1, keepdims=True) / largest)
        floor = -np.rint(ratio(-floor, of_block)) * of_block
    scale, floor = (scale, floor) if largest else (half(scale), half(floor))
    return (nearest(ratio(parts - floor, scale), type_name, low, high) * scale + floor).reshape(x.shape)


def matrix(seed: int, cols: int = 768) -> np.ndarray:
    """Rows with outliers, of different size and mean, and one of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(4, (24, cols)) * 10.0 ** rng.integers(-3, 2, (24, 1)) + rng.normal(0, 1, (24, 1)) * 0.01
    x[3], x[4, 256:512], x[5] = 0, 0, 0.25
    return x.astype(np.float32)


def errors(x: np.ndarray, values: np.ndarray, weights_of: np.ndarray | float = 1.0) -> np.ndarray:
    """By row."""
    return (weights_of * (x.astype(np.float64) - values) ** 2).sum(axis=1)


@pytest.mark.parametrize("type_name", [*PARTS, *PLAIN])
def test_the_error_is_less_than_that_of_plain_rounding(type_name: str) -> None:
    x = matrix(1)
    data = searched(x, type_name)
    assert data.shape == (len(x), block_type(type_name).row_bytes(x.shape[1]))
    error, plain = errors(x, dequantize(data, type_name)), errors(x, rounded(x, type_name))
    assert (error <= plain * 1.001 + 1e-12).all(), (error - plain, plain)
    assert error.sum() < 0.97 * plain.sum()
    assert not dequantize(data, type_name)[3].any(), "zeros stay"


@pytest.mark.parametrize("type_name", SEARCHED)
def test_importance_moves_the_error_away_from_columns_that_matter(type_name: str) -> None:
    x = np.random.default_rng(2).standard_normal((32, 512)).astype(np.float32)
    importance = np.where(np.arange(512) % 4 == 0, 100, 1).astype(np.float32)
    of_rows = np.broadcast_to(importance, x.shape)
    even, weighted = (dequantize(searched(x, type_name, one), type_name) for one in (None, of_rows))
    assert errors(x, weighted, importance).sum() < errors(x, even, importance).sum()
    assert errors(x, even).sum() < errors(x, weighted).sum()


def test_importance_is_relative() -> None:
    """Numbers of an imatrix however large or small give the same blocks; where all of a block are 0, those of none."""
    x = np.random.default_rng(5).standard_normal((2, 256)).astype(np.float32)
    importance = np.random.default_rng(6).uniform(0.01, 1, x.shape).astype(np.float32)
    for type_name in SEARCHED:
        expected = searched(x, type_name, importance)
        assert dequantize(expected, type_name).any(axis=1).all()
        for power in (127, 60, -60, -110):
            assert np.array_equal(searched(x, type_name, np.ldexp(importance, power)), expected), (type_name, power)
        nothing = searched(x, type_name, np.zeros_like(x))
        assert np.array_equal(nothing, searched(x, type_name, np.ones_like(x))), type_name


# Root mean square errors of standard normal numbers that llama.cpp's types have, about: without importance.
OF_NORMAL = {
    "TQ1_0": 0.44, "TQ2_0": 0.44, "MXFP4": 0.115, "NVFP4": 0.088, "IQ3_S": 0.135, "IQ3_XXS": 0.185, "IQ2_S": 0.245,
    "IQ2_XS": 0.295, "IQ2_XXS": 0.335, "IQ1_S": 0.45, "IQ1_M": 0.42, "Q2_0": 0.36, "Q1_0": 0.605,
}  # fmt: skip


@pytest.mark.parametrize("type_name", OF_NORMAL)
def test_the_error_of_normal_numbers(type_name: str) -> None:
    x = np.random.default_rng(3).standard_normal((8, 1024)).astype(np.float32)
    x[3, 256:512] = 0
    values = dequantize(searched(x, type_name), type_name)
    assert errors(x, values).sum() / x.size < OF_NORMAL[type_name] ** 2
    assert not values[3, 256:512].any(), "zeros stay"
    assert set(OF_NORMAL) | set(PARTS) | set(PLAIN) == set(SEARCHED)


@pytest.mark.parametrize("type_name", [name for name in OF_NORMAL if name[:2] in ("TQ", "IQ", "Q1", "Q2")])
def test_values_that_a_type_has_are_found(type_name: str) -> None:
    """Blocks of random bytes whose scales are alike, and largest."""
    kind, rng = block_type(type_name), np.random.default_rng(4)
    blocks = rng.integers(0, 256, (32, kind.nbytes), dtype=np.uint8)
    if type_name == "TQ1_0":  # of the bytes only some stand for 5 digits
        blocks[:, :52] = (rng.integers(0, 81, (32, 52)) * 3 * 256 + 242) // 243
    if type_name != "IQ1_M":
        at = kind.nbytes - 2 if type_name[0] == "T" else 0
        blocks[:, at : at + 2] = np.array([0.02], "<f2").view(np.uint8)
    scales = {"IQ3_S": (106, 110), "IQ2_S": (74, 82), "IQ2_XS": (66, 74)}.get(type_name, (0, 0))
    blocks[:, slice(*scales)] = 0xEE
    if type_name == "IQ1_S":
        blocks[:, 35:50:2] |= 0x70
    if type_name == "IQ1_M":  # scales of parts, and 2 ** -6 in the high bits of four words
        blocks[:, 48:56] = np.array([0x0FFF, 0x0FFF, 0x4FFF, 0x2FFF], "<u2").view(np.uint8)
    if type_name.endswith("XXS"):
        blocks[:, 69 if type_name == "IQ3_XXS" else 9 :: 4 if type_name == "IQ3_XXS" else 8] |= 0xF0
    if type_name == "TQ2_0":
        blocks[:, :64] &= 0xAA
    x = dequantize(blocks, type_name)
    apart = errors(x, dequantize(searched(x, type_name), type_name)) / (x.astype(np.float64) ** 2).sum(axis=1)
    assert np.median(apart) < 1e-5 and apart.mean() < 2e-3, apart


def test_values_that_a_type_cannot_hold() -> None:
    x = np.ones((2, 256), np.float32)
    for type_name in ("F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K", "NVFP4", "IQ3_S", "TQ1_0"):
        for value in (np.nan, np.inf, 3e38):
            x[1, 7] = value
            with pytest.raises(ModelError, match="a weight is"):
                searched(x, type_name)


def write(path: Path) -> Path:
    path.write_bytes(tiny_gguf().encode())
    return path


def quantize(*args: str | Path) -> int:
    return main(["quantize", *map(str, args)])


@pytest.mark.parametrize("type_name", ["F16", "q8_0", "Q4_0", "q5_k_m", "IQ4_XS"])
def test_the_file_runs(type_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    assert quantize(source, type_name, "-o", made, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == made.stat().st_size < document["source_bytes"] == source.stat().st_size
    before, after = read_gguf(source), read_gguf(made)
    stated = {"general.file_type": MIXES[type_name.upper()].number, "general.quantization_version": 2}
    assert after.metadata == before.metadata | stated
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in after.tensors.items():
        values = before.tensors[name].float32()
        assert tensor.shape == values.shape
        assert ("norm" in name) == (tensor.type == "F32"), name
        assert np.abs(tensor.float32() - values).max() <= (0 if "norm" in name else 0.5)
    texts = []
    for path in (source, made):
        with LLM(path, threads=1) as llm:
            texts.append(llm.generate("abc", llm.default_params(temperature=0.0, max_tokens=4)))
    assert all(len(text.token_ids) == 4 for text in texts)


def types_of(mix: str, names: dict[str, tuple[int, ...]], weighed: bool = False, **about: Any) -> dict[str, str]:
    matrices = ModelMatrices({f"{name}.weight": ("F32", shape) for name, shape in names.items()}, layers=8, **about)
    types = target_types(matrices, wanted_types(matrices, MIXES[mix], weighed))
    return {name.removesuffix(".weight"): kind for name, kind in types.items()}


def test_types_of_tensors_are_those_of_llama_cpp() -> None:
    shapes = {"token_embd": (8, 512), "blk.0.ffn_gate_inp": (4, 512), "blk.0.ffn_down_exps": (4, 8, 96)}
    shapes |= {f"blk.{layer}.{name}": (8, 512) for layer in range(8) for name in ("attn_v", "attn_q", "ffn_down")}
    shapes |= {"blk.0.attn_output": (8, 30), "blk.0.attn_norm": (512,)}
    types = types_of("Q4_K_M", shapes)
    assert [types[f"blk.{layer}.attn_v"] for layer in range(8)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    assert types["blk.3.ffn_down"] == "Q6_K" and types["blk.3.attn_q"] == "Q4_K"
    assert types["token_embd"] == "Q6_K", "it is the head, too"
    assert types["blk.0.ffn_gate_inp"] == types["blk.0.attn_norm"] == "F32"
    assert types["blk.0.ffn_down_exps"] == "Q8_0" and types["blk.0.attn_output"] == "F16"
    types = types_of("Q2_K", shapes | {"output": (8, 512)})
    assert (types["output"], types["token_embd"]) == ("Q6_K", "Q2_K")
    assert types["blk.0.ffn_down_exps"] == "Q4_0"


# What llama-quantize gives a model of 8 layers: values, down, attention's result, keys, each layer's where they differ.
OF_LLAMA_CPP = (
    ("Q2_K", {}, False, "Q3_K", "Q3_K", "Q3_K", "Q2_K"),
    ("Q2_K", {"grouped": True}, False, "Q4_K", "Q3_K", "Q3_K", "Q2_K"),
    ("Q3_K_M", {}, False, "Q5_K Q5_K" + 6 * " Q4_K", "Q4_K", "Q4_K", "Q3_K"),
    ("Q3_K_L", {}, False, "Q5_K", "Q5_K", "Q5_K", "Q3_K"),
    ("Q4_K_S", {}, False, 4 * "Q5_K " + "Q4_K Q4_K Q4_K Q4_K", "Q5_K" + 7 * " Q4_K", "Q4_K", "Q4_K"),
    ("IQ4_XS", {}, False, "IQ4_XS", "Q5_K" + 7 * " IQ4_XS", "IQ4_XS", "IQ4_XS"),
    ("IQ4_XS", {"grouped": True}, True, "Q5_K", "IQ4_XS", "IQ4_XS", "IQ4_XS"),
    ("Q4_0", {}, True, "Q4_0", "Q4_1" + 7 * " Q4_0", "Q4_0", "Q4_0"),
    ("Q3_K_S", {"experts": 8}, False, "Q8_0", "Q3_K", "Q5_K", "Q8_0"),
    ("Q3_K_S", {"large": True}, False, "Q5_K", "Q3_K", "Q3_K", "Q3_K"),
    ("IQ1_M", {"grouped": True}, True, "Q4_K", "Q2_K" + 7 * " IQ1_M", "IQ2_XXS", "IQ1_M"),
    ("IQ1_S", {}, True, "Q2_K", "Q2_K" + 7 * " IQ1_S", "IQ2_XXS", "IQ1_S"),
    ("Q2_0", {"grouped": True}, False, "Q2_0", "Q2_0", "Q2_0", "Q2_0"),
    ("Q1_0", {"experts": 8}, True, "Q8_0", "Q1_0", "Q1_0", "Q8_0"),
)


@pytest.mark.parametrize(("mix", "about", "weighed", "value", "down", "out", "key"), OF_LLAMA_CPP)
def test_mixes(mix: str, about: dict[str, Any], weighed: bool, value: str, down: str, out: str, key: str) -> None:
    kinds = {"attn_v": value, "ffn_down": down, "attn_output": out, "attn_k": key}
    names = {f"blk.{layer}.{kind}": (8, 512) for layer in range(8) for kind in kinds}
    types = types_of(mix, names | {"output": (8, 512)}, weighed, **about)
    for kind, expected in kinds.items():
        of_layers = expected.split() if " " in expected else 8 * [expected]
        assert [types[f"blk.{layer}.{kind}"] for layer in range(8)] == of_layers, kind


def test_every_type_of_a_mix_can_be_written() -> None:
    for name, mix in MIXES.items():
        kinds = {mix.type, mix.head, mix.embedding, mix.experts, *(kind for _, kind, _ in mix.rules)} - {None}
        kinds |= set((mix.eight or {}).values())
        kinds |= {fitting(str(kind), cols) for kind in kinds for cols in (32, 30)}
        assert kinds <= set(WRITTEN), name


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    made.write_bytes(b"x")
    for args, says in (
        ((source, "q4_k_x", "-o", made), "no type Q4_K_X; did you mean Q4_K"),
        ((source, "X", "-o", tmp_path / "c.gguf"), "there are F16, BF16, Q8_0"),
        ((source,), "give either TYPE"),
        ((source, "--size", "8GiB"), "--size needs a name for the file: -o FILE"),
        ((source, "Q8_0", "-o", made), "is there already; --force replaces it"),
        ((source, "Q8_0", "-o", source, "--force"), "is the model itself"),
        ((source, "Q8_0", "-o", tmp_path), "is a folder: --out"),
        ((source, "Q3_K_X", "-o", made), "did you mean Q3_K"),
        ((source, "Q8_0", "-o", made, "--force", "--tensor-type", "x"), "give NAMES=TYPE"),
        ((source, "Q8_0", "-o", made, "--force", "--tensor-type", "(=q4_0"), "no regular expression"),
        ((source, "Q8_0", "-o", made, "--force", "--tensor-type", "attn=q4"), "no type q4; did you mean Q4_"),
        ((source, "Q8_0", "-o", made, "--force", "--tensor-type", r"exps\.3=q4_0"), "has the experts of a layer in"),
        ((source, "Q8_0", "-o", tmp_path / "no" / "c.gguf"), "cannot write"),
        ((source, "Q8_0", "-o", tmp_path / "c.gguf", "--threads", "-1"), "threads must be between 0"),
        ((made, "Q8_0", "-o", tmp_path / "c.gguf"), "not a GGUF file"),
    ):
        assert quantize(*args) in (1, 2), args
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1, err
    assert made.read_bytes() == b"x"
    assert quantize(source, "Q8_0", "-o", made, "--force") == 0
    assert quantize(made, "Q8_0", "-o", tmp_path / "c.gguf") == 2 and "is that already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("a.gguf", "a-Q8_0.gguf"),
        ("Some-Model.F16.gguf", "Some-Model-Q8_0.gguf"),
        ("m-7b-BF16-00001-of-00001.gguf", "m-7b-Q8_0.gguf"),
        ("m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"),
    ],
)
def test_the_usual_name_of_a_file(name: str, made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As llama-quantize has one; a file of that name is never replaced."""
    source, target = write(tmp_path / name), tmp_path / made
    assert quantize(source, "q8_0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(target) and read_gguf(target).tensors
    before = target.read_bytes()
    for more in ((), ("--force",)):
        assert quantize(source, "q8_0", *more) == 2
        assert f"{target} is there already: give another name with -o FILE" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert quantize(target, "q8_0") == 2 and "is there already" in capsys.readouterr().err


def test_the_usual_name_of_a_folders_file_and_of_one_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models" / "m").mkdir(parents=True)
    assert quantize(write(tmp_path / "cache" / "models" / "m" / "b-f16.gguf"), "q8_0") == 0
    assert [path.name for path in here.iterdir()] == ["b-Q8_0.gguf"]
    monkeypatch.setattr("model_files.VOCAB", 1200)
    folder = tiny_folder(tmp_path / "some-model", dtype="BF16")
    write_tokenizer_files(folder, 1200)
    assert quantize(folder, "q8_0") == 0 and (tmp_path / "some-model-Q8_0.gguf").exists()
    capsys.readouterr()


def test_ternary_types_of_a_model_that_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(8)
    for name, values in (
        ("normal", rng.standard_normal((8, 256))),
        ("ternary", 0.5 * rng.integers(-1, 2, (8, 256))),
    ):
        builder = tiny_gguf()
        builder.tensor("blk.0.ffn_wide.weight", values.astype(np.float32))
        (tmp_path / f"{name}.gguf").write_bytes(builder.encode())
        assert quantize(tmp_path / f"{name}.gguf", "TQ2_0", "-o", tmp_path / f"{name}-tq2_0.gguf") == 0
        said = "matrices of two to four values lose 19% of their weights' squares" in capsys.readouterr().err
        assert said == (name == "normal")


@pytest.mark.parametrize("flags", [("IQ1_S",), ("Q8_0", "--tensor-type", "wide=iq1_m")])
def test_types_that_need_importance(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made, imatrix = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "imatrix.gguf"
    builder, name = tiny_gguf(), "blk.0.ffn_wide.weight"
    builder.tensor(name, np.random.default_rng(9).standard_normal((8, 256)).astype(np.float32))
    source.write_bytes(builder.encode())
    kind = flags[-1].rpartition("=")[2].upper()
    assert quantize(source, *flags, "-o", made) == 2 and not made.exists()
    err = capsys.readouterr().err
    assert f"{kind} needs the importance of weights: give --imatrix FILE, or --corpus PATH" in err
    assert err.count("\n") == 1
    columns, counts = np.linspace(1, 2, 256, dtype=np.float32)[None], np.full(1, 9, np.float32)
    write_importance(imatrix, Importance("a text", {name: columns}, {name: counts}), 10)
    assert quantize(source, *flags, "-o", made, "--imatrix", imatrix) == 0
    assert read_gguf(made).tensors[name].type == kind


def test_a_weight_that_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = weights("llama")["layers.1.up"].copy()
    values[3, 4] = np.nan
    builder = tiny_gguf()
    name = gguf_name("layers.1.up")
    builder.tensors = [tensor for tensor in builder.tensors if tensor.name != name]
    builder.tensor(name, values)
    (tmp_path / "a.gguf").write_bytes(builder.encode())
    assert quantize(tmp_path / "a.gguf", "Q4_0", "-o", tmp_path / "b.gguf") == 2
    assert f"'{name}': a weight is infinite or not a number" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pipe = write(tmp_path / "a.gguf"), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert quantize(source, "Q8_0", "-o", pipe, "--force") == 2
    assert "is not a file: --out" in capsys.readouterr().err and pipe.is_fifo()


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(143)], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_is_resumed(
    signal: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    assert quantize(source, "Q4_0", "-o", tmp_path / "c.gguf") == 0
    calls: list[str] = []

    def stopped(values: np.ndarray, type_name: str, importance: None) -> np.ndarray:
        calls.append(type_name)
        if len(calls) == 4:
            raise signal
        return searched(values, type_name)

    for type_name in ("Q8_0", "Q4_0"):  # what the second run finds is of another result, and goes
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(quantised_file, "searched", stopped)
            if isinstance(signal, SystemExit):
                with pytest.raises(SystemExit):
                    quantize(source, type_name, "-o", made)
            else:
                assert quantize(source, type_name, "-o", made) == 130
        (part,) = tmp_path.glob("b.gguf.*.part")
        assert not made.exists() and part.read_bytes()[:4] == b"PART"
        capsys.readouterr()
    assert quantize(source, "Q4_0", "-o", made, "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed"] >= 3
    assert made.read_bytes() == (tmp_path / "c.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf"]


def test_what_another_process_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = gguf_original(read_gguf(write(tmp_path / "a.gguf")))
    types = target_types(original.matrices, wanted_types(original.matrices, MIXES["Q4_0"]))

    def meanwhile(*_: object) -> None:
        assert quantize(tmp_path / "a.gguf", "Q4_0", "-o", tmp_path / "b.gguf") == 1
        assert "another process is writing" in capsys.readouterr().err

    write_quantised(original, types, 2, tmp_path / "b.gguf", 1, progress=meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def imatrix(path: Path, **changes: np.ndarray) -> Path:
    """One in which every fourth input of layer 0's up is large. changes: of its arrays, by the end of their names."""
    sums = np.where(np.arange(64) % 4 == 0, 300, 3).astype(np.float32)[None]
    arrays = {"in_sum2": sums, "counts": np.full((1, 1), 3, np.float32)} | changes
    builder = Builder().fields({"type": "imatrix"}, "general.")
    for end, values in arrays.items():
        builder.tensor(f"blk.0.ffn_up.weight.{end}", values)
    return builder.write(path)


def test_an_imatrix_weighs_the_errors_of_its_matrices(tmp_path: Path) -> None:
    source, even, weighted = write(tmp_path / "a.gguf"), tmp_path / "b.gguf", tmp_path / "c.gguf"
    assert quantize(source, "Q4_0", "-o", even) == 0
    assert quantize(source, "Q4_0", "-o", weighted, "--imatrix", imatrix(tmp_path / "i.gguf")) == 0
    values, by_even, by_weight = (read_gguf(path).tensors for path in (source, even, weighted))
    changed = {name for name in values if not np.array_equal(by_even[name].data, by_weight[name].data)}
    assert changed == {"blk.0.ffn_up.weight"}
    x, first, second = (tensors["blk.0.ffn_up.weight"].float32() for tensors in (values, by_even, by_weight))
    assert errors(x[:, ::4], second[:, ::4]).sum() < 0.9 * errors(x[:, ::4], first[:, ::4]).sum()
    assert read_gguf(weighted).metadata["quantize.imatrix.entries_count"] == 1


def test_an_imatrix_of_experts_has_a_row_for_each(tmp_path: Path) -> None:
    builder = Builder().fields({"architecture": "llama"}, "general.")
    builder.tensor("blk.0.ffn_up.weight", np.ones((3, 5, 64), np.float32))
    gguf = read_gguf(builder.write(tmp_path / "a.gguf"))
    sums = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    counts = np.array([[1], [0], [2]], np.float32)
    shape = gguf.tensors["blk.0.ffn_up.weight"].shape
    path = imatrix(tmp_path / "i.gguf", in_sum2=sums, counts=counts)
    read = read_importance(path, {"blk.0.ffn_up.weight": shape}, gguf.path)
    rows = read.rows("blk.0.ffn_up.weight", shape, 4, 11)
    assert rows is not None and rows.shape == (7, 64)
    assert np.array_equal(rows[0], sums[0]) and (rows[1:6] == 1).all() and np.array_equal(rows[6], sums[2] / 2)
    assert read.rows("blk.1.ffn_up.weight", shape, 0, 1) is None
    shares = read.shares("blk.0.ffn_up.weight", shape)
    assert shares is not None and np.allclose(shares, [1, 0, 2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"in_sum2": np.ones((1, 32), np.float32)}, "made of another model"),
        ({"in_sum2": np.ones((2, 64), np.float32)}, "made of another model"),
        ({"counts": np.ones((2, 1), np.float32)}, "made of another model"),
        ({"in_sum2": np.full((1, 64), np.nan, np.float32)}, "infinite, below 0 or no numbers"),
        ({"counts": np.full((1, 1), -1, np.float32)}, "holds counts below 0"),
    ],
)
def test_an_imatrix_that_is_wrong(
    changes: dict[str, np.ndarray], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    assert quantize(source, "Q4_0", "-o", made, "--imatrix", imatrix(tmp_path / "i.gguf", **changes)) == 2
    assert says in capsys.readouterr().err and not made.exists()
    assert quantize(source, "Q4_0", "-o", made, "--imatrix", source) == 2
    assert "is not an imatrix file" in capsys.readouterr().err and not made.exists()


def old_imatrix(path: Path, name: str, values: np.ndarray, calls: int = 4) -> Path:
    """The form before GGUF: mean squares times calls."""
    head = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
    path.write_bytes(head + (values * calls).astype("<f4").tobytes() + struct.pack("<i", 1))
    return path


def test_an_imatrix_of_the_old_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, name = write(tmp_path / "a.gguf"), "blk.0.ffn_up.weight"
    means = np.where(np.arange(64) % 4 == 0, 100, 1).astype(np.float32)
    old = old_imatrix(tmp_path / "i.dat", name, means)
    for number, file in enumerate((old, imatrix(tmp_path / "i.gguf"))):
        assert quantize(source, "Q4_0", "-o", tmp_path / f"{number}.gguf", "--imatrix", file) == 0
    first, second = (read_gguf(tmp_path / f"{number}.gguf").tensors[name] for number in range(2))
    assert np.array_equal(first.data, second.data)
    whole = old.read_bytes()
    for data, says in ((whole[:-40], "cut short"), (whole[:3], "truncated"), (b"\xff" * 40, "is not an imatrix file")):
        old.write_bytes(data)
        assert quantize(source, "Q4_0", "-o", tmp_path / "x.gguf", "--imatrix", old) == 2
        assert says in capsys.readouterr().err
    old_imatrix(old, name, means[:-1])
    assert quantize(source, "Q4_0", "-o", tmp_path / "x.gguf", "--imatrix", old) == 2
    assert "does not suit the model's tensor" in capsys.readouterr().err


def test_types_of_chosen_matrices(tmp_path: Path) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    chosen = ("--tensor-type", r"blk\.1\..*ffn_up=q8_0", "--tensor-type", "ffn=q5_0")
    assert quantize(source, "-o", made, "--pure", *chosen, "Q4_0") == 0
    types = {name: tensor.type for name, tensor in read_gguf(made).tensors.items()}
    assert (types["blk.0.ffn_up.weight"], types["blk.1.ffn_up.weight"]) == ("Q5_0", "Q8_0")
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q4_0"


def test_a_small_model_is_not_downloaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert quantize("qwen3-0.6b", "q4_0", "-o", tmp_path / "a.gguf") == 2
    assert "is not downloaded; `powerinfer pull" in capsys.readouterr().err


def test_a_larger_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.gguf")
    assert quantize(source, "Q4_0", "-o", tmp_path / "b.gguf") == 0
    assert "larger" not in capsys.readouterr().err
    assert quantize(tmp_path / "b.gguf", "Q8_0", "-o", tmp_path / "c.gguf") == 0
    assert "the file is larger than the model" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_folder(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers as the folder's; llama's q and k have another order of rows in a GGUF file."""
    monkeypatch.setattr("model_files.VOCAB", 1200)
    folder, made = tiny_folder(tmp_path / "a", architecture, dtype="BF16"), tmp_path / "b.gguf"
    write_tokenizer_files(folder, 1200)
    assert quantize(folder, "bf16", "-o", made) == 0
    texts = []
    for path in (folder, made):
        with LLM(path, threads=1) as llm:
            texts.append(llm.generate("abc", llm.default_params(temperature=0.0, max_tokens=12)))
    assert texts[0].token_ids == texts[1].token_ids and len(set(texts[0].token_ids)) > 4
    for path, name in ((folder, "c.gguf"), (made, "d.gguf")):
        assert quantize(path, "q4_0", "-o", tmp_path / name) == 0
    direct, twice = (read_gguf(tmp_path / name).tensors for name in ("c.gguf", "d.gguf"))
    assert direct.keys() == twice.keys()
    assert all(np.array_equal(direct[name].data, twice[name].data) for name in direct)


def test_a_folder_that_gguf_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, says in (
        (tiny_folder(tmp_path / "a"), "has no tokenizer.json"),
        (plain_folder(tmp_path / "b", "opt"), "models of opt are not written so"),
    ):
        assert quantize(folder, "q4_0", "-o", tmp_path / "c.gguf") == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
    assert not (tmp_path / "c.gguf").exists()


def test_importance_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's is computed by hand; experts count the tokens that they got."""
    monkeypatch.setattr("model_files.VOCAB", 1200)
    folder, saved = tiny_folder(tmp_path / "a", dtype="BF16"), tmp_path / "i.gguf"
    write_tokenizer_files(folder, 1200)
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 300)
    made = (tmp_path / name for name in ("b.gguf", "c.gguf", "d.gguf"))
    direct, again, even = made
    assert quantize(folder, "q4_0", "-o", direct, "--corpus", text, "--save-imatrix", saved, "--tokens", "512") == 0
    assert quantize(folder, "q4_0", "-o", again, "--imatrix", saved) == 0
    assert quantize(folder, "q4_0", "-o", even) == 0
    tensors = [read_gguf(path).tensors for path in (direct, again, even)]
    assert all(np.array_equal(tensors[0][name].data, tensors[1][name].data) for name in tensors[0])
    for kind in ("attn_q", "attn_output", "ffn_up", "ffn_down"):
        name = f"blk.1.{kind}.weight"
        assert not np.array_equal(tensors[0][name].data, tensors[2][name].data), name
    checkpoint = open_checkpoint(folder)
    ids = tokenizer_of(checkpoint).encode(text.read_text())[: len(counts_of(saved, "attn_q"))]
    x = checkpoint.take("embed").float32()[ids]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + checkpoint.config.norm_eps)
    expected = ((x * checkpoint.take("layers.0.attn_norm").float32()) ** 2).sum(axis=0)
    found = read_gguf(saved).tensors["blk.0.attn_q.weight.in_sum2"].float32()
    assert np.allclose(found[0], expected, rtol=1e-4)


def counts_of(path: Path, kind: str) -> range:
    """As many as the tokens that a matrix of the first layer got."""
    return range(int(read_gguf(path).tensors[f"blk.0.{kind}.weight.counts"].float32().item()))


def test_bytes_are_spent_where_they_gain_most(tmp_path: Path) -> None:
    shapes = {"blk.0.attn_q": (64, 512), "blk.0.attn_k": (64, 512), "blk.0.ffn_up": (64, 96)}
    builder, rng = Builder().fields({"architecture": "llama"}, "general."), np.random.default_rng(5)
    for name, shape in shapes.items():
        builder.tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    original = gguf_original(read_gguf(builder.write(tmp_path / "a.gguf")))
    bits = {"attn_q": [], "attn_k": []}
    for size in (27_000, 40_000, 60_000, 76_512):
        sensitivities = {"blk.0.attn_q.weight": 8.0, "blk.0.attn_k.weight": 1.0, "blk.0.ffn_up.weight": 1.0}
        types = sized_types(original, size, sensitivities, {}, None, 1)
        made = write_quantised(original, types, main_number(types, original.shapes), tmp_path / f"{size}.gguf", 1)
        assert made.nbytes == file_size(original, types) <= size
        for name, row in bits.items():
            row.append(block_type(types[f"blk.0.{name}.weight"]).row_bytes(512))
    assert all(a >= b for a, b in zip(bits["attn_q"], bits["attn_k"], strict=True))
    assert bits["attn_q"] == sorted(bits["attn_q"]) and len(set(bits["attn_q"])) > 2
    assert types["blk.0.ffn_up.weight"] == types["blk.0.attn_k.weight"] == "Q8_0", "all that there is to gain"
    assert sized_types(original, 40_000, {}, {"blk.0.attn_k.weight": "Q2_K"}, None, 1)["blk.0.attn_k.weight"] == "Q2_K"
    with pytest.raises(RequestError, match="the smallest file of this model takes"):
        sized_types(original, 20_000, {}, {}, None, 1)


def test_a_file_of_another_alignment_is_within_its_size(tmp_path: Path) -> None:
    rng, keys = np.random.default_rng(5), {"architecture": "llama", "alignment": 4096}
    builder = Builder(alignment=4096).fields(keys, "general.")
    for name in ("attn_q", "attn_k", "attn_v"):
        builder.tensor(f"blk.0.{name}.weight", rng.standard_normal((70, 96)).astype(np.float32))
    original, sensitivities = gguf_original(read_gguf(builder.write(tmp_path / "a.gguf"))), {"blk.0.attn_v.weight": 8.0}
    least = file_size(original, dict.fromkeys(original.shapes, "Q4_0"))
    for more in (417, 833, 1249):
        types = sized_types(original, least + more, sensitivities, {}, None, 1)
        assert least <= file_size(original, types) <= least + more


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    original = gguf_original(read_gguf(path))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError):
        sized_types(original, 60_000, {}, {}, None, 1)


def test_a_name_of_many_digits(tmp_path: Path) -> None:
    builder = Builder().fields({"architecture": "llama"}, "general.")
    builder.tensor(f"blk.{'9' * 5000}.ffn_down.weight", np.ones((2, 32), np.float32))
    assert quantize(builder.write(tmp_path / "a.gguf"), "q4_0", "-o", tmp_path / "b.gguf") == 0


def test_a_size_in_place_of_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    text = tmp_path / "text.txt"
    text.write_text("abc a b c d e f g " * 60)
    for size in ("60KB", "48KB"):
        assert quantize(source, "-o", made, "--size", size, "--corpus", text, "--force", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["bytes"] == made.stat().st_size <= read_size(size) and document["type"] is None
        assert len([kind for kind in document["types"] if kind != "F32"]) > 1
    with LLM(made, threads=1) as llm:
        assert len(llm.generate("abc", llm.default_params(temperature=0.0, max_tokens=4)).token_ids) == 4
    assert quantize(source, "q8_0", "-o", made, "--force") == 0
    chosen = ("--tensor-type", "ffn_down=q8_0", "--tensor-type", "attn_q=q4_k")  # as it is; of rows that are narrower
    assert quantize(made, "-o", tmp_path / "c.gguf", "--size", "60KB", "--corpus", text, *chosen) == 0
    types = {name: tensor.type for name, tensor in read_gguf(tmp_path / "c.gguf").tensors.items()}
    assert (types["blk.1.ffn_down.weight"], types["blk.1.attn_q.weight"]) == ("Q8_0", "Q5_0")
    assert "2 matrices have another type: their rows are not whole blocks of Q4_K\n" in capsys.readouterr().err
    for args, says in (
        (("-o", made), "give either TYPE"),
        (("q4_0", "-o", made, "--corpus", text, "--save-imatrix", made, "--force"), "give two names"),
        (("q4_0", "-o", made, "--corpus", text, "--save-imatrix", tmp_path, "--force"), "a folder: --save-imatrix"),
        (("q4_0", "-o", made, "--size", "1MB"), "give either TYPE"),
        (("-o", made, "--size", "1MB", "--pure"), "--pure is for a TYPE"),
        (("-o", made, "--size", "1MB", "--imatrix", text, "--save-imatrix", made), "--save-imatrix writes"),
        (("q4_0", "-o", made, "--imatrix", text, "--corpus", text), "give one of them"),
        (("q4_0", "-o", made, "--tokens", "0"), "--tokens must be at least 1"),
        (("-o", made, "--size", "5KB", "--force", "--corpus", text), "the smallest file of this model takes"),
        (("-o", made, "--size", "1MB", "--force", "--corpus", text), "give less, or the type q8_0"),
        (("q4_0.gguf", "q4_0"), "unexpected: q4_0; the file to write is -o FILE"),
    ):
        assert quantize(source, *args) == 2
        err = capsys.readouterr().err
        assert says in err and "measuring" not in err
    assert quantize(made, "-o", tmp_path / "d.gguf", "--size", "1MB", "--corpus", text) == 2
    err = capsys.readouterr().err
    assert "is that already: it takes 0.1 MB" in err and "measuring" not in err


def test_sensitivity_is_that_of_the_errors(tmp_path: Path) -> None:
    """The divergence that errors of the head cause, computed by hand."""
    checkpoint = open_checkpoint(write(tmp_path / "a.gguf"))
    ids = np.random.default_rng(6).integers(0, 40, (2, 32)).astype(np.int32)
    windows = Windows(ids, ("x",), (2,), "")
    importance = Importance("x", {}, {})
    found = measure_sensitivity(checkpoint, NAMES, windows, importance, silent)
    assert set(found) == {name for name in read_gguf(tmp_path / "a.gguf").tensors if "norm" not in name}
    assert all(value > 0 for value in found.values())
    noisy = _Noisy(checkpoint, NAMES, importance)
    weight = checkpoint.take("layers.1.down").float32()
    changed = dequantize(quantise_plainly(weight, "Q4_0"), "Q4_0")
    logs = []
    for values in (weight, changed):
        weights_ = load(checkpoint) | {"layers.1.down": torch.from_numpy(values.copy())}
        model = TorchModel(checkpoint.config, weights_, torch.float32)
        logs.append(model.logits(model.states(torch.from_numpy(ids).long()))[:, ::4].log_softmax(-1))
    divergence = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    share = ((changed - weight) ** 2).sum() / (weight**2).sum()
    assert noisy.groups["layers.1.down"] == "down last" != noisy.groups["layers.0.down"]
    assert found["blk.1.ffn_down.weight"] == pytest.approx(divergence / share, rel=1e-3)


def sentencepiece(folder: Path, size: int, spoil: bool = False) -> None:
    """A tokenizer.json as Llama 2's, of words that are made of letters in all ways. spoil: one way is missing."""
    letters = "etaoinshr"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    pieces += [first + second for first in ("▁", *letters) for second in letters]
    pieces += ["▁" + first + second for first in letters for second in letters]
    pieces += [f"<|{number}|>" for number in range(size - len(pieces))]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    atoms = frozenset(piece for piece in pieces if piece[0] == "<")
    merges = score_merges(vocab, [-float(at) for at in range(size)], atoms)
    if spoil:
        del merges[next(at for at, pair in enumerate(merges) if len("".join(pair)) > 2)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": vocab[piece], "content": piece, **flags} for piece in pieces if piece in atoms and piece[1] != "0"]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    model = {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in merges], "unk_token": "<unk>"}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": steps}, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"fuse_unk": True, "byte_fallback": True},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    side = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side))


def test_a_folder_with_a_tokenizer_of_sentencepiece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("model_files.VOCAB", 1200)
    folder, made = tiny_folder(tmp_path / "a", dtype="BF16"), tmp_path / "b.gguf"
    sentencepiece(folder, 1200)
    assert quantize(folder, "bf16", "-o", made) == 0
    known, read = (tokenizer_of(open_checkpoint(path)) for path in (folder, made))
    for text in ("the rain is near the shore", " tea  \n\u00e9\u4f60", "<s>another</s>one", ""):
        assert read.encode(text) == known.encode(text)
        assert read.decode(known.encode(text)) == known.decode(known.encode(text))
    assert len(known.encode("the rain")) < 6 and read.eos_ids == known.eos_ids
    assert read_gguf(made).metadata["tokenizer.ggml.model"] == "llama"
    sentencepiece(folder, 1200, spoil=True)
    assert quantize(folder, "bf16", "-o", tmp_path / "c.gguf") == 2
    assert "merges pieces in an order that scores do not give" in capsys.readouterr().err


def test_factors_of_nvfp4_become_a_part_of_the_weights(tmp_path: Path) -> None:
    x = np.random.default_rng(8).standard_normal((8, 128)).astype(np.float32)
    builder = Builder().fields({"architecture": "llama"}, "general.")
    data = searched(x, "NVFP4").reshape(-1)
    builder.tensor("blk.0.ffn_up.weight", data, block_type("NVFP4").id, [128, 8])
    builder.tensor("blk.0.ffn_up.scale", np.full(1, 0.25, np.float32))
    original = gguf_original(read_gguf(builder.write(tmp_path / "a.gguf")))
    assert list(original.shapes) == ["blk.0.ffn_up.weight"]
    write_quantised(original, {"blk.0.ffn_up.weight": "Q8_0"}, 7, tmp_path / "b.gguf", 1)
    written = read_gguf(tmp_path / "b.gguf").tensors["blk.0.ffn_up.weight"].float32()
    assert np.allclose(written, dequantize(data.reshape(8, -1), "NVFP4") / 4, atol=0.005)
