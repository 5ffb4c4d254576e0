"""Selector `predicted` inside experts: what a predictor selects is computed, and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from levels import LEVELS, each_level
from model_files import FF, LAYERS, PLAIN_EXPERTS, SHARED, D, experts_gguf
from test_expert_neurons import ACTIVATIONS, ALLOWED, BESIDE, OF_LATENTS, TOKENS, far, logits, model, plain_model
from test_prepared import describe

from powerinfer import LLM, ModelError, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch, cpu_experts
from powerinfer.devices import cpu as cpu_module
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import PREDICTOR_TYPES, open_predictor, write_predictor
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.formats.tensors import RawTensor
from powerinfer.hybrid import in_ram as in_ram_module
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import needs
from powerinfer.models import load
from powerinfer.neurons import Predictor
from powerinfer.placement.budget import Workload, gib, in_ram
from powerinfer.placement.shapes import checkpoint_model, skipping_model

EXPERTS, TOP, RANK = 4, 2, 32


def give_predictors(
    path: Path, threshold: float = 0.0, kind: str = "F16", seed: int = 5, checkpoint: Checkpoint | None = None
) -> Path:
    """The same path, with random predictors beside it: z of a neuron is as often above 0 as below. checkpoint: the
    model, None: the one at the path."""
    rng = np.random.default_rng(seed)
    pair = lambda: tuple(  # noqa: E731
        rng.standard_normal(shape).astype(np.float32) for shape in ((RANK, D), (EXPERTS * FF, RANK))
    )
    layers = [Predictor(RANK, threshold, 0)] * LAYERS
    write_predictor(checkpoint or open_checkpoint(path), None, kind, layers, [pair() for _ in range(LAYERS)])
    return path


def opened(path: Path, *, threads: int = 2, level: str | None = None, recall_every: int = 0) -> CpuExecutor:
    """With the predictors beside the model."""
    engine = EngineConfig(
        threads=threads, context=128, kv_type="f32", prefill_chunk=TOKENS, isa=level, recall_every=recall_every
    )
    file = open_predictor(open_checkpoint(path))
    own = {layer: (one.predictor, one.inner, one.outer) for layer, one in file.layers.items()}
    return load(open_checkpoint(path), engine, in_experts=True, predictors=own.__getitem__)


def whole(path: Path, *, exact: bool = False, level: str | None = None) -> CpuExecutor:
    engine = EngineConfig(threads=2, context=128, kv_type="f32", prefill_chunk=TOKENS, isa=level)
    return load(open_checkpoint(path), engine, in_experts=exact)


def act(name: str, x: np.ndarray) -> np.ndarray:
    positive = np.maximum(x, 0)
    silu = x / (1 + np.exp(-x))
    own = {"relu2": positive**2, "fatrelu": np.where(x > 0.1, x, 0), "cats": np.where(np.abs(silu) > 0.2, silu, 0)}
    return own.get(name, positive)


class Reference:
    """The experts of a layer in float64, and what its predictor says."""

    def __init__(self, path: Path, layer: int, activation: str) -> None:
        checkpoint, file = open_checkpoint(path), open_predictor(open_checkpoint(path))

        def weights(name: str) -> np.ndarray:
            return checkpoint.take(f"layers.{layer}.{name}").float32().astype(np.float64)

        self.norm, self.router = weights("ffn_norm"), weights("router")
        self.gate, self.up, self.down = (weights(f"experts_{part}") for part in ("gate", "up", "down"))
        self.eps, self.activation = checkpoint.config.norm_eps, activation
        one = file.layers[layer]
        self.inner, self.outer = one.inner.float32(), one.outer.float32().reshape(EXPERTS, FF, RANK)
        self.threshold = one.predictor.threshold

    def sum(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(what is added to x, candidates, neurons that fire): the last two bool [tokens, TOP, FF]."""
        n = x / np.sqrt((x**2).mean(1, keepdims=True) + self.eps) * self.norm
        scores = np.exp(n @ self.router.T)
        scores /= scores.sum(1, keepdims=True)
        out, candidates, fires = np.zeros_like(x), [], []
        for token, row in enumerate(n):
            selected = np.sort(np.argsort(-scores[token])[:TOP])
            own = scores[token, selected] / scores[token, selected].sum()
            z = self.outer[selected] @ np.maximum(self.inner @ x[token], 0)
            up = self.up[selected] @ row
            h = act(self.activation, self.gate[selected] @ row) * (
                np.maximum(up, 0) if self.activation == "drelu" else up
            )
            candidates.append(z >= self.threshold)
            fires.append(h != 0)
            kept = h * candidates[-1] * own[:, None]
            out[token] = np.einsum("edf,ef->d", self.down[selected], kept)
        return out, np.array(candidates), np.array(fires)


def added(executor: CpuExecutor, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(x before the experts of a layer, what they add to it), float64 [tokens, D]; of tokens of as many sequences."""
    program, at = executor._program, executor.expert_ffns[layer].op.number
    ids = np.random.default_rng(8).integers(0, executor.vocab_size, tokens).astype(np.int32)
    rows = np.arange(tokens, dtype=np.int32)
    batch = Batch(ids, np.zeros(tokens, np.int32), rows, rows[:, None].copy(), np.empty(0, np.int32))
    executor._run(batch, 0, at)
    before = program.residual(tokens).astype(np.float64)
    executor._run(batch, at, at + 1)
    return before, program.residual(tokens).astype(np.float64) - before


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_candidates_are_summed(activation: str, tokens: int, tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path, activation=activation))
    executor = opened(path, threads=1 + tokens % 3, recall_every=1)
    for layer in range(LAYERS):
        x, found = added(executor, layer, tokens)
        expected, candidates, fires = Reference(path, layer, activation).sum(x)
        assert far(found, expected) < 1e-4
        assert 0.2 < candidates.mean() < 0.8 and 0.1 < fires.mean() < 0.7
        counts = executor.expert_ffns[layer].counts()
        assert counts["tokens"] == counts["sampled_tokens"] == tokens
    executor.close()


@pytest.mark.parametrize("tokens", [1, 9])
def test_what_is_counted(tokens: int, tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path), threshold=20.0)
    executor = opened(path, recall_every=1)
    ffn = executor.expert_ffns[0]
    x, _ = added(executor, 0, tokens)
    _, candidates, fires = Reference(path, 0, "relu").sum(x)
    counts = ffn.counts()
    assert counts["candidates"] == candidates.sum() and counts["active"] == (candidates & fires).sum()
    assert counts["sampled_active"] == fires.sum() and counts["sampled_found"] == (candidates & fires).sum()
    assert counts["neurons"] == tokens * TOP * FF
    experts = 2 if tokens == 1 else EXPERTS
    layout, (shared, row) = ffn.layout, ffn.predictor
    assert shared == RANK * D * 2 and row == RANK * 2
    some = counts["bytes"] - shared - experts * FF * row
    if tokens == 1:  # each row once
        rows = candidates.sum() * layout.gate_bytes
        assert rows < some <= rows + candidates.sum() * (layout.gate_bytes + layout.down_bytes)
    ffn.op.clear()
    assert set(ffn.counts().values()) == {0}
    executor.close()


@pytest.mark.parametrize("kind", PREDICTOR_TYPES)
def test_candidates_of_every_type(kind: str, tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path), kind=kind)
    executor = opened(path)
    for tokens in (1, 12):
        executor.expert_ffns[1].op.clear()
        x, _ = added(executor, 1, tokens)
        _, candidates, _ = Reference(path, 1, "relu").sum(x)
        near = {"F32": 0, "F16": 0, "BF16": 0.03, "Q8_0": 0.03}[kind] * candidates.size
        assert abs(executor.expert_ffns[1].counts()["candidates"] - candidates.sum()) <= near, "activations are rounded"
    executor.close()


@each_level("kind", [*ALLOWED])
def test_prompts_have_the_bits_of_whole_experts(kind: str, level: str, tmp_path: Path) -> None:
    """Gates, too, become the panels that the file's matrices would."""
    path = give_predictors(model(tmp_path, kind))
    dense, predicted = whole(path, level=level), opened(path, level=level)
    expected = logits(dense, TOKENS)
    assert np.array_equal(logits(predicted, TOKENS), expected)
    assert far(logits(predicted, 25), expected) > 0.01, "half of the neurons are missing"
    for ffn in predicted.expert_ffns.values():
        ffn.op.set_whole(True)
    assert np.array_equal(logits(predicted, 25), logits(dense, 25)), "the selector is suspended"
    for one in (dense, predicted):
        one.close()


@pytest.mark.sampled(("kind", "level"), ("kind", "step"), ("level", "step"))
@pytest.mark.parametrize("step", [1, 25])
@each_level("kind", [*ALLOWED], prompts=False)
def test_where_all_are_candidates_it_is_exact(kind: str, level: str, step: int, tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path, kind), threshold=-1e5, kind="Q8_0")
    exact, predicted = whole(path, exact=True, level=level), opened(path, level=level, recall_every=2)
    assert far(logits(predicted, step), logits(exact, step)) <= ALLOWED[kind]
    for ffn in predicted.expert_ffns.values():
        counts = ffn.counts()
        assert counts["candidates"] == counts["neurons"] == TOKENS * TOP * FF
        assert counts["sampled_found"] == counts["sampled_active"] > 0
    for one in (exact, predicted):
        one.close()


def test_candidates_depend_on_their_token_alone(tmp_path: Path) -> None:
    """Not on the batch, nor on the threads."""
    path = give_predictors(model(tmp_path, "Q4_0"), kind="Q8_0")
    found = []
    for threads, tokens in ((1, 1), (1, 12), (2, 12), (3, 32)):
        executor = opened(path, threads=threads)
        number = []
        for first in range(0, 12 if tokens == 1 else 1):
            ids = np.random.default_rng(8).integers(0, executor.vocab_size, 32).astype(np.int32)
            rows = np.arange(tokens, dtype=np.int32)
            batch = Batch(
                ids[first : first + tokens], np.zeros(tokens, np.int32), rows, rows[:, None].copy(),
                np.empty(0, np.int32),
            )  # fmt: skip
            executor.forward(batch)
            number.append(executor.expert_ffns[0].counts()["candidates"])
        found.append(number[-1])
        executor.close()
    assert found[0] == found[1] == found[2] < found[3]


def test_the_same_step_has_the_same_bits(tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path, "Q4_0"), kind="Q8_0")
    results = []
    for _ in range(2):
        executor = opened(path, threads=3, recall_every=3)
        results.append(logits(executor, 5))
        executor.close()
    assert np.array_equal(*results)


def test_numbers_that_are_none_stay_in_their_token(tmp_path: Path) -> None:
    executor = opened(give_predictors(model(tmp_path)), recall_every=1)
    rows = np.arange(3, dtype=np.int32)
    batch = Batch(rows + 1, np.zeros(3, np.int32), rows, rows[:, None].copy(), np.empty(0, np.int32))
    executor.embedded(batch)[1] = np.nan
    executor.finish(batch)
    assert np.isfinite(executor.hidden_states(rows)).all(axis=1).tolist() == [True, False, True]
    executor.close()


def test_a_model_says_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = give_predictors(model(tmp_path), threshold=-1e5)
    settings = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with LLM(path, gpu="none", threads=2, selector="all") as llm:
        expected = llm.generate("ab", settings).token_ids
    with LLM(path, gpu="none", threads=2, selector="predicted", recall_every=1) as llm:
        assert llm.generate("ab", settings).token_ids == expected
        report = llm.sparsity
        assert report is not None and report["selector"] == "predicted" and report["tokens"] == report["sampled"] >= 8
        assert report["recall"] == report["candidate_fraction"] == 1.0 and 0.3 < report["active_fraction"] < 0.7
        assert report["layers"][0]["ways"]["1"] == "predicted"
    give_predictors(path)
    text = tmp_path / "text.txt"
    text.write_text("ab ba " * 40)
    flags = ["--selector", "predicted", "--file", str(text), "--context", "32", "--gpu", "none", "--json"]
    assert main(["eval", "agreement", "-m", str(path), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["mean_kl"] > 1e-4 and 0.3 < result["recall"] < 0.7 and 0.3 < result["candidate_fraction"] < 0.7
    few = ["--prompt-tokens", "8", "--gen-tokens", "4", "--repeat", "1"]
    assert main(["bench", "-m", str(path), "--selector", "predicted", "--gpu", "none", *few]) == 0
    assert main(["bench", "-m", str(path), "--selector", "all", "--gpu", "none", *few]) == 0, (
        "the file is in no one's way"
    )
    assert main(["plan", "-m", str(path), "--hardware", "pc-16gb", "--context", "64"]) == 0


def test_free_memory_holds_predictors_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_predictors(model(tmp_path))
    engine = EngineConfig(gpu="none", threads=1, selector="predicted", prefill_chunk=32, context=64)
    needed = needs(resolve(open_checkpoint(path), engine)).ram
    monkeypatch.setattr(in_ram_module, "_MOST_GROWTH", 1 << 20)
    for free in (needed, needed - 1):
        for name in ("available_memory", "container_memory"):
            monkeypatch.setattr(f"powerinfer.system.{name}", lambda free=free: free)
        if free == needed:
            assert resolve(open_checkpoint(path), engine).selection.in_experts
            assert needed > needs(resolve(open_checkpoint(path), replace(engine, selector="exact"))).ram
        else:
            with pytest.raises(RequestError, match=f"needs {gib(needed)} of RAM.*, and this container leaves it"):
                resolve(open_checkpoint(path), engine)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"kind": "MXFP4"}, "experts of type MXFP4 have no rows of single neurons"),
        ({"activation": "silu"}, "never exactly zero"),
        ({}, "there is no .*predictor.safetensors; `powerinfer train"),
    ],
)
def test_what_is_refused(made: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = model(tmp_path, **made)
    with pytest.raises((RequestError, ModelError), match=why):
        LLM(path, gpu="none", threads=1, selector="predicted")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"neurons": [FF, FF]}, "states a neurons of"),
        ({"neurons": [EXPERTS * FF]}, "states a neurons of"),
        ({"layers": [{"rank": RANK, "threshold": 0.0, "floor": 1}] * LAYERS}, "a floor of 1 in layer 0"),
        ({"layers": [{"rank": 2 * RANK, "threshold": 0.0, "floor": 0}] * LAYERS}, "does not hold"),
        ({"layers": [{"rank": D + RANK, "threshold": 0.0, "floor": 0}] * LAYERS}, "a rank of 96 .* in layer 0"),
    ],
)
def test_files_that_do_not_suit(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path))
    describe(PreparedFile(PREDICTOR, open_checkpoint(path)), lambda description: description.update(change))
    with pytest.raises(ModelError, match=why):
        LLM(path, gpu="none", threads=1, selector="predicted")


def test_the_predictor_of_another_model(tmp_path: Path) -> None:
    path = give_predictors(model(tmp_path))
    other = experts_gguf(experts=8).write(tmp_path / "other.gguf")
    (tmp_path / "other.gguf.powerinfer").mkdir()
    (tmp_path / "other.gguf.powerinfer/predictor.safetensors").write_bytes(
        Path(f"{path}.powerinfer/predictor.safetensors").read_bytes()
    )
    with pytest.raises(ModelError, match=r"another kind|was made for another model|of no use"):
        open_predictor(open_checkpoint(other))


# ---------------------------------------------------------------- without gates, beside a shared one


def give_plain_predictors(path: Path, threshold: float = 0.0, kind: str = "F16") -> Path:
    """The same path, with random predictors of its layers 1 and 2, the first of which has no experts."""
    rng = np.random.default_rng(5)
    pair = lambda: tuple(  # noqa: E731
        rng.standard_normal(shape).astype(np.float32) for shape in ((RANK, D), (PLAIN_EXPERTS * FF + SHARED, RANK))
    )
    described = [None, *[Predictor(RANK, threshold, 0)] * 2]
    write_predictor(open_checkpoint(path), None, kind, described, [pair(), pair()])
    return path


def plain_sum(path: Path, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(what experts and the shared one add to x, candidates, neurons that fire) in float64: the last two bool [tokens,
    neurons of a token]."""
    checkpoint, one = open_checkpoint(path), open_predictor(open_checkpoint(path)).layers[layer]

    def weights(name: str) -> np.ndarray:
        return checkpoint.take(f"layers.{layer}.{name}").float32().astype(np.float64)

    config = checkpoint.config.experts[layer].router
    n = x / np.sqrt((x**2).mean(1, keepdims=True) + checkpoint.config.norm_eps) * weights("ffn_norm")
    scores = 1 / (1 + np.exp(-(n @ weights("router").T)))
    wanted = scores + weights("router_correction_bias")
    z = np.maximum(x @ one.inner.float32().T, 0) @ one.outer.float32().T >= one.predictor.threshold
    of_experts, of_shared = z[:, : PLAIN_EXPERTS * FF].reshape(len(x), PLAIN_EXPERTS, FF), z[:, PLAIN_EXPERTS * FF :]
    up, down, more_up, more_down = map(weights, ("experts_up", "experts_down", "shared_up", "shared_down"))
    if checkpoint.config.experts[layer].latents:
        up, down = up @ weights("latent_in"), weights("latent_out") @ down
    out, candidates, fires = np.zeros_like(x), [], []
    for token, row in enumerate(n):
        own = np.sort(np.argsort(-wanted[token])[: config.top_k])
        share = scores[token, own] / (scores[token, own].sum() if config.normalise else 1) * config.scale
        h, h_shared = np.maximum(up[own] @ row, 0) ** 2, np.maximum(more_up @ row, 0) ** 2
        candidates.append(np.concatenate([of_experts[token, own].reshape(-1), of_shared[token]]))
        fires.append(np.concatenate([h.reshape(-1), h_shared]) != 0)
        out[token] = np.einsum("edf,ef->d", down[own], h * of_experts[token, own] * share[:, None])
        out[token] += more_down @ (h_shared * of_shared[token])
    return out, np.array(candidates), np.array(fires)


@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
@pytest.mark.parametrize("latents", [0, 32])
def test_candidates_without_gates_are_summed(latents: int, tokens: int, tmp_path: Path) -> None:
    """Those of the shared expert, too, which experts of latents have beside them."""
    path = give_plain_predictors(plain_model(tmp_path, "F16", latents=latents), threshold=3.0)
    executor = opened(path, threads=1 + tokens % 3, recall_every=1)
    for layer in (1, 2):
        x, found = added(executor, layer, tokens)
        expected, candidates, fires = plain_sum(path, layer, x)
        assert far(found, expected) < 1e-4
        assert 0.2 < candidates.mean() < 0.8 and 0.3 < fires.mean() < 0.7
        counts = executor.expert_ffns[layer].counts()
        assert counts["candidates"] == candidates.sum() and counts["active"] == (candidates & fires).sum()
        assert counts["sampled_active"] == fires.sum() and counts["sampled_found"] == (candidates & fires).sum()
        assert counts["tokens"] == counts["sampled_tokens"] == tokens and counts["neurons"] == candidates.size
        if tokens == 1 and not latents:  # each row once
            layout, (inner, row) = executor.expert_ffns[layer].layout, executor.expert_ffns[layer].predictor
            rows = candidates.sum() * layout.gate_bytes + (candidates & fires).sum() * layout.down_bytes
            assert counts["bytes"] == inner + candidates.size * row + rows
    executor.close()


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize(("kind", "shared", "latents"), [one for one in (*BESIDE, *OF_LATENTS) if one[0] != "MXFP4"])
def test_without_gates_it_is_exact_where_all_are_candidates(
    kind: str, shared: str | None, latents: int, step: int, tmp_path: Path
) -> None:
    """A shared expert in F32 is dense. Prompts have the bits of whole experts, of rows of up, too."""
    path = give_plain_predictors(plain_model(tmp_path, kind, shared, latents), threshold=-1e5, kind="Q8_0")
    dense, exact, predicted = whole(path), whole(path, exact=True), opened(path, recall_every=2)
    assert far(logits(predicted, step), logits(exact, step)) <= ALLOWED.get(kind, 2e-3)
    for ffn in predicted.expert_ffns.values():
        counts = ffn.counts()
        assert counts["candidates"] == counts["neurons"] == TOKENS * (2 * FF + (0 if shared == "F32" else SHARED))
        assert counts["sampled_found"] == counts["sampled_active"] > 0
    assert np.array_equal(logits(predicted, TOKENS), logits(dense, TOKENS))
    for one in (dense, exact, predicted):
        one.close()


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("kinds", [("Q8_0", None), ("Q5_0", "Q8_0"), ("Q5_0", None, 256), ("Q4_0", "gated")])
def test_a_plan_counts_what_a_load_holds(
    kinds: tuple[Any, ...], predicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows long enough that their padding hides nothing."""
    monkeypatch.setattr(model_files, "HEADS", 32)
    for module in (model_files, sys.modules[__name__]):
        monkeypatch.setattr(module, "D", 512)
    gated, kind = kinds[1] == "gated", kinds[0]
    path = model(tmp_path, kind) if gated else plain_model(tmp_path, *kinds)
    path = give_predictors(path) if gated else give_plain_predictors(path)
    held, pack, own_pages = [], cpu_module.pack, cpu_experts.own_pages

    def packed(*args: Any) -> Any:
        matrix = pack(*args)
        held.append(matrix.nbytes)
        return matrix

    def pages(nbytes: int) -> Any:
        held.append(nbytes)
        return own_pages(nbytes)

    monkeypatch.setattr(cpu_module, "pack", packed)
    monkeypatch.setattr(cpu_experts, "own_pages", pages)
    executor = opened(path) if predicted else whole(path, exact=True)
    ffns = executor.expert_ffns.values()
    rows = EXPERTS * FF if gated else PLAIN_EXPERTS * FF + SHARED
    of_predictors = sum(inner + rows * outer for inner, outer in (ffn.predictor for ffn in ffns))
    executor.close()
    model_of_file = skipping_model(checkpoint_model(open_checkpoint(path)), open_checkpoint(path), None, predicted)
    planned = in_ram(model_of_file, Workload("f16", 64, 32))
    assert of_predictors == planned["predictor"] and (of_predictors > 0) == predicted
    assert sum(held) - of_predictors == planned["attention"] + planned["head"] + planned["panels"]


@pytest.mark.parametrize("level", LEVELS)
def test_without_gates_at_every_level(level: str, tmp_path: Path) -> None:
    path = give_plain_predictors(plain_model(tmp_path, "Q5_0"), threshold=-1e5, kind="Q8_0")
    exact, predicted = whole(path, exact=True, level=level), opened(path, level=level)
    for step in (1, 8):
        assert far(logits(predicted, step), logits(exact, step)) <= ALLOWED["Q4_0"]
    for one in (exact, predicted):
        one.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": [{"rank": RANK, "threshold": 0.0, "floor": 0}] * 3}, "describes a predictor of layer 0"),
        ({"layers": [None, None, {"rank": RANK, "threshold": 0.0, "floor": 0}]}, "describes none of layer 1"),
        ({"layers": [{"rank": RANK, "threshold": 0.0, "floor": 0}] * 2}, "does not describe 3 layers"),
        ({"neurons": [0, PLAIN_EXPERTS * FF, PLAIN_EXPERTS * FF]}, "states a neurons of"),
    ],
)
def test_files_of_other_layers(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = give_plain_predictors(plain_model(tmp_path, "F16"))
    describe(PreparedFile(PREDICTOR, open_checkpoint(path)), lambda description: description.update(change))
    with pytest.raises(ModelError, match=why):
        LLM(path, gpu="none", threads=1, selector="predicted")


def test_a_predictor_is_given_what_its_first_matrix_makes(tmp_path: Path) -> None:
    """Of experts of latents that a caller selects: candidates are those of the whole predictor."""
    path = give_plain_predictors(plain_model(tmp_path, "F16", latents=32), threshold=3.0)
    executor, checkpoint = opened(path), open_checkpoint(path)
    one = open_predictor(checkpoint).layers[1]
    rows = PLAIN_EXPERTS * FF
    outer = RawTensor(one.outer.type, (rows, RANK), one.outer.rows()[:rows].reshape(-1))
    up, down = (checkpoint.take(f"layers.1.experts_{part}") for part in ("up", "down"))
    some = executor.expert_sum(1, [up, down], predicted=((one.predictor, None, outer), None))
    rng = np.random.default_rng(4)
    for tokens in (1, 5):
        x, latents = (rng.standard_normal((tokens, width)).astype(np.float32) for width in (D, 32))
        hidden = np.maximum(x @ one.inner.float32().T, 0)
        selected, weights = np.tile(np.int32([1, 3]), (tokens, 1)), rng.random((tokens, 2), np.float32)
        found = np.empty_like(latents)
        assert some.sum(latents, selected, weights, found, hidden)
        z = (hidden @ outer.float32().T).reshape(tokens, PLAIN_EXPERTS, FF)[:, [1, 3]]
        h = np.maximum(np.einsum("enl,tl->ten", up.float32()[[1, 3]], latents), 0) ** 2 * (z >= 3.0)
        expected = np.einsum("eln,ten,te->tl", down.float32()[[1, 3]], h, weights)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max() > 0
    for wrong in (None, hidden[:2], hidden[:, 1:].copy()):
        with pytest.raises(ValueError, match=r"what the predictor reads is missing|tokens, rank"):
            some.sum(latents, selected, weights, found, wrong)
    exact = whole(path, exact=True)
    with pytest.raises(ValueError, match="of a predictor without its first matrix"):
        exact.expert_sum(1, [up, down]).sum(latents, selected, weights, found, hidden)
    for each in (executor, exact):
        each.close()
