"""Text that the model writes itself, to train on beside the texts: answers to prompts out of them.

The original answers, run by the engine, before the training. A prompt is the beginning of a conversation up to the
user's first message, through the chat template; if the texts hold no conversations or the model has no template, the
first sentence of a line, which the model goes on from. The token ids are kept in `own-text.jsonl` in --out, a line an
answer; an interrupted run loses one batch of answers at most.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.prepare.corpus import Conversation, Corpus, Encoder, Piece
from powerinfer.progress import Progress, Say, silent
from powerinfer.text.model_text import chat_template_of, tokenizer_of

if TYPE_CHECKING:
    from powerinfer.text.tokenizer import Tokenizer

FILE = "own-text.jsonl"
PART = FILE + ".part"

ANSWER = 256  # maximum tokens
PROMPT = 512  # maximum tokens; a longer one is left out
SENTENCE = 64  # maximum tokens of a sentence to go on from
LEAST_WORDS = 5  # of such a sentence: less is a heading
BATCH = 64  # answers that are kept at a time
TOGETHER = 16  # of them decoded together
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
FRUITLESS = 4  # batches in a row without an answer of use, after which the model is given up
PERIOD, REPEATS, LOOP = 64, 3, 24
"""An answer ends in a loop if its last tokens, LOOP of them at least, are up to PERIOD tokens REPEATS times."""

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class OwnText(Corpus):
    """answers: with their prompts."""

    answers: tuple[Ids, ...] = ()

    def pieces(self) -> Iterator[Piece]:
        """An answer with its prompt at a time."""
        yield from self.answers

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers and their prompts."""
        return sum(map(len, self.answers))


class Exchange(NamedTuple):
    """A prompt and what the model answered."""

    prompt: Ids
    answer: Ids


def write_own_text(
    checkpoint: Checkpoint,
    corpora: Sequence[Corpus],
    tokens: int,
    seed: int,
    out: Path,
    progress: Progress = silent,
    threads: int = 0,
    say: Say = silent,
) -> OwnText:
    """Text of so many tokens, prompts included, or up to an answer more: what `out` holds already, and what that lacks.

    progress: called with ("writing text", tokens, all of them); say: how many conversations the template did not take,
    if any. RequestError if the texts hold no prompts, or what is kept is of another model, other texts or other
    options; PowerInferError if the model writes nothing of use.
    """
    writer = _Writer(checkpoint, corpora, tokens, seed)
    path, part = out / FILE, out / PART
    if path.exists():
        return writer.text(writer.read_answers(path)[0])
    out.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PowerInferError(f"another process is training in {out}") from None
        done, ends = writer.read_answers(part)
        del done[len(done) // BATCH * BATCH :]
        file.truncate(ends[len(done)] if ends else 0)
        if not ends:
            _append(file.fileno(), [writer.asked])
        writer.write(done, file.fileno(), progress, threads, say)
    os.replace(part, path)
    return writer.text(done)


class _Writer:
    def __init__(self, checkpoint: Checkpoint, corpora: Sequence[Corpus], tokens: int, seed: int) -> None:
        self._checkpoint, self._corpora, self._tokens, self._seed = checkpoint, corpora, tokens, seed
        self._tokenizer = tokenizer_of(checkpoint)
        self._context = min(checkpoint.config.context_length, PROMPT + ANSWER)
        self._answer = min(ANSWER, self._context // 2)
        self._chats = chat_template_of(checkpoint) is not None and any(
            isinstance(piece, Conversation) for corpus in corpora for piece in corpus.pieces()
        )
        first = json.dumps(list(islice(self._prompts(self._encoder()), BATCH))).encode()
        self.asked = {
            "model": checkpoint.fingerprint,
            "prompts": sha256(first).hexdigest(),
            "answer": self._answer,
            "tokens": tokens,
            "seed": seed,
            **SAMPLING,
        }

    def text(self, exchanges: Sequence[Exchange]) -> OwnText:
        """Text of the answers that are of use."""
        useful = [np.concatenate(one) for one in exchanges if is_useful(one.answer.tolist(), self._tokenizer)]
        return OwnText("own text", (), tuple(useful))

    # ------------------------------------------------------------------------------------------------ prompts

    def _encoder(self) -> Encoder:
        return Encoder(self._tokenizer, chat_template_of(self._checkpoint))

    def _prompts(self, encoder: Encoder) -> Iterator[list[int]]:
        """All prompts of the texts, of each in turn."""
        longest = self._context - self._answer
        for row in zip_longest(*(self._prompts_of(corpus, encoder) for corpus in self._corpora)):
            yield from (list(prompt) for prompt in row if prompt is not None and 0 < len(prompt) <= longest)

    def _prompts_of(self, corpus: Corpus, encoder: Encoder) -> Iterator[Sequence[int]]:
        for piece in corpus.pieces():
            if self._chats:
                if isinstance(piece, Conversation):
                    yield encoder.chat(piece.opening(), answer=True)
                continue
            text = piece.text() if isinstance(piece, Conversation) else str(piece)
            for line in text.splitlines():
                sentence = re.split(r"(?<=[.!?])\s", line.strip(), maxsplit=1)[0]
                if len(sentence.split(None, LEAST_WORDS)) >= LEAST_WORDS:
                    ids = self._tokenizer.encode(sentence, special=False, add_bos=self._tokenizer.add_bos)
                    yield ids[:SENTENCE]

    def _endless(self, encoder: Encoder) -> Iterator[list[int]]:
        """The prompts again and again. encoder: of the first time, which counts what is left out."""
        while True:
            none = True
            for prompt in self._prompts(encoder):
                none = False
                yield prompt
            if none:
                also = f" ({encoder.left_out_note})" if encoder.left_out else ""
                raise RequestError(f"--own-text: the texts hold no conversation or sentence to begin with{also}")
            encoder = self._encoder()

    # ------------------------------------------------------------------------------------------------ answers

    def write(self, done: list[Exchange], fd: int, progress: Progress, threads: int, say: Say) -> None:
        """Answers, added to `done` and to a file, batch by batch, until there are tokens enough."""
        from powerinfer.runtime.engine import LLM
        from powerinfer.runtime.params import SamplingParams

        encoder = self._encoder()
        prompts = islice(self._endless(encoder), len(done), None)
        written, fruitless = self.text(done).tokens, 0
        if written >= self._tokens:
            return
        options: dict[str, Any] = {"threads": threads, "context": self._context, "max_batch": TOGETHER}
        with LLM(self._checkpoint.path, progress=progress, selector="all", **options) as llm:
            while written < self._tokens:
                progress("writing text", written, self._tokens)
                mean_tokens = written / len(done) if done else self._answer
                wanted = max(TOGETHER, math.ceil((self._tokens - written) / max(mean_tokens, 1)))
                # none crosses a multiple of BATCH: so far an interrupted run is kept, and goes on with the same batches
                batch = list(islice(prompts, min(wanted, BATCH - len(done) % BATCH)))
                seeds = [self._seed * 1_000_003 + len(done) + at for at in range(len(batch))]
                params = [SamplingParams(max_tokens=self._answer, seed=seed, **SAMPLING) for seed in seeds]

                def tell(_: str, answers: int, of: int, begin: int = written, mean_tokens: float = mean_tokens) -> None:
                    progress("writing text", min(self._tokens - 1, begin + round(answers * mean_tokens)), self._tokens)

                before, exchanges = written, list[Exchange]()
                answers = [exchange.token_ids for exchange in llm.generate(batch, params, tell)]
                for exchange in zip(batch, answers, strict=True):
                    if written < self._tokens:
                        exchanges.append(Exchange(*(np.array(ids, np.int32) for ids in exchange)))
                        written += self.text(exchanges[-1:]).tokens
                _append(fd, [[part.tolist() for part in exchange] for exchange in exchanges])
                done += exchanges
                fruitless = 0 if written > before else fruitless + 1
                if fruitless == FRUITLESS:
                    raise PowerInferError("--own-text: the model's answers are empty or loops: leave it out")
            progress("writing text", self._tokens, self._tokens)
        if encoder.left_out:
            say(f"--own-text: {encoder.left_out_note}")

    def read_answers(self, path: Path) -> tuple[list[Exchange], list[int]]:
        """(the answers in a file, where each of its whole lines ends: what it was asked for, and each answer)."""
        bad = ModelError(f"{path} is damaged: remove it, and the text is written anew")
        exchanges: list[Exchange] = []
        ends: list[int] = []
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):  # the run was interrupted
                    break
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    raise bad from None
                if number == 0 and value != self.asked:
                    raise RequestError(f"{path} is of another model, text or option: remove it, or give another --out")
                if number:
                    if not isinstance(value, list) or len(value) != 2 or not all(map(self._are_ids, value)):
                        raise bad
                    exchanges.append(Exchange(*(np.array(ids, np.int32) for ids in value)))
                ends.append(ends[-1] + len(line) if ends else len(line))
        return exchanges, ends

    def _are_ids(self, value: Any) -> bool:
        size = self._tokenizer.vocab_size
        return isinstance(value, list) and all(type(one) is int and 0 <= one < size for one in value)


def is_useful(answer: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether an answer says something, and does not end in a loop."""
    ids = list(answer[:-1] if answer and answer[-1] in tokenizer.eos_ids else answer)
    if not tokenizer.decode(ids).strip():
        return False
    for period in range(1, PERIOD + 1):
        span = max(LOOP, REPEATS * period) - period
        if len(ids) >= span + period and ids[-span:] == ids[-span - period : -period]:
            return False
    return True


def _append(fd: int, lines: Sequence[Any]) -> None:
    data = memoryview("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode())
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)
