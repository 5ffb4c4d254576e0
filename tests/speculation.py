"""Steps of sequences that speculate: of the tokens of a step only the first may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from powerinfer.devices import Batch, Executor

UNDO = 8  # tokens of a step
LENGTH = 125  # of a text
PAGES = 4  # of a text
PREFIX = 64  # tokens that some texts share


@dataclass
class Work:
    """Tokens of a sequence in a step: read, replayed, undo and written as of `Batch`."""

    row: int
    at: int
    tokens: list[int]
    read: int
    write: int
    replayed: int = 0
    undo: int = 0


def batch_of(works: list[Work], tables: np.ndarray) -> Batch:
    """Slots of rows without tokens are such as no check would let pass."""
    slots = np.full((4, len(tables)), 999, np.int32)
    for work in works:
        slots[:, work.row] = work.read, work.write, work.replayed, work.undo
    tokens, positions, rows = (
        np.concatenate(parts).astype(np.int32)
        for parts in zip(
            *((one.tokens, one.at + np.arange(len(one.tokens)), np.full(len(one.tokens), one.row)) for one in works),
            strict=True,
        )
    )
    some = {"replayed": slots[2].copy(), "undo_states": slots[3].copy()} if any(one.replayed for one in works) else {}
    return Batch(tokens, positions, rows, tables, np.arange(len(tokens), dtype=np.int32), slots[0], slots[1], **some)


def tables_of(rows: int) -> np.ndarray:
    """Pages of texts; those of the shared prefix are those of row 0."""
    tables = np.arange(rows * PAGES, dtype=np.int32).reshape(rows, PAGES)
    tables[:, : PREFIX // 32] = tables[0, : PREFIX // 32]
    return tables


def one_by_one(model: Executor, text: list[int]) -> np.ndarray:
    """Logits of all tokens, float32 [tokens, vocab]."""
    table = np.arange(PAGES, dtype=np.int32)[None]
    steps = (batch_of([Work(0, at, [token], 0, 0)], table) for at, token in enumerate(text))
    return np.concatenate([model.forward(each).copy() for each in steps])


def some_texts(model: Executor, number: int) -> list[list[int]]:
    return np.random.default_rng(5).integers(0, model.vocab_size, (number, LENGTH)).tolist()


@dataclass
class Sequence:
    """A speculating sequence: tokens that hold, and those of them that the state in slot `read` lacks."""

    row: int
    text: list[int]
    expected: np.ndarray
    slots: list[int]  # two of its own
    read: int
    at: int = 0
    replayed: int = 0
    patterns: set[tuple[int, int]] = field(default_factory=set)  # tokens of a step, and how many were right

    def work(self, rng: np.random.Generator, vocab: int) -> tuple[Work, int]:
        """A step whose drafts are right up to some place, and the number of tokens that are."""
        longest = min(LENGTH - self.at, UNDO if rng.random() < 0.9 else 20)
        count = int(rng.integers(1, longest + 1))
        right = int(rng.integers(1, count + 1)) if count <= UNDO else count
        tokens = self.text[self.at : self.at + count]
        for place in range(right, count):
            tokens[place] = (tokens[place] + int(rng.integers(1, vocab))) % vocab
        write = self.slots[1] if self.replayed else next(slot for slot in self.slots if slot != self.read)
        undo = self.read if self.read in self.slots else self.slots[0]
        return Work(self.row, self.at, tokens, self.read, write, self.replayed, undo), right

    def accept(self, work: Work, right: int) -> None:
        count = len(work.tokens)
        self.patterns.add((count, right))
        self.at += right
        if self.replayed:
            self.read = work.undo
        self.replayed = 0 if right == count else right
        if right == count:
            self.read = work.write
        self.slots = [slot for slot in self.slots if slot != work.write] + [work.write]  # the last: what was written
