"""`powerinfer demo`: the model that it writes, the comparison of both sides, and what it shows."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import powerinfer.random_model
from powerinfer import LLM, SamplingParams
from powerinfer.cli import demo
from powerinfer.cli.main import main
from powerinfer.comparison import Comparison, Run, compare, refusal_reason
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.evaluate import Perplexities, dense_and_sparse
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hub import find_stored, made_model
from powerinfer.placement.power_law import hot_share, power_law
from powerinfer.prepare.packing import pack
from powerinfer.random_model import RandomModel, write_random_model
from powerinfer.sparsity.verdict import verdict

SMALL = RandomModel(d_model=256, d_ff=768, n_layers=3, n_heads=4, n_kv_heads=2)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "small.gguf"
    write_random_model(path, SMALL, "small")
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint))
    return path


def opened(path: Path, selector: str = "exact") -> LLM:
    return LLM(path, selector=selector, trial=False, threads=1, max_batch=1, context=256, gpu="none")


# ---------------------------------------------------------------- the model with random weights


def test_neurons_fire_as_often_as_planned(small: Path) -> None:
    """By count, over tokens of many answers: the mean, and how unevenly."""
    counts, tokens = np.zeros((SMALL.n_layers, SMALL.d_ff)), 0
    with opened(small) as llm:
        live = llm.live()
        for seed in range(12):
            llm.generate(["Why?"], replace(SAMPLED, seed=seed, max_tokens=64))
            layers = live.look(SMALL.d_ff)
            counts += [one.fired * one.tokens for one in layers if one.fired is not None]
            tokens += layers[0].tokens
        live.close()
    often = counts / tokens
    assert tokens > 700 and often.mean() == pytest.approx(0.10, abs=0.02)
    expected = hot_share(power_law(SMALL.active, SMALL.skew, SMALL.d_ff))
    measured = float(np.mean([hot_share(layer) for layer in often]))
    assert measured == pytest.approx(expected, abs=0.06)
    busy = often[0] > 0.4
    assert busy.sum() > 0 and not busy[: busy.sum()].all(), "frequent neurons are anywhere in the layer"


def test_the_same_seed_writes_the_same_bytes_by_any_number_of_threads(tmp_path: Path, small: Path) -> None:
    write_random_model(tmp_path / "again.gguf", SMALL, "small", threads=2)
    assert (tmp_path / "again.gguf").read_bytes() == small.read_bytes()
    write_random_model(tmp_path / "other.gguf", replace(SMALL, seed=2), "small")
    assert (tmp_path / "other.gguf").read_bytes() != small.read_bytes()
    beside_matrices = small.stat().st_size - SMALL.nbytes
    assert abs(beside_matrices) < 100_000


def test_its_words_are_letters(small: Path) -> None:
    with opened(small, "all") as llm:
        text = llm.generate("Why?", replace(SAMPLED, max_tokens=100)).text
    assert re.fullmatch(r"[a-z ]{100,}", text), text


def test_an_interrupted_model_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))

    def make(path: Path) -> None:
        def stop(label: str, done: int, total: int) -> None:
            if done > 5:
                raise KeyboardInterrupt

        write_random_model(path, SMALL, "small", stop)

    with pytest.raises(KeyboardInterrupt):
        made_model("small", "small.gguf", "random", 1, make)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(PowerInferError, match=r"small needs [0-9,]+ MB in .*free; POWERINFER_CACHE selects another"):
        made_model("small", "small.gguf", "random", 1 << 60, make)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_made_model_is_made_once_and_again_if_it_would_be_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    written: list[Path] = []

    def make(path: Path) -> None:
        written.append(path)
        path.write_bytes(b"x" * len(written))

    first = made_model("some", "some.gguf", "one way", 1, make)
    assert made_model("some", "some.gguf", "one way", 1, make) == first and len(written) == 1
    assert made_model("some", "some.gguf", "another way", 1, make).nbytes == 2
    with pytest.raises(RequestError, match=r"the name some is taken by .*; `powerinfer rm some` frees it"):
        made_model("some", "other.gguf", "one way", 1, make)
    (tmp_path / "models" / "some" / "some.gguf").write_bytes(b"")
    assert find_stored("some") is None
    assert made_model("some", "some.gguf", "another way", 1, make).nbytes == 3, "what is incomplete is made again"


# ---------------------------------------------------------------- both sides


def test_both_sides_say_the_same_and_the_sparse_one_reads_less(small: Path) -> None:
    seen: list[tuple[str, int]] = []
    with opened(small) as llm:
        found = compare(llm, llm.encode("Why?"), SAMPLED, 2, lambda *token: seen.append(token))
        whole, ffn = found.dense.bytes_per_token, (llm.sparsity or {})["dense_bytes_per_token"]
    assert found.same_tokens == (24, 24)
    assert len(found.dense.tok_s) == len(found.sparse.tok_s) == 2
    assert [side for side, tokens in seen if tokens == 1] == ["sparse", "dense", "dense", "sparse", "sparse", "dense"]
    assert 0.05 < found.computed_fraction < 0.2
    assert ffn == 3 * 3 * 256 * 768 * 2
    skipped = 2 / 3 * (1 - found.computed_fraction)  # of up and down
    assert whole - found.sparse.bytes_per_token == pytest.approx(ffn * skipped, rel=0.01)
    document = json.loads(json.dumps(found.document()))
    assert document["ratio"] == found.ratio > 0 and document["tokens"] == document["same_tokens"] == 24
    assert document["sparse"]["decode_tok_s"]["min"] <= document["sparse"]["decode_tok_s"]["median"]


def test_perplexity_is_that_of_sparse_steps(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that skips what matters is told from one that does not, and dense steps skip nothing."""
    text = "the sea was calm that morning and the boats went out " * 12
    with LLM(small, selector="exact", trial=False, threads=1, max_batch=4, context=64, gpu="none") as llm:
        found = dense_and_sparse(llm, text, 64, step=4)
        sparsity = llm.sparsity
        assert sparsity is not None and sparsity["tokens"] == found.tokens, "and none of the dense side"
        assert found.alike and found.dense != found.sparse == pytest.approx(found.dense, rel=1e-3)
    with LLM(
        small, selector="threshold", threshold=0.4, trial=False, threads=1, max_batch=4, context=64, gpu="none"
    ) as llm:
        found = dense_and_sparse(llm, text, 64, step=4)
        assert found.apart == pytest.approx(np.log(found.sparse / found.dense)) and abs(found.apart) > 1e-3
    assert not Perplexities(10, 11, 0.1, 0.01, 50).alike and Perplexities(10, 9.9, -0.01, 0.01, 50).alike


def test_no_round_begins_after_the_time(small: Path) -> None:
    with opened(small) as llm:
        found = compare(llm, [5, 6], replace(SAMPLED, max_tokens=2), 50, seconds=0)
    assert len(found.dense.tok_s) == 1


def test_the_ratio_is_that_within_rounds() -> None:
    def side(rates: list[float], tokens: list[int]) -> Run:
        return Run(rates, 1, SimpleNamespace(token_ids=tokens))  # type: ignore[arg-type]

    found = Comparison(side([10, 1, 10], [1, 2, 3, 4]), side([20, 2.2, 18], [1, 2, 5]), {}, 0.0)
    assert found.ratio == 2 and found.same_tokens == (2, 4)


def test_what_has_no_sparse_side_is_refused(small: Path) -> None:
    with opened(small, "all") as llm:
        assert "all (asked for)" in (refusal_reason(llm) or "")
        with pytest.raises(RequestError, match="nothing to compare: every neuron is computed: all"):
            compare(llm, [5], SAMPLED, 1)


def test_the_verdict_needs_a_gain() -> None:
    assert verdict(1.9) == "Sparse decoding is 1.90 x as fast as dense here: worth it."
    assert all("here: not worth it" in verdict(ratio) for ratio in (0.5, 1.0, 1.01))


def test_bench_compares_both_sides(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "-m", str(small), "--compare", "--gen-tokens", "8", "--repeat", "2", "-t", "1", "-c", "64"]
    assert main([*flags, "--selector", "exact", "--no-trial", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["tokens"] == 8 and document["sparsity"]["tokens"] > 0 and 0 < document["computed_fraction"] < 0.5
    assert document["sparse"]["bytes_per_token"] < document["dense"]["bytes_per_token"]
    rates = [re.search(rf"^{side} +([0-9.]+) tok/s +\([0-9.]+ to [0-9.]+\), ", err, re.MULTILINE) for side in
             ("dense", "sparse")]  # fmt: skip
    assert all(rates) and f"Sparse decoding is {document['ratio']:.2f} x as fast as dense here" in err
    assert re.search(r"^exact +layers 0-2$", err, re.MULTILINE)
    assert main([*flags, "--selector", "all"]) == 2
    assert "nothing to compare: every neuron is computed: all (asked for)" in capsys.readouterr().err
    assert main([*flags, "--prompt-tokens", "5"]) == 2
    assert "leave out --prompt-tokens" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command with a small model, in a cache of its own and no clone."""
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(powerinfer.random_model, "WIDE", SMALL)
    monkeypatch.setattr("powerinfer.hub.cloned_models", dict)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    return tmp_path


def test_demo_shows_both_sides(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-t", "1"]) == 0
    shown = capsys.readouterr().out
    assert "random weights" in shown and "words mean nothing" in " ".join(shown.split())
    dense, sparse = (re.search(rf"^{side} +\S.{{39}} +([0-9.]+) tokens/s +([0-9.]+) MB a token$", shown, re.MULTILINE)
                     for side in ("dense", "sparse"))  # fmt: skip
    assert dense and sparse and float(sparse[2]) < float(dense[2])
    assert "Both said the same 64 tokens." in " ".join(shown.split()) and "\033" not in shown
    written = (tiny / "models" / "random-relu" / "random-relu.gguf").stat().st_mtime_ns
    assert main(["demo", "-t", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (tiny / "models" / "random-relu" / "random-relu.gguf").stat().st_mtime_ns == written, "it is used again"
    (model,) = document["models"]
    assert model["name"] == "random-relu" and model["same_tokens"] == 64 and 0.1 < model["hot_share"] < 0.6
    assert f"{model['ratio']:.2f} x as fast" in err
    assert main(["demo", "--remove", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": True}
    assert not (tiny / "models" / "random-relu").exists()
    assert main(["demo", "--remove"]) == 0
    assert capsys.readouterr().out == "random-relu is not there\n"


def test_the_real_model_is_shown_with_its_quality(
    tiny: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of smollm2-sparse another model: what is packed for it is removed with the demonstration's own."""
    (tiny / "real.gguf").symlink_to(small)
    monkeypatch.setattr("powerinfer.hub.cloned_models", lambda: {"smollm2-sparse": tiny / "real.gguf"})
    monkeypatch.setattr(LLM, "encode_chat", lambda self, messages: self.encode(messages[0]["content"]))
    assert main(["demo", "-t", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    real = json.loads(out)["models"][1]
    assert real["perplexity"]["sparse"] == pytest.approx(real["perplexity"]["dense"], rel=1e-3)
    assert real["perplexity"]["sparse"] != real["perplexity"]["dense"], "sums in another order"
    assert "the same quality" in " ".join(err.split()) and "answer, sparse: " in err
    assert real["answers"]["dense"] and not (tiny / "real.gguf.powerinfer").exists()
    assert (tiny / "models" / "random-relu" / "smollm2-sparse.powerinfer").is_dir()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_in_what_the_terminal_has(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, shares = Terminal(), np.linspace(1, 0, demo.COLUMNS)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(demo, "REDRAW", 0)
    with opened(small) as llm, demo.SpeedDisplay(llm) as display:
        compare(llm, llm.encode("Why?"), replace(SAMPLED, max_tokens=4), 1, display)
        assert display.drawn(shares, terminal).startswith("\033[33m█") and "█" * 40 in display.drawn(None, terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert display.drawn(shares, terminal)[0] == "█" and display.drawn(shares, terminal)[-1] == " "
        ascii_only = SimpleNamespace(encoding="ascii", isatty=lambda: True)
        assert display.drawn(shares, ascii_only).isascii() and len(display.drawn(shares, ascii_only)) == demo.COLUMNS
        display.look()
        assert np.all(np.diff(display.mean()) <= 1e-9), "the hot ones are on the left"
    drawn = terminal.getvalue()
    assert re.search(r"\rdense  \S*█{40}\S* +[0-9.]+ tokens/s", drawn) and "\rsparse " in drawn
    assert drawn.endswith("\r\033[K")
