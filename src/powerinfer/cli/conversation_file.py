"""A conversation as a JSON file: {"messages": [{"role": ..., "content": ...}, ...]}, as `chat --json` prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.json_file import Length, checked, parse_json, read_limited
from powerinfer.formats.prepared import write_small
from powerinfer.text.tokenizer import valid_unicode

LARGEST = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Length(LARGEST)]


@dataclass(frozen=True)
class _Conversation:
    extra_fields = True  # what else `chat --json` prints

    messages: Annotated[list[_Message], Length(1 << 20)]

    def __post_init__(self) -> None:
        roles = [message.role for message in self.messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise ValueError("the messages are not turns of user and assistant, after at most one of system")


def save(path: Path, messages: Sequence[dict[str, str]]) -> None:
    """Write a conversation, whole or not at all. RequestError if it cannot be; no other file is overwritten."""
    path = _resolved(path)
    if path.exists():
        try:
            load(path)
        except PowerInferError:
            raise RequestError(f"{path} is there and is no conversation: give another name") from None
    if not path.parent.is_dir():
        raise RequestError(f"there is no folder {path.parent}")
    try:
        write_small(path, json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1).encode() + b"\n")
    except OSError as error:
        raise RequestError(f"cannot write {path} ({error.strerror or error})") from None


def load(path: Path) -> list[dict[str, str]]:
    """The messages of a conversation. ModelError or RequestError if the file is none."""
    path = _resolved(path)
    conversation = checked(_Conversation, parse_json(read_limited(path, LARGEST), str(path)), str(path))
    return [asdict(_Message(message.role, valid_unicode(message.content))) for message in conversation.messages]


def _resolved(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(f"{path} is no path ({error})") from None
