"""Measuring a GPU on torch's CPU device: figures are sane and follow what is made slower; what is kept of them.

And the engine on a stand-in, under budgets.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sparse_models import TEXT, give_bundles, give_predictor, give_profile, tiny_llama  # noqa: E402
from test_cli import error_line, powerinfer  # noqa: E402

from powerinfer.cli import serve  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import wanted  # noqa: E402
from powerinfer.devices.link import Link  # noqa: E402
from powerinfer.devices.streams import ImmediateStreams  # noqa: E402
from powerinfer.errors import PowerInferError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.profile_file import open_profile  # noqa: E402
from powerinfer.hardware import description, gpu_rates, measure  # noqa: E402
from powerinfer.hardware.description import (  # noqa: E402
    RATED_ROWS,
    SIZES_ALONE,
    RatedTypes,
    load,
    save,
)
from powerinfer.hardware.gpu_rates import GpuEffort, GpuRates  # noqa: E402
from powerinfer.hybrid import resolve  # noqa: E402
from powerinfer.kernels import gpu as kernels  # noqa: E402
from powerinfer.placement.budget import gib  # noqa: E402
from powerinfer.placement.plan import PlanRequest  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.progress import silent  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.serve.served import Budget  # noqa: E402
from powerinfer.sizes import read_size  # noqa: E402
from powerinfer.system import available_memory  # noqa: E402

LITTLE = GpuEffort(1 << 17, (256, 512), (64, 64), ((64, 64), (128, 64)), 128, 3, (1, 3), 1 << 16)
ONE = EngineConfig(threads=1)
CONTEXT = 128


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def rates() -> GpuRates:
    return gpu_rates.gpu_rates("cpu", effort=LITTLE)


# ---------------------------------------------------------------- figures


def test_sane_figures(device: str) -> None:
    """Of a GPU, as it is measured for plans."""
    steps: list[tuple[str, int, int]] = []
    effort = None if device == "cuda" else LITTLE
    found = gpu_rates.gpu_rates(device, effort=effort, progress=lambda *state: steps.append(state))
    gpu = found.device
    assert set(gpu.dense_gb_s) == set(gpu.head_gb_s) == {*kernels.GPU_TYPES}
    assert set(gpu.bundle_gb_s) == set(gpu.row_ns) == set(RATED_ROWS)
    every = [*gpu.dense_gb_s.values(), *gpu.head_gb_s.values(), *gpu.bundle_gb_s.values(), gpu.kv_gb_s]
    assert all(1e-5 < rate < 20_000 for rate in every) and 0 < found.copy_gb_s < 2000
    assert all(0 <= time < 1e7 for time in (gpu.op_us, gpu.sparse_us, gpu.step_us, found.sync_us))
    assert gpu.threads == 1 and 0 <= gpu.reserved_bytes < gpu.memory_bytes
    assert ("stand-in" in gpu.name) == (gpu.reserved_bytes == 0) == (device != "cuda")
    assert [done for _, done, _ in steps] == list(range(steps[0][2])), "the progress ends where it said"


def test_figures_can_be_described(rates: GpuRates, tmp_path: Path) -> None:
    machine = dataclasses.replace(
        load("pc-low"), gpu=rates.device, sync_us=rates.sync_us, copy_gb_s=rates.copy_gb_s, host_bytes=5
    )
    save(machine, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == machine
    document = json.loads((tmp_path / "machine.json").read_text())
    for value in (-1, 1.5, "much", None):
        (tmp_path / "machine.json").write_text(json.dumps(document | {"host_bytes": value}))
        with pytest.raises(PowerInferError, match="host_bytes"):
            load(tmp_path / "machine.json")


class Clock:
    """What is measured takes the time that it sleeps, and none else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(gpu_rates, "time", own)
    return own


def work() -> Any:
    return gpu_rates._GpuSamples(torch.device("cpu"), LITTLE, silent)


def test_dense_rates_are_those_of_the_products(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products that take a known time for each byte."""
    real = kernels.linear

    def slow(w: kernels.Weight, *given: Any) -> Any:
        clock.sleep(w.nbytes / 2e7)
        return real(w, *given)

    monkeypatch.setattr(kernels, "linear", slow)
    for kind in ("F16", "Q8_0"):
        assert work().dense(kind, 0.0, 0.0) == pytest.approx(0.02)
        assert work().head(kind) == pytest.approx(0.02)


def test_fixed_times_are_those_of_a_layer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.norm

    def slow(*given: Any, **more: Any) -> Any:
        clock.sleep(0.02)  # twice in a layer, which has four operators
        return real(*given, **more)

    monkeypatch.setattr(kernels, "norm", slow)
    assert work().fixed() == (pytest.approx(10_000), pytest.approx(0, abs=1e-3))


def test_what_a_layer_pays_for_sparsity_and_for_waiting(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    neuron_sum, wait = kernels.neuron_sum, Link.wait

    def slow_sum(*given: Any) -> Any:
        clock.sleep(0.03)
        return neuron_sum(*given)

    def slow_wait(link: Link) -> Any:
        clock.sleep(0.02)
        return wait(link)

    monkeypatch.setattr(kernels, "neuron_sum", slow_sum)
    monkeypatch.setattr(Link, "wait", slow_wait)
    assert work().split(0.0, 0.0, 1e9) == pytest.approx((30_000, 20_000))


def test_kernels_are_timed_by_the_device_within_one_recording(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a launch, which may take longer than a kernel, counts for little, and the host's waiting not at all."""
    recorded: list[int] = []
    calls = [0]

    class Event:
        def record(self, stream: Any = None) -> None:
            self.at = clock.now

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (end.at - self.at)

    class Recording(ImmediateStreams):
        def event(self, *, timed: bool = False, sleeps: bool = False) -> Any:
            assert timed
            return Event()

        def finish(self) -> None:
            clock.sleep(5)

        def recorder(self) -> Any:
            def record(run: Any) -> Any:
                before = calls[0]
                run()
                recorded.append(calls[0] - before)
                return lambda: (clock.sleep(0.03), run())

            return record

    def call() -> None:
        calls[0] += 1
        clock.sleep(0.01)

    samples = work()
    samples._streams = Recording(torch.device("cpu"))
    monkeypatch.setattr(kernels, "which", lambda _: "triton")
    for number, many in ((1, 16), (3, 18), (20, 20)):
        assert samples._seconds([call] * number) == pytest.approx(0.01 + 0.03 / many)
        assert recorded.pop() == many


def test_rows_are_counted_as_they_fire() -> None:
    """Exact: a gate for every neuron, up and down of those that fire. Predicted: of those that are selected."""
    entries = list(work().rows("F16"))
    assert len(entries) == 2 * 2 * len(gpu_rates.FRACTIONS)
    for group, rows, nbytes, seconds in entries:
        assert seconds > 0 and nbytes == rows * 2 * max(group.d_model, 32)
        assert rows >= 64 if group.way == "exact" else rows <= 3 * 64
    assert {group.way for group, *_ in entries} == {"exact", "predicted"}


def test_what_libraries_take_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by another process: torch alone is tens of MB. One that cannot be asked costs a guess."""
    assert 30 << 20 < gpu_rates.host_bytes("cpu") < 4 << 30
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert gpu_rates.host_bytes("cpu") == gpu_rates._HOST_BYTES


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rates, "available_memory", lambda: 1 << 10)
    with pytest.raises(PowerInferError, match="are free; end other programs first"):
        gpu_rates.gpu_rates("cpu", effort=LITTLE)


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(kernels, "upload", full)
    with pytest.raises(PowerInferError, match="out of memory while it was measured: end other programs"):
        gpu_rates.gpu_rates("cpu", effort=LITTLE)


# ---------------------------------------------------------------- what is kept


def machine(engine: EngineConfig, **more: Any) -> description.Hardware:
    """The description of another machine, kept as if it had been measured here: with the figures of that machine's
    GPU, free of fixed times, every neuron is faster there. Of the stand-in's own that depends on the day."""
    other = load("pc-low")
    assert other.gpu is not None
    gpu = replace(other.gpu, name=gpu_rates.gpu_name("cpu"), memory_bytes=available_memory(), reserved_bytes=0)
    gpu = replace(gpu, op_us=0.0, sparse_us=0.0)
    made = replace(other, gpu=gpu, sync_us=0.0, key=measure.machine_key(engine, "cpu"), **more)
    save(made, measure.kept_at(made.key))
    return made


def test_a_gpu_is_kept_beside_the_cpu(cache: Path, rates: GpuRates, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataclasses.replace(load("pc-low"), gpu=None, sync_us=0.0, copy_gb_s=0.0, key=measure.machine_key(ONE))
    save(alone, measure.kept_at(alone.key))
    asked: list[str] = []
    monkeypatch.setattr(measure, "measure", None)  # would be called if the CPU were measured again
    monkeypatch.setattr(gpu_rates, "gpu_rates", lambda name, *_, **__: asked.append(name) or rates)
    monkeypatch.setattr(gpu_rates, "host_bytes", lambda name: 678)
    both = measure.measured(ONE, gpu="cpu")
    assert both.cpu == alone.cpu and both.gpu == rates.device and both.sync_us == rates.sync_us
    assert both.host_bytes == 678 and both.key["torch"] == torch.__version__
    assert len(list(cache.iterdir())) == 2 and measure.measured(ONE) == alone
    monkeypatch.setattr(gpu_rates, "available_memory", lambda: 12345)
    again = measure.measured(ONE, gpu="cpu")
    assert asked == ["cpu"] and again == dataclasses.replace(
        both, gpu=dataclasses.replace(rates.device, memory_bytes=12345)
    )
    for what, value in (("GPU_METHOD", 99), ("METHOD", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(measure, what, value)
            assert measure.saved_hardware(ONE, "cpu") is None
    monkeypatch.setattr(gpu_rates, "gpu_name", lambda name: "another card")
    assert measure.saved_hardware(ONE, "cpu") is None and measure.saved_hardware(ONE) == alone


def test_layers_as_a_whole_need_no_rates(cache: Path, rates: GpuRates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes alone are measured; rates once something reads them, and then the sizes stay."""
    monkeypatch.setattr(gpu_rates, "host_bytes", lambda name: 678)
    with monkeypatch.context() as patch:
        for name in ("dense", "head", "rows", "kv_gb_s", "split", "copy_gb_s"):
            patch.setattr(gpu_rates._GpuSamples, name, None)  # would be called
        patch.setattr(measure, "measure", None)
        sizes = measure.measured(ONE, gpu="cpu", types=SIZES_ALONE)
        assert sizes.host_bytes == 678 and sizes.gpu is not None and not sizes.gpu.dense_gb_s
        assert measure.measured(ONE, gpu="cpu", types=SIZES_ALONE).cpu == sizes.cpu
    assert measure.saved_hardware(ONE, "cpu") is None and measure.saved_hardware(ONE) is None
    monkeypatch.setattr(measure, "measure", lambda *_: replace(load("pc-low"), key=measure.machine_key(ONE)))
    monkeypatch.setattr(gpu_rates, "STAND_IN", LITTLE)
    monkeypatch.setattr(gpu_rates, "host_bytes", None)
    few = RatedTypes(frozenset({"F16"}))
    found = measure.measured(ONE, gpu="cpu", types=few)
    assert found.cpu == load("pc-low").cpu and found.host_bytes == 678 and {*found.gpu.dense_gb_s} == {"F16"}  # type: ignore[union-attr]
    assert measure.saved_hardware(ONE, "cpu", few) is not None and measure.saved_hardware(ONE, "cpu") is None
    with pytest.raises(PowerInferError, match=r"gpu\.dense_gb_s lacks BF16: `powerinfer measure` measures it"):
        load(measure.kept_at(found.key))


def test_types_are_measured_when_they_are_read(rates: GpuRates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before keep their rates, and fixed times are not measured again."""
    first = gpu_rates.gpu_rates("cpu", RatedTypes(frozenset({"F16"})), effort=LITTLE)
    assert {*first.device.dense_gb_s} == {*first.device.head_gb_s} == {"F16"} and not first.device.bundle_gb_s
    assert first.device.op_us > 0 and first.sync_us >= 0
    for name in ("fixed", "kv_gb_s", "split", "copy_gb_s"):
        monkeypatch.setattr(gpu_rates._GpuSamples, name, None)
    steps: list[tuple[str, int, int]] = []
    more = RatedTypes(frozenset({"Q8_0"}), frozenset({"Q4_0"}))
    both = gpu_rates.gpu_rates("cpu", more, first, LITTLE, lambda *state: steps.append(state))
    assert {*both.device.dense_gb_s} == {*both.device.head_gb_s} == {"F16", "Q8_0"}
    assert {*both.device.bundle_gb_s} == {*both.device.row_ns} == {"Q4_0"}
    assert both.device.dense_gb_s["F16"] == first.device.dense_gb_s["F16"]
    assert (both.device.op_us, both.sync_us, both.copy_gb_s) == (first.device.op_us, first.sync_us, first.copy_gb_s)
    assert [done for _, done, _ in steps] == list(range(steps[0][2])), "the progress ends where it said"


def test_what_another_process_has_measured_meanwhile_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins before the other has saved; the file has the types of both, of one disturbed only its own."""
    monkeypatch.setattr(measure, "measure", lambda *_: replace(load("pc-low"), key=measure.machine_key(ONE)))
    monkeypatch.setattr(gpu_rates, "host_bytes", lambda name: 1)
    real = gpu_rates.gpu_rates

    def slow(name: str, types: RatedTypes, *given: Any, **more: Any) -> GpuRates:
        if "F16" in types.dense:
            measure.measured(ONE, gpu="cpu", types=RatedTypes(frozenset({"Q8_0"}), frozenset({"Q4_0"})))
        return real(name, types, *given, effort=LITTLE, **more)

    monkeypatch.setattr(gpu_rates, "gpu_rates", slow)
    measure.measured(ONE, gpu="cpu", types=RatedTypes(frozenset({"F16"})))
    found = measure.saved_hardware(ONE, "cpu", RatedTypes(frozenset({"F16", "Q8_0"}), frozenset({"Q4_0"})))
    assert found is not None and found.gpu is not None and {*found.gpu.dense_gb_s} == {"F16", "Q8_0"}
    other = replace(found, gpu=replace(found.gpu, dense_gb_s={"BF16": 1.0}))
    assert {*measure.joined(other, replace(found, disturbed=1.0)).gpu.dense_gb_s} == {"BF16"}  # type: ignore[union-attr]
    assert {*measure.joined(other, found).gpu.dense_gb_s} == {"BF16", "F16", "Q8_0"}  # type: ignore[union-attr]
    assert measure.joined(other, replace(found, key={})) == other and measure.joined(other, None) == other


def test_which_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    assert measure.gpu_beside(EngineConfig(gpu="none"), said.append) is None
    assert measure.gpu_beside(EngineConfig(gpu="cpu", vram=0), said.append) is None
    assert measure.gpu_beside(EngineConfig(gpu="cpu"), said.append) == "cpu"
    monkeypatch.setattr(wanted, "DRIVERS", [tmp_path / "nothing"])
    assert measure.gpu_beside(EngineConfig(), said.append) is None and not said
    (tmp_path / "driver").touch()
    monkeypatch.setattr(wanted, "DRIVERS", [tmp_path / "driver"])
    if not torch.cuda.is_available():  # a driver, and torch that finds no GPU
        assert measure.gpu_beside(EngineConfig(), said.append) is None
        assert len(said) == 1 and "the GPU is not used: " in said[0]
        with pytest.raises(RequestError):
            measure.gpu_beside(EngineConfig(gpu="cuda"), said.append)


def test_the_command(cache: Path) -> None:
    made = machine(ONE)
    shown = powerinfer("measure", "--threads", "1", "--gpu", "cpu", "--json")
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout.splitlines()[-1])
    assert not document["measured"] and document["hardware"]["sync_us"] == made.sync_us
    assert document["hardware"]["gpu"]["dense_gb_s"] == dict(made.gpu.dense_gb_s)  # type: ignore[union-attr]
    assert "stand-in for a GPU" in shown.stderr and "synchronisation of a layer" in shown.stderr
    assert "there is no device" in error_line(powerinfer("measure", "--gpu", "tpu"), 2)


def test_torch_is_not_imported_where_there_is_no_driver(cache: Path) -> None:
    if wanted.has_driver():
        pytest.skip("there is one")
    code = (
        "import sys\nfrom powerinfer.hybrid import load, resolve\nfrom powerinfer.runtime import engine\n"
        "assert not {'powerinfer.kernels.gpu', 'powerinfer.devices.gpu'} & set(sys.modules)\n"
        "from powerinfer.config import EngineConfig\nfrom powerinfer.hardware import measure\n"
        "assert measure.gpu_beside(EngineConfig(), print) is None\n"
        "assert measure.saved_hardware(EngineConfig()) is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stderr


# ---------------------------------------------------------------- the engine on a stand-in


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return give_profile(give_bundles(tiny_llama(tmp_path / "m.gguf")))


def options(**more: Any) -> dict[str, Any]:
    return {"threads": 1, "context": CONTEXT, "prefill_chunk": 32, "max_batch": 3, "trial": False} | more


PROMPTS = [TEXT[:60], TEXT[7:30], TEXT[20:90]]
SHORT = SamplingParams(max_tokens=12, temperature=0.0)


def answers(llm: LLM) -> list[str]:
    return [answer.text for answer in llm.generate(PROMPTS, SHORT)]


def split_calls(llm: LLM) -> list[str]:
    return [llm.generate(prompt, SHORT).text for prompt in PROMPTS]


def request_of(path: Path, made: description.Hardware) -> PlanRequest:
    checkpoint = open_checkpoint(path)
    found, profile = checkpoint_model(checkpoint), open_profile(checkpoint, None)
    return PlanRequest(found, profile, made, context=CONTEXT, chunk=32, requests=3, selector="exact")


def vram_for(path: Path, made: description.Hardware, groups: int) -> int:
    """VRAM for everything but neurons, plus `groups` groups of them."""
    return request_of(path, made).vram_for(groups)


def test_the_engine_on_a_stand_in(model: Path, cache: Path) -> None:
    """The CPU's answers under every budget, and no more memory than that."""
    made = machine(EngineConfig(**options(gpu="cpu")))
    alone = LLM(model, **options(gpu="none"))
    wanted = answers(alone)
    assert any(wanted) and alone.choices["gpu"].startswith("none")
    for groups in (0, 1, 4):
        vram, ram = vram_for(model, made, groups), 400 << 20
        llm = LLM(model, **options(gpu="cpu", vram=vram, ram=ram))
        assert llm.choices["gpu"].startswith("2 layers and the head on cpu, "), llm.choices
        assert answers(llm) == wanted
        told = llm.sparsity
        assert told is not None and sum(layer["hot"] for layer in told["layers"]) == min(64 * groups, 2 * 96)
        executor, ffns = llm._executor, llm._sparsity.ffns  # type: ignore[union-attr]
        held = sum(executor.gpu.memory().values()) + sum(sum(ffn.memory().values()) for ffn in ffns)
        assert held <= vram


def test_agreement_with_all_is_that_of_the_cpu_alone(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split neurons know no dense way: what a threshold leaves out shows all the same."""
    made, text = machine(EngineConfig(**options(gpu="cpu"))), tmp_path / "text.txt"
    text.write_text(TEXT)
    place = ["--gpu", "cpu", "--vram", f"{vram_for(model, made, 1)}B", "--threads", "1", "--context", str(CONTEXT)]
    asked = ["--file", str(text), "--tokens", "20", "--selector", "threshold", "--threshold", "0.5", "--json"]
    flags = ["-m", str(model), *place, "--prefill-chunk", "32", "--max-batch", "3", *asked]
    assert main(["eval", "agreement", *flags]) == 0
    shown = capsys.readouterr()
    assert "on the GPU" in shown.err and json.loads(shown.out)["max_abs_logit_diff"] > 0.01


def test_layers_beside_a_gpu_are_predicted_too(model: Path, cache: Path) -> None:
    """With room for one layer's attention: the other layer, on the CPU, gives `predicted` of the CPU alone."""
    made, path = machine(EngineConfig(**options(gpu="cpu"))), give_predictor(model, 0.5)
    # The rounding of an F16 cache decides which neurons are selected; with this batch the CPU alone predicts every step
    # that it may.
    more = {"selector": "predicted", "kv_type": "f32", "max_batch": 32}
    alone = LLM(path, **options(gpu="none", **more))
    wanted, named = split_calls(alone), alone.sparsity["layers"][1]  # type: ignore[index]
    request = replace(request_of(path, made), selector="predicted", kv_type="f32", requests=32)
    vram = request.vram_for() - request.model.head.stored - request.model.end_vectors - 1
    llm = LLM(path, **options(gpu="cpu", vram=vram, **more))
    assert llm.choices["gpu"].startswith("1 layer on cpu, ") and split_calls(llm) == wanted
    told = llm.sparsity["layers"][1]  # type: ignore[index]
    assert (told["hot"], told["tokens"], told["gpu_share"], told["jobs"]) == (0, named["tokens"], 0, 1)
    assert told["active_fraction"] == pytest.approx(named["active_fraction"], rel=0.01)
    assert split_calls(LLM(path, **options(gpu="none"))) != wanted
    llm.clear_sparsity()
    assert llm.sparsity["layers"][1]["tokens"] == 0  # type: ignore[index]


def test_budgets_that_cannot_be_met(model: Path, cache: Path) -> None:
    """One line that says what to do; and where only the GPU is too small, the CPU does without it."""
    made = machine(EngineConfig(**options(gpu="cpu")))
    wanted = answers(LLM(model, **options(gpu="none")))
    for selector in ("auto", "all"):
        with pytest.raises(
            RequestError,
            match=r"^4KiB of VRAM hold no layer of Tiny: give --vram .* or more \(.*KV cache .*\(--gpu none\)$",
        ) as caught:
            LLM(model, **options(gpu="cpu", vram=1 << 12, selector=selector))
        enough = read_size(str(caught.value).split("--vram ")[1].split(" ")[0])
        with LLM(model, **options(gpu="cpu", vram=enough, selector=selector)) as least:
            assert least.choices["gpu"].startswith("1 layer on cpu, ") and answers(least) == wanted
        with pytest.raises(RequestError, match="hold no layer"):
            LLM(model, **options(gpu="cpu", vram=enough - (enough >> 6), selector=selector))
    vram = vram_for(model, made, 1)
    dense = sum(replace(request_of(model, made), vram=vram).claims().cpu.values())
    for more, match in (
        ({"vram": vram, "ram": dense + (1 << 14)}, r"do not fit in --vram and --ram, .* give --ram \d"),
        ({"ram": 1 << 20}, r"needs at least .* give --ram "),
        ({"vram": 1 << 49}, r"--vram .* free: give less, or end other programs on it"),
        ({"ram": 1 << 49}, r"--ram .*, but "),
        ({"ram": 60 << 20, "selector": "all"}, r"of RAM beside the 2 layers that --vram holds: give --ram \d"),
    ):
        with pytest.raises(RequestError, match=match) as caught:
            LLM(model, **options(gpu="cpu", **more))
        assert "\n" not in str(caught.value)


def test_budgets_are_checked_before_the_machine_is_measured(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measuring(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(measure, "measure_and_keep", measuring)
    bare = tiny_llama(model.with_name("bare.gguf"))
    for path in (model, bare):
        with pytest.raises(AssertionError, match="measured"):
            LLM(path, **options(gpu="cpu"))
        for more, match in (
            ({"vram": 1 << 12}, "hold no layer"),
            ({"vram": 1 << 49}, "--vram .* free: give less"),
            ({"ram": 1 << 20}, "give --ram "),
        ):
            with pytest.raises(RequestError, match=match):
                LLM(path, **options(gpu="cpu", **more))
    flags = ["-m", str(model), "--threads", "1", "--context", str(CONTEXT), "--gpu", "cpu"]
    for flag, size in (("--vram", "4KiB"), ("--vram", "500TiB"), ("--ram", "1MiB")):
        assert main(["plan", *flags, flag, size]) == 2
        assert main(["prepare", "-m", str(model), "--threads", "1", "--ram", "1MiB"]) == 2


def test_a_plan_is_what_a_run_does(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the emulated GPU, too: the same neurons, and the same least --ram."""
    made = machine(EngineConfig(**options(gpu="cpu")))
    flags = ["-m", str(model), "--threads", "1", "--context", str(CONTEXT), "--prefill-chunk", "32", "--max-batch", "3"]
    for groups in (0, 2):
        vram = vram_for(model, made, groups)
        own = [*flags, "--gpu", "cpu", "--vram", f"{vram}B"]
        assert main(["plan", *own, "--ram", "400MiB", "--json", "--dry-run"]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        with LLM(model, **options(gpu="cpu", vram=vram, ram=400 << 20)) as llm:
            hot = [layer["hot"] for layer in llm.sparsity["layers"]]  # type: ignore[index]
        assert [layer["gpu"] for layer in document["layers"]] == hot and sum(hot) == 64 * groups
        assert any("emulates" in line for line in document["assumed"])
        assert main(["plan", *own, "--ram", "1MiB"]) == 2
        said = capsys.readouterr().err
        with pytest.raises(RequestError) as caught:
            LLM(model, **options(gpu="cpu", vram=vram, ram=1 << 20))
        assert str(caught.value) in said
        ram = read_size(str(caught.value).split("--ram ")[1].split(" ")[0])
        assert main(["plan", *own, "--ram", f"{ram}B", "--json", "--dry-run"]) == 0
        helps = json.loads(capsys.readouterr().out.splitlines()[-1])["helps"]
        with pytest.raises(RequestError, match="--ram does not hold what reading them from disk takes") as caught:
            LLM(model, **options(gpu="cpu", vram=vram, ram=ram))
        everything = next(one["bytes"] for one in helps if one["flag"] == "--ram")
        assert f"give --ram {gib(everything)}" in str(caught.value)
        LLM(model, **options(gpu="cpu", vram=vram, ram=everything)).close()


def test_what_is_said_where_no_gpu_is_used(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wanted, "DRIVERS", [tmp_path / "nothing"])
    with LLM(model, **options()) as llm:
        assert llm.notes == []
    with LLM(model, **options(vram=8 << 30)) as llm:
        assert llm.notes == ["--vram is not used: there is no GPU to use (no NVIDIA driver)"]
    serve._load("m", model, EngineConfig(**options()), silent, Budget(vram=8 << 30)).close()
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", *llm.notes)]
    with pytest.raises(RequestError, match="--gpu none uses none"):
        LLM(model, **options(gpu="none", vram=8 << 30))
    (tmp_path / "driver").touch()
    monkeypatch.setattr(wanted, "DRIVERS", [tmp_path / "driver"])
    if not torch.cuda.is_available():
        with LLM(model, **options()) as llm:
            assert len(llm.notes) == 1 and llm.notes[0].startswith("the GPU is not used: ")
    monkeypatch.setattr(wanted, "lacks_torch", lambda: True)
    monkeypatch.setattr(resolve, "lacks_torch", lambda: True)
    missing = "torch is not installed: pip install '.[gpu]' in a clone of powerinfer"
    with LLM(model, **options()) as llm:
        assert llm.notes == [f"the GPU is not used: {missing}"]
    for chosen in ({"gpu": "none"}, {"vram": 0}):
        with LLM(model, **options(**chosen)) as llm:
            assert llm.notes == []


def test_a_wrong_name_of_a_gpu_is_refused_without_torch(model: Path) -> None:
    code = (
        "import sys\nfrom powerinfer import LLM, RequestError\n"
        f"try:\n    LLM({str(model)!r}, gpu='foo')\n"
        "except RequestError as error:\n    print(error, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "there is no device 'foo': choose auto, none, cuda, cuda:1, cpu, or several, as 0,1 False\n"


def test_neurons_trade_places_between_requests(model: Path, cache: Path) -> None:
    """The profile was invented, so what is hot is not on the GPU at first; the answers stay the same."""
    made = machine(EngineConfig(**options(gpu="cpu")))
    vram = vram_for(model, made, 1)
    llm = LLM(model, **options(gpu="cpu", vram=vram, ram=400 << 20, adjust=True))
    wanted = answers(LLM(model, **options(gpu="none")))
    deadline = time.monotonic() + 60
    while llm.sparsity["traded"] == 0:  # type: ignore[index]
        assert answers(llm) == wanted and time.monotonic() < deadline
    assert answers(llm) == wanted
    llm.close()
    with pytest.raises(RequestError, match="--adjust is for models whose neurons or experts are split"):
        LLM(model, **options(gpu="none", adjust=True))


def test_a_trace_of_the_engine(model: Path, cache: Path, tmp_path: Path) -> None:
    made = machine(EngineConfig(threads=1, context=CONTEXT, gpu="cpu"))
    with LLM(model, **options(gpu="cpu", vram=vram_for(model, made, 1), ram=400 << 20)) as llm:
        with llm.traced() as trace:
            wanted = answers(llm)
        assert answers(llm) == wanted and trace.summary()["steps"] > 12
    with LLM(model, **options(gpu="cpu", selector="all")) as llm:  # layers as a whole
        with llm.traced() as trace:
            answers(llm)
        assert llm.sparsity is None and {span.kind for span in trace.spans} >= {"attention", "ffn", "head", "embedding"}
    with LLM(model, **options(gpu="none")) as llm, pytest.raises(RequestError, match="nothing to trace"):
        llm.traced()
    out = tmp_path / "trace.json"
    bench = ("bench", "-m", str(model), "--prompt-tokens", "8", "--gen-tokens", "4", "--repeat", "1", "--threads", "1")
    bench = (*bench, "--context", str(CONTEXT), "--trace", str(out), "--json")
    done = powerinfer(*bench, "--gpu", "cpu")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["trace"]["path"] == str(out) and 0 < document["trace"]["overlap"] <= 1
    assert json.loads(out.read_text())["traceEvents"]
    assert "nothing to trace" in error_line(powerinfer(*bench, "--gpu", "none", "--no-trial"), 2)
