"""The choice of a source of drafts for a loaded model, as `--speculate` says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices import Executor
from powerinfer.devices.choices import Choice
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.errors import RequestError
from powerinfer.progress import Progress
from powerinfer.runtime.speculation import DraftSource

if TYPE_CHECKING:
    from pathlib import Path

    from powerinfer.text.tokenizer import Tokenizer

HOW = ("auto", "mtp", "lookup", "off")
"""Ways of `--speculate`; anything else names a model."""


def draft_source(
    engine: EngineConfig, executor: Executor, config: ModelConfig, tokenizer: Tokenizer, progress: Progress
) -> DraftSource | None:
    """The source of drafts for a model; None: it decodes without. RequestError for one that it cannot have."""
    how, head = engine.speculate, executor.drafter if isinstance(executor, CpuExecutor) else None
    if not engine.drafts_for(config):
        return None
    if config.states and not isinstance(executor, CpuExecutor):
        raise RequestError(
            f"--speculate {how}: not beside a GPU for models whose layers keep a state of what they read; use "
            "--speculate off, or --gpu none"
        )
    if how in ("auto", "mtp") and head is not None:
        from powerinfer.runtime.mtp import MtpDrafts

        return MtpDrafts(head, executor.page_size, max(1, min(64, executor.max_tokens // engine.max_batch)))
    if how == "mtp":
        raise RequestError(
            "--speculate mtp: the model's file has no layers that predict further tokens; use lookup, the name of a "
            "smaller model of the same vocabulary, or off"
        )
    if how == "lookup":
        from powerinfer.runtime.lookup import LookupDrafts

        return LookupDrafts()
    return _draft_model(how, engine, executor, config, tokenizer, progress)


def drafts_choice(engine: EngineConfig, source: DraftSource | None) -> Choice[str] | None:
    """The choice of a source, for people; None: there was none to choose."""
    if source is None:
        return None
    value = source.name if source.name != "model" else engine.speculate
    return Choice(value, "the model has a head for them" if engine.speculate == "auto" else "asked for")


def _draft_model(
    name: str,
    engine: EngineConfig,
    executor: Executor,
    config: ModelConfig,
    tokenizer: Tokenizer,
    progress: Progress,
) -> DraftSource:
    """A smaller model on the CPU, on the threads of the one that answers where that is there, too."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.hub import resolve_model
    from powerinfer.models import load
    from powerinfer.runtime.draft_model import DraftModel
    from powerinfer.text.model_text import tokenizer_of

    path: Path = resolve_model(name, progress=progress)
    checkpoint = open_checkpoint(path, progress=progress)
    if checkpoint.config.states:
        raise RequestError(f"--speculate {name}: its layers keep a state of what they read; use another model")
    _check_vocabulary(name, tokenizer, tokenizer_of(checkpoint))
    context = min(engine.context or config.context_length, checkpoint.config.context_length)
    settings = replace(
        engine, context=context, speculate="off", selector="all", threads=executor.choices.threads.value
        if executor.choices.threads else engine.threads,
    )  # fmt: skip
    pool = executor.pool if isinstance(executor, CpuExecutor) else None
    return DraftModel(load(checkpoint, settings, progress, pool=pool), config.vocab_size)


def _check_vocabulary(name: str, tokenizer: Tokenizer, drafts: Tokenizer) -> None:
    """RequestError unless every token of the model that drafts is the same text in the one that answers."""
    n = min(tokenizer.vocab_size, drafts.vocab_size)
    same = all(tokenizer.token_bytes(token) == drafts.token_bytes(token) for token in range(n))
    if not same or tokenizer.eos_ids != drafts.eos_ids:
        raise RequestError(
            f"--speculate {name}: its vocabulary is another one; use a smaller model of the same family, lookup or off"
        )
