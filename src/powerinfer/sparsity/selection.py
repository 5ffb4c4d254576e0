"""The selection of neurons that decode computes: the selector, why it was chosen, and the prepared files that it uses.

    all        every neuron
    exact      those whose gate fires: the dense answer, if inactive gates are exactly zero
    predicted  those that a predictor selects and whose gate, computed exactly, fires
    threshold  those whose activation exceeds a threshold: lossy, for activations that are never exactly zero

The native operators do this work (csrc/ffn.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig, ExpertsConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PROFILE, PreparedFile
from powerinfer.formats.profile_file import open_profile
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor

if TYPE_CHECKING:
    from powerinfer.devices.cpu_ffn import Weights
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.expert_rows import ExpertRowsFile

ASKED = "asked for"


@dataclass(frozen=True)
class Selection:
    """A selector, by its name, with the data that it needs.

    reason: for people; thresholds: magnitudes up to which activations count as zero (CATS, arXiv 2404.08763),
    of each layer, () for 0; bundles: of the neurons, None for the selector `all`; predictors: gives the predictor of a
    layer, None: the selector has none; files: the prepared files in use. in_experts: it selects neurons inside experts,
    for which only predictors are prepared; on_gpu: a GPU does so, too, else it computes its experts whole; expert_rows:
    of these what may be read from disk, None: nothing.
    """

    selector: str
    reason: str
    thresholds: tuple[float, ...] = ()
    bundles: BundleFile | None = None
    predictors: Callable[[int], Weights] | None = None
    files: tuple[Path, ...] = ()
    in_experts: bool = False
    on_gpu: bool = True
    expert_rows: ExpertRowsFile | None = None

    def threshold(self, layer: int) -> float:
        """The magnitude up to which activations of a layer count as zero."""
        return self.thresholds[layer] if self.thresholds else 0.0


DENSE = Selection("all", ASKED)
"""Every neuron is computed."""


def check_neurons(config: ModelConfig, user: str) -> None:
    """RequestError if the model has FFNs whose neurons are not separable. user: what needs them, for people."""
    if config.experts and config.whole_reason is not None:
        needs = "" if config.whole_experts_reason else ", and --selector exact needs nothing prepared"
        needs = needs if config.unpredicted_reason else f"{needs}, predicted only `powerinfer train`"
        raise RequestError(f"{user}: not for models of experts, which run as they are{needs}")
    if config.whole_reason is not None:
        raise RequestError(f"{user}: {config.whole_reason}; the model runs with --selector all")


def check_experts(selector: str, checkpoint: Checkpoint) -> None:
    """RequestError if the selector cannot select neurons inside the experts of a model."""
    from powerinfer.devices.cpu_experts import types_problem

    config = checkpoint.config
    if selector not in ("exact", "predicted"):
        selectors = "all" if config.whole_experts_reason else "exact or all"
        raise RequestError(f"selector {selector}: not inside experts so far; use --selector {selectors}")
    if config.whole_experts_reason is not None:
        raise RequestError(f"selector {selector}: {config.whole_experts_reason}; the model runs with --selector all")
    if selector == "predicted" and config.unpredicted_reason is not None:
        raise RequestError(f"selector predicted: {config.unpredicted_reason}; use --selector exact or all")
    problem = types_problem(config, checkpoint.taken_type, selector == "predicted")
    if problem is not None:
        raise RequestError(f"selector {selector}: {problem}")


def check_suited(selector: str, config: ModelConfig) -> None:
    """RequestError if a model of this configuration cannot use the selector."""
    if selector != "all":
        check_neurons(config, f"selector {selector}")
    suited = {"exact": config.partly_rectified, "predicted": config.rectified and not config.competing}
    if suited.get(selector, True):
        return
    other = "exact" if config.partly_rectified else "threshold"
    if selector == "exact":
        reason = (
            f"the activation {config.activations} is never exactly zero, so no neuron can be skipped exactly: leave "
            "out --selector; threshold skips small ones, which changes answers"
        )
    else:
        unsuited = config.activations_never_zero or config.activations
        reason = f"no predictor can select neurons of the activation {unsuited}: use --selector {other}"
    raise RequestError(f"selector {selector}: {reason}")


def auto(
    config: ModelConfig, lacking: str | None = None, *, predictors: bool = False, thresholds: bool = False
) -> tuple[str, str]:
    """(selector, reason) for `--selector auto`: the only place where that is decided.

    It never changes answers: `exact` if inactive neurons are exactly zero in some layer and bundles can be used, else
    `all`.
    lacking: why bundles cannot be used; None: they are there, or will be.
    predictors, thresholds: for planning only, where the selector is then stated to the user, who has to request it to
    run a model with it: predictors are there; thresholds are expected to be faster than computing every neuron.
    """
    if config.whole_reason is not None:
        if config.experts:
            return "all", config.whole_experts_reason or "a trial at load finds whether to skip neurons inside experts"
        return "all", config.whole_reason
    if not config.partly_rectified:
        return ("threshold", "faster") if thresholds else ("all", f"{config.activations} is never exactly zero")
    if lacking is not None:
        return "all", lacking
    return ("predicted", "predictors are trained") if predictors else ("exact", "bundles are prepared")


def tried_inside(engine: EngineConfig, config: ModelConfig, selection: Selection) -> bool:
    """Whether a trial may still choose a selector inside experts."""
    may = bool(config.experts) and config.whole_experts_reason is None
    return may and (engine.selector, selection.selector) == ("auto", "all")


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
    from powerinfer.formats.bundle_file import open_bundles

    name, reason = choose(checkpoint, engine, lacking)
    if (name, engine.selector) == ("all", "auto"):
        return Selection(name, reason)
    if name != "all" and any(isinstance(layer.ffn, ExpertsConfig) for layer in checkpoint.config.layers):
        check_experts(name, checkpoint)
        _thresholds(checkpoint, engine, name)
        predicted = name == "predicted"
        inside = Selection(name, reason, in_experts=True, expert_rows=_expert_rows(checkpoint, engine, predicted))
        return _with_predictors(inside, checkpoint, engine) if predicted else inside
    if name != "all":
        check_neurons(checkpoint.config, f"selector {name}")
    thresholds = _thresholds(checkpoint, engine, name)
    if name == "all":
        return Selection(name, reason)
    check_suited(name, checkpoint.config)
    bundles = open_bundles(checkpoint, engine.prepared, cpu.bundle_row_bytes)
    selection = Selection(name, reason, thresholds, bundles, files=(bundles.path,))
    return _with_predictors(selection, checkpoint, engine) if name == "predicted" else selection


def _expert_rows(checkpoint: Checkpoint, engine: EngineConfig, predicted: bool) -> ExpertRowsFile | None:
    """The rows of experts that are prepared for a selector; None: they are not."""
    from powerinfer.formats.expert_rows import kind_of, open_expert_rows

    if not PreparedFile(kind_of(predicted), checkpoint, engine.prepared).exists():
        return None
    return open_expert_rows(checkpoint, engine.prepared, cpu.bundle_row_bytes, predicted)


def _thresholds(checkpoint: Checkpoint, engine: EngineConfig, selector: str) -> tuple[float, ...]:
    """The threshold of each layer: --threshold X, or those that `profile` calibrated. RequestError if missing or
    superfluous."""
    threshold = engine.threshold
    if selector != "threshold":
        if threshold is not None:
            raise RequestError(f"--threshold goes with --selector threshold, not with {selector}")
        return ()
    if threshold is not None:
        if not 0 < threshold < float("inf"):
            raise RequestError("--selector threshold needs --threshold X, a positive number")
        return (threshold,) * checkpoint.config.n_layers
    place = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if not place.exists():
        raise RequestError(
            f"--selector threshold needs --threshold X, or a profile with calibrated thresholds: `{place.command}`"
        )
    calibrated = open_profile(checkpoint, engine.prepared).thresholds
    if calibrated is None:
        raise RequestError(
            f"{place.path} has no thresholds, because the model's activations are exactly zero: use --selector "
            "exact, or give --threshold X"
        )
    return calibrated


def _with_predictors(selection: Selection, checkpoint: Checkpoint, engine: EngineConfig) -> Selection:
    """The selection with the trained predictors, or those in the model's file."""
    from powerinfer.formats.predictor_file import open_predictor

    threshold = checkpoint.predictor_threshold
    if threshold is not None and not PreparedFile(PREDICTOR, checkpoint, engine.prepared).exists():

        def included(layer: int) -> Weights:
            inner, outer = (checkpoint.take(f"layers.{layer}.predictor_{end}") for end in ("in", "out"))
            return Predictor(inner.shape[0], threshold, 0), inner, outer

        return replace(selection, predictors=included)
    file = open_predictor(checkpoint, engine.prepared)

    def trained(layer: int) -> Weights:
        file.file.check()
        matrices = file.layers[layer]
        return matrices.predictor, matrices.inner, matrices.outer

    return replace(selection, predictors=trained, files=(*selection.files, file.path))
