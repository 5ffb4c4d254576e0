"""How a GPU sums a layer's neurons for one token: by a kernel for each stage, or by a fused one; timed, and saved.

The fused kernel leaves the memory idle less often, and has fewer rows on their way (kernels/triton_fused.py); what is
faster depends on the GPU and on the layers. So at load, once the neurons are where they stay, some tokens of a text are
decoded both ways, by turns. The sums are rounded differently, so the choice is kept in fusion.json: if it changed from
run to run, so would the bits of the answers. A fused kernel that this GPU cannot run is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import numpy as np

from powerinfer.devices.choices import Choice
from powerinfer.devices.replayed_spans import UNRECORDED
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.errors import PowerInferError
from powerinfer.formats.json_file import Between, Length
from powerinfer.formats.prepared import prepared_folder
from powerinfer.hardware.gpu_rates import software
from powerinfer.hybrid.policy_trial import GAIN, decode_one
from powerinfer.kernels import gpu
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.saved_trials import Key, find_entry, keep_entry, trial_key

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import HybridFfn
    from powerinfer.hybrid.resolve import Resolved

KIND = "fusions"
STEPS = 8
"""That are timed at a time."""
ROUNDS = 6
"""Of both ways."""

_WHY = 1 << 10  # characters


INTERRUPTED = "its trial was interrupted; --retrial repeats it"


@dataclass(frozen=True)
class _Kept:
    """A choice in the file. several, one: medians of seconds of a step; problem: why the fused kernel was not timed."""

    key: Key
    fused: bool
    several: Annotated[float, Between(0, 1e6)] = 0.0
    one: Annotated[float, Between(0, 1e6)] = 0.0
    problem: Annotated[str, Length(_WHY)] = ""

    def told(self, how: str) -> Choice[str]:
        """The choice of a kernel, with its reason."""
        who = "a fused kernel" if self.fused else "a kernel for each stage"
        times = f"{1e3 * self.one:.3g} ms a step fused, {1e3 * self.several:.3g} otherwise"
        return Choice(f"{who} for one token", f"{self.problem or times}; {how}")


def fuses(executor: SplitExecutor) -> bool:
    """Whether the GPU has such a kernel, compiled by Triton; of neurons on disk reads take most of the time."""
    import torch

    device = executor.gpu.device
    return device.type == "cuda" and gpu.which(torch.empty(0, device=device)) == "triton" and executor.disk is None


class Fusion:
    """The choice for a model that is being loaded. Notes it in the executor's choices."""

    def __init__(self, executor: SplitExecutor, ffns: Sequence[HybridFfn], resolved: Resolved) -> None:
        """Takes a choice of an earlier start with neurons placed alike, before anything is recorded."""
        self._executor = executor
        self._ffns = ffns
        self._resolved = resolved
        self._path = prepared_folder(resolved.checkpoint.path, resolved.engine.prepared) / "fusion.json"
        self._fused, self._settled = False, not fuses(executor)
        self._recall()

    def settle(self, sample: Callable[[], Sequence[int]], progress: Progress = silent) -> bool:
        """Time both ways if there is no choice yet; whether steps are other ones than before.

        sample: the token ids of a text; the KV cache must be empty, and neurons where they stay. PowerInferError if the
        GPU fails, or runs out of memory without the fused kernel, too.
        """
        before = self._fused
        if not self._settled and any(len(ffn.hot) for ffn in self._ffns):
            self._recall()  # neurons may have moved to where they were at an earlier start
            if not self._settled and self._resolved.engine.trial:
                progress("trial of kernels", 0, 1)
                self._take(*self._tried(sample()))
            elif not self._settled:
                way = "a kernel for each stage for one token"
                self._executor.choices.neurons = Choice(way, "--no-trial: nothing was timed")
        return self._fused != before

    @property
    def _key(self) -> Key:
        checkpoint, engine, selection = self._resolved.checkpoint, self._resolved.engine, self._resolved.selection
        placed = " ".join(str(len(ffn.hot)) for ffn in self._ffns)
        key = trial_key(checkpoint, engine, selection, ()) | software(str(self._executor.gpu.device))
        return key | {"hot": placed}

    def _recall(self) -> None:
        if self._settled or self._resolved.engine.retrial:
            return
        kept = find_entry(self._path, KIND, _Kept, self._key)
        if kept is not None:
            self._take(kept, f"found earlier, {self._path}")

    def _take(self, kept: _Kept, how: str) -> None:
        self._settled = True
        self._fuse(kept.fused)
        self._executor.choices.neurons = kept.told(how)

    def _fuse(self, on: bool) -> None:
        self._fused = on
        for ffn in self._ffns:
            ffn.fuse(on)

    def _tried(self, text: Sequence[int]) -> tuple[_Kept, str]:
        """The choice, and where it is kept."""
        key = self._key
        self._keep(_Kept(key, False, problem=INTERRUPTED))  # in case that this process does not outlive it
        try:
            kept = self._timed(key, text)
        except BaseException:
            keep_entry(self._path, KIND, _Kept, key, None)
            raise
        problem = self._keep(kept)
        return kept, f"kept in {self._path}" if problem is None else f"cannot be kept: {problem}"

    def _keep(self, kept: _Kept) -> str | None:
        """Why that failed, or None."""
        own = {name: value for name, value in asdict(kept).items() if name != "key"}
        return keep_entry(self._path, KIND, _Kept, kept.key, own)

    def _timed(self, key: Key, text: Sequence[int]) -> _Kept:
        executor, rounds = self._executor, dict[bool, list[float]]({False: [], True: []})
        tokens = np.resize(np.asarray(text or [0], np.int32), min(STEPS, executor.n_pages * executor.page_size))
        with gpu_failures("trying kernels", "give less --vram"), current(executor.gpu.device):
            for turn in range(ROUNDS):
                for fused in (True, False) if turn % 2 else (False, True):
                    self._fuse(fused)
                    try:
                        rounds[fused].append(self._seconds(tokens))
                    except (PowerInferError, RuntimeError) as error:  # Triton's compiler raises both
                        if not fused:
                            raise
                        self._fuse(False)
                        self._seconds(tokens)  # fails likewise where it is not the kernel
                        return _Kept(key, False, problem=_why(error))
        shares = [one / max(several, 1e-9) for one, several in zip(rounds[True], rounds[False], strict=True)]
        clear = median(shares) < GAIN and sum(share >= 1 for share in shares) <= 1
        return _Kept(key, clear, median(rounds[False]), median(rounds[True]))

    def _seconds(self, tokens: np.ndarray) -> float:
        """Of a step, once steps are recorded."""
        for _ in range(UNRECORDED):
            decode_one(self._executor, tokens[0], 0)
        begin = time.perf_counter()
        for at, token in enumerate(tokens):
            decode_one(self._executor, token, at)
        return (time.perf_counter() - begin) / len(tokens)


def _why(error: Exception) -> str:
    """Without what would help if there were no other way."""
    return f"fused: {(str(error).splitlines() or [type(error).__name__])[0].partition(';')[0]}"[:_WHY]
