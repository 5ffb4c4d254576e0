"""Texts, steps and answers of the small models whose layers have states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from model_files import VOCAB

from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load

CONTEXT = 1024


def texts(number: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, (number, length)).tolist()


def answers(
    path: Path, prompts: list[list[int]], rounds: int = 1, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """The tokens and their log probabilities, of the last of several rounds."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    with LLM(path, **({"threads": 2, "gpu": "none", "context": CONTEXT} | options)) as llm:
        for _ in range(rounds):
            found = llm.generate(prompts, params)
    return [(one.token_ids, [each.logprob for each in one.logprobs or []]) for one in found]


def executor(path: Path, **options: Any) -> CpuExecutor:
    return load(open_checkpoint(path), EngineConfig(**({"threads": 2, "context": CONTEXT, "max_batch": 2} | options)))


def step(tokens: list[int], at: int, read: int, write: int) -> Batch:
    n = len(tokens)
    slots = [np.array([slot], np.int32) for slot in (read, write)]
    places = np.arange(at, at + n, dtype=np.int32)
    pages = np.arange(CONTEXT // 32, dtype=np.int32)[None]
    return Batch(np.array(tokens, np.int32), places, np.zeros(n, np.int32), pages, np.array([n - 1], np.int32), *slots)
