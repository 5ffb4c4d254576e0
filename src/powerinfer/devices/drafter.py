"""The draft head of a model (MTP): one layer that predicts the token after the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.devices.batch import Batch


class DraftHead(Protocol):
    """A model's draft head, on the model's own device.

    It writes to the pages of the model's KV cache, of which its layer is one more, and changes nothing that the model
    reads: a draft may be wrong, or left out. A token's logits do not depend on the batch or the chunk.
    """

    def inputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """What the head reads of tokens of the last `forward` of the model, float32 [n, d_model].

        rows: int32 [n], their indices in its batch. To be asked for before the next `forward` of either.
        """
        ...

    def forward(self, batch: Batch, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Write keys and values of the head's layer and return logits, float32 [R, vocab_size], of the token after the
        one that a position is given.

        batch.tokens: at each position the token that follows it; inputs: float32 [T, d_model], of `inputs` or
        `outputs`, of each position. The states of a batch are neither read nor written. The result is a view that stays
        valid until the next call; logits of the model stay valid. StoppedError: of a batch that was stopped.
        """
        ...

    def outputs(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """What a further draft reads: the head's own hidden states of tokens of its last `forward`, float32
        [n, d_model]. rows, and when: as of `inputs`."""
        ...
