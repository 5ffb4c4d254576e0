"""Whole models beside a GPU, in the memory of smaller cards: decode by policy, prompts by chunk; llama.cpp with CUDA.

    python -m benchmarks.hybrid.whole --models FOLDER --cards 8 12 --prompts 512 2048 [--peer FOLDER_OF_BINARIES]
    python -m benchmarks.hybrid.whole --models FOLDER --shape llama-3.3-70b --layers 20 --times 2 --prompts 2048
    python -m benchmarks.hybrid.whole --models FOLDER --gpu cpu --tiny                  tries it without a GPU

A model has random weights of Q4_0 in a published shape. Only some layers differ (--distinct), the others have the bytes
of one of them, at places of their own: they are made sooner, and read like any. With --locality tokens tend to select
the experts that the tokens before them did, and tokens are drawn; else the most likely ones are taken. --times N has a
card with the N-th part of the model's bytes instead of --cards.

Each load decodes and computes all prompts, once its logits of a text have been compared with the CPU's. llama.cpp gets
the most experts, or layers, on the GPU that fit into the same budget at its default -ub, for decode; its prompts are
computed with the same flags at -ub 512 and 2048, what these take beyond the budget notwithstanding, with weights that
are mapped, and that are not, which copies those of the CPU faster to the GPU. Every job is written down when it is
done, and started again with the same --out, what is done is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hybrid import compare, step_times, worker
from benchmarks.hybrid.experts import checked, reference_of
from benchmarks.lib import programs, results
from benchmarks.lib.jobs import Result
from benchmarks.models import expert_models
from powerinfer import LLM, SamplingParams
from powerinfer.config import AttentionConfig, EngineConfig, ExpertsConfig, FfnConfig, ModelConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import needs
from powerinfer.kernels import cpu
from powerinfer.placement.experts import EXPERT_POLICIES
from powerinfer.placement.shapes import checkpoint_model, find_shape
from powerinfer.sizes import read_size

EXPERTS, DENSE = "qwen3-30b-a3b", "llama-3.3-70b"
CONFIGS: dict[str, ModelConfig] = {
    EXPERTS: expert_models.CONFIGS[EXPERTS],
    DENSE: replace(find_shape(DENSE).config, architecture="llama", name=""),
}
UBATCHES = (512, 2048)  # of llama.cpp's prompts
AUTO = 0  # as a chunk: the engine chooses
POLICIES = (*EXPERT_POLICIES, "auto")


@dataclass(kw_only=True)
class Measurement(compare.LocalMeasurement):
    """What is measured."""

    @property
    def model(self) -> Path:
        given = self.arguments
        size = "tiny" if given.tiny else f"{config_of(given).n_layers}"
        return Path(given.models / f"{given.shape}-{size}-{given.locality:g}.gguf")

    def engine(self, policy: str = "static", chunk: int = AUTO) -> dict[str, Any]:
        """Of a load: room for the longest prompt and what is decoded behind it, by one request."""
        given = self.arguments
        tokens = max((*given.prompts, 2 * worker.TEXT)) + given.tokens
        settings = {"threads": given.threads, "ram": given.ram, "prefill_chunk": chunk, "expert_policy": policy}
        return settings | {"context": cpu.PAGE * (2 + tokens // cpu.PAGE), "max_batch": 1, "prefix_cache": False}


def config_of(arguments: argparse.Namespace) -> ModelConfig:
    """The model's, cut to so many layers; or of the same kind and tiny."""
    config = CONFIGS[arguments.shape]
    if not arguments.tiny:
        return replace(config, layers=config.layers[: arguments.layers])
    layer = config.layers[0]
    assert isinstance(layer.attention, AttentionConfig)
    rope = layer.attention.rope and replace(layer.attention.rope, dim=32)
    attention = replace(layer.attention, n_heads=2, n_kv_heads=1, head_dim=32, rope=rope)
    ffn = layer.ffn
    if isinstance(ffn, ExpertsConfig):
        ffn = replace(ffn, n_experts=16, size=32)
    elif isinstance(ffn, FfnConfig):
        ffn = replace(ffn, size=256)
    layer = replace(layer, attention=attention, ffn=ffn)
    return replace(config, d_model=64, vocab_size=1200, layers=(layer,) * 5)


def make(measurement: Measurement) -> Result:
    """The model's file."""
    given, config = measurement.arguments, config_of(measurement.arguments)
    if not measurement.model.exists():
        weights = expert_models.Weights("q4_0", locality=given.locality, distinct=given.distinct)
        expert_models.write(measurement.model, config, weights, cpu.choose_threads(given.threads)[0])
    return {"file_bytes": measurement.model.stat().st_size, "layers": config.n_layers}


def reference(measurement: Measurement) -> Result:
    """The text's logits on the CPU alone."""
    with LLM(measurement.model, gpu="none", trial=False, **measurement.engine()) as llm:
        np.savez(reference_of(measurement.model), **worker.logits_of(llm, 1))
    return {}


def budgets(measurement: Measurement) -> dict[str, int]:
    """Bytes of each card's memory, by its name in the jobs; of a tiny model a part of what it takes."""
    given, file = measurement.arguments, measurement.model
    if not given.tiny:
        if given.times:
            return {f"a-{given.times:g}-th": int(file.stat().st_size / given.times)}
        return {str(card): card << 30 for card in given.cards}
    checkpoint = open_checkpoint(file)
    model = checkpoint_model(checkpoint)
    whole = needs(resolve(checkpoint, EngineConfig(**measurement.engine(), gpu=given.gpu))).vram
    names = [f"a-{given.times:g}-th"] if given.times else [str(card) for card in given.cards]
    experts = sum(one.n_experts for one in checkpoint.config.experts.values())
    left = experts // 2 * model.expert_bytes(0)[0] if experts else sum(one.stored for one in model.ffn[0])
    return dict.fromkeys(names, whole - left)


def ours(measurement: Measurement, key: str, budget: int, policy: str, chunk: int) -> Result:
    """Tokens per second of decode and of each prompt, of one request. key: of the job, written down before a profiler
    runs."""
    given = measurement.arguments
    begin = time.perf_counter()
    with (
        compare.Vram(given.gpu, measurement.before) as used,
        LLM(measurement.model, **measurement.engine(policy, chunk), gpu=given.gpu, vram=budget) as llm,
    ):
        result: Result = {"vram": budget, "load_s": round(time.perf_counter() - begin, 1)}
        with np.load(reference_of(measurement.model)) as wanted:
            result["off"] = {of: checked(logits, wanted[of]) for of, logits in worker.logits_of(llm, 1).items()}
        result["decode_tok_s"] = {"1": decoded(llm, given.tokens, given.locality > 0)}
        result["prompt_tok_s"] = {str(tokens): read(llm, tokens) for tokens in given.prompts}
        told = llm.sparsity or {}
        result |= {"gpu_share": told.get("gpu_share"), "choices": dict(llm.choices)}
        measurement.note(key, result)
        result["step"] = step_times.times(llm, given.gpu, given.tokens, given.locality > 0)
    return result | {"vram_used": used.peak}


def decoded(llm: LLM, tokens: int, drawn: bool) -> float:
    """Tokens per second of one request, the second time. drawn: not the most likely tokens, but random ones."""
    params = SamplingParams(max_tokens=1 + tokens, temperature=float(drawn), seed=1, ignore_eos=True)
    for _ in range(2):
        llm.clear_sparsity()
        rate = llm.generate([[1]], params)[0].timings.decode_tok_s
    assert rate is not None
    return rate


def read(llm: LLM, tokens: int) -> float:
    """Tokens per second of a prompt, the second time."""
    prompt = [1 + (7919 * number) % (llm.config.vocab_size - 1) for number in range(tokens)]
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return float([llm.generate([prompt], once)[0].timings.prefill_tok_s for _ in "12"][-1])


def theirs(measurement: Measurement, name: str, way: str) -> Result:
    """llama.cpp with as much on the GPU as the budget of `ours` holds. way: ngl, ncmoe or cache."""
    given, peer, model = measurement.arguments, measurement.peer, measurement.model
    assert peer is not None
    threads, layers = cpu.choose_threads(given.threads)[0], config_of(given).n_layers
    budget = budgets(measurement)[name]
    if way == "cache":
        limit = compare.cached_limit(peer, model, layers, budget, threads)
    else:
        each = model.stat().st_size // (layers + 1)
        limit = compare.limit(peer, model, way, layers, budget, each, threads)
    prompts = ["-p", ",".join(map(str, given.prompts)) or "0"]
    batches = ["-b", str(max(UBATCHES)), "-ub", ",".join(map(str, UBATCHES))]
    result = limit | peer_rates(peer, model, limit, [*prompts, "-n", str(given.tokens), *batches])
    if given.prompts and way != "cache":
        try:
            more = peer_rates(peer, model, limit, [*prompts, "-n", "0", *batches, *peer.not_mapped()])
            result["prompt_tok_s"] |= {f"{of}, not mapped": rate for of, rate in more["prompt_tok_s"].items()}
        except RuntimeError as error:
            result["not_mapped_error"] = programs.reason(error)
    return result


def peer_rates(peer: compare.Peer, model: Path, limit: Result, sizes: list[str]) -> Result:
    """One load: its decode, the better of both -ub, and its prompts by tokens and -ub, such as "2048, -ub 512"."""
    with compare.Vram(peer.gpu) as used:
        lines = peer.bench(model, limit["threads"], limit["flags"], [*sizes, "-r", "2"])
    decode = max((one["avg_ts"] for one in lines if one["n_gen"]), default=None)
    prompts = {f"{one['n_prompt']}, -ub {one['n_ubatch']}": one["avg_ts"] for one in lines if one["n_prompt"]}
    return {"decode_tok_s": {"1": decode}, "prompt_tok_s": prompts, "vram_used": used.peak}


def jobs(measurement: Measurement) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(key, work): this engine with every card, policy and chunk; then the peer in each of its ways."""
    given, peer = measurement.arguments, measurement.peer
    names = budgets(measurement)
    for policy, chunk, name in itertools.product(given.policies, given.chunks, () if given.peer_only else names):
        key = f"ours/{name}/{policy}/{chunk or 'auto'}"
        given_to = measurement, key, names[name], policy, chunk
        yield key, lambda given_to=given_to: ours(*given_to)
    if peer is None:
        return
    ways = ["ncmoe"] if config_of(given).experts else ["ngl"]
    if config_of(given).experts and peer.knows(compare.CACHE_FLAG):
        ways.append("cache")
    for name, way in itertools.product(names, ways):
        yield f"theirs/{name}/{way}", lambda name=name, way=way: theirs(measurement, name, way)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the model is made")
    parser.add_argument("--shape", choices=tuple(CONFIGS), default=EXPERTS, help="default: %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="default: all")
    parser.add_argument("--distinct", type=int, default=4, metavar="N", help="layers that differ (default 4), 0: all")
    parser.add_argument("--locality", type=float, default=0.0, metavar="L", help="as of expert_models.py; default: 0")
    parser.add_argument("--gpu", default="cuda", help="cuda, cuda:1, or cpu, which stands in (default %(default)s)")
    parser.add_argument("--cards", type=int, nargs="+", default=(8, 12), help="GiB; default: 8 12")
    parser.add_argument("--times", type=float, metavar="N", help="the model's bytes, as a multiple of the card's")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=("static",), help="default: static")
    parser.add_argument("--chunks", type=int, nargs="+", default=(AUTO,), help="of prompts; 0: the engine's (default)")
    parser.add_argument("--prompts", type=int, nargs="*", default=(), metavar="N", help="tokens of each; default: none")
    parser.add_argument("--tokens", type=int, default=64, help="that are decoded; default: %(default)s")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="of llama.cpp's binaries, built with CUDA")
    parser.add_argument("--ram", type=read_size, metavar="SIZE", help="RAM that there is, where it grows with use")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: ours by itself, the peer's every core")
    parser.add_argument("--peer-only", action="store_true", help="of the jobs those of llama.cpp")
    parser.add_argument("--make", action="store_true", help="make the model, nothing else")
    parser.add_argument("--tiny", action="store_true", help="a small model of the same kind")
    parser.add_argument("--out", type=Path, default=results.RESULTS / "hybrid-whole.json")
    arguments = parser.parse_args(argv)
    names = ("shape", "layers", "distinct", "locality", "gpu", "times", "prompts", "tokens", "threads", "tiny", "ram")
    settings = {name: getattr(arguments, name) for name in names}
    measurement = compare.begin(Measurement, arguments, "hybrid-whole", settings)
    with worker.hardware_of(arguments.gpu, arguments.ram):
        if measurement.wanted("make") or not measurement.model.exists():
            measurement.do("make", lambda: make(measurement))
        if arguments.make or "error" in measurement.done["make"]:
            return int("error" in measurement.done["make"])
        todo = dict(jobs(measurement))
        if not arguments.peer_only and (
            measurement.wanted("reference") or not reference_of(measurement.model).exists()
        ):
            measurement.do("reference", lambda: reference(measurement))
        for key, work in todo.items():
            if measurement.wanted(key):
                measurement.do(key, work)
    return int(any("error" in measurement.done[key] for key in todo))


if __name__ == "__main__":
    sys.exit(main())
