"""The model card of a model that was made sparse: what it is, how it was made, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from powerinfer.config import ModelConfig, SparsifyConfig


def document(
    model: ModelConfig,
    source: str,
    config: SparsifyConfig,
    corpora: Sequence[str],
    before: tuple[float, Sequence[float]],
    after: tuple[float, Sequence[float]],
    tokens: int,
    seconds: float,
) -> dict[str, Any]:
    """Figures as a JSON document. before, after: (perplexity, share of zeros in each layer) on held-out windows."""
    zeros = after[1]
    return {
        "source": source,
        "architecture": model.architecture,
        "recipe": config.recipe,
        "target_zeros": config.zeros,
        "gate_zeros": config.gate_zeros,
        "tokens": tokens,
        "corpora": list(corpora),
        "perplexity_before": before[0],
        "perplexity": after[0],
        "ratio": after[0] / before[0],
        "zeros": sum(zeros) / len(zeros),
        "zeros_by_layer": list(zeros),
        "seconds": seconds,
    }


def card(facts: dict[str, Any]) -> str:
    """README.md of the model."""
    written = facts["own_text_tokens"]
    note = f" Own text: {written:,} tokens of the original's answers to prompts out of these texts." if written else ""
    start = (
        f" It began with {facts['start']}, made by an earlier training, whose tokens are not counted here."
        if facts["start"]
        else ""
    )
    options = "" if facts["gate_zeros"] is None else f" --gate-zeros {facts['gate_zeros']:g}"
    options += "" if facts["types"] is None else f" {facts['types']}"
    options += f"\n{facts['options']}`"
    layers = ", ".join(f"{100 * share:.0f}" for share in facts["zeros_by_layer"])
    return f"""# {facts["source"]}, made sparse

Made with `powerinfer sparsify --recipe {facts["recipe"]} --zeros {facts["target_zeros"]:g}{options}
out of {facts["source"]} ({facts["architecture"]}), trained on {facts["tokens"]:,} tokens of:
{", ".join(facts["corpora"])}.{note}{start}
The activation and its thresholds are stated in the model's file as powerinfer's own keys and tensors: other programs
refuse it, or would compute the original activation.

| | original | sparse |
|---|---:|---:|
| perplexity, held-out windows of these texts | {facts["perplexity_before"]:.3f} | {facts["perplexity"]:.3f} |
| neurons that are zero for a token | | {100 * facts["zeros"]:.1f} % |

By layer, per cent: {layers}. The licence is that of the original; the texts may add conditions of their own.
"""
