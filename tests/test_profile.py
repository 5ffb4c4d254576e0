"""Profiling: what is counted, against plain loops; that it goes on where it was stopped; what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import gemma4_gguf
from sparse_models import give_bundles, tiny_llama
from test_watch import MODELS, products

from powerinfer import LLM
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, ProfileConfig
from powerinfer.devices import Batch
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.profile_file import open_profile, open_profile_file
from powerinfer.formats.samples_file import open_samples
from powerinfer.models import load
from powerinfer.prepare import counting, profiling
from powerinfer.prepare.calibrate import HALVINGS, MAX_SHARE, calibrate, held_out, thresholds_at
from powerinfer.prepare.corpus import open_corpora, read_windows
from powerinfer.progress import silent
from powerinfer.text.model_text import tokenizer_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WINDOW = 48
RECTIFIED = [name for name in MODELS if name != "silu"]


def text(seed: int, length: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join("".join(rng.choice(list(LETTERS), rng.integers(2, 9))) for _ in range(length // 6))


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    paths = []
    for seed, length in ((1, 1200), (2, 500)):
        paths.append(tmp_path / f"corpus{seed}.txt")
        paths[-1].write_text(text(seed, length))
    return [str(path) for path in paths]


def made(path: Path, corpora: list[str], force: bool = False, **options: Any) -> profiling.Profiled:
    """What the verb makes. progress: of `make`; threads and prepared: of the engine."""
    progress = options.pop("progress", silent)
    notes = options.pop("notes", [])
    engine = EngineConfig(**{name: options.pop(name) for name in ("threads", "prepared") if name in options})
    settings = {"corpus": corpora, "window": WINDOW, "samples": 1 << 20} | options
    checkpoint = open_checkpoint(path)
    task = profiling.read(checkpoint, ProfileConfig(**settings), notes.append)
    return profiling.profile(checkpoint, engine, task, notes.append, progress, force)


def files(path: Path) -> dict[str, bytes]:
    folder = Path(f"{path}.powerinfer")
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else {}


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("name", RECTIFIED)
def test_the_profile_is_what_plain_loops_count(name: str, tmp_path: Path, corpora: list[str]) -> None:
    path = MODELS[name]().write(tmp_path / "m.gguf")
    one = made(path, corpora).file.profile
    checkpoint = open_checkpoint(path)
    windows = read_windows(open_corpora(corpora), tokenizer_of(checkpoint), WINDOW, 200_000)
    assert len(windows.number) == 2 and min(windows.number) > 1
    assert one.corpora == ("corpus1.txt", "corpus2.txt") and one.tokens == windows.tokens
    samples = open_samples(checkpoint)
    assert samples.rows == one.tokens and samples.windows.tolist() == list(range(0, one.tokens, WINDOW))
    d_ff = checkpoint.config.widest_ffn
    for layer in range(checkpoint.config.n_layers):
        x, fires = inputs(path, windows.ids, layer)
        h, _, close = products(checkpoint, layer, x.reshape(len(fires), -1))
        assert close.mean() < 0.002 and (fires == (h != 0))[~close].all()
        counts = [part.sum(axis=0) for part in np.split(fires, [windows.number[0] * WINDOW])]
        assert np.array_equal(one.corpus_counts[layer], counts)
        assert np.array_equal(one.active[layer], np.bincount(100 * fires.sum(axis=1) // d_ff, minlength=101))
        both = fired = 0
        for window in fires.reshape(-1, WINDOW, d_ff):
            both += int((window[1:] & window[:-1]).sum())
            fired += int(window[1:].sum())
        assert one.reuse[layer] == both / fired
        assert np.array_equal(samples.layers[layer][0], x.reshape(one.tokens, -1).astype(np.float16))
        assert np.array_equal(np.unpackbits(samples.layers[layer][1], axis=1, count=d_ff, bitorder="little"), fires)


def test_models_whose_layers_get_numbers_beside_the_residual_stream(tmp_path: Path, corpora: list[str]) -> None:
    """Of Gemma 4 E2B's kind: what is computed in parts, to be observed, is what is computed at once."""
    path = gemma4_gguf(experts=False).write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.layer_inputs
    one = made(path, corpora).file.profile
    assert one.thresholds is not None and min(one.thresholds) > 0
    samples = open_samples(checkpoint)
    windows = read_windows(open_corpora(corpora), tokenizer_of(checkpoint), WINDOW, 200_000)
    for layer in range(checkpoint.config.n_layers):
        x, fires = inputs(path, windows.ids, layer, one.thresholds)
        assert np.array_equal(one.counts[layer], fires.sum(axis=0)) and fires.any()
        assert np.array_equal(samples.layers[layer][0], x.reshape(one.tokens, -1).astype(np.float16))


def inputs(
    path: Path, ids: np.ndarray, layer: int, thresholds: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(x [tokens, d_model], who fires bool [tokens, d_ff]) of windows that are computed one by one, token by token."""
    checkpoint = open_checkpoint(path)
    executor = load(checkpoint, EngineConfig(threads=1, context=WINDOW, max_batch=1, selector="all"))
    x: list[np.ndarray] = []
    active: list[np.ndarray] = []

    class Seen:
        def reads(self, at: int, rows: np.ndarray) -> None:
            if at == layer:
                x.append(rows.copy())

        def fires(self, at: int, fired: Any) -> None:
            if at == layer:
                active.append(fired.active.copy())

    with executor.observed(Seen(), thresholds):
        for window in ids:
            for at, token in enumerate(window):
                one, zero = np.array([token], np.int32), np.zeros(1, np.int32)
                executor.forward(Batch(one, zero + at, zero, np.array([[0, 1]], np.int32), np.empty(0, np.int32)))
    executor.close()
    bits = np.unpackbits(np.concatenate(active), axis=1, count=checkpoint.config.widest_ffn, bitorder="little")
    return np.concatenate(x), bits.astype(bool)


def test_it_hangs_neither_on_calls_nor_on_threads(
    tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    made(path, corpora)
    expected = files(path)
    assert set(expected) == {"profile.safetensors", "samples.safetensors"}
    for call, chunk, threads in ((1, 512, 1), (WINDOW * 3, 512, 3), (1, 7, 2)):
        monkeypatch.setattr(counting, "CALL", call)
        monkeypatch.setattr(EngineConfig, "prefill_chunk", chunk)
        made(path, corpora, force=True, threads=threads)
        assert files(path) == expected, (call, chunk, threads)


@pytest.mark.parametrize("rows", [1, 7, 100, 10_000])
def test_samples_are_spread_evenly_and_kept_below_their_cap(rows: int, tmp_path: Path, corpora: list[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    one = made(path, corpora).file.profile
    whole = open_samples(open_checkpoint(path))
    per_row = sum(x.itemsize * x.shape[1] + active.shape[1] for x, active in whole.layers.values())
    made(path, corpora, samples=rows * per_row + per_row - 1)
    some = open_samples(open_checkpoint(path))
    assert some.rows == min(rows, one.tokens)
    at = np.arange(some.rows) * one.tokens // some.rows
    for (x, active), (all_x, all_active) in zip(some.layers.values(), whole.layers.values(), strict=True):
        assert np.array_equal(x, all_x[at]) and np.array_equal(active, all_active[at])
    assert some.windows.tolist() == np.unique(at // WINDOW, return_index=True)[1].tolist()


def test_no_samples(tmp_path: Path, corpora: list[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    made(path, corpora)
    assert made(path, corpora, samples=0).tokens == 0, "the profile is the same"
    assert set(files(path)) == {"profile.safetensors"}, "those of the earlier profile are gone"
    made(path, corpora[:1])
    assert made(path, corpora, samples=0).tokens > 0, "of another text it is another"
    assert set(files(path)) == {"profile.safetensors"}
    assert made(path, corpora).tokens > 0, "samples have to be made"
    assert set(files(path)) == {"profile.safetensors", "samples.safetensors"}


# ---------------------------------------------------------------- stopped and gone on with


class Stop(Exception):
    pass


def stop_at(tokens: int) -> Callable[[str, int, int], None]:
    def progress(label: str, done: int, total: int) -> None:
        if label == "profiling" and done >= tokens:
            raise Stop

    return progress


@pytest.mark.parametrize("samples", [0, 1 << 20])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_what_was_stopped_goes_on_and_ends_the_same(
    activation: str, samples: int, tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m.gguf", activation)
    options: dict[str, Any] = {"samples": samples, "perplexity_cost": 0.2}
    total = made(path, corpora, **options).tokens
    expected = files(path)
    for name in expected:
        (Path(f"{path}.powerinfer") / name).unlink()
    monkeypatch.setattr(counting, "CALL", 1)
    for save_every in (0.0, 1e9):
        monkeypatch.setattr(counting, "SAVE_EVERY", save_every)
        for stop in (WINDOW, WINDOW * 5, total):
            with pytest.raises(Stop):
                made(path, corpora, progress=stop_at(stop), **options)
            assert not set(files(path)) & set(expected), "nothing that is not complete has its name"
        notes: list[str] = []
        again = made(path, corpora, notes=notes, **options)
        if save_every == 0:
            assert again.tokens == 0 and "resuming" in notes[0] and f"{total} of {total} tokens" in notes[0]
        else:
            assert again.tokens == total
        assert files(path) == expected
        for name in expected:
            (Path(f"{path}.powerinfer") / name).unlink()


def test_a_killed_process_is_gone_on_with(tmp_path: Path, corpora: list[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    made(path, corpora)
    expected = files(path)
    for name in expected:
        (Path(f"{path}.powerinfer") / name).unlink()
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from test_profile import *\n"
        "counting.CALL, counting.SAVE_EVERY = 1, 0.0\n"
        "def slow(label, done, total):\n"
        "    if label == 'profiling' and done >= total // 2: print(done, flush=True); time.sleep(60)\n"
        "made(Path(sys.argv[2]), sys.argv[3:], progress=slow)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(path), *corpora]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert set(files(path)) == {"profile-unfinished.safetensors", "samples.safetensors.part"}
    again = made(path, corpora)
    assert again.tokens == again.file.profile.tokens - done and files(path) == expected


@pytest.mark.parametrize(
    "change",
    [{"window": 32}, {"tokens": 500}, {"samples": 1 << 18}, {"corpus": ["corpus2.txt", "corpus1.txt"]}],
    ids=lambda change: next(iter(change)),
)
def test_other_options_start_again(
    change: dict[str, Any], tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SAVE_EVERY", 0.0)
    path = tiny_llama(tmp_path / "m.gguf")
    with pytest.raises(Stop):
        made(path, corpora, progress=stop_at(500))
    change = dict(change)
    others = [str(tmp_path / name) for name in change.pop("corpus", [])] or corpora
    notes: list[str] = []
    again = made(path, others, notes=notes, **change)
    assert again.tokens == again.file.profile.tokens and "starting over" in notes[0]
    fresh = tiny_llama(tmp_path / "fresh.gguf")
    made(fresh, others, **change)
    assert files(path) == files(fresh)


def spoilt(raw: bytes) -> list[bytes]:
    rng = np.random.default_rng(4)
    flips = []
    for _ in range(30):
        changed = bytearray(raw)
        changed[rng.integers(0, 4500)] ^= 1 << rng.integers(0, 8)
        flips.append(bytes(changed))
    return [b"", b"x" * 5000, raw[:100], raw[:-8], raw.replace(b'\\"windows\\": ', b'\\"windows\\":-'), *flips]


def test_a_state_that_is_damaged_does_no_harm(
    tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SAVE_EVERY", 0.0)
    path = tiny_llama(tmp_path / "m.gguf")
    made(path, corpora)
    expected = files(path)
    with pytest.raises(Stop):
        made(path, corpora, progress=stop_at(500), force=True)
    left = files(path)
    state = "profile-unfinished.safetensors"
    whole = []
    for raw in spoilt(left[state]):
        folder = Path(f"{path}.powerinfer")
        for name in expected:
            (folder / name).unlink(missing_ok=True)
        (folder / "samples.safetensors.part").write_bytes(left["samples.safetensors.part"])
        (folder / state).write_bytes(raw)
        made(path, corpora)
        now = files(path)
        assert set(now) == set(expected)
        whole.append(now == expected)
    assert sum(whole) >= len(whole) - 2, "but for a flipped bit of a count, which cannot be seen"


def test_samples_that_are_gone_are_made_again(
    tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SAVE_EVERY", 0.0)
    path = tiny_llama(tmp_path / "m.gguf")
    made(path, corpora)
    expected = files(path)
    with pytest.raises(Stop):
        made(path, corpora, progress=stop_at(500), force=True)
    (Path(f"{path}.powerinfer") / "samples.safetensors.part").unlink()
    assert made(path, corpora, force=False).tokens in (0, open_profile(open_checkpoint(path)).tokens)
    assert files(path)["samples.safetensors"] == expected["samples.safetensors"]


def test_up_to_date_is_left_alone(tmp_path: Path, corpora: list[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    first = made(path, corpora)
    stamps = {name: os.stat(f"{path}.powerinfer/{name}").st_mtime_ns for name in files(path)}
    again = made(path, corpora)
    assert again.tokens == 0 and again.file.profile.digest == first.file.profile.digest
    assert stamps == {name: os.stat(f"{path}.powerinfer/{name}").st_mtime_ns for name in files(path)}
    assert made(path, corpora, force=True).tokens == first.tokens
    Path(f"{path}.powerinfer/samples.safetensors").unlink()
    assert made(path, corpora).tokens == first.tokens, "the samples are a part of it"
    Path(corpora[1]).write_text(text(3, 700))
    assert made(path, corpora).tokens > 0


# ---------------------------------------------------------------- what is refused


def damaged(tmp_path: Path, activation: str = "relu") -> Path:
    path = tiny_llama(tmp_path / "bad.gguf", activation)
    raw = bytearray(path.read_bytes())
    weights = open_checkpoint(path).take("layers.1.up")
    at = raw.index(weights.data.tobytes()[:64])
    raw[at + 40 : at + 44] = np.float32(np.nan).tobytes()
    path.write_bytes(bytes(raw))
    return path


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_damaged_weights_are_one_line_and_leave_nothing(
    activation: str, tmp_path: Path, corpora: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(tmp_path, activation)
    with pytest.raises(ModelError, match=r"layer 1 .*weights may be damaged"):
        made(path, corpora)
    assert files(path) == {}
    assert main(["profile", "-m", str(path), "--corpus", corpora[0], "--window", "48"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "layer 1" in lines[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 129}, "--window 129 is more than the model's context of 128"),
        ({"window": -1}, "--window must be a whole number"),
        ({"window": 7}, "--window must be a whole number of at least 8"),
        ({"tokens": 0}, "--tokens must be"),
        ({"samples": -1}, "--samples must be"),
        ({"perplexity_cost": 0.0}, "--perplexity-cost"),
        ({"perplexity_cost": float("nan")}, "--perplexity-cost"),
    ],
    ids=str,
)
def test_options_that_cannot_be_met(options: dict[str, Any], why: str, tmp_path: Path, corpora: list[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match=why):
        profiling.check(ProfileConfig(**options))
        made(path, corpora, **options)
    assert files(path) == {}


@pytest.mark.parametrize("samples", [0, 1 << 20])
def test_what_cannot_be_written_is_said_before_the_work(
    samples: int, tmp_path: Path, corpora: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")

    def never(*_: Any) -> Any:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(profiling, "load_executor", never)
    with pytest.raises(PowerInferError, match=r"cannot write .*m.gguf.*--prepared"):
        made(path, corpora, samples=samples, prepared=str(path / "folder"))  # the model is no folder
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 0, 1000))
    with pytest.raises(PowerInferError, match="MB are needed"):
        made(path, corpora, samples=samples)
    assert files(path) == {}
    if samples:  # there is room for the profile, and none for the samples
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 0, 100_000))
        with pytest.raises(PowerInferError, match=r"samples.safetensors .*MB are needed"):
            made(path, corpora, samples=samples)


def test_a_context_that_is_shorter_than_the_usual_window(tmp_path: Path, corpora: list[str]) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "m.gguf"))
    assert checkpoint.config.context_length == 128 < profiling.WINDOW
    task = profiling.read(checkpoint, ProfileConfig(corpora[:1]), lambda line: None)
    assert task.windows.size == 128


@pytest.mark.parametrize("size", ["", "1.2.3", "GiB", "-1", "1XB", "1e9", "nan", "5 apples"])
def test_sizes_that_are_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"--samples={size}"]) == 2
    assert "such as 8GiB" in capsys.readouterr().err


def test_sizes() -> None:
    from powerinfer.sizes import read_size

    given = {"0": 0, "4096B": 4096, "8GiB": 8 << 30, "500MB": 500_000_000, "1.5 kib": 1536, "0.5GB": 500_000_000}
    given |= {"8G": 8 << 30, "8gb": 8_000_000_000}
    assert {text: read_size(text) for text in given} == given


@pytest.mark.parametrize("command", ["profile", "train"])
def test_threads_are_checked_before_a_model_is_fetched(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-m", "no-such-model", "--threads", "-1"]) == 2
    assert "threads must be between 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "meant"), [("8", "8GiB"), ("1.5", "1.5GiB"), ("512", "512MiB"), ("8589934592", "8589934592B")]
)
def test_a_size_without_a_unit_is_refused(size: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, flag in (("run", "--vram"), ("plan", "--ram"), ("profile", "--samples")):
        assert main([verb, f"{flag}={size}"]) == 2
        assert f"{flag}: {size} has no unit: did you mean {meant}?" in capsys.readouterr().err


def test_the_command(tmp_path: Path, corpora: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    command = ["profile", "-m", str(path), "--window", "48", "--corpus", corpora[0], "--corpus", corpora[1]]
    assert main([*command, "--json", "--samples", "2KB"]) == 0
    document = json.loads(capsys.readouterr().out)
    one = open_profile_file(open_checkpoint(path))
    assert document["path"] == str(one.path) and document["tokens"] == one.profile.tokens
    assert document["corpora"][1] == {"name": "corpus2.txt", "tokens": one.profile.corpus_tokens[1]}
    assert document["overlap"][0]["share"] == one.profile.overlap(0, 1)
    assert document["samples"]["rows"] == 7 and document["calibration"] is None and document["tok_s"] > 0
    assert [layer["active_fraction"] for layer in document["layers"]] == [
        one.profile.active_fraction(n) for n in (0, 1)
    ]
    assert document["active_fraction"] == pytest.approx(np.mean([one["active_fraction"] for one in document["layers"]]))
    assert 0 < document["reuse"] < 1 and 0 < document["hot_share"] < 1
    assert main([*command, "--json", "--samples", "2KB"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == document | {"tok_s": None, "seconds": 0.0}
    assert main([*command, "--samples", "2KB"]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main([*command[:-4], "--corpus", str(tmp_path / "no.txt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_built_in_sample_says_that_it_is_small(tmp_path: Path) -> None:
    notes: list[str] = []
    made(tiny_llama(tmp_path / "m.gguf"), [], notes=notes)
    assert "small built-in sample" in notes[0] and "public domain" in notes[0]


# ---------------------------------------------------------------- calibrated thresholds


def test_thresholds_are_quantiles() -> None:
    from powerinfer.devices.cpu import magnitude

    rng = np.random.default_rng(2)
    values = np.abs(rng.standard_normal((3, 200_000))) * np.array([[1e-3], [1.0], [50.0]])
    edges = magnitude(np.arange(48 * 16 + 1))
    bins = np.array([np.histogram(row, edges)[0] for row in values])
    for quantile in (0.01, 0.3, 0.5, 0.9, 0.99):
        assert thresholds_at(bins, quantile) == pytest.approx(np.quantile(values, quantile, axis=1), rel=0.01)
    assert thresholds_at(bins, 1.0) >= tuple(values.max(axis=1) * 0.999)


@pytest.mark.parametrize("best", [0.0, 0.004, 0.1, 0.5, 0.77, 0.97, 0.99])
def test_bisection_finds_the_largest_quantile(best: float) -> None:
    asked: list[float] = []

    def measure(quantile: float) -> float:
        asked.append(quantile)
        return 10.0 if quantile == 0 else 10.1 if quantile <= best else 10.2

    found = calibrate(measure, 0.011)
    assert found <= best and (best - found < MAX_SHARE / 2**HALVINGS or best > found == MAX_SHARE)
    assert len(asked) <= HALVINGS + 2 and set(asked) >= {0.0, found}


@pytest.mark.parametrize("number", [1, 2, 3, 9, 40, 391, 5000])
def test_windows_are_held_out(number: int) -> None:
    scored, measured = held_out(number)
    assert scored and measured and set(scored) | set(measured) <= set(range(number))
    assert len(set(scored)) == len(scored) <= 32 and len(set(measured)) == len(measured) <= 64
    assert number == 1 or not set(scored) & set(measured)


def calibrated(tmp_path: Path, corpora: list[str], cost: float = 0.2) -> Path:
    path = give_bundles(tiny_llama(tmp_path / "m.gguf", "silu"))
    made(path, corpora, perplexity_cost=cost)
    return path


def test_a_profile_of_silu_has_thresholds_at_their_cost(tmp_path: Path, corpora: list[str]) -> None:
    path = calibrated(tmp_path, corpora)
    file = open_profile_file(open_checkpoint(path))
    one, about = file.profile, file.details["calibration"]
    assert one.thresholds is not None and min(one.thresholds) > 0
    assert about["asked"] == 0.2 and about["cost"] <= 0.2 and 0 < about["quantile"] < 1
    assert about["cost"] == about["perplexity"] / about["perplexity_dense"] - 1
    assert one.active_fraction() == pytest.approx(1 - about["quantile"], abs=0.05)
    more = made(path, corpora, perplexity_cost=0.9).file
    assert more.details["calibration"]["quantile"] > about["quantile"]
    assert more.profile.active_fraction() < one.active_fraction()


def test_the_selector_takes_the_calibrated_thresholds(tmp_path: Path, corpora: list[str]) -> None:
    """Decoding a window of the profile's text activates, layer by layer, as many neurons as the profile counts."""
    path = calibrated(tmp_path, corpora)
    checkpoint = open_checkpoint(path)
    windows = read_windows(open_corpora(corpora), tokenizer_of(checkpoint), WINDOW, 200_000)
    one = open_profile(checkpoint)
    kept: list[np.ndarray] = []
    with LLM(path, selector="threshold", trial=False, context=WINDOW, max_batch=1) as llm:
        for window in windows.ids:
            llm.score(window.tolist(), 0, lambda at, logits: kept.append(logits.copy()), step=1)
        report = llm.sparsity
    assert report is not None and report["tokens"] == one.tokens
    for layer in report["layers"]:
        expected = one.active_fraction(layer["layer"])
        # The first layer reads the same; behind it decode lacks what was left out, and prompts do not.
        assert layer["active_fraction"] == pytest.approx(expected, rel=1e-3 if layer["layer"] == 0 else 0.1)


def test_the_cost_is_that_of_decoding_so(tmp_path: Path, corpora: list[str]) -> None:
    from powerinfer.evaluate import windows_perplexity

    path = calibrated(tmp_path, corpora)
    checkpoint = open_checkpoint(path)
    windows = read_windows(open_corpora(corpora), tokenizer_of(checkpoint), WINDOW, 200_000)
    about = open_profile_file(checkpoint).details["calibration"]
    inside = [windows.ids[window].tolist() for window in held_out(len(windows.ids))[0]]
    found = {}
    for selector in ("all", "threshold"):
        with LLM(path, selector=selector, trial=False, context=WINDOW, max_batch=1) as llm:
            found[selector] = windows_perplexity(llm, inside, step=1).perplexity
    assert found["all"] == pytest.approx(about["perplexity_dense"], rel=1e-5)
    assert found["threshold"] == pytest.approx(about["perplexity"], rel=1e-3)


def test_what_selector_threshold_needs(tmp_path: Path, corpora: list[str]) -> None:
    silu, relu = (give_bundles(tiny_llama(tmp_path / f"{name}.gguf", name)) for name in ("silu", "relu"))
    for path in (silu, relu):
        with pytest.raises(RequestError, match=r"needs --threshold X, or a profile .*`powerinfer profile -m") as caught:
            LLM(path, selector="threshold")
        assert str(path) in str(caught.value)
    made(relu, corpora)
    with pytest.raises(RequestError, match=r"has no thresholds.*--selector exact"):
        LLM(relu, selector="threshold")
    made(silu, corpora)
    with LLM(silu, selector="threshold", threshold=0.125) as llm:
        assert llm.sparsity is not None
    other = tiny_llama(tmp_path / "other.gguf", "silu")
    raw = bytearray(other.read_bytes())
    raw[-3] ^= 1
    silu.write_bytes(bytes(raw))
    with pytest.raises(ModelError, match="another model"):
        LLM(silu, selector="threshold")
