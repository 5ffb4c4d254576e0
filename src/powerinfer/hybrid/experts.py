"""FFNs whose terms are experts, see terms.py: the router, on the GPU, selects a few for each token.

An expert is on one device, unless a policy exchanges those on the GPU: then the CPU has all. A token's experts are
added up in their order, on each device by itself. Where experts are placed changes how the sum is rounded and, for
types that the GPU lacks and converts, their weights by as much as Q8_0 rounds.

A router that reads what the layer gets runs before attention, and the selection is sent ahead of the experts' input:
the CPU orders its rows and fetches weights into its caches while attention runs.

A predictor inside experts runs on each device, for the experts that this one has. Where these read latents, which the
GPU makes of the layer's input and sends in its place, it makes and sends what the predictor's first matrix gives, too.

Where a predictor selects a layer may be split by neurons inside its experts instead (`ExpertSplit.inside`): the GPU has
copies of the same number of hot ones of each, and steps of few tokens add up these there, the others on the CPU. Longer
steps, whose tokens need nearly all neurons, are whole: the CPU, or the GPU through which all stream, computes them.

For a long prompt, whose tokens select nearly all experts, the cold ones stream to the GPU as the CPU has them, or where
it tells their neurons apart from the model's file. Where RAM does not hold all cold experts they rest on disk
(devices/disk.py): the CPU reads those that are selected and that it does not have, and computes the others meanwhile,
in prompts, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ExpertsConfig
from powerinfer.devices.cpu import CpuExecutor, ExpertSum
from powerinfer.devices.cpu_experts import shared_place
from powerinfer.devices.gpu_weights import Matrices, StoredMatrix
from powerinfer.devices.link import EXPERT_BYTES
from powerinfer.devices.registered import lines_bytes
from powerinfer.devices.stage import BUFFERS, Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.devices.trace import span
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.quant import Bytes
from powerinfer.formats.tensors import ExpertWeights, RawTensor, RestingTensor
from powerinfer.hybrid.copier import Copier, Send
from powerinfer.hybrid.spread import ExpertShare, experts_on
from powerinfer.hybrid.terms import HybridTerms, Split, SplitSparsity
from powerinfer.kernels import gpu, gpu_experts, gpu_host, gpu_panels
from powerinfer.kernels.cpu import LANES, NEURON_TOKENS, ExpertPanels
from powerinfer.kernels.gpu_types import Elsewhere, tensor_bytes
from powerinfer.neurons import BUNDLE_GROUP, Indices, Predictor

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.cpu_experts import ByNeuron
    from powerinfer.devices.cpu_ffn import Selecting
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.kernels.gpu_types import Experts


class HybridExperts(HybridTerms):
    """The FFN of one layer of `GpuLayers` over experts."""

    terms = "experts"
    most = 2
    _freed = (
        "_router", "_factors", "_separate", "_shared", "_shared_weight", "_latents",
        "_slots", "_table", "_biases", "_linked_experts", "_expert_shares", "_not_cold",
        "_tensors", "_disk", "_inner", "_predictors", "_shared_part", "_sent_panels",
    )  # fmt: skip

    def __init__(
        self, split: ExpertSplit, cpu: CpuExecutor, layers: GpuLayers, layer: int, weights: ExpertWeights
    ) -> None:
        """RequestError where experts cannot be swapped, PowerInferError if a device runs out of memory."""
        super().__init__(layer, layers, split.stage)
        config = cpu.config.with_draft.layers[layer].ffn
        assert isinstance(config, ExpertsConfig)
        self.config = config
        self.top_k = config.router.top_k
        hot = split.hot[layer]
        self._inside = split.inside.get(layer)  # int32 [experts, some]
        self._linked_experts = experts_on(layers.card_links, split.spread, layer)
        self._copier = copier = split.copier if len(hot) else None
        if copier is not None:
            copier.use(layers.device, split.stage)
            hot = copier.policy.resident(layer).copy()
        self._swapped, self._suspended, self._hot_whole = True, False, split.hot_whole
        self._beside: Future[object] | None = None  # what the CPU computes beside what streams
        # For calls: of each expert its place on the CPU, -1 where it is on the GPU; what tokens of steps of few tokens
        # select, as of `calls`, which only grows, and what of it was collected.
        self._call_places = np.full(config.n_experts, -1, np.int32)
        self.tally, self._collected = (np.zeros(config.n_experts + 1, np.int64) for _ in range(2))
        self._disk = cpu.disk if cpu.disk is not None and layer in cpu.disk.about.experts else None
        with gpu_failures(f"loading the experts of layer {layer}", "give less --vram"), current(layers.device):
            self._predictors = None if config.whole_reason is not None else cpu.expert_predictors
            self._inner: gpu.Weight | None = None  # of the predictor of the GPU's experts
            self._upload(cpu, weights)
            self._norm, self._check_files = weights.norm, weights.check
            # Views of the model's file: no memory of their own.
            self._tensors = self._place(cpu, weights, hot)
        if split.movable and copier is None and config.bias:
            raise RequestError("--adjust does not swap experts that have biases: leave it out")
        if split.movable and copier is None and self._predicted:
            raise RequestError("--adjust does not swap experts among whose neurons a predictor selects: leave it out")
        if (split.movable or copier is not None) and self._tensors is None and self._disk is None:
            flag = "--adjust" if copier is None else f"--expert-policy {copier.policy.name}"
            raise RequestError(
                f"{flag} needs experts as a GGUF file has them, not a folder, --quantize or types without kernels"
            )
        if self._tensors is None:
            self.stage = None
        self._sent_panels = self._note_panels()
        self.clear()
        if copier is not None:
            copier.add(self)
            layers.observer = copier

    def _skips(self, cpu: CpuExecutor, down_type: str, size: int) -> bool:
        """Whether the GPU tells the neurons of experts of a size apart."""
        wanted = cpu.in_experts and not self._hot_whole and self.config.whole_reason is None and self._disk is None
        return wanted and size % BUNDLE_GROUP == 0 and gpu_experts.tells_apart(down_type, size)

    def _upload(self, cpu: CpuExecutor, weights: ExpertWeights) -> None:
        """Upload what every token needs: the router, and the shared expert where it is computed whole."""
        import torch

        device = self._layers.device

        def vector(values: NDArray[np.float32] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(np.array(values, np.float32)).to(device)

        vectors = weights.router_bias, weights.correction
        self._router = gpu_experts.upload_router(weights.router, *vectors, self.config.router, device)
        self._shared_weight = vector(weights.shared_weight)
        self._factors, self._separate = vector(weights.factors), weights.separate
        self._biases = weights.biases
        around = [Matrices([StoredMatrix(tensor, None)], [None], device) for tensor in weights.latents]
        self._latents = (around[0], around[1]) if around else None
        self._shared: tuple[Matrices, Matrices] | None = None
        self._shared_part: Experts | None = None  # the same, where its neurons are told apart
        scaled = any(one.scales is not None for one in weights.shared)  # beside its blocks
        if weights.shared and (scaled or not self._skips(cpu, weights.shared[-1].type, self.config.shared_size)):
            *first, down = (StoredMatrix(tensor, None) for tensor in weights.shared)
            inputs, output = Matrices(first, [None] * len(first), device), Matrices([down], [None], device)
            self._shared = inputs, output

    def _place(self, cpu: CpuExecutor, weights: ExpertWeights, hot: Indices) -> list[RawTensor] | None:
        """Put each expert on its device, and only there; those of the CPU in RAM, or on disk. Returns all of them, if
        RAM needs no copy, as it does not of those in a mapped file."""
        n, device = self.config.n_experts, self._layers.device
        of_slot = hot if self._copier is not None else np.sort(hot)
        self._on_other = np.isin(np.arange(n), [expert for _, index in self._linked_experts for expert in index])
        on_cpu = self._select_for_cpu(hot)
        inside, among = self._inside, None
        if inside is not None:
            of_slot, among = np.arange(n, dtype=np.int32), complement(inside, self.config.size)
        self._gpu_part = None
        self._cpu_part: ExpertSum | None = None
        self._predicted = False  # the CPU gets the layer's input before its norm, or latents and what is hidden
        self._resting: Sequence[RestingTensor] = ()
        views: list[RawTensor] | None = None

        def biases(index: Indices) -> list[NDArray[np.float32] | None]:
            return [None if bias is None else bias[index] for bias in self._biases]

        if self._disk is not None:
            self._resting = weights.resting()
            routing = weights.correction, weights.router_bias
            self._cpu_part = cpu.resting_sum(self.layer, self._resting, self._biases, *routing)

            def load(index: Indices, to: Any) -> Experts:
                slots = np.arange(len(index), dtype=np.int32)
                return gpu_experts.resident(weights.some(index), slots, self.config, to, biases(index))

            if len(of_slot):
                self._gpu_part = load(of_slot, device)
        else:
            tensors = [tensor.gathered() for tensor in weights.experts()]
            views = tensors if all(map(is_mapped, tensors)) else None
            if weights.shared and self._shared is None:
                self._place_shared(weights.shared, [tensor.type for tensor in tensors])
            by_neuron = self._skips(cpu, tensors[-1].type, self.config.size)
            if len(of_slot):
                assert by_neuron or inside is None
                predictor = self._upload_predictor() if by_neuron else None
                self._gpu_part = gpu_experts.resident(
                    tensors, of_slot, self.config, device, self._biases, by_neuron, predictor, inside
                )

            def load(index: Indices, to: Any) -> Experts:
                return gpu_experts.resident(tensors, index, self.config, to, self._biases, by_neuron)

            if len(on_cpu):
                matrices = (_rows_of(tensor, on_cpu) for tensor in tensors)
                predicted = self._cpu_predictor(weights, on_cpu, among)
                self._cpu_part = cpu.expert_sum(self.layer, matrices, biases(on_cpu), predicted, among)
                self._predicted = predicted is not None
        d_model = cpu.config.d_model
        self._expert_shares = [
            ExpertShare(link, index, self.layer, self.config, d_model, partial(load, index))
            for link, index in self._linked_experts
        ]
        self._enumerate(of_slot, on_cpu)
        return views

    def _select_for_cpu(self, hot: Indices) -> Indices:
        """The experts that can be asked of the CPU, ascending."""
        experts = np.arange(self.config.n_experts, dtype=np.int32)
        cpu_has_all = self._copier is not None or self._disk is not None
        return experts if cpu_has_all else np.setdiff1d(experts[~self._on_other], hot)

    def _enumerate(self, of_slot: Indices, on_cpu: Indices) -> None:
        """Number the experts on either device. of_slot: that of each slot on the GPU; on_cpu: those of the CPU."""
        import torch

        n = self.config.n_experts
        # Of each expert its slot on the GPU, and its place on the CPU; -1 where it is not there.
        self._slot, self._place_of = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        if self._inside is None:
            self._slot[of_slot] = np.arange(len(of_slot))
        self._place_of[on_cpu] = np.arange(len(on_cpu))
        self._place_of[self._on_other] = -1
        self.in_slot: list[int] = of_slot.tolist()
        self._table: NDArray[np.int32] | None = None  # of a copier, which uploads it
        if self._copier is None:
            self._slots = torch.arange(n, dtype=torch.int32, device=self._layers.device)
        else:
            self._slots, self._table = self._copier.table(self.layer)
        self._publish()

    def _place_shared(self, shared: Sequence[RawTensor], types: Sequence[str]) -> None:
        """Put the shared expert on the GPU, its neurons told apart. What is left out is what the CPU alone would leave
        out: with a predictor its candidates alone, where its rows can be neurons of their own."""
        import torch

        device, n, size = self._layers.device, self.config.n_experts, self.config.shared_size
        selects = None
        shared_types, d_model = [one.type for one in shared], shared[0].shape[1]
        if self._predictors is not None and shared_place(self.config, d_model, types, shared_types, predicted=True):
            settings, inner, outer = self._predictors(self.layer)
            self._inner = gpu.upload(inner, device)
            rows = outer.rows()[n * self.config.size :]
            selects = settings.threshold, RawTensor(outer.type, (1, size, outer.shape[1]), rows.reshape(-1))
        stacked = [replace(one.gathered(), shape=(1, *one.shape)) for one in shared]
        config = replace(self.config, n_experts=1, size=size)
        self._shared_part = gpu_experts.resident(stacked, np.zeros(1, np.int32), config, device, (), True, selects)
        # The place, and the weight, of a token's only one.
        self._only = torch.zeros((NEURON_TOKENS, 1), dtype=torch.int32, device=device)
        self._unit = torch.ones((NEURON_TOKENS, 1), dtype=torch.float32, device=device)

    def _predictor(self) -> tuple[Predictor, RawTensor, RawTensor] | None:
        """The predictor among the neurons of the layer's experts: inner [rank, d_model] and outer [experts, size,
        rank]; None: nothing selects. ModelError if its file has changed."""
        if self._predictors is None:
            return None
        settings, inner, outer = self._predictors(self.layer)
        n, size, rank = self.config.n_experts, self.config.size, outer.shape[1]
        return settings, inner, RawTensor(outer.type, (n, size, rank), outer.rows()[: n * size].reshape(-1))

    def _upload_predictor(self) -> tuple[float, RawTensor] | None:
        """Upload what all experts share of it; the rest, as of `gpu_experts.resident`."""
        predictor = self._predictor()
        if predictor is None:
            return None
        settings, inner, outer = predictor
        self._inner = self._inner or gpu.upload(inner, self._layers.device)
        return settings.threshold, outer

    def _cpu_predictor(
        self, weights: ExpertWeights, on_cpu: Indices, among: Indices | None
    ) -> tuple[Selecting, NDArray[np.float32] | None] | None:
        """The same of the CPU's experts, or of some neurons of each, and the norm of their input; of experts of latents
        the GPU has what they share, and there is no norm."""
        predictor = self._predictor()
        if predictor is None:
            return None
        settings, inner, outer = predictor
        cold = _rows_of(outer, on_cpu)
        n, size, rank = cold.shape
        rows = cold.data.reshape(n, size, -1)
        rows = rows if among is None else np.take_along_axis(rows, among[:, :, None], axis=1)
        outer_rows = RawTensor(outer.type, (n * rows.shape[1], rank), rows.reshape(-1))
        if self.config.latents:
            self._inner = self._inner or gpu.upload(inner, self._layers.device)
            return (settings, None, outer_rows), None
        if weights.norm is None:
            raise RequestError("--selector predicted: beside a GPU it needs an RMS norm before experts: use exact")
        return (settings, inner, outer_rows), weights.norm

    def _publish(self) -> None:
        """Tell the GPU, its calls of the CPU, and what guesses the CPU's experts, which ones are in slots."""
        import torch

        self._list()
        if self._inside is None:
            self._slots.copy_(torch.from_numpy(self._slot))
        self._not_cold = self._slots
        if self._expert_shares:
            table = np.where(self._on_other, len(self._slot), self._slot).astype(np.int32)
            self._not_cold = torch.from_numpy(table).to(self._layers.device)
        if self._table is not None:
            self._table[:] = self._slot
        self._call_places[:] = np.where(self._slot < 0, self._place_of, np.int32(-1))
        if self._disk is not None and self._cpu_part is not None:
            self._cpu_part.op.elsewhere[:] = (self._slot >= 0) | self._on_other

    def _list(self) -> None:
        self.hot = np.flatnonzero(self._slot >= 0).astype(np.int32)
        self.cold = np.flatnonzero((self._slot < 0) & ~self._on_other).astype(np.int32)

    def foresee(self, cpu: CpuExecutor, before: HybridExperts, router: RawTensor) -> None:
        """Have the last layer before with experts guess those on disk that are needed, and read them early.

        What a layer's router gets differs from what the one before it got by what is added to the stream between them,
        and by the weights of their norms: these are part of the matrix that guesses. router: [experts, d_model].
        """
        norm, other, first, second = self._norm, before._norm, before._cpu_part, self._cpu_part
        rest = self._disk is not None and before._disk is not None and self._disk.about.prefetch
        if not rest or first is None or second is None or self.config.early_router:
            return
        if norm is None or other is None or not other.all() or before.config.latents:
            return
        weights = (router.float32() * (norm / other)).astype(np.float32)
        cpu.foresee(first, second, RawTensor("F32", router.shape, weights.view(np.uint8).reshape(-1)))

    def _stored(self, expert: int) -> list[RawTensor]:
        """An expert's matrices [out, in], as the file has them. ModelError if they cannot be read."""
        if self._disk is not None:
            return self._disk.read(self._resting, expert)
        assert self._tensors is not None
        self._check_files()
        return [tensor.matrix(expert) for tensor in self._tensors]

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert on the GPU; of none there, those that one has on the CPU; or of one group of each expert's
        neurons, where some are there."""
        if self._inside is not None and self._gpu_part is not None:
            return self._gpu_part.nbytes * BUNDLE_GROUP // self._gpu_part.size
        part, n = (self._gpu_part, len(self.hot)) if self._gpu_part is not None else (self._cpu_part, len(self.cold))
        return 0 if part is None else part.nbytes // max(1, n)

    def swap(self, leave: Indices, come: Indices) -> None:
        """Exchange experts, each in the other's memory. ModelError for an expert that cannot be read from disk: it
        stays where it is."""
        assert self._gpu_part is not None and self._cpu_part is not None
        failures = gpu_failures(f"swapping experts of layer {self.layer}", "load the model again")
        try:
            with failures, current(self._layers.device):
                for old, new in zip(leave, come, strict=True):
                    slot, place = int(self._slot[old]), int(self._place_of[new])
                    into = self._stored(int(new))
                    self._swapped = False  # a swap that fails leaves an expert in neither place
                    gpu_experts.replace(self._gpu_part, slot, into, int(new), self._biases)
                    if self._disk is None:
                        self._cpu_part.replace(place, self._stored(int(old)))
                        self._place_of[old], self._place_of[new] = place, -1
                    self._slot[old], self._slot[new] = -1, slot
                    self._publish()
                    self._swapped = True
        finally:
            if not self._swapped:
                self._layers.changed(self.layer)  # what is replayed does not look whether a swap failed

    def vacate(self, slot: int) -> None:
        expert, self.in_slot[slot] = self.in_slot[slot], -1
        if expert >= 0:
            self._move(expert, -1)

    @property
    def sent_bytes(self) -> int:
        if not self._sent_panels:
            return 0
        matrices = [one.data.shape[1] for one in self._sent_panels]
        return lines_bytes([*matrices, *(4 * bias.shape[1] for bias in self._biases if bias is not None)])

    def write(self, slot: int, expert: int, send: Send) -> None:
        assert self._gpu_part is not None
        if self._sent_panels:
            matrices = [one.data[self._place_of[expert]] for one in self._sent_panels]
            biases = [bias[expert].astype(np.float32) for bias in self._biases if bias is not None]
            gpu_experts.put_panels(self._gpu_part, slot, self._sent_panels, send([*matrices, *biases]))
            return
        predictor = None if self._gpu_part.predictor is None else self._predictor()
        outer = None if predictor is None else predictor[2].matrix(expert)
        gpu_experts.replace(self._gpu_part, slot, self._stored(expert), expert, self._biases, outer)

    def occupy(self, slot: int, expert: int) -> None:
        self.in_slot[slot] = expert
        self._move(expert, slot)
        self._sums["copied"] += 1

    def _move(self, expert: int, slot: int) -> None:
        """Say where an expert is, -1: on the CPU; the copier tells the GPU."""
        assert self._table is not None
        self._slot[expert] = self._table[expert] = slot
        self._call_places[expert] = self._place_of[expert] if slot < 0 else -1
        if self._disk is not None and self._cpu_part is not None:
            self._cpu_part.op.elsewhere[expert] = slot >= 0
        self._list()

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        super().close()

    @property
    def on_gpus(self) -> int:
        return len(self.hot) + int(self._on_other.sum())

    @property
    def cold_bytes(self) -> int:
        return 0 if self._cpu_part is None else self._cpu_part.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part: ffn (router, shared expert, latents' matrices, hot experts with their rows of a
        predictor), and what all experts share of this."""
        parts = [self._router.nbytes, *(one.nbytes for one in (*(self._shared or ()), *(self._latents or ())))]
        parts += [part.nbytes for part in (self._gpu_part, self._shared_part) if part is not None]
        vectors = self._factors, self._shared_weight, self._slots
        inner = {} if self._inner is None else {"predictor": self._inner.nbytes}
        return {"ffn": sum(parts) + tensor_bytes(*vectors)} | inner

    # ---------------------------------------------------------------- a step

    @property
    def _asks_cpu(self) -> bool:
        return self._cpu_part is not None

    @property
    def _callable(self) -> bool:
        """Not where reads from disk fail by themselves."""
        return self._disk is None

    def ahead(self) -> list[Operator]:
        """Select experts where the router reads the layer's input, and send the CPU the selection."""
        if not self.config.early_router:
            return []
        operators = [self._operator("router", self._select)]
        if self._asks_cpu:
            operators.append(self._operator("selection out", self._send_experts))
            operators.append(self._host_operator("mark selection", self._mark_experts, self._begin_ahead))
        return operators

    def _chooses(self, tokens: int) -> bool:
        return self._inside is None

    def _selection(self) -> list[Operator]:
        operators = [] if self.config.early_router else [self._operator("router", self._select)]
        return operators if self._inner is None else [*operators, self._operator("predictor", self._hide)]

    def begin(self) -> list[Operator]:
        operators = super().begin()
        return [*operators, self._operator("ask GPUs", self._ask_others)] if self._expert_shares else operators

    def _ask_others(self, step: Step) -> None:
        assert step.read is not None
        x = step.read if self._latents is None else self._latents[0](step.read)
        for share in self._expert_shares:
            share.begin(self._link, x, self._latents is None)

    def _add_others(self, step: Step) -> None:
        for share in self._expert_shares:
            sums = share.sums(len(step.x))
            step.add_part(sums if self._latents is None else self._latents[1](sums))

    def _gpu_sums(self) -> list[Operator]:
        operators = []
        if self._gpu_part is not None:
            operators.append(self._operator("hot experts", self._add_hot))
        if self._shared is not None:
            operators.append(self._operator("shared expert", self._add_shared))
        if self._shared_part is not None:
            operators.append(self._operator("shared expert", self._add_shared_neurons))
        if self._expert_shares:
            operators.append(self._operator("experts of other GPUs", self._add_others))
        return operators

    def sent(self, step: Step) -> Tensor | None:
        return None if self._sends_other else super().sent(step)

    @property
    def _sends_other(self) -> bool:
        """Whether the CPU gets another input than step.read."""
        return self._latents is not None or self._predicted

    def _select(self, step: Step) -> None:
        assert step.read is not None
        tokens, sent, answer = len(step.x), None, self._answer(step)
        experts, weights = self._link.experts(tokens, self.top_k)
        if self._asks_cpu and self._cpu_has_part(step):
            sent = self._link.sent_experts(tokens, self.top_k, self.layer)
        step.routed = None  # of the layer before
        x = step.x if self.config.early_router else step.read
        x = x if self._separate is None else self._separate.router(step.x)
        elsewhere = None if answer is None else Elsewhere(self._not_cold, answer)
        gpu_experts.select(self._router, x, experts, weights, sent, elsewhere)
        if self._factors is not None:
            weights.mul_(self._factors[experts.long()])
            if sent is not None:
                gpu_host.put(weights, sent[1])

    def _hide(self, step: Step) -> None:
        assert self._inner is not None
        few = len(step.x) <= NEURON_TOKENS and not self._suspended
        step.hidden = gpu.hide(self._inner, step.x) if few else None

    def _send(self, step: Step) -> None:
        if not self._sends_other or not self._cpu_has_part(step):
            super()._send(step)
            return
        assert step.read is not None
        self._link.send_input(step.x if self._latents is None else self._latents[0](step.read))
        if self._predicted and self._latents is not None and step.hidden is not None:
            self._link.send_hidden(step.hidden)
        if not self.config.early_router:
            self._link.send_experts(len(step.x), self.top_k)

    def _send_experts(self, step: Step) -> None:
        if self._cpu_has_part(step):
            self._link.send_experts(len(step.x), self.top_k)

    def _mark_experts(self, step: Step) -> None:
        if self._cpu_has_part(step):
            self._link.mark_experts()

    def _sent_bytes(self, tokens: int) -> int:
        return 0 if self.config.early_router else EXPERT_BYTES * self.top_k

    def _check(self) -> None:
        if not self._swapped:
            raise PowerInferError(f"experts of layer {self.layer} were lost in a swap: load the model again")

    def _make_calls(self, tokens: int, sent: int) -> tuple[_native.ExpertCall, ...]:
        assert self._cpu_part is not None
        places, ahead = self._call_places, self.config.early_router
        return self._cpu_part.calls(self._link, self.layer, tokens, places, self.tally, ahead=ahead)

    def _begin_ahead(self, step: Step) -> None:
        self._link.begin(self._step_calls(step)[0], self._number - 1)

    def _begin_cold(self, step: Step) -> None:
        self._check()
        super()._begin_cold(step)

    def _mark(self, step: Step) -> None:
        self._check()
        super()._mark(step)

    def _add_hot(self, step: Step) -> None:
        assert self._gpu_part is not None and step.read is not None
        if self._inside is not None and step.hidden is None:
            return  # whoever computes the others computes all
        routing = *self._link.experts(len(step.x), self.top_k), self._slots
        hidden = None if self._gpu_part.predictor is None else step.hidden
        if len(step.x) > gpu.FEW:
            members = gpu_experts.members(self._slots, self._gpu_part.slots)
            self._add_some(step, [(self._gpu_part, self._slots, members)])
        elif self._latents is None:
            gpu_experts.expert_sum(self._gpu_part, step.read, *routing, step.target, hidden)
            step.normed = None
        else:
            before, behind = self._latents
            part = gpu_experts.expert_sum(self._gpu_part, before(step.read), *routing, None, hidden)
            step.add_part(behind(part))

    def _add_some(self, step: Step, parts: Iterable[gpu_experts.Part]) -> None:
        """Add the sums of some experts of a long step after others."""
        import torch

        assert step.read is not None
        if step.routed is None:
            x = step.read if self._latents is None else self._latents[0](step.read)
            selected = self._link.experts(len(step.x), self.top_k)
            step.routed = gpu_experts.Routed(x, *selected, self.config.n_experts)
        target = step.target if self._latents is None else torch.zeros_like(step.routed.x)
        gpu_experts.add_some(parts, step.routed, target)
        if self._latents is None:
            step.normed = None
        else:
            step.add_part(self._latents[1](target))

    def finish(self) -> list[Operator]:
        operators = super().finish()
        return operators if self._separate is None else [*operators, self._operator("join", self._join_separate)]

    def _join_separate(self, step: Step) -> None:
        """target = what the shared expert gives + the experts' sum that it has become, each normalised."""
        assert self._separate is not None and step.shared is not None
        step.target.copy_(self._separate.experts_out(step.target)).add_(self._separate.shared_out(step.shared))
        step.shared = step.normed = None

    def _add_shared(self, step: Step) -> None:
        assert self._shared is not None and step.read is not None
        config, (inputs, output) = self.config, self._shared
        read = step.read if self._separate is None else self._separate.shared(step.x, for_codes=inputs.for_codes)
        product = inputs(read)
        gate = product[:, : config.shared_size] if config.gated else product
        up = product[:, config.shared_size :] if config.gated else None
        hidden = gpu.activate(config.activation, gate, up, config.threshold, for_codes=output.for_codes)
        del product, gate, up  # their memory is what the next products take
        if self._separate is not None:
            step.shared = output(hidden)
        elif self._shared_weight is None:
            output(hidden, step.target)
            step.normed = None
        else:
            step.add_part(output(hidden) * gpu_experts.shared_weight(step.read, self._shared_weight))

    def _add_shared_neurons(self, step: Step) -> None:
        import torch

        assert self._shared_part is not None and step.read is not None
        part, x, tokens, gate = self._shared_part, step.read, len(step.x), self._shared_weight
        weights = None if gate is None else gpu_experts.shared_weight(x, gate)
        if tokens <= NEURON_TOKENS:
            hidden = None if part.predictor is None else step.hidden
            only, unit = self._only[:tokens], self._unit[:tokens]
            gpu_experts.expert_sum(part, x, only, unit if weights is None else weights, None, step.target, hidden)
        elif weights is None:
            gpu_experts.add_many(part, x, step.target)
        else:
            total = torch.zeros_like(step.target)
            gpu_experts.add_many(part, x, total)
            step.target.add_(total.mul_(weights))
        step.normed = None

    def _compute_cold(self, step: Step) -> None:
        assert self._cpu_part is not None
        cpu, link, trace, tokens = self._cpu_part, self._link, self._layers.trace, len(step.x)
        x, experts, weights, out = link.received_experts(tokens, self.top_k, self.layer, self.config.latents)
        hidden = link.received_hidden(tokens, cpu.rank)
        # These are there once it was waited for.
        if self.config.early_router:
            with span(trace, "cpu", "wait for the selection", self.layer, "wait"):
                link.wait_experts()
            with span(trace, "cpu", "prepare cold experts", self.layer):
                places = self._places(experts)
                cpu.order(places, weights)
                while not link.arrived() and cpu.fetch():
                    pass
        self._wait()
        with span(trace, "cpu", "cold experts", self.layer):
            if self.config.early_router:
                job = cpu.sum_ordered(x, out, hidden)
            else:
                places = self._places(experts)
                job = cpu.sum(x, places, weights, out, hidden)
        counts, hits = np.bincount(experts.reshape(-1), minlength=self.config.n_experts), int((places < 0).sum())
        if tokens <= NEURON_TOKENS:
            self.tally += np.append(counts, hits)
        else:
            self._count(counts, hits)
        self._count_steps(tokens, 1, job)

    def _add_cold(self, step: Step) -> None:
        beside, self._beside = self._beside, None
        if beside is None and self._streams(step):
            step.normed = None
        elif self._latents is None:
            self._link.add_back(step.target, self._answer(step))
            step.normed = None
        else:
            sums = self._link.sums(len(step.x), self.config.latents, self._answer(step))
            step.add_part(self._latents[1](sums))

    def _places(self, experts: NDArray[np.int32]) -> NDArray[np.int32]:
        """The places of experts on the CPU; -1 for those on the GPU."""
        return np.where(self._slot[experts] < 0, self._place_of[experts], np.int32(-1))

    def _shares(self, step: Step) -> bool:
        """Whether the CPU takes some of the experts that stream."""
        sharing = None if self.stage is None else self.stage.sharing
        return sharing is not None and sharing.takes(len(step.x)) and not self._layers.rehearses

    def _cpu_has_part(self, step: Step) -> bool:
        return super()._cpu_has_part(step) or self._shares(step)

    def _stream_cold(self, step: Step) -> None:
        self._check_files()
        self._beside = None
        try:
            self._add_some(step, self._sent_experts(step))
        finally:
            self._wait_beside()

    def _wait_beside(self) -> None:
        """Wait for what the CPU computes beside what streams."""
        if self._beside is not None:
            self._beside.result()

    def _divide(self, step: Step, rest: Indices, streamed: int) -> Indices:
        """Let the CPU compute some of the experts of a step that shares them; the others. streamed: how many stream
        before these."""
        assert self.stage is not None and self.stage.sharing is not None and self._cpu_part is not None
        cpu, tokens = self._cpu_part, len(step.x)
        x, experts, weights, out = self._link.received_experts(tokens, self.top_k, self.layer, self.config.latents)
        self._wait()
        counts = np.bincount(experts.reshape(-1), minlength=self.config.n_experts)
        chosen = self.stage.sharing.choose(counts[rest], streamed)
        places = np.full(self.config.n_experts, -1, np.int32)
        places[rest[chosen]] = self._place_of[rest[chosen]]
        self._sums.update(shared=int(counts[self.cold].sum()), beside=int(counts[rest[chosen]].sum()))
        if counts[rest[chosen]].any():
            self._beside = self.stage.run_beside(lambda: cpu.sum(x, places[experts], weights, out))
        return np.delete(rest, chosen)

    def cold_load(self, tokens: int) -> tuple[int, int]:
        _, experts, _, _ = self._link.received_experts(tokens, self.top_k, self.layer, self.config.latents)
        counts = np.bincount(experts.reshape(-1), minlength=self.config.n_experts)[self.cold]
        return int((counts > 0).sum()), int(counts.sum())

    def _note_panels(self) -> Sequence[ExpertPanels]:
        """Note what streams, for the GPU to read it by itself. Returns panels that a policy's experts are sent from:
        none where the GPU has other bits of the file."""
        panels, part = self._panels() or (), self._gpu_part
        registered = None if self._copier is None else self._copier.registered
        registered = registered if self.stage is None else self.stage.registered
        if registered is not None:
            for matrix in panels:
                registered.note(matrix.data.reshape(-1))
        if self._copier is None or part is None or self._tensors is None or not panels:
            return ()
        return panels if gpu_experts.takes_panels(part, self._tensors, panels) else ()

    def _panels(self) -> list[ExpertPanels] | None:
        """The CPU's matrices, if they stream as they are: not with rows beside those of the file."""
        if self._cpu_part is None or self._tensors is None:
            return None
        panels, rows = self._cpu_part.panels(), [tensor.shape[1] for tensor in self._tensors]
        return None if panels is None or [one.rows for one in panels] != rows else panels

    def _pieces(self, step: Step, count: int) -> Iterator[Indices]:
        """The cold experts that stream, so many at a time, as they lie in memory. Where the CPU takes some of them, the
        buffers are filled before the host waits for the selection."""
        cold = self.cold[np.argsort(self._place_of[self.cold])]
        if self._layers.rehearses:  # one piece takes as much memory as all
            cold = cold[:count]
        first = BUFFERS * count if self._shares(step) else len(cold)
        yield from _pieces_of(cold[:first], count)
        if len(cold) > first:
            yield from _pieces_of(self._divide(step, cold[first:], first), count)

    def _sent_experts(self, step: Step) -> Iterator[gpu_experts.Part]:
        """Experts of the CPU on the GPU, some at a time, until the next ones are asked for."""
        import torch

        assert self.stage is not None and self._tensors is not None
        n, panels, count = self.config.n_experts, self._panels(), 0
        if panels is not None:
            sizes = [
                max(one.data.shape[1], gpu_panels.panel_bytes(one.type, one.k) * one.rows // LANES) for one in panels
            ]
            count = self.stage.experts_at_once(sizes, n)
        if not count:
            panels = None
            count = self.stage.experts_at_once([tensor.matrix(0).nbytes for tensor in self._tensors], n)
        for piece in self._pieces(step, count):
            table = np.full(2 * n, -1, np.int32)  # the slot of each expert, and the expert of each slot
            table[piece], table[n : n + len(piece)] = np.arange(len(piece)), piece
            parts = [np.asarray(table.view(np.uint8))]
            if panels is None:
                for tensor in self._tensors:
                    parts += [tensor.matrix(expert).data for expert in piece]
            else:
                for one in panels:
                    parts += _runs(one.data, self._place_of[piece])
            with self.stage.sent(parts) as (of_table, *sent):
                assert of_table is not None
                slots, members = of_table.view(torch.int32).split(n)
                runs = len(sent) // len(self._tensors)
                joined = [_joined(sent[at : at + runs]) for at in range(0, len(sent), runs)]
                if panels is None:
                    resident = gpu_experts.from_rows(self.config, self._tensors, joined, piece, self._biases)
                else:
                    resident = gpu_experts.from_panels(self.config, panels, joined, piece, self._biases)
                yield resident, slots, members[: len(piece)]
                del resident  # the next one reuses its memory

    # ---------------------------------------------------------------- counters, of layers with cold experts

    @property
    def _hot_neurons(self) -> int:
        """Neurons of each expert on the GPU, of a layer that is split by these."""
        return 0 if self._inside is None else self._inside.shape[1]

    @property
    def _sparse(self) -> ByNeuron | None:
        """The cold experts' neurons, where steps skip those that do not fire."""
        return None if self._cpu_part is None else self._cpu_part.by_neuron

    def _count(self, counts: NDArray[np.integer], hits: int) -> None:
        """Count what steps selected, and how much of it was on the GPU."""
        self._sums.update(hot=hits, cold=int(counts.sum()) - hits)
        self.recent += counts

    def _count_steps(self, tokens: int, steps: int, jobs: int) -> None:
        self._sums.update(tokens=tokens, steps=steps, jobs=jobs)
        self.recent_tokens += tokens

    def collect(self) -> Counter[str]:
        """Sums as of `HybridTerms`, and copied: experts copied to the GPU beside steps; of steps whose cold experts
        stream but for some, shared: selections of cold ones, and beside: of those that the CPU took."""
        self._layers.drop_next()  # a step launched ahead counts, too
        tokens = steps = jobs = 0
        for each, calls, had, *_ in self._taken_calls():
            tokens, steps, jobs = tokens + each * calls, steps + calls, jobs + had
        new = self.tally - self._collected
        self._collected[:] = self.tally
        hits, cold = int(new[-1]), int(new[:-1].sum() - new[-1])
        self._count(new[:-1], hits)
        self._count_steps(tokens, steps, jobs)
        if self._sparse is not None and not self._suspended:  # steps of few tokens skip neurons where they can
            self._sums["neurons"] += cold * (self.config.size - self._hot_neurons)
        if self._cpu_part is not None and self._sparse is not None:
            counts = self._cpu_part.op.counts()
            for name in ("active", "candidates", "sampled_active", "sampled_found"):
                self._sums[name] = counts[name]
        if self._inside is None:
            return self._sums
        hot = self._sums["cold"] * self._hot_neurons // self.config.size  # as many experts' worth of neurons
        return Counter(self._sums | {"hot": hot, "cold": self._sums["cold"] - hot})

    def clear(self) -> None:
        self._layers.drop_next()  # as in `collect`
        for _ in self._taken_calls():
            pass
        self._collected[:] = self.tally
        self._sums: Counter[str] = Counter()
        self.recent, self.recent_tokens = np.zeros(self.config.n_experts), 0.0
        if self._cpu_part is not None and self._sparse is not None:
            self._cpu_part.op.clear()

    def suspend(self, on: bool) -> None:
        """Choose whether every neuron is computed of cold experts that could skip some, and each that fires of hot
        ones."""
        self.collect()
        self._suspended = on
        if self._inner is not None:
            self._layers.changed(self.layer)
        if self._cpu_part is not None:
            self._cpu_part.set_whole(on)


def is_mapped(tensor: RawTensor) -> bool:
    """Whether a tensor's bytes are the mapped file's, not a copy."""
    data: Any = tensor.data
    while isinstance(data, np.ndarray):
        data = data.base
    return data is not None


def _pieces_of(experts: Indices, count: int) -> Iterator[Indices]:
    """Some experts at a time, `count` at most."""
    return (experts[first : first + count] for first in range(0, len(experts), count))


def _runs(panels: Bytes, places: Indices) -> list[Bytes]:
    """Rows `places`, ascending, of uint8 [experts, bytes], those that lie one behind the other as one."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return [panels[run[0] : run[-1] + 1].reshape(-1) for run in np.split(places, breaks)]


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Parts that lie one behind the other in a buffer, as one; else a copy."""
    import torch

    present = [part for part in parts if part is not None]
    ends = [part.data_ptr() + part.nbytes for part in present[:-1]]
    if all(part.data_ptr() == end for part, end in zip(present[1:], ends, strict=True)):
        return present[0].as_strided((sum(part.nbytes for part in present),), (1,))
    return torch.cat(present)


def complement(inside: Indices, size: int) -> Indices:
    """The other neurons of experts that have `size`, ascending, int32. inside: some of each, int32 [experts, some]."""
    cold = np.ones((len(inside), size), np.bool_)
    np.put_along_axis(cold, inside, False, axis=1)
    return np.nonzero(cold)[1].reshape(len(inside), -1).astype(np.int32)


def _rows_of(tensor: RawTensor, index: Indices) -> RawTensor:
    """Some of the matrices of a tensor [n, out, in]."""
    return tensor.gathered() if len(index) == tensor.shape[0] else tensor.subset(index)


@dataclass
class ExpertSplit(Split[HybridExperts]):
    """The split of the experts of the GPU's layers.

    hot: of each layer of the model, the experts on the GPU, int32 (of layers without experts: none); movable: they may
    be swapped; copier: exchanges those on the GPU from step to step, the CPU has all of them; hot_whole: those on the
    GPU are computed whole, whatever the CPU skips. inside: of layers none of whose experts is hot, the neurons of each
    that the GPU has copies of, int32 [experts, some], ascending: whole groups, of which a predictor selects, and not
    all. spread: of each GPU of several the experts of each layer on it; (): those of a layer are on one.
    """

    hot: Sequence[Indices]
    movable: bool = False
    stage: Stage | None = None
    copier: Copier | None = None
    hot_whole: bool = False
    inside: Mapping[int, Indices] = field(default_factory=dict)
    spread: Sequence[Sequence[Indices]] = ()
    ffns: list[HybridExperts] = field(default_factory=list)
    kind: type = ExpertsConfig

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, weights: ExpertWeights) -> HybridExperts:
        """PowerInferError if a device runs out of memory."""
        ffn = HybridExperts(self, cpu, layers, layer, weights)
        if self.ffns:
            ffn.foresee(cpu, self.ffns[-1], weights.router)
        self.ffns.append(ffn)
        return ffn


class ExpertSparsity(SplitSparsity[HybridExperts]):
    """Statistics of a model whose experts are split between a GPU and the CPU. The GPU leaves out neurons that give
    zero, suspended or not."""

    selector = "router"

    def __init__(self, executor: SplitExecutor, ffns: Sequence[HybridExperts], policy: str = "static") -> None:
        """policy: who decides which experts the GPU has, a name of `placement.experts.EXPERT_POLICIES`."""
        super().__init__(executor, ffns)
        self.policy = policy

    def end_policy(self, failure: PowerInferError) -> None:
        """Say that the policy has ended by a failure: experts stay where they are."""
        self.policy = f"{self.policy} (ended: {failure})"
        experts = self._executor.choices.experts
        if experts is not None:
            self._executor.choices.experts = experts.add(f"; ended: {failure}")

    def report(self) -> dict[str, Any]:
        """Report as `SplitSparsity` does. gpu_share: None of a layer without cold experts, of divided ones that of
        their neurons; active_fraction: of the neurons that the CPU has, None where all are computed;
        candidate_fraction, recall: of a predictor among these, on sampled steps; policy: decides which experts the GPU
        has; copied: experts copied there beside steps; beside: of the selections of cold experts in prompts whose
        experts stream but for some, the share that the CPU took, None: there were none."""
        layers, totals = self._collect()
        tokens = max((layer["tokens"] for layer in layers), default=0)
        totals["hot"] += tokens * sum(ffn.top_k for ffn in self.ffns if not len(ffn.cold))  # which nobody counts
        fired, neurons = totals["sampled_active"], totals["neurons"]
        predicted = {
            "candidate_fraction": totals["candidates"] / neurons if neurons else None,
            "recall": totals["sampled_found"] / fired if fired else None,
        }
        beside = totals["beside"] / totals["shared"] if totals["shared"] else None
        more = {"policy": self.policy, "copied": totals["copied"], "beside": beside}
        return {**self._report(layers, totals), **predicted, **more}
