"""The trial by which `auto` takes `exact` inside experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import LAYERS
from test_expert_neurons import model, plain_model

from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hybrid.resolve import resolve
from powerinfer.sparsity import expert_trial

SETTINGS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
Timed = Callable[[float], list[int]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Sets the time of `exact`, of a dense one of 1; returns the sizes that are measured from then on."""

    def sets(exact: float) -> list[int]:
        sizes: list[int] = []

        def seconds(executor: object, ops: object, size: int, sample: object) -> list[float]:
            sizes.append(size)
            return [1.0, exact]

        monkeypatch.setattr(expert_trial, "_seconds", seconds)
        return sizes

    return sets


def loaded(path: Path, **options: object) -> tuple[str, str | None]:
    """What a load with `auto` says of its selector, and that of its statistics after an answer."""
    with LLM(path, gpu="none", threads=1, max_batch=4, **options) as llm:  # type: ignore[arg-type]
        llm.generate("ab", SETTINGS)
        report = llm.sparsity
        return str(llm.choices["selector"]), None if report is None else report["selector"]


@pytest.mark.parametrize("made", [model, lambda folder: plain_model(folder, "Q5_0")])
def test_auto_takes_what_is_faster_and_remembers_it(made: Callable[[Path], Path], timed: Timed, tmp_path: Path) -> None:
    path = made(tmp_path)
    sizes = timed(0.9)
    said, selector = loaded(path)
    assert sizes == [1, 4] and selector == "exact" and said.startswith("exact inside experts")
    assert "dense 1000000 us, exact 900000 us" in said and "measured in" in said
    said, selector = loaded(path)
    assert sizes == [1, 4] and selector == "exact" and "measured earlier" in said
    resolved = resolve(open_checkpoint(path), EngineConfig(gpu="none", threads=1, max_batch=4))
    assert resolved.selection.in_experts, "plans and inspect know it, too"
    sizes = timed(0.99)
    said, selector = loaded(path, retrial=True)
    assert sizes == [1, 4] and selector is None and "exact 990000 us" in said
    assert loaded(path)[1] is None and sizes == [1, 4]
    with LLM(path, gpu="none", threads=1, selector="exact") as llm:
        assert llm.sparsity is not None and sizes == [1, 4], "what is asked for is not tried"


def test_what_is_not_tried(timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = timed(0.5)
    said, selector = loaded(model(tmp_path), trial=False)
    assert selector is None and "--no-trial" in said
    assert loaded(model(tmp_path, "F32"))[1] is None and loaded(model(tmp_path, activation="silu"))[1] is None
    monkeypatch.setattr(expert_trial, "available_memory", lambda: 1000)
    said, selector = loaded(model(tmp_path))
    assert selector is None and "no room" in said and not sizes


def test_both_layouts_run_in_the_same_steps(tmp_path: Path) -> None:
    path = plain_model(tmp_path, "Q4_0")
    checkpoint, engine = open_checkpoint(path), EngineConfig(threads=2, max_batch=3)
    assert expert_trial.obstacle(checkpoint, engine) is None and expert_trial.first_layer(checkpoint) == 1 < LAYERS + 1
    result = expert_trial.measured(checkpoint, engine, [1, 2, 3])
    assert expert_trial.fits(result, engine) and not expert_trial.fits(result, EngineConfig(max_batch=1))
    assert all(0 < seconds < 10 for seconds in result.layers[0].seconds.values())
