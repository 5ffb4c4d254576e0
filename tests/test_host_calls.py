"""Calls of the CPU by a GPU's streams: in their order, launched and in recordings; failures are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
from gpu_device import torch_device  # noqa: E402
from prepared_models import saved_results  # noqa: E402
from sparse_models import give_bundles, give_profile, tiny_llama  # noqa: E402
from test_bundled_ffn import NEURONS, K, layout_of, part_of, some, tokens  # noqa: E402
from test_gpu_layers import counting_recorder, static_where_emulated  # noqa: E402
from test_gpu_rates import CONTEXT, cache, machine, options, vram_for  # noqa: E402, F401
from test_hybrid import split  # noqa: E402
from test_neuron_kernels import limits_of, make_layer  # noqa: E402

from powerinfer import LLM, EngineConfig, _native  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.link import Link  # noqa: E402
from powerinfer.devices.streams import ImmediateStreams, call_now, streams_of  # noqa: E402
from powerinfer.devices.torch_device import current  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.hybrid import step_trial  # noqa: E402
from powerinfer.hybrid.parts import CpuNeurons  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402

NO_FLAGS = "no flags: torch's CPU device has no streams"


def failing_part() -> _native.NeuronSum:
    """A sum that says so: neurons in banks have no bundles alone."""
    layer = make_layer(K, NEURONS, ("F16", "F16"))
    layout, spec = layout_of(layer), _native.NeuronSpec("topk", 8.0, limits=limits_of(NEURONS))
    at = layout.pitch, layout.gate_at, layout.up_at, layout.down_at
    bundles = _native.Bundles(layer.data, NEURONS, K, "F16", "F16", "F16", *at, spec)
    return _native.NeuronSum(_native.Workspace(_native.Pool(1), cpu.choose_isa(None)[0]), bundles)


@pytest.mark.parametrize("names", [None, 0.3, 0.0])
def test_a_call_computes_the_sum(names: float | None) -> None:
    """Of what is in its arrays when it is made, each time; only calls that select neurons have a job."""
    part, rng = part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)), np.random.default_rng(1)
    x, out = tokens(3), np.full((3, K), np.nan, np.float32)
    selected = None if names is None else np.zeros((3, part.neurons), np.uint8)
    calls = _native.HostCalls()
    call = _native.NeuronCall(calls, part, x, out, selected)
    del part
    for _ in range(2):
        x[:] = rng.standard_normal(x.shape)
        wanted = np.empty_like(out)
        if selected is not None and names is not None:
            selected[:] = rng.random(selected.shape) < names
        part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5)).sum(x, wanted, selected)
        calls.begin()
        begin = time.perf_counter()
        call_now(call.function, call.data)
        taken = time.perf_counter() - begin
        np.testing.assert_array_equal(out, wanted)
        made, jobs, waited, worked = call.take()
        assert (made, jobs) == (1, names != 0.0) and 0 < worked <= taken and waited >= 0
    assert call.take() == (0, 0, 0, 0) and calls.take_failure() == ""


def test_a_call_that_fails_writes_zeros() -> None:
    calls, out = _native.HostCalls(), np.full((2, K), np.nan, np.float32)
    call = _native.NeuronCall(calls, failing_part(), tokens(2), out)
    for _ in range(2):
        call_now(call.function, call.data)
    assert not out.any() and call.take()[:2] == (2, 0)
    assert "topk" in calls.take_failure() and calls.take_failure() == "", "the first one, once"
    call_now(call.function, call.data)
    calls.begin()
    assert calls.take_failure() == "", "of a step that was broken off: it does not fail the next one"


def test_arrays_of_other_shapes_are_refused() -> None:
    calls, part = _native.HostCalls(), part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5))
    x, out = tokens(2), np.empty((2, K), np.float32)
    for wrong in ((x[:1], out), (x[:, 1:], out), (x, out, np.zeros((2, 1), np.uint8)), (x.astype(np.float64), out)):
        with pytest.raises((ValueError, TypeError)):
            _native.NeuronCall(calls, part, *wrong)


@pytest.mark.usefixtures("device")
def test_streams_call_in_their_order() -> None:
    """What was sent before a call is there, and what follows has its result; beside it another stream goes on."""
    device, part = torch_device(), part_of(make_layer(K, NEURONS, ("F16", "F16")), some(0.5))
    streams, rng = streams_of(device), np.random.default_rng(2)
    here, back = (streams.pinned((2, K), torch.float32) for _ in range(2))
    given, total = (torch.zeros((2, K), device=device) for _ in range(2))
    call = _native.NeuronCall(_native.HostCalls(), part, here.numpy(), back.numpy())

    def run() -> None:
        sent, computed = streams.event(), streams.event()
        here.copy_(given * 2, non_blocking=True)
        sent.record()
        beside.wait_event(sent)
        streams.call(beside, call.function, call.data)
        computed.record(beside)
        total.copy_(given)
        streams.current().wait_event(computed)
        total.add_(back.to(device, non_blocking=True))

    with current(device), torch.inference_mode():
        beside, record = streams.stream(), streams.recorder()
        again: list[Callable[[], None]] = [run] if record is None else [run, record(run)]
        for replay in again * 3:
            x, wanted = rng.standard_normal((2, K)).astype(np.float32), np.empty((2, K), np.float32)
            given.copy_(torch.from_numpy(x))
            replay()
            part.sum(2 * x, wanted)
            np.testing.assert_array_equal(total.cpu().numpy(), x + wanted)
    assert call.take()[:2] == (3 * len(again), 3 * len(again))


def split_calls(executor: Any, count: int) -> np.ndarray:
    found: np.ndarray = families.run_chunks(
        executor, np.arange(count, dtype=np.int32), [1] * count, families.scattered_pages(executor, 1)[0]
    )
    return found


@pytest.mark.usefixtures("device")
def test_a_step_whose_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line; the next step is right."""
    static_where_emulated(monkeypatch)
    path, plain = give_bundles(tiny_llama(tmp_path / "tiny.gguf")), CpuNeurons.call
    with split(path, 0.5) as (executor, ffns):
        executor.gpu.record(counting_recorder([]))
        right = split_calls(executor, 4)
        bad = failing_part()

        def failing(_: CpuNeurons, link: Any, tokens: int, columns: int) -> Any:
            wide = [np.zeros((tokens, K), np.float32) for _ in range(2)]
            return _native.NeuronCall(link.calls, bad, *wide)

        monkeypatch.setattr(CpuNeurons, "call", failing)
        ffns[1].place(ffns[1].hot)
        with pytest.raises(PowerInferError, match=r"^the CPU's part of a step failed: .*topk"):
            split_calls(executor, 4)
        monkeypatch.setattr(CpuNeurons, "call", plain)
        ffns[1].place(ffns[1].hot)
        np.testing.assert_array_equal(split_calls(executor, 4), right)


@pytest.mark.usefixtures("device")
def test_nothing_replays_a_call_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons that cannot be placed anew take the layer's calls with them, and so its recordings."""
    static_where_emulated(monkeypatch)
    path = give_bundles(tiny_llama(tmp_path / "tiny.gguf"))

    def full(*_: Any) -> Any:
        raise PowerInferError("no room")

    with split(path, 0.5) as (executor, ffns):
        executor.gpu.record(counting_recorder([]))
        right = split_calls(executor, 4)
        recordings = executor.gpu._recordings
        assert recordings is not None and any(recordings._runs.values())
        with monkeypatch.context() as patch, pytest.raises(PowerInferError, match="no room"):
            patch.setattr("powerinfer.hybrid.ffn.GpuNeurons", full)
            ffns[1].place(ffns[1].hot)
        assert executor.gpu._recordings is None or not any(executor.gpu._recordings._runs.values())
        ffns[1].place(ffns[1].hot)
        np.testing.assert_array_equal(split_calls(executor, 4), right)


@pytest.mark.parametrize("slow", ["join", "wait"])
def test_the_faster_way_is_kept(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that one of the two moves; recordings are launched anew here, so that it does."""
    now = [0.0]
    plain = getattr(Link, slow)
    monkeypatch.setattr(Link, slow, lambda *given: (now.__setitem__(0, now[0] + 0.001), plain(*given)))
    monkeypatch.setattr("powerinfer.devices.gpu.time.perf_counter", lambda: now[0])
    path = give_bundles(tiny_llama(tmp_path / "tiny.gguf"))
    with split(path, 0.5) as (executor, ffns):
        assert executor.choices.steps is None and executor.gpu.way == "waits", "nothing is recorded"
        executor.gpu.record(lambda run, _: run)
        step_trial.use(executor, step_trial.measured(executor), "just now")
        times = f"ms a step: {len(ffns)} with calls, 0 if the host waits"
        if slow == "wait":
            times = f"ms a step: 0 with calls, {len(ffns)} if the host waits"
        who = "the host waits for the GPU" if slow == "join" else "the GPU calls the CPU"
        assert str(executor.choices.steps) == f"{who} ({times}; {NO_FLAGS}), just now"
        before = executor.gpu.link.calls.made
        split_calls(executor, 3)
        assert (executor.gpu.link.calls.made > before) == (slow == "wait")


@pytest.mark.usefixtures("cache")
def test_the_faster_way_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts with neurons placed alike take it, whatever is faster then, and without a trial, too."""
    static_where_emulated(monkeypatch)
    monkeypatch.setattr("powerinfer.devices.gpu.recorder_of", lambda _: counting_recorder([]))
    monkeypatch.setattr("powerinfer.devices.gpu.gpu.which", lambda _: "triton")
    path = give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    file, asked = Path(f"{path}.powerinfer") / "trials.json", list[str]()
    room = vram_for(path, machine(EngineConfig(threads=1, context=CONTEXT, gpu="cpu")), 2)

    def step_seconds(_: GpuLayers, way: str, steps: int) -> float:
        asked.append(way)
        return 2e-3 if way == "calls" else 1e-3

    monkeypatch.setattr(GpuLayers, "step_seconds", step_seconds)

    def steps(**more: Any) -> str:
        asked.clear()
        with LLM(path, **options(**{"gpu": "cpu", "vram": room, "ram": 400 << 20} | more)) as llm:
            return llm.choices["steps"]

    assert steps(trial=False) == f"the GPU calls the CPU ({NO_FLAGS})" and not asked
    assert not saved_results(file, "steps")
    times = f"ms a step: 2 with calls, 1 if the host waits; {NO_FLAGS}"
    said = steps(trial=True)
    assert said.startswith(f"the host waits for the GPU ({times}), measured in") and f"kept in {file}" in said
    assert asked == ["calls", "waits", "waits", "calls"] * (step_trial.ROUNDS // 2), "by turns"
    assert saved_results(file, "steps") == [{"way": "waits", "seconds": [["calls", 2e-3], ["waits", 1e-3]]}]
    for more in ({"trial": True}, {"trial": False}):
        assert steps(**more) == f"the host waits for the GPU ({times}), measured earlier ({file})" and not asked
    assert steps(trial=True, kv_type="q8_0") and asked and len(saved_results(file, "steps")) == 2
    assert steps(trial=True, retrial=True) and asked


@pytest.mark.parametrize("share, tokens, awake", [(0.5, 1, True), (0.5, 40, False), (1.0, 1, False)])
@pytest.mark.usefixtures("device")
def test_the_cpus_threads_stay_awake_where_it_has_a_part(
    share: float, tokens: int, awake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of few tokens, until they end, be it in a failure; where it has none they may park."""
    held: list[str] = []

    class Pool(_native.Pool):
        def keep_awake(self) -> None:
            held.append("awake")
            super().keep_awake()

        def let_park(self) -> None:
            held.append("park")
            super().let_park()

    monkeypatch.setattr(_native, "Pool", Pool)
    with split(give_bundles(tiny_llama(tmp_path / "tiny.gguf")), share) as (executor, _):
        numbers, pages = np.arange(tokens, dtype=np.int32), families.scattered_pages(executor, 1)[0]
        families.run_chunks(executor, numbers, [tokens], pages)
        assert held == ["awake", "park"] * awake
        monkeypatch.setattr(executor.gpu, "run", lambda *_: (_ for _ in ()).throw(PowerInferError("broken")))
        with pytest.raises(PowerInferError, match="broken"):
            families.run_chunks(executor, numbers, [tokens], pages)
        assert held == ["awake", "park"] * 2 * awake


def test_the_host_sleeps_where_the_gpu_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks again and again where it acts itself."""
    static_where_emulated(monkeypatch)
    plain, made = ImmediateStreams.event, {}

    def event(own: ImmediateStreams, *, timed: bool = False, sleeps: bool = False) -> Any:
        found = plain(own, timed=timed, sleeps=sleeps)
        made[id(found)] = found, sleeps  # kept: no other gets its number
        return found

    monkeypatch.setattr(ImmediateStreams, "event", event)
    with split(give_bundles(tiny_llama(tmp_path / "tiny.gguf")), 0.5) as (executor, _):
        for calls in (True, False, True):
            executor.gpu.record(counting_recorder([]), "calls" if calls else "waits")
            split_calls(executor, 3)
            assert made[id(executor.gpu.buffers._done)][1] == calls
        with executor.traced():
            split_calls(executor, 3)
            assert not made[id(executor.gpu.buffers._done)][1]
        split_calls(executor, 3)
        assert made[id(executor.gpu.buffers._done)][1]


def test_a_device_that_cannot_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for it then, as it says, and the answer has the same bits."""
    static_where_emulated(monkeypatch)
    path, made, answers = give_bundles(tiny_llama(tmp_path / "tiny.gguf")), [], []
    monkeypatch.setattr("powerinfer.devices.gpu.recorder_of", lambda _: counting_recorder(made))
    # Of a device, whose steps are recorded then; not of kernels.
    monkeypatch.setattr("powerinfer.devices.gpu.gpu.which", lambda x: "torch" if x.numel() else "triton")

    def refuses(*_: Any) -> None:
        raise RuntimeError("CUDA error 801: not supported\nand more")

    for refused in (False, True):
        with monkeypatch.context() as patch:
            if refused:
                patch.setattr(ImmediateStreams, "call", refuses)
            with split(path, 0.5) as (executor, _):
                said = str(executor.choices.steps)
                assert (said == "the host waits for the GPU (CUDA error 801: not supported)") == refused, said
                executor.gpu.record(counting_recorder(made))
                answers.append(split_calls(executor, 4))
    np.testing.assert_array_equal(*answers)
