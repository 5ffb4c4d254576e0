"""Mamba2: the native operator against numpy, and models that cannot be right. Its states: test_states.py, its kernels:
native/test_mamba.cpp. Against `transformers`: test_architectures.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from model_files import D, experts_gguf, mamba_gguf
from state_steps import CONTEXT, executor, step, texts

from benchmarks.models.gguf_writer import U32, Builder
from powerinfer import ModelError, _native
from powerinfer.config import Mamba2Config
from powerinfer.devices.states import state_bytes
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.json_file import read_json


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = mamba_gguf().put("nemotron_h.context_length", U32, CONTEXT)
    return builder.write(tmp_path_factory.mktemp("mamba") / "m.gguf")


# --- the executor


def test_what_the_states_take(path: Path) -> None:
    config = open_checkpoint(path).config
    kinds = [one for one in config.states.values() if isinstance(one, Mamba2Config)]
    layers = [(one.taps, one.n_groups, one.state_dim, one.n_heads, one.head_dim, True, False) for one in kinds]
    native = _native.States(layers, 3)
    assert len(kinds) == 2 and native.slot_bytes == state_bytes(config)


# --- the operator, against numpy in float64


@pytest.mark.parametrize("isa", _native.levels())
def test_a_layer_against_numpy(path: Path, isa: str) -> None:
    tensors = {
        one.name: np.frombuffer(one.data, np.float32).reshape(one.dims[::-1]) for one in mamba_gguf().tensors
    }
    text = texts(1, 100, 4)[0]
    x = tensors["token_embd.weight"][text].astype(np.float64)
    about = open_checkpoint(path).config.layers[0].attention
    assert isinstance(about, Mamba2Config)
    z, xbc, dt = np.split(tensors["blk.0.ssm_in.weight"], [about.width, about.width + about.channels])
    own = {"z": z, "xbc": xbc, "dt": dt, "conv": tensors["blk.0.ssm_conv1d.weight"]}
    own |= {"conv_bias": tensors["blk.0.ssm_conv1d.bias"], "step_bias": tensors["blk.0.ssm_dt.bias"]}
    own |= {name: tensors[f"blk.0.ssm_{name}"].reshape(-1) for name in ("a", "d")}
    own |= {"norm": tensors["blk.0.ssm_norm.weight"].reshape(-1), "o": tensors["blk.0.ssm_out.weight"]}
    n = reference.rms_norm(x, tensors["blk.0.attn_norm.weight"], 1e-5)
    expected = x + reference.mamba_layer(about, own, n, 1e-5)
    model = executor(path, isa=isa)
    program = model._program
    model.forward(step(text, 0, 0, 0))
    assert [name for name, _ in program.take_times()][:3] == ["embed", "mamba", "project"]
    model.slots = model._states.begin(step(text, 0, 0, 1))  # type: ignore[union-attr]
    model._run(step(text, 0, 0, 1), 0, 3)
    ours = program.residual(len(text)).astype(np.float64)
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()
    model.close()


class Layer:
    """A program for one layer, and everything that it takes; x, norms and their order may be any."""

    def __init__(self, about: Mamba2Config, seed: int = 1) -> None:
        self.about, rng = about, np.random.default_rng(seed)
        self.pool, self.arena = _native.Pool(2), _native.Arena()
        self.workspace = _native.Workspace(self.pool, "")
        self.tensors: dict[str, np.ndarray] = {}
        for name, shape in about.tensors(D):
            drawn = rng.standard_normal(shape).astype(np.float32)
            made = drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else drawn
            self.tensors[name.removeprefix("mamba_")] = made
        self.tensors["a"] = -np.exp(self.tensors["a"] - 2)
        get = self.tensors.get
        taps = np.ascontiguousarray(self.tensors["conv"].T * self.of_channels())
        parts = [] if about.norm == "none" else np.split(self.tensors["norm"], about.norm_groups)
        self.rest: dict[str, Any] = {
            "biases": [get("z_bias"), get("xbc_bias"), get("dt_bias")],
            "taps": taps,
            "taps_bias": get("conv_bias"),
            "of_heads": [self.tensors[name] for name in ("a", "d", "step_bias")],
            "steps": about.step_limits,
            "scales": (about.scales[0], about.scales[4]),
            "out_norms": [_native.Norm(np.ascontiguousarray(part), 1e-5) for part in parts],
            "gated": about.norm == "gated",
            "activation": about.activation,
        }
        self.matrices = [self.matrix(self.tensors[name]) for name in ("z", "xbc", "dt")]

    def of_channels(self) -> np.ndarray:
        keys = self.about.n_groups * self.about.state_dim
        return np.repeat(np.array(self.about.scales[1:4], np.float32), (self.about.width, keys, keys))

    def matrix(self, values: np.ndarray) -> _native.Matrix:
        data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        return _native.pack_matrix(self.pool, self.arena, "F32", *values.shape, data, None)

    def program(self, states: bool = True, chunked: bool = True, heads: int = 0) -> _native.Program:
        about = self.about
        sizes = about.taps, about.n_groups, about.state_dim, heads or about.n_heads, about.head_dim, chunked, False
        memory = _native.States([sizes], 2) if states else None
        cache = _native.Cache("f32", [(0, about.head_dim)], 2)
        return _native.Program(self.workspace, cache, 64, D, 64, [about.n_heads], None, memory)


KINDS = [
    Mamba2Config(4, 16, 1, 32, 2, norm="before", norm_groups=2, step_limits=(0.3, 0.9)),
    Mamba2Config(6, 80, 3, 16, 4, conv_bias=False, bias=True, norm="none", scales=(0.5, 2.0, 1.5, 0.7, 1.2)),
    Mamba2Config(3, 32, 3, 48, 8, activation="relu2", norm_groups=1, step_limits=(0.0, 0.5)),
]


@pytest.mark.parametrize("about", KINDS, ids=lambda one: one.norm)
def test_every_setting_against_numpy(about: Mamba2Config) -> None:
    layer = Layer(about)
    program = layer.program()
    program.mamba(0, 0, None, layer.matrices, **layer.rest)
    program.project(0, layer.matrix(layer.tensors["o"]), layer.tensors.get("o_bias"))
    tokens = 50
    x = np.random.default_rng(2).standard_normal((tokens, D)).astype(np.float32)
    zero, slot = np.zeros(tokens, np.int32), np.zeros(1, np.int32)
    pages = np.zeros((1, 2), np.int32)
    pages[0, 1] = 1
    program.residual(tokens)[:] = x
    program.run(zero, np.arange(tokens, dtype=np.int32), zero, pages, slot[:0], np.zeros((1, 16), np.float32), 0, 2, 16,
                slot, slot)  # fmt: skip
    expected = x + reference.mamba_layer(about, dict(layer.tensors), x, 1e-5)
    assert np.abs(program.residual(tokens) - expected).max() < 2e-5 * np.abs(expected).max()


def test_a_native_layer_is_checked() -> None:
    layer = Layer(KINDS[0])
    layer.program().mamba(0, 0, None, layer.matrices, **layer.rest)
    for at in range(3):
        wrong = [*layer.matrices]
        wrong[at] = layer.matrix(np.zeros((3, D)))
        with pytest.raises(ValueError, match="wrong shape"):
            layer.program().mamba(0, 0, None, wrong, **layer.rest)
    three, none = np.zeros(3, np.float32), layer.rest["of_heads"]
    for name, value in {
        "taps": np.zeros((3, 128), np.float32),
        "taps_bias": three,
        "of_heads": [three, *none[1:]],
        "biases": [three, None, None],
        "steps": (1.0, 0.5),
        "out_norms": [_native.Norm(np.ones(48, np.float32), 1e-6)],
        "activation": "gelu_tanh",
    }.items():
        with pytest.raises(ValueError):
            layer.program().mamba(0, 0, None, layer.matrices, **layer.rest | {name: value})
    for program in (layer.program(states=False), layer.program(chunked=False)):
        with pytest.raises(ValueError, match="states"):
            program.mamba(0, 0, None, layer.matrices, **layer.rest)
    with pytest.raises(ValueError, match="three matrices"):
        layer.program().mamba(0, 0, None, layer.matrices[:2], **layer.rest)


# --- models that cannot be right


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("ssm.group_count", 3, "cannot share 3 groups"),
        ("ssm.time_step_rank", 5, "5 heads do not divide"),
        ("ssm.state_size", 8, "no multiples of 16"),
        ("ssm.state_size", 32, "has shape"),
        ("ssm.conv_kernel", 9, "2 to 8"),
        ("ssm.conv_kernel", 3, "has shape"),
        ("ssm.inner_size", 64, "has shape"),
        ("attention.head_count_kv", [0, 0, 0], "for every layer"),
        ("attention.head_count_kv", [2, 0, 2, 0], "missing"),
        ("feed_forward_length", [0, 0, 0, 0], "missing"),
        ("moe_latent_size", 32, "does not know"),
    ],
)
def test_wrong_settings(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = mamba_gguf().drop(f"nemotron_h.{key}").fields({key: value}, "nemotron_h.").write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=why):
        open_checkpoint(path)


def nan(builder: Builder, name: str, value: float) -> Builder:
    old = next(one for one in builder.tensors if one.name == name)
    values = np.frombuffer(old.data, np.float32).reshape(old.dims[::-1]).copy()
    values.reshape(-1)[1] = value
    builder.tensors.remove(old)
    return builder.tensor(name, values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssm_a", np.nan), ("ssm_a", 0.5), ("ssm_dt.bias", np.nan), ("ssm_d", np.inf), ("ssm_conv1d.weight", np.nan),
        ("ssm_conv1d.bias", np.inf),
    ],
)  # fmt: skip
def test_heads_whose_states_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    path = nan(mamba_gguf(), f"blk.0.{name}", value).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"layers\.0\.mamba_\w+ holds values that are no numbers, or make states grow"):
        executor(path)


@pytest.mark.parametrize("name", ["ssm_a", "ssm_d", "ssm_dt.bias", "ssm_in.weight", "ssm_conv1d.weight"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    builder = mamba_gguf()
    builder.tensors = [one for one in builder.tensors if one.name != f"blk.0.{name}"]
    with pytest.raises(ModelError, match="missing"):
        open_checkpoint(builder.write(tmp_path / "m.gguf"))


NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
    "ssm_state_size": 16, "n_routed_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 64, "time_step_limit": [0.0, float("inf")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hybrid_override_pattern": "MX*-"}, "has the letter 'X'; only M"),
        ({"hybrid_override_pattern": "ME*"}, "has 3 layers, not 4"),
        ({"layers_block_type": ["mamba", "moe", "swa", "mlp"]}, "holds 'swa'; only mamba"),
        ({"layers_block_type": "ME*-"}, "layers_block_type holds 'ME"),
        ({"n_groups": 3}, "4 heads of Mamba2 cannot share 3 groups"),
        ({"mamba_head_dim": 24}, "no multiples of 16"),
        ({"conv_kernel": 1}, "2 to 8"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit is .*, not two ascending numbers"),
        ({"time_step_limit": [0.0, "many"]}, "not two ascending numbers"),
        ({"mamba_hidden_act": "gelu"}, "only silu, relu, relu2 are supported"),
        ({"mlp_hidden_act": "silu"}, "of this family only relu, relu2"),
        ({"n_group": 3, "topk_group": 1}, "8 experts cannot be divided into 3 groups"),
        ({"mlp_bias": True}, "mlp_bias is 'True', which this engine does not support"),
        ({"sliding_window": 5}, "sliding_window is"),
    ],
)
def test_configurations_that_cannot_be(change: dict[str, Any], why: str) -> None:
    folder = Path("nemotron")
    layout.check(read_config(NEMOTRON, folder), "nemotron")
    with pytest.raises(ModelError, match=why):
        layout.check(read_config(NEMOTRON | change, folder), "nemotron")


def test_why_neurons_are_not_told_apart(path: Path) -> None:
    dense = open_checkpoint(path).config
    assert dense.whole_reason is None and dense.rectified and list(dense.neurons) == [1], "test_dense_hybrids.py"
    mixed = read_config(NEMOTRON, Path("nemotron")).whole_reason
    assert mixed is not None and mixed.startswith("1 of 4 layers have another kind of FFN (8 experts of 48 neurons")


def test_infinity_in_config_json(tmp_path: Path) -> None:
    """Python writes it, and JSON does not know it; no other number may be infinite."""
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON))
    metadata, _ = read_json(tmp_path / "config.json")
    mamba = read_config(metadata, tmp_path).states[0]
    assert isinstance(mamba, Mamba2Config) and mamba.step_limits == (0.0, float("inf"))
    with pytest.raises(ModelError, match="routed_scaling_factor is"):
        read_config(metadata | {"routed_scaling_factor": float("inf")}, tmp_path)


def test_an_expert_without_the_shared_one_that_the_file_claims(tmp_path: Path) -> None:
    builder = experts_gguf().put("llama.expert_shared_count", U32, 1)
    with pytest.raises(ModelError, match="expert_shared_count is 1, but the file has no shared expert"):
        open_checkpoint(builder.write(tmp_path / "m.gguf"))
