"""Everything that `prepare` would make for a random model, from what is known of it rather than measured, to save time.

The neurons of make_model.py fire as often as a power law says, so the profile holds these frequencies
(`make_model.known_profile`) and the predictor is the one that the weights were built around
(`make_model.make_predictor`). The bundles are packed by `powerinfer pack`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.models import make_model, silent_models
from benchmarks.models.weights import Plan
from powerinfer.cli.main import main as powerinfer
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.profile_file import write_profile

RANK = 512  # of the predictors


def prepare(path: Path, plan: Plan, stored: str, threads: int) -> None:
    """The GGUF file, matrices in the type `stored`, profile, predictor and bundles: what of them is not there yet."""
    make_model.make(path, plan, "gguf", stored, threads)
    checkpoint = open_checkpoint(path)
    folder = Path(f"{path}.powerinfer")
    if not (folder / "profile.safetensors").exists():
        about = {"method": "frequencies that the weights were made for; nothing was run"}
        write_profile(checkpoint, None, make_model.known_profile(plan), about)
    if not (folder / "predictor.safetensors").exists():
        make_model.make_predictor(path, plan, rank_of(plan))
    if not (folder / "neurons.safetensors").exists() and powerinfer(["pack", "-m", str(path), "--no-check"]):
        raise RuntimeError(f"powerinfer pack failed on {path.name}")


def prepare_silent(path: Path, sizes: silent_models.Sizes, silent: list[float]) -> None:
    """Predictors of a model of silent_models.py, and its bundles; one of experts needs none."""
    folder = Path(f"{path}.powerinfer")
    if not (folder / "predictor.safetensors").exists():
        silent_models.write_predictors(path, sizes, silent)
    if open_checkpoint(path).config.whole_reason is not None:
        return
    if not (folder / "neurons.safetensors").exists() and powerinfer(["pack", "-m", str(path), "--no-check"]):
        raise RuntimeError(f"powerinfer pack failed on {path.name}")


def rank_of(plan: Plan) -> int:
    """Of the predictor: what the noise needs, in whole blocks of Q8_0."""
    return min(RANK, -(-(2 * plan.noise_rank + 1) // 32) * 32)


def remove(path: Path) -> None:
    """A model and what was prepared for it."""
    path.unlink(missing_ok=True)
    shutil.rmtree(f"{path}.powerinfer", ignore_errors=True)
