"""The use of experts on disk: profiles, and traces, which say what every token selected.

A profile has for each layer N of experts `layers.N.counts` I64 [parts, experts], `layers.N.pairs` U32 [experts,
experts], `layers.N.follows` U32 [experts, experts of the next layer of experts], unless it is the last, and
`layers.N.distances` I64 [parts, experts + 1]: see `experts.LayerUse`; where samples say which neurons inside them fire
also `layers.N.sampled` I64 [experts] and `layers.N.fired` U32 [experts, neurons]. Its description has the tokens of the
`parts` of each corpus.

A trace has `layers.N.selected` [tokens, experts of a token], U8 if the layer has up to 256 experts, else U16: the
experts that a token selected, ascending. `done` I64 [1] is the number of tokens, in a complete file all of them.

Both are prepared files (prepared.py). Their descriptions name corpora and their tokens, of each layer its number,
experts and experts of a token, and "about", which says how the file was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ModelConfig
from powerinfer.experts import ExpertProfile, LayerUse, Selected
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length
from powerinfer.formats.prepared import EXPERT_TRACE, EXPERTS, PartFile, PreparedFile
from powerinfer.formats.tensors import RawTensor

MAX_TOKENS = (1 << 32) - 1
"""Maximum number of tokens of a profile or a trace, which counters of pairs can hold."""

MAX_PARTS = 1 << 15
"""Maximum number of parts of a profile, of all corpora: each has counters of its own."""


@dataclass(frozen=True)
class _CorpusTokens:
    name: str
    tokens: Annotated[int, Between(1, MAX_TOKENS)]


@dataclass(frozen=True)
class _Layer:
    layer: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class _TraceHeader:
    layers: list[_Layer]
    corpora: Annotated[list[_CorpusTokens], Length(1 << 12, smallest=1)]
    about: dict[str, Any]

    def __post_init__(self) -> None:
        if self.tokens > MAX_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS} tokens")

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.corpora)


@dataclass(frozen=True)
class _ProfileDescription(_TraceHeader):
    parts: list[Annotated[list[Annotated[int, Between(1, MAX_TOKENS)]], Length(1 << 12, smallest=1)]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if [sum(own) for own in self.parts] != [one.tokens for one in self.corpora]:
            raise ValueError("parts that do not add up to their corpora")
        if sum(map(len, self.parts)) > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} parts")


D = TypeVar("D", bound=_TraceHeader)


@dataclass(frozen=True)
class ExpertProfileFile:
    """A profile, its file, and how it was made."""

    profile: ExpertProfile
    details: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class TraceFile:
    """Experts that every token of some texts selected; views of a mapped file. details: how it was made."""

    selected: Selected
    corpora: tuple[str, ...]
    corpus_tokens: tuple[int, ...]
    details: dict[str, Any]
    path: Path

    @property
    def tokens(self) -> int:
        """Number of tokens of all corpora."""
        return sum(self.corpus_tokens)


def _layers(config: ModelConfig) -> list[_Layer]:
    return [_Layer(layer, ffn.n_experts, ffn.router.top_k) for layer, ffn in config.experts.items()]


def _described(place: PreparedFile, config: ModelConfig, description: dict[str, Any], kind: type[D]) -> D:
    header = place.described(kind, description)
    wanted = _layers(config)
    if header.layers != wanted:
        for layer, expected in zip(header.layers, wanted, strict=False):
            if layer != expected:
                raise place.bad(
                    f"is of {layer.experts} experts in layer {layer.layer}, {layer.top_k} a token, and the model has "
                    f"{expected.experts} in layer {expected.layer}, {expected.top_k} a token"
                )
        raise place.bad(f"is of {len(header.layers)} layers of experts, and the model has {len(wanted)}")
    return header


def _description(config: ModelConfig, corpora: Sequence[tuple[str, int]], details: Mapping[str, Any]) -> dict[str, Any]:
    named = [{"name": name, "tokens": tokens} for name, tokens in corpora]
    return {"layers": [asdict(one) for one in _layers(config)], "corpora": named, "about": dict(details)}


# ---------------------------------------------------------------- profiles


def open_expert_profile(checkpoint: Checkpoint, prepared: str | None = None) -> ExpertProfile:
    """The profile of a model of experts, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes it, if there is none or it does not match the model.
    """
    return open_expert_profile_file(checkpoint, prepared).profile


def open_expert_profile_file(checkpoint: Checkpoint, prepared: str | None = None) -> ExpertProfileFile:
    """The same with its path and how it was made."""
    place = PreparedFile(EXPERTS, checkpoint, prepared)
    description, tensors, file = place.read()
    header = _described(place, checkpoint.config, description, _ProfileDescription)
    file.check()
    tokens = np.concatenate(header.parts)
    layers = []
    for one, after in zip(header.layers, [*header.layers[1:], None], strict=True):
        size = checkpoint.config.experts[one.layer].size
        layers.append(_read_layer(place, tensors, one, after, tokens, size))
    place.holds_no_more(tensors)
    names, parts = tuple(one.name for one in header.corpora), tuple(map(tuple, header.parts))
    profile = ExpertProfile(names, parts, tuple(layers))
    return ExpertProfileFile(profile, header.about, place.path)


def _read_layer(
    place: PreparedFile,
    tensors: dict[str, RawTensor],
    layer: _Layer,
    after: _Layer | None,
    tokens: NDArray[np.int64],
    size: int,
) -> LayerUse:
    """The tensors of a layer, copied; tokens: of each part; size: neurons of an expert."""

    def take(name: str, dtype: str, *shape: int) -> NDArray[np.int64]:
        raw = place.holds(tensors, f"layers.{layer.layer}.{name}", dtype, shape)
        return np.frombuffer(raw.data.tobytes(), {"I64": "<i8", "U32": "<u4"}[dtype]).reshape(shape).astype(np.int64)

    counts = take("counts", "I64", len(tokens), layer.experts)
    distances = take("distances", "I64", len(tokens), layer.experts + 1)
    pairs = take("pairs", "U32", layer.experts, layer.experts)
    follows = None if after is None else take("follows", "U32", layer.experts, after.experts)
    k, place_text = layer.top_k, f"in layer {layer.layer}"
    if (counts < 0).any() or (counts > tokens[:, None]).any() or (counts.sum(axis=1) != tokens * k).any():
        raise place.bad(f"does not count {k} experts for each token {place_text}")
    total = counts.sum(axis=0)
    if (pairs != pairs.T).any() or pairs.diagonal().any() or (pairs.sum(axis=1) != total * (k - 1)).any():
        raise place.bad(f"counts pairs {place_text} that its experts do not have")
    if after is not None and follows is not None and (follows.sum(axis=1) != total * after.top_k).any():
        raise place.bad(f"counts experts that follow one another {place_text} more or less often than there are tokens")
    if (distances < 0).any() or (distances > total.sum()).any() or (distances.sum(axis=1) != tokens * k).any():
        raise place.bad(f"does not count each selection once in the distances of reuse {place_text}")
    if f"layers.{layer.layer}.fired" not in tensors:
        return LayerUse(layer.layer, k, counts, pairs, follows, distances)
    sampled, fired = take("sampled", "I64", layer.experts), take("fired", "U32", layer.experts, size)
    if (sampled < 0).any() or (sampled > total).any() or (fired > sampled[:, None]).any():
        raise place.bad(f"counts neurons that fire {place_text} more often than their experts are selected")
    return LayerUse(layer.layer, k, counts, pairs, follows, distances, sampled, fired)


def write_expert_profile(
    checkpoint: Checkpoint, prepared: str | None, profile: ExpertProfile, details: Mapping[str, Any]
) -> Path:
    """Write the profile of a model of experts; the path of the file.

    details: how it was made, values of JSON. PowerInferError if it cannot be written.
    """
    arrays: list[tuple[str, str, NDArray[np.int64]]] = []
    for layer in profile.layers:
        follows = [] if layer.follows is None else [("follows", "U32", layer.follows)]
        named = [
            ("counts", "I64", layer.counts),
            ("pairs", "U32", layer.pairs),
            *follows,
            ("distances", "I64", layer.distances),
        ]
        if layer.sampled is not None and layer.fired is not None:
            named += [("sampled", "I64", layer.sampled), ("fired", "U32", layer.fired)]
        arrays += [(f"layers.{layer.layer}.{name}", dtype, values) for name, dtype, values in named]
    corpora = list(zip(profile.corpora, profile.corpus_tokens, strict=True))
    description = _description(checkpoint.config, corpora, details) | {"parts": list(map(list, profile.parts))}
    place = PreparedFile(EXPERTS, checkpoint, prepared)
    with place.write(description, [(name, dtype, values.shape) for name, dtype, values in arrays]) as write:
        for name, dtype, values in arrays:
            raw = np.ascontiguousarray(values, {"I64": "<i8", "U32": "<u4"}[dtype])
            write(name, raw.reshape(-1).view(np.uint8))
    return place.path


# ---------------------------------------------------------------- traces


def trace_place(checkpoint: Checkpoint, prepared: str | None, path: Path | None = None) -> PreparedFile:
    """Place of a trace: `path`, None: an unfinished one in the folder `prepared`."""
    return PreparedFile(EXPERT_TRACE, checkpoint, prepared, path)


def open_trace(checkpoint: Checkpoint, place: PreparedFile) -> TraceFile:
    """A trace of this model. ModelError, with the command that makes it, if it is none or of another model."""
    description, tensors, file = place.read()
    header = _described(place, checkpoint.config, description, _TraceHeader)
    done = place.holds(tensors, "done", "I64", (1,))
    selected: Selected = {}
    file.check()
    if int(np.frombuffer(done.data.tobytes(), "<i8")[0]) != header.tokens:
        raise place.bad("is not complete")
    for layer in header.layers:
        dtype, kind = _stored(layer.experts)
        raw = place.holds(tensors, f"layers.{layer.layer}.selected", dtype, (header.tokens, layer.top_k))
        if raw.data.ctypes.data % kind.itemsize:
            raise place.bad(f"holds layer {layer.layer} at an odd place")
        rows = raw.data.view(kind).reshape(header.tokens, layer.top_k)
        n = layer.top_k
        if int(rows.max()) >= layer.experts or (rows[:, 1:] <= rows[:, :-1]).any():
            raise place.bad(f"selects no {n} different ones of {layer.experts} experts in layer {layer.layer}")
        selected[layer.layer] = rows
    place.holds_no_more(tensors)
    names, tokens = tuple(layer.name for layer in header.corpora), tuple(layer.tokens for layer in header.corpora)
    return TraceFile(selected, names, tokens, header.about, place.path)


def _stored(experts: int) -> tuple[str, np.dtype[np.unsignedinteger]]:
    return ("U8", np.dtype("u1")) if experts <= 256 else ("U16", np.dtype("<u2"))


class TraceWriter:
    """Takes the tokens of `write_trace`, one after another. done: how many there are."""

    def __init__(self, config: ModelConfig, part: PartFile) -> None:
        self._part = part
        self._layers = {one.layer: one for one in _layers(config)}
        self.done = int.from_bytes(part.get("done"), "little") if part.resumed else 0

    def put(self, selected: Mapping[int, NDArray[np.integer]]) -> None:
        """The next tokens: of each layer [tokens, experts of a token]."""
        for layer, rows in selected.items():
            _, kind = _stored(self._layers[layer].experts)
            raw = np.ascontiguousarray(rows, kind)
            at = self.done * rows.shape[1] * kind.itemsize
            self._part.put(f"layers.{layer}.selected", at, raw.reshape(-1).view(np.uint8))
        self.done += len(rows)

    def sync(self) -> None:
        """Sync to disk; `done` after the tokens that it counts."""
        self._part.sync()
        self._part.put("done", 0, np.array([self.done], "<i8").view(np.uint8))
        self._part.sync()


@contextmanager
def write_trace(
    checkpoint: Checkpoint,
    place: PreparedFile,
    corpora: list[tuple[str, int]],
    details: Mapping[str, Any],
    resume: bool,
) -> Iterator[TraceWriter]:
    """Write a trace: the block puts all tokens, in their order.

    corpora: names and tokens; details: values of JSON. The file is renamed to its final name when the block succeeds;
    if it ends early, `resume` continues it in a call with the same arguments. PowerInferError if it cannot be written.
    """
    config, tokens = checkpoint.config, sum(n for _, n in corpora)
    tensors = [
        (f"layers.{one.layer}.selected", _stored(one.experts)[0], (tokens, one.top_k)) for one in _layers(config)
    ]
    with place.fill(_description(config, corpora, details), [*tensors, ("done", "I64", (1,))], resume) as part:
        writer = TraceWriter(config, part)
        yield writer
        assert writer.done == tokens
        writer.sync()
