"""Multiple-choice tasks: items from the files in which they are published, in the words that lm-eval gives a model.

A file's items are recognised by their fields: HellaSwag and ARC as published, the JSON of LLM-Adapters
(arXiv 2304.01933), and {"context" or "question", "choices", "answer"} for anything else. Files are checked strictly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.json_file import parse_json, read_limited
from powerinfer.formats.mapped import shown
from powerinfer.text.tokenizer import valid_unicode

MAX_BYTES = 1 << 27
MAX_CHOICES = 64


@dataclass(frozen=True)
class Item:
    """A question: what the model reads, the texts of which one continues it behind a space, and the right one's index.

    where: the file and the item's number in it, from 1.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    place: str


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """The items of a file, JSON lines or one JSON list; limit: only that many.

    RequestError, which names the item, if it cannot be read, or holds something else.
    """
    try:
        items = [_item(value, place) for value, place in _values(path, limit)]
    except ModelError as error:
        raise RequestError(str(error)) from None
    if not items:
        raise RequestError(f"{path} has no items")
    return items


def _values(path: Path, limit: int | None) -> Iterator[tuple[Any, str]]:
    """Values of a file, each with words for where it stands."""
    raw = read_limited(path, MAX_BYTES, pipe=True).removeprefix(b"\xef\xbb\xbf")
    if raw.lstrip()[:1] == b"[":
        for number, value in enumerate(parse_json(raw, str(path))[:limit], 1):
            yield value, f"{path}, item {number}"
        return
    number = 0
    for line in raw.splitlines():
        if line.strip() and (limit is None or number < limit):
            number += 1
            yield parse_json(line, f"{path}, item {number}"), f"{path}, item {number}"


def _item(value: Any, place: str) -> Item:
    if type(value) is not dict:
        raise RequestError(f"{place}: {shown(value)} is not a JSON object")
    for names, read in _FORMATS:
        if names <= value.keys():
            try:
                context, choices, answer = read(value)
            except _ItemError as wrong:
                raise RequestError(f"{place}: {wrong}") from None
            return _checked(context, choices, answer, place)
    formats = "; ".join(", ".join(sorted(names)) for names, _ in _FORMATS)
    raise RequestError(f"{place}: the fields {shown(', '.join(value))} are those of no known task ({formats})")


def _checked(context: str, choices: list[str], answer: int, place: str) -> Item:
    if not context.strip():
        raise RequestError(f"{place}: there is no text before the choices")
    if not 2 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"{place}: it has {len(choices)} choices, not 2 to {MAX_CHOICES}")
    if not all(choice.strip() for choice in choices):
        raise RequestError(f"{place}: a choice is empty")
    if not 0 <= answer < len(choices):
        raise RequestError(f"{place}: the answer is number {answer} of {len(choices)} choices, counted from 0")
    return Item(valid_unicode(context), tuple(map(valid_unicode, choices)), answer, place)


# ---------------------------------------------------------------- the formats


class _ItemError(Exception):
    """Error in an item."""


def _text(value: dict[str, Any], name: str) -> str:
    if type(value.get(name)) is not str:
        raise _ItemError(f"{name} is {shown(value.get(name))}, not a text")
    return str(value[name])


def _texts(value: dict[str, Any], name: str) -> list[str]:
    texts = value.get(name)
    if type(texts) is not list or not all(type(one) is str for one in texts):
        raise _ItemError(f"{name} is {shown(texts)}, not a list of texts")
    return texts


def _integer(value: dict[str, Any], name: str) -> int:
    """A number, which may be written as a text: that is how HellaSwag's label is in some copies."""
    number = value[name]
    if type(number) is str and re.fullmatch("[0-9]{1,3}", number):
        return int(number)
    if type(number) is not int:
        raise _ItemError(f"{name} is {shown(number)}, not a whole number")
    return number


Read = Callable[[dict[str, Any]], tuple[str, list[str], int]]
"""An item's fields -> its context, choices and answer."""


def _hellaswag(value: dict[str, Any]) -> tuple[str, list[str], int]:
    context = f"{_text(value, 'ctx_a')} {_text(value, 'ctx_b').capitalize()}"
    endings = [_strip_brackets(ending) for ending in _texts(value, "endings")]
    return _strip_brackets(f"{_text(value, 'activity_label')}: {context}"), endings, _integer(value, "label")


def _strip_brackets(text: str) -> str:
    """Text of WikiHow without the marks that were left in it, as lm-eval cleans it."""
    *marked, rest = text.strip().replace(" [title]", ". ").split("]")
    parts = (part.partition("[")[0] if "[" in part else f"{part}]" for part in marked)
    return ("".join(parts) + rest).replace("  ", " ")


def _adapters(value: dict[str, Any]) -> tuple[str, list[str], int]:
    """Instruction: "... to the question: (question) Answer1: (choice) Answer2: (choice) ... Answer format: ..." """
    answer = re.fullmatch("([a-z]{1,16})([0-9]{1,2})", _text(value, "answer"))
    if answer is None:
        raise _ItemError(f"answer is {shown(value['answer'])}, not like answer1 or solution1")
    word = answer[1]
    _, colon, rest = _text(value, "instruction").partition("to the question:")
    body, formatted, _ = rest.rpartition("Answer format:")
    if not colon or not formatted:
        raise _ItemError('instruction has not the form "... to the question: ... Answer format: ..."')
    question, *parts = re.split(rf"(?:^|\s){word}([0-9]{{1,2}}):", body, flags=re.IGNORECASE)
    if parts[::2] != [str(number) for number in range(1, len(parts) // 2 + 1)]:
        raise _ItemError(f"its choices are not {word}1, {word}2 and so on: {shown(', '.join(parts[::2]))}")
    return _question(question.strip()), [choice.strip() for choice in parts[1::2]], int(answer[2]) - 1


def _question(text: str) -> str:
    """A question as lm-eval asks it in PIQA and ARC."""
    return f"Question: {text}\nAnswer:" if text else ""


def _arc(value: dict[str, Any]) -> tuple[str, list[str], int]:
    """Item of ARC as published, or as the hub has it, where choices are two lists."""
    asked, choices = value["question"], value.get("choices")
    if type(asked) is dict:
        stem, choices = _text(asked, "stem"), asked.get("choices")
    else:
        stem = _text(value, "question")
    if type(choices) is list and all(type(one) is dict for one in choices):
        choices = {name: [_text(one, name) for one in choices] for name in ("text", "label")}
    if type(choices) is not dict:
        raise _ItemError(f"choices are {shown(choices)}, not texts with labels")
    texts, labels, key = _texts(choices, "text"), _texts(choices, "label"), _text(value, "answerKey")
    if len(texts) != len(labels) or labels.count(key) != 1:
        raise _ItemError(f"answerKey {shown(key)} is not one of the labels {shown(', '.join(labels))}")
    return _question(stem), texts, labels.index(key)


def _generic(value: dict[str, Any]) -> tuple[str, list[str], int]:
    context = _text(value, "context" if "context" in value else "question")
    choices = _texts(value, "choices")
    if type(value["answer"]) is not str:
        return context, choices, _integer(value, "answer")
    if choices.count(value["answer"]) != 1:
        raise _ItemError(f"the answer {shown(value['answer'])} is not one of its choices")
    return context, choices, choices.index(value["answer"])


_FORMATS: list[tuple[set[str], Read]] = [
    ({"activity_label", "ctx_a", "ctx_b", "endings", "label"}, _hellaswag),
    ({"instruction", "answer"}, _adapters),
    ({"question", "answerKey"}, _arc),
    ({"context", "choices", "answer"}, _generic),
    ({"question", "choices", "answer"}, _generic),
]
