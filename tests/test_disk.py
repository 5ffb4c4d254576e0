"""Models that RAM does not hold: dense matrices that pass through a window, what stays on disk, and failures of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import (
    delta_gguf,
    family_gguf,
    gguf_name,
    in_nvfp4,
    latent_gguf,
    tiny_fields,
    tiny_folder,
    tiny_gguf,
    weights,
)
from sparse_models import CHAT

from benchmarks.models.gguf_writer import STRING
from powerinfer import LLM, ModelError, RequestError, SamplingParams, _native
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch, StoppedError
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.errors import RamError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.layout import matrix_names
from powerinfer.formats.quant import block_type, quantize
from powerinfer.hybrid.disk_hints import disk_helps
from powerinfer.hybrid.resolve import resolve
from powerinfer.models import load
from powerinfer.sizes import read_size

ENGINE = EngineConfig(threads=2, prefill_chunk=64, max_batch=4, context=64, trial=False)
OPTIONS: dict[str, Any] = {"threads": 2, "prefill_chunk": 32, "max_batch": 2, "gpu": "none", "trial": False}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def on_disk(checkpoint: Checkpoint, window: int, direct: bool = True, **emulated: Any) -> DiskTier:
    """Every matrix that lies in the file as it is used passes through a window of so many bytes; 0: the smallest."""
    names = [
        name for name in (*matrix_names(checkpoint.config), "embed") if not name.endswith(("k_b", "v_b", "router"))
    ]
    found = {name: place for name in names if (place := checkpoint.rests_at(name)) is not None}
    files = [(os.fspath(file.path), file.size) for file in checkpoint.files]
    reads = _native.Reads(files, direct, **emulated)
    if not window:  # the operators of a tiny model read a few blocks each
        window = 128 << 10
    return DiskTier(OnDisk(frozenset(found), window, direct=direct), checkpoint.files, found.values(), reads)


def steps(vocab: int) -> Iterator[Batch]:
    """A prompt, two tokens of it and one of another, and a few single ones."""
    rng = np.random.default_rng(5)

    def step(sequences: list[tuple[int, int, int]]) -> Batch:
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in sequences]).astype(np.int32)
        rows = np.repeat(np.arange(len(sequences)), [n for _, _, n in sequences]).astype(np.int32)
        pages = np.array([[2 * own, 2 * own + 1] for own, _, _ in sequences], np.int32)
        slots = np.array([own for own, _, _ in sequences], np.int32)
        tokens = rng.integers(0, vocab, len(positions)).astype(np.int32)
        return Batch(tokens, positions, rows, pages, np.arange(len(positions), dtype=np.int32), slots, slots)

    yield step([(0, 0, 20)])
    yield step([(0, 20, 2), (1, 0, 1)])
    for at in range(22, 25):
        yield step([(0, at, 1)])


def answers(executor: CpuExecutor) -> list[np.ndarray]:
    return [executor.forward(batch).copy() for batch in steps(executor.config.vocab_size)]


def write_family(name: str, folder: Path) -> Path:
    if name == "folder":
        return tiny_folder(folder / "model")
    if name in ("llama", "untied"):
        return tiny_gguf("llama", tied=name == "llama").write(folder / "m.gguf")
    if name == "nvfp4":
        return in_nvfp4(tiny_gguf("llama"), ("attn_q.weight", "ffn_up.weight"), 1.0).write(folder / "m.gguf")
    if name == "delta":
        return delta_gguf().write(folder / "m.gguf")
    if name == "latent":
        return latent_gguf(older=False).write(folder / "m.gguf")
    if name == "qwen2":
        return tiny_gguf("qwen2", biases="qkv").write(folder / "m.gguf")
    return family_gguf(name).write(folder / "m.gguf")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "untied", "folder", "falcon", "opt", "delta", "latent", "nvfp4"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_passes_through_a_window_gives_the_same_bits(name: str, direct: bool, tmp_path: Path) -> None:
    path = write_family(name, tmp_path)
    whole = load(open_checkpoint(path), ENGINE)
    expected = answers(whole)
    for window in (0, 1 << 20):  # an operator or two at a time; all of them
        checkpoint = open_checkpoint(path)
        tier = on_disk(checkpoint, window, direct)
        executor = load(checkpoint, ENGINE, disk=tier)
        assert len(tier.about.matrices) > 2 * checkpoint.config.n_layers
        for _ in range(2):  # the second time with what was read ahead
            for own, right in zip(answers(executor), expected, strict=True):
                assert np.array_equal(own, right)
        assert tier.counts()["bytes"] > 0
        executor.close()
    whole.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_type_is_packed_from_disk(kind: str, tmp_path: Path) -> None:
    builder = tiny_fields("llama").add("tokenizer.chat_template", STRING, CHAT)
    for name, values in weights("llama").items():
        if values.ndim == 2 and name != "embed":
            kind_id, dims = block_type(kind).id, list(reversed(values.shape))
            builder.tensor(gguf_name(name), quantize(values.astype(np.float32), kind), kind_id, dims)
        else:
            builder.tensor(gguf_name(name), values)
    path = builder.write(tmp_path / "m.gguf")
    whole, checkpoint = load(open_checkpoint(path), ENGINE), open_checkpoint(path)
    executor = load(checkpoint, ENGINE, disk=on_disk(checkpoint, 0))
    for own, right in zip(answers(executor), answers(whole), strict=True):
        assert np.array_equal(own, right)


def test_a_slow_disk_changes_nothing(tmp_path: Path) -> None:
    path = write_family("llama", tmp_path)
    whole, checkpoint = load(open_checkpoint(path), ENGINE), open_checkpoint(path)
    tier = on_disk(checkpoint, 0, False, latency=2e-4, rate=1e9)
    executor = load(checkpoint, ENGINE, disk=tier)
    for own, right in zip(answers(executor), answers(whole), strict=True):
        assert np.array_equal(own, right)
    assert tier.counts()["waited"] > 0


@pytest.mark.parametrize("at", [0, 1, 5, 20, 33])
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(at: int, tmp_path: Path) -> None:
    path = write_family("llama", tmp_path)
    whole, checkpoint = load(open_checkpoint(path), ENGINE), open_checkpoint(path)
    tier = on_disk(checkpoint, 0, False, fail_at=at, failures=1, error=errno.EIO)
    executor = load(checkpoint, ENGINE, disk=tier)
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
    assert failed == 1


def test_a_step_is_stopped_while_it_is_read_and_the_next_one_is_right(tmp_path: Path) -> None:
    path = write_family("llama", tmp_path)
    whole, checkpoint = load(open_checkpoint(path), ENGINE), open_checkpoint(path)
    executor = load(checkpoint, ENGINE, disk=on_disk(checkpoint, 0, False, latency=0.02))
    for number, batch in enumerate(steps(executor.config.vocab_size)):
        right = whole.forward(batch).copy()
        if number < 2:
            batch.stop = np.zeros(1, np.int32)
            waiter = threading.Timer(0.01, lambda stop=batch.stop: stop.fill(1))  # a step takes half a second
            waiter.start()
            with pytest.raises(StoppedError):
                executor.forward(batch)
            waiter.join()
            batch.stop = None
        assert np.array_equal(executor.forward(batch), right)
        if number == 2:
            return


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_family("llama", tmp_path)
    other = tmp_path / "other.gguf"
    shutil.copy(path, other)
    for change in ("touched", "truncated"):
        shutil.copy(other, path)
        checkpoint = open_checkpoint(path)
        executor = load(checkpoint, ENGINE, disk=on_disk(checkpoint, 0))
        first, *rest = steps(executor.config.vocab_size)
        executor.forward(first)
        if change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ModelError, match="changed while it was in use; load the model again"):
            for batch in rest:
                executor.forward(batch)
        executor.close()
    shutil.copy(other, tmp_path / "new")
    shutil.copy(other, path)
    checkpoint = open_checkpoint(path)
    executor, right = load(checkpoint, ENGINE, disk=on_disk(checkpoint, 0)), load(open_checkpoint(other), ENGINE)
    os.replace(tmp_path / "new", path)  # what was opened stays as it was
    for own, expected in zip(answers(executor), answers(right), strict=True):
        assert np.array_equal(own, expected)


# ---------------------------------------------------------------- the whole of it


def least_of(path: Path, **more: Any) -> int:
    """The smallest --ram that the error of a smaller one states, in bytes: a MiB more, for its rounding."""
    with pytest.raises(RequestError, match=r"even if its weights stay on disk.* give --ram ") as caught:
        LLM(path, ram=1 << 20, **OPTIONS, **more)
    return read_size(str(caught.value).rpartition("give --ram ")[2].split(",")[0])


@pytest.fixture(scope="module")
def water(smollm2: Path) -> list[int]:
    """What boiling water does, by the model in memory."""
    with LLM(smollm2, context=128, **OPTIONS) as llm:
        assert "disk" not in llm.choices
        return llm.generate("Water boils", PARAMS).token_ids


@pytest.mark.parametrize(("disk", "more"), [("auto", 0), ("direct", 0), ("direct", 24 << 20), ("cached", 24 << 20)])
def test_a_model_runs_in_less_memory_than_it_needs(disk: str, more: int, smollm2: Path, water: list[int]) -> None:
    options = OPTIONS | {"context": 128, "max_batch": 1}
    with LLM(smollm2, ram=least_of(smollm2, context=128) + more, disk=disk, **options) as llm:
        assert llm.generate("Water boils", PARAMS).token_ids == water
        assert "of dense weights at every step" in llm.choices["disk"]


def test_what_ram_holds_stays_there(smollm2: Path) -> None:
    """The more of it, the fewer bytes pass through the window; and what is planned is within the budget."""
    engine = EngineConfig(context=128, max_batch=1, prefill_chunk=32, gpu="none", trial=False, threads=2)
    least, before = least_of(smollm2, context=128), 1 << 40
    for ram in range(least, least + (128 << 20), 8 << 20):
        resolved = resolve(open_checkpoint(smollm2), replace(engine, ram=ram))
        if resolved.placement.disk is None:
            break
        assert sum(resolved.placement.disk.held.values()) <= ram
        assert 0 < resolved.placement.disk.streamed <= before
        before = resolved.placement.disk.streamed
    else:
        pytest.fail("everything fits at last")
    assert before < smollm2.stat().st_size / 2


def test_without_a_disk_ram_must_hold_the_model(smollm2: Path) -> None:
    with pytest.raises(RequestError, match=r"needs .* of RAM, .* and --ram is .*: give --ram"):
        LLM(smollm2, ram=least_of(smollm2, context=128), context=128, disk="none", **OPTIONS)


def test_free_memory_is_the_budget_where_it_does_not_hold_the_model(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = least_of(smollm2, context=128)
    monkeypatch.setattr("powerinfer.system.available_memory", lambda: (least + (8 << 20)) * 10 // 9)
    with LLM(smollm2, **OPTIONS, context=128) as llm:
        assert "disk" in llm.choices
        assert llm.generate("Water boils", PARAMS).token_ids


def test_a_context_that_nobody_asked_for_keeps_no_model_on_disk(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV cache takes memory as it fills."""
    engine = EngineConfig(max_batch=1, prefill_chunk=32, gpu="none", trial=False, threads=2)
    for free, disk in ((280 << 20, False), (200 << 20, True), (20 << 20, False)):  # with 8,192 tokens 400 MiB
        monkeypatch.setattr("powerinfer.system.available_memory", lambda free=free: free)
        resolved = resolve(open_checkpoint(smollm2), engine)
        assert (resolved.placement.disk is not None) is disk and resolved.engine == engine


def test_a_container_gets_what_takes_least_or_a_line_in_place_of_a_kill(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineConfig(max_batch=1, prefill_chunk=32, gpu="none", trial=False, threads=2, context=128)
    checkpoint, least = open_checkpoint(smollm2), least_of(smollm2, context=128)

    def within(room: int, free: int, **changes: Any) -> Any:
        monkeypatch.setattr("powerinfer.system.available_memory", lambda: free)
        monkeypatch.setattr("powerinfer.system.container_memory", lambda: room)
        return resolve(checkpoint, replace(engine, **changes))

    tight = within(least + (1 << 20), least)  # nine tenths of what is free do not hold it
    stated = resolve(checkpoint, replace(engine, ram=least)).placement.disk
    assert tight.placement.disk is not None and stated is not None
    assert tight.placement.disk.streamed >= stated.streamed > 0
    assert within(1 << 40, 1 << 20).placement.disk is None, "a container that holds all of it"
    for options in ({}, {"disk": "none"}):
        with pytest.raises(RamError, match=r"needs .* of RAM.*, and this container leaves it .*MiB: give") as error:
            within(least - (1 << 20), least // 2, **options)
        assert ("even if its weights stay on disk" in str(error.value)) is not bool(options)
        assert error.value.least > least - (1 << 20)


def test_a_lower_context_that_keeps_all_in_ram_is_said(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest one: with a page more, parts of the model stay on disk."""
    common: dict[str, Any] = OPTIONS | {"max_batch": 1}
    with pytest.raises(RequestError, match="give --ram ") as caught:
        LLM(smollm2, ram=1 << 20, disk="none", context=6144, **common)
    ram = read_size(str(caught.value).partition("give --ram ")[2].split(",")[0])
    with LLM(smollm2, ram=ram, **common) as llm:
        said = llm.choices["disk"].rpartition("; --context ")[2]
        assert said.endswith(" would leave room for all of it")
        assert said in llm.notes[-1]
        context = int(said.split()[0])
        assert 6144 <= context < 8192
    checkpoint, engine = open_checkpoint(smollm2), EngineConfig(**common, ram=ram)
    assert resolve(checkpoint, replace(engine, context=context)).placement.disk is None
    more = resolve(checkpoint, replace(engine, context=context + 32))
    assert more.placement.disk is not None
    assert disk_helps(more) == f"; --context {context} would leave room for all of it"
    less = resolve(checkpoint, replace(engine, ram=ram - (160 << 20), context=512))
    assert less.placement.disk is not None and "--context" not in disk_helps(less), "its weights do not fit"
    monkeypatch.setattr("powerinfer.system.available_memory", lambda: ram)
    said = disk_helps(resolve(checkpoint, replace(engine, ram=None, context=8192)))
    assert 1024 < int(said.partition("--context ")[2].split()[0]) < context


def test_a_request_that_fails_leaves_the_engine_usable(
    smollm2: Path, water: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, real = OPTIONS | {"context": 128, "disk": "cached"}, _native.Reads

    def failing(files: Any, direct: bool) -> Any:
        return real(files, direct, fail_at=400, failures=3, error=errno.EIO)

    least = least_of(smollm2, context=128)
    monkeypatch.setattr(_native, "Reads", failing)
    with LLM(smollm2, ram=least, prefix_cache=True, **options) as llm:
        with pytest.raises(ModelError, match="cannot read"):
            llm.generate("Water boils", PARAMS)
        for _ in range(2):
            assert llm.generate("Water boils", PARAMS).token_ids == water


def test_layers_beside_a_gpu_are_read_from_disk(tmp_path: Path) -> None:
    """Those that stay on the CPU as a whole."""
    pytest.importorskip("torch")
    from powerinfer.hybrid.load import load_split
    from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu
    from powerinfer.placement.disk import DiskPlan

    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    names = frozenset(f"layers.1.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    plan = DiskPlan(OnDisk(names, 128 << 10), {}, 0)
    found = []
    for disk in (None, plan):
        resolved = Resolved(
            open_checkpoint(path), ENGINE, device=UsedGpu("cpu"), placement=Placement(1, pages=8, disk=disk)
        )
        executor = load_split(resolved)
        found.append([executor.forward(batch).copy() for batch in steps(executor.vocab_size)])
        read = 0 if executor.cpu.disk is None else executor.cpu.disk.report()["bytes"]
        assert (read > 0) is (disk is not None)
        executor.close()
    for own, right in zip(*found, strict=True):
        assert np.array_equal(own, right)


def test_a_file_that_is_cut_off_ends_a_request(smollm2: Path, tmp_path: Path) -> None:
    """Down to its first page: the embedding is looked up in the mapped file, where nothing is left."""
    path = tmp_path / "m.gguf"
    shutil.copy(smollm2, path)
    options = OPTIONS | {"context": 128, "disk": "direct", "ram": least_of(smollm2, context=128)}
    code = f"""
import os
from powerinfer import LLM, ModelError, SamplingParams
from powerinfer.errors import EngineError
params = SamplingParams(max_tokens=4)
with LLM({str(path)!r}, **{options!r}) as llm:
    llm.generate("Water boils", params)
    os.truncate({str(path)!r}, 4096)
    try:
        llm.generate("Water boils", params)
    except ModelError as error:
        print(error)
    try:
        llm.generate("Water boils", params)
    except EngineError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == 2 * f"{path} changed while it was in use; load the model again\n"


def test_ram_is_kept(smollm2: Path) -> None:
    """In a memory cgroup of --ram, where exceeding it means being killed."""
    from benchmarks.lib import memory_limit

    with memory_limit.Group(1 << 30) as group:
        if group.by is None:
            pytest.skip("no memory cgroup can be made here")
    least = least_of(smollm2, context=128)
    flags = ["--context", "128", "--prefill-chunk", "32", "--max-batch", "1", "--threads", "2", "--disk", "direct"]
    command = [sys.executable, "-m", "powerinfer", "bench", "-m", str(smollm2), "--gpu", "none", "--ram", f"{least}B"]
    command += [*flags, "--prompt-tokens", "40", "--gen-tokens", "4", "--repeat", "1", "--json"]
    text, usage = memory_limit.output(command, least)
    document = json.loads(text.splitlines()[-1])
    assert not usage.killed and document["disk"]["bytes"] > 0
    assert document["disk"]["bytes_per_token"] <= smollm2.stat().st_size * 1.1
