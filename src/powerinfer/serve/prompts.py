"""The prompt of a request, as tokens that fit the context. Nothing is cut off unless the request asks for it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from powerinfer.errors import ModelError
from powerinfer.runtime.thinking import thinking_variables
from powerinfer.serve.api_error import ApiError, ContextError
from powerinfer.serve.constraints import Tools, chat_prompt
from powerinfer.serve.schema import (
    Bias,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TemplateBody,
    conversation,
)
from powerinfer.serve.scoring import echo_of
from powerinfer.serve.shapes import Echo
from powerinfer.text.chat import drop_oldest
from powerinfer.text.system_messages import placed

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.params import SamplingParams

Input = str | list[int]
"""A text or token ids."""

MAX_BIAS_CHARS = 1 << 14  # of the texts in logit_bias
MAX_DIGITS = 20  # of a token id


MAX_COUNTED = 1 << 18  # tokens of a text that need not fit the context


def encode_chat(
    llm: LLM, body: TemplateBody, tools: Tools, limit: int | None = None, room: Room | None = None
) -> tuple[list[int], int]:
    """The tokens of a conversation, and how many of its turns are left out: the oldest, down to `limit` tokens.

    room: what the prompt must fit; None: it is only counted. ApiError for one that is certainly longer, before its
    tokens are made, unless turns may be left out.
    """
    room = room or Room.counting(llm)

    def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
        text, plain = _rendered(llm, body, messages, tools)
        if limit is None:
            room.check(llm, text)
        elif least := llm.tokenizer.excess(text, max(limit, room.context)):
            return [0] * least  # too long, whatever they are
        return llm.tokenizer.encode_masked(text, plain, add_bos=False)

    with _template_errors(llm):
        messages = conversation(body.messages)
        if limit is None:
            room.check(llm, *(one["content"] for one in messages if one["role"] != "assistant"))
            return encode(messages), 0
        _, tokens, dropped = drop_oldest(messages, encode, limit)
        return tokens, dropped


def _variables(llm: LLM, body: TemplateBody) -> dict[str, Any]:
    """The variables of the chat template; those that the request names come before what its other fields mean."""
    return {**thinking_variables(llm, body.asked_thinking().thinking), **(body.chat_template_kwargs or {})}


class Room(NamedTuple):
    """Tokens that a prompt may have together with those to generate; counted: nothing is, so it need not fit."""

    context: int
    wanted: int = 0
    counted: bool = False

    @classmethod
    def counting(cls, llm: LLM) -> Room:
        """Room for texts that are only encoded: as many tokens as the context, or `MAX_COUNTED`."""
        return cls(max(llm.context, MAX_COUNTED), counted=True)

    def check(self, llm: LLM, *texts: str, param: str = "prompt") -> None:
        """ApiError for a prompt with texts that certainly do not fit, however they are cut into tokens."""
        least = max((llm.tokenizer.excess(text, self.context) for text in texts if len(text) > self.context), default=0)
        if not least:
            return
        if self.counted:
            message = f"a text has at least {least} tokens: up to {self.context} are counted, send it in parts"
            raise ApiError(400, message, param=param, code="text_too_long")
        raise ContextError(least, self.wanted, self.context, least=True, param=param)


def fitted_chat(llm: LLM, body: ChatRequest, tools: Tools, params: SamplingParams) -> tuple[list[int], int]:
    """Like `encode_chat`, without turns that do not fit if the request wants it. ApiError: its last is too long."""
    asked = body.truncate_prompt_tokens
    limit = _limit(llm, asked, params.max_tokens or llm.context // 8 + 1)
    tokens, dropped = encode_chat(llm, body, tools, limit, Room(llm.context, params.max_tokens or 1))
    if asked is not None and len(tokens) > asked >= 0:
        raise ApiError(
            400,
            f"the system's messages and the last turn have {len(tokens)} tokens, more than truncate_prompt_tokens "
            f"{asked}: only whole turns before it are left out",
            param="truncate_prompt_tokens",
            code="context_length_exceeded",
        )
    check_fit(llm, [tokens], params)
    return tokens, dropped


def render(llm: LLM, body: TemplateBody, tools: Tools | None = None) -> str:
    """The text that the chat template makes of a conversation. ApiError for one that is too long to be counted."""
    with _template_errors(llm):
        messages = conversation(body.messages)
        Room.counting(llm).check(llm, *(str(one["content"]) for one in messages), param="messages")
        return _rendered(llm, body, messages, tools)[0]


def _rendered(
    llm: LLM, body: TemplateBody, messages: Sequence[dict[str, Any]], tools: Tools | None
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation as the request wants it to end, and its spans that are plain text."""
    assert llm.template is not None
    ends, conversation = None, list(messages)
    if body.continue_final_message:
        ends = _end_mark(body, conversation)
        conversation[-1] = {**conversation[-1], "content": conversation[-1]["content"] + ends}
    conversation = placed(conversation, llm.template.tool_template if tools and tools.tools else llm.template)
    shown, options = chat_prompt(llm, conversation, _variables(llm, body), tools)
    begins = ends is None and body.add_generation_prompt is not False
    text, plain = llm.template.render(shown, llm.tokenizer.special_tokens, begins, **options)
    if ends is None:
        return text, plain
    at = text.rfind(ends)
    if at < 0:
        raise ApiError(400, "the chat template leaves out the last message: it cannot be continued", param="messages")
    return text[:at], [(start, min(end, at)) for start, end in plain if start < at]


def _end_mark(body: TemplateBody, messages: Sequence[dict[str, Any]]) -> str:
    """A character to put behind the last message, so that the prompt can end there. ApiError if it cannot."""
    if body.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
        )
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        raise ApiError(
            400, "continue_final_message needs a last message that is the assistant's, without calls", param="messages"
        )
    used = "".join(message["content"] for message in messages)
    return next(mark for mark in map(chr, range(0xF8FF, 0xDFFF, -1)) if mark not in used)


@contextmanager
def _template_errors(llm: LLM) -> Iterator[None]:
    """A template that fails does so with these messages: it has been read, and others may do."""
    if llm.template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions", code="no_chat_template")
    try:
        yield
    except ModelError as error:
        reason = str(error).partition("; --raw")[0]  # a flag of the command line
        raise ApiError(400, f"{reason}: use other messages, or /v1/completions", code="template_failed") from None


def read_biases(llm: LLM, body: Sampling) -> dict[str, Bias] | None:
    """`logit_bias` by token id: of a text, each of its tokens gets the bias. ApiError for what is none of these."""
    value = body.logit_bias
    if value is None:
        return None
    pairs = [(_key(name), bias) for name, bias in value.items()] if isinstance(value, dict) else value
    biases: dict[str, Bias] = {}
    room = MAX_BIAS_CHARS
    token: Any
    bias: Any
    for token, bias in pairs:
        if isinstance(token, str):
            room -= len(token)
            if room < 0:
                raise ApiError(400, f"logit_bias: texts of more than {MAX_BIAS_CHARS} characters", param="logit_bias")
            tokens = llm.tokenizer.encode(token, special=False, add_bos=False)
        elif int(token) != token or isinstance(token, bool) or bias is True or isinstance(bias, str):
            raise ApiError(400, "logit_bias: a pair is a token id or a text, and a number or false", param="logit_bias")
        else:
            tokens = [int(token)]
        for name in map(str, tokens):
            biases[name] = biases.get(name, 0.0) + (-math.inf if bias is False else bias)
    return biases


def _key(name: str) -> int | str:
    """A token id, or a text."""
    if re.fullmatch("-?[0-9]+", name) is None:
        return name
    if len(name) > MAX_DIGITS:
        raise ApiError(400, f"logit_bias: token {name[:MAX_DIGITS]}... is not one of the model's", param="logit_bias")
    return int(name)


def encode_texts(
    llm: LLM, texts: Sequence[Input], asked: int | None = None, wanted: int = 0, param: str = "prompt"
) -> list[list[int]]:
    """Tokens of each text, of which the last remain if the request asks for it.

    asked: its truncate_prompt_tokens; wanted: tokens to generate. The token that marks the beginning of a text stays.
    ApiError for a text that is certainly too long, before its tokens are made.
    """
    limit, room = _limit(llm, asked, wanted), Room(llm.context, wanted)
    encoded = []
    for text in texts:
        if isinstance(text, str) and limit is None:
            room.check(llm, text, param=param)
        elif isinstance(text, str) and limit is not None:
            text = llm.tokenizer.end_of(text, max(limit, 1))
            Room.counting(llm).check(llm, text, param=param)
        tokens = llm.tokenizer.encode(text) if isinstance(text, str) else text
        if limit is not None and len(tokens) > limit > 0:
            first = tokens[:1] if isinstance(text, str) and tokens[0] == llm.tokenizer.bos_id else []
            tokens = first + tokens[len(tokens) - limit + len(first) :]
        encoded.append(tokens)
    return encoded


def _limit(llm: LLM, asked: int | None, wanted: int) -> int | None:
    """The most tokens of a prompt; None: nothing is left out. asked -1: what fits with `wanted` tokens to generate."""
    return llm.context - wanted if asked == -1 else asked


def check_ids(llm: LLM, tokens: list[int], param: str) -> None:
    """ApiError for a token that the model does not have."""
    if tokens and max(tokens) >= llm.config.vocab_size:
        vocab = llm.config.vocab_size
        raise ApiError(400, f"{param}: token {max(tokens)} is not one of the model's {vocab} tokens", param=param)


def check_fit(llm: LLM, prompts: list[list[int]], params: SamplingParams | None) -> None:
    """ApiError for a prompt that cannot be answered. params None: nothing is generated."""
    for tokens in prompts:
        check_ids(llm, tokens, "prompt")
        if not tokens:
            raise ApiError(400, "the prompt is empty: it needs at least one token", param="prompt")
        wanted = 0 if params is None else params.max_tokens or 1
        if len(tokens) + wanted > llm.context:
            param = "prompt" if len(tokens) >= llm.context else "max_tokens"
            raise ContextError(len(tokens), wanted, llm.context, param=param)


def check_texts(llm: LLM, texts: list[list[int]]) -> None:
    """ApiError for a text that cannot be embedded."""
    for tokens in texts:
        check_ids(llm, tokens, "input")
        if not tokens:
            raise ApiError(400, "input: a text has no tokens", param="input")
        if len(tokens) > llm.context:
            raise ContextError(len(tokens), 0, llm.context, param="input")


async def echoes_of(llm: LLM, body: CompletionRequest, inputs: list[Input], prompts: list[list[int]]) -> list[Echo]:
    """Beginnings of the answers, one for each; none without `echo`."""
    if not body.echo:
        return []
    echoes = [await echo_of(llm, *pair, body.logprobs) for pair in zip(inputs, prompts, strict=True)]
    return [echo for echo in echoes for _ in range(body.choices)]
