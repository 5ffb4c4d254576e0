"""Experts that rest on disk: the same bits as in memory, whatever is there already, and failures of the disk."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_shapes import TOP, shape
from model_files import experts_gguf, in_nvfp4, mamba_gguf
from serving import ByteTokenizer, client, post, serving
from test_disk import ENGINE as OF_TWO
from test_disk import answers, least_of, steps
from test_experts import EXPERTS, LEVELS, Layer

from benchmarks.lib import memory_limit
from benchmarks.models import expert_models
from powerinfer import LLM, ModelError, RequestError, _native
from powerinfer.config import ModelConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.devices.rankings import DISK_POLICIES, Lfu
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.hybrid.load import load_resolved
from powerinfer.hybrid.resolve import resolve
from powerinfer.models import load
from powerinfer.placement.experts import replay_on_disk

ENGINE = replace(OF_TWO, threads=1)
FILES: dict[str, str] = {  # by name: the type of the matrices
    "qwen3-30b-a3b": "q4_0", "smallthinker-4b": "q8_0", "gpt-oss-20b": "mxfp4", "deepseek-v2-lite": "q8_0",
}  # fmt: skip


def larger(config: ModelConfig) -> ModelConfig:
    """Experts that are worth reading: of more than a few blocks."""
    layers = [replace(layer, ffn=replace(layer.ffn, size=256)) for layer in config.layers]  # type: ignore[type-var]
    return replace(config, layers=tuple(layers))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small model of a family, as a file, or, of "folder", with a tensor for each expert."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def write(name: str) -> Path:
        if name == "folder":
            path, config = folder / name, replace(larger(shape("qwen3-30b-a3b")), architecture="qwen3_moe")
            expert_models.write_folder(path, config, expert_models.Weights("f16", "f16"))
        else:
            path = folder / f"{name}.gguf"
            config = larger(shape("qwen3-30b-a3b")) if name == "larger" else shape(name)
            expert_models.write(path, config, expert_models.Weights(FILES.get(name, "q8_0")))
        return path

    return write


@pytest.fixture(scope="module")
def expected(written: Callable[[str], Path]) -> Callable[[str], list[np.ndarray]]:
    """What a model answers that is in memory."""

    @cache
    def answer(name: str) -> list[np.ndarray]:
        executor = load(open_checkpoint(written(name)), ENGINE)
        found = answers(executor)
        executor.close()
        return found

    return answer


def on_disk(
    checkpoint: Checkpoint, slots: int, emulated: dict[str, Any] | None = None, threads: int = 1, **about: Any
) -> CpuExecutor:
    """With that many experts of each layer in memory."""
    files = [(os.fspath(file.path), file.size) for file in checkpoint.files]
    what = OnDisk(experts=dict.fromkeys(checkpoint.config.experts, slots), **about)
    reads = _native.Reads(files, what.direct, **(emulated or {}))
    return load(checkpoint, replace(ENGINE, threads=threads), disk=DiskTier(what, checkpoint.files, (), reads))


def single_tokens(n: int, vocab: int) -> Iterator[Batch]:
    tokens, zero = np.random.default_rng(0).integers(0, vocab, n).astype(np.int32), np.zeros(1, np.int32)
    for at in range(n):
        yield Batch(tokens[at : at + 1], np.array([at], np.int32), zero, np.array([[0, 1, 2, 3]], np.int32), zero)


def check_bits(executor: CpuExecutor, right: list[np.ndarray]) -> dict[str, float]:
    """Twice: the second time with what the first one left in memory. What was read."""
    for _ in range(2):
        for own, one in zip(answers(executor), right, strict=True):
            assert np.array_equal(own, one)
    assert executor.disk is not None
    counts = executor.disk.counts()
    executor.close()
    return counts


# ---- the operator


class RestingLayer(Layer):
    """Random experts in a file, of which memory has some; `run` finds what it left there the last time."""

    def write(self, path: Path, slots: int, direct: bool) -> None:
        """At places that nothing aligns."""
        data, places = b"?", []
        for name, _ in self.shapes(self.size):
            found = []
            for one in self.stored[name]:
                data += b"?" * 37
                found.append((0, len(data)))
                data += one.tobytes()
            places.append(found)
        path.write_bytes(data)
        reads = _native.Reads([(str(path), len(data))], direct)
        parts = [
            _native.Resting.matrices(self.kind, *shape, own)
            for (_, shape), own in zip(self.shapes(self.size), places, strict=True)
        ]
        self.slots = _native.Slots(reads, parts, EXPERTS, slots)

    def experts(self, pool: _native.Pool) -> _native.ExpertMatrices:
        shapes = dict(self.shapes(self.size))
        gate, up, down = (
            (shape := shapes.get(name)) and _native.disk_matrix(self.kind, EXPERTS * shape[0], shape[1], 0, 0)
            for name in ("gate", "up", "down")
        )
        return _native.ExpertMatrices(
            EXPERTS, self.size, _native.NeuronSpec(self.activation), gate, up, down, slots=self.slots
        )


TYPES = {
    "F32": (40, 24), "F16": (48, 40), "BF16": (64, 40), "Q8_0": (96, 160), "Q4_0": (96, 64), "Q4_1": (96, 64),
    "Q5_0": (96, 64), "Q5_1": (96, 64), "Q4_K": (256, 512), "Q5_K": (256, 512), "Q6_K": (256, 512),
    "Q3_K": (256, 512), "Q2_K": (256, 512), "TQ1_0": (256, 512), "TQ2_0": (256, 512),
    "IQ4_NL": (96, 64), "IQ4_XS": (256, 512), "MXFP4": (96, 64),
    "NVFP4": (192, 128), "Q2_0": (192, 128), "Q1_0": (384, 128),
    "IQ3_S": (256, 512), "IQ2_XS": (256, 512), "IQ1_S": (256, 512),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("kind", TYPES)
def test_rows_from_disk_and_the_panels_that_are_made_of_them_give_the_same_bits(
    kind: str, direct: bool, tmp_path: Path
) -> None:
    """Whatever the sizes and the number of threads, which pack parts of the same expert in place."""
    d, size = TYPES[kind]
    gated = kind != "F16"
    resting = RestingLayer(kind, d, size, gated, shared=0)
    rng = np.random.default_rng(3)
    steps = [rng.standard_normal((tokens, d)).astype(np.float32) for tokens in (1, 3, 40, 1)]
    right = [Layer(kind, d, size, gated, shared=0).run(LEVELS[-1], x, threads=1) for x in steps]
    for slots, threads in ((1, 5), (EXPERTS, 2)) if direct else ((3, 3),):
        resting.write(tmp_path / "rows", slots, direct)
        for x, one in zip(steps, right, strict=True):
            assert np.array_equal(resting.run(LEVELS[-1], x, threads), one)


# ---- models


@pytest.mark.sampled
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("name", [*FILES, "folder"])
def test_the_bits_are_those_of_experts_in_memory(name: str, direct: bool, written: Any, expected: Any) -> None:
    read = []
    for slots in (1, 5, 32):
        executor = on_disk(open_checkpoint(written(name)), slots, threads=1 + (slots == 5), direct=direct)
        read.append(check_bits(executor, expected(name)))
    few, some, every = read
    assert few["bytes"] > some["bytes"] > every["bytes"] > 0
    assert few["wanted"] == some["wanted"] == every["wanted"]
    assert few["hits"] < some["hits"] < every["hits"] < every["wanted"]


def test_factors_beside_the_blocks(tmp_path: Path) -> None:
    """Of NVFP4, which experts have in a tensor of their own."""
    found = []
    for spread in (0.0, 2.0):
        builder = in_nvfp4(experts_gguf(experts=8), ("gate_exps.weight", "up_exps.weight"), spread)
        path = builder.write(tmp_path / f"{spread}.gguf")
        whole = load(open_checkpoint(path), ENGINE)
        right = answers(whole)
        whole.close()
        assert check_bits(on_disk(open_checkpoint(path), 3, threads=2), right)["bytes"] > 0
        found.append(np.concatenate([one.reshape(-1) for one in right]))
    assert np.abs(found[0] - found[1]).max() > 0.01 * np.abs(found[0]).max(), "they make a difference"


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", DISK_POLICIES)
def test_a_policy_says_what_is_read_but_nothing_of_the_result(
    policy: str, prefetch: bool, written: Any, expected: Any
) -> None:
    checkpoint = open_checkpoint(written("qwen3-30b-a3b"))
    shares = {layer: np.linspace(0, 1, about.n_experts) for layer, about in checkpoint.config.experts.items()}
    executor = on_disk(checkpoint, 8, policy=policy, frequencies=shares, prefetch=prefetch)
    check_bits(executor, expected("qwen3-30b-a3b"))


@pytest.mark.parametrize("policy", DISK_POLICIES)
def test_a_replay_hits_what_a_model_does(policy: str, written: Any) -> None:
    checkpoint, tokens = open_checkpoint(written("qwen3-30b-a3b")), 60
    shares = {layer: np.linspace(0, 1, about.n_experts) for layer, about in checkpoint.config.experts.items()}
    executor = on_disk(checkpoint, 8, policy=policy, frequencies=shares, prefetch=False)
    selected: dict[int, list[np.ndarray]] = {layer: [] for layer in shares}
    with executor.routed() as routed:
        for one in single_tokens(tokens, executor.vocab_size):
            executor.forward(one)
            for layer, found in routed().items():
                selected[layer].extend(found)
    assert executor.disk is not None
    start = np.array([*shares.values()], np.float32)
    played = {layer: np.array(one) for layer, one in selected.items()}
    replayed = replay_on_disk(policy, start, played, dict.fromkeys(shares, 8))
    by_layer = {layer: op.disk_counts() for layer, op in executor._experts.items()}
    assert replayed.hits == {layer: by_layer[layer]["hits"] for layer in shares}
    assert replayed.copies == {layer: by_layer[layer]["wanted"] - by_layer[layer]["hits"] for layer in shares}
    assert sum(replayed.hits.values()) > 0.2 * sum(replayed.selections.values())


def test_static_needs_a_profile(written: Any) -> None:
    with pytest.raises(RequestError, match="powerinfer profile"):
        on_disk(open_checkpoint(written("qwen3-30b-a3b")), 8, policy="static")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "smallthinker-4b"])
@pytest.mark.parametrize("slots", [2, 12])
def test_a_slow_disk_changes_nothing(name: str, slots: int, written: Any, expected: Any) -> None:
    slow = {"latency": 1e-4, "rate": 2e9}
    executor = on_disk(open_checkpoint(written(name)), slots, slow, direct=False, prefetch=True)
    assert executor.disk is not None
    report = executor.disk.report
    counts = check_bits(executor, expected(name))
    assert counts["waited"] > 0 and counts["active"] > 0
    assert counts["guessed"] >= counts["right"] > 0
    assert report()["guess_rate"] == counts["right"] / counts["guessed"]
    if name == "smallthinker-4b":  # its router selects before attention
        assert counts["guessed"] == counts["right"]


@pytest.mark.parametrize("latents", [0, 32])
def test_experts_are_guessed_across_layers_without_any(latents: int, tmp_path: Path) -> None:
    """Routers read the layer's input, also where experts read latents."""
    checkpoint = open_checkpoint(mamba_gguf("ME*E", latents).write(tmp_path / "m.gguf"))
    whole = load(checkpoint, ENGINE)
    right = answers(whole)
    whole.close()
    counts = check_bits(on_disk(open_checkpoint(tmp_path / "m.gguf"), 2, direct=False, prefetch=True), right)
    assert counts["guessed"] >= counts["right"] > 0


def test_guesses_end_where_they_are_wrong(tmp_path: Path) -> None:
    """Where a layer changes the stream so much that the next one's router selects others."""
    builder = experts_gguf(experts=32, top=2)
    down = next(one for one in builder.tensors if one.name == "blk.0.ffn_down_exps.weight")
    down.data = (100 * np.frombuffer(down.data, np.float32)).astype(np.float32).tobytes()
    executor = on_disk(open_checkpoint(builder.write(tmp_path / "m.gguf")), 4)
    assert executor.disk is not None
    for one in single_tokens(120, executor.vocab_size):
        executor.forward(one)
    last = executor.disk.counts()  # of the second layer: nothing is guessed of the first
    assert 64 <= last["guessed"] < 70 and last["right"] < 0.4 * last["guessed"]


def test_each_expert_is_read_once_for_a_piece_of_a_prompt(written: Any) -> None:
    checkpoint = open_checkpoint(written("qwen3-30b-a3b"))
    executor = on_disk(checkpoint, 4, prefetch=False)
    assert executor.disk is not None
    with executor.routed() as routed:
        for batch in steps(executor.config.vocab_size):
            executor.disk.clear()
            executor.forward(batch)
            wanted = sum(len(np.unique(one)) for one in routed().values())
            counts = executor.disk.counts()
            assert counts["wanted"] == wanted
            parts = 3
            assert counts["reads"] == parts * (wanted - counts["hits"])
    executor.close()


class Seen:
    """Every layer's input, selected experts and neurons that fired."""

    def __init__(self) -> None:
        self.found: list[np.ndarray] = []

    def reads(self, layer: int, x: np.ndarray) -> None:
        self.found.append(x.copy())

    def fires(self, layer: int, selected: np.ndarray, active: np.ndarray) -> None:
        self.found += [selected.copy(), active.copy()]


def test_experts_can_be_observed(written: Any) -> None:
    """`forward` runs in parts then."""
    path, seen = written("smallthinker-4b"), []
    for executor in (load(open_checkpoint(path), ENGINE), on_disk(open_checkpoint(path), 6)):
        seen.append(Seen())
        with executor.observed_experts(seen[-1]):
            answers(executor)
    whole, own = (one.found for one in seen)
    assert len(whole) == len(own) > 20
    assert all(np.array_equal(a, b) for a, b in zip(whole, own, strict=True))


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("at", [0, 7, 100, 200])
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(at: int, prefetch: bool, written: Any) -> None:
    path = written("qwen3-30b-a3b")
    whole, fault = load(open_checkpoint(path), ENGINE), {"fail_at": at, "failures": 1, "error": errno.EIO}
    executor = on_disk(open_checkpoint(path), 8, fault, direct=False, prefetch=prefetch)
    failed = 0
    for batch in steps(executor.config.vocab_size):
        right = whole.forward(batch).copy()
        try:
            own = executor.forward(batch).copy()
        except ModelError as error:
            assert str(error) == f"cannot read {path}: {os.strerror(errno.EIO)}"
            failed += 1
            own = executor.forward(batch).copy()
        assert np.array_equal(own, right)
    assert failed == 1 or (prefetch and failed == 0)  # nobody may need what was expected


def test_a_step_that_fails_counts_for_no_policy(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(Lfu, "observe", lambda policy, uses, tokens: seen.append(uses.copy()))
    fault = {"fail_at": 60, "failures": 1, "error": errno.EIO}
    executor = on_disk(open_checkpoint(written("qwen3-30b-a3b")), 8, fault, direct=False, prefetch=False)
    failed = 0
    for batch in steps(executor.config.vocab_size):
        try:
            executor.forward(batch)
        except ModelError:
            failed += 1
            executor.forward(batch)
        assert (seen.pop().sum(axis=1) == TOP * len(batch.tokens)).all() and not seen
    assert failed == 1


def test_a_disk_that_is_gone_is_said_at_every_step(written: Any) -> None:
    executor = on_disk(open_checkpoint(written("smallthinker-4b")), 8, {"fail_at": 0, "error": errno.ENODEV})
    for batch in steps(executor.config.vocab_size):
        with pytest.raises(ModelError, match=os.strerror(errno.ENODEV)):
            executor.forward(batch)


def test_a_file_that_changes_is_no_longer_computed(tmp_path: Path) -> None:
    path = experts_gguf().write(tmp_path / "m.gguf")
    executor = on_disk(open_checkpoint(path), 2)
    first, *_, last = steps(executor.config.vocab_size)
    executor.forward(first)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="changed while it was in use"):
        executor.forward(last)


def test_what_is_converted_cannot_stay_on_disk(tmp_path: Path) -> None:
    path = experts_gguf().write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="leave out --quantize"):
        on_disk(open_checkpoint(path, quantize="q8_0"), 2)


def test_neurons_in_experts_are_not_selected_on_disk(written: Any) -> None:
    checkpoint = open_checkpoint(written("smallthinker-4b"))
    tier = DiskTier(OnDisk(experts=dict.fromkeys(checkpoint.config.experts, 8)), checkpoint.files)
    with pytest.raises(RequestError, match="--selector all"):
        load(checkpoint, ENGINE, in_experts=True, disk=tier)


def test_slots_of_other_experts_are_refused(tmp_path: Path) -> None:
    """Of the native operator, whose sizes the wiring gets from one place."""
    path = experts_gguf().write(tmp_path / "m.gguf")
    executor = on_disk(open_checkpoint(path), 2)
    about, disk = executor.config.experts[0], executor.disk
    assert disk is not None
    matrices = [_native.disk_matrix("F32", 4 * 96, 64, 0, 0) for _ in range(2)]
    down = _native.disk_matrix("F32", 4 * 64, 96, 0, 0)
    spec = _native.NeuronSpec(about.activation)
    for items, nbytes, why in ((3, 96 * 64 * 4, "number of experts"), (4, 64, "another size")):
        part = _native.Resting(0, 0, nbytes, nbytes)
        slots = _native.Slots(disk.reads, [part] * 3, items, 2)
        of_all = _native.ExpertMatrices(4, 96, spec, *matrices, down, slots=slots)
        with pytest.raises(ValueError, match=why):
            executor._program.experts(_native.FfnSpec(), _native.RouterSpec(2), None, of_all)


def test_the_server_shows_what_was_read(written: Any) -> None:
    executor = on_disk(open_checkpoint(written("qwen3-30b-a3b")), 8)
    llm = LLM.from_parts(executor, ByteTokenizer(), executor.config, ENGINE)  # type: ignore[arg-type]
    names = {"disk_read_bytes": "bytes", "disk_wanted": "wanted", "disk_hits": "hits", "disk_stall_seconds": "waited"}

    def figures() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines()]
        values = dict(line for line in lines if len(line) == 2)
        return {own: float(values[f'powerinfer_{name}_total{{model="toy"}}']) for name, own in names.items()}

    with serving(llm) as server, client(server) as http:
        tier = executor.disk
        assert tier is not None
        seen = [figures()]
        for _ in range(2):
            status, _ = post(server, "/v1/completions", {"prompt": "some", "max_tokens": 4, "ignore_eos": True})
            assert status == 200
            seen.append(figures())
            totals = tier.totals()
            assert seen[-1] == {own: pytest.approx(totals[own]) for own in names.values()}
            assert 0 < totals["hits"] < totals["wanted"]
        assert all(before[own] < after[own] for before, after in pairwise(seen) for own in names.values())
        assert http.get("/v1/engine").json()["disk"]["bytes"] == seen[-1]["bytes"]


# ---- what --ram does not hold


@pytest.mark.parametrize("name", ["larger", "folder"])
def test_experts_that_ram_does_not_hold_stay_on_disk(name: str, written: Any, expected: Any) -> None:
    engine, low, high = replace(ENGINE, gpu="none"), 1 << 20, 1 << 33
    checkpoint = open_checkpoint(written(name))
    while high - low > 1 << 16:  # the least that holds all
        ram = (low + high) // 2
        try:
            held = resolve(checkpoint, replace(engine, ram=ram)).placement.disk is None
        except RequestError:
            held = False
        low, high = (low, ram) if held else (ram, high)
    resolved = resolve(checkpoint, replace(engine, ram=low - (1 << 20)))
    assert resolved.placement.disk is not None
    slots = resolved.placement.disk.about.experts.values()
    assert len(slots) == 2 and all(2 * TOP <= n < 32 for n in slots)
    executor, _ = load_resolved(resolved.placed(kv_room=None), list)
    check_bits(executor, expected(name))


def test_ram_is_kept(tmp_path: Path) -> None:
    """In a memory cgroup of --ram, where exceeding it means being killed."""
    with memory_limit.Group(1 << 30) as group:
        if group.by is None:
            pytest.skip("no memory cgroup can be made here")
    small, path = shape("qwen3-30b-a3b"), tmp_path / "m.gguf"
    layers = tuple(replace(layer, ffn=replace(layer.ffn, size=2048)) for layer in small.layers)  # type: ignore[type-var]
    expert_models.write(path, replace(small, layers=layers), expert_models.Weights("q8_0"))
    assert path.stat().st_size > 100 << 20
    flags = ["--context", "128", "--prefill-chunk", "32", "--max-batch", "1", "--threads", "2", "--disk", "direct"]
    flags += ["--gpu", "none", "--prompt-tokens", "60", "--gen-tokens", "30", "--repeat", "1", "--json"]
    least, hits = least_of(path, context=128), 0.0
    for ram in (least, least + (24 << 20)):
        command = [sys.executable, "-m", "powerinfer", "bench", "-m", str(path), "--ram", f"{ram}B", *flags]
        text, usage = memory_limit.output(command, ram)
        disk = json.loads(text.splitlines()[-1])["disk"]
        assert not usage.killed and disk["bytes"] > 0 and hits < disk["hit_rate"] < 1
        hits = disk["hit_rate"]
