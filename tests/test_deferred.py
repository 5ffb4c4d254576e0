"""Streams, events, pinned memory and recordings on a device that works later (deferred.py).

Where every wait is in its place, the answers are those of torch's CPU device, bit for bit, whenever the streams work.
Without any one of them they are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import test_architectures as families  # noqa: E402
import test_hybrid as neurons  # noqa: E402
import test_hybrid_experts as experts  # noqa: E402
from deferred import DEFERRED, Machine, deferred  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from sparse_models import give_bundles, tiny_llama  # noqa: E402
from test_gpu_layers import engine_of  # noqa: E402
from test_sparse import case_named, model_of, packed, side_by_side  # noqa: E402

from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.devices.stage import _PADDING, BESIDE, Stage, buffer_bytes, expert_buffer  # noqa: E402
from powerinfer.devices.streams import streams_of  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid.experts import Copier, ExpertSplit  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolve import Resolved  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.neurons import BUNDLE_GROUP  # noqa: E402

SEEDS = range(3)
"""Each is another order in which the streams work."""

MANY = range(40)
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

Breaks = Callable[[Any, "Stage | None", "Copier | None"], None]
"""Takes a wait away from an executor, its stage or its copier."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def saved(name: str, folder: Path) -> Path:
    """A random model of a case, with bundles beside it where it has no experts."""
    own = folder / name
    own.mkdir()
    if name == "tiny":
        return give_bundles(tiny_llama(own / "tiny.gguf"))
    if name in experts.NAMES or name in dict(experts.LATENT):
        case = experts.case_named(name)
        config = case.config()
        return families.save(case, config, families.random_model(case, config, 11), "gguf", own)
    case = case_named(name)
    return packed(case, *model_of(case), own)


def answers(executor: Any, ffns: Sequence[Any], swaps: bool = False) -> list[np.ndarray]:
    """Of a prompt, decoding and a batch, first without recordings, then with them, and traced."""
    tokens = np.random.default_rng(5).integers(0, executor.vocab_size, 52).astype(np.int32)
    pages = families.scattered_pages(executor, 2)
    found = [families.run_chunks(executor, tokens[:44], [40, 1, 1, 2], pages[0])]
    found.append(executor.hidden_states(np.array([1, 0], np.int32)).copy())
    executor.gpu.record(recorder_of(executor.gpu.device))
    found.append(families.run_chunks(executor, tokens, [44, 1, 1, 1, 1, 2, 2], pages[1]))
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


def whole_layers(name: str, folder: Path, breaks: Breaks | None = None) -> list[np.ndarray]:
    """All but the last. A step before them is broken off after the first products."""
    checkpoint, launched = open_checkpoint(saved(name, folder)), []
    resolved = Resolved(
        checkpoint, engine_of(), gpu=device_name(), gpu_layers=checkpoint.config.n_layers - 1, gpu_head=False
    )
    executor, linear = load_split(resolved), gpu.linear

    def failing(*given: Any) -> torch.Tensor:
        launched.append(given)
        if len(launched) > 1:
            raise torch.OutOfMemoryError("no room")
        return linear(*given)

    try:
        if breaks is not None:
            breaks(executor, None, None)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerInferError, match="ran out of memory"):
            patch.setattr(gpu, "linear", failing)
            families.run_chunks(executor, np.arange(30, dtype=np.int32), [30], families.scattered_pages(executor, 2)[1])
        return answers(executor, ())
    finally:
        executor.close()


def of_neurons(
    name: str,
    folder: Path,
    breaks: Breaks | None = None,
    *,
    predicted: bool = False,
    streams: bool = False,
    swaps: bool = False,
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
        if breaks is not None:
            breaks(executor, stage, None)
        return answers(executor, ffns, swaps)


def of_experts(
    name: str,
    folder: Path,
    breaks: Breaks | None = None,
    *,
    streams: bool = False,
    policy: str | None = None,
    swaps: bool = False,
) -> list[np.ndarray]:
    path = saved(name, folder)
    checkpoint = open_checkpoint(path)
    config, stage = checkpoint.config, None
    copier = None if policy is None else Copier(experts.policy_of(path, policy))
    if streams:
        about = next(iter(config.experts.values()))
        stage = Stage(torch_device(), expert_buffer([4 * about.size * config.d_model] * len(about.matrices), 2))
        stage.least = 33
    parts = ExpertSplit(experts.some(config, 0.5), swaps, stage, copier)
    resolved = Resolved(checkpoint, engine_of(), gpu=device_name(), gpu_layers=config.n_layers, gpu_head=True)
    executor = load_split(resolved, parts)
    try:
        if breaks is not None:
            breaks(executor, stage, copier)
        return answers(executor, parts.ffns, swaps)
    finally:
        executor.close()


Scene = Callable[..., list[np.ndarray]]

SCENES: dict[str, Scene] = {
    "whole layers": functools.partial(whole_layers, "tiny"),
    "neurons": functools.partial(of_neurons, "tiny"),
    "predicted neurons, which are swapped": functools.partial(of_neurons, "tiny", predicted=True, swaps=True),
    "neurons beside attention": functools.partial(of_neurons, "falcon-40b", predicted=True),
    "neurons whose sum is normalised": functools.partial(of_neurons, "opt-post-norm"),
    "neurons that stream": functools.partial(of_neurons, "tiny", streams=True),
    "experts, which are swapped": functools.partial(of_experts, "mixtral", swaps=True),
    "experts selected before attention": functools.partial(of_experts, "smallthinker"),
    "experts that stream": functools.partial(of_experts, "qwen2-moe", streams=True),
    "experts that a policy exchanges": functools.partial(of_experts, "gpt-oss", policy="lru"),
    "latents": functools.partial(of_experts, "deepseek-v2-lite"),
    "states": functools.partial(of_experts, "qwen35-moe"),
}


@functools.cache
def expected(name: str, folder: Path) -> list[np.ndarray]:
    return SCENES[name](folder)


@pytest.mark.parametrize("name", SCENES)
def test_every_order_gives_the_same_bits(name: str, folder: Path) -> None:
    for seed in SEEDS:
        with deferred(seed):
            found = SCENES[name](folder)
        for one, other in zip(found, expected(name, folder), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_kernels_of_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, each of them a launch; steps are recorded and replayed as on CUDA."""
    path = saved("tiny", folder)

    def run() -> np.ndarray:
        with neurons.split(path, 0.5, predictors=neurons.predictor_of(open_checkpoint(path).config)) as (executor, _):
            tokens = np.random.default_rng(5).integers(0, executor.vocab_size, 3).astype(np.int32)
            return families.run_chunks(executor, tokens, [1] * 3, families.scattered_pages(executor, 1)[0])

    monkeypatch.setattr(gpu, "_forced", [True])
    right = run()
    with deferred(1) as machine:
        np.testing.assert_array_equal(run(), right)
    assert machine.replays > 2


# ---- What would be wrong without a wait ------------------------------------------------------------------------------


def nothing(*_: Any) -> None:
    pass


def without(path: str) -> Breaks:
    """An attribute of the executor's GPU layers that does nothing when it is called."""

    def breaks(executor: Any, stage: Stage | None, copier: Copier | None) -> None:
        *owners, last = path.split(".")
        owner = functools.reduce(getattr, owners, executor.gpu)
        setattr(owner, last, nothing)

    return breaks


def without_all(name: str, method: str) -> Breaks:
    """The same of events of the stage, or of its stream."""

    def breaks(executor: Any, stage: Stage | None, copier: Copier | None) -> None:
        owners = getattr(stage, name)
        for owner in owners if isinstance(owners, list) else [owners]:
            setattr(owner, method, nothing)

    return breaks


def main_does_not_wait(executor: Any, stage: Stage | None, copier: Copier | None) -> None:
    streams_of(DEFERRED).current().wait_event = nothing  # type: ignore[method-assign]


def copier_does_not_wait(executor: Any, stage: Stage | None, copier: Copier | None) -> None:
    assert copier is not None
    copier._side = streams_of(DEFERRED).stream()
    copier._side.wait_event = nothing  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str, Breaks]] = {
    "the CPU does not wait for its input": ("neurons", without("link.wait")),
    "nor with attention beside it": ("neurons beside attention", without("link.wait")),
    "nor for that of experts": ("experts, which are swapped", without("link.wait")),
    "the event after the input is left out": ("neurons", without("link.mark")),
    "the CPU does not wait for the selection": ("experts selected before attention", without("link.wait_experts")),
    "the event after the selection is left out": ("experts selected before attention", without("link.mark_experts")),
    "the answer is read before it is there": ("neurons", without("buffers._done.synchronize")),
    "the residual stream is read before it is there": ("whole layers", without("buffers._done.synchronize")),
    "a step begins while one that failed is uploaded": ("whole layers", without("buffers._uploaded.synchronize")),
    "a pinned buffer is filled while it is copied": ("neurons that stream", without_all("_copied", "synchronize")),
    "a buffer is overwritten while it is summed": ("neurons that stream", without_all("_side", "wait_event")),
    "the end of a sum is not marked": ("neurons that stream", without_all("_summed", "record")),
    "a sum does not wait for the copy": ("neurons that stream", main_does_not_wait),
    "experts: a pinned buffer": ("experts that stream", without_all("_copied", "synchronize")),
    "experts: a buffer is overwritten": ("experts that stream", without_all("_side", "wait_event")),
    "experts: a sum does not wait": ("experts that stream", main_does_not_wait),
    "an expert is overwritten in use": ("experts that a policy exchanges", copier_does_not_wait),
    "an expert is used before it is copied": ("experts that a policy exchanges", main_does_not_wait),
}


def is_right(name: str, folder: Path, seed: int, breaks: Breaks | None = None) -> bool:
    try:
        with deferred(seed):
            found = SCENES[name](folder, breaks)
    except (IndexError, RuntimeError):  # of numbers that are no indices
        return False
    return all(np.array_equal(one, other) for one, other in zip(found, expected(name, folder), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_seen(fault: str, folder: Path) -> None:
    """In some order, in which the answer is right otherwise."""
    name, breaks = FAULTS[fault]
    wrong = next((seed for seed in MANY if not is_right(name, folder, seed, breaks)), None)
    assert wrong is not None, "the answer is right in every order"
    assert is_right(name, folder, wrong)
