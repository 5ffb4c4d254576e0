"""The trial of who acts in steps of few tokens: the GPU calls the CPU, or the host waits for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import hot_counts, settled, split_trial
from powerinfer.sparsity.trials import TrialSubject, fastest, take_turns

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.resolved import Resolved

ROUNDS = 4
STEPS = 3
"""Steps of either way in a round."""

GAIN = 0.97
"""The host must take less than this share of the time of a step with calls."""


@dataclass(frozen=True)
class Caller:
    """calls: the GPU calls the CPU. called, waited: medians of seconds of a step, with calls and if the host waits."""

    calls: bool
    called: Annotated[float, Between(0, 1e6)]
    waited: Annotated[float, Between(0, 1e6)]


CALLERS = TrialSubject("steps", Caller)


def settle(executor: SplitExecutor, split: NeuronSplit | ExpertSplit, resolved: Resolved, copies: bool = False) -> None:
    """Choose who acts, by an earlier trial or now, where the GPU can call the CPU; the cache must be empty. copies:
    experts are copied beside steps. PowerInferError when the device fails."""
    if not executor.gpu.calls:
        return
    facts = {
        "layers": f"{resolved.placement.layers} {resolved.placement.head}",
        "hot": hot_counts(split.ffns),
        "copies": copies,
        "kv_type": resolved.engine.kv_type,
    }
    outcome = settled(split_trial(CALLERS, resolved, facts), resolved, lambda: measured(executor), "steps")
    if outcome is not None:
        use(executor, outcome.result, outcome.origin)


def measured(executor: SplitExecutor) -> Caller:
    """Time steps of a token both ways, by turns."""
    with executor.cpu.awake():
        seconds = take_turns((True, False), ROUNDS, lambda calls, _: executor.gpu.step_seconds(calls, STEPS))
    return Caller(fastest(seconds, True, GAIN), *(median(seconds[calls]) for calls in (True, False)))


def use(executor: SplitExecutor, caller: Caller, origin: str) -> None:
    """Let steps be run so from now on, and note it in the executor's choices. origin: of that result."""
    times = f"{1e3 * caller.called:.3g} ms a step with calls, {1e3 * caller.waited:.3g} if the host waits"
    executor.gpu.let_call(caller.calls, times)
    steps = executor.gpu.caller
    executor.choices.steps = None if steps is None else steps.add(f", {origin}")
