"""PWRI files of every architecture; pickles are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import FF, LAYERS, D, family_gguf, family_weights

from benchmarks.models.gguf_writer import F32, STRING, U32, Builder
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.quant import dequantize, quantize
from powerinfer.formats.tensors import RawTensor, transpose
from powerinfer.text.model_text import tokenizer_of

ARCHITECTURES = {"llama": "relu", "bamboo": "drelu", "falcon": "relu", "opt": "relu"}


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def stored_as(builder: Builder, type_id: int, name: str, *inner: str) -> Builder:
    """Turn the matrices of those names into another type."""
    for tensor in builder.tensors:
        if len(tensor.dims) == 2 and tensor.name.split(".")[-2] in inner:
            values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
            tensor.type_id, tensor.data = type_id, quantize(values, name).tobytes()
    return builder


# --- PWRI files


@pytest.mark.parametrize(("architecture", "two_norms"), [*((name, False) for name in ARCHITECTURES), ("falcon", True)])
def test_models(tmp_path: Path, architecture: str, two_norms: bool) -> None:
    checkpoint = open_checkpoint(family_gguf(architecture, two_norms, published=True).write(tmp_path / "m.gguf"))
    config = checkpoint.config
    assert (config.architecture, config.activations) == (architecture, ARCHITECTURES[architecture])
    assert config.layers[0].ffn.gated == (architecture in ("llama", "bamboo")) and config.layers[0].parallel == (
        architecture == "falcon"
    )
    assert all(rope.interleaved == config.layers[0].ffn.gated for rope in config.ropes)
    assert config.layers[0].shared_norm == (architecture == "falcon" and not two_norms)
    plain = family_gguf(architecture, two_norms).put(f"{architecture}.hidden_act", STRING, ARCHITECTURES[architecture])
    assert config == open_checkpoint(plain.write(tmp_path / "plain.gguf")).config
    assert checkpoint.predictor_threshold == 0.25
    expected = family_weights(architecture, two_norms, predictors=True)
    assert {name for name, _ in layout.shapes(config)} | {n for n in expected if ".predictor_" in n} == expected.keys()
    for name, values in expected.items():
        tensor = checkpoint.take(name)
        assert checkpoint.has(name) and tensor.shape == values.shape and tensor.data.flags.c_contiguous
        assert np.array_equal(tensor.float32(), values), name
    checkpoint.finish()
    rows = checkpoint.take("layers.1.down_rows")
    assert np.array_equal(rows.float32(), expected["layers.1.down"].T) and not rows.data.flags.owndata
    weights = {name: values for name, values in expected.items() if ".predictor_" not in name}
    assert checkpoint.parameters == sum(values.size for values in weights.values())
    activation = ARCHITECTURES[architecture]
    assert checkpoint.notes == [
        f"a file of PowerInfer's: activation {activation}, predictors with threshold 0.25",
        "transposing 2 down matrices of type F32",
    ]


def test_predictors_may_be_left_and_down_may_not(tmp_path: Path) -> None:
    path = family_gguf("llama", published=True).write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    for name, _ in layout.shapes(checkpoint.config):
        if name != "layers.1.down":
            checkpoint.take(name)
    with pytest.raises(ModelError, match=r"not used by a llama model: layers\.1\.down_rows$"):
        checkpoint.finish()
    checkpoint.take("layers.1.down_rows")  # the neurons themselves will do
    checkpoint.finish()


def test_the_threshold_may_be_left_out(tmp_path: Path) -> None:
    builder = family_gguf("opt", published=True).drop("powerinfer.sparse_threshold")
    assert open_checkpoint(builder.write(tmp_path / "m.gguf")).predictor_threshold == 0.0


@pytest.mark.parametrize(("type_id", "name"), [(0, "F32"), (1, "F16"), (30, "BF16")])
def test_float_rows_are_transposed_exactly(tmp_path: Path, type_id: int, name: str) -> None:
    builder = stored_as(family_gguf("falcon", published=True), type_id, name, "ffn_down_t")
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    down, rows = checkpoint.take("layers.0.down"), checkpoint.take("layers.0.down_rows")
    assert down.type == rows.type == name and down.shape == (D, FF)
    item = np.dtype(f"u{rows.data.nbytes // (D * FF)}")
    assert np.array_equal(down.data.view(item).reshape(D, FF), rows.data.view(item).reshape(FF, D).T)


def test_quantised_rows_become_wider_blocks_of_the_other_axis(tmp_path: Path) -> None:
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down_t", "fc1")
    builder = stored_as(family_gguf("llama", published=True), 2, "Q4_0", *matrices)
    stored_as(builder, 6, "Q5_0", "fc2")
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    assert checkpoint.notes[1:] == ["transposing 2 down matrices of type Q4_0 to Q8_0"]
    down, rows = checkpoint.take("layers.1.down"), checkpoint.take("layers.1.down_rows")
    assert (down.type, rows.type, down.shape) == ("Q8_0", "Q4_0", (D, FF))
    values = dequantize(rows.rows(), "Q4_0")
    assert np.array_equal(down.data, quantize(np.ascontiguousarray(values.T), "Q8_0").reshape(-1))
    assert checkpoint.take("layers.0.predictor_in").type == "Q4_0" and checkpoint.main_type == "Q4_0"
    assert checkpoint.take("layers.0.predictor_out").type == "Q5_0"


@pytest.mark.parametrize("target", ["q8_0", "q4_0"])
def test_quantising_on_load(tmp_path: Path, target: str) -> None:
    path = family_gguf("falcon", published=True).write(tmp_path / "m.gguf")
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(path, quantize=target, progress=lambda *step: seen.append(step))
    values = family_weights("falcon", predictors=True)
    for name, _ in layout.shapes(checkpoint.config):
        taken = checkpoint.take(name)
        if taken.type == target.upper():
            assert np.array_equal(taken.data, quantize(values[name], target.upper()).reshape(-1)), name
    assert checkpoint.take("layers.0.down").type == target.upper()
    assert checkpoint.notes[-1] == f"quantising {6 * LAYERS + 1} matrices to {target.upper()}"
    assert seen[-1][1] == seen[-1][2] and checkpoint.fingerprint == open_checkpoint(path).fingerprint
    checkpoint.finish()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 300), (96, 64), (5000, 600)])
def test_transposing_in_pieces(rows: int, cols: int) -> None:
    values = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    ticks: list[int] = []
    turned = transpose(RawTensor("F32", values.shape, values.view(np.uint8).reshape(-1)), "F32", ticks.append)
    assert turned.shape == (cols, rows) and np.array_equal(turned.float32(), values.T) and sum(ticks) == values.size
    assert (len(ticks) > 1) == (rows > 4000)


def put(key: str, kind: int, value: Any) -> Callable[[Builder], Any]:
    return lambda builder: builder.put(key, kind, value)


def without(name: str) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        builder.tensors = [tensor for tensor in builder.tensors if tensor.name != name]

    return change


def renamed(old: str, new: str) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        next(tensor for tensor in builder.tensors if tensor.name == old).name = new

    return change


def reshaped(name: str, *dims: int) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        next(tensor for tensor in builder.tensors if tensor.name == name).dims = list(dims)

    return change


def plain_magic(builder: Builder) -> None:
    builder.magic = b"GGUF"


REFUSED: dict[str, tuple[Callable[[Builder], Any], str]] = {
    "another magic": (plain_magic, r"powerinfer\.\* metadata are not supported"),
    "architecture": (put("general.architecture", STRING, "qwen2"), r"'qwen2' is not supported \(only bamboo, falcon"),
    "threshold": (put("powerinfer.sparse_threshold", F32, float("nan")), "sparse_threshold is 'nan'"),
    "threshold as a text": (put("powerinfer.sparse_threshold", STRING, "0"), "sparse_threshold is '0', not a number"),
    "another key": (put("powerinfer.new", U32, 1), r"powerinfer\.new is set"),
    "another activation": (put("llama.hidden_act", STRING, "silu"), "hidden_act is 'silu'"),
    "no predictor": (without("blk.1.fc1.weight"), r"blk\.1\.fc1\.weight is missing"),
    "half a predictor": (without("blk.1.fc2.weight"), r"blk\.1\.fc2\.weight is missing"),
    "no down": (without("blk.0.ffn_down_t.weight"), r"blk\.0\.ffn_down_t\.weight is missing"),
    "down as ever": (renamed("blk.0.ffn_down_t.weight", "blk.0.ffn_down.weight"), r"ffn_down_t\.weight is missing"),
    "down the wrong way": (reshaped("blk.0.ffn_down_t.weight", FF, D), rf"shape \[{D}, {FF}\], not \[{FF}, {D}\]"),
    "ranks that differ": (
        reshaped("blk.0.fc1.weight", D // 2, 48),
        r"fc1\.weight has shape \[48, 32\], not \[48, 64\]",
    ),
    "another rank": (reshaped("blk.0.fc2.weight", 16, 2 * FF), r"fc2\.weight has shape \[192, 16\], not \[96, 32\]"),
    "a flat predictor": (reshaped("blk.0.fc1.weight", 32 * D), r"fc1\.weight has shape"),
    "more layers": (put("llama.block_count", U32, 4000), "4000 layers and holds"),
    "a bias": (lambda b: b.tensor("blk.0.fc1.bias", np.zeros(32, np.float32)), r"does not have: 'blk\.0\.fc1\.bias'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    builder = family_gguf("llama", published=True)
    change(builder)
    refused(builder.write(tmp_path / "m.gguf"), message)


def test_an_index_of_a_gpu_is_no_model(tmp_path: Path) -> None:
    builder = Builder(magic=b"PWRI").add("general.architecture", STRING, "generic.gpu_index")
    builder.tensor("blk.0.gpu_idx", np.zeros(FF, np.int32), type_id=26)
    path = builder.write(tmp_path / "m.gguf.generated.gpuidx")
    refused(path, "does not need it: name the model itself")
    refused(path.rename(tmp_path / "renamed.gguf"), "does not need it: name the model itself")


def test_tokenizers_of_files_that_name_no_pre_tokenizer(tmp_path: Path) -> None:
    builder = family_gguf("opt", published=True).drop("tokenizer.ggml.pre")
    tokenizer = tokenizer_of(open_checkpoint(builder.write(tmp_path / "m.gguf")))
    assert tokenizer.decode(tokenizer.encode("ab abc")) == "ab abc"


def test_a_pickle_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "activation_0.pt").write_bytes(pickle.dumps([1, 2, 3]))
    refused(tmp_path / "activation_0.pt", "pickle files can run code and are never read")
