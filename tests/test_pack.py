"""Packing: what is unpacked from bundles is what the model holds, or what re-quantising it must give."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_models import checkpoint
from test_prepared import describe, edit_header, left_in

from powerinfer import _native
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats import prepared
from powerinfer.formats.bundle_file import BundleFile, open_bundles
from powerinfer.formats.bundle_memory import own_pages
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.predictor_file import open_predictor, write_predictor
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, Kind, PreparedFile
from powerinfer.formats.quant import SHORT_BLOCKS, block_type, dequantize, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import BLOCKS, DOWN_TYPES, NATIVE_TYPES, ROW_TYPES, STORED_ROWS
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor
from powerinfer.prepare import packing
from powerinfer.prepare.packing import current, pack

KINDS = {"gate": "dot", "up": "dot", "down": "add"}


@pytest.mark.skipif(sys.platform != "linux", reason="what a mapping is like is read from /proc")
def test_copies_may_have_huge_pages() -> None:
    """Shared memory has none, as Linux is mostly set up, whatever it is advised."""
    memory = own_pages(8 << 20)
    place, flags = memory.ctypes.data, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags and " sh" not in flags


def packed(model: Checkpoint, gate: str | None = None, down: str | None = None) -> packing.Packed:
    return pack(model, None, choose_types(model, gate, down))


def unpacked(bundles: BundleFile, d_ff: int, matrix: str, layer: int) -> np.ndarray:
    """The values of one matrix's rows of every neuron, float32 [d_ff, d_model]."""
    layout = bundles.layouts[layer]
    row_type = layout.down_type if matrix == "down" else layout.gate_type
    at = getattr(layout, f"{matrix}_at")
    out = np.empty((d_ff, layout.d_model), np.float32)
    _native.unpack_bundle_rows(row_type, KINDS[matrix], layout.d_model, bundles.layers[layer], layout.pitch, at, out)
    return out


def expected(model: Checkpoint, matrix: str, layer: int, row_type: str) -> tuple[np.ndarray, np.ndarray]:
    """(values in the bundle, values in the model), float32 [d_ff, d_model], worked out in one piece."""
    name = f"layers.{layer}.{matrix}"
    by_neuron = matrix != "down" or model.has(f"{name}_rows")
    tensor = model.take(f"{name}_rows" if matrix == "down" and by_neuron else name)
    values = tensor.float32() if by_neuron else np.ascontiguousarray(tensor.float32().T)
    if row_type in BLOCKS:
        stored = BLOCKS[row_type]
        if not by_neuron and SHORT_BLOCKS.get(tensor.type, tensor.type) == stored:
            return (shortened(tensor) if tensor.type == "IQ4_XS" else values), values
        return dequantize(quantize(np.ascontiguousarray(values.T), stored), stored).T, values
    exact = tensor.type == row_type and (by_neuron or tensor.type in ("F16", "BF16"))
    exact = exact or (by_neuron and (tensor.type, row_type) in (("Q4_0", "Q8_0"), ("Q5_0", "Q8_0")))
    return (values if exact else dequantize(quantize(values, row_type), row_type)), values


def shortened(tensor: RawTensor) -> np.ndarray:
    """Values of IQ4_XS [d_model, neurons], transposed, with the scales of each 32 neurons as float16."""
    blocks = tensor.rows().reshape(tensor.shape[0], -1, block_type("IQ4_XS").nbytes)
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    high, low = blocks[..., 2:4].copy().view(np.uint16), np.repeat(blocks[..., 4:8], 2, axis=-1)
    number = np.arange(8)
    scales = d * ((low >> 4 * (number % 2) & 15 | (high >> 2 * number & 3) << 4).astype(np.float32) - 32)
    values = tensor.float32().reshape(*scales.shape, 32)
    codes = np.rint(values / np.where(scales == 0, 1, scales)[..., None])
    return np.ascontiguousarray(
        (codes * scales.astype(np.float16).astype(np.float32)[..., None]).reshape(tensor.shape).T
    )


def check(model: Checkpoint, made: packing.Packed) -> None:
    """Every value of every bundle, and the errors that were measured."""
    layout = made.bundles.layouts[0]
    assert set(made.error) == {"gate", "up", "down"} - ({"gate"} if not layout.gated else set())
    for matrix, error in made.error.items():
        row_type = layout.down_type if matrix == "down" else layout.gate_type
        wrong = whole = 0.0
        for layer in range(model.config.n_layers):
            values, own = expected(model, matrix, layer, row_type)
            assert np.array_equal(unpacked(made.bundles, model.config.widest_ffn, matrix, layer), values), (
                matrix,
                layer,
            )
            wrong += np.square(values.astype(np.float64) - own).sum()
            whole += np.square(own, dtype=np.float64).sum()
        assert error == pytest.approx(np.sqrt(wrong / whole), rel=1e-9)


# ---------------------------------------------------------------- which types


@pytest.mark.parametrize(
    ("source", "asked", "types"),
    [
        ("F16", (None, None), ("F16", "F16")),
        ("BF16", (None, None), ("BF16", "BF16")),
        ("F32", (None, None), ("F16", "F16")),
        ("Q8_0", (None, None), ("Q8_0", "Q8_0")),
        ("Q4_0", (None, None), ("Q4_0", "Q4_0X32")),
        ("Q4_1", (None, None), ("Q4_1", "Q4_1X32")),
        ("F16", (None, "Q4_0X32"), ("F16", "Q4_0X32")),
        ("Q4_0", ("Q4_1", "Q4_1X32"), ("Q4_1", "Q4_1X32")),
        ("Q4_0", (None, "Q8_0"), ("Q4_0", "Q8_0")),
        *((source, (None, None), (source, "Q8_0")) for source in STORED_ROWS if source not in SHORT_BLOCKS),
        *((source, (None, None), (source, f"{down}X32")) for source, down in SHORT_BLOCKS.items()),
        ("NVFP4", (None, None), ("Q8_0", "Q8_0")),
        ({"gate": "Q3_K", "up": "Q2_K", "down": "Q3_K"}, (None, None), ("Q8_0", "Q8_0")),
        *((source, (None, None), ("Q8_0", f"{source}X32")) for source in ("Q5_0", "Q5_1", "IQ4_NL")),
        ("F16", ("Q4_0", None), ("Q4_0", "Q8_0")),
        ("F16", ("BF16", None), ("BF16", "BF16")),
        ("F16", (None, "Q4_0"), ("F16", "Q4_0")),
        ("F32", ("BF16", None), ("BF16", "BF16")),
        ("Q4_0", ("F16", None), ("F16", "Q4_0X32")),
        ("Q4_K", ("Q4_0", "BF16"), ("Q4_0", "BF16")),
        ({"gate": "F16", "up": "F32", "down": "F16"}, (None, None), ("F16", "F16")),
        ({"gate": "BF16", "up": "F32", "down": "BF16"}, (None, None), ("BF16", "BF16")),
        ({"gate": "Q4_0", "up": "Q8_0", "down": "F16"}, (None, None), ("Q8_0", "F16")),
        ({"gate": "F16", "up": "F16", "down": "Q5_1"}, (None, None), ("F16", "Q5_1X32")),
    ],
)
def test_the_types_that_are_chosen(
    tmp_path: Path, source: Any, asked: tuple[str | None, str | None], types: tuple[str, str]
) -> None:
    model = checkpoint(tmp_path / "m", source, d_model=256, d_ff=256)
    chosen = choose_types(model, *asked)
    assert (chosen.gate, chosen.down) == types
    same = isinstance(source, str) and source != "IQ4_NL"
    if same:  # a note for each matrix that changes its type, no other
        assert len(chosen.notes) == (types[0] != source) + (types[1].removesuffix("X32") != source)


def test_down_that_is_neuron_by_neuron_already_keeps_its_type(tmp_path: Path) -> None:
    for kind in set(ROW_TYPES) & set(DOWN_TYPES):
        model = checkpoint(tmp_path / kind, kind, by_neuron=True)
        assert choose_types(model).down == kind
        made = packed(model)
        assert set(made.error.values()) == {0.0}
        check(model, made)
    model = checkpoint(tmp_path / "m", "Q4_1", by_neuron=True)
    assert choose_types(model).down == "Q8_0"


def test_quantising_on_load_goes_for_neurons_too(tmp_path: Path) -> None:
    for quantize_to in ("q8_0", "q4_0"):
        model = checkpoint(tmp_path / quantize_to, by_neuron=True, quantize=quantize_to)
        types = choose_types(model)
        assert (types.gate, types.down) == (quantize_to.upper(), "Q8_0")  # the model has down neuron by neuron
        check(model, pack(model, None, types))


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    types = {"gate": "F16", "up": "F16", "down": "Q4_0"}
    model = checkpoint(tmp_path / "m", types, d_model=50, d_ff=96)
    assert choose_types(model).down == "F16" and choose_types(model, "BF16").down == "F16"
    check(model, packed(model))
    with pytest.raises(RequestError, match="rows of 50 weights are not whole blocks of Q8_0"):
        choose_types(model, None, "Q8_0")
    with pytest.raises(RequestError, match="Q4_0"):
        choose_types(model, "Q4_0")
    with pytest.raises(RequestError, match="no rows of type Q4_K; choose one of F16, BF16, Q8_0, Q4_0"):
        choose_types(model, "Q4_K")
    with pytest.raises(RequestError, match="no rows of type Q4_0X32"):
        choose_types(model, "Q4_0X32")
    with pytest.raises(RequestError, match="no rows of type Q4_1; choose"):
        choose_types(model, None, "Q4_1")
    with pytest.raises(RequestError, match="rows of 50 weights are not whole blocks of Q4_0X32"):
        choose_types(model, None, "Q4_0X32")
    uneven = checkpoint(tmp_path / "n", "F16", d_model=64, d_ff=50)
    with pytest.raises(RequestError, match="50 neurons are not whole blocks of Q4_0X32"):
        choose_types(uneven, None, "Q4_0X32")


# ---------------------------------------------------------------- the weights


@pytest.mark.sampled
@pytest.mark.parametrize("source", sorted(NATIVE_TYPES))
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_bundles_of_every_source(tmp_path: Path, source: str, gated: bool) -> None:
    model = checkpoint(tmp_path / "m", source, d_model=256, d_ff=512, gated=gated)
    made = packed(model)
    check(model, made)
    assert made.bundles.layouts[0].gated == gated and made.bundles.source_type == source
    floats = {"F16", "BF16"}
    lossless = {
        matrix: source in {*floats, "Q4_0", "Q4_1"}
        or source
        in (
            ("Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
            if matrix == "down"
            else ("Q8_0", "Q5_0", *STORED_ROWS)
        )
        for matrix in made.error
    }
    assert {matrix: error == 0 for matrix, error in made.error.items()} == lossless
    # F32 to F16 rounds at 2**-11 of a weight, Q8_0 at 1/254 of the largest weight of 32, about 2.2 standard deviations
    assert max(made.error.values()) < 2 / 254


SOURCES = ("F32", "BF16", "Q4_0", "Q6_K")
WRITTEN = [kind for kind in DOWN_TYPES if kind != "IQ4_NLX32"]  # from any other type


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("source", "gate", "down"),  # each source with every type of gate and every type of down
    [
        (SOURCES[(i + j) % len(SOURCES)], gate, down)
        for i, gate in enumerate(ROW_TYPES)
        for j, down in enumerate(WRITTEN)
    ],
)
def test_every_pair_of_types(tmp_path: Path, source: str, gate: str, down: str) -> None:
    model = checkpoint(tmp_path / "m", source, d_model=256, d_ff=256, layers=1)
    check(model, packed(model, gate, down))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_model(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Sizes that are whole blocks of the source, cut into slabs anywhere; several threads."""
    source = data.draw(st.sampled_from(sorted(NATIVE_TYPES)), "source")
    block = block_type(source).block
    d_model = data.draw(st.integers(1, 600 // block), "d_model / block") * block
    d_ff = data.draw(st.integers(1, 1500 // block), "d_ff / block") * block
    fitting = [name for name in ROW_TYPES if d_model % block_type(name).block == 0]
    asked = st.none() | st.sampled_from(fitting)
    whole = d_model % 32 == d_ff % 32 == 0
    asked_of_down = st.none() | st.sampled_from(
        [name for name in WRITTEN if name in fitting or (whole and name in BLOCKS)]
    )
    gated, by_neuron, seed = data.draw(st.tuples(st.booleans(), st.booleans(), st.integers(0, 99)))
    model = checkpoint(
        tmp_path_factory.mktemp("any") / "m", source, d_model=d_model, d_ff=d_ff, gated=gated, by_neuron=by_neuron,
        seed=seed,
    )  # fmt: skip
    types = choose_types(model, data.draw(asked, "gate"), data.draw(asked_of_down, "down"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SLAB", data.draw(st.sampled_from([1, 1 << 17, 1 << 20]), "slab"))
        patch.setattr("powerinfer.kernels.cpu.usable_cores", lambda: (3, "a test"))
        check(model, pack(model, None, types))


def test_the_bytes_of_a_file_do_not_depend_on_slabs_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path / "m", "Q4_0", d_model=64, d_ff=1184)
    first = packed(model).bundles.path.read_bytes()
    monkeypatch.setattr(packing, "_SLAB", 1)
    for cores in (1, 4):
        monkeypatch.setattr("powerinfer.kernels.cpu.usable_cores", lambda cores=cores: (cores, "a test"))
        assert packed(model).bundles.path.read_bytes() == first


def test_weights_quantised_on_load(tmp_path: Path) -> None:
    """What is packed is what the dense path computes with: the codes of gate and up are those of --quantize."""
    model = checkpoint(tmp_path / "m", "F16", quantize="q4_0")
    made = packed(model)
    assert made.bundles.types == ("Q4_0", "Q4_0X32")
    assert made.error == {"gate": 0, "up": 0, "down": 0}
    check(model, made)


def test_bundles_of_a_real_file(tmp_path: Path) -> None:
    from model_files import tiny_gguf

    from powerinfer.formats.checkpoint import open_checkpoint

    path = tiny_gguf().write(tmp_path / "tiny.gguf")
    model = open_checkpoint(path)
    made = packed(model)
    check(model, made)
    assert made.bundles.path == tmp_path / "tiny.gguf.powerinfer" / "neurons.safetensors"
    assert 0 < made.error["gate"] < 2**-11, "F32 weights become F16"


@pytest.mark.parametrize("architecture", ["llama", "opt", "falcon", "bamboo"])
@pytest.mark.parametrize("published", [False, True], ids=["plain", "PWRI"])
def test_bundles_of_the_relu_families(tmp_path: Path, architecture: str, published: bool) -> None:
    """With and without a gate; PowerInfer's own files keep down neuron by neuron."""
    from model_files import family_gguf

    from powerinfer.formats.checkpoint import open_checkpoint

    model = open_checkpoint(family_gguf(architecture, published=published).write(tmp_path / "m.gguf"))
    assert model.has("layers.0.down_rows") == published
    check(model, packed(model))
    check(model, packed(model, "Q4_0", "Q8_0"))


def test_progress_counts_neurons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SLAB", 1)
    told: list[tuple[str, int, int]] = []
    model = checkpoint(tmp_path / "m", d_ff=600)
    pack(model, None, choose_types(model), lambda *state: told.append(state))
    assert told == [("packing neurons", done, 1200) for done in (256, 512, 600, 856, 1112, 1200)]


def test_memory_is_bounded_by_the_slabs_not_by_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's floats would take 96 MB; a slab of three matrices takes 3 MB, and temporaries a few times that."""
    monkeypatch.setattr(packing, "_SLAB", 1 << 16)
    monkeypatch.setattr("powerinfer.kernels.cpu.usable_cores", lambda: (2, "a test"))
    model = checkpoint(tmp_path / "m", "Q4_0", d_model=1024, d_ff=8192, layers=1)
    types = choose_types(model, "Q8_0")
    tracemalloc.start()
    pack(model, None, types)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32e6


@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_weights_too_large_for_the_type(tmp_path: Path, matrix: str) -> None:
    model = checkpoint(tmp_path / "m.gguf", "F32")
    tensor = model.take(f"layers.1.{matrix}")
    values = tensor.float32().copy()
    values[-1, -1] = -7e4
    model._tensors[f"layers.1.{matrix}"] = type(tensor)("F32", tensor.shape, values.view(np.uint8).reshape(-1))
    flag = "--down-type bf16" if matrix == "down" else "--type bf16"
    with pytest.raises(ModelError, match=f"m.gguf: layers.1.{matrix} has a weight that F16 cannot hold; `{flag}`"):
        packed(model)
    assert left_in(tmp_path) == []
    packed(model, "BF16")
    values[-1, -1] = np.nan
    for kind in ("BF16", "Q8_0"):
        with pytest.raises(ModelError, match=rf"layers\.1\.{matrix}.*(cannot hold|not a number)"):
            packed(model, kind)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_packing_that_ends_early_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException | type[BaseException]
) -> None:
    model = checkpoint(tmp_path / "m.gguf")
    old = packed(model).bundles.path.read_bytes()
    write, count = os.write, [0]

    def fail(fd: int, data: memoryview) -> int:
        count[0] += 1
        if count[0] > 2:
            raise ending
        return write(fd, data)

    monkeypatch.setattr(prepared.os, "write", fail)
    with pytest.raises((KeyboardInterrupt, PowerInferError)):
        packed(model, "BF16")
    assert left_in(tmp_path) == ["neurons.safetensors"]
    assert open_bundles(model, None, cpu.bundle_row_bytes).path.read_bytes() == old


def test_what_is_current(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m.gguf")
    types = choose_types(model)
    assert current(model, None, types) is None
    packed(model)
    found = current(model, None, types)
    assert found is not None and found.layouts[0].gate_type == "F16"
    assert current(model, None, choose_types(model, "Q8_0")) is None
    assert current(model, None, choose_types(model, None, "Q8_0")) is None
    assert current(model, str(tmp_path / "elsewhere"), types) is None
    assert current(checkpoint(tmp_path / "m.gguf", seed=2), None, types) is None


# ---------------------------------------------------------------- the file


def test_the_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = checkpoint(tmp_path / "m.gguf", d_model=50, d_ff=37)
    bundles = packed(model).bundles
    assert bundles.layouts[0].group_bytes == 32 * 3 * 128 and bundles.nbytes == 2 * 2 * 32 * 384
    assert bundles.file.size == 4096 + bundles.nbytes
    stored = load_file(bundles.path)
    base = bundles.file.view().ctypes.data
    for layer, rows in enumerate(bundles.layers):
        assert rows.shape == (2, 32 * 384) and not rows.flags.writeable
        assert (rows.ctypes.data - base) % 64 == 0
        assert np.array_equal(stored[f"layers.{layer}.neurons"], rows)
    assert bundles.layers[0].ctypes.data - base == 4096


def refused(model: Checkpoint, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_bundles(model, None, cpu.bundle_row_bytes)
    message = str(caught.value)
    assert re.search(why, message), message
    assert f"`powerinfer pack -m {model.path}`" in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"d_model": 65}, "states a d_model of 65, and the model has 128"),
        ({"neurons": [1 << 80, 96]}, "neurons.*1208925819614629174706176"),
        ({"neurons": [97, 96]}, r"states a neurons of \[97, 96\]"),
        ({"n_layers": None}, "n_layers is 'None', not a whole number"),
        ({"gated": [False, False]}, "kind of FFN"),
        ({"gated": [True, False]}, "kind of FFN"),
        ({"gated": [True]}, "kind of FFN"),
        ({"gated": [True, 1]}, "gated.* is '1', not true or false"),
        ({"gated": True}, "gated is 'True', not a list"),
        ({"gate_type": "F32"}, "rows of type 'F32'"),
        ({"gate_type": None}, "gate_type is 'None', not a text"),
        ({"down_type": ["F16"]}, "down_type is .*, not a text"),
        ({"down_types": ["F16"]}, "states 1 types of down, and the model has 2 layers"),
        ({"down_types": ["F16", "F17"]}, "holds rows of type 'F17', which it cannot"),
        ({"gate_type": "Q4_0X32"}, "rows of type"),
        ({"down_type": "Q8_0"}, r"does not hold layers\.0\.neurons as \[3, "),
        ({"format": 1}, r"another version of powerinfer \(format '1', not 4\)"),
        ({"format": 3}, r"another version of powerinfer \(format '3', not 4\)"),
        ({"format": BUNDLES.format + 1}, "another version"),
    ],
)
def test_descriptions_that_do_not_suit(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    model = checkpoint(tmp_path / "m.gguf", d_model=128)
    packed(model)
    describe(PreparedFile(BUNDLES, model), lambda description: description.update(change))
    refused(model, why)


def test_types_whose_blocks_the_rows_do_not_fill(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m.gguf", d_model=50)
    packed(model)
    describe(PreparedFile(BUNDLES, model), lambda description: description.update(gate_type="Q8_0"))
    refused(model, "rows of type 'Q8_0'")


def reshape(header: dict[str, Any]) -> None:
    rows, stride = header["layers.1.neurons"]["shape"]
    header["layers.1.neurons"]["shape"] = [rows * 2, stride // 2]


def retype(header: dict[str, Any]) -> None:
    rows, stride = header["layers.0.neurons"]["shape"]
    header["layers.0.neurons"].update(dtype="F16", shape=[rows, stride // 2])


def rename(header: dict[str, Any]) -> None:
    header["layers.2.neurons"] = header.pop("layers.1.neurons")


def split(header: dict[str, Any]) -> None:
    rows, stride = header["layers.1.neurons"]["shape"]
    begin, end = header["layers.1.neurons"]["data_offsets"]
    header["layers.1.neurons"].update(shape=[rows - 1, stride], data_offsets=[begin, end - stride])
    header["more"] = {"dtype": "U8", "shape": [stride], "data_offsets": [end - stride, end]}


@pytest.mark.parametrize("edit", [reshape, retype, rename, split])
def test_tensors_that_do_not_suit(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    model = checkpoint(tmp_path / "m.gguf")
    packed(model)
    edit_header(PreparedFile(BUNDLES, model), edit)
    refused(model, r"does not hold layers\.\d\.neurons")


def test_tensors_beside_the_bundles(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m.gguf")
    path = packed(model).bundles.path
    size = path.stat().st_size - 4096
    with path.open("ab") as file:
        file.write(bytes(64))

    def add(header: dict[str, Any]) -> None:
        header["more"] = {"dtype": "U8", "shape": [64], "data_offsets": [size, size + 64]}

    edit_header(PreparedFile(BUNDLES, model), add)
    refused(model, "do not belong there, such as 'more'")


def test_bundles_across_cache_lines(tmp_path: Path) -> None:
    """A file that is right in itself, but whose header is not padded: the kernels would read across lines."""
    model = checkpoint(tmp_path / "m.gguf")
    path = packed(model).bundles.path
    raw = path.read_bytes()
    text = raw[8:4096].rstrip()
    text += b" " * (-len(text) % 64)  # 8 bytes off
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[4096:])
    json.loads(text)
    refused(model, "where no cache line begins")


def test_another_model(tmp_path: Path) -> None:
    packed(checkpoint(tmp_path / "m.gguf"))
    refused(checkpoint(tmp_path / "m.gguf", seed=2), "another model")
    refused(checkpoint(tmp_path / "m.gguf", "BF16"), "another model")


def test_no_bundles(tmp_path: Path) -> None:
    refused(checkpoint(tmp_path / "m.gguf"), "there is no")


@pytest.mark.parametrize("kind", [BUNDLES, PREDICTOR], ids=["bundles", "predictor"])
def test_damaged_files_are_read_or_refused(tmp_path: Path, kind: Kind) -> None:
    """Bytes of the header changed, doubled and left out at random: no other error than ModelError, and no long wait."""
    model = checkpoint(tmp_path / "m.gguf", d_ff=32)
    if kind is BUNDLES:
        packed(model)
    else:
        layers = [Predictor(4, 0.5, 1), Predictor(8, 0.5, 1)]
        weights = [(np.ones((one.rank, 64), np.float32), np.ones((32, one.rank), np.float32)) for one in layers]
        write_predictor(model, None, "F16", layers, weights)
    place = PreparedFile(kind, model)
    whole = place.path.read_bytes()
    used = len(whole[:4096].rstrip())
    refusals = 0
    for case in range(1500):
        rng = random.Random(case)
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(used)
            end = min(used, at + rng.randint(1, 8))
            change = rng.choice([bytes([rng.randrange(256)]), b"9", b'"', b"", bytes(raw[at:end]) * 2, b"1e999", b"-1"])
            raw[at : end if rng.random() < 0.5 else at + 1] = change
        if rng.random() < 0.7:  # the length goes with the text, so that the damage is found deeper
            raw[:8] = (len(raw) - (len(whole) - 4096) - 8).to_bytes(8, "little")
        place.path.write_bytes(raw)
        begin = time.process_time()
        try:
            open_bundles(model, None, cpu.bundle_row_bytes) if kind is BUNDLES else open_predictor(model)
        except ModelError as error:
            refusals += 1
            assert place.command in str(error) and "\n" not in str(error)
        assert time.process_time() - begin < 1, case
    assert refusals > 1000, "damage that is not noticed lies in names of no account, or in spaces"


# ---------------------------------------------------------------- the command


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from model_files import tiny_gguf

    return tiny_gguf().write(tmp_path / "tiny.gguf")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    from powerinfer.cli.main import main

    status = main(list(args))
    said = capsys.readouterr()
    return status, said.out, said.err


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run(capsys, *args, "--json")
    assert status == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def test_the_verb(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document(capsys, "pack", "-m", str(tiny))
    path = tiny.with_name("tiny.gguf.powerinfer") / "neurons.safetensors"
    assert made["path"] == str(path) and made["bytes"] == path.stat().st_size
    assert made["types"] == {"gate": "F16", "up": "F16", "down": "F16"} and made["layers"] == 2
    assert set(made["error"]) == {"gate", "up", "down"} and all(0 < e < 2**-11 for e in made["error"].values())
    assert made["seconds"] > 0
    found = made["agreement"]  # float32 weights became float16
    assert 0 < found["max_abs_logit_diff"] < 1 and 0 <= found["mean_kl"] < 1e-3 and found["tokens"] > 100
    assert found["active_fraction"] == 1 and found["top1_agreement"] > 0.98
    assert document(capsys, "pack", "-m", str(tiny), "--force", "--no-check")["agreement"] is None
    again = document(capsys, "pack", "-m", str(tiny))
    assert again == made | {"error": None, "seconds": 0.0, "agreement": None}
    before = path.stat().st_ino
    status, out, err = run(capsys, "pack", "-m", str(tiny))
    assert status == 0 and "up to date" in out and path.stat().st_ino == before
    status, out, err = run(capsys, "pack", "-m", str(tiny), "--force")
    assert status == 0 and "packed in" in out and "mean KL" in out and path.stat().st_ino != before
    assert "nothing to gain: silu is never exactly zero; only --selector threshold" in out
    assert "gate and up: F32 becomes F16" in err


def test_the_verb_remakes_what_does_not_suit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document(capsys, "pack", "-m", str(tiny))
    other = document(capsys, "pack", "-m", str(tiny), "--type", "q4_0", "--down-type", "bf16")
    assert other["types"] == {"gate": "Q4_0", "up": "Q4_0", "down": "BF16"} and other["error"] is not None
    quantised = document(capsys, "pack", "-m", str(tiny), "--quantize", "q8_0")
    assert quantised["error"]["gate"] == 0 < quantised["error"]["down"]
    assert document(capsys, "pack", "-m", str(tiny))["error"] is not None


def test_the_verb_writes_elsewhere(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = document(capsys, "pack", "-m", str(tiny), "--prepared", str(tmp_path / "a" / "b"))
    assert made["path"] == str(tmp_path / "a" / "b" / "neurons.safetensors")
    assert not tiny.with_name("tiny.gguf.powerinfer").exists()


def test_the_verb_fails_in_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.with_name("tiny.gguf.powerinfer").write_bytes(b"")
    status, out, err = run(capsys, "pack", "-m", str(tiny))
    assert status == 1 and out == "" and "--prepared" in err and len(err.splitlines()) == 1
    status, out, err = run(capsys, "pack", "-m", str(tiny), "--type", "q5_0")
    assert status == 2 and "must be one of" in err and "q5_0" in err


def test_inspect_shows_what_is_prepared(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from powerinfer.formats.checkpoint import open_checkpoint

    folder = str(tiny.with_name("tiny.gguf.powerinfer"))
    shown = document(capsys, "inspect", "-m", str(tiny))["prepared"]
    assert shown == {"folder": folder} | dict.fromkeys(("profile", "predictor", "bundles", "plan", "report"))
    assert f"nothing in {folder}" in run(capsys, "inspect", "-m", str(tiny))[1]

    made = document(capsys, "pack", "-m", str(tiny), "--down-type", "q8_0")
    model = open_checkpoint(tiny)
    layers = [Predictor(8, -0.5, 0), Predictor(16, 0.25, 5)]
    d_model, d_ff = model.config.d_model, model.config.widest_ffn
    weights = [(np.ones((one.rank, d_model), np.float32), np.ones((d_ff, one.rank), np.float32)) for one in layers]
    path = write_predictor(model, None, "BF16", layers, weights)
    shown = document(capsys, "inspect", "-m", str(tiny))["prepared"]
    types = {"gate": "F16", "up": "F16", "down": "Q8_0"}
    assert shown["bundles"] == {"path": made["path"], "bytes": made["bytes"], "stale": None, "types": types}
    assert shown["predictor"]["type"] == "BF16" and shown["predictor"]["bytes"] == path.stat().st_size
    assert shown["predictor"]["layers"][1] == {"rank": 16, "threshold": 0.25, "floor": 5}
    text = run(capsys, "inspect", "-m", str(tiny))[1]
    assert re.search(r"^bundles +gate F16, up F16, down Q8_0, .*up to date$", text, re.MULTILINE)
    assert re.search(r"^predictor +BF16, .*ranks 8 to 16, thresholds -0.5 to 0.25$", text, re.MULTILINE)

    shown = document(capsys, "inspect", "-m", str(tiny), "--quantize", "q8_0")["prepared"]
    for name, verb in (("bundles", "pack"), ("predictor", "train")):
        assert f"`powerinfer {verb} -m {tiny} --quantize q8_0`" in shown[name]["stale"] and "types" not in shown[name]
    path.write_bytes(b"")
    status, text, _ = run(capsys, "inspect", "-m", str(tiny))
    assert status == 0 and re.search(r"^predictor +.*truncated", text, re.MULTILINE)
