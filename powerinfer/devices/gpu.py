"""The first layers of a model on a GPU: weights, paged cache and the list of operators that a step runs.

The device may also be torch's CPU, which then stands in for a GPU: the same operators in torch's own arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ModelConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.gpu_weights import GpuNorm, Matrices, StoredMatrix
from powerinfer.devices.link import NAMED_TOKENS, Link
from powerinfer.devices.step import (
    MOST_SHAPES,
    RECORDED_BYTES,
    Operator,
    Recorder,
    Recordings,
    Step,
    cuda_graphs,
)
from powerinfer.devices.torch_device import current, gpu_failures, import_torch
from powerinfer.devices.trace import Trace, span
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu, gpu

if TYPE_CHECKING:
    from torch import Tensor, device
else:
    Tensor = device = Any

Floats = NDArray[np.float32]

_SEND, _SUM = "send", "ffn"  # the gaps that are left where others sum a layer's neurons


@dataclass
class _Ffn:
    """biases: of gate and up, for who sums the neurons; hung: what runs in either gap."""

    biases: tuple[Floats | None, Floats | None]
    hung: dict[str, list[Operator]] = field(default_factory=dict)


class GpuLayers:
    """The first layers of a model on a device. `models` wires them with the methods from `matrix` to `head`.

    An FFN is dense (`ffn`), or its neurons are summed by somebody else (`neurons`, then `hang`). `run` takes the
    residual stream behind the embedding and gives it back behind these layers, or the logits.

    The same step gives the same bits on every run. How a token's sums are rounded may hang on the number of tokens in
    its step.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: device,
        *,
        layers: int,
        pages: int,
        kv_type: str,
        max_tokens: int,
        frequencies: Floats,
        rope_factor: float,
    ) -> None:
        """frequencies: float32 [rotated pairs], radians per position; rope_factor multiplies sine and cosine."""
        torch = import_torch()
        assert 0 < layers <= config.n_layers and pages > 0 and max_tokens > 0
        self.layers = layers
        self.page_size = cpu.PAGE
        self.n_pages = pages
        self.max_tokens = max_tokens
        self.vocab_size = config.vocab_size
        self.d_model = config.d_model
        self.device = device
        self.trace: Trace | None = None
        self.link: Link | None = None
        self.few_tokens = self.few_steps = 0
        self.bytes_per_token = 0
        self._config = config
        self._cuda = device.type == "cuda"
        self._bytes: Counter[str] = Counter()
        self._wired: list[Operator] = []
        self._ffns: dict[int, _Ffn] = {}
        self._frequencies = self._vector(frequencies) if len(frequencies) else None
        self._rope_factor = rope_factor
        shape = (kv_type, pages, config.n_kv_heads, config.head_dim, device)
        self._cache = [(gpu.new_cache(*shape), gpu.new_cache(*shape)) for _ in range(layers)]
        self._bytes["kv"] = sum(part.nbytes for pair in self._cache for part in pair)
        self._x = torch.zeros((max_tokens, config.d_model), device=device)
        self._host_x = torch.zeros(self._x.shape, pin_memory=True) if self._cuda else self._x
        self._host_logits = self._host(1)
        self._description = _Description(device)
        self._uploaded = torch.cuda.Event() if self._cuda else None
        self._done = torch.cuda.Event() if self._cuda else None
        self._recorder = cuda_graphs(device) if self._cuda and gpu.which(self._x) == "triton" else None
        self._recordings: Recordings | None = None
        self._recorded_at = 0
        self._shapes = MOST_SHAPES
        self._passed = self._recorded_bytes = 0

    # ---------------------------------------------------------------- weights

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> StoredMatrix:
        """A matrix [out, in], to be uploaded by the operator that takes it. row_map: see `StoredMatrix`."""
        return StoredMatrix(tensor, row_map)

    def _upload(self, part: str, *matrices: StoredMatrix, biases: Sequence[Tensor | None] = ()) -> Matrices:
        """Matrices that multiply the same rows; part: of `memory`."""
        together = Matrices(matrices, biases or [None] * len(matrices), self.device)
        self._bytes[part] += together.nbytes
        self.bytes_per_token += together.nbytes
        return together

    def head_rows(self, heads: int, interleaved: bool) -> NDArray[np.int32] | None:
        """The row map of a matrix whose rows are heads: rotary pairs brought to (i, i + dim/2). None: as they are."""
        if not interleaved:
            return None
        dim = self._config.head_dim
        within = np.arange(dim).reshape(-1, 2).T.reshape(-1)
        return (np.arange(heads)[:, None] * dim + within).reshape(-1).astype(np.int32)

    def norm(self, weight: Floats, bias: Floats | None = None) -> GpuNorm:
        """A norm of the model's kind over rows of d_model."""
        config = self._config
        return GpuNorm(self._vector(weight), self._some(bias), config.norm_eps, config.norm == "layer")

    def _vector(self, values: Floats) -> Tensor:
        own = import_torch().from_numpy(np.array(values, np.float32)).to(self.device)
        self._bytes["norms"] += own.nbytes
        return own

    def _some(self, values: Floats | None) -> Tensor | None:
        return None if values is None else self._vector(values)

    # ---------------------------------------------------------------- operators, in the order they run

    def attention(
        self,
        layer: int,
        norm: GpuNorm | None,
        qkv: Sequence[StoredMatrix],
        *,
        biases: Sequence[Floats | None] = (None, None, None),
        q_norm: Floats | None = None,
        k_norm: Floats | None = None,
    ) -> None:
        """attended = attention(norm(x)): projections, rotary embedding, cache store, softmax over the pages."""
        config = self._config
        heads, kv, dim = config.n_heads, config.n_kv_heads, config.head_dim
        matrices = self._upload("attention", *qkv, biases=[self._some(bias) for bias in biases])
        of_q, of_k = (
            GpuNorm(self._vector(w), None, config.norm_eps, False) if w is not None else None for w in (q_norm, k_norm)
        )
        keys, values = self._cache[layer]
        frequencies, factor, scale = self._frequencies, self._rope_factor, dim**-0.5
        window = config.layers[layer].attention.window

        def run(step: Step) -> None:
            tokens = len(step.x)
            every = matrices(step.normalised(norm)).view(tokens, heads + 2 * kv, dim)
            q, k, v = every[:, :heads], every[:, heads : heads + kv], every[:, heads + kv :]
            q = q if of_q is None else _each_head(of_q, q)
            k = k if of_k is None else _each_head(of_k, k)
            if frequencies is None:
                gpu.store_kv(keys, values, k, v, step.slots)
            else:
                gpu.rotate_and_store(q, k, v, step.positions, frequencies, factor, keys, values, step.slots)
            step.attended = gpu.attention(
                q, keys, values, step.page_table, step.rows, step.positions, window, scale
            ).view(tokens, heads * dim)

        self._add("attention", layer, run)

    def project(self, matrix: StoredMatrix, bias: Floats | None = None) -> None:
        """x += matrix . attended."""
        out = self._upload("attention", matrix, biases=[self._some(bias)])

        def run(step: Step) -> None:
            step.add(out(step.attended))
            step.attended = None

        layer = self._layer
        sums = [at for at, one in enumerate(self._wired) if (one.kind, one.layer) == (_SUM, layer)]
        # Neurons that are wired already have what they read: their sum may wait for others, and comes behind.
        self._add("project", layer, run, sums[0] if sums and layer in self._ffns else None)

    def ffn(
        self,
        norm: GpuNorm | None,
        gate: StoredMatrix | None,
        up: StoredMatrix,
        down: StoredMatrix,
        biases: Sequence[Floats | None] = (None, None, None),
    ) -> None:
        """x += down . (act(gate . n) * (up . n)) with n = norm(x), or down . act(up . n) without a gate.

        biases: of gate, up and down.
        """
        of_gate, of_up, of_down = (self._some(bias) for bias in biases)
        if gate is None:
            first = self._upload("ffn", up, biases=[of_up])
        else:
            first = self._upload("ffn", gate, up, biases=[of_gate, of_up])
        second = self._upload("ffn", down, biases=[of_down])
        about = self._config.layers[self._layer].ffn
        activation, threshold = about.activation, about.threshold
        neurons, plain = up.rows, gate is None  # the matrices themselves are not kept

        def run(step: Step) -> None:
            product = first(step.normalised(norm))
            if plain:
                hidden = gpu.activate(activation, product, None, threshold)
            else:
                hidden = gpu.activate(activation, product[:, :neurons], product[:, neurons:], threshold)
            step.add(second(hidden))

        self._add("ffn", self._layer, run)

    def neurons(self, norm: GpuNorm | None, biases: Sequence[Floats | None] = (None, None, None)) -> None:
        """x += sum over the layer's neurons, given norm(x), + bias of down. Who sums them is told later (`hang`).

        biases: of gate, up and down; the first two are kept for them who sum (`ffn_biases`).
        """
        layer = self._layer
        gate, up, down = (None if bias is None else np.array(bias, np.float32) for bias in biases)
        of_down = self._some(down)
        self._ffns[layer] = _Ffn((gate, up))
        if self.link is None:
            self.link = Link(self.device, self.max_tokens, self.d_model, self._config.widest_ffn)

        def missing(step: Step) -> None:
            raise AssertionError(f"nobody sums the neurons of layer {layer}")

        # Where attention reads the same x it comes between what sends and what adds: others are at work meanwhile.
        at = len(self._wired) - self._config.layers[layer].parallel
        self._add("norm", layer, lambda step: step.let_read(norm), at)
        self._add(_SEND, layer, missing, at + 1)
        self._add(_SUM, layer, missing)
        if of_down is not None:
            self._add("bias", layer, lambda step: step.add(of_down))

    def normalise(self, norm: GpuNorm) -> None:
        """x = norm(x)."""

        self._add("normalise", self._layer, lambda step: step.replace(norm(step.x)))

    def head(self, norm: GpuNorm | None, matrix: StoredMatrix, projection: StoredMatrix | None = None) -> None:
        """logits = matrix . projection . norm(x)."""
        out = self._upload("head", matrix)
        inner = None if projection is None else self._upload("head", projection)

        def run(step: Step) -> None:
            if not len(step.logit_rows):
                return
            x = step.x.index_select(0, step.logit_rows)
            x = x if norm is None else norm(x)
            logits = out(x if inner is None else inner(x))
            self._answer(len(logits)).copy_(logits, non_blocking=True)

        self._add("head", -1, run)

    @property
    def has_head(self) -> bool:
        """Whether a step ends in logits."""
        return bool(self._wired) and self._wired[-1].kind == "head"

    @property
    def _layer(self) -> int:
        """The layer that is being wired."""
        return self._wired[-1].layer

    def _add(self, kind: str, layer: int, run: Callable[[Step], None], at: int | None = None) -> None:
        self._wired.insert(len(self._wired) if at is None else at, Operator(kind, layer, run))
        self._recordings = None

    @property
    def operators(self) -> list[Operator]:
        """All that a step runs, in order."""
        every: list[Operator] = []
        for operator in self._wired:
            hung = self._ffns[operator.layer].hung if operator.layer in self._ffns else {}
            every += hung.get(operator.kind, [operator])
        return every

    @contextmanager
    def noted(self, trace: Trace) -> Iterator[None]:
        """Let `trace` note each static operator meanwhile; the others note themselves what they do."""
        self.trace = trace
        try:
            yield
        finally:
            self.trace = None

    # ---------------------------------------------------------------- neurons

    @property
    def neuron_layers(self) -> list[int]:
        """The layers whose neurons somebody else sums."""
        return sorted(self._ffns)

    def ffn_biases(self, layer: int) -> tuple[Floats | None, Floats | None]:
        """float32 [d_ff], those of gate and of up, of one of `neuron_layers`."""
        return self._ffns[layer].biases

    def hang(self, layer: int, send: Sequence[Operator], add: Sequence[Operator]) -> None:
        """Sum the neurons of a layer of `neuron_layers` with these operators from now on.

        `send` bring out what others need to begin, and run as early as may be: they read step.read, what gate and up
        multiply, and step.x, which predictors read, and must not write to either. `add` add to x.
        """
        ffn = self._ffns[layer]
        before, ffn.hung = ffn.hung, {_SEND: list(send), _SUM: list(add)}
        if before != ffn.hung:
            self._recordings = None
        self.forget(layer)

    def forget(self, layer: int | None = None) -> None:
        """Record anew what a layer launches, or all."""
        if layer is None:
            self._recordings = None
        elif self._recordings is not None:
            self._recordings.forget(layer)

    # ---------------------------------------------------------------- running

    def run(self, batch: Batch, x: Floats) -> Floats:
        """x float32 [T, d_model] behind the embedding -> x behind these layers, or logits float32 [R, vocab].

        The batch must have been checked, as the CPU's program does when it embeds: pages within the cache, positions
        within the page table. The result is a view that stays valid until the next call. PowerInferError when the
        device fails or has no memory left; the next step may then be run as if this one had not been.
        """
        with gpu_failures(f"computing {len(batch.tokens)} tokens", "lower --prefill-chunk, --max-batch or --vram"):
            torch = import_torch()
            with current(self.device):
                step = self.begin(batch, x)
                with torch.inference_mode():
                    if self._recorder is not None and self.trace is None and len(step.x) <= gpu.FEW:
                        self._recorded(self._recorder).run(step)
                    else:
                        for operator in self.operators:
                            with span(self.trace if operator.static else None, "gpu", operator.kind, operator.layer):
                                operator.run(step)
                result = self.end(step)
        if len(step.x) <= NAMED_TOKENS:
            self.few_tokens += len(step.x)
            self.few_steps += 1
        return result

    def record(self, recorder: Recorder | None) -> None:
        """Replay steps of few tokens with what `recorder` makes of them; None: launch each anew."""
        self._recorder, self._recordings = recorder, None

    def _recorded(self, recorder: Recorder) -> Recordings:
        if self._recordings is None or self._recorded_at != self._description.address:
            self._recordings = Recordings(self.operators, recorder, self._shapes)
            self._recorded_at = self._description.address
        return self._recordings

    def begin(self, batch: Batch, x: Floats) -> Step:
        """Bring a step to the device: its description and its residual stream, one transfer each."""
        tokens = len(batch.tokens)
        assert 0 < tokens <= self.max_tokens and x.shape == (tokens, self.d_model)
        if self._uploaded is not None:
            self._uploaded.synchronize()  # after a step that was broken off, the device may still be reading
        step = self._description.upload(batch, self._x[:tokens])
        step.read = None if self.link is None else self.link.read(tokens)
        np.copyto(self._host_x[:tokens].numpy(), x)
        if self._uploaded is not None:
            step.x.copy_(self._host_x[:tokens], non_blocking=True)
            self._uploaded.record()
        return step

    def end(self, step: Step) -> Floats:
        """What a step comes to, once the device is done with it."""
        if self.has_head:
            out = self._answer(len(step.logit_rows))
        else:
            out = self._host_x[: len(step.x)]
            if self._cuda:
                out.copy_(step.x, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        return _array(out)

    def _answer(self, rows: int) -> Tensor:
        """Where so many rows of logits go. Once there is room for more of them it lies elsewhere, so record anew."""
        if rows > len(self._host_logits):
            self._host_logits = self._host(1 << (rows - 1).bit_length())
            self.forget()
        return self._host_logits[:rows]

    def _host(self, rows: int) -> Tensor:
        """Room for rows of logits in memory that the device writes to."""
        return import_torch().zeros((rows, self.vocab_size), pin_memory=self._cuda)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by part: attention, norms (with all biases), head, kv, ffn, scratch, allocator.

        scratch: what is kept from step to step and, once steps were rehearsed, what operators pass to each other and
        what recordings may come to; allocator: what torch holds of CUDA's memory beside all tensors, these and others'.
        """
        parts = {part: self._bytes[part] for part in ("attention", "norms", "head", "kv", "ffn")}
        link = 0 if self.link is None else self.link.gpu_bytes
        kept = self._x.nbytes + self._description.nbytes + link
        parts["scratch"] = kept + self._passed + self._recorded_bytes
        if self._cuda:
            cuda = import_torch().cuda
            unused = int(cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device))
            parts["allocator"] = max(0, unused - self._passed)
        return parts

    def rehearse(self, logit_rows: int) -> int:
        """Run steps that between them launch every kernel that decoding may: the largest, with so many rows of logits,
        those that are recorded, and single tokens far and near. The cache must be empty yet.

        Kernels are compiled, and there is memory for what steps need, or PowerInferError is raised now. Returns the
        most bytes that operators held to pass them to each other; 0 on the stand-in, where nobody counts them.
        """
        torch, held = import_torch(), 0
        if self._cuda:
            held = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        largest = min(self.max_tokens, self.n_pages * self.page_size)
        few = sorted({min(gpu.FEW, logit_rows, largest), 1}, reverse=True)
        for pages in (1 << power for power in range(1, self.n_pages.bit_length())):  # contexts are read in more splits
            self._rehearse(1, logit_rows, pages * self.page_size - 1)
        for tokens in (gpu.FEW, gpu.FEW // 2):  # tiles of products have so many columns
            self._rehearse(min(tokens, largest), logit_rows)
        for tokens in (largest, *few):
            self._rehearse(tokens, logit_rows)
        if self._cuda:
            self._passed = torch.cuda.max_memory_allocated(self.device) - held
            torch.cuda.empty_cache()
        if self._recorder is None:
            return self._passed
        before, each = self._taken(), 0
        for tokens in few:  # now they are recorded, which takes memory of torch's, for all shapes, and of the driver's
            self._rehearse(tokens, logit_rows)
            after = self._taken()
            self._passed += max(0, after[0] - before[0])
            before, each = after, max(each, after[1] - before[1])
        if each:
            self._shapes = max(1, min(MOST_SHAPES, RECORDED_BYTES // each))
            self._recorded_bytes = self._shapes * each
            self.forget()
        return self._passed

    def _rehearse(self, tokens: int, logit_rows: int, first: int = 0) -> None:
        places, rows = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
        pages = np.arange(-(-(first + tokens) // self.page_size), dtype=np.int32)[None]
        batch = Batch(rows, first + places, rows, pages, places[:logit_rows])
        self.run(batch, np.zeros((tokens, self.d_model), np.float32))

    def _taken(self) -> tuple[int, int]:
        """Bytes of the device that torch has taken, and all others."""
        if not self._cuda:
            return 0, 0
        cuda = import_torch().cuda
        free, total = cuda.mem_get_info(self.device)
        reserved = int(cuda.memory_reserved(self.device))
        return reserved, int(total) - int(free) - reserved

    def close(self) -> None:
        """Free all memory; the layers cannot be used afterwards."""
        self._wired.clear()
        self._ffns.clear()
        self._recorder = self._recordings = None
        for name in ("_cache", "_x", "link", "_host_x", "_host_logits", "_description", "_frequencies"):
            self.__dict__.pop(name, None)
        if self._cuda:
            import_torch().cuda.empty_cache()


class _Description:
    """The numbers of a batch, which go to the device in one transfer from memory that stays in place."""

    def __init__(self, device: device) -> None:
        self._device = device
        self._make(1 << 12)

    def _make(self, nbytes: int) -> None:
        torch = import_torch()
        cuda = self._device.type == "cuda"
        self._here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda)
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=self._device) if cuda else self._here

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._there.nbytes)

    @property
    def address(self) -> int:
        """Where they lie."""
        return int(self._there.data_ptr())

    def upload(self, batch: Batch, x: Tensor) -> Step:
        """The step of a batch, but for what is in x."""
        torch = import_torch()
        # The columns that are in use, as a power of two: shapes hardly change from step to step.
        width = min(batch.page_table.shape[1], 1 << int(int(batch.positions.max()) // cpu.PAGE).bit_length())
        table = batch.page_table[:, :width]
        pages = batch.page_table[batch.rows, batch.positions // cpu.PAGE].astype(np.int64)
        slots = pages * cpu.PAGE + batch.positions % cpu.PAGE
        parts = [slots.view(np.int32), batch.positions, batch.rows, batch.logit_rows, table]
        ends = np.cumsum([part.size for part in parts])
        nbytes = 4 * int(ends[-1])
        if nbytes > len(self._here):
            self._make(1 << (nbytes - 1).bit_length())
        numbers = self._here.numpy()[:nbytes].view(np.int32)
        for part, end in zip(parts, ends, strict=True):
            numbers[end - part.size : end] = part.reshape(-1)
        if self._there is not self._here:
            self._there[:nbytes].copy_(self._here[:nbytes], non_blocking=True)
        on_device = self._there[:nbytes].view(torch.int32).split([part.size for part in parts])
        wide, positions, rows, logit_rows, page_table = on_device
        return Step(x, positions, rows, wide.view(torch.int64), page_table.view(table.shape), logit_rows)


def _array(tensor: Tensor) -> Floats:
    """A float32 tensor in the host's memory, as a view."""
    values: Floats = tensor.numpy()
    return values


def _each_head(norm: GpuNorm, heads: Tensor) -> Tensor:
    """heads float32 [T, n, head_dim], each normalised."""
    return norm(heads.reshape(-1, heads.shape[-1])).view(heads.shape)
