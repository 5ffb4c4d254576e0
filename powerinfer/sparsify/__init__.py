"""Making a dense model sparse: another activation, and training until the model has learnt to do with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer.config import SparsifyConfig
from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.prepared import write_small
from powerinfer.prepare.corpus import open_corpora
from powerinfer.prepare.training import torch_threads
from powerinfer.progress import Progress, silent
from powerinfer.sparsify.card import card, document
from powerinfer.sparsify.recipes import check_recipe
from powerinfer.sparsify.writing import check_writable, write_model


@dataclass(frozen=True)
class Made:
    """path: of the model; document: figures, see `powerinfer sparsify --help`."""

    path: Path
    document: dict[str, Any]


def sparsify(
    checkpoint: Checkpoint,
    corpora: Sequence[str],
    config: SparsifyConfig,
    out: Path,
    progress: Progress = silent,
    threads: int = 0,
) -> Made:
    """Make a sparse model out of a dense one in the folder `out`. corpora: paths of texts, none: the built-in sample.

    threads: of the CPU, 0 for all. RequestError for options and texts that do not suit the model, PowerInferError
    without torch, if a file cannot be written, or if the loss becomes no number. An interrupted run goes on.
    """
    check_recipe(config.recipe, checkpoint.config)
    if out.resolve() in (checkpoint.path.resolve(), checkpoint.path.parent.resolve()):
        raise RequestError(f"--out {out} holds the model itself: give another folder")
    texts = open_corpora(corpora)
    with torch_threads(threads):
        from powerinfer.sparsify.training import Sparsifier

        work = Sparsifier(checkpoint, texts, config, out, progress)
        check_writable(checkpoint, work.trained_names)
        done = work.run()
        about: dict[str, Any] = {"hidden_act": work.recipe.activation}
        if done.limits:
            about["hidden_act_param"] = list(done.limits)
        path = write_model(checkpoint, out, config.type, done.changed, work.values, about)
    names = [one.name for one in texts]
    figures = document(
        checkpoint.config, checkpoint.path.name, config, names, done.before, done.after, done.tokens, done.seconds
    )
    write_small(out / "README.md", card(figures).encode())
    return Made(path, {"path": str(path), **figures, "limits": list(done.limits), "resumed": done.resumed})
