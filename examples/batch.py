"""Several prompts at once, with asyncio and a time limit: python examples/batch.py [MODEL]"""

import asyncio
import sys

from powerinfer import AsyncLLM, RequestTimeoutError, SamplingParams

PROMPTS = ["The sky is", "Water boils at", "A triangle has", "The opposite of hot is"]


async def main(model: str | None) -> None:
    async with AsyncLLM(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        # they are computed together, which costs little more time than one
        answers = await asyncio.gather(*(llm.generate(prompt, params, timeout=60) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt}{answer.text!r}")
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        try:
            await llm.generate("Count to a million: 1, 2,", endless, timeout=0.2)
        except RequestTimeoutError as error:
            print(f"stopped: {error}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
