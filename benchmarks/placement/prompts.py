"""The time of a prompt, simulated for a plan: chunks, layer by layer, with the engine's launches, pieces and copies.

What only a CPU has streams through two buffers where that is faster than computing it there, as a load finds out
(`hybrid/crossing.py`). Per layer of a chunk then three things run at once, and the longest counts:

    host      launches; of each piece, copying into a pinned buffer unless the GPU reads it by itself, and its launches
    bus       the bytes that stream
    GPU       the products of what it has, and of what arrives

Products with a layer's own matrices are FP16 after a conversion, which reads and writes them; those of experts are FP16
after one in registers. Experts lie in memory that is registered with the GPU, layers in RAM as a whole do not. Where
that is faster the CPU computes some of a layer's experts while the others stream (`devices/sharing.py`). States and
convolutions are counted as their matrices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.placement import assumptions
from powerinfer.config import AttentionConfig, AttentionKind
from powerinfer.devices.stage import MOST_THREADS, PIECE
from powerinfer.formats.quant import block_type
from powerinfer.hardware import cards
from powerinfer.hybrid.crossing import GAIN
from powerinfer.hybrid.prompt_trial import GAIN as LEAST_GAIN
from powerinfer.hybrid.prompt_trial import SIZES
from powerinfer.kernels import gpu_types
from powerinfer.kernels.gpu_types import FEW
from powerinfer.models.inventory import Matrix
from powerinfer.placement.plan import Plan


def elements(matrices: Sequence[Matrix]) -> float:
    """Weights of matrices."""
    kinds = ((one, block_type(one.type)) for one in matrices)
    return sum(one.file / kind.row_bytes(kind.block) * kind.block for one, kind in kinds)


def stored(matrices: Sequence[Matrix]) -> int:
    return sum(one.stored for one in matrices)


@dataclass(frozen=True)
class Prompt:
    """A prompt's time. seconds: of all; streamed: bytes that passed through the bus; bound: seconds by what took the
    longest in each layer: "host", "bus", "GPU" or "CPU"."""

    seconds: float
    streamed: float
    bound: dict[str, float]


@dataclass(frozen=True)
class _Chunk:
    """Tokens of a prompt that are computed at once, from position `at` on. expert_share: what experts' products reach
    of the tensor cores' peak."""

    plan: Plan
    tokens: int
    at: int
    expert_share: float

    @cached_property
    def _staging(self) -> int:
        """Bytes of a buffer, 0: nothing streams."""
        return min(self.plan.staging, PIECE)

    @cached_property
    def _cpu_flops(self) -> float:
        return assumptions.core_flops() * self.plan.request.hardware.cpu.threads

    @cached_property
    def _tensor(self) -> float:
        gpu = self.plan.request.hardware.gpu
        assert gpu is not None
        return assumptions.tensor_flops(gpu)

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes a second that conversions of weights reach."""
        gpu = self.plan.request.hardware.gpu
        assert gpu is not None
        return 1e9 * gpu.dense_gb_s["other"]

    def _attends(self, about: AttentionKind) -> float:
        """FLOP of attention itself."""
        if not isinstance(about, AttentionConfig):
            return 0.0
        seen = self.at + self.tokens / 2
        seen = seen if about.window is None else min(seen, about.window)
        return 4.0 * self.tokens * seen * about.n_heads * about.head_dim

    def _dense(self, matrices: Sequence[Matrix]) -> float:
        """Seconds of a GPU for products with these."""
        n = elements(matrices)
        converted = (stored(matrices) + 4 * n) / self._bandwidth
        return 2 * n * self.tokens / (self._tensor * assumptions.DENSE_SHARE) + converted

    def _experts(self, layer: int, share: float) -> float:
        """The same with that share of a layer's experts."""
        model = self.plan.request.model
        ffn, own = model.config.experts[layer], model.experts[layer]
        pairs = self.tokens * ffn.router.top_k * share
        flops = 2 * pairs * elements(own) / ffn.n_experts
        read = share * self._needed(layer) * stored(own) / self._bandwidth
        return flops / (self._tensor * self.expert_share) + read

    def _needed(self, layer: int) -> float:
        """Share of a layer's experts that some token selects."""
        ffn = self.plan.request.model.config.experts[layer]
        return float(1 - (1 - ffn.router.top_k / ffn.n_experts) ** self.tokens)

    def _on_cpu(self, matrices: Sequence[Matrix], flops: float = 0.0) -> float:
        return (2 * elements(matrices) * self.tokens + flops) / self._cpu_flops

    @property
    def _piece(self) -> int:
        """Weights of a dense matrix that are multiplied at a time."""
        return gpu_types.piece_elements(self.tokens)

    def launches(self, layer: int) -> tuple[float, float]:
        """Triton's launches and torch's for a layer of the GPU, but for what streams."""
        model, blocks = self.plan.request.model, self._blocks
        routed = bool(model.n_experts[layer])
        matrices = (*model.attention[layer], *(model.beside if routed else model.ffn)[layer])
        parts = [(assumptions.CHUNK_LAUNCHES, 1.0)]
        parts += [(assumptions.PRODUCT_LAUNCHES, max(1.0, elements([one]) / self._piece)) for one in matrices]
        parts += [(assumptions.ORDER_LAUNCHES, blocks)] if routed else []
        parts += [(assumptions.EXPERT_LAUNCHES, blocks)] if routed and self._hot(layer) else []
        kernels, operators = (sum(one[kind] * times for one, times in parts) for kind in (0, 1))
        return kernels, operators

    def _hot(self, layer: int) -> float:
        """Share of a layer's experts on the GPU."""
        model = self.plan.request.model
        return (self.plan.claims.slots or model.n_experts)[layer] / model.n_experts[layer]

    def _host(self, launches: tuple[float, float], times: float = 1.0) -> float:
        kernels, operators = launches
        return 1e-6 * times * (kernels * assumptions.launch_us() + operators * assumptions.TORCH_US)

    def _staged(self, nbytes: float) -> float:
        """Seconds of copying bytes into pinned buffers."""
        threads = min(MOST_THREADS, self.plan.request.hardware.cpu.threads)
        ram = self.plan.request.hardware.cpu.dense_gb_s["other"] / cards.CPU_DENSE
        return nbytes / (1e9 * min(threads * assumptions.COPY_GB_S, ram / assumptions.COPIES))

    @property
    def _blocks(self) -> int:
        """Blocks of tokens whose experts are summed at a time."""
        return -(-self.tokens // gpu_types.EXPERT_TOKENS)

    def _passes(self, layer: int, share: float, pieces: float) -> float:
        """Seconds in which a GPU narrows the hidden rows of the pairs of that share of the experts, and adds them to
        their tokens: of many blocks for each of so many pieces."""
        config = self.plan.request.model.config
        ffn = config.experts[layer]
        if self._blocks <= gpu_types.KEPT_BLOCKS:
            added = min(1.0, pieces)
        else:  # tokens of which a piece has an expert
            added = pieces * (1 - (1 - share / max(1.0, pieces)) ** ffn.router.top_k)
        row = share * ffn.router.top_k * ffn.size * (4 + 2) + added * 2 * 4 * config.d_model
        return self.tokens * row / self._bandwidth

    def layer(self, layer: int) -> tuple[dict[str, float], float]:
        """Seconds of a layer by what takes them, of which the largest counts, and the bytes that stream."""
        plan, model = self.plan, self.plan.request.model
        claims, about = plan.claims, model.config.layers[layer]
        attention, attends = model.attention[layer], self._attends(about.attention)
        if layer >= claims.gpu_layers:
            return self._in_ram(layer)
        flops = attends / (self._tensor * assumptions.ATTENTION_SHARE)
        launched = self._host(self.launches(layer))
        if not model.n_experts[layer]:
            return {"GPU": flops + self._dense((*attention, *model.ffn[layer])), "host": launched}, 0.0
        hot = self._hot(layer)
        gpu = flops + self._dense((*attention, *model.beside[layer]))
        gpu += self._experts(layer, hot) + self._passes(layer, hot, float(hot > 0))
        cold = 1 - hot
        if not cold:
            return {"GPU": gpu, "host": launched}, 0.0
        ffn, own = model.config.experts[layer], model.experts[layer]
        pairs = self.tokens * ffn.router.top_k * cold
        computed = 2 * pairs * elements(own) / ffn.n_experts / self._cpu_flops

        def streamed(share: float) -> dict[str, float]:
            """With that share of the layer's experts streamed, while the CPU computes the other cold ones."""
            nbytes = share * stored(own)
            pieces = max(1.0, nbytes / max(1, self._staging))
            host = launched + self._host(assumptions.PIECE_LAUNCHES["experts"], pieces)
            host += self._host(assumptions.EXPERT_LAUNCHES, pieces * self._blocks)
            streams = {
                "GPU": gpu + self._experts(layer, share) + self._passes(layer, share, pieces),
                "host": host,
                "bus": nbytes / (1e9 * plan.request.hardware.copy_gb_s),
            }
            return streams | ({"CPU": (1 - share / cold) * computed} if share < cold else {})

        alone = max(streamed(cold).values())
        divided = streamed(cold * computed / (alone + computed))
        if not self._staging or max(divided.values()) >= GAIN * min(alone, gpu + computed):
            on_cpu = {"CPU": gpu + computed, "host": launched}
            return self._faster(on_cpu, streamed(cold), cold * stored(own), self._staging > 0)
        return divided, cold * computed / (alone + computed) * stored(own)

    def _faster(
        self, on_cpu: dict[str, float], streams: dict[str, float], nbytes: float, can_stream: bool
    ) -> tuple[dict[str, float], float]:
        if can_stream and max(streams.values()) < max(on_cpu.values()):
            return streams, nbytes
        return on_cpu, 0.0

    def _in_ram(self, layer: int) -> tuple[dict[str, float], float]:
        """The same of a layer that is in RAM as a whole. Attention with a state or latents stays on the CPU."""
        plan, model = self.plan, self.plan.request.model
        about = model.config.layers[layer]
        attends = self._attends(about.attention)
        attention, ffn = model.attention[layer], model.ffn[layer]
        share = 1.0
        if model.n_experts[layer]:
            share = about.ffn.share_read(1)
        cpu = self._on_cpu(attention, attends) + share * self._on_cpu(ffn)
        if model.n_experts[layer] or not self._staging:
            return {"CPU": cpu}, 0.0
        passes = (*attention, *ffn) if isinstance(about.attention, AttentionConfig) else ffn
        stays = 0.0 if passes != ffn else self._on_cpu(attention)
        nbytes = float(sum(one.panels for one in passes))
        pieces = sum(max(1.0, one.panels / self._staging) for one in passes)
        host = self._host(assumptions.CHUNK_LAUNCHES) + self._staged(nbytes)
        host += self._host(assumptions.PIECE_LAUNCHES["panels"], pieces)
        flops = attends / (self._tensor * assumptions.ATTENTION_SHARE)
        streams = {
            "GPU": stays + flops + self._dense(passes),
            "host": stays + host,
            "bus": stays + nbytes / (1e9 * plan.request.hardware.copy_gb_s),
        }
        return self._faster({"CPU": cpu}, streams, nbytes, True)


def prompt(plan: Plan, tokens: int, expert_share: float = assumptions.EXPERT_SHARE) -> Prompt:
    """A prompt of that many tokens, in chunks as the plan's request has them; weights on disk are not told apart from
    those in RAM."""
    request = plan.request
    layers = plan.choice.layer_seconds
    ends = plan.choice.seconds - sum(
        own["other"] + max(own["gpu"], own["cpu"] + own["sync"]) + own["disk"] for own in layers
    )
    seconds, streamed, bound = ends, 0.0, {}  # the head, once
    for at in range(0, tokens, request.chunk):
        chunk = _Chunk(plan, min(request.chunk, tokens - at), at, expert_share)
        for layer in range(request.model.config.n_layers):
            parts, nbytes = chunk.layer(layer)
            name = max(parts, key=lambda part: parts[part])
            seconds += parts[name]
            streamed += nbytes
            bound[name] = bound.get(name, 0.0) + parts[name]
    return Prompt(seconds, streamed, bound)


def replayed(plan: Plan, tokens: int) -> float:
    """Seconds of a prompt of as many tokens as a chunk is padded to, replayed, of a model that the GPU has."""
    launched, chunk = prompt(plan, tokens), _Chunk(plan, tokens, 0, assumptions.EXPERT_SHARE)
    seconds = launched.seconds - sum(launched.bound.values())  # the head
    for layer in range(plan.request.model.config.n_layers):
        parts, _ = chunk.layer(layer)
        assert not parts.keys() - {"GPU", "host"}, "a part of the model is elsewhere"
        seconds += parts["GPU"] + 1e-6 * sum(chunk.launches(layer)) * assumptions.replayed_us()
    return seconds


def largest_padded(plan: Plan) -> int:
    """The largest number of tokens to which chunks would be padded (`hybrid/prompt_trial.py`), 0: none would be."""
    largest = 0
    for fewest, size in zip((FEW + 1, *(1 + size for size in SIZES)), SIZES, strict=False):
        if replayed(plan, size) >= LEAST_GAIN * prompt(plan, fewest).seconds:
            break
        largest = size
    return largest


def with_chunk(plan: Plan, tokens: int) -> Plan:
    """The plan of the same request with chunks of so many tokens."""
    from powerinfer.placement.plan import make_plan

    return make_plan(replace(plan.request, chunk=tokens))
