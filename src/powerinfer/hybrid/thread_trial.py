"""The trial of automatic `--threads`, where cores differ, or the system does not describe them.

More threads are not always faster: those on efficient cores hold up the others, two on one core share it, and other
programs want a core. The first layers of the model, up to about as much as a processor's caches do not hold, are
loaded for each number of threads that may be the fastest (`Topology.thread_counts`), and compute a text in turn, before
the model is loaded with the one chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated

import numpy as np

from powerinfer.config import EngineConfig, ExpertsConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.choices import Choice
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.json_file import Between, Length
from powerinfer.hybrid.resolved import Resolved, ram_bytes
from powerinfer.kernels import cpu
from powerinfer.models import rotations
from powerinfer.models.blocks import wire_embedding, wire_layer
from powerinfer.sparsity.expert_trial import FewExperts
from powerinfer.sparsity.trials import INTERRUPTED, Outcome, Trial, TrialSubject, conditions, fastest, take_turns
from powerinfer.system import MOST_THREADS, available_memory

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.hybrid.load import Loading
    from powerinfer.placement.shapes import Model

LEAST_BYTES = 128 << 20
"""Bytes of weights that a token reads in the layers that are loaded: fewer would stay in a processor's caches."""
ROUNDS = 4  # the first is a warm-up
PROMPT = 16
"""Tokens of a prompt that are computed in one step."""
STEPS = 6
"""Decode steps of a round, of which the first counts for nothing: it finds the caches as the prompt left them."""
PROMPT_TOKENS, ANSWER_TOKENS = 256, 128
"""A request by whose time numbers of threads are compared."""
GAIN = 0.97
"""Fewer threads must take less than this share of the time with all."""
_SPARE = 2  # of the bytes that the trial takes, where others may take memory, too

_Seconds = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one token, and of one of `PROMPT`."""

    token: _Seconds
    prompt: _Seconds

    @property
    def request(self) -> float:
        return ANSWER_TOKENS * self.token + PROMPT_TOKENS / PROMPT * self.prompt


@dataclass(frozen=True)
class TimedThreads:
    """The number of threads, and the medians of all that were tried, by number; {}: none were."""

    threads: Annotated[int, Between(1, MOST_THREADS)]
    seconds: Annotated[dict[str, StepTimes], Length(MOST_THREADS)] = field(default_factory=dict)

    def fits(self, counts: Mapping[int, str]) -> bool:
        return self.threads in counts and (not self.seconds or [*self.seconds] == [str(count) for count in counts])

    def __str__(self) -> str:
        times = (f"{n} threads {1e3 * one.token:.3g} and {1e3 * one.prompt:.3g} ms" for n, one in self.seconds.items())
        return f"a token and {PROMPT} of a prompt in the first layers: {', '.join(times)}"


SUBJECT = TrialSubject("threads", TimedThreads, forgives=True)


def with_threads(
    resolved: Resolved, loading: Loading, counts: Mapping[int, str]
) -> tuple[Resolved, Choice[int]]:
    """The same on the CPU alone with the number of threads that a trial chooses, now or earlier, and this choice.
    counts: as of `cpu.thread_counts`."""
    engine, checkpoint = resolved.engine, resolved.checkpoint
    most, reason = next(iter(counts.items()))
    if resolved.placement.disk is not None:
        return resolved, Choice(most, f"{reason}; what is read from disk decides the speed")
    outcome = _outcome(resolved, loading, counts)
    if isinstance(outcome, str):
        return resolved, Choice(most, f"{reason}; {outcome}")
    threads = outcome.result.threads
    chosen = f"{counts[threads]}, of {most}; " if threads != most else f"{reason}; "
    checkpoint.release()
    return replace(resolved, engine=replace(engine, threads=threads)), Choice(
        threads, chosen + outcome.reason(str(outcome.result))
    )


def _outcome(resolved: Resolved, loading: Loading, counts: Mapping[int, str]) -> Outcome[TimedThreads] | str:
    """The outcome of an earlier trial, or of one now, or the reason why there is none."""
    checkpoint, engine = resolved.checkpoint, resolved.engine
    key = conditions(checkpoint, engine, resolved.selection) | {"counts": " ".join(map(str, counts))}
    all_cores = TimedThreads(next(iter(counts)))
    trial = Trial(replace(SUBJECT, fallback=all_cores), checkpoint, engine, key)
    few = first_layers(checkpoint)
    room = _has_room(few, checkpoint, engine, counts)

    def fits(result: TimedThreads) -> bool:
        return result.fits(counts)

    # Only a trial depends on the memory that is free at the moment: else the choice would change from run to run.
    outcome = trial.find(fits, anew=engine.trial and room)
    if outcome is not None:
        return outcome
    if not engine.trial:
        return "--no-trial"
    if not room:
        return "no room for the trial of threads"
    if unsaved := trial.keep(all_cores, problem=INTERRUPTED).unsaved:
        return f"no trial of threads, which every start would repeat: {trial.path} cannot be written ({unsaved})"
    loading.progress("trial of threads", 0, 1)
    text = loading.sample()
    outcome = trial.run(lambda: measured(few, checkpoint, engine, list(counts), text))
    loading.progress("trial of threads", 1, 1)
    return outcome


def first_layers(checkpoint: Checkpoint) -> FewExperts:
    """A model's first layers, with some of their experts: the fewest that read `LEAST_BYTES` for a token, or all."""
    from powerinfer.placement.shapes import partial_model

    model, layers, read = partial_model(checkpoint.config, checkpoint), 0, 0.0
    while layers < checkpoint.config.n_layers and read < LEAST_BYTES:
        read += _read_bytes(model, layers)
        layers += 1
    return FewExperts(checkpoint, layers)


def _read_bytes(model: Model, layer: int) -> float:
    """Bytes of weights that a token reads in a layer."""
    ffn = model.config.layers[layer].ffn
    share = ffn.router.top_k / ffn.n_experts if isinstance(ffn, ExpertsConfig) else 1.0
    experts = sum(one.panels for one in model.experts[layer])
    weights = sum(one.panels for one in (*model.attention[layer], *model.ffn[layer]))
    return weights - experts * (1 - share)


def _small_engine(engine: EngineConfig, threads: int) -> EngineConfig:
    """The options of the trial: a context that a round fills."""
    context = cpu.round_up(PROMPT + STEPS, cpu.PAGE)
    return replace(engine, threads=threads, context=context, max_batch=1, prefill_chunk=PROMPT)


def _has_room(few: FewExperts, checkpoint: Checkpoint, engine: EngineConfig, counts: Mapping[int, str]) -> bool:
    """Whether --ram, and the free memory with room for others, hold the layers once for each number of threads."""
    from powerinfer.placement.shapes import partial_model

    model = partial_model(few.config, checkpoint)
    needed = sum(ram_bytes(model, _small_engine(engine, count)) for count in counts)
    return needed <= (engine.ram or needed) and not 0 < available_memory() < _SPARE * needed


def measured(
    few: FewExperts, checkpoint: Checkpoint, engine: EngineConfig, counts: Sequence[int], sample: Sequence[int]
) -> TimedThreads:
    """The fastest number of threads; the first of them is all."""
    tokens = np.resize(np.asarray(sample or [0], np.int32), PROMPT + STEPS)
    with ExitStack() as opened:
        steps: dict[int, Callable[[], StepTimes]] = {}
        for count in counts:
            small = _small_engine(engine, count)
            executor = CpuExecutor(few.config, small, rotations(checkpoint, small), pages=small.context // cpu.PAGE)
            opened.callback(executor.close)
            wire_embedding(executor, checkpoint)
            for layer in range(few.config.n_layers):
                wire_layer(executor, few, layer, None)
            steps[count] = partial(step_times, executor, tokens)
        times = take_turns(counts, ROUNDS, lambda count, _: steps[count](), warm_up=1)
    requests = {count: [one.request for one in found] for count, found in times.items()}
    return TimedThreads(fastest(requests, counts[0], GAIN), {str(count): _middle(times[count]) for count in counts})


def _middle(times: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(*(round(median(one), 9) for one in zip(*((t.token, t.prompt) for t in times), strict=True)))


def step_times(executor: CpuExecutor, tokens: np.ndarray) -> StepTimes:
    """Times of a prompt and of the tokens after it; int32 [PROMPT + STEPS]."""
    pages = np.arange(executor.n_pages, dtype=np.int32)[None]
    nothing = np.empty(0, np.int32)

    def seconds(first: int, last: int) -> float:
        places = np.arange(first, last, dtype=np.int32)
        batch = Batch(np.ascontiguousarray(tokens[first:last]), places, np.zeros_like(places), pages, nothing)
        begin = time.perf_counter()
        executor.forward(batch)
        return time.perf_counter() - begin

    prompt = seconds(0, PROMPT)
    steps = [seconds(at, at + 1) for at in range(PROMPT, PROMPT + STEPS)]
    return StepTimes(median(steps[1:]), prompt)
