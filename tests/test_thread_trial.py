"""The trial by which automatic threads are chosen, on machines that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import tiny_gguf
from test_expert_neurons import model as expert_model

from powerinfer import LLM, SamplingParams
from powerinfer import topology as topologies
from powerinfer.config import EngineConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hybrid import thread_trial
from powerinfer.hybrid.thread_trial import StepTimes, TimedThreads
from powerinfer.kernels import cpu
from powerinfer.sparsity import trials
from powerinfer.system import Disturbance
from powerinfer.topology import Topology

CORES = ((0, 1), (2, 3), (4,), (5,))
HYBRID = Topology(CORES, frozenset(range(4)))
EQUAL = Topology(CORES, frozenset(range(6)))
SETTINGS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
Timed = Callable[[dict[int, float]], list[int]]


@pytest.fixture(autouse=True)
def six_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two performance cores, of two processors each, and two others."""
    monkeypatch.setattr(cpu, "usable_cores", lambda: (6, "every core"))
    monkeypatch.setattr(topologies, "read_topology", lambda: HYBRID)
    monkeypatch.setattr(trials, "quiet", lambda: True)
    monkeypatch.setattr(Disturbance, "disturbed", property(lambda self: False))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Sets the time of a step by number of threads; returns the numbers whose steps are timed from then on."""

    def sets(seconds: dict[int, float]) -> list[int]:
        calls: list[int] = []

        def times(executor: object, tokens: object) -> StepTimes:
            threads = executor.choices.threads.value  # type: ignore[attr-defined]
            calls.append(threads)
            return StepTimes(seconds[threads], 4 * seconds[threads])

        monkeypatch.setattr(thread_trial, "step_times", times)
        return calls

    return sets


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf().write(tmp_path / "m.gguf")


def threads_of(path: Path, **options: object) -> str:
    with LLM(path, gpu="none", **options) as llm:  # type: ignore[arg-type]
        assert llm.generate("ab", SETTINGS)
        return str(llm.choices["threads"])


def test_the_fastest_number_is_used_and_remembered(model: Path, timed: Timed) -> None:
    calls = timed({6: 1.0, 2: 0.9, 4: 0.8, 5: 1.1})
    said = threads_of(model)
    assert said.startswith("4 (one thread a core, of 6;") and "4 threads 800 and 3.2e+03 ms" in said, said
    assert sorted(calls) == sorted([6, 2, 4, 5] * thread_trial.ROUNDS) and calls[:4] != calls[4:8]
    assert "chosen earlier" in threads_of(model) and len(calls) == 16
    assert threads_of(model, threads=2) == "2 (asked for)", "what is asked for wins"
    timed({6: 1.0, 2: 0.98, 4: 0.99, 5: 1.1})
    assert threads_of(model, retrial=True).startswith("6 (every core;")


def test_what_is_not_tried(model: Path, timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = timed({})
    assert threads_of(model, trial=False) == "6 (every core; --no-trial)"
    with monkeypatch.context() as patch:
        patch.setattr(thread_trial, "available_memory", lambda: 1000)
        assert threads_of(model) == "6 (every core; no room for the trial of threads)"

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(trials, "write_small", full)
    assert "trials.json cannot be written (no space left)" in threads_of(model), "each start would try it again"
    monkeypatch.setattr(topologies, "read_topology", lambda: EQUAL)
    assert threads_of(model) == "6 (every core)"
    monkeypatch.setattr(cpu, "usable_cores", lambda: (2, "every core"))
    monkeypatch.setattr(topologies, "read_topology", lambda: Topology(((0,), (1,)), None))
    assert threads_of(model) == "2 (every core)" and not calls


def test_what_a_busy_machine_showed_decides_nothing_for_a_quiet_one(
    model: Path, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disturbance, "disturbed", property(lambda self: True))
    monkeypatch.setattr(Disturbance, "cores", property(lambda self: 1.5))
    timed({6: 1.0, 2: 0.5, 4: 1.0, 5: 0.7})
    assert threads_of(model).startswith("2 (performance cores")
    monkeypatch.setattr(Disturbance, "disturbed", property(lambda self: False))
    timed({6: 0.5, 2: 1.0, 4: 1.0, 5: 0.7})
    monkeypatch.setattr(trials, "quiet", lambda: False)
    assert threads_of(model).startswith("2 (performance cores"), "it is busy still"
    monkeypatch.setattr(trials, "quiet", lambda: True)
    assert threads_of(model).startswith("6 (every core;")


def test_a_saved_result_of_other_numbers_is_none(model: Path, timed: Timed) -> None:
    calls = timed({6: 1.0, 2: 0.9, 4: 0.8, 5: 1.1})
    threads_of(model)
    file = next(model.parent.rglob("trials.json"))
    document = json.loads(file.read_text())
    document["trials"][0]["result"]["threads"] = 1000
    file.write_text(json.dumps(document))
    assert threads_of(model).startswith("4 (one thread") and len(calls) == 2 * 16


def test_a_prompt_counts_too() -> None:
    slow_prompts, all_cores = StepTimes(0.9, 16.0), StepTimes(1.0, 4.0)
    assert slow_prompts.token < all_cores.token and slow_prompts.request > all_cores.request


@pytest.mark.parametrize("experts", [False, True])
def test_layers_run_with_each_number(experts: bool, model: Path, tmp_path: Path) -> None:
    checkpoint, engine = open_checkpoint(expert_model(tmp_path) if experts else model), EngineConfig()
    few = thread_trial.first_layers(checkpoint)
    assert few.config.n_layers == checkpoint.config.n_layers
    result = thread_trial.measured(few, checkpoint, engine, [2, 1], [1, 2, 3])
    assert result.fits({2: "", 1: ""}) and not result.fits({3: "", 1: ""})
    assert all(0 < one.token < 10 and 0 < one.prompt < 10 for one in result.seconds.values())
    assert isinstance(result, TimedThreads) and result.threads in (1, 2)


def test_as_few_layers_as_caches_do_not_hold(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_trial, "LEAST_BYTES", 1)
    checkpoint = open_checkpoint(model)
    assert checkpoint.config.n_layers > 1 == thread_trial.first_layers(checkpoint).config.n_layers
