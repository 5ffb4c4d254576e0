"""A step of layers on a GPU: its tensors, and the operators that run on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powerinfer.devices.batch import LogitsNeed
from powerinfer.kernels import gpu, gpu_host

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_experts import Routed
    from powerinfer.kernels.gpu_types import Replay

    Norm = Callable[..., Tensor]
    """Called with its input and, optionally, the tensor to write the result into, `for_codes` and `sent` as
    `gpu.norm`."""


@dataclass(slots=True)
class Step:
    """T tokens of S sequences on a device. x is the residual stream, which operators update in place."""

    x: Tensor  # float32 [T, d_model]
    positions: Tensor  # int32 [T]
    rows: Tensor  # int32 [T] row of page_table of each token
    slots: Tensor  # int64 [T] page * 32 + place in the page: where the token's keys and values are stored
    page_table: Tensor  # int32 [S, P]
    logit_rows: Tensor  # int32 [R]
    read: Tensor | None = None  # float32 [T, d_model], like x always at the same address: input of gate and up
    total: Tensor | None = None  # likewise: where the parts of an FFN are added if their sum is normalised; None: x
    attended: Tensor | None = None  # float32 [T, heads * head_dim]; of latent attention [heads, T, latents]
    beside: Tensor | None = None  # float32 [T, heads * head_dim], of Mamba2 beside attention
    shared: Tensor | None = None  # float32 [T, d_model], of a shared expert that is added behind a norm of its own
    hidden: Tensor | None = None  # float32 [T, rank], of a predictor inside experts; None: it selects nothing
    routed: Routed | None = None  # of a long step, the experts of its tokens
    runs: Tensor | None = None  # int32 [S, 4] of models with states, as `runs_with_slots`
    replay: Replay | None = None  # of tokens of the step before, for their states; None: there are none
    input_places: Tensor | None = None  # int64 [T], as of the function; None: no inputs are kept
    inputs: Tensor | None = None  # float32 [T, layers * numbers], what layers get of tokens beside x
    normed: tuple[Norm, Tensor] | None = None  # a norm and its result, until x changes
    inverse_temperatures: Tensor | None = None  # float32 [R], as of `Batch`
    needs: LogitsNeed = LogitsNeed.LOGITS  # likewise

    @property
    def contexts(self) -> gpu.Contexts:
        """The contexts of its tokens in a cache."""
        return gpu.Contexts(self.page_table, self.rows, self.positions)

    @property
    def key(self) -> tuple[int, ...]:
        """Steps with the same key have their tensors at the same addresses."""
        flags = self.replay is not None, self.input_places is not None, self.needs
        # Not len(), which is a function of Python's, of tensors.
        return self.x.shape[0], self.logit_rows.shape[0], *self.page_table.shape, *flags

    def normalised(self, norm: Norm | None, for_codes: bool = False) -> Tensor:
        """norm(x); x itself without a norm. for_codes: as of `gpu.norm`."""
        if norm is None:
            return self.x
        if self.normed is None or self.normed[0] is not norm:
            self.normed = norm, norm(self.x, for_codes=for_codes)
        return self.normed[1]

    def write_read(self, norm: Norm | None, sent: Tensor | None = None) -> None:
        """read = norm(x); total = 0. sent: memory of the host that gets the former, too."""
        if self.total is not None:
            self.total.zero_()
        assert self.read is not None
        if norm is None or (self.normed is not None and self.normed[0] is norm):
            self.read.copy_(self.normalised(norm))
            gpu.forget_codes(self.read)
            if sent is not None:
                gpu_host.put(self.read, sent)
        else:
            self.normed = norm, norm(self.x, self.read, for_codes=True, sent=sent)  # neurons and experts mostly do

    def forget_codes(self) -> None:
        """Forget what kernels made beside their results (`for_codes`), which is in memory of one recording. What
        follows may be recorded at another time, and must not look there."""
        for result in (self.read, self.attended, self.beside, self.normed and self.normed[1]):
            if result is not None:
                gpu.forget_codes(result)

    def add(self, more: Tensor) -> None:
        """x += more."""
        self.x.add_(more)
        self.normed = None

    def add_product(self, matrices: Callable[..., Tensor], values: Tensor, norm: Norm | None) -> None:
        """x += norm(matrices . values); matrices: called with what to add to, they do so."""
        if norm is None:
            matrices(values, self.x)
            self.normed = None
        else:
            self.add(norm(matrices(values)))

    @property
    def target(self) -> Tensor:
        """The tensor to which the parts of an FFN are added: total, or x."""
        return self.x if self.total is None else self.total

    def add_part(self, more: Tensor) -> None:
        """target += more."""
        self.target.add_(more)
        self.normed = None

    def set(self, x: Tensor) -> None:
        """Replace the values of the residual stream."""
        self.x.copy_(x)
        self.normed = None


@dataclass(frozen=True)
class Operator:
    """A part of a step. kind: "attention", "project", "ffn", "head" and the like; layer: -1 for the head.

    static: launches the same kernels for every step of a shape, and the host does nothing else. An operator passes
    tensors on within its layer only. called: what does the same in a step of few tokens, static, in that the device
    calls the host; None: there is none.
    """

    kind: str
    layer: int
    run: Callable[[Step], None]
    static: bool = True
    called: Callable[[Step], None] | None = None

    def as_called(self) -> Operator:
        """The static one of the two."""
        return self if self.called is None else replace(self, run=self.called, static=True, called=None)
