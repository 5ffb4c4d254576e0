"""A conversation of two turns, streamed: python examples/chat.py [MODEL]"""

import sys

from powerinfer import LLM

QUESTIONS = ["What is the capital of France?", "And of Italy?"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for event in llm.chat_stream(messages, llm.default_params(seed=1, max_tokens=40)):
            print(event.text, end="", flush=True)
            answer += event.text
        print()
        # the next turn finds this one in the prefix cache
        messages.append({"role": "assistant", "content": answer})
