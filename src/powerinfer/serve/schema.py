"""The bodies of requests, by OpenAI's names, and what of them is refused.

Types are strict, every integer and every list is bounded, and checking a list ends with its first error. A field that
is not listed here is refused, unless it cannot change the answer (`IGNORED`), asks for nothing (`NEUTRAL`), or asks for
what is not here but whose lack does not change the answer (`LOGGED`, each with a line in the log). The other APIs'
tables are beside their bodies; docs/serving.md has the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from powerinfer.errors import did_you_mean
from powerinfer.runtime.options import may_be_set
from powerinfer.runtime.params import MAX_TOP_LOGPROBS, SamplingParams
from powerinfer.serve.api_error import ApiError, not_supported, path_of
from powerinfer.serve.logs import log
from powerinfer.serve.thinking import ThinkingFields
from powerinfer.text.chat import MessageError, plain_messages
from powerinfer.text.grammar import MAX_SOURCE
from powerinfer.text.sampling_defaults import SamplingDefaults
from powerinfer.text.tools import MAX_TOOLS

MAX_INT = 2**31 - 1
UNLIMITED = -1  # max_tokens
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128  # n
MAX_PROMPTS = 1024  # of one request; also limits prompts times n
MAX_PROMPT_TOKENS = 1 << 21
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of a message
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_BIASES = 4096
MAX_OPTIONS = 1024  # of guided_choice
MAX_CALLS = 128  # of a message
MAX_TEMPLATE_OPTIONS = 32

Neutral = Sequence[Any] | Callable[[Any], bool]
"""The values of a field that ask for nothing, or a test of them."""

IGNORED = frozenset((
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "priority", "cache_prompt", "store", "prompt_cache_options", "client_metadata", "id_slot", "n_cache_reuse",
    "sse_ping_interval", "return_progress", "backend_sampling", "t_max_prompt_ms", "xtc_threshold", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
    "dynatemp_exponent", "adaptive_decay", "penalize_nl", "repeat_last_n",
))  # fmt: skip
"""Fields that do not change the answer, parameters of samplers that are off among them."""

LOGGED = frozenset(("prediction", "speculative.n_max", "speculative.n_min", "speculative.p_min"))
"""Fields that ask for what this server does not have, and without which an answer is the same: speed, storage."""

NEUTRAL: Mapping[str, Neutral] = {
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "repeat_penalty": (1.0,),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "n_probs": (0,),
    "n_keep": (0,),
    "n_discard": (0,),
    "min_keep": (0,),
    "lora": ([],),
    "typ_p": (1.0,),
    "adaptive_target": (-1.0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "response_fields": ([],),
    "return_tokens": (False,),
    "n_cmpl": (1,),
    "verbose": (False,),
    "post_sampling_probs": (False,),
    "reasoning_control": (False,),
    "truncation_side": ("left",),
}
"""Fields of OpenAI, vLLM and llama-server that this server does not have, with the values that ask for nothing."""


SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
"""llama-server's names of the samplers, in the order in which they are applied here; what turns each off."""

SAMPLERS_OFF = ("dry", "typ_p", "typical_p", "top_n_sigma", "xtc", "adaptive_p")
"""Samplers that this server does not have: their parameters are refused, unless they turn them off."""

SAMPLER_LETTERS: Mapping[str, str] = {
    "e": "penalties", "t": "temperature", "k": "top_k", "p": "top_p", "m": "min_p", "d": "dry", "y": "typ_p",
    "s": "top_n_sigma", "x": "xtc", "a": "adaptive_p", "i": "infill",
}  # fmt: skip
"""Letters of samplers, in a text such as "edkypmxt"."""

ALIASES: Mapping[str, Sequence[str]] = {
    **{name: (f"options.{name}",) for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "repeat_last_n", "num_ctx", "presence_penalty",
        "frequency_penalty",
    )},
    "repeat_penalty": ("repetition_penalty", "options.repeat_penalty"),
    "repetition_penalty": ("repeat_penalty", "options.repeat_penalty"),
    **dict.fromkeys(
        ("num_predict", "max_new_tokens"), ("max_tokens", "max_output_tokens", "num_predict", "options.num_predict")
    ),
    "max_output_tokens": ("max_tokens", "num_predict", "options.num_predict"),
    "max_tokens": ("num_predict", "options.num_predict"),
    "stop": ("stop_sequences", "options.stop"),
    "stop_sequences": ("stop", "options.stop"),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "format": ("response_format", "text.format", "output_config.format"),
    "response_format": ("text.format", "output_config.format", "format"),
    "system": ("instructions", "messages"),
    "messages": ("prompt",),
    "text": ("content",),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    **dict.fromkeys(("enable_thinking", "think"), ("reasoning.enabled", "thinking.type")),
    **dict.fromkeys(
        ("reasoning_budget", "thinking_budget", "thinking_budget_tokens", "thinking_token_budget"),
        ("reasoning.max_tokens", "thinking.budget_tokens"),
    ),
}
"""Names that other servers and APIs have for fields of this one. The first that a body has is named in the refusal."""


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 2.0 is 2."""
    return int(value) if type(value) is float and value.is_integer() else value


def _named(value: str) -> str | None:
    return value or None  # some clients send "" for the only model


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("it must be -1 or at least 1")
    return value


def _bounded(value: int) -> int:
    if value < -1:
        raise PydanticCustomError("max_tokens", "it must be at least 1, or -1 for no limit")
    return value


def _random(seed: int) -> int | None:
    return None if seed == -1 else seed


Id = Annotated[int, Field(ge=0, le=MAX_INT)]  # of a token
Integral = BeforeValidator(_integral)
Int = Annotated[int, Field(ge=0, le=MAX_INT), Integral]
MaxTokens = Annotated[int, Field(le=MAX_INT), AfterValidator(_bounded), Integral]
Seed = Annotated[int, Field(ge=-1, le=MAX_SEED), AfterValidator(_random), Integral]  # -1: as in llama-server, none
Truncate = Annotated[int, Field(ge=-1, le=MAX_INT), AfterValidator(_not_zero), Integral]
TopK = Annotated[int, Field(ge=-1, le=MAX_INT), Integral]
Temperature = Annotated[float, Field(ge=0, le=1e6)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(gt=0, le=1e6)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Source = Annotated[str, Field(max_length=MAX_SOURCE)]
Bias = float | bool  # llama-server's false forbids the token
BiasPair = Annotated[list[int | float | bool | Annotated[str, Field(max_length=MAX_STOP_CHARS)]],
                     Field(min_length=2, max_length=2)]  # fmt: skip
TokenIds = Annotated[list[Id], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]


class Body(BaseModel):
    """Fields and checks of every body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: Annotated[str, Field(max_length=1024), AfterValidator(_named)] | None = None

    def check_extra(
        self,
        ignored: frozenset[str] = IGNORED,
        neutral: Mapping[str, Neutral] = NEUTRAL,
        logged: frozenset[str] = LOGGED,
    ) -> None:
        """ApiError for a field that this server does not have, unless the answer is the same without it."""
        check_extra(self, ignored, neutral, logged)


def check_extra(
    body: BaseModel, ignored: frozenset[str], neutral: Mapping[str, Neutral], logged: frozenset[str], prefix: str = ""
) -> None:
    """Like `Body.check_extra`, for a part of a body. prefix: the beginning of its fields' names."""
    for name, value in (body.model_extra or {}).items():
        if value is None or name in ignored or _is_neutral(value, neutral.get(name, ())):
            continue
        if name in logged:
            log("warning", "a field has no effect", field=prefix + name)
            continue
        fields = type(body).model_fields
        right = next((one for one in ALIASES.get(name, ()) if one.partition(".")[0] in fields), None)
        if name in neutral or right is not None:
            raise not_supported(prefix + name, "" if right is None else f": use {prefix}{right}")
        shown = prefix + (name if len(name) <= 64 else f"{name[:64]}...")
        hint = did_you_mean(name[:64], fields)
        raise ApiError(400, f"unknown field {shown!r}{hint}", param=shown, code="unknown_parameter")


class ModelRequest(BaseModel):
    """The body of /models/load and /models/unload."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(max_length=1024)]


def _is_neutral(value: Any, neutral: Neutral) -> bool:
    if callable(neutral):
        return neutral(value)
    # True == 1 in Python, but not in JSON
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the numbers of tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # which makes an event's size say nothing of its text: of other servers
    continuous_usage_stats: Literal[False] | None = None


class Sampling(Body):
    """Common fields of /v1/chat/completions and /v1/completions; those that are missing have the model's defaults.

    max_tokens: -1: no limit but the context.
    """

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[list[BiasPair], Field(fail_fast=True, max_length=MAX_BIASES)]
        | None
    ) = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Id], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Integral] | None = None
    truncate_prompt_tokens: Truncate | None = None
    min_tokens: Int | None = None
    n_predict: MaxTokens | None = None
    samplers: (
        Annotated[str, Field(max_length=32)]
        | Annotated[list[Annotated[str, Field(max_length=64)]], Field(fail_fast=True, max_length=32)]
        | None
    ) = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: Source | None = None
    guided_json: dict[str, Any] | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Annotated[list[Source], Field(fail_fast=True, max_length=MAX_OPTIONS)] | None = None
    guided_grammar: Source | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """ApiError for what fields cannot be together. n_predict is llama-server's name of max_tokens."""
        self.check_extra()
        if self.n_predict is not None:
            if self.max_tokens not in (None, self.n_predict):
                raise ApiError(400, "max_tokens and n_predict differ: give one", param="n_predict")
            self.max_tokens = self.n_predict
        extra = self.model_extra or {}
        if self.repetition_penalty is None and (extra.get("repeat_penalty") == 1 or extra.get("repeat_last_n") == 0):
            self.repetition_penalty = 1.0  # the model's default may be another one
        if self.min_tokens:
            self._check_min_tokens(self.min_tokens)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream: true", param="stream_options")

    def _check_min_tokens(self, least: int) -> None:
        """An answer has max_tokens tokens if nothing else ends it, which is what load generators want of min_tokens."""
        ends = ("stop", "stop_token_ids", "response_format", "json_schema", "grammar", "guided_json", "guided_regex",
                "guided_choice", "guided_grammar", "structured_outputs", "tools")  # fmt: skip
        if not self.ignore_eos or any(getattr(self, name, None) for name in ends):
            raise not_supported("min_tokens", " but with ignore_eos: true and nothing else that ends an answer")
        if least > self.most_tokens:
            raise ApiError(400, f"min_tokens {least} is more than max_tokens {self.most_tokens}", param="min_tokens")

    @property
    def most_tokens(self) -> float:
        """Maximum number of tokens of an answer, as far as the request says."""
        return math.inf if self.max_tokens in (None, UNLIMITED) else self.max_tokens

    def params(self, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """defaults: for fields that are missing. RequestError for a value that `SamplingParams` refuses."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        values = defaults.with_given({name: value for name, value in values.items() if value is not None})
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **{**values, **self._samplers_off()})

    def _samplers_off(self) -> dict[str, Any]:
        """The parameters that turn off what `samplers` does not name. ApiError for one that there is not."""
        names = self.sampler_names
        if names is None:
            return {}
        for name in names:
            if name not in SAMPLERS and name not in SAMPLERS_OFF:
                raise not_supported(f"samplers {name!r}", f": it may name {', '.join(SAMPLERS)}")
        return {field: off for name, fields in SAMPLERS.items() if name not in names
                for field, off in fields.items()}  # fmt: skip

    @property
    def sampler_names(self) -> list[str] | None:
        """`samplers` as names; None: all of them."""
        if isinstance(self.samplers, str):
            return [SAMPLER_LETTERS.get(letter, letter) for letter in self.samplers]
        return self.samplers


class Part(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None


MESSAGE_IGNORED = ("cache_control", "provider_specific_fields", "annotations", "id")
"""Fields of a message that clients send back, or for other servers, and of which no template knows."""


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    refusal: str | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    thinking_blocks: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @property
    def thought(self) -> str | None:
        """The thought before an answer, by one of the names that clients send it back under."""
        parts = [*(self.reasoning_details or ()), *(self.thinking_blocks or ())]
        details = [one.get("text") or one.get("summary") or one.get("thinking") for one in parts]
        texts = "\n".join(text for text in details if isinstance(text, str))
        return self.reasoning_content or self.reasoning or self.thinking or texts or None


class TemplateBody(ThinkingFields, Body):
    """Fields that become variables of a chat template; chat_template_kwargs: others, such as enable_thinking.

    continue_final_message: the prompt ends within the last message, which is the assistant's.
    """

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def begun(self) -> str | None:
        """The beginning of the answer, if the last message is to be continued."""
        content = self.messages[-1].content if self.continue_final_message else None
        return "".join(part.text or "" for part in content) if isinstance(content, list) else content


class ChatRequest(TemplateBody, Sampling):
    """The body of /v1/chat/completions."""

    ends_with_context: ClassVar[bool] = False  # an answer may be shorter than max_tokens because the context ends

    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None = None

    @property
    def most_tokens(self) -> float:
        return min(self._limits, default=math.inf)

    @property
    def _limits(self) -> set[int]:
        limits = (self.max_tokens, self.max_completion_tokens)
        return {limit for limit in limits if limit is not None and limit != UNLIMITED}

    def to_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """defaults: the model's own. ApiError or RequestError for what is wrong beyond types."""
        self.check()
        limits = self._limits
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if 0 in limits:
            raise ApiError(400, "max_tokens: it must be at least 1, or -1 for no limit", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params(defaults, limits.pop() if limits else None, logprobs)


class CompletionRequest(Sampling):
    """The body of /v1/completions. prompt: a text, several texts, token ids, or several lists of token ids."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None = None

    @property
    def most_tokens(self) -> float:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else super().most_tokens

    @property
    def generates(self) -> bool:
        """Whether tokens are generated: with echo and max_tokens 0 the answer is the prompt alone."""
        return self.max_tokens != 0

    def to_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """defaults: the model's own. ApiError or RequestError for what is wrong beyond types."""
        self.check()
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ApiError(400, "echo and truncate_prompt_tokens exclude each other", param="truncate_prompt_tokens")
        if not self.generates and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: true", param="max_tokens")
        most = self.most_tokens
        return self.params(defaults, None if most == math.inf else max(1, int(most)), self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt. ApiError for none, an empty one, or too many."""
        value: Any = self.prompt
        single = isinstance(value, str) or (bool(value) and isinstance(value[0], int))
        prompts: list[str | list[int]] = [value] if single else value
        if not prompts or [] in prompts:  # an empty text may still begin with a token of the model's own
            raise ApiError(400, "a prompt is empty: it needs at least one token", param="prompt")
        if len(prompts) * self.choices > MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts)} prompts times n {self.choices} exceed {MAX_PROMPTS}", param="prompt")
        return prompts


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


class TokenizeRequest(Body):
    """The body of /tokenize. content (llama-server) or prompt (vLLM): the text; one of them."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def text(self) -> str:
        """The text to encode."""
        self.check_extra()
        texts = [text for text in (self.content, self.prompt) if text is not None]
        if len(texts) != 1:
            raise ApiError(400, "give the text as content or as prompt", param="content")
        return texts[0]

    @property
    def adds(self) -> bool:
        """Whether the beginning and the end of the text are marked as the model wants: vLLM's default, if `prompt`."""
        if self.add_special_tokens is not None:
            return self.add_special_tokens
        return self.prompt is not None if self.add_special is None else self.add_special


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: TokenIds


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them. ApiError for what a template cannot take."""
    for n, message in enumerate(messages):
        for name, value in (message.model_extra or {}).items():
            if name not in MESSAGE_IGNORED and value not in (None, [], "", {}):
                raise not_supported(f"messages[{n}].{name[:64]}")
    try:
        return plain_messages([_filled(message) for message in messages])
    except MessageError as error:
        code = "unsupported_parameter" if error.unsupported else None
        raise ApiError(400, str(error), param=path_of(error.path), code=code) from None


def _filled(message: Message) -> dict[str, Any]:
    """A message's fields that have a value; its parts as they are."""
    content: Any = message.content if message.content is not None else message.refusal
    if isinstance(content, list):
        content = [_part(part) for part in content]
    extra = {
        "name": message.name,
        "reasoning_content": message.thought,
        "tool_calls": message.tool_calls or None,
        "tool_call_id": message.tool_call_id,
    }
    fields = {name: value for name, value in extra.items() if value is not None}
    return {"role": message.role, "content": content, **fields}


def _part(part: Part) -> dict[str, Any]:
    """A part as it is; what the assistant refused with is its text."""
    refusal = part.type == "refusal" and part.refusal is not None
    return {"type": "text", "text": part.refusal} if refusal else {"type": part.type, "text": part.text}


def template_options(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables of a chat template that a request sets. ApiError for one that it may not."""
    for name in variables or {}:
        if not may_be_set(name):
            raise ApiError(400, f"chat_template_kwargs may not set {name[:64]!r}", param="chat_template_kwargs")
    return dict(variables or {})
