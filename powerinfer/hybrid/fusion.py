"""How a GPU sums a layer's neurons for one token: by a kernel for each stage, or by one for all; timed, and saved.

One kernel leaves the memory idle less often, and keeps fewer rows on their way (kernels/triton_fused.py); what is
faster depends on the GPU and on the layers. So at load some tokens of a text are decoded both ways. The sums are
rounded differently, so the result is kept in fusion.json: if it changed from run to run, so would the bits of the
answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.replayed_spans import UNRECORDED
from powerinfer.formats.json_file import Between
from powerinfer.formats.prepared import prepared_folder
from powerinfer.hardware.gpu_rates import software
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.saved_trials import Key, find_entry, keep_entry, trial_key

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import HybridFfn
    from powerinfer.hybrid.resolve import Resolved

KIND = "fusions"
CLEARLY = 0.98
"""One kernel must take less than this share of the time of several."""

_STEPS = 12  # that are timed at a time
_ROUNDS = 2  # of both ways in turn


@dataclass(frozen=True)
class _Kept:
    """A measurement in the file: seconds of a step."""

    key: Key
    several: Annotated[float, Between(0, 1e6)]
    one: Annotated[float, Between(0, 1e6)]


def fuses(executor: SplitExecutor) -> bool:
    """Whether the GPU has such a kernel: Triton compiles for it."""
    return str(executor.gpu.device.type) == "cuda"


def settle(
    executor: SplitExecutor,
    ffns: Sequence[HybridFfn],
    resolved: Resolved,
    sample: Callable[[], Sequence[int]],
    progress: Progress = silent,
) -> None:
    """Set `fused` of each FFN, by a saved measurement under the same conditions, or a new one.

    sample: the token ids of a text; the KV cache must be empty. Notes the result in the executor's choices. Where
    neurons rest on disk, which takes most of the time, nothing is tried. PowerInferError if the GPU fails or has too
    little memory.
    """
    some = [ffn for ffn in ffns if len(ffn.hot)]
    if not some or not fuses(executor) or executor.disk is not None:
        return
    checkpoint, engine = resolved.checkpoint, resolved.engine
    path = prepared_folder(checkpoint.path, engine.prepared) / "fusion.json"
    key = trial_key(checkpoint, engine, resolved.selection, [len(ffn.hot) for ffn in ffns])
    key |= software(str(executor.gpu.device))
    kept = find_entry(path, KIND, _Kept, key)
    if kept is not None and not engine.retrial:
        how = f"measured earlier ({path})"
    elif not engine.trial:
        return
    else:
        progress("trial of kernels", 0, 1)
        several, one = _measured(executor, some, sample())
        kept = _Kept(key, several, one)
        problem = keep_entry(path, KIND, _Kept, key, {"several": several, "one": one})
        how = f"kept in {path}" if problem is None else f"cannot be kept: {problem}"
    fused = kept.one < CLEARLY * kept.several
    _set(executor, some, fused)
    who = "one kernel" if fused else "a kernel for each stage"
    times = f"{1e3 * kept.one:.3g} ms a step with one, {1e3 * kept.several:.3g} with several"
    executor.choices["neurons"] = f"{who} for one token ({times}, {how})"


def _set(executor: SplitExecutor, ffns: Sequence[HybridFfn], fused: bool) -> None:
    for ffn in ffns:
        ffn.fused = fused
        executor.gpu.changed(ffn.layer)  # what is recorded


def _measured(executor: SplitExecutor, ffns: Sequence[HybridFfn], text: Sequence[int]) -> tuple[float, float]:
    """Seconds of a step of one token of a text, with several kernels and with one."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens = np.resize(np.asarray(text or [0], np.int32), min(_STEPS, executor.n_pages * executor.page_size - 1) + 1)
    try:
        for _ in range(_ROUNDS):
            for fused, own in seconds.items():
                _set(executor, ffns, fused)
                for _ in range(UNRECORDED):
                    _step(executor, tokens[0], 0)
                own += [_step(executor, token, at) for at, token in enumerate(tokens)][1:]
    finally:
        _set(executor, ffns, False)
    return median(seconds[False]), median(seconds[True])


def _step(executor: SplitExecutor, token: np.int32, at: int) -> float:
    one, none = np.full(1, token, np.int32), np.zeros(1, np.int32)
    pages = np.arange(at // executor.page_size + 1, dtype=np.int32)[None]
    begin = time.perf_counter()
    executor.forward(Batch(one, np.full(1, at, np.int32), none, pages, none[:0]))
    return time.perf_counter() - begin
