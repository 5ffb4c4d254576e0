"""Whether sparse decoding is worth it, in a sentence."""

from __future__ import annotations

from powerinfer.config import ModelConfig
from powerinfer.sparsity.selector_trial import GAIN


def worth_it(ratio: float) -> bool:
    """Whether the ratio of sparse to dense speed is a gain by as much as the trial asks for."""
    return ratio > 1 / GAIN


def verdict(ratio: float, subject: str = "Sparse decoding", condition: str = "here") -> str:
    """The sentence. ratio: of sparse to dense speed; subject: what was compared; condition: of the ratio."""
    text = f"{subject} is {ratio:.2f} x as fast as dense {condition}"
    if worth_it(ratio):
        return f"{text}: worth it."
    return f"{text}: not worth it. It is on larger models in which fewer neurons fire; `powerinfer demo` shows one."


def no_gain(config: ModelConfig) -> str:
    """The line about a model none of whose neurons is ever exactly zero."""
    return (
        f"nothing to gain: {config.activations_never_zero} is never exactly zero; only --selector threshold skips "
        "neurons, which changes answers"
    )
