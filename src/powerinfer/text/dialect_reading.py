"""The dialect of calls that a model was trained on, read off its chat template.

A conversation with calls whose names, keys and values occur nowhere else is rendered; what the template writes around
them are the marks of the dialect. The description counts only if its parser gives back the calls that the template
writes; else a row of `tool_dialects.py` may know the template, and in the end functions are told in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from powerinfer.errors import ModelError, RequestError
from powerinfer.text import tool_dialects, tool_messages
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.marks import HOLE
from powerinfer.text.tool_calls import GENERIC, HARMONY, ToolFormat
from powerinfer.text.tool_parser import ToolDelta
from powerinfer.text.tools import Tool

SECONDS = 3.0  # of processor time for reading a template
_MAX_TEXT = 1 << 17  # characters that it may write for a conversation of some words
_MAX_TURN = 1 << 13  # characters of it for two calls
_MAX_MARKS = 1024  # characters

_NAMES = ("find_marker", "move_marker")
_VALUES: tuple[dict[str, Any], ...] = ({"kone": "vone", "ktwo": "vtwo"}, {"kthree": "vthree"})
_IDS = ("idAAAAAA1", "idBBBBBB2")
_CONTENT, _ASKED, _RESULT = "Words before calls", "Words of a user", "Words of a function"
_TYPED = {"ktext": "two words", "kcount": 17, "kflag": True, "klist": [1, "x"], "kobject": {"z": [2.5, "y"]}}
_KINDS = {"ktext": "string", "kcount": "number", "kflag": "boolean", "klist": "array", "kobject": "object"}
_LINES = {"ktext": "def f():\n    return 1\n"}


def _tool(name: str, *keys: str) -> Tool:
    properties = {key: {"type": _KINDS.get(key, "string")} for key in keys}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    function = {"name": name, "description": "What it does", "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": function})


_TOOLS = [_tool(_NAMES[0], "kone", "ktwo", *_KINDS), _tool(_NAMES[1], "kthree")]
_DOCUMENTS = tool_messages.fill_fields([tool.document for tool in _TOOLS])


def read_dialect(template: ChatTemplate | None) -> ToolFormat:
    """The dialect in which the model with this chat template is told of functions and calls them.

    The first time for a template it is rendered some times, which takes milliseconds.
    """
    return GENERIC if template is None else _read(template.source, template.bos, template.eos)


@lru_cache(32)
def _read(source: str, bos: str, eos: str) -> ToolFormat:
    probe = _CallProbe(ChatTemplate(source, bos, eos, "2026-01-01T00:00:00"))
    row = tool_dialects.calling(source)
    if row is not None and _writes(probe, row):
        return row
    written = _written(probe)
    if written is not None:
        return written
    dialect = tool_dialects.announcing(source)
    if dialect is not None and probe.render(probe.chat(), tools=_DOCUMENTS) is not None:
        return dialect
    return replace(GENERIC, no_system=probe.drops_system)


def _writes(probe: _CallProbe, form: ToolFormat) -> bool:
    """Whether the template writes a call as a row of the table says. Harmony's begins in the header of a message."""
    if form == HARMONY:
        return True
    call = {"id": _IDS[0], "function": {"name": _NAMES[0], "arguments": _VALUES[0]}}
    messages, variables = form.conversation(probe.chat({"role": "assistant", "tool_calls": [call]}), _TOOLS)
    turn = (probe.render(messages, **variables) or "").rpartition(_ASKED)[2]
    marks = ('{"name"',) if form.bare else form.begins
    begin = min((at for mark in marks if (at := turn.find(mark)) >= 0), default=len(turn))
    calls = parsed(replace(form, tools=tuple(_TOOLS)), turn[begin:])[1]
    return [(name, json.loads(arguments)) for name, arguments in calls] == [(_NAMES[0], _VALUES[0])]


def _written(probe: _CallProbe) -> ToolFormat | None:
    """The dialect in which the template writes earlier calls; None: it writes none, or in no way that is understood."""
    for text_arguments, named_ids in ((False, False), (True, False), (False, True)):
        spellings = [_Spelling(text_arguments, content, named_ids) for content in (_CONTENT, "", None)]
        forms = [form for spelling in spellings if (form := _read_spelling(probe, spelling)) is not None]
        if forms:  # what a template writes around a message is in some of them
            return min(forms, key=_length)
    return None


def _length(form: ToolFormat) -> int:
    """Characters of the marks around the calls."""
    return len(form.section + form.call_begin + form.call_end + form.between + form.end)


def _read_spelling(probe: _CallProbe, spelling: _Spelling) -> ToolFormat | None:
    for count in (2, 1):
        text = probe.history(spelling, _NAMES[:count], _VALUES[:count])
        if text is None or any(mark not in text for mark in (_NAMES[0], "kone", "vone", "ktwo", "vtwo")):
            continue
        form = _Reading(probe, spelling, text).form()
        if form is not None:
            return form
    return None


@dataclass(frozen=True)
class _Spelling:
    """Way in which a message with calls is given to the template."""

    text_arguments: bool = False
    content: str | None = ""
    named_ids: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        named = {"named_ids": True} if self.named_ids else {}
        return {"text_arguments": self.text_arguments, "no_content": self.content is None, **named}


class _CallProbe:
    """Renders one template, for as long as that takes little time."""

    def __init__(self, template: ChatTemplate) -> None:
        from powerinfer.text.sandbox import TimeLimit

        self._template, self._limit = template, TimeLimit(SECONDS)

    @staticmethod
    def chat(*more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [{"role": "user", "content": _ASKED}, *more]

    def render(self, messages: Sequence[Mapping[str, Any]], ask: bool = False, **options: Any) -> str | None:
        """The prompt; None if the template does not make one."""
        if self._limit.reached:
            return None
        try:
            text = self._template.render(messages, add_generation_prompt=ask, **options)[0]
        except (RequestError, ModelError):
            return None
        return text if len(text) <= _MAX_TEXT else None

    def history(
        self,
        spelling: _Spelling,
        names: Sequence[str],
        values: Sequence[Mapping[str, Any]],
        ids: Sequence[str] = _IDS,
        more: Sequence[Mapping[str, Any]] = (),
    ) -> str | None:
        """A conversation that ends with calls. more: messages behind them."""
        calls: list[dict[str, Any]] = [
            {"id": ids[at], "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(zip(names, values, strict=True))
        ]
        if spelling.named_ids:
            for at, call in enumerate(calls):
                call["id"] = f"functions.{names[at]}:{at}"
        if spelling.text_arguments:
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        message = {"role": "assistant", "content": spelling.content, "tool_calls": calls}
        return self.render(self.chat(message, *more), tools=_DOCUMENTS)

    def shows_results(self, spelling: _Spelling) -> bool:
        """Whether the template writes what a function returned."""
        call_id = f"functions.{_NAMES[0]}:0" if spelling.named_ids else _IDS[0]
        result = {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _NAMES[0]}
        return _RESULT in (self.history(spelling, _NAMES[:1], _VALUES[:1], more=(result,)) or "")

    @property
    def tells(self) -> bool:
        """Whether the template tells of functions."""
        text = self.render(self.chat(), ask=True, tools=_DOCUMENTS)
        return text is not None and _NAMES[1] in text

    @property
    def needs_whole(self) -> bool:
        """Whether the template fails for a function without a description, or for an object of any kind."""
        schema = {"type": "object", "properties": {"k": {"type": "object"}, "l": {"type": "array"}}}
        bare = {"type": "function", "function": {"name": _NAMES[0], "parameters": schema}}
        return self.render(self.chat(), ask=True, tools=[bare]) is None

    @property
    def drops_system(self) -> bool:
        """Whether a system message does not reach the prompt."""
        text = self.render([{"role": "system", "content": _CONTENT}, *self.chat()], ask=True)
        return (text is None or _CONTENT not in text) and self.render(self.chat(), ask=True) is not None


class _Reading:
    """The description of what one template writes in `text`, a conversation that ends with calls."""

    def __init__(self, probe: _CallProbe, spelling: _Spelling, text: str) -> None:
        self._probe, self._spelling = probe, spelling
        self._plain = probe.render(probe.chat({"role": "assistant", "content": _CONTENT}), tools=_DOCUMENTS)
        self._text = text
        turn = self._turn(text) if self._plain is not None else ""
        self._names = [name for name in _NAMES if name in turn]

    def form(self) -> ToolFormat | None:
        """The description; None if the text is not understood."""
        if self._plain is None or _CONTENT not in self._plain or not self._names:
            return None
        turn = self._turn(self._text)
        if len(turn) > _MAX_TURN:
            return None
        shapes = (self._object, self._named, self._keywords, self._tagged)
        for shape in shapes:
            form = shape(turn)
            if form is None or not form.begins or len("".join(form.marks)) > _MAX_MARKS:
                continue
            if _TAG.search(form.begins[0]):
                form = replace(form, single=len(self._names) == 1, **self._spelling.fields)
                if self._plain.rpartition(_CONTENT)[2].strip().startswith(form.begins[0]):  # it ends all messages
                    form = replace(form, begun_by=(form.section or form.call_begin).strip())
                if self._agrees(form):
                    return self._with_announcement(form)
        return None

    def _turn(self, text: str) -> str:
        """The calls of the last message, without what the template writes around every message."""
        assert self._plain is not None
        before, _, after = self._plain.rpartition(_CONTENT)
        if self._spelling.content == _CONTENT and text.rpartition(_CONTENT)[0].endswith(before[-16:]):
            turn = text.rpartition(_CONTENT)[2]
            closed = _tag_start(after, _common(after, turn))
            if after[closed:].strip():  # the mark that closes a content
                turn, after = turn[closed:], after[closed:]
        else:
            start = _common(before, text)
            turn = text[_tag_start(text, start) :]
        end = _common(turn[::-1], after[::-1])
        turn = turn[: len(turn) - end] + _part_of_tag(turn, len(turn) - end)
        return _THOUGHT.sub("", turn.lstrip())

    # ---- shapes

    def _object(self, turn: str) -> ToolFormat | None:
        """An object with name and arguments."""
        spans = self._objects(turn)
        if len(spans) != len(self._names):
            return None
        fields_read = spans[0][2]
        fields: dict[str, Any] = {}
        if list(fields_read) == [self._names[0]]:
            fields["named_by_key"] = True
        else:
            names = [key for key, value in fields_read.items() if value == self._names[0]]
            arguments = [key for key, value in fields_read.items() if value == _VALUES[0]]
            ids = [key for key in fields_read if key not in (*names, *arguments) and "id" in key]
            if len(names) != 1 or len(arguments) != 1:
                return None
            fields |= {"name_key": names[0], "arguments_key": arguments[0], "id_key": ids[0] if ids else ""}
            fields["id_first"] = bool(ids) and list(fields_read).index(ids[0]) < list(fields_read).index(names[0])
        head, tail = turn[: spans[0][0]], turn[spans[-1][1] :]
        between = turn[spans[0][1] : spans[1][0]] if len(spans) > 1 else None
        if head.rstrip().endswith("[") and tail.lstrip().startswith("]"):
            return ToolFormat("read", section=head.rstrip()[:-1], end=tail.lstrip()[1:].rstrip(), listed=True, **fields)
        return self._marked(head, between, tail, body="object", **fields)

    def _objects(self, turn: str) -> list[tuple[int, int, dict[str, Any]]]:
        """Begin, end and value of the objects that are calls."""
        spans, at = [], 0
        while (at := turn.find("{", at)) >= 0:
            try:
                value, end = _DECODER.raw_decode(turn, at)
            except (ValueError, RecursionError):
                at += 1
                continue
            if any(value.get(name) or name in value.values() for name in self._names):
                spans.append((at, end, value))
            at = end
        return spans

    def _named(self, turn: str) -> ToolFormat | None:
        """A name, and arguments as an object."""
        parts = []
        for name, arguments in zip(self._names, _VALUES, strict=False):
            begin = turn.find("{", turn.find(name))
            try:
                value, end = _DECODER.raw_decode(turn, begin) if begin >= 0 else (None, 0)
            except (ValueError, RecursionError):
                return None
            if value != arguments:
                return None
            at = turn.rfind(name, 0, begin)
            parts.append((at, at + len(name), begin, end))
        return self._with_name(turn, parts, body="json")

    def _keywords(self, turn: str) -> ToolFormat | None:
        """A call in Python."""
        parts = []
        for name in self._names:
            at = turn.find(name + "(")
            begin = at + len(name) + 1
            end = turn.find(")", begin)
            if at < 0 or end < 0:
                return None
            parts.append((at, begin - 1, begin, end + 1))
        head, tail = turn[: parts[0][0]], turn[parts[-1][3] :].rstrip()
        fields: dict[str, Any] = {"body": "keywords", "name_end": "("}
        if head.rstrip().endswith("[") and tail.lstrip().startswith("]"):
            return ToolFormat("read", section=head.rstrip()[:-1], end=tail.lstrip()[1:], listed=True, **fields)
        between = turn[parts[0][3] : parts[1][0]] if len(parts) > 1 else "\n"
        return ToolFormat("read", section=head, end=tail, between=between, **fields) if between.isspace() else None

    def _tagged(self, turn: str) -> ToolFormat | None:
        """A name, and arguments between marks."""
        places = [turn.find(text) for text in (self._names[0], "kone", "vone", "ktwo", "vtwo")]
        if -1 in places or places != sorted(places):
            return None
        name, key, value, key_two, value_two = places
        behind_name, between = turn[name + len(self._names[0]) : key], turn[value + 4 : key_two]
        shared = between[len(between) - _common(between[::-1], behind_name[::-1]) :]
        begin = max(shared.rfind("<"), shared.rfind("["))
        if begin < 0:
            return None
        key_begin = shared[begin:]
        value_end = between[: -len(key_begin)].rstrip()
        rest = turn[value_two + 4 :]
        if not value_end.strip() or not rest.startswith(value_end):
            return None
        if turn[key + 4 : value] != turn[key_two + 4 : value_two]:
            return None
        name_end = behind_name[: -len(key_begin)]
        last = name if len(self._names) < 2 else turn.find(self._names[1], value_two)
        parts = [(name, name + len(self._names[0]), key - len(key_begin), value_two + 4 + len(value_end))]
        if last > name:
            value_three = turn.find("vthree", last)
            key_three = turn.find("kthree", last)
            if value_three < 0 or key_three < 0:
                return None
            end = value_three + len("vthree") + len(value_end)
            parts.append((last, last + len(self._names[1]), key_three - len(key_begin), end))
        key_end, words = self._types(turn[key + 4 : value])
        lines = self._probe.history(self._spelling, _NAMES[:1], [_LINES]) or ""
        marks = ("<![CDATA[", "]]>") if "<![CDATA[" in self._turn(lines) else ("", "")
        typed = self._probe.history(self._spelling, _NAMES[:1], [_TYPED]) or ""
        literals = str(_TYPED["kobject"]) in self._turn(typed)
        form = self._with_name(
            turn, parts, body="tagged", key_begin=key_begin, key_end=key_end, value_end=value_end, type_words=words,
            value_marks=marks, literals=literals,
        )  # fmt: skip
        return None if form is None else form if name_end.strip() else replace(form, name_end=name_end)

    def _types(self, key_end: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Text between a key and its value, with a hole for the word by which a value's type is told."""
        text = self._probe.history(self._spelling, _NAMES[:1], [_TYPED]) or ""
        turn = self._turn(text)
        words_by_kind: dict[str, str] = {}
        for key, kind in _KINDS.items():
            start = turn.find(key) + len(key)
            shown = _TYPED[key] if kind == "string" else json.dumps(_TYPED[key])
            end = turn.find(str(shown), start)
            if end < 0 or end - start > 128:
                return key_end, ()
            words_by_kind[kind] = turn[start:end]
        texts = list(words_by_kind.values())
        if len(set(texts)) == 1:
            return key_end, ()
        begin = min(_common(texts[0], text) for text in texts)
        begin = max(texts[0].rfind(mark, 0, begin) + 1 for mark in "\"'= <") if begin else 0
        end = min(_common(texts[0][begin:][::-1], text[begin:][::-1]) for text in texts)
        end = max((size for size in range(1, end + 1) if texts[0][-size] in "\"'> "), default=0)
        words = tuple((kind, text[begin : len(text) - end]) for kind, text in words_by_kind.items())
        if not end or any(not word or not word.isalnum() for _, word in words):
            return key_end, ()
        return texts[0][:begin] + HOLE + texts[0][len(texts[0]) - end :], words

    # ---- marks

    def _with_name(self, turn: str, parts: Sequence[tuple[int, int, int, int]], **fields: Any) -> ToolFormat | None:
        """The description, given where names begin and end and arguments begin and end."""
        ends = [_holes(turn[end:begin], _IDS[at]) for at, (_, end, begin, _) in enumerate(parts)]
        if len(ends) > 1 and ends[0] != ends[1]:
            ends = [_DIGITS.sub(HOLE, text) for text in ends]
            if ends[0] != ends[1]:
                return None
        elif HOLE not in ends[0]:
            ends = [_COUNTER.sub(HOLE, ends[0], count=1)]
        head = _holes(turn[: parts[0][0]], _IDS[0])
        between = _holes(turn[parts[0][3] : parts[1][0]], _IDS[1]) if len(parts) > 1 else None
        if self._names[0] in head:  # the name is told before, too
            return None
        form = self._marked(head, between, turn[parts[-1][3] :], name_end=ends[0], **fields)
        if form is None:
            return None
        prefix = _PREFIX.search(form.call_begin)
        if prefix is not None and prefix.start():
            return replace(form, call_begin=form.call_begin[: prefix.start()], name_begin=prefix[0])
        return form

    def _marked(self, head: str, between: str | None, tail: str, **fields: Any) -> ToolFormat | None:
        """The description, given what is before, between and behind the calls."""
        tail = tail.rstrip()
        if between is None:
            return ToolFormat("read", call_begin=head, call_end=tail, **fields)
        shared = head[len(head) - _common(head[::-1], between[::-1]) :]
        starts = [at for mark in "<[" if (at := shared.find(mark)) >= 0]
        call_begin = shared[min(starts) :] if starts else ""
        section = head[: len(head) - len(call_begin)]
        gap = between[: len(between) - len(call_begin)]
        length = _common(gap, tail)
        while length and (_is_in_tag(gap, length) or _is_in_tag(tail, length)):
            length -= 1
        call_end = gap[:length].rstrip()
        if not section.strip() and not call_begin.strip():
            return None
        return ToolFormat(
            "read",
            section=section.lstrip() if section.strip() else "",
            call_begin=call_begin,
            call_end=call_end,
            between=gap[len(call_end) :],
            end=tail[len(call_end) :],
            **fields,
        )

    # ---- checks

    def _with_announcement(self, form: ToolFormat) -> ToolFormat:
        """The description with how functions are told, and ids."""
        if not self._probe.tells:
            form = replace(form, announced_in="words", no_system=self._probe.drops_system)
        long_id = self._probe.history(self._spelling, _NAMES[:1], _VALUES[:1], ["call_" + _IDS[0]])
        return replace(form, short_ids=long_id is None and not form.named_ids, whole_documents=self._probe.needs_whole)

    def _agrees(self, form: ToolFormat) -> bool:
        """Whether the parser gives back what the template writes: two calls, values of all types, no argument."""
        count = len(self._names)
        cases: list[tuple[Sequence[str], Sequence[dict[str, Any]]]] = [
            (_NAMES[:count], _VALUES[:count]), (_NAMES[:1], [_TYPED]), (_NAMES[:1], [_LINES])
        ]  # fmt: skip
        if not self._probe.shows_results(self._spelling):
            return False
        for names, values in cases:
            text = self._probe.history(self._spelling, names, values)
            if text is None:
                return False
            turn = self._turn(text)
            content, calls = parsed(replace(form, tools=tuple(_TOOLS)), form.prompt_end + turn)
            if content.strip() or [name for name, _ in calls] != list(names):
                return False
            if [json.loads(arguments) for _, arguments in calls] != list(values):
                return False
        return True


def parsed(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of a whole answer, and its calls."""
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    parser = form.parser()
    for delta in [*parser.push(text), *parser.finish()]:
        if isinstance(delta, str):
            texts.append(delta)
        elif isinstance(delta, ToolDelta) and delta.name is not None:
            calls.append((delta.name, delta.arguments))
        elif isinstance(delta, ToolDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return "".join(texts), calls


_DECODER = json.JSONDecoder()
_TAG = re.compile(r"[<>\[\]|{}`]")
_DIGITS = re.compile(r"\d+")
_COUNTER = re.compile(r"(?<=[:\"])[01](?=[<\"])")
_PREFIX = re.compile(r"[A-Za-z_]+\.$")  # a namespace before a function's name
_THOUGHT = re.compile(r"\A(?:<[^<>]{0,40}(?:think|THINK)[^<>]{0,40}>\s*){1,2}")


def _holes(text: str, identity: str) -> str:
    return text.replace(identity, HOLE)


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    length = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        length += 1
    return length


def _is_in_tag(text: str, at: int) -> bool:
    """Whether a position is within a tag."""
    return any(text.rfind(begin, 0, at) > text.rfind(end, 0, at) for begin, end in ("<>", "[]"))


def _tag_start(text: str, at: int) -> int:
    """The position, or where the tag begins that it is in."""
    begin = max(text.rfind("<", 0, at), text.rfind("[", 0, at))
    return begin if begin >= 0 and _is_in_tag(text, at) else at


def _part_of_tag(turn: str, at: int) -> str:
    """The rest of the tag that a position is in."""
    if not _is_in_tag(turn, at):
        return ""
    ends = [end for mark in ">]" if (end := turn.find(mark, at)) >= 0]
    return turn[at : min(ends) + 1] if ends else ""
