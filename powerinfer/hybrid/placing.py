"""Where a model runs: on the CPU alone, or with its first layers, or their hot neurons, on a GPU.

With bundles, and a profile that says which neurons are hot, the plan of `placement` decides under the budgets. Without
them layers go to the GPU as a whole, as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig
from powerinfer.devices import Executor
from powerinfer.devices.wanted import wanted_gpu
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, Progress
from powerinfer.kernels import cpu
from powerinfer.sparsity.attach import Sparsity, attach, prepared_for

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import HybridSparsity
    from powerinfer.neurons import Profile
    from powerinfer.placement.plan import Plan
    from powerinfer.placement.shapes import Model
    from powerinfer.sparsity.attach import Prepared

_SHORT = 256  # tokens: a shorter context is no help


def load_executor(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    sample: Callable[[], Sequence[int]],
    progress: Progress | None = None,
) -> tuple[Executor, Sparsity | HybridSparsity | None]:
    """The model, loaded where it should run, and how its layers decode sparsely, if they do.

    sample: gives the token ids of a text, to try the model's speed on. RequestError for options that cannot be met,
    PowerInferError when a GPU that was asked for by name cannot be used.
    """
    from powerinfer.models import load

    name, reason = wanted_gpu(engine)
    if name is not None:
        try:
            placing = _place(checkpoint, engine, name, progress)
        except PowerInferError as error:
            if engine.gpu != "auto":
                raise
            placing = str(error)
        if not isinstance(placing, str):
            return _load_placed(checkpoint, engine, placing, sample, progress)
        reason = placing
    room, unfit = None, False
    if engine.ram is not None:
        room, unfit = _within_ram(checkpoint, engine, engine.ram)
        engine = replace(engine, selector="all") if unfit else engine
    executor = load(checkpoint, engine, progress, room)
    executor.choices["gpu"] = f"none ({reason})"
    sparsity = attach(executor, checkpoint, engine, sample, progress)
    if unfit:
        executor.choices["selector"] = "all (--ram does not hold bundles beside the dense weights)"
    return executor, sparsity


def _within_ram(checkpoint: Checkpoint, engine: EngineConfig, ram: int) -> tuple[int, bool]:
    """Without a GPU: (bytes that --ram leaves for the KV cache, whether `auto` must do without bundles).

    RequestError, with what would do, where one context does not fit.
    """
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.placement.budget import Workload, bundle_bytes, gib, in_ram
    from powerinfer.placement.shapes import checkpoint_model

    prepared, _ = prepared_for(checkpoint, engine)
    selector = "all" if prepared is None else prepared.selector.name
    model = checkpoint_model(checkpoint, engine.prepared, fresh=prepared is None)
    context = engine.context or model.config.context_length

    def needed(model: Model, selector: str, kv_type: str = engine.kv_type) -> int:
        work = Workload(kv_type, context, engine.prefill_chunk, engine.max_batch, selector=selector)
        return sum(in_ram(model, work).values()) + (0 if selector == "all" else bundle_bytes(model))

    kv = model.config.n_layers * model.kv_bytes(engine.kv_type, context, 1)
    total, unfit = needed(model, selector), False
    if total > ram and engine.selector == "auto" and selector != "all":
        selector, total, unfit = "all", needed(model, "all"), True
    if total <= ram:
        return ram - total + kv, unfit
    helps = [f"give --ram {gib(total)}"]
    page = model.config.n_layers * model.kv_bytes(engine.kv_type, 1, 1)
    tokens = (ram - total + kv) // page * cpu.PAGE
    if tokens >= min(context // 2, _SHORT):
        helps.append(f"--context {tokens}")
    if needed(model, selector, "q8_0") <= ram:
        helps.append("--kv-type q8_0")
    if needed(model, "all") <= ram:
        helps.append("--selector all")
    for kind in ("q8_0", "q4_0") if engine.quantize is None else ():
        with suppress(PowerInferError):  # there is nothing to quantise
            smaller = checkpoint_model(open_checkpoint(checkpoint.path, quantize=kind), engine.prepared, fresh=True)
            if needed(smaller, "all") <= ram:
                helps.append(f"--quantize {kind}")
                break
    if len(helps) == 1:
        helps.append("a smaller model, or one in fewer bits")
    raise RequestError(
        f"{model.name} needs {gib(total)} of RAM, {gib(kv)} of it for a context of {context} tokens, and --ram is "
        f"{gib(ram)}: {', or '.join(helps)}"
    )


@dataclass(frozen=True)
class _Placing:
    """device: its name; layers, head: what of the model is on it; pages: of the KV cache; reason: for people.

    vram: bytes of the device that all of that may take, None: what there is.
    plan, prepared, profile: where neurons are placed one by one; None: layers are dense.
    """

    device: str
    layers: int
    head: bool
    pages: int
    reason: str
    vram: int | None
    plan: Plan | None = None
    prepared: Prepared | None = None
    profile: Profile | None = None


def _place(checkpoint: Checkpoint, engine: EngineConfig, name: str, progress: Progress | None) -> _Placing | str:
    """What goes where; a reason where the GPU is not used."""
    from powerinfer.devices.torch_device import choose_device
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import Workload, budgets, gib, in_ram, layers_that_fit
    from powerinfer.placement.plan import PlanRequest, make_plan
    from powerinfer.placement.shapes import checkpoint_model
    from powerinfer.system import available_memory

    device = choose_device(name)
    context = engine.context or checkpoint.config.context_length
    pages = -(-context // cpu.PAGE)  # one whole context, which the requests share
    prepared, reason = prepared_for(checkpoint, engine)
    place = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if prepared is not None and not place.exists():
        if engine.selector != "auto":
            raise RequestError(f"which neurons are hot is not known: `{place.command}` finds out, or leave --selector")
        prepared, reason = None, f"no profile says which neurons are hot; {place.command} makes it"
    hardware = measured(engine, progress, gpu=name)
    assert hardware.gpu is not None
    limit = None if engine.vram is None else engine.vram - hardware.gpu.reserved_bytes
    model = checkpoint_model(checkpoint, engine.prepared, fresh=prepared is None)
    if prepared is None:
        work = Workload(engine.kv_type, context, engine.prefill_chunk, engine.max_batch)
        vram, _ = budgets(hardware, engine.vram, None)
        layers, head = layers_that_fit(model, hardware, work, vram, dense=True)
        if not layers:
            return "the budget does not hold one layer"
        needed = sum(in_ram(model, work, layers, head, hardware.host_bytes).values())
        if engine.ram is not None and needed > engine.ram:
            raise RequestError(
                f"{model.name} needs {gib(needed)} of RAM beside the {layers} layers that --vram holds: give --ram "
                f"{gib(needed)}, or more --vram"
            )
        return _Placing(name, layers, head, pages, f"layers as a whole ({reason})", limit)
    profile = open_profile(checkpoint, engine.prepared)
    most = hardware.cpu.memory_bytes
    request = PlanRequest(
        model,
        profile,
        hardware,
        vram=engine.vram,
        ram=engine.ram if engine.ram is not None else min(available_memory() or most, most),
        context=context,
        kv_type=engine.kv_type,
        selector=prepared.selector.name,
        chunk=engine.prefill_chunk,
        requests=engine.max_batch,
    )
    if device.type == "cpu":  # a stand-in, for trying things: time does not matter
        request = replace(request, policy="greedy", insist=True)
    plan = make_plan(request)
    if not plan.claims.gpu_layers:
        return plan.reasons[0]
    if not plan.fits:
        needed = next(one["bytes"] for one in plan.helps if one["flag"] == "--ram")
        raise RequestError(
            f"the neurons of {model.name} do not fit in --vram and --ram, and none are read from disk while decoding: "
            f"give --ram {gib(needed)}, or more --vram"
        )
    share = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPU"
    return _Placing(name, plan.claims.gpu_layers, plan.claims.gpu_head, pages, share, limit, plan, prepared, profile)


def _load_placed(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    placing: _Placing,
    sample: Callable[[], Sequence[int]],
    progress: Progress | None,
) -> tuple[SplitExecutor, HybridSparsity | None]:
    from powerinfer.devices.stage import Stage
    from powerinfer.devices.torch_device import gpu_failures
    from powerinfer.hybrid.crossing import settle
    from powerinfer.hybrid.ffn import HybridSparsity, hang_neurons
    from powerinfer.hybrid.vram import hold_budget
    from powerinfer.models import GpuShare, load_split

    plan, prepared, profile = placing.plan, placing.prepared, placing.profile
    bundles = most = predictors = None
    if prepared is not None:
        bundles, predictors = prepared.bundles, prepared.predictors
        most = [prepared.most(layer) for layer in range(checkpoint.config.n_layers)]
    own = bundles is not None, bundles, most, placing.pages, predictors
    share = GpuShare(placing.device, placing.layers, placing.head, *own)
    executor = load_split(checkpoint, engine, share, progress)
    executor.choices["gpu"] += f", {placing.reason}"
    sparsity, stage, ffns = None, None, []
    try:
        if plan is not None and prepared is not None and profile is not None:
            if plan.staging:
                with gpu_failures("making room for prompts", "give less --vram"):
                    stage = Stage(executor.gpu.device, plan.staging)
            ffns = hang_neurons(
                executor.cpu,
                executor.gpu,
                prepared.bundles,
                plan.placement(profile),
                most=prepared.most,
                predictors=prepared.predictors,
                stage=stage,
                progress=progress,
            )
            sparsity = HybridSparsity(prepared.selector.name, executor, ffns, stage)
            if stage is not None:
                settle(stage, executor, ffns, checkpoint, engine, prepared, sample, progress)
            elif any(len(ffn.cold) for ffn in ffns):
                executor.choices["prefill"] = (
                    "the CPU computes cold neurons (no room, or no long steps, to stream them)"
                )
        held = hold_budget(executor, engine.max_batch, placing.vram, plan, ffns, stage)
        if held is not None and held is not plan:
            executor.choices["gpu"] += f", {100 * held.choice.mass_on_gpu:.0f} % since memory was measured"
        if sparsity is not None:
            sparsity.clear()  # of what was tried
    except BaseException:
        executor.close()
        raise
    way = "all (layers as a whole)" if sparsity is None else f"{sparsity.selector} (neurons on both devices)"
    executor.choices["selector"] = way
    return executor, sparsity
