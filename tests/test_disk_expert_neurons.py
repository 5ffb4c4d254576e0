"""Experts on disk whose neurons are told apart: the bits of `exact` and of `predicted` in memory, whatever is there,
from fewer bytes."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import PLAIN_EXPERTS
from test_expert_neurons import OF_LATENTS, PLAIN, TOKENS, logits, model, opened, plain_model
from test_predicted_experts import give_plain_predictors
from test_predicted_experts import opened as opened_predicted

from benchmarks.models import silent_models
from powerinfer import LLM, ModelError, RequestError, SamplingParams, _native
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.gguf import read_gguf
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import model_of, ram_bytes
from powerinfer.models import load
from powerinfer.prepare.expert_packing import pack_experts
from powerinfer.sparsity.selection import select

STEPS = (1, 25, TOKENS)  # a token, some that are computed sparsely, and a prompt, which is not
WAYS = ((1, 3, True, (1, 25, TOKENS)), (2, 1, False, (TOKENS, 1, 25)), (PLAIN_EXPERTS, 3, True, (25, TOKENS, 1)))
"""Slots, threads, whether reads are direct, and steps, of which each comes first once, and last."""


def resting(
    path: Path,
    slots: int,
    threads: int = 2,
    gap: int = 0,
    emulated: dict[str, Any] | None = None,
    predicted: bool = False,
    **about: Any,
) -> CpuExecutor:
    """`exact`, or `predicted`, with that many experts of each layer in memory. gap: bytes between rows that are read
    with them."""
    checkpoint, predictors = open_checkpoint(path), None
    rows, _ = pack_experts(checkpoint, None, predicted=predicted)
    if predicted:
        own = open_predictor(checkpoint).layers
        predictors = {layer: (one.predictor, one.inner, one.outer) for layer, one in own.items()}.__getitem__
    files = [*checkpoint.files, rows.file]
    what = OnDisk(experts=dict.fromkeys(rows.layers, slots), **about)
    reads = _native.Reads([(os.fspath(file.path), file.size) for file in files], what.direct, **(emulated or {}))
    reads.gap = gap
    engine = EngineConfig(threads=threads, context=128, kv_type="f32", prefill_chunk=TOKENS)
    disk = DiskTier(what, files, (), reads, rows.layers)
    return load(checkpoint, engine, in_experts=True, predictors=predictors, disk=disk)


def counts_of(executor: CpuExecutor) -> dict[str, float]:
    assert executor.disk is not None
    return executor.disk.counts()


ALL_KINDS = (*((kind, None, 0) for kind in PLAIN), ("Q5_0", "Q8_0", 0), *OF_LATENTS)
"""Types of experts and of the shared one, None: the same; the width of latents."""


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "shared", "latents"), ALL_KINDS)
def test_the_bits_are_those_in_memory(kind: str, shared: str | None, latents: int, tmp_path: Path) -> None:
    path = plain_model(tmp_path, kind, shared, latents)
    inside = [opened(path, exact=True, threads=threads) for threads in (1, 3)]
    right = {(one, step): logits(inside[one > 1], step) for one in (1, 3) for step in STEPS}
    for slots, threads, direct, steps in WAYS:
        executor = resting(path, slots, threads, direct=direct)
        for step in steps:
            assert np.array_equal(logits(executor, step), right[threads, step]), (slots, step)
        executor.close()


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "shared", "latents"), [one for one in ALL_KINDS if one[0] != "MXFP4"])
def test_what_a_predictor_selects_has_the_bits_in_memory(
    kind: str, shared: str | None, latents: int, tmp_path: Path
) -> None:
    """With rows of up and of down in bundles; prompts make panels of both."""
    path = give_plain_predictors(plain_model(tmp_path, kind, shared, latents), threshold=3.0)
    inside = [opened_predicted(path, threads=threads) for threads in (1, 3)]
    right = {(one, step): logits(inside[one > 1], step) for one in (1, 3) for step in STEPS}
    for slots, threads, direct, steps in WAYS:
        executor = resting(path, slots, threads, direct=direct, predicted=True)
        for step in steps:
            assert np.array_equal(logits(executor, step), right[threads, step]), (slots, step)
        for ffn in executor.expert_ffns.values():
            counts = ffn.counts()
            assert 0 < counts["active"] < counts["candidates"] < counts["neurons"]
        executor.close()


def test_bundles_of_candidates_are_read_and_no_others(tmp_path: Path) -> None:
    """Of a shared one that is dense, only experts have neurons that are told apart. A read has up and down."""
    path = give_plain_predictors(plain_model(tmp_path, "Q5_0", "F32"), threshold=3.0)
    executor = resting(path, PLAIN_EXPERTS, prefetch=False, predicted=True)
    assert executor.disk is not None
    pitch = {layer: own.layout.pitch for layer, own in executor.disk.rows.items()}
    once = one_token(executor)
    selected = {layer: ffn.counts()["candidates"] for layer, ffn in executor.expert_ffns.items()}
    read, counts = opened_rows(executor), counts_of(executor)
    assert read == sum(selected[layer] * pitch[layer] for layer in pitch)
    assert 0 < read < 0.4 * sum(own.rows.nbytes for own in executor.disk.rows.values())
    scales = sum(own.scales.nbytes / PLAIN_EXPERTS for own in executor.disk.rows.values() if own.scales is not None)
    assert counts["bytes"] == read + 2 * scales, "of two experts"
    assert np.array_equal(one_token(executor), once) and opened_rows(executor) == read, "what was read is kept"
    executor.close()


def test_rows_of_neurons_that_fire_are_read_and_no_others(tmp_path: Path) -> None:
    """Down of the shared one has another type, so that only experts have neurons that are told apart."""
    executor = resting(plain_model(tmp_path, "Q5_0", "F32"), PLAIN_EXPERTS, prefetch=False)
    assert executor.disk is not None
    pitch = {layer: own.layout.pitch for layer, own in executor.disk.rows.items()}
    down = sum(own.rows.nbytes for own in executor.disk.rows.values())
    once = logits(executor, 1)[:1]
    first = opened_rows(executor)
    executor.close()

    executor = resting(plain_model(tmp_path, "Q5_0", "F32"), PLAIN_EXPERTS, prefetch=False)
    assert np.array_equal(one_token(executor), once[0])
    fired = {layer: ffn.counts()["active"] for layer, ffn in executor.expert_ffns.items()}
    read = opened_rows(executor)
    assert read == sum(fired[layer] * pitch[layer] for layer in fired)
    assert 0 < read < 0.4 * down and read < first <= down, "half of the neurons of half of the experts, then more"
    assert np.array_equal(one_token(executor), once[0]) and opened_rows(executor) == read, "what was read is kept"
    executor.close()


def test_candidates_of_the_next_layer_are_read_early(tmp_path: Path) -> None:
    """By its predictor, of what the layer before reads: some of them in vain, which costs bytes and nothing else."""
    path, found = give_plain_predictors(plain_model(tmp_path, "Q5_0"), threshold=3.0), []
    for prefetch in (False, True):
        executor = resting(path, PLAIN_EXPERTS - 1, prefetch=prefetch, predicted=True)
        found.append((one_token(executor), opened_rows(executor)))
        executor.close()
    (right, needed), (early, read) = found
    assert np.array_equal(early, right) and needed < read < 1.5 * needed


@pytest.mark.parametrize("at", [5, 30, 200])
def test_guesses_that_could_not_be_read_leave_what_is_right(at: int, tmp_path: Path) -> None:
    path = give_plain_predictors(plain_model(tmp_path, "Q5_0"), threshold=3.0)
    right, fault = logits(opened_predicted(path), 1), {"fail_at": at, "failures": 2, "error": errno.EIO}
    executor = resting(path, 3, emulated=fault, predicted=True)
    for _ in range(3):
        with suppress(ModelError):
            assert np.array_equal(logits(executor, 1), right)
    assert np.array_equal(logits(executor, 1), right)
    executor.close()


def test_a_step_does_without_guesses_that_could_not_be_read(tmp_path: Path) -> None:
    """Of experts that it needs, too: the rows that it needs are read again. Only if these fail it does."""
    path, right = give_plain_predictors(plain_model(tmp_path, "Q5_0"), threshold=3.0), 0
    expected = logits(opened_predicted(path), 1)
    for at in range(40, 80, 4):  # most of these reads are guesses
        executor = resting(path, 3, emulated={"fail_at": at, "failures": 1, "error": errno.EIO}, predicted=True)
        with suppress(ModelError):
            assert np.array_equal(logits(executor, 1), expected)
            right += 1
        executor.close()
    assert right >= 5


def opened_rows(executor: CpuExecutor) -> float:
    return counts_of(executor)["rows"]


def one_token(executor: CpuExecutor) -> np.ndarray:
    """The logits of the first token of `logits`."""
    token = np.random.default_rng(3).integers(0, executor.vocab_size, TOKENS).astype(np.int32)[:1]
    pages, zero = np.arange(executor.n_pages, dtype=np.int32)[None], np.zeros(1, np.int32)
    return executor.forward(Batch(token, zero, zero, pages, zero)).copy()[0]


def test_rows_that_lie_close_are_read_at_once(tmp_path: Path) -> None:
    path, found = plain_model(tmp_path, "Q4_0"), []
    for gap in (0, 1 << 20):
        executor = resting(path, 2, gap=gap)
        answer = logits(executor, 1)
        found.append((answer, counts_of(executor)))
        executor.close()
    (apart, single), (together, joined) = found
    assert np.array_equal(apart, together)
    assert joined["reads"] < 0.5 * single["reads"] and joined["rows"] > single["rows"]


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("slots", [1, PLAIN_EXPERTS])
def test_a_slow_disk_changes_nothing(slots: int, predicted: bool, tmp_path: Path) -> None:
    path = give_plain_predictors(plain_model(tmp_path, "Q8_0"), threshold=3.0)
    inside = opened_predicted(path) if predicted else opened(path, exact=True)
    slow = resting(path, slots, emulated={"latency": 2e-5, "rate": 2e9}, predicted=predicted, direct=False)
    for step in (25, TOKENS):
        assert np.array_equal(logits(slow, step), logits(inside, step))
    assert counts_of(slow)["waited"] > 0
    slow.close()


@pytest.mark.sampled(("predicted", "step"), "at")
@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("at", [0, 9, 40])
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(
    at: int, step: int, predicted: bool, tmp_path: Path
) -> None:
    path = give_plain_predictors(plain_model(tmp_path, "Q5_1"), threshold=3.0)
    right = logits(opened_predicted(path) if predicted else opened(path, exact=True), step)
    fault = {"fail_at": at, "failures": 1, "error": errno.EIO}
    executor = resting(path, 2, emulated=fault, predicted=predicted, direct=False, prefetch=False)
    with pytest.raises(ModelError, match=f"cannot read .*: {os.strerror(errno.EIO)}"):
        for _ in range(5):
            logits(executor, step)
    assert np.array_equal(logits(executor, step), right)
    executor.close()


# ---- the prepared file


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "F16", "BF16"])
def test_weights_that_are_no_numbers_are_named(kind: str, tmp_path: Path) -> None:
    path = plain_model(tmp_path, kind)
    experts = read_gguf(path).tensors["blk.1.ffn_down_exps.weight"].data.tobytes()
    data = path.read_bytes()
    at = data.index(experts) + len(experts) * 3 // PLAIN_EXPERTS  # of the fourth
    nan = b"\xc0\x7f" if kind == "BF16" else b"\x00\x7e"
    path.write_bytes(data[:at] + nan + data[at + 2 :])
    with pytest.raises(ModelError, match=r"layers\.1\.experts_down of expert 3 has weights that are no numbers"):
        pack_experts(open_checkpoint(path), None)
    assert not list(tmp_path.glob("**/*.safetensors*"))


def test_a_file_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    path = plain_model(tmp_path, "Q4_0")
    checkpoint = open_checkpoint(path)
    rows, seconds = pack_experts(checkpoint, None)
    assert seconds is not None and pack_experts(checkpoint, None)[1] is None, "it is up to date"
    whole, file = rows.path.read_bytes(), rows.path

    def refused(data: bytes, why: str) -> None:
        file.write_bytes(data)
        with pytest.raises(ModelError, match=why) as caught:
            select(checkpoint, EngineConfig(selector="exact"))
        assert f"`powerinfer pack -m {path}` recreates it" in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(whole[:-64], "past the end of the file")
    refused(whole.replace(b'\\"experts\\": [4, 4]', b'\\"experts\\": [4, 5]'), "other layers, experts or types")
    refused(whole.replace(b"layers.1.scales", b"layers.1.scalez"), "does not hold layers.1.scales")
    refused(whole.replace(b'"kind\\": \\"expert-rows', b'"kind\\": \\"expert-rowz'), "not expert-rows")
    refused(b"", "truncated")
    assert pack_experts(checkpoint, None)[1] is not None, "it is made again"
    assert file.read_bytes() == whole and not list(file.parent.glob("*.part"))
    other = open_checkpoint(plain_model(tmp_path / "..", "Q4_1"))
    file.rename(file.with_name("kept"))
    theirs, _ = pack_experts(other, None)
    file.write_bytes(theirs.path.read_bytes())
    with pytest.raises(ModelError, match="made for another model"):
        select(checkpoint, EngineConfig(selector="exact"))


def test_pack_writes_rows_of_experts_without_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plain_model(tmp_path, "Q5_0")
    assert main(["pack", "-m", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["types"]["down"], made["layers"], made["error"]) == ("Q5_0X32", 2, {"down": 0.0})
    assert made["bytes"] == Path(made["path"]).stat().st_size
    assert made["predicted"] is None
    assert main(["pack", "-m", str(path)]) == 0
    assert "up to date" in capsys.readouterr().out
    give_plain_predictors(path)
    assert main(["pack", "-m", str(path), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["bytes"], both["error"]) == (made["bytes"], None)
    assert both["predicted"]["bytes"] == Path(both["predicted"]["path"]).stat().st_size > 1.5 * made["bytes"]
    assert main(["pack", "-m", str(path)]) == 0
    assert capsys.readouterr().out.count("up to date") == 2
    assert main(["pack", "-m", str(path), "--down-type", "q8_0"]) == 2
    assert "leave out --type and --down-type" in capsys.readouterr().err
    assert main(["pack", "-m", str(model(tmp_path))]) == 2, "gates are read whole"


# ---- placing


def silent(folder: Path, predictors: bool = False) -> Path:
    """Experts that are worth reading, of which 9 % of the neurons fire."""
    sizes = {
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
        "intermediate_size": 256, "n_routed_experts": 64, "num_experts_per_tok": 3, "moe_intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 512, "n_group": 1, "topk_group": 1, "chunk_size": 32,
    }  # fmt: skip
    document = silent_models.FOLDERS["nemotron_h"].defaults | {"model_type": "nemotron_h"} | sizes
    path = folder / "silent.gguf"
    of_model = path, silent_models.Sizes(document, "*EME", 1500)
    silent_models.write(*of_model, "q5_0", [silent_models.SILENT])
    if predictors:
        silent_models.write_predictors(*of_model, [silent_models.SILENT])
    return path


def test_experts_that_ram_does_not_hold_stay_on_disk(tmp_path: Path) -> None:
    path = silent(tmp_path)
    options: dict[str, Any] = {"context": 64, "prefill_chunk": 64, "max_batch": 1, "threads": 2, "gpu": "none"}
    settings = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine = EngineConfig(**options, selector="exact", trial=False)
    with LLM(path, **options, selector="exact", trial=False) as llm:
        right = llm.generate([list(range(40))], settings)[0].token_ids
    checkpoint = open_checkpoint(path)
    whole = ram_bytes(model_of(resolve(checkpoint, engine)), engine, select(checkpoint, engine))
    with pytest.raises(RequestError, match=f"or run `powerinfer pack -m {path}` for --selector exact"):
        LLM(path, **options, selector="exact", trial=False, ram=f"{whole - (4 << 20)}B")
    pack_experts(checkpoint, None)
    with LLM(path, **options, selector="exact", trial=False, ram=f"{whole - (4 << 20)}B") as llm:
        assert llm.generate([list(range(40))], settings)[0].token_ids == right
        assert llm.disk is not None and 0 < llm.disk["expert_row_bytes"] < llm.disk["bytes"]
        assert llm.sparsity["active_fraction"] < 0.2
    with pytest.raises(RequestError, match="even if its weights stay on disk"):
        LLM(path, **options, selector="exact", trial=False, ram="8MiB")


def test_a_predictor_selects_of_what_stays_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = silent(tmp_path, predictors=True)
    options: dict[str, Any] = {"context": 64, "prefill_chunk": 64, "max_batch": 1, "threads": 2, "gpu": "none"}
    options |= {"selector": "predicted", "trial": False}
    settings = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine, checkpoint = EngineConfig(**options), open_checkpoint(path)
    with LLM(path, **options) as llm:
        right = llm.generate([list(range(40))], settings)[0].token_ids
    ram = ram_bytes(model_of(resolve(checkpoint, engine)), engine, select(checkpoint, engine)) - (6 << 20)
    with pytest.raises(RequestError, match=f"or run `powerinfer pack -m {path}` for --selector predicted"):
        LLM(path, **options, ram=f"{ram}B")
    pack_experts(checkpoint, None, predicted=True)
    with LLM(path, **options, ram=f"{ram}B") as llm:
        assert llm.generate([list(range(40))], settings)[0].token_ids == right
        assert llm.disk is not None and 0 < llm.disk["expert_row_bytes"] < llm.disk["bytes"]
        assert llm.sparsity["active_fraction"] < llm.sparsity["candidate_fraction"] < 0.3
        assert llm.sparsity["recall"] is None, "a sample would read all"
    flags = ["--selector", "predicted", "--ram", f"{ram}B", "--context", "64", "--prefill-chunk", "64"]
    flags += ["--max-batch", "1", "--threads", "2", "--hardware", "pc-16gb", "--gpu", "none"]
    assert main(["plan", "-m", str(path), *flags]) == 0
    assert "experts that are selected" in capsys.readouterr().out
