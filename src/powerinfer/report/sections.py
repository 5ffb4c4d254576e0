"""The sections of a report: text, plots and tables on one subject each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powerinfer.placement.budget import gib as flag_size
from powerinfer.placement.plan_document import rate, tenths_of_percent
from powerinfer.progress import Progress, silent
from powerinfer.report import plots
from powerinfer.report.page import Image, Section, Table

if TYPE_CHECKING:
    from powerinfer.experts import ExpertProfile
    from powerinfer.formats.predictor_file import PredictorFile
    from powerinfer.neurons import Profile
    from powerinfer.placement.expert_slots import Comparison
    from powerinfer.placement.plan_document import PlanDocument
    from powerinfer.sparsity.selector_trial import MeasuredFfns

Tile = tuple[str, str]
Rows = dict[str, Mapping[int, str]]
"""Columns of the table of layers: heading -> cells by layer, of those that have one."""


@dataclass
class Plots:
    """Draws plots for the page, light and dark, and keeps the light ones by name. expected: their maximum number."""

    expected: int
    progress: Progress = silent
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, section: Section, name: str, caption: str, draw: plots.Draw) -> None:
        """Add a plot to a section, under a name. The caption is also its alternative text."""
        self.progress("drawing plots", len(self.files), self.expected)
        light, dark = (plots.png(draw, look) for look in (plots.LIGHT, plots.DARK))
        self.files[name] = light
        section.images.append((Image(light, dark, caption), caption))


def percent(share: float | None) -> str:
    """A share as text: two or three digits."""
    if share is None:
        return "–"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def size(nbytes: float) -> str:
    """Bytes as text."""
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def gib(nbytes: float) -> str:
    """Memory in GiB as text."""
    return f"{nbytes / 2**30:.3g} GiB"


# ---------------------------------------------------------------- activations


def activations(profile: Profile, drawn: Plots) -> tuple[Section, list[Tile], Rows]:
    """The section on a profile."""
    corpora = len(profile.corpora)
    section, hot = Section("Activations"), profile.hot_share(mass=plots.MASS)
    section.paragraphs.append(
        f"Counted over {profile.tokens:,} tokens" + (f" of {corpora} texts" if corpora > 1 else "")
        + f". A token needs {percent(profile.active_fraction())} of the neurons on average, dense decoding computes all"
        + (", those whose activation exceeds its layer's threshold" if profile.thresholds else "")
        + f". Hot: the {percent(hot)} of all neurons that fire most often carry {percent(plots.MASS)} of the "
        f"activations. Cold: the other {percent(1 - hot)} carry {percent(1 - plots.MASS)}."
    )  # fmt: skip
    drawn.add(
        section,
        "cumulative",
        "Share of all activations carried by the most frequent neurons. Each thin line is a layer, the thick one the "
        f"whole model; dots mark {percent(plots.MASS)} of the activations. The further to the upper left, the more a "
        "small fast memory is worth.",
        lambda figure: plots.draw_cumulative(figure, profile),
    )
    drawn.add(
        section,
        "heat",
        "How often the neurons of each layer fire: hot ones on the left, cold ones on the right.",
        lambda figure: plots.draw_heat_map(figure, profile),
    )
    if corpora > 1:
        section.tables.append(_overlaps(profile))
    layers, hottest = profile.layers, f"neurons for {percent(plots.MASS)}"
    rows: Rows = {
        "active": {layer: percent(profile.active_fraction(layer)) for layer in layers},
        hottest: {layer: percent(profile.hot_share(layer, plots.MASS)) for layer in layers},
        "never fire": {layer: percent(float((profile.counts[layer] == 0).mean())) for layer in layers},
        "kept from token to token": {layer: percent(profile.reuse[layer]) for layer in layers},
    }
    if profile.thresholds is not None:
        rows["threshold"] = {layer: f"{profile.thresholds[layer]:.3g}" for layer in layers}
    tiles = [
        (percent(profile.active_fraction()), "of the neurons active for a token; dense: 100 %"),
        (percent(hot), f"of the neurons are hot: they carry {percent(plots.MASS)} of the activations"),
    ]
    return section, tiles, rows


def _overlaps(profile: Profile) -> Table:
    """The overlap of the most frequent neurons of different texts."""
    corpora = range(len(profile.corpora))
    rows = [
        [profile.corpora[corpus], f"{profile.corpus_tokens[corpus]:,}"]
        + [percent(profile.overlap(corpus, other)) for other in corpora]
        for corpus in corpora
    ]
    head = ["text", "tokens", *(f"with {other + 1}" for other in corpora)]
    numbered = [[f"{number}. {row[0]}", *row[1:]] for number, row in enumerate(rows, 1)]
    return Table(head, numbered, "Shared by the fifth of the neurons that fires most often")


# ---------------------------------------------------------------- experts


def experts(profile: ExpertProfile, replayed: Comparison | None, drawn: Plots) -> tuple[Section, list[Tile], Rows]:
    """The section on a profile of experts; replayed: what the policies hit on a trace."""
    section, corpora = Section("Experts"), len(profile.corpora)
    section.paragraphs.append(
        f"Counted over {profile.tokens:,} tokens" + (f" of {corpora} texts" if corpora > 1 else "")
        + f". The most frequent quarter of the experts has {percent(profile.share_of_top(0.25))} of the selections; "
        f"{percent(profile.mean('reuse'))} of a token's experts are also those of the token before it."
    )  # fmt: skip
    drawn.add(
        section,
        "experts",
        "How often each expert of a layer is selected, the most frequent ones on the left; each line is a layer.",
        lambda figure: plots.draw_experts(figure, profile),
    )
    drawn.add(
        section,
        "slots",
        "Selections whose expert is in a memory for some of the experts. Static: the most frequent ones; LRU: those "
        "selected last; LFU: those selected most often of late; dynamic: static, with a few exchanges.",
        lambda figure: plots.draw_slots(figure, profile, replayed),
    )
    if replayed is not None:
        section.tables.append(_policies(replayed))
    if corpora > 1:
        section.tables.append(_expert_overlaps(profile))
    section.tables.append(_expert_layers(profile))
    tiles = [
        (percent(profile.share_of_top(0.25)), "of the selections for the most frequent 25 % of the experts"),
        (percent(profile.mean("reuse")), "of the experts kept from token to token"),
    ]
    return section, tiles, {}


def _policies(replayed: Comparison) -> Table:
    rows = []
    for at in replayed.at:
        for name, figures in at.policies.items():
            copied = "–" if figures.copies is None else f"{figures.copies:.2f}"
            nbytes = "–" if figures.bytes is None else size(figures.bytes)
            rows.append(
                [
                    f"{name}, {at.slots:g} slots",
                    *(percent(at.share), gib(at.bytes), percent(figures.predicted)),
                    "–" if figures.low is None else f"{percent(figures.low)} to {percent(figures.high)}",
                    *(percent(figures.measured), copied, nbytes),
                ]
            )
    head = ["policy", "of all experts", "memory", "predicted", "over parts of the texts", "measured"]
    head += ["experts copied a token", "bytes a token"]
    title = f"Hits of the policies, replayed over {replayed.tokens:,} tokens" if replayed.tokens else "Hits, predicted"
    return Table(head, rows, title)


def _expert_overlaps(profile: ExpertProfile) -> Table:
    corpora = range(len(profile.corpora))
    rows = [
        [f"{corpus + 1}. {profile.corpora[corpus]}", f"{profile.corpus_tokens[corpus]:,}"]
        + [percent(profile.overlap(corpus, other)) for other in corpora]
        for corpus in corpora
    ]
    head = ["text", "tokens", *(f"with {other + 1}" for other in corpora)]
    return Table(head, rows, "Shared by the fifth of the experts that is selected most often")


def _expert_layers(profile: ExpertProfile) -> Table:
    head = ["layer", "experts", "a token", "top 10 %", "top 25 %", "top 50 %", "Gini", "kept", "foretold", "never"]
    rows = [
        [str(layer.layer), str(layer.n_experts), str(layer.top_k)]
        + [percent(layer.share_of_top(share)) for share in (0.10, 0.25, 0.50)]
        + [f"{layer.gini:.3f}", percent(layer.reuse), percent(layer.foretold), str(int((layer.total == 0).sum()))]
        for layer in profile.layers
    ]
    return Table(head, rows, f"Experts of {len(rows)} layers", True)


# ---------------------------------------------------------------- predictors


def predictors(predictor: PredictorFile, drawn: Plots) -> tuple[Section, list[Tile], Rows]:
    """The section on the predictors; their quality only if the training recorded it."""
    section = Section("Predictors")
    ranks = [one.predictor.rank for one in predictor.layers.values()]
    widths = str(min(ranks)) if len(set(ranks)) == 1 else f"{min(ranks)} to {max(ranks)}"
    rows: Rows = {
        "hidden size": {layer: str(one.predictor.rank) for layer, one in predictor.layers.items()},
        "predictor": {layer: size(nbytes) for layer, nbytes in _sizes(predictor).items()},
    }
    tiles: list[Tile] = []
    text = f"{size(predictor.nbytes)} in {predictor.type}, hidden sizes {widths}."
    training = predictor.training
    if training is None:
        section.paragraphs.append(text + " Their quality was not measured when they were made.")
        return section, tiles, rows
    measured: list[dict[str, Any]] = training["layers"]
    by_layer = dict(zip(predictor.layers, measured, strict=True))
    recall = sum(one["recall"] for one in measured) / len(measured)
    selected = sum(one["candidate_fraction"] for one in measured) / len(measured)
    baseline = sum(one["method"] == "svd" for one in measured)
    section.paragraphs.append(
        f"{text} They are {percent(training['share_of_model'])} of the model. On {training['held_out_tokens']:,} "
        f"held-out tokens they selected {tenths_of_percent(recall)} of the neurons that fired, where "
        f"{tenths_of_percent(training['recall_target'])} was the target, and {percent(selected)} of all neurons."
        + (f" In {baseline} of {len(measured)} layers the training-free baseline was as good." if baseline else "")
    )  # fmt: skip
    drawn.add(
        section,
        "recall",
        "By layer, of held-out tokens: recall, precision, and selected neurons against those that fire.",
        lambda figure: plots.draw_quality(figure, by_layer),
    )
    makers = {"svd": "baseline", "trained": "training"}
    rows |= {
        "recall": {layer: tenths_of_percent(one["recall"]) for layer, one in by_layer.items()},
        "precision": {layer: percent(one["precision"]) for layer, one in by_layer.items()},
        "selected": {layer: percent(one["candidate_fraction"]) for layer, one in by_layer.items()},
        "made by": {layer: makers.get(one["method"], "–") for layer, one in by_layer.items()},
    }
    tiles.append((tenths_of_percent(recall), "of the firing neurons are predicted (recall)"))
    return section, tiles, rows


def _sizes(predictor: PredictorFile) -> dict[int, int]:
    """Bytes of the predictors by layer."""
    return {layer: one.inner.data.nbytes + one.outer.data.nbytes for layer, one in predictor.layers.items()}


# ---------------------------------------------------------------- placements


def placement(plan: PlanDocument, drawn: Plots) -> tuple[Section, list[Tile], Rows]:
    """The section on a plan; what a GPU or a disk does not have is left out."""
    on_gpu = any(layer.gpu for layer in plan.layers) or plan.gpu_layers > 0
    neurons = any(layer.gpu or layer.cpu or layer.disk for layer in plan.layers)
    split = neurons and (on_gpu or any(layer.disk for layer in plan.layers))
    section = Section("Placement")
    section.paragraphs += _placement_paragraphs(plan, on_gpu)
    budgets = {"gpu": plan.budgets.vram, "cpu": plan.budgets.ram}
    drawn.add(
        section,
        "bytes",
        "Bytes in each memory, by purpose; each memory has a scale of its own.",
        lambda figure: plots.draw_bytes(figure, plan.bytes, budgets),
    )
    if split:
        drawn.add(
            section,
            "neurons",
            "Where the neurons of each layer are placed"
            + (", and how much of the layer's activity the GPU takes with its part." if on_gpu else "."),
            lambda figure: plots.draw_neurons(figure, plan.layers),
        )
    if any(sum(layer.seconds.values()) for layer in plan.layers):
        drawn.add(
            section,
            "time",
            "Estimated time of each layer for one token" + ("; GPU and CPU work at the same time." if on_gpu else "."),
            lambda figure: plots.draw_time(figure, plan.layers),
        )
    section.tables += _plan_tables(plan, on_gpu)
    columns = _neuron_columns(plan) if split else {}
    dense = "" if plan.predicted.dense_tok_s is None else f"; dense: {rate(plan.predicted.dense_tok_s)}"
    tiles = [(rate(plan.predicted.decode_tok_s), f"tokens a second, estimated{dense * (plan.selector != 'all')}")]
    if on_gpu:
        columns["activations on GPU"] = {layer.layer: percent(layer.mass_on_gpu) for layer in plan.layers}
        tiles.append((percent(plan.mass_on_gpu), "of the activations on the GPU"))
    return section, tiles, columns


def _placement_paragraphs(plan: PlanDocument, on_gpu: bool) -> list[str]:
    """A plan's machine, speeds, assumptions and reasons."""
    vram = f"{gib(plan.budgets.vram)} of VRAM and " if plan.budgets.vram else ""
    requests = f"{plan.batch} request{'s' * (plan.batch != 1)} with {plan.context} tokens of context"
    return [
        f"On {plan.hardware}, with {vram}{gib(plan.budgets.ram)} of RAM, for {requests}, selector {plan.selector}"
        + (f", policy {plan.policy}: {percent(plan.mass_on_gpu)} of the activations are computed on the GPU" * on_gpu)
        + "."
        + ("" if plan.fits else " Not everything fits; the rest is read from disk."),
        _speeds(plan),
        *(f"Assumed: {line}." for line in plan.assumed),
        *(f"{line[:1].upper()}{line[1:]}." for line in plan.reasons),
    ]


def _neuron_columns(plan: PlanDocument) -> Rows:
    """The neurons of each layer in each memory that has any."""
    return {
        f"neurons on {name}": {layer.layer: f"{getattr(layer, tier):,}" for layer in plan.layers}
        for tier, name in plots.TIER_NAMES.items()
        if any(getattr(layer, tier) for layer in plan.layers)
    }


def _speeds(plan: PlanDocument) -> str:
    """The estimated speed, beside that of the dense model."""
    speed, dense = plan.predicted.decode_tok_s, plan.predicted.dense_tok_s
    text = f"Estimated from its bytes and the machine's rates: {rate(speed)} tokens a second"
    if plan.selector == "all":
        return f"{text}, with every neuron computed."
    if dense is None:
        return f"{text}."
    return f"{text}; computing every neuron (dense) {rate(dense)}: {speed / max(dense, 1e-9):.2f} times that."


def measured(trial: MeasuredFfns) -> tuple[Section, list[Tile], Rows]:
    """The section on what the trial at load measured: the FFNs, each way."""
    section = Section("Measured at load")
    dense = [one["dense"] for one in trial.seconds]
    chosen = [one.get(way, one["dense"]) for one, way in zip(trial.seconds, trial.ways, strict=True)]
    sparse = sum(way != "dense" for way in trial.ways)
    section.paragraphs.append(
        f"On {trial.cpu} with {trial.threads} thread{'s' * (trial.threads != '1')}, selector {trial.selector}: the FFNs"
        f" of all layers take {1e3 * sum(chosen):.3g} ms a token, and {1e3 * sum(dense):.3g} ms if dense; {sparse} of "
        f"{len(dense)} layers decode sparsely. FFNs are a part of a token's time: powerinfer bench --compare measures "
        "the whole."
    )
    if trial.disturbed:
        section.paragraphs.append(
            f"Other programs took {trial.disturbed:.1f} cores meanwhile: the figures mean little, and are measured "
            "again at the first start at which the machine is quiet."
        )
    ways = list(dict.fromkeys(way for one in trial.seconds for way in one))
    timed = list(zip(trial.layers, trial.seconds, strict=True))
    rows: Rows = {
        f"FFN {way}, µs": {layer: f"{1e6 * one[way]:.0f}" for layer, one in timed if way in one} for way in ways
    }
    rows["decodes"] = dict(zip(trial.layers, trial.ways, strict=True))
    tile = (f"{gain_of(trial):.2f} x", f"as fast as dense: the FFNs, measured; {sparse} of {len(dense)} layers sparse")
    return section, [] if trial.disturbed else [tile], rows


def gain_of(trial: MeasuredFfns) -> float:
    """The speed of the FFNs of all layers, as they decode, by that of dense ones."""
    chosen = [one.get(way, one["dense"]) for one, way in zip(trial.seconds, trial.ways, strict=True)]
    return sum(one["dense"] for one in trial.seconds) / max(sum(chosen), 1e-12)


def _plan_tables(plan: PlanDocument, on_gpu: bool) -> Iterator[Table]:
    """Bytes; what larger budgets would help; the other policies."""
    names = list(dict.fromkeys(name for parts in plan.bytes.values() for name in parts))
    rows = [
        [plots.TIER_NAMES[tier], *(size(parts.get(name, 0)) for name in names), size(sum(parts.values()))]
        for tier, parts in plan.bytes.items()
        if parts
    ]
    yield Table(["memory", *names, "together"], rows, "Bytes by memory and purpose", True)
    if plan.helps:
        beyond = {True: "", False: "more than the machine has"}
        helps = [[one.what, one.flag, flag_size(one.bytes), beyond[one.within_machine]] for one in plan.helps]
        yield Table(["what would fit", "from", "", ""], helps, "Larger budgets")
    if plan.predicted.policies and on_gpu:
        policies = [
            [name, f"{one.decode_tok_s:.3g}", percent(one.mass_on_gpu)] for name, one in plan.predicted.policies.items()
        ]
        yield Table(["policy", "tokens a second, estimated", "activations on GPU"], policies, "Policies compared")


# ---------------------------------------------------------------- layer by layer


def layer_section(
    profile: Profile | None, predictor: PredictorFile | None, columns: Sequence[Rows], drawn: Plots
) -> Section:
    """The section with a plot and a table of all figures by layer."""
    section = Section("Layer by layer")
    if profile is not None or predictor is not None:
        sizes = None if predictor is None else {layer: n / 1e6 for layer, n in _sizes(predictor).items()}
        active = "neurons active for a token, their mean and the range of the middle four fifths of the tokens"
        says = [active] * (profile is not None) + ["the size of its predictor"] * (sizes is not None)
        caption = f"Of each layer: {'; '.join(says)}."
        drawn.add(section, "sparsity", caption, lambda figure: plots.draw_sparsity(figure, profile, sizes))
    together: Rows = {}
    for rows in columns:
        together |= rows
    layers = sorted({layer for cells in together.values() for layer in cells})
    cells = [[str(layer), *(own.get(layer, "–") for own in together.values())] for layer in layers]
    section.tables.append(Table(["layer", *together], cells, f"Figures of {len(layers)} layers", True))
    return section
