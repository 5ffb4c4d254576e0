"""The log of the server, on stderr: one JSON object a line. Prompts and answers are not in it."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

MAX_LOGGED = 16  # things of a kind that one line names

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_logger = logging.getLogger("powerinfer.serve")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is answered, in whose lines it is."""


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, event, and what else is known of it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line["error"] = f"{type(error).__name__}: {error}"[:1000]
            line["traceback"] = "".join(traceback.format_exception(error))[-8000:]
        return json.dumps(line, default=str)


def set_up(
    formatter: logging.Formatter | None = None, is_shown: Callable[[logging.LogRecord], bool] | None = None
) -> None:
    """Send the server's log, and the warnings of the libraries, to stderr. formatter: None: as JSON; is_shown: which
    records, None: all."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter or JsonLines())
    if is_shown is not None:
        handler.addFilter(is_shown)
    logging.getLogger().handlers = [handler]
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every piece that a client who left does not get
    logging.captureWarnings(True)
    _logger.setLevel(logging.INFO)


def log(level: str, event: str, error: BaseException | None = None, **facts: Any) -> None:
    """Log an event with what is known of it; an error with its traceback."""
    if (current_id := request_id.get()) is not None:
        facts.setdefault("request_id", current_id)
    _logger.log(_LEVELS[level], event, extra={"facts": facts}, exc_info=error)


def log_notes(notes: Iterable[str], **facts: Any) -> None:
    """Log how a model was loaded, as a warning what is not as an option says."""
    for note in notes:
        log("warning" if note.startswith("--") else "info", note, **facts)
