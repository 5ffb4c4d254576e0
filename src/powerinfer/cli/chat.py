"""Talk with a model; earlier turns stay in the KV cache.

On a terminal Enter sends a message, Alt-Enter begins a new line, and what is pasted stays one message; elsewhere each
line is one. A text between two lines of \"\"\" is a message of several lines. /help lists the commands, /bye or Ctrl-D
ends. Ctrl-C ends an answer and keeps what was generated. When the context is full, the oldest turns are dropped.

JSON: messages (role, content) and turns, each like an answer of `run`; for a sparse model sparsity, as there.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import (
    SAMPLING,
    Output,
    checked_text,
    config_flags,
    config_from,
    model_argument,
    model_flag,
    open_llm,
    option_names,
    printable,
    read_option,
    shown_name,
    small_model_note,
    sparsity_summary,
    with_model_defaults,
)
from powerinfer.cli.keys import unechoed
from powerinfer.cli.main import error_line
from powerinfer.cli.run import answer, describe_end, reading
from powerinfer.cli.screen import styled
from powerinfer.cli.thinking import VALUES, asked_thinking, cannot_think, read_think, thinking_flags, thought_reader
from powerinfer.config import EngineConfig
from powerinfer.errors import EngineError, PowerInferError, RequestError, did_you_mean
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.thinking import thinking_variables
from powerinfer.text.chat import NEXT_TURN, drop_oldest, plain_template
from powerinfer.text.model_text import chat_template_of
from powerinfer.text.thoughts import Thinking, read_thoughts

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM

Message = dict[str, str]

COMMANDS = {
    "/system": ("TEXT", "set the system message (none: remove it) and start over"),
    "/set": ("NAME VALUE", "set a sampling option; alone: list them"),
    "/think": ("VALUE", "whether the model thinks before it answers: on, off, low, medium, high, ..."),
    "/retry": ("", "answer the last message again"),
    "/undo": ("", "remove the last message and its answer"),
    "/clear": ("", "start over; the system message stays"),
    "/save": ("FILE", "save the conversation as JSON"),
    "/load": ("FILE", "continue a saved conversation"),
    "/stats": ("", "show how much of the context is used, and how fast answers were"),
    "/help": ("", "show this"),
    "/bye": ("", "end, as Ctrl-D"),
}
LOADED = "is chosen when a model is loaded: `powerinfer chat"
FOREIGN = {
    "/show": "; /set lists the sampling options, /stats shows what is used of the context",
    "/model": f": the model {LOADED} -m NAME`; /save and /load take the conversation there",
    "/list": "; `powerinfer list` shows the local models",
    "/regenerate": "; /retry answers the last message again",
    "/read": "; a file is part of a message when it is pasted",
}
"""Commands of Ollama and llama.cpp, and what does the same here."""
FOREIGN_OPTIONS = {
    **dict.fromkeys(("think", "nothink"), "/think on and /think off say whether the model thinks"),
    **dict.fromkeys(("num_ctx", "n_ctx", "ctx_size", "context"), f"the context {LOADED} -c N`"),
    **dict.fromkeys(("verbose", "quiet"), "/stats shows speeds; with `powerinfer chat -v` each answer does"),
    **dict.fromkeys(("system", "system_prompt"), "/system TEXT sets the system message"),
    **dict.fromkeys(("num_predict", "n_predict"), "max_tokens limits an answer"),
    "repeat_penalty": "use repetition_penalty",
}
ALIASES = {"/models": "/list", "/reset": "/clear", "/exit": "/bye", "/quit": "/bye", "/?": "/help"}
BLOCK = '"""'
LEAVE = "/bye or Ctrl-D ends the conversation; Ctrl-C stops an answer"


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the speed of every answer to stderr")
    thinking_flags(parser)
    config_flags(parser, SamplingParams, SAMPLING, {"max_tokens": None})
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    params = config_from(args, SamplingParams)
    system = None if args.system is None else checked_text(args.system, "the system message")
    engine, alone = config_from(args, EngineConfig), "max_batch" not in args
    with open_llm(args.model, engine, out, _check_template, alone=alone) as llm:
        small_model_note(args.model, out)
        assert llm.checkpoint is not None
        name = shown_name(args.model, llm.checkpoint.path)
        conversation = ChatSession(llm, with_model_defaults(params, llm, args), out, system, args.verbose)
        conversation.thinking, conversation.hide = asked_thinking(args), args.hide_thinking
        if reason := cannot_think(llm, conversation.thinking):
            out.note(reason)
        with Interrupts() as interrupts:
            _talk(conversation, name, interrupts, out)
        sparsity = sparsity_summary(llm)
        document = {"messages": conversation.messages, "turns": conversation.turns}
        out.document({**document, **({"sparsity": sparsity} if sparsity else {})})
    return 0


def _talk(conversation: ChatSession, name: str, interrupts: Interrupts, out: Output) -> None:
    """Handle messages until the input ends. name: of the model."""
    read, keep = reader(out, interrupts)
    if interrupts.interactive:
        details = f", context of {conversation.context} tokens; /help lists the commands, Ctrl-D ends"
        out.note(styled(printable(name), "bold", sys.stderr) + details)
    while True:
        try:
            text = read()
            if text is None:
                return
            with unechoed(keep):
                goes_on = conversation.handle(text, interrupts)
            if not goes_on:
                return
        except KeyboardInterrupt:
            if not interrupts.interactive:
                raise
            out.note(LEAVE)


def _check_template(checkpoint: Checkpoint) -> None:
    """ModelError if the model's template fails, RequestError if it takes no conversation."""
    template = chat_template_of(checkpoint)
    if template is not None:
        template.render([{"role": "user", "content": "?"}])


# ---------------------------------------------------------------- input


class Interrupts:
    """Ctrl-C in a conversation on a terminal: it raises KeyboardInterrupt once within `allowed`, and nothing elsewhere.

    So the first one stops an answer, and none ends the conversation. Where stdin is no terminal, nothing changes.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self._allowed = False

    def __enter__(self) -> Interrupts:
        if self.interactive:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self.interactive:
            signal.signal(signal.SIGINT, self._before)

    def allowed(self, work: Callable[[], Any]) -> Any:
        """Result of `work()`; Ctrl-C may interrupt it."""
        self._allowed = True
        try:
            return work()
        finally:
            self._allowed = False

    def _handle(self, number: int, frame: object) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt


def unfinished(text: str) -> bool:
    """Whether a text is a block that has been opened and not closed yet."""
    return text.lstrip().startswith(BLOCK) and not (text.rstrip().endswith(BLOCK) and len(text.strip()) >= 6)


def reader(out: Output, interrupts: Interrupts) -> tuple[Callable[[], str | None], Callable[[str], None] | None]:
    """Reads the next message, None at the end: with a line editor on a terminal, else line by line; and a function
    that keeps for it a text that was typed before, None where the terminal does."""
    if interrupts.interactive and sys.stdout.isatty() and not out.json_mode:
        with suppress(ImportError):
            from powerinfer.cli.terminal import Terminal
            from powerinfer.hub import cache_folder

            commands = {name: about for name, (_, about) in COMMANDS.items()}
            history = cache_folder() / "chat-history"
            terminal = Terminal(history, unfinished, commands, option_names(SamplingParams))
            return terminal.read, terminal.keep
    mark = "> " if interrupts.interactive and not out.json_mode else ""

    def read() -> str | None:
        try:
            text = interrupts.allowed(lambda: input(mark))
            while unfinished(text):
                text += "\n" + interrupts.allowed(input)
        except EOFError:
            if mark:
                out.line()
            return None
        except UnicodeDecodeError:
            raise RequestError("the input is not UTF-8 text") from None
        return checked_text(text, "the input")

    return read, None


# ---------------------------------------------------------------- the conversation


class ChatSession:
    """The messages so far, and the handling of what is typed."""

    def __init__(self, llm: LLM, params: SamplingParams, out: Output, system: str | None, verbose: bool) -> None:
        self.messages: list[Message] = []
        self.turns: list[dict[str, Any]] = []
        self.params = params
        self.thinking = Thinking()  # as the model does
        self.hide = False  # its thoughts
        self._llm = llm
        self._out = out
        self._system = system
        self._verbose = verbose
        self._plain = llm.template is None
        if llm.template is None:
            llm.template = plain_template(llm.tokenizer)
            out.note('this model has no chat template: turns are written as lines of "User:" and "Assistant:"')
        self._clear()
        if sys.stdin is not None and sys.stdin.isatty():  # while the user types
            threading.Thread(target=self._prepare, daemon=True).start()

    def _prepare(self) -> None:
        """Compile the template and read it, in any thread, so that the first message need not."""
        if self._llm.template is not None:
            self._llm.template.prepare()
            read_thoughts(self._llm.template)

    @property
    def context(self) -> int:
        return self._llm.context

    def handle(self, text: str, interrupts: Interrupts) -> bool:
        """Act on a command or a message; False when it ends the conversation."""
        stripped = text.strip()
        if stripped.startswith(BLOCK):
            return self._attempt(lambda: self._turn(stripped.removeprefix(BLOCK).removesuffix(BLOCK), interrupts))
        command, rest = (*stripped.split(None, 1), "", "")[:2]
        command = ALIASES.get(command, command)
        if command == "/bye":
            return False
        if command in COMMANDS:
            return self._attempt(lambda: self._command(command, rest, interrupts))
        if command.startswith("/"):
            hint = FOREIGN.get(command) or did_you_mean(command, COMMANDS) or "; /help lists the commands"
            self._out.note(f"no command {printable(command)}{hint}")
        elif command:
            return self._attempt(lambda: self._turn(text, interrupts))
        return True

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Do it; if it fails, the conversation goes on as it was. Always True."""
        try:
            work()
        except EngineError:
            raise
        except PowerInferError as error:
            self._out.note(error_line(str(error)))
        return True

    def _command(self, command: str, rest: str, interrupts: Interrupts) -> None:
        if command == "/help":
            for name, (value, about) in COMMANDS.items():
                self._out.note(f"{f'{name} {value}':<18}{about}")
            self._out.note(f"{BLOCK} begins and ends a message of several lines; Alt-Enter begins a new line")
        elif command == "/set":
            self._set(*(*rest.split(None, 1), "", "")[:2])
        elif command == "/think":
            self._think(rest)
        elif command == "/system":
            self._system = rest or None
            self._clear()
            self._out.aside(f"(system message {'set' if rest else 'removed'}; the conversation starts over)")
        elif command == "/stats":
            self._stats()
        elif command == "/clear":
            self._clear()
            self._out.aside("(the conversation starts over)")
        elif command in ("/save", "/load"):
            self._file(command, rest)
        else:
            self._back(again=command == "/retry", interrupts=interrupts)

    def _clear(self) -> None:
        self.messages[:] = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _set(self, name: str, value: str) -> None:
        if name == "parameter":  # Ollama's
            name, value = (*value.split(None, 1), "", "")[:2]
        if name in FOREIGN_OPTIONS:
            raise RequestError(f"no option {name}; {FOREIGN_OPTIONS[name]}")
        if value:
            change = read_option(SamplingParams, name, value)
            self.params = dataclasses.replace(self.params, **change)
        else:
            change = {one: getattr(self.params, one) for one in option_names(SamplingParams) if not name or one == name}
        if not change:
            names = option_names(SamplingParams)
            raise RequestError(f"no option {name}{did_you_mean(name, names) or '; there are ' + ', '.join(names)}")
        for one in change:
            self._out.note(f"{one:<22}{_shown(getattr(self.params, one))}")

    def _think(self, value: str) -> None:
        try:
            self.thinking = read_think(value)
        except argparse.ArgumentTypeError:
            raise RequestError(f"/think takes one of {VALUES}") from None
        self._out.aside(cannot_think(self._llm, self.thinking) or f"(thinking: {value})")

    def _file(self, command: str, name: str) -> None:
        from powerinfer.cli import conversation_file

        if not name:
            raise RequestError(f"{command} needs the name of a file")
        if command == "/save":
            conversation_file.save(Path(name), self.messages)
        else:
            self.messages[:] = conversation_file.load(Path(name))
            first = self.messages[:1]
            self._system = first[0]["content"] if first and first[0]["role"] == "system" else None
            self._show_last()
        done = "saved in" if command == "/save" else "loaded from"
        count = f"{len(self.messages)} message{'s' * (len(self.messages) != 1)}"
        self._out.aside(f"({count} {done} {printable(name)})")

    def _show_last(self) -> None:
        """Show the last message and its answer, of a conversation that goes on."""
        for message in self.messages[-2:]:
            if message["role"] == "user":
                self._out.note(f"> {printable(message['content'])}")
            elif message["role"] == "assistant":
                self._out.text(message["content"])
                self._out.flush()
                self._out.text("\n")

    def _stats(self) -> None:
        used = len(self._llm.encode_chat(self.messages)) if self.messages else 0
        rows = {"context": f"{used} of {self.context} tokens used"}
        for turn in self.turns[-1:]:
            rows["last answer"] = speed(turn).strip("()")
            if first := turn.get("timings", {}).get("ttft_s"):
                rows["first token"] = f"after {first:.2f} s"
            rows["answers"] = f"{len(self.turns)}, {sum(turn['completion_tokens'] for turn in self.turns)} tokens"
        for name, value in rows.items():
            self._out.note(f"{name:<14}{value}")

    def _back(self, again: bool, interrupts: Interrupts) -> None:
        """Remove the last turn; again: and send its message again."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise RequestError("there is no earlier message")
        before = self.messages[:]
        del self.messages[-2:]
        if not again:
            self._out.aside("(the last message and its answer are removed)")
            return
        answered = False
        try:
            answered = self._turn(before[-2]["content"], interrupts)
        finally:
            if not answered:
                self.messages[:] = before

    def _turn(self, text: str, interrupts: Interrupts) -> bool:
        """Answer a message; whether there is an answer."""
        asked, prompt = self._fitted([*self.messages, {"role": "user", "content": text}])
        room = self._llm.context - len(prompt)
        stop = (*self.params.stop, NEXT_TURN) if self._plain else self.params.stop
        params = dataclasses.replace(self.params, max_tokens=min(self.params.max_tokens or room, room), stop=stop)
        reader, params = thought_reader(self._llm, params, prompt, self.thinking)
        with reading() as progress:
            events = self._llm.stream(prompt, params, progress=progress)
            _, document = interrupts.allowed(
                lambda: answer(events, self._out, trim=self._plain, reader=reader, hide=self.hide)
            )
        self._out.text("\n")
        stopped = document["finish_reason"] == "abort"
        if stopped and not document["text"]:
            self._out.aside("(stopped; the message is not kept)")
            return False
        self.messages[:] = [*asked, {"role": "assistant", "content": document["text"]}]
        self.turns.append(document)
        if stopped:
            self._out.aside("(stopped)")
        elif ending := describe_end(document, None if params.max_tokens == room else params.max_tokens):
            self._out.aside(ending)
        if self._verbose:
            self._out.aside(speed(document))
        return True

    def _fitted(self, asked: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages, and their tokens; without the oldest turns if those leave no room for an answer.

        Half the context is made free, so that the prefix cache serves the next turns. RequestError if the last message
        does not fit on its own.
        """
        context, variables = self._llm.context, thinking_variables(self._llm, self.thinking)
        encode = partial(self._llm.encode_chat, chat_template_kwargs=variables)
        prompt = encode(asked)
        if context - len(prompt) < min(self.params.max_tokens or context, context // 8 + 1):
            asked, prompt, n = drop_oldest(asked, encode, context // 2)
            if n and len(prompt) < context:
                self._out.aside(f"(the context is full: {n} of the earlier turns dropped, the oldest)")
        if len(prompt) >= context:
            raise RequestError(f"the message does not fit the context: {len(prompt)} of {context} tokens")
        return asked, prompt


def _shown(value: Any) -> str:
    """The value of an option as `/set` takes it."""
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def speed(document: dict[str, Any]) -> str:
    """Speed of an answer, on a line."""
    timings = document.get("timings", {})
    parts = [f"{document['completion_tokens']} tokens"]
    parts += [f"{rate:.1f} tok/s" for rate in [timings.get("decode_tok_s")] if rate]
    parts += [f"{document['accepted']} of {drafted} drafts right" for drafted in [document.get("drafted")] if drafted]
    if "prompt_tokens" in document:
        cached = document["cached_tokens"]
        parts.append(f"prompt of {document['prompt_tokens']}" + (f" ({cached} cached)" if cached else ""))
    parts += [f"{rate:.1f} tok/s" for rate in [timings.get("prefill_tok_s")] if rate]
    return f"({', '.join(parts)})"
