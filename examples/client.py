"""OpenAI's client with a server, `powerinfer serve`: python examples/client.py [ADDRESS]"""

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Name three colours."}]
    with client.chat.completions.create(model=model, messages=question, max_tokens=40, stream=True) as stream:
        for chunk in stream:
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
    print()
    vectors = client.embeddings.create(model=model, input=["red", "green"])
    print(f"{model}: vectors of {len(vectors.data[0].embedding)} numbers")
