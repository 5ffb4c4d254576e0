"""Profiles on disk: how often each neuron of a model fires.

For each layer with an FFN `layers.N.counts` I64 [corpora, neurons], tokens that the neuron fired for, and
`layers.N.active` I64 [101], tokens by the per cent of neurons that fired. Names and tokens of the corpora, reuse and
thresholds are in the file's description, with "about", which says how it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length, Share
from powerinfer.formats.mapped import shown
from powerinfer.formats.prepared import PROFILE, PreparedFile
from powerinfer.formats.tensors import RawTensor
from powerinfer.neurons import Counts, Profile

BINS = 101
"""Bins of the histogram of active neurons: 0 to 100 per cent."""

_MAX_TOKENS = 1 << 50  # sums of counts stay below 2**63


@dataclass(frozen=True)
class _Corpus:
    name: str
    tokens: Annotated[int, Between(1, _MAX_TOKENS)]


@dataclass(frozen=True)
class _ProfileHeader:
    n_layers: int
    neurons: list[int]
    corpora: Annotated[list[_Corpus], Length(1 << 12, smallest=1)]
    reuse: list[Share]
    thresholds: list[Annotated[float, Between(0, 1e30)]] | None
    about: dict[str, Any]

    def __post_init__(self) -> None:
        if sum(one.tokens for one in self.corpora) > _MAX_TOKENS:
            raise ValueError(f"more than {_MAX_TOKENS} tokens")


@dataclass(frozen=True)
class ProfileFile:
    """A profile, its file, and how it was made."""

    profile: Profile
    details: dict[str, Any]
    path: Path


def open_profile(checkpoint: Checkpoint, prepared: str | None = None) -> Profile:
    """The profile of a model, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes it, if there is none or it does not match the model as it is opened.
    """
    return open_profile_file(checkpoint, prepared).profile


def open_profile_file(checkpoint: Checkpoint, prepared: str | None = None) -> ProfileFile:
    """The same with its path and how it was made."""
    place = PreparedFile(PROFILE, checkpoint, prepared)
    description, tensors, file = place.read()
    layers, sizes = checkpoint.config.n_layers, checkpoint.config.ffn_sizes
    for name, size in (("neurons", list(sizes)), ("n_layers", layers)):
        if name not in description:
            raise place.bad(f"was written by an earlier version of powerinfer, which stated no {name}")
        if description.get(name) != size:
            raise place.bad(f"states a {name} of {shown(description.get(name))}, and the model has {size}")
    header = place.described(_ProfileHeader, description)
    names, tokens = tuple(one.name for one in header.corpora), tuple(one.tokens for one in header.corpora)
    thresholds = None if header.thresholds is None else tuple(header.thresholds)
    if len(header.reuse) != layers or (thresholds is not None and len(thresholds) != layers):
        raise place.bad(f"does not state reuse and thresholds of {layers} layers")
    by_corpus: list[Counts] = []
    active: list[Counts] = []
    file.check()
    for layer in range(layers):
        if not sizes[layer]:
            by_corpus.append(np.zeros((len(names), 0), np.int64))
            active.append(np.zeros(BINS, np.int64))
            continue
        counts = _copied(place, tensors, f"layers.{layer}.counts", (len(names), sizes[layer]))
        if (counts < 0).any() or (counts > np.array(tokens)[:, None]).any():
            raise place.bad(f"counts more or less tokens in layer {layer} than there were")
        histogram = _copied(place, tensors, f"layers.{layer}.active", (BINS,))
        if (histogram < 0).any() or (histogram > sum(tokens)).any() or histogram.sum() != sum(tokens):
            raise place.bad(f"does not count each token once in the histogram of layer {layer}")
        by_corpus.append(counts)
        active.append(histogram)
    place.holds_no_more(tensors)
    total = tuple(counts.sum(axis=0) for counts in by_corpus)
    reuse = tuple(header.reuse)
    profile = Profile(sum(tokens), total, names, tokens, tuple(by_corpus), tuple(active), reuse, thresholds)
    return ProfileFile(profile, header.about, place.path)


def write_profile(checkpoint: Checkpoint, prepared: str | None, profile: Profile, details: Mapping[str, Any]) -> Path:
    """Write the profile of a model; the path of the file.

    details: how it was made, values of JSON. PowerInferError if it cannot be written.
    """
    config = checkpoint.config
    assert profile.sizes == config.ffn_sizes and profile.corpora
    description = {
        "n_layers": config.n_layers,
        "neurons": list(config.ffn_sizes),
        "corpora": [
            {"name": name, "tokens": tokens}
            for name, tokens in zip(profile.corpora, profile.corpus_tokens, strict=True)
        ],
        "reuse": [float(value) for value in profile.reuse],
        "thresholds": None if profile.thresholds is None else [float(value) for value in profile.thresholds],
        "about": dict(details),
    }
    arrays = [
        (f"layers.{layer}.{name}", values)
        for layer, pair in enumerate(zip(profile.corpus_counts, profile.active, strict=True))
        if profile.sizes[layer]
        for name, values in zip(("counts", "active"), pair, strict=True)
    ]
    place = PreparedFile(PROFILE, checkpoint, prepared)
    with place.write(description, [(name, "I64", values.shape) for name, values in arrays]) as write:
        for name, values in arrays:
            write(name, np.ascontiguousarray(values, "<i8").reshape(-1).view(np.uint8))
    return place.path


def _copied(place: PreparedFile, tensors: dict[str, RawTensor], name: str, shape: tuple[int, ...]) -> Counts:
    """A tensor of whole numbers, copied: profiles are small, and the file may be replaced."""
    tensor = place.holds(tensors, name, "I64", shape)
    return np.frombuffer(tensor.data.tobytes(), "<i8").reshape(shape).astype(np.int64)
