"""Predictors on disk: what is written is read, and what does not suit the model is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_models import checkpoint
from test_prepared import describe, edit_header, left_in

from powerinfer.errors import ModelError
from powerinfer.formats.predictor_file import PREDICTOR_TYPES, PredictorFile, open_predictor, write_predictor
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.formats.quant import dequantize, quantize
from powerinfer.neurons import Predictor

LAYERS = [Predictor(32, 0.5, 0), Predictor(64, -1.25, 96)]


def weights(d_model: int = 64, d_ff: int = 96, layers: list[Predictor] = LAYERS) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [
        (rng.standard_normal((one.rank, d_model), np.float32), rng.standard_normal((d_ff, one.rank), np.float32))
        for one in layers
    ]


def written(folder: Path, type_name: str = "F16") -> PreparedFile:
    model = checkpoint(folder / "m.gguf")
    write_predictor(model, None, type_name, LAYERS, weights())
    return PreparedFile(PREDICTOR, model)


def opened(folder: Path) -> PredictorFile:
    return open_predictor(checkpoint(folder / "m.gguf"))


def refused(folder: Path, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    message = str(caught.value)
    assert re.search(why, message), message
    assert f"`powerinfer train -m {folder}/m.gguf`" in message and "\n" not in message


@pytest.mark.parametrize("type_name", PREDICTOR_TYPES)
def test_what_is_written_is_read(tmp_path: Path, type_name: str) -> None:
    written(tmp_path, type_name)
    file = opened(tmp_path)
    assert file.type == type_name and [layer.predictor for layer in file.layers.values()] == LAYERS
    assert file.nbytes == sum(len(quantize(one, type_name).reshape(-1)) for pair in weights() for one in pair)
    for layer, pair in zip(file.layers.values(), weights(), strict=True):
        for tensor, values in zip((layer.inner, layer.outer), pair, strict=True):
            assert tensor.type == type_name and tensor.shape == values.shape
            assert tensor.data.ctypes.data % 64 == 0
            assert np.array_equal(tensor.float32(), dequantize(quantize(values, type_name), type_name))


def test_sizes_that_fill_no_lines(tmp_path: Path) -> None:
    """Between tensors whose bytes are not whole lines something pads; the reader does not see it."""
    model = checkpoint(tmp_path / "m.gguf", d_model=34, d_ff=37)
    layers = [Predictor(5, 0.0, 1), Predictor(3, 0.0, 1)]
    values = weights(34, 37, layers)
    write_predictor(model, None, "F16", layers, values)
    for layer, pair in zip(open_predictor(model).layers.values(), values, strict=True):
        for tensor, array in zip((layer.inner, layer.outer), pair, strict=True):
            assert np.array_equal(tensor.float32(), array.astype(np.float16)) and tensor.data.ctypes.data % 64 == 0


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    stored = load_file(written(tmp_path).path)
    for layer, (inner, outer) in enumerate(weights()):
        assert np.array_equal(stored[f"layers.{layer}.in"], inner.astype(np.float16))
        assert np.array_equal(stored[f"layers.{layer}.out"], outer.astype(np.float16))


def test_layers_are_taken_one_by_one(tmp_path: Path) -> None:
    """The trainer hands over a layer when it is asked for the next: both never lie in memory."""
    given = []

    def split_calls() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for layer, pair in enumerate(weights()):
            given.append(layer)
            yield pair
            assert given[-1] == layer, "the next was asked for before this one was done with"

    write_predictor(checkpoint(tmp_path / "m.gguf"), None, "F16", LAYERS, split_calls())
    assert given == [0, 1] and len(opened(tmp_path).layers) == 2


@pytest.mark.parametrize(
    ("type_name", "value"), [("F16", 70000.0), ("F32", np.inf), ("Q8_0", np.nan), ("BF16", np.nan)]
)
def test_weights_that_the_type_cannot_hold(tmp_path: Path, type_name: str, value: float) -> None:
    values = weights()
    values[1][1][3, 4] = value
    with pytest.raises(ModelError, match=r"cannot hold|cannot be quantised"):
        write_predictor(checkpoint(tmp_path / "m.gguf"), None, type_name, LAYERS, values)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("change", [lambda v: v[:1], lambda v: [*v, v[0]]], ids=["too few", "too many"])
def test_another_number_of_layers_is_never_written(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_predictor(checkpoint(tmp_path / "m.gguf"), None, "F16", LAYERS, change(weights()))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 65},
        {"neurons": None},
        {"type": "Q4_K"},
        {"type": 3},
        {"type": "BF16"},
        {"type": "Q8_0"},
        {"layers": None},
        {"layers": []},
        pytest.param({"layers": [{"rank": 32, "threshold": 0.5, "floor": 0}] * (1 << 17)}, id="layers without end"),
    ],
    ids=str,
)
def test_descriptions_that_do_not_suit(tmp_path: Path, change: dict[str, Any]) -> None:
    file = written(tmp_path)
    describe(file, lambda description: description.update(change))
    refused(
        tmp_path,
        r"states a (d_model|neurons)|: (type|layers) |weights of type|does not hold|does not describe|claims",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"rank": 33},
        {"rank": 1 << 62},
        {"rank": True},
        {"threshold": "1"},
        {"threshold": 1e300},
        {"threshold": None},
        {"floor": -1},
        {"floor": 97},
        {"floor": 1.0},
    ],
    ids=str,
)
def test_layers_that_are_described_wrongly(tmp_path: Path, change: dict[str, Any]) -> None:
    file = written(tmp_path)
    describe(file, lambda description: description["layers"][1].update(change))
    refused(
        tmp_path, r": layers\[1\]\.(rank|threshold|floor) is|in layer 1, which cannot be|does not hold layers\.1\.in"
    )


@pytest.mark.parametrize("one", [3, [], {}])
def test_layers_that_are_not_described(tmp_path: Path, one: Any) -> None:
    file = written(tmp_path)
    describe(file, lambda description: description.update(layers=[one, one]))
    refused(tmp_path, r": layers\[0\]")


def test_broken_blocks(tmp_path: Path) -> None:
    """A rank that is no whole number of blocks, in a file that says Q8_0."""
    file = written(tmp_path, "Q8_0")
    describe(file, lambda description: description["layers"][0].update(rank=33))
    refused(tmp_path, "in layer 0, which cannot be|does not hold")


def test_weights_of_no_layer(tmp_path: Path) -> None:
    file = written(tmp_path)
    edit_header(file, lambda header: header.update({"layers.2.in": header.pop("layers.1.in")}))
    refused(tmp_path, r"does not hold layers\.1\.in")
    file = written(tmp_path)

    def split(header: dict[str, Any]) -> None:
        """A tensor more, of what was the last one's end."""
        begin, end = header["layers.1.out"]["data_offsets"]
        header["layers.1.out"] = {"dtype": "F16", "shape": [96, 63], "data_offsets": [begin, end - 192]}
        header["more"] = {"dtype": "F16", "shape": [96], "data_offsets": [end - 192, end]}

    edit_header(file, split)
    refused(tmp_path, r"does not hold layers\.1\.out")


def test_another_model(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ModelError, match="another model"):
        open_predictor(checkpoint(tmp_path / "m.gguf", seed=2))
