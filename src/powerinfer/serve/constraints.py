"""Constraints of answers, and the functions a model may call: fields of OpenAI, llama-server and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from powerinfer.errors import RequestError
from powerinfer.runtime.grammar import refusal
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.logs import MAX_LOGGED, log
from powerinfer.serve.schema import ChatRequest, Sampling, template_options
from powerinfer.text.dialect_reading import read_dialect
from powerinfer.text.grammar import Grammar, LazyGrammar, json_text, response_format
from powerinfer.text.tool_calls import ToolFormat, reasoning_format
from powerinfer.text.tools import Tool, ToolChoice, read_tool_choice, read_tools

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.params import SamplingParams


@dataclass(frozen=True)
class Tools:
    """The functions of a request; form: how the model writes calls, None: it is to call nothing; reads: how its answer
    is read, None: its text is the answer."""

    tools: list[Tool]
    choice: ToolChoice
    form: ToolFormat | None
    reads: ToolFormat | None


def read_grammar(body: Sampling) -> Grammar | None:
    """The grammar that an answer's text must match; None: anything. ApiError for more than one such field."""
    grammars = {name: grammar for name, grammar in _grammars(body).items() if grammar is not None}
    if len(grammars) > 1:
        names = ", ".join(grammars)
        raise ApiError(400, f"{names} exclude each other: give one", param=next(iter(grammars)))
    return next(iter(grammars.values()), None)


def _grammars(body: Sampling) -> dict[str, Grammar | None]:
    values: dict[str, Any] = {name: getattr(body, name) for name in _FIELDS}
    grammars: dict[str, Grammar | None] = {}
    for name, value in values.items():
        try:
            grammars[name] = None if value in (None, "") else _FIELDS[name](value)
        except RequestError as error:
            raise ApiError(400, str(error), param=name) from None
    return grammars


def _structured(fields: Mapping[str, Any]) -> Grammar | None:
    """vLLM's structured_outputs."""
    makers = {"json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.gbnf}
    named = {name: value for name, value in fields.items() if value not in (None, False)}
    if not named:
        return None
    (name, value), *more = named.items()
    if more or name not in (*makers, "json_object"):
        raise RequestError("structured_outputs takes one of json, regex, choice, grammar and json_object")
    return Grammar.json_object() if name == "json_object" else makers[name](value)


_FIELDS: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": response_format,
    "json_schema": Grammar.json_schema,
    "grammar": Grammar.gbnf,
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": Grammar.gbnf,
    "structured_outputs": _structured,
}


def functions(tools: Sequence[dict[str, Any]], *kinds: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The functions among the tools of a request, with their places. kinds: their types.

    Others are a server's own, or what a client has beside functions: they are left out, and the log names their types.
    """
    offered = [(at, tool) for at, tool in enumerate(tools) if tool.get("type") in kinds or not _typed(tool)]
    other_types = {tool["type"][:64] for tool in tools if _typed(tool) and tool["type"] not in kinds}
    if other_types:
        log("warning", "tools that are no functions are left out", types=sorted(other_types)[:MAX_LOGGED])
    yield from offered


def _typed(tool: Mapping[str, Any]) -> bool:
    return isinstance(tool.get("type"), str)


def read_chat_tools(llm: LLM, body: ChatRequest) -> Tools:
    """The functions of a chat. ApiError or RequestError if they are malformed or this model cannot have any."""
    try:
        tools = read_tools([tool for _, tool in functions(body.tools or [], "function")])
    except RequestError as error:
        raise ApiError(400, str(error), param="tools") from None
    try:
        choice = read_tool_choice(body.tool_choice, tools)
    except RequestError as error:
        raise ApiError(400, str(error), param="tool_choice") from None
    dropped = [f"{tool.name}: {what}" for tool in tools for what in tool.dropped]
    if dropped:
        log("warning", "schemas are not enforced as a whole", left_out=dropped[:MAX_LOGGED], count=len(dropped))
    if choice.kind == "none":
        return Tools(tools, choice, None, reasoning_format(_template(llm)))
    parallel, required = body.parallel_tool_calls is not False, choice.kind != "auto"
    form = replace(_format(llm), parallel=parallel, required=required, tools=tuple(tools))
    if form.announced_in == "words" and form.history == "words":
        _say_generic(_template(llm))
    return Tools(tools, choice, form, form)


def chat_prompt(
    llm: LLM, conversation: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None, tools: Tools | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for the chat template. variables: the request's chat_template_kwargs."""
    messages, options = list(conversation), template_options(variables)
    shown = tools.tools if tools is not None and tools.form is not None else []
    called = shown or any("tool_calls" in message or message["role"] == "tool" for message in messages)
    form = _format(llm, bool(shown)) if called else reasoning_format(_template(llm))
    if form is not None:
        messages, more = form.conversation(messages, shown)
        options |= more
    return messages, options


def constrained(llm: LLM, body: Sampling, params: SamplingParams, tools: Tools | None = None) -> SamplingParams:
    """The parameters, with what an answer must match."""
    wanted = read_grammar(body)
    if tools is None or tools.reads is None:
        return params if wanted is None else replace(params, grammar=wanted)
    form, special = tools.reads, _special_marks(llm, tools.reads)
    grammar: Grammar | LazyGrammar | None
    if tools.form is None:
        json_asked = wanted is not None and wanted.kind == "json_schema"
        grammar = form.grammar([], ToolChoice("required"), special, instead=wanted) if json_asked else wanted
    elif tools.choice.kind != "auto":
        if wanted is not None and body.response_format is None:  # which is of texts, and there will be none
            raise ApiError(400, "an answer that must be a call has no other format", param="tool_choice")
        grammar = form.grammar(tools.tools, tools.choice, special)
    elif wanted is not None:
        grammar = form.grammar(tools.tools, ToolChoice("required"), special, instead=wanted)
    else:
        grammar = form.lazy_grammar(tools.tools, special)
    return replace(params, grammar=grammar, skip_special_tokens=not special)


def wrong_tool(tools: Sequence[Tool]) -> ApiError | None:
    """The refusal of the first function whose schema no grammar can be made of."""
    for at, tool in enumerate(tools):
        error = refusal(Grammar("json_schema", json_text(tool.parameters, "parameters")))
        if error is not None:
            return ApiError(400, f"tools[{at}], {tool.name}: {error}", param=f"tools[{at}]")
    return None


def _template(llm: LLM) -> str | None:
    return llm.template.source if llm.template is not None else None


def _format(llm: LLM, with_tools: bool = True) -> ToolFormat:
    """The dialect of the model's calls; told: of its template for chats with tools."""
    template = llm.template.tool_template if with_tools and llm.template is not None else llm.template
    return read_dialect(template).ended_by([llm.tokenizer.token_text(token) for token in llm.tokenizer.eos_ids])


@lru_cache(32)
def _say_generic(template: str | None) -> None:
    """A line in the log, once for a template."""
    log("warning", "the chat template has no tool calls that are understood: functions are told in words")


def _special_marks(llm: LLM, form: ToolFormat) -> dict[str, int]:
    """Ids of the special tokens of this model that are in the marks of a format."""
    texts = {llm.tokenizer.token_text(token): token for token in llm.tokenizer.special_ids}
    marks = "\0".join(form.marks)
    return {text: token for text, token in texts.items() if text and text in marks}
