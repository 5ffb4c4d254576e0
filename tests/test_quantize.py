"""`powerinfer quantize`: the error of each type, and the files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from model_files import gguf_name, tiny_gguf, weights

from benchmarks.models.gguf_writer import Builder
from powerinfer.cli.main import main
from powerinfer.errors import ModelError
from powerinfer.formats import quantised_file
from powerinfer.formats.gguf import read_gguf
from powerinfer.formats.quant import block_type, dequantize
from powerinfer.formats.quantised_file import MIXES, target_types
from powerinfer.formats.scale_search import SEARCHED, searched
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.runtime.engine import LLM

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


@pytest.mark.parametrize("type_name", SEARCHED)
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


def test_values_that_a_type_cannot_hold() -> None:
    x = np.ones((2, 256), np.float32)
    for type_name in ("F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K"):
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


def test_types_of_tensors_are_those_of_llama_cpp(tmp_path: Path) -> None:
    shapes = {"token_embd": (8, 512), "blk.0.ffn_gate_inp": (4, 512), "blk.0.ffn_down_exps": (4, 8, 96)}
    shapes |= {f"blk.{layer}.{name}": (8, 512) for layer in range(8) for name in ("attn_v", "attn_q", "ffn_down")}
    shapes |= {"blk.0.attn_output": (8, 30), "blk.0.attn_norm": (512,)}
    builder = Builder().fields({"architecture": "llama"}, "general.")
    for name, shape in shapes.items():
        builder.tensor(f"{name}.weight", np.ones(shape, np.float32))
    path = tmp_path / "a.gguf"
    path.write_bytes(builder.encode())
    types = target_types(read_gguf(path), MIXES["Q4_K_M"])
    assert [types[f"blk.{layer}.attn_v.weight"] for layer in range(8)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    assert types["blk.3.ffn_down.weight"] == "Q6_K" and types["blk.3.attn_q.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q6_K", "it is the head, too"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0" and types["blk.0.attn_output.weight"] == "F16"
    builder.tensor("output.weight", np.ones((8, 512), np.float32))
    path.write_bytes(builder.encode())
    types = target_types(read_gguf(path), MIXES["Q2_K"])
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q6_K", "Q2_K")
    assert types["blk.0.ffn_down_exps.weight"] == "Q4_0"


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    made.write_bytes(b"x")
    for args, says in (
        ((source, "q4_k_x", "-o", made), "no type q4_k_x; did you mean Q4_K"),
        ((source, "IQ2_XS", "-o", tmp_path / "c.gguf"), "there are F16, BF16, Q8_0"),
        ((source, "Q8_0"), "missing: -o/--out"),
        ((source, "Q8_0", "-o", made), "is there already; --force replaces it"),
        ((source, "Q8_0", "-o", source, "--force"), "is the model itself"),
        ((source, "Q8_0", "-o", tmp_path), "is a folder: --out"),
        ((source, "Q3_K_M", "-o", made), "did you mean Q3_K?"),
        ((source, "Q8_0", "-o", tmp_path / "no" / "c.gguf"), "cannot write"),
        ((made, "Q8_0", "-o", tmp_path / "c.gguf"), "not a GGUF file"),
    ):
        assert quantize(*args) in (1, 2), args
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1, err
    assert made.read_bytes() == b"x"
    assert quantize(source, "Q8_0", "-o", made, "--force") == 0
    assert quantize(made, "Q8_0", "-o", tmp_path / "c.gguf") == 2 and "is Q8_0 already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


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


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.gguf")
    calls: list[str] = []

    def stopped(values: np.ndarray, type_name: str, importance: None) -> np.ndarray:
        calls.append(type_name)
        if len(calls) == 3:
            assert list(tmp_path.glob("b.gguf.*.part"))
            raise KeyboardInterrupt
        return searched(values, type_name)

    monkeypatch.setattr(quantised_file, "searched", stopped)
    assert quantize(source, "Q4_0", "-o", tmp_path / "b.gguf") == 130
    assert len(calls) >= 3 and [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


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
    read = quantised_file.read_importance(imatrix(tmp_path / "i.gguf", in_sum2=sums, counts=counts), gguf)
    rows = read.rows("blk.0.ffn_up.weight", gguf.tensors["blk.0.ffn_up.weight"], 4, 11)
    assert rows is not None and rows.shape == (7, 64)
    assert np.array_equal(rows[0], sums[0]) and (rows[1:6] == 1).all() and np.array_equal(rows[6], sums[2] / 2)
    assert read.rows("blk.1.ffn_up.weight", gguf.tensors["blk.0.ffn_up.weight"], 0, 1) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"in_sum2": np.ones((1, 32), np.float32)}, "made of another model"),
        ({"in_sum2": np.ones((2, 64), np.float32)}, "made of another model"),
        ({"counts": np.ones((2, 1), np.float32)}, "made of another model"),
        ({"in_sum2": np.full((1, 64), np.nan, np.float32)}, "infinite, below 0 or no numbers"),
        ({"counts": np.full((1, 1), -1, np.float32)}, "infinite, below 0 or no numbers"),
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
