"""A model that does what its prompt's script says, for the tests of the server's clients: `python stand_in.py CONTEXT`.

Everything but the choice of the tokens is that of `powerinfer serve`: routes, template, tokenizer, grammars, parser,
streams. A prompt holds the script, a JSON list after the word SCRIPT: the steps of the job, one for each answer.

    SCRIPT [{"think": "I need it.", "call": "read", "arguments": {"path": "a.txt"}}, {"say": "It says WORD."}]

A step calls a function or says a text, perhaps after a thought; WORD in it is the last code word in the prompt
(`code word: ...`). So an answer is right only if the function was called and its result came back. Where the function
is not offered (clients ask for titles and summaries, too), the answer is a title.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig, ServeConfig
from powerinfer.devices import Batch
from powerinfer.devices.choices import Choices
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hub import resolve_model
from powerinfer.runtime.engine import LLM
from powerinfer.serve import logs
from powerinfer.serve.served import ModelSource
from powerinfer.serve.server import Server, make_server
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.model_text import tokenizer_of
from powerinfer.text.tokenizer import Tokenizer

NAME = "stand-in"
TURN = "<|im_start|>assistant\n"
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions that you may call:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nA call is\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Of the kind that Hermes and Qwen have."""
TITLE = "A file and its word"


def answer_to(prompt: str) -> str:
    """What the script in a prompt says for the turn that begins at its end."""
    _, script, rest = prompt.rpartition("SCRIPT [")
    if not script:
        return TITLE
    try:
        steps, end = json.JSONDecoder().raw_decode("[" + rest)
    except ValueError as error:
        return f"The script cannot be read: {error}."
    number = rest[end - 1 :].count(TURN) - 1
    if number >= len(steps):
        return "There is nothing left to do."
    step = steps[number]
    words = re.findall(r"code word: (\w+)", prompt)
    word = words[-1] if words else "nothing"
    thought = f"<think>\n{step['think']}\n</think>\n\n" if "think" in step else ""
    if "call" not in step:
        return thought + str(step["say"]).replace("WORD", word)
    if not re.search(f'"name": *"{re.escape(step["call"])}"', prompt):
        return TITLE
    call = json.dumps({"name": step["call"], "arguments": step["arguments"]}).replace("WORD", word)
    return f"{thought}<tool_call>\n{call}\n</tool_call>"


class ScriptedExecutor:
    """Wants to write the answer that the script says; what a mask forbids costs it nothing."""

    n_states, page_size, max_tokens = 0, 64, 4096
    bytes_per_token = disk = None

    def __init__(self, tokenizer: Tokenizer, tokens: int, vocab_size: int) -> None:
        """tokens: that the KV cache has room for."""
        self.choices = Choices()
        self.vocab_size, self.n_pages = vocab_size, tokens // self.page_size
        self._tokenizer = tokenizer
        self._ids = np.zeros((self.n_pages, self.page_size), np.int32)
        self._turn = np.asarray(tokenizer.encode(TURN, add_bos=False), np.int32)
        self._answers: dict[bytes, list[int]] = {}

    def forward(self, batch: Batch) -> np.ndarray:
        pages = batch.page_table[batch.rows, batch.positions // self.page_size]
        self._ids[pages, batch.positions % self.page_size] = batch.tokens
        logits = np.zeros((len(batch.logit_rows), self.vocab_size), np.float32)
        for row, at in enumerate(batch.logit_rows.tolist()):
            count = int(batch.positions[at]) + 1
            read = batch.page_table[batch.rows[at], : -(-count // self.page_size)]
            token = self._next(self._ids[read].reshape(-1)[:count])
            if token is not None:
                logits[row, token] = 100
        return logits

    def _next(self, ids: np.ndarray) -> int | None:
        """The token after these; None: there is no turn, or the answer is another one than the script's."""
        size = len(self._turn)
        (begins,) = np.nonzero((np.lib.stride_tricks.sliding_window_view(ids, size) == self._turn).all(1))
        if not len(begins):
            return None
        prompt, written = ids[: begins[-1] + size], ids[begins[-1] + size :].tolist()
        key = prompt.tobytes()
        if key not in self._answers:
            text = answer_to(self._tokenizer.decode(prompt.tolist(), skip_special=False))
            self._answers = {key: [*self._tokenizer.encode(text, special=False, add_bos=False), self._tokenizer.eos_id]}
        answer = self._answers[key]
        return answer[len(written)] if answer[: len(written)] == written and len(written) < len(answer) else None

    def hidden_states(self, rows: np.ndarray) -> np.ndarray:
        return np.ones((len(rows), 4), np.float32)

    def traced(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass


def stand_in(tokenizer: Any, vocab_size: int, context: int, template: str = TEMPLATE) -> LLM:
    """The model with room for two contexts."""
    config = ModelConfig(
        architecture="stand-in", d_model=4, vocab_size=vocab_size, context_length=context, norm_eps=1e-5,
        layers=(LayerConfig(AttentionConfig(1, 1, 4), FfnConfig(4)),),
    )  # fmt: skip
    executor = ScriptedExecutor(tokenizer, 2 * context, vocab_size)
    llm = LLM.from_parts(executor, tokenizer, config, EngineConfig())
    llm.template = ChatTemplate(template)
    return llm


def make(context: int) -> Server:
    """The server, with SmolLM2's tokenizer."""
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    llm = stand_in(tokenizer_of(checkpoint), checkpoint.config.vocab_size, context)
    requests = llm.engine.max_batch + llm.engine.max_queue
    return make_server([ModelSource((NAME,), lambda progress, budget: llm)], ServeConfig(port=0), requests)


if __name__ == "__main__":
    logs.set_up()
    make(int(sys.argv[1])).live()
