"""Training of a sparse model: stages, thresholds, what is kept to resume from, and figures.

The model is distilled: its teacher is the original, so any text will do. The share of zeros is raised slowly.

    regress   sum over layers of |own FFN(x) - original FFN(x)|^2 / |original FFN(x)|^2, x from the original model;
              an expert counts as an FFN
    distil    mean over tokens of KL(original || own) of the next token

Where the activation has thresholds, each layer's follows the quantile of what it is compared with, so that the target
share stays below. A weighted recipe compares a neuron's activation a times its importance, which is the same as a
threshold of its own: the root mean square of dL/da over tokens, L the loss of labels that the original draws, so that
its square times a^2 / 2 is about what L gains when the neuron is left out (the diagonal of the Fisher information).

A recipe with products does the same with h, after the gates' share of the zeros: the importance is then of dL/dh.

Of topk these thresholds are the inverse importances, and how many neurons of a bank count follows from the target.

With neither a penalty is added to the loss: the share of neurons that fire, counted softly so that it has a gradient
(see `_firing`), times a factor that grows while fewer are zero than the target asks for.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from powerinfer.config import BANK, LIMITED, ExpertsConfig, FfnConfig, ModelConfig, SparsifyConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.folder import THRESHOLDS
from powerinfer.formats.json_file import Between, NonNegative
from powerinfer.formats.layout import MAX_SCALE, shapes
from powerinfer.formats.prepared import TRAINING, PreparedFile
from powerinfer.formats.quant import dequantize, quantize
from powerinfer.formats.tensors import RawTensor, float32_tensor
from powerinfer.prepare.adam import Adam, Moments
from powerinfer.prepare.corpus import Corpus, read_windows
from powerinfer.progress import Progress, Say, silent
from powerinfer.system import available_memory
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.model_text import chat_template_of, tokenizer_of
from powerinfer.text.tokenizer import Tokenizer
from powerinfer_train.blocks import Blocks
from powerinfer_train.finished import STATE
from powerinfer_train.recipes import (
    RECIPES,
    RecipeStage,
    check,
    gate_share,
    moved_biases,
    scaled_types,
    stored_types,
    trained_names,
)
from powerinfer_train.step_log import StepLog
from powerinfer_train.torch_model import ROUNDED, NeuronValues, TorchModel, load, narrowed
from powerinfer_train.writing import fitting

HELD_OUT = 0.02  # of the windows of each text, at least MIN_HELD_OUT: measured on, never trained on
MIN_HELD_OUT = 2
MAX_HELD_OUT = 16_384  # tokens of each text
READ = 16_000_000  # tokens of the texts that are read at least, for a short training to draw from
WARM_UP = 20  # steps in which a stage's learning rate rises
FOLLOWS = 0.5  # how far a threshold goes towards the quantile of a step
SAMPLE_INTERVAL = 31  # of the tokens of a step, one of so many counts for the quantile
SOFT = 0.25  # of `_firing`
SCORED = 128  # tokens whose logits are in memory at once
CACHED = 8  # of them, those gone through at once on a CPU: few, so that their logits stay in the caches
MOST_PENALTY = 10.0
WEIGHED = 12_288  # tokens that importances are taken from


class HeldOutFigures(NamedTuple):
    """Figures of a model on held-out windows: perplexity of their second halves, as `eval perplexity` scores them, and
    share of zeros in each layer."""

    perplexity: float
    zeros: tuple[float, ...]


@dataclass(frozen=True)
class TrainingResult:
    """changed: canonical names; limits: thresholds of the layers, of topk how many neurons of a bank count, () where
    there are none; thresholds: of the neurons, by canonical name, of layers that have such; tokens, seconds: of all
    runs; resumed: steps of earlier ones."""

    changed: tuple[str, ...]
    limits: tuple[float, ...]
    thresholds: Mapping[str, NDArray[np.float32]]
    before: HeldOutFigures
    tokens: int
    seconds: float
    resumed: int


@dataclass(frozen=True)
class _TrainingState:
    """Header of a training's state. run: what it is of, as of `Sparsifier._run`; compute: the type of its
    products; lr: --lr of the last step; seconds: of all runs; step: how many are done; limits, penalty: as the next one
    begins."""

    run: dict[str, Any]
    compute: Literal["float32", "bfloat16"]
    lr: NonNegative
    seconds: NonNegative
    step: Annotated[int, Between(1, 1 << 60)]
    limits: dict[str, tuple[Annotated[float, Between(0, MAX_SCALE)], ...]]
    penalty: Annotated[float, Between(0, MOST_PENALTY)]


class _Limits:
    """Thresholds of what neurons are compared by: one in each layer, which follows a quantile, and where neurons have
    an importance a neuron's is the layer's divided by that."""

    def __init__(self, layers: int) -> None:
        self.of = dict.fromkeys(range(layers), 0.0)  # by layer
        self.importance: dict[str, Tensor] = {}  # by the name of an FFN, float32 [d_ff], with mean 1
        self._observed: list[list[Tensor]] = [[] for _ in self.of]  # by layer, since `follow`

    def __call__(self, name: str, device: torch.device) -> Tensor:
        """Limit of an FFN by its name, [] or [d_ff]."""
        importance = self.importance.get(name)
        limit = torch.tensor(self.of[_layer(name)], device=device)
        return limit if importance is None else limit / importance

    def see(self, name: str, compared: Tensor) -> None:
        """Magnitudes [..., d_ff] that were compared."""
        importance, sample = self.importance.get(name), compared.flatten(0, -2)[::SAMPLE_INTERVAL]
        self._observed[_layer(name)].append((sample if importance is None else sample * importance).flatten())

    def follow(self, share: float) -> None:
        """Each layer's threshold goes towards the quantile of what was seen since the last call."""
        for layer, observed in enumerate(self._observed):
            if observed:
                sample = torch.cat(observed)
                wanted = max(0.0, float(sample.kthvalue(max(1, round(share * sample.numel()))).values))
                before = self.of[layer]
                self.of[layer] = before + FOLLOWS * (wanted - before) if before else wanted
            observed.clear()

    def take(self, name: str, thresholds: Tensor) -> None:
        """Take the thresholds that the neurons of an FFN have in a model [d_ff]."""
        inverse = 1 / thresholds.clamp_min(1e-3 * float(thresholds.mean()) + 1e-30)
        mean = float(inverse.mean())
        self.importance[name], self.of[_layer(name)] = inverse / mean, 1 / mean


def _weights(squares: Tensor) -> Tensor:
    """Importances [d_ff] by the sums of squares of derivatives. Where nothing depends on a neuron its threshold would
    be infinite: so it is a thousand times the layer's."""
    root = squares.sqrt()
    return (root / root.mean().clamp_min(1e-30)).clamp_min(1e-3)


def _layer(name: str) -> int:
    """Layer of an FFN by its name."""
    return int(name.split(".")[1])


class Sparsifier:
    """One training. `run` may be interrupted at any time, and goes on from the state kept last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        corpora: Sequence[Corpus],
        config: SparsifyConfig,
        out: Path,
        progress: Progress = silent,
        say: Say = silent,
        start: Checkpoint | None = None,
    ) -> None:
        """start: a sparse model made out of the checkpoint's, whose weights and thresholds the training begins with.

        RequestError for options that do not suit the model or each other, a start that is none, and for texts that are
        too short.
        """
        self.recipe = check(config, checkpoint.config)
        self.config, self._progress, self._say, self._checkpoint, self._out = config, progress, say, checkpoint, out
        self.device = find_device(config.device)
        if self.device.type == "cpu":
            _keep_freed_memory()
        self._train, self._held_out = _texts(*self.text_of(checkpoint), corpora, config, progress, say, start)
        self._state = PreparedFile(TRAINING, checkpoint, path=out / STATE, option=("--out", "FOLDER"))
        self._ffns, self._all = trained_names(checkpoint.config)
        self._moved = moved_biases(checkpoint.config)
        self._embedding: tuple[str, ...] = ()  # where its type changes
        self._make_models(start)
        kinds = ("threshold", "product_threshold") if self.recipe.products else ("threshold",)
        self._limits = {kind: _Limits(checkpoint.config.n_layers) for kind in kinds}  # by the name of a neuron's
        self._gates, self._products = self._limits["threshold"], self._limits.get("product_threshold")
        ffns = {f"layers.{n}.": layer.ffn for n, layer in enumerate(checkpoint.config.layers)}
        dense = self.recipe.weighted and all(isinstance(ffn, FfnConfig) for ffn in ffns.values())
        self._weighted = {name: ffn.width for name, ffn in ffns.items() if dense}  # by the name of an FFN, its neurons
        self._start = start
        if start is not None:
            self._take_thresholds(start)
        self._follow: float | None = None  # the share of zeros that thresholds are to give
        self._order: tuple[int, NDArray[np.int64]] | None = None  # (how often the text was through, its windows' order)
        self._kept_step = 0
        self._seconds = 0.0  # of the runs before this one
        self._began = time.monotonic()
        self._penalty = 0.05
        self._counted = [0, 0]  # zeros, and all, since the log's last line
        self._firing: list[Tensor] = []
        self._windows = config.batch // config.window  # of a step
        if config.batch % config.window:
            total = self._windows * config.window
            say(f"--batch {config.batch} is not a multiple of --window {config.window}: a step has {total} tokens")
        self._steps = max(1, config.tokens // (self._windows * config.window))
        stages = self.recipe.stages
        if start is not None:  # its weights were rounded already, and would be far off between the stages
            stages = tuple(replace(stage, stored=True) for stage in stages if stage.name != "regress")
        self.stages = self._divided(stages)

    def _make_models(self, start: Checkpoint | None) -> None:
        """The teacher and the student, as the training begins."""
        checkpoint, config, compute = self._checkpoint, self.config, self._compute()
        types = stored_types(config)
        scaled = scaled_types(checkpoint, self._all, types)
        self._blocks = {name: Blocks.from_tensor(checkpoint.stored(name), self.device) for name in scaled}
        still = {name: blocks.still() for name, blocks in self._blocks.items()}
        weights = {name: value.to(self.device) for name, value in load(checkpoint, scaled).items()} | still
        frozen = narrowed(weights, compute) | still
        self.teacher = TorchModel(checkpoint.config, frozen, compute)
        gguf = "gguf" in (checkpoint.source, config.format)
        transposed = {name for name in self._all if checkpoint.is_transposed(name)}
        rows = {name: weights[name].shape[-2 if name in transposed else -1] for name in self._all}
        rough = [name for name in self._all if gguf and types[name] in ROUNDED and rows[name] % 32 == 0]
        self._rounded = {name: types[name] for name in rough}
        first = weights if start is None else self._started(start, weights)
        student = dict(frozen) | {name: first[name].to(self.device).clone() for name in self._all}
        student |= {name: weights[name] + more for name, more in self._moved.items()}
        if gguf and config.embedding_type != "same":
            self._embedding = ("embed",)
            student["embed"] = _stored(weights["embed"], config.embedding_type).to(self.device, compute)
        del weights, first
        self.student = TorchModel(checkpoint.config, student, compute)
        self.student.hidden = self._hidden
        for model in (self.teacher, self.student):
            model.blocks, model.transposed = self._blocks, transposed

    def text_of(self, checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
        """The tokenizer and the chat template of the texts."""
        return tokenizer_of(checkpoint), chat_template_of(checkpoint)

    def _compute(self) -> torch.dtype:
        """The type of products: where it is measured, that of the state, whose bits would else be others."""
        dtype = None
        with suppress(ModelError):
            if self._state.exists():
                dtype = getattr(torch, self._state.described(_TrainingState, self._state.read()[0]).compute)
        return fast_type(self.device, dtype)

    def _divided(self, stages: Sequence[RecipeStage]) -> list[tuple[RecipeStage, int]]:
        """The stages with their steps, by their shares of the tokens."""
        shares = np.cumsum([stage.share for stage in stages])
        ends = np.rint(shares / shares[-1] * self._steps).astype(int).tolist()
        return [(stage, end - begin) for stage, begin, end in zip(stages, [0, *ends[:-1]], ends, strict=True)]

    def trained(self, name: str) -> RawTensor:
        """A weight, by its canonical name: float32, or as it is stored where only its scales are trained."""
        if name in self._embedding:
            return self._checkpoint.take(name)
        weight = self.student.weights[name].detach()
        if name in self._blocks:
            return self._blocks[name].stored(self._checkpoint.stored(name), weight)
        return float32_tensor(weight.float().cpu().numpy())

    def opened(self, written: Checkpoint) -> TorchModel:
        """The model that was written of this training, to evaluate."""
        weights = {name: value.to(self.device) for name, value in load(written, self._blocks).items()}
        blocks = {}
        for name, trained in self._blocks.items():
            trained_blocks = trained.rescaled(written.stored(name))
            assert trained_blocks is not None, "codes stay"
            blocks[name] = trained_blocks
        weights |= {name: trained_blocks.still() for name, trained_blocks in blocks.items()}
        model = TorchModel(written.config, weights, self.teacher.compute)
        model.blocks, model.transposed = blocks, self.student.transposed
        return model

    def _started(self, start: Checkpoint, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a sparse model that was made out of the original: what is never trained is the same."""
        check_start(start, self._checkpoint, self.config.recipe)
        theirs = load(start, self._blocks)
        for name, blocks in self._blocks.items():
            moves = blocks.moves_to(start.stored(name))
            if moves is None:
                raise RequestError(
                    f"--start {start.path} has other codes than {self._checkpoint.path} in {name}, and --type same "
                    "trains scales alone: give the --type that it was made with"
                )
            theirs[name] = moves
        untrained = [name for name in ours if name not in self._all and not name.endswith(THRESHOLDS)]
        moved = moved_biases(self._checkpoint.config)
        if not all(_alike(ours[name].cpu() + moved.get(name, 0.0), theirs[name]) for name in untrained):
            raise _no_start(start, self._checkpoint, self.config.recipe)
        return theirs

    def _take_thresholds(self, start: Checkpoint) -> None:
        for n, layer in enumerate(start.config.layers):
            assert isinstance(layer.ffn, FfnConfig | ExpertsConfig)
            self._gates.of[n] = layer.ffn.threshold
            if f"layers.{n}." in self._weighted and isinstance(layer.ffn, FfnConfig) and layer.ffn.thresholds:
                for kind, limits in self._limits.items():
                    thresholds = torch.from_numpy(start.take(f"layers.{n}.{kind}").float32().copy()).to(self.device)
                    limits.take(f"layers.{n}.", thresholds)
                if self.recipe.activation == "topk":
                    self._gates.of[n] = layer.ffn.threshold

    # ---------------------------------------------------------------- the activation

    def _hidden(self, name: str, gate: Tensor | None, up: Tensor) -> Tensor:
        assert gate is not None
        kind = self.recipe.activation
        if kind in LIMITED:
            gates, products, device = self._gates, self._products, gate.device
            count = int(gates.of[_layer(name)]) if kind == "topk" else 0
            first = 1 / gates.importance[name] if count else gates(name, device)
            second = None if products is None else products(name, device)
            h, decides, product, fires = _Cut.apply(gate, up, first, kind != "fatrelu", count, second)
            self._counted[0] += fires.numel() - int(fires.sum(dtype=torch.float32))
            if not count and self._follow is not None and torch.is_grad_enabled():
                gates.see(name, decides)
                if products is not None:
                    products.see(name, product)
        else:
            active = functional.relu(gate)
            h = active * (functional.relu(up) if kind == "drelu" else up)
            if torch.is_grad_enabled():
                self._firing.append(_firing(gate, up if kind == "drelu" else None))
            self._counted[0] += h.numel() - int(h.count_nonzero())
        self._counted[1] += h.numel()
        return h

    def _adapt(self, share: float) -> None:
        """Thresholds follow what they were compared with in the step."""
        self._gates.follow(share if self._products is None else share * gate_share(self.config))
        if self._products is not None:
            self._products.follow(share)

    def _zeros(self) -> float:
        zeros, of = self._counted
        self._counted = [0, 0]
        return zeros / max(of, 1)

    # ---------------------------------------------------------------- losses

    def _regress(self, tokens: Tensor, scale: float) -> float:
        """Adds the gradients of `scale` times the loss; the loss."""
        total, n = 0.0, self._checkpoint.config.n_layers

        def learn(name: str, values: NeuronValues) -> None:
            nonlocal total
            with torch.enable_grad():
                self._firing.clear()
                output = self.student.neurons(values.x, name, values.expert).out.float()
                wanted = values.out.float()
                loss = (output - wanted).square().sum() / wanted.square().sum().clamp_min(1e-20) / n
                (scale * (loss + self._fine() / n)).backward()
            total += float(loss.detach())

        with torch.no_grad():
            self.teacher.states(tokens, learn)
        return total

    def _distil(self, tokens: Tensor, scale: float) -> float:
        """Adds the gradients of `scale` times the loss; the loss."""
        with torch.no_grad():
            wanted = self.teacher.states(tokens).flatten(0, 1)
        self._firing.clear()
        states = self.student.states(tokens).flatten(0, 1)
        fine = self._fine()
        with torch.no_grad():
            total, gradient = self._divergence(wanted, states.detach())
        heads, gradients = [states], [gradient.mul_(scale / len(states))]
        if fine.requires_grad:
            heads, gradients = [states, fine], [*gradients, torch.full_like(fine, scale)]
        torch.autograd.backward(heads, gradients)
        return total / len(states)

    def _divergence(self, wanted: Tensor, student_states: Tensor) -> tuple[float, Tensor]:
        """(sum over tokens of KL(p || q), its gradient for `own`) of what the head reads [tokens, width], p the
        teacher's and q the student's probabilities of the next token. By hand: d KL / d logits = q - p, and the logits
        of some tokens at a time are gone through as few times as can be."""
        gradient, total, student = torch.empty_like(student_states), 0.0, self.student
        rows = CACHED if self.device.type == "cpu" else SCORED
        for at in range(0, len(student_states), SCORED):
            part = slice(at, at + SCORED)
            ps, qs = self.teacher.products(wanted[part]), student.products(student_states[part])
            for p_part, q_part in zip(ps.split(rows), qs.split(rows), strict=True):
                p, q = self.teacher.scaled(p_part), student.scaled(q_part)
                for logits in (p, q):
                    logits.sub_(logits.amax(1, True))
                difference = p - q
                p_sum, q_sum = p.exp_().sum(1, True), q.exp_().sum(1, True)
                p.div_(p_sum)
                total += float(torch.dot(p.flatten(), difference.flatten()) + (q_sum.log() - p_sum.log()).sum())
                q_part.copy_(q.div_(q_sum).sub_(p))
            gradient[part] = student.states_gradient(qs)
        return total, gradient

    def _fine(self) -> Tensor:
        """The penalty on the neurons that fired since `_firing` was cleared."""
        if not self._firing:
            return torch.zeros((), device=self.device)
        return self._penalty * torch.stack(self._firing).mean()

    # ---------------------------------------------------------------- the run

    def run(self) -> TrainingResult:
        """Train to the end. PowerInferError if the loss becomes no number: the state kept last stays."""
        self._began = time.monotonic()
        with StepLog(self._out) as log:
            done, moments = self._resume()
            if done == self._steps:
                self._say(f"{self._state.path} is of the end of this training: the model is only written and measured")
            before = self.evaluate(self.teacher)
            if not math.isfinite(before.perplexity):
                raise PowerInferError(f"{self._checkpoint.path} gives no usable probabilities for these texts")
            if self._weighted and not self._gates.importance:
                for layer_limits, importance in zip(self._limits.values(), self._importances(), strict=True):
                    layer_limits.importance = importance
            log.begin(done)
            resumed, first = done, 0
            for stage, steps in self.stages:
                if done < first + steps:
                    self._stage(stage, first, steps, done, moments, log)
                    done, moments = first + steps, {}
                first += steps
        self._follow = None
        limits = tuple(self._gates.of.values()) if self.recipe.activation in LIMITED else ()
        thresholds = {}
        for kind, limit_of in self._limits.items():
            for name, importance in limit_of.importance.items():
                limit = 1 / importance if self.recipe.activation == "topk" else limit_of(name, importance.device)
                thresholds[f"{name}{kind}"] = np.asarray(limit.cpu().numpy())
        trains_all = any(stage.other and steps for stage, steps in self.stages)
        seconds, tokens = self._so_far(), self._tokens(self._steps)
        changed = (*self._embedding, *self._moved, *(self._all if trains_all else self._ffns))
        return TrainingResult(changed, limits, thresholds, before, tokens, seconds, resumed)

    def _importances(self) -> list[dict[str, Tensor]]:
        """Weights of each of `_limits`: by the name of an FFN float32 [d_ff], with mean 1, of the neurons'
        activations and, where products have thresholds, of these."""
        values: dict[str, tuple[Tensor, ...]] = {}
        sums: list[dict[str, Tensor]] = [{} for _ in self._limits]

        def hidden(name: str, gate: Tensor | None, up: Tensor) -> Tensor:
            assert gate is not None
            active = functional.silu(gate)
            active = active.requires_grad_() if not active.requires_grad else active
            h = active * up
            values[name] = (active, h)[: len(sums)]
            for value in values[name]:
                value.retain_grad()
            return h

        rng = torch.Generator(self.device).manual_seed(self.config.seed)
        before, self.teacher.hidden = self.teacher.hidden, hidden
        count = max(1, min(len(self._train), WEIGHED // self.config.window))
        done = 0
        try:
            for part in self._batch(0, count).split(self.config.rows):
                states = self.teacher.states(part).flatten(0, 1)
                states.backward(self._drawn(states.detach(), rng))
                for name, parts in values.items():
                    for value, total in zip(parts, sums, strict=True):
                        assert value.grad is not None
                        squares = value.grad.float().square().flatten(0, -2).sum(0)
                        total[name] = total[name] + squares if name in total else squares
                values.clear()
                done += len(part)
                self._progress("weighing neurons", done, count)
        finally:
            self.teacher.hidden = before
        return [{name: _weights(squares) for name, squares in total.items()} for total in sums]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _drawn(self, states: Tensor, rng: torch.Generator) -> Tensor:
        """The gradient, for what the head reads [tokens, width], of the loss of labels drawn from the probabilities."""
        gradient = torch.empty_like(states)
        for at in range(0, len(states), SCORED):
            p = self.teacher.logits(states[at : at + SCORED]).softmax(-1)
            # by cumulative sums: `multinomial` draws a number for every token of the vocabulary, 35 times as slow
            ends = p.cumsum(1)
            drawn = torch.rand((len(p), 1), generator=rng, device=p.device) * ends[:, -1:]
            labels = torch.searchsorted(ends, drawn).clamp_max(p.shape[1] - 1)
            gradient[at : at + SCORED] = self.teacher.states_gradient(
                p.scatter_add_(1, labels, -torch.ones_like(p[:, :1]))
            )
        return gradient

    def _so_far(self) -> float:
        """Seconds of this run and of those that it goes on from."""
        return self._seconds + time.monotonic() - self._began

    def left(self) -> str:
        """State that an interruption leaves, for people."""
        if not self._kept_step:
            return "stopped before the first step was done, so no state was kept: the same command begins anew"
        return f"stopped: the same command goes on from step {self._kept_step} of {self._steps}"

    def _tokens(self, steps: int) -> int:
        return steps * self._windows * self.config.window

    def _stage(
        self, stage: RecipeStage, first: int, steps: int, done: int, moments: Mapping[str, Tensor], log: StepLog
    ) -> None:
        names = self._all if stage.other else self._ffns
        for name in self._all:
            self.student.weights[name].requires_grad_(name in names)
        self.student.rounded = {name: kind for name, kind in self._rounded.items() if stage.stored and name in names}
        groups = self._groups(stage, names)
        rates, adam = list(groups), Adam(list(groups.values()), betas=(0.9, 0.98), fused=True)
        self._put_moments(adam, names, moments, done - first)
        learn = self._regress if stage.name == "regress" else self._distil
        micro, rows = self.config.rows, self._windows
        saved = time.monotonic()
        complete_steps: int | None = done  # steps after which weights, moments and thresholds are as they are now
        try:
            for step in range(max(done, first), first + steps):
                self._follow = self._wanted(step)
                if self.recipe.activation == "topk":
                    kept_count = float(max(1, round((1 - self._follow) * BANK)))
                    self._gates.of = dict.fromkeys(self._gates.of, kept_count)
                batch = self._batch(step, rows)
                loss = sum(learn(part, len(part) / rows) * len(part) / rows for part in batch.split(micro))
                norm = float(torch.nn.utils.clip_grad_norm_([self.student.weights[name] for name in names], 1.0))
                if not math.isfinite(loss) or not math.isfinite(norm):
                    raise self._diverged(loss, norm, step)
                complete_steps = None
                adam.step([self.config.lr * rate * _schedule(step - first, steps) for rate in rates])
                zeros = self._zeros()
                self._adapt(self._follow)
                self._steer(zeros, self._follow)
                log.add(step, stage.name, self._tokens(step + 1), loss, zeros)
                complete_steps = step + 1
                self._progress("training", step + 1, self._steps)
                if time.monotonic() - saved > self.config.save or step + 1 == first + steps:
                    self._keep(step + 1, adam, names)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            if complete_steps is not None and complete_steps > self._kept_step:
                self._keep(complete_steps, adam, names)
            raise

    def _groups(self, stage: RecipeStage, names: Sequence[str]) -> dict[float, list[Tensor]]:
        """Weights by their rates, each a share of --lr: FFNs have the rate of the stage."""
        groups, ffns = dict[float, list[Tensor]](), set(self._ffns)
        for name in names:
            rate = stage.rate if name in ffns else stage.rate * stage.other
            groups.setdefault(rate, []).append(self.student.weights[name])
        return groups

    def _diverged(self, loss: float, norm: float, step: int) -> PowerInferError:
        state, then = "no state was kept:", "begins anew"
        if self._kept_step:
            state, then = f"the state of step {self._kept_step} is kept, from which", "goes on"
        return PowerInferError(
            f"the loss is {loss} and its gradient {norm} at step {step}: {state} the same command with --lr "
            f"below {self.config.lr:g} {then}"
        )

    def _wanted(self, step: int) -> float:
        """The share of zeros that a step is to have."""
        begin, reached = 1.0 if self._start else self.recipe.begin, self.recipe.reached
        return self.config.zeros * min(1.0, begin + (1 - begin) * step / (self._steps * reached))

    def _steer(self, zeros: float, wanted: float) -> None:
        if self.recipe.activation not in LIMITED:
            self._penalty = min(MOST_PENALTY, max(1e-4, self._penalty * math.exp(0.5 * (wanted - zeros))))

    def _batch(self, step: int, rows: int) -> Tensor:
        """The windows of a step: all of the text in a random order, then in another one."""
        picked = []
        for at in range(step * rows, (step + 1) * rows):
            epoch, place = divmod(at, len(self._train))
            if self._order is None or self._order[0] != epoch:
                rng = np.random.default_rng([self.config.seed, epoch])
                self._order = epoch, rng.permutation(len(self._train))
            picked.append(int(self._order[1][place]))
        return torch.from_numpy(self._train[picked].astype(np.int64)).to(self.device)

    def evaluate(self, model: TorchModel) -> HeldOutFigures:
        """Figures on the held-out windows."""
        total = scored = 0.0
        n = model.config.n_layers
        zeros, totals = [0] * n, [0] * n

        def count(name: str, values: NeuronValues) -> None:
            layer = int(name.split(".")[1])
            zeros[layer] += int((values.h == 0).sum())
            totals[layer] += values.h.numel()

        half = self._held_out.shape[1] // 2
        with torch.no_grad():
            for part in torch.from_numpy(self._held_out.astype(np.int64)).split(self.config.rows):
                tokens = part.to(self.device)
                states, targets = model.states(tokens, count)[:, half:-1], tokens[:, half + 1 :]
                for outputs, wanted in zip(
                    states.flatten(0, 1).split(SCORED), targets.flatten().split(SCORED), strict=True
                ):
                    total += float(functional.cross_entropy(model.logits(outputs), wanted, reduction="sum"))
                scored += targets.numel()
        return HeldOutFigures(_exp(total / scored), tuple(a / max(b, 1) for a, b in zip(zeros, totals, strict=True)))

    # ---------------------------------------------------------------- what is kept

    def _run(self) -> dict[str, Any]:
        """Settings of a state, by flag, which a training that goes on from it must have in common."""
        # own_text: what is written is in the windows
        free = ("save", "device", "type", "attention_type", "format", "lr", "own_text")
        run = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.config).items() if name not in free}
        run["--start"] = None if self._start is None else self._start.fingerprint
        rounded = {(name.rpartition(".")[2], kind) for name, kind in self._rounded.items()}
        rounded |= {(name.rpartition(".")[2], "same") for name in self._blocks}
        run["--type or --attention-type"] = sorted(rounded)
        digest = hashlib.sha256()
        for windows in (self._train, self._held_out):
            digest.update(np.ascontiguousarray(windows).tobytes())
        run["the text"] = digest.hexdigest()
        return dict(json.loads(json.dumps(run)))  # as it is read

    def _keep(self, step: int, adam: Adam, names: Sequence[str]) -> None:
        tensors = {f"weights.{name}": self.student.weights[name].detach() for name in self._all}
        for kind, limits in self._limits.items():
            tensors |= {f"importance.{name}{kind}": value for name, value in limits.importance.items()}
        for name in names:
            state = adam.moments[self.student.weights[name]]
            tensors |= {f"exp_avg.{name}": state.exp_avg, f"exp_avg_sq.{name}": state.exp_avg_sq}
        header = {
            "run": self._run(),
            "compute": str(self.teacher.compute).removeprefix("torch."),
            "lr": self.config.lr,
            "seconds": self._so_far(),
            "step": step,
            "limits": {kind: list(limits.of.values()) for kind, limits in self._limits.items()},
            "penalty": self._penalty,
        }
        with self._state.write(header, [(name, "F32", tuple(one.shape)) for name, one in tensors.items()]) as write:
            for name, one in tensors.items():
                write(name, one.float().cpu().contiguous().numpy().reshape(-1).view(np.uint8))
        self._kept_step = step

    def _resume(self) -> tuple[int, dict[str, Tensor]]:
        """(steps that are done, the optimiser's moments)."""
        if not self._state.exists():
            return 0, {}
        try:
            return self._read_state()
        except ModelError as error:
            reason = str(error).partition("; `")[0].removesuffix("; is the download complete?")
            raise ModelError(f"{reason}: give another --out") from None

    def _read_state(self) -> tuple[int, dict[str, Tensor]]:
        description, tensors, file = self._state.read()
        past = self._state.described(_TrainingState, description)
        self._check_run(past)
        step, limits = past.step, {kind: past.limits.get(kind, ()) for kind in self._limits}
        if step > self._steps or any(len(one) != self._checkpoint.config.n_layers for one in limits.values()):
            raise self._state.bad("is damaged")
        ends = accumulate(steps for _, steps in self.stages)
        stage = next(stage for (stage, _), end in zip(self.stages, ends, strict=True) if step <= end)
        trained = self._all if stage.other else self._ffns
        names = [f"weights.{name}" for name in self._all]
        names += [f"{moment}.{name}" for name in trained for moment in ("exp_avg", "exp_avg_sq")]
        weighted = {f"importance.{name}{of}": (size,) for of in self._limits for name, size in self._weighted.items()}
        file.check()
        moments: dict[str, Tensor] = {}
        for name in (*names, *weighted):
            shape = weighted.get(name) or tuple(self.student.weights[name.partition(".")[2]].shape)
            values = torch.from_numpy(np.array(self._state.holds(tensors, name, "F32", shape).float32()))
            self._take_values(name, values, moments)
        self._state.holds_no_more(tensors)
        for of, each in self._limits.items():
            each.of = dict(enumerate(limits[of]))
        self._penalty, self._seconds, self._kept_step = past.penalty, past.seconds, step
        return step, moments

    def _check_run(self, past: _TrainingState) -> None:
        """RequestError if the state is of another training than this one."""
        run, now = past.run, self._run()
        if run != now:
            other = [name for name in now | run if run.get(name) != now.get(name)]
            flags = [name for name in other if name != "the text"] or other  # some flags change the text as well
            raise RequestError(
                f"{self._state.path} is of another training (other: {', '.join(flags)}): give another --out, or the "
                "same as then"
            )
        if past.step == self._steps and past.lr != self.config.lr:
            raise RequestError(
                f"{self._state.path} is of a training that ended with --lr {past.lr:g}: give another --out, or the same"
            )

    def _take_values(self, name: str, values: Tensor, moments: dict[str, Tensor]) -> None:
        """Put a tensor of the state where it belongs: into the student, its thresholds, or the moments."""
        kind, _, weight = name.partition(".")
        if not bool(values.isfinite().all()) or (kind == "importance" and not bool((values > 0).all())):
            raise self._state.bad("holds values that are no numbers")
        if kind == "weights":
            with torch.no_grad():
                self.student.weights[weight].copy_(values)
        elif kind == "importance":
            ffn, dot, limits = weight.rpartition(".")
            self._limits[limits].importance[ffn + dot] = values.to(self.device)
        else:
            moments[name] = values.to(self.device)

    def _put_moments(self, adam: Adam, names: Sequence[str], moments: Mapping[str, Tensor], steps: int) -> None:
        for name in names:
            if f"exp_avg.{name}" in moments and steps > 0:
                step = torch.tensor(float(steps), device=self.device)  # where the fused step reads it
                of_weight = Moments(moments[f"exp_avg.{name}"], moments[f"exp_avg_sq.{name}"], step)
                adam.moments[self.student.weights[name]] = of_weight


def check_start(start: Checkpoint, original: Checkpoint, recipe: str) -> None:
    """RequestError if the headers of a model say that the recipe did not make it out of the original."""

    def traits(config: ModelConfig) -> tuple[Any, ...]:
        sizes = {name: shape for name, shape in shapes(config) if not name.endswith(THRESHOLDS)}
        return sizes, [layer.attention for layer in config.layers]

    if traits(start.config) != traits(original.config) or recipe not in _makers(start):
        raise _no_start(start, original, recipe)


def _makers(model: Checkpoint) -> list[str]:
    """Recipes that make models of this one's activation."""
    products = any(isinstance(one.ffn, FfnConfig) and one.ffn.product_thresholds for one in model.config.layers)
    functions = (model.config.activations, products)
    return [name for name, recipe in RECIPES.items() if (recipe.activation, recipe.products) == functions]


def _no_start(start: Checkpoint, original: Checkpoint, recipe: str) -> RequestError:
    reason = "" if start.source == original.source else ", or has it in another format: take the original in that one"
    makers = _makers(start)
    if recipe not in makers:
        other = f"it was made by recipe {' or '.join(makers)}: give --recipe {makers[0]}" if makers else ""
        reason += f": {other or 'it is not sparse: leave --start out to begin with the original'}"
    return RequestError(f"--start {start.path} is no model that recipe {recipe} made out of {original.path}{reason}")


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def _alike(before: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for the type they are stored in. Q4_0 is 0.11 away (SmolLM2's embedding),
    another model's 1.4."""
    return float((before - other).norm()) <= 0.25 * float(before.norm())


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: up, then down along a cosine to a tenth."""
    return min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _firing(gate: Tensor, up: Tensor | None) -> Tensor:
    """About the share of neurons that fire: the mean of s(gate), for dReLU of s(gate) * s(up).

    s(a) = sigmoid(a / (SOFT * the neuron's root mean square of a)): it counts signs, so scaling weights does not lower
    it, and a margin grows around zero. A penalty on magnitudes moves them from h into down instead of silencing
    neurons (runs/README.md).
    """

    def positive(a: Tensor) -> Tensor:
        a = a.float()
        scale = a.detach().square().flatten(0, -2).mean(0).sqrt()
        return torch.sigmoid(a / (SOFT * scale + 1e-6))

    share = positive(gate)
    return (share if up is None else share * positive(up)).mean()


class _Cut(torch.autograd.Function):  # type: ignore[misc]
    """h = act(gate) * up where act(gate) exceeds its limit or, with `kept`, is among so many of its bank that are the
    largest multiples of their limits, and where |h| exceeds `second` if that is given, else 0; what was compared with
    each limit, of the first with `silu` |silu(gate)|, else the gate; and 1 where it counts, else 0. As one function,
    for elementwise operations cost a CPU as much as the matrices here; products with 1 and 0 are several times as fast
    there as masks."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, limit: Tensor, silu: bool, count: int, second: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        active = functional.silu(gate) if silu else gate
        decides = active.abs() if silu else gate
        if count:
            banks = (decides / limit).unflatten(-1, (-1, BANK))
            fires = banks.ge(banks.topk(count, sorted=False).values.amin(-1, True)).flatten(-2).to(gate.dtype)
        else:
            fires = torch.gt(decides, limit, out=torch.empty_like(gate))
        h = (active * up).mul_(fires)
        product = None
        if second is not None:
            product = h.abs()
            fires = torch.gt(product, second, out=torch.empty_like(gate))
            h.mul_(fires)
        ctx.save_for_backward(gate, up, fires)
        ctx.silu = silu
        ctx.mark_non_differentiable(*(one for one in (decides, product, fires) if one is not None))
        return h, decides, product, fires

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        gate, up, fires = ctx.saved_tensors
        gradient = gradients[0] * fires
        if not ctx.silu:
            return gradient * up, gradient.mul_(gate), None, None, None, None
        by_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return by_gate, gradient.mul_(functional.silu(gate)), None, None, None, None


def _texts(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    corpora: Sequence[Corpus],
    config: SparsifyConfig,
    progress: Progress,
    say: Say,
    start: Checkpoint | None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(windows to train on, windows that are held out), the last of each text.

    To train on, each text gives an equal share of twice the tokens, drawn at random, with another start others.
    """
    room = config.tokens * 2
    windows = read_windows(corpora, tokenizer, config.window, max(room, READ), progress, template, say)
    rng = np.random.default_rng([config.seed, *(b"" if start is None else start.fingerprint.encode())])
    train, held_out, begin, left = [], [], 0, max(len(corpora), room // config.window)
    for at, (corpus, number) in enumerate(zip(windows.corpora, windows.number, strict=True)):
        last = max(MIN_HELD_OUT, min(round(HELD_OUT * number), MAX_HELD_OUT // config.window))
        if number < 2 * last:
            raise RequestError(
                f"corpus {corpus} has {number} windows of {config.window} tokens, too few to train on and to measure: "
                "use a longer text, or a smaller --window"
            )
        drawn = np.sort(rng.permutation(number - last)[: left // (len(corpora) - at)])
        train.append(windows.ids[begin + drawn])
        held_out.append(windows.ids[begin + number - last : begin + number])
        left -= len(drawn)
        begin += number
    return np.concatenate(train), np.concatenate(held_out)


def find_device(name: str) -> torch.device:
    has = torch.cuda.is_available()
    if name == "cuda" and not has:
        raise RequestError("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device("cuda" if has and name != "cpu" else "cpu")


def _keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed: to get them anew from the system takes a tenth of the time here."""
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for any block
        mallopt(-1, 0x7FFFFFFF)  # M_TRIM_THRESHOLD


def _stored(weight: Tensor, kind: str) -> Tensor:
    """Weights as a type stores them, float32 on the CPU."""
    stored_type = fitting(kind, weight.shape)
    values = quantize(np.ascontiguousarray(weight.float().cpu().numpy()), stored_type)
    return torch.from_numpy(np.array(dequantize(values, stored_type)))


@cache
def fast_type(device: torch.device, timed: torch.dtype | None = None) -> torch.dtype:
    """bfloat16 where the device multiplies matrices of it clearly faster than float32, else float32. Of CPUs with
    AVX-512 BF16 some have four times the speed, some 0.6 of it, so they are timed, unless it is known what that gave
    before."""
    if device.type == "cuda" or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    if not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    if timed is not None:
        return timed
    return torch.bfloat16 if 1.3 * _product(torch.bfloat16) < _product(torch.float32) else torch.float32


def _product(kind: torch.dtype) -> float:
    """Seconds that a product of matrices takes, at the best of several."""
    x, weight = torch.ones(512, 1024, dtype=kind), torch.ones(1024, 1024, dtype=kind)
    took = []
    for _ in range(8):
        began = time.perf_counter()
        functional.linear(x, weight)
        took.append(time.perf_counter() - began)
    return min(took)
