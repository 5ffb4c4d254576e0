"""Code that a type checker flags in every line that it is told to ignore, and nowhere else.

`make check` runs mypy on it, which complains of a line to ignore that nothing is wrong with. It is never run.
"""

from __future__ import annotations

from powerinfer import LLM, AsyncLLM, SamplingParams

CHAT = [{"role": "user", "content": "hi"}]

llm = LLM("x")
LLM("x", thread=4)  # type: ignore
LLM("x", threads="4")  # type: ignore
LLM("x", selector="some")  # type: ignore
LLM("x", vram=8.5)  # type: ignore
AsyncLLM("x", thread=4)  # type: ignore
SamplingParams(temprature=0)  # type: ignore
SamplingParams(max_tokens="8")  # type: ignore
llm.default_params(temprature=0)  # type: ignore
llm.generate(None)  # type: ignore
llm.generate("a", 16)  # type: ignore
print(llm.generate("a").txt)  # type: ignore
llm.stream(CHAT)  # type: ignore
llm.chat("a")  # type: ignore
llm.chat(CHAT, temperature=0)  # type: ignore


async def answers(model: AsyncLLM) -> None:
    await model.generate("a", timout=60)  # type: ignore
    await model.chat(CHAT, salt="x")  # type: ignore
    model.stream("a", enable_thinking=False)  # type: ignore
