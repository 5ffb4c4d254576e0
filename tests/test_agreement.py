"""Two settings of a model compared on a text, and what bench, run and chat tell about sparse decode."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import TEXT, give_bundles, give_predictor, give_profile, tiny_llama
from test_cli import error_line, powerinfer
from toy_model import BOS, VOCAB, ToyExecutor, reference_logits, toy_llm

from powerinfer import _native
from powerinfer.cli import bench
from powerinfer.cli.common import Output
from powerinfer.cli.neurons import neuron_rows, ranges
from powerinfer.devices import Batch
from powerinfer.errors import RequestError
from powerinfer.evaluate import PROMPT, Agreement, _summary, agreement, perplexity
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.profile_file import open_profile
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.sparsity.selector_trial import TimedLayer, TimedLayers, Way
from powerinfer.system import peak_memory

SENTENCE = "It was the best of times, it was the worst of times. "


# ---------------------------------------------------------------- the figures, on models that can be worked out


class Perturbed(ToyExecutor):
    """Logits that are off by what `noise` says."""

    def forward(self, batch: Batch) -> np.ndarray:
        return super().forward(batch) + self.noise(batch.positions[batch.logit_rows])

    @staticmethod
    def noise(positions: np.ndarray) -> np.ndarray:
        """float32 [n, vocab]: small, and every fifth position prefers another token."""
        rows = [np.random.default_rng(int(position)).normal(0, 0.01, VOCAB) for position in positions]
        noise = np.asarray(rows, np.float32).reshape(len(rows), VOCAB)
        noise[positions % 5 == 0, 7] += 40
        return noise


def expected(*windows: tuple[list[int], int]) -> tuple[float, float, float, int]:
    """(top-1 agreement, mean KL, largest difference, positions) of the plain and the perturbed toy model.

    windows: their tokens and the position from which on they are compared.
    """
    same, kl, furthest = [], [], []
    for tokens, first in windows:
        for at in range(first, len(tokens)):
            plain = reference_logits(tokens[: at + 1]).astype(np.float64)
            other = (plain.astype(np.float32) + Perturbed.noise(np.asarray([at]))[0]).astype(np.float64)
            p, q = (np.exp(logits) / np.exp(logits).sum() for logits in (plain, other))
            same.append(plain.argmax() == other.argmax())
            kl.append((p * np.log(p / q)).sum())
            furthest.append(np.abs(plain - other).max())
    return float(np.mean(same)), float(np.mean(kl)), max(furthest), len(kl)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("add_bos", [False, True])
def test_the_figures(step: int, add_bos: bool) -> None:
    """Windows of 50 and a rest of 9, BOS in the place of their first token; KL is that of `against` to the other."""
    executor = Perturbed()
    llm, against = toy_llm(executor), toy_llm()
    llm.tokenizer.add_bos = add_bos
    text = (SENTENCE * 3)[: 109 - add_bos]
    tokens = [BOS] * add_bos + list(text.encode())
    windows = [tokens[:50], tokens[50:100], tokens[100:]]
    if add_bos:
        windows = [[BOS, *window[1:]] for window in windows]
    seen: list[tuple[str, int, int]] = []
    result = agreement(llm, against, text, 50, step=step, progress=lambda *event: seen.append(event))
    same, kl, furthest, count = expected((windows[0], PROMPT), (windows[1], PROMPT), (windows[2], 4))
    assert result == Agreement(same, pytest.approx(kl, rel=1e-6), pytest.approx(furthest, rel=1e-6), count, 1.0)
    assert 0.5 < same < 1 and count == 34 + 34 + 5
    assert seen[-1] == ("agreement", 2 * count, 2 * count) and sorted(seen) == seen
    # a prompt, then small steps
    assert executor.sizes[0] == PROMPT and max(executor.sizes[1 : 1 + 34 // step]) == step


def test_a_limit_counts_positions() -> None:
    """Of windows of 50 with 34 positions each: one, and 6 of the second."""
    executor = Perturbed()
    result = agreement(toy_llm(executor), toy_llm(), SENTENCE * 5, 50, limit=40)
    tokens = list((SENTENCE * 5).encode())
    assert result.tokens == 40 and len(executor.sizes) == 2 + 40
    assert result.mean_kl == pytest.approx(expected((tokens[:50], PROMPT), (tokens[50:72], PROMPT))[1], rel=1e-6)


def test_an_engine_agrees_with_itself() -> None:
    llm = toy_llm()
    assert agreement(llm, llm, SENTENCE) == Agreement(1.0, 0.0, 0.0, len(SENTENCE) - PROMPT, 1.0)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(RequestError, match="1 tokens: at least 2"):
        agreement(toy_llm(), toy_llm(), "x")
    with pytest.raises(RequestError, match="a window of 3 tokens"):
        agreement(toy_llm(), toy_llm(), SENTENCE, 3)
    other = toy_llm()
    other.config = other.config.__class__(**{**vars(other.config), "vocab_size": 7})
    with pytest.raises(RequestError, match="vocabularies of 258 and 7"):
        agreement(toy_llm(), other, SENTENCE)

    class Broken(ToyExecutor):
        def forward(self, batch: Batch) -> np.ndarray:
            return super().forward(batch) * np.float32("nan")

    for pair in ((Broken(), ToyExecutor()), (ToyExecutor(), Broken())):
        with pytest.raises(RequestError, match="no usable probabilities"):
            agreement(*map(toy_llm, pair), SENTENCE)
    for losses in ([800.0, 801.0], [1.0, np.nan], [1.0, np.inf]):  # e^800 is beyond float64
        with pytest.raises(RequestError, match="no usable probabilities"):
            _summary(np.array(losses))


def test_scoring_in_steps_gives_the_same() -> None:
    """`step` bounds the calls from the first position on, and no call before."""
    losses = []
    for step, sizes in ((1, [1] * 99), (7, [7] * 14 + [1]), (64, [48, 48, 3])):
        executor = ToyExecutor(max_tokens=48)
        losses.append(perplexity(toy_llm(executor), SENTENCE * 8, 200, step=step))
        assert executor.sizes == [48, 48, 4, *sizes] * 2
    assert losses[0] == losses[1] == losses[2]


# ---------------------------------------------------------------- sparse decode


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_predictor(give_bundles(tiny_llama(tmp_path_factory.mktemp("relu") / "relu.gguf")))


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_bundles(tiny_llama(tmp_path_factory.mktemp("silu") / "silu.gguf", "silu"))


def opened(path: Path, selector: str, **options: Any) -> LLM:
    settings = {"threads": 2, "kv_type": "f32", "trial": False, "recall_every": 1}
    return LLM(path, selector=selector, **(settings | options))


def compared(path: Path, selector: str, against: str = "all", step: int = 1, **options: Any) -> tuple[Agreement, Any]:
    with opened(path, selector, **options) as llm, opened(path, against) as other:
        result = agreement(llm, other, TEXT, 96, 100, step)
        # every |difference| of the logits is at most d: then KL is at most d * d / 2 (Hoeffding's lemma)
        assert -1e-12 < result.mean_kl <= result.max_abs_logit_diff**2 / 2 + 1e-12
        return result, llm.sparsity


@pytest.mark.parametrize("step", [1, 8])
def test_exact_agrees_with_all(relu: Path, step: int) -> None:
    """It differs no more than kernels of another width do: both only add in another order."""
    if len(_native.levels()) < 2:
        pytest.skip("this build has one instruction set for this CPU")
    rounding = compared(relu, "all", isa=_native.levels()[-1])[0].max_abs_logit_diff
    result, sparsity = compared(relu, "exact", step=step)
    assert result.top1_agreement == 1 and 0 < result.max_abs_logit_diff <= 4 * rounding
    assert result.active_fraction == sparsity["active_fraction"] and 0.2 < result.active_fraction < 0.8
    assert [layer["tokens"] for layer in sparsity["layers"]] == [100, 100]
    assert sparsity["bytes_per_token"] == pytest.approx(sum(layer["bytes_per_token"] for layer in sparsity["layers"]))


def test_the_same_selector_gives_the_same_bits(relu: Path) -> None:
    for selector in ("exact", "predicted"):
        result, _ = compared(relu, selector, against=selector)
        assert (result.top1_agreement, result.mean_kl, result.max_abs_logit_diff) == (1, 0, 0)


def test_a_bad_predictor_shows(relu: Path) -> None:
    exact, _ = compared(relu, "exact")
    guessed, sparsity = compared(relu, "predicted")
    assert 0.2 < sparsity["recall"] < 0.8 and guessed.active_fraction < exact.active_fraction
    assert guessed.top1_agreement < exact.top1_agreement and guessed.mean_kl > 1e6 * exact.mean_kl


def test_a_higher_threshold_is_further_off(silu: Path) -> None:
    results = [compared(silu, "threshold", threshold=value)[0] for value in (1e-6, 0.1, 1.0)]
    active = [result.active_fraction for result in results]
    assert active[0] > active[1] > active[2] > 0
    assert results[0].mean_kl < results[1].mean_kl < results[2].mean_kl


# ---------------------------------------------------------------- the commands


def document(*args: str, stdin: str = "") -> dict[str, Any]:
    done = powerinfer(*args, "--threads", "2", "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return str(file)


def test_eval_agreement(relu: Path, text: str) -> None:
    flags = ["-m", str(relu), "--file", text, "--context", "64", "--tokens", "60"]
    result = document("eval", "agreement", *flags, "--selector", "exact", "--no-trial", "--against", "all")
    assert result["top1_agreement"] == 1 and 0 < result["max_abs_logit_diff"] < 0.01 and abs(result["mean_kl"]) < 1e-4
    assert result["tokens"] == 60 and 0.2 < result["active_fraction"] < 0.8 and result["bytes_per_token"] > 0
    settings = {name: result[name] for name in ("selector", "against", "context", "step", "recall")}
    assert settings == {"selector": "exact", "against": "all", "context": 64, "step": 1, "recall": None}
    result = document("eval", "agreement", *flags, "--selector", "predicted", "--against", "exact", "--step", "4")
    assert 0 < result["recall"] < 1 and result["candidate_fraction"] > result["active_fraction"] > 0
    shown = powerinfer("eval", "agreement", *flags, "--selector", "predicted").stdout
    assert (
        "predicted against all, 60 positions" in shown
        and "% of those that fire among them" in shown
        and "mean KL" in shown
    )


def test_eval_agreement_gives_the_threshold_to_the_selector_that_takes_it(silu: Path, text: str) -> None:
    flags = ["-m", str(silu), "--file", text, "--context", "64", "--tokens", "20", "--threshold", "0.5"]
    one = document("eval", "agreement", *flags, "--selector", "threshold")
    other = document("eval", "agreement", *flags, "--selector", "all", "--against", "threshold")
    assert one["max_abs_logit_diff"] == other["max_abs_logit_diff"] > 0
    assert one["active_fraction"] < 1 == other["active_fraction"]
    assert "goes with --selector threshold" in error_line(powerinfer("eval", "agreement", *flags, "--selector", "all"))


def test_eval_perplexity_takes_the_sparse_path(relu: Path, text: str) -> None:
    flags = ["-m", str(relu), "--file", text, "--context", "64"]
    dense = document("eval", "perplexity", *flags)
    exact = document("eval", "perplexity", *flags, "--selector", "exact")
    guessed = document("eval", "perplexity", *flags, "--selector", "predicted", "--step", "8")
    assert document("eval", "perplexity", "-m", str(relu), "--file", text)["context"] == 128, "the model's own"
    assert "sparsity" not in dense and exact["sparsity"]["ways"] == {"exact": 2}
    assert exact["sparsity"]["tokens"] == exact["tokens"] == dense["tokens"]
    assert exact["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-3)
    assert guessed["perplexity"] != pytest.approx(dense["perplexity"], rel=1e-3)
    assert guessed["sparsity"]["recall"] < 1


def test_what_eval_refuses(relu: Path, silu: Path, tmp_path: Path, text: str) -> None:
    def said(measure: str, path: Path, *flags: str) -> str:
        return error_line(powerinfer("eval", measure, "-m", str(path), "--file", text, "--context", "64", *flags))

    assert "leave out --selector; threshold skips small ones" in said("agreement", silu, "--selector", "exact")
    assert "leave out --selector; threshold skips small ones" in said("agreement", silu, "--against", "exact")
    bare = tiny_llama(tmp_path / "bare.gguf")
    assert f"`powerinfer pack -m {bare}` makes it" in said("agreement", bare, "--selector", "exact")
    assert "between 1 and 8" in said("agreement", relu, "--step", "9")
    assert "between 1 and 2" in said("perplexity", relu, "--step", "3", "--max-batch", "2")
    assert "--tokens must be at least 1" in said("agreement", relu, "--tokens", "0")
    assert "are options of eval agreement" in said("perplexity", relu, "--against", "all")


def test_a_selector_is_refused_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import powerinfer.models

    def never(*args: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(powerinfer.models, "load", never)
    for activation, message in (("silu", "leave out --selector; threshold"), ("relu", "powerinfer pack -m")):
        with pytest.raises(ValueError, match=message):
            LLM(tiny_llama(tmp_path / f"{activation}.gguf", activation), selector="exact")


def test_bench_tells_what_decode_needed(relu: Path) -> None:
    sizes = ["--prompt-tokens", "5", "--gen-tokens", "6", "--repeat", "2"]  # such a prompt is a small step as well
    dense = document("bench", "-m", str(relu), "--selector", "all", *sizes)
    sparse = document("bench", "-m", str(relu), "--selector", "predicted", "--no-trial", "--recall-every", "1", *sizes)
    assert "sparsity" not in dense
    sparsity = sparse["sparsity"]
    assert sparsity["tokens"] == sparsity["sampled"] == 6
    assert [layer["tokens"] for layer in sparsity["layers"]] == [6, 6]
    assert 0 < sparsity["active_fraction"] < sparsity["candidate_fraction"] < 1 and 0 < sparsity["recall"] < 1
    assert [layer["ways"] for layer in sparsity["layers"]] == [dict.fromkeys("1248", "predicted")] * 2
    ffn = 3 * 64 * 96 * 4 * 2  # F32, two layers
    assert sparse["bytes_per_token"] == round(dense["bytes_per_token"] - ffn + sparsity["bytes_per_token"])
    read_per_second = sparse["bytes_per_token"] * sparse["decode_tok_s"]["median"]
    assert sparse["bandwidth_gb_s"] == pytest.approx(read_per_second / 1e9)
    again = document("bench", "-m", str(relu), "--selector", "predicted", "--no-trial", "--recall-every", "1", *sizes)
    assert again["sparsity"] == sparsity
    shown = powerinfer("bench", "-m", str(relu), "--selector", "predicted", "--no-trial", *sizes).stdout
    assert "% active" in shown and "% candidates" in shown and "predicted     layers 0-1\n" in shown


def test_dense_layers_count_in_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two layers is dense: the figures of all layers, the dense ones beside them, and where each way is used."""
    path = give_bundles(tiny_llama(tmp_path / "relu.gguf"))
    sizes = ("1", "2", "4", "8")
    ways: list[Way] = ["exact", "dense"]
    layers = [TimedLayer(dict.fromkeys(sizes, way), {"dense": 2.0, "exact": 1.0}) for way in ways]
    monkeypatch.setattr("powerinfer.sparsity.selector_trial.measured", lambda *_: TimedLayers(layers))
    with LLM(path, selector="exact", threads=1) as llm:
        llm.generate("a cab back", SamplingParams(max_tokens=8, ignore_eos=True))
        sparsity = llm.sparsity
        assert sparsity is not None
        first, second = sparsity["layers"]
        part = 64 * 96 * 4  # F32
        assert second["bytes_per_token"] == 3 * part and sparsity["dense_bytes_per_token"] == 6 * part
        rows_in_f16 = first["active_fraction"] * part  # of up and down
        assert first["bytes_per_token"] == pytest.approx(part + rows_in_f16, rel=0.01)
        assert sparsity["bytes_per_token"] == first["bytes_per_token"] + second["bytes_per_token"]
        assert sparsity["computed_fraction"] == pytest.approx((first["active_fraction"] + 1) / 2)
        rows = neuron_rows(llm, sparsity)
        assert rows["exact"] == "layers 0" and rows["dense"] == "layers 1" and "hot" not in rows
        assert f"in the layers that decode sparsely, {100 * sparsity['computed_fraction']:.1f} %" in rows["neurons"]
        assert rows["neurons"].endswith("MB of FFN weights a token, dense 0.1 MB")
        give_profile(path)
        share = open_profile(open_checkpoint(path)).hot_share()
        shown = neuron_rows(llm, sparsity)["hot"]
        assert shown == f"{100 * share:.0f} % of the neurons make 80 % of the activations, by the profile"
        (path.parent / "relu.gguf.powerinfer" / "profile.safetensors").write_bytes(b"stale")
        assert "hot" not in neuron_rows(llm, sparsity)


def test_hot_neurons_are_those_on_the_gpu(relu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [{"layer": at, "hot": 24, "cold": 72} for at in range(2)]
    sparsity = {"selector": "exact", "tokens": 5, "active_fraction": 0.3, "gpu_share": 0.8, "jobs": 0.9}
    sparsity["layers"] = layers
    with opened(relu, "all") as llm:
        rows = neuron_rows(llm, sparsity)
    assert rows["hot and cold"] == "25 % of the neurons, the hot ones, are on the GPU"
    assert "80.0 % of them on the GPU" in rows["neurons"]
    rates = {f"{name}_tok_s": dict.fromkeys(("median", "min", "max"), 1.0) for name in ("prefill", "decode")}
    measured = rates | {"bytes_per_token": None, "peak_rss_mb": 1.0, "choices": {"prefill_chunk": "512"}}
    bench._show(measured, rows, Output(False))
    shown = capsys.readouterr().out
    assert "\nhot and cold  25 %" in shown and "\nprefill_chunk 512\n" in shown


def test_run_and_chat_sum_it_up(relu: Path) -> None:
    flags = ["-m", str(relu), "--selector", "exact", "--no-trial", "--max-tokens", "5", "--ignore-eos"]
    for found in (
        document("run", "a cab back bab abc cad", "--raw", *flags),
        document("chat", *flags, stdin="a cab\n"),
    ):
        sparsity = found["sparsity"]
        assert sparsity["selector"] == "exact" and sparsity["ways"] == {"exact": 2} and "layers" not in sparsity
        assert 0 < sparsity["active_fraction"] < 1 and sparsity["bytes_per_token"] > 0
    shown = powerinfer("run", "a cab back bab abc cad", "--raw", "--verbose", *flags).stderr
    read = r"^neurons +[0-9.]+ % active; [0-9.]+ MB of FFN weights a token, dense 0.1 MB$"
    assert re.search(read, shown, re.MULTILINE) and re.search(r"^exact +layers 0-1$", shown, re.MULTILINE)
    assert not re.search("^hot", shown, re.MULTILINE), "there is no profile"
    assert "sparsity" not in document(
        "run", "a cab", "--raw", "-m", str(relu), "--selector", "all", "--max-tokens", "5"
    )


def test_peak_memory_is_this_process_own(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\ta: b\nVmPeak:\t  9000 kB\nVmHWM:\t    2048 kB\n")
    assert peak_memory(status) == 2 << 20
    assert 10 << 20 < peak_memory(tmp_path / "none") < 100_000 << 20
    # a process that a large one started has not been large itself
    child = "from powerinfer.system import peak_memory; print(peak_memory())"
    code = (
        f"import subprocess, sys; x = bytes(300 << 20); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 1 << 20 < int(done.stdout) < 200 << 20


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
