"""Gated DeltaNet on a GPU: plain torch and the Triton kernels against float64, and models with layers on the stand-in
for a GPU against the CPU. Against `transformers`: test_gpu_layers.py, test_hybrid_experts.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import CUDA, device_name  # noqa: E402
from model_files import delta_gguf  # noqa: E402
from state_steps import CONTEXT, answers, step, texts  # noqa: E402
from test_gpu_kernels import TRITON, by_interpreter, floats, kernels, on_device  # noqa: E402, F401
from test_gpu_layers import on_gpu, opened  # noqa: E402

from benchmarks.models.gguf_writer import U32  # noqa: E402
from powerinfer import LLM, SamplingParams  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import ChannelDeltaConfig, DeltaNetConfig  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.kernels import gpu, gpu_delta, gpu_states  # noqa: E402
from powerinfer.kernels.gpu_types import States  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.runtime import state_cache  # noqa: E402

KINDS = {
    "in turn": DeltaNetConfig(2, 16, 4, 32, 4, tiled=True),
    "in groups": DeltaNetConfig(2, 32, 6, 16, 3),
    "odd sizes, long convolution": DeltaNetConfig(1, 48, 3, 80, 8),
    "no groups, short convolution": DeltaNetConfig(3, 16, 3, 16, 2, tiled=True, activation="relu2"),
    "decays of channels": ChannelDeltaConfig(3, 48, 3, 48, 4),
}


def weights(about: DeltaNetConfig) -> gpu_delta.DeltaNet:
    heads = about.n_value_heads
    decay = -np.exp(floats(3, heads) - 2)
    taps = floats(1, about.taps, about.channels) / about.taps**0.5
    vectors = (taps, decay, floats(4, about.decays), 1 + floats(5, about.value_dim) / 4)
    return gpu_delta.DeltaNet(about, *map(on_device, vectors), 1e-5)


class Exact:
    """The layer in float64, a token of a sequence at a time, as the paper and csrc/delta_net.cpp have it."""

    def __init__(self, net: gpu_delta.DeltaNet, window: np.ndarray, heads: np.ndarray) -> None:
        self.about = net.about
        self.taps, self.decay, self.dt_bias, self.norm = (
            one.cpu().numpy().astype(np.float64) for one in (net.taps, net.decay, net.dt_bias, net.norm)
        )
        self.eps = net.eps
        self.window, self.heads = window.astype(np.float64), heads.astype(np.float64)

    def step(self, row: np.ndarray) -> np.ndarray:
        about = self.about
        keys, n = about.n_key_heads * about.key_dim, about.n_value_heads
        mixed, gate, beta, alpha = np.split(row.astype(np.float64), np.cumsum([about.channels, about.width, n]))
        inputs = np.concatenate([self.window, mixed[None]])
        self.window = inputs[1:]
        x = (self.taps * inputs).sum(axis=0)
        x = {"silu": lambda: x / (1 + np.exp(-x)), "relu2": lambda: np.maximum(x, 0) ** 2}[about.activation]()
        q, k, v = np.split(x, [keys, 2 * keys])
        q, k = (part.reshape(about.n_key_heads, -1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(axis=1, keepdims=True) + 1e-6) for part in (q, k))
        out = np.empty((n, about.value_dim))
        for h in range(n):
            own = h % about.n_key_heads if about.tiled else h // (n // about.n_key_heads)
            steps = np.log1p(np.exp(alpha + self.dt_bias)).reshape(n, -1)  # of a head, or of its channels
            state = self.heads[h] * np.exp(self.decay[h] * steps[h])
            new = v.reshape(n, -1)[h] - state @ k[own]
            state = state + np.outer(new, k[own]) / (1 + np.exp(-beta[h]))
            self.heads[h] = state
            out[h] = state @ q[own] / about.key_dim**0.5
        out /= np.sqrt((out**2).mean(axis=1, keepdims=True) + self.eps)
        return (out * self.norm).reshape(-1) * (1 if about.channel_decays else gate) / (1 + np.exp(-gate))


def filled(about: DeltaNetConfig, slots: int) -> States:
    """Slots with states of some sequences, one of which holds no numbers."""
    (states,) = gpu_states.new_states([about], slots, device_name())
    states.window.copy_(on_device(floats(6, *states.window.shape)))
    states.heads.copy_(on_device(floats(7, *states.heads.shape)))
    if slots > 1:
        states.window[1], states.heads[1] = torch.nan, torch.nan
    return states


# Of each sequence: tokens, slot read (negative: none), slot written. The first has none: its slots do not count.
STEPS = {
    "one token": [(1, 2, 2)],
    "one token of several": [(1, 0, 0), (1, -1, 1), (1, 3, 2), (1, 4, 4)],
    "prompts": [(0, 77, -5), (5, 2, 0), (1, -1, 1), (2, 4, 4), (0, 1, 0), (19, -1, 3)],
}


@pytest.fixture(params=["one after another", "in chunks"])
def way(request: pytest.FixtureRequest, kernels: str, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """How Triton goes through the tokens of a sequence."""
    if kernels == "torch" and request.param == "in chunks":
        pytest.skip("there is one way in torch")
    if kernels == "triton":
        from powerinfer.kernels import triton_delta

        monkeypatch.setattr(triton_delta, "CHUNKED", 1 if request.param == "in chunks" else 1 << 30)
    return str(request.param)


INTERPRETED = {
    "one after another": {
        "in turn": set(STEPS),
        "in groups": {"one token of several"},
        "odd sizes, long convolution": {"prompts"},
        "no groups, short convolution": {"one token"},
        "decays of channels": {"one token of several", "prompts"},
    },
    "in chunks": {
        "in turn": {"one token of several", "prompts"},
        "in groups": {"prompts"},
        "odd sizes, long convolution": {"prompts"},
        "no groups, short convolution": {"one token"},
        "decays of channels": set(),
    },
}
"""The steps of each kind in Triton's interpreter: how sequences lie depends on no size of a layer."""


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
    counts = np.array([count for count, _, _ in step])
    tokens, rows = int(counts.sum()), np.repeat(np.arange(len(step), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    runs = np.array([(at, *one) for at, one in zip(first, step, strict=True)], np.int32)
    products = floats(2, tokens, about.channels + about.width + about.n_value_heads + about.decays)
    before = [part.cpu().numpy().copy() for part in (states.window, states.heads)]
    out = gpu_delta.delta_net(net, on_device(products), states, on_device(runs), on_device(rows)).cpu().numpy()
    after = [part.cpu().numpy() for part in (states.window, states.heads)]
    for at, (count, read, write) in zip(first, step, strict=True):
        if not count:
            continue
        begin = [np.zeros_like(part[0]) if read < 0 else part[read] for part in before]
        exact = Exact(net, *begin)
        wanted = np.stack([exact.step(row) for row in products[at : at + count]])
        assert np.abs(out[at : at + count] - wanted).max() <= 2e-5 * np.abs(wanted).max()
        np.testing.assert_array_equal(after[0][write], exact.window.astype(np.float32))
        assert np.abs(after[1][write] - exact.heads).max() <= 2e-5 * np.abs(exact.heads).max()
    written = {write for count, _, write in step if count}
    for slot in set(range(6)) - written:
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old[slot], new[slot])


@pytest.mark.parametrize("about", [KINDS["in turn"], KINDS["odd sizes, long convolution"]], ids=["tiled", "odd sizes"])
def test_a_text_in_pieces(kernels: str, way: str, about: DeltaNetConfig) -> None:  # noqa: F811
    """The same bits in Triton, one token after another; torch rounds functions by where in a tensor a number is."""
    if by_interpreter() and (about is KINDS["in turn"]) == (way == "in chunks"):
        pytest.skip("the interpreter goes through each way with one kind")
    net, products = weights(about), floats(8, 7, about.channels + about.width + 2 * about.n_value_heads)
    given = []
    for pieces in ([7], [1] * 7, [2, 1, 4]):
        states, at, out = filled(about, 2), 0, []
        for count in pieces:
            runs = np.array([[0, count, -1 if at == 0 else 0, 0]], np.int32)
            rows, x = np.zeros(count, np.int32), products[at : at + count]
            out.append(gpu_delta.delta_net(net, on_device(x), states, on_device(runs), on_device(rows)).cpu().numpy())
            at += count
        given.append([np.concatenate(out), states.window[0].cpu().numpy(), states.heads[0].cpu().numpy()])
    for one in given[1:]:
        for own, other in zip(one, given[0], strict=True):
            if kernels == "triton" and way == "one after another":
                np.testing.assert_array_equal(own, other)
            assert np.abs(own - other).max() <= 1e-5 * np.abs(other).max()


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_chunks_are_as_exact(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt whose keys are much alike, so that tokens correct each other, with states that fade slowly."""
    if device == "cpu" and CUDA:
        pytest.skip("kernels are compiled for the GPU")
    from powerinfer.kernels import triton_delta

    about, errors = KINDS["no groups, short convolution"], []
    keys, heads = about.n_key_heads * about.key_dim, about.n_value_heads
    products = floats(2, 38, about.channels + about.width + 2 * heads)
    products[:, : 2 * keys] += 3 * floats(9, 2 * keys)
    products[:, -2 * heads :] += np.repeat(np.array([3, -6], np.float32), heads)  # beta, alpha
    runs, rows = np.array([[0, 38, 0, 0]], np.int32), np.zeros(38, np.int32)
    monkeypatch.setattr(gpu, "_forced", [True])
    for chunked in (1 << 30, triton_delta.CHUNKED):
        monkeypatch.setattr(triton_delta, "CHUNKED", chunked)
        net, states = weights(about), filled(about, 1)
        exact = Exact(net, *(part[0].cpu().numpy().copy() for part in (states.window, states.heads)))
        wanted = np.stack([exact.step(row) for row in products])
        out = gpu_delta.delta_net(net, on_device(products), states, on_device(runs), on_device(rows)).cpu().numpy()
        off = [out - wanted, states.heads[0].cpu().numpy() - exact.heads]
        errors.append([float(np.sqrt((one**2).mean())) for one in off])
    assert all(chunks <= 2 * alone for alone, chunks in zip(*errors, strict=True)), errors


def test_gates_that_are_extreme(kernels: str) -> None:  # noqa: F811
    """A decay of nearly one and of zero, exactly as the logarithm and the sigmoid have them."""
    about = replace(KINDS["in turn"], tiled=False)
    net = weights(about)
    for alpha in (-80.0, -20.0, 0.0, 19.0, 21.0, 80.0):
        products = floats(9, 1, about.channels + about.width + 2 * about.n_value_heads)
        products[:, -about.n_value_heads :] = alpha
        products[:, -2 * about.n_value_heads : -about.n_value_heads] = -alpha
        states = filled(about, 1)
        exact = Exact(net, *(part[0].cpu().numpy() for part in (states.window, states.heads)))
        wanted = exact.step(products[0])
        runs, rows = np.array([[0, 1, 0, 0]], np.int32), np.zeros(1, np.int32)
        out = gpu_delta.delta_net(net, on_device(products), states, on_device(runs), on_device(rows)).cpu().numpy()
        assert np.abs(out[0] - wanted).max() <= 1e-5 * np.abs(wanted).max(), alpha
        assert np.abs(states.heads[0].cpu().numpy() - exact.heads).max() <= 1e-6 * np.abs(exact.heads).max()


def test_what_states_take() -> None:
    for about in KINDS.values():
        (states,) = gpu_states.new_states([about], 3, "cpu")
        assert states.nbytes == 3 * gpu_states.state_bytes(about)
    both = gpu_states.new_states(list(KINDS.values()), 5, "cpu")
    assert [one.nbytes for one in both] == [5 * gpu_states.state_bytes(about) for about in KINDS.values()]


# --- models


LAYERS = 4
"""Two of Gated DeltaNet and two of gated attention, in turn."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = delta_gguf(layers=LAYERS).put("qwen35.context_length", U32, CONTEXT)
    return builder.write(tmp_path_factory.mktemp("delta") / "d.gguf")


@pytest.fixture(params=[LAYERS, 2], ids=["all", "half"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """That many layers are on the GPU."""
    found: int = request.param
    monkeypatch.setattr("powerinfer.placement.budget.layers_that_fit", lambda *_, **__: (found, found == LAYERS))
    return found


@pytest.mark.usefixtures("device")
def test_answers_are_those_of_the_cpu(path: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, in chunks, with prefixes found again and states kept, on one device or on both."""
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    system = texts(1, 200)[0]
    prompts = [system + one for one in texts(2, 20)] + texts(2, 50) + [system[:100]]
    alone = answers(path, prompts)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts), "the answers are not all alike"
    for options in ({"max_batch": 8}, {"max_batch": 3, "prefill_chunk": 48, "mixed_chunk": 5}):
        beside = answers(path, prompts, 2, gpu=device_name(), **options)
        for (tokens, logprobs), (wanted, exact) in zip(beside, alone, strict=True):
            assert tokens == wanted
            np.testing.assert_allclose(logprobs, exact, atol=2e-3)  # the cache is of F16


@pytest.mark.usefixtures("device")
def test_a_prefix_is_not_computed_again(path: Path, layers: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    base = texts(1, 200)[0]
    with LLM(path, threads=1, gpu=device_name(), context=CONTEXT) as llm:
        assert llm.choices["gpu"].startswith(f"{layers} layers")
        first = llm.generate([base], params)[0]
        again = llm.generate([[*base, *first.token_ids, 1, 2, 3]], params)[0]
        assert (first.cached_tokens, again.cached_tokens) == (0, 192)
    with LLM(path, threads=1, gpu="none", context=CONTEXT) as llm:
        assert llm.generate([[*base, *first.token_ids, 1, 2, 3]], params)[0].token_ids == again.token_ids


@pytest.mark.usefixtures("device")
def test_an_aborted_request_harms_nobody(path: Path, layers: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    prompts = texts(3, 100)
    with LLM(path, threads=2, gpu=device_name(), context=CONTEXT, max_batch=2, prefill_chunk=32) as llm:
        expected = [llm.generate([one], params)[0].token_ids for one in prompts]
        for at in (1, 33):
            stream = llm.stream(prompts[0], params)
            for _ in range(at):
                next(stream)
            stream.close()
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected


@pytest.mark.usefixtures("device")
def test_scores_and_embeddings(path: Path, layers: int) -> None:
    text, found = texts(1, 150)[0], []
    for name in ("none", device_name()):
        rows: list[np.ndarray] = []
        with LLM(path, gpu=name, context=CONTEXT, threads=1) as llm:
            llm.score(text, 30, lambda _, logits, rows=rows: rows.append(logits.copy()), step=7)
            found.append((np.concatenate(rows), llm.embed([text, text[:50]])))
    for ours, exact in zip(*found, strict=True):
        assert np.abs(ours - exact).max() <= 2e-3 * np.abs(exact).max()


@pytest.mark.usefixtures("device")
def test_the_program_runs_them_beside_a_gpu(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", "-m", str(path), "-n", "8", "-t", "2", "--temperature", "0", "--raw", "a"]
    said = []
    for name in (device_name(), "none"):
        assert main([*given, "--gpu", name]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@contextmanager
def split(path: Path, layers: int = LAYERS, **options: Any) -> Iterator[SplitExecutor]:
    share = on_gpu(layers, layers == LAYERS)
    with opened(path, share, **{"context": CONTEXT, "max_batch": 2, "prefill_chunk": 512} | options) as executor:
        yield executor


@pytest.mark.parametrize("count", [1, 3, LAYERS])
@pytest.mark.usefixtures("device")
def test_slots(path: Path, count: int) -> None:
    """A state that is read elsewhere stays; one of other tokens is refused, and so are slots that there are not."""
    with split(path, count) as model:
        text = texts(1, 60)[0]
        whole = model.forward(step(text, 0, 0, 0)).copy()
        model.forward(step(text[:40], 0, 0, 3))
        for _ in range(3):
            ours = model.forward(step(text[40:], 40, 3, 1))
            assert np.abs(ours - whole).max() <= 1e-5 * np.abs(whole).max()
        for given in (step(text[41:], 41, 3, 0), step(text[40:], 40, 1, 1)):
            with pytest.raises(RuntimeError, match="not that of the tokens before"):
                model.forward(given)
        for read, write in ((3, 99), (3, -1), (77, 0)):
            with pytest.raises((ValueError, IndexError)):
                model.forward(step(text[40:], 40, read, write))
        np.testing.assert_array_equal(model.forward(step(text[40:], 40, 3, 2)), ours)


@pytest.mark.parametrize("count", [1, LAYERS])
@pytest.mark.usefixtures("device")
def test_two_sequences_cannot_have_one_state(path: Path, count: int) -> None:
    with split(path, count) as model:
        given = step(texts(1, 2)[0], 0, 0, 0)
        rows, zero, pages = np.arange(2, dtype=np.int32), np.zeros(2, np.int32), given.page_table.reshape(2, -1)
        both = replace(given, rows=rows, positions=zero, page_table=np.ascontiguousarray(pages))
        with pytest.raises(ValueError, match="two sequences write"):
            model.forward(replace(both, read_states=zero, states=zero))
        model.forward(replace(both, read_states=zero, states=rows))
        later = replace(both, positions=zero + 1, states=rows + 1)
        with pytest.raises(ValueError, match="reads a state that another one writes"):
            model.forward(replace(later, read_states=rows))


@pytest.mark.parametrize("count", [1, LAYERS])
@pytest.mark.usefixtures("device")
def test_a_step_that_fails_leaves_no_state(path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with split(path, count) as model:
        text = texts(1, 60)[0]
        whole = model.forward(step(text, 0, 0, 0)).copy()
        model.forward(step(text[:40], 0, 0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(gpu_delta, "delta_net", full)
            with pytest.raises(PowerInferError, match="ran out of memory"):
                model.forward(step(text[40:50], 40, 1, 1))
        with pytest.raises(RuntimeError, match="not that of the tokens before"):
            model.forward(step(text[40:], 40, 1, 1))
        np.testing.assert_array_equal(model.forward(step(text, 0, 1, 1)), whole)


@pytest.mark.usefixtures("device")
def test_numbers_that_are_none_stay_in_their_sequence(path: Path) -> None:
    with split(path) as model:
        text = texts(1, 40)[0]
        whole = model.forward(step(text, 0, 0, 0)).copy()
        for states in model.gpu._states.values():
            states.window[0], states.heads[0] = torch.nan, torch.nan
        assert np.isnan(model.forward(step(text[:1], 40, 0, 0))).all()
        np.testing.assert_array_equal(model.forward(step(text, 0, 0, 0)), whole)


@pytest.mark.parametrize("count", [1, 3, LAYERS])
@pytest.mark.usefixtures("device")
def test_each_device_has_the_states_of_its_layers(path: Path, count: int) -> None:
    checkpoint = open_checkpoint(path)
    config, planned = checkpoint.config, checkpoint_model(checkpoint)
    with split(path, count) as model:
        assert model.n_states == 5 and list(model.gpu._states) == [layer for layer in config.states if layer < count]
        here = [kind for layer, kind in config.states.items() if layer < count]
        assert sum(one.nbytes for one in model.gpu._states.values()) == 5 * sum(map(gpu_states.state_bytes, here))
        assert model.cpu._states is not None
        assert 5 * model.cpu._states.native.slot_bytes == planned.state_bytes(2, slice(count, None))
        assert planned.gpu_state_bytes(2, slice(count)) + planned.state_bytes(2, slice(count, None)) > 0
        assert planned.gpu_state_bytes(2, slice(count)) == 5 * sum(map(gpu_states.state_bytes, here))
