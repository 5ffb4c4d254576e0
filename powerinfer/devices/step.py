"""A step of layers on a GPU, and the replay of steps of few tokens.

Launching a kernel takes the host longer than a small kernel takes the device. What a step launches hangs on its shape
alone, but for the neurons of FFNs; so all that lies between these is recorded once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Norm = Callable[[Tensor], Tensor]

MOST_SHAPES = 64
"""Of which recordings are kept; the oldest goes first."""


@dataclass(slots=True)
class Step:
    """T tokens of S sequences on a device. x is the residual stream, which operators write to."""

    x: Tensor  # float32 [T, d_model]
    positions: Tensor  # int32 [T]
    rows: Tensor  # int32 [T] row of page_table of each token
    slots: Tensor  # int64 [T] page * 32 + place in the page, where the token's keys and values go
    page_table: Tensor  # int32 [S, P]
    logit_rows: Tensor  # int32 [R]
    attended: Tensor | None = None  # float32 [T, heads * head_dim]
    logits: Tensor | None = None  # float32 [R, vocab]
    normed: tuple[Norm, Tensor] | None = None  # what a norm made of x, until x changes

    @property
    def key(self) -> tuple[int, ...]:
        """Steps with the same key have their tensors at the same addresses."""
        return len(self.x), len(self.logit_rows), *self.page_table.shape

    def normalised(self, norm: Norm | None) -> Tensor:
        """norm(x); x itself without a norm."""
        if norm is None:
            return self.x
        if self.normed is None or self.normed[0] is not norm:
            self.normed = norm, norm(self.x)
        return self.normed[1]

    def add(self, more: Tensor) -> None:
        """x += more."""
        self.x.add_(more)
        self.normed = None

    def replace(self, x: Tensor) -> None:
        """x = x."""
        self.x.copy_(x)
        self.normed = None


@dataclass(frozen=True)
class Operator:
    """A part of a step. kind: "attention", "project", "norm", "ffn", "normalise" or "head"; layer: -1 for the head.

    static: launches the same for every step of a shape, and never waits for the device.
    """

    kind: str
    layer: int
    run: Callable[[Step], None]
    static: bool = True


State = tuple["Tensor | None", "Tensor | None", "tuple[Norm, Tensor] | None"]
"""What operators hand on beside x: attended, logits and normed of a step."""

Run = Callable[[State], State]

Recorder = Callable[[Run, State], Run]
"""Given what runs some operators, and the state before them, returns what does the same again at less cost."""


class Recordings:
    """Runs steps. Of a shape that comes again it records the static operators, and from then on replays them."""

    def __init__(self, operators: Sequence[Operator], recorder: Recorder) -> None:
        self._parts = [(static, list(group)) for static, group in groupby(operators, lambda one: one.static)]
        self._recorder = recorder
        self._kept: dict[tuple[int, ...], dict[int, Run]] = {}

    def run(self, step: Step) -> None:
        """All operators on the step."""
        recorded = self._kept.get(step.key)
        if recorded is None:  # the first of its shape runs as it is: kernels are compiled, memory is found
            if len(self._kept) == MOST_SHAPES:
                del self._kept[next(iter(self._kept))]
            self._kept[step.key] = {}
        for number, (static, operators) in enumerate(self._parts):
            if recorded is None or not static:
                for operator in operators:
                    operator.run(step)
                continue
            if number not in recorded:
                recorded[number] = self._recorder(_runner(operators, replace(step)), _state(step))
            step.attended, step.logits, step.normed = recorded[number](_state(step))


def _state(step: Step) -> State:
    return step.attended, step.logits, step.normed


def _runner(operators: Sequence[Operator], step: Step) -> Run:
    def run(state: State) -> State:
        step.attended, step.logits, step.normed = state
        for operator in operators:
            operator.run(step)
        return _state(step)

    return run


def cuda_graphs() -> Recorder:
    """A recorder that makes CUDA graphs, all of which share their memory: one is replayed at a time."""
    import torch

    pool = torch.cuda.graph_pool_handle()

    def record(run: Run, state: State) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            after = run(state)  # is recorded, not done

        def replay(_: State) -> State:
            graph.replay()
            return after

        return replay

    return record
