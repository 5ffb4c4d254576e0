"""Code that a type checker flags in every line marked "wrong", and nowhere else; tests/test_python_api.py."""

from __future__ import annotations

from powerinfer import LLM, AsyncLLM, SamplingParams

CHAT = [{"role": "user", "content": "hi"}]

llm = LLM("x")
LLM("x", thread=4)  # wrong
LLM("x", threads="4")  # wrong
LLM("x", selector="some")  # wrong
LLM("x", vram=8.5)  # wrong
AsyncLLM("x", thread=4)  # wrong
SamplingParams(temprature=0)  # wrong
SamplingParams(max_tokens="8")  # wrong
llm.default_params(temprature=0)  # wrong
llm.generate(None)  # wrong
llm.generate("a", 16)  # wrong
print(llm.generate("a").txt)  # wrong
llm.stream(CHAT)  # wrong
llm.chat("a")  # wrong
llm.chat(CHAT, temperature=0)  # wrong


async def answers(model: AsyncLLM) -> None:
    await model.generate("a", timout=60)  # wrong
    await model.chat(CHAT, salt="x")  # wrong
    model.stream("a", enable_thinking=False)  # wrong
