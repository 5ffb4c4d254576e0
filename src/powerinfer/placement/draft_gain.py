"""The gain of a draft head, by the bytes of weights that steps read, and whether it is worth its memory.

With a draft for each step, two tokens are computed with one reading of the weights, but of experts, of which each token
has its own, and the head is read besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig, ExpertsConfig, ModelConfig
from powerinfer.kernels.draft_rows import first_tokens

if TYPE_CHECKING:
    from powerinfer.models.inventory import Unit
    from powerinfer.placement.disk import DiskPlan
    from powerinfer.placement.shapes import Model

RIGHT = 0.7
"""The share of drafts of a head that is right, until it was measured."""

LEAST = 1.02
"""The least gain for which drafts are computed."""

SELECTED = "neurons are read from disk as tokens need them"
NO_OUTPUT = "the model's output head, which they need, stays on disk"
FROM_DISK = (
    "their {:,.0f} MB of RAM would hold more of what is read from disk, so they give {:.2f} times the speed: ask for "
    "--speculate mtp, or raise --ram"
)
BESIDE_GPU = (
    "an EAGLE head reads hidden states of layers, which only those on the CPU give: use --gpu none, lookup, a smaller "
    "model, or off"
)
NO_ROOM = "there is too little memory for them"
DISPLACES = (
    "the states that undo their steps would take {} of the GPU's memory from layers or experts: lower --max-batch (run "
    "and chat do by themselves), or ask for --speculate mtp"
)


def draft_gain(model: Model) -> float:
    """Expected speed with a draft in each step, as a multiple of that without; weights are in RAM, which is what takes
    the time of a step, and tokens select experts independently."""
    inventory, config = model.inventory, model.config
    assert config.draft is not None
    head = _bytes((one for one in inventory.draft_units if one.use != "head"), config.with_draft, 1)
    units = inventory.draft_units if config.draft.head else inventory.units
    output = sum(one.panels for one in units if one.use == "head")
    listed = config.vocab_size if config.draft.eagle is not None else first_tokens(config.vocab_size)
    head += output * listed / config.vocab_size
    return (1 + RIGHT) * _bytes(inventory.units, config, 1) / (_bytes(inventory.units, config, 2) + head)


def too_little_gain(model: Model, engine: EngineConfig) -> str | None:
    """The reason to leave out a head that nobody asked for where memory is limited, for people; None: there is
    none."""
    if engine.speculate != "auto" or engine.ram is None or (gain := draft_gain(model)) >= LEAST:
        return None
    return f"within --ram {model.inventory.draft / 1e6:,.0f} MB for {gain:.2f} times the speed are too much"


def problem_from_disk(disk: DiskPlan, model: Model, speculate: str) -> str | None:
    """The reason to leave out a head, which is in RAM, where some of the model stays on disk, for people; None: there
    is none. speculate: the option, which asks for it unless it is `auto`."""
    assert model.config.draft is not None
    if disk.about.neurons:
        return SELECTED
    if not model.config.draft.head and model.head.name in disk.about.matrices:
        return NO_OUTPUT
    if speculate != "auto" or (gain := disk_gain(disk, model)) >= LEAST:
        return None
    return FROM_DISK.format(model.inventory.draft / 1e6, gain)


def disk_gain(disk: DiskPlan, model: Model) -> float:
    """Expected speed with a draft in each step, as a multiple of that without the head; what a step reads from disk is
    what takes its time, and without the head RAM would hold more of that: dense matrices first, then experts."""
    freed, config = model.inventory.draft, model.config
    in_ram, resting = disk.held.get("experts", 0), disk.resting.get("experts", 0)

    def read(streamed: int, cached: int, tokens: int) -> float:
        missing = max(0.0, 1 - cached / resting) if resting else 0.0
        total = float(streamed)
        for layer in disk.about.experts:
            nbytes = sum(one.file for one in model.experts[layer])
            total += missing * nbytes * _selected(config.experts[layer], tokens)
        return total

    reads = read(disk.streamed, in_ram, 2)
    if not reads:
        return draft_gain(model)
    without = read(max(0, disk.streamed - freed), in_ram + max(0, freed - disk.streamed), 1)
    return (1 + RIGHT) * without / reads


def drop_head(model: Model) -> Model:
    """The same model, whose head is left out."""
    inventory = replace(model.inventory, draft=0, draft_units=(), gpu_draft=0)
    return replace(model, config=replace(model.config, draft=None), inventory=inventory)


def _bytes(units: Iterable[Unit], config: ModelConfig, tokens: int) -> float:
    """Bytes that a step of so many tokens is expected to read."""
    total = 0.0
    for unit in units:
        ffn = None if unit.layer is None else config.layers[unit.layer].ffn
        share = 1.0
        if unit.use == "experts" and isinstance(ffn, ExpertsConfig):
            share = _selected(ffn, tokens)
        total += share * unit.panels
    return total


def _selected(experts: ExpertsConfig, tokens: int) -> float:
    """Share of experts that are selected by any of so many tokens."""
    return 1 - (1 - experts.router.top_k / experts.n_experts) ** tokens
