"""Making a dense model sparse: another activation, and training until the model has learnt to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from powerinfer.config import LIMITED, ModelConfig, SparsifyConfig
from powerinfer.devices.cpu_experts import ROW_TYPES
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.layout import shapes
from powerinfer.formats.prepared import write_small
from powerinfer.prepare.corpus import SAMPLE_SOURCE, open_corpora
from powerinfer.prepare.training import torch_threads
from powerinfer.progress import Progress, Say, silent
from powerinfer_train.card import card, document
from powerinfer_train.estimate import Rates, memory, stage_costs
from powerinfer_train.finished import RECORD, STATE, asked_for, read_finished, write_finished
from powerinfer_train.own_text import FILE, PART, write_own_text
from powerinfer_train.recipes import (
    Recipe,
    check,
    code_bytes,
    dense_reason,
    moved_biases,
    stored_types,
    trained_names,
)
from powerinfer_train.step_log import LOG_FILE, draw_log
from powerinfer_train.writing import check_writable, fitting, write_model

if TYPE_CHECKING:
    from powerinfer_train.training import HeldOutFigures, Sparsifier, TrainingResult

LONG = 2e13
"""Operations of a training that takes minutes on a CPU, about: how long is measured and said before."""


@dataclass(frozen=True)
class SparsifyResult:
    """path: of the model; document: figures, see `powerinfer sparsify --help`."""

    path: Path
    document: dict[str, Any]


@dataclass(frozen=True)
class Listener:
    """A listener to a run. say: receives notes for the user; agree: called with the hours that it takes, about, before
    a long training begins, and may raise."""

    progress: Progress = silent
    say: Say = silent
    agree: Callable[[float], object] = silent


NOBODY = Listener()


def sparsify(
    checkpoint: Checkpoint,
    corpora: Sequence[str],
    config: SparsifyConfig,
    out: Path,
    listener: Listener = NOBODY,
    threads: int = 0,
    start: Checkpoint | None = None,
) -> SparsifyResult:
    """Make a sparse model out of a dense one in the folder `out`. corpora: paths of texts, none: the built-in sample.

    threads: of the CPU, 0 for all; start: a sparse model made out of the dense one, which is trained further.
    RequestError for options and texts that do not suit the model or the machine, PowerInferError without torch or if
    the loss becomes no number, that or OSError if a file cannot be written. An interrupted run goes on, and of one that
    was finished what came out of it is given again.
    """
    recipe, say = check(config, checkpoint.config), listener.say
    if out.resolve() in (checkpoint.path.resolve(), checkpoint.path.parent.resolve()):
        raise RequestError(f"--out {out} holds the model itself: give another folder")
    texts, text_tokens = open_corpora(corpora), 0
    asked = asked_for(checkpoint, texts, config, start)
    finished = read_finished(out, asked)
    if finished is not None:
        say(f"{out} holds what this command made before: nothing is left to do")
        path = out / finished.path
        return SparsifyResult(path, {"path": str(path), **finished.figures})
    begun = _has_state(out)
    if not corpora:
        say(f"the text is a small built-in sample ({SAMPLE_SOURCE}), which teaches little: use --corpus")
    reason = dense_reason(checkpoint.config, recipe) or _dense_reason_by_type(checkpoint, config)
    if reason is not None:
        say(f"the sparse model will not be faster, {reason}: its zeros can be studied")
    with _output_folder(out), torch_threads(threads):
        from powerinfer_train.training import Sparsifier, check_start

        if start is not None:
            check_start(start, checkpoint, config.recipe)
        _check_model(checkpoint, config, recipe)
        _check_memory(checkpoint, config, recipe)
        if not begun:
            _agree(checkpoint.config, config, recipe, listener)
        if config.own_text:
            progress, tokens = listener.progress, config.own_text
            answers = write_own_text(checkpoint, texts, tokens, config.seed, out, progress, threads, say)
            texts, text_tokens = [*texts, answers], answers.tokens
        work = Sparsifier(checkpoint, texts, config, out, listener.progress, say, start)
        try:
            done = work.run()
        except KeyboardInterrupt:
            say(work.left())
            raise
        path = _write(work, done, checkpoint, config, out)
        if (out / ("config.json" if path.is_file() else "model.gguf")).exists():
            say(f"{out} holds a model as folder, which `-m {out}` takes, and one as file, {out / 'model.gguf'}")
        after = _evaluated(work, path)
    names = [text.name for text in texts]
    figures = document(
        checkpoint.config, checkpoint.path.name, config, names, done.before, after, done.tokens, done.seconds
    )
    figures |= {"own_text_tokens": text_tokens, "start": "/".join(start.path.parts[-2:]) if start else None}
    figures |= _command(config, path.is_file() or checkpoint.source == "gguf")
    draw_log(out, work.stages)
    write_small(out / "README.md", card(figures).encode(errors="replace"))  # names of files may be no text
    figures |= {"limits": list(done.limits), "resumed": done.resumed}
    write_finished(out, asked, path, figures)
    return SparsifyResult(path, {"path": str(path), **figures})


def _has_state(out: Path) -> bool:
    """Whether a training was begun in the folder `out`. RequestError if it has files of anything else."""
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    if STATE not in names and names - {LOG_FILE, f"{STATE}.part", FILE, PART}:
        other = "files that no training made"
        if RECORD in names:
            other = f"a model of other options, texts or models, and no {STATE} to go on from"
        raise RequestError(f"--out {out} has {other}: give a new folder")
    return STATE in names


def _check_model(checkpoint: Checkpoint, config: SparsifyConfig, recipe: Recipe) -> None:
    """Check with `check_writable` all that the training will change."""
    stated: dict[str, Any] = {"hidden_act": recipe.activation}
    if recipe.activation in LIMITED:
        stated["hidden_act_param"] = [0.0] * checkpoint.config.n_layers
    replaced = (*trained_names(checkpoint.config)[1], *moved_biases(checkpoint.config))
    check_writable(checkpoint, stored_types(config), replaced, stated, config.format)


def _check_memory(checkpoint: Checkpoint, config: SparsifyConfig, recipe: Recipe) -> None:
    """RequestError if the device has too little memory."""
    from powerinfer_train.training import fast_type, find_device, free_bytes

    device = find_device(config.device)
    product, free = fast_type(device).itemsize, free_bytes(device)
    codes = code_bytes(checkpoint, config)
    needed = memory(checkpoint.config, recipe, config.rows, config.window, product, codes)[0].device
    if needed <= free:
        return
    least = memory(checkpoint.config, recipe, 1, 1, product, codes)[0].device
    helps = "smaller --rows and --window need less"
    if least > free:
        helps = f"no --rows and --window need less than {least / 2**30:.1f} GiB, take a smaller model"
    raise RequestError(
        f"training needs about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free: {helps}"
    )


def _agree(model: ModelConfig, config: SparsifyConfig, recipe: Recipe, listener: Listener) -> None:
    """Ask whether a long training may begin."""
    costs = stage_costs(model, recipe, config.tokens, config.window)
    if sum(stage.tokens * stage.flops for stage in costs) > LONG:
        from powerinfer_train.timing import hours

        listener.agree(hours(model, config))


def _write(work: Sparsifier, done: TrainingResult, checkpoint: Checkpoint, config: SparsifyConfig, out: Path) -> Path:
    """Write the trained model into the folder `out`; its path."""
    stated: dict[str, Any] = {"hidden_act": work.recipe.activation}
    if done.limits and (work.recipe.activation == "topk" or not done.thresholds):
        stated["hidden_act_param"] = list(done.limits)
    (out / RECORD).unlink(missing_ok=True)  # of other options, with the same state
    types, thresholds = stored_types(config), done.thresholds
    return write_model(checkpoint, out, types, done.changed, work.trained, stated, thresholds, form=config.format)


def _evaluated(work: Sparsifier, path: Path) -> HeldOutFigures:
    """The figures of a model that was written. PowerInferError, and it is removed, if it is of no use."""
    after = work.evaluate(work.opened(open_checkpoint(path)))
    if not math.isfinite(after.perplexity):
        (path if path.is_file() else path / "config.json").unlink()
        raise PowerInferError(
            "the trained model gives no usable probabilities and was removed: train anew, into another --out, with "
            "a smaller --lr or other --zeros"
        )
    return after


def _command(config: SparsifyConfig, with_types: bool) -> dict[str, str | None]:
    """The flags by which a model was made, as its card shows them. with_types: those of weights, too."""
    values = {name: getattr(config, name) for name in ("lr", "tokens", "window", "batch", "rows", "seed")}
    types, stored = None, stored_types(config)
    if with_types:
        types = f"--type {stored.changed} --attention-type {stored.attention} --embedding-type {stored.embedding}"
    return {"options": " ".join(f"--{name} {value}" for name, value in values.items()), "types": types}


def _dense_reason_by_type(checkpoint: Checkpoint, config: SparsifyConfig) -> str | None:
    """Reason for which the engine will compute all neurons of experts, as they are stored; None: it can skip some."""
    types, keeps_format = stored_types(config), checkpoint.source != "gguf" and config.format != "gguf"
    shape_of = dict(shapes(checkpoint.config))
    for name in trained_names(checkpoint.config)[0]:
        if name.endswith((".experts_up", ".experts_down")):
            same = keeps_format or types[name] == "same"
            kind = checkpoint.stored_type(name) if same else fitting(types[name], shape_of[name])
            if kind not in ROW_TYPES:
                return f"experts in {kind} are computed whole (those in {', '.join(ROW_TYPES)} are not: --type)"
    return None


@contextmanager
def _output_folder(out: Path) -> Iterator[None]:
    """The folder, which is removed again where it is new and nothing was written into it. RequestError for one that
    nothing can be written into."""
    new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise RequestError(f"--out {out} cannot be written: {error.strerror or error}; give another folder") from None
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                out.rmdir()
        raise


def measured(config: ModelConfig, options: SparsifyConfig, threads: int = 0, progress: Progress = silent) -> Rates:
    """Rates at which this machine trains a model, see `timing.measure`. PowerInferError without torch."""
    with torch_threads(threads):
        from powerinfer_train.timing import measure

        return measure(config, options, progress)
