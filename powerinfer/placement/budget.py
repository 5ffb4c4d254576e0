"""Budgets: where the dense parts of a model rest, and what is left of either memory for neurons.

Everything counts: weights, predictors, KV cache, working memory, and what driver and runtime take.

Order of claim on the GPU: runtime and working memory; for one layer after another attention, norms, its KV cache
(attention cannot run where its cache is not) and its predictor; the output head; what is left is for hot neurons. The
layers that do not fit run on the CPU as a whole. Of that a little goes to the buffers through which those in RAM come
to the GPU for long prompts (devices/stage.py), if all of them fit somewhere all the same. RAM holds runtime, working
memory, the embedding and every dense part that is not on the GPU; what is left is for the other neurons. Without a GPU
the engine keeps the dense matrices of the FFNs beside the bundles, for prompts; where there is no room for both,
bundles alone are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from powerinfer.devices.link import link_bytes, link_gpu_bytes
from powerinfer.devices.stage import BUFFERS, buffer_bytes
from powerinfer.errors import RequestError
from powerinfer.formats.bundle_file import n_groups
from powerinfer.hardware.description import Hardware
from powerinfer.kernels import gpu as kernels
from powerinfer.placement.shapes import Matrix, Model
from powerinfer.placement.solver import GROUP

if TYPE_CHECKING:
    from powerinfer.placement.plan import PlanRequest

RUNTIME_BYTES = 80 << 20
"""What the interpreter, its libraries, the tokenizer and the threads take in RAM beside the model: 47 to 65 MiB with
vocabularies of 16,000 and 49,000, and some room."""

STAGED = 16
"""Of the room for neurons on a GPU, one part in so many is for staging at most."""

_GIB = 1 << 30

Bytes = dict[str, int]
"""By part: runtime, scratch (kept from step to step), step (what a GPU's operators pass to each other at most), staging
(buffers for long prompts), embedding, norms (with biases), attention, predictor, head, kv, panels, ffn (bundles),
allocator (what tensors are rounded up by on a GPU)."""


@dataclass(frozen=True)
class Claims:
    """gpu_layers: so many layers, from the first, have their attention on the GPU, and their predictor where there are
    any; 0: the GPU is not used; gpu_head: the output head is there. The other layers have theirs in RAM.

    gpu, cpu: bytes of all but the bundles, by part; gpu_left, cpu_left: what remains of the budgets, once there is room
    for what groups of bundles share, as if each group had neurons on both sides. gpu_neuron, cpu_neuron: bytes of a
    neuron beside that. staging: bytes of a buffer, 0 for none; what they take of either memory is not part of what is
    left. bundles: neurons rest as bundles, which then go where there is room; panels: dense matrices of
    the FFNs are in RAM.
    """

    gpu_layers: int
    gpu_head: bool
    gpu: Bytes
    cpu: Bytes
    gpu_left: int
    cpu_left: int
    gpu_neuron: int
    cpu_neuron: int
    bundles: bool
    panels: bool
    staging: int = 0


def budgets(hardware: Hardware, vram: int | None, ram: int | None) -> tuple[int, int]:
    """(VRAM, RAM) in bytes; None asks for all that is not taken already. RequestError for more than there is.

    A budget is what may be used at most, so without a GPU there is none to use, whatever --vram says; the plan's
    reasons tell.
    """
    gpu, cpu = hardware.gpu, hardware.cpu
    if gpu is None:
        vram = 0
    elif vram is None:
        vram = gpu.memory_bytes
    elif vram > gpu.memory_bytes:
        now = " free: give less, or end other programs on it" if hardware.key else ""  # measured, not described
        raise RequestError(f"--vram {gib(vram)}, but {gpu.name} has {gib(gpu.memory_bytes)}{now}")
    if ram is None:
        ram = cpu.memory_bytes - cpu.reserved_bytes
    elif ram > cpu.memory_bytes:
        raise RequestError(f"--ram {gib(ram)}, but {hardware.name} has {gib(cpu.memory_bytes)}")
    return vram, ram


def claim(request: PlanRequest) -> Claims:
    """What the dense parts take. RequestError, with the minimum, where RAM and VRAM together do not hold them."""
    vram, ram = budgets(request.hardware, request.vram, request.ram)
    model, config = request.model, request.model.config
    gpu_layers, gpu_head, gpu = _on_gpu(request, vram)
    kv = model.kv_bytes(request.kv_type, request.context, request.batch)
    host = request.hardware.host_bytes if gpu_layers else 0
    cpu = _in_ram(model, host, gpu_layers, gpu_head, kv, request.chunk, request.together)
    cpu["norms"] = model.vectors + (model.rotation_bytes if gpu_layers else 0) - gpu.get("norms", 0)
    cpu["predictor"] = sum(_panels(pair) for pair in _predictors(request)[gpu_layers:])
    left = ram - sum(cpu.values())
    if left < 0:
        dense, needed = sum(cpu.values()) + sum(gpu.values()), sum(cpu.values())
        beside = f" beside {gib(sum(gpu.values()))} of VRAM" if gpu else ""
        raise RequestError(
            f"{model.name} needs at least {gib(dense)} of RAM + VRAM for the dense part: give --ram {gib(needed)} or "
            f"more{beside}, not {gib(ram)} (attention {gib(cpu['attention'])}, KV cache {gib(cpu['kv'])}, "
            f"embedding and head {gib(cpu['embedding'] + cpu['head'])}, the rest "
            f"{gib(needed - sum(cpu[part] for part in ('attention', 'kv', 'embedding', 'head')))})"
        )
    panels = sum(_panels(layer) for layer in model.ffn)
    bundles = model.bundles.stride * config.n_neurons
    if request.selector == "all":
        keep, packed = not gpu_layers and panels <= left, bool(gpu_layers) or panels > left
    else:
        keep, packed = not gpu_layers and panels + bundles <= left, True
    if keep:
        cpu["panels"] = panels
        left -= panels
    if not gpu_layers:
        return Claims(0, False, {}, cpu, 0, left, model.gpu_neuron, model.bundles.stride, packed, keep)
    gpu_left = max(0, vram - sum(gpu.values()) - shared_on_gpu(model, gpu_layers))
    left = max(0, left - shared_in_ram(model, gpu_layers))
    staging = _staging(request, gpu_layers, gpu_left, left)
    gpu_left, left = gpu_left - staged_on_gpu(staging), left - staged_in_ram(staging)
    neuron = model.gpu_neuron, model.bundles.pitch
    return Claims(gpu_layers, gpu_head, gpu, cpu, gpu_left, left, *neuron, packed, keep, staging)


def _staging(request: PlanRequest, gpu_layers: int, gpu_left: int, left: int) -> int:
    """Bytes of a buffer: the most that leaves all neurons a place. 0 where no prompt needs any."""
    model, groups = request.model, -(-request.model.config.widest_ffn // GROUP)
    on_gpu, in_ram = GROUP * model.gpu_neuron, GROUP * model.bundles.pitch
    if request.selector == "all" or request.chunk <= kernels.FEW or gpu_left // on_gpu >= gpu_layers * groups:
        return 0
    most = gpu_left // (STAGED * staged_on_gpu(1))
    while size := buffer_bytes(model.bundles, model.config.widest_ffn, most):
        room = (gpu_left - staged_on_gpu(size)) // on_gpu + max(0, left - staged_in_ram(size)) // in_ram
        if room >= model.config.n_layers * groups:
            return size
        most = size // 2
    return 0


def staged_on_gpu(staging: int) -> int:
    """Bytes on the GPU for buffers of that size: theirs, and a piece once it is in the GPU's order."""
    return (BUFFERS + 1) * staging


def staged_in_ram(staging: int) -> int:
    """The same in RAM."""
    return BUFFERS * staging


def with_staging(model: Model, room: int) -> int:
    """Bytes on the GPU that leave that many for neurons."""
    return room + staged_on_gpu(
        buffer_bytes(model.bundles, model.config.widest_ffn, room // ((STAGED - 1) * staged_on_gpu(1)))
    )


def _in_ram(
    model: Model, host_bytes: int, gpu_layers: int, gpu_head: bool, kv: int, chunk: int, requests: int
) -> Bytes:
    """What RAM holds beside norms, predictors and FFNs. host_bytes: of a GPU's libraries; kv: of one layer."""
    config, tokens = model.config, max(chunk, requests)
    between = link_bytes(tokens, config.d_model, config.widest_ffn) + 4 * tokens * config.d_model  # and x in and out
    between += gpu_layers * 2 * 8 * config.widest_ffn  # counters of neurons
    return {
        "runtime": RUNTIME_BYTES + host_bytes,
        "scratch": model.scratch_bytes(chunk, requests) + (between if gpu_layers else 0),
        "embedding": model.tables,
        "norms": 0,
        "attention": sum(map(_panels, model.attention[gpu_layers:])),
        "predictor": 0,
        "head": _panels(model.projections[:1] if gpu_head else (model.head, *model.projections)),
        "kv": kv * (config.n_layers - gpu_layers),
    }


def shared_on_gpu(model: Model, layers: int) -> int:
    """Bytes on the GPU of what the groups of bundles of so many layers share, if each has neurons there."""
    return layers * n_groups(model.config.widest_ffn) * model.gpu_shared


def shared_in_ram(model: Model, gpu_layers: int) -> int:
    """The same in RAM; without layers on a GPU it is part of the neurons' own bytes."""
    return model.config.n_layers * n_groups(model.config.widest_ffn) * model.bundles.shared_bytes if gpu_layers else 0


def _fixed_on_gpu(request: PlanRequest) -> Bytes:
    """What the GPU holds however few layers are there."""
    tokens, requests = max(request.chunk, request.together), request.together
    fixed = _fixed(request.model, request.hardware, tokens, requests, request.context)
    config = request.model.config
    fixed["scratch"] += link_gpu_bytes(tokens, config.d_model, config.widest_ffn)
    return fixed


def _fixed(model: Model, hardware: Hardware, tokens: int, requests: int, context: int) -> Bytes:
    assert hardware.gpu is not None
    return {
        "runtime": hardware.gpu.reserved_bytes,
        "scratch": model.gpu_scratch(tokens, requests, context),
        "step": model.gpu_passed(tokens, requests, context if hardware.plain_torch else None),
        "norms": model.rotation_bytes,
    }


def _layers_on_gpu(request: PlanRequest) -> list[Bytes]:
    """What each layer claims there, its neurons aside."""
    model = request.model
    norms = model.layer_vectors(dense=False)
    kv = model.gpu_kv_bytes(request.kv_type, request.context, request.batch)
    predictors = [model.gpu_predictor(pair) for pair in _predictors(request)]
    return [
        {
            "norms": norms,
            "attention": _stored(model.attention[layer]),
            "kv": kv,
            "predictor": predictors[layer] if predictors else 0,
            "allocator": _rounding(request.hardware, model.gpu_rounding(layer, kv, bool(predictors), False)),
        }
        for layer in range(model.config.n_layers)
    ]


def _head_on_gpu(model: Model, hardware: Hardware) -> Bytes:
    head = _stored((model.head, *model.projections[1:]))
    return {"norms": model.end_vectors, "head": head, "allocator": _rounding(hardware, model.gpu_head_rounding)}


def _rounding(hardware: Hardware, nbytes: int) -> int:
    """Of tensors on CUDA; nothing is rounded where torch's CPU device stands in."""
    return 0 if hardware.stand_in else nbytes


def _on_gpu(request: PlanRequest, vram: int) -> tuple[int, bool, Bytes]:
    """(layers, head, bytes by part) that fit; nothing where not even one layer does."""
    if request.hardware.gpu is None or not vram:
        return 0, False, {}
    head = _head_on_gpu(request.model, request.hardware)
    return _fitting(_fixed_on_gpu(request), _layers_on_gpu(request), head, vram)


def _fitting(fixed: Bytes, layers: list[Bytes], head: Bytes, vram: int) -> tuple[int, bool, Bytes]:
    held = dict(fixed)
    count = 0
    for layer in layers:
        if sum(held.values()) + sum(layer.values()) > vram:
            break
        _hold(held, layer)
        count += 1
    if not count:
        return 0, False, {}
    with_head = count == len(layers) and sum(held.values()) + sum(head.values()) <= vram
    if with_head:
        _hold(held, head)
    return count, with_head, held


def _hold(held: Bytes, more: Bytes) -> None:
    for part, nbytes in more.items():
        held[part] = held.get(part, 0) + nbytes


def whole_layers(
    model: Model,
    hardware: Hardware,
    vram: int | None,
    kv_type: str,
    context: int,
    chunk: int,
    requests: int = 1,
) -> tuple[int, bool]:
    """How many layers of a dense model, from the first on, fit on the GPU as a whole, and whether the head does too.

    With attention, norms, FFN, and the KV cache of one context, which `requests` share; everything counts. chunk: the
    most tokens of a step. RequestError for more VRAM than there is.
    """
    vram, _ = budgets(hardware, vram, None)
    if hardware.gpu is None:
        return 0, False
    fixed = _fixed(model, hardware, max(chunk, requests), requests, context)
    norms, kv = model.layer_vectors(dense=True), model.gpu_kv_bytes(kv_type, context, 1)
    each = [
        {
            "norms": norms,
            "kv": kv,
            "attention": _stored(model.attention[layer]),
            "ffn": _stored(model.ffn[layer]),
            "allocator": _rounding(hardware, model.gpu_rounding(layer, kv, False, True)),
        }
        for layer in range(model.config.n_layers)
    ]
    layers, head, _ = _fitting(fixed, each, _head_on_gpu(model, hardware), vram)
    return layers, head


def ram_beside(
    model: Model, hardware: Hardware, layers: int, head: bool, kv_type: str, context: int, chunk: int, requests: int = 1
) -> int:
    """Bytes of RAM that a dense model takes whose first layers, and with `head` the head too, are on the GPU."""
    kv = model.kv_bytes(kv_type, context, 1)
    held = _in_ram(model, hardware.host_bytes if layers else 0, layers, head, kv, chunk, requests)
    norms = model.vectors - layers * model.layer_vectors(dense=True)
    return sum(held.values()) + norms + sum(map(_panels, model.ffn[layers:]))


def ram_alone(model: Model, kv_type: str, context: int, chunk: int, requests: int, selector: str) -> int:
    """Bytes of RAM that a model takes without a GPU, with the KV cache of one context.

    chunk: the most tokens of a step; selector: with bundles beside the dense matrices unless it is `all`, and with
    predictors where it is `predicted`.
    """
    held = _in_ram(model, 0, 0, False, model.kv_bytes(kv_type, context, 1), max(chunk, requests), requests)
    total = sum(held.values()) + model.vectors + sum(map(_panels, model.ffn))
    if selector != "all":
        total += model.config.n_layers * n_groups(model.config.widest_ffn) * model.bundles.group_bytes
    return total + (sum(map(_panels, model.predictors)) if selector == "predicted" else 0)


def dense_on_gpu(request: PlanRequest) -> list[tuple[str, int]]:
    """What claims room on the GPU before the neurons, in order: (part, bytes of VRAM that hold it and all before)."""
    fixed, layers = _fixed_on_gpu(request), _layers_on_gpu(request)
    head = _head_on_gpu(request.model, request.hardware)
    first = sum(fixed.values()) + sum(sum(layer.values()) for layer in layers)
    what = "attention, KV cache and predictors" if _predictors(request) else "attention and KV cache"
    return [(f"{what} of all layers", first), ("the output head", first + sum(head.values()))]


def _predictors(request: PlanRequest) -> tuple[tuple[Matrix, Matrix], ...]:
    return request.model.predictors if request.selector == "predicted" else ()


def _panels(matrices: tuple[Matrix, ...]) -> int:
    return sum(one.panels for one in matrices)


def _stored(matrices: tuple[Matrix, ...]) -> int:
    return sum(one.stored for one in matrices)


def gib(nbytes: float) -> str:
    """Bytes for people, rounded up, as the flags take them."""
    unit, name = (_GIB, "GiB") if nbytes >= _GIB else (1 << 20, "MiB")
    return f"{-int(-nbytes * 100 // unit) / 100:.2f}{name}".replace(".00", "")
