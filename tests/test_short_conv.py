"""Gated short convolutions: the native operator against numpy, and models that cannot be right. Its states:
test_states.py; on a GPU: test_gpu_short_conv.py; against `transformers`: test_architectures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import D, conv_gguf

from powerinfer import ModelError, _native
from powerinfer.config import FfnConfig, ShortConvConfig
from powerinfer.devices.states import state_bytes
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config

KINDS = [ShortConvConfig(48, 3), ShortConvConfig(D, 2, bias=True), ShortConvConfig(80, 8, bias=True)]


def reference(about: ShortConvConfig, tensors: dict[str, np.ndarray], n: np.ndarray) -> np.ndarray:
    """What a layer adds to tokens of a sequence from its begin, of their normalised rows n, in float64."""
    get = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    b, c, x = (n @ get[part].T + get.get(f"{part}_bias", 0.0) for part in "bcx")
    padded = np.concatenate([np.zeros((about.taps - 1, about.size)), b * x])
    mixed = sum(padded[j : j + len(n)] * get["conv"][:, j] for j in range(about.taps)) + get.get("conv_bias", 0.0)
    return np.asarray((c * mixed) @ get["o"].T + get.get("o_bias", 0.0))


class Layer:
    """A program for one layer, and everything that it takes."""

    def __init__(self, about: ShortConvConfig) -> None:
        self.about, rng = about, np.random.default_rng(1)
        self.pool, self.arena = _native.Pool(2), _native.Arena()
        self.workspace = _native.Workspace(self.pool, "")
        self.tensors: dict[str, np.ndarray] = {}
        for name, shape in about.tensors(D):
            drawn = rng.standard_normal(shape).astype(np.float32)
            self.tensors[name.removeprefix("short_")] = drawn / np.float32(shape[-1] ** 0.5)
        get = self.tensors.get
        self.matrices = [self.matrix(self.tensors[name]) for name in "xbc"]
        self.rest: dict[str, Any] = {
            "biases": [get(f"{name}_bias") for name in "xbc"],
            "taps": np.ascontiguousarray(self.tensors["conv"].T),
            "taps_bias": get("conv_bias"),
        }

    def matrix(self, values: np.ndarray) -> _native.Matrix:
        data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        return _native.pack_matrix(self.pool, self.arena, "F32", *values.shape, data, None)

    def program(self, sizes: tuple[Any, ...] | None = (), attended: int = 0) -> _native.Program:
        """sizes: of the states, (): the layer's own, None: there are none."""
        about = self.about
        own = about.taps, 0, 0, about.n_heads, about.head_dim, False, False
        memory = None if sizes is None else _native.States([sizes or own], 2)
        cache = _native.Cache("f32", [(0, about.head_dim)], 2)
        heads = about.n_heads if sizes == () else 1
        return _native.Program(self.workspace, cache, 64, D, 64, [heads], None, memory, attended)


@pytest.mark.parametrize("about", KINDS, ids=lambda one: f"{one.size} x {one.taps}")
def test_a_layer_against_numpy(about: ShortConvConfig) -> None:
    """A text at once and in pieces, which have the same bits, wherever its state is read and written."""
    layer = Layer(about)
    program, tokens = layer.program(), 50
    program.short_conv(0, 0, None, layer.matrices, **layer.rest)
    program.project(0, layer.matrix(layer.tensors["o"]), layer.tensors.get("o_bias"))
    x = np.random.default_rng(2).standard_normal((tokens, D)).astype(np.float32)
    pages, answers = np.array([[0, 1]], np.int32), []
    for pieces in ([tokens], [1] * tokens, [17, 1, 32]):
        at, state, rows = 0, 0, []
        for count in pieces:
            zero, slots = np.zeros(count, np.int32), [np.array([one % 2], np.int32) for one in (state, state + 1)]
            program.residual(count)[:] = x[at : at + count]
            places = np.arange(at, at + count, dtype=np.int32)
            program.run(zero, places, zero, pages, zero[:0], np.zeros((1, 16), np.float32), 0, 2, 16, *slots)
            rows.append(program.residual(count).copy())
            at, state = at + count, state + 1
        answers.append(np.concatenate(rows))
    expected = x + reference(about, layer.tensors, x.astype(np.float64))
    assert np.abs(answers[0] - expected).max() < 1e-5 * np.abs(expected).max()
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])


def test_a_native_layer_is_checked() -> None:
    layer = Layer(KINDS[0])
    layer.program().short_conv(0, 0, None, layer.matrices, **layer.rest)
    for at in range(3):
        wrong = [*layer.matrices]
        wrong[at] = layer.matrix(np.zeros((32, D)))
        with pytest.raises(ValueError, match="wrong shape"):
            layer.program().short_conv(0, 0, None, wrong, **layer.rest)
    three = np.zeros(3, np.float32)
    for name, value in {
        "taps": np.zeros((4, 48), np.float32),
        "taps_bias": three,
        "biases": [three, None, None],
    }.items():
        with pytest.raises(ValueError):
            layer.program().short_conv(0, 0, None, layer.matrices, **layer.rest | {name: value})
    for sizes in (None, (3, 1, 16, 1, 16, False, False), (3, 1, 16, 1, 16, True, False)):
        with pytest.raises(ValueError, match="states"):
            layer.program(sizes).short_conv(0, 0, None, layer.matrices, **layer.rest)
    with pytest.raises(ValueError, match="three matrices"):
        layer.program().short_conv(0, 0, None, layer.matrices[:2], **layer.rest)
    with pytest.raises(ValueError, match="no room"):
        layer.program((3, 0, 0, 3, 16, False, False)).short_conv(0, 0, None, layer.matrices, **layer.rest)
    for sizes in (
        (3, 0, 16, 3, 16, False, False), (3, 0, 0, 3, 16, True, False),
        (3, 0, 0, 0, 16, False, False), (3, 1, 0, 3, 16, False, False),
    ):
        with pytest.raises(ValueError, match="heads"):
            _native.States([sizes], 2)
    vector = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="not one of Gated DeltaNet"):
        layer.program().delta_net(0, 0, None, layer.matrices * 2, layer.rest["taps"], vector, vector,
                                  _native.Norm(np.ones(16, np.float32), 1e-6), 1, False, "silu")  # fmt: skip


def test_what_the_states_take(tmp_path: Path) -> None:
    config = open_checkpoint(conv_gguf().write(tmp_path / "m.gguf")).config
    kinds = list(config.states.values())
    sizes = [
        (one.taps, one.n_key_heads, one.key_dim, one.n_value_heads, one.value_dim, one.chunked, False) for one in kinds
    ]
    assert len(kinds) == 2 and _native.States(sizes, 3).slot_bytes == state_bytes(config) == 2 * 2 * D * 4


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("shortconv.l_cache", 1, "2 to 8"),
        ("shortconv.l_cache", 4, "has shape"),
        ("attention.head_count_kv", [0, 2], "for every layer"),
        ("attention.head_count_kv", [2, 2, 0], "missing"),
        ("attention.sliding_window", 5, "sliding_window is"),
        ("ssm.conv_kernel", 3, "does not know"),
    ],
)
def test_wrong_settings(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = conv_gguf().drop(f"lfm2.{key}").fields({key: value}, "lfm2.").write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=why):
        open_checkpoint(path)


LFM2: dict[str, Any] = {
    "model_type": "lfm2", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "full_attn_idxs": [1], "intermediate_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({}, 256), ({"block_ff_dim": 12288}, 8192), ({"block_multiple_of": 5}, 65),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 8}, 96), ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)  # fmt: skip
def test_neurons_follow_from_several_keys(change: dict[str, Any], size: int) -> None:
    config = read_config(LFM2 | change, Path("lfm2"))
    assert config.tied_embeddings and config.layers[0].ffn == FfnConfig(size)
    assert [isinstance(layer.attention, ShortConvConfig) for layer in config.layers] == [True, False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"full_attn_idxs": [3]}, "not numbers of some of 3 layers"),
        ({"layer_types": ["conv", "linear_attention", "conv"]}, "not full_attention or conv for every layer"),
        ({"layer_types": ["conv"]}, "for every layer"),
        ({"conv_L_cache": 9}, "2 to 8"),
        ({"hidden_size": 72}, "72 channels, no multiple of 16"),
        ({"block_ffn_dim_multiplier": 1e6, "intermediate_size": 1 << 20}, "gives .* neurons"),
        ({"sliding_window": 5}, "sliding_window is"),
    ],
)
def test_configurations_that_cannot_be(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        layout.check(read_config(LFM2 | change, Path("lfm2")), "lfm2")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_convolution_that_is_no_number(tmp_path: Path, value: float) -> None:
    builder = conv_gguf()
    builder.tensors = [one for one in builder.tensors if one.name != "blk.0.shortconv.conv.weight"]
    path = builder.tensor("blk.0.shortconv.conv.weight", np.full((D, 3), value, np.float32)).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"layers\.0\.short_conv holds values that are no numbers"):
        open_checkpoint(path).take("layers.0.short_conv")
