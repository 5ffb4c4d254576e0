"""Gated DeltaNet: the native operator against numpy, and models that cannot be right. Its states: test_states.py.
Against `transformers`: test_architectures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import delta_gguf
from state_steps import CONTEXT, executor, step, texts

from benchmarks.models.gguf_writer import ARRAY, I32, U32, Array
from powerinfer import LLM, ModelError, RequestError, _native
from powerinfer.config import AttentionConfig
from powerinfer.devices import Batch
from powerinfer.devices.states import state_bytes, state_slots
from powerinfer.formats.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return delta_gguf().put("qwen35.context_length", U32, CONTEXT).write(tmp_path_factory.mktemp("delta") / "d.gguf")


def scored(path: Path, text: list[int], **options: Any) -> tuple[list[bytes], bytes]:
    """The logits of a text, and its embedding with another one's."""
    rows: list[bytes] = []
    with LLM(path, gpu="none", context=CONTEXT, **options) as llm:
        llm.score(text, 30, lambda position, logits: rows.extend(row.tobytes() for row in logits), step=7)
        return rows, llm.embed([text, text[:50]]).tobytes()


def test_scores_and_embeddings(path: Path) -> None:
    text = texts(1, 150)[0]
    first = scored(path, text, threads=1)
    assert len(first[0]) == 120 and scored(path, text, threads=2, prefill_chunk=40) == first


# --- the executor


def test_a_state_of_other_tokens_is_refused(path: Path) -> None:
    model, text = executor(path), texts(1, 60)[0]
    model.forward(step(text[:40], 0, 0, 0))
    with pytest.raises(RuntimeError, match="not that of the tokens before"):
        model.forward(step(text[41:], 41, 0, 0))
    with pytest.raises(RuntimeError, match="not that of the tokens before"):
        model.forward(step(text[40:], 40, 1, 1))
    for read, write in ((0, 99), (0, -1)):
        with pytest.raises((ValueError, IndexError)):
            model.forward(step(text[40:], 40, read, write))
    model.close()


def test_two_sequences_cannot_have_one_state(path: Path) -> None:
    model = executor(path)
    rows, zero = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
    pages = np.arange(2, dtype=np.int32)[:, None]
    with pytest.raises(ValueError, match="two sequences write"):
        model.forward(Batch(zero, zero, rows, pages, rows, zero, zero))
    with pytest.raises(RequestError, match="--max-batch"):
        many = np.arange(9, dtype=np.int32)
        model.forward(Batch(0 * many, 0 * many, many, many[:, None], many))
    model.close()


def test_what_the_states_take(path: Path) -> None:
    model = executor(path)
    config = open_checkpoint(path).config
    assert model.n_states == state_slots(2, True) == 5
    native = _native.States([(4, 2, 16, 4, 16, False, False)], 3)
    assert native.slot_bytes == state_bytes(config) and native.slots == 3
    assert "5 of" in str(model.choices.states)
    model.close()


@pytest.mark.parametrize(
    "layer", [(1, 2, 16, 4, 16), (9, 2, 16, 4, 16), (4, 0, 16, 4, 16), (4, 2, 8, 4, 16), (4, 2, 16, 4, 24)]
)
def test_states_that_cannot_be(layer: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        _native.States([(*layer, False, False)], 1)


# --- the operator, against numpy in float64


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def remembered(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What a layer of Gated DeltaNet adds to x, token by token, as the paper has it; value heads in turn."""
    get = {name: tensors[f"blk.0.{name}"].astype(np.float64) for name in (
        "attn_norm.weight", "attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_a",
        "ssm_dt.bias", "ssm_conv1d.weight", "ssm_norm.weight", "ssm_out.weight",
    )}  # fmt: skip
    n = norm(x, get["attn_norm.weight"])
    mixed = n @ get["attn_qkv.weight"].T
    taps = get["ssm_conv1d.weight"].shape[1]
    padded = np.concatenate([np.zeros((taps - 1, mixed.shape[1])), mixed])
    mixed = sum(padded[j : j + len(x)] * get["ssm_conv1d.weight"][:, j] for j in range(taps))
    mixed = mixed / (1 + np.exp(-mixed))
    q, k, v = np.split(mixed, [32, 64], axis=1)
    unit = [part.reshape(len(x), 2, 16) for part in (q, k)]
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in unit)
    v = v.reshape(len(x), 4, 16)
    decay = np.exp(get["ssm_a"] * np.log1p(np.exp(n @ get["ssm_alpha.weight"].T + get["ssm_dt.bias"])))
    beta = 1 / (1 + np.exp(-(n @ get["ssm_beta.weight"].T)))
    states, out = np.zeros((4, 16, 16)), np.empty_like(v)
    for t in range(len(x)):
        for h in range(4):
            key, query = k[t, h % 2], q[t, h % 2] / 4
            states[h] *= decay[t, h]
            states[h] += np.outer(key, beta[t, h] * (v[t, h] - key @ states[h]))
            out[t, h] = query @ states[h]
    gate = (n @ get["attn_gate.weight"].T).reshape(out.shape)
    out = norm(out, get["ssm_norm.weight"]) * gate / (1 + np.exp(-gate))
    return out.reshape(len(x), -1) @ get["ssm_out.weight"].T


@pytest.mark.parametrize("isa", _native.levels())
def test_a_layer_against_numpy(path: Path, isa: str) -> None:
    builder = delta_gguf()
    tensors = {one.name: np.frombuffer(one.data, np.float32).reshape(one.dims[::-1]) for one in builder.tensors}
    text = texts(1, 100, 4)[0]
    x = tensors["token_embd.weight"][text].astype(np.float64)
    expected = x + remembered(tensors, x)
    model = executor(path, isa=isa)
    program = model._program
    seen = [name for name, _ in program.take_times()]
    model.forward(step(text, 0, 0, 0))
    names = [name for name, _ in program.take_times()]
    assert names[:3] == ["embed", "delta_net", "project"] and not seen
    model.slots = model._states.begin(step(text, 0, 0, 1))  # type: ignore[union-attr]
    model._run(step(text, 0, 0, 1), 0, 3)
    ours = program.residual(len(text)).astype(np.float64)
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()
    model.close()


# --- the native module by itself


class Layer:
    """A program for one layer, and everything that it takes."""

    def __init__(self) -> None:
        self.pool = _native.Pool(1)
        self.arena = _native.Arena()
        self.workspace = _native.Workspace(self.pool, "")
        self.matrices = [self.matrix(rows) for rows in (32, 32, 64, 64, 4, 4)]
        self.rest: dict[str, Any] = {
            "taps": np.zeros((4, 128), np.float32),
            "decay": np.zeros(4, np.float32),
            "dt_bias": np.zeros(4, np.float32),
            "out_norm": _native.Norm(np.ones(16, np.float32), 1e-6),
            "key_heads": 2,
            "tiled": True,
            "activation": "silu",
        }

    def matrix(self, rows: int, cols: int = 64) -> _native.Matrix:
        data = np.zeros(rows * cols * 4, np.uint8)
        return _native.pack_matrix(self.pool, self.arena, "F32", rows, cols, data, None)

    def program(self, states: bool = True, head_dim: int = 16) -> _native.Program:
        memory = _native.States([(4, 2, 16, 4, 16, False, False)], 2) if states else None
        cache = _native.Cache("f32", [(0, head_dim)], 2)
        return _native.Program(self.workspace, cache, 8, 64, 64, [4], None, memory)


def test_a_native_layer_is_checked() -> None:
    layer = Layer()
    layer.program().delta_net(0, 0, None, layer.matrices, **layer.rest)
    for at, rows in enumerate((16, 48, 48, 80, 5, 3)):
        wrong = [*layer.matrices]
        wrong[at] = layer.matrix(rows)
        with pytest.raises(ValueError, match="wrong shape"):
            layer.program().delta_net(0, 0, None, wrong, **layer.rest)
    for name, value in {
        "taps": np.zeros((3, 128), np.float32),
        "decay": np.zeros(3, np.float32),
        "dt_bias": np.zeros(5, np.float32),
        "out_norm": _native.Norm(np.ones(32, np.float32), 1e-6),
        "key_heads": 3,
        "activation": "gelu",
    }.items():
        with pytest.raises(ValueError):
            layer.program().delta_net(0, 0, None, layer.matrices, **layer.rest | {name: value})
    for number, state in ((1, 0), (-1, 0), (0, 1)):
        with pytest.raises(ValueError, match="no such layer"):
            layer.program().delta_net(number, state, None, layer.matrices, **layer.rest)
    with pytest.raises(ValueError, match="no such layer in the states"):
        layer.program(states=False).delta_net(0, 0, None, layer.matrices, **layer.rest)
    with pytest.raises(ValueError, match="other heads"):
        layer.program(head_dim=32).delta_net(0, 0, None, layer.matrices, **layer.rest)
    with pytest.raises(ValueError, match="six matrices"):
        layer.program().delta_net(0, 0, None, layer.matrices[:5], **layer.rest)
    with pytest.raises(ValueError, match="keeps no keys"):
        layer.program().attention(0, AttentionConfig(1, 1, 16))
    with pytest.raises(ValueError, match="wrong shape"):
        layer.program().gate_attended(0, None, layer.matrix(48))


# --- models that cannot be right


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("ssm.group_count", 3, "evenly"),
        ("ssm.time_step_rank", 3, "divide"),
        ("ssm.state_size", 8, "no multiples of 16"),
        ("ssm.conv_kernel", 9, "2 to 8"),
        ("ssm.conv_kernel", 1, "2 to 8"),
        ("ssm.inner_size", 128, "shape"),
        ("full_attention_interval", 3, "missing"),
        ("attention.key_length", 32, "shape|value_length"),
        ("nextn_predict_layers", 1, "tensors that|missing|interval"),
    ],
)
def test_wrong_settings(tmp_path: Path, key: str, value: int, why: str) -> None:
    path = delta_gguf().put(f"qwen35.{key}", U32, value).write(tmp_path / "d.gguf")
    if key == "nextn_predict_layers":  # the second layer only predicts further tokens then, and the first is the model
        assert open_checkpoint(path).config.n_layers == 1
        return
    with pytest.raises(ModelError, match=why):
        open_checkpoint(path)


def test_recurrent_layers_must_be_truth_values(tmp_path: Path) -> None:
    path = delta_gguf().add("qwen35.attention.recurrent_layers", ARRAY, Array(I32, [1, 0])).write(tmp_path / "d.gguf")
    with pytest.raises(ModelError, match="truth value"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "attn_gate.weight"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="missing"):
        open_checkpoint(delta_gguf(f"blk.0.{name}").write(tmp_path / "d.gguf"))
