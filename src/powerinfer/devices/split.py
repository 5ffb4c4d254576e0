"""An executor with its first layers on a GPU and the others on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.choices import Choice, GpuPart, launched_afterwards
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.drafter import GpuDraftHead, SplitDraftHead
from powerinfer.devices.flags import LateAnswerError
from powerinfer.devices.torch_device import gpu_failures
from powerinfer.devices.trace import Trace, span
from powerinfer.kernels.gpu import FEW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer import _native
    from powerinfer.devices.disk import DiskTier
    from powerinfer.devices.drafter import DraftHead
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.several import SeveralGpus
    from powerinfer.devices.streamed import StreamedLayers


class SplitExecutor:
    """Embedding on the CPU, the layers of `gpu`, those of `cpu`, and the head on whichever has it.

    cards: the GPUs, `gpu` the only or the first one.

    streamed: those of `cpu` that the GPU computes in steps of many tokens; None: none.

    The result for a token is the same on every run. Its rounding may depend on the number of tokens in the call.
    """

    overlaps = True  # it calls `Batch.meanwhile`

    def __init__(
        self,
        cpu: CpuExecutor,
        gpu: GpuLayers | SeveralGpus,
        streamed: StreamedLayers | None = None,
        reason: str = "",
        draft: GpuLayers | None = None,
    ) -> None:
        """reason: for the layers that the GPU has; draft: the draft head there, None: the CPU has it, if any."""
        assert cpu.n_pages == gpu.n_pages and cpu.max_tokens == gpu.max_tokens and cpu.first_layer == gpu.layers
        self.cpu = cpu
        self._gpu = gpu
        self.cards = gpu.cards
        self.gpu = self.cards[0]
        self.streamed = streamed
        self.page_size = cpu.page_size
        self.n_states = cpu.n_states
        self.undo_tokens = cpu.undo_tokens
        self.drafter: DraftHead | None = cpu.drafter
        self.draft = draft
        if draft is not None:
            self.drafter = GpuDraftHead(draft, gpu, cpu.embedding)
        elif cpu.drafter is not None and gpu.has_head:
            self.drafter = SplitDraftHead(cpu.drafter, gpu)
        self.n_pages = cpu.n_pages
        self.max_tokens = cpu.max_tokens
        self.vocab_size = cpu.vocab_size
        self.trace: Trace | None = None
        pages = cpu.choices.kv_cache
        assert pages is not None
        more = f", {gpu.memory()['kv'] >> 20} MiB on the GPU"
        part = GpuPart(gpu.layers, gpu.has_head, gpu.place)
        self.choices = replace(cpu.choices, gpu=Choice(part), kv_cache=pages.add(more), steps=gpu.caller)
        self._refusal = self._launch_ahead()
        self.tell_launches()
        if reason:
            self.tell(reason)
        if self.drafter is not None:
            self.tell(f"the draft head on the {'CPU' if draft is None else 'GPU'}")

    def _launch_ahead(self) -> str | None:
        """Let steps be launched ahead of their tokens, where they can be; the reason why they cannot, empty: they can,
        None: none is recorded."""
        reason = self._launch_problem()
        if reason is None:
            reason = self.gpu.launch_ahead(self.cpu) or ""
        return reason if self.gpu.records else None

    def _launch_problem(self) -> str | None:
        """The reason why no step of this model can be launched ahead, whatever the device can do; None: there is
        none."""
        cpu = self.cpu
        if len(self.cards) > 1:
            return "a step goes through several GPUs"
        if not self.gpu.has_head:
            return "the CPU has the output head"
        if cpu.n_states:
            return "layers have states"
        if cpu.disk is not None:
            return "a part of the model stays on disk"
        return None if cpu.looks_up else "embeddings are not rows of a table alone"

    def tell_steps(self) -> None:
        """Note in the choices who acts in steps on both devices, of all GPUs."""
        self.choices.steps = self._gpu.caller

    def tell_launches(self) -> None:
        """Note in the choices whether steps are launched ahead of their tokens, which depends on how both devices
        exchange."""
        reason = self._refusal
        if reason is None:
            return
        reason = reason or self.gpu.launched_afterwards
        drawn = "where these are the most likely ones, or drawn among them"
        self.choices.launches = launched_afterwards(reason) if reason else Choice("ahead of the tokens", drawn)

    def tell(self, more: str) -> None:
        """Add to the text on the GPU's part."""
        assert self.choices.gpu is not None
        self.choices.gpu = self.choices.gpu.add(f", {more}")

    @property
    def pool(self) -> _native.Pool:
        """Threads of the CPU's part."""
        return self.cpu.pool

    @property
    def disk(self) -> DiskTier | None:
        """The part that stays on disk of the CPU's layers, and of experts and neurons that are split."""
        return self.cpu.disk

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights read per token, on both devices together."""
        return self.cpu.bytes_per_token + self._gpu.bytes_per_token

    def forward(self, batch: Batch) -> NDArray[Any]:
        if self.gpu.awaits(batch):
            try:
                return self._collect(batch)
            except LateAnswerError:  # what the GPU has computed is void
                pass
        if self.gpu.launched_ahead:
            self.drop_successor()
        # In a step of few tokens the CPU waits for the GPU longer than its threads do, and has little to do then.
        awake = len(batch.tokens) <= FEW and self._on_both
        if self.trace is None and not awake:
            return self._forward(batch)
        with (
            nullcontext() if self.trace is None else self.trace.step(),
            self.cpu.awake() if awake else nullcontext(),
        ):
            return self._forward(batch)

    def drop_successor(self) -> None:
        """End a step that was launched ahead, as no other one follows soon. PowerInferError when the device fails."""
        with gpu_failures("computing a token", "lower --max-batch or --vram"):
            self.gpu.drop_next()

    def _collect(self, batch: Batch) -> NDArray[Any]:
        """The result of a step that was launched ahead."""
        if self.gpu.shares:
            with self.cpu.awake():
                result = self.gpu.collect(batch)
        else:
            result = self.gpu.collect(batch)
        self.cpu.end(batch)
        return result

    @property
    def divided(self) -> bool:
        """Whether a step has work for the CPU behind the embedding."""
        return not self._gpu.has_head or self._gpu.shares

    @property
    def _on_both(self) -> bool:
        """The same, all of it in RAM: reads take longer than threads take to wake."""
        return self.cpu.disk is None and self.divided

    def _forward(self, batch: Batch) -> NDArray[Any]:
        with span(self.trace, "cpu", "embedding", -1):
            x = self.cpu.embedded(batch)
        result = self._gpu.run(batch, x, self.cpu.slots, self.cpu.step_inputs(len(batch.tokens)))
        if not self._gpu.has_head:
            x[:] = result
            if self.streamed is not None and self.streamed.takes(batch):
                result = self.streamed.finish(batch, self.trace)
            else:
                with span(self.trace, "cpu", "layers and head", -1):
                    result = self.cpu.finish(batch)
        self.cpu.end(batch)
        return result

    def hidden_states(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._gpu.hidden_states(rows) if self._gpu.has_head else self.cpu.hidden_states(rows)

    @contextmanager
    def traced(self) -> Iterator[Trace]:
        """Trace the steps within this context; operators that sum neurons elsewhere add their own spans.

        What is replayed is recorded anew with the spans in it.
        """
        self.trace = Trace(self.gpu.device)
        try:
            with self._gpu.noted(self.trace):
                yield self.trace
        finally:
            self.trace = None

    def close(self) -> None:
        self.drafter = None
        if self.draft is not None:
            self.draft.close()
        if self.streamed is not None:
            self.streamed.close()
        self._gpu.close()
        self.cpu.close()
