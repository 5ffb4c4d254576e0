"""Experts of a layer that are spread over GPUs: the answer of one GPU that has all of them, in steps of any length,
launched and replayed, whenever either device works.

Two stand-ins (torch's CPU device) are two GPUs, as in test_several_gpus.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import families  # noqa: E402
import test_split_experts_on_disk as experts_on_disk  # noqa: E402
from deferred import Machine  # noqa: E402
from families import case_named  # noqa: E402
from sparse_models import tiny_llama  # noqa: E402
from test_disk_experts import written  # noqa: E402, F401
from test_expert_plan import tiny_model  # noqa: E402
from test_several_gpus import (  # noqa: E402
    DEVICES,
    GIB,
    answer,
    answers,
    check_alike,
    names,
    replayed,
    two_described,  # noqa: F401
    two_devices,
)
from truth import Truth  # noqa: E402

from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import card_link, flags  # noqa: E402
from powerinfer.devices.card_link import CardLink  # noqa: E402
from powerinfer.devices.disk import OnDisk  # noqa: E402
from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.errors import PowerInferError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit, HybridExperts  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu  # noqa: E402
from powerinfer.hybrid.several import CardSplits  # noqa: E402
from powerinfer.hybrid.spread import ExpertShare, deal  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.sparsity.selection import DENSE  # noqa: E402


def shares_of(path: Path, gpus: int, cold: int) -> list[list[np.ndarray]]:
    """Of each GPU the experts of each layer; the last `cold` ones are on the CPU."""
    config = open_checkpoint(path).config
    each: list[list[np.ndarray]] = [[] for _ in range(gpus)]
    for layer in range(config.n_layers):
        n = config.experts[layer].n_experts - cold if layer in config.experts else 0
        counts = [n // gpus + (number < n % gpus) for number in range(gpus)]
        for number, experts in enumerate(deal(np.arange(n, dtype=np.int32), counts)):
            each[number].append(experts)
    return each


@contextmanager
def spread(
    path: Path,
    firsts: tuple[int, ...],
    device: str = "cpu",
    cold: int = 1,
    resting: int = 0,
    **options: Any,
) -> Iterator[Any]:
    """An executor whose layers are on as many GPUs as `firsts` has layers, and the experts of each on all of them.
    resting: slots in RAM for those that rest on disk, 0: none do."""
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    engine = EngineConfig(**(settings | {"max_batch": 8} | options))
    checkpoint = open_checkpoint(path)
    layers = checkpoint.config.n_layers
    disk = DiskPlan(OnDisk(experts=dict.fromkeys(range(layers), resting)), {}, 0) if resting else None
    placement = Placement(layers, True, pages=16, firsts=firsts, disk=disk, spread=True)
    resolved = Resolved(checkpoint, engine, DENSE, UsedGpu(names(device, len(firsts))), placement)
    of_gpus = shares_of(path, len(firsts), cold)
    splits = [ExpertSplit(own, spread=of_gpus) for own in of_gpus]
    executor = load_split(resolved, CardSplits(splits, [*firsts[1:], layers]))
    try:
        yield executor
    finally:
        executor.close()


def test_experts_are_dealt_so_that_each_gpu_gets_frequent_ones() -> None:
    first, second, third = deal(np.array([5, 3, 0, 1, 2, 4, 6], np.int32), [4, 2, 1])
    assert [each.tolist() for each in (first, second, third)] == [[1, 2, 5, 6], [3, 4], [0]]
    assert [each.tolist() for each in deal(np.array([1, 0], np.int32), [0, 2])] == [[], [0, 1]]


@pytest.mark.parametrize("cold", [0, 1])
@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next", "gpt-oss", "nemotron-h-latents", "gemma4-experts"])
def test_spread_experts_give_the_models_answers(name: str, gpu: str, cold: int, tmp_path: Path) -> None:
    model = Truth(case_named(name), folder=tmp_path)
    with spread(model.path, (0, 1), gpu, cold) as two:
        ours = answers(two, model.texts)
        model.check(ours[0])
        check_alike(answers(two, model.texts), ours)
        links = [link for card in two.cards for link in card.card_links]
        assert len(links) == 2 and all(link.expert_bytes for link in links)


def test_experts_that_are_spread_over_three_gpus(tmp_path: Path) -> None:
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=3)
    with spread(model.path, (0, 1, 2), cold=1) as three:
        model.check(answers(three, model.texts)[0])
        assert [len(card.card_links) for card in three.cards] == [2, 2, 2]


def test_spread_experts_beside_others_on_disk(written: Callable[[str], Path]) -> None:  # noqa: F811
    path, found = written("qwen3-30b-a3b"), []
    options: dict[str, Any] = {"prefill_chunk": 64, "context": 128, "max_batch": 4, "disk": "direct"}
    for resting in (0, 4):
        with spread(path, (0, 1), cold=8, resting=resting, **options) as two:
            found.append(experts_on_disk.answers(two))
            assert not resting or two.disk.counts()["bytes"]
    check_alike(*found)


# ---------------------------------------------------------------- devices that work later

AWAITED = (
    # launched or recorded, by numbers
    ("owner.write_value(owner.current(), self._flags[\"owner\"][0], number)", True),
    ("owner.wait_value(owner.current(), self._flags[\"owner\"][1], number)", True),
    ("helper.wait_value(helper.current(), self._flags[\"helper\"][0], number)", True),
    ("helper.write_value(helper.current(), self._flags[\"helper\"][1], number)", True),
    # launched, by events
    ("asked.record(owner.current())", False),
    ("self._of_helper.current().wait_event(asked)", False),
    ("self._computed.record(self._of_helper.current())", False),
    ("owner.current().wait_event(self._computed)", False),
)
"""Lines without which a GPU does not wait for the other; whether numbers say when it goes on."""


def run_later(path: Path, texts: Any, seed: int, by_numbers: bool, without: str | None = None) -> list[np.ndarray]:
    with two_devices(seed, without) as machine, pytest.MonkeyPatch.context() as patch:
        tried = CardLink._tried

        def trial(link: CardLink, record: bool) -> str:
            if record and not by_numbers:
                return "a test"
            return "" if without is not None else tried(link, record)

        patch.setattr(CardLink, "_tried", trial)
        with spread(path, (0, 1), "deferred") as two:
            machine.finish()
            assert all(link.records == by_numbers for card in two.cards for link in card.card_links)
            before = machine.replays
            found = replayed(two, texts) if by_numbers else launched(two, texts)
            assert without or (machine.replays > before) == by_numbers
            return found


def launched(executor: Any, texts: Any) -> list[np.ndarray]:
    pages = families.scattered_pages(executor, 1)[0]
    return [families.run_chunks(executor, texts[0][:37], [33, 1, 1, 2], pages)]


@pytest.mark.parametrize("by_numbers", [True, False])
def test_each_gpu_waits_for_the_other(by_numbers: bool, tmp_path: Path) -> None:
    """Whenever either works, the bits are the same."""
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=2)
    with spread(model.path, (0, 1)) as two:
        wanted = replayed(two, model.texts) if by_numbers else launched(two, model.texts)
    for seed in range(3):
        check_alike(run_later(model.path, model.texts, seed, by_numbers), wanted)


@pytest.mark.parametrize(("line", "by_numbers"), AWAITED)
def test_a_wait_that_is_left_out_is_seen(line: str, by_numbers: bool, tmp_path: Path) -> None:
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=2)
    with spread(model.path, (0, 1)) as two:
        wanted = replayed(two, model.texts) if by_numbers else launched(two, model.texts)
    for seed in range(10):
        try:
            ours = run_later(model.path, model.texts, seed, by_numbers, line)
        except (IndexError, RuntimeError, PowerInferError):  # of numbers that are no indices
            return
        except AssertionError as error:
            assert "waits for what never happens" in str(error)
            return
        if any(not np.array_equal(*pair) for pair in zip(ours, wanted, strict=True)):
            return
    raise AssertionError("nothing shows that one GPU waits for the other")


def test_a_gpu_that_answers_nothing_ends_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line, and the next step has the right answer."""
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(card_link, "LOOK", 0.01)
    with two_devices(1) as machine, spread(model.path, (0, 1), "deferred") as two:
        wanted, (link, *_) = launched(two, model.texts), two.cards[0].card_links
        answer = link._answer
        with monkeypatch.context() as broken, pytest.raises(PowerInferError, match="has waited for deferred:1 for 0 s"):
            broken.setattr(flags, "PATIENCE", 0.1)
            broken.setattr(link, "_answer", lambda number, compute: None)
            broken.setattr(machine, "wait", patiently(machine.wait))
            launched(two, model.texts)
        assert link._answer == answer
        check_alike(launched(two, model.texts), wanted)


def test_a_host_that_is_slow_ends_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compile what the helper is given, and the owner waits meanwhile."""
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(card_link, "LOOK", 0.01)
    with two_devices(1) as machine, spread(model.path, (0, 1), "deferred") as two:
        wanted, compute, slow = launched(two, model.texts), ExpertShare._compute, [True]

        def late(share: ExpertShare, tokens: int) -> None:
            until = time.monotonic() + 0.3 * slow.pop() if slow else 0.0
            while time.monotonic() < until:
                with machine.lock:
                    machine.tick()
                time.sleep(0.01)
            compute(share, tokens)

        monkeypatch.setattr(flags, "PATIENCE", 0.1)
        monkeypatch.setattr(ExpertShare, "_compute", late)
        check_alike(launched(two, model.texts), wanted)
        assert not slow


@pytest.mark.parametrize("seed", range(3))
def test_a_recording_that_is_not_launched_ends_its_step(seed: int, tmp_path: Path) -> None:
    """Whose helper has its part already, and waits, while the owner may still have something before it to do."""
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=4)
    with two_devices(seed), spread(model.path, (0, 3), "deferred", cold=1) as two:
        for card in two.cards:
            card.record(recorder_of(card.device), "waits")
        pages = families.scattered_pages(two, 1)[0]
        families.run_chunks(two, model.texts[0][:4], [1] * 4, pages)
        recordings, fails = two.cards[0]._recordings, [False, False, True]

        def replay(run: Any, link: CardLink, _: Any, answer: Any, before: Any) -> Any:
            if fails and fails.pop(0):
                with link._use_helper():
                    answer()
                raise RuntimeError("CUDA error: out of memory")
            return run(before)

        for runs in recordings._runs.values():
            asking = {part: run for part, run in runs.items() if isinstance(run, partial)}
            assert len(asking) > 1
            runs.update({part: partial(replay, run, run.func.__self__, *run.args) for part, run in asking.items()})
        with pytest.raises(PowerInferError, match="ran out of memory"):
            families.run_chunks(two, model.texts[0][4:5], [1], pages)
        assert not fails
        families.run_chunks(two, model.texts[0][4:6], [1, 1], pages)


def patiently(wait: Any) -> Any:
    """The host waits for a GPU that a thread lets go on."""

    def wait_long(done: Any) -> None:
        for _ in range(100):
            try:
                wait(done)
            except AssertionError:
                time.sleep(0.01)
            else:
                return
        wait(done)

    return wait_long


def test_both_gpus_compute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes the longer of both shares; by the clocks of the devices, in a step that is replayed."""
    model = Truth(case_named("qwen3-moe"), folder=tmp_path, num_hidden_layers=2)
    for seed, shares in enumerate([(5.0, 3.0), (2.0, 7.0)]):
        with two_devices(seed) as machine, monkeypatch.context() as patch:

            def timed(plain: Any, seconds: float, machine: Machine = machine) -> Any:
                def run(*args: Any) -> Any:
                    found = plain(*args)
                    machine.spend(seconds)
                    return found

                return run

            patch.setattr(HybridExperts, "_add_hot", timed(HybridExperts._add_hot, shares[0]))
            patch.setattr(ExpertShare, "_compute", timed(ExpertShare._compute, shares[1]))
            with spread(model.path, (0, 1), "deferred", cold=0) as two:
                for card in two.cards:
                    card.record(recorder_of(card.device))
                pages, times = families.scattered_pages(two, 1)[0], []
                for at in range(4):
                    begin = machine.host
                    families.run_chunks(two, model.texts[0][at : at + 1], [1], pages)
                    times.append(machine.host - begin)
            assert times[-1] == pytest.approx(2 * max(shares), rel=1e-12)


# ---------------------------------------------------------------- placed by plans


@pytest.mark.usefixtures("two_described")
def test_a_load_that_spreads_experts_follows_its_plan(tmp_path: Path) -> None:
    """Bytes on each GPU are the plan's, its budget holds, and the CPU has what no GPU does."""
    path = tiny_model(tmp_path)
    engine = EngineConfig(threads=1, context=128, prefill_chunk=48, max_batch=3, gpu="cpu,cpu", trial=False)
    engine = replace(engine, split_mode="expert")
    everything = resolve(open_checkpoint(path), replace(engine, vram=(2 * GIB, 2 * GIB)))
    assert everything.placement.several is not None and everything.placement.spread
    held = [sum(part.plan.bytes["gpu"].values()) for part in everything.placement.several.parts]
    for less in (0, 4096):
        vram = tuple(nbytes - less for nbytes in held)
        resolved = resolve(open_checkpoint(path), replace(engine, vram=vram))
        plan = resolved.placement.several
        assert plan is not None and plan.claims.slots is not None
        assert all(sum(counts) == n for n, *counts in zip(plan.claims.slots, *plan.shares, strict=True))
        assert all(map(sum, plan.shares))
        for part, most in zip(plan.parts, vram, strict=True):
            assert sum(part.plan.bytes["gpu"].values()) <= most
        executor, sparsity = load_resolved(resolved, lambda: [1, 2, 3])
        try:
            ffns = sparsity.ffns  # type: ignore[attr-defined]
            for number, (card, part) in enumerate(zip(executor.cards, plan.parts, strict=True)):
                ours, planned = card.memory(), part.plan.bytes["gpu"]
                inside = [ffn.memory()["ffn"] for ffn in ffns if part.first <= ffn.layer < part.last]
                of_others = sum(layer is not None for layer in plan.shares[number]) - len(inside)
                places = 4 * 4 * (len(inside) + of_others) + 4 * len(inside)  # where each expert is, and a counter
                assert ours["ffn"] + sum(inside) == planned.get("ffn", 0) + planned["experts"] + places
                for use in ("attention", "kv", "norms", "head"):
                    assert ours[use] == planned.get(use, 0), (number, use)
            layered = resolve(open_checkpoint(path), replace(engine, vram=vram, split_mode="layer"))
            assert layered.placement.several is not None and not layered.placement.spread
            buffers = sum(link.nbytes for card in executor.cards for link in card.card_links)
            scratch = [each.bytes["cpu"]["scratch"] for each in (plan, layered.placement.several)]
            assert scratch[0] - scratch[1] == buffers
            for ffn, n in zip(ffns, plan.claims.slots, strict=True):
                assert len(ffn.cold) == ffn.config.n_experts - n
        finally:
            executor.close()
        alone, _ = answer(path, gpu="none")
        ours, choices = answer(path, gpu="cpu,cpu", split_mode="expert", vram=vram)
        assert ours == alone
        said = r"; each layer's experts are spread over both, \d+ us an exchange; launched kernel by kernel \("
        assert re.search(said, choices["gpu"])


@pytest.mark.usefixtures("two_described")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "cpu"}, "is for several GPUs"),
        ({"gpu": "none"}, "is for models of experts on several GPUs"),
        ({"gpu": "cpu,cpu", "expert_policy": "lru"}, "lru does not work with --split-mode expert"),
        ({"gpu": "cpu,cpu", "adjust": True}, "--adjust does not work with --split-mode expert"),
    ],
)
def test_a_load_refuses_what_does_not_spread(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        answer(tiny_model(tmp_path), split_mode="expert", **options)


def test_a_server_refuses_it_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powerinfer.serve.server.make_server", Mock(side_effect=RequestError("it listens")))
    dense = tiny_llama(tmp_path / "dense.gguf", "silu")
    refused = (
        ("on several GPUs, and none is used (asked for)", "--gpu none"),
        ("on several GPUs, and none is used (asked for)", f"--gpu none -m b={dense}"),
        ("is for several GPUs", "--gpu cpu"),
        ("does not work with", "--gpu cpu,cpu --expert-policy lru"),
        ("--adjust does not work with", "--gpu cpu,cpu --adjust"),
        ("it listens", "--gpu cpu,cpu"),
    )
    path = tiny_model(tmp_path)
    for message, line in refused:
        assert main(["serve", "-m", f"a={path}", "--split-mode", "expert", *line.split()]) == 2, line
        assert message in capsys.readouterr().err
    assert main(["serve", "-m", str(dense), "--split-mode", "expert", "--gpu", "cpu,cpu"]) == 2
    assert "is for models of experts" in capsys.readouterr().err
