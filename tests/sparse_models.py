"""Tiny GGUF models with bundles, for the tests of what uses sparse decode."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from model_files import gguf_name, give_limits, tiny_fields, weights

from benchmarks.models.gguf_writer import F32, STRING
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.predictor_file import write_predictor
from powerinfer.formats.profile_file import write_profile
from powerinfer.neurons import Predictor, Profile
from powerinfer.prepare.packing import pack

TEXT = "a cab back bab abc cad deaf face bead fab cafe gab cab abba dad add fade babe " * 8
"""In the letters that the models' tokenizer knows."""

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tiny_llama(path: Path, activation: str = "relu", limits: bool | float = False, products: bool = False) -> Path:
    """A model whose weights are float16 numbers, so that bundles of F16 hold them exactly. limits: with a threshold for
    each neuron; a number: with that one for all; products: with thresholds of products beside those of neurons."""
    builder = (
        tiny_fields("llama").add("llama.hidden_act", STRING, activation).add("tokenizer.chat_template", STRING, CHAT)
    )
    for name, values in weights("llama").items():
        builder.tensor(gguf_name(name), values.astype(np.float16).astype(np.float32))
    if limits is True:
        give_limits(builder, products=products)
    elif limits:
        builder.add("llama.hidden_act_param", F32, limits)
    return builder.write(path)


def give_bundles(path: Path, prepared: str | None = None) -> Path:
    """The same path, with bundles beside it."""
    checkpoint = open_checkpoint(path)
    pack(checkpoint, prepared, choose_types(checkpoint, "F16", "F16"))
    return path


def give_predictor(path: Path, threshold: float = 0.0) -> Path:
    """The same path, with random predictors beside it."""
    checkpoint = open_checkpoint(path)
    rng = np.random.default_rng(3)
    config = checkpoint.config
    layers = [
        tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((32, config.d_model), (size, 32)))
        for size in config.ffn_sizes
    ]
    write_predictor(checkpoint, None, "F16", [Predictor(32, threshold, 4)] * config.n_layers, layers)  # type: ignore[arg-type]
    return path


def some_neurons(n_layers: int, neurons: int, share: float = 0.7, seed: int = 6) -> np.ndarray:
    """Bool [layers, neurons]: those that `predictors_of` are to select."""
    return np.random.default_rng(seed).random((n_layers, neurons)) < share


def predictors_of(selected: np.ndarray, d_model: int) -> tuple[Predictor, list[tuple[np.ndarray, np.ndarray]]]:
    """(their description, in and out of each layer) of predictors that select these neurons, whatever they read."""
    direction = np.random.default_rng(7).standard_normal((1, d_model)).astype(np.float16).astype(np.float32)
    inner = np.concatenate([direction, -direction])
    weights = [(inner, np.repeat(np.where(own, 0, -1).astype(np.float32)[:, None], 2, 1)) for own in selected]
    return Predictor(2, 0.0, 0), weights


def profile_of(layers: int, d_ff: int, seed: int = 4, most: float = 0.9) -> Profile:
    """`profile_for` layers that are alike."""
    return profile_for((d_ff,) * layers, seed, most)


@functools.cache
def profile_for(sizes: tuple[int, ...], seed: int = 4, most: float = 0.9) -> Profile:
    """A profile of two texts of 300 and 200 tokens; neurons fire independently, each with a chance of up to `most`."""
    rng = np.random.default_rng(seed)
    tokens = (300, 200)
    each, active = [], []
    for size in sizes:
        chance = most * rng.random(size) ** 3
        fires = [rng.random((count, size)) < chance for count in tokens]
        each.append(np.stack([one.sum(axis=0) for one in fires]).astype(np.int64))
        share = np.concatenate(fires).mean(axis=1) if size else np.empty(0)
        active.append(np.bincount((100 * share).astype(np.int64), minlength=101))
    whole = tuple(counts.sum(axis=0) for counts in each)
    names = ("one.txt", "two.txt")
    for array in (*whole, *each, *active):
        array.flags.writeable = False  # others get the same
    return Profile(sum(tokens), whole, names, tokens, tuple(each), tuple(active), (0.5,) * len(sizes))


def give_profile(path: Path, seed: int = 4) -> Path:
    """The same path, with an invented profile beside it."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    write_profile(checkpoint, None, profile_for(config.ffn_sizes, seed), {})
    return path
