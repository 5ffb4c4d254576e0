"""Random models of experts: how unevenly, and how often the same, their routers select."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_shapes import EXPERTS, TOP, shape

from benchmarks.models import expert_models
from benchmarks.models.routing import Routing, selection_shares
from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.experts import ExpertProfile
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.layout import shapes
from powerinfer.placement.shapes import find_shape
from powerinfer.prepare.corpus import Windows
from powerinfer.prepare.counting import Task
from powerinfer.prepare.expert_profiling import profile_experts


def profiled(path: Path, config: ModelConfig, skew: float, locality: float, tokens: int = 4096) -> ExpertProfile:
    """A profile over random tokens, in two texts."""
    about = expert_models.Weights("q8_0", skew=skew, locality=locality)
    (expert_models.write if path.suffix == ".gguf" else expert_models.write_folder)(path, config, about)
    checkpoint = open_checkpoint(path)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (tokens // 1024, 1024)).astype(np.int32)
    task = Task(Windows(ids, ("a", "b"), (tokens // 2048, tokens // 2048), "x"), 0, None)
    return profile_experts(checkpoint, EngineConfig(threads=1, gpu="none"), task).file.profile


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0])
def test_shares_are_a_power_law(skew: float) -> None:
    shares = selection_shares(128, 8, skew)
    assert shares.sum() == pytest.approx(8) and shares.max() <= 0.98
    free = np.flatnonzero(shares < 0.98)
    exponent = np.polyfit(np.log(free + 1.0), np.log(shares[free]), 1)[0]
    assert exponent == pytest.approx(-skew, abs=1e-6)


FOLDERS = ["qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "glm-4.5-air"]
OTHERS = ["deepseek-v2-lite", "deepseek-v3", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b"]


@pytest.mark.parametrize(  # folders hold what files hold: test_folders_hold_what_files_hold
    ("name", "end"), [*((name, "") for name in FOLDERS), *((name, ".gguf") for name in OTHERS)]
)
def test_routers_select_as_asked(name: str, end: str, tmp_path: Path) -> None:
    """The power law, nearly, with and without locality; with it, the same ones again.

    Nearly, because a model as narrow as this one has embeddings that are less alike in length than those of real ones.
    """
    config = shape(name)
    if not end:
        config = replace(config, architecture=find_shape(name).config.architecture)
    reuse = {}
    for locality in (0.0, 0.8):
        found = profiled(tmp_path / f"model-{10 * locality:.0f}{end}", config, 1.0, locality)
        wanted = np.cumsum(selection_shares(EXPERTS, TOP, 1.0)) / TOP
        for one in found.layers:
            for n in (2, 4, 8, 16):
                off = abs(one.static_hits[n] - wanted[n - 1])
                assert off < (0.15 if locality else 0.09), (locality, one.layer, n)
        reuse[locality] = found.mean("reuse")
    chance = float((selection_shares(EXPERTS, TOP, 1.0) ** 2).sum() / TOP)
    assert reuse[0.0] == pytest.approx(chance, abs=0.05) and reuse[0.8] > reuse[0.0] + 0.15


LATENT_OR_STATES = [*OTHERS, "kimi-k2"]


def as_stated(config: ModelConfig) -> Any:
    """A configuration without what only one of the formats states, and with numbers as exact as float32."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            said = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
            only_one = ("architecture", "name", "context_length", "interleaved", "tiled", "truncate")
            return type(value), {key: one for key, one in said.items() if key not in only_one}
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return plain(config)


@pytest.mark.parametrize("name", [*FOLDERS, *LATENT_OR_STATES, "gpt-oss-20b"])
def test_folders_hold_what_files_hold(name: str, tmp_path: Path) -> None:
    """The same configuration and the same values, but for roundings."""
    config, mxfp4 = shape(name), name.startswith("gpt-oss")
    locality = 0.5 if name in LATENT_OR_STATES else 0.0
    about = expert_models.Weights("mxfp4" if mxfp4 else "f16", "f16", skew=0.5, locality=locality)
    expert_models.write(tmp_path / "m.gguf", config, about)
    family = find_shape(name).config.architecture
    expert_models.write_folder(tmp_path / "m", replace(config, architecture=family), about)
    file, folder = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path / "m")
    assert as_stated(folder.config) == as_stated(file.config)
    for canonical, dims in shapes(folder.config):
        found, wanted = (one.take(canonical).float32() for one in (folder, file))
        assert found.shape == wanted.shape == dims
        if mxfp4 and ".experts_" in canonical and not canonical.endswith("_bias"):
            assert folder.taken_type(canonical) == "MXFP4" and np.array_equal(found, wanted)
            continue
        precise = mxfp4 or locality  # where the file has Q8_0
        off = np.abs(wanted).max() / 127 if precise else 1e-3 * np.abs(wanted)
        assert np.all(np.abs(found - wanted) <= off + 1e-6), canonical
    folder.finish()
    file.finish()


def test_without_skew_all_are_alike(tmp_path: Path) -> None:
    config = shape("qwen3-30b-a3b")
    found = profiled(tmp_path / "m.gguf", config, 0.0, 0.0)
    assert found.share_of_top(0.25) < 0.4 and found.mean("gini") < 0.25


@pytest.mark.parametrize(
    ("skew", "locality", "why"), [(-1, 0, "--skew"), (9, 0, "--skew"), (0, 1, "--locality"), (0, -0.1, "--locality")]
)
def test_what_cannot_be(skew: float, locality: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Routing(shape("qwen3-30b-a3b"), skew, locality)


def test_heads_that_cannot_be_paired() -> None:
    config = shape("qwen3-30b-a3b")
    three = replace(config.layers[0].attention, n_heads=6, n_kv_heads=2)
    config = replace(config, layers=(replace(config.layers[0], attention=three), *config.layers[1:]))
    with pytest.raises(ValueError, match="even number of heads"):
        Routing(config, locality=0.5)
