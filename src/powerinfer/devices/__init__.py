"""The protocol of executors, which compute forward passes for the runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from powerinfer.devices.batch import Batch as Batch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.devices.choices import Choices
    from powerinfer.devices.disk import DiskTier
    from powerinfer.devices.drafter import DraftHead
    from powerinfer.devices.trace import Trace

__all__ = ["Batch", "Executor"]


class Executor(Protocol):
    """A model loaded on a device, with its KV cache.

    The result for a token must not depend on the batch, the chunk or the cache page it is computed in.
    """

    page_size: int  # tokens of a KV page
    n_pages: int  # pages of the whole KV cache
    n_states: int  # slots for the states of sequences; 0: no layer has any
    max_tokens: int  # maximum tokens of one forward call
    vocab_size: int
    choices: Choices  # made for this machine (instruction set, threads, ...), with their reasons

    @property
    def drafter(self) -> DraftHead | None:
        """The model's draft head; None: it has none, or was loaded without it."""
        ...

    @property
    def disk(self) -> DiskTier | None:
        """The part of the model that stays on disk, until `close`; None: there is none."""
        ...

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of weights read per decoded token if every neuron is computed; None: unknown."""
        ...

    def forward(self, batch: Batch) -> NDArray[Any]:
        """Write the keys and values of the batch's tokens and return logits, float32 [R, vocab_size].

        Of a batch that `needs` no more it may be tokens, int32 [R], those of the largest logits, of equals the first,
        with a number of `NOT_FINITE` where that is none; or records of `candidates.CANDIDATES`, [R], behind which
        `batch.logits` makes the logits. The result is a view that stays valid until the next call. StoppedError: of a
        batch that was stopped.
        """
        ...

    def hidden_states(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """The hidden states after the final norm, float32 [n, d_model], of tokens of the last `forward`.

        rows: int32 [n], their indices in its batch. The logits that `forward` returned stay valid.
        """
        ...

    def traced(self) -> AbstractContextManager[Trace]:
        """Trace the steps within this context. RequestError if no layer runs on a GPU."""
        ...

    def close(self) -> None:
        """Free the weights and the cache; the executor cannot be used afterwards."""
        ...
