"""The program that renders chat templates: questions on standard input, answers on standard output, a JSON line each.

A template is a program in a model file. Jinja's sandbox blocks access to Python's internals, and the system ends this
process if a rendering takes too much time or memory (`_limit`). It imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

MAX_OUTPUT = 1 << 22  # characters, plus a multiple of the request
MAX_GROWTH = 16
MAX_TEMPLATES = 8  # compiled templates kept
OUT_OF_MEMORY = 3  # exit status


class Refused(Exception):
    """The template called raise_exception: it does not take these messages."""


class Limit(Exception):
    """The template goes beyond its limits."""


def environment() -> Any:
    """Jinja as transformers sets it up for chat templates, but lists may grow: some templates append to their own, and
    what they are given is a copy."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks an assistant's text, for training; here only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    env: Any = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return env


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: unlike Jinja's own filter, without escapes for HTML. What filters such as `map`
    yield is a list."""
    if isinstance(x, Iterator):
        x = list(x)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


_now = ""  # of the question


def _strftime_now(format: str) -> str:
    return (datetime.fromisoformat(_now) if _now else datetime.now()).strftime(format)


def _text(template: Any, variables: dict[str, Any], limit: int) -> str:
    parts, length = [], 0
    for part in template.generate(variables):
        length += len(part)
        if length > limit:
            raise Limit(f"it writes more than {limit} characters")
        parts.append(part)
    return "".join(parts)


def answer(compiled: Callable[[str], Any], source: str, variables: dict[str, Any] | None, size: int) -> tuple[str, str]:
    """(kind, text) for a question of `size` bytes; kind: text, refused, failed or limit.

    compiled: the template of a source. variables: None: only compile.
    """
    try:
        template = compiled(source)
        limit = MAX_OUTPUT + MAX_GROWTH * size
        return "text", "" if variables is None else _text(template, variables, limit)
    except Refused as error:
        return "refused", str(error)[:1000]
    except Limit as error:
        return "limit", str(error)
    except (MemoryError, RecursionError):
        return "limit", "it nests or grows too far"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"[:1000]


def _limit(seconds: float, memory: int | None) -> None:
    """Limits of this process: seconds of processor time (0: unlimited), after which the system ends it, and memory."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which has no handler
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if memory is None or (hard != resource.RLIM_INFINITY and memory > hard):
        memory = hard
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(kind: str, text: str, seconds: float = 0.0) -> None:
    """Answer. seconds: of processor time that the question took."""
    sys.stdout.buffer.write(json.dumps((kind, text, seconds)).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    global _now
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores or blocks it passes that on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    try:
        compiled = lru_cache(MAX_TEMPLATES)(environment().from_string)
    except Exception as error:
        _say("broken", f"Jinja cannot be used ({type(error).__name__}: {error})"[:1000])
        return
    for line in sys.stdin.buffer:
        question = json.loads(line)
        _now = question["now"]
        _limit(question["seconds"], question["memory"] + MAX_GROWTH * len(line))
        begin = time.process_time()
        result = answer(compiled, question["source"], question["variables"], len(line))
        _limit(0, None)
        _say(*result, time.process_time() - begin)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
