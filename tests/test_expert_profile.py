"""Profiles of experts: what is counted, against plain loops and `transformers`, and the files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import LAYERS, experts_gguf, tiny_gguf
from test_prepared import describe, edit_header, left_in

from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError
from powerinfer.experts import ExpertProfile, Selected
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.expert_files import (
    open_expert_profile,
    open_expert_profile_file,
    open_trace,
    trace_place,
    write_expert_profile,
    write_trace,
)
from powerinfer.formats.prepared import EXPERTS, PreparedFile
from powerinfer.placement.experts import make_policy, replay
from powerinfer.prepare import expert_profiling
from powerinfer.prepare.corpus import Windows
from powerinfer.prepare.counting import Task
from powerinfer.prepare.expert_counting import count_experts
from powerinfer.prepare.expert_profiling import profile_experts

EXPERTS_OF = {0: 4, 2: 3}
BY_HAND: Selected = {
    0: np.array([[0, 1], [0, 2], [1, 2], [0, 1]], np.uint8),
    2: np.array([[2], [2], [0], [2]], np.uint8),
}


def by_hand() -> ExpertProfile:
    return count_experts(BY_HAND, EXPERTS_OF, ["a", "b"], [3, 1])


def test_a_small_trace_by_hand() -> None:
    found = by_hand()
    first, second = found.layers
    assert (found.tokens, found.corpora, found.corpus_tokens) == (4, ("a", "b"), (3, 1))
    assert first.counts.tolist() == [[2, 2, 2, 0], [1, 1, 0, 0]] and second.counts.tolist() == [[1, 0, 2], [0, 0, 1]]
    assert first.pairs.tolist() == [[0, 2, 1, 0], [2, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert second.pairs.sum() == 0
    assert first.follows is not None and second.follows is None
    assert first.follows.tolist() == [[0, 0, 3], [1, 0, 2], [1, 0, 1], [0, 0, 0]]
    # What was selected last comes first, of one token the higher number: 1 0; then 2 0 1; 2 1 0; 1 0 2.
    # Token 1: 0 is second, 2 is new. Token 2: 1 is third, 2 is first. Token 3: 0 is third, 1 is second.
    assert first.distances.tolist() == [[1, 1, 1, 0, 3], [0, 1, 1, 0, 0]]
    assert second.distances.tolist() == [[1, 0, 0, 2], [0, 1, 0, 0]]
    assert found.parts == ((3,), (1,)) and found.n_parts == 2
    assert first.lru_hits_by_part[0].tolist() == [0, 1 / 6, 2 / 6, 3 / 6, 3 / 6]
    # text b selects 0 and 1; a as often as 2, so the lower number comes first
    assert first.static_hits_by_part[1].tolist() == [0, 1 / 2, 1, 1, 1]
    assert second.static_hits_by_part[0].tolist() == [0, 2 / 3, 1, 1], "2 first, by text b, then 0"
    assert first.frequency.tolist() == [0.75, 0.75, 0.5, 0.0]
    assert (
        first.reuse == 3 / 8 and second.reuse == 1 / 4 and found.mean("reuse") == pytest.approx((2 * 3 / 8 + 1 / 4) / 3)
    )
    assert first.static_hits.tolist() == [0, 3 / 8, 6 / 8, 1, 1] and first.share_of_top(0.25) == 3 / 8
    assert first.lru_hits.tolist() == [0, 1 / 8, 3 / 8, 5 / 8, 5 / 8]
    assert first.foretold == pytest.approx(6 / 8) and second.foretold is None
    assert first.gini == pytest.approx(sum(abs(a - b) for a in (3, 3, 2, 0) for b in (3, 3, 2, 0)) / (2 * 4 * 8))
    assert found.overlap(0, 1) == (1 + 1) / 2


@pytest.mark.parametrize("tokens", [1, 5000])
def test_distances_say_what_an_lru_of_any_size_hits(tokens: int) -> None:
    """Of layers of two kinds, over several pieces, with tokens that tend to select what the last one did."""
    rng = np.random.default_rng(tokens)
    selected: Selected = {}
    for layer, (experts, top) in {0: (300, 3), 1: (6, 2), 2: (6, 2)}.items():
        drift = np.cumsum(rng.standard_normal((tokens, experts)), axis=0) / 8 + rng.standard_normal((tokens, experts))
        selected[layer] = np.sort(np.argsort(-drift, axis=1)[:, :top], axis=1).astype(np.uint16)
    sizes = {0: 300, 1: 6, 2: 6}
    profile = count_experts(selected, sizes, ["a"], [tokens])
    for slots in (1, 2, 4, 40, 300):
        found = replay(make_policy("lru", dict.fromkeys(sizes, slots), sizes), selected)
        for one in profile.layers:
            at = min(slots, one.n_experts)
            assert found.hits[one.layer] == round(one.lru_hits[at] * one.total.sum()), (slots, one.layer)


@pytest.mark.parametrize(("tokens", "parts"), [(1, 1), (2047, 1), (2048, 2), (5000, 4), (10_000, 8)])
def test_a_corpus_is_counted_in_parts(tokens: int, parts: int) -> None:
    """Of about the same size, in their order; together they are the whole, and none depends on how it is cut."""
    rng = np.random.default_rng(tokens)
    selected: Selected = {0: np.sort(np.argsort(rng.random((tokens + 3, 9)), axis=1)[:, :3], axis=1).astype(np.uint8)}
    profile = count_experts(selected, {0: 9}, ["a", "b"], [tokens, 3])
    one, (own, other) = profile.layers[0], profile.parts
    assert len(own) == parts and other == (3,) and max(own) - min(own) <= 1 and sum(own) == tokens
    ends = np.cumsum([0, *own]).tolist()
    policy = make_policy("lru", {0: 4}, {0: 9})  # which goes on from part to part
    assert profile.corpus_tokens == (tokens, 3) and profile.tokens == tokens + 3
    for part, (begin, end) in enumerate(pairwise(ends)):
        assert one.counts[part].tolist() == np.bincount(selected[0][begin:end].ravel(), minlength=9).tolist()
        hits = replay(policy, {0: selected[0][begin:end]}).hits[0]
        assert hits == round(one.lru_hits_by_part[part][4] * 3 * own[part])
        others = np.argsort(one.counts[part] - one.total, kind="stable")[:4]
        assert one.static_hits_by_part[part][4] == pytest.approx(np.isin(selected[0][begin:end], others).mean())


# ---------------------------------------------------------------- models


def task(checkpoint: Checkpoint, windows: tuple[int, ...] = (2, 1), size: int = 24, seed: int = 1) -> Task:
    ids = np.random.default_rng(seed).integers(0, checkpoint.config.vocab_size, (sum(windows), size)).astype(np.int32)
    names = tuple("abc"[: len(windows)])
    return Task(Windows(ids, names, windows, f"{seed}"), 0, None)


def model(folder: Path, **change: Any) -> Checkpoint:
    return open_checkpoint(experts_gguf(**change).write(folder / "m.gguf"))


ENGINE = EngineConfig(threads=2, gpu="none")


def test_the_counts_are_those_of_transformers(tmp_path: Path) -> None:
    """From its router's logits, in float64; a token whose last selected expert is nearly another one may differ."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config = transformers.OlmoeConfig(
        **sizes, intermediate_size=16, num_experts=8, num_experts_per_tok=3, max_position_embeddings=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(3)
    reference = transformers.OlmoeForCausalLM(config)
    for weight in reference.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1)
    reference.save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    one = task(checkpoint)
    made = profile_experts(checkpoint, ENGINE, one, tmp_path / "trace")
    with torch.no_grad():
        out = reference.double()(torch.from_numpy(one.windows.ids).long(), output_router_logits=True)
    trace = open_trace(checkpoint, trace_place(checkpoint, None, tmp_path / "trace"))
    close = 0
    for layer, logits in enumerate(out.router_logits):
        values = logits.reshape(-1, 8).numpy()
        order = np.argsort(-values, axis=1)
        wanted = np.sort(order[:, :3], axis=1)
        ranked = -np.sort(-values, axis=1)
        clear = ranked[:, 2] - ranked[:, 3] > 1e-4
        close += int((~clear).sum())
        assert np.array_equal(trace.selected[layer][clear], wanted[clear])
        for corpus, part in ((0, slice(0, 48)), (1, slice(48, 72))):
            counts = np.bincount(trace.selected[layer][part].reshape(-1), minlength=8)
            assert made.file.profile.layers[layer].counts[corpus].tolist() == counts.tolist()
    assert close < 5, "nearly all tokens were compared"
    assert trace.corpora == ("a", "b") and trace.corpus_tokens == (48, 24) and made.tokens == 72


def same(one: ExpertProfile, other: ExpertProfile) -> bool:
    if (one.corpora, one.parts) != (other.corpora, other.parts):
        return False
    names = ("layer", "top_k", "counts", "pairs", "follows", "distances")
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.layers, other.layers, strict=True)
        for name in names
        if getattr(a, name) is not None or getattr(b, name) is not None
    )


def test_what_is_up_to_date_is_not_made_again(tmp_path: Path) -> None:
    checkpoint = model(tmp_path)
    first = profile_experts(checkpoint, ENGINE, task(checkpoint))
    assert first.tokens == 72 and left_in(tmp_path) == ["experts.safetensors", "m.gguf"]
    raw = first.file.path.read_bytes()
    again = profile_experts(checkpoint, ENGINE, task(checkpoint))
    assert again.tokens == 0 and same(again.file.profile, first.file.profile)
    assert profile_experts(checkpoint, ENGINE, task(checkpoint), force=True).tokens == 72
    assert first.file.path.read_bytes() == raw, "the same text and options are the same bytes"
    assert profile_experts(checkpoint, ENGINE, task(checkpoint, seed=2)).tokens == 72
    trace = tmp_path / "t"
    assert profile_experts(checkpoint, ENGINE, task(checkpoint, seed=2), trace).tokens == 72, "for the trace"
    assert profile_experts(checkpoint, ENGINE, task(checkpoint, seed=2), trace).tokens == 0


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each window, and while counting; the result is that of one run."""
    checkpoint = model(tmp_path)
    one = task(checkpoint, (3, 3), size=600)  # longer than a call: a window in pieces
    whole = profile_experts(checkpoint, ENGINE, one).file
    raw = whole.path.read_bytes()
    whole.path.unlink()
    monkeypatch.setattr(expert_profiling, "SAVE_EVERY", 0.0)
    notes: list[str] = []

    def until(label: str, least: int) -> Callable[[str, int, int], None]:
        def progress(now: str, done: int, total: int) -> None:
            if now == label and done >= least:
                raise KeyboardInterrupt

        return progress

    for label, least in (("profiling", 600), ("profiling", 2400), ("counting", 1)):
        with pytest.raises(KeyboardInterrupt):
            profile_experts(checkpoint, ENGINE, one, None, notes.append, until(label, least))
    assert notes == [f"resuming: {done} of 3600 tokens are done" for done in (600, 2400)]
    last = profile_experts(checkpoint, ENGINE, one, None, notes.append)
    assert last.tokens == 0 and len(notes) == 2, "all was recorded, only counting was left"
    assert whole.path.read_bytes() == raw and left_in(tmp_path) == ["experts.safetensors", "m.gguf"]


def test_a_damaged_model_ends_in_one_line(tmp_path: Path) -> None:
    builder = experts_gguf()
    tensor = next(one for one in builder.tensors if one.name == "blk.1.ffn_gate_inp.weight")
    values = np.frombuffer(bytes(tensor.data), np.float32).copy()
    values[0] = np.nan
    builder.tensors = [one for one in builder.tensors if one is not tensor]
    builder.tensor(tensor.name, np.full((4, len(values) // 4), np.nan, np.float32))
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match="layer 1 computes numbers that are not finite"):
        profile_experts(checkpoint, ENGINE, task(checkpoint))
    assert left_in(tmp_path) == ["m.gguf"]


# ---------------------------------------------------------------- files


def written(folder: Path) -> tuple[Checkpoint, PreparedFile]:
    checkpoint = model(folder)
    selected = {layer: np.array([[0, 1], [0, 2], [2, 3]], np.uint8) for layer in range(LAYERS)}
    made = count_experts(selected, dict.fromkeys(selected, 4), ["a", "ü"], [2, 1])
    write_expert_profile(checkpoint, None, made, {"key": "x"})
    place = trace_place(checkpoint, None, folder / "trace")
    with write_trace(checkpoint, place, [("a", 2), ("ü", 1)], {"key": "x"}, False) as writer:
        writer.put(selected)
    found = open_expert_profile_file(checkpoint)
    assert same(found.profile, made) and found.details == {"key": "x"}
    trace = open_trace(checkpoint, place)
    assert all(np.array_equal(trace.selected[layer], rows) for layer, rows in selected.items())
    return checkpoint, PreparedFile(EXPERTS, checkpoint)


def refused(read: Callable[[], Any], why: str) -> None:
    with pytest.raises(ModelError) as caught:
        read()
    message = str(caught.value)
    assert re.search(why, message), message
    assert "`powerinfer profile -m " in message and "\n" not in message


def put(file: PreparedFile, name: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a tensor."""
    raw = bytearray(file.path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][0] + at
    raw[begin : begin + len(data)] = data
    file.path.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "at", "why"),
    [
        ("counts", 0, "does not count 2 experts for each token in layer 1"),
        ("pairs", 4, "pairs in layer 1"),
        ("pairs", 0, "pairs in layer 1"),
        ("distances", 0, "each selection once in the distances of reuse in layer 1"),
    ],
)
@pytest.mark.parametrize("value", [3, 2**31 - 1, 255 << 24])
def test_profiles_that_do_not_add_up(name: str, at: int, why: str, value: int, tmp_path: Path) -> None:
    checkpoint, file = written(tmp_path)
    own = np.array([value], "<u4").tobytes() if name == "pairs" else np.array([-value], "<i8").tobytes()
    put(file, f"layers.1.{name}", at, own)
    refused(lambda: open_expert_profile(checkpoint), why)


def test_follows_that_do_not_add_up(tmp_path: Path) -> None:
    checkpoint, file = written(tmp_path)
    put(file, "layers.0.follows", 0, bytes([9]))
    refused(lambda: open_expert_profile(checkpoint), "follow one another in layer 0")


@pytest.mark.parametrize("place", ["profile", "trace"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d["layers"][1].update(experts=5), "is of 5 experts in layer 1, 2 a token, and the model has 4"),
        (lambda d: d["layers"][0].update(top_k=1), "is of 4 experts in layer 0, 1 a token"),
        (lambda d: d["layers"].pop(), "is of 1 layers of experts, and the model has 2"),
        (lambda d: d["layers"][0].update(experts="4"), "experts"),
        (lambda d: d["corpora"][0].update(tokens=-1), "tokens"),
        (lambda d: d["corpora"][0].update(tokens=1 << 40), "tokens"),
        (lambda d: d["corpora"].clear(), "corpora"),
        (lambda d: d["corpora"].pop(), "does not|is not complete|do not add up to"),
        (lambda d: d.update(format=99), "another version of powerinfer"),
        (lambda d: d.update(kind="predictor"), "holds 'predictor'"),
        (lambda d: d.update(fingerprint="0"), "made for another model"),
        (lambda d: d.pop("about"), "about"),
        (lambda d: d.update(more=1), "more"),
    ],
)
def test_descriptions_that_are_refused(
    place: str, change: Callable[[dict[str, Any]], Any], why: str, tmp_path: Path
) -> None:
    checkpoint, file = written(tmp_path)
    trace = trace_place(checkpoint, None, tmp_path / "trace")
    describe(trace if place == "trace" else file, lambda d: change(d) and None)
    refused(
        (lambda: open_trace(checkpoint, trace)) if place == "trace" else lambda: open_expert_profile(checkpoint), why
    )


def test_a_profile_of_too_many_parts(tmp_path: Path) -> None:
    """Every one of 4096 corpora may have 4096 of them: each has counters, and a curve in the report."""
    checkpoint, file = written(tmp_path)

    def change(d: dict[str, Any]) -> None:
        d["corpora"] = [{"name": f"{at}", "tokens": 4096} for at in range(9)]
        d["parts"] = [[1] * 4096 for _ in range(9)]

    describe(file, change)
    refused(lambda: open_expert_profile(checkpoint), "more than 32768 parts")


@pytest.mark.parametrize(("at", "value"), [(0, 4), (0, 1), (1, 0), (1, 255)])
def test_traces_of_no_experts(at: int, value: int, tmp_path: Path) -> None:
    checkpoint, _ = written(tmp_path)
    place = trace_place(checkpoint, None, tmp_path / "trace")
    put(place, "layers.1.selected", at, bytes([value]))
    refused(lambda: open_trace(checkpoint, place), "selects no 2 different ones of 4 experts in layer 1")


def test_traces_that_are_incomplete_or_damaged(tmp_path: Path) -> None:
    checkpoint, file = written(tmp_path)
    place = trace_place(checkpoint, None, tmp_path / "trace")
    refused(lambda: open_trace(checkpoint, trace_place(checkpoint, None, tmp_path / "none")), "there is no")
    put(place, "done", 0, bytes([2]))
    refused(lambda: open_trace(checkpoint, place), "is not complete")
    edit_header(
        place, lambda header: header.update({"layers.1.selected": header["layers.0.selected"] | {"shape": [6]}})
    )
    refused(lambda: open_trace(checkpoint, place), "layers.1.selected|does not fit|overlap")
    place.path.write_bytes(file.path.read_bytes())
    refused(lambda: open_trace(checkpoint, place), "holds 'experts'")
    place.path.write_bytes(b"no")
    refused(lambda: open_trace(checkpoint, place), "trace")


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "other").mkdir()
    other = model(tmp_path / "other", top=1)
    refused(lambda: open_expert_profile(other, f"{tmp_path}/m.gguf.powerinfer"), "made for another model")


# ---------------------------------------------------------------- commands


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = model(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} few words of {name} text. " * 40)
    texts = ["--corpus", f"{tmp_path}/a.txt", "--corpus", f"{tmp_path}/b.txt"]
    command = ["profile", "-m", str(checkpoint.path), *texts, "--window", "32", "--trace", f"{tmp_path}/t"]
    assert main([*command, "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    document = json.loads(out[-1])
    trace = open_trace(checkpoint, trace_place(checkpoint, None, tmp_path / "t"))
    profile = count_experts(trace.selected, {0: 4, 1: 4}, trace.corpora, trace.corpus_tokens)
    assert document["tokens"] == profile.tokens and document["reuse"] == profile.mean("reuse")
    assert [layer["gini"] for layer in document["layers"]] == [one.gini for one in profile.layers]
    assert document["top_25"] == profile.share_of_top(0.25) and document["trace"]["path"] == f"{tmp_path}/t"
    assert document["overlap"][0]["share"] == profile.overlap(0, 1)
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "up to date" in text and f"{100 * document['top_50']:.1f} %" in text and "overlap of the most" in text


def test_a_trace_of_a_model_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf().write(tmp_path / "m.gguf")
    assert main(["profile", "-m", str(path), "--trace", f"{tmp_path}/t"]) == 2
    assert "--trace is for models of experts" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = model(tmp_path)
    (tmp_path / "t").mkdir()
    assert main(["profile", "-m", str(checkpoint.path), "--tokens", "500", "--trace", f"{tmp_path}/t"]) == 1
    err = capsys.readouterr().err
    assert f"cannot write {tmp_path}/t " in err and "--trace FILE names another" in err
    assert main(["profile", "-m", str(checkpoint.path), "--tokens", f"{1 << 32}"]) == 2
    assert "--tokens must be at most" in capsys.readouterr().err


def test_a_trace_does_not_replace_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model, the text, or anything else that a mistyped name may be of; a trace is replaced by the next."""
    path = experts_gguf().write(tmp_path / "m.gguf")
    text = tmp_path / "text.txt"
    text.write_text("abc bca cab " * 40)
    before = path.read_bytes()
    flags = ["profile", "-m", str(path), "--corpus", str(text), "--tokens", "64", "--trace"]
    for other in (path, text):
        assert main([*flags, str(other)]) == 2
        assert "it would be lost" in capsys.readouterr().err
    assert path.read_bytes() == before and text.read_text().startswith("abc")
    for _ in range(2):
        assert main([*flags, str(tmp_path / "trace.safetensors"), "--force"]) == 0
