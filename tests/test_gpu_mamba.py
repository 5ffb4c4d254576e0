"""Mamba2 on a GPU: plain torch and the Triton kernels against float64, and models with layers on the stand-in for a GPU
against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
from gpu_device import CUDA, device_name  # noqa: E402
from model_files import mamba_gguf  # noqa: E402
from state_steps import CONTEXT, answers, step, texts  # noqa: E402
from test_gpu_delta import STEPS  # noqa: E402
from test_gpu_kernels import TRITON, by_interpreter, floats, kernels, on_device  # noqa: E402, F401
from test_gpu_layers import on_gpu, opened  # noqa: E402

from benchmarks.models.gguf_writer import U32  # noqa: E402
from powerinfer import LLM, SamplingParams  # noqa: E402
from powerinfer.config import Mamba2Config  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.kernels import gpu, gpu_mamba, gpu_states  # noqa: E402
from powerinfer.kernels.gpu_types import States  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.runtime import state_cache  # noqa: E402

KINDS = {
    "in groups, with a norm of each": Mamba2Config(6, 32, 2, 16, 4, norm_groups=2),
    "one group, steps within limits": Mamba2Config(4, 16, 1, 48, 3, step_limits=(0.6, 1.1)),
    "odd sizes, long convolution, the norm first": Mamba2Config(3, 80, 3, 32, 8, norm="before"),
    "no norm, scales, short convolution": Mamba2Config(
        2, 16, 1, 16, 2, norm="none", activation="relu2", scales=(1.5, 0.7, 1.2, 0.8, 0.6)
    ),
}


def weights(about: Mamba2Config) -> gpu_mamba.Mamba:
    heads = about.n_heads
    taps = floats(1, about.taps, about.channels) / about.taps**0.5
    vectors = taps, floats(2, about.channels), -np.exp(floats(3, heads) - 1), floats(4, heads), floats(5, heads)
    norm = None if about.norm == "none" else on_device(1 + floats(6, about.width) / 4)
    return gpu_mamba.Mamba(about, *map(on_device, vectors), norm, 1e-5)


class Exact:
    """The layer in float64, tokens of one sequence at a time."""

    def __init__(self, net: gpu_mamba.Mamba, window: np.ndarray, heads: np.ndarray) -> None:
        self.about, self.eps = net.about, net.eps
        vectors = net.taps, net.conv_bias, net.a, net.d, net.step_bias
        self.taps, self.bias, *self.of_heads = (one.cpu().numpy().astype(np.float64) for one in vectors)
        self.norm = None if net.norm is None else net.norm.cpu().numpy().astype(np.float64)
        self.window, self.heads = window.astype(np.float64), heads.astype(np.float64)

    def run(self, rows: np.ndarray) -> np.ndarray:
        about, (a, d, step_bias), tokens = self.about, self.of_heads, len(rows)
        inner, keys = about.width, about.n_groups * about.state_dim
        gate, inputs, steps = np.split(rows.astype(np.float64), [inner, inner + about.channels], axis=1)
        every = np.concatenate([self.window, inputs])
        self.window = every[tokens:]
        mixed = self.bias + sum(self.taps[j] * every[j : j + tokens] for j in range(about.taps))
        mixed = reference.activate(about.activation, mixed)
        x, b, c = np.split(mixed, [inner, inner + keys], axis=1)
        b, c = (part.reshape(tokens, about.n_groups, -1) for part in (b, c))
        steps = np.clip(np.logaddexp(0, steps * about.scales[-1] + step_bias), *about.step_limits)
        out, self.heads = reference.mamba(x.reshape(tokens, about.n_heads, -1), b, c, steps, a, d, self.heads)
        gate = reference.activate("silu", gate * about.scales[0])
        out = out.reshape(tokens, -1) * (gate if about.norm == "gated" else 1)
        if self.norm is not None:
            parts = out.reshape(tokens, about.norm_groups, -1)
            parts = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + self.eps)
            out = parts.reshape(tokens, -1) * self.norm
        return out if about.norm == "gated" else out * gate


def filled(about: Mamba2Config, slots: int) -> States:
    """Slots with states of some sequences, one of which holds no numbers."""
    (states,) = gpu_states.new_states([about], slots, device_name())
    states.window.copy_(on_device(floats(6, *states.window.shape)))
    states.heads.copy_(on_device(floats(7, *states.heads.shape)))
    if slots > 1:
        states.window[1], states.heads[1] = torch.nan, torch.nan
    return states


def inputs(about: Mamba2Config, tokens: int) -> np.ndarray:
    return floats(2, tokens, about.width + about.channels + about.n_heads)


@pytest.fixture(params=["one after another", "in chunks"])
def way(request: pytest.FixtureRequest, kernels: str, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """How Triton goes through the tokens of a sequence."""
    if kernels == "torch" and request.param == "in chunks":
        pytest.skip("there is one way in torch")
    if kernels == "triton":
        from powerinfer.kernels import triton_mamba

        monkeypatch.setattr(triton_mamba, "CHUNKED", 1 if request.param == "in chunks" else 1 << 30)
        monkeypatch.setattr(triton_mamba, "CHUNK", 16)  # tokens of a prompt here are in two,
        monkeypatch.setattr(triton_mamba, "COLUMNS", 16)  # and the columns of states, too
    return str(request.param)


INTERPRETED = {
    "one after another": {
        "in groups, with a norm of each": {"prompts"},
        "one group, steps within limits": {"one token of several"},
        "odd sizes, long convolution, the norm first": {"one token"},
        "no norm, scales, short convolution": {"one token of several"},
    },
    "in chunks": {
        "in groups, with a norm of each": {"one token of several"},
        "one group, steps within limits": {"prompts"},
        "odd sizes, long convolution, the norm first": {"prompts"},
        "no norm, scales, short convolution": {"prompts"},
    },
}
"""The steps of each kind in Triton's interpreter: how sequences lie depends on no size of a layer."""


def given(net: gpu_mamba.Mamba, states: States, products: np.ndarray, runs: list[tuple[int, ...]]) -> np.ndarray:
    """What tokens get, whose sequences are those of `runs`, one after another."""
    rows = np.repeat(np.arange(len(runs), dtype=np.int32), [count for _, count, *_ in runs])
    where = np.array(runs, np.int32), rows
    return gpu_mamba.mamba(net, on_device(products), states, *map(on_device, where)).cpu().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_step(way: str, kind: str, steps: str) -> None:
    """What sequences get, and their new states, wherever they are; the states of others stay."""
    about, step = KINDS[kind], STEPS[steps]
    if by_interpreter() and steps not in INTERPRETED[way][kind]:
        pytest.skip("the interpreter goes through this step and this kind with others")
    if gpu.which(torch.empty(0, device=device_name())) == "triton" and way == "one after another":
        step = [(min(count, 5), *slots) for count, *slots in step]  # one more token is like the one before
    net, states = weights(about), filled(about, 6)
    first = np.cumsum([0, *(count for count, _, _ in step)])
    products = inputs(about, int(first[-1]))
    before = [part.cpu().numpy().copy() for part in (states.window, states.heads)]
    out = given(net, states, products, [(at, *one) for at, one in zip(first.tolist(), step, strict=False)])
    after = [part.cpu().numpy() for part in (states.window, states.heads)]
    for at, (count, read, write) in zip(first, step, strict=False):
        if not count:
            continue
        exact = Exact(net, *(np.zeros_like(part[0]) if read < 0 else part[read] for part in before))
        wanted = exact.run(products[at : at + count])
        assert np.abs(out[at : at + count] - wanted).max() <= 2e-5 * np.abs(wanted).max()
        np.testing.assert_array_equal(after[0][write], exact.window.astype(np.float32))
        assert np.abs(after[1][write] - exact.heads).max() <= 2e-5 * np.abs(exact.heads).max()
    written = {write for count, _, write in step if count}
    for slot in set(range(6)) - written:
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old[slot], new[slot])


@pytest.mark.parametrize("kind", ["no norm, scales, short convolution", "one group, steps within limits"])
def test_a_text_in_pieces(kernels: str, way: str, kind: str) -> None:  # noqa: F811
    """The same bits in Triton, one token after another; torch rounds functions by where in a tensor a number is."""
    if by_interpreter() and kind.startswith("no norm") == (way == "in chunks"):
        pytest.skip("the interpreter goes through each way with one kind")
    about = KINDS[kind]
    net, products = weights(about), inputs(about, 19)
    found = []
    for pieces in ([19], [1] * 19, [2, 14, 3]):
        states, at, out = filled(about, 2), 0, []
        for count in pieces:
            out.append(given(net, states, products[at : at + count], [(0, count, 0 if at else -1, 0)]))
            at += count
        found.append([np.concatenate(out), states.window[0].cpu().numpy(), states.heads[0].cpu().numpy()])
    for one in found[1:]:
        for ours, other in zip(one, found[0], strict=True):
            if kernels == "triton" and way == "one after another":
                np.testing.assert_array_equal(ours, other)
            assert np.abs(ours - other).max() <= 1e-5 * np.abs(other).max()


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_chunks_are_as_exact(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt whose tokens are much alike, with states that fade slowly, so that they grow."""
    if device == "cpu" and CUDA:
        pytest.skip("kernels are compiled for the GPU")
    from powerinfer.kernels import triton_mamba

    about, errors = Mamba2Config(2, 16, 1, 16, 2, norm="none"), []
    products = inputs(about, 70)
    products[:, about.width :] += 2 * floats(9, about.channels + about.n_heads)
    products[:, -about.n_heads :] -= 3
    monkeypatch.setattr(gpu, "_forced", [True])
    for chunked in (1 << 30, triton_mamba.CHUNKED):
        monkeypatch.setattr(triton_mamba, "CHUNKED", chunked)
        net, states = weights(about), filled(about, 1)
        exact = Exact(net, *(part[0].cpu().numpy().copy() for part in (states.window, states.heads)))
        wanted = exact.run(products)
        out = given(net, states, products, [(0, 70, 0, 0)])
        off = [out - wanted, states.heads[0].cpu().numpy() - exact.heads]
        errors.append([float(np.sqrt((one**2).mean())) for one in off])
    assert all(chunks <= 2 * alone for alone, chunks in zip(*errors, strict=True)), errors


def test_steps_that_are_extreme(kernels: str) -> None:  # noqa: F811
    """States that stay or are forgotten, exactly as softplus has them."""
    about = Mamba2Config(2, 16, 1, 16, 2, norm="none")
    for number in (-80.0, -20.0, 19.0, 21.0, 80.0):
        products = inputs(about, 1)
        products[:, -about.n_heads :] = number
        net, states = weights(about), filled(about, 1)
        exact = Exact(net, *(part[0].cpu().numpy().copy() for part in (states.window, states.heads)))
        wanted = exact.run(products)
        out = given(net, states, products, [(0, 1, 0, 0)])
        assert np.abs(out - wanted).max() <= 1e-5 * np.abs(wanted).max(), number
        assert np.abs(states.heads[0].cpu().numpy() - exact.heads).max() <= 1e-6 * np.abs(exact.heads).max()


def test_what_states_take() -> None:
    kinds = list(KINDS.values())
    for about, states in zip(kinds, gpu_states.new_states(kinds, 5, "cpu"), strict=True):
        assert states.nbytes == 5 * gpu_states.state_bytes(about)
        assert states.heads.shape == (5, about.n_heads, about.head_dim, about.state_dim)


# --- models, whose layers are one of Mamba2, an MLP or attention each


PATTERN = "M-*M"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = mamba_gguf(PATTERN).put("nemotron_h.context_length", U32, CONTEXT)
    return builder.write(tmp_path_factory.mktemp("mamba") / "m.gguf")


@pytest.fixture(params=[4, 3], ids=["all", "some"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """That many layers are on the GPU."""
    count: int = request.param
    whole = count == len(PATTERN)
    monkeypatch.setattr("powerinfer.placement.budget.layers_that_fit", lambda *_, **__: (count, whole))
    return count


@pytest.mark.usefixtures("device")
def test_answers_are_those_of_the_cpu(path: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, in chunks, with prefixes found again and states kept, on one device or on both."""
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
def test_an_aborted_request_harms_nobody(path: Path, layers: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = texts(3, 100)
    with LLM(path, threads=2, gpu=device_name(), context=CONTEXT, max_batch=2, prefill_chunk=32) as llm:
        assert llm.choices["gpu"].startswith(f"{layers} layers")
        expected = [llm.generate([one], params)[0].token_ids for one in prompts]
        for at in (1, 9):
            stream = llm.stream(prompts[0], params)
            for _ in range(at):
                next(stream)
            stream.close()
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected


def split(path: Path, count: int) -> Any:
    share = on_gpu(count, count == len(PATTERN))
    return opened(path, share, context=CONTEXT, max_batch=2, prefill_chunk=512)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.usefixtures("device")
def test_slots(path: Path, count: int) -> None:
    """A state that is read elsewhere stays; NaN stays in its sequence. Each device has the states of its layers."""
    checkpoint = open_checkpoint(path)
    planned = checkpoint_model(checkpoint)
    with split(path, count) as model:
        text = texts(1, 60)[0]
        whole = model.forward(step(text, 0, 0, 0)).copy()
        model.forward(step(text[:40], 0, 0, 3))
        for _ in range(2):
            ours = model.forward(step(text[40:], 40, 3, 1))
            assert np.abs(ours - whole).max() <= 1e-5 * np.abs(whole).max()
        for states in model.gpu._states.values():
            states.window[0], states.heads[0] = torch.nan, torch.nan
        assert np.isnan(model.forward(step(text[:1], 60, 0, 0))).all()
        np.testing.assert_array_equal(model.forward(step(text, 0, 0, 0)), whole)
        here = [kind for layer, kind in checkpoint.config.states.items() if layer < count]
        nbytes = sum(one.nbytes for one in model.gpu._states.values())
        assert nbytes == 5 * sum(map(gpu_states.state_bytes, here)) == planned.gpu_state_bytes(2, slice(count))
