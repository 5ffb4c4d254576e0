"""Show what a model is and how it would run; nothing is computed.

JSON: name, architecture, source, path, file_bytes, parameters, sizes (layers, d_model, heads, ...), rope, activation,
quantisation (main type, bytes by type), tokenizer, chat_template, notes, fingerprint, choices (chosen and why).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_flag
from powerinfer.config import EngineConfig

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
        document = describe(open_checkpoint(path, quantize=engine.quantize, progress=bar))
    document["choices"] = _choices(engine)
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
    }
    for label, text in lines.items():
        out.line(f"{label:<14}{text}")
    for note in document["notes"]:
        out.note(note)


def _rope(rope: dict[str, Any]) -> str:
    pairs = "interleaved pairs" if rope["interleaved"] else "pairs of halves"
    scaling = f", {rope['scaling']} scaling by {rope['factor']:g}" if rope["scaling"] else ""
    return f"theta {rope['theta']:g}, {rope['dim']} dimensions in {pairs}{scaling}"
