"""The first layers of a model on several GPUs: each has some that follow each other, their cache and their states.

A step goes from one GPU to the next, as the residual stream does. Each replays its own recordings, which are launched
one behind another: the host waits for the last GPU alone, an event between two makes the second wait for the first.
Only one computes at a time, but where layers' experts are spread over all (card_link.py), so several GPUs are for
models that one does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.batch import Batch, LogitsNeed
from powerinfer.devices.choices import Choice
from powerinfer.devices.gpu import GpuLayers
from powerinfer.devices.split import SplitExecutor
from powerinfer.devices.states import Slots
from powerinfer.devices.trace import Trace
from powerinfer.errors import RequestError
from powerinfer.formats.quant import Float32

if TYPE_CHECKING:
    from powerinfer.devices.step_buffers import PassedRows

SINGLE_TRACE = "a trace is of one GPU, and this model is on {}: leave out --trace, or name one with --gpu"


class SeveralGpus:
    """Layers on several devices, in the order in which a step runs them, as `GpuLayers` has those of one."""

    def __init__(self, cards: Sequence[GpuLayers]) -> None:
        """cards: at least two, each with the layers behind those of the card before; the last one may have the head."""
        assert len(cards) > 1 and not any(card.has_head for card in cards[:-1])
        assert len({(card.n_pages, card.max_tokens) for card in cards}) == 1
        self.cards = tuple(cards)
        last = cards[-1]
        self.layers = last.layers
        self.n_pages = last.n_pages
        self.max_tokens = last.max_tokens

    @property
    def place(self) -> str:
        """The names of the devices."""
        return ", ".join(card.place for card in self.cards)

    @property
    def has_head(self) -> bool:
        """Whether a step ends in logits."""
        return self.cards[-1].has_head

    @property
    def shares(self) -> bool:
        """Whether the CPU has a part in steps of few tokens."""
        return any(card.shares for card in self.cards)

    @property
    def caller(self) -> Choice[str] | None:
        """The choice of who acts in steps of few tokens, as of `GpuLayers`; of GPUs that differ each one's."""
        choices = list(dict.fromkeys(card.caller for card in self.cards if card.caller is not None))
        if len(choices) < 2:
            return choices[0] if choices else None
        return Choice("; ".join(f"{card.place}: {card.caller}" for card in self.cards))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights read per token, but for those of parts."""
        return sum(card.bytes_per_token for card in self.cards)

    def memory(self) -> dict[str, int]:
        """Bytes on all devices by part, as of `GpuLayers.memory`."""
        sums: Counter[str] = Counter()
        for card in self.cards:
            sums.update(card.memory())
        return dict(sums)

    def run(self, batch: Batch, x: Float32, slots: Slots | None = None, inputs: Float32 | None = None) -> NDArray[Any]:
        """Run a step as `GpuLayers.run` does, with its arguments and errors."""
        rows: Float32 | PassedRows = x
        *first, last = self.cards
        try:
            for card in first:
                rows = card.pass_on(batch, rows, slots, inputs)
            result = last.run(batch, rows, slots, inputs)
            for card in first:
                card.check_passed()
        except BaseException:
            for card in self.cards:  # they may still read what the next step writes
                card.break_off()
            raise
        for card in first:
            card.end_step(len(batch.tokens))
        return result

    def hidden_states(self, rows: NDArray[np.int32]) -> Float32:
        """Hidden states as of `GpuLayers.hidden_states`."""
        return self.cards[-1].hidden_states(rows)

    def logits(self, hidden: Float32, needs: LogitsNeed = LogitsNeed.LOGITS) -> NDArray[Any]:
        """Logits as of `GpuLayers.logits`."""
        return self.cards[-1].logits(hidden, needs)

    def noted(self, _: Trace) -> AbstractContextManager[None]:
        """RequestError: events of two devices have no common clock."""
        raise RequestError(SINGLE_TRACE.format(self.place))

    def close(self) -> None:
        """Free all memory; the layers cannot be used afterwards."""
        for card in self.cards:
            card.close()


class OneCard(SplitExecutor):
    """An executor on several GPUs with one of these as the GPU, for what is measured of it; steps are those of all."""

    def __init__(self, executor: SplitExecutor, card: GpuLayers) -> None:
        """The same memory: it is not closed."""
        self.__dict__.update(executor.__dict__)
        self._executor = executor
        self.gpu = card
        if card is not executor.cards[-1]:  # whose layers stream through the last one
            self.streamed = None

    def forward(self, batch: Batch) -> NDArray[Any]:
        return self._executor.forward(batch)
