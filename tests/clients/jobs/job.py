"""The prompts of the Python clients' jobs, and how these run: `python JOB.py URL`; stand_in.py reads the scripts."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]
MODEL = "stand-in"
WORD = f"word{secrets.token_hex(4)}"
PROMPT = (
    'Read notes.txt. SCRIPT [{"think": "I need it.", "call": "read_file", "arguments": {"path": "notes.txt"}}, '
    '{"think": "That is it.", "say": "It says WORD, yes."}]'
)
PERSON_PROMPT = 'Who? SCRIPT [{"say": "{\\"name\\": \\"Jo\\", \\"age\\": 3}"}]'
PERSON_CALL_PROMPT = 'Who? SCRIPT [{"call": "Person", "arguments": {"name": "Jo", "age": 3}}]'
ANSWER = f"It says {WORD}, yes."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Where the file is"}},
    "required": ["path"],
    "additionalProperties": False,
}


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Where the file is
    """
    assert str(path) == "notes.txt", path
    return f"code word: {WORD}"


def run(*jobs: Callable[[], Any]) -> None:
    """Do all jobs, each of which returns the model's answer after the result, or None where it checks by itself."""
    failed = 0
    with asyncio.Runner() as runner:  # the clients keep connections of its loop
        for job in jobs:
            try:
                answer = runner.run(job()) if inspect.iscoroutinefunction(job) else job()
                if answer is not None and answer != ANSWER:
                    raise AssertionError(f"the answer is {answer!r}, not {ANSWER!r}")
                print(f"ok      {job.__name__}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  {job.__name__}", flush=True)
                traceback.print_exc()
    sys.exit(failed > 0)
