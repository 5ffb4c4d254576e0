"""The choice of a source of drafts for a loaded model, as `--speculate` says."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig
from powerinfer.devices import Executor
from powerinfer.devices.choices import Choice
from powerinfer.devices.cpu import Drafting
from powerinfer.devices.drafter import EagleHead
from powerinfer.errors import ModelError, NoDraftsError, RequestError, did_you_mean
from powerinfer.formats.source import NO_EAGLE, NO_MTP
from powerinfer.progress import Progress
from powerinfer.runtime.speculation import DraftSource

if TYPE_CHECKING:
    from pathlib import Path

    from powerinfer.config import ModelConfig
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.text.tokenizer import Tokenizer

WAYS = ("auto", "mtp", "lookup", "off")
"""Ways of `--speculate`; anything else names a model."""


class SmallerModel:
    """A model whose files are open, to draft for another one on the CPU."""

    def __init__(self, engine: EngineConfig, longest: int, progress: Progress) -> None:
        """longest: the context of the model that answers. RequestError for a model that there is not, or that cannot
        draft, ModelError for files that cannot be read."""
        self.name = engine.speculate
        self._checkpoint = _opened(self.name, engine.quantize, progress)
        config = self._checkpoint.config
        if config.states:
            raise RequestError(f"--speculate {self.name}: its layers keep a state of what they read; use another model")
        context = min(engine.context or longest, config.context_length)
        plain = replace(engine, speculate="off", selector="all", threshold=None, prepared=None)
        self._engine = replace(plain, context=context, gpu="none", vram=None, ram=None)

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that it takes."""
        from powerinfer.hybrid.resolved import Resolved, UsedGpu, model_of, ram_bytes
        from powerinfer.sparsity.selection import DENSE

        return ram_bytes(model_of(Resolved(self._checkpoint, self._engine, DENSE, UsedGpu(reason=""))), self._engine)

    def leave_room(self, engine: EngineConfig) -> EngineConfig:
        """The options of the model that answers: --ram without what this one needs. NoDraftsError if too little is
        left."""
        if engine.ram is None:
            return engine
        from powerinfer.placement.budget import gib

        needed = self.ram_bytes
        if needed >= engine.ram:
            raise NoDraftsError(
                f"--speculate {self.name} needs {gib(needed)} of RAM, and --ram gives {gib(engine.ram)}: raise --ram, "
                "lower --context, or use lookup or off"
            )
        return replace(engine, ram=engine.ram - needed)

    def load(self, executor: Executor, config: ModelConfig, progress: Progress) -> DraftSource:
        """The source of drafts for a loaded model, on its threads."""
        from powerinfer.hybrid.resolved import Resolved, UsedGpu, kv_bytes, model_of
        from powerinfer.models import load
        from powerinfer.runtime.draft_model import DraftModel
        from powerinfer.sparsity.selection import DENSE

        threads = executor.choices.threads
        engine = self._engine if threads is None else replace(self._engine, threads=threads.value)
        drafting = Drafting(pool=getattr(executor, "pool", None))  # whoever computes on the CPU has one
        room = kv_bytes(model_of(Resolved(self._checkpoint, engine, DENSE, UsedGpu(reason=""))), engine)
        drafts = load(self._checkpoint, engine, progress, room, drafting=drafting)
        return DraftModel(drafts, config.vocab_size, engine.mixed_chunk, reuse=engine.prefix_cache)

    def check_vocabulary(self, tokenizer: Tokenizer) -> None:
        """NoDraftsError unless every token of both models is the same text. tokenizer: of the one that answers."""
        from powerinfer.text.model_text import tokenizer_of

        drafts = tokenizer_of(self._checkpoint)
        n = min(tokenizer.vocab_size, drafts.vocab_size)
        same = all(tokenizer.token_bytes(token) == drafts.token_bytes(token) for token in range(n))
        if not same:
            raise NoDraftsError(
                f"--speculate {self.name}: its vocabulary is another one; use a smaller model of the same family, "
                "lookup or off"
            )

    def size_note(self, checkpoint: Checkpoint) -> str | None:
        """A line for people where this model's files are no smaller than those of the one that answers; None: they
        are."""
        drafts, answers = self._checkpoint.file_bytes, checkpoint.file_bytes
        if drafts < answers:
            return None
        return (
            f"--speculate {self.name}: this model is not smaller ({drafts / 1e6:,.1f} MB, the one that answers "
            f"{answers / 1e6:,.1f} MB), so its drafts cost more than they gain"
        )


def _opened(name: str, quantize: str | None, progress: Progress) -> Checkpoint:
    """The files of a model that `--speculate` names. quantize: the type of its matrices, where they are floats. Errors
    name the flag, RequestError its values, too."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.hub import resolve_model

    takes = f"--speculate takes {', '.join(WAYS)}, a smaller MODEL or an EAGLE head, not {name!r}"
    if not name:
        raise RequestError(takes)
    try:
        path = resolve_model(name, progress=progress)
        if quantize is not None:
            with suppress(RequestError):  # it is quantised already
                return open_checkpoint(path, quantize, progress)
        return open_checkpoint(path, progress=progress)
    except ModelError as error:
        raise ModelError(f"--speculate {name}: {error}") from None
    except RequestError as error:
        near = did_you_mean(name.lower(), WAYS)
        message = f"{str(error).partition('; did you mean')[0]}{near}" if near else error
        raise RequestError(f"{takes}: {message}") from None


def smaller_model(engine: EngineConfig, longest: int, progress: Progress) -> SmallerModel | None:
    """The model that `--speculate` names; None: it names none, or an EAGLE head. longest: as of `SmallerModel`."""
    none = engine.speculate in WAYS or _eagle_path(engine, progress) is not None
    return None if none else SmallerModel(engine, longest, progress)


def _eagle_path(engine: EngineConfig, progress: Progress) -> Path | None:
    """The files of the EAGLE head that `--speculate` names; None: it names none."""
    from powerinfer.formats.eagle import is_eagle
    from powerinfer.hub import resolve_model

    if engine.speculate in WAYS or not engine.speculate:
        return None
    with suppress(RequestError, ModelError):  # which the smaller model that it names instead gives rise to, too
        path = resolve_model(engine.speculate, progress=progress)
        return path if is_eagle(path) else None
    return None


def join_head(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress) -> None:
    """Give a model, whose draft head was not read, the EAGLE head that `--speculate` names, if it names one.
    NoDraftsError for one that cannot be read, or that is another model's."""
    path = _eagle_path(engine, progress)
    if path is None:
        return
    from powerinfer.formats.eagle import open_eagle

    try:
        checkpoint.join_draft(open_eagle(path, checkpoint.config, checkpoint.stored("embed")))
    except ModelError as error:
        raise NoDraftsError(f"--speculate {engine.speculate}: {error}") from None


def check_head(engine: EngineConfig, config: ModelConfig, notes: Iterable[str]) -> None:
    """NoDraftsError where `--speculate mtp` is for a model without a draft head, or an EAGLE head was left out. notes:
    lines of its files and of how it is to be loaded, of which one may say why it has none."""
    left_out = next((one for one in notes if one.startswith(NO_EAGLE)), None)
    if left_out is not None:
        more = "raise --ram, lower --context, or use lookup or off"
        raise NoDraftsError(f"--speculate {engine.speculate}: {left_out}: {more}")
    if engine.speculate == "mtp" and config.draft is None:
        none = "the model's file has no layers that predict further tokens"
        line = next((one for one in notes if one.startswith(NO_MTP)), none)
        raise NoDraftsError(
            f"--speculate mtp: {line}; use lookup, the name of a smaller model of the same vocabulary, or off"
        )


def draft_source(engine: EngineConfig, executor: Executor, config: ModelConfig) -> DraftSource | None:
    """The source of drafts that needs no other model; None: there is none."""
    way, head = engine.speculate, executor.drafter
    if not engine.drafts_for(config):
        return None
    if isinstance(head, EagleHead):
        from powerinfer.runtime.eagle import EagleDrafts

        return EagleDrafts(head, executor.page_size, executor.max_tokens)
    if way in ("auto", "mtp") and head is not None:
        from powerinfer.runtime.mtp import MtpDrafts

        return MtpDrafts(head, executor.page_size, executor.max_tokens)
    if way != "lookup":
        return None
    from powerinfer.runtime.lookup import LookupDrafts

    return LookupDrafts()


def drafts_choice(engine: EngineConfig, source: DraftSource | None) -> Choice[str] | None:
    """The choice of a source, for people; None: there was none to choose."""
    if source is None:
        return None
    value = engine.speculate if source.name in ("model", "eagle") else source.name
    return Choice(value, "the model has a head for them" if engine.speculate == "auto" else "asked for")
