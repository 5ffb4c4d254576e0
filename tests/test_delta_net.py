"""Gated DeltaNet: the native operator against numpy, answers with and without kept states, and models that cannot be
right. Against `transformers`: test_architectures.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import VOCAB, delta_gguf

from benchmarks.models.gguf_writer import ARRAY, I32, U32, Array
from powerinfer import LLM, ModelError, RequestError, SamplingParams, _native
from powerinfer.config import AttentionConfig, EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.states import state_bytes, state_slots
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load
from powerinfer.runtime import state_cache

CONTEXT = 1024


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return delta_gguf().put("qwen35.context_length", U32, CONTEXT).write(tmp_path_factory.mktemp("delta") / "d.gguf")


def texts(number: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, (number, length)).tolist()


# --- answers


def answers(
    path: Path, prompts: list[list[int]], rounds: int = 1, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """The tokens and their log probabilities, of the last of several rounds."""
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=1)
    with LLM(path, **({"threads": 2, "gpu": "none", "context": CONTEXT} | options)) as llm:
        for _ in range(rounds):
            found = llm.generate(prompts, params)
    return [(one.token_ids, [each.logprob for each in one.logprobs or []]) for one in found]


def test_answers_have_the_same_bits_with_and_without_kept_states(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    system, short = texts(1, 300)[0], texts(1, 40, 1)[0]
    prompts = [system + one for one in texts(3, 20)] + [short + one for one in texts(3, 50)] + [system[:100]]
    alone = answers(path, prompts, prefix_cache=False, max_batch=1, prefill_chunk=512, threads=1)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts), "the answers are not all alike"
    for options in ({"max_batch": 8}, {"max_batch": 3, "prefill_chunk": 48, "mixed_chunk": 5}, {"kv_type": "f16"}):
        assert answers(path, prompts, 2, **options) == alone


def test_a_prefix_is_not_computed_again(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    base = texts(1, 200)[0]
    with LLM(path, threads=1, gpu="none", context=CONTEXT) as llm:
        first = llm.generate([base], params)[0]
        again = llm.generate([[*base, *first.token_ids, 1, 2, 3]], params)[0]
        assert (first.cached_tokens, again.cached_tokens) == (0, 192)


def test_an_aborted_request_harms_nobody(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = texts(4, 100)
    with LLM(path, threads=2, gpu="none", context=CONTEXT, max_batch=2, prefill_chunk=32) as llm:
        expected = [llm.generate([one], params)[0].token_ids for one in prompts]
        for at in (1, 7, 33):
            stream = llm.stream(prompts[0], params)
            for _ in range(at):
                next(stream)
            stream.close()
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected


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


def executor(path: Path, **options: Any) -> CpuExecutor:
    return load(open_checkpoint(path), EngineConfig(**({"threads": 2, "context": CONTEXT, "max_batch": 2} | options)))


def step(tokens: list[int], at: int, read: int, write: int) -> Batch:
    n = len(tokens)
    slots = [np.array([slot], np.int32) for slot in (read, write)]
    places = np.arange(at, at + n, dtype=np.int32)
    pages = np.arange(CONTEXT // 32, dtype=np.int32)[None]
    return Batch(np.array(tokens, np.int32), places, np.zeros(n, np.int32), pages, np.array([n - 1], np.int32), *slots)


def test_a_state_that_is_read_elsewhere_stays(path: Path) -> None:
    model, text = executor(path), texts(1, 60)[0]
    whole = model.forward(step(text, 0, 0, 0)).copy()
    model.forward(step(text[:40], 0, 0, 3))
    for _ in range(3):  # from the same state
        assert np.array_equal(model.forward(step(text[40:], 40, 3, 1)), whole)
    model.close()


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
    native = _native.States([(4, 2, 16, 4, 16, False)], 3)
    assert native.slot_bytes == state_bytes(config) and native.slots == 3
    assert "5 of" in str(model.choices.states)
    model.close()


@pytest.mark.parametrize(
    "layer", [(1, 2, 16, 4, 16), (9, 2, 16, 4, 16), (4, 0, 16, 4, 16), (4, 2, 8, 4, 16), (4, 2, 16, 4, 24)]
)
def test_states_that_cannot_be(layer: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        _native.States([(*layer, False)], 1)


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
        memory = _native.States([(4, 2, 16, 4, 16, False)], 2) if states else None
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


def test_numbers_that_are_none_stay_in_their_sequence(path: Path) -> None:
    """A state with NaN belongs to one sequence; the next one in its slot begins with zeros."""
    model, text = executor(path), texts(1, 40)[0]
    whole = model.forward(step(text, 0, 0, 0)).copy()
    model._program.residual(1)[:] = np.nan
    model._run(step(text[:1], 40, 0, 0), 1, model._program.size)  # its result is whatever it is
    assert np.array_equal(model.forward(step(text, 0, 0, 0)), whole)
    model.close()
