"""Talk with a model; earlier turns stay in the KV cache.

Each line is a message. /reset clears the conversation, /system TEXT sets the system message and clears it too,
/help lists the commands, /exit or Ctrl-D ends. Ctrl-C ends an answer and keeps what was generated.

JSON: messages (role, content) and turns, each like an answer of `run`; for a sparse model sparsity, as there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import (
    Output,
    checked_text,
    config_flags,
    config_from,
    demonstration_note,
    model_flag,
    open_llm,
    sparsity_summary,
    with_model_defaults,
)
from powerinfer.cli.run import answer, ended_by
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.formats.chat import NEXT_TURN, plain_template
from powerinfer.runtime.params import SamplingParams

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM

Message = dict[str, str]

HELP = "/reset clears the conversation  /system TEXT sets the system message  /exit ends  /help shows this"


def configure(parser: argparse.ArgumentParser) -> None:
    model_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    config_flags(parser, SamplingParams, "sampling", {"max_tokens": None})
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    params = config_from(args, SamplingParams)
    with open_llm(args.model, config_from(args, EngineConfig), out, _check_template) as llm:
        demonstration_note(args.model, out)
        conversation = Conversation(llm, with_model_defaults(params, llm, args), out, args.system)
        if conversation.interactive:
            out.note(HELP)
        while (line := conversation.read()) is not None:
            if not conversation.handle(line):
                break
        sparsity = sparsity_summary(llm)
        document = {"messages": conversation.messages, "turns": conversation.turns}
        out.document({**document, **({"sparsity": sparsity} if sparsity else {})})
    return 0


def _check_template(checkpoint: Checkpoint) -> None:
    """ModelError if the model's template fails, RequestError if it takes no conversation."""
    template = checkpoint.chat_template()
    if template is not None:
        template.render([{"role": "user", "content": "?"}])


class Conversation:
    """The messages so far, and the handling of input lines."""

    def __init__(self, llm: LLM, params: SamplingParams, out: Output, system: str | None) -> None:
        self.messages: list[Message] = []
        self.turns: list[dict[str, Any]] = []
        self.interactive = sys.stdin.isatty()
        self._llm = llm
        self._params = params
        self._out = out
        self._system = system
        self._plain = llm.template is None
        if self._plain:
            llm.template = plain_template(llm.tokenizer)
            self._params = dataclasses.replace(params, stop=(*params.stop, NEXT_TURN))
            out.note('this model has no chat template: turns are written as lines of "User:" and "Assistant:"')
        self._reset()
        if self.interactive:
            import contextlib

            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() a line editor and a history

            if llm.template is not None:  # while the user types
                threading.Thread(target=llm.template.prepare, daemon=True).start()

    def _reset(self) -> None:
        self.messages[:] = [] if self._system is None else [{"role": "system", "content": self._system}]

    def read(self) -> str | None:
        """The next line; None at the end of input."""
        try:
            line = input("> " if self.interactive and not self._out.json_mode else "")
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise RequestError("the input is not UTF-8 text") from None
        return checked_text(line, "the input")

    def handle(self, line: str) -> bool:
        """Act on a line; False when it ends the conversation."""
        command, _, rest = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self._reset()
        elif command == "/system":
            self._system = rest.strip() or None
            self._reset()
        elif command == "/help":
            self._out.note(HELP)
        elif command.startswith("/"):
            self._out.note(f"no command {command}; {HELP}")
        elif command:
            self._turn(line)
        return True

    def _turn(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt = self._llm.encode_chat(asked)
            room = self._llm.context - len(prompt)
            if room < 1:
                raise RequestError(f"the conversation of {len(prompt)} tokens fills the context; /reset")
            params = dataclasses.replace(self._params, max_tokens=min(self._params.max_tokens or room, room))
            _, document = answer(self._llm.stream(prompt, params), self._out, trim=self._plain)
        except RequestError as error:  # the conversation continues without this line
            self._out.note(f"powerinfer: {error}")
            return
        self._out.text("\n")
        if document["finish_reason"] == "length":
            full = params.max_tokens == room
            self._out.note("(the context is full; /reset)" if full else ended_by(params.max_tokens))
        self.messages[:] = [*asked, {"role": "assistant", "content": document["text"]}]
        self.turns.append(document)
