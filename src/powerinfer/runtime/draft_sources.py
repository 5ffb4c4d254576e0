"""The choice of a source of drafts for a loaded model, as `--speculate` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from powerinfer.config import EngineConfig
from powerinfer.devices import Executor
from powerinfer.devices.choices import Choice
from powerinfer.devices.cpu import Drafting
from powerinfer.devices.drafter import EagleHead
from powerinfer.errors import GpuMemoryError, ModelError, NoDraftsError, RamError, RequestError, did_you_mean
from powerinfer.formats.source import NO_EAGLE, NO_MTP
from powerinfer.progress import Progress, Say, silent
from powerinfer.runtime.speculation import FEW, DraftSource

if TYPE_CHECKING:
    from pathlib import Path

    from powerinfer.config import ModelConfig
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.placement.draft_place import DraftPlace
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.placement.plan_document import Help
    from powerinfer.placement.shapes import Model
    from powerinfer.sparsity import Sparsity
    from powerinfer.text.tokenizer import Tokenizer

WAYS = ("auto", "mtp", "lookup", "off")
"""Ways of `--speculate`; anything else names a model."""


class SmallerModel:
    """A model whose files are open, to draft for another one: on its GPU, or on the CPU."""

    def __init__(self, engine: EngineConfig, longest: int, progress: Progress) -> None:
        """longest: the context of the model that answers. RequestError for a model that there is not, or that cannot
        draft, ModelError for files that cannot be read."""
        self.name = engine.speculate
        self._checkpoint = _opened(self.name, engine.quantize, progress)
        config = self._checkpoint.config
        if config.states:
            raise RequestError(f"--speculate {self.name}: its layers keep a state of what they read; use another model")
        context = min(engine.context or longest, config.context_length)
        plain = replace(engine, speculate="off", selector="all", threshold=None, prepared=None, split_mode="layer")
        self._asked = engine
        self._engine = replace(plain, context=context, gpu="none", vram=None, ram=None)
        self._place: DraftPlace | None = None  # None: there is no GPU
        self._left_gpu = False

    @property
    def place(self) -> str:
        """Place of it, and why, for people; "": there is no GPU."""
        return "" if self._place is None else self._place.text

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that it takes."""
        from powerinfer.hybrid.resolved import ram_bytes

        if self._place is not None and self._place.vram:
            return self._place.ram
        return ram_bytes(self._model, self._engine)

    @property
    def vram_bytes(self) -> int:
        """Bytes of the GPU's memory that it takes; 0: it is on the CPU."""
        return 0 if self._place is None else self._place.vram

    def leave_room(self, engine: EngineConfig, checkpoint: Checkpoint, progress: Progress = silent) -> EngineConfig:
        """The options of the model that answers, `checkpoint`: --vram and --ram without what this one needs where it is
        best placed. NoDraftsError if too little is left."""
        from powerinfer.hybrid.beside_gpu import planned_beside

        if self._left_gpu:
            return self._less(engine)
        return self.plan_beside(planned_beside(checkpoint, engine, progress, self._model.rated_types), engine)

    def plan_beside(self, answers: PlanRequest | None, engine: EngineConfig) -> EngineConfig:
        """The same beside a model of that plan; None: there is no GPU for both."""
        from powerinfer.placement.draft_place import place_drafts

        self._place = None
        if answers is not None and answers.hardware.gpu is not None and answers.vram != 0:
            self._place = place_drafts(answers, self._request(answers), FEW)
        return self._less(engine)

    def _less(self, engine: EngineConfig) -> EngineConfig:
        from powerinfer.placement.budget import gib

        if self._place is not None and self._place.left is not None:
            engine = replace(engine, vram=self._place.left)
        if engine.ram is None:
            return engine
        needed = self.ram_bytes
        if needed >= engine.ram:
            raise NoDraftsError(
                f"--speculate {self.name} needs {gib(needed)} of RAM, and --ram gives {gib(engine.ram)}: raise --ram, "
                "lower --context, or use lookup or off"
            )
        return replace(engine, ram=engine.ram - needed)

    def with_share(self, text: str) -> str:
        """The text of a line or an error about the budgets that are left, with what this model takes beside them."""
        from powerinfer.placement.budget import gib

        asked, more = self._asked, []
        if "--ram " in text and asked.ram is not None:
            more.append(f"{gib(self.ram_bytes)} of --ram")
        if "--vram " in text and asked.vram is not None and self.vram_bytes:
            more.append(f"{gib(self.vram_bytes)} of --vram")
        return f"{text}; --speculate {self.name} takes {' and '.join(more)} beside that" if more else text

    def error_with_share(self, error: RequestError) -> RequestError:
        """The same error, of the budgets that are left, with what this model takes beside them."""
        kind = RequestError if isinstance(error, RamError) else type(error)
        return kind(self.with_share(str(error)))

    def add_share(self, helps: Iterable[Help]) -> list[Help]:
        """Budgets of the model that answers, as flags for both."""
        shares = {"--ram": self.ram_bytes, "--vram": self.vram_bytes}
        return [replace(offer, bytes=offer.bytes + shares.get(offer.flag, 0)) for offer in helps]

    @property
    def _model(self) -> Model:
        from powerinfer.hybrid.resolved import Resolved, model_of

        return model_of(Resolved(self._checkpoint, self._engine))

    def _on_gpu(self, name: str) -> EngineConfig:
        """Options of it there: the CPU looks up embeddings, and no call has more tokens than one between two steps."""
        chunk = min(self._engine.chunk, self._engine.mixed_chunk)
        return replace(self._engine, gpu=name, threads=1, prefill_chunk=max(1, chunk))

    def _request(self, answers: PlanRequest) -> PlanRequest:
        """The request for a plan of its own, on the machine of the other model's."""
        from powerinfer.placement.request import Subject, even_profile

        subject, engine = Subject(self._model, even_profile(self._model), "all"), self._on_gpu("auto")
        return subject.request(answers.hardware, replace(engine, threads=0))

    def leave_gpu(self) -> bool:
        """Leave the GPU, which has too little memory; whether it was to be there."""
        from powerinfer.placement.draft_place import IN_RAM, DraftPlace

        was, self._left_gpu = self.vram_bytes > 0, True
        self._place = DraftPlace(IN_RAM.format("the GPU ran out of memory with it"))
        return was

    def load(self, executor: Executor, config: ModelConfig, progress: Progress) -> DraftSource:
        """The source of drafts for a loaded model, on its threads, or on its GPU. GpuMemoryError if that has too little
        memory."""
        from powerinfer.hybrid.resolved import kv_bytes
        from powerinfer.models import load
        from powerinfer.runtime.draft_model import DraftModel

        if self.vram_bytes:
            return self._load_on_gpu(executor, config, progress)
        threads = executor.choices.threads
        engine = self._engine if threads is None else replace(self._engine, threads=threads.value)
        drafting = Drafting(pool=getattr(executor, "pool", None))  # whoever computes on the CPU has one
        room = kv_bytes(self._model, engine)
        drafts = load(self._checkpoint, engine, progress, room, drafting=drafting)
        lists = getattr(drafts, "list_draft_panels", None)
        reuse, chunk = engine.prefix_cache, engine.mixed_chunk
        return DraftModel(drafts, config.vocab_size, chunk, reuse=reuse, list_panels=lists)

    def _load_on_gpu(self, executor: Executor, config: ModelConfig, progress: Progress) -> DraftSource:
        from powerinfer.devices.streams import streams_of
        from powerinfer.devices.torch_device import choose_device, held_beside_tensors
        from powerinfer.devices.wanted import wanted_gpu
        from powerinfer.hybrid.load import load_split
        from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu, pages_of
        from powerinfer.hybrid.vram import hold_budget
        from powerinfer.runtime.draft_model import DraftModel

        name, _ = wanted_gpu(self._asked)
        assert name is not None
        engine = self._on_gpu(name)
        placement = Placement(self._checkpoint.config.n_layers, head=True, pages=pages_of(self._model, engine))
        device = choose_device(name)
        reserved = held_beside_tensors(device) if device.type == "cuda" else 0  # by torch, for the model that answers
        place = {"device": UsedGpu(name), "placement": placement, "vram": self.vram_bytes + reserved}
        resolved = Resolved(self._checkpoint, engine, **place)  # type: ignore[arg-type]
        streams = streams_of(device)
        stream = partial(streams.on, streams.stream())
        with stream():
            drafts = load_split(resolved, progress=progress)
            try:
                hold_budget(drafts, resolved)
            except BaseException:
                drafts.close()
                raise
        options: dict[str, Any] = {"reuse": engine.prefix_cache, "stream": stream}
        options["ahead"] = getattr(executor, "divided", True)
        return DraftModel(drafts, config.vocab_size, engine.mixed_chunk, **options)

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


def drafts_for_itself(engine: EngineConfig, path: Path) -> bool:
    """Whether `--speculate` names the model at this path, which gains nothing by its own drafts."""
    from powerinfer.hub import resolve_model

    if engine.speculate in WAYS:
        return False
    return resolve_model(engine.speculate).resolve() == path.resolve()


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
        problem = str(error).removeprefix(f"{path}: ")
        raise NoDraftsError(f"--speculate {engine.speculate}: {problem}") from None


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


def smaller_model_of(checkpoint: Checkpoint, engine: EngineConfig) -> SmallerModel | None:
    """The model that `--speculate` names for one whose files are open, None: it names none. An EAGLE head that it names
    is joined to these. RequestError for drafts that a load would refuse."""
    from powerinfer.text.model_text import tokenizer_of

    join_head(checkpoint, engine, silent)
    check_head(engine, checkpoint.config, checkpoint.notes)
    smaller = smaller_model(engine, checkpoint.config.context_length, silent)
    if smaller is not None:
        smaller.check_vocabulary(tokenizer_of(checkpoint))
    return smaller


def draft_source(engine: EngineConfig, executor: Executor, config: ModelConfig) -> DraftSource | None:
    """The source of drafts that needs no other model; None: there is none."""
    way, head = engine.speculate, executor.drafter
    if not engine.drafts_for(config):
        return None
    if isinstance(head, EagleHead):
        from powerinfer.runtime.eagle import EagleDrafts

        return EagleDrafts(head, executor.page_size, executor.max_tokens, executor.vocab_size)
    if way in ("auto", "mtp") and head is not None:
        from powerinfer.runtime.mtp import MtpDrafts

        return MtpDrafts(head, executor.page_size, executor.max_tokens, executor.vocab_size)
    if way != "lookup":
        return None
    from powerinfer.runtime.lookup import LookupDrafts

    return LookupDrafts()


def drafts_choice(engine: EngineConfig, source: DraftSource | None, place: str = "") -> Choice[str] | None:
    """The choice of a source, for people; None: there was none to choose. place: of a smaller model."""
    if source is None:
        return None
    value = engine.speculate if source.name in ("model", "eagle") else source.name
    more = f", {place}" if place else ""
    return Choice(value, "the model has a head for them" if engine.speculate == "auto" else "asked for", more)


class DraftingModel(NamedTuple):
    """A loaded model, how its layers decode, and its source of drafts, if it has one."""

    executor: Executor
    sparsity: Sparsity
    source: DraftSource | None


def load_with_drafts(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    smaller: SmallerModel | None,
    sample: Callable[[], Sequence[int]],
    progress: Progress,
    notes: list[str],
) -> DraftingModel:
    """The model with what drafts for it. Where the GPU runs out of memory a smaller model leaves it first, and all is
    loaded again.

    smaller: the model that `--speculate` names; sample: gives a text for measurements; notes: for people, are added to.
    Raises as `resolve` and `load_resolved` do, and NoDraftsError.
    """
    arguments = checkpoint, engine, smaller, sample, progress, notes
    try:
        return _load_once(*arguments)
    except GpuMemoryError as error:
        if smaller is None or not smaller.leave_gpu():
            raise
        notes.append(f"--speculate {smaller.name} drafts on the CPU: {error}")
    loaded = _load_once(*arguments)
    notes[:] = dict.fromkeys(notes)
    return loaded


def _load_once(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    smaller: SmallerModel | None,
    sample: Callable[[], Sequence[int]],
    progress: Progress,
    notes: list[str],
) -> DraftingModel:
    from powerinfer.hybrid.context_note import context_note
    from powerinfer.hybrid.load import load_resolved

    beside = engine if smaller is None else smaller.leave_room(engine, checkpoint, progress)
    say: Say = notes.append if smaller is None else lambda line: notes.append(smaller.with_share(line))
    resolved = resolve_beside(checkpoint, beside, smaller, progress, say)
    check_head(engine, checkpoint.config, notes)
    for line in context_note(resolved):
        say(line)
    again = smaller is None or not smaller.vram_bytes
    executor, sparsity = load_resolved(resolved, sample, progress, say, again=again)
    try:
        source = draft_source(engine, executor, checkpoint.config)
        if smaller is not None:
            source = smaller.load(executor, checkpoint.config, progress)
        executor.choices.drafts = drafts_choice(engine, source, "" if smaller is None else smaller.place)
    except BaseException:
        executor.close()
        raise
    return DraftingModel(executor, sparsity, source)


def resolve_beside(
    checkpoint: Checkpoint, beside: EngineConfig, smaller: SmallerModel | None, progress: Progress, say: Say
) -> Resolved:
    """The outcome of `resolve` for the options that a smaller model leaves; errors about them say what that takes."""
    from powerinfer.hybrid.resolve import resolve

    try:
        return resolve(checkpoint, beside, progress, say)
    except RequestError as error:
        if smaller is None:
            raise
        raise smaller.error_with_share(error) from None
