"""What other programs take of the machine while something is measured, and what follows from it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_measure import LITTLE, ONE

from powerinfer.devices.choices import Choices
from powerinfer.hardware import measure
from powerinfer.hardware.description import load
from powerinfer.sparsity import attach, trial
from powerinfer.sparsity.saved_trials import SavedTrials
from powerinfer.sparsity.trial import Verdict
from powerinfer.system import Disturbance, quiet

READ = Disturbance.__dict__["_read"]  # before the fixture that makes every machine quiet

Taken = Callable[..., None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """taken(a, b, c): others take so many cores in the next contexts, and c in all that follow."""

    def make(*cores: float) -> None:
        left = list(cores)

        def finish(self: Disturbance, *_: object) -> None:
            self.others, self.steal = left.pop(0) if len(left) > 1 else left[0], 0.0

        monkeypatch.setattr(Disturbance, "__exit__", finish)

    return make


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_what_this_process_uses_is_not_taken_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(10.0, 1.0, 3.0, 100.0), (15.0, 2.0, 4.0, 102.0)])  # busy, stolen, of this process, the clock
    monkeypatch.setattr(Disturbance, "_read", staticmethod(lambda: next(reads)))
    with Disturbance() as found:
        pass
    assert (found.others, found.steal, found.cores) == (2.0, 0.5, 2.5) and found.disturbed


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_another_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disturbance, "_read", READ)
    before = READ()
    busy(0.2)
    own = READ()[2] - before[2]
    assert 0.15 < own < 1.0, "the time of this process, in seconds"
    loop = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", loop]) as other:
        time.sleep(0.2)
        with Disturbance() as beside:
            time.sleep(0.4)
        assert not quiet(0.3)
        other.kill()
    assert beside.disturbed and beside.cores > 0.2


def test_without_statistics_nothing_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disturbance, "_read", READ)
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(OSError()))
    with Disturbance() as found:
        busy(0.05)
    assert found.cores == 0 and not found.disturbed and quiet(0.01)


# ---------------------------------------------------------------- trials


class Saved:
    path = Path("trial.json")

    def __init__(self) -> None:
        self.kept: list[tuple[Any, float]] = []

    def keep(self, verdicts: list[Verdict], disturbed: float) -> None:
        self.kept.append((verdicts, disturbed))


def tried(monkeypatch: pytest.MonkeyPatch) -> tuple[Saved, Any, str, int]:
    """(what was saved, what came out, the message, trials)."""
    made: list[list[Verdict]] = []

    def one(*_: object) -> list[Verdict]:
        made.append([Verdict({"1": "exact"}, {"dense": len(made) + 1.0})])
        return made[-1]

    monkeypatch.setattr(trial, "trial", one)
    executor, saved = SimpleNamespace(choices=Choices()), Saved()
    verdicts = attach._tried(executor, saved, ["exact"], [1], [0], lambda *_: None)  # type: ignore[arg-type]
    return saved, verdicts[0].seconds["dense"], str(executor.choices.trial), len(made)


def test_a_quiet_trial_is_the_only_one(monkeypatch: pytest.MonkeyPatch, taken: Taken) -> None:
    taken(0.1)
    saved, which, message, trials = tried(monkeypatch)
    assert (which, trials, saved.kept[0][1]) == (1.0, 1, 0.0) and "others" not in message


def test_a_disturbed_trial_is_repeated_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch, taken: Taken) -> None:
    taken(1.0, 0.0, 1.0)
    saved, which, message, trials = tried(monkeypatch)
    assert (which, trials, saved.kept[0][1]) == (2.0, 2, 0.0) and "others" not in message


def test_the_quietest_of_three_counts(monkeypatch: pytest.MonkeyPatch, taken: Taken) -> None:
    taken(1.0, 0.5, 0.7)
    saved, which, message, trials = tried(monkeypatch)
    assert (which, trials, saved.kept[0][1]) == (2.0, 3, 0.5)
    assert "while others took 0.5 cores" in message


def test_a_saved_disturbed_trial_is_repeated_when_it_is_quiet(tmp_path: Path, taken: Taken) -> None:
    checkpoint: Any = SimpleNamespace(path=tmp_path / "m.gguf")
    verdicts = [Verdict({"1": "exact"}, {"dense": 1.0, "exact": 0.5})]
    saved = SavedTrials(checkpoint, None, {"sizes": "1"})
    assert saved.keep(verdicts, 0.5) is None
    taken(1.0)
    found = saved.find(1, ["exact"])
    assert found is not None and found[0].ways == {"1": "exact"}, "not repeated while the machine is busy"
    taken(0.0)
    assert saved.find(1, ["exact"]) is None
    assert saved.keep(verdicts) is None
    assert saved.find(1, ["exact"]) is not None


# ---------------------------------------------------------------- the machine


def test_a_disturbed_measurement_is_marked_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    said: list[str] = []
    taken(1.25)
    first = measure.measure_and_keep(ONE, say=said.append, effort=LITTLE)
    assert first.disturbed == 1.25 and len(said) == 1 and "took 1.2 cores" in said[0]
    assert load(measure.kept_at(first.key)) == first == measure.known(ONE), "used while the machine stays busy"
    taken(0.0)
    assert measure.known(ONE) is None
    second = measure.measure_and_keep(ONE, say=said.append, effort=LITTLE)
    assert second.disturbed == 0 and len(said) == 1 and measure.known(ONE) == second
