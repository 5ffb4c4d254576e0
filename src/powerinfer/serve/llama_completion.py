"""llama-server's own completions: the bodies of /completion and /infill, and their answers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from powerinfer.runtime.params import MAX_TOP_LOGPROBS, SamplingParams
from powerinfer.runtime.request import Completion, Timings
from powerinfer.serve.api_error import ApiError, not_supported
from powerinfer.serve.logs import log
from powerinfer.serve.prompts import Room, check_ids
from powerinfer.serve.schema import (
    MAX_CHOICES,
    MAX_INT,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    SAMPLERS,
    UNLIMITED,
    Int,
    Integral,
    Repetition,
    Sampling,
)
from powerinfer.serve.shapes import LOWEST_LOGPROB, AnswerShape, Delta, Logprobs, Usage, sent_event
from powerinfer.text.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.request import StreamEvent
    from powerinfer.runtime.sampling import TokenLogprob
    from powerinfer.serve.answers import Answers
    from powerinfer.text.tokenizer import Tokenizer

MAX_FIELDS = 64  # of response_fields
MAX_CHUNKS = 1024  # of input_extra
NO_SLOT = -1

Mixed = list[Any]
"""Token ids and texts, which make one prompt; or several prompts."""


class CompletionBody(Sampling):
    """The body of /completion. prompt: a text, token ids, a list of both, {"prompt_string": TEXT}, or several of these.

    n_predict: -1: until the context is full, where every answer ends; 0: the prompt is only computed.
    """

    prompt: str | dict[str, Any] | Annotated[Mixed, Field(max_length=MAX_PROMPT_TOKENS)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES), Integral] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT), Integral] | None = None
    n_indent: Int | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_INT), Integral] | None = None
    return_tokens: bool | None = None
    response_fields: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(fail_fast=True, max_length=MAX_FIELDS)] | None
    ) = None

    @property
    def choices(self) -> int:
        return self.n_cmpl or super().choices

    @property
    def most_tokens(self) -> float:
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        return math.inf if limit in (None, UNLIMITED) else limit

    @property
    def ends_early(self) -> bool:
        """Whether an answer may end at a line of it."""
        return bool(self.n_indent) or (self.t_max_predict_ms or 0) > 0

    def to_params(self, defaults: SamplingDefaults, context: int) -> SamplingParams:
        """defaults: the model's own. ApiError or RequestError for what is wrong beyond types."""
        self.check()
        penalty = repetition_penalty(self.repeat_penalty, self.repeat_last_n, context)
        if self.repeat_penalty is not None and self.repetition_penalty not in (None, self.repeat_penalty):
            raise ApiError(400, "repeat_penalty and repetition_penalty differ: give one", param="repeat_penalty")
        if self.repeat_penalty is not None or self.repetition_penalty is None:
            self.repetition_penalty = penalty
        most = self.most_tokens
        limit = None if most >= context else max(1, int(most))
        return self.params(defaults, limit, self.n_probs or None)

    def prompts(self, llm: LLM) -> tuple[list[list[int]], list[int]]:
        """The tokens of each prompt, and further tokens that end an answer. ApiError for a malformed prompt."""
        return read_prompts(llm, self.prompt, "prompt", self.choices), []


def repetition_penalty(penalty: float | None, window: int | None, context: int) -> float | None:
    """The penalty that repeat_penalty and repeat_last_n ask for; None: as the model has it. ApiError for a window.

    llama-server penalises the last `repeat_last_n` tokens, by default 64, this server all.
    """
    if window == 0:
        return 1.0
    if penalty is None:
        return None
    if window is None and penalty != 1:
        log("warning", "repeat_penalty counts all tokens of an answer: there is no window")
    if 0 < (window or -1) < context and penalty != 1:
        raise not_supported(
            f"repeat_penalty of the last {window} tokens",
            ": with repeat_last_n: -1 it counts all of them, as repetition_penalty does",
        )
    return penalty


def read_prompts(llm: LLM, value: Any, field: str, choices: int = 1) -> list[list[int]]:
    """The tokens of each prompt of a field: a list of texts is several, one of token ids, or of both, is one.

    ApiError for what is none, and for too many.
    """
    if value is None:
        raise ApiError(400, f"{field} is missing", param=field)
    single = not isinstance(value, list) or any(_is_token(part) for part in value)
    prompts = [value] if single else value
    if not prompts or len(prompts) * choices > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(prompts)} texts: it may have 1 to {MAX_PROMPTS // choices}", param=field)
    return [_tokens(llm, prompt, field) for prompt in prompts]


def _is_token(part: Any) -> bool:
    return type(part) is int or (type(part) is float and part.is_integer())


def _tokens(llm: LLM, prompt: Any, field: str) -> list[int]:
    """The tokens of one prompt. A text at its beginning is marked as the model wants."""
    if isinstance(prompt, dict):
        prompt = _prompt_string(prompt, field)
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(parts, list) or not all(isinstance(part, str) or _is_token(part) for part in parts):
        raise ApiError(
            400, f'{field} must be a text, token ids, a list of both, {{"prompt_string": TEXT}}, or a list of these',
            param=field,
        )  # fmt: skip
    tokens: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, str):
            Room(llm.context).check(llm, part, param=field)
            tokens += llm.tokenizer.encode(part, add_bos=None if at == 0 and len(parts) == 1 else _begins(llm, at == 0))
        elif not 0 <= part <= MAX_INT:
            raise ApiError(400, f"{field}: token {part} is not one of the model's", param=field)
        else:
            tokens.append(int(part))
    check_ids(llm, tokens, field)
    return tokens


def _begins(llm: LLM, first: bool) -> bool:
    return first and llm.tokenizer.add_bos and llm.tokenizer.bos_id is not None


def _prompt_string(prompt: Mapping[str, Any], field: str) -> str:
    if prompt.get("multimodal_data"):
        raise not_supported(f"{field}.multimodal_data", ": this model takes text")
    for name in prompt:
        if name not in ("prompt_string", "multimodal_data"):
            raise ApiError(400, f"unknown field {field}.{name[:64]}", param=field, code="unknown_parameter")
    if not isinstance(prompt.get("prompt_string"), str):
        raise ApiError(400, f"{field}.prompt_string must be a text", param=field)
    return str(prompt["prompt_string"])


# --------------------------------------------------------------------------------------------------------------- infill


class ExtraChunk(BaseModel):
    """A piece of another file."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str
    filename: Annotated[str, Field(max_length=1024)] | None = None


class InfillBody(CompletionBody):
    """The body of /infill: code around the place to fill. prompt: the beginning of what is filled in."""

    prompt: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraChunk], Field(fail_fast=True, max_length=MAX_CHUNKS)] | None = None

    def to_params(self, defaults: SamplingDefaults, context: int) -> SamplingParams:
        names = self.sampler_names or []
        if "infill" in names:
            log("warning", "the sampler infill is left out: there is none", fields=["samplers"])
            self.samplers = [name for name in names if name != "infill"]
        return super().to_params(defaults, context)

    def prompts(self, llm: LLM) -> tuple[list[list[int]], list[int]]:
        """The prompt, and the tokens that end an answer. ApiError if the model has no tokens for that.

        Of what does not fit beside the answer, the end of the prefix stays, at least a quarter for the suffix's
        beginning, then the end of the other files.
        """
        marks = InfillMarks.from_tokenizer(llm.tokenizer)
        answer = llm.context // 8 if self.most_tokens == math.inf else min(int(self.most_tokens), llm.context // 2)
        room = max(1, llm.context - answer - 4)  # for the marks and the token of the beginning
        most = MAX_TOKEN_CHARS * room
        prefix = _plain(llm, self.input_prefix[-most:]) + _plain(llm, (self.prompt or "")[-most:])
        suffix = _plain(llm, self.input_suffix[:most])
        suffix = suffix[: max(room // 4, room - len(prefix))]
        prefix = prefix[max(0, len(prefix) - (room - len(suffix))) :]
        extra = self._extra(llm, marks, most)
        extra = extra[max(0, len(extra) - (room - len(suffix) - len(prefix))) :]
        begin = [llm.tokenizer.bos_id] if _begins(llm, True) and llm.tokenizer.bos_id is not None else []
        tokens = [*extra, *begin, marks.prefix, *prefix, marks.suffix, *suffix, marks.middle]
        return [tokens], [mark for mark in (marks.pad, marks.repository, marks.file) if mark is not None]

    def _extra(self, llm: LLM, marks: InfillMarks, most: int) -> list[int]:
        """Other files, before the file, as models are trained to see a repository. most: characters of each."""
        tokens: list[int] = []
        if marks.repository is not None:
            tokens += [marks.repository, *_plain(llm, REPOSITORY)]
        for chunk in self.input_extra or []:
            if marks.file is None:
                tokens += _plain(llm, SNIPPET + chunk.text[-most:])
            else:
                tokens += [marks.file, *_plain(llm, f"{chunk.filename or 'tmp'}\n{chunk.text[-most:]}")]
        if marks.file is not None:
            tokens += [marks.file, *_plain(llm, "filename\n")]
        return tokens


MAX_TOKEN_CHARS = 128  # of text that is looked at, for each token that there is room for
REPOSITORY = "myproject\n"
SNIPPET = "\n\n--- snippet ---\n\n"


def _plain(llm: LLM, text: str) -> list[int]:
    """Tokens of text in which nothing is special."""
    return llm.tokenizer.encode(text, special=False, add_bos=False) if text else []


class InfillMarks(NamedTuple):
    """The tokens around the parts of a file. pad, repository, file: None where the model has none."""

    prefix: int
    suffix: int
    middle: int
    pad: int | None
    repository: int | None
    file: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> InfillMarks:
        """A model's, as its file states them, or by their names. ApiError if a necessary one is missing."""
        ids = {token.text: token.id for token in tokenizer.vocabulary.added}
        marks: dict[str, int | None] = dict.fromkeys(INFILL_MARKS)
        marks |= {part: ids[name] for part, names in INFILL_MARKS.items() for name in reversed(names) if name in ids}
        marks |= tokenizer.vocabulary.infill
        missing = [part for part in ("prefix", "suffix", "middle") if marks[part] is None]
        if missing:
            raise ApiError(
                400, f"this model cannot fill in: it has no token for the {' and the '.join(missing)}",
                param="model", code="no_infill",
            )  # fmt: skip
        return cls(**marks)  # type: ignore[arg-type]  # the first three are there


INFILL_MARKS: Mapping[str, Sequence[str]] = {
    "prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
               "<|code_prefix|>", "<|prefix|>"),
    "suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
               "<|code_suffix|>", "<|suffix|>"),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
               "<|code_middle|>", "<|middle|>"),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}  # fmt: skip
"""Names of these tokens in the models of Qwen, StarCoder, Granite, DeepSeek, CodeLlama, GLM and Falcon."""


# -------------------------------------------------------------------------------------------------------------- answers


OFF_SETTINGS: Mapping[str, Any] = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "typical_p": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 0,
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0, "adaptive_decay": 0.9,
    "n_keep": 0, "n_discard": 0, "min_keep": 0, "post_sampling_probs": False, "lora": [],
}  # fmt: skip
"""Settings of what this server does not have: all off."""


def settings(params: SamplingParams) -> dict[str, Any]:
    """llama-server's names for how tokens are sampled. repeat_last_n -1: the penalty counts all tokens."""
    limit = UNLIMITED if params.max_tokens is None else params.max_tokens
    return {
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "samplers": list(SAMPLERS),
        **OFF_SETTINGS,
    }


class CompletionShape(AnswerShape):
    """/completion and /infill. prompts: of each answer; context: of the model, in tokens."""

    def __init__(
        self, body: CompletionBody, params: SamplingParams, prompts: Sequence[list[int]], context: int,
        model: str, tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        super().__init__("", model, tokenizer, False)
        self._body, self._params, self._context = body, params, context
        self._asked = [prompt for prompt in prompts for _ in range(body.choices)]
        texts = [tokenizer.decode(prompt, skip_special=False) for prompt in prompts]
        self._texts = [text for text in texts for _ in range(body.choices)]
        self._completions: dict[int, Completion] = {}
        self._probs: list[list[dict[str, Any]]] = [[] for _ in self._asked]
        self._lines = [False] * len(self._asked)  # whether it has a line break
        self._counts = [0] * len(self._asked)  # of tokens
        self._nothing = body.most_tokens == 0  # the prompt is only computed
        self.show_timings(self._asked)

    def watch(self, events: Answers) -> Answers:
        return _ending_at_lines(events, self._body, self._asked[0]) if self._body.ends_early else events

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, event: StreamEvent) -> Delta:
        if event.completion is not None:
            self._completions[index] = event.completion
        if event.token_id is not None and not self._nothing:
            self._counts[index] += 1
            if event.logprobs is not None:
                self._probs[index].append(_probability(event.logprobs))
        text = "" if self._nothing else event.text
        self._lines[index] |= "\n" in text
        return Delta(text, None, event.finish_reason)

    def chunk_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        raise AssertionError("progress writes the chunks")

    def begin(self, count: int, usage: Usage) -> list[bytes]:
        return []

    def progress(self, index: int, event: StreamEvent) -> list[bytes]:
        delta = self.delta(index, event)
        sent = []
        if event.token_id is not None and not self._nothing:
            sent.append(sent_event(self._chunk(index, delta.text, event.token_id)))
        if event.finish_reason is not None:
            sent.append(sent_event(self._final(index, "")))
        return sent

    def end(self, usage: Usage) -> list[bytes]:
        return []

    def failed(self, error: ApiError) -> list[bytes]:
        return [sent_event(error.document())]

    def choice(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str) -> dict[str, Any]:
        return self._final(index, text)

    def full_answer(self, choices: list[dict[str, Any]], usage: Usage, ids: Sequence[list[int]] = ()) -> Any:
        return choices[0] if len(choices) == 1 else choices

    def _chunk(self, index: int, text: str, token: int) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._body.n_probs:
            more["completion_probabilities"] = self._probs[index][-1:]
        if self._body.timings_per_token:
            more["timings"] = self._timings[index].document()
        return {
            "index": index,
            "content": text,
            "tokens": [token],
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._counts[index],
            "tokens_evaluated": len(self._asked[index]),
            **more,
        }

    def _final(self, index: int, text: str) -> dict[str, Any]:
        """The whole answer, or the last event of a stream."""
        body, prompt, completion = self._body, self._asked[index], self._completions[index]
        ids = [] if self._nothing else completion.token_ids
        stop_type, word = self._stop_reason(completion)
        full = len(prompt) + len(ids) >= self._context and len(ids) < body.most_tokens
        document: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": ids if body.return_tokens and not body.stream else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(ids),
            "tokens_evaluated": len(prompt),
            "generation_settings": self._settings(),
            "prompt": self._texts[index],
            "has_new_line": self._lines[index],
            "truncated": stop_type == "limit" and full,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": completion.cached_tokens,
            "timings": self._timings[index].document() | ({"predicted_n": 0} if self._nothing else {}),
        }
        if body.n_probs and not body.stream:
            document["completion_probabilities"] = self._probs[index]
        return document if not body.response_fields else _fields(document, body.response_fields)

    def _stop_reason(self, completion: Completion) -> tuple[str, str]:
        """(stop_type, the text in `stop` that ended it)."""
        if completion.finish_reason != "stop":
            return "limit", ""
        if self._params.stop and completion.token_ids[-1] not in self._tokenizer.eos_ids:
            rest = self._tokenizer.decode(completion.token_ids)[len(completion.text) :]
            words = [word for word in self._params.stop if rest.startswith(word)]
            if words:
                return "word", words[0]
        return "eos", ""

    def _settings(self) -> dict[str, Any]:
        body, params = self._body, self._params
        limit = UNLIMITED if body.most_tokens == math.inf else int(body.most_tokens)
        biases = [{"token": token, "bias": None if bias == -math.inf else bias}
                  for token, bias in params.logit_bias.items()]  # fmt: skip
        values = {"max_tokens": limit, "n_predict": limit, "stop": list(params.stop), "stream": bool(body.stream),
                 "logit_bias": biases, "grammar": body.grammar or "", "n_indent": body.n_indent or 0,
                 "timings_per_token": bool(body.timings_per_token)}  # fmt: skip
        return settings(params) | values | ({} if body.samplers is None else {"samplers": body.sampler_names})


def _probability(token: TokenLogprob) -> dict[str, Any]:
    return {**_token(token), "top_logprobs": [_token(top) for top in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    text, logprob = token.bytes.decode("utf-8", "ignore"), max(token.logprob, LOWEST_LOGPROB)
    return {"id": token.token_id, "token": text, "bytes": list(token.bytes), "logprob": logprob}


def _fields(document: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """response_fields: "a/b" is the field b of a, under that name."""
    fields: dict[str, Any] = {}
    for path in paths:
        value: Any = document
        for name in path.split("/"):
            value = value.get(name, fields) if isinstance(value, Mapping) else fields
        if value is not fields:  # which stands for a field that there is not
            fields[path] = value
    return fields


async def _ending_at_lines(events: Answers, body: CompletionBody, prompt: list[int]) -> Answers:
    """Events of one answer, up to a line that is indented less than n_indent, or that begins after t_max_predict_ms."""
    seconds = (body.t_max_predict_ms or 0) / 1e3
    lines = _Lines(body.n_indent or 0)
    texts: list[str] = []
    ids: list[int] = []
    first: float | None = None
    async with aclosing(events):
        async for item in events:
            if item is None:
                yield None
                continue
            index, event = item
            first = first or time.perf_counter()
            text, ended = lines.push(event.text)
            if event.finish_reason is not None:
                yield index, event._replace(text=text)
                return
            late = 0 < seconds < time.perf_counter() - first and "\n" in event.text
            texts.append(text)
            ids += [] if event.token_id is None else [event.token_id]
            if not ended and not late:
                yield item
                continue
            completion = Completion(
                "".join(texts), ids, "length", len(prompt), len(ids), event.cached_tokens,
                Timings(0.0, None, None, None),
            )  # fmt: skip
            yield index, event._replace(text=text, finish_reason="length", completion=completion)
            return


class _Lines:
    """Text up to the first line, after a line break, that is indented less than `least`."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._indent: int | None = None  # of the line, while only white space of it has come

    def push(self, text: str) -> tuple[str, bool]:
        """The text before the end, and whether the end has come."""
        for at, char in enumerate(text if self._least else ""):
            if self._indent is not None and char in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._least:
                return text[:at], True
            else:
                self._indent = 0 if char == "\n" else None
        return text, False


