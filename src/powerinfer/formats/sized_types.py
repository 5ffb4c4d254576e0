"""Types of the tensors of a file of a stated size: each byte is spent where it takes off most of the loss.

The error of each matrix in each type that it may have is measured on some of its rows, weighed as errors are, as a
share of its own weights. Loss is that times the matrix's sensitivity. Of each matrix the types count whose points
(bytes, loss) are corners of the hull below all; from the smallest file on, the step with the largest gain of a byte is
taken until none fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.gguf import stored_alignment
from powerinfer.formats.importance import Importance
from powerinfer.formats.mixes import MIXES
from powerinfer.formats.quant import Float32, block_type, dequantize
from powerinfer.formats.quantised_file import Original, file_size
from powerinfer.formats.scale_search import searched
from powerinfer.progress import Progress, silent

WIDE = ("IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
NARROW = ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that are chosen from, of matrices whose rows are whole blocks of 256, and of others."""

_COARSE = ("TQ1_0", "TQ2_0", "Q2_0", "Q1_0")
_SAMPLE = 1 << 15  # elements of a matrix on which errors are measured


@dataclass(frozen=True)
class _Choice:
    """A type that a matrix may have: bytes in the file, and the loss."""

    type: str
    nbytes: int
    loss: float


def sized_types(
    original: Original,
    size: int,
    sensitivities: Mapping[str, float],
    chosen: Mapping[str, str],
    importance: Importance | None,
    threads: int,
    progress: Progress = silent,
) -> dict[str, str]:
    """The type of each tensor in a file of at most `size` bytes. sensitivities: loss for an error as large as the
    matrix, by name; of others it is their mean. chosen: types that are given. RequestError if none are small enough.
    """
    stored = original.matrices.stored
    types = {name: kind for name, (kind, _) in stored.items()} | dict(chosen)
    names = [name for name in original.matrices.names() if name not in chosen]
    alignment = stored_alignment(original.metadata)
    usual = float(np.mean(list(sensitivities.values()))) if sensitivities else 1.0

    def choices(name: str) -> list[_Choice]:
        shares = _error_shares(original, name, importance)
        factor = sensitivities.get(name, usual)
        losses = {kind: factor * share for kind, share in shares.items()}
        return _hull([_Choice(kind, _nbytes(stored[name][1], kind, alignment), loss) for kind, loss in losses.items()])

    by_name: dict[str, list[_Choice]] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            for name, steps_of in zip(names, pool.map(choices, names), strict=True):
                by_name[name] = steps_of
                progress("measuring errors of types", len(by_name), len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    types |= {name: steps_of[0].type for name, steps_of in by_name.items()}
    least = check_size(original, size, chosen, importance)
    return types | _spend(by_name, size - least - (-least % alignment))  # as if the last one were padded, too


def check_size(original: Original, size: int, chosen: Mapping[str, str], importance: Importance | None) -> int:
    """The bytes of the smallest file, for which nothing is measured. RequestError if they are more than `size`, if the
    largest file takes less, or if the model has types that are chosen from, and takes no more."""
    stored = original.matrices.stored
    types = {name: kind for name, (kind, _) in stored.items()} | dict(chosen)
    alignment = stored_alignment(original.metadata)
    is_made = all(stored[name][0] in (chosen.get(name), *_kinds(stored[name][1])) for name in original.matrices.names())
    if is_made and types == {name: kind for name, (kind, _) in stored.items()}:
        now = file_size(original, types, importance)
        if now <= size:
            raise RequestError(f"{original.path} is that already: it takes {now / 1e6:,.1f} MB")
    wide = dict(types)
    for name in original.matrices.names():
        if name not in chosen:
            shape = original.matrices.stored[name][1]
            nbytes = {kind: _nbytes(shape, kind, alignment) for kind in _kinds(shape)}
            types[name], wide[name] = (pick(nbytes, key=nbytes.__getitem__) for pick in (min, max))
    least, most = (file_size(original, kinds, importance) for kinds in (types, wide))
    if least > size:
        raise RequestError(f"--size {size}: the smallest file of this model takes {least} bytes, {least / 1e6:,.1f} MB")
    if most < size:
        largest = f"the largest file of this model takes {most} bytes, {most / 1e6:,.1f} MB"
        raise RequestError(f"--size {size}: {largest}: give less, or the type q8_0, for which nothing is measured")
    return least


def _kinds(shape: tuple[int, ...]) -> list[str]:
    """Types that a matrix may have."""
    cols = shape[-1]
    return [kind for kind in (WIDE if cols % 256 == 0 else NARROW) if cols % block_type(kind).block == 0] or ["F16"]


def _nbytes(shape: tuple[int, ...], kind: str, alignment: int) -> int:
    nbytes = prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1])
    return -(-nbytes // alignment) * alignment


def _error_shares(original: Original, name: str, importance: Importance | None) -> dict[str, float]:
    """Errors of a matrix in the types that it may have, as shares of its weights; experts count by their use."""
    _, shape = original.matrices.stored[name]
    rows, kinds = prod(shape[:-1]), _kinds(shape)
    x, at = _sample(original, name)
    weights = None
    if importance is not None:
        parts = [importance.rows(name, shape, row, row + 1) for row in at]
        weights = None if parts[0] is None else np.concatenate([part for part in parts if part is not None])
    counted = np.ones_like(x) if weights is None else weights
    shares = None if importance is None else importance.shares(name, shape)
    if shares is not None:
        counted = counted * np.repeat(shares, rows // len(shares))[at][:, None]
    counted = np.ldexp(counted, -np.frexp(counted.max())[1])  # no sum overflows
    square = float((counted * x**2).sum()) or 1.0
    errors = {kind: dequantize(searched(x, kind, weights), kind) - x for kind in kinds}
    return {kind: float((counted * error**2).sum()) / square for kind, error in errors.items()}


def _sample(original: Original, name: str) -> tuple[Float32, list[int]]:
    """(some rows of a matrix, their numbers)."""
    _, shape = original.matrices.stored[name]
    cols, rows = shape[-1], prod(shape[:-1])
    for file in original.files:
        file.check()  # a page of a file that was cut short must not be touched
    tensor = original.take(name)
    count = min(rows, max(8, _SAMPLE // cols))
    at = [(2 * number + 1) * rows // (2 * count) for number in range(count)]
    return np.concatenate([tensor.values(row, row + 1) for row in at]), at


def coarse_loss(original: Original, types: Mapping[str, str]) -> float:
    """The error of a matrix whose type has two to four values, as a share of its weights' squares: the middle one of a
    few; 0 where none does."""
    names = [name for name in original.matrices.names() if types[name] in _COARSE]
    losses = []
    for name in names[:: max(1, len(names) // 4)]:
        x, _ = _sample(original, name)
        with suppress(ModelError):  # who writes the file names the matrix
            error = dequantize(searched(x, types[name]), types[name]) - x
            losses.append(float((error**2).sum()) / (float((x**2).sum()) or 1.0))
    return sorted(losses)[len(losses) // 2] if losses else 0.0


def _hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Choices on the lower hull, by size: each step gains less of a byte than the one before."""
    hull: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], choice):
            hull.pop()
        if hull and choice.nbytes == hull[-1].nbytes:
            hull.pop()
        hull.append(choice)
    return hull


def _gain(before: _Choice, after: _Choice) -> float:
    """Loss that a byte takes off."""
    return (before.loss - after.loss) / max(1, after.nbytes - before.nbytes)


def _spend(by_name: Mapping[str, Sequence[_Choice]], room: int) -> dict[str, str]:
    """Types of the matrices with so many bytes more than the smallest ones take."""
    places = dict.fromkeys(by_name, 0)
    steps = [(-_gain(*steps_of[:2]), name) for name, steps_of in by_name.items() if len(steps_of) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        steps_of, at = by_name[name], places[name]
        more = steps_of[at + 1].nbytes - steps_of[at].nbytes
        if more > room:
            continue
        room -= more
        places[name] = at + 1
        if at + 2 < len(steps_of):
            heapq.heappush(steps, (-_gain(steps_of[at + 1], steps_of[at + 2]), name))
    return {name: by_name[name][at].type for name, at in places.items()}


def main_number(types: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """general.file_type of a file with these types: of the mix of the one that most elements have."""
    elements: dict[str, int] = {}
    for name, kind in types.items():
        elements[kind] = elements.get(kind, 0) + prod(shapes[name])
    order: Callable[[str], int] = elements.__getitem__
    main = max(elements, key=order)
    return next((mix.number for mix in MIXES.values() if mix.type == main), 0)
