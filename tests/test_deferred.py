"""Streams, events, pinned memory and recordings on a device that works later (deferred.py).

Where every wait is in its place, the answers are those of torch's CPU device, bit for bit, whenever the streams work.
Without any one of them they are not.
"""

from __future__ import annotations

import ctypes
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import families  # noqa: E402
import test_hybrid as neurons  # noqa: E402
import test_hybrid_experts as experts  # noqa: E402
from deferred import DEFERRED, Machine, deferred  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import CUDA, torch_device, used  # noqa: E402
from sparse_models import give_bundles, tiny_llama  # noqa: E402
from test_gpu_layers import engine_of, on_gpu  # noqa: E402
from test_sparse import packed, side_by_side  # noqa: E402
from test_spread_experts import AWAITED  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer import devices, hybrid  # noqa: E402
from powerinfer.devices.batch import Batch, LogitsNeed  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor  # noqa: E402
from powerinfer.devices.flags import Flags  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.link import Link, Way  # noqa: E402
from powerinfer.devices.next_step import NextStep  # noqa: E402
from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.devices.sharing import Sharing  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.stage import _PADDING, BESIDE, Stage, buffer_bytes, expert_buffer  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid.copier import Copier, Send  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Resolved  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.kernels.candidates import drawn_token  # noqa: E402
from powerinfer.neurons import BUNDLE_GROUP  # noqa: E402
from powerinfer.placement.experts import Policy  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.text.model_text import tokenizer_of  # noqa: E402

SEEDS = range(2)
"""Each is another order in which the streams work."""

MANY = range(100)
"""For faults that show only in some orders."""

ORDERS = range(40)
"""For operations without a model, which take no time."""


# ---- The stand-in, as CUDA is described ------------------------------------------------------------------------------


def seen(run: Callable[[Machine], np.ndarray]) -> set[tuple[float, ...]]:
    """What a program gives, over all orders."""
    found = set()
    for seed in ORDERS:
        with deferred(seed) as machine:
            found.add(tuple(run(machine).tolist()))
    return found


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(DEFERRED)


def test_the_host_reads_what_has_arrived() -> None:
    def run(machine: Machine, wait: bool) -> np.ndarray:
        here, there, event = machine.pinned(2, torch.float32), on_device(3, 4), machine.event()
        there.mul_(2)
        here.copy_(there, non_blocking=True)
        event.record()
        if wait:
            event.synchronize()
        return here.numpy().copy()

    assert seen(lambda machine: run(machine, True)) == {(6, 8)}
    assert seen(lambda machine: run(machine, False)) == {(0, 0), (6, 8)}


def test_a_pinned_buffer_is_copied_as_it_is_then() -> None:
    def run(machine: Machine, pinned: bool) -> np.ndarray:
        here = machine.pinned(1, torch.float32) if pinned else torch.zeros(1)
        here[0] = 1
        there = torch.zeros(1, device=DEFERRED)
        there.copy_(here, non_blocking=True)
        here[0] = 2
        return there.cpu().numpy()

    assert seen(lambda machine: run(machine, True)) == {(1,), (2,)}
    assert seen(lambda machine: run(machine, False)) == {(1,)}, "other memory is read before the call returns"


def test_streams_wait_for_events_alone() -> None:
    def run(machine: Machine, waits: bool) -> np.ndarray:
        x, side, event = on_device(1), machine.stream(), machine.event()
        machine.finish()
        with machine.on(side):
            x.add_(1)
            event.record()
        if waits:
            machine.current().wait_event(event)
        x.mul_(10)
        machine.finish()
        return x.cpu().numpy()

    assert seen(lambda machine: run(machine, True)) == {(20,)}
    assert seen(lambda machine: run(machine, False)) == {(20,), (11,)}


def test_freed_memory_is_given_to_its_own_stream() -> None:
    """Another stream that still reads it must have been waited for."""

    def run(machine: Machine, waits: bool) -> np.ndarray:
        x, side, ready, done = on_device(1), machine.stream(), machine.event(), machine.event()
        ready.record()
        side.wait_event(ready)
        out = torch.zeros(1, device=DEFERRED)
        ready.record()
        with machine.on(side):
            side.wait_event(ready)
            out.copy_(x)
            done.record()
        del x
        if waits:
            machine.current().wait_event(done)
        torch.full((1,), 7.0, device=DEFERRED)
        machine.finish()
        return out.cpu().numpy()

    assert seen(lambda machine: run(machine, True)) == {(1,)}
    assert len(seen(lambda machine: run(machine, False))) > 1


def test_a_recording_runs_when_it_is_replayed_on_the_same_memory() -> None:
    def run(machine: Machine) -> np.ndarray:
        x, out = on_device(1, 2), []
        again = machine.recorder()(lambda: out.append(x + 1))
        machine.finish()
        before = x.cpu().numpy()
        x.mul_(5)
        again()
        first = out[0].cpu().numpy()
        x.zero_()
        again()
        return np.concatenate([before, first, out[0].cpu().numpy()])

    assert seen(run) == {(1, 2, 6, 11, 1, 1)}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("waits", ["", "sent", "computed"])
def test_a_stream_calls_the_host_in_its_order(recorded: bool, waits: str) -> None:
    """Launched or replayed. waits: a wait that is left out."""

    def run(machine: Machine) -> np.ndarray:
        here, back, x = machine.pinned(1, torch.float32), machine.pinned(1, torch.float32), on_device(1.0)
        total, beside = on_device(0.0), machine.stream()

        def compute(_: int) -> None:
            back[0] = 10 * here[0]

        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compute)

        def step() -> None:
            sent, computed = machine.event(), machine.event()
            here.copy_(x, non_blocking=True)
            sent.record()
            if waits != "sent":
                beside.wait_event(sent)
            machine.call(beside, ctypes.cast(call, ctypes.c_void_p).value, 0)
            computed.record(beside)
            if waits != "computed":
                machine.current().wait_event(computed)
            total.add_(back.to(DEFERRED, non_blocking=True))

        again = machine.recorder()(step) if recorded else step
        for _ in range(2):
            again()
            x.add_(1)
        machine.finish()
        return total.cpu().numpy()

    if recorded and waits:
        with pytest.raises(RuntimeError, match="unjoined" if waits == "computed" else "capturing"):
            seen(run)
    else:
        assert (seen(run) == {(30,)}) == (not waits)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_a_number_of_the_host(recorded: bool, waits: bool) -> None:
    """Launched or replayed; what it writes comes behind what it has done before."""

    def run(machine: Machine) -> np.ndarray:
        numbers, here, back = (machine.pinned(2, torch.int32) for _ in range(3))
        x, address = torch.ones(2, dtype=torch.int32, device=DEFERRED), machine.address(numbers)

        def step() -> None:
            here.copy_(x, non_blocking=True)
            machine.write_value(machine.current(), address, 2)
            if waits:
                machine.wait_value(machine.current(), address + 4, 2)
            x.add_(back.to(DEFERRED, non_blocking=True))

        again = machine.recorder()(step) if recorded else step
        for _ in range(2):
            numbers.zero_()
            back.zero_()
            again()
            while numbers[0] != 2:
                assert not waits or not machine.current().query()
                machine.current().query()
            back[:] = 10 * here
            numbers[1] = 2
            machine.finish()
        return x.cpu().numpy()

    assert (seen(run) == {(121, 121)}) == waits


def test_a_host_that_waits_for_a_stream_that_waits_for_it() -> None:
    with deferred(0) as machine:
        numbers = machine.pinned(1, torch.int32)
        machine.wait_value(machine.current(), machine.address(numbers), 1)
        with pytest.raises(RuntimeError, match="never happens"):
            while not machine.current().query():
                pass
        numbers[0] = 1
        machine.finish()


def test_a_recording_waits_for_nothing_outside_of_it() -> None:
    with deferred(0) as machine:
        event, x = machine.event(), on_device(1)
        event.record()
        with pytest.raises(RuntimeError, match="uncaptured"):
            machine.recorder()(lambda: machine.current().wait_event(event))
        x.add_(1)


@pytest.mark.parametrize("asks", ["item", "cpu", "nonzero", "synchronize", "upload"])
def test_a_recording_cannot_ask_the_host(asks: str) -> None:
    with deferred(0) as machine:
        x = on_device(1, 0)
        ask = {
            "item": lambda: x.sum().item(),
            "cpu": x.cpu,
            "nonzero": x.nonzero,
            "synchronize": machine.finish,
            "upload": lambda: x.copy_(torch.ones(2)),
        }[asks]
        with pytest.raises(RuntimeError, match="capturing"):
            machine.recorder()(ask)
        ask()


def test_memories_do_not_mix() -> None:
    with deferred(0):
        x = on_device(1, 2)
        for wrong in (x.numpy, lambda: x + torch.ones(2), lambda: torch.ones(2).add_(x)):
            with pytest.raises(RuntimeError):
                wrong()


# ---- Models on it ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


FEW_LAYERS = {
    name: {"num_hidden_layers": 2} for name in ("falcon-40b", "opt-post-norm", "mixtral", "gpt-oss", "deepseek-v2-lite")
} | {"smallthinker": dict(num_hidden_layers=2, rope_layout=[0, 1], sliding_window_layout=[0, 1])}
"""Settings of models whose layers are alike, or of two kinds in turn."""


@functools.cache
def saved(name: str, folder: Path) -> Path:
    """A random model of a case, with bundles beside it where it has no experts."""
    own = folder / name
    own.mkdir()
    if name == "tiny":
        return give_bundles(tiny_llama(own / "tiny.gguf"))
    few: dict[str, Any] = FEW_LAYERS.get(name, {})
    if name in experts.NAMES or name in dict(experts.LATENT):
        return Truth(case_named(name), **few).save("gguf", own)
    return packed(Truth(case_named(name), half=True, **few), own)


def answers(
    executor: Any, ffns: Sequence[Any], swaps: bool = False, way: Way = "flags", copies: bool = False
) -> list[np.ndarray]:
    """Of a prompt, decoding and a batch, first without recordings, then with them, and traced. way: in which both
    devices exchange in recordings, or the next one that they can; copies: nothing is written in place."""
    if executor.gpu.link is not None:
        assert executor.gpu.link.sent(1) is not None
        executor.gpu.link.copy("it was asked for") if copies else None
    tokens = np.random.default_rng(5).integers(0, executor.vocab_size, 51).astype(np.int32)
    pages = families.scattered_pages(executor, 2)
    found = [families.run_chunks(executor, tokens[:43], [40, 1, 2], pages[0])]
    found.append(executor.hidden_states(np.array([1, 0], np.int32)).copy())
    executor.gpu.record(recorder_of(executor.gpu.device), way)
    found.append(families.run_chunks(executor, tokens, [44, 1, 1, 1, 2, 2], pages[1]))
    found += side_by_side(executor, [tokens[:4], tokens[4:8]])
    with executor.traced():
        found += side_by_side(executor, [tokens[:4], tokens[4:8]])
    if swaps:
        for ffn in ffns:
            if isinstance(ffn, HybridFfn):
                ffn.place(np.sort(np.concatenate([ffn.hot[1:], ffn.cold[:1]])).astype(np.int32))
            else:
                ffn.swap(ffn.hot[:1], ffn.cold[:1])
        found += side_by_side(executor, [tokens[:4], tokens[4:8]])
    return found


def whole_layers(name: str, folder: Path) -> list[np.ndarray]:
    """All but the last. A step before them is broken off after the first products."""
    checkpoint, launched = open_checkpoint(saved(name, folder)), []
    resolved = Resolved(checkpoint, engine_of(), **on_gpu(checkpoint.config.n_layers - 1))
    executor, linear = load_split(resolved), gpu.linear

    def failing(*given: Any) -> torch.Tensor:
        launched.append(given)
        if len(launched) > 1:
            raise torch.OutOfMemoryError("no room")
        return linear(*given)

    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerInferError, match="ran out of memory"):
            patch.setattr(gpu, "linear", failing)
            families.run_chunks(executor, np.arange(33, dtype=np.int32), [33], families.scattered_pages(executor, 2)[1])
        return answers(executor, ())
    finally:
        executor.close()


def launched_ahead(name: str, folder: Path, way: Way = "flags", drawn: bool = False) -> list[np.ndarray]:
    """The whole model, of experts some, and of neurons half of them, on the GPU, which launches steps before their
    tokens are known where the device can. drawn: the tokens are drawn out of candidates."""
    path = saved(name, folder)
    checkpoint = open_checkpoint(path)
    run = decoded_by_draws if drawn else decoded
    if name == "tiny":
        with neurons.split(path, 0.5) as (executor, _):
            return run(executor, way)
    parts = ExpertSplit(experts.some(checkpoint.config, 0.5)) if checkpoint.config.experts else None
    executor = load_split(Resolved(checkpoint, engine_of(), **on_gpu(checkpoint.config.n_layers, head=True)), parts)
    try:
        return run(executor, way)
    finally:
        executor.close()


def decoded(executor: Any, way: Way) -> list[np.ndarray]:
    """Tokens of two sequences, with a step in between that nobody asks for, and then logits."""
    executor.gpu.record(recorder_of(executor.gpu.device), way)
    table, rows = families.scattered_pages(executor, 2), np.arange(2, dtype=np.int32)
    text = np.random.default_rng(5).integers(0, executor.vocab_size, 36).astype(np.int32)
    ahead, found = list[bool](), list[np.ndarray]()
    for pages in table:
        families.run_chunks(executor, text, [36], pages)
    position, tokens = 36, np.array([3, 4], np.int32)
    for steps in (5, 4, 1):
        batch: Batch | None = None
        for _ in range(steps):
            if batch is None:
                batch = Batch(tokens, np.full(2, position, np.int32), rows, table, rows, needs=LogitsNeed.LARGEST)
            launched: list[Batch] = []
            following = replace(batch, tokens=np.zeros(2, np.int32), positions=batch.positions + np.int32(1))
            batch.successor = lambda one=following, launched=launched: launched.append(one) or one
            tokens = executor.forward(batch).copy()
            found.append(tokens)
            ahead.append(bool(launched))
            batch = following if launched else None
            position += 1
    assert ahead == [False] + [torch_device() == DEFERRED] * 9
    executor.drop_successor()
    assert executor.gpu.next_step is None or executor.gpu.next_step._run is None, "its recording may be dropped"
    found.append(executor.forward(Batch(tokens, np.full(2, position, np.int32), rows, table, rows)).copy())
    return found


def decoded_by_draws(executor: Any, way: Way) -> list[np.ndarray]:
    """Tokens of two sequences, one sampled and one greedy. Of every fourth step candidates do not suffice: the step
    that was launched behind it is void, and the logits of its own are asked for. Another one nobody asks for."""
    executor.gpu.record(recorder_of(executor.gpu.device), way)
    table, rows = families.scattered_pages(executor, 2), np.arange(2, dtype=np.int32)
    rng = np.random.default_rng(5)
    text = rng.integers(0, executor.vocab_size, 36).astype(np.int32)
    for pages in table:
        families.run_chunks(executor, text, [36], pages)
    tokens, found, ahead = np.array([3, 4], np.int32), list[np.ndarray](), list[bool]()
    batch: Batch | None = None
    for step in range(12):
        if batch is None:
            positions, cold = np.full(2, 36 + step, np.int32), np.full(2, 1 / 0.7, np.float32)
            batch = Batch(tokens, positions, rows, table, rows, needs=LogitsNeed.CANDIDATES, inverse_temperatures=cold)
        wide = step % 4 == 3
        limits = (0.0, 1.0) if wide else (40.0, 0.9)
        draws = np.array([(0.7, *limits, 0.0, rng.random()), (0.0, 0.0, 1.0, 0.0, 0.0)])
        following = replace(batch, tokens=np.full(2, -1, np.int32), positions=batch.positions + np.int32(1))
        following.draws = draws
        launched: list[Batch] = []
        batch.successor = lambda one=following, launched=launched: launched.append(one) or one
        result = executor.forward(batch).copy()
        ahead.append(bool(launched))
        if result.dtype.names:
            assert wide or not launched, "the native module draws what it can"
            result = np.array(list(map(drawn_token, result, map(tuple, draws.tolist()))), np.int32)
        found.append(result)
        if wide:
            assert result[0] == -1 < result[1] and batch.logits is not None
            found.append(batch.logits().copy())
            result = found[-1].argmax(axis=1).astype(np.int32)
        assert not launched or (following.tokens == result).all() != wide
        tokens, batch = result, following if launched and not wide and step != 5 else None
    assert ahead == [False] + [torch_device() == DEFERRED] * 11
    executor.drop_successor()
    found.append(executor.forward(Batch(tokens, np.full(2, 48, np.int32), rows, table, rows)).copy())
    return found


def layers_that_stream(name: str, folder: Path) -> list[np.ndarray]:
    """All but the first, in steps of many tokens: of two pages, and of more than there are buffers."""
    checkpoint, stage = open_checkpoint(saved(name, folder)), Stage(torch_device(), 1 << 14)
    resolved = Resolved(checkpoint, engine_of(), **on_gpu(1))
    executor = load_split(resolved, stage=stage)
    stage.least = 33
    tokens = np.random.default_rng(5).integers(0, executor.vocab_size, 75).astype(np.int32)
    try:
        found = families.run_chunks(executor, tokens, [70, 5], families.scattered_pages(executor, 1)[0])
        return [found, *answers(executor, ())]
    finally:
        executor.close()


def of_neurons(
    name: str,
    folder: Path,
    *,
    predicted: bool = False,
    streams: bool = False,
    swaps: bool = False,
    way: Way = "flags",
    copies: bool = False,
) -> list[np.ndarray]:
    path = saved(name, folder)
    config = open_checkpoint(path).config
    stage = None
    if streams:
        layout = open_bundles(open_checkpoint(path), None, cpu.bundle_row_bytes).layouts[0]
        a_group = layout.group_bytes + BUNDLE_GROUP * BESIDE + _PADDING
        stage = Stage(torch_device(), buffer_bytes(layout, config.widest_ffn, a_group))
        stage.least = 33
    predictors = neurons.predictor_of(config) if predicted else None
    with neurons.split(path, 0.5, predictors=predictors, stage=stage) as (executor, ffns):
        return answers(executor, ffns, swaps, way, copies)


def of_neurons_after_a_failure(folder: Path) -> list[np.ndarray]:
    """A step is broken off in its last layer, with the CPU's parts of all layers under way. Nothing is launched ahead,
    so that all descriptions of steps are uploaded from one place."""
    path, plain, failed = saved("tiny", folder), HybridFfn._add_hot, []

    def failing(ffn: HybridFfn, step: Any) -> None:
        if ffn is ffns[-1] and not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("no room")
        plain(ffn, step)

    with ExitStack() as opened:
        opened.enter_context(pytest.MonkeyPatch.context()).setattr(SplitExecutor, "_launch_ahead", lambda _: None)
        executor, ffns = opened.enter_context(neurons.split(path, 0.5))
        executor.gpu.record(recorder_of(executor.gpu.device))
        pages = families.scattered_pages(executor, 2)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerInferError, match="ran out of memory"):
            patch.setattr(HybridFfn, "_add_hot", failing)
            families.run_chunks(executor, np.arange(2, dtype=np.int32), [2], pages[1])
        # Numbers of three tokens' residual stream lie where the description of two was.
        three = families.run_chunks(executor, np.arange(3, dtype=np.int32), [3], pages[0])
        return [three, *answers(executor, ffns)]


def of_experts(
    name: str,
    folder: Path,
    *,
    streams: bool = False,
    shares: bool = False,
    policy: str | None = None,
    swaps: bool = False,
    way: Way = "flags",
    copies: bool = False,
) -> list[np.ndarray]:
    path = saved(name, folder)
    checkpoint = open_checkpoint(path)
    config, stage = checkpoint.config, None
    copier = None if policy is None else Copier(experts.policy_of(path, policy))
    if streams:
        about = next(iter(config.experts.values()))
        stage = Stage(torch_device(), expert_buffer([4 * about.size * config.d_model] * len(about.matrices), 2))
        stage.least, stage.sharing = 33, Sharing(33, 1 << 20, 1.0, 0.3, 0.01) if shares else None
    parts = ExpertSplit(experts.some(config, 0.0 if shares else 0.5), swaps, stage, copier)
    resolved = Resolved(checkpoint, engine_of(), **on_gpu(config.n_layers, head=True))
    executor = load_split(resolved, parts)
    try:
        return answers(executor, parts.ffns, swaps, way, copies)
    finally:
        executor.close()


def of_a_stage(folder: Path) -> list[np.ndarray]:
    """A stage gets memory that was just freed."""
    used = torch.ones(1 << 12, device=torch_device())
    total, size = used.sum(), used.nbytes
    del used
    with Stage(torch_device(), size).sent([np.full(size, 7, np.uint8)]) as (part,):
        assert part is not None
        found = part.cpu()
    return [total.cpu().numpy(), found.numpy()]


Scene = Callable[[Path], list[np.ndarray]]

SCENES: dict[str, Scene] = {
    "whole layers": functools.partial(whole_layers, "tiny"),
    "a whole model, launched ahead": functools.partial(launched_ahead, "qwen3"),
    "neurons, launched ahead": functools.partial(launched_ahead, "tiny"),
    "a whole model, drawn and launched ahead": functools.partial(launched_ahead, "qwen3", drawn=True),
    "neurons, drawn and launched ahead": functools.partial(launched_ahead, "tiny", drawn=True),
    "experts, launched ahead, by functions": functools.partial(launched_ahead, "mixtral", way="calls"),
    "layers that stream": functools.partial(layers_that_stream, "qwen3"),
    "layers whose FFNs stream": functools.partial(layers_that_stream, "qwen35"),
    "neurons": functools.partial(of_neurons, "tiny"),
    "predicted neurons, which are swapped": functools.partial(of_neurons, "tiny", predicted=True, swaps=True),
    "neurons, after a step that failed": of_neurons_after_a_failure,
    "neurons beside attention, by functions": functools.partial(
        of_neurons, "falcon-40b", predicted=True, way="calls"
    ),
    "neurons beside attention": functools.partial(of_neurons, "falcon-40b", predicted=True),
    "neurons beside attention, by copies": functools.partial(of_neurons, "falcon-40b", predicted=True, copies=True),
    "neurons whose sum is normalised": functools.partial(of_neurons, "opt-post-norm"),
    "neurons that stream": functools.partial(of_neurons, "tiny", streams=True),
    "memory that was in use": of_a_stage,
    "experts, which are swapped": functools.partial(of_experts, "mixtral", swaps=True),
    "experts selected before attention": functools.partial(of_experts, "smallthinker"),
    "experts selected before attention, by functions": functools.partial(of_experts, "smallthinker", way="calls"),
    "experts selected before attention, by copies": functools.partial(of_experts, "smallthinker", copies=True),
    "experts that stream": functools.partial(of_experts, "qwen2-moe", streams=True),
    "experts that stream, but for the rarest": functools.partial(of_experts, "mixtral", streams=True, shares=True),
    "experts that a policy exchanges": functools.partial(of_experts, "gpt-oss", policy="lru"),
    "latents": functools.partial(of_experts, "deepseek-v2-lite"),
    "states": functools.partial(of_experts, "qwen35-moe"),
}


@functools.cache
def expected(name: str, folder: Path) -> list[np.ndarray]:
    return SCENES[name](folder)


@pytest.mark.parametrize("name", ["neurons beside attention", "experts selected before attention"])
def test_what_is_written_in_place_is_what_was_copied(name: str, folder: Path) -> None:
    for one, other in zip(expected(name, folder), expected(f"{name}, by copies", folder), strict=True):
        np.testing.assert_array_equal(one, other)


@functools.cache
def deferred_answers(name: str, folder: Path, seed: int) -> list[np.ndarray]:
    with deferred(seed):
        return SCENES[name](folder)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCENES)
def test_every_order_gives_the_same_bits(name: str, seed: int, folder: Path) -> None:
    for one, other in zip(deferred_answers(name, folder, seed), expected(name, folder), strict=True):
        np.testing.assert_array_equal(one, other)


def answers_of_an_engine(path: Path) -> tuple[list[Any], int]:
    """Of requests that end at different times, two at a time, by tokens and strings, one of them sampled; then of one
    that goes on with an answer. And how many steps were launched ahead."""
    settings = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True}
    launched, launch = list[bool](), NextStep.go_on
    with neurons.split(path, 0.5, max_batch=2) as (executor, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextStep, "go_on", lambda *given: launched.append(launch(*given)) or launched[-1])
        executor.gpu.record(recorder_of(executor.gpu.device))
        checkpoint, engine = open_checkpoint(path), engine_of(max_batch=2)
        with LLM.from_parts(executor, tokenizer_of(checkpoint), checkpoint.config, engine) as llm:
            prompts = [[5, 6, 7], [9] * 40, [11, 3]]
            found = llm.generate(prompts, SamplingParams(**settings))
            sampled = {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 3}
            stops = {"stop_token_ids": found[0].token_ids[6:7]}
            params = [SamplingParams(**(settings | one)) for one in (stops, sampled, {})]
            found += llm.generate(prompts, params)
            found += llm.generate([prompts[1] + found[1].token_ids], params[:1])
            stats = llm.stats()
            assert (stats.running, stats.used_pages) == (0, 0)
    answers = [(one.token_ids, one.text, one.finish_reason, one.cached_tokens) for one in found]
    return answers, sum(launched)


def test_an_engine_on_a_device_that_works_later(folder: Path) -> None:
    wanted, none = answers_of_an_engine(saved("tiny", folder))
    assert not none and {answer[2] for answer in wanted} == {"stop", "length"} and wanted[-1][3] > 0
    for seed in SEEDS[:2]:
        with deferred(seed):
            found, ahead = answers_of_an_engine(saved("tiny", folder))
        assert found == wanted and ahead > 20


def test_rows_that_cannot_be_looked_up(folder: Path) -> None:
    """The step that waits for them is broken off, with the CPU's part in it, and the next ones are right."""

    def failing(*_: Any) -> bool:
        raise PowerInferError("no such row")

    with deferred(1), neurons.split(saved("tiny", folder), 0.5) as (executor, _):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerInferError, match="no such row"):
            patch.setattr(CpuExecutor, "answer_tokens", failing)
            decoded(executor, "flags")
        found = decoded(executor, "flags")
    for one, other in zip(found, expected("neurons, launched ahead", folder), strict=True):
        np.testing.assert_array_equal(one, other)


def test_where_flags_are_refused_nothing_is_launched_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuLayers, "records", True)
    told = {None: "ahead of the tokens (", "CUDA error 801": "when the tokens are known (CUDA error 801)"}
    for refused, text in told.items():
        monkeypatch.setattr(Flags, "trial", lambda *_, refused=refused, **_options: refused)
        with deferred(1), neurons.split(saved("tiny", folder), 0.5) as (executor, _):
            assert (executor.gpu.next_step is None) == (refused is not None)
            executor.gpu.record(recorder_of(executor.gpu.device))
            executor.tell_launches()
            assert executor.choices.texts()["launches"].startswith(text)
            executor.gpu.observer, exchanged = object(), "experts are exchanged between steps"  # type: ignore[assignment]
            executor.tell_launches()
            assert executor.choices.texts()["launches"] == f"when the tokens are known ({refused or exchanged})"
            executor.gpu.observer, waits = None, "the host waits for the GPU within a step"
            executor.gpu.exchange("waits", "")
            executor.tell_launches()
            assert executor.choices.texts()["launches"] == f"when the tokens are known ({refused or waits})"


def test_a_trial_of_recordings_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed in every order, and where the device does not wait, or writes too early, it fails in some."""
    monkeypatch.setattr(Flags, "trial", lambda *_, **_options: None)

    def told(seed: int, without: str | None = None) -> str | None:
        with deferred(seed, without=without) as machine:
            nothing: Any = None
            return NextStep(machine, nothing, nothing, nothing).trial(DEFERRED)

    assert not any(told(seed) for seed in ORDERS)
    for line, reason in {
        "self._streams.wait_value(self._stream, self._answered, self._number)": "does not wait for its turn",
        "self._streams.write_value(self._stream, self._asked, self._number)": "never happens",
    }.items():
        assert any(reason in (told(seed, line) or "") for seed in ORDERS)


@pytest.mark.skipif(not CUDA, reason="a GPU is needed")
def test_an_engine_on_a_gpu(folder: Path) -> None:
    with used("cuda"):
        found, ahead = answers_of_an_engine(saved("tiny", folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NextStep, "start", lambda *_: False)
            wanted, none = answers_of_an_engine(saved("tiny", folder))
    assert found == wanted and ahead > 20 and not none


@pytest.mark.skipif(CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.parametrize("fused", [False, True])
def test_the_kernels_of_a_gpu(fused: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, each of them a launch; steps are recorded and replayed as on CUDA."""
    path = saved("tiny", folder)

    def run() -> np.ndarray:
        with neurons.split(path, 0.5, predictors=neurons.predictor_of(open_checkpoint(path).config)) as (
            executor,
            ffns,
        ):
            for ffn in ffns:
                ffn.fuse(fused)
            tokens = np.random.default_rng(5).integers(0, executor.vocab_size, 3).astype(np.int32)
            return families.run_chunks(executor, tokens, [1] * 3, families.scattered_pages(executor, 1)[0])

    monkeypatch.setattr(gpu, "_forced", [True])
    right = run()
    with deferred(1) as machine:
        np.testing.assert_array_equal(run(), right)
    assert machine.replays > 2


# ---- What would be wrong without a wait ------------------------------------------------------------------------------

BY_FUNCTIONS = (
    "neurons beside attention, by functions",
    "experts selected before attention, by functions",
)

# Lines that several scenes go through have two of them each, in turn: the line is the same in all.
OF_SEVERAL = {
    "ready.record(self._streams.current())",
    "self._streams.current().wait_event(passed.ready)",
    *(line for line, _ in AWAITED),
}
"""Between two GPUs: test_several_gpus.py and test_spread_experts.py leave them out."""

LEFT_OUT = {
    # link.py: the CPU's input, and a selection before it
    "self._came.record()": ("neurons", "experts, which are swapped"),
    "self._came.synchronize()": ("neurons beside attention", "experts, which are swapped"),
    "self._selection_known.record()": ("experts selected before attention",),
    "self._selection_known.synchronize()": ("experts selected before attention",),
    "sent.record()": BY_FUNCTIONS,
    "self._beside.wait_event(sent)": BY_FUNCTIONS,
    "self._computed.record(self._beside)": BY_FUNCTIONS,
    "self._streams.current().wait_event(self._computed)": BY_FUNCTIONS,
    # flags.py: the same in a recording
    "self._streams.write_value(self._streams.current(), self._asked, number)": ("neurons",),
    "self._streams.wait_value(self._streams.current(), self._answered, number)": (
        "neurons beside attention",
        "experts selected before attention",
    ),
    # next_step.py: the same between two recordings
    "self._streams.write_value(self._stream, self._asked, self._number)": ("a whole model, launched ahead",),
    "self._streams.wait_value(self._stream, self._answered, self._number)": ("a whole model, launched ahead",),
    # gpu.py: a step that was broken off
    "self._streams.finish()": ("whole layers", "neurons, after a step that failed"),
    # step_buffers.py: the result of a step
    "self._done.record()": ("neurons",),
    "self._done.synchronize()": ("neurons", "whole layers"),
    # stage.py: buffers that are filled, copied and summed in turn
    "event.record(self._streams.current())": ("memory that was in use",),
    "self._copied[slot].synchronize()": ("neurons that stream", "layers that stream"),
    "self._side.wait_event(self._summed[slot])": ("experts that stream", "layers that stream"),
    "self._copied[slot].record(self._side)": ("neurons that stream", "experts that stream"),
    "main.wait_event(self._copied[slot])": ("neurons that stream", "layers that stream"),
    "self._summed[slot].record(main)": ("experts that stream", "layers that stream"),
    # passed_cache.py: pages that come back
    "self._came[slot].record()": ("layers that stream",),
    "self._came[slot].synchronize()": ("layers that stream",),
    # copier.py: experts that are exchanged beside steps
    "self._read.synchronize()": ("experts that a policy exchanges",),
    "self._read.record(self._streams.current())": ("experts that a policy exchanges",),
    "done.record(side)": ("experts that a policy exchanges",),
    "self._streams.current().wait_event(done)": ("experts that a policy exchanges",),
}
"""By line of source: what is wrong without it."""

CALLS = re.compile(
    r"^ +([^#\n]+\.(?:record|synchronize|wait_\w+|write_value)\(.*?\)|self\._streams\.finish\(\))(?:  #.*)?$",
    re.MULTILINE,
)


def closed_stage(machine: Machine, memory: np.ndarray, copies: int) -> None:
    """A stage that has memory registered, copies it so many times, and is closed at once."""
    stage = Stage(torch_device(), 1 << 17)
    stage.registered.note(memory)
    stage.registered.register()
    assert machine.registered
    for _ in range(copies):
        with stage.sent([memory]):
            pass
    stage.close()


def test_memory_is_registered_until_its_copies_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not longer: a stage that follows may register it, whether or not anything was copied."""
    monkeypatch.setattr("powerinfer.devices.registered.LEAST_BYTES", 1 << 12)
    memory = np.arange(3 << 14, dtype=np.int64).view(np.uint8)[: 1 << 16]
    for seed in SEEDS:
        with deferred(seed) as machine:
            for copies in (0, 2, 0):
                closed_stage(machine, memory, copies)
                assert not machine.registered
    seen = 0
    for seed in MANY:
        with deferred(seed, without="self._streams.finish()") as machine, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            closed_stage(machine, memory, 2)
            seen += bool(told) and "unregistered" in str(told[0].message)
            machine.registered.clear()
    assert seen, "nothing was under way"


class OneSlot:
    """A layer of one slot, for which `Copier` copies by operations of the device. whole: a copy has ended there."""

    layer, expert_bytes, sent_bytes, whole = 0, 1, 0, False

    def __init__(self, machine: Machine) -> None:
        self.tally, self.in_slot = np.zeros(5, np.int64), [-1]
        self._machine = machine

    def vacate(self, slot: int) -> None:
        self.in_slot[slot] = -1

    def write(self, slot: int, expert: int, send: Send) -> None:
        self._machine.launch(lambda: setattr(self, "whole", True))

    def occupy(self, slot: int, expert: int) -> None:
        self.in_slot[slot] = expert


def closed_copier(machine: Machine) -> bool:
    """Whether a copy has ended once a copier that began it is closed."""
    copier, layer = Copier(Policy("lru", {0: 1}, {0: 4})), OneSlot(machine)
    copier.use(torch_device(), None)
    copier.table(0)
    copier.add(layer)
    layer.tally[2] += 1
    copier.end(1)
    copier.close()
    return layer.whole


def test_a_copier_that_is_closed_waits_for_the_device() -> None:
    for seed in MANY:
        with deferred(seed) as machine:
            assert closed_copier(machine)
    whole = []
    for seed in MANY:
        with deferred(seed, without="self._streams.finish()") as machine:
            whole.append(closed_copier(machine))
    assert not all(whole), "nothing was under way"


def test_every_line_that_waits_is_there() -> None:
    """And every one that says for what. Those of traces are for times alone."""
    found: set[str] = set()
    for room in (devices, hybrid):
        for file in Path(room.__path__[0]).glob("*.py"):
            text = file.read_text()
            if "powerinfer.devices.streams import" in text and file.name != "trace.py":
                found |= set(CALLS.findall(text))
    assert found - OF_SEVERAL == set(LEFT_OUT)


def is_seen(line: str, name: str, folder: Path, seed: int) -> bool:
    try:
        with pytest.MonkeyPatch.context() as patch, deferred(seed, without=line):
            # Trials would see some of them, and do without.
            patch.setattr(Link, "try_call", lambda _: None)
            patch.setattr(Flags, "trial", lambda *_, **_options: None)
            patch.setattr(NextStep, "trial", lambda *_: None)
            found = SCENES[name](folder)
    except (IndexError, RuntimeError, PowerInferError):  # of numbers that are no indices, and of recordings
        return True
    return not all(np.array_equal(one, other) for one, other in zip(found, expected(name, folder), strict=True))


@pytest.mark.sampled("line")
@pytest.mark.parametrize(("line", "name"), [(line, name) for line, names in LEFT_OUT.items() for name in names])
def test_a_line_that_is_left_out_is_seen(line: str, name: str, folder: Path) -> None:
    """In some order, in which the answer is right otherwise."""
    seed = next((seed for seed in MANY if is_seen(line, name, folder, seed)), None)
    assert seed is not None, "the answer is right in every order"
    for one, other in zip(deferred_answers(name, folder, seed), expected(name, folder), strict=True):
        np.testing.assert_array_equal(one, other)
