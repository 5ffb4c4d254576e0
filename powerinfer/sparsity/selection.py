"""Which neurons decode computes: the selector, why it was chosen, and the prepared files that it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PROFILE, PreparedFile
from powerinfer.formats.profile_file import open_profile
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor
from powerinfer.sparsity.selectors import All, Selector, Threshold, check_suited, selector_named

if TYPE_CHECKING:
    from powerinfer.devices.cpu import Weights
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint

ASKED = "asked for"


@dataclass(frozen=True)
class Selection:
    """A selector and what it needs.

    why: the reason, for people; bundles: of the neurons, None for the selector `all`; predictors: gives the predictor
    of a layer, None: the selector has none; files: the prepared files in use.
    """

    selector: Selector
    why: str
    bundles: BundleFile | None = None
    predictors: Callable[[int], Weights] | None = None
    files: tuple[Path, ...] = ()

    def threshold(self, layer: int) -> float:
        """The magnitude up to which activations of a layer count as zero."""
        return self.selector.of(layer) if isinstance(self.selector, Threshold) else 0.0


DENSE = Selection(All(), ASKED)
"""Every neuron is computed."""


def auto(
    config: ModelConfig, lacking: str | None = None, *, predictors: bool = False, thresholds: bool = False
) -> tuple[str, str]:
    """(selector, reason) for `--selector auto`: the only place where that is decided.

    It never changes answers: `exact` if inactive neurons are exactly zero and bundles can be used, else `all`.
    lacking: why bundles cannot be used; None: they are there, or will be.
    predictors, thresholds: for planning only, where the selector is then stated to the user, who has to request it to
    run a model with it: predictors are there; thresholds are expected to be faster than computing every neuron.
    """
    if not config.rectified:
        return ("threshold", "faster") if thresholds else ("all", f"{config.activations} is never exactly zero")
    if lacking is not None:
        return "all", lacking
    return ("predicted", "predictors are trained") if predictors else ("exact", "bundles are prepared")


def choose(checkpoint: Checkpoint, engine: EngineConfig, lacking: str | None = None) -> tuple[str, str]:
    """(name of the selector, reason) for running a model; no file is read. lacking: as for `auto`."""
    if engine.selector != "auto":
        return engine.selector, ASKED
    bundles = PreparedFile(BUNDLES, checkpoint, engine.prepared)
    if lacking is None and not bundles.exists():
        lacking = f"no bundles are prepared; {bundles.command} makes them"
    return auto(checkpoint.config, lacking)


def select(checkpoint: Checkpoint, engine: EngineConfig, lacking: str | None = None) -> Selection:
    """The selector for running a model, with its files open. lacking: as for `auto`.

    RequestError if a requested selector is not possible, ModelError for files that do not match the model.
    """
    name, why = choose(checkpoint, engine, lacking)
    if (name, engine.selector) == ("all", "auto"):
        return Selection(All(), why)
    selector = selector_named(name, engine.threshold, lambda: _calibrated(checkpoint, engine))
    if selector.name == "all":
        return Selection(selector, why)
    check_suited(selector, checkpoint.config)
    return _open(checkpoint, engine, selector, why)


def _calibrated(checkpoint: Checkpoint, engine: EngineConfig) -> tuple[float, ...]:
    """The thresholds calibrated by `profile`."""
    place = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if not place.exists():
        raise RequestError(
            f"--selector threshold needs --threshold X, or a profile with calibrated thresholds: `{place.command}`"
        )
    thresholds = open_profile(checkpoint, engine.prepared).thresholds
    if thresholds is None:
        raise RequestError(
            f"{place.path} has no thresholds, because the model's activations are exactly zero: use --selector "
            "exact, or give --threshold X"
        )
    return thresholds


def _open(checkpoint: Checkpoint, engine: EngineConfig, selector: Selector, why: str) -> Selection:
    """The prepared files. Predictors are the trained ones, else those in the model's file."""
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.formats.predictor_file import open_predictor

    bundles = open_bundles(checkpoint, engine.prepared, cpu.part_bytes)
    if not selector.needs_predictor:
        return Selection(selector, why, bundles, None, (bundles.path,))
    threshold = checkpoint.predictor_threshold
    if threshold is not None and not PreparedFile(PREDICTOR, checkpoint, engine.prepared).exists():

        def own(layer: int) -> Weights:
            inner, outer = (checkpoint.take(f"layers.{layer}.predictor_{end}") for end in ("in", "out"))
            return Predictor(inner.shape[0], threshold, 0), inner, outer

        return Selection(selector, why, bundles, own, (bundles.path,))
    file = open_predictor(checkpoint, engine.prepared)

    def trained(layer: int) -> Weights:
        file.file.check()
        one = file.layers[layer]
        return one.predictor, one.inner, one.outer

    return Selection(selector, why, bundles, trained, (bundles.path, file.path))
