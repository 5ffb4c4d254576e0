"""benchmarks/hybrid/gpu_kernels.py, where there is no GPU: that it runs, and what it counts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from model_files import experts_gguf
from sparse_models import give_bundles, give_predictor, tiny_llama

from benchmarks.hybrid import gpu_kernels, launches
from powerinfer.kernels import gpu, gpu_experts


def test_every_kernel_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "CONTEXT", 64)
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(gpu_kernels, "TOKENS", (1, 8))
    arguments = ["--device", "cpu", "--d-model", "256", "--d-ff", "320", "--active", "1", "--out", str(out)]
    document = gpu_kernels.main(arguments)
    assert json.loads(out.read_text()) == document
    cases = {(case["kernel"], case["type"], case["tokens"]): case for case in document["kernels"]}
    assert {kernel for kernel, _, _ in cases} == {"linear", "neurons", "fused", "predict", "attention", "experts"}
    assert ("fused", "Q8_0/Q8_0", 1) in cases and ("fused", "Q8_0/Q8_0", 8) not in cases
    for kind in gpu.CUT:
        assert cases["linear", kind, 8]["bytes"] == gpu.weight_bytes(kind, 256, 256)
        weights = gpu_kernels.random_weights(kind, 4, 256, "cpu")
        assert len(weights) == 2 and all(torch.isfinite(gpu.linear(one, torch.ones(1, 256))).all() for one in weights)
    some = gpu_kernels.main([*arguments, "--kernels", "neurons", "predict", "--types", "Q8_0/Q8_0", "--tokens", "2"])
    assert [(case["kernel"], case["tokens"]) for case in some["kernels"]] == [("neurons", 2)]
    assert all(case["us"] > 0 for case in cases.values())
    assert cases["linear", "Q8_0", 8]["bytes"] == gpu.weight_bytes("Q8_0", 256, 256)
    for tokens in gpu_kernels.TOKENS:  # all neurons are active, and read once
        assert cases["neurons", "Q8_0/Q8_0", tokens]["bytes"] == 3 * gpu.weight_bytes("Q8_0", 320, 256)
        across = 2 * gpu.weight_bytes("Q4_0", 320, 256) + 320 * 128 + 10 * 2 * 256
        assert cases["neurons", "Q4_0/Q4_0X32", tokens]["bytes"] == across


@pytest.mark.parametrize("ffn", [("--plain",), ("--activation", "drelu"), ()])
def test_neurons_of_each_kind_are_summed(ffn: tuple[str, ...], tmp_path: Path) -> None:
    """Plain, dReLU and ReGLU: what is read, and the sum in float64."""
    given = ["--device", "cpu", "--d-model", "256", "--d-ff", "320", "--active", "1", "--tokens", "1"]
    (case,) = gpu_kernels.main([*given, "--kernels", "neurons", "--types", "F16/F16", *ffn])["kernels"]
    rows = 2 if "--plain" in ffn else 3
    assert case["bytes"] == rows * gpu.weight_bytes("F16", 320, 256)
    for types in gpu_kernels.TYPES:
        activation = "drelu" if "drelu" in ffn else "relu"
        neurons = gpu_kernels.random_neurons(types, 320, 256, "cpu", activation, "--plain" in ffn)
        x, selected = torch.randn(3, 256), (torch.rand(3, 320) < 0.5).to(torch.uint8)
        assert gpu_kernels.off(neurons, x, selected) < 1e-6  # float32 sums of 320 products
        total, fired = gpu.neuron_sum(neurons, x, selected)
        assert torch.equal(fired, selected.sum(0).int()) and total.abs().max() > 1


def test_experts_are_checked_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--device", "cpu", "--d-model", "64", "--tokens", "1", "--kernels", "experts"]
    (case,) = gpu_kernels.main(given)["kernels"]
    each = 3 * gpu.weight_bytes("Q4_0", gpu_kernels.EXPERT_SIZE, 64)
    assert case["bytes"] == gpu_kernels.TOP_K * each and case["tflop_s"] >= 0
    plain = gpu_experts.expert_sum
    *_, copies, call = next(gpu_kernels.expert_cases("cpu", 64, [1]))
    seen = list[int]()
    monkeypatch.setattr(gpu_experts, "expert_sum", lambda *given: seen.extend(given[2].flatten().tolist()))
    for copy in range(copies):
        call(copy)
    assert copies == 2 and sorted(seen) == [*range(16)], "no call finds its experts in a cache"
    monkeypatch.setattr(gpu_experts, "expert_sum", lambda *given: 1.1 * plain(*given))
    with pytest.raises(RuntimeError, match=r"not timed: experts of 1 tokens are off by 0\.1 of"):
        gpu_kernels.main(given)


def test_a_wrong_sum_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gpu.neuron_sum
    monkeypatch.setattr(gpu, "neuron_sum", lambda *given, **how: (1.01 * plain(*given, **how)[0], None))
    given = ["--device", "cpu", "--d-model", "256", "--d-ff", "320", "--tokens", "1", "--kernels", "fused"]
    with pytest.raises(RuntimeError, match=r"not timed: fused of F16/F16 is off by 0\.01 of its size"):
        gpu_kernels.main([*given, "--types", "F16/F16"])


def test_other_tiles_are_tried_and_put_back() -> None:
    pytest.importorskip("triton")
    from powerinfer.kernels import triton_fused, triton_neurons

    with gpu_kernels.tiles("fused", "Q4_0/Q4_0X32", 1) as choices:
        seen = {(*chosen,) for chosen in choices}
    assert len(seen) > 40 and (triton_fused.PRODUCTS["Q4_0"], triton_fused.DOWN["Q4_0X32"]) in seen
    before = dict(triton_neurons.DOT_ONE), dict(triton_neurons.ADD_ONE)
    with gpu_kernels.tiles("neurons", "Q4_0/Q4_0X32", 1) as choices:
        seen = {(*chosen,) for chosen in choices}
    assert len(seen) > 40 and (before[0]["Q4_0"], before[1]["Q4_0X32"]) in seen
    assert before == (triton_neurons.DOT_ONE, triton_neurons.ADD_ONE)


def test_tiles_that_compute_something_else_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    each = (1, 1 + 1e-6, 1 + 1e-6, 1.1, float("nan"))
    results = iter([torch.full((4,), value) for value in each for _ in range(2)])  # the first zeroes what is added to
    timed: list[int] = []
    monkeypatch.setattr(gpu_kernels, "seconds", lambda *_: timed.append(1) or 1.0)
    monkeypatch.setattr(gpu_kernels, "tiles", lambda *_: nullcontext(iter([((16, 32, 4),)] * 4)))
    found = gpu_kernels.swept("linear", "F16", 1, lambda _: next(results), 1, "cpu", None)
    assert (found["tried"], found["wrong"], len(timed)) == (2, 2, 2)
    assert gpu_kernels.swept("linear", "F16", 1, lambda _: torch.ones(4), 1, "cpu", -1)["tried"] == 0
    total = torch.zeros(4)
    added = lambda _: total.add_(1)  # noqa: E731
    assert gpu_kernels.swept("neurons", "F16/F16", 1, lambda _: (added(_), None), 1, "cpu", None)["wrong"] == 0
    assert gpu_kernels.swept("attention", "F16", 1, lambda _: None, 1, "cpu", None) == {}


def test_what_is_launched_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    for selector, asked in (("exact", ()), ("predicted", ("predictor",))):
        made = launches.main([str(path), "--gpu", "cpu", "--selector", selector, "--steps", "6", "--threads", "1"])
        layers = made["layers"]
        between = {"mark": layers, "cold neurons": layers}
        assert made["replayed"]["operators"] == {"replays": 1, "calls": layers}
        assert made["the host waits"]["operators"] == {"replays": 2 * layers + 1, "calls": 0, **between}
        each = ("attention", "project", "norm", *asked, "copy out", "mark", "hot neurons", "cold neurons", "add")
        assert made["one by one"]["operators"] == {"replays": 0, "calls": 0, "head": 1, **dict.fromkeys(each, layers)}
        assert 0 < made["replayed"]["python_us_per_layer"] < 1e4
        assert made["off"] < 1e-4
    plain = gpu.neuron_sum
    monkeypatch.setattr(gpu, "neuron_sum", lambda *given: (plain(*given), plain(*given))[1])
    with pytest.raises(SystemExit, match="not timed: logits are off by"):
        launches.main([str(path), "--gpu", "cpu", "--steps", "6", "--threads", "1"])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_step_is_one_replay_whoever_decides_about_experts(policy: str, tmp_path: Path) -> None:
    path = experts_gguf().write(tmp_path / "m.gguf")
    given = ["--gpu", "cpu", "--selector", "all", "--steps", "6", "--threads", "1", "--expert-policy", policy]
    made = launches.main([str(path), *given])
    assert made["replayed"]["operators"] == {"replays": 1, "calls": made["layers"]} and made["off"] < 1e-3
    assert made["the host waits"]["operators"]["replays"] > made["layers"]


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_kernels.main([])
    assert "there is no GPU here" in capsys.readouterr().err
