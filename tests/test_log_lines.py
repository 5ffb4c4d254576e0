"""The server's log for a person at a terminal, and the port that is in use."""

from __future__ import annotations

import logging
import re
import socket
import sys
from typing import Any

import pytest

from powerinfer.cli.log_lines import LONGEST, LogLines, is_shown
from powerinfer.cli.serve import _addresses
from powerinfer.config import ServeConfig
from powerinfer.errors import PowerInferError
from powerinfer.serve.server import listen

REQUEST = {"client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 1.2345}


def shown(event: str, level: int = logging.INFO, error: BaseException | None = None, **facts: Any) -> str:
    """A line of the log without its time."""
    record = logging.LogRecord("x", level, "", 0, event, (), (type(error), error, None) if error else None)
    record.facts = facts
    before = dict(facts)
    line = LogLines().format(record)
    assert facts == before, "they are another formatter's, too"
    time, _, rest = line.partition("  ")
    assert len(time) == 8 and time.count(":") == 2
    return rest


@pytest.mark.parametrize(
    ("event", "facts", "line"),
    [
        ("request", REQUEST, "200 POST /v1/completions, 1.23 s"),
        ("request", REQUEST | {"prompt_tokens": 7, "completion_tokens": 5, "request_id": "a"},
            "200 POST /v1/completions, 1.23 s, 7 tokens read, 5 generated"),
        ("request", REQUEST | {"seconds": 0.00123, "dropped_turns": 2},
            "200 POST /v1/completions, 1.2 ms (dropped_turns 2)"),
        ("request", REQUEST | {"body": '{"a":\n1}'}, '200 POST /v1/completions, 1.23 s (body {"a":\\n1})'),
        ("loaded", {"model": "tiny", "seconds": 0.5, "choices": {"isa": "avx2"}}, "tiny is loaded, in 0.50 s"),
        ("unloaded", {"model": "tiny"}, "tiny is unloaded"),
        ("load_failed", {"model": "tiny", "reason": "no memory"}, "tiny cannot be loaded: no memory"),
        ("draining", {"connections": 0}, "the server ends"),
        ("draining", {"connections": 3}, "the server ends; open connections: 3"),
        ("draining", {}, "the server ends"),
        ("a note", {"fields": ["a", "é"], "model": "m"}, 'a note (fields ["a", "é"], model m)'),
        ("request", REQUEST | {"path": "/\n12:00:00  x"}, r"200 POST /\n12:00:00  x, 1.23 s"),
        ("\x1b[2J", {"path": "\x9b"}, "\\x1b[2J (path \\x9b)"),
    ],
)  # fmt: skip
def test_lines(event: str, facts: dict[str, Any], line: str) -> None:
    assert shown(event, **facts) == line


def test_levels_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("odd", logging.WARNING) == "warning: odd"
    text = shown("internal error", logging.ERROR, ValueError("x\x1b" * LONGEST))
    assert text.startswith("error: internal error\n") and "\x1b" not in text and len(text) < 5 * LONGEST
    _, *rest = shown("internal error", logging.ERROR, ValueError("x\n12:00:00  200 GET /")).splitlines()
    assert len(rest) > 1 and all(line.startswith(" " * 10) for line in rest), "no error writes a line of its own"
    assert len(shown("x" * 9 * LONGEST)) < 2 * LONGEST
    for style in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", style)
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        record = logging.LogRecord("x", logging.WARNING, "", 0, "odd", (), None)
        assert LogLines().format(record).startswith("\r\x1b[K")
        assert LogLines().format(record).endswith("\x1b[33mwarning\x1b[0m: odd") is (style == "xterm")


def test_a_block_says_where_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POWERINFER_API_KEY", raising=False)
    block = _addresses("http://h:1", "tiny\x1b, context of 64 tokens", ServeConfig())
    assert block.splitlines()[1] == "tiny\\x1b, context of 64 tokens" and "models" not in block
    assert re.search(r"^  OpenAI's API +http://h:1/v1$", block, re.MULTILINE)
    assert re.search(r"^  API key +any, or none$", block, re.MULTILINE)
    monkeypatch.setenv("POWERINFER_API_KEY", "x" * 32)
    block = _addresses("http://h:1", "9 models", ServeConfig(), [f"m{n}" for n in range(10)])
    assert re.search(r"^  API key +needed$", block, re.MULTILINE)
    assert re.search(r"^  models +m0, m1, .*, m7 and 2 more, see http://h:1/v1/models$", block, re.MULTILINE)
    assert not is_shown(logging.LogRecord("x", 0, "", 0, "listening", (), None))
    assert is_shown(logging.LogRecord("x", 0, "", 0, "request", (), None))


def test_a_port_in_use_leads_to_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        says = rf"port {port}: it is in use.*; --port \d+ is free$"
        with pytest.raises(PowerInferError, match=says) as error:
            listen(ServeConfig(port=port))
        free = int(str(error.value).split()[-3])
        assert free > port
        listen(ServeConfig(port=free)).close()
