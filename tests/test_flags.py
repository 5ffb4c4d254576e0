"""Flags in memory by which a GPU calls the CPU: a thread in its place, the device of deferred.py, and CUDA."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import families  # noqa: E402
import test_hybrid_experts as experts  # noqa: E402
from deferred import Machine, deferred  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from sparse_models import give_bundles, tiny_llama  # noqa: E402
from test_bundled_ffn import NEURONS, K, part_of, some, tokens  # noqa: E402
from test_gpu_layers import counting_recorder, static_where_emulated  # noqa: E402
from test_host_calls import failing_part, split_calls  # noqa: E402
from test_hybrid import predictor_of, split  # noqa: E402
from test_neuron_kernels import make_layer  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer import _native  # noqa: E402
from powerinfer.devices import flags as flags_module  # noqa: E402
from powerinfer.devices.batch import Batch, LogitsNeed  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor  # noqa: E402
from powerinfer.devices.flags import FlaggedRun, Flags  # noqa: E402
from powerinfer.devices.link import WAYS  # noqa: E402
from powerinfer.devices.next_step import NextStep  # noqa: E402
from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.devices.streams import streams_of  # noqa: E402
from powerinfer.devices.torch_device import current  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid import step_trial  # noqa: E402
from powerinfer.kernels import gpu_host  # noqa: E402

LONG = 20.0
"""Seconds for what should take none, on a machine that does other things."""

ASKED, ANSWERED = 0, 32
RELEASED = 0x7FFFFFFF


def flags_of(patience: float = LONG) -> tuple[_native.HostFlags, np.ndarray]:
    """Flags, and the memory that they are in."""
    memory = np.full(64, 7, np.uint32)
    flags = _native.HostFlags(memory[ASKED : ASKED + 1], memory[ANSWERED : ANSWERED + 1], patience)
    assert memory[ASKED] == memory[ANSWERED] == 0
    return flags, memory


def until(good: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG
    while not good():
        assert time.monotonic() < give_up
        time.sleep(0)


# ---- The CPU's part, and a thread in place of a GPU ------------------------------------------------------------------

NUMBERS = (2, 3, 8)
"""Of the calls of a step."""

STEPS = 30


def calls_of(flags: _native.HostFlags, part: _native.NeuronSum) -> tuple[Any, np.ndarray, np.ndarray, Any]:
    """Calls that all have the same input and result: those, both arrays, and what calls share."""
    x, out, shared = tokens(2), np.full((2, K), np.nan, np.float32), _native.HostCalls()
    calls = _native.FlaggedCalls(flags)
    for number in NUMBERS:
        calls.add(number, _native.NeuronCall(shared, part, x, out))
    assert len(calls) == len(NUMBERS)
    return calls, x, out, shared


def test_each_call_is_made_once_it_is_asked_for() -> None:
    """A thread asks, as a GPU does, goes on, and waits for the answer, whose result is there then."""
    flags, memory = flags_of()
    part = part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5))
    calls, x, out, shared = calls_of(flags, part)
    rng, begun, ended = np.random.default_rng(1), threading.Semaphore(0), threading.Semaphore(0)
    inputs: list[np.ndarray] = []
    results: list[np.ndarray] = []

    def play() -> None:
        for _ in range(STEPS):
            begun.acquire()
            for number in NUMBERS:
                x[:] = rng.standard_normal(x.shape)
                inputs.append(x.copy())
                memory[ASKED] = number
                until(lambda least=number: memory[ANSWERED] >= least)
                results.append(out.copy())
                out[:] = np.nan
            ended.release()

    gpu = threading.Thread(target=play)
    gpu.start()
    for _ in range(STEPS):
        flags.begin()
        begun.release()
        calls.begin()
        while not calls.answer(0.01):
            assert gpu.is_alive()
        assert memory[ANSWERED] == NUMBERS[-1] and not flags.released
        ended.acquire()
    gpu.join()
    wanted = np.empty_like(out)
    for given, found in zip(inputs, results, strict=True):
        part.sum(given, wanted)
        np.testing.assert_array_equal(found, wanted)
    assert len(results) == shared.made == STEPS * len(NUMBERS) and shared.take_failure() == ""


def test_no_call_is_made_before() -> None:
    flags, memory = flags_of()
    calls, _, out, shared = calls_of(flags, part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)))
    for asked, made in ((0, 0), (1, 0), (2, 1), (2, 1), (7, 2), (8, 3)):
        memory[ASKED] = asked
        assert calls.answer(0.0) == (made == 3)
        assert shared.made == made and memory[ANSWERED] == (0, *NUMBERS)[made]
        assert np.isnan(out).all() == (made == 0)
    assert calls.answer(0.0) and shared.made == 3
    flags.begin()
    calls.begin()
    assert not calls.answer(0.0) and memory[ASKED] == memory[ANSWERED] == 0, "a step begins anew"
    begin = time.monotonic()
    assert not calls.answer(0.05) and time.monotonic() - begin >= 0.05


def test_a_call_that_the_gpu_has_answered_is_not_made() -> None:
    flags, memory = flags_of()
    calls, _, out, shared = calls_of(flags, part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)))
    memory[ANSWERED] = memory[ASKED] = NUMBERS[0]
    assert not calls.answer(0.0) and shared.made == 0 and np.isnan(out).all()
    memory[ASKED] = NUMBERS[1]
    assert not flags.answered(NUMBERS[1]) and not calls.answer(0.0)
    assert flags.answered(NUMBERS[1]) and shared.made == 1 and not np.isnan(out).any()
    memory[ANSWERED] = memory[ASKED] = NUMBERS[2]
    assert calls.answer(0.0) and shared.made == 1


def test_a_release_outlives_answers_of_the_gpu() -> None:
    """One that goes on may answer calls behind those that it does not wait for any more."""
    flags, memory = flags_of()
    flags.release()
    for number in NUMBERS:
        memory[ANSWERED] = number
        assert flags.released
        until(lambda: bool(memory[ANSWERED] == RELEASED))
    flags.begin()
    memory[ANSWERED] = 1
    time.sleep(0.05)
    assert not flags.released and memory[ANSWERED] == 1


def test_a_call_that_fails_is_answered() -> None:
    """With zeros: the GPU goes on, and the step is told of it."""
    flags, memory = flags_of()
    calls, shared, out = _native.FlaggedCalls(flags), _native.HostCalls(), np.full((2, K), np.nan, np.float32)
    calls.add(1, _native.NeuronCall(shared, failing_part(), tokens(2), out))
    memory[ASKED] = 1
    assert calls.answer(0.0) and memory[ANSWERED] == 1 and not out.any() and "topk" in shared.take_failure()


# ---- A thread that answers while the host does something else --------------------------------------------------------


def playing(memory: np.ndarray, out: np.ndarray, results: list[np.ndarray]) -> threading.Thread:
    """A thread, begun, that asks for the calls of a step as a GPU does, and has their results."""

    def play() -> None:
        for number in NUMBERS:
            memory[ASKED] = number
            until(lambda least=number: memory[ANSWERED] >= least)
            results.append(out.copy())
            out[:] = np.nan

    gpu = threading.Thread(target=play)
    gpu.start()
    return gpu


def test_a_thread_answers_while_the_host_does_something_else() -> None:
    """It asks for no call of Python's, and sleeps when nothing is left; the next step is its own again."""
    flags, memory = flags_of()
    part = part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5))
    (calls, x, out, shared), thread = calls_of(flags, part), _native.AnsweringThread()
    x[:], wanted = tokens(2), np.empty_like(out)
    part.sum(x, wanted)
    results: list[np.ndarray] = []
    for step in range(STEPS):
        flags.begin()
        calls.begin()
        thread.start(calls, LONG)
        playing(memory, out, results).join(LONG)
        assert len(results) == (step + 1) * len(NUMBERS) and memory[ANSWERED] == NUMBERS[-1]
        until(lambda: not thread.answers)
        thread.take_back()
        assert calls.answer(0.0), "nothing is left"
    for one in results:
        np.testing.assert_array_equal(one, wanted)
    assert shared.made == len(results) and not flags.released


def test_calls_are_taken_back() -> None:
    """At any moment: each is made once, and who has taken them back makes the others."""
    flags, memory = flags_of()
    part = part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5))
    (calls, x, out, shared), thread = calls_of(flags, part), _native.AnsweringThread()
    x[:], wanted = tokens(2), np.empty_like(out)
    part.sum(x, wanted)
    rng, results = np.random.default_rng(1), list[np.ndarray]()
    for step in range(STEPS):
        flags.begin()
        calls.begin()
        thread.start(calls, LONG)
        gpu = playing(memory, out, results)
        time.sleep(rng.choice([0.0, 1e-4, 3e-4]))
        thread.take_back()
        assert not thread.answers
        until(lambda: calls.answer(0.0))
        gpu.join(LONG)
        assert shared.made == len(results) == (step + 1) * len(NUMBERS)
    for one in results:
        np.testing.assert_array_equal(one, wanted)


def test_a_thread_that_is_not_asked() -> None:
    """It goes on for so long, or until calls are taken back, or the GPU is released; and ends with its object."""
    flags, memory = flags_of()
    calls, _, out, shared = calls_of(flags, part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)))
    before, threads = len(os.listdir("/proc/self/task")), [_native.AnsweringThread()]
    begin = time.monotonic()
    threads[0].start(calls, 0.05)
    until(lambda: not threads[0].answers)
    assert time.monotonic() - begin >= 0.05 and memory[ANSWERED] == 0
    for seconds in (0.0, 0.01):
        threads[0].start(calls, LONG)
        time.sleep(seconds)
        threads[0].take_back()
        assert not threads[0].answers and shared.made == 0
    threads[0].start(calls, LONG)
    flags.release()
    memory[ASKED] = NUMBERS[0]
    until(lambda: not threads[0].answers)
    flags.begin()
    threads[0].start(calls, LONG)
    memory[ASKED] = NUMBERS[0]
    until(lambda: bool(memory[ANSWERED] == NUMBERS[0]))
    begin = time.monotonic()
    threads.clear()
    assert time.monotonic() - begin < LONG / 2 and shared.made == 1 and not np.isnan(out).any()
    until(lambda: len(os.listdir("/proc/self/task")) <= before)


def test_a_call_of_the_thread_that_fails() -> None:
    flags, memory = flags_of()
    calls, shared, out = _native.FlaggedCalls(flags), _native.HostCalls(), np.full((2, K), np.nan, np.float32)
    calls.add(1, _native.NeuronCall(shared, failing_part(), tokens(2), out))
    thread = _native.AnsweringThread()
    thread.start(calls, LONG)
    memory[ASKED] = 1
    until(lambda: bool(memory[ANSWERED] == 1))
    thread.take_back()
    assert not out.any() and "topk" in shared.take_failure()


def test_numbers_grow() -> None:
    flags, _ = flags_of()
    calls, call = _native.FlaggedCalls(flags), _native.HostCall(_native.HostCalls())
    calls.add(3, call)
    for wrong in (3, 1, 0, RELEASED):
        with pytest.raises((RuntimeError, ValueError), match="numbers that grow"):
            calls.add(wrong, call)
    with pytest.raises((RuntimeError, ValueError), match="one number"):
        _native.HostFlags(np.zeros(2, np.uint32), np.zeros(1, np.uint32), 1.0)


def test_the_watchdog_releases_a_gpu_that_is_not_answered() -> None:
    """Not before its time, and for the rest of the step; the next one begins anew."""
    flags, memory = flags_of(0.1)
    calls, *_, shared = calls_of(flags, part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)))
    time.sleep(0.2)
    assert not flags.released, "nobody waits"
    begin = time.monotonic()
    memory[ASKED] = NUMBERS[0]
    until(lambda: bool(memory[ANSWERED] == RELEASED))
    assert time.monotonic() - begin >= 0.08 and flags.released
    flags.answer(NUMBERS[0])
    assert memory[ANSWERED] == RELEASED and calls.answer(LONG) and shared.made == 0, "nobody waits any more"
    flags.begin()
    calls.begin()
    memory[ASKED] = NUMBERS[-1]
    assert not flags.released and calls.answer(0.0) and shared.made == len(NUMBERS)


def test_the_watchdog_leaves_a_cpu_alone_that_answers() -> None:
    flags, memory = flags_of(0.5)
    for number in range(1, 21):
        memory[ASKED] = number
        time.sleep(0.05)
        assert memory[ANSWERED] == number - 1
        flags.answer(number)
    assert not flags.released


def test_who_has_broken_off_a_step_releases_its_gpu() -> None:
    flags, memory = flags_of()
    flags.release()
    flags.answer(1)
    assert flags.released and memory[ANSWERED] == RELEASED
    flags.begin()
    assert not flags.released


# ---- Models on a device that works later -----------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return give_bundles(tiny_llama(tmp_path / "tiny.gguf"))


def recorded(executor: Any, way: Any = WAYS[0]) -> np.ndarray:
    """Logits of steps that are launched, recorded, and replayed."""
    executor.gpu.record(recorder_of(executor.gpu.device), way)
    return split_calls(executor, 5)


@contextmanager
def working_by_itself(machine: Machine) -> Iterator[None]:
    """A thread runs what the streams have, as a GPU does, without the host."""
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            with machine.lock:
                machine.tick()
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_every_way_gives_the_same_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By flags of a GPU that works when the host looks, and of one that works by itself."""
    found = []
    for way in (*WAYS, "by itself"):
        with deferred(3) as machine, split(model, 0.5) as (executor, ffns):
            assert executor.gpu.ways == WAYS
            if way != "by itself":
                found.append(recorded(executor, way))
                assert executor.gpu.way == way and (executor.gpu.link.calls.made > 2) == (way != "waits")
                continue
            with working_by_itself(machine), monkeypatch.context() as patch:
                patch.setattr(flags_module, "LOOK", LONG)
                found.append(recorded(executor))
        assert machine.replays > 3 and ffns
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize("name", ["mixtral", "smallthinker"])
def test_where_no_cold_expert_is_selected_the_cpu_is_not_asked(name: str, tmp_path: Path) -> None:
    """It counts the same, whoever answers; smallthinker's selections are known before attention."""
    path, found = Truth(case_named(name)).save("gguf", tmp_path), {}
    for way in WAYS:
        with deferred(2), experts.split(path, 0.75) as (executor, ffns):
            before = executor.gpu.link.calls.made
            logits = recorded(executor, way)
            made = executor.gpu.link.calls.made - before
            sums = [(ffn.tally.tolist(), *(ffn.collect()[one] for one in ("tokens", "steps", "jobs"))) for ffn in ffns]
            found[way] = logits, sums, made
    for logits, sums, _ in found.values():
        np.testing.assert_array_equal(logits, found["waits"][0])
        assert sums == found["waits"][1]
    asked, every = found["flags"][2], found["calls"][2]
    assert 0 < asked < every


@pytest.mark.parametrize(("threshold", "asks"), [(1e9, False), (-1e9, True)])
def test_where_no_cold_neuron_is_selected_the_cpu_is_not_asked(threshold: float, asks: bool, model: Path) -> None:
    predictors, found = predictor_of(open_checkpoint(model).config, threshold), {}
    for way in WAYS:
        with deferred(2), split(model, 0.5, predictors=predictors) as (executor, ffns):
            found[way] = recorded(executor, way), executor.gpu.link.calls.made, [ffn.collect() for ffn in ffns]
    for logits, _, sums in found.values():
        np.testing.assert_array_equal(logits, found["waits"][0])
        assert sums == found["waits"][2]
    assert (found["flags"][1] == found["calls"][1]) == asks


def test_a_step_that_is_broken_off_before_it_is_answered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and the next step is right."""
    plain, failures = Flags.answer, [KeyboardInterrupt(), PowerInferError("broken")]

    def failing(own: Flags, calls: Any) -> None:
        if failures:
            raise failures.pop()
        plain(own, calls)

    for seed in range(3):
        with deferred(seed), split(model, 0.5) as (executor, _):
            right = recorded(executor)
            with monkeypatch.context() as patch:
                patch.setattr(Flags, "answer", failing)
                for error in (PowerInferError, KeyboardInterrupt) if failures else ():
                    with pytest.raises(error):
                        split_calls(executor, 5)
            np.testing.assert_array_equal(split_calls(executor, 5), right)


def test_a_cpu_that_does_not_answer_fails_its_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(own: Flags, _: Any) -> None:
        while not own._host.wait(2, 0.0):  # the number of the first layer's call
            streams_of(torch_device()).current().query()
        until(lambda: own.released)

    with deferred(1), split(model, 0.5) as (executor, _):
        right = recorded(executor)
        executor.gpu.link.flags._host.set_patience(0.05)
        with monkeypatch.context() as patch:
            patch.setattr(Flags, "answer", hanging)
            with pytest.raises(PowerInferError, match=r"^the CPU's part of a step failed: it did not answer for 30 s"):
                split_calls(executor, 5)
        executor.gpu.link.flags._host.set_patience(LONG)
        np.testing.assert_array_equal(split_calls(executor, 5), right)


def test_a_gpu_that_ends_without_asking_fails_its_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with deferred(1), split(model, 0.5) as (executor, _):
        monkeypatch.setattr(Machine, "write_value", lambda *_: None)
        monkeypatch.setattr(Machine, "wait_value", lambda *_: None)
        with pytest.raises(PowerInferError, match=r"^the GPU did not ask for the CPU's part of a step"):
            recorded(executor)


# ---- Steps that are launched ahead -----------------------------------------------------------------------------------


def tokens_of_steps(executor: Any, steps: int, meanwhile: Callable[[int], None] = lambda _: None) -> list[int]:
    """The tokens of a text's steps; each but the last has a successor. meanwhile: gets the number of a step whose
    tokens are there, and whose successor is under way."""
    pages, found = families.scattered_pages(executor, 1), list[int]()
    families.run_chunks(executor, np.arange(20, dtype=np.int32), [20], pages[0])
    row, batch, token = np.zeros(1, np.int32), None, 3
    for step in range(steps):
        position = np.full(1, 20 + step, np.int32)
        if batch is None:
            batch = Batch(np.array([token], np.int32), position, row, pages, row, needs=LogitsNeed.LARGEST)
        following = replace(batch, tokens=np.full(1, -1, np.int32), positions=position + np.int32(1))
        batch.successor = (lambda one=following: one) if step + 1 < steps else None
        token = int(executor.forward(batch)[0])
        found.append(token)
        batch = following if executor.gpu.launched_ahead else None
        assert batch is None or following.tokens[0] == token
        if batch is not None:
            meanwhile(step)
    return found


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The tokens of eight steps none of which is launched ahead."""
    path = give_bundles(tiny_llama(tmp_path_factory.mktemp("right") / "tiny.gguf"))
    with pytest.MonkeyPatch.context() as patch, deferred(1), split(path, 0.5) as (executor, _):
        patch.setattr(NextStep, "start", lambda *_: False)
        executor.gpu.record(recorder_of(executor.gpu.device))
        return tokens_of_steps(executor, 8)


def test_a_step_ahead_is_computed_while_the_host_does_something_else(
    model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its calls are answered though nobody comes for its result."""
    with deferred(3) as machine, split(model, 0.5) as (executor, ffns), working_by_itself(machine):
        executor.gpu.record(recorder_of(executor.gpu.device))
        calls, before = executor.gpu.link.calls, list[int]()

        def wait(_: int) -> None:
            until(lambda: not executor.gpu.link.flags.answers_beside)
            before.append(calls.made)

        monkeypatch.setattr(flags_module, "LOOK", LONG)
        monkeypatch.setattr(flags_module, "ASLEEP_AFTER", LONG)
        assert tokens_of_steps(executor, 8, wait) == right
        assert len(before) > 4 and np.all(np.diff([*before, calls.made]) == [len(ffns)] * (len(before) - 1) + [0])


def test_the_host_computes_nothing_beside_a_step_ahead(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step than the one that was launched takes back its calls first."""
    plain, under_way, row = CpuExecutor._run, list[bool](), np.zeros(1, np.int32)
    with deferred(3) as machine, split(model, 0.5) as (executor, _), working_by_itself(machine):
        executor.gpu.record(recorder_of(executor.gpu.device))
        monkeypatch.setattr(flags_module, "LOOK", LONG)
        other = Batch(row + 5, row, row, families.scattered_pages(executor, 2)[1:], row)

        def run(*given: Any) -> None:
            assert not executor.gpu.link.flags.answers_beside
            plain(*given)

        def come(_: int) -> None:
            under_way.append(executor.gpu.link.flags.answers_beside)
            executor.forward(other)

        monkeypatch.setattr(CpuExecutor, "_run", run)
        tokens_of_steps(executor, 8, come)
    assert any(under_way)


@pytest.mark.parametrize("kind", ["neurons", "experts"])
def test_counters_that_are_cleared_take_calls_back(kind: str, model: Path, tmp_path: Path) -> None:
    """Nothing of a step that was launched ahead counts afterwards."""
    path = model if kind == "neurons" else Truth(case_named("mixtral")).save("gguf", tmp_path)
    made = split(path, 0.5) if kind == "neurons" else experts.split(path, 0.25)
    under_way = []
    with deferred(3) as machine, made as (executor, ffns), working_by_itself(machine):
        executor.gpu.record(recorder_of(executor.gpu.device))

        def clear(_: int) -> None:
            under_way.append(executor.gpu.launched_ahead)
            for ffn in ffns:
                ffn.clear()
            assert not executor.gpu.launched_ahead and not any(ffn.collect()["tokens"] for ffn in ffns)

        tokens_of_steps(executor, 8, clear)
    assert any(under_way)


def test_a_model_is_closed_while_a_step_ahead_is_under_way(model: Path) -> None:
    """Its GPU does not go on, so that the thread waits to be asked; it ends, and so do both watchdogs."""
    with deferred(1), split(model, 0.5) as (executor, _):
        executor.gpu.record(recorder_of(executor.gpu.device))
        flags = [executor.gpu.link.flags]

        def break_off(_: int) -> None:
            if flags[0].answers_beside:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tokens_of_steps(executor, 8, break_off)
        assert flags.pop().answers_beside
        most = len(os.listdir("/proc/self/task"))
        executor.close()
        until(lambda: len(os.listdir("/proc/self/task")) <= most - 3)


def test_a_call_of_a_step_ahead_that_fails(model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails its step by one line, once the host comes for the result; the next one is right."""
    with deferred(2) as machine, split(model, 0.5) as (executor, _), working_by_itself(machine):
        executor.gpu.record(recorder_of(executor.gpu.device))
        monkeypatch.setattr(flags_module, "LOOK", LONG)
        plain = FlaggedRun.answer_beside
        failing = _native.FlaggedCalls(executor.gpu.link.flags._host)
        failing.add(1, _native.NeuronCall(executor.gpu.link.calls, failing_part(), tokens(2), tokens(2)))

        def answer_beside(run: FlaggedRun) -> None:
            executor.gpu.link.flags.answer_beside(failing)
            until(lambda: not executor.gpu.link.flags.answers_beside)
            plain(run)

        with monkeypatch.context() as patch:
            patch.setattr(FlaggedRun, "answer_beside", answer_beside)
            with pytest.raises(PowerInferError, match=r"^the CPU's part of a step failed: .*topk"):
                tokens_of_steps(executor, 8)
        assert tokens_of_steps(executor, 8) == right


@pytest.mark.parametrize("late", ["rows", "calls"])
def test_a_step_ahead_that_is_answered_too_late_is_computed_again(
    late: str, model: Path, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU has gone on with anything."""
    with deferred(2) as machine, split(model, 0.5) as (executor, _), working_by_itself(machine):
        executor.gpu.record(recorder_of(executor.gpu.device))
        monkeypatch.setattr(flags_module, "LOOK", LONG)
        numbers = executor.gpu.next_step._host if late == "rows" else executor.gpu.link.flags._host
        owner, name = (NextStep, "_begin_calls") if late == "rows" else (Flags, "take_back")
        plain, times = getattr(owner, name), list[bool]()

        def waiting(*given: Any) -> None:
            times.append(executor.gpu.launched_ahead)
            if sum(times) == 3 and times[-1]:
                numbers.set_patience(0.05)
                until(lambda: bool(numbers.released))
                numbers.set_patience(LONG)
            plain(*given)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, waiting)
            patch.setattr(FlaggedRun, "answer_beside", lambda _: None)
            assert tokens_of_steps(executor, 8) == right
        assert sum(times) >= 3


def refuses(*_: Any) -> None:
    raise RuntimeError("CUDA error 801: not supported\nand more")


def blocking(plain: Any) -> Callable[[Machine], Any]:
    """Replays return when all is done."""

    def recorder(machine: Machine) -> Any:
        record = plain(machine)

        def recording(run: Any) -> Any:
            replay = record(run)

            def blocked() -> None:
                replay()
                while machine.current().queue:
                    machine.tick()
                    time.sleep(0)

            return blocked

        return recording

    return recorder


def early(_: Machine, __: Any, address: int, value: int) -> None:
    """Written when it is given, not in the stream's order."""
    ctypes.c_uint32.from_address(address).value = value


NEVER = "the host waits for what never happens"
FAULTS: dict[str, tuple[str, Any]] = {
    "CUDA error 801: not supported": ("write_value", refuses),
    "the GPU does not wait for a number": ("wait_value", lambda *_: None),
    "the GPU writes a number before its turn": ("write_value", early),
    NEVER: ("write_value", lambda *_: None),
    "the host waits for the GPU when it replays a recording": ("recorder", blocking(Machine.recorder)),
}
"""What a device does wrong, by what is said of it."""


@pytest.mark.parametrize("reason", FAULTS)
def test_a_device_without_flags_calls_functions(
    reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and the bits are the same."""
    name, fault = FAULTS[reason]
    with deferred(1), split(model, 0.5) as (executor, _):
        right = recorded(executor)
        assert str(executor.gpu.caller) == "the GPU calls the CPU by flags"
    with deferred(2), monkeypatch.context() as patch:  # late enough to show a number before its turn
        patch.setattr(flags_module, "TRIAL_PATIENCE", 0.1 if reason == NEVER or name == "recorder" else 5.0)
        patch.setattr(Machine, name, fault)
        with split(model, 0.5) as (executor, _):
            assert executor.gpu.ways == WAYS[1:] and executor.gpu.link.flags is None
            found = recorded(executor)
            assert str(executor.gpu.caller) == f"the GPU calls the CPU (no flags: {reason})"
    np.testing.assert_array_equal(found, right)


def copied(machine: Machine, memory: torch.Tensor) -> torch.Tensor:
    """As torch may make a tensor of other memory."""
    return torch.zeros(memory.shape, dtype=memory.dtype, device="deferred")


@pytest.mark.parametrize("fault", ["refused", "copied"])
def test_a_device_that_cannot_map_memory_copies(fault: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {
        "refused": "CUDA error 801: not supported",
        "copied": "its kernels do not see what the host has written, or the host what they have",
    }
    with deferred(1), split(model, 0.5) as (executor, _):
        right = recorded(executor)
        assert executor.gpu.link.sent(1) is not None
    with deferred(1), monkeypatch.context() as patch:
        patch.setattr(Machine, "mapped", refuses if fault == "refused" else copied)
        with split(model, 0.5) as (executor, _):
            assert executor.gpu.ways == WAYS and executor.gpu.link.sent(1) is None
            found = recorded(executor)
            assert str(executor.gpu.caller) == f"the GPU calls the CPU by flags (by copies: {reasons[fault]})"
    np.testing.assert_array_equal(found, right)


def test_kernels_that_have_old_sums_after_a_wait_are_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a cache: those that were there when the recording was replayed."""
    plain, stale = gpu_host.add, {}

    def add(sums: Any, total: Any, answer: Any = None) -> None:
        if streams_of(torch_device()).recording is None:
            plain(sums, total, answer)
            return
        if sums.inner.data_ptr() not in stale:  # as long as a recording
            stale[sums.inner.data_ptr()] = sums.clone()
        plain(stale[sums.inner.data_ptr()], total, answer)

    with deferred(1), monkeypatch.context() as patch:
        patch.setattr(gpu_host, "add", add)
        with split(model, 0.5) as (executor, _):
            assert executor.gpu.ways == WAYS and executor.gpu.link.sent(1) is None
            recorded(executor)
            assert "by copies: the GPU" in str(executor.gpu.caller)


@pytest.mark.parametrize("copies", [False, True])
def test_nothing_is_copied_within_a_recorded_step(
    copies: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, within = Machine.copy, []

    def copy(machine: Machine, *given: Any) -> Any:
        if machine.recording is not None:
            within.append(given)
        return plain(machine, *given)

    with deferred(1), split(model, 0.5) as (executor, ffns):
        executor.gpu.link.copy("it was asked for") if copies else None
        monkeypatch.setattr(Machine, "copy", copy)
        recorded(executor)
        assert len(within) == 1 + 2 * len(ffns) * copies, "logits; n, and sums, of each layer"


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_is_kept(fastest: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with deferred(1), split(model, 0.5) as (executor, _):
        right = recorded(executor)
        monkeypatch.setattr(executor.gpu, "step_seconds", lambda way, _: 1e-3 if way == fastest else 2e-3)
        step_trial.use(executor, step_trial.measured(executor), "just now")
        names = {"flags": "with flags", "calls": "with calls", "waits": "if the host waits"}
        times = ", ".join(f"{1 if way == fastest else 2} {names[way]}" for way in WAYS)
        who = {"flags": "the GPU calls the CPU by flags", "calls": "the GPU calls the CPU"}
        said = f"{who.get(fastest, 'the host waits for the GPU')} (ms a step: {times}), just now"
        assert str(executor.choices.steps) == said and executor.gpu.way == fastest
        np.testing.assert_array_equal(recorded(executor), right)
        assert executor.gpu.way == fastest, "a way that is slower is not taken again"


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
def test_each_way_of_a_device_gives_the_same_bits_in_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA by flags, where its driver has them; torch's CPU device has none."""
    static_where_emulated(monkeypatch)
    answers = []
    with split(model, 0.5) as (executor, _):
        ways = executor.gpu.ways
        if device_name() == "cpu":
            no_flags = "no flags: torch's CPU device has no streams"
            assert ways == WAYS[1:] and executor.gpu.link.try_ways() == (ways, no_flags)
        elif ways != WAYS:
            pytest.skip(executor.gpu._no_way)
        for way in ways:
            executor.gpu.record(counting_recorder([]), way)
            answers.append(split_calls(executor, 5))
            assert executor.gpu.way == way
    for one in answers[1:]:
        np.testing.assert_array_equal(one, answers[0])


@pytest.mark.usefixtures("device")
def test_a_device_that_is_released_goes_on_in_order() -> None:
    """It waits for an answer, launched and replayed, until the watchdog ends that."""
    device = torch_device()
    streams = streams_of(device)
    with current(device):
        try:
            flags = Flags(streams)
        except RuntimeError as error:
            assert device_name() == "cpu" and "has no streams" in str(error)
            return
        if (reason := flags.trial(device)) is not None:
            pytest.skip(reason)
        flags._host.set_patience(0.5)
        x = torch.zeros(1, device=device)

        def run() -> None:
            flags._write(1)
            flags.wait(1)
            x.add_(1)

        record = streams.recorder()
        assert record is not None
        for again in (run, record(run)):
            flags.begin()
            x.zero_()
            begin = time.monotonic()
            again()
            until(lambda: flags._host.wait(1, 0.0) or streams.current().query())
            until(lambda: flags.released)
            streams.finish()
            assert time.monotonic() - begin > 0.4 and x.item() == 1
