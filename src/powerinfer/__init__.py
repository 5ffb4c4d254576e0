"""Fast inference of large language models on ordinary machines.

    from powerinfer import LLM, SamplingParams

    llm = LLM()                                   # the default model; or a path, or a name `powerinfer pull` knows
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)

The names are loaded when first used, so that `import powerinfer` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from powerinfer.config import EngineConfig as EngineConfig
    from powerinfer.errors import EngineError as EngineError
    from powerinfer.errors import ModelError as ModelError
    from powerinfer.errors import PowerInferError as PowerInferError
    from powerinfer.errors import QueueFullError as QueueFullError
    from powerinfer.errors import RequestError as RequestError
    from powerinfer.errors import RequestTimeoutError as RequestTimeoutError
    from powerinfer.runtime.async_llm import AsyncLLM as AsyncLLM
    from powerinfer.runtime.engine import LLM as LLM
    from powerinfer.runtime.params import SamplingParams as SamplingParams
    from powerinfer.runtime.request import Completion as Completion
    from powerinfer.runtime.request import StreamEvent as StreamEvent
    from powerinfer.runtime.sampling import TokenLogprob as TokenLogprob

_HOMES = {
    "LLM": "powerinfer.runtime.engine",
    "AsyncLLM": "powerinfer.runtime.async_llm",
    "SamplingParams": "powerinfer.runtime.params",
    "Completion": "powerinfer.runtime.request",
    "StreamEvent": "powerinfer.runtime.request",
    "TokenLogprob": "powerinfer.runtime.sampling",
    "EngineConfig": "powerinfer.config",
    "PowerInferError": "powerinfer.errors",
    "RequestError": "powerinfer.errors",
    "ModelError": "powerinfer.errors",
    "QueueFullError": "powerinfer.errors",
    "RequestTimeoutError": "powerinfer.errors",
    "EngineError": "powerinfer.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "EngineConfig",
    "EngineError",
    "ModelError",
    "PowerInferError",
    "QueueFullError",
    "RequestError",
    "RequestTimeoutError",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'powerinfer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
