"""An answer that is JSON of a schema: python examples/structured.py [MODEL]"""

import json
import sys

from powerinfer import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "green", "blue"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "colour", "legs"],
    "additionalProperties": False,
}

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    messages = [{"role": "user", "content": "Describe an animal, as JSON with name, colour and legs."}]
    answer = llm.chat(messages, SamplingParams(temperature=0, json_schema=SCHEMA))
    animal = json.loads(answer.text)
    print(f"{animal['name']}: {animal['colour']}, {animal['legs']} legs")
