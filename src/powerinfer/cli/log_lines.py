"""The log of the server for a person at a terminal: a short line for each event."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from textwrap import indent
from typing import Any

from powerinfer.cli.common import printable
from powerinfer.cli.screen import Style, styled

LONGEST = 2000  # characters of an event
HIDDEN = frozenset(("listening",))  # what is shown beside the log
_LEVELS: dict[str, Style] = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}

Facts = dict[str, Any]


class LogLines(logging.Formatter):
    """A record as the time of day and what has happened."""

    def format(self, record: logging.LogRecord) -> str:
        facts: Facts = {**getattr(record, "facts", {})}
        event = record.getMessage()
        shown = EVENTS[event](facts) if event in EVENTS else event
        facts.pop("request_id", None)
        more = ", ".join(f"{name} {_plain(value)}" for name, value in facts.items())
        text = f"{shown} ({more})" if more else shown
        line = _shortened(printable(text.replace("\n", "\\n")))  # no request writes a line of its own
        if style := _LEVELS.get(record.levelname):
            line = f"{styled(record.levelname.lower(), style, sys.stderr)}: {line}"
        if record.exc_info and (error := record.exc_info[1]) is not None:
            trace = _shortened(printable("".join(traceback.format_exception(error)).rstrip()), -4 * LONGEST)
            line += "\n" + indent(trace, INDENT, lambda _: True)  # a message may have lines that look like records
        moment = styled(time.strftime("%H:%M:%S", time.localtime(record.created)), "dim", sys.stderr)
        # over the bar of a model that is being loaded
        return f"{CLEAR if sys.stderr.isatty() else ''}{moment}  {line}"


CLEAR = "\r\x1b[K"
INDENT = " " * 10  # as wide as the time of day


def is_shown(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line."""
    return record.getMessage() not in HIDDEN


def _request(facts: Facts) -> str:
    facts.pop("client", None)
    method, path, status = facts.pop("method", ""), facts.pop("path", ""), facts.pop("status", "")
    read, written = facts.pop("prompt_tokens", None), facts.pop("completion_tokens", None)
    tokens = "" if read is None else f", {read} tokens read" + (f", {written} generated" if written else "")
    return f"{status} {method} {path}, {_seconds(facts)}{tokens}"


def _loaded(facts: Facts) -> str:
    facts.pop("choices", None)
    return f"{facts.pop('model', 'the model')} is loaded, in {_seconds(facts)}"


def _draining(facts: Facts) -> str:
    count = facts.pop("connections", 0)
    return "the server ends" + (f"; open connections: {count}" if count else "")


def _load_failed(facts: Facts) -> str:
    return f"{facts.pop('model', 'the model')} cannot be loaded: {facts.pop('reason', '')}"


EVENTS: Mapping[str, Callable[[Facts], str]] = {
    "request": _request,
    "loaded": _loaded,
    "unloaded": lambda facts: f"{facts.pop('model', 'the model')} is unloaded",
    "draining": _draining,
    "load_failed": _load_failed,
}
"""Text for an event, by its name; facts that it takes are not listed behind it."""


def _seconds(facts: Facts) -> str:
    seconds = facts.pop("seconds", 0.0)
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _shortened(text: str, most: int = LONGEST) -> str:
    """The begin of a long text; of a negative number of characters the end."""
    return text if len(text) <= abs(most) else text[:most] + " ..." if most > 0 else "... " + text[most:]
