"""Train a small model of experts with a draft head on a text, and record which experts tokens select and what foretells
them, for `benchmarks.disk.foresight`.

    python -m benchmarks.models.expert_routes MODEL TRACE.npz --text PATH ... [--minutes 25]

MODEL becomes a folder in the form of Qwen3-MoE, which the engine reads, with the draft head (MTP, in the form of
DeepSeek-V3) beside it in `trained/`; one that exists is kept. PATH: files, or folders of .py, .rst, .md and .txt files,
of which every twentieth is held out. Training takes the minutes on one thread.

TRACE has int16 arrays [layers, tokens, top_k] of held-out text, heaviest expert first, -1: none. Of each token three
are told apart: `text`, the token as a step computes it; `drafted`, what the head would have drafted in its place, with
the text before it; `right`, the token as if it had been drafted. STREAM/selected is what routers select, STREAM/NAME
what is expected by

    router, router2   the layer's router, of what the experts one and two layers before get
    before            the same, of what the layer gets, before its attention
    embedding         the same, of the token's embedding
    draft             the same, of what the draft head gives when it has read the token
    token             what the token selected most often in other text
    state             a linear map, fitted to other text, of the model's state before the token (of a draft: the head's)
    fitted            the same, of that and the token's embedding
    fitted_draft      the same, of what the draft head gives, too

All but the first three are known before the step begins. drafted/is_right bool [tokens]: the draft is the token of the
text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

SUFFIXES = (".py", ".rst", ".md", ".txt")
HELD_OUT = 20
EPS, THETA = 1e-6, 10000.0
BALANCE = 0.01  # of the loss, what unevenly used experts weigh
DRAFTS = 0.3  # likewise, the draft head
FIRST = 2  # position of a text from which on tokens have drafts
RIDGE = 1e-3


@dataclass(frozen=True)
class Shape:
    d_model: int = 64
    layers: int = 5
    heads: int = 2
    experts: int = 32
    top_k: int = 4
    size: int = 32
    vocab: int = 1024
    context: int = 128

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


class Pass(NamedTuple):
    """Of a layer and its tokens: the stream before it, before its experts, and behind it [batch, tokens, d_model]; the
    router's logits [batch, tokens, experts]; keys and values; how evenly experts were used, at best 1."""

    before: Tensor
    between: Tensor
    after: Tensor
    logits: Tensor
    keys: tuple[Tensor, Tensor]
    balance: Tensor


def rotated(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim], of positions from 0 on."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]).float(), THETA ** (-torch.arange(half).float() / half))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, d = shape, shape.d_model
        self.attn_norm, self.ffn_norm = nn.RMSNorm(d, EPS), nn.RMSNorm(d, EPS)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(shape.head_dim, EPS), nn.RMSNorm(shape.head_dim, EPS)
        self.router = nn.Linear(d, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.size, d))
        self.down = nn.Parameter(torch.empty(shape.experts, d, shape.size))

    def attend(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """past: keys and values of other tokens at the same positions, of which each reads those before its own."""

        def heads(linear: nn.Linear) -> Tensor:
            return linear(x).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

        q, k, v = rotated(self.q_norm(heads(self.q))), rotated(self.k_norm(heads(self.k))), heads(self.v)
        if past is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            n, scale = x.shape[1], self.shape.head_dim**-0.5
            scores = (q @ past[0].transpose(-1, -2) * scale).masked_fill(
                torch.ones(n, n, dtype=torch.bool).triu(), float("-inf")
            )
            weights = torch.cat([scores, (q * k).sum(-1, keepdim=True) * scale], -1).softmax(-1)
            mixed = weights[..., :-1] @ past[1] + weights[..., -1:] * v
        return self.o(mixed.transpose(1, 2).flatten(-2)), (k, v)

    def route(self, stream: Tensor) -> Tensor:
        return self.router(self.ffn_norm(stream))

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum of experts. x: [n, d_model]; weights, chosen: [n, top_k]."""
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.shape.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.experts).tolist()
        parts = []
        matrices = self.gate_up.unbind(0), self.down.unbind(0)  # not by number: gradients would be whole tensors
        for some, gate_up, down in zip(x[rows].split(counts), *matrices, strict=True):
            gate, up = functional.linear(some, gate_up).chunk(2, -1)
            parts.append(functional.linear(functional.silu(gate) * up, down))
        return torch.zeros_like(x).index_add(0, rows, torch.cat(parts) * weights.flatten()[order, None])

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Pass:
        mixed, keys = self.attend(self.attn_norm(x), past)
        between = x + mixed
        logits = self.route(between)
        shares = logits.softmax(-1)
        weights, chosen = shares.topk(self.shape.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.mix(self.ffn_norm(between).flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1))
        used = torch.bincount(chosen.flatten(), minlength=self.shape.experts) / chosen.numel()
        balance = self.shape.experts * (used * shares.flatten(0, 1).mean(0)).sum()
        return Pass(x, between, between + out.view_as(x), logits, keys, balance)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, d = shape, shape.d_model
        self.embed = nn.Embedding(shape.vocab, d)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(d, EPS)
        self.embed_norm, self.hidden_norm, self.draft_norm = (nn.RMSNorm(d, EPS) for _ in range(3))
        self.join, self.draft_layer = nn.Linear(2 * d, d, bias=False), Layer(shape)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = (2 * shape.layers) ** -0.5 if name.endswith(("o.weight", "down")) else 1.0
                nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)

    def run(self, tokens: Tensor, past: Sequence[Pass] | None = None) -> list[Pass]:
        """tokens: [batch, tokens]; past: as of `Layer.attend`."""
        x, found = self.embed(tokens), list[Pass]()
        for at, layer in enumerate(self.layers):
            found.append(layer(x, None if past is None else past[at].keys))
            x = found[-1].after
        return found

    def draft(self, hidden: Tensor, tokens: Tensor, past: Pass | None = None) -> Pass:
        """The draft head. hidden: of each token, the state before it."""
        read = torch.cat([self.embed_norm(self.embed(tokens)), self.hidden_norm(hidden)], -1)
        return self.draft_layer(self.join(read), None if past is None else past.keys)

    def logits(self, stream: Tensor, norm: nn.Module) -> Tensor:
        return functional.linear(norm(stream), self.embed.weight)


def shifted(x: Tensor) -> Tensor:
    """Of each token what is of the one before it; zeros of the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


# ---- Text and training


def files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES) if path.is_dir() else [path]


def read_texts(paths: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Texts to train with, and those that are held out, by their names."""
    texts: tuple[list[str], list[str]] = [], []
    for path in files(paths):
        held_out = zlib.crc32(path.name.encode()) % HELD_OUT == 0
        texts[held_out].append(path.read_text(errors="replace"))
    return texts


def make_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def windows(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Tensor:
    """int64 [n, length], one text behind the other."""
    ids = np.concatenate([np.array(one.ids, np.int64) for one in tokenizer.encode_batch(list(texts))])
    return torch.from_numpy(ids[: len(ids) // length * length].reshape(-1, length))


def losses(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(of the next token, of the draft head, of unevenly used experts)"""
    passes = model.run(tokens)
    stream = passes[-1].after
    drafted = model.draft(shifted(stream), tokens)
    flat = tokens[:, 1:].flatten()
    own = functional.cross_entropy(model.logits(stream[:, :-1], model.norm).flatten(0, 1), flat)
    after = model.logits(drafted.after[:, 1:-1], model.draft_norm).flatten(0, 1)
    draft = functional.cross_entropy(after, tokens[:, 2:].flatten())
    return own, draft, torch.stack([one.balance for one in (*passes, drafted)]).mean()


def train(model: Model, texts: Tensor, seconds: float, batch: int = 32, rate: float = 5e-3, seed: int = 1) -> int:
    """Until so many seconds have passed, at least one step. Returns how many tokens it saw."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    groups = [{"params": matrices}, {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draws, begin, step = torch.Generator().manual_seed(seed), time.monotonic(), 0
    while (share := (time.monotonic() - begin) / max(seconds, 1e-9)) < 1 or not step:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20) * (0.05 + 0.95 * max(0.0, 1 - share))
        tokens = texts[torch.randint(len(texts), (batch,), generator=draws)]
        own, draft, balance = losses(model, tokens)
        (own + DRAFTS * draft + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"{share:6.1%} step {step}: {own:.3f}, draft {draft:.3f}, balance {balance:.2f}", file=sys.stderr)
    return step * batch * texts.shape[1]


# ---- The model's folder


def write(model: Model, tokenizer: Tokenizer, folder: Path, about: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    shape = model.shape
    (folder / "trained").mkdir(parents=True)
    save_file(dict(model.state_dict()), folder / "trained/weights.safetensors")
    named = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for at, layer in enumerate(model.layers):
        plain = {"input_layernorm": layer.attn_norm, "post_attention_layernorm": layer.ffn_norm}
        plain |= {"mlp.gate": layer.router} | {f"self_attn.{name}_proj": getattr(layer, name) for name in "qkvo"}
        plain |= {f"self_attn.{name}_norm": getattr(layer, f"{name}_norm") for name in "qk"}
        named |= {f"model.layers.{at}.{name}.weight": part.weight for name, part in plain.items()}
        for e in range(shape.experts):
            gate, up = layer.gate_up[e].chunk(2)
            for name, matrix in (("gate", gate), ("up", up), ("down", layer.down[e])):
                named[f"model.layers.{at}.mlp.experts.{e}.{name}_proj.weight"] = matrix
    save_file({name: one.detach().clone() for name, one in named.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": shape.d_model,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.size, "moe_intermediate_size": shape.size,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": shape.vocab, "rms_norm_eps": EPS,
        "max_position_embeddings": shape.context, "rope_theta": THETA, "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": None, "eos_token_id": 0, "about": about,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))


def read(folder: Path) -> tuple[Model, Tokenizer, dict[str, Any]]:
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    model = Model(Shape(*(config[name] for name in names)))
    model.load_state_dict(load_file(folder / "trained/weights.safetensors"))
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), config["about"]


# ---- What foretells routes


class Stream(NamedTuple):
    """Tokens and what a step computes of them, the states before them, and what the draft head gives of both."""

    tokens: Tensor
    passes: list[Pass]
    states: Tensor
    drafts: Tensor


def streams(model: Model, tokens: Tensor) -> tuple[Stream, Stream, Stream]:
    """`text`, `drafted` and `right`."""
    text = model.run(tokens)
    states = shifted(text[-1].after)
    head = model.draft(states, tokens)
    best = model.logits(head.after, model.draft_norm).argmax(-1)
    drafted = torch.cat([tokens[:, :FIRST], best[:, FIRST - 1 : -1]], 1)
    further = shifted(head.after)
    again = (model.draft(further, one, head).after for one in (drafted, tokens))
    return (
        Stream(tokens, text, states, head.after),
        Stream(drafted, model.run(drafted, text), further, next(again)),
        Stream(tokens, text, further, next(again)),
    )


FITTED = {"state": 1, "fitted": 2, "fitted_draft": 3}
"""Linear maps, and how many parts of a stream they read."""


def features(model: Model, one: Stream, count: int) -> Tensor:
    """What a linear map reads, with a one behind it, float64 [tokens, n]."""
    parts = [one.states, model.embed(one.tokens), one.drafts][:count]
    scaled = [functional.rms_norm(part[:, FIRST:], part.shape[-1:]).flatten(0, 1) for part in parts]
    return torch.cat([*scaled, torch.ones(len(scaled[0]), 1)], -1).double()


def wanted(model: Model, one: Stream) -> Tensor:
    """All routers' logits, float64 [tokens, layers * experts]."""
    return torch.cat([each.logits[:, FIRST:].flatten(0, 1) for each in one.passes], -1).double()


class Fit:
    """Linear maps from features to routers' logits, by whether the token is a draft, and name; and what tokens select,
    as counts [layers, vocab, experts]."""

    KINDS = tuple((drafted, name) for drafted in (False, True) for name in FITTED)

    def __init__(self, model: Model, texts: Tensor, batch: int = 16) -> None:
        shape = model.shape
        sums: dict[tuple[bool, str], list[Tensor]] = {}
        self.counts = torch.zeros(shape.layers, shape.vocab, shape.experts)
        for tokens in texts.split(batch):
            text, _, right = streams(model, tokens)
            goal = wanted(model, text)
            for kind in self.KINDS:
                x = features(model, right if kind[0] else text, FITTED[kind[1]])
                products = [x.T @ x, x.T @ goal]
                sums[kind] = [a + b for a, b in zip(sums[kind], products, strict=True)] if kind in sums else products
            flat = tokens[:, FIRST:].flatten()
            for counts, one in zip(self.counts, text.passes, strict=True):
                chosen = one.logits[:, FIRST:].flatten(0, 1).topk(shape.top_k, -1).indices
                used = torch.zeros(len(flat), shape.experts).scatter_(1, chosen, 1.0)
                counts.index_add_(0, flat, used)
        self.counts += self.counts.mean(1, keepdim=True) / self.counts.mean(1).sum(-1)[:, None, None]
        n = texts.shape[0] * (texts.shape[1] - FIRST)
        self.maps = {
            kind: torch.linalg.solve(square + RIDGE * n * torch.eye(len(square)).double(), goal)
            for kind, (square, goal) in sums.items()
        }


def expected(model: Model, one: Stream, fit: Fit, drafted: bool) -> dict[str, Tensor]:
    """Scores of the experts by everything that may foretell them, [layers, tokens, experts]; NaN: of nothing."""
    layers = list(model.layers)
    embedding = model.embed(one.tokens)
    nothing = torch.full_like(one.passes[0].logits, float("nan"))

    def of_layers(streams: Sequence[Tensor]) -> Tensor:
        lacking = [nothing] * (len(layers) - len(streams))
        routed = [layer.route(x) for layer, x in zip(layers[len(lacking) :], streams, strict=True)]
        return torch.stack([*lacking, *routed])[:, :, FIRST:].flatten(1, 2)

    between = [each.between for each in one.passes]
    found = {
        "selected": torch.stack([each.logits for each in one.passes])[:, :, FIRST:].flatten(1, 2),
        "router": of_layers(between[:-1]),
        "router2": of_layers(between[:-2]),
        "before": of_layers([each.before for each in one.passes]),
        "embedding": of_layers([embedding] * len(layers)),
        "draft": of_layers([one.drafts] * len(layers)),
        "token": fit.counts[:, one.tokens[:, FIRST:].flatten()],
    }
    for name, count in FITTED.items():
        scores = features(model, one, count) @ fit.maps[drafted, name]
        found[name] = scores.unflatten(-1, (len(layers), -1)).transpose(0, 1)
    return found


@torch.no_grad()
def record(model: Model, texts: Tensor, others: Tensor, batch: int = 16) -> dict[str, np.ndarray]:
    """The arrays of a trace of `texts`; others: int64 [n, tokens], from which maps and counts are made."""
    fit, parts = Fit(model, others, batch), dict[str, list[np.ndarray]]()
    for tokens in texts.split(batch):
        text, drafted, right = streams(model, tokens)
        for name, one in (("text", text), ("drafted", drafted), ("right", right)):
            for guess, scores in expected(model, one, fit, one is not text).items():
                best = scores.nan_to_num(-torch.inf).topk(model.shape.top_k, -1).indices
                best = torch.where(scores[..., :1].isnan(), -1, best)
                parts.setdefault(f"{name}/{guess}", []).append(best.numpy().astype(np.int16))
        same = (drafted.tokens == tokens)[:, FIRST:].flatten()
        parts.setdefault("drafted/is_right", []).append(same.numpy())
    return {name: np.concatenate(each, axis=-1 if each[0].ndim == 1 else 1) for name, each in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="PATH")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=10_000, help="of held-out text in the trace (default 10000)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    texts, held_out = read_texts(args.text)
    if not texts or not held_out:
        parser.error("--text needs more files: every twentieth, by its name, is held out")
    if args.model.exists():
        model, tokenizer, about = read(args.model)
        seen = windows(tokenizer, texts, model.shape.context)
    else:
        shape = Shape()
        tokenizer, model = make_tokenizer(texts, shape.vocab), Model(shape)
        seen = windows(tokenizer, texts, shape.context)
        tokens = train(model, seen, 60 * args.minutes)
        about = {"minutes": args.minutes, "tokens": tokens, "text_bytes": sum(len(one.encode()) for one in texts)}
        write(model, tokenizer, args.model, about)
    unseen = windows(tokenizer, held_out, model.shape.context)
    count = -(-args.tokens // (model.shape.context - FIRST))
    places = torch.linspace(0, len(unseen) - 1, min(count, len(unseen))).long()
    others = seen[torch.randperm(len(seen))[: 10 * count]]
    trace = record(model, unseen[places], others)
    with torch.no_grad():
        own, draft, _ = losses(model, unseen[places])
    about |= {"loss": own.item(), "draft_loss": draft.item(), "experts": model.shape.experts}
    np.savez_compressed(args.trace, **trace, about=np.array(json.dumps(about)))
    print(json.dumps(about))


if __name__ == "__main__":
    main()
