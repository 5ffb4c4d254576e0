"""Show what sparse decoding gains on this machine: the same tokens dense and sparse in turn, in under a minute.

First with a model of wide rows in which 10 % of the neurons fire for a token, as a ReLU makes them: its weights are
random, for the speed, and its words mean nothing. It is written into the cache once, `powerinfer rm random-relu` or
--remove deletes it. Then, in a clone, with smollm2-sparse, a small real model: its answer and its perplexity, dense and
sparse. Everything is measured, on the CPU alone. On a terminal a bar shows the neurons that are computed for a token:
each column is a share of them, the hot ones, which fire most often, on the left.

JSON: models (of each: name, dense and sparse (decode_tok_s: median, min, max; bytes_per_token), ratio (the median of
the rounds), computed_fraction (of the neurons), hot_share (of the neurons, those that make 80 % of the activations
seen), tokens, same_tokens, disturbed (cores that other programs took meanwhile), answers (dense, sparse) and perplexity
(dense, sparse, apart: the logarithm of their ratio, apart_error: its standard error, tokens) of the real one, else
null), seconds; with --remove: removed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, load_llm, printable, wrapped
from powerinfer.cli.screen import styled
from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError
from powerinfer.runtime.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.comparison import Comparison, Run
    from powerinfer.hub import StoredModel
    from powerinfer.runtime.engine import LLM

RANDOM, REAL = "random-relu", "smollm2-sparse"
QUESTION = "Why is the sky blue?"
TOKENS = 64  # of an answer
ROUNDS = 4
PATIENCE = 12.0  # seconds after which no further round of a model begins
REDRAW = 0.1  # seconds between redraws of the bar
COLUMNS = 40  # of the bar
WIDTH = 100  # of the longest line
WINDOW, STEP = 256, 8  # tokens of the windows of the perplexity, and of its steps, which are sparse as those of decode
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " .:-=+*#@"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", action="store_true", help="delete the model that this command wrote, and end")
    config_flags(parser, EngineConfig, "engine", only=("threads",))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.hub import cloned_models

    if args.remove:
        return _remove(out)
    begin = time.perf_counter()
    engine: EngineConfig = config_from(
        args, EngineConfig, selector="exact", trial=False, gpu="none", max_batch=STEP, context=2 * WINDOW,
        prefix_cache=False,
    )  # fmt: skip
    stored = _random_model(engine, out)
    shown = [_show_random(stored, engine, out)]
    real = cloned_models().get(REAL)
    if real is None:
        out.line()
        _say(f"2. For real text there is {REAL}, which comes with a clone of powerinfer: run this there.", out)
    else:
        shown.append(_show_real(real, stored.path.parent / f"{REAL}.powerinfer", engine, out))
    out.line()
    _say(_sentence(shown), out)
    out.document({"models": shown, "seconds": time.perf_counter() - begin})
    return 0


def _say(text: str, out: Output) -> None:
    """Lines that fit a terminal."""
    from shutil import get_terminal_size

    out.line(wrapped(text, min(get_terminal_size().columns, WIDTH)))


def _remove(out: Output) -> int:
    from powerinfer.hub import find_stored, remove

    removed = find_stored(RANDOM) is not None
    if removed:
        remove(RANDOM)
    out.line(f"{RANDOM} {'is removed' if removed else 'is not there'}")
    out.document({"removed": removed})
    return 0


def _sentence(shown: Sequence[dict[str, Any]]) -> str:
    from powerinfer.sparsity.verdict import worth_it

    random, *rest = shown
    wide = f"where rows are wide and {100 * random['computed_fraction']:.0f} % of the neurons fire"
    sentence = f"Skipping neurons decodes {random['ratio']:.2f} x as fast on this machine {wide}"
    for real in rest:
        gains = "gains too" if worth_it(real["ratio"]) else "gains nothing"
        sentence += f"; {real['name']}, a small model of narrow rows, {gains}: {real['ratio']:.2f} x"
    return sentence + "."


# ---------------------------------------------------------------- the models


def _random_model(engine: EngineConfig, out: Output) -> StoredModel:
    """The model with random weights, which is written unless it is there."""
    from powerinfer.cli.progress import Bar
    from powerinfer.hub import made_model
    from powerinfer.kernels.cpu import choose_threads
    from powerinfer.random_model import WIDE, write_random_model

    with Bar() as bar:

        def make(path: Path) -> None:
            write_random_model(path, WIDE, RANDOM, bar, choose_threads(engine.threads)[0])

        return made_model(RANDOM, f"{RANDOM}.gguf", f"random weights: {WIDE}", 2 * WIDE.nbytes, make, out.note)


def _show_random(stored: StoredModel, engine: EngineConfig, out: Output) -> dict[str, Any]:
    from powerinfer.random_model import WIDE

    _say(
        f"1. {RANDOM}: random weights, for the speed; its words mean nothing. {WIDE.n_layers} layers of {WIDE.d_ff} "
        f"neurons, {stored.nbytes / 1e6:.0f} MB; `powerinfer rm {RANDOM}` deletes it.", out
    )
    with _loaded(stored.path, None, engine, out) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
        return _compare(RANDOM, llm, llm.encode(QUESTION), params, out)[1]


def _show_real(path: Path, folder: Path, engine: EngineConfig, out: Output) -> dict[str, Any]:
    from importlib.resources import files

    from powerinfer.cli.progress import Bar
    from powerinfer.evaluate import dense_and_sparse

    out.line()
    out.line(f"2. {REAL}: a small real model, asked: {QUESTION}")
    with _loaded(path, folder, engine, out) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, repetition_penalty=1.1)
        tokens = llm.encode_chat([{"role": "user", "content": QUESTION}])
        comparison, document = _compare(REAL, llm, tokens, params, out)
        text = files("powerinfer.prepare").joinpath("sample.txt").read_text(encoding="utf-8")
        with Bar() as bar:
            quality = dense_and_sparse(llm, text, WINDOW, bar, STEP)
    document["perplexity"] = asdict(quality)
    answers = document["answers"] = {"dense": _text(comparison.dense), "sparse": _text(comparison.sparse)}
    for side in ("sparse",) if answers["dense"] == answers["sparse"] else ("dense", "sparse"):
        _say(f"answer, {side}: {printable(' '.join(answers[side].split()))}...", out)
    verdict = "the same quality, as far as this text can tell" if quality.alike else "not the same quality"
    _say(
        f"perplexity of {quality.tokens} tokens of old books: dense {quality.dense:.2f}, sparse {quality.sparse:.2f}, "
        f"{100 * quality.apart:+.1f} % with a standard error of {100 * quality.apart_error:.1f}: {verdict}",
        out,
    )
    return document


def _text(run: Run) -> str:
    return run.answer.text if run.answer else ""


def _loaded(path: Path, folder: Path | None, engine: EngineConfig, out: Output) -> LLM:
    """The model with its bundles: those beside it, else those in the folder, which are packed unless they are there."""
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.prepare.packing import current, pack

    checkpoint = open_checkpoint(path)
    types = choose_types(checkpoint)
    prepared = None
    with Bar() as bar:
        if current(checkpoint, None, types) is None:
            prepared = None if folder is None else str(folder)
            if current(checkpoint, prepared, types) is None:
                pack(checkpoint, prepared, types, bar, engine.threads)
        llm = load_llm(path, replace(engine, prepared=prepared), bar)
    if llm.disk is not None:
        llm.close()
        raise PowerInferError("too little memory is free to hold the model: close other programs, and try again")
    return llm


# ---------------------------------------------------------------- both sides


def _compare(
    name: str, llm: LLM, prompt: Sequence[int], params: SamplingParams, out: Output
) -> tuple[Comparison, dict[str, Any]]:
    from powerinfer.comparison import compare

    with SpeedDisplay(llm) as display:
        pair = compare(llm, prompt, params, ROUNDS, display, PATIENCE)
        display.look()
        hot, mean = display.hot_share(), display.mean()
    lines = (("dense", pair.dense, None), ("sparse", pair.sparse, mean))
    for side, run, shares in lines:
        out.line(f"{side:<7}{display.drawn(shares, sys.stderr if out.json_mode else sys.stdout)}  {_speed(run)}")
    summary = f"{pair.ratio:.2f} x as fast; {100 * pair.computed_fraction:.0f} % of the neurons are computed. Hot: "
    summary += f"{100 * hot:.0f} % of all neurons make 80 % of the activations. {_same(pair)}"
    if pair.disturbed:
        summary += f" Other programs took {pair.disturbed:.1f} cores meanwhile: on a quiet machine it may differ."
    _say(summary, out)
    return pair, {"name": name, **pair.document(), "hot_share": hot, "answers": None, "perplexity": None}


def _speed(run: Run) -> str:
    read = "" if run.bytes_per_token is None else f"  {run.bytes_per_token / 1e6:6.1f} MB a token"
    return f"{run.median:6.1f} tokens/s{read}"


def _same(comparison: Comparison) -> str:
    same, tokens = comparison.same_tokens
    if same == tokens:
        return f"Both said the same {tokens} tokens."
    return f"The first {same} of {tokens} tokens are the same; sums in another order decided between the next two."


class SpeedDisplay:
    """The bar of neurons, while answers come; as a context manager it removes itself at the end."""

    def __init__(self, llm: LLM) -> None:
        self._live = llm.live()
        self._widest = max(llm.config.ffn_sizes)
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._sums: list[NDArray[np.float64]] = []  # of each layer, tokens that each neuron fired for
        self._recent: list[NDArray[np.float64]] = []  # of each layer, shares of the tokens since the last look
        self._tokens = 0
        self._next = self._begin = time.monotonic()

    def __call__(self, side: str, tokens: int) -> None:
        """Take a token of a side."""
        now = time.monotonic()
        if tokens <= 1:
            self._begin = now
        if now < self._next:
            return
        self._next = now + REDRAW
        self.look()
        if self._terminal and tokens > 1 and self._recent:
            shares = None if side == "dense" else self._columns(self._recent)
            rate = (tokens - 1) / max(now - self._begin, 1e-9)
            sys.stderr.write(f"\r{side:<7}{self.drawn(shares, sys.stderr)}  {rate:6.1f} tokens/s\033[K")
            sys.stderr.flush()

    def look(self) -> None:
        """Take the neurons that fired since the last look."""
        fired = [(one.fired, one.tokens) for one in self._live.look(self._widest) if one.fired is not None]
        if fired:
            self._recent = [shares for shares, _ in fired]
            counts = [shares * tokens for shares, tokens in fired]
            self._sums = [a + b for a, b in zip(self._sums, counts, strict=True)] if self._sums else counts
            self._tokens += fired[0][1]

    def mean(self) -> NDArray[np.float64]:
        """Shares of the neurons that fired for a token, by column, of all tokens so far."""
        return self._columns([counts / self._tokens for counts in self._sums])

    def _columns(self, layers: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Means of the layers, whose neurons are sorted by how often they fired so far."""
        import numpy as np

        columns = []
        for fired, sums in zip(layers, self._sums, strict=True):
            ordered = fired[np.argsort(-sums, kind="stable")]
            edges = np.arange(COLUMNS) * len(ordered) // COLUMNS
            columns.append(np.add.reduceat(ordered, edges) / np.diff([*edges, len(ordered)]))
        return np.asarray(np.mean(columns, axis=0))

    def hot_share(self) -> float:
        """The share of the neurons that make 80 % of the activations seen."""
        import numpy as np

        from powerinfer.placement.power_law import hot_share

        return hot_share(np.concatenate(self._sums))

    def drawn(self, shares: NDArray[np.float64] | None, to: Any) -> str:
        """A bar of the shares, None: every neuron; in characters and colours that the stream has."""
        blocks = BLOCKS if "utf" in (getattr(to, "encoding", None) or "").lower() else PLAIN
        heights = [8] * COLUMNS if shares is None else [min(8, -int(-8 * share // 1)) for share in shares.tolist()]
        bar = "".join(blocks[height] for height in heights)
        return styled(bar, "dim" if shares is None else "yellow", to)

    def __enter__(self) -> SpeedDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._live.close()
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
