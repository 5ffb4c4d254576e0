"""Fixtures that more than one test file uses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerinfer.errors import PowerInferError
from powerinfer.hub import resolve_model

# A shell that starts the tests in the background lets them, and every process they start, ignore Ctrl-C; some test it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched once as a user's first `run` would fetch it."""
    try:
        return resolve_model()
    except PowerInferError as error:
        pytest.fail(f"the default model could not be had: {error}", pytrace=False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, for the tests of a file: two pools of threads on the same cores wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
