"""How the chat templates of a folder are told of functions, and whether a history with calls can be given to them.

    python tests/templates_report.py FOLDER

For each *.jinja: the dialect, read off the template ("read"), of a row, or "generic"; whether tools and a history with
two calls render; whether the calls that the template writes are read back; and whether they fit the grammar of a forced
call.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from toy_model import EOS, ToyTokenizer

from powerinfer.errors import ModelError, RequestError
from powerinfer.runtime.grammar import Grammars
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.dialect_reading import parsed, read_dialect
from powerinfer.text.tool_calls import ToolFormat
from powerinfer.text.tools import ToolChoice, read_tools

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "parts": {"type": "array"},
                   "options": {"type": "object"}},
    "required": ["city"],
}  # fmt: skip
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "description": "Say it", "parameters": SCHEMA}}
        for name in ("get_weather", "get-time.now")
    ]
)
ASKED = "What is it like?"
ARGUMENTS = (
    {"city": "Paris <b>\n  \"x\" 'y'", "days": 3, "parts": [1, "two"], "options": {"unit": "C"}},
    {"city": "Rome", "days": 12},
)
PLAIN = ({"city": "Paris <b>", "days": 3, "parts": [1, "two"], "options": {"unit": "C"}}, ARGUMENTS[1])


def history(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with two calls in one message and their results."""
    calls = [
        {"id": f"call_{number}", "type": "function",
         "function": {"name": tool.name, "arguments": json.dumps(given)}}
        for number, (tool, given) in enumerate(zip(TOOLS, arguments, strict=True))
    ]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"RESULT{at}"} for at, call in enumerate(calls)]
    return [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Thanks."},
    ]


def report(source: str, grammars: Grammars) -> tuple[str, str]:
    """The dialect's name, and what is wrong with it."""
    template = ChatTemplate(source, "<s>", "</s>", "2026-01-01T00:00:00")
    form = replace(read_dialect(template), tools=tuple(TOOLS))
    wrong = []
    for given, asked in ((PLAIN, TOOLS), (PLAIN, []), (ARGUMENTS, TOOLS)):
        try:
            messages, variables = form.conversation(history(given), asked)
            text, _ = template.render(messages, **variables)
        except (RequestError, ModelError) as error:
            wrong.append(f"{'with' if asked else 'without'} tools: {error}")
            continue
        lacks = [part for part in ("get_weather", "get-time.now", "Rome", "RESULT0", "RESULT1", "Fine.", "Thanks.")
                 if part not in text]  # fmt: skip
        if lacks:
            wrong.append(f"the prompt lacks {', '.join(lacks)}")
        wrong += read_back(form, template, given, grammars) if asked else []
    return form.name, "; ".join(dict.fromkeys(wrong))


def read_back(form: ToolFormat, template: ChatTemplate, given: Any, grammars: Grammars) -> list[str]:
    """What is wrong with the calls as the template writes them, read again."""
    wrong = []
    asked, turn = history(given)[:2]
    for call in turn["tool_calls"]:
        messages, variables = form.conversation([asked, {**turn, "tool_calls": [call]}], TOOLS)
        text = template.render(messages, add_generation_prompt=False, **variables)[0].rpartition(ASKED)[2]
        marks = ('{"name"',) if form.bare else (form.section.strip(), *form.begins)
        text = text[min((at for mark in marks if mark and (at := text.find(mark)) >= 0), default=0) :]
        _, calls = parsed(form, text)
        wanted = (call["function"]["name"], json.loads(call["function"]["arguments"]))
        if [(name, json.loads(arguments)) for name, arguments in calls] != [wanted]:
            wrong.append(f"{text[:200]!r} is read as {calls}")
            continue
        if form.name == "harmony":
            continue  # its calls begin in the header of a message
        allowed = text.encode()
        mask = grammars.mask(replace(form, parallel=False).grammar(TOOLS, ToolChoice("required")))
        for at, token in enumerate(allowed):
            if mask.complete or not mask.allows(token):
                allowed = allowed[:at]
                break
            mask.accept(token)
        if len(allowed) < len(text.encode()) and not (mask.complete or mask.allows(EOS)):
            wrong.append(f"the grammar allows only {allowed.decode(errors='ignore')!r} of {text[:200]!r}")
    return wrong


def main(folder: str) -> int:
    tokenizer = ToyTokenizer()
    grammars = Grammars(tokenizer)  # type: ignore[arg-type]
    names: Counter[str] = Counter()
    bad = 0
    for path in sorted(Path(folder).glob("*.jinja")):
        begin = time.perf_counter()
        name, wrong = report(path.read_text(), grammars)
        names[name] += 1
        bad += bool(wrong)
        print(f"{path.stem[:52]:52} {name:16} {time.perf_counter() - begin:5.2f} s  {wrong or 'ok'}")
    print(f"{sum(names.values())} templates, {bad} with something wrong: {dict(names.most_common())}")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
