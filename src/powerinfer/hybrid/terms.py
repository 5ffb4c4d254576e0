"""FFNs that are split over terms, neurons or experts: hot ones on the GPU, cold ones on the CPU, at the same time.

For each layer of a step:

    GPU   attention ... n, selection | sum of the hot terms            | + sum of the cold ones ...
    CPU                      waits   | sum of the cold terms    | waits

The GPU selects terms, by a predictor or the router, so both devices agree on them. In a step of few tokens kernels
write n and the selection into memory of the host, the GPU calls the CPU (devices/flags.py), or answers the call itself
where no cold term is selected, and a kernel adds the sums, a vector for each token, from memory of the host. In longer
steps all of it is copied. In these, where the GPU cannot call, and where reads from disk may fail, the host acts twice:
it records an event behind what is sent, and sums the cold terms. For a long prompt the GPU computes the cold terms too,
and the CPU none: see devices/stage.py.

An FFN is a sum over its terms, so where they are placed changes only how the sum is rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.trace import span
from powerinfer.neurons import Indices
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.kernels.gpu_types import CallAnswer

ENOUGH = 128
"""Tokens that a layer must have computed recently before its terms are swapped."""

NOISE = 3.0
"""Standard deviations by which a cold term must have been used more often than the hot one that it replaces."""


class HybridTerms(ABC):
    """The FFN of one layer of `GpuLayers`, its terms on two devices.

    hot, cold: int32, the terms on the GPU and on the CPU, ascending. on_input: called in steps in which the CPU may
    have work, and which are launched, with the residual stream and the input of gate and up, both float32 [T, d_model]
    on the GPU. recent: float64 [terms], the tokens that used each, of recent_tokens.
    """

    terms: str
    most: int
    """Units swapped at a time: the swap happens between requests, which wait for it."""
    hot: Indices
    cold: Indices
    recent: NDArray[np.float64]
    recent_tokens: float
    _freed: tuple[str, ...] = ()
    """Attributes with memory, beside the parts."""

    def __init__(self, layer: int, layers: GpuLayers, stage: Stage | None) -> None:
        """stage: streams cold terms to the GPU for long prompts."""
        assert layers.link is not None
        self.layer = layer
        self.stage = stage
        self.on_input: Callable[[Tensor, Tensor], None] | None = None
        self._layers = layers
        self._link = layers.link
        self._calls: dict[tuple[int, int], Sequence[_native.NeuronCall | _native.ExpertCall]] = {}

    def close(self) -> None:
        """Free both parts, and the buffers that are shared with others; no step follows. May be called twice."""
        if self.stage is not None:
            self.stage.close()
        for name in ("_gpu_part", "_cpu_part", "_calls", "_link", "_layers", *self._freed):
            self.__dict__.pop(name, None)

    @property
    def on_gpus(self) -> int:
        """The number of terms on the GPU, or on several."""
        return len(self.hot)

    @property
    @abstractmethod
    def cold_bytes(self) -> int:
        """Bytes of RAM for the cold terms."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part."""

    # ---------------------------------------------------------------- a step

    def ahead(self) -> list[Operator]:
        """Operators before attention, see `FfnParts`."""
        return []

    def sent(self, step: Step) -> Tensor | None:
        """The host's memory for step.read, see `FfnParts`."""
        return self._link.sent(len(step.x)) if self._asks_cpu and self._cpu_has_part(step) else None

    def begin(self) -> list[Operator]:
        """Select terms, and send the CPU its input, see `FfnParts`."""
        operators = self._selection()
        if self._asks_cpu:
            operators.append(self._operator("copy out", self._send))
            operators.append(self._host_operator("mark", self._mark, self._begin_cold))
        return operators

    def finish(self) -> list[Operator]:
        """Add the sums of both parts, see `FfnParts`."""
        operators = self._gpu_sums()
        if self._asks_cpu:
            operators.append(self._host_operator(f"cold {self.terms}", self._sum_cold, self._join_cold))
            operators.append(self._operator("add", self._add_cold))
        return operators

    @abstractmethod
    def _selection(self) -> list[Operator]: ...

    @abstractmethod
    def _gpu_sums(self) -> list[Operator]: ...

    @property
    @abstractmethod
    def _asks_cpu(self) -> bool:
        """Whether the CPU may have work."""

    @property
    @abstractmethod
    def _callable(self) -> bool:
        """Whether the GPU may call the CPU."""

    @abstractmethod
    def _sent_bytes(self, tokens: int) -> int:
        """Bytes per token of the selection that is sent with the input."""

    @abstractmethod
    def _make_calls(self, tokens: int, sent: int) -> Sequence[_native.NeuronCall | _native.ExpertCall]:
        """Calls of the CPU for a step, one after another."""

    @abstractmethod
    def _compute_cold(self, step: Step) -> None:
        """Write the CPU's sum to the link's buffer; zeros if no cold term is selected."""

    @abstractmethod
    def _stream_cold(self, step: Step) -> None:
        """Add the sum of the cold terms, some of which are on the GPU at a time."""

    def _operator(self, kind: str, run: Callable[[Step], None]) -> Operator:
        return Operator(kind, self.layer, run)

    def _host_operator(self, kind: str, run: Callable[[Step], None], called: Callable[[Step], None]) -> Operator:
        """An operator in which the host acts, unless the GPU can call it."""
        return Operator(kind, self.layer, run, False, called if self._callable else None)

    def cold_load(self, tokens: int) -> tuple[int, int] | None:
        """Experts on the CPU that the last step, of so many tokens, selected, and pairs of one of them and a token.
        None: the CPU has no part in steps that stream."""
        return None

    def _streams(self, step: Step) -> bool:
        """Whether the GPU computes the cold terms too."""
        return self.stage is not None and self.stage.takes(len(step.x))

    def _cpu_has_part(self, step: Step) -> bool:
        """Whether the CPU gets the input of a step."""
        return not self._streams(step)

    @abstractmethod
    def _chooses(self, tokens: int) -> bool:
        """Whether a selection, in a step of that number of tokens, may leave the CPU without any term."""

    def _answer(self, step: Step) -> CallAnswer | None:
        """The means by which the GPU answers the layer's call where it selects no cold term; None: the CPU does."""
        tokens = len(step.x)
        answers = self._asks_cpu and self._callable and self._chooses(tokens) and self._cpu_has_part(step)
        return self._link.answer(self._number, tokens) if answers else None

    def _send(self, step: Step) -> None:
        if self._cpu_has_part(step):
            self._link.send(len(step.x), self._sent_bytes(len(step.x)))

    def _mark(self, step: Step) -> None:
        if self.on_input is not None:
            assert step.read is not None
            self.on_input(step.x, step.read)
        if self._cpu_has_part(step):
            self._link.mark()

    def _step_calls(self, step: Step) -> Sequence[_native.NeuronCall | _native.ExpertCall]:
        key = len(step.x), self._sent_bytes(len(step.x))
        if key not in self._calls:
            self._calls[key] = self._make_calls(*key)
        return self._calls[key]

    @property
    def _number(self) -> int:
        """Number in a step of the layer's last call; that of a call before it is one less."""
        return 2 * self.layer + 2

    def _begin_cold(self, step: Step) -> None:
        self._link.begin(self._step_calls(step)[-1], self._number)

    def _join_cold(self, _: Step) -> None:
        self._link.join(self._number)

    def _taken_calls(self) -> Iterator[tuple[int, int, int, float, float]]:
        """The work of the GPU's calls since the last time: (tokens of each, calls, jobs, seconds waited, worked)."""
        for (tokens, _), calls in self._calls.items():
            yield tokens, *calls[-1].take()

    def _sum_cold(self, step: Step) -> None:
        if not self._streams(step):
            self._compute_cold(step)
            return
        with span(self._layers.trace, "gpu", f"streamed {self.terms}", self.layer):
            self._stream_cold(step)

    def _wait(self) -> None:
        with span(self._layers.trace, "cpu", "wait", self.layer, "wait"):
            self._link.wait()

    def _add_cold(self, step: Step) -> None:
        if not self._streams(step):
            self._link.add_back(step.target, self._answer(step))
        step.normed = None

    # ---------------------------------------------------------------- counters and swaps, not while a step runs

    @abstractmethod
    def collect(self) -> Counter[str]:
        """Sums since the last `clear`: tokens, steps, jobs (steps in which the CPU had work); over the tokens, terms
        used on the GPU (hot) and on the CPU (cold), and neurons of which some may be left out, and those of them that
        fired (active). `recent` is up to date then."""

    @abstractmethod
    def clear(self) -> None:
        """Reset the counters."""

    @abstractmethod
    def suspend(self, on: bool) -> None:
        """Begin or end to compute terms whole that a selector could leave out, or leave out a part of."""

    @abstractmethod
    def swap(self, leave: Indices, come: Indices) -> None:
        """Exchange terms on the GPU for the same number on the CPU."""

    def trade(self) -> int:
        """Swap terms that have become hot for those that have cooled, by `recent`, which is halved. Returns how many.
        Raises what `swap` does."""
        self.collect()
        if self.recent_tokens < ENOUGH:
            return 0
        leave, come = trades(self.recent, self.hot, self.cold, self.most)
        self.recent /= 2
        self.recent_tokens /= 2
        if len(come):
            self.swap(leave, come)
        return len(come)


U = TypeVar("U", bound=HybridTerms)


def trades(used: NDArray[np.float64], hot: Indices, cold: Indices, limit: int | None = None) -> tuple[Indices, Indices]:
    """(terms of `hot` to move to the CPU, the same number of `cold` to move to the GPU), largest difference first.

    used: float64 [terms], tokens that used each recently. The coldest hot term is compared with the hottest cold one,
    and so on. The standard deviation of a count is its square root, so a difference below `NOISE` roots of the sum is
    ignored: equally hot terms are not swapped back and forth.
    """
    leave = hot[np.argsort(used[hot], kind="stable")][:limit]
    come = cold[np.argsort(-used[cold], kind="stable")][:limit]
    n = min(len(leave), len(come))
    less, more = used[leave[:n]], used[come[:n]]
    clear = more - less > NOISE * np.sqrt(more + less)
    n = int(np.argmin(clear)) if not clear.all() else n
    return leave[:n], come[:n]


def shares(sums: Counter[str]) -> dict[str, Any]:
    """A part of a report, of what `HybridTerms.collect` gives."""
    used = sums["hot"] + sums["cold"]
    return {
        "tokens": sums["tokens"],
        "active_fraction": sums["active"] / sums["neurons"] if sums["neurons"] else None,
        "gpu_share": sums["hot"] / used if used else None,
        "jobs": sums["jobs"] / sums["steps"] if sums["steps"] else None,
    }


class Split(Generic[U]):
    """The split of a model's FFNs: makes that of each of the GPU's layers when it is wired (`load_split`).

    ffns: made so far; stage: streams cold terms to the GPU for long prompts.
    """

    ffns: list[U]
    stage: Stage | None

    def close(self) -> None:
        """Free the FFNs made so far, and the stage. May be called twice."""
        for ffn in self.ffns:
            ffn.close()
        self.ffns.clear()
        if self.stage is not None:
            self.stage.close()


class SplitSparsity(Sparsity, Generic[U]):
    """Statistics of a model whose FFNs are split between a GPU and the CPU, and swaps of their terms."""

    def __init__(self, executor: SplitExecutor, ffns: Sequence[U]) -> None:
        """ffns: of the executor's split layers."""
        self.ffns = ffns
        self.stage = next((ffn.stage for ffn in ffns if ffn.stage is not None), None)
        self.traded = 0  # terms moved to the GPU since the model was loaded
        self._executor = executor
        self._turn = 0

    def _collect(self) -> tuple[list[dict[str, Any]], Counter[str]]:
        """The layers' parts of a report, and sums over them."""
        layers, totals = [], Counter[str]()
        for ffn in self.ffns:
            sums = ffn.collect()
            totals.update(sums)
            layers.append({"layer": ffn.layer, "hot": ffn.on_gpus, "cold": len(ffn.cold), **shares(sums)})
        return layers, totals

    def _report(self, layers: list[dict[str, Any]], totals: Counter[str]) -> dict[str, Any]:
        """Per layer and in all: hot, cold: terms on the GPU and on the CPU; tokens; active_fraction: of the neurons,
        those that fired; gpu_share: of the terms used, those on the GPU; jobs: share of the steps in which the CPU had
        work; traded: terms swapped onto the GPU between requests."""
        tokens = max((layer["tokens"] for layer in layers), default=0)
        sums = shares(totals) | {"tokens": tokens, "traded": self.traded}
        return {"selector": self.selector, "layers": layers, **sums}

    def clear(self) -> None:
        """Reset the counters of `report`."""
        for ffn in self.ffns:
            ffn.clear()

    def adjust(self) -> bool:
        """Swap terms of one layer, the next in turn with enough recent tokens, if the difference is clear."""
        for _ in self.ffns:
            ffn = self.ffns[self._turn]
            self._turn = (self._turn + 1) % len(self.ffns)
            traded = ffn.trade()
            self.traded += traded
            if traded:
                return True
        return False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which no term is left out that fires."""
        self._suspend(True)
        try:
            yield
        finally:
            self._suspend(False)

    def _suspend(self, on: bool) -> None:
        for ffn in self.ffns:
            ffn.suspend(on)

    def bytes_per_token(self, dense: int | None) -> None:
        """Unknown: it depends on what the GPU skips, and on which experts are selected, and where they are."""
