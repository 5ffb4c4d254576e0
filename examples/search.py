"""The text that is nearest to a question, by embeddings: python examples/search.py [MODEL]"""

import sys

import numpy as np

from powerinfer import LLM

TEXTS = [
    "Bread is baked from flour, water, salt and yeast.",
    "The Moon circles the Earth once in 27 days.",
    "A violin has four strings and is played with a bow.",
]
QUESTION = "How long does the Moon take to go around the Earth?"

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    texts = llm.embed(TEXTS)  # float32 [3, d_model], each of length 1
    (question,) = llm.embed(QUESTION)
    # vectors of one model share a large common part: without it their angles say more
    centre = texts.mean(axis=0)
    apart = texts - centre
    nearness = apart @ (question - centre) / np.linalg.norm(apart, axis=1)
    for at in np.argsort(-nearness):
        print(f"{nearness[at]:+.3f}  {TEXTS[at]}")
