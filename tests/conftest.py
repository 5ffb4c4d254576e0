"""Fixtures that more than one test file uses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from powerinfer.errors import PowerInferError
from powerinfer.formats.hub import resolve_model

# A shell that starts the tests in the background lets them, and every process they start, ignore Ctrl-C; some test it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, fetched once as a user's first `run` would fetch it."""
    try:
        return resolve_model()
    except PowerInferError as error:
        pytest.fail(f"the default model could not be had: {error}", pytrace=False)
