"""The plots of a report, as PNG images. matplotlib is imported when the first one is drawn.

Each `draw_...` function takes a figure and its data. Colours are the colour-blind safe ones of Okabe and Ito, and
cividis for quantities; a tier or a category has the same colour in every plot. Text in a plot never comes from files,
because matplotlib would interpret it as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import RequestError, install_extra
from powerinfer.experts import ExpertProfile
from powerinfer.neurons import Profile
from powerinfer.placement.expert_slots import Comparison, band, curve
from powerinfer.placement.plan_document import LayerPlan

MASS = 0.8
"""The share of activations by which a profile's skew is measured, as in the PowerInfer paper (figure 5)."""

TIER_COLOURS = {"gpu": "#d55e00", "cpu": "#0072b2", "disk": "#8a8a8a"}
TIER_NAMES = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
_MEMORIES = {"gpu": "GPU memory", "cpu": "RAM", "disk": "Disk"}
_GREEN, _PURPLE, _ORANGE, _SKY, _GREY = "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a"

_SIZE = (7.2, 3.8)  # inches
_DPI = 144
_POINTS = 256  # of a curve, and bins of the heat map


@dataclass(frozen=True)
class Look:
    """The colours of a plot that are not data."""

    ink: str
    grid: str
    paper: str


LIGHT = Look("#1f2328", "#d1d9e0", "#ffffff")
DARK = Look("#e6edf3", "#3d444d", "#161b22")

Figure = Any
Draw = Callable[[Figure], None]


def need_matplotlib() -> None:
    """RequestError with the command that installs matplotlib, if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(f"a report needs matplotlib: {install_extra('report')}") from None


def png(draw: Draw, look: Look = LIGHT) -> bytes:
    """The image that `draw` makes on a figure, in the colours of `look`. Global settings are restored."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MplFigure
    from PIL import Image

    with _style(look):
        figure = MplFigure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
    # A palette is enough for a plot and needs a third of the bytes.
    image = BytesIO()
    with Image.open(drawn) as full:
        full.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(image, "png")
    return image.getvalue()


@contextmanager
def _style(look: Look) -> Iterator[None]:
    """matplotlib's defaults with our colours, ignoring the user's matplotlibrc."""
    from matplotlib import rc_context, rcParamsDefault

    settings = {
        "figure.facecolor": look.paper,
        "savefig.facecolor": look.paper,
        "axes.facecolor": look.paper,
        "axes.edgecolor": look.grid,
        "axes.labelcolor": look.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "grid.color": look.grid,
        "grid.linewidth": 0.6,
        "text.color": look.ink,
        "xtick.color": look.ink,
        "ytick.color": look.ink,
        "legend.frameon": False,
        "legend.fontsize": "small",
        "font.size": 10.0,
    }
    defaults = {name: value for name, value in rcParamsDefault.items() if not name.startswith("backend")}
    with rc_context({**defaults, **settings}):
        yield


def _ink() -> str:
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def _percent(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _layer_axis(axes: Any, layers: int) -> None:
    """An x axis of layer numbers, with integer ticks."""
    axes.set_xlim(-0.6, layers - 0.4)
    axes.xaxis.set_major_locator(_whole_numbers(12))
    axes.set_xlabel("layer")
    axes.grid(False, axis="x")


def _bar_width(layers: Sized) -> float:
    """Width of a layer's bar; without gaps if there are many."""
    return 0.85 if len(layers) <= 40 else 1.0


# ---------------------------------------------------------------- activations


def cumulative(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of all activations that the k most frequent neurons carry, k = 0 ... n; zeros where nothing ever fired."""
    sums = np.concatenate([[0], np.cumsum(np.sort(counts)[::-1])]).astype(np.float64)
    return sums / sums[-1] if sums[-1] else sums


def draw_cumulative(figure: Figure, profile: Profile) -> None:
    """Activations against neurons, most frequent first: a line per layer, coloured by depth, and one for the model."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    axes, ink = figure.add_subplot(), _ink()
    depth = Normalize(0, max(1, profile.n_layers - 1))
    colours = ListedColormap(
        colormaps["cividis"](np.linspace(0.15, 0.85, 256))
    )  # the ends are invisible on light or dark paper
    at = 100 * np.linspace(0, 1, _POINTS)
    for layer in profile.layers:
        share = cumulative(profile.counts[layer])
        axes.plot(at, 100 * _sampled(share), color=colours(depth(layer)), linewidth=0.9, alpha=0.8)
        if share[-1]:
            axes.plot(100 * profile.hot_share(layer, MASS), 100 * MASS, ".", color=colours(depth(layer)), markersize=4)
    model_share = profile.hot_share(mass=MASS)
    share = cumulative(np.concatenate(profile.counts))
    axes.plot(at, 100 * _sampled(share), color=ink, linewidth=2.2, label="whole model")
    if share[-1]:
        axes.plot(100 * model_share, 100 * MASS, "o", color=ink, markersize=6)
        axes.annotate(
            f"{100 * MASS:.0f} % of activations:\n{100 * model_share:.1f} % of the model's neurons",
            (100 * model_share, 100 * MASS), xytext=(14, -34), textcoords="offset points", color=ink, fontsize="small",
        )  # fmt: skip
    axes.set(xlim=(0, 100), ylim=(0, 101), xlabel="neurons, most frequent first", ylabel="share of activations")
    figure.suptitle("Share of activations that the most frequent neurons carry", x=0.01, ha="left")
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(loc="lower right")
    if profile.n_layers > 1:
        bar = figure.colorbar(ScalarMappable(depth, colours), ax=axes, pad=0.02)
        bar.set_label("layer")
        bar.locator = _whole_numbers()
        bar.outline.set_visible(False)


def _whole_numbers(nbins: int = 8) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=nbins, integer=True, min_n_ticks=1)


def _sampled(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """A curve over 0 ... n, sampled at `_POINTS` equidistant points."""
    return np.interp(np.linspace(0, len(share) - 1, _POINTS), np.arange(len(share)), share)


def heat(profile: Profile) -> NDArray[np.float64]:
    """Frequencies of neurons, in per cent, [layers, bins]: each layer's most frequent first, averaged in bins; NaN
    where a layer has none."""
    bins = min(_POINTS, *(profile.sizes[layer] for layer in profile.layers))
    rows = np.full((profile.n_layers, bins), np.nan)
    for layer in profile.layers:
        edges = np.linspace(0, profile.sizes[layer], bins + 1).astype(np.int64)
        rows[layer] = np.add.reduceat(np.sort(profile.fraction(layer))[::-1], edges[:-1]) / np.diff(edges)
    return 100 * rows


def draw_heat_map(figure: Figure, profile: Profile) -> None:
    """Layers against neurons, each layer's most frequent first."""
    from matplotlib.colors import PowerNorm

    axes, values = figure.add_subplot(), heat(profile)
    extent = (0, 100, profile.n_layers - 0.5, -0.5)
    norm = PowerNorm(0.5, 0, max(float(np.nanmax(values)), 1e-9))  # square root: most neurons fire rarely
    image = axes.imshow(values, aspect="auto", cmap="cividis", norm=norm, extent=extent, interpolation="nearest")
    axes.set(xlabel="neurons of a layer, most frequent first", ylabel="layer")
    figure.suptitle("How often each neuron fires", x=0.01, ha="left")
    axes.yaxis.set_major_locator(_whole_numbers())
    axes.grid(False)
    _percent(axes.xaxis)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("tokens for which it fires")
    bar.outline.set_visible(False)
    _percent(bar.ax.yaxis)


def spread(histogram: NDArray[np.int64], share: float) -> float:
    """The active fraction, in per cent, that `share` of the tokens do not exceed; histogram: by integer per cent."""
    total = np.cumsum(histogram)
    return float(np.searchsorted(total, share * total[-1])) if total[-1] else 0.0


def draw_sparsity(figure: Figure, profile: Profile | None, predictor_mb: Mapping[int, float] | None) -> None:
    """Plot by layer: neurons active for a token with the range of most tokens, and the size of the predictor."""
    rows = (profile is not None) + (predictor_mb is not None)
    figure.suptitle("Neurons that fire, and predictors, by layer" if rows == 2 else "By layer", x=0.01, ha="left")
    axes = list(np.atleast_1d(figure.subplots(rows, 1, sharex=True)))
    layers = profile.n_layers if profile is not None else max(predictor_mb or (0,)) + 1
    if profile is not None:
        at = profile.layers
        mean = [100 * profile.active_fraction(layer) for layer in at]
        low, high = ([spread(profile.active[layer], share) for layer in at] for share in (0.1, 0.9))
        axes[0].fill_between(at, low, high, color=_SKY, alpha=0.35, linewidth=0, label="four of five tokens")
        axes[0].plot(at, mean, color=TIER_COLOURS["cpu"], marker="o", markersize=3.5, label="mean")
        axes[0].set(ylabel="neurons active\nfor a token", ylim=(0, None))
        _percent(axes[0].yaxis)
        axes[0].legend(loc="best", ncols=2)
    if predictor_mb is not None:
        axes[-1].bar(list(predictor_mb), list(predictor_mb.values()), color=_GREEN, width=_bar_width(range(layers)))
        axes[-1].set_ylabel("predictor, MB")
    _layer_axis(axes[-1], layers)
    for one in axes[:-1]:
        one.grid(False, axis="x")


# ---------------------------------------------------------------- experts


def draw_experts(figure: Figure, profile: ExpertProfile) -> None:
    """Share of a layer's selections by expert, most frequent first: a line per layer; even use as a dashed line."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    axes = figure.add_subplot()
    depth = Normalize(profile.layers[0].layer, max(profile.layers[-1].layer, profile.layers[0].layer + 1))
    colours = ListedColormap(colormaps["cividis"](np.linspace(0.15, 0.85, 256)))
    for layer in profile.layers:
        sorted_share = 100 * np.sort(layer.frequency)[::-1]
        at = 100 * (np.arange(layer.n_experts) + 0.5) / layer.n_experts
        axes.plot(at, sorted_share, color=colours(depth(layer.layer)), linewidth=0.9, alpha=0.8)
    even = 100 * np.mean([layer.top_k / layer.n_experts for layer in profile.layers])
    axes.axhline(even, color=_ink(), linestyle="--", linewidth=1.2, label="if all were used alike")
    axes.set(xlim=(0, 100), ylim=(0, None), xlabel="experts, most frequent first", ylabel="tokens that select it")
    figure.suptitle("How often each expert is selected", x=0.01, ha="left")
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(loc="upper right")
    if len(profile.layers) > 1:
        bar = figure.colorbar(ScalarMappable(depth, colours), ax=axes, pad=0.02)
        bar.set_label("layer")
        bar.locator = _whole_numbers()
        bar.outline.set_visible(False)


POLICY_LOOKS = {
    "static": (TIER_COLOURS["cpu"], "o"),
    "lru": (TIER_COLOURS["gpu"], "s"),
    "lfu": (_GREEN, "^"),
    "dynamic": (_PURPLE, "D"),
}


def draw_slots(figure: Figure, profile: ExpertProfile, replayed: Comparison | None) -> None:
    """Hits over slots: what a profile predicts of `static` and `lru` as lines, parts of its texts as bands around them,
    what a trace measured as marks."""
    axes = figure.add_subplot()
    for policy in ("static", "lru"):
        shares, hits = zip(*curve(profile, policy), strict=True)
        label = f"{policy}, predicted"
        parts = list(band(profile, policy))
        if parts:
            at, low, high = 100 * np.array(parts).T
            axes.fill_between(at, low, high, color=POLICY_LOOKS[policy][0], alpha=0.18, linewidth=0)
        axes.plot(
            100 * np.array(shares), 100 * np.array(hits), color=POLICY_LOOKS[policy][0], linewidth=1.6, label=label
        )
    for policy, (colour, marker) in POLICY_LOOKS.items():
        points_ = [] if replayed is None else [(one.share, one.policies.get(policy)) for one in replayed.at]
        points = [(share, one.measured) for share, one in points_ if one is not None and one.measured is not None]
        if points:
            shares, hits = zip(*points, strict=True)
            axes.plot(
                100 * np.array(shares), 100 * np.array(hits), color=colour, marker=marker, linestyle="", markersize=5,
                label=f"{policy}, measured",
            )  # fmt: skip
    axes.plot([0, 100], [0, 100], color=_ink(), linestyle=":", linewidth=1, label="experts used alike and at random")
    axes.set(xlim=(0, 100), ylim=(0, 101), xlabel="experts that have a slot", ylabel="selections that hit")
    figure.suptitle("What memory for some of the experts hits", x=0.01, ha="left")
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(loc="lower right")


# ---------------------------------------------------------------- predictors


def draw_quality(figure: Figure, layers: Mapping[int, Mapping[str, float]]) -> None:
    """Plot by layer: recall, precision, candidates, and the neurons that fire; on held-out tokens."""
    axes = figure.add_subplot()
    styles = {
        "recall": ("recall: selected, of those that fire", _GREEN, "o", "-"),
        "precision": ("precision: firing, of those selected", _PURPLE, "s", "-"),
        "candidate_fraction": ("selected, of all neurons", _ORANGE, "^", "-"),
        "active_fraction": ("firing, of all neurons", TIER_COLOURS["cpu"], "", "--"),
    }
    for key, (label, colour, marker, line) in styles.items():
        values = [100 * one[key] for one in layers.values()]
        axes.plot(list(layers), values, color=colour, marker=marker, linestyle=line, markersize=4, label=label)
    axes.set(ylim=(0, 103))
    figure.suptitle("Quality of the predictors, by layer", x=0.01, ha="left")
    _percent(axes.yaxis)
    _layer_axis(axes, max(layers) + 1)
    figure.legend(loc="outside lower center", ncols=2)


# ---------------------------------------------------------------- placements

# Part of a plan's bytes -> (name, colour) of its category.
_PARTS = {
    "ffn": ("neurons", _GREEN),
    "panels": ("dense FFNs, for prompts", "#8fd9c4"),
    "attention": ("attention", _PURPLE),
    **dict.fromkeys(("embedding", "head"), ("embedding, output head", _ORANGE)),
    "kv": ("keys and values", _SKY),
    "predictor": ("predictor", "#f0e442"),
    "draft": ("draft head", "#b2df8a"),
}
_REMAINDER = ("norms, scratch, runtime", _GREY)


def draw_bytes(figure: Figure, tiers: Mapping[str, Mapping[str, int]], budgets: Mapping[str, int]) -> None:
    """Bytes of each memory in use by category, as stacked bars on a scale each. tiers: tier -> part -> bytes."""
    used = [tier for tier, parts in tiers.items() if any(parts.values())] or ["cpu"]
    labelled: dict[str, Any] = {}
    for axes, tier in zip(np.atleast_1d(figure.subplots(len(used), 1)), used, strict=True):
        total, budget = sum(tiers[tier].values()), budgets.get(tier, 0)
        unit, scale = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
        left = 0.0
        for category in dict.fromkeys((*_PARTS.values(), _REMAINDER)):
            value = sum(n for part, n in tiers[tier].items() if _PARTS.get(part, _REMAINDER) == category) / scale
            if value:
                label, colour = category
                labelled[label] = axes.barh([0], [value], left=left, color=colour, height=0.6)
                left += value
        near = total <= budget <= 1.5 * total
        if near:
            labelled["budget"] = axes.plot([budget / scale] * 2, [-0.4, 0.4], color=_ink(), linewidth=1.8)[0]
        axes.set_xlim(0, 1.05 * max(budget if near else 0, total) / scale)
        of_budget = f" of a budget of {budget / 2**30:.3g} GiB" if budget else ""
        axes.set_title(f"{_MEMORIES[tier]}: {total / scale:.3g} {unit}{of_budget}", fontsize="small")
        axes.set(yticks=[], ylim=(-0.5, 0.5), xlabel=unit)
        axes.grid(False, axis="y")
    figure.suptitle("Memory by purpose", x=0.01, ha="left")
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=3)


def draw_neurons(figure: Figure, layers: Sequence[LayerPlan]) -> None:
    """Plot by layer: where its neurons are placed, and the share of its activations on the GPU."""
    axes = figure.add_subplot()
    at = np.arange(len(layers))
    totals = np.array([max(1, one.gpu + one.cpu + one.disk) for one in layers])
    bottom = np.zeros(len(layers))
    for tier, name in TIER_NAMES.items():
        values = np.array([getattr(one, tier) for one in layers]) / totals * 100
        if values.any():
            colour, label = TIER_COLOURS[tier], f"neurons on {name}"
            axes.bar(at, values, bottom=bottom, color=colour, width=_bar_width(layers), label=label)
            bottom += values
    mass = [100 * one.mass_on_gpu for one in layers]
    if any(mass):
        axes.plot(at, mass, color=_ink(), marker=".", markersize=5, linewidth=1, label="share of activations on GPU")
    axes.set(ylim=(0, 103), ylabel="neurons of the layer")
    figure.suptitle("Where the neurons are, by layer", x=0.01, ha="left")
    _percent(axes.yaxis)
    _layer_axis(axes, len(layers))
    figure.legend(loc="outside lower center", ncols=2)


_TIMES = {
    "cpu": ("neurons on CPU", TIER_COLOURS["cpu"]),
    "sync": ("synchronisation", _PURPLE),
    "disk": ("disk reads", TIER_COLOURS["disk"]),
    "other": ("attention and the rest", _SKY),
}


def draw_time(figure: Figure, layers: Sequence[LayerPlan]) -> None:
    """Plot by layer: estimated time of a token, sequential parts stacked; the GPU's concurrent time as a line."""
    axes = figure.add_subplot()
    at = np.arange(len(layers))
    bottom = np.zeros(len(layers))
    unit, scale = ("ms", 1e-3) if max(sum(one.seconds.values()) for one in layers) > 2e-3 else ("µs", 1e-6)
    for key, (label, colour) in _TIMES.items():
        values = np.array([one.seconds.get(key, 0.0) for one in layers]) / scale
        if values.any():
            axes.bar(at, values, bottom=bottom, color=colour, width=_bar_width(layers), label=label)
            bottom += values
    gpu = np.array([one.seconds.get("gpu", 0.0) for one in layers]) / scale
    if gpu.any():
        steps = {"where": "mid", "color": TIER_COLOURS["gpu"], "linewidth": 1.8}
        axes.step([-0.5, *at, len(layers) - 0.5], [gpu[0], *gpu, gpu[-1]], label="neurons on GPU, concurrent", **steps)
    axes.set(ylabel=f"{unit} per token, estimated", ylim=(0, None))
    figure.suptitle("Time of a token, by layer", x=0.01, ha="left")
    _layer_axis(axes, len(layers))
    figure.legend(loc="outside lower center", ncols=3)


# ---------------------------------------------------------------- training


def draw_training(
    figure: Figure,
    tokens: Sequence[int],
    loss: Sequence[float],
    zeros: Sequence[float],
    stages: Sequence[tuple[str, int]],
) -> None:
    """Loss and share of zeros of the steps of a training against its tokens. stages: (name, first step) of each."""
    figure.suptitle("Loss, and neurons that are zero", x=0.01, ha="left")
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, values, colour in ((above, loss, TIER_COLOURS["cpu"]), (below, [100 * share for share in zeros], _GREEN)):
        axes.plot(tokens, values, color=colour, linewidth=0.6, alpha=0.45)
        for (_, first), (_, end) in pairwise([*stages, ("", len(tokens))]):
            axes.plot(tokens[first:end], _smooth(values[first:end]), color=colour, linewidth=1.6)
            if first:
                axes.axvline(tokens[first - 1], color=_ink(), linewidth=0.8, linestyle=":")
    for name, first in stages:
        at = tokens[first - 1] if first else 0
        above.annotate(name, (at, 1), xycoords=("data", "axes fraction"), xytext=(2, 3), textcoords="offset points")
    if min(loss) > 0:
        above.set_yscale("log")
    above.set(ylabel="loss")
    below.set(ylabel="zeros", xlabel="tokens", ylim=(0, 100), xlim=(0, None))
    _percent(below.yaxis)


def _smooth(values: Sequence[float]) -> NDArray[np.float64]:
    """The mean of the values around each one: a fiftieth of them."""
    reach = len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(0, at - reach), np.minimum(len(values), at + reach + 1)
    return np.asarray((sums[high] - sums[low]) / (high - low))
