"""Several GPUs: layers that follow each other on each, and the bits of one GPU that has all of them.

Two stand-ins (torch's CPU device) are two GPUs: caches, states, buffers and streams are each one's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import families  # noqa: E402
from configs import small  # noqa: E402
from deferred import Machine, Stream, deferred  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import CUDA  # noqa: E402
from sparse_models import give_bundles, give_predictor, give_profile, tiny_llama  # noqa: E402
from test_expert_plan import tiny_model  # noqa: E402
from test_hybrid import placed, predictor_of  # noqa: E402
from test_sparse import packed, side_by_side, split_calls  # noqa: E402
from truth import Truth  # noqa: E402

from benchmarks.models import expert_models  # noqa: E402
from powerinfer import LLM, RequestError, SamplingParams  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import registered, streams  # noqa: E402
from powerinfer.devices.choices import Choice  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.devices.several import OneCard  # noqa: E402
from powerinfer.devices.step_buffers import description_bytes, step_bytes  # noqa: E402
from powerinfer.devices.wanted import wanted_gpu  # noqa: E402
from powerinfer.errors import GpuMemoryError, PowerInferError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware.description import Hardware, load  # noqa: E402
from powerinfer.hardware.measure import memories  # noqa: E402
from powerinfer.hybrid import crossing, policy_trial, step_trial, vram  # noqa: E402
from powerinfer.hybrid.copier import Copier  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit  # noqa: E402
from powerinfer.hybrid.ffn import NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu, needs  # noqa: E402
from powerinfer.hybrid.several import CardSplits  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402
from powerinfer.placement import budget, several  # noqa: E402
from powerinfer.placement.experts import make_policy  # noqa: E402
from powerinfer.placement.plan import Plan, place  # noqa: E402
from powerinfer.placement.request import PlanConfig, shape_subject  # noqa: E402
from powerinfer.placement.request import described as described_for  # noqa: E402
from powerinfer.placement.shapes import Model  # noqa: E402
from powerinfer.sparsity.selection import DENSE, Selection  # noqa: E402
from powerinfer.sparsity.trials import Outcome  # noqa: E402
from powerinfer.system import Disturbance  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
CHUNKS = [32, 9, 31, 3]


def names(device: str, gpus: int) -> str:
    """Of as many GPUs; where there is one, its name twice: each has layers of its own all the same."""
    if device == "deferred":
        return ",".join(["deferred", "deferred:1"][:gpus])
    there = torch.cuda.device_count() if device == "cuda" else 0
    return ",".join(f"cuda:{min(number, there - 1)}" if there else "cpu" for number in range(gpus))


@contextmanager
def loaded(
    path: Path,
    firsts: tuple[int, ...],
    device: str = "cpu",
    layers: int | None = None,
    make: Callable[[], Any] | None = None,
    selection: Selection = DENSE,
    **options: Any,
) -> Iterator[Any]:
    """An executor whose first layers are on as many GPUs as `firsts` has layers. make: makes a GPU's split."""
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    engine = EngineConfig(**(settings | {"max_batch": 8} | options))
    checkpoint = open_checkpoint(path)
    every = checkpoint.config.n_layers
    layers = every if layers is None else layers
    placement = Placement(layers, layers == every, firsts=firsts if len(firsts) > 1 else ())
    resolved = Resolved(checkpoint, engine, selection, UsedGpu(names(device, len(firsts))), placement)
    split = None if make is None else CardSplits([make() for _ in firsts], [*firsts[1:], layers])
    executor = load_split(resolved, split)
    try:
        yield executor
    finally:
        executor.close()


def answers(executor: Any, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Logits of a prompt in chunks, of tokens one by one, and of texts side by side, and hidden states."""
    pages = families.scattered_pages(executor, 1)[0]
    found = [families.run_chunks(executor, texts[0], CHUNKS, pages)]
    found.append(executor.hidden_states(np.array([1, 0], np.int32)).copy())
    found.append(split_calls(executor, texts[0][:40]))
    return found + side_by_side(executor, [text[:20] for text in texts])


def check_alike(ours: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize(
    "name", ["llama-gqa", "gemma2", "falcon-40b", "gemma4-e", "gemma3n", "qwen35", "plm", "falcon-h1", "lfm2"]
)
def test_layers_on_two_gpus_give_the_bits_of_one(name: str, gpu: str, tmp_path: Path) -> None:
    """Every kind of attention and state, dense and of experts."""
    model = Truth(case_named(name), folder=tmp_path)
    with loaded(model.path, (0,), gpu) as one:
        wanted = answers(one, model.texts)
        held = one.gpu.memory()
    config = open_checkpoint(model.path).config
    first = config.whole_caches(config.n_layers - 1)
    with loaded(model.path, (0, first), gpu) as two:
        assert [card.layers for card in two.cards] == [first, config.n_layers]
        check_alike(answers(two, model.texts), wanted)
        check_alike(answers(two, model.texts), wanted)  # again, over the same pages and states
        parts = [card.memory() for card in two.cards]
        for part in ("attention", "ffn", "head", "kv"):  # each of them is held once
            assert sum(one[part] for one in parts) == held[part], part
        assert not parts[0]["head"] and parts[1]["head"] and all(one["kv"] for one in parts[:1])
        assert two.bytes_per_token == one.bytes_per_token
        assert "on " + ", ".join(card.place for card in two.cards) in two.choices.texts()["gpu"]


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_behind_those_of_two_gpus_are_on_the_cpu(layers: int, tmp_path: Path) -> None:
    model = Truth(case_named("llama-gqa"), folder=tmp_path, num_hidden_layers=4)
    with loaded(model.path, (0,), layers=layers) as one:
        wanted = answers(one, model.texts)
    with loaded(model.path, (0, 1), layers=layers) as two:
        check_alike(answers(two, model.texts), wanted)
        assert families.rms(wanted[0] - model.logits[0]) <= model.allowed()


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("gpu", DEVICES)
def test_neurons_of_layers_on_two_gpus(gpu: str, predicts: bool, tmp_path: Path) -> None:
    path = packed(model := Truth(case_named("llama-relu"), half=True), tmp_path)
    checkpoint = open_checkpoint(path)
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    predictors = predictor_of(checkpoint.config) if predicts else None
    selection = Selection("exact", "a test", (), bundles, predictors)

    def make() -> NeuronSplit:
        return NeuronSplit(bundles, placed(checkpoint.config, 0.5), selection.threshold, predictors)

    with loaded(path, (0,), gpu, make=make, selection=selection) as one:
        wanted = answers(one, model.texts)
        assert predicts or families.rms(wanted[0] - model.logits[0]) <= model.allowed()
    with loaded(path, (0, 1), gpu, make=make, selection=selection) as two:
        check_alike(answers(two, model.texts), wanted)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next", "deepseek-v2-lite"])
@pytest.mark.parametrize("gpu", DEVICES)
def test_experts_of_layers_on_two_gpus(name: str, gpu: str, tmp_path: Path) -> None:
    model = Truth(case_named(name), folder=tmp_path)
    experts = open_checkpoint(model.path).config.experts

    def make() -> ExpertSplit:
        sizes = [experts[layer].n_experts if layer in experts else 0 for layer in range(max(experts) + 1)]
        return ExpertSplit([np.arange(0, size, 2, dtype=np.int32) for size in sizes])

    with loaded(model.path, (0,), gpu, make=make) as one:
        wanted = answers(one, model.texts)
    with loaded(model.path, (0, 1), gpu, make=make) as two:
        check_alike(answers(two, model.texts), wanted)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_experts_that_a_policy_exchanges_on_two_gpus(policy: str, tmp_path: Path) -> None:
    """Each has a policy over its own layers, which decides as that of one GPU does."""
    model = Truth(case_named("mixtral"), "gguf", tmp_path)
    experts = open_checkpoint(model.path).config.experts
    layers = range(max(experts) + 1)

    def split(first: int, last: int) -> ExpertSplit:
        sizes = {layer: about.n_experts for layer, about in experts.items() if first <= layer < last}
        start = {layer: np.full(n, 1 / n) for layer, n in sizes.items()}
        hot = [np.arange(2 * (layer in experts), dtype=np.int32) for layer in layers]
        return ExpertSplit(hot, copier=Copier(make_policy(policy, dict.fromkeys(sizes, 2), sizes, start)))

    def run(firsts: tuple[int, ...]) -> tuple[list[np.ndarray], list[Any]]:
        ends = [*firsts[1:], len(layers)]
        made = iter([split(*each) for each in zip(firsts, ends, strict=True)])
        splits = list[ExpertSplit]()

        def make() -> ExpertSplit:
            splits.append(next(made))
            return splits[-1]

        with loaded(model.path, firsts, make=make) as executor:
            found = [*answers(executor, model.texts), *answers(executor, model.texts)]
            for card in executor.cards:
                card.observer.settle()
            return found, [(ffn.hot.tolist(), ffn.collect()["copied"]) for one in splits for ffn in one.ffns]

    wanted, held = run((0,))
    ours, on_two = run((0, 1))
    check_alike(ours, wanted)
    assert on_two == held and all(copied for _, copied in held)


def test_a_failure_on_either_gpu_fails_its_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Truth(case_named("llama-gqa"), folder=tmp_path)
    with loaded(model.path, (0, 1)) as two:
        wanted, finished = answers(two, model.texts), list[Any]()
        for card in two.cards:

            def fail(*_: Any) -> None:
                raise RuntimeError("CUDA error: out of memory")

            for each in two.cards:
                monkeypatch.setattr(each, "finish", lambda each=each: finished.append(each))
            with monkeypatch.context() as broken, pytest.raises(PowerInferError, match="ran out of memory"):
                broken.setattr(card, "_operators", [*card.operators[:2], replace(card.operators[2], run=fail)])
                answers(two, model.texts)
            assert set(finished) == set(two.cards)
            finished.clear()
            check_alike(answers(two, model.texts), wanted)
        with pytest.raises(RequestError, match="a trace is of one GPU"), two.traced():
            pass


# ---------------------------------------------------------------- devices that work later


class Second:
    """The streams of another device of a machine, which has a queue of its own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stream = machine.stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def active(self) -> AbstractContextManager[None]:
        return self._machine.on(self._stream)

    def current(self) -> Stream:
        stream = self._machine.current()
        return self._stream if stream is self._machine.streams[0] else stream


@contextmanager
def two_devices(seed: int, without: str | None = None) -> Iterator[Machine]:
    with deferred(seed, without) as machine, pytest.MonkeyPatch.context() as patch:
        second = Second(machine)
        patch.setitem(streams.KINDS, "deferred", lambda device: second if device.index == 1 else machine)
        streams.streams_of.cache_clear()
        yield machine


def replayed(executor: Any, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of a prompt and of tokens one by one, launched and then replayed."""
    pages = families.scattered_pages(executor, 1)[0]
    found = [families.run_chunks(executor, texts[0][:37], [33, 1, 1, 2], pages)]
    for card in executor.cards:
        card.record(recorder_of(card.device))
    return [*found, split_calls(executor, texts[0][:6]), *side_by_side(executor, [text[:4] for text in texts])]


def test_a_gpu_waits_for_the_one_before_it(tmp_path: Path) -> None:
    """Whenever either works, the bits are the same; without the wait between them they are not."""
    path = packed(model := Truth(case_named("llama-relu"), half=True, num_hidden_layers=2), tmp_path)
    checkpoint = open_checkpoint(path)
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    selection = Selection("exact", "a test", (), bundles, None)

    def make() -> NeuronSplit:
        return NeuronSplit(bundles, placed(checkpoint.config, 0.5), selection.threshold)

    def run(device: str, machine: Machine | None = None) -> list[np.ndarray]:
        with loaded(path, (0, 1), device, make=make, selection=selection) as executor:
            if machine is not None:
                machine.finish()
            return replayed(executor, model.texts)

    wanted = run("cpu")
    for seed in range(2):
        with two_devices(seed) as machine:
            check_alike(run("deferred", machine), wanted)
            assert machine.replays
    wait, differs = "self._streams.current().wait_event(passed.ready)", False
    for seed in range(10):
        with two_devices(seed, wait) as machine:
            try:
                ours = run("deferred", machine)
                differs = any(not np.array_equal(*pair) for pair in zip(ours, wanted, strict=True))
            except RuntimeError:  # of recordings
                differs = True
        if differs:
            break
    assert differs, "nothing shows that one device waits for the other"


# ---------------------------------------------------------------- placed by plans


@pytest.fixture
def two_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured, with as many GPUs as are named, for which few neurons are worth it."""

    def measured(
        engine: EngineConfig, *_: Any, gpu: str | None = None, check: Callable[[Hardware], object] = repr, **__: Any
    ) -> Hardware:
        check(memories(engine, gpu))
        hardware = replace(load("pc-high"), sync_us=0.0)
        return hardware.with_cards([hardware] * (gpu or "").count(","))

    monkeypatch.setattr("powerinfer.hardware.measure.measured", measured)


def answer(path: Path, **options: Any) -> tuple[list[int], dict[str, str]]:
    settings = {"threads": 1, "context": 64, "prefill_chunk": 48, "max_batch": 3, "trial": False} | options
    with LLM(path, **settings) as llm:
        tokens = list(range(3, 39))
        found = llm.generate([tokens, tokens[::-1]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        return [token for one in found for token in one.token_ids], llm.choices


def files(folder: Path, kind: str) -> Path:
    if kind == "experts":
        return tiny_model(folder)
    path = tiny_llama(folder / "m.gguf")
    if kind == "dense":
        return path
    give_profile(give_bundles(path))
    return give_predictor(path) if kind == "predicted" else path


@pytest.mark.usefixtures("two_described")
@pytest.mark.parametrize("kind", ["dense", "exact", "predicted", "experts"])
def test_a_load_on_two_gpus_follows_its_plan(kind: str, tmp_path: Path) -> None:
    """Bytes on each GPU are the plan's, its budget holds, and the bits are those of one GPU with the same neurons."""
    path, options = files(tmp_path, kind), {"selector": kind} if kind == "predicted" else {}
    engine = EngineConfig(threads=1, context=128, prefill_chunk=48, max_batch=3, gpu="cpu,cpu", trial=False, **options)
    everything = resolve(open_checkpoint(path), replace(engine, vram=(2 * GIB, 2 * GIB)))
    several = everything.placement.several
    assert several is not None and everything.placement.firsts == (0, 1) and everything.placement.head
    held = [sum(part.plan.bytes["gpu"].values()) for part in several.parts]
    assert sum(held) == needs(everything).vram
    less = {"dense": 0, "experts": 4096}.get(kind, 1)
    resolved = resolve(open_checkpoint(path), replace(engine, vram=tuple(nbytes - less for nbytes in held)))
    plan = resolved.placement.several
    assert plan is not None
    for part, nbytes in zip(plan.parts, held, strict=True):
        assert sum(part.plan.bytes["gpu"].values()) <= nbytes - less
    if less:
        assert plan.choice.mass_on_gpu < 1, "something is left for the CPU"
    texts = [np.arange(3, 3 + families.TOKENS, dtype=np.int32) % 20]
    executor, sparsity = load_resolved(resolved, lambda: [1, 2, 3])
    try:
        wanted = answers(executor, texts)
        ffns = getattr(sparsity, "ffns", ())
        for number, (card, part) in enumerate(zip(executor.cards, plan.parts, strict=True)):
            ours = card.memory()
            first, last = part.first, part.last
            inside = sum(ffn.memory()["ffn"] for ffn in ffns if first <= ffn.layer < last)
            planned = part.plan.bytes["gpu"]
            for use in ("attention", "kv", "norms", "head"):
                assert ours[use] == planned.get(use, 0), (number, use)
            places = (4 + 1) * 4 * (last - first) * (kind == "experts")  # where each expert is, and a counter, int32
            assert ours["ffn"] + inside == planned.get("ffn", 0) + planned.get("experts", 0) + places
        request, pinned = plan.request, 0
        for card in executor.cards if less else ():
            buffers = card.buffers
            described = sum(one.nbytes for one in buffers._description._pinned)
            pinned += card.link.nbytes + buffers._host_x.nbytes + described
        config = request.model.config
        logits = step_bytes(0, 0, config.vocab_size, request.workload.requests) - description_bytes(0, 0, False)
        beside = request.model.scratch_bytes(request.workload.tokens, 0) + 2 * 8 * sum(config.ffn_sizes) + logits
        assert not less or plan.bytes["cpu"]["scratch"] == beside + pinned
    finally:
        executor.close()
    placement = replace(resolved.placement, firsts=(), several=None)
    alone = replace(resolved, device=replace(resolved.device, gpu="cpu"), placement=placement, vram=None)
    executor, _ = load_resolved(replace(alone, checkpoint=open_checkpoint(path)), lambda: [1, 2, 3])
    try:
        check_alike(answers(executor, texts), wanted)
    finally:
        executor.close()


@pytest.mark.usefixtures("two_described")
def test_prompts_on_two_gpus_have_the_chunks_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose working memory it counts; what streams is registered, once that is known."""
    monkeypatch.setattr(budget, "EXPERT_STAGED", 1)
    monkeypatch.setattr(Model, "gpu_scratch", lambda _, tokens, *__: tokens)
    path = tmp_path / "m.gguf"
    expert_models.write(path, small(expert_models.CONFIGS["qwen3-30b-a3b"]), expert_models.Weights("f16"))
    engine = EngineConfig(threads=1, context=2048, max_batch=3, gpu="cpu,cpu", trial=False)
    everything = resolve(open_checkpoint(path), replace(engine, vram=(2 * GIB, 2 * GIB)))
    assert everything.placement.several is not None and everything.engine.chunk == 512, "nothing streams"
    less = tuple(sum(part.plan.bytes["gpu"].values()) - 30000 for part in everything.placement.several.parts)
    resolved = resolve(open_checkpoint(path), replace(engine, vram=less))
    assert resolved.placement.several is not None and resolved.placement.several.staging
    assert resolved.engine.chunk == resolved.device.chunk == resolved.placement.several.request.chunk == 2048
    monkeypatch.setattr(registered, "LEAST_BYTES", 1 << 12)
    for least in (33, None):
        outcome = Outcome(crossing.Crossing(least, ()), tmp_path)
        monkeypatch.setattr(crossing, "settled", lambda *_, outcome=outcome: outcome)
        executor, sparsity = load_resolved(replace(resolved, checkpoint=open_checkpoint(path)), list)
        try:
            stage = sparsity.ffns[0].stage  # type: ignore[attr-defined]
            assert stage.least == least
            assert bool(stage.registered.nbytes) == stage.registered.active == (least is not None)
        finally:
            executor.close()


def test_each_of_two_gpus_says_who_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = property(lambda card: Choice(card.way, card._way_reason, card._way_origin))  # though nothing is recorded
    monkeypatch.setattr(GpuLayers, "caller", caller)
    with loaded(Truth(case_named("llama-gqa"), folder=tmp_path).path, (0, 1)) as two:
        for card, seconds in zip(two.cards, (1e-3, 2e-3), strict=True):
            step_trial.use(OneCard(two, card), step_trial.StepExchange("waits", (("waits", seconds),)), "a test")
        times = (f"cpu: waits (ms a step: {ms} if the host waits), a test" for ms in (1, 2))
        assert two.choices.texts()["steps"] == "; ".join(times)


@pytest.mark.usefixtures("two_described")
@pytest.mark.parametrize("name", ["gemma4-e", "gemma3n-streams"])
def test_layers_that_get_inputs_of_their_own_on_two_gpus(name: str, tmp_path: Path) -> None:
    """Each GPU gets those of its layers, and all residual streams; those that read others' keys and values are beside
    these. Bytes are the plan's."""
    model = Truth(case_named(name), folder=tmp_path)
    sizes = {"context": families.CONTEXT, "prefill_chunk": families.TOKENS, "kv_type": "f32"}
    engine = EngineConfig(threads=1, max_batch=8, gpu="cpu,cpu", trial=False, **sizes)
    resolved = resolve(open_checkpoint(model.path), engine)
    assert resolved.placement.several is not None and resolved.placement.head
    executor, _ = load_resolved(resolved, lambda: [1, 2, 3])
    try:
        model.check(families.run_chunks(executor, model.texts[0], CHUNKS, families.scattered_pages(executor, 1)[0]))
        config, widths = open_checkpoint(model.path).config, [card.buffers._inputs.shape[1] for card in executor.cards]
        assert sum(widths) == config.layer_inputs * config.n_layers and all(widths)
        for card, part in zip(executor.cards, resolved.placement.several.parts, strict=True):
            ours, wanted = card.memory(), part.plan.bytes["gpu"]
            assert {use: ours[use] for use in ("attention", "kv", "head")} == {
                use: wanted.get(use, 0) for use in ("attention", "kv", "head")
            }
    finally:
        executor.close()


@pytest.mark.usefixtures("two_described")
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-moe-some"])
def test_a_gpu_whose_layers_have_no_experts_beside_one_with_experts(name: str, tmp_path: Path) -> None:
    """The first of these models has them in the last layer, the other in the first; some are beside the GPU."""
    model = Truth(case_named(name), folder=tmp_path)
    engine = EngineConfig(threads=1, context=families.CONTEXT, max_batch=8, gpu="cpu,cpu", trial=False, kv_type="f32")
    several = resolve(open_checkpoint(model.path), engine).placement.several
    assert several is not None and several.claims.slots is not None
    vram = tuple(sum(part.plan.bytes["gpu"].values()) - 1 for part in several.parts)
    resolved = resolve(open_checkpoint(model.path), replace(engine, vram=tuple(map(max, vram, vram[::-1]))))
    less = resolved.placement.several
    assert less is not None and sum(less.claims.slots or ()) < sum(several.claims.slots)
    executor, _ = load_resolved(resolved, lambda: [1, 2, 3])
    try:
        model.check(families.run_chunks(executor, model.texts[0], CHUNKS, families.scattered_pages(executor, 1)[0]))
    finally:
        executor.close()


@pytest.mark.usefixtures("two_described")
def test_answers_on_two_gpus(tmp_path: Path) -> None:
    """By every way into the engine; where one of them holds nothing, a line says how much would do."""
    path = tiny_model(tmp_path)
    alone, _ = answer(path, gpu="none")
    for options in (
        {"gpu": "cpu,cpu"},
        {"gpu": "cpu, cpu", "vram": "2GiB,2GiB"},
        {"gpu": "cpu,cpu", "vram": [2 * GIB] * 2},
    ):
        found, choices = answer(path, **options)
        assert found == alone and choices["gpu"].startswith("2 layers and the head on cpu, cpu")
    adjusted, _ = answer(path, gpu="cpu,cpu", adjust=True)
    assert adjusted == alone
    exchanged, choices = answer(path, gpu="cpu,cpu", expert_policy="lru")
    assert exchanged == alone and choices["experts"] == "lru (asked for: --expert-policy)"
    refused = {
        r"\(2\): 1MiB of VRAM hold no layer .*iB too little \(.*: give it more, leave that card out, or": {
            "vram": (2 * GIB, MIB)
        },
        "of RAM, .* beside several GPUs: give --ram": {"ram": 64 * MIB},
    }
    for message, options in refused.items():
        with pytest.raises(RequestError, match=message):
            answer(path, gpu="cpu,cpu", **options)
    with pytest.raises(RequestError, match="has 2 layers: name at most as many GPUs"):
        answer(path, gpu="cpu,cpu,cpu")


@pytest.mark.usefixtures("two_described")
def test_policies_over_experts_are_tried_on_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest is chosen for both, and kept; its bits are those of that policy where it was asked for."""
    path, now, seconds = tiny_model(tmp_path), [0.0], {"static": 4, "lru": 3, "lfu": 2, "dynamic": 5}
    everything = resolve(open_checkpoint(path), EngineConfig(threads=1, context=64, gpu="cpu,cpu", prefill_chunk=48))
    assert everything.placement.several is not None
    vram = [
        sum(part.plan.bytes["gpu"].values()) - 2 * part.plan.request.model.expert_bytes(0)[0]
        for part in everything.placement.several.parts
    ]
    before, tried = policy_trial.decode_one, list[str]()

    def decode(executor: Any, token: Any, at: int) -> None:
        (name,) = {card.observer.policy.name for card in executor.cards}
        tried.append(name)
        now[0] += seconds[name]
        before(executor, token, at)

    monkeypatch.setattr(policy_trial, "finished", lambda _: now[0])
    monkeypatch.setattr(policy_trial, "decode_one", decode)
    monkeypatch.setattr(Disturbance, "cores", 0.0)
    options = {"gpu": "cpu,cpu", "vram": vram, "max_batch": 1, "trial": True}
    found, choices = answer(path, **options, expert_policy="auto")
    assert choices["experts"].startswith("lfu (a step takes") and set(tried) == set(seconds)
    tried.clear()
    again, choices = answer(path, **options, expert_policy="auto")
    assert again == found and "chosen earlier" in choices["experts"] and not tried
    assert answer(path, **options | {"trial": False, "expert_policy": "lfu"})[0] == found
    engine = EngineConfig(threads=1, context=64, prefill_chunk=48, gpu="cpu,cpu", vram=tuple(vram), max_batch=1)
    moving, staying = (
        resolve(open_checkpoint(path), replace(engine, expert_policy=name)) for name in ("auto", "static")
    )
    ram = needs(moving).ram
    assert ram == needs(resolve(open_checkpoint(path), replace(engine, expert_policy="lfu"))).ram > needs(staying).ram
    less = resolve(open_checkpoint(path), replace(engine, expert_policy="auto", ram=ram - 1))
    assert less.policy.name == "static" and "need all experts in RAM too" in less.policy.reason


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"gpu": "0,1"}, "cuda:0,cuda:1"),
        ({"gpu": "cuda:1, cuda:0", "vram": (1, 2)}, "cuda:1,cuda:0"),
        ({"gpu": "1"}, "cuda:1"),
        ({"gpu": "cpu,cpu"}, "cpu,cpu"),
        ({"gpu": "0,0"}, "names cuda:0 twice"),
        ({"gpu": "cpu,0"}, "stand-ins alone"),
        ({"gpu": "0,"}, "no device ''"),
        ({"gpu": "0,none"}, "no device 'none'"),
        ({"gpu": "0,1", "vram": GIB}, "give 2 sizes"),
        ({"gpu": "0,1", "vram": (1, 2, 3)}, "names 2 GPUs, and --vram has 3 sizes"),
        ({"gpu": "0", "vram": (1, 2)}, "--gpu names one GPU"),
        ({"gpu": "0,1", "vram": (1, 0)}, "is more than 0"),
        ({"gpu": ",".join(map(str, range(17)))}, "at most 16"),
    ],
)
def test_names_of_several_gpus(options: dict[str, Any], wanted: str) -> None:
    if wanted.startswith(("cuda", "cpu")):
        assert wanted_gpu(EngineConfig(**options))[0] == wanted
        return
    with pytest.raises(RequestError, match=wanted):
        wanted_gpu(EngineConfig(**options))


def test_flags_of_other_programs_say_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, hint in (
        (["-ts", "3,1"], "as 8GiB,12GiB"),
        (["-mg", "1"], "as 0,1"),
    ):
        assert main(["run", *flags, "hello"]) == 2
        assert hint in capsys.readouterr().err


# ---------------------------------------------------------------- plans


def planned(name: str, card: str, ram: int = 64 * GIB, selector: str = "auto", **options: Any) -> Plan:
    engine = EngineConfig(ram=ram, context=4096, selector=selector, **options)
    machine = described_for(PlanConfig(card=card), engine, is_shape=True)
    assert machine is not None
    hardware, engine = machine
    plan = place(shape_subject(name, None, selector).request(hardware, engine, PlanConfig(card=card)))
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("name", ["llama-3.3-70b", "qwen3-30b-a3b", "bamboo-7b", "qwen3-next-80b-a3b"])
def test_a_plan_over_two_cards_holds_both_budgets(name: str) -> None:
    plan = planned(name, "RTX 4060, RTX 3060")
    request, every = plan.request, plan.request.model.config.n_layers
    assert len(plan.parts) == 2 and plan.parts[1].first == plan.parts[0].last
    for part, card in zip(plan.parts, request.hardware.all_cards, strict=True):
        assert 0 < sum(part.plan.bytes["gpu"].values()) <= card.device.memory_bytes
    assert sum(plan.bytes["cpu"].values()) <= budget.budgets(request.hardware, request.vram, request.ram)[1]
    each: dict[str, int] = {}
    for part in plan.parts:
        for use, nbytes in part.plan.bytes["gpu"].items():
            each[use] = each.get(use, 0) + nbytes
    assert each == plan.bytes["gpu"], "the whole is the sum of its parts"
    assert len(plan.choice.layer_seconds) == every and plan.fits
    larger, smaller = (planned(name, card) for card in ("RTX 3060", "RTX 4060"))
    if larger.choice.mass_on_gpu < 1:
        assert plan.choice.seconds < min(larger.choice.seconds, smaller.choice.seconds), "two cards hold more than one"
    else:
        assert larger.choice.seconds < plan.choice.seconds < smaller.choice.seconds, "each is as fast as it is"


@pytest.mark.parametrize(
    ("name", "cards", "fastest"),
    [
        ("qwen2.5-32b", "RTX 4090, RTX 3060", 0),
        ("nemotron-h-8b", "RTX 4060, RTX 3060", 1),  # the first card has no neurons
        ("qwen3-30b-a3b", "RTX 4060 Ti 16GB, RTX 3060", 1),
        ("gpt-oss-120b", "RTX 3060, RTX 5090, RTX 4090", 1),
        ("qwen2.5-32b", "RTX 3090, RTX 3090", None),
        ("gpt-oss-120b", "RTX 4060, RTX 3060", None),
    ],
)
def test_the_fastest_of_several_cards_has_what_it_holds(
    name: str, cards: str, fastest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts and neurons with it; the others have what is left, one layer at least. Layers are divided in
    proportion where cards are alike, and where experts in RAM take most of the time."""
    plan = planned(name, cards)
    assert plan.request.claims() == plan.claims, "what a load checks is what is planned"
    monkeypatch.setattr(several, "WORTH", 0.0)
    even, counts = planned(name, cards), [part.plan.claims.gpu_layers for part in plan.parts]
    if fastest is None:
        assert counts == [part.plan.claims.gpu_layers for part in even.parts]
        return
    assert plan.choice.seconds < 0.98 * even.choice.seconds and plan.choice.mass_on_gpu == 1
    part, count, every = plan.parts[fastest].plan, counts[fastest], plan.request.model.config.n_layers
    full = sum(part.bytes["gpu"].values()) * (count + 1) > count * (part.request.vram or 0)
    assert sum(counts) == every and min(counts) > 0 and (full or count == every - len(counts) + 1)


def test_two_cards_are_as_fast_as_one_of_their_memory() -> None:
    """But for the way between them, and for what both of them take for their driver and working memory."""
    both, one = planned("qwen3-30b-a3b", "RTX 4060, RTX 4060"), planned("qwen3-30b-a3b", "RTX 4060 Ti 16GB")
    assert both.choice.mass_on_gpu < one.choice.mass_on_gpu < both.choice.mass_on_gpu + 0.25
    first, last = (part.plan.choice.mass_on_gpu for part in both.parts)
    assert abs(first - last) < 0.15, "neither is left with more than the other"


def test_several_residual_streams_are_on_gpus_altogether() -> None:
    plan = planned("gemma-3n-e4b", "RTX 4060, RTX 4060", vram=(4 * GIB, 4 * GIB))
    assert plan.claims.whole and plan.claims.gpu_layers == 35 and plan.parts[1].first <= 18
    engine = EngineConfig(ram=64 * GIB, context=4096, vram=(2 * GIB, 2 * GIB))
    config = PlanConfig(card="RTX 4060, RTX 4060")
    hardware, engine = described_for(config, engine, is_shape=True)  # type: ignore[misc]
    refused = place(shape_subject("gemma-3n-e4b", None, "auto").request(hardware, engine, config))
    assert isinstance(refused, RequestError) and "give it more, leave that card out" in str(refused)


@pytest.mark.parametrize("vrams", [(8 * GIB, 12 * GIB), (3 * GIB, 20 * GIB)])
def test_layers_go_where_there_is_room(vrams: tuple[int, ...]) -> None:
    plan = planned("llama-3.3-70b", "RTX 4090, RTX 4090", vram=vrams)
    assert plan.claims.whole
    first, last = plan.parts
    for part, most in zip(plan.parts, vrams, strict=True):
        each = sum(part.plan.bytes["gpu"].values())
        layer = each // part.plan.claims.gpu_layers
        assert part.plan.request.vram == most and most - 2 * layer < each <= most, "not one more layer fits"
    assert first.last < last.last < 80


def test_what_a_plan_over_cards_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "qwen3-30b-a3b", "--card", "RTX 4060, RTX 3060", "--ram", "32GiB", "-c", "4096"]
    assert main([*flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(flags) == 0
    shown = capsys.readouterr().out
    cards = document["cards"]
    assert [card["vram"] for card in cards] == [8 * GIB, 12 * GIB]
    assert sum(card["layers"] for card in cards) == document["gpu_layers"] == 48 and cards[1]["head"]
    assert "layers 0 to" in shown and "and the head" in shown and "only one of them computes at a time" in shown
    refused = {
        "give 2 sizes": [*flags, "--vram", "8GiB"],
        "has 3 sizes, and there are 2": [*flags, "--vram", "8GiB,8GiB,8GiB"],
        "has 2 sizes, and there is 1 GPU: give a size": [*flags, "--card", "RTX 4060", "--vram", "8GiB,12GiB"],
        "RTX 4060 has 8GiB": [*flags, "--vram", "12GiB,8GiB"],
        "random is of one GPU": [*flags, "--policy", "random"],
        "no card": [*flags[:4], "RTX 4060, RTX 9999"],
        "or add a model that several are to share": ["plan", *flags[3:7]],
        "number of|such as 8GiB": [*flags, "--vram", "8GiB,many"],
    }
    for message, arguments in refused.items():
        assert main(arguments) == 2, message
        text = capsys.readouterr().err
        assert any(one in text for one in message.split("|")), (message, text)


def test_what_was_measured_of_each_gpu_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = replace(load("pc-high"), key={"isa": "avx2"}).with_cards([load("pc-low")])
    monkeypatch.setattr("powerinfer.hardware.measure.saved_hardware", lambda *_: both)
    assert main(["measure", "--gpu", "cpu,cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("between the two: ") == len(both.all_cards) == 2
    for card in both.all_cards:
        assert f"\n{card.device.name}, " in shown and f": {card.copy_gb_s:.1f} GB/s; " in shown
    assert main(["measure", "--gpu", "cpu,cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["paths"]) == 2 and document["path"] == document["paths"][0]
    assert len(document["hardware"]["cards"]) == 1


@pytest.mark.usefixtures("two_described")
def test_gpus_that_run_out_of_memory_are_given_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each as much as was lacking on one; where nothing is left to leave out, its own line is what is said."""
    path, failures = files(tmp_path, "exact"), [1]
    options = {"threads": 1, "context": 64, "prefill_chunk": 48, "max_batch": 3, "gpu": "cpu,cpu", "trial": False}
    everything = resolve(open_checkpoint(path), EngineConfig(**options, vram=(2 * GIB, 2 * GIB)))
    assert everything.placement.several is not None
    held = tuple(sum(part.plan.bytes["gpu"].values()) for part in everything.placement.several.parts)

    def rehearsed(executor: Any, _: int) -> int | None:
        if failures[0] and executor.gpu is executor.cards[1]:
            failures[0] -= 1
            raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")
        return None

    monkeypatch.setattr(vram, "rehearsed", rehearsed)
    monkeypatch.setattr(vram, "_LACKING", 1)
    with LLM(path, **options, vram=held) as llm:
        hot = [len(ffn.hot) for ffn in llm._sparsity.ffns]  # type: ignore[union-attr]
        assert not failures[0] and len(hot) == 2 and all(0 < n < 96 for n in hot)
    failures[0] = 99
    with pytest.raises(GpuMemoryError, match="ran out of memory while it was tried"):
        LLM(path, **options, vram=held)
