"""Show what a model is and how it would run; nothing is computed.

JSON: name, architecture, source, path, file_bytes, parameters, sizes (layers, d_model, heads, ...), rope, activation,
quantisation (main type, bytes by type), tokenizer, chat_template, notes, fingerprint, choices (chosen and why),
prepared (folder; bundles and predictor, null where there are none: path, bytes, stale (null, or why they cannot be
used), and if they can, the types of bundles, the type and layers of a predictor).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_flag
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
SWITCHES = ("tied_embeddings", "qkv_bias", "o_bias", "ffn_bias", "qk_norm", "sliding_window")


def configure(parser: argparse.ArgumentParser) -> None:
    model_flag(parser)
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.formats.hub import resolve_model

    engine = config_from(args, EngineConfig)
    path = resolve_model(args.model, say=out.note)
    with Bar() as bar:
        checkpoint = open_checkpoint(path, quantize=engine.quantize, progress=bar)
        document = describe(checkpoint)
    document["choices"] = _choices(engine)
    document["prepared"] = prepared(checkpoint, engine.prepared)
    _show(document, out)
    out.document(document)
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the files say about the model."""
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer()
    return {
        "name": config.name,
        "architecture": config.architecture,
        "source": checkpoint.source,
        "path": str(checkpoint.path),
        "file_bytes": checkpoint.file_bytes,
        "parameters": checkpoint.parameters,
        "sizes": {name: getattr(config, name) for name in SIZES},
        "switches": {name: getattr(config, name) for name in SWITCHES},
        "activation": config.activation,
        "norm_eps": config.norm_eps,
        "rope": dataclasses.asdict(config.rope),
        "quantisation": {"main": checkpoint.main_type, "bytes": checkpoint.bytes_by_type},
        "tokenizer": {"vocab_size": tokenizer.vocab_size, "end_ids": sorted(tokenizer.eos_ids)},
        "chat_template": checkpoint.chat_template() is not None,
        "notes": checkpoint.notes,
        "fingerprint": checkpoint.fingerprint,
    }


def prepared(checkpoint: Checkpoint, option: str | None) -> dict[str, Any]:
    """What lies in the folder of prepared files, and whether it can be used."""
    from powerinfer.formats.pack import open_bundles
    from powerinfer.formats.predictor_file import open_predictor
    from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PreparedFile, prepared_folder
    from powerinfer.kernels.cpu import part_bytes

    def bundles() -> dict[str, Any]:
        layout = open_bundles(checkpoint, option, part_bytes).layout
        gate = layout.gate_type if layout.gated else None
        return {"types": {"gate": gate, "up": layout.gate_type, "down": layout.down_type}}

    def predictor() -> dict[str, Any]:
        file = open_predictor(checkpoint, option)
        return {"type": file.type, "layers": [layer.predictor for layer in file.layers]}

    document: dict[str, Any] = {"folder": str(prepared_folder(checkpoint.path, option))}
    for name, kind, read in (("bundles", BUNDLES, bundles), ("predictor", PREDICTOR, predictor)):
        place = PreparedFile(kind, checkpoint, option)
        document[name] = None
        if place.exists():
            found = {"path": str(place.path), "bytes": place.path.stat().st_size, "stale": None}
            try:
                document[name] = found | read()
            except ModelError as error:
                document[name] = found | {"stale": str(error)}
    return document


def _choices(engine: EngineConfig) -> dict[str, str]:
    from powerinfer.kernels.cpu import choices

    return choices(engine)


def _show(document: dict[str, Any], out: Output) -> None:
    sizes = document["sizes"]
    lines = {
        "model": document["name"] or document["path"],
        "file": f"{document['path']} ({document['source']}, {document['file_bytes'] / 1e6:.1f} MB)",
        "architecture": f"{document['architecture']}, {document['parameters'] / 1e6:.1f} M parameters",
        "layers": f"{sizes['n_layers']} of width {sizes['d_model']}, FFN {sizes['d_ff']}, {document['activation']}",
        "attention": f"{sizes['n_heads']} heads of {sizes['head_dim']}, {sizes['n_kv_heads']} for keys and values",
        "context": f"{sizes['context_length']} tokens",
        "vocabulary": f"{sizes['vocab_size']} tokens, answers end at {document['tokenizer']['end_ids']}",
        "rope": _rope(document["rope"]),
        "switches": ", ".join(name for name, value in document["switches"].items() if value) or "none",
        "weights": ", ".join(f"{kind} {n / 1e6:.1f} MB" for kind, n in document["quantisation"]["bytes"].items()),
        "chat": "has a chat template" if document["chat_template"] else "no chat template: use --raw",
        **document["choices"],
        **_prepared_lines(document["prepared"]),
    }
    for label, text in lines.items():
        out.line(f"{label:<14}{text}")
    for note in document["notes"]:
        out.note(note)


def _prepared_lines(document: dict[str, Any]) -> dict[str, str]:
    lines = {}
    bundles, predictor = document["bundles"], document["predictor"]
    if bundles:
        types = ", ".join(f"{part} {name}" for part, name in bundles.get("types", {}).items() if name)
        lines["bundles"] = bundles["stale"] or f"{types}, {bundles['bytes'] / 1e6:.1f} MB, up to date"
    if predictor:
        layers = predictor.get("layers", [])
        ranks, thresholds = [one.rank for one in layers], [one.threshold for one in layers]
        lines["predictor"] = predictor["stale"] or (
            f"{predictor['type']}, {predictor['bytes'] / 1e6:.1f} MB, up to date; ranks {_span(ranks)}, "
            f"thresholds {_span(thresholds)}"
        )
    return lines or {"prepared": f"nothing in {document['folder']}"}


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _rope(rope: dict[str, Any]) -> str:
    pairs = "interleaved pairs" if rope["interleaved"] else "pairs of halves"
    scaling = f", {rope['scaling']} scaling by {rope['factor']:g}" if rope["scaling"] else ""
    return f"theta {rope['theta']:g}, {rope['dim']} dimensions in {pairs}{scaling}"
