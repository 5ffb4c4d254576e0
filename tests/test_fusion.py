"""How a GPU sums neurons for one token: measured at load, kept, and the same on every start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sparse_models import give_bundles, give_profile, tiny_llama
from test_gpu_rates import CONTEXT, cache, machine, options, vram_for  # noqa: F401

from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.errors import GpuMemoryError
from powerinfer.hybrid import fusion
from powerinfer.kernels import gpu

pytestmark = pytest.mark.usefixtures("cache")
PROMPT, SHORT = [5, 9, 2] * 5, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Clock:
    """Time that neurons alone take: so long for a layer and one token, by whether it is one kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, several: float, one: float) -> None:
        self.now, self.seconds, self.fused, plain = 0.0, {False: several, True: one}, list[bool](), gpu.neuron_sum
        self.fails = False

        def timed(neurons: Any, x: Any, *rest: Any) -> Any:
            if len(x) == 1:
                fused = rest[-1]
                if fused and self.fails:
                    raise GpuMemoryError("no room")
                self.fused.append(fused)
                self.now += self.seconds[fused]
            return plain(neurons, x, *rest)

        monkeypatch.setattr("powerinfer.kernels.gpu.neuron_sum", timed)
        monkeypatch.setattr(fusion, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(fusion, "fuses", lambda _: True)


def decoded(path: Path, clock: Clock, **more: Any) -> tuple[str | None, set[bool], int]:
    """What was chosen, how tokens are decoded then, and the number of steps of one token until the model is loaded."""
    made = machine(EngineConfig(threads=1, context=CONTEXT, gpu="cpu"))
    where = {"gpu": "cpu", "vram": vram_for(path, made, 4), "ram": 400 << 20, "trial": True}
    clock.fused.clear()
    with LLM(path, **options(**where | more)) as llm:
        tried = len(clock.fused)
        clock.fused.clear()
        llm.generate([PROMPT], SHORT)
        return llm.choices.get("neurons"), set(clock.fused), tried


def test_the_faster_way_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    file = Path(f"{path}.powerinfer") / "fusion.json"
    clock = Clock(monkeypatch, 2e-3, 1e-3)
    assert decoded(path, clock, trial=False)[:2] == (None, {False}) and not file.exists()

    chosen, ways, tried = decoded(path, clock)
    kept = json.loads(file.read_text())["fusions"][0]
    assert kept["several"] == pytest.approx(2 * kept["one"])
    times = f"{1e3 * kept['one']:.3g} ms a step with one, {1e3 * kept['several']:.3g} with several"
    assert chosen == f"one kernel for one token ({times}, kept in {file})" and ways == {True}

    clock.seconds = {False: 1e-3, True: 1e-3}
    chosen, ways, again = decoded(path, clock)
    assert chosen == f"one kernel for one token ({times}, measured earlier ({file}))" and ways == {True}
    assert again < tried, "it was tried again"
    assert decoded(path, clock, trial=False)[1] == {True}

    chosen, ways, _ = decoded(path, clock, retrial=True)  # no clear gain
    assert chosen is not None and chosen.startswith("a kernel for each stage") and ways == {False}
    file.write_text('{"format": 1, "kind": "fusions", "fusions": [{"key": {}, "several": -1, "one": "x"}]}')
    clock.seconds = {False: 2e-3, True: 1e-3}
    assert decoded(path, clock)[1] == {True}


def test_without_memory_for_it_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    clock = Clock(monkeypatch, 2e-3, 1e-3)
    clock.fails = True
    assert decoded(path, clock)[:2] == (None, {False})
    assert not (Path(f"{path}.powerinfer") / "fusion.json").exists()


def test_where_triton_compiles_nothing_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    fuses = fusion.fuses
    clock = Clock(monkeypatch, 2e-3, 1e-3)
    monkeypatch.setattr(fusion, "fuses", fuses)
    assert decoded(path, clock)[:2] == (None, {False})
    assert not (Path(f"{path}.powerinfer") / "fusion.json").exists()
