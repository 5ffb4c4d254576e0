"""The draft head of a model (MTP): one layer that predicts the token after the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.batch import LogitsNeed
from powerinfer.kernels import cpu

if TYPE_CHECKING:
    from powerinfer import _native
    from powerinfer.devices.batch import Batch


class DraftHead(Protocol):
    """A model's draft head, on the model's own device.

    It writes to the pages of the model's KV cache, of which its layer is one more, and changes nothing that the model
    reads: a draft may be wrong, or left out. A token's logits do not depend on the batch or the chunk. It attends to
    all earlier positions: where it was not given one, to whatever the page holds, by which drafts become worse.
    """

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """Hidden states that the head reads, of tokens of the last `forward` of the model, float32 [n, d_model].

        rows: int32 [n], their indices in its batch. To be asked for before the next `forward` of either.
        """
        ...

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[Any]:
        """Write keys and values of the head's layer and return logits, float32 [R, vocab_size], or what the batch
        `needs` of them, of the token after the one that a position is given.

        batch.tokens: at each position the token that follows it; inputs: float32 [T, d_model], of `inputs` or
        `outputs`, of each position. The states of a batch are neither read nor written. The result is a view that stays
        valid until the next call; logits of the model stay valid. Without logit rows there are no `outputs`, since keys
        and values alone are needed. StoppedError: of a batch that was stopped.
        """
        ...

    @property
    def lists(self) -> bool:
        """Whether it can make logits of listed tokens alone."""
        ...

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        """Make logits of these panels of `cpu.LANES` tokens alone from now on, int32 [n], ascending; the order in which
        they come, one behind the other. Only where it `lists`."""
        ...

    def outputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """Hidden states that a further draft reads: those that the head gave tokens of its last `forward`, float32
        [n, d_model]. rows, and when: as of `inputs`."""
        ...


class CpuDraftHead:
    """The draft head as the last operators of a model's program, with the pages of its cache."""

    def __init__(
        self, program: _native.Program, run: Callable[..., None], vocab_size: int, stores: int, *, output: bool
    ) -> None:
        """run: called with a batch, last=, the end of the operators to run, and logits=, where they go; stores: the end
        of those that store keys and values. output: they end in logits, else in what another device makes these of:
        `read` instead of `forward`, and no `inputs`."""
        self.output = output
        self.lists = output and program.lists_draft_panels
        self._stores = stores
        self._last = program.size
        self._program = program
        self._run = run
        self._vocab_size = vocab_size
        self._d_model = program.residual(1).shape[1]
        self._logits = np.empty((0, cpu.round_up(vocab_size, cpu.LANES)), np.float32)

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._hidden_states(rows, False)

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        n = len(batch.logit_rows)
        self.read(batch, inputs)
        return self._logits[:n, : self._vocab_size]

    def read(self, batch: Batch, inputs: NDArray[np.float32]) -> None:
        """The same without a result."""
        n = len(batch.logit_rows)
        if n > len(self._logits):
            self._logits = np.empty((n, self._logits.shape[1]), np.float32)
        self._run(batch, last=self._last if n else self._stores, logits=self._logits, **self._place(inputs))

    def _place(self, inputs: NDArray[np.float32]) -> dict[str, int]:
        """Put inputs where the operators read them. Arguments of `run` beside the others."""
        self._program.residual(len(inputs))[:] = inputs
        return {}

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        self._program.list_draft_panels(panels)
        return panels

    def outputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        if not self.output:  # the last operator has normalised them, or they are what the final norm reads
            return self._program.residual(int(rows.max(initial=0)) + 1)[rows]
        return self._hidden_states(rows, True)

    def _hidden_states(self, rows: NDArray[np.int32], draft: bool) -> NDArray[np.float32]:
        out = np.empty((len(rows), self._d_model), np.float32)
        self._program.hidden_states(rows, out, draft)
        return out


class EagleHead(CpuDraftHead):
    """An EAGLE head. `inputs` are features, float32 [n, features * d_model], and `forward` takes these or `outputs`.

    tokens: int32 [rows of its logits], the model's token of each.
    """

    def __init__(
        self,
        program: _native.Program,
        run: Callable[..., None],
        stores: int,
        *,
        tokens: NDArray[np.int32],
        vocab_size: int,
        fused: int,
        normed: bool,
    ) -> None:
        """run, stores: as of `CpuDraftHead`; vocab_size: of the model; fused: the end of the operators that make of
        features what `outputs` stand for; normed: these are what the final norm gives."""
        super().__init__(program, run, vocab_size, stores, output=normed)
        self.tokens = tokens
        self.lists = False  # tokens to draft from: its rows are of few already
        self._fused = fused

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._program.features(int(rows.max(initial=0)) + 1)[rows]

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        return super().forward(batch, inputs)[:, : len(self.tokens)]

    def _place(self, inputs: NDArray[np.float32]) -> dict[str, int]:
        if inputs.shape[1] == self._program.residual(1).shape[1]:
            return super()._place(inputs) | {"first": self._fused}
        self._program.features(len(inputs))[:] = inputs
        return {}


class OutputHead(Protocol):
    """The output head of a model on another device (`GpuLayers`)."""

    def hidden_states(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """Hidden states of tokens of the last step, float32 [n, d_model]; rows: int32 [n]."""
        ...

    def logits(self, hidden: NDArray[np.float32], needs: LogitsNeed = LogitsNeed.LOGITS) -> NDArray[Any]:
        """Logits of hidden states, float32 [R, d_model] -> [R, vocab_size], in memory of their own; or `CANDIDATES`."""
        ...


class GpuDraftLayer(OutputHead, Protocol):
    """The layer of a draft head on a GPU (`GpuLayers`), with an output head."""

    @property
    def lists(self) -> bool:
        """Whether it can, as of `DraftHead`."""
        ...

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        """List panels as `DraftHead` does."""
        ...

    def run(self, batch: Batch, x: NDArray[np.float32], *, inputs: NDArray[np.float32]) -> NDArray[Any]:
        """Logits of a step, or what it needs of them; x: hidden states, inputs: embeddings, float32 [T, d_model]."""
        ...


class GpuDraftHead:
    """The draft head of a model that a GPU has as a whole: its layer is there, too; the CPU looks up embeddings."""

    def __init__(self, layer: GpuDraftLayer, output: OutputHead, embed: Callable[[Batch], NDArray[np.float32]]) -> None:
        """output: of the model; embed: gives the embeddings of a batch's tokens, float32 [T, d_model]."""
        self._layer = layer
        self._output = output
        self._embed = embed
        self.lists = layer.lists

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._layer.list_panels(panels)

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._output.hidden_states(rows)

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[Any]:
        return self._layer.run(batch, inputs, inputs=self._embed(batch))

    def outputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._layer.hidden_states(rows)


class SplitDraftHead:
    """The draft head of a model whose output head is on a GPU: its layer runs on the CPU, which has no copy of the
    output head, and hidden states pass between the two."""

    def __init__(self, head: CpuDraftHead, output: OutputHead) -> None:
        self._head = head
        self._output = output
        self.lists = head.lists

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._head.list_panels(panels)

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._output.hidden_states(rows)

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[Any]:
        if self._head.output:
            return self._head.forward(batch, inputs)
        self._head.read(batch, inputs)
        return self._output.logits(self._head.outputs(batch.logit_rows), batch.needs)

    def outputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._head.outputs(rows)
