"""A model without weights for the tests of the runtime: bytes are tokens, what follows depends on all before it.

A token stores one number in its slot of the paged cache, made from its own id and the number in the slot before, read
through the page table. Its logits are drawn from a hash of all the numbers it can see, read through the page table
too; its hidden state is made from its own number. So a wrong page, position, order or reuse changes what is generated.
`reference_logits` says the same without pages.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig
from powerinfer.devices import Batch
from powerinfer.devices.batch import StoppedError
from powerinfer.devices.choices import Choices
from powerinfer.errors import RequestError
from powerinfer.runtime.driver import EngineStats
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import StreamEvent

BOS, EOS, VOCAB = 256, 257, 258
D_MODEL = 6
PRIME = 2**31 - 1


def next_value(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % PRIME


def logits_of(values: np.ndarray) -> np.ndarray:
    """Logits after a context whose slots hold `values`."""
    weights = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(2654435761)
    seed = int((values.astype(np.uint64) * weights % np.uint64(PRIME)).sum() % np.uint64(PRIME))
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    logits[BOS] = -20
    logits[EOS] -= 3  # an answer ends by itself now and then
    return logits


def reference_logits(tokens: Sequence[int]) -> np.ndarray:
    values, value = [], 0
    for token in tokens:
        value = next_value(value, token)
        values.append(value)
    return logits_of(np.asarray(values))


def state_of(value: int) -> np.ndarray:
    """The hidden state of a token whose slot holds `value`."""
    return np.random.default_rng(value).normal(0, 1, D_MODEL).astype(np.float32)


def reference_embedding(tokens: Sequence[int]) -> np.ndarray:
    total, value = np.zeros(D_MODEL), 0
    for token in tokens:
        value = next_value(value, token)
        total += state_of(value)
    return (total / np.sqrt(total @ total)).astype(np.float32)


def reference_greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy answer, the token that ends it included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(int(reference_logits(tokens).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class ToyExecutor:
    vocab_size = VOCAB
    bytes_per_token = None
    disk = None
    drafter = None

    def __init__(self, n_pages: int = 64, page_size: int = 32, max_tokens: int = 64, n_states: int = 0) -> None:
        """n_states: slots for states, without which the model does not go on; 0: it needs none."""
        self.n_pages, self.page_size, self.max_tokens = n_pages, page_size, max_tokens
        self.n_states = n_states
        self.states: dict[int, int] = {}  # the value that a sequence had reached, by slot
        self.undo_tokens = 8
        self.inputs: dict[int, list[int]] = {}  # tokens of the last step of few, by slot that it wrote
        self.store = np.full((n_pages, page_size), -(2**40), np.int64)
        self.values: list[int] = []  # of the tokens of the last call
        self.sizes: list[int] = []  # tokens of each call
        self.positions: list[int] = []  # of every token computed
        self.sequences: list[int] = []  # how many requests each call served
        self.calls: SimpleQueue[int] = SimpleQueue()  # the number of each call that has begun
        self.held = False  # every call waits for `let`
        self._allowed = threading.Semaphore(0)
        self.fail_at: dict[int, BaseException] = {}  # what a call raises, by its number
        self.begun = 0
        self.closed = False
        self.choices = Choices()

    def traced(self) -> Any:
        raise RequestError("nothing to trace")

    def forward(self, batch: Batch) -> np.ndarray:
        assert 0 < len(batch.tokens) <= self.max_tokens
        assert len(batch.tokens) == len(batch.positions) == len(batch.rows)
        for array in (batch.tokens, batch.positions, batch.rows, batch.page_table, batch.logit_rows):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        changes = np.count_nonzero(np.diff(batch.rows)) + 1
        assert changes == len(set(batch.rows.tolist())), "the tokens of a sequence are consecutive"
        number, self.begun = self.begun, self.begun + 1
        self.calls.put(number)
        if self.held:
            self.wait(batch)
        if number in self.fail_at:
            raise self.fail_at.pop(number)
        self.values = []
        reached = self._states_before(batch)
        for token, position, row in zip(batch.tokens, batch.positions, batch.rows, strict=True):
            before = self._slots(batch, row, position)
            value = int(before[-1]) if position else 0
            assert not position or reached.get(row, value) == value, "the state of other tokens"
            reached.pop(row, None)
            page = batch.page_table[row, position // self.page_size]
            assert page >= 0
            self.values.append(next_value(value, int(token)))
            self.store[page, position % self.page_size] = self.values[-1]
            if self.n_states:
                self.states[batch.states[row]] = self.values[-1]
        self.sizes.append(len(batch.tokens))
        self.positions += batch.positions.tolist()
        self.sequences.append(changes)
        rows = [
            logits_of(self._slots(batch, batch.rows[at], batch.positions[at] + 1)) for at in batch.logit_rows.tolist()
        ]
        return np.asarray(rows, np.float32).reshape(len(rows), VOCAB)

    def hidden_states(self, rows: np.ndarray) -> np.ndarray:
        assert rows.dtype == np.int32
        return np.stack([state_of(self.values[row]) for row in rows])

    def wait(self, batch: Batch) -> None:
        assert self._allowed.acquire(timeout=4 * PATIENCE), "nobody let this call go on"

    def let(self, calls: int = 1) -> None:
        """Let calls of a held executor go on."""
        for _ in range(calls):
            self._allowed.release()

    def release(self) -> None:
        """Hold no call any more."""
        self.held = False
        self._allowed.release()

    def wait_for(self, call: int) -> None:
        """Until this call has begun."""
        deadline = time.monotonic() + PATIENCE
        while self.begun <= call:
            try:
                self.calls.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"call {call} did not begin within {PATIENCE} s") from None

    def _states_before(self, batch: Batch) -> dict[int, int]:
        """The value that each sequence of the step had reached according to its state, by row."""
        if not self.n_states:
            return {}
        rows, first = np.unique(batch.rows, return_index=True)
        written = [int(batch.states[row]) for row in rows]
        assert len(set(written)) == len(written), "two sequences write a state"
        pairs = zip(rows.tolist(), first.tolist(), strict=True)
        again = {row: int(batch.replayed[row]) for row in rows.tolist()} if batch.replayed is not None else {}
        undone = {row: int(batch.undo_states[row]) for row, count in again.items() if count}
        written += [slot for row, slot in undone.items() if slot != batch.states[row]]
        assert len(set(written)) == len(written), "two sequences write a state"
        later = {row: int(batch.read_states[row]) for row, at in pairs if batch.positions[at] > again.get(row, 0)}
        for row, slot in later.items():
            mine = batch.states[row], undone.get(row)
            assert slot in mine or slot not in written, "a sequence reads what another one writes"
        before = {row: self.states[slot] for row, slot in later.items()}
        for row in undone:
            inputs = self.inputs[batch.states[row]][: again[row]]
            assert len(inputs) == again[row], "more tokens are replayed than were kept"
            for token in inputs:
                before[row] = next_value(before.get(row, 0), token)
        for slot in written:
            self.states.pop(slot, None)
            self.inputs.pop(slot, None)
        self.states |= {slot: before[row] for row, slot in undone.items()}
        for row in rows.tolist():
            tokens, read = batch.tokens[batch.rows == row].tolist(), undone.get(row, later.get(row))
            if len(tokens) <= self.undo_tokens and read != batch.states[row]:
                self.inputs[int(batch.states[row])] = tokens
        return before

    def _slots(self, batch: Batch, row: int, count: int) -> np.ndarray:
        pages = batch.page_table[row, : -(-int(count) // self.page_size)]
        assert (pages >= 0).all()
        return self.store[pages].reshape(-1)[:count]

    def close(self) -> None:
        self.closed = True


class StoppableExecutor(ToyExecutor):
    """Held calls that are stopped end."""

    stopped = 0

    def wait(self, batch: Batch) -> None:
        assert batch.stop is not None
        deadline = time.monotonic() + 4 * PATIENCE
        while not self._allowed.acquire(timeout=0.005):
            if batch.stop[0]:
                self.stopped += 1
                raise StoppedError
            assert time.monotonic() < deadline, "nobody let this call go on"


class ToyDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ToyTokenizer:
    vocab_size = VOCAB
    bos_id, eos_id = BOS, EOS
    eos_ids = frozenset({EOS})
    add_bos = False
    special_ids = frozenset({BOS, EOS})
    special_tokens: Sequence[str] = ()
    strips_space = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        add = self.add_bos if add_bos is None else add_bos
        return [BOS] * add + list(text.encode())

    def encode_masked(self, text: str, plain: Sequence[tuple[int, int]], *, add_bos: bool | None = None) -> list[int]:
        assert not plain, "it has no special tokens in texts"
        return self.encode(text, add_bos=add_bos)

    def end_of(self, text: str, count: int) -> str:
        return text

    def start_of(self, text: str, count: int) -> str:
        return text

    def excess(self, text: str, limit: int) -> int:
        return len(text) if len(text) > limit else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def stream(self, skip_special: bool = True) -> ToyDecoder:
        return ToyDecoder()


def toy_llm(executor: ToyExecutor | None = None, context: int = 512, **engine: object) -> LLM:
    config = ModelConfig(
        architecture="toy", d_model=D_MODEL, vocab_size=VOCAB, context_length=context,
        norm_eps=1e-5, layers=(LayerConfig(AttentionConfig(1, 1, 1), FfnConfig(1)),),
    )  # fmt: skip
    return LLM.from_parts(executor or ToyExecutor(), ToyTokenizer(), config, EngineConfig(**engine))  # type: ignore[arg-type]


PATIENCE = 60
"""Seconds that a test waits for what takes milliseconds on a machine that does nothing else."""


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come to pass within {seconds} s"
        time.sleep(0.005)


def joined(*threads: threading.Thread) -> None:
    """Wait for the end of threads."""
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} did not end within {PATIENCE} s"


def settled(llm: LLM) -> EngineStats:
    """The statistics once everything asked for so far has been done."""
    return llm._runner.call(llm.stats)


def idle(llm: LLM) -> bool:
    """Whether nothing runs or waits, and every page and every slot of a state is free."""
    stats = settled(llm)
    states, slots = llm._runner._scheduler.states, llm._executor.n_states
    if states is not None and states.free != slots:
        return False
    speculation = llm._runner._speculation
    if speculation is not None:
        source = speculation.source
        of_requests = (speculation, "_requests"), (source, "_pending"), (source, "_texts"), (source, "_sequences")
        if any(getattr(owner, name, None) for owner, name in of_requests):
            return False
    return (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0) and not llm._runner._driver.open_commands


class Asked:
    """A request that was submitted, and its events."""

    def __init__(self, llm: LLM, prompt: Sequence[int], params: SamplingParams | None = None, **limits: Any) -> None:
        self.request = llm._runner.request(prompt, params or SamplingParams(temperature=0), **limits)
        self.events: SimpleQueue[StreamEvent | None] = SimpleQueue()
        self.request.deliver, self.request.all_tokens = self.events.put, True

    def rest(self) -> list[StreamEvent | None]:
        """The events from here on, until the request has ended."""
        events = [self.events.get(timeout=PATIENCE)]
        while events[-1] is not None and events[-1].finish_reason is None:
            events.append(self.events.get(timeout=PATIENCE))
        return events


def ask(llm: LLM, prompt: Sequence[int], params: SamplingParams | None = None, **limits: Any) -> Asked:
    """Submit a request from this thread, without waiting for anything."""
    asked = Asked(llm, prompt, params, **limits)
    llm._runner.submit([asked.request])
    return asked
