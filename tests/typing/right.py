"""Code that a type checker takes: `make check` runs mypy on it. It is never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

from powerinfer import LLM, AsyncLLM, Completion, SamplingParams, StreamEvent

CHAT = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]

llm = LLM("model.gguf", threads=4, context=4096, selector="exact", vram=8 << 30, ram="16GiB", gpu="none")
params = SamplingParams(temperature=0, max_tokens=None, stop=["x"], regex="[0-9]+")
SamplingParams(grammar='root ::= "x"')
assert_type(llm.generate("a"), Completion)
assert_type(llm.generate(["a", [1, 2]], params), list[Completion])
assert_type(llm.generate(["a", "b"], [params, params]), list[Completion])
assert_type(llm.chat(CHAT, params, tools=[], chat_template_kwargs={"enable_thinking": False}), Completion)
assert_type(llm.default_params(seed=1, grammar='root ::= "x"'), SamplingParams)
assert_type(llm.embed(["a", [1, 2]]), NDArray[np.float32])
for event in llm.stream([1, 2, 3], params):
    assert_type(event, StreamEvent)
for one in llm.generate("a").logprobs or ():
    print(one.text, one.bytes, one.logprob, one.top[0].text)


async def answers() -> None:
    async with AsyncLLM(None, threads=2, max_queue=8) as model:
        assert_type(await model.generate("a", timeout=60), Completion)
        assert_type(await model.chat(PARTS, params, salt=b"x", chat_template_kwargs={}), Completion)
        assert_type(await model.embed("a", timeout=60), NDArray[np.float32])
        assert_type(model.stream("a", queue_timeout=1.5), AsyncGenerator[StreamEvent, None])
        async for event in model.chat_stream(CHAT):
            print(event.text)
