"""Exchange between a GPU and the CPU, for layers that both of them compute.

In steps of few tokens, where the device can, kernels write it into memory of the host and read the CPU's sums there;
else, and in steps of more tokens, it is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import ExpertsConfig, ModelConfig
from powerinfer.devices.flags import FLAG_BYTES, PATIENCE, Flags, LateAnswerError
from powerinfer.devices.streams import Event, streams_of
from powerinfer.errors import PowerInferError
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.kernels import gpu_host
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.kernels.gpu_types import CallAnswer

if TYPE_CHECKING:
    from torch import Tensor, device

Way = Literal["flags", "calls", "waits"]
"""Exchange of both devices in steps of few tokens: the GPU calls the CPU by flags, or by functions, or the host
waits for the GPU."""

WAYS: tuple[Way, ...] = ("flags", "calls", "waits")

EXPERT_BYTES = 8
"""Bytes of a token's expert in a selection: its number and its weight."""


def link_bytes(max_tokens: int, config: ModelConfig) -> int:
    """Bytes of the buffers of a `Link` in RAM, with those of flags, which not every device has."""
    rows = 2 * 4 * max_tokens * config.d_model + _few_bytes(max_tokens, config)
    return rows + selection_bytes(max_tokens, config) + _hidden_bytes(config) + FLAG_BYTES


def selection_bytes(max_tokens: int, config: ModelConfig) -> int:
    """Bytes of the largest selection. Single neurons are selected in steps of up to NEURON_TOKENS tokens, since more of
    them select nearly all. Experts are, with their weights, in every step."""
    neurons = min(max_tokens, NEURON_TOKENS) * max(config.ffn_sizes)
    experts = (one.ffn.router.top_k for one in config.layers if isinstance(one.ffn, ExpertsConfig))
    return max(neurons, max_tokens * EXPERT_BYTES * max(experts, default=0))


def _few_bytes(max_tokens: int, config: ModelConfig) -> int:
    """Bytes of the selections of all layers with experts, in steps of few tokens."""
    most = max((one.router.top_k for one in config.experts.values()), default=0)
    return len(config.experts) * min(max_tokens, NEURON_TOKENS) * EXPERT_BYTES * most


def _hidden_bytes(config: ModelConfig) -> int:
    """Bytes of what a predictor has made of the layer's input, where the CPU gets that no more, but latents: its rank
    is at most the width of the layer."""
    latents = any(one.latents for one in config.experts.values())
    return 4 * NEURON_TOKENS * config.d_model if latents else 0


class _SharedBuffers(NamedTuple):
    """The buffers in RAM as the device has them."""

    host: Tensor
    back: Tensor
    hidden: Tensor | None
    few: Tensor | None


class Link:
    """Buffers between a GPU and the CPU, one set for all layers, at fixed addresses.

    In place, kernels that make the input of the neurons and the selection write both into the host's buffer, and the
    sums are added from there. Else, on the GPU both are adjacent, so that one copy sends both; the CPU waits only for
    that part of the GPU's work. A selection that is known before the input is sent before it, by a copy of its own. A
    buffer is reused only when the next layer's input, or selection, has arrived, which is after the previous layer's
    sum was added. Only experts that are selected in place have a buffer for each layer: the CPU counts them, and is not
    waited for where a kernel has answered its call (`answer`).
    """

    def __init__(self, to: device, max_tokens: int, config: ModelConfig) -> None:
        import torch

        d_model, streams = config.d_model, streams_of(to)
        self._d_model = d_model
        self._with_experts = list(config.experts)
        selection = selection_bytes(max_tokens, config)
        nbytes = 4 * max_tokens * d_model + selection
        self._on_device = torch.zeros(nbytes, dtype=torch.uint8, device=to)
        self._host = streams.pinned(nbytes, torch.uint8)
        self._hot = torch.zeros(selection, dtype=torch.uint8, device=to)
        self._back = streams.pinned((max_tokens, d_model), torch.float32)
        self._hidden = streams.pinned(_hidden_bytes(config), torch.uint8)
        rows = len(config.experts)
        self._few = streams.pinned((rows, _few_bytes(max_tokens, config) // max(1, rows)), torch.uint8)
        self._counters = torch.zeros(3, dtype=torch.int32, device=to)  # as of `CallAnswer`
        self._came, self._selection_known = streams.event(), streams.event()
        self.calls = _native.HostCalls()
        self._streams, self._beside = streams, streams.stream()
        self._computed: Event | None = None
        self.flags: Flags | None = None  # None: the GPU calls by functions alone
        self._mapped: _SharedBuffers | None = None  # None: everything is copied
        self._no_mapped = ""  # why
        self._views: dict[tuple[int, int], tuple[Float32, Bytes | None, Float32]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in RAM, with room for flags."""
        return int(self._host.nbytes + self._back.nbytes + self._hidden.nbytes + self._few.nbytes) + FLAG_BYTES

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the buffers on the GPU, but for a few numbers."""
        return int(self._on_device.nbytes + self._hot.nbytes)

    # ---------------------------------------------------------------- on the GPU: the same for every step of a shape

    def read(self, tokens: int) -> Tensor:
        """Buffer for the input of the neurons, float32 [tokens, d_model]."""
        import torch

        return self._on_device[: 4 * tokens * self._d_model].view(torch.float32).view(tokens, self._d_model)

    def sent(self, tokens: int) -> Tensor | None:
        """The host's buffer for that input, where it is written in place; None: `send` copies it."""
        import torch

        mapped = self._mapped_for(tokens)
        if mapped is None:
            return None
        return mapped.host[: 4 * tokens * self._d_model].view(torch.float32).view(tokens, self._d_model)

    def selected(self, tokens: int, hot: int, cold: int) -> tuple[Tensor, Tensor]:
        """Buffers for the selection of neurons, uint8 [tokens, hot] and [tokens, cold], the latter for the CPU
        alone."""
        mapped = self._mapped_for(tokens)
        out = self._selection(self._on_device if mapped is None else mapped.host, tokens, cold)
        return self._hot[: tokens * hot].view(tokens, hot), out.view(tokens, cold)

    def experts(self, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Buffers for the experts of each token, int32 [tokens, top_k], and their weights, float32."""
        return self._experts(self._selection(self._on_device, tokens, EXPERT_BYTES * top_k), tokens, top_k)

    def packed(self, tokens: int, top_k: int) -> Tensor:
        """The buffers of `read` and `experts`, which follow each other, as numbers, float32."""
        import torch

        return self._on_device[: tokens * (4 * self._d_model + EXPERT_BYTES * top_k)].view(torch.float32)

    def sent_experts(self, tokens: int, top_k: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """The host's buffers for the same of a layer, as of `sent`."""
        mapped = self._mapped_for(tokens)
        if mapped is None or mapped.few is None:
            return None
        row = mapped.few[self._with_experts.index(layer)]
        return self._experts(row[: tokens * EXPERT_BYTES * top_k], tokens, top_k)

    def answer(self, number: int, tokens: int) -> CallAnswer | None:
        """The means by which kernels of a recording answer the call of that number themselves; None: they cannot."""
        if self.flags is None or not self.flags.recording or self._mapped_for(tokens) is None:
            return None
        return CallAnswer(self._counters, self.flags.answered, number)

    def _mapped_for(self, tokens: int) -> _SharedBuffers | None:
        return self._mapped if tokens <= NEURON_TOKENS else None

    def _selection(self, memory: Tensor, tokens: int, nbytes: int) -> Tensor:
        begin = 4 * tokens * self._d_model
        return memory[begin : begin + tokens * nbytes]

    def _experts(self, selection: Tensor, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
        import torch

        numbers, weights = selection.chunk(2)
        return numbers.view(torch.int32).view(tokens, top_k), weights.view(torch.float32).view(tokens, top_k)

    def send(self, tokens: int, cold: int) -> None:
        """Send the input, and `cold` bytes a token of the selection (0: none), to the CPU, if they are not there."""
        if self._mapped_for(tokens) is not None:
            return
        nbytes = tokens * (4 * self._d_model + cold)
        self._host[:nbytes].copy_(self._on_device[:nbytes], non_blocking=True)

    def send_experts(self, tokens: int, top_k: int) -> None:
        """Send the experts of each token, and their weights, to the CPU, likewise: the input follows."""
        if self._mapped_for(tokens) is not None:
            return
        begin = 4 * tokens * self._d_model
        end = begin + tokens * EXPERT_BYTES * top_k
        self._host[begin:end].copy_(self._on_device[begin:end], non_blocking=True)

    def send_input(self, x: Tensor) -> None:
        """Send another input than `read`, float32 [tokens, width], at most as wide, to the CPU."""
        mapped = self._mapped_for(len(x))
        self._send_rows(x, self._host, None if mapped is None else mapped.host)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send what a predictor has made of the layer's input, float32 [tokens, rank], to the CPU: for experts of
        latents, of few tokens."""
        mapped = self._mapped_for(len(hidden))
        self._send_rows(hidden, self._hidden, None if mapped is None else mapped.hidden)

    def _send_rows(self, rows: Tensor, to: Tensor, mapped: Tensor | None) -> None:
        import torch

        if mapped is None:
            to[: rows.nbytes].copy_(rows.contiguous().view(torch.uint8).view(-1), non_blocking=True)
        else:
            gpu_host.put(rows, mapped[: rows.nbytes].view(torch.float32).view(rows.shape))

    def add_back(self, x: Tensor, answer: CallAnswer | None = None) -> None:
        """x float32 [tokens, d_model] += the CPU's sums. answer: by which its call may have been answered here."""
        mapped = self._mapped_for(len(x))
        if mapped is None:
            x.add_(self.sums(len(x), self._d_model))
        else:
            gpu_host.add(mapped.back[: len(x)], x, answer)

    def sums(self, tokens: int, width: int, answer: CallAnswer | None = None) -> Tensor:
        """The CPU's sums, float32 [tokens, width], in memory of the device; answer: likewise."""
        mapped = self._mapped_for(tokens)
        back = self._back if mapped is None else mapped.back
        sums = back.view(-1)[: tokens * width].view(tokens, width)
        return sums.to(self._on_device.device, non_blocking=True) if mapped is None else gpu_host.take(sums, answer)

    # ---------------------------------------------------------------- the CPU's part as a call of the GPU's, likewise

    def empty_call(self) -> _native.HostCall:
        """One that computes nothing. Calls must outlive the recordings they are in."""
        return _native.HostCall(self.calls)

    def neuron_call(self, neurons: _native.NeuronSum, tokens: int, cold: int) -> _native.NeuronCall:
        """One that computes their sum; tokens, cold: as of `views`."""
        x, selected, out = self.views(tokens, cold)
        return _native.NeuronCall(self.calls, neurons, x, out, selected)

    def begin(self, call: _native.HostCall, number: int) -> None:
        """The GPU calls the CPU once all that was sent has arrived, and goes on meanwhile with what it is given until
        `join`: by flags in a recording of theirs, else by a function. number: of the call in its step, as of
        `Flags`."""
        if self.flags is not None and self.flags.recording:
            self.flags.ask(number, call)
            return
        # New events, since one of a recording means nothing outside of it.
        sent, self._computed = self._streams.event(), self._streams.event()
        sent.record()
        self._beside.wait_event(sent)
        self._streams.call(self._beside, call.function, call.data)
        self._computed.record(self._beside)

    def join(self, number: int) -> None:
        """Let what the GPU is given from now on begin once the last call has returned, which has that number."""
        if self.flags is not None and self.flags.recording:
            self.flags.wait(number)
            return
        assert self._computed is not None
        self._streams.current().wait_event(self._computed)

    def try_call(self) -> str | None:
        """The reason why the GPU cannot call the CPU from a recording; None: it can, in a trial."""
        trial, streams = self.empty_call(), self._streams
        self._trial = trial  # a call must outlive what may still be under way

        def run() -> None:
            self.begin(trial, 1)
            self.join(1)

        try:
            record = streams.recorder()
            again = run if record is None else record(run)
            for _ in range(2):
                again()
            streams.finish()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        calls, *_ = trial.take()
        return None if calls == 2 else f"it made {calls} of 2 calls"

    def try_ways(self) -> tuple[tuple[Way, ...], str]:
        """The ways that both devices can exchange in, by trials, the one that should be the fastest first; and why
        these are not all, and nothing is written in place."""
        self._try_in_place()
        ways, reason = self._try_calls()
        return ways, "; ".join(filter(None, (reason, self._no_mapped and f"by copies: {self._no_mapped}")))

    def _try_calls(self) -> tuple[tuple[Way, ...], str]:
        if (reason := self.try_call()) is not None:
            return WAYS[2:], reason
        if (reason := self.try_flags()) is not None:
            return WAYS[1:], f"no flags: {reason}"
        return WAYS, ""

    def _try_in_place(self) -> None:
        """Let kernels write and read the host's memory from now on, in steps of few tokens, if they can."""
        streams = self._streams
        try:
            memories = self._host, self._back, self._hidden, self._few
            host, back, hidden, few = (streams.mapped(one) if one.nbytes else None for one in memories)
            assert host is not None and back is not None
            self._mapped = _SharedBuffers(host, back, hidden, few)
            self._exchange()
        except RuntimeError as error:
            self.copy(str(error).partition("\n")[0])

    def copy(self, reason: str) -> None:
        """Copy everything from now on, for that reason; not while a step runs, nor once one was recorded."""
        self._mapped, self._no_mapped = None, reason

    def _exchange(self) -> None:
        """A trial in place. RuntimeError where numbers do not arrive, from kernels or from those of a recording."""
        import torch

        streams, tokens = self._streams, min(len(self._back), NEURON_TOKENS)
        x = torch.zeros((tokens, self._d_model), device=self._on_device.device)

        def run() -> None:
            self.add_back(x)
            self.send_input(x)

        record, again = streams.recorder(), run
        numbers = np.arange(x.numel(), dtype=np.float32).reshape(x.shape)
        received, _, back = self.views(tokens, 0)
        for turn in range(4):
            back[:] = numbers + turn
            again()
            streams.finish()
            if not np.array_equal(received, (turn + 1) * numbers + turn * (turn + 1) // 2):
                raise RuntimeError("its kernels do not see what the host has written, or the host what they have")
            if not turn and record is not None:  # kernels are loaded now
                again = record(run)
        back[:] = received[:] = 0

    def try_flags(self) -> str | None:
        """The reason why the GPU cannot call the CPU by flags; None: it does from now on, by recorders of `flags`."""
        try:
            flags = Flags(self._streams)
        except RuntimeError as error:
            return str(error)
        device, in_place = self._on_device.device, self._mapped is not None
        reason = flags.trial(device, in_place=in_place)
        if reason is not None and in_place and flags.trial(device) is None:
            self.copy(reason)
            reason = None
        self.flags = flags if reason is None else None
        return reason

    def begin_step(self) -> None:
        """A step begins, and what failed in earlier ones is void; nothing of them is under way."""
        self.calls.begin()
        if self.flags is not None:
            self.flags.begin()

    def release(self) -> None:
        """A step is broken off: the GPU waits for no answer any more."""
        if self.flags is not None:
            self.flags.release()

    def check(self) -> None:
        """PowerInferError if a call of this step failed; LateAnswerError if one was not answered in time."""
        begin = "the CPU's part of a step failed"
        if failure := self.calls.take_failure():
            raise PowerInferError(f"{begin}: {failure}")
        if self.flags is not None and self.flags.released:
            late = f"it did not answer for {PATIENCE:.0f} s; stop what keeps it from its cores"
            raise LateAnswerError(f"{begin}: {late}")

    # ---------------------------------------------------------------- on the CPU, between what the GPU does

    def mark(self) -> None:
        """`wait` waits for everything sent so far. The host can only wait for events outside of recordings."""
        self._came.record()

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        self._came.synchronize()

    def mark_experts(self) -> None:
        """`wait_experts` waits for everything sent so far."""
        self._selection_known.record()

    def wait_experts(self) -> None:
        """Wait until the experts that were sent before the input have arrived."""
        self._selection_known.synchronize()

    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._came.query()

    def views(self, tokens: int, cold: int) -> tuple[Float32, Bytes | None, Float32]:
        """The received input, float32 [tokens, d_model], and selection, uint8 [tokens, cold], None if cold is 0; and
        the buffer for the sums, float32 [tokens, d_model]."""
        key = tokens, cold
        if key not in self._views:
            received = self._host.numpy()
            end = 4 * tokens * self._d_model
            selected = received[end : end + tokens * cold].reshape(tokens, cold) if cold else None
            x = received[:end].view(np.float32).reshape(tokens, self._d_model)
            self._views[key] = x, selected, self._back[:tokens].numpy()
        return self._views[key]

    def received_experts(
        self, tokens: int, top_k: int, layer: int, latents: int = 0
    ) -> tuple[Float32, NDArray[np.int32], Float32, Float32]:
        """The received input; each token's experts of a layer, int32 [tokens, top_k], and their weights; the buffer for
        the sums. latents: the width of both, 0: that of the layer."""
        x, selected, out = self.views(tokens, EXPERT_BYTES * top_k)
        assert selected is not None
        selected = selected.reshape(-1)
        if self._mapped_for(tokens) is not None:
            selected = self._few[self._with_experts.index(layer)].numpy()[: len(selected)]
        numbers, weights = np.split(selected, 2)
        shape = tokens, top_k
        if latents:
            x, out = (each.reshape(-1)[: tokens * latents].reshape(tokens, latents) for each in (x, out))
        return x, numbers.view(np.int32).reshape(shape), weights.view(np.float32).reshape(shape), out

    def received_hidden(self, tokens: int, rank: int) -> Float32 | None:
        """Products of a predictor of that rank with the layer's input, float32 [tokens, rank]; None: for no rank, and
        for many tokens."""
        if not rank or tokens > NEURON_TOKENS:
            return None
        received: Float32 = self._hidden.numpy()[: 4 * tokens * rank].view(np.float32).reshape(tokens, rank)
        return received
