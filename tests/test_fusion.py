"""How a GPU sums neurons for one token: timed at load, kept, and the same on every start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from prepared_models import saved_results
from sparse_models import give_bundles, give_profile, tiny_llama
from test_gpu_rates import CONTEXT, cache, machine, options, vram_for  # noqa: F401

from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.errors import GpuMemoryError, PowerInferError
from powerinfer.hybrid import fusion
from powerinfer.kernels import gpu

pytestmark = pytest.mark.usefixtures("cache")
PROMPT, SHORT = [5, 9, 2] * 5, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Clock:
    """Time that neurons alone take: so long for a layer and one token, by whether the kernel is fused; or what it
    raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, several: float, one: float) -> None:
        self.now, self.seconds, self.fused, plain = 0.0, {False: several, True: one}, list[bool](), gpu.neuron_sum
        self.fails: dict[bool, Exception] = {}

        def timed(neurons: Any, x: Any, *rest: Any) -> Any:
            if len(x) == 1:
                fused = rest[4]
                if fused in self.fails:
                    raise self.fails[fused]
                self.fused.append(fused)
                self.now += self.seconds[fused]
            return plain(neurons, x, *rest)

        monkeypatch.setattr("powerinfer.kernels.gpu.neuron_sum", timed)
        monkeypatch.setattr(fusion, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(fusion, "fuses", lambda _: True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, 2e-3, 1e-3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))


@pytest.fixture
def file(path: Path) -> Path:
    return Path(f"{path}.powerinfer") / "trials.json"


def decoded(path: Path, clock: Clock, **more: Any) -> tuple[str | None, set[bool], int]:
    """What was chosen, how tokens are decoded then, and the number of sums for one token until the model is loaded."""
    made = machine(EngineConfig(threads=1, context=CONTEXT, gpu="cpu"))
    where = {"gpu": "cpu", "vram": vram_for(path, made, 4), "ram": 400 << 20, "trial": True}
    clock.fused.clear()
    with LLM(path, **options(**where | more)) as llm:
        tried = len(clock.fused)
        clock.fused.clear()
        llm.generate([PROMPT], SHORT)
        return llm.choices.get("neurons"), set(clock.fused), tried


def test_the_faster_way_is_timed_once(path: Path, file: Path, clock: Clock) -> None:
    chosen, ways, tried = decoded(path, clock, trial=False)
    assert chosen == "a kernel for each stage for one token (--no-trial: nothing was timed)"
    assert (ways, tried) == ({False}, 0) and not saved_results(file, "neuron kernels")

    chosen, ways, tried = decoded(path, clock)
    kept = saved_results(file, "neuron kernels")[0]
    assert kept["staged_s"] == pytest.approx(2 * kept["fused_s"]) and kept["fused"]
    times = f"{1e3 * kept['fused_s']:.3g} ms a step fused, {1e3 * kept['staged_s']:.3g} otherwise"
    assert chosen == f"a fused kernel for one token ({times}, kept in {file})" and ways == {True} and tried

    clock.seconds = {False: 1e-3, True: 1e-3}
    for more in ({}, {"trial": False}):
        chosen, ways, tried = decoded(path, clock, **more)
        assert chosen == f"a fused kernel for one token ({times}, chosen earlier ({file}))"
        assert (ways, tried) == ({True}, 0), "it was tried again"

    chosen, ways, _ = decoded(path, clock, retrial=True)  # no clear gain
    assert chosen is not None and chosen.startswith("a kernel for each stage") and ways == {False}
    file.write_text(file.read_text().replace('"staged_s": ', '"staged_s": -'))
    clock.seconds = {False: 2e-3, True: 1e-3}
    assert decoded(path, clock)[1] == {True}


@pytest.mark.parametrize("kind", [GpuMemoryError, PowerInferError, RuntimeError])  # Triton's compiler raises these, too
def test_a_kernel_that_cannot_run_is_not_used(path: Path, file: Path, clock: Clock, kind: type[Exception]) -> None:
    clock.fails = {True: kind("this GPU cannot run a kernel (shared memory); leave out the GPU")}
    chosen, ways, _ = decoded(path, clock)
    why = "fused: this GPU cannot run a kernel (shared memory)"
    assert chosen == f"a kernel for each stage for one token ({why}, kept in {file})" and ways == {False}
    clock.fails = {}
    chosen, ways, tried = decoded(path, clock)
    assert chosen == f"a kernel for each stage for one token ({why}, chosen earlier ({file}))"
    assert (ways, tried) == ({False}, 0)


def test_a_gpu_that_fails_is_no_choice(path: Path, file: Path, clock: Clock) -> None:
    clock.fails = dict.fromkeys((True, False), PowerInferError("the GPU failed: load the model again"))
    with pytest.raises(PowerInferError, match="the GPU failed"):
        decoded(path, clock)
    assert not saved_results(file, "neuron kernels"), "nothing of the trial is left"


def test_a_start_that_did_not_outlive_the_trial_is_remembered(path: Path, file: Path, clock: Clock) -> None:
    begun: list[Any] = []

    class Dead(BaseException):
        pass

    def dies(*_: Any) -> Any:
        begun.append(json.loads(file.read_text()))
        raise Dead

    plain = fusion.Fusion._timed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Dead):
        patch.setattr(fusion.Fusion, "_timed", dies)
        decoded(path, clock)
    file.write_text(json.dumps(begun[0]))
    assert fusion.Fusion._timed is plain
    chosen, ways, tried = decoded(path, clock)
    why = "its trial was interrupted; --retrial repeats it"
    assert chosen == f"a kernel for each stage for one token ({why}, chosen earlier ({file}))"
    assert (ways, tried) == ({False}, 0) and decoded(path, clock, retrial=True)[1] == {True}


def test_where_triton_compiles_nothing_nothing_is_tried(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuses = fusion.fuses
    clock = Clock(monkeypatch, 2e-3, 1e-3)
    monkeypatch.setattr(fusion, "fuses", fuses)
    assert decoded(path, clock) == (None, {False}, 0) and not saved_results(file, "neuron kernels")
