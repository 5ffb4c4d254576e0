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

from powerinfer.config import EngineConfig
from powerinfer.hardware import measure
from powerinfer.hardware.description import load
from powerinfer.sparsity.selector_trial import SELECTORS, TimedLayer, TimedLayers
from powerinfer.sparsity.trials import Trial, read_trials
from powerinfer.system import Disturbance, quiet

READ = Disturbance.__dict__["_read"]  # before the fixture that makes every machine quiet

Taken = Callable[..., None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """taken(a, b, c): others take so many cores in the next contexts, and c in all that follow."""

    def make(*cores: float) -> None:
        left = list(cores)

        def finish(self: Disturbance, *_: object) -> None:
            self.other_cores, self.steal = left.pop(0) if len(left) > 1 else left[0], 0.0

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
    assert (found.other_cores, found.steal, found.cores) == (2.0, 0.5, 2.5) and found.disturbed


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


RESULTS = [TimedLayers([TimedLayer({"1": "exact"}, {"dense": 1.0 + number, "exact": 0.5})]) for number in range(3)]


def a_trial(folder: Path, **options: Any) -> Trial[TimedLayers]:
    checkpoint: Any = SimpleNamespace(path=folder / "m.gguf")
    return Trial(SELECTORS, checkpoint, EngineConfig(**options), {"cpu": "one"})


def tried(folder: Path) -> tuple[float, float, str, int]:
    """(seconds of what was saved, cores of others that were noted with it, the text, trials)."""
    left = list(RESULTS)
    outcome = a_trial(folder).run(lambda: left.pop(0))
    ((entry, result),) = read_trials(a_trial(folder).path, SELECTORS)
    assert result == outcome.result and entry.disturbed == outcome.disturbed
    return result.layers[0].seconds["dense"], entry.disturbed, outcome.origin, len(RESULTS) - len(left)


def test_a_quiet_trial_is_the_only_one(tmp_path: Path, taken: Taken) -> None:
    taken(0.1)
    which, disturbed, message, trials = tried(tmp_path)
    assert (which, trials, disturbed) == (1.0, 1, 0.0) and "others" not in message


def test_a_disturbed_trial_is_repeated_until_it_is_quiet(tmp_path: Path, taken: Taken) -> None:
    taken(1.0, 0.0, 1.0)
    which, disturbed, message, trials = tried(tmp_path)
    assert (which, trials, disturbed) == (2.0, 2, 0.0) and "others" not in message


def test_the_quietest_of_three_counts(tmp_path: Path, taken: Taken) -> None:
    taken(1.0, 0.5, 0.7)
    which, disturbed, message, trials = tried(tmp_path)
    assert (which, trials, disturbed) == (2.0, 3, 0.5)
    assert "while others took 0.5 cores" in message


def test_a_saved_disturbed_trial_is_repeated_when_it_is_quiet(tmp_path: Path, taken: Taken) -> None:
    a_trial(tmp_path).keep(RESULTS[0], disturbed=0.5)
    taken(1.0)
    found = a_trial(tmp_path).find()
    assert found is not None and found.result == RESULTS[0], "not repeated while the machine is busy"
    taken(0.0)
    assert a_trial(tmp_path).find() is None and a_trial(tmp_path).find(anew=False) == found
    a_trial(tmp_path).keep(RESULTS[0])
    assert a_trial(tmp_path).find() == found and a_trial(tmp_path, retrial=True).find() is None


# ---------------------------------------------------------------- the machine


def test_a_disturbed_measurement_is_marked_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: Taken
) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    said: list[str] = []
    taken(1.25)
    first = measure.measure_and_keep(ONE, say=said.append, effort=LITTLE)
    assert first.disturbed == 1.25 and len(said) == 1 and "took 1.2 cores" in said[0]
    assert load(measure.kept_at(first.key)) == first == measure.saved_hardware(ONE), "used while the machine stays busy"
    taken(0.0)
    assert measure.saved_hardware(ONE) is None
    second = measure.measure_and_keep(ONE, say=said.append, effort=LITTLE)
    assert second.disturbed == 0 and len(said) == 1 and measure.saved_hardware(ONE) == second
