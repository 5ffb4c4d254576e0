"""A step of layers on a GPU, and the replay of steps of few tokens.

Launching a kernel takes the host longer than a small kernel takes the device. What a step launches hangs on its shape
alone; so all that lies between two points at which the host must act is recorded once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, device

    Norm = Callable[..., Tensor]
    """Called with what it normalises and, if it is to write there, where the result goes."""

MOST_SHAPES = 16
"""Of which recordings are kept; the one that was not needed for longest goes first."""

RECORDED_BYTES = 256 << 20
"""Of a GPU's memory for recordings, which a driver keeps there: fewer shapes where it does not hold so many."""


@dataclass(slots=True)
class Step:
    """T tokens of S sequences on a device. x is the residual stream, which operators write to."""

    x: Tensor  # float32 [T, d_model]
    positions: Tensor  # int32 [T]
    rows: Tensor  # int32 [T] row of page_table of each token
    slots: Tensor  # int64 [T] page * 32 + place in the page, where the token's keys and values go
    page_table: Tensor  # int32 [S, P]
    logit_rows: Tensor  # int32 [R]
    read: Tensor | None = None  # float32 [T, d_model] like x always at the same address: what neurons of a layer read
    attended: Tensor | None = None  # float32 [T, heads * head_dim]
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

    def let_read(self, norm: Norm | None) -> None:
        """read = norm(x)."""
        assert self.read is not None
        if norm is None or (self.normed is not None and self.normed[0] is norm):
            self.read.copy_(self.normalised(norm))
        else:
            self.normed = norm, norm(self.x, self.read)

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
    """A part of a step. kind: "attention", "project", "ffn", "head" and the like; layer: -1 for the head.

    static: launches the same for every step of a shape, and the host does nothing else. An operator hands tensors on
    within its layer only.
    """

    kind: str
    layer: int
    run: Callable[[Step], None]
    static: bool = True


State = tuple["Tensor | None", "tuple[Norm, Tensor] | None"]
"""What operators hand on beside x and read: attended and normed of a step."""

Run = Callable[[State], State]

Recorder = Callable[[Run, State], Run]
"""Given what runs some operators, and the state before them, returns what does the same again at less cost."""


class Recordings:
    """Runs steps. Of a shape that comes again it records the static operators, and from then on replays them."""

    def __init__(self, operators: Sequence[Operator], recorder: Recorder, shapes: int = MOST_SHAPES) -> None:
        self._parts = [(static, list(group)) for static, group in groupby(operators, lambda one: one.static)]
        self._recorder = recorder
        self._shapes = shapes
        self._kept: dict[tuple[int, ...], dict[int, Run | None]] = {}

    def run(self, step: Step) -> None:
        """All operators on the step."""
        kept = self._kept.pop(step.key, {})
        if len(self._kept) == self._shapes:
            del self._kept[next(iter(self._kept))]
        self._kept[step.key] = kept
        for number, (static, operators) in enumerate(self._parts):
            if not static or number not in kept:
                if static:  # at first it runs as it is: kernels are compiled, memory is found
                    kept[number] = None
                for operator in operators:
                    operator.run(step)
                continue
            recorded = kept[number]
            if recorded is None:
                recorded = kept[number] = self._recorder(_runner(operators, replace(step)), _state(step))
            step.attended, step.normed = recorded(_state(step))

    def forget(self, layer: int) -> None:
        """What a layer's operators launch is no longer what was recorded."""
        for number, (_, operators) in enumerate(self._parts):
            if any(operator.layer == layer for operator in operators):
                for kept in self._kept.values():
                    kept.pop(number, None)


def _state(step: Step) -> State:
    return step.attended, step.normed


def _runner(operators: Sequence[Operator], step: Step) -> Run:
    def run(state: State) -> State:
        step.attended, step.normed = state
        for operator in operators:
            operator.run(step)
        return _state(step)

    return run


def cuda_graphs(device: device) -> Recorder:
    """A recorder that makes CUDA graphs on a device, all of which share their memory.

    What a graph frees while it is recorded, others may use that are recorded later. That is right for graphs that are
    replayed one behind the other in one stream, as parts of whole steps: nothing but what operators hand on must
    outlive its graph, and that is kept from others for as long as the recording is (it is in `after`). The next graph
    in the step reads it before any other is replayed: recorded later, it cannot have it for its own; recorded earlier,
    it wrote to it before, as part of this step, or will again in the next one.
    """
    import torch

    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    first: list[torch.cuda.CUDAGraph] = []  # kept, for with the last of its graphs a pool ends

    def record(run: Run, state: State) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            after = run(state)  # is recorded, not done
        first.append(graph) if not first else None

        def replay(_: State) -> State:
            graph.replay()
            return after

        return replay

    return record
