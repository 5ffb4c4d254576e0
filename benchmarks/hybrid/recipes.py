"""The models of compare.py: shapes of published ones with random weights, which models/prepared.py makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.models.weights import Plan

GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """A model and the memory of the card that is stood in for.

    stored: type of the matrices; vram: bytes; about: what the firing is taken from; share: of the layers, where nobody
    asks for another: so that model, bundles and what making them takes suit 64 GB of disk and the time that there is;
    part: of the layers that there are, which get as much of the card's memory (`worker.card`).
    """

    plan: Plan
    stored: str
    vram: int
    about: str
    share: float
    part: float = 1.0

    @property
    def layers(self) -> int:
        return self.plan.n_layers

    def scaled(self, scale: float) -> Recipe:
        """A share of the layers."""
        layers = max(1, round(scale * self.layers))
        plan = replace(self.plan, n_layers=layers, layer_ratio=self.plan.layer_ratio if layers > 1 else 1.0)
        return replace(self, plan=plan, part=layers / self.layers)

    def tiny(self) -> Recipe:
        """The same kind of model, small enough for any machine. Without a budget: its runs have room for half the
        neurons.
        """
        small = {"d_model": 128, "d_ff": 512, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab": 1024}
        plan = replace(self.plan, **small, context=4096, noise_rank=47)
        return replace(self, plan=plan, vram=0)

    def document(self) -> dict[str, Any]:
        """What was made, with the shares of neurons that carry 80 % of the activations."""
        chosen = make_model.chosen_statistics(self.plan)
        shares = chosen["hot_share_of_layer"]
        firing = {"hot_share_of_layer": sum(shares) / len(shares), "hot_share_of_model": chosen["hot_share_of_model"]}
        return {
            "plan": asdict(self.plan),
            "stored": self.stored,
            "vram": self.vram,
            "part": self.part,
            "about": self.about,
            **firing,
        }


# Shapes as published (docs/plan.md names the sources of the shares).
RECIPES: dict[str, Recipe] = {
    "falcon-40b": Recipe(
        Plan(
            family="falcon", d_model=8192, d_ff=32768, n_layers=60, n_heads=128, n_kv_heads=8, vocab=65024,
            activation="relu", **make_model.PROFILES["opt-30b"] | {"active": 0.05},
        ),
        "f16",
        24 * GIB,
        "mean as of ReLU Falcon-40B (95 % sparse); skew and ratio of the layers as of OPT-30B, a plain ReLU FFN too",
        0.25,
    ),
    "reglu-70b": Recipe(
        Plan(
            family="llama", d_model=8192, d_ff=28672, n_layers=80, n_heads=64, n_kv_heads=8, vocab=32000,
            activation="relu", **make_model.PROFILES["reglu-70b"],
        ),
        "q4_0",
        24 * GIB,
        "mean, skew and ratio of the layers as of LLaMA2-70B with ReGLU (models/make_model.py)",
        0.25,
    ),
    "drelu-7b": Recipe(
        Plan(
            family="llama", d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, vocab=32000,
            activation="drelu", **make_model.PROFILES["drelu"],
        ),
        "f16",
        24 * GIB,
        "mean as of Bamboo-7B (90 % sparse), Zipf's law over the neurons; the whole model fits into the budget",
        1.0,
    ),
}  # fmt: skip


def recipe(name: str, scale: str, distinct: int = 0) -> Recipe:
    """A recipe at a scale: "own" for its own share, "tiny", or a share from 0 to 1. ValueError for others. distinct:
    layers that differ, 0: all."""
    chosen = RECIPES[name]
    chosen = replace(chosen, plan=replace(chosen.plan, distinct=distinct))
    if scale == "tiny":
        return chosen.tiny()
    share = chosen.share if scale == "own" else float(scale)
    if not 0 < share <= 1:
        raise ValueError(f"a scale of {scale}: give a share from 0 to 1, own or tiny")
    return chosen.scaled(share)


def path_of(folder: Path, name: str, scale: str) -> Path:
    return folder / f"{name}-{scale}.gguf"
