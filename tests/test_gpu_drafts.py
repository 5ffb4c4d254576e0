"""Drafts beside a GPU, or one that torch's CPU emulates: where a model's draft head is, what it says there, and what
requests with drafts answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from draft_models import DraftModel, tier_of  # noqa: E402
from families import ROUNDING, TOKENS, rms, scattered_pages  # noqa: E402
from gpu_device import CUDA, device_name  # noqa: E402
from test_draft_head import batch_of, run  # noqa: E402
from test_gpu_kernels import TRITON  # noqa: E402
from test_gpu_layers import engine_of, on_gpu  # noqa: E402
from test_speculation_models import any_number, prompts  # noqa: E402, F401
from toy_model import ToyTokenizer  # noqa: E402

from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.batch import LogitsNeed  # noqa: E402
from powerinfer.devices.cpu import Drafting  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.step_buffers import step_bytes  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware.description import load as machine  # noqa: E402
from powerinfer.hybrid import resolve as resolving  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Needs, Placement, Resolved, UsedGpu, needs, workload  # noqa: E402
from powerinfer.hybrid.vram import smaller  # noqa: E402
from powerinfer.kernels import draft_rows, gpu  # noqa: E402
from powerinfer.kernels.candidates import CANDIDATES  # noqa: E402
from powerinfer.kernels.cpu import LANES, PAGE  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.placement.budget import Division, displaced_by_drafts, in_ram, whole_layers  # noqa: E402
from powerinfer.placement.budget import on_gpu as bytes_on_gpu  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.placement.shapes import LAYER_MARGIN, checkpoint_model  # noqa: E402
from powerinfer.runtime.draft_model import DraftModel as SmallerModel  # noqa: E402
from powerinfer.runtime.draft_sources import draft_source  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.mtp import MtpDrafts  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.runtime.speculation import DraftSource, likeliest  # noqa: E402

PLACES = {"split": (False, False), "output": (True, False), "whole": (True, True)}
"""Of a split model, whose output head is on the CPU: (output head on the GPU, draft head there)."""
HEADS = [("qwen35", place) for place in PLACES] + [("glm4-moe", "split")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[DraftModel, Path]]:
    models = {name: DraftModel(name) for name in ("qwen35", "glm4-moe", "deepseek-v3")}
    return {name: (one, one.save("folder", tmp_path_factory.mktemp(name))) for name, one in models.items()}


Files = dict[str, tuple[DraftModel, Path]]


def placed(path: Path, place: str, **options: Any) -> Resolved:
    checkpoint, (head, draft) = open_checkpoint(path, draft_head=True), PLACES[place]
    layers = checkpoint.config.n_layers if head else checkpoint.config.whole_layers(1) or 1
    return Resolved(checkpoint, engine_of(**options), **on_gpu(layers, head)).placed(draft=draft)


@pytest.mark.parametrize(("name", "place"), HEADS)
@pytest.mark.usefixtures("device")
def test_a_head_is_that_of_transformers(name: str, place: str, files: Files) -> None:
    """In one go, and token by token, without the model's logits being lost."""
    model, path = files[name]
    executor = load_split(placed(path, place))
    assert (executor.draft is not None) == PLACES[place][1]
    assert f"draft head on the {'GPU' if PLACES[place][1] else 'CPU'}" in executor.choices.texts()["gpu"]
    pages = scattered_pages(executor, 2)
    for row, chunks in enumerate(([TOKENS], [40, *[1] * 8, TOKENS - 48])):
        _, *ours = run(executor, model.tokens, pages[row], chunks)  # type: ignore[arg-type]
        for got, exact, narrow in zip(ours, model.exact, model.narrow, strict=True):
            assert rms(got - exact) <= 2 * ROUNDING * rms(narrow - exact)
    executor.close()
    assert executor.drafter is None


@pytest.mark.parametrize("place", ["output", "whole"])
@pytest.mark.usefixtures("device")
def test_a_draft_brings_candidates_in_place_of_logits(place: str, files: Files) -> None:
    """The likeliest token of each row, with its probability."""
    model, path = files["qwen35"]
    executor = load_split(placed(path, place))
    head, pages = executor.drafter, scattered_pages(executor, 1)[0]
    assert head is not None
    hidden = model.exact[0][:5].astype(np.float32)
    batch = batch_of(model.tokens[1:6], 0, pages)
    logits = head.forward(batch, hidden).copy()
    batch.needs = LogitsNeed.CANDIDATES
    records = head.forward(batch, hidden)
    assert records.dtype == CANDIDATES and records.shape == (5,)
    for record, row in zip(records, logits, strict=True):
        (token, probability), (expected, its) = likeliest(record), likeliest(row)
        assert token == expected and probability == pytest.approx(its, rel=1e-4)
    executor.close()


def test_candidates_without_a_likeliest_one() -> None:
    record = np.zeros((), CANDIDATES)
    record["count"], record["total"] = 200, 4
    assert likeliest(record) == (0, 0.0)
    for total in (np.nan, np.inf, 0.5):
        record["count"], record["total"] = 64, total
        assert likeliest(record)[1] == 0.0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are chosen from part of 96 tokens."""
    monkeypatch.setattr(draft_rows, "LEAST", LANES)


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_0"])
@pytest.mark.usefixtures("device", "few")
def test_a_head_of_a_draft_vocabulary(quantize: str | None, files: Files) -> None:
    """Logits of listed panels are those of all, wherever they come; panels that are listed no more have none."""
    model, path = files["qwen35"]
    checkpoint = open_checkpoint(path, draft_head=True, **({"quantize": quantize} if quantize else {}))
    layers = checkpoint.config.n_layers
    resolved = Resolved(checkpoint, engine_of(), **on_gpu(layers, True)).placed(draft=True)
    executor = load_split(resolved)
    head, pages = executor.drafter, scattered_pages(executor, 1)[0]
    assert head is not None and head.lists
    assert executor.draft is not None and executor.draft.memory()["head"] > 0
    hidden = model.exact[0][:5].astype(np.float32)
    batch = batch_of(model.tokens[1:6], 0, pages)
    head.forward(batch, hidden)
    normal = executor.gpu.logits(head.outputs(np.arange(5, dtype=np.int32)))
    for panels in ([0], [0, 2, 5], [0, 1, 2, 4], [0, 4, 5], [0, 1, 2, 3, 4, 5]):
        order = head.list_panels(np.array(panels, np.int32))
        logits = head.forward(batch, hidden)[:, : len(order) * LANES].reshape(5, len(order), LANES)
        places = [int(np.flatnonzero(order == panel)[-1 if panel else 0]) for panel in panels]
        for panel, place in zip(panels, places, strict=True):
            np.testing.assert_allclose(logits[:, place], normal[:, panel * LANES :][:, :LANES], rtol=1e-5, atol=1e-5)
        unused = sorted(set(range(len(order))) - set(places))
        assert (logits[:, unused] == -np.inf).all()
    executor.close()


@pytest.mark.skipif(not TRITON or CUDA, reason="Triton's interpreter is not at hand")
def test_a_head_by_the_kernels_of_a_gpu(files: Files) -> None:
    model, path = files["qwen35"]
    executor = load_split(placed(path, "whole"))
    head, table = executor.drafter, np.arange(3, dtype=np.int32)
    assert head is not None
    gpu.force_triton(True)
    try:
        hidden = model.exact[0][:5].astype(np.float32)
        logits = head.forward(batch_of(model.tokens[1:6], 0, table), hidden)
    finally:
        gpu.force_triton(None)
    exact, narrow = model.exact[2][:5], model.narrow[2][:5]
    assert rms(logits - exact) <= 4 * ROUNDING * rms(narrow - exact)
    executor.close()


def experts_placed(path: Path, vram: int, said: list[str]) -> Resolved:
    """A model of experts as a load places it: all it can on the GPU."""
    options = {"context": 128, "prefill_chunk": TOKENS, "kv_type": "f32", "threads": 1, "max_batch": 2}
    engine = EngineConfig(gpu=device_name(), vram=vram, **options)
    return resolve(open_checkpoint(path, draft_head=True), engine, say=said.append)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
@pytest.mark.usefixtures("device")
def test_a_head_of_experts(name: str, files: Files) -> None:
    """It is on the GPU where that has the whole model, to the byte, else on the CPU; and leaves first."""
    model, path = files[name]
    said = list[str]()
    whole = experts_placed(path, 2 << 30, said)
    vram = needs(whole).vram
    for budget, there in ((vram, True), (vram - 1, False)):
        resolved = experts_placed(path, budget, said)
        executor, _ = load_resolved(resolved, lambda: [1, 2, 3], say=said.append)
        assert isinstance(executor, SplitExecutor) and executor.gpu.has_head and not executor.divided and not said
        assert (executor.draft is not None) == there == resolved.placement.draft
        chunks = [40, *[1] * 8, TOKENS - 48]
        _, *ours = run(executor, model.tokens, scattered_pages(executor, 1)[0], chunks)  # type: ignore[arg-type]
        for got, exact, narrow in zip(ours, model.exact, model.narrow, strict=True):
            assert rms(got - exact) <= 2 * ROUNDING * rms(narrow - exact)
        if executor.draft is not None:
            planned = checkpoint_model(resolved.checkpoint).gpu_draft_bytes("f32", 128, 1, TOKENS)
            assert 0 < executor.draft.memory()["ffn"] < sum(executor.draft.memory().values()) <= planned
        executor.close()
    less = smaller(whole, 0)
    assert isinstance(less, Resolved) and less.placement == replace(whole.placement, draft=False)


@pytest.mark.usefixtures("device")
def test_a_head_beside_layers_on_disk(files: Files) -> None:
    """The bits of a head of a model whose layers RAM holds, beside the first one on the GPU."""
    model, path = files["glm4-moe"]
    engine, found = EngineConfig(prefill_chunk=TOKENS, context=128, threads=1, max_batch=2), []
    for rests in (False, True):
        checkpoint = open_checkpoint(path, draft_head=True)
        about = tier_of(checkpoint).about
        matrices = frozenset(name for name in about.matrices if not name.startswith("layers.0."))
        plan = DiskPlan(replace(about, matrices=matrices), {}, 0) if rests else None
        placed = Placement(1, pages=8, disk=plan)
        executor = load_split(Resolved(checkpoint, engine, device=UsedGpu(device_name()), placement=placed))
        assert (executor.disk is not None) == rests
        found.append(run(executor, model.tokens, scattered_pages(executor, 1)[0], [40, 1, TOKENS - 41]))  # type: ignore[arg-type]
        assert not rests or executor.cpu.disk.counts()["bytes"] > 0  # type: ignore[union-attr]
        executor.close()
    assert all(map(np.array_equal, *found))


# ---- memory


@pytest.mark.parametrize(("kv_type", "part"), [("f32", False), ("q8_0", True)])
@pytest.mark.usefixtures("device")
def test_what_it_takes(kv_type: str, part: bool, files: Files, request: pytest.FixtureRequest) -> None:
    """It is on the GPU where it fits beside everything else, to the byte; a load takes no more than was planned. part:
    of the tokens is drafted from."""
    if part:
        request.getfixturevalue("few")
    _, path = files["qwen35"]
    resolved = placed(path, "whole", kv_type=kv_type, max_batch=2)
    resolved = resolved.placed(pages=-(-resolved.engine.context // PAGE))
    model, card = checkpoint_model(resolved.checkpoint), machine("pc-low")
    work, n = workload(model, resolved.engine), model.config.n_layers
    without, beside = (Division(n, True, draft=one) for one in (False, True))
    vram = sum(bytes_on_gpu(model, card, work, beside, dense=True).values())
    assert whole_layers(model, card, work, vram) == (n, True, 0, True)
    assert whole_layers(model, card, work, vram - 1) == (n, True, 0, False)
    held, more = in_ram(model, work, beside), in_ram(model, work, without)
    assert more.pop("draft") == model.inventory.draft and "draft" not in held
    d_model, vocab, split = model.config.d_model, model.config.vocab_size, model.draft_link_bytes(work.tokens)
    on_cpu = model.scratch_bytes(work.tokens, 2) - model.scratch_bytes(work.tokens, 0)
    steps = split + step_bytes(work.tokens, d_model, vocab, 2, inputs=d_model)
    assert held.pop("scratch") - more.pop("scratch") == steps - on_cpu
    assert held.pop("kv") < more.pop("kv") and held == more
    executor = load_split(resolved)
    assert executor.draft is not None
    executor.draft.rehearse(2)  # its largest steps
    memory = executor.draft.memory()
    scratch = memory.pop("scratch") + memory.pop("allocator", 0)
    planned = model.gpu_draft_bytes(kv_type, work.context, work.batch, work.tokens)
    assert sum(memory.values()) + scratch <= planned
    rows = planned - model.gpu_draft_bytes(kv_type, work.context, work.batch, 0)
    assert planned - sum(memory.values()) == rows + LAYER_MARGIN
    executor.close()


@pytest.mark.usefixtures("device")
def test_it_gives_way_first(files: Files) -> None:
    less = smaller(placed(files["qwen35"][1], "whole"), 0)
    assert isinstance(less, Resolved) and less.placement == replace(less.placement, head=True, draft=False)
    less = smaller(less, 0)
    assert isinstance(less, Resolved) and not less.placement.head


@pytest.mark.usefixtures("device")
def test_states_displace_little(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What undoes steps takes no more than a share of a GPU that has not the whole model, unless it is asked for."""
    _, path = files["qwen35"]
    resolved = placed(path, "split", max_batch=8)
    model = checkpoint_model(resolved.checkpoint)
    work = workload(model, resolved.engine)
    more = displaced_by_drafts(model, work, 1, 0)
    assert more == model.gpu_state_bytes(8, slice(1), work.undo_tokens) - model.gpu_state_bytes(8, slice(1)) > 0
    assert displaced_by_drafts(model, work, 1, 16 * more) == 0 != displaced_by_drafts(model, work, 1, 16 * more - 1)
    monkeypatch.setattr(resolving, "needs", lambda _: Needs(0, 0, 16 * more - 1))
    monkeypatch.setattr(resolving, "_placed", lambda checkpoint, engine, *_: replace(resolved, engine=engine))
    for way in ("mtp", "auto"):
        said = list[str]()
        found = resolve(resolved.checkpoint, replace(resolved.engine, speculate=way), say=said.append)
        assert (found.checkpoint.config.draft is not None) == (way == "mtp")
        assert [line for line in said if "--max-batch" in line] == said and len(said) == (way == "auto")


def test_a_plan_counts_it(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(files["qwen35"][1]), "--gpu", "cpu", "--context", "64", "--dry-run", "--json"]
    places = []
    for more in (["--vram", "2GiB"], ["--vram", "2GiB", "--speculate", "off"], ["--vram", "0"]):
        assert main([*command, *more]) == 0
        tiers = json.loads(capsys.readouterr().out)["bytes"]
        places.append([tier for tier, parts in tiers.items() if "draft" in parts])
    assert places == [["gpu"], [], ["cpu"]]


# ---- requests


def llm_of(executor: SplitExecutor, engine: EngineConfig, source: DraftSource | None = None) -> LLM:
    return LLM.from_parts(executor, ToyTokenizer(), executor.cpu.config, engine, source=source)  # type: ignore[arg-type]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=1, top_k=4, seed=2, max_tokens=16, ignore_eos=True, logprobs=5),
] * 2


ANSWERS = [(*head, "mtp") for head in HEADS] + [("qwen35", "output", "model"), ("glm4-moe", "split", "lookup")]


@pytest.mark.usefixtures("device", "any_number", "few")
def test_drafts_are_of_the_draft_vocabulary(files: Files) -> None:
    resolved = placed(files["qwen35"][1], "whole", context=128, max_batch=2)
    executor = load_split(resolved)
    source = draft_source(resolved.engine, executor, executor.cpu.config)
    assert isinstance(source, MtpDrafts) and source._vocabulary.restricts
    drafted, draft = set[int](), source.draft

    def watched(wanted: Any) -> list[list[int]]:
        result = draft(wanted)
        for tokens in result:
            drafted.update(tokens)
            assert all(token // LANES in source._vocabulary._listed for token in tokens)
        return result

    source.draft = watched  # type: ignore[method-assign]
    llm = llm_of(executor, resolved.engine, source)
    llm.generate([[1, 2, 3], [4] * 20], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert len(drafted) > 3
    llm.close()


@pytest.mark.parametrize(("name", "place", "source"), ANSWERS)
@pytest.mark.usefixtures("device", "any_number")
def test_answers_agree(name: str, place: str, source: str, files: Files) -> None:
    """With those of the same model without drafts, up to the rounding of steps of other sizes."""
    _, path = files[name]
    options = {"context": 128, "max_batch": 3, "prefill_chunk": 32}
    plain = load_split(placed(path, place, speculate="off", **options))
    texts = prompts(plain.vocab_size)[2:]
    expected = llm_of(plain, engine_of(**options)).generate(texts, PARAMS)
    resolved = placed(path, place, speculate="lookup" if source == "model" else source, **options)
    executor = load_split(resolved)
    drafts = draft_source(resolved.engine, executor, executor.cpu.config)
    if source == "model":
        small = load(open_checkpoint(path), engine_of(**options), drafting=Drafting(pool=executor.pool))
        drafts = SmallerModel(small, executor.vocab_size)
    llm = llm_of(executor, resolved.engine, drafts)
    for one, before in zip(llm.generate(texts, PARAMS), expected, strict=True):
        for ours, other in zip(one.logprobs or [], before.logprobs or [], strict=True):
            if ours.token_id != other.token_id:  # two were as good, but for rounding
                break
            assert abs(ours.logprob - other.logprob) <= 1e-3
    stats = llm.stats().speculation
    assert stats.drafted > (0 if source == "lookup" else 30)
    llm.close()
    plain.close()
