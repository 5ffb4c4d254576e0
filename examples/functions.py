"""A function that the model calls, through `powerinfer serve`: python examples/functions.py [ADDRESS]"""

import json
import sys

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 17 plus 25? Use the function."}]
    # "required": the answer is a call; "auto", the default, leaves it to the model
    asked = client.chat.completions.create(model=model, messages=messages, tools=[ADD], tool_choice="required")
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        result = given["a"] + given["b"]
        print(f"{call.function.name}({given['a']}, {given['b']}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    told = client.chat.completions.create(model=model, messages=messages, tools=[ADD], max_tokens=40)
    print(told.choices[0].message.content)
