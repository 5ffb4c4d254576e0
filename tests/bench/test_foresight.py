"""benchmarks/disk/foresight.py, whose memory is the engine's, and the small model whose routes it reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_reads import open_reads, random_file

from benchmarks.disk import foresight, foresight_table
from benchmarks.disk.foresight import Costs, Disk, Memory, Simulation, Trace, Way
from powerinfer._native import Resting, Slots
from powerinfer.placement.experts import replay_on_disk

LAYERS, TOKENS, EXPERTS, TOP = 3, 120, 16, 4
COSTS = Costs(LAYERS, 1.0, 0.5, 0.6, 3.0, 2.0, 100.0, 50.0)


def write_trace(path: Path, wrong: str = "") -> Trace:
    """Routes that resemble those before them; every guess is right but `wrong`, which never is."""
    rng = np.random.default_rng(3)
    scores = np.cumsum(rng.standard_normal((LAYERS, TOKENS, EXPERTS)), axis=1)
    scores += 4 * rng.standard_normal(scores.shape)
    order = np.argsort(-scores, axis=-1).astype(np.int16)
    arrays = {"drafted/is_right": rng.random(TOKENS) < 0.5}
    for stream in ("text", "drafted", "right"):
        other = stream == "drafted"  # of wrong drafts
        selected = np.where(other & ~arrays["drafted/is_right"][:, None], order[..., TOP : 2 * TOP], order[..., :TOP])
        arrays[f"{stream}/selected"] = selected
        for name in ("state", "embedding", "fitted", "draft", "fitted_draft", "router", "before"):
            arrays[f"{stream}/{name}"] = order[..., -TOP:] if name == wrong else selected.copy()
        arrays[f"{stream}/router"][0] = -1
    np.savez(path, **arrays, about=np.array(json.dumps({"experts": EXPERTS})))
    return Trace.load(path)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return write_trace(tmp_path / "trace.npz")


def test_memory_has_what_the_engine_has(tmp_path: Path) -> None:
    """The same experts leave, with guesses of which some are there, and priorities that are equal."""
    size, rng = 4096, np.random.default_rng(5)
    random_file(tmp_path / "a", EXPERTS * size)
    slots = Slots(open_reads([tmp_path / "a"], "threads"), [Resting(0, 0, size, size)], EXPERTS, 9)
    priority = np.zeros(EXPERTS, np.float32)
    memory = Memory(9, priority, Disk(0.0))
    read = 0
    for step in range(200):
        priority[:] = slots.priority[:] = rng.integers(0, 6, EXPERTS)
        guess = rng.permutation(EXPERTS)[: rng.integers(0, 6)].astype(np.int32)
        there = [one for one in guess.tolist() if slots.held(one)]
        slots.priority[guess] = np.inf
        slots.fetch(np.array([*there, *(one for one in guess.tolist() if one not in there)], np.int32))
        memory.expect(guess.tolist(), float(step))
        slots.want(np.zeros(0, np.int32))
        while any(not slots.held(one) for one in guess.tolist()):  # they arrive
            slots.want(guess)
            slots.wait()
            slots.let_go()
        slots.priority[:] = priority
        needed = np.sort(rng.permutation(EXPERTS)[: rng.integers(1, 9)]).astype(np.int32)
        held = sum(slots.held(one) for one in needed.tolist())
        assert memory.begin(set(needed.tolist()), step + 0.5)[0] == held
        for one in sorted(needed.tolist(), key=lambda one: not slots.held(one)):
            slots.want(np.array([one], np.int32))
        slots.wait()
        slots.let_go()
        memory.arrive(step + 0.5)
        assert memory.held == {one for one in range(EXPERTS) if slots.held(one)}
        read += len(needed) - held
    assert read > 200


def test_a_simulation_reads_what_a_replay_does(trace: Trace) -> None:
    for slots in (6, 10):
        way = Way(within=False)
        simulation = Simulation(trace, COSTS, slots, way)
        for at in range(TOKENS):
            assert simulation.step(at) == 1
        selected = dict(enumerate(trace.of("text", "selected").astype(np.int64)))
        start = np.zeros((LAYERS, EXPERTS), np.float32)
        copies = replay_on_disk("lfu", start, selected, dict.fromkeys(range(LAYERS), slots)).copies
        expected = [copies[one] for one in simulation.of]
        assert simulation.disk.reads == sum(expected) > 0
        computed = TOKENS * (LAYERS * COSTS.attention + COSTS.end) + COSTS.expert * TOKENS * LAYERS * TOP
        extra = sum(expected) * (COSTS.fresh - COSTS.expert)
        waited = simulation.now - computed - extra
        assert 0 < waited <= simulation.disk.reads * COSTS.nbytes / COSTS.rate + 1e-6


def test_right_guesses_save_time_and_wrong_ones_cost_it(trace: Trace, tmp_path: Path) -> None:
    def run(of: Trace, **way: object) -> foresight.Simulated:
        return Simulation(of, COSTS, 10, Way(**way)).run(20, 80)  # type: ignore[arg-type]

    none, today = run(trace, within=False), run(trace)
    assert today.seconds < none.seconds and today.guessed == today.useful > 0
    ahead = run(trace, ahead="fitted", depth=LAYERS)
    assert ahead.seconds < today.seconds and ahead.guessed == ahead.useful > today.guessed
    misled = run(write_trace(tmp_path / "wrong.npz", "fitted"), ahead="fitted", depth=LAYERS)
    assert misled.seconds > today.seconds and misled.nbytes > today.nbytes and misled.useful < misled.guessed
    for name in ("fitted", "fitted_draft"):
        assert run(trace, drafts=True, ahead=name, depth=LAYERS, idle=True).seconds < run(trace, drafts=True).seconds
    drafts, surer = run(trace, drafts=True), run(trace, drafts=True, right=1.0)
    assert drafts.accepted == pytest.approx(trace.right.mean(), abs=0.15) and surer.accepted == pytest.approx(
        1, abs=0.05
    )
    assert surer.seconds < drafts.seconds


def test_what_is_right_of_guesses(trace: Trace) -> None:
    selected = trace.of("text", "selected")
    held, frequent = foresight.resident(selected, EXPERTS, 8)
    assert held[:, -1].sum(1).tolist() == [8] * LAYERS and not held[:, 0].any()
    found = {(one.stream, one.name): one for one in foresight.all_judged(trace)}
    assert found["text", "fitted"].recall == [1.0] * LAYERS and found["text", "fitted"].reads == 1.0
    assert found["text", "router"].recall[0] is None
    last = found["text", "last"]
    same = [np.isin(one[1:], one[:-1]).mean() for one in selected]  # of all tokens: more than of the one before
    assert all(a is not None and 0 < a < b for a, b in zip(last.recall, same, strict=True))
    assert last.absent == 0 and last.reads is None, "what was just used is there"
    assert frequent.shape == selected.shape


def test_guesses_that_are_supposed(trace: Trace) -> None:
    """Right as often as they should be, or by chance besides; drafts that are wrong select what others do."""
    selected = trace.of("text", "selected")
    routes = foresight.supposed(selected, EXPERTS, 0.7)
    assert routes.right.mean() == pytest.approx(0.7, abs=0.15)
    same = (routes.of("drafted", "selected") == selected).all(axis=(0, 2))
    assert (same >= routes.right).all() and same.mean() < 0.9
    for name, share in foresight.SUPPOSED.items():
        guess = routes.of("text", name)
        assert share - 0.05 < (guess == selected).mean() < share + 0.5 * (1 - share)
    found = {(one.ahead, one.drafts) for one in foresight.ways(routes, 48, 0.0)}
    assert found == {("", False), ("needed", False), ("", True), *((one, True) for one in ("half", "likely", "needed"))}


def test_tables(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "SETTINGS", (("7 GB/s", 0.75),))
    document = foresight.document(trace, 0.9, 2, 10)
    assert len(document["simulated"]) == len(foresight.ways(trace, 48, 0.9)) and document["costs"]["layers"] == 48
    routes = foresight.document(foresight.supposed(trace.of("text", "selected"), EXPERTS, 0.7), 0.0, 2, 10)
    documents = {one["kind"]: json.loads(json.dumps(one)) for one in (document, routes)}
    monkeypatch.setattr(foresight_table, "newest", documents.get)
    tables = foresight_table.tables()
    recall, gain, supposed = (tables[f"foresight {name}"] for name in ("recall", "gain", "routes"))
    assert recall is not None and gain is not None and supposed is not None
    assert recall.count("100 %") > 20 and "| no draft | by the next layer's router (the engine's) | " in gain
    assert "x |" in gain and "7 GB/s, 75 % in RAM" in gain
    assert "| and a guess of which 50 % is right: all layers, while the disk is idle | " in supposed


def test_the_small_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.models import expert_routes
    from powerinfer.config import EngineConfig
    from powerinfer.devices import Batch
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.models import load

    torch.manual_seed(1)
    for n in range(60):
        (tmp_path / f"{n}.txt").write_text(" ".join(str(n * i * i) for i in range(60)))
    texts, held_out = expert_routes.read_texts([tmp_path])
    assert texts and held_out and len(texts) + len(held_out) == 60
    shape = expert_routes.Shape(d_model=64, layers=2, heads=2, experts=8, top_k=2, size=32, vocab=300, context=32)
    tokenizer, model = expert_routes.make_tokenizer(texts, shape.vocab), expert_routes.Model(shape)
    seen = expert_routes.windows(tokenizer, texts, shape.context)
    expert_routes.train(model, seen, 0.0, batch=4)
    expert_routes.write(model, tokenizer, tmp_path / "model", {})
    model, _, _ = expert_routes.read(tmp_path / "model")
    with torch.no_grad():
        logits = model.logits(model.run(seen[:1])[-1].after, model.norm)[0].numpy()
    span = np.arange(shape.context, dtype=np.int32)
    batch = Batch(seen[0].numpy().astype(np.int32), span, np.zeros_like(span), span[:1][None], span)
    engine = load(open_checkpoint(tmp_path / "model"), EngineConfig(threads=1, context=64, max_batch=1, kv_type="f32"))
    assert np.abs(engine.forward(batch) - logits).max() < 1e-3 * np.abs(logits).max(), "sums in another order"
    found = expert_routes.record(model, seen[:3], seen[3:9], 2)
    assert found["text/selected"].shape == (2, 3 * 30, 2)
    # Tokens that read others' keys are computed as among these; rounding may change near-ties.
    assert (found["right/selected"] == found["text/selected"]).mean() > 0.98
    assert found["drafted/is_right"].shape == (90,)
    assert (found["text/router"][0] == -1).all() and (found["text/router"][1] >= 0).all()
    assert (found["text/embedding"][0] == found["text/before"][0]).all()
    fitted = foresight.hits(found["text/fitted"], found["text/selected"]).mean()
    assert fitted > 1.5 * shape.top_k / shape.experts, "better than chance"
