"""Show what a model is and how it would run, without running it. Nothing is downloaded unless you agree.

JSON: name, architecture, source, path, file_bytes, parameters, sizes (n_layers, d_model, heads, ...; heads that differ
are lists, of every layer, with 0 for those without attention), layers (each kind of layer: numbers of the layers, and
what `LayerConfig` says), draft_head (null: none that is read; bytes on disk, and what `DraftHeadConfig` says),
quantisation (main type, bytes by type, file_type: the mix that a GGUF file states, or null), tokenizer (null: none),
chat_template, notes, unread_keys (of the metadata, that change nothing), fingerprint, choices (chosen and why), memory
(bytes that it takes: ram, kv (of that, the cache of one context; 0: not told apart), drafts (of that, the model of
--speculate), vram, and disk, which stay there; null: it would be refused), prepared (folder; profile, expert_profile,
predictor, bundles and the newest plan, each null if missing: path, bytes, stale (null, or why it cannot be used), and
if it can, tokens, corpora, active_fraction, hot_share (of the neurons, that carry 80 % of activations) and thresholds
of a profile, tokens, corpora, top_25 (share of the selections of the most frequent quarter of the experts), gini, reuse
and slots (share of the experts that have one: predicted hits of static and lru) of an expert profile, type, layers and
training of a predictor, types of bundles, selector, policy, hardware, budgets, context, batch, fits, mass_on_gpu and
decode_tok_s (estimated) of a plan; report: path of its page).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import AttentionConfig, EngineConfig, ExpertsConfig, Uncached
from powerinfer.errors import PowerInferError
from powerinfer.formats.mixes import file_type
from powerinfer.progress import Progress, silent
from powerinfer.text.model_text import chat_template_of, has_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from powerinfer.config import LayerConfig, ModelConfig, RopeConfig
    from powerinfer.experts import ExpertProfile
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.predictor_file import PredictorFile
    from powerinfer.neurons import Profile
    from powerinfer.placement.plan_document import PlanDocument

NO_TEMPLATE = "no chat template: `run` continues the prompt, `chat` writes turns as plain lines"
NORMS = {
    "post": "norms after the sums",
    "output": "norms after attention and FFN",
    "both": "norms before and after attention and FFN",
}
HEADS = ("n_heads", "n_kv_heads", "head_dim")
MEMORIES = {"gpu": "VRAM", "cpu": "RAM"}


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.runtime.options import engine_config

    engine = engine_config(dataclasses.asdict(config_from(args, EngineConfig)))
    with Bar() as bar:
        checkpoint = open_model(args.model, engine, out, bar, fetch_pinned=False, draft_head=True)
        document = describe(checkpoint)
        document["choices"], document["memory"] = _resolved(checkpoint, engine, bar, out)
        if checkpoint.config.draft is not None:  # an EAGLE head has joined it
            document["draft_head"] = _draft_head(checkpoint)
    document["prepared"] = prepared(checkpoint, engine.prepared)
    _show(document, checkpoint.config, out)
    out.document(document)
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model as its files describe it."""
    config = checkpoint.config
    tokenizer = tokenizer_of(checkpoint) if has_tokenizer(checkpoint) else None
    kinds = _kinds(config)
    return {
        "name": config.name,
        "architecture": config.architecture,
        "source": checkpoint.source,
        "path": str(checkpoint.path),
        "file_bytes": checkpoint.file_bytes,
        "parameters": checkpoint.parameters,
        "sizes": _sizes(config),
        "tied_embeddings": config.tied_embeddings,
        "norm_eps": config.norm_eps,
        "layers": [{"numbers": numbers, **_finite(dataclasses.asdict(layer))} for layer, numbers in kinds.items()],
        "draft_head": _draft_head(checkpoint),
        "quantisation": {
            "main": checkpoint.main_type,
            "bytes": checkpoint.bytes_by_type,
            "file_type": file_type(checkpoint.metadata.get("general.file_type")),
        },
        "tokenizer": tokenizer and {"vocab_size": tokenizer.vocab_size, "end_ids": sorted(tokenizer.eos_ids)},
        "chat_template": tokenizer is not None and chat_template_of(checkpoint) is not None,
        "notes": [*checkpoint.notes, *(tokenizer.notes if tokenizer is not None else ())],
        "unread_keys": checkpoint.unread,
        "fingerprint": checkpoint.fingerprint,
    }


def _draft_head(checkpoint: Checkpoint) -> dict[str, Any] | None:
    draft = checkpoint.config.draft
    return None if draft is None else {"bytes": checkpoint.draft_bytes, **_finite(dataclasses.asdict(draft))}


def _finite(value: Any) -> Any:
    """Settings as JSON may have them: no limit (infinity, of Mamba2's steps) is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _sizes(config: ModelConfig) -> dict[str, Any]:
    sizes: dict[str, Any] = {"n_layers": config.n_layers, "d_model": config.d_model}
    for name in HEADS:
        kinds = (layer.attention for layer in config.layers)
        values = [0 if isinstance(kind, Uncached) else getattr(kind, name) for kind in kinds]
        sizes[name] = values[0] if len(set(values)) == 1 else values
    return sizes | {"vocab_size": config.vocab_size, "context_length": config.context_length}


def _kinds(config: ModelConfig) -> dict[LayerConfig, list[int]]:
    """The kinds of layers, and the numbers of those of each kind."""
    kinds: dict[LayerConfig, list[int]] = {}
    for number, layer in enumerate(config.layers):
        kinds.setdefault(layer, []).append(number)
    return kinds


def prepared(checkpoint: Checkpoint, option: str | None) -> dict[str, Any]:
    """The prepared files, and whether they can be used."""
    from powerinfer.formats.prepared import prepared_folder
    from powerinfer.report.findings import findings
    from powerinfer.report.writing import PAGE, report_folder

    details: dict[str, Callable[[Any], dict[str, Any]]]
    details = {
        "profile": _profile,
        "expert_profile": _experts,
        "predictor": _predictor,
        "bundles": _bundles,
        "plan": _plan,
    }
    document: dict[str, Any] = {"folder": str(prepared_folder(checkpoint.path, option))}
    for finding in findings(checkpoint, option):
        name = finding.noun.replace(" ", "_")
        document[name] = None
        if finding.path is not None:
            document[name] = {"path": str(finding.path), "bytes": finding.path.stat().st_size, "stale": finding.stale}
        if finding.value is not None and name in details:
            document[name] |= details[name](finding.value)
    page = report_folder(checkpoint.path, option) / PAGE
    document["report"] = str(page) if page.is_file() else None
    return document


def _profile(profile: Profile) -> dict[str, Any]:
    from powerinfer.report.plots import MASS

    return {
        "tokens": profile.tokens,
        "corpora": list(profile.corpora),
        "active_fraction": profile.active_fraction(),
        "hot_share": profile.hot_share(mass=MASS),
        "thresholds": None if profile.thresholds is None else list(profile.thresholds),
    }


def _experts(profile: ExpertProfile) -> dict[str, Any]:
    from powerinfer.placement.expert_slots import curve

    curves = {name: list(curve(profile, name, 5)) for name in ("static", "lru")}
    return {
        "tokens": profile.tokens,
        "corpora": list(profile.corpora),
        "top_25": profile.share_of_top(0.25),
        "gini": profile.mean("gini"),
        "reuse": profile.mean("reuse"),
        "slots": [
            {"share": static[0], "static": static[1], "lru": lru[1]}
            for static, lru in zip(curves["static"], curves["lru"], strict=True)
        ][1:-1],
    }


def _predictor(file: PredictorFile) -> dict[str, Any]:
    layers = [layer.predictor for layer in file.layers.values()]
    return {"type": file.type, "layers": layers, "training": file.training}


def _bundles(file: BundleFile) -> dict[str, Any]:
    return {"types": file.types_by_part}


def _plan(plan: PlanDocument) -> dict[str, Any]:
    names = ("selector", "policy", "hardware", "context", "batch", "fits", "mass_on_gpu")
    budgets = {"gpu": plan.budgets.vram, "cpu": plan.budgets.ram}
    return {name: getattr(plan, name) for name in names} | {
        "budgets": budgets,
        "decode_tok_s": plan.predicted.decode_tok_s,
    }


def _resolved(
    checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, out: Output
) -> tuple[dict[str, str], dict[str, int] | None]:
    """The choices of `run` with these options, or why it would refuse; and what memory that takes."""
    from powerinfer.devices.choices import Choice, machine_choices
    from powerinfer.hybrid.disk import open_tier
    from powerinfer.hybrid.resolved import needs
    from powerinfer.runtime.draft_sources import check_head, join_head, resolve_beside, smaller_model
    from powerinfer.sparsity.selection import choose

    machine, lines = machine_choices(engine).texts(), list[str]()
    smaller = smaller_model(engine, checkpoint.config.context_length, progress)
    try:
        if smaller is not None and has_tokenizer(checkpoint):
            smaller.check_vocabulary(tokenizer_of(checkpoint))
        join_head(checkpoint, engine, progress)
        beside = engine if smaller is None else smaller.leave_room(engine, checkpoint, progress)
        resolved = resolve_beside(checkpoint, beside, smaller, progress, lines.append)
        check_head(engine, checkpoint.config, [*checkpoint.notes, *lines])
        disk = open_tier(resolved, silent)
    except PowerInferError as error:
        return machine | {"selector": str(Choice(*choose(checkpoint, engine))), "refused": str(error)}, None
    for line in lines:
        out.note(line)
    gpu, placement, selection = None, resolved.placement, resolved.selection
    if placement.layers:
        layers = f"{placement.layers} of {checkpoint.config.n_layers} layers"
        gpu = f"{layers}{' and the head' * placement.head} on {resolved.gpu}"
    reasons = {"selector": Choice(selection.selector, selection.reason), "gpu": Choice(gpu, resolved.device.reason)}
    chosen = {name: str(choice) for name, choice in reasons.items()}
    memory = needs(resolved)._asdict() | {"drafts": 0, "disk": 0}
    if smaller is not None:
        memory["drafts"] = smaller.ram_bytes
        memory["ram"] += memory["drafts"]
        memory["vram"] += smaller.vram_bytes
        chosen |= {"drafts": f"{engine.speculate}, {smaller.place}"} if smaller.place else {}
        if (note := smaller.size_note(checkpoint)) is not None:
            out.note(note)
    if placement.disk is not None and disk is not None:
        chosen["disk"] = disk.about.why
        memory |= {"kv": placement.disk.held["kv"], "disk": sum(placement.disk.resting.values())}
    return machine | chosen, memory


def _show(document: dict[str, Any], config: ModelConfig, out: Output) -> None:
    sizes = document["sizes"]
    lines = {
        "model": document["name"] or document["path"],
        "file": f"{document['path']} ({document['source']}, {document['file_bytes'] / 1e6:.1f} MB)",
        "architecture": f"{document['architecture']}, {document['parameters'] / 1e6:.1f} M parameters",
        "layers": f"{sizes['n_layers']} of width {sizes['d_model']}",
        **_layer_lines(_kinds(config)),
        "attention": _attention(sizes),
        "context": f"{sizes['context_length']} tokens",
        "vocabulary": f"{sizes['vocab_size']} tokens, {_ends(document['tokenizer'])}",
        "head": "the embedding" if document["tied_embeddings"] else "a matrix of its own",
        **_draft_line(document["draft_head"], config),
        "weights": _weights(document["quantisation"]),
        "chat": "has a chat template" if document["chat_template"] else NO_TEMPLATE,
        **document["choices"],
        **_memory_line(document["memory"]),
        **_prepared_lines(document["prepared"]),
    }
    for label, text in lines.items():
        out.line(f"{label:<14}{text}")
    _show_training(document["prepared"]["predictor"], out)
    for note in document["notes"]:
        out.note(note)


def _weights(quantisation: dict[str, Any]) -> str:
    of_types = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in quantisation["bytes"].items())
    mix = quantisation["file_type"]
    return of_types if mix is None else f"{of_types}; the file says {mix}"


def _draft_line(document: dict[str, Any] | None, config: ModelConfig) -> dict[str, str]:
    draft = config.draft
    if document is None or draft is None:
        return {}
    parts = [name for name in ("embedding", "head") if getattr(draft, name)]
    beside = f" with {' and '.join(parts)} of its own" if parts else ""
    kind = "experts" if isinstance(draft.layer.ffn, ExpertsConfig) else "one FFN"
    return {"draft head": f"a layer of {kind}{beside}, {document['bytes'] / 1e6:.1f} MB (--speculate)"}


def _memory_line(memory: dict[str, int] | None) -> dict[str, str]:
    from powerinfer.placement.budget import gib

    if memory is None:
        return {}
    parts = {"kv": "for the KV cache", "drafts": "for the model that drafts"}
    shares = [f"{gib(memory[use])} of it {what}" for use, what in parts.items() if memory[use]]
    within = f" ({', '.join(shares)})" if shares else ""
    more = {"vram": "of VRAM", "disk": "on disk"}
    elsewhere = [f"{gib(memory[use])} {where}" for use, where in more.items() if memory[use]]
    return {"memory": ", ".join([f"{gib(memory['ram'])} of RAM{within}", *elsewhere])}


def _ends(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "no tokenizer among the model's files: it can be packed, but not run"
    ids = ", ".join(map(str, tokenizer["end_ids"]))
    return f"answers end at {ids}" if ids else "no end token: answers end at --max-tokens or a stop string"


def _attention(sizes: dict[str, Any]) -> str:
    lists = (sizes[name] if type(sizes[name]) is list else [sizes[name]] for name in HEADS)
    ranges = [[value for value in values if value] for values in lists]  # 0: of layers without attention
    if not all(ranges):
        return "none"
    heads, kv, dim = map(_span, ranges)
    return f"{heads} heads of {dim}, {kv} for keys and values"


def _prepared_lines(document: dict[str, Any]) -> dict[str, str]:
    lines_by_noun = {
        "profile": _profile_line,
        "expert_profile": _experts_line,
        "predictor": _predictor_line,
        "bundles": _bundles_line,
        "plan": _plan_line,
    }
    lines = {}
    for noun, line in lines_by_noun.items():
        facts = document.get(noun)
        if facts is not None:
            lines["experts" if noun == "expert_profile" else noun] = facts["stale"] or line(facts)
    if document["report"]:
        lines["report"] = document["report"]
    return lines or {"prepared": f"nothing in {document['folder']}"}


def _profile_line(profile: dict[str, Any]) -> str:
    return (
        f"{profile['tokens']:,} tokens of {_texts(profile)}, {_size(profile)}, up to date; "
        f"{100 * profile['active_fraction']:.1f} % active, {100 * profile['hot_share']:.1f} % of the neurons carry "
        "80 % of activations"
    )


def _experts_line(profile: dict[str, Any]) -> str:
    slots = ", ".join(f"{one['share']:.0%}: {one['static']:.0%} and {one['lru']:.0%}" for one in profile["slots"])
    return (
        f"{profile['tokens']:,} tokens of {_texts(profile)}, {_size(profile)}, up to date; the most frequent 25 % have "
        f"{100 * profile['top_25']:.1f} % of the selections; memory for some of them hits, static and LRU, {slots}"
    )


def _texts(facts: dict[str, Any]) -> str:
    return f"{len(facts['corpora'])} text" + "s" * (len(facts["corpora"]) != 1)


def _predictor_line(facts: dict[str, Any]) -> str:
    ranks, thresholds = ([getattr(one, name) for one in facts["layers"]] for name in ("rank", "threshold"))
    return f"{facts['type']}, {_size(facts)}, up to date; ranks {_span(ranks)}, thresholds {_span(thresholds)}"


def _show_training(predictor: dict[str, Any] | None, out: Output) -> None:
    """The predictors' figures by layer, if the file has them."""
    from powerinfer.cli.train import table

    for line in table((predictor or {}).get("training")):
        out.line(line)


def _bundles_line(bundles: dict[str, Any]) -> str:
    types = ", ".join(f"{part} {name}" for part, name in bundles["types"].items() if name)
    return f"{types}, {_size(bundles)}, up to date"


def _plan_line(plan: dict[str, Any]) -> str:
    from powerinfer.placement.plan_document import rate

    budgets = " and ".join(f"{plan['budgets'][tier] / 2**30:.3g} GiB of {name}" for tier, name in MEMORIES.items())
    return (
        f"{budgets}, up to date; {100 * plan['mass_on_gpu']:.1f} % of activations on the GPU, "
        f"{rate(plan['decode_tok_s'])} tokens/s estimated with --selector {plan['selector']} on {plan['hardware']}"
    )


def _size(facts: dict[str, Any]) -> str:
    return f"{facts['bytes'] / 1e6:.1f} MB"


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _layer_lines(kinds: dict[LayerConfig, list[int]]) -> dict[str, str]:
    """A line for each kind of layer; below each other, with their numbers, where there are several."""
    from powerinfer.cli.neurons import ranges

    if len(kinds) == 1:
        return {"each layer": _layer(next(iter(kinds)))}
    of: dict[str, list[int]] = {}  # thresholds differ from layer to layer, and are not shown
    for layer, numbers in kinds.items():
        of.setdefault(_layer(layer), []).extend(numbers)
    if len(of) == 1:
        return {"each layer": next(iter(of))}
    lines = [f"{len(numbers)} ({ranges(sorted(numbers))}): {title}" for title, numbers in of.items()]
    return {"kinds of them": f"\n{'':<14}".join(lines)}


def _layer(layer: LayerConfig) -> str:
    attention, ffn = layer.attention, layer.ffn.neurons
    plain = attention if isinstance(attention, AttentionConfig) else None
    parts = [layer.ffn.title] if type(attention) is AttentionConfig else [layer.ffn.title, attention.title]
    parts += [_rope(attention.rope)] if attention.rope else []
    looks_back = "chunks" if plain and plain.chunked else "window"
    parts += [f"{looks_back} of {attention.window}"] if attention.window else []
    has_bias = {"q, k, v": plain and plain.qkv_bias, "o": plain and plain.o_bias, "FFN": ffn and ffn.bias}
    parts += [f"biases of {', '.join(name for name, has in has_bias.items() if has)}"] if any(has_bias.values()) else []
    norms = {"rotated": "head, once rotated", "plain": "head, without weights", "separate": "head, LayerNorm"}
    parts += [f"q and k normalised by {norms.get(plain.qk_norm, plain.qk_norm)}"] if plain and plain.qk_norm else []
    parts += [NORMS[layer.norms]] if layer.norms in NORMS else []
    parts += ["attention and FFN in parallel"] if layer.parallel else []
    return "; ".join(parts)


def _rope(rope: RopeConfig) -> str:
    pairs = "interleaved pairs" if rope.interleaved else "pairs of halves"
    scaling = f", {rope.scaling} scaling by {rope.factor:g}" if rope.scaling else ""
    return f"RoPE theta {rope.theta:g}, {rope.dim} dimensions in {pairs}{scaling}"
