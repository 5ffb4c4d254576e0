"""Gated short convolutions on a GPU: plain torch and the Triton kernels against float64, and a model with layers on the
stand-in for a GPU against the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import device_name  # noqa: E402
from model_files import conv_gguf  # noqa: E402
from state_steps import CONTEXT, answers, step, texts  # noqa: E402
from test_gpu_delta import STEPS  # noqa: E402
from test_gpu_kernels import by_interpreter, floats, kernels, on_device  # noqa: E402, F401
from test_gpu_layers import on_gpu, opened  # noqa: E402

from benchmarks.models.gguf_writer import U32  # noqa: E402
from powerinfer.config import ShortConvConfig  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.kernels import gpu_short_conv, gpu_states  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.runtime import state_cache  # noqa: E402

KINDS = {"LFM2's": ShortConvConfig(48, 3), "long, with biases": ShortConvConfig(272, 8, bias=True)}


@pytest.fixture(params=["of few tokens", "of many"])
def way(request: pytest.FixtureRequest, kernels: str, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """Programs of Triton."""
    if kernels == "torch" and request.param == "of many":
        pytest.skip("there is one way in torch")
    if kernels == "triton":
        from powerinfer.kernels import triton_short_conv

        monkeypatch.setattr(triton_short_conv, "MANY", 1 if request.param == "of many" else 1 << 30)
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_step(way: str, kind: str, steps: str) -> None:
    """What sequences get, and their new states, wherever they are; the states of others stay."""
    about, sequences = KINDS[kind], STEPS[steps]
    if by_interpreter() and (way == "of many") == about.bias and steps != "prompts":
        pytest.skip("the interpreter goes through the other steps with the other kind")
    biases = floats(2, about.size)
    bias = on_device(biases) if about.bias else None
    net = gpu_short_conv.ShortConv(about, on_device(floats(1, about.taps, about.size)), bias)
    (states,) = gpu_states.new_states([about], 6, device_name())
    states.window.copy_(on_device(floats(6, *states.window.shape)))
    states.window[1] = torch.nan  # of a sequence that nobody goes on with
    counts = [count for count, *_ in sequences]
    first = np.cumsum([0, *counts])
    products = floats(3, int(first[-1]), 3 * about.size)
    before = states.window.cpu().numpy().copy()
    runs = np.array([(at, *one) for at, one in zip(first, sequences, strict=False)], np.int32)
    rows = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
    out = gpu_short_conv.short_conv(net, on_device(products), states, on_device(runs), on_device(rows)).cpu().numpy()
    x, b, c = np.split(products, 3, axis=1)
    taps, left = net.taps.cpu().numpy().astype(np.float64), before.copy()
    for at, (count, read, write) in zip(first, sequences, strict=False):
        if not count:
            continue
        here = slice(at, at + count)
        every = np.concatenate([np.zeros_like(before[0]) if read < 0 else before[read], x[here] * b[here]])
        mixed = sum(taps[j] * every[j : j + count] for j in range(about.taps)) + (0 if bias is None else biases)
        np.testing.assert_allclose(out[here], mixed * c[here], atol=1e-5)
        left[write] = every[count:]
    np.testing.assert_array_equal(states.window.cpu().numpy(), left)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = conv_gguf("C*CC").put("lfm2.context_length", U32, CONTEXT)
    return builder.write(tmp_path_factory.mktemp("conv") / "m.gguf")


@pytest.mark.usefixtures("device")
def test_answers_are_those_of_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, in chunks, with prefixes found again and states kept, on both devices."""
    monkeypatch.setattr("powerinfer.placement.budget.layers_that_fit", lambda *_, **__: (3, False))
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    system = texts(1, 200)[0]
    prompts = [system + one for one in texts(2, 20)] + texts(1, 50)
    alone = answers(path, prompts)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts), "the answers are not all alike"
    beside = answers(path, prompts, 2, gpu=device_name(), max_batch=3, prefill_chunk=48, mixed_chunk=5)
    for (tokens, logprobs), (wanted, exact) in zip(beside, alone, strict=True):
        assert tokens == wanted
        np.testing.assert_allclose(logprobs, exact, atol=2e-3)  # the cache is of F16


@pytest.mark.usefixtures("device")
def test_slots(path: Path) -> None:
    """A state that is read elsewhere stays; NaN stays in its sequence; the memory is what is planned."""
    checkpoint = open_checkpoint(path)
    planned = checkpoint_model(checkpoint)
    with opened(path, on_gpu(3, False), context=CONTEXT, max_batch=2, prefill_chunk=512) as model:
        text = texts(1, 60)[0]
        whole = model.forward(step(text, 0, 0, 0)).copy()
        model.forward(step(text[:40], 0, 0, 3))
        for _ in range(2):
            ours = model.forward(step(text[40:], 40, 3, 1))
            assert np.abs(ours - whole).max() <= 1e-5 * np.abs(whole).max()
        for states in model.gpu._states.values():
            states.window[0] = torch.nan
        assert np.isnan(model.forward(step(text[:1], 60, 0, 0))).all()
        np.testing.assert_array_equal(model.forward(step(text, 0, 0, 0)), whole)
        nbytes = sum(one.nbytes for one in model.gpu._states.values())
        assert nbytes == planned.gpu_state_bytes(2, slice(3)) > 0
