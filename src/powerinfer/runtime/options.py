"""The keywords of the Python API as types, for editors and type checkers; and how those given are checked."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError, did_you_mean
from powerinfer.sizes import A_SIZE, NoUnitError, read_size

if TYPE_CHECKING:
    from powerinfer.runtime.sampling import TokenMask
    from powerinfer.text.grammar import AfterThought, Grammar, LazyGrammar

P = ParamSpec("P")
T = TypeVar("T")

Prompt = str | Sequence[int]
"""A text, or token ids."""

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}."""


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`; sizes also as texts, such as "8GiB"."""

    threads: int
    context: int
    kv_type: Literal["f16", "q8_0", "f32"]
    prefill_chunk: int
    mixed_chunk: int
    max_batch: int
    max_queue: int
    prefix_cache: bool
    quantize: Literal["q8_0", "q4_0"] | None
    selector: Literal["auto", "all", "exact", "predicted", "threshold"]
    trial: bool
    retrial: bool
    threshold: float | None
    prepared: str | None
    recall_every: int
    gpu: str
    vram: int | str | Sequence[int | str] | None
    ram: int | str | None
    disk: Literal["auto", "direct", "cached", "none"]
    disk_policy: Literal["lfu", "window", "lru", "static"]
    adjust: bool
    expert_policy: Literal["static", "lru", "lfu", "dynamic", "auto"]
    split_mode: Literal["layer", "expert"]
    speculate: str
    isa: str | None


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    skip_special_tokens: bool
    grammar: Grammar | LazyGrammar | AfterThought | str | None
    json_schema: Any
    regex: str | None
    choice: Sequence[str] | None


class EmbeddingOptions(TypedDict, total=False):
    """Keywords of `AsyncLLM.embed`, beside the texts."""

    salt: bytes
    timeout: float | None
    queue_timeout: float | None


class RequestOptions(EmbeddingOptions, total=False):
    """Keywords of `AsyncLLM.generate` and `stream`, beside the prompt and `params`."""

    mask: TokenMask | None


class TemplateOptions(TypedDict, total=False):
    """Keywords of `chat` and `chat_stream`: what the chat template is given beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(RequestOptions, TemplateOptions, total=False):
    """Keywords of `AsyncLLM.chat` and `chat_stream`, beside the messages and `params`."""


def check_names(names: Collection[str], allowed: Collection[str], owner: str) -> None:
    """RequestError for a keyword that `where` does not have."""
    for name in names:
        if name not in allowed:
            hint = _hint(name, owner) or did_you_mean(name, allowed) or f"; it has {', '.join(allowed)}"
            raise RequestError(f"{owner} has no option {name!r}{hint}")


ELSEWHERE = {
    "n_ctx": "context", "num_ctx": "context", "max_model_len": "context", "n_threads": "threads",
    "model_path": "model", "n_gpu_layers": "gpu and vram", "gpu_memory_utilization": "vram",
}  # fmt: skip
"""Options of other engines' models, and ours."""


def _hint(name: str, owner: str) -> str:
    """The end of a message about an option that is elsewhere."""
    if owner == "LLM" and name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    if owner != "SamplingParams" and name in SamplingOptions.__annotations__:
        return f"; it is one of SamplingParams({name}=...)"
    return "; chat_stream and stream answer token by token" if name == "stream" else ""


def told_names(call: Callable[P, T]) -> Callable[P, T]:
    """A method that refuses an unknown keyword as `check_names` does."""
    parameters = signature(call).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise TypeError(f"{call.__name__} takes any keyword")

    @wraps(call)
    def checked(*values: P.args, **options: P.kwargs) -> T:
        check_names(options, [name for name in parameters if name != "self"], call.__name__)
        return call(*values, **options)

    return checked


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The options of `LLM` as an EngineConfig; RequestError for an invalid one."""
    options_ = {field.name: field for field in fields(EngineConfig)}
    check_names(options, options_, "LLM")
    sizes = {name: _bytes(name, value) for name, value in options.items() if options_[name].metadata.get("size")}
    options = {**options, **sizes, **({"vram": _sizes("vram", options["vram"])} if "vram" in options else {})}
    for name, value in options.items():
        default, choices = options_[name].default, options_[name].metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise RequestError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if type(default) is bool and type(value) is not bool:
            raise RequestError(f"{name} must be True or False, not {value!r}")
        if type(default) is int:
            least = options_[name].metadata.get("least", 0 if default == 0 else 1)  # a default of 0 means automatic
            if type(value) is not int or value < least:
                raise RequestError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if not isinstance(way := options.get("speculate", "off"), str | Path):
        raise RequestError(f"speculate must be auto, mtp, lookup, off or the name or path of a model, not {way!r}")
    if options.get("retrial") and not options.get("trial", True):
        raise RequestError("--retrial repeats the trials, and --no-trial makes none: leave out one of the two")
    return EngineConfig(**options if "speculate" not in options else options | {"speculate": str(way)})


def _sizes(name: str, value: object) -> int | tuple[int, ...] | None:
    """A size, or several, as of `_bytes`."""
    if isinstance(value, str) and "," in value:
        value = tuple(value.split(","))
    if not isinstance(value, Sequence) or isinstance(value, str):
        return _bytes(name, value)
    sizes = tuple(size for one in value if (size := _bytes(name, one)) is not None)
    if len(sizes) < len(value) or not sizes:
        raise RequestError(f"{name} of several GPUs must be a size for each, not {value!r}")
    return sizes if len(sizes) > 1 else sizes[0]


def _bytes(name: str, value: object) -> int | None:
    """A size in bytes, or as the flag of that name takes it. RequestError for what is none."""
    if isinstance(value, str):
        try:
            return None if value.lower() == "none" else read_size(value)
        except NoUnitError as error:
            raise RequestError(f"{name}: {error}") from None
        except ValueError:
            raise RequestError(f"{name} must be a {A_SIZE}, not {value!r}") from None
    if value is not None and (type(value) is not int or value < 0):
        raise RequestError(f"{name} must be a {A_SIZE}, a whole number of bytes or None, not {value!r}")
    return value


def token_ids(prompt: object) -> list[int]:
    """The ids of a prompt that is given as tokens; RequestError for anything else."""
    if isinstance(prompt, Mapping) or (
        isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt)
    ):
        raise RequestError("a prompt is a text or a list of token ids; messages are for chat and chat_stream")
    try:
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise TypeError
        ids: list[Any] = list(prompt)
        return [_token_id(one) for one in ids] if set(map(type, ids)) - {int} else ids
    except TypeError:
        raise RequestError(f"a prompt is a text or a list of token ids, not {reprlib.repr(prompt)}") from None


def template_variables(options: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template; RequestError for one that it may not be given."""
    check_names(options, TemplateOptions.__annotations__, "chat")
    variables = options.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs must be a dict, not {reprlib.repr(variables)}")
    for name in variables:
        if not may_be_set(name):
            raise RequestError(f"chat_template_kwargs may not set {reprlib.repr(name)}")
    return {**variables, **({"tools": options["tools"]} if options.get("tools") is not None else {})}


def may_be_set(name: object) -> bool:
    """Whether a caller may give the chat template a variable of that name."""
    return isinstance(name, str) and name.isidentifier() and name not in _RESERVED


_RESERVED = frozenset((  # variables that are made here, and arguments of `formats.chat.encode_chat`
    "self", "messages", "special_tokens", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt",
    "tokenizer", "template", "tokenize",
))  # fmt: skip


def _token_id(value: Any) -> int:
    """A token id; TypeError for what is none. Integers of numpy are some."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError
    return int(value)


def check_prompts(prompts: object) -> None:
    """RequestError for anything but a list of prompts."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be a text or a list of prompts, not {reprlib.repr(prompts)}")
    if prompts and isinstance(prompts[0], int):
        raise RequestError("prompts must be a text or a list: wrap the token ids of one prompt in a list")
    if prompts and isinstance(prompts[0], Mapping):
        token_ids(prompts)  # refuses it


def several(texts: str | Sequence[Prompt]) -> Sequence[Prompt]:
    """One text or several, as several; RequestError for what is neither."""
    if isinstance(texts, str):
        return [texts]
    check_prompts(texts)
    return texts
