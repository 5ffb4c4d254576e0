"""The trial of how both devices exchange in steps of few tokens: the GPU calls the CPU, by flags or by functions, or
the host waits for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

from powerinfer.devices.link import Way
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
"""Steps of each way in a round."""

GAIN = 0.97
"""Another way must take less than this share of the time of the first one."""

_NAMES: dict[Way, str] = {"flags": "with flags", "calls": "with calls", "waits": "if the host waits"}


@dataclass(frozen=True)
class StepExchange:
    """way: the one to take; seconds: medians of a step, by way, as they were tried."""

    way: Way
    seconds: tuple[tuple[Way, Annotated[float, Between(0, 1e6)]], ...]


EXCHANGES = TrialSubject("steps", StepExchange)


def settle(executor: SplitExecutor, split: NeuronSplit | ExpertSplit, resolved: Resolved, copies: bool = False) -> None:
    """Choose a way, by an earlier trial or now, where the GPU can call the CPU; the cache must be empty. copies:
    experts are copied beside steps. PowerInferError when the device fails."""
    if executor.gpu.way == "waits":
        return
    facts = {
        "layers": f"{resolved.placement.layers} {resolved.placement.head}",
        "hot": hot_counts(split.ffns),
        "copies": copies,
        "kv_type": resolved.engine.kv_type,
        "ways": " ".join(executor.gpu.ways),
    }
    outcome = settled(split_trial(EXCHANGES, resolved, facts), resolved, lambda: measured(executor), "steps")
    if outcome is not None and outcome.result.way in executor.gpu.ways:  # a saved result may be anyone's
        use(executor, outcome.result, outcome.origin)


def measured(executor: SplitExecutor) -> StepExchange:
    """Time steps of a token in every way, by turns."""
    ways = executor.gpu.ways
    with executor.cpu.awake():
        seconds = take_turns(ways, ROUNDS, lambda way, _: executor.gpu.step_seconds(way, STEPS))
    return StepExchange(fastest(seconds, ways[0], GAIN), tuple((way, median(seconds[way])) for way in ways))


def use(executor: SplitExecutor, exchange: StepExchange, origin: str) -> None:
    """Let steps be run so from now on, and note it in the executor's choices. origin: of that result."""
    times = [f"{1e3 * seconds:.3g} {_NAMES[way]}" for way, seconds in exchange.seconds]
    executor.gpu.exchange(exchange.way, f"ms a step: {', '.join(times)}", f", {origin}")
    executor.tell_steps()
    executor.tell_launches()
