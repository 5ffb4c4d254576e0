"""report.md and the plots of a report.json that report.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.lib.cells import number, percent
from benchmarks.lib.tables import table
from powerinfer.report.plots import need_matplotlib, png

PUBLISHED = {"OPT-30B": (0.26, 0.17), "LLaMA (ReGLU) 70B": (0.43, 0.26)}
"""Of arXiv 2312.12456, figure 5: the share of the neurons that carries 80 % of all activations, of a layer and of the
whole model."""
SHOWN = (5, 10, 20, 30, 50)
"""Per cent of the neurons, of the curve in the table."""
ORANGE, BLUE, GREY = "#d55e00", "#0072b2", "#8a8a8a"

Results = dict[str, Any]


def page(document: dict[str, Any]) -> str:
    """The whole report; a section without results is left out."""
    found, models = document["results"], document["models"]
    parts = [f"# {models['sparse']['file']}, made of {models['original']['file']}\n"]
    rows = [
        [name, *(str(model[name]) for model in models.values())]
        for name in ("file", "parameters", "type", "activation")
    ]
    parts.append(table(["", *models], rows))
    for title, section in SECTIONS.items():
        if body := "\n".join(section(found)):
            parts.append(f"## {title}\n\n{body}")
    commits = ", ".join(dict.fromkeys(one["commit"] for one in found.values()))
    cpus = ", ".join(dict.fromkeys(one["cpu"] for one in found.values()))
    parts.append(f"Measured at commit {commits} on {cpus}.\n")
    return "\n".join(parts)


def pairs(found: Results, section: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, of the original, of the sparse model) of the results that both have, with the same options."""
    for name, original in found.items():
        if name.startswith(f"{section}, ") and name.endswith(", original"):
            item = name.removeprefix(f"{section}, ").removesuffix(", original")
            sparse = found.get(f"{section}, {item}, sparse")
            if sparse and sparse["options"] == original["options"]:
                yield item, original, sparse


def perplexities(found: Results) -> Iterator[str]:
    rows = []
    for item, original, sparse in pairs(found, "perplexity"):
        values = [f"{one['perplexity']:.3f} ± {one['error']:.3f}" for one in (original, sparse)]
        rows.append([item, *values, f"{sparse['perplexity'] / original['perplexity']:.3f}", str(sparse["tokens"])])
    if rows:
        yield table(["text", "original", "sparse", "ratio", "tokens scored"], rows, numbers=True)


def tasks(found: Results) -> Iterator[str]:
    both = [(item, a["tasks"][0], b["tasks"][0]) for item, a, b in pairs(found, "tasks")]
    rows = []
    for item, original, sparse in both:
        cells = [item, str(sparse["items"])]
        for name in ("acc_norm", "acc"):
            cells += [f"{100 * one[name]:.1f} ± {100 * one[f'{name}_error']:.1f}" for one in (original, sparse)]
            cells.append(f"{100 * (original[name] - sparse[name]):.1f}")
        rows.append([*cells, percent(sparse["chance"])])
    if len(both) > 1:
        cells = ["mean", ""]
        for name in ("acc_norm", "acc"):
            means = [100 * sum(one[at][name] for one in both) / len(both) for at in (1, 2)]
            cells += [f"{means[0]:.1f}", f"{means[1]:.1f}", f"{means[0] - means[1]:.1f}"]
        rows.append([*cells, ""])
    if rows:
        head = [
            "task",
            "items",
            "acc_norm, original",
            "sparse",
            "points lost",
            "acc, original",
            "sparse",
            "points lost",
        ]
        yield table([*head, "guessing"], rows, numbers=True)
        yield "Per cent, with one standard error; without examples (powerinfer eval tasks).\n"


def neurons(found: Results) -> Iterator[str]:
    if one := found.get("firing"):
        zeros = one["zeros_by_layer"]
        yield (
            f"For a token {percent(one['active_fraction'])} of the neurons fire, counted over {one['tokens']} tokens; "
            f"{percent(1 - one['active_fraction'])} are exactly zero.\n"
        )
        rows = [
            [str(layer), percent(share), percent(hot)]
            for layer, (share, hot) in enumerate(zip(zeros, one["hot_share_by_layer"], strict=True))
        ]
        rows.append(
            ["mean", *(percent(sum(one[name]) / len(zeros)) for name in ("zeros_by_layer", "hot_share_by_layer"))]
        )
        yield table(["layer", "zeros", "neurons that carry 80 % of its activations"], rows, numbers=True)
        yield "![Zeros by layer](zeros.png)\n"


def power_law(found: Results) -> Iterator[str]:
    if one := found.get("firing"):
        curve, layers = one["curve"], sorted(one["hot_share_by_layer"])
        rows = [[f"{share} %", percent(curve[share])] for share in SHOWN]
        yield table(["most active neurons of the model", "share of all activations"], rows, numbers=True)
        rows = [[name, percent(layer, 0), percent(whole, 0)] for name, (layer, whole) in PUBLISHED.items()]
        here = [percent(layers[len(layers) // 2]), percent(one["hot_share"])]
        rows = [["this model (layers: the median)", *here], *rows]
        yield table(["neurons that carry 80 % of the activations", "of a layer", "of the model"], rows, numbers=True)
        yield "The others as published, arXiv 2312.12456, figure 5.\n\n![Power law](power-law.png)\n"


def largest_kept(found: Results) -> dict[str, Any]:
    """By model, what was measured with only the largest neurons; of one model where the options differ."""
    models = {label: found[f"kept, {label}"] for label in ("original", "sparse") if f"kept, {label}" in found}
    options = [one["options"] for one in models.values()]
    return {label: one for label, one in models.items() if one["options"] == options[-1]}


def kept(found: Results) -> Iterator[str]:
    if models := largest_kept(found):
        rows = []
        for at, one in enumerate(next(iter(models.values()))["kept"]):
            cells = ["all" if one["share"] == 1 else percent(one["share"], 0)]
            for values in models.values():
                value, whole = (values["kept"][place]["perplexity"] for place in (at, -1))
                cells.append(f"{value:.3f} ({value / whole:.3f} x)")
            rows.append(cells)
        yield (
            "Perplexity where of each token's |h| in each layer only the largest are kept, on "
            f"{next(iter(models.values()))['windows']} windows of the texts:\n"
        )
        yield table(["kept", *models], rows, numbers=True)
        yield "![Perplexity by the share that is kept](kept.png)\n"


def curve(found: Results) -> Iterator[str]:
    if one := found.get("curve"):
        if isinstance(one["curve"], str):
            yield f"None: {one['curve']}.\n"
            return
        rows = [
            [
                f"{at['factor']:g}",
                percent(at["zeros"]),
                f"{at['perplexity']:.3f}",
                f"{at['perplexity'] / one['original']:.3f}",
            ]
            for at in one["curve"]
        ]
        yield (
            f"The sparse model with its thresholds times a factor, on {one['windows']} windows of the texts; the "
            f"original's perplexity there is {one['original']:.3f}:\n"
        )
        yield table(["thresholds times", "zeros", "perplexity", "by the original's"], rows, numbers=True)
        yield "![Perplexity by zeros](curve.png)\n"


def predictor(found: Results) -> Iterator[str]:
    if one := found.get("predictor"):
        about = one["predictor"]
        if isinstance(about, str):
            yield f"None: {about}\n"
        elif not about["layers"]:
            yield "There is one, whose training is not recorded.\n"
        else:
            names = ("recall", "precision", "candidate_fraction", "active_fraction")
            layers = about["layers"]
            rows = [
                [str(layer), str(one["rank"]), *(percent(one[name]) for name in names)]
                for layer, one in enumerate(layers)
            ]
            means = [percent(sum(one[name] for one in layers) / len(layers)) for name in names]
            head = ["layer", "rank", "recall", "precision", "candidates", "fire"]
            yield table(head, [*rows, ["mean", "", *means]], numbers=True)
            yield f"On {about.get('held_out_tokens', 'its')} held-out tokens, as `powerinfer train` measured it.\n"


def speed(found: Results) -> Iterator[str]:
    for name, one in found.items():
        if not name.startswith("speed, "):
            continue
        bases = list(next(iter(one["ratio"].values())))
        rows = []
        for label, engine in one["engines"].items():
            rate, sparsity = engine.get("decode_tok_s"), engine.get("sparsity") or {}
            if rate is None:
                rows.append([label, engine.get("error", "")])
                continue
            mark = "*" if engine["kept"] < 3 else ""
            cells = [label, f"{number(rate['median'])}{mark}", f"{number(rate['min'])} to {number(rate['max'])}"]
            cells += [f"{ratio['median']:.2f}" if (ratio := one["ratio"][label][base]) else "" for base in bases]
            read = engine.get("bytes_per_token")
            rows.append([*cells, f"{read / 1e6:.1f}" if read else "", percent(sparsity.get("active_fraction"))])
        threads = name.removeprefix("speed, ").removesuffix(" threads")
        yield (
            f"{threads} thread{'s' * (threads != '1')}, decoding {one['options']['gen_tokens']} tokens, medians of "
            f"{one['options']['rounds']} interleaved rounds; * fewer than three undisturbed ones:\n"
        )
        head = ["", "tokens a second", "from, to", *(f"by {base}" for base in bases), "MB a token", "neurons computed"]
        yield table(head, [row + [""] * (len(head) - len(row)) for row in rows], numbers=True)


SECTIONS: dict[str, Callable[[Results], Iterator[str]]] = {
    "Perplexity": perplexities,
    "Tasks": tasks,
    "Neurons that fire": neurons,
    "Power law": power_law,
    "Only the largest": kept,
    "Thresholds": curve,
    "Predictors": predictor,
    "Speed": speed,
}


# ---------------------------------------------------------------- plots


def plots(document: dict[str, Any]) -> dict[str, bytes]:
    """File name -> PNG, of what was measured. RequestError without matplotlib."""
    need_matplotlib()
    found, made = document["results"], {}
    if one := found.get("firing"):
        made["zeros.png"] = png(partial(draw_zeros, zeros=one["zeros_by_layer"]))
        made["power-law.png"] = png(partial(draw_power_law, curve=one["curve"]))
    if models := largest_kept(found):
        made["kept.png"] = png(partial(draw_kept, models=models))
    if (one := found.get("curve")) and not isinstance(one["curve"], str):
        made["curve.png"] = png(partial(draw_curve, points=one["curve"], original=one["original"]))
    return made


def draw_zeros(figure: Any, zeros: list[float]) -> None:
    axes = figure.add_subplot()
    axes.bar(range(len(zeros)), [100 * share for share in zeros], color=BLUE)
    axes.set(ylim=(0, 100), xlabel="layer", ylabel="neurons that are zero, %", title="Zeros by layer")


def draw_power_law(figure: Any, curve: list[float]) -> None:
    axes = figure.add_subplot()
    axes.plot(range(len(curve)), [100 * share for share in curve], color=ORANGE, label="this model")
    for (name, (_, whole)), marker in zip(PUBLISHED.items(), "os", strict=True):
        axes.plot(100 * whole, 80, marker, color=GREY, label=f"{name}, published")
    axes.set(xlim=(0, 100), ylim=(0, 101), xlabel="neurons of the model, most active first, %")
    axes.set(ylabel="share of all activations, %", title="Share of activations that the most active neurons carry")
    axes.legend(loc="lower right")


def draw_kept(figure: Any, models: dict[str, Any]) -> None:
    axes = figure.add_subplot()
    for (label, found), colour in zip(models.items(), (BLUE, ORANGE), strict=False):
        shares, values = zip(*((100 * one["share"], one["perplexity"]) for one in found["kept"]), strict=True)
        axes.plot(shares, values, "o-", color=colour, label=label)
    axes.set(yscale="log", xlabel="largest neurons that are kept, %", ylabel="perplexity")
    axes.set(title="Perplexity by the share of neurons that is kept")
    axes.legend()


def draw_curve(figure: Any, points: list[dict[str, float]], original: float) -> None:
    axes = figure.add_subplot()
    zeros, ratios = zip(*((100 * one["zeros"], one["perplexity"] / original) for one in points), strict=True)
    axes.plot(zeros, ratios, "o-", color=ORANGE)
    for one, at in zip(points, zip(zeros, ratios, strict=True), strict=True):
        axes.annotate(f"{one['factor']:g}", at, textcoords="offset points", xytext=(0, 6), ha="center")
    axes.axhline(1, color=GREY, linestyle="--")
    axes.set(xlabel="neurons that are zero, %", ylabel="perplexity by the original's")
    axes.set(title="Perplexity by zeros, where the thresholds are multiplied")
