"""Budgets: where the dense parts of a model rest, and what is left of either memory for neurons.

Everything counts: weights, predictors, KV cache, working memory, and what driver and runtime take.

Order of claim on the GPU: runtime and working memory; for one layer after another attention, norms and its KV cache
(attention cannot run where its cache is not); predictors; the output head; what is left is for hot neurons. The layers
whose attention does not fit run on the CPU as a whole. RAM holds runtime, working memory, the embedding and every dense
part that is not on the GPU; what is left is for the other neurons. Without a GPU the engine keeps the dense matrices of
the FFNs beside the bundles, for prompts; where there is no room for both, bundles alone are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from powerinfer.errors import RequestError
from powerinfer.placement.hardware import Hardware
from powerinfer.placement.shapes import Matrix

if TYPE_CHECKING:
    from powerinfer.placement.plan import PlanRequest

RUNTIME_BYTES = 80 << 20
"""What the interpreter, its libraries, the tokenizer and the threads take in RAM beside the model: 47 to 65 MiB with
vocabularies of 16,000 and 49,000, and some room."""

_GIB = 1 << 30

Bytes = dict[str, int]
"""By part: runtime, scratch, embedding, norms (with biases), attention, predictor, head, kv, panels, ffn (bundles)."""


@dataclass(frozen=True)
class Claims:
    """gpu_layers: so many layers, from the first, have their attention on the GPU, 0: the GPU is not used;
    gpu_predictors: so many of them their predictor too; gpu_head: the output head is there.

    gpu, cpu: bytes of all but the bundles, by part; gpu_left, cpu_left: what remains of the budgets. bundles: neurons
    rest as bundles, which then go where there is room; panels: dense matrices of the FFNs are in RAM.
    """

    gpu_layers: int
    gpu_predictors: int
    gpu_head: bool
    gpu: Bytes
    cpu: Bytes
    gpu_left: int
    cpu_left: int
    bundles: bool
    panels: bool


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
        raise RequestError(f"--vram {gib(vram)}, but {gpu.name} has {gib(gpu.memory_bytes)}")
    if ram is None:
        ram = cpu.memory_bytes - cpu.reserved_bytes
    elif ram > cpu.memory_bytes:
        raise RequestError(f"--ram {gib(ram)}, but {hardware.name} has {gib(cpu.memory_bytes)}")
    return vram, ram


def claim(request: PlanRequest) -> Claims:
    """What the dense parts take. RequestError, with the minimum, where RAM and VRAM together do not hold them."""
    vram, ram = budgets(request.hardware, request.vram, request.ram)
    model, layers = request.model, request.model.config.n_layers
    gpu_layers, gpu_predictors, gpu_head, gpu = _on_gpu(request, vram)
    kv = model.kv_bytes(request.kv_type, request.context, request.batch)
    cpu = {
        "runtime": RUNTIME_BYTES,
        "scratch": model.scratch_bytes(request.chunk, request.batch, forms=True),
        "embedding": model.tables,
        "norms": model.vectors * (layers - gpu_layers) // layers,
        "attention": sum(_panels(model.attention[layer]) for layer in range(gpu_layers, layers)),
        "predictor": sum(_panels(pair) for pair in _predictors(request)[gpu_predictors:]),
        "head": 0 if gpu_head else _panels((model.head, *model.projections)),
        "kv": kv * (layers - gpu_layers),
    }
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
    bundles = model.bundles.stride * model.config.d_ff * layers
    if request.selector == "all":
        keep, packed = not gpu_layers and panels <= left, bool(gpu_layers) or panels > left
    else:
        keep, packed = not gpu_layers and panels + bundles <= left, True
    if keep:
        cpu["panels"] = panels
        left -= panels
    gpu_left = vram - sum(gpu.values()) if gpu else 0
    return Claims(gpu_layers, gpu_predictors, gpu_head, gpu, cpu, gpu_left, left, packed, keep)


def _on_gpu(request: PlanRequest, vram: int) -> tuple[int, int, bool, Bytes]:
    """(layers, predictors, head, bytes by part) that fit; nothing where not even one layer does."""
    model, device, layers = request.model, request.hardware.gpu, request.model.config.n_layers
    if device is None or not vram:
        return 0, 0, False, {}
    gpu = {
        "runtime": device.reserved_bytes,
        "scratch": model.scratch_bytes(request.chunk, request.batch, forms=False),
        "norms": 0,
        "attention": 0,
        "predictor": 0,
        "head": 0,
        "kv": 0,
    }
    left = vram - sum(gpu.values())
    kv = model.kv_bytes(request.kv_type, request.context, request.batch)
    count = 0
    for layer in range(layers):
        norms = model.vectors * (layer + 1) // layers - model.vectors * layer // layers
        attention = _stored(model.attention[layer])
        if norms + attention + kv > left:
            break
        for part, nbytes in (("norms", norms), ("attention", attention), ("kv", kv)):
            gpu[part] += nbytes
            left -= nbytes
        count += 1
    if not count:
        return 0, 0, False, {}
    predictors = 0
    for pair in _predictors(request)[:count]:
        if _stored(pair) > left:
            break
        gpu["predictor"] += _stored(pair)
        left -= _stored(pair)
        predictors += 1
    head = _stored((model.head, *model.projections))
    on_gpu = count == layers and predictors == len(_predictors(request)) and head <= left
    gpu["head"] = head if on_gpu else 0
    return count, predictors, on_gpu, gpu


def dense_on_gpu(request: PlanRequest) -> list[tuple[str, int]]:
    """What claims room on the GPU before the neurons, in order: (part, bytes of VRAM that hold it and all before)."""
    model, device, layers = request.model, request.hardware.gpu, request.model.config.n_layers
    assert device is not None
    fixed = device.reserved_bytes + model.scratch_bytes(request.chunk, request.batch, forms=False)
    kv = layers * model.kv_bytes(request.kv_type, request.context, request.batch)
    attention = fixed + kv + model.vectors + sum(map(_stored, model.attention))
    predictors = attention + sum(map(_stored, _predictors(request)))
    head = predictors + _stored((model.head, *model.projections))
    parts = [("attention and KV cache of all layers", attention), ("the output head", head)]
    return [parts[0], ("all predictors", predictors), parts[1]] if _predictors(request) else parts


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
