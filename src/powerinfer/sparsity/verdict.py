"""Whether sparse decoding is worth it, in a sentence."""

from __future__ import annotations

from powerinfer.sparsity.trial import GAIN


def worth_it(ratio: float) -> bool:
    """Whether the ratio of sparse to dense speed is a gain by as much as the trial asks for."""
    return ratio > 1 / GAIN


def verdict(ratio: float, what: str) -> str:
    """The sentence. what: it is about, such as "sparse decoding"."""
    if worth_it(ratio):
        return f"{what} is {ratio:.2f} x as fast as dense here: worth it."
    return (
        f"{what} is {ratio:.2f} x as fast as dense here: not worth it. It is worth it for larger models in which fewer "
        "neurons fire: `powerinfer demo` shows one."
    )
