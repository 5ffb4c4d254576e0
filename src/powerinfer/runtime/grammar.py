"""Constrained decoding: grammars compiled for a model's vocabulary, and the masks of tokens that they allow.

llguidance does the work: it compares the bytes of tokens with an Earley parser, so an answer may be cut into tokens in
any way. It is imported, and the vocabulary is handed to it, with the first grammar.
"""

from __future__ import annotations

import json
import re
import threading
import time
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.errors import CLOSED, ModelError, PowerInferError, RequestError, single_line
from powerinfer.runtime.gbnf import lark_of_gbnf
from powerinfer.runtime.thought_mask import AnswerMask, Spelling, ThoughtMask
from powerinfer.text.grammar import JSON_OPTIONS, KINDS, AfterThought, Grammar, LazyGrammar
from powerinfer.text.schemas import place_of

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from llguidance import LLMatcher, LLParserLimits
    from numpy.typing import NDArray

    from powerinfer.text.tokenizer import Tokenizer

CACHE_BYTES = 64 << 20
COMPILE_SECONDS = 5.0  # wall-clock time; real grammars need milliseconds
MAX_LEXER_STATES = 20_000  # about 1 kB each, made as they are reached; shared by all masks of a grammar

# What a compiled grammar takes, from above, as measured: llguidance does not say. Its states grow while masks are
# computed, by up to 12 MB in a second.
GRAMMAR_BYTES = 256 << 10
BYTES_PER_CHARACTER = 256
BYTES_PER_SECOND = 20e6


class Grammars:
    """Compiles grammars for one model, and keeps those used last. Any thread may call any method.

    vocab_size: the model's number of logits, if it has more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 0, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._preparing = threading.Lock()  # held long, so that no event loop may wait for it
        self._cache = _Cache(cache_bytes)
        self._closed = False
        self._prepared: _Vocabulary | PowerInferError | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Wait for a compiled grammar: milliseconds, for the first one of all as long as the vocabulary takes.

        RequestError if it is invalid or matches nothing, or if compiling goes beyond the limits of time and size;
        PowerInferError if the compiler fails.
        """
        with self._lock:
            if self._closed:
                raise RequestError(CLOSED)
            compiled = self._cache.find(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        if isinstance(compiled, str):
            raise RequestError(compiled)
        return compiled

    def prepare(self) -> None:
        """Hand over the vocabulary now, in any thread: for 262,144 pieces a second or two, in which no other thread
        runs. One that cannot be used is refused with the first grammar."""
        with suppress(PowerInferError):
            _ = self._vocabulary

    def knows(self, grammar: Grammar | LazyGrammar | AfterThought) -> bool:
        """Whether `mask` would not have to wait; at once."""
        compiled = grammar.grammar if isinstance(grammar, AfterThought) else grammar
        if compiled is None:
            return True
        if isinstance(grammar, AfterThought) and "_spelling" not in self.__dict__:
            return False
        with self._lock:
            return self._cache.find(compiled.grammar if isinstance(compiled, LazyGrammar) else compiled) is not None

    def mask(self, grammar: Grammar | LazyGrammar | AfterThought) -> AnswerMask | ThoughtMask:
        """The mask of one answer; errors and time as of `compile`."""
        if not isinstance(grammar, AfterThought):
            return self._maker(grammar)()
        spelling = self._spelling
        if isinstance(grammar.grammar, Grammar):
            spelling.prepare(grammar.begin.encode(), grammar.end.encode())
        if grammar.budget is not None:
            spelling.tokens(grammar.end.encode())  # looked up now, not while others wait
        return ThoughtMask(grammar, spelling, None if grammar.grammar is None else self._maker(grammar.grammar))

    def _maker(self, grammar: Grammar | LazyGrammar) -> Callable[[], AnswerMask]:
        """Maker of the masks of one answer, once the grammar is compiled."""
        if not isinstance(grammar, LazyGrammar):
            return self.compile(grammar).mask
        compiled = self.compile(grammar.grammar)
        return lambda: LazyMask(compiled, grammar.position, grammar.ends and grammar.ends())

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._tokenizer, self._vocab_size)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of the cache, from above."""
        with self._lock:
            return self._cache.nbytes

    def _compile(self, grammar: Grammar) -> CompiledGrammar | str:
        from concurrent.futures import CancelledError

        vocabulary = self._vocabulary
        noun = KINDS[grammar.kind]
        job = self._submit(vocabulary, grammar)
        try:
            return job.result(COMPILE_SECONDS)
        except CancelledError:
            raise RequestError(CLOSED) from None
        except TimeoutError:
            # One that is under way cannot be stopped. llguidance's own limits end it, and its result is kept.
            reason = "too many others are being compiled" if job.cancel() else "simplify it"
            raise RequestError(f"the {noun} takes longer than {COMPILE_SECONDS:g} s to compile: {reason}") from None

    def close(self) -> None:
        """Forget all grammars, and end the thread that compiles them, within what it is compiling."""
        with self._lock:
            self._closed, self._cache, self._prepared = True, _Cache(0), None
            worker = self.__dict__.pop("_worker", None)
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)

    def _submit(self, vocabulary: _Vocabulary, grammar: Grammar) -> Future[CompiledGrammar | str]:
        with self._lock:
            if self._closed:
                raise RequestError(CLOSED)
            return self._worker.submit(self._build, vocabulary, grammar)

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(1, "grammar")

    def _build(self, vocabulary: _Vocabulary, grammar: Grammar) -> CompiledGrammar | str:
        """Compile, on the worker's thread, and keep the result, which for an invalid grammar is the error."""
        entry: CompiledGrammar | str
        try:
            entry = CompiledGrammar(vocabulary, grammar)
        except RequestError as error:
            entry = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {_line(str(error))}"
            raise PowerInferError(f"the {KINDS[grammar.kind]} cannot be compiled: {reason}") from error
        with self._lock:
            self._cache.put(grammar, entry)
        return entry

    @property
    def _vocabulary(self) -> _Vocabulary:
        """Prepared once, in as long as a large vocabulary takes; so is the refusal of one."""
        with self._preparing:
            if self._prepared is None:
                try:
                    self._prepared = _Vocabulary(self._tokenizer, self._vocab_size)
                except (RequestError, ModelError) as error:
                    self._prepared = error
            if isinstance(self._prepared, PowerInferError):
                raise type(self._prepared)(str(self._prepared))  # a new one: each thread has its own traceback
            return self._prepared


class CompiledGrammar:
    """A grammar for one vocabulary; `mask` starts an answer."""

    def __init__(self, vocabulary: _Vocabulary, grammar: Grammar) -> None:
        """RequestError if it is invalid, too large, or matches nothing."""
        from llguidance import LLMatcher

        self.vocabulary = vocabulary
        self.failed = False  # a limit was reached in use: it has to be compiled again
        self.noun = KINDS[grammar.kind]
        self._size = GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(grammar.text)
        self._seconds = 0.0
        try:
            source = _source(grammar, vocabulary)
        except Exception as error:
            raise _refused(grammar, str(error)) from None
        self._matcher = LLMatcher(vocabulary.words, source, log_level=0, limits=_limits())
        if self._matcher.is_error():
            raise _refused(grammar, self._matcher.get_error())
        first = np.zeros(vocabulary.filled_words, np.uint32)
        self.fill(self.matcher(), first)
        self.first = vocabulary.first_mask(self._matcher, first[: vocabulary.mask_words])  # of every answer
        if not self.first.any():
            raise RequestError(f"the {self.noun} matches no text")

    @property
    def nbytes(self) -> int:
        """Estimated bytes, from above."""
        return self._size + int(self._seconds * BYTES_PER_SECOND)

    def matcher(self) -> LLMatcher:
        """A parser at its beginning, which shares what was compiled."""
        return self._matcher.deep_copy()

    def mask(self) -> GrammarMask:
        """The mask of one answer."""
        return GrammarMask(self)

    def fill(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> None:
        """The mask of the tokens that may follow, [filled_words]; RequestError if a limit is reached."""
        begin = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._seconds += time.perf_counter() - begin
        if matcher.is_error():
            self.failed = True
            message = _line(matcher.get_error())
            if message.startswith("NoExtension"):
                raise RequestError(f"the {self.noun} matches no text")
            raise RequestError(f"the {self.noun} became too complex: {message}")

    def fits(self, matcher: LLMatcher, token: int) -> bool:
        """Whether a token may follow."""
        begin = time.perf_counter()
        fits = matcher.validate_tokens([token]) == 1
        self._seconds += time.perf_counter() - begin
        return fits


class GrammarMask:
    """A `TokenMask`: which tokens may follow in one answer, so that its text matches a grammar.

    uint32 [ceil(vocab / 32)]; the array is used again for the next token.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._matcher = grammar.matcher()
        self._begun = False
        self._filled = np.zeros(self._vocabulary.filled_words, np.uint32)
        self._words = self._filled[: self._vocabulary.mask_words]

    def allows(self, token: int) -> bool:
        """Whether a token may follow: without the whole mask, which takes ten times as long.

        Where only one text may follow, the mask has only the tokens that the model expects for it; here any will do.
        """
        if self._begun:
            return self._grammar.fits(self._matcher, token)
        return bool(self._grammar.first[token >> 5] >> np.uint32(token & 31) & 1)

    def allowed(self) -> NDArray[np.uint32]:
        """The tokens that may follow. RequestError if a limit is reached."""
        if not self._begun:
            return self._grammar.first
        self._grammar.fill(self._matcher, self._filled)
        return self._words

    def accept(self, token: int) -> bool:
        """Take the next token; whether nothing may follow it. RequestError if it was not allowed."""
        tokens: Sequence[int] = (token,) if self._begun else self._vocabulary.without_space.get(token, (token,))
        self._begun = True
        if self._matcher.try_consume_tokens(list(tokens)) != len(tokens):
            reason = _line(self._matcher.get_error()) or f"or the {self._grammar.noun} became too complex: simplify it"
            raise RequestError(f"token {token} does not fit the grammar: {reason}")
        return self._matcher.is_stopped()

    def accept_bytes(self, data: bytes) -> bool:
        """Take text; whether it fits the grammar. If not, the mask cannot be used any more."""
        self._begun = True
        tokens = self._vocabulary.tokens_of(data)
        return tokens is not None and self._matcher.try_consume_tokens(tokens) == len(tokens)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()


class LazyMask:
    """A `TokenMask` for an answer that may be text: a grammar applies where a part of the answer begins.

    position: as in `LazyGrammar`. Until then, and after the part, every token is allowed, and so it is if the part does
    not begin as the grammar demands. ends: given the answer's text piece by piece, says whether it ends there.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        position: Callable[[str, bool], int | None],
        ends: Callable[[str], bool] | None = None,
    ) -> None:
        self._grammar, self._position, self._ends = grammar, position, ends
        self._decoder = getincrementaldecoder("utf-8")("ignore")
        self._data = b""  # the end of the text
        self._from_start = True
        self._mask: GrammarMask | None = None

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        return self._mask is None or self._mask.allows(token)

    def allowed(self) -> NDArray[np.uint32] | None:
        """The tokens that may follow, None for all. RequestError if a limit is reached."""
        return None if self._mask is None else self._mask.allowed()

    def accept(self, token: int) -> bool:
        """Take the next token; whether the answer ends with it."""
        data = self._grammar.vocabulary.token_bytes(token)
        if self._mask is None:
            self._look(data)
        elif self._mask.accept(token):
            self._mask = None
        return self._ends is not None and self._ends(self._decoder.decode(data))

    def accept_bytes(self, data: bytes) -> bool:
        """Take the text that the answer begins with."""
        self._look(data)
        if self._ends is not None:
            self._ends(self._decoder.decode(data))
        return True

    def _look(self, data: bytes) -> None:
        """Whether the part begins with these bytes."""
        self._data += data
        text = self._data.decode("utf-8", "ignore")
        at = self._position(text, self._from_start)
        if at is not None:
            self._begin(text[at:])
        elif len(self._data) > _TAIL:
            self._data, self._from_start = self._data[-_TAIL:], False

    def _begin(self, text: str) -> None:
        self._data, self._from_start = b"", False
        mask = self._grammar.mask()
        if mask.accept_bytes(text.encode()) and not mask.complete:
            self._mask = mask


_TAIL = 256  # bytes, longer than the beginning of any part

_BYTES = {
    bytes([byte]) for byte in (0x0A, *range(0x20, 0x7F))
}  # rare characters' bytes are missing in some vocabularies

_BEFORE = "\n"  # a text that merges with nothing after it, so that what follows is within the text


class _Words:
    """A tokenizer as llguidance takes it; it has no way to free what refers to it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], special: Sequence[int], end: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._ids = {token: at for at, token in enumerate(tokens) if token}
        for at in special:
            self._ids.pop(tokens[at], None)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens that the model expects for a piece of text within an answer.

        llguidance asks for them where only one text may follow. They must spell it to the byte, which a tokenizer that
        adds a space or normalises does not promise.
        """
        before = self._tokenizer.encode(_BEFORE, special=False, add_bos=False)
        tokens = self._tokenizer.encode(_BEFORE + text, special=False, add_bos=False)[len(before) :]
        data = text.encode()
        return tokens if b"".join(map(self._tokenizer.token_bytes, tokens)) == data else self._spelled(data)

    def _spelled(self, data: bytes) -> list[int]:
        """The longest tokens, from the left."""
        tokens, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return []
            tokens.append(self._ids[data[at:end]])
            at = end
        return tokens


class _Vocabulary:
    """A tokenizer's tokens for llguidance: their bytes, which of them are special, which end an answer.

    size: how many tokens the model has; ends: those that end an answer. filled_words: words of the masks that
    llguidance fills; the model's tokens have the first `mask_words` of them.
    without_space: if decoding drops the space that an answer begins with, what tokens with that space mean in its
    beginning: the tokens of the rest.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """RequestError if answers cannot be constrained in this vocabulary."""
        from llguidance import LLTokenizer

        self._tokenizer = tokenizer
        self.mask_words = -(-vocab_size // 32)
        tokens = [tokenizer.token_bytes(at) for at in range(tokenizer.vocab_size)]
        tokens += [b""] * (vocab_size - len(tokens))
        if not set(tokens) >= _BYTES:  # llguidance would wait for a byte that no token begins with
            raise RequestError("this model's vocabulary cannot spell every text, so answers cannot be constrained")
        ends = sorted(tokenizer.eos_ids)
        if not ends:  # llguidance needs one: in a word of its own, beyond the model's mask, it is never sampled
            ends = [self.mask_words * 32]
            tokens += [b""] * (ends[0] + 1 - len(tokens))
        self.size, self.ends = vocab_size, ends
        self.filled_words = -(-len(tokens) // 32)
        special = sorted({*tokenizer.special_ids, *ends})
        for at in special:  # one without a text would be in the mask wherever another special token is
            tokens[at] = tokens[at] or b"<[%d]>" % at
        words: Any = _Words(tokenizer, tokens, special, ends[0])
        try:
            self.words = LLTokenizer(words, n_vocab=len(tokens), eos_token=ends)
        except ValueError as error:
            raise ModelError(f"answers of this model cannot be constrained: {_line(str(error))}") from error
        words.tokens = ()  # it has its own copy
        self.without_space: dict[int, list[int]] = {}
        if tokenizer.strips_space:
            spaced = {at: token[1:] for at, token in enumerate(tokens) if token[:1] == b" "}
            rests = {at: self.tokens_of(rest) for at, rest in spaced.items() if at not in tokenizer.special_ids}
            self.without_space = {at: rest for at, rest in rests.items() if rest is not None}

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token."""
        return self._tokenizer.token_bytes(token)

    def token_of(self, text: str) -> int | None:
        """The one token that a text is; None if it is several."""
        tokens = self._tokenizer.encode(text, add_bos=False)
        return tokens[0] if len(tokens) == 1 else None

    def tokens_of(self, data: bytes) -> list[int] | None:
        """Some tokens that spell `data`; None if it is no UTF-8 text or no tokens spell it."""
        try:
            tokens = self.words.greedy_tokenize(data.decode())
        except ValueError:
            return None
        return tokens if self.words.decode_bytes(tokens) == data else None

    def first_mask(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The mask of an answer's first token: `words`, but tokens with a leading space count without it."""
        if not self.without_space:
            return words
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        fits = [matcher.validate_tokens(rest) == len(rest) for rest in self.without_space.values()]
        allowed[list(self.without_space)] = fits
        return np.packbits(allowed, bitorder="little").view(np.uint32)


class _Cache:
    """Compiled grammars, and the errors of invalid ones, by what was used last, bounded by bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()

    def find(self, grammar: Grammar) -> CompiledGrammar | str | None:
        entry = self._entries.get(grammar)
        if isinstance(entry, CompiledGrammar) and entry.failed:
            del self._entries[grammar]
            return None
        if entry is not None:
            self._entries.move_to_end(grammar)
        return entry

    def put(self, grammar: Grammar, entry: CompiledGrammar | str) -> None:
        self._entries[grammar] = entry
        self._entries.move_to_end(grammar)
        total = self.nbytes
        while total > self._limit:
            total -= _nbytes(*self._entries.popitem(last=False))

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(*entry) for entry in self._entries.items())


def _nbytes(grammar: Grammar, entry: CompiledGrammar | str) -> int:
    return entry.nbytes if isinstance(entry, CompiledGrammar) else 1024 + 4 * (len(grammar.text) + len(entry))


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)


def _source(grammar: Grammar, vocabulary: _Vocabulary) -> str:
    """The grammar in llguidance's own format."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        options: Any = JSON_OPTIONS
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "gbnf":
        text = lark_of_gbnf(grammar.text, vocabulary.token_of, vocabulary.size, vocabulary.ends)
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_lark(grammar.text)


def refusal(grammar: Grammar) -> RequestError | None:
    """Reason for which no grammar can be made of a JSON schema, whatever the vocabulary; None if one can."""
    from llguidance import LLMatcher

    options: Any = JSON_OPTIONS
    try:
        source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        message = LLMatcher.validate_grammar(source, None)
    except Exception as error:
        message = str(error)
    return _refused(grammar, message) if message else None


def _refused(grammar: Grammar, message: str) -> RequestError:
    """Error of llguidance, for the person who wrote the grammar."""
    noun = KINDS[grammar.kind]
    if "recursion" in message:
        return RequestError(f"the {noun} is nested too deep")
    if grammar.kind != "json_schema":
        return RequestError(f"the {noun} is not supported: {_line(message)}")
    keys = re.match(r"Unimplemented keys: (\[.*\])", message)
    names = _names(keys[1]) if keys else []
    place = place_of(json.loads(grammar.text), lambda name, value: name in names or _is_in(message, name, value))
    position = f" (at {place})" if place else ""
    if names:
        return RequestError(f"the {noun} has keywords that are not supported: {', '.join(names)}{position}")
    if message.startswith("oneOf"):
        return RequestError(f"the {noun} has a oneOf whose options may overlap: use anyOf{position}")
    return RequestError(f"the {noun} is not supported: {_line(message)}{position}")


def _is_in(message: str, name: str, value: Any) -> bool:
    """Whether an error speaks of a keyword with this value."""
    if name == "pattern" and isinstance(value, str):
        return message.startswith("regex") and value in message
    if name == "oneOf":
        return message.startswith("oneOf")
    return name == "type" and message.startswith("Invalid type") and str(value) in message


def _names(listed: str) -> list[str]:
    try:
        return [str(name) for name in json.loads(listed)]
    except ValueError:
        return [listed]


def _line(message: str) -> str:
    """Message of llguidance, on one line."""
    return single_line(message.replace("<non-verbose/>", ""))
