"""The synthetic models of benchmarks/: neurons fire as often as they were told to, in every family and both formats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import machine
from benchmarks.models import activity, make_model, writers
from benchmarks.models.firing import Firing
from benchmarks.models.weights import ATTENTION_WRITES, Plan, Weights
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.placement.power_law import hot_share, layer_means, power_law
from powerinfer.text.model_text import tokenizer_of

VOCAB = 4096  # every token is seen once: then tokens are independent draws
TINY = {"d_model": 128, "d_ff": 512, "n_layers": 3, "n_heads": 4, "vocab": VOCAB, "context": 64, "noise_rank": 48}
KINDS = {
    "llama": {"n_kv_heads": 2},
    "drelu": {"n_kv_heads": 2, "activation": "drelu"},
    "relu2": {"n_kv_heads": 4, "activation": "relu2"},
    "fatrelu": {"n_kv_heads": 2, "activation": "fatrelu", "offset": 0.05},
    "opt": {"family": "opt", "n_kv_heads": 4},
    "falcon-40b": {"family": "falcon", "n_kv_heads": 2},
    "falcon-7b": {"family": "falcon", "n_kv_heads": 1},
}
RANK = 128  # of the predictors


def plan(kind: str = "llama", **more: object) -> Plan:
    return Plan(**(TINY | KINDS[kind] | more))


def quiet(tensor: str) -> None:
    pass


def folder(path: Path, made: Plan, kind: str = "f32", shard_bytes: int = 1 << 30) -> Path:
    writers.write_folder(path, made, kind, quiet, shard_bytes)
    return path


def every_token() -> np.ndarray:
    return np.random.default_rng(3).permutation(VOCAB).reshape(-1, 64)


def allowance(made: Plan, p: np.ndarray) -> float:
    """How far a layer's mean may be off because the maker cannot know how much attention adds.

    The maker counts on a twentieth of ATTENTION_WRITES; between none and three twentieths are seen in sequences of
    64. That changes the variance of the residual stream by a tenth of ATTENTION_WRITES, its standard deviation d by
    half as much, and a probability by t * density(t) * d.
    """
    t = Firing("relu", True, 0.5).threshold(p)
    density = np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
    return float((np.abs(t) * density).mean() * ATTENTION_WRITES / 20)


# --- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "skew"), [(0.02, 1.0), (0.1, 0.0), (0.18, 0.93), (0.5, 0.8), (0.9, 3.0)])
def test_power_law_has_its_mean_and_its_exponent(mean: float, skew: float) -> None:
    p = power_law(mean, skew, 1000)
    assert p.mean() == pytest.approx(mean, rel=1e-9)
    assert (np.diff(p) <= 0).all() and p[-1] > 0 and p[0] <= 0.9999
    uncut = p < 0.9999
    rank = (np.arange(1000) + 0.5) / 1000
    assert np.ptp(np.log(p[uncut]) + skew * np.log(rank[uncut])) < 1e-9


def test_all_neurons_can_be_active() -> None:
    assert (power_law(1.0, 1.0, 100) == 0.9999).all()


@pytest.mark.parametrize(
    ("profile", "d_ff", "layers", "of_layer", "of_model"),
    [("opt-30b", 8192, 48, 0.26, 0.17), ("reglu-70b", 8192, 80, 0.43, 0.26)],
)
def test_profiles_have_the_papers_shares(
    profile: str, d_ff: int, layers: int, of_layer: float, of_model: float
) -> None:
    values = make_model.PROFILES[profile]
    means = layer_means(values["active"], values["layer_ratio"], layers)
    model = np.stack([power_law(mean, values["skew"], d_ff) for mean in means])
    assert model.mean() == pytest.approx(values["active"], rel=1e-6)
    assert np.mean([hot_share(layer) for layer in model]) == pytest.approx(of_layer, abs=0.005)
    assert hot_share(model) == pytest.approx(of_model, abs=0.005)


def test_hot_share_counts_the_fewest() -> None:
    assert hot_share(np.array([0, 8, 1, 1])) == 0.25  # one of four carries 80 %
    assert hot_share(np.array([1, 1, 1, 1, 1])) == 0.8


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("relu", True), ("relu2", True), ("fatrelu", True), ("drelu", True), ("relu", False), ("relu2", False)],
)
def test_thresholds_cuts_and_moments_against_sampling(activation: str, gated: bool) -> None:
    rest, scale, offset, n = 0.2, 0.9, 0.1 if activation == "fatrelu" else 0.0, 400_000
    family = Firing(activation, gated, rest, recall=0.9, offset=offset)
    rng = np.random.default_rng(1)
    y = rng.standard_normal(n)
    noise = np.sqrt(1 - rest) * y + np.sqrt(rest) * rng.standard_normal((2, n))
    for p in (0.02, 0.3, 0.97):
        at = np.array([p])
        threshold, cut = family.threshold(at)[0], family.cut(at)[0]
        gate = noise[0] > threshold
        fires = gate & (noise[1] > threshold) if activation == "drelu" else gate
        assert fires.mean() == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / n))
        candidate = y > cut
        assert candidate[fires].mean() == pytest.approx(0.9, abs=5 * np.sqrt(0.09 / fires.sum()))
        share = family.candidates(at)[0]
        assert candidate.mean() == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / n))
        h = np.where(gate, scale * (noise[0] - threshold) + offset, 0)
        h = h * h if activation == "relu2" else h
        if activation == "drelu":
            h = h * np.maximum(scale * (noise[1] - threshold), 0)
        elif gated:
            h = h * scale * rng.standard_normal(n)
        mean, square = (float(values[0]) for values in family.moments(at, scale))
        assert h.mean() == pytest.approx(mean, abs=5 * h.std() / np.sqrt(n) + 1e-12)
        assert (h * h).mean() == pytest.approx(square, abs=5 * (h * h).std() / np.sqrt(n))


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_neurons_fire_as_often_as_chosen(kind: str, tmp_path: Path) -> None:
    made = plan(kind, active=0.1)
    weights = Weights(made)
    checkpoint = open_checkpoint(folder(tmp_path / "model", made))
    for number, (active, _) in enumerate(activity.layers(checkpoint, every_token())):
        fired = active.reshape(VOCAB, -1)
        p = weights.layer(number).probabilities
        assert p.mean() == pytest.approx(0.1, rel=1e-9)
        # neurons of a token go together, tokens do not: the error of the mean follows from what tokens show
        error = fired.mean(axis=1).std() / np.sqrt(VOCAB)
        assert abs(fired.mean() - 0.1) < 5 * error + (allowance(made, p) if number else 0)
        # each neuron by itself; 1536 of them in 7 kinds of model: six standard deviations are never seen by chance
        if number == 0:
            assert (np.abs(fired.mean(axis=0) - p) < 6 * np.sqrt(p * (1 - p) / VOCAB) + 1 / VOCAB).all()
        assert hot_share(fired.sum(axis=0)) == pytest.approx(hot_share(p), abs=0.02)
        # sets are fresh: two tokens share what independent ones would, the squares' sum, not everything
        shared = (fired[1:] & fired[:-1]).sum() / fired[1:].sum()
        assert shared == pytest.approx((p * p).sum() / p.sum(), abs=0.04)


@pytest.mark.parametrize("fraction", [0.02, 0.5, 1.0])
def test_any_fraction(fraction: float, tmp_path: Path) -> None:
    made = plan(active=fraction)
    result = activity.measure(folder(tmp_path / "model", made), every_token()).document()
    assert result["active_fraction"] == pytest.approx(fraction, rel=0.04)


def test_layers_can_differ(tmp_path: Path) -> None:
    made = plan(active=0.05, layer_ratio=16, n_layers=5)
    result = activity.measure(folder(tmp_path / "model", made), every_token()).document()
    assert result["layers"] == pytest.approx(layer_means(0.05, 16, 5), rel=0.1)
    assert result["layers"][4] / result["layers"][0] == pytest.approx(16, rel=0.15)
    assert result["hot_share_of_model"] < min(0.8 * x for x in result["hot_share_of_layer"][3:])


@pytest.mark.parametrize("kind", ["llama", "opt", "falcon-40b", "falcon-7b"])
def test_transformers_sees_the_same_neurons(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = folder(tmp_path / "model", plan(kind), shard_bytes=1 << 20)
    assert len(list(path.glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(model).__name__ == json.loads((path / "config.json").read_text())["architectures"][0]
    seen: list[np.ndarray] = []
    found = [module for name, module in model.named_modules() if name.endswith(("act_fn", "activation_fn", "mlp.act"))]
    assert len(found) == 3
    for module in found:
        module.register_forward_hook(lambda module, given, out: seen.append(out.numpy() > 0))
    tokens = every_token()[:16]
    with torch.no_grad():
        model(torch.from_numpy(tokens))
    ours = [active for active, _ in activity.layers(open_checkpoint(path), tokens)]
    for theirs, active in zip(seen, ours, strict=True):
        # float32 arithmetic in another order moves a gate by about 1e-6 of its deviation; so many lie that near zero
        assert (theirs.reshape(active.shape) != active).mean() < 1e-4
        assert theirs.mean() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_both_formats_hold_the_same_model(kind: str, tmp_path: Path) -> None:
    made = plan(kind)
    writers.write_gguf(tmp_path / "model.gguf", made, "f32", quiet)
    tokens = every_token()[:8]
    of_gguf = activity.measure(tmp_path / "model.gguf", tokens)
    of_folder = activity.measure(folder(tmp_path / "model", made), tokens)
    for one, other in zip(of_gguf.layers, of_folder.layers, strict=True):
        assert np.abs(one.counts - other.counts).sum() <= 1e-4 * one.counts.size * one.tokens
    one, other = (open_checkpoint(tmp_path / name) for name in ("model.gguf", "model"))
    assert one.config.activations == other.config.activations == made.activation
    text = "the rain\nin Spain, 2024 ÄÖ<|eos|>"
    assert tokenizer_of(one).encode(text) == tokenizer_of(other).encode(text)
    assert tokenizer_of(one).decode(tokenizer_of(one).encode(text), skip_special=False) == text


@pytest.mark.parametrize(("kind", "digits"), [("f16", 11), ("bf16", 8)])
def test_narrow_types_round_to_nearest(kind: str, digits: int, tmp_path: Path) -> None:
    made = plan()
    writers.write_gguf(tmp_path / "model.gguf", made, kind, quiet)
    wide, narrow, small = (
        open_checkpoint(path)
        for path in (folder(tmp_path / "f32", made), folder(tmp_path / kind, made, kind), tmp_path / "model.gguf")
    )
    for name in ("embed", "layers.1.gate", "layers.2.down", "head"):
        exact = wide.take(name).float32()
        assert narrow.take(name).type == small.take(name).type == kind.upper()
        rounded = narrow.take(name).float32()
        assert (np.abs(rounded - exact) <= np.abs(exact) * 2.0**-digits + 2.0**-25).all()
        np.testing.assert_array_equal(rounded, small.take(name).float32())


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        writers.write_gguf(tmp_path / name, plan(seed=seed), "f16", quiet)
        folder(tmp_path / f"folder-{name}", plan(seed=seed), "f16")
    for a, b, c in (
        ("a", "b", "c"),
        ("folder-a/model.safetensors", "folder-b/model.safetensors", "folder-c/model.safetensors"),
    ):
        first, again, other = ((tmp_path / name).read_bytes() for name in (a, b, c))
        assert first == again
        assert first != other


@pytest.mark.parametrize("kind", ["llama", "drelu", "opt", "falcon-7b"])
@pytest.mark.parametrize("stored", ["f16", "q8_0"])
def test_predictor_selects_what_it_is_set_to(kind: str, stored: str, tmp_path: Path) -> None:
    made = plan(kind, active=0.1, recall=0.95)
    path = folder(tmp_path / "model", made)
    assert make_model.make_predictor(path, made, RANK, stored) == tmp_path / "model.powerinfer/predictor.safetensors"
    result = activity.measure(path, every_token()).document()
    assert result["recall"] == pytest.approx(0.95, abs=0.01)
    expected = np.mean([made.firing.candidates(Weights(made).layer(n).probabilities).mean() for n in range(3)])
    assert result["candidate_fraction"] == pytest.approx(expected, rel=0.05)
    assert expected < 0.13  # it is good: few are selected in vain


def test_predictor_of_neurons_that_all_fire(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", plan(active=1.0))
    make_model.make_predictor(path, plan(active=1.0), RANK, "f16")
    training = open_predictor(open_checkpoint(path)).training
    assert training is not None and training["layers"][0]["precision"] > 0.99


def test_predictor_ignores_the_scale_of_the_stream() -> None:
    w_in, w_out = Weights(plan("opt")).predictor(1, RANK)
    x = np.random.default_rng(2).standard_normal((50, 128)).astype(np.float32)
    x += 0.5 * np.sqrt(128) * Weights(plan("opt")).direction
    z = np.maximum(x @ w_in.T, 0) @ w_out.T
    scaled = np.maximum(8 * x @ w_in.T, 0) @ w_out.T
    assert ((z >= 0) == (scaled >= 0)).all() and 0.05 < (z >= 0).mean() < 0.3


def test_impossible_models_are_refused() -> None:
    for more in (
        {"family": "opt", "activation": "drelu"},
        {"n_heads": 3},
        {"vocab": 999},
        {"noise_rank": 127},
        {"active": 0.0},
        {"active": 0.5, "layer_ratio": 50.0},
        {"rest": 0.0},
    ):
        with pytest.raises(ValueError, match=r"."):
            plan(**more)
    with pytest.raises(ValueError, match="rank 97 at least"):
        Weights(plan()).predictor(0, 96)
    with pytest.raises(ValueError, match="multiples of 32"):
        make_model.make_predictor(Path("model"), plan(), 100)


def test_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", make_model.__name__]
    model = tmp_path / "model"
    sizes = ["--shape", "tiny", "--format", "hf", "--profile", "drelu", "--active", "0.2", "--layers", "2"]
    subprocess.run([*command, str(model), *sizes, "--predictor-rank", "64"], check=True, cwd=machine.ROOT)
    done = subprocess.run(
        [*command, "--measure", str(model), "--tokens", "512", "--json"],
        check=True, capture_output=True, text=True, cwd=machine.ROOT,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["tokens"] == 512 and len(result["layers"]) == 2
    assert result["active_fraction"] == pytest.approx(0.2, abs=0.02)
    assert result["recall"] > 0.9
    command += [str(model), "--active", "1.5"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=machine.ROOT)
    assert refused.returncode == 2 and "must be above 0 and at most 1" in refused.stderr
