"""One layer on a GPU: its operators, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from powerinfer.devices.step import Operator, Step

if TYPE_CHECKING:
    from torch import Tensor


class FfnParts(Protocol):
    """An FFN that is a sum of parts, some of which other devices compute.

    Its operators are asked for again after `GpuLayers.changed`.
    """

    def ahead(self) -> Sequence[Operator]:
        """Operators ahead of attention: what follows from step.x as the layer gets it. These write to no tensor of the
        step."""
        ...

    def sent(self, step: Step) -> Tensor | None:
        """Memory of the host that gets step.read as it is written, float32 [T, d_model]; None: it needs none."""
        ...

    def begin(self) -> Sequence[Operator]:
        """Send what other devices need to start, as early as possible.

        These read step.read, the input of gate and up, and step.x, the input of predictors, and write to neither.
        """
        ...

    def finish(self) -> Sequence[Operator]:
        """Add the parts (`Step.add_part`)."""
        ...

    def close(self) -> None:
        """Free their memory, on all devices; no step follows. May be called twice."""
        ...


@dataclass
class _SplitFfn:
    """read: writes step.read; parts: of the sum; after: applied to the sum."""

    read: Operator
    parts: FfnParts
    after: list[Operator]


@dataclass
class GpuLayer:
    """A layer that is wired operator by operator, with at most one FFN of parts.

    parallel: attention and FFN both read the layer's input. latest: the operator that was wired last, but for those of
    an FFN of parts.
    """

    index: int
    parallel: bool
    latest: Operator | None = None
    _before: list[Operator] = field(default_factory=list)
    _ffn: _SplitFfn | None = None
    _behind: list[Operator] = field(default_factory=list)

    def operator(self, kind: str, run: Callable[[Step], None]) -> Operator:
        """A static operator of this layer."""
        return Operator(kind, self.index, run)

    def add(self, kind: str, run: Callable[[Step], None]) -> None:
        """A static operator that comes next."""
        wired = self._before if self._ffn is None or self.parallel else self._behind
        self.latest = self.operator(kind, run)
        wired.append(self.latest)

    def add_parts(self, read: Operator, parts: FfnParts, after: list[Operator]) -> None:
        """An FFN of parts comes next."""
        assert self._ffn is None
        self._ffn = _SplitFfn(read, parts, after)

    def operators(self) -> list[Operator]:
        """All of them, in the order in which they run."""
        if self._ffn is None:
            return self._before
        ahead, begin = self._ffn.parts.ahead(), [self._ffn.read, *self._ffn.parts.begin()]
        finish = [*self._ffn.parts.finish(), *self._ffn.after]
        if self.parallel:  # attention and its projection run while other devices compute their parts
            return [*ahead, *begin, *self._before, *finish]
        return [*ahead, *self._before, *begin, *finish, *self._behind]

    def ffn_operators(self) -> list[Operator]:
        """Operators of the FFN of parts alone, one after another."""
        assert self._ffn is not None
        ffn = self._ffn
        return [*ffn.parts.ahead(), ffn.read, *ffn.parts.begin(), *ffn.parts.finish(), *ffn.after]

    def close(self) -> None:
        """Free what the operators hold; no step follows."""
        parts = None if self._ffn is None else self._ffn.parts
        self._before, self._ffn, self._behind = [], None, []
        if parts is not None:
            parts.close()
