"""Loading a model as it was resolved: on the CPU alone, or with its first layers, or their hot neurons, on a GPU.

Dense parts, cache, and neurons or experts are wired where the placement has them, the largest steps run, and what they
take is measured (vram.py). Only `load_resolved` tries again: with less on a GPU that ran out of memory, or with neurons
or experts placed by the working memory that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.config import ExpertsConfig
from powerinfer.devices import Executor
from powerinfer.devices.choices import Choice
from powerinfer.devices.wanted import gpu_names
from powerinfer.errors import GpuMemoryError, RequestError
from powerinfer.hybrid.disk import open_tier
from powerinfer.hybrid.resolve import NOT_USED, draft_problem, on_cpu_alone, permitted
from powerinfer.hybrid.resolved import Placement, Resolved, UsedPolicy, kept_on_gpus
from powerinfer.kernels import cpu as cpu_kernels
from powerinfer.numa import interleaved
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity import Sparsity
from powerinfer.topology import read_nodes

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.stage import Stage
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.hybrid.copier import Copier, Pace
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.policy_trial import TriedGpu
    from powerinfer.models.blocks import SplitFfns
    from powerinfer.placement.experts import Policy
    from powerinfer.placement.plan import Plan

Sample = Callable[[], Sequence[int]]
"""Returns the token ids of a text for measuring the model's speed."""

Loaded = tuple[Executor, Sparsity]

SLOW_NODES = (
    "{} NUMA nodes: weights rest on the node of the thread that packed them, and are read from others at a fraction of "
    "the speed; `numactl --interleave=all powerinfer ...` spreads them ({})"
)


@dataclass(frozen=True)
class Loading:
    """Whom a load asks and tells. sample: gives a text for measurements; say: told of what is read from disk, or of a
    GPU that is not used."""

    sample: Sample
    progress: Progress = silent
    say: Say = silent


def load_resolved(
    resolved: Resolved,
    sample: Sample,
    progress: Progress = silent,
    say: Say = silent,
    *,
    again: bool = True,
) -> Loaded:
    """The model, and how its layers decode. ModelError for a checkpoint with tensors missing or left over.

    say: told if the GPU turns out to have too little memory and is not used, or what a machine's nodes cost. again: a
    load for which the GPU has too little memory is tried again, with less there.

    RequestError for options that cannot be met, PowerInferError if the GPU has too little memory.
    """
    nodes = read_nodes()
    if not nodes:
        return _loaded(resolved, sample, progress, say, again)
    with interleaved(nodes) as refused:
        executor, sparsity = _loaded(resolved, sample, progress, say, again)
    numbers = ", ".join(map(str, nodes))
    if refused is None:
        near = f"each thread reads 1/{len(nodes)} of the weights from its own"
        executor.choices.memory = Choice(f"spread over NUMA nodes {numbers}", near)
    else:
        say(SLOW_NODES.format(len(nodes), refused))
        executor.choices.memory = Choice(f"NUMA nodes {numbers}", f"not spread: {refused}")
    return executor, sparsity


def _loaded(resolved: Resolved, sample: Sample, progress: Progress, say: Say, again: bool) -> Loaded:
    from powerinfer.hybrid.expert_selector import with_choice

    failures, loading = 0, Loading(sample, progress, _once(say))
    if resolved.device.gpu is not None:
        resolved = with_choice(resolved, loading)
    first = resolved.placement.plan
    while resolved.device.gpu is not None:
        _leave_draft_from_disk(resolved, loading.say)
        try:
            outcome = _load_beside_gpu(resolved, loading, first, failures)
        except GpuMemoryError as error:
            if not again:
                raise
            resolved = _smaller_load(error, resolved, failures, say)
            failures += 1
        else:
            if not isinstance(outcome, Resolved):
                if (disk := outcome[0].disk) is not None:
                    disk.end_reads()
                return outcome
            resolved = outcome
    _leave_draft_from_disk(resolved, loading.say)
    return _load_on_cpu(resolved, loading)


def _leave_draft_from_disk(resolved: Resolved, say: Say) -> None:
    """Leave a draft head out where it gains too little, now that the GPU has less, and some of the model stays on
    disk."""
    if resolved.checkpoint.config.draft is not None and (reason := draft_problem(resolved)) is not None:
        say(resolved.checkpoint.leave_draft(reason))


def _once(say: Say) -> Say:
    """`say`, which is told the same thing once, however often a load is tried."""
    lines: set[str] = set()

    def tell(text: str) -> None:
        if text not in lines:
            lines.add(text)
            say(text)

    return tell


def _smaller_load(problem: GpuMemoryError, resolved: Resolved, failures: int, say: Say) -> Resolved:
    """The load to try once the GPU ran out of memory: with less there or, with `--gpu auto`, without it. The problem
    again if there is none."""
    from powerinfer.hybrid.vram import smaller

    less = smaller(resolved, problem.lacking, failures)
    if isinstance(less, Resolved):
        less = permitted(less)
    if isinstance(less, Resolved):
        return less
    if resolved.engine.gpu != "auto" or isinstance(permitted(replace(resolved, placement=Placement())), RequestError):
        raise problem if less is None else less
    say(NOT_USED.format(problem))
    return on_cpu_alone(resolved, str(problem))


def _load_on_cpu(resolved: Resolved, loading: Loading) -> Loaded:
    from powerinfer.devices.cpu import Drafting
    from powerinfer.hybrid.expert_selector import with_choice
    from powerinfer.models import load
    from powerinfer.sparsity.attach import attach

    threads = None
    if len(counts := cpu_kernels.thread_counts(resolved.engine.threads)) > 1:
        from powerinfer.hybrid.thread_trial import with_threads

        resolved, threads = with_threads(resolved, loading, counts)
    resolved = with_choice(resolved, loading)
    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    options: dict[str, Any] = {"in_experts": selection.in_experts, "predictors": selection.predictors}
    options["drafting"] = Drafting(resolved.tokens_to_undo)
    disk = open_tier(resolved, loading.say)
    executor = load(checkpoint, engine, loading.progress, resolved.placement.kv_room, disk=disk, **options)
    executor.choices.gpu = Choice(None, resolved.device.reason)
    executor.choices.threads = threads or executor.choices.threads
    try:
        return executor, attach(executor, checkpoint, engine, selection, loading.sample, loading.progress)
    except BaseException:
        executor.close()
        raise


def load_split(
    resolved: Resolved,
    split: SplitFfns | None = None,
    progress: Progress = silent,
    stage: Stage | None = None,
    say: Say = silent,
) -> SplitExecutor:
    """The executor of a model whose first layers are on a GPU, at least one, or on several.

    split: makes the FFNs of these layers, and the checkpoint's matrices are not read; None: they are dense. stage:
    what the other layers stream through, of FFNs of matrices or bundles; None: they do not. say: told what is read from
    disk as it runs.
    Raises as `load_resolved` does.
    """
    from powerinfer.devices.cpu import CpuExecutor, Drafting
    from powerinfer.devices.gpu import CacheSize, GpuLayers
    from powerinfer.devices.several import SeveralGpus
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.streamed import StreamedLayers
    from powerinfer.devices.torch_device import MemoryShare, choose_device, gpu_failures, make_room
    from powerinfer.hybrid.spread import connect
    from powerinfer.models import rotations
    from powerinfer.models.blocks import wire
    from powerinfer.models.draft import wire_draft

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    config, placement, spared = checkpoint.config, resolved.placement, resolved.device.spared
    drafts = config.draft is not None
    assert not placement.head or placement.layers == config.n_layers
    rotary = rotations(checkpoint, engine)
    streamed = None
    with ExitStack() as opened:
        disk = open_tier(resolved, say)
        options: dict[str, Any] = {"first_layer": placement.layers, "pages": placement.pages, "disk": disk}
        drafting = Drafting(resolved.tokens_to_undo, head=drafts and not placement.draft)
        cpu = CpuExecutor(config, engine, rotary, drafting=drafting, **options)
        opened.callback(cpu.close)
        cpu.in_experts = selection.in_experts
        cpu.expert_predictors = selection.predictors if selection.in_experts else None
        if spared:
            _, reason = cpu_kernels.choose_threads(0)
            cpu.choices.threads = Choice(engine.threads, f"{reason}, less {spared} for the GPU's driver")
        advice = "put fewer layers on it, or lower --context or --max-batch"
        with checkpoint.names_damage(), gpu_failures("the model was loaded", advice):
            gpus: list[GpuLayers] = []
            common: dict[str, Any] = {"max_tokens": cpu.max_tokens}
            for number, (name, first, last) in enumerate(resolved.card_layers):
                device = choose_device(name)
                share = MemoryShare(device)
                opened.callback(share.end)
                if device.type == "cuda":
                    make_room(device, kept_on_gpus(resolved)[number])
                cache = CacheSize(engine.kv_type, cpu.n_pages, cpu.n_states, cpu.undo_tokens, first)
                ropes = config.ropes_of(first, last) if placement.firsts else rotary
                common |= {"rotations": {rope: rotary[rope] for rope in ropes}, "share": share}
                gpus.append(GpuLayers(config, device, layers=last, cache=cache, split=split is not None, **common))
                opened.callback(gpus[-1].close)
            if stage is not None:
                streamed = StreamedLayers(cpu, gpus[-1], stage)
            if placement.spread:
                connect(gpus)
            parts: dict[str, Any] = {"split": split, "head": placement.head, "last": streamed}
            wire(cpu, checkpoint, progress, gpus, neurons=selection, **parts)
            draft = None
            if placement.draft:
                size = CacheSize(engine.kv_type, cpu.n_pages, first=config.n_layers, drafts=True)
                drafted, chosen = config.with_draft, choose_device(resolved.gpu)
                routed = isinstance(drafted.layers[-1].ffn, ExpertsConfig)
                draft = GpuLayers(drafted, chosen, layers=config.n_layers + 1, cache=size, split=routed, **common)
                opened.callback(draft.close)
                draft.share_output(gpus[0])
                _wire_draft(draft, cpu, checkpoint)
            elif drafts:
                wire_draft(cpu, checkpoint)
        checkpoint.finish()
        checkpoint.release()
        gpu = gpus[0] if len(gpus) == 1 else SeveralGpus(gpus)
        executor = SplitExecutor(cpu, gpu, streamed, resolved.device.reason, draft)
        if resolved.device.chunk:
            reason = "tokens of a prompt in a step: what is in RAM streams once for each step"
            executor.choices.prefill_chunk = Choice(resolved.device.chunk, reason)
        opened.pop_all()  # the executor closes them
    return executor


def _wire_draft(draft: GpuLayers, cpu: CpuExecutor, checkpoint: Checkpoint) -> None:
    """Wire a draft head on a GPU, with all of its experts, if it has any."""
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.models.blocks import wire_split
    from powerinfer.models.draft import wire_draft

    layer = checkpoint.config.n_layers
    ffn = checkpoint.config.with_draft.layers[layer].ffn
    if not isinstance(ffn, ExpertsConfig):
        wire_draft(draft, checkpoint)
        return
    hot = [np.empty(0, np.int32)] * layer + [np.arange(ffn.n_experts, dtype=np.int32)]
    split = ExpertSplit(hot, hot_whole=True)
    wire_draft(draft, checkpoint, partial(wire_split, cpu, draft, layer, split))
    for made in split.ffns:
        draft.count("ffn", sum(made.memory().values()))


def _load_beside_gpu(
    resolved: Resolved, loading: Loading, first: Plan | None, failures: int
) -> Loaded | Resolved:
    """The model, or the load to try in its place. first: the plan before memory was measured; failures: how often the
    GPU ran out of memory before."""
    if resolved.placement.several is not None:
        return _load_on_cards(resolved, loading)
    if resolved.placement.neurons is not None:
        return _load_neurons(resolved, loading, first, tight=failures > 0)
    if resolved.placement.experts is not None:
        return _load_experts(resolved, loading)
    from powerinfer.hybrid.vram import hold_budget

    stage = _stage(resolved)
    try:
        executor = load_split(resolved, None, loading.progress, stage, loading.say)
    except BaseException:
        if stage is not None:
            stage.close()
        raise
    try:
        settle = partial(_settle_layers, executor, resolved, loading.progress)
        hold_budget(executor, resolved, executor.streamed, settle=settle)
        if executor.streamed is not None:
            executor.streamed.stage.settle()
    except BaseException:
        executor.close()
        raise
    sparsity = Sparsity()
    sparsity.stage = None if executor.streamed is None else executor.streamed.stage
    executor.choices.selector = Choice(sparsity.selector, "layers as a whole")
    return executor, sparsity


def _load_on_cards(resolved: Resolved, loading: Loading) -> Loaded:
    """The model on several GPUs. GpuMemoryError where one's budget cannot be kept."""
    from powerinfer.hybrid.ffn import NeuronSplit

    plan = resolved.placement.several
    assert plan is not None
    if resolved.policy.name is None:
        resolved = replace(resolved, policy=_tried_policies(resolved, loading))
    copiers: list[Copier | None] = [None] * len(plan.parts)
    if resolved.placement.experts is not None and resolved.policy.name != "static":
        copiers = [*_copiers(resolved, plan, resolved.policy.name)]
    executor, splits = _split_on_cards(resolved, plan, copiers, loading)
    exchanging = [copier for copier in copiers if copier is not None]
    try:
        _settle_cards(executor, resolved, splits, loading)
        for ffn in (ffn for split in splits if isinstance(split, NeuronSplit) for ffn in split.ffns):
            ffn.fill()
        streamed = executor.streamed
        for stage in {split.stage for split in splits} | {None if streamed is None else streamed.stage}:
            if stage is not None:
                stage.settle()
        sparsity = _sparsity_of_cards(executor, resolved, splits)
        for copier in exchanging:
            copier.start()
            copier.tell = sparsity.end_policy  # type: ignore[attr-defined]
    except BaseException:
        executor.close()
        raise
    return executor, sparsity


def _split_on_cards(
    resolved: Resolved, plan: Plan, copiers: Sequence[Copier | None], loading: Loading
) -> tuple[SplitExecutor, list[NeuronSplit | ExpertSplit]]:
    """The model on several GPUs, not yet within their budgets; the copiers, of each GPU's experts, are off."""
    from powerinfer.hybrid.several import CardSplits, splits_of, stages_of

    with ExitStack() as opened:
        stages = stages_of(resolved, plan, opened)
        splits = [] if plan.claims.whole else splits_of(resolved, plan, stages, copiers)
        for made in splits:
            opened.callback(made.close)
        streams = plan.claims.whole or plan.claims.passes
        parts = CardSplits(splits, [part.last for part in plan.parts]) if splits else None
        executor = load_split(resolved, parts, loading.progress, stages[-1] if streams else None, loading.say)
        opened.pop_all()  # the executor closes them
    for copier in copiers:
        if copier is not None:
            copier.on = False  # what is measured is no text
    return executor, splits


def _copiers(resolved: Resolved, plan: Plan, name: str | None) -> list[Copier]:
    """The copiers of the experts of each GPU, of its layers alone, by a policy of that name."""
    from powerinfer.hybrid.copier import Copier

    assert name is not None
    return [
        Copier(_policy(resolved, name, part.first, part.last), _pace(plan, part.plan.request.hardware.copy_gb_s))
        for part in plan.parts
    ]


def _settle_cards(
    executor: SplitExecutor,
    resolved: Resolved,
    splits: Sequence[NeuronSplit | ExpertSplit],
    loading: Loading,
    prompts: bool = True,
) -> None:
    """Hold each GPU's budget, and settle how it computes prompts and steps. prompts: these are measured."""
    from powerinfer.devices.several import OneCard
    from powerinfer.hybrid.spread import tell_exchanges
    from powerinfer.hybrid.step_trial import settle as settle_steps
    from powerinfer.hybrid.vram import hold_card

    plan, prefill = resolved.placement.several, []
    assert plan is not None
    for card in executor.cards:
        card.rehearse_exchanges()
    if any(card.card_links for card in executor.cards):
        tell_exchanges(executor)
    cards = zip(executor.cards, gpu_names(resolved.gpu), plan.parts, strict=True)
    for number, (card, name, part) in enumerate(cards):
        single = replace(resolved, device=replace(resolved.device, gpu=name))
        alone, split = OneCard(executor, card), splits[number] if splits else None
        settle: Callable[[], None] = lambda: None  # noqa: E731
        if split is not None and prompts:
            settle = partial(_settle_prompts, alone, single, split, loading.sample, loading.progress)
        elif split is None and card is executor.cards[-1]:
            settle = partial(_settle_layers, alone, single, loading.progress)
        hold_card(alone, single, part.plan, split or alone.streamed)
        settle()
        if split is not None:
            settle_steps(alone, split, single, card.observer is not None)
        prefill.append(executor.choices.prefill)
    texts = dict.fromkeys(str(choice) for choice in prefill if choice is not None)
    if len(texts) > 1:
        executor.choices.prefill = Choice("; ".join(texts))


def _sparsity_of_cards(
    executor: SplitExecutor, resolved: Resolved, splits: Sequence[NeuronSplit | ExpertSplit]
) -> Sparsity:
    """Note in the executor's choices how the layers decode; that, with its statistics."""
    from powerinfer.hybrid.experts import ExpertSparsity
    from powerinfer.hybrid.sparsity import HybridSparsity

    choices, ffns = executor.choices, [ffn for split in splits for ffn in split.ffns]
    if not splits:
        sparsity = Sparsity()
        sparsity.stage = None if executor.streamed is None else executor.streamed.stage
        choices.selector = Choice(sparsity.selector, "layers as a whole")
        return sparsity
    if resolved.placement.experts is not None:
        name = resolved.policy.name or "static"
        of_experts = ExpertSparsity(executor, ffns, name)  # type: ignore[arg-type]
        choices.experts = Choice(name, resolved.policy.reason)
        choices.selector = Choice(of_experts.selector, "experts on the GPUs and the CPU", _expert_selector(resolved))
        of_experts.clear()
        return of_experts
    of_neurons = HybridSparsity(resolved.selection.selector, executor, ffns)  # type: ignore[arg-type]
    choices.selector = Choice(of_neurons.selector, "neurons on the GPUs and the CPU")
    of_neurons.clear()
    return of_neurons


def _settle_layers(executor: SplitExecutor, resolved: Resolved, progress: Progress) -> None:
    """Settle how prompts are computed (`_settle_prompts`), of layers that are on the CPU as a whole."""
    from powerinfer.hybrid.crossing import settle_layers

    if resolved.placement.layers == resolved.checkpoint.config.n_layers:
        return
    if executor.streamed is not None and executor.streamed.spans:
        settle_layers(executor, resolved, progress)
    else:
        reason = "no room, or no long steps, to stream them"
        executor.choices.prefill = Choice("the CPU computes the layers in RAM", reason)


def _load_neurons(resolved: Resolved, loading: Loading, first: Plan | None, tight: bool) -> Loaded | Resolved:
    """The model with its neurons placed by the plan, or the load to try in its place, by a better one, once memory is
    measured. first, tight: the plan before that; the GPU ran out of memory with it."""
    from powerinfer.hybrid.beside_gpu import neurons_with_chunk
    from powerinfer.hybrid.fusion import Fusion
    from powerinfer.hybrid.memory_trial import Working, neurons_memory
    from powerinfer.hybrid.sparsity import HybridSparsity
    from powerinfer.hybrid.step_trial import settle as settle_steps
    from powerinfer.hybrid.vram import hold_budget

    assert first is not None
    memory, earlier = neurons_memory(resolved, first), None
    again = resolved.placement.refilled  # and these are its neurons
    saved = None if tight or again else memory.find()
    if saved is not None:
        rests, short = resolved.engine.disk != "none", saved.result.chunk
        planned = None
        if 0 < short < resolved.device.chunk:
            planned = neurons_with_chunk(resolved.with_fewer_tokens(short), first.request)
        if isinstance(planned, Resolved):
            resolved = planned
        plan = _as_saved(resolved.placement.neurons or first, saved.result.working, rests)
        if plan is not None:
            resolved = resolved.placed(plan=plan, disk=plan.on_disk if rests else None)
            earlier = saved.result.measured
    start = resolved.placement.neurons
    assert start is not None
    split = _planned_split(resolved, start)
    try:
        stage = split.stage if start.claims.passes else None
        executor = load_split(resolved, split, loading.progress, stage, loading.say)
    except BaseException:
        split.close()
        raise
    try:
        fusion = Fusion(executor, split.ffns, resolved)

        def settle() -> bool:
            if fusion.settle(loading.sample, loading.progress):
                return True
            _settle_prompts(executor, resolved, split, loading.sample, loading.progress)
            return False

        filled, measured = hold_budget(executor, resolved, split, earlier=earlier, tight=tight, settle=settle)
        if filled is not resolved:
            executor.close()
            return filled
        if measured is not None and earlier is None:
            chunk = start.request.chunk
            memory.keep(Working(start.claims.gpu["scratch"], measured, chunk if chunk != first.request.chunk else 0))
        if start is not first:
            executor.tell(f"{100 * start.choice.mass_on_gpu:.0f} % since memory was measured")
        settle_steps(executor, split, resolved)
        for ffn in split.ffns:
            ffn.fill()
        if split.stage is not None:
            split.stage.settle()
        sparsity = HybridSparsity(resolved.selection.selector, executor, split.ffns)
        sparsity.clear()  # counts of the measurements
    except BaseException:
        executor.close()
        raise
    executor.choices.selector = Choice(sparsity.selector, "neurons on both devices")
    return executor, sparsity


def _as_saved(plan: Plan, working: int, rests: bool) -> Plan | None:
    """The plan by the working memory of an earlier start; None if neurons do not fit into RAM then. rests: some may
    stay on disk."""
    from powerinfer.placement.plan import Plan, with_working_memory

    again = with_working_memory(plan, working)
    return again if isinstance(again, Plan) and (again.loads if rests else again.fits) else None


def _load_experts(resolved: Resolved, loading: Loading) -> Loaded | Resolved:
    """The model with experts on both devices, or the load to try in its place: with other experts on the GPU, by the
    working memory that was measured."""
    from powerinfer.hybrid.beside_gpu import estimated_scratch, with_other_experts
    from powerinfer.hybrid.copier import Copier
    from powerinfer.hybrid.experts import ExpertSparsity
    from powerinfer.hybrid.vram import measured_scratch

    if resolved.policy.name is None:
        resolved = replace(resolved, policy=_tried_policies(resolved, loading))
    name = resolved.policy.name
    assert name is not None
    copier = None if name == "static" else Copier(_policy(resolved, name), _pace_of(resolved))
    executor, split, used = _split_of_experts(resolved, copier, loading)
    scratch = resolved.placement.scratch
    try:
        auto = resolved.engine.expert_policy == "auto"  # its choice is of these
        working = None if auto else measured_scratch(resolved, split, used)
        if working is None:
            if scratch is not None and scratch < estimated_scratch(resolved):
                executor.tell("since memory was measured")
            sparsity = ExpertSparsity(executor, split.ffns, name)
            sparsity.clear()  # counts of the measurements
            _keep_memory(resolved)
    except BaseException:
        executor.close()
        raise
    if working is not None:
        executor.close()
        other = with_other_experts(resolved, working)
        return other if isinstance(other, Resolved) else resolved.placed(scratch=estimated_scratch(resolved))
    if split.stage is not None:
        split.stage.settle()
    if copier is not None:
        copier.start()
        copier.tell = sparsity.end_policy
    executor.choices.experts = Choice(name, resolved.policy.reason)
    executor.choices.selector = Choice(sparsity.selector, "experts on both devices", _expert_selector(resolved))
    return executor, sparsity


def _expert_selector(resolved: Resolved) -> str:
    """The selector inside experts, for people."""
    selection, tried = resolved.selection, resolved.checkpoint.config.whole_experts_reason is None
    reason = f": {selection.reason}" if resolved.engine.selector == "auto" else ""
    if selection.in_experts:
        of = "them, too" if selection.on_gpu else "those on the CPU"
        return f", {selection.selector} (neurons inside {of}{reason})"
    return f", all (neurons inside them{reason})" if tried and reason else ""


def _keep_memory(resolved: Resolved) -> None:
    """Save what experts were placed by, unless that is the estimate, and always was."""
    from powerinfer.hybrid.memory_trial import ExpertsMemory, experts_memory

    placement, device = resolved.placement, resolved.device
    assert placement.plan is not None
    request, planned = placement.plan.request, placement.plan.staging
    trial = experts_memory(resolved, replace(request, chunk=device.first_chunk or request.chunk))
    saved = trial.find()
    staging = None if placement.staging == planned else placement.staging
    used = ExpertsMemory(placement.scratch, staging, device.chunk if device.first_chunk else 0)
    if used != (ExpertsMemory() if saved is None else saved.result):
        trial.keep(used)


def _split_of_experts(
    resolved: Resolved, copier: Copier | None, loading: Loading, prompts: bool = True
) -> tuple[SplitExecutor, ExpertSplit, int | None]:
    """The model within its budget, and the bytes that dense parts and the largest steps take; the copier is off.
    prompts: how they are computed is measured."""
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.step_trial import settle as settle_steps
    from powerinfer.hybrid.vram import hold_budget

    experts = resolved.placement.experts
    assert experts is not None
    hot_whole = not resolved.selection.on_gpu
    inside = resolved.placement.hot_neurons
    split = ExpertSplit(experts, resolved.engine.adjust, _stage(resolved), copier, hot_whole, inside)
    try:
        executor = load_split(resolved, split, loading.progress, say=loading.say)
    except BaseException:
        split.close()
        raise
    if copier is not None:
        copier.on = False  # what is measured is no text
    try:
        settle = partial(_settle_prompts, executor, resolved, split, loading.sample, loading.progress)
        _, used = hold_budget(executor, resolved, split, settle=settle if prompts else lambda: None)
        settle_steps(executor, split, resolved, copier is not None)
    except BaseException:
        executor.close()
        raise
    return executor, split, used


def _tried_policies(resolved: Resolved, loading: Loading) -> UsedPolicy:
    """The policy that decodes fastest, chosen earlier or now. Nothing of the trial is left in memory."""
    from powerinfer.hybrid.policy_trial import chosen, measured, policy_trial

    trial = policy_trial(resolved)
    earlier = trial.find()
    if earlier is not None:
        return UsedPolicy(*chosen(earlier))
    executor, gpus = _tried_gpus(resolved, replace(loading, say=silent))
    try:
        sample, progress = loading.sample(), loading.progress
        return UsedPolicy(*chosen(trial.run(lambda: measured(executor, gpus, sample, progress))))
    finally:
        executor.close()


def _tried_gpus(resolved: Resolved, loading: Loading) -> tuple[SplitExecutor, list[TriedGpu]]:
    """The model within its budgets, with what exchanges the experts of each GPU."""
    from powerinfer.hybrid.copier import Copier
    from powerinfer.hybrid.policy_trial import TriedGpu

    plan, make = resolved.placement.several, partial(_policy, resolved)
    if plan is None:
        copier = Copier(make("static"), _pace_of(resolved))
        executor, _, _ = _split_of_experts(resolved, copier, loading, prompts=False)
        return executor, [TriedGpu(executor.gpu.device, copier, make)]
    copiers = _copiers(resolved, plan, "static")
    executor, splits = _split_on_cards(resolved, plan, copiers, loading)
    try:
        _settle_cards(executor, resolved, splits, loading, prompts=False)
    except BaseException:
        executor.close()
        raise
    makes = [partial(make, first=part.first, last=part.last) for part in plan.parts]
    return executor, list(map(TriedGpu, (card.device for card in executor.cards), copiers, makes))


def _policy(resolved: Resolved, name: str, first: int = 0, last: int | None = None) -> Policy:
    """The policy of a name, of which the GPU at first has the experts of the plan. first, last: of the GPU's layers,
    None: all that are on one."""
    from powerinfer.placement.experts import make_policy

    routed, experts = resolved.checkpoint.config.experts, resolved.placement.experts
    assert experts is not None
    last = resolved.placement.layers if last is None else last
    slots = {layer: len(experts[layer]) for layer in routed if first <= layer < last}
    sizes = {layer: routed[layer].n_experts for layer in slots}
    frequencies = resolved.placement.frequencies or {
        layer: np.full(n, routed[layer].router.top_k / n) for layer, n in sizes.items()
    }
    return make_policy(name, slots, sizes, {layer: frequencies[layer] for layer in slots})


def _pace_of(resolved: Resolved) -> Pace:
    """The time for copies of experts beside a step, by the plan and the rates that were measured."""
    plan = resolved.placement.plan
    assert plan is not None
    return _pace(plan, plan.request.hardware.copy_gb_s)


def _pace(plan: Plan, copy_gb_s: float) -> Pace:
    from powerinfer.hybrid.copier import Pace

    return Pace(plan.choice.seconds, 1e9 * copy_gb_s)


def _planned_split(resolved: Resolved, plan: Plan) -> NeuronSplit:
    """The neurons of the GPU's layers, where the plan places them."""
    from powerinfer.hybrid.ffn import NeuronSplit

    selection = resolved.selection
    assert selection.bundles is not None
    stage = _stage(resolved)
    placement = plan.placement(plan.request.profile)
    frequency = plan.request.profile.fraction
    return NeuronSplit(selection.bundles, placement, selection.threshold, selection.predictors, stage, frequency)


def _stage(resolved: Resolved) -> Stage | None:
    """Buffers for long prompts; None: there are none."""
    from powerinfer.devices.stage import Stage
    from powerinfer.devices.torch_device import choose_device, gpu_failures

    placement = resolved.placement
    staging = placement.staging if placement.neurons is None else placement.neurons.staging
    if not staging:
        return None
    with gpu_failures("making room for prompts", "give less --vram"):
        return Stage(choose_device(resolved.gpu), staging)


def _settle_prompts(
    executor: SplitExecutor, resolved: Resolved, split: NeuronSplit | ExpertSplit, sample: Sample, progress: Progress
) -> None:
    """Measure the crossing, if cold neurons can be streamed, or layers: these stream from the crossing of neurons on,
    where any are cold. GpuMemoryError if the GPU has too little memory for it."""
    from powerinfer.hybrid.crossing import settle, settle_layers
    from powerinfer.kernels.gpu import FEW

    if not any(len(ffn.cold) for ffn in split.ffns):
        if executor.streamed is not None:
            settle_layers(executor, resolved, progress)
        return
    placement = resolved.placement
    if placement.neurons is not None and placement.disk is not None and split.stage is not None:
        split.stage.least = FEW + 1  # the CPU would read what is cold once for each FEW tokens
        cold = "what is cold, some of it from disk, streams"
        executor.choices.prefill = Choice(f"{cold} from {FEW + 1} tokens, which reads it once")
        return
    if split.stage is not None and all(ffn.stage is not None for ffn in split.ffns):
        settle(split.stage, executor, split.ffns, resolved, sample, progress)
    else:
        reason = "no room, or no long steps, to stream them"
        if placement.disk is not None and placement.neurons is None:
            reason = "it reads from disk"
        if split.stage is not None:
            reason = "they are not as a GGUF file has them"
        executor.choices.prefill = Choice("the CPU computes what is cold", reason)
    if (
        placement.neurons is not None
        and executor.streamed is None
        and not executor.gpu.has_head
        and split.stage is not None
        and executor.choices.prefill is not None
    ):
        more = "; the layers in RAM stay on the CPU (no room to stream them)"
        executor.choices.prefill = executor.choices.prefill.add(more)
