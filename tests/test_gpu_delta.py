"""Gated DeltaNet on a GPU: plain torch and the Triton kernels against float64, and models with layers on the stand-in
for a GPU against the CPU. Against `transformers`: test_gpu_layers.py, test_hybrid_experts.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_gpu_kernels import DEVICE, floats, kernels, on_device  # noqa: E402, F401

from powerinfer.config import DeltaNetConfig  # noqa: E402
from powerinfer.kernels import gpu_delta  # noqa: E402

KINDS = {
    "in turn": DeltaNetConfig(2, 16, 4, 32, 4, tiled=True),
    "in groups": DeltaNetConfig(2, 32, 6, 16, 3),
    "odd sizes, long convolution": DeltaNetConfig(1, 48, 3, 80, 8),
    "no groups, short convolution": DeltaNetConfig(3, 16, 3, 16, 2, tiled=True),
}


def weights(about: DeltaNetConfig) -> gpu_delta.DeltaNet:
    heads = about.n_value_heads
    decay = -np.exp(floats(3, heads) - 2)
    taps = floats(1, about.taps, about.channels) / about.taps**0.5
    vectors = (taps, decay, floats(4, heads), 1 + floats(5, about.value_dim) / 4)
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
        x /= 1 + np.exp(-x)
        q, k, v = np.split(x, [keys, 2 * keys])
        q, k = (part.reshape(about.n_key_heads, -1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(axis=1, keepdims=True) + 1e-6) for part in (q, k))
        out = np.empty((n, about.value_dim))
        for h in range(n):
            own = h % about.n_key_heads if about.tiled else h // (n // about.n_key_heads)
            state = self.heads[h] * np.exp(self.decay[h] * np.log1p(np.exp(alpha[h] + self.dt_bias[h])))
            new = v.reshape(n, -1)[h] - state @ k[own]
            state = state + np.outer(new, k[own]) / (1 + np.exp(-beta[h]))
            self.heads[h] = state
            out[h] = state @ q[own] / about.key_dim**0.5
        out /= np.sqrt((out**2).mean(axis=1, keepdims=True) + self.eps)
        return (out * self.norm).reshape(-1) * gate / (1 + np.exp(-gate))


def filled(about: DeltaNetConfig, slots: int) -> gpu_delta.States:
    """Slots with states of some sequences, one of which holds no numbers."""
    (states,) = gpu_delta.new_states([about], slots, DEVICE)
    states.window.copy_(on_device(floats(6, *states.window.shape)))
    states.heads.copy_(on_device(floats(7, *states.heads.shape)))
    if slots > 1:
        states.window[1], states.heads[1] = torch.nan, torch.nan
    return states


# Of each sequence: tokens, slot read (negative: none), slot written. The first has none: its slots do not count.
STEPS = {
    "one token": [(1, 2, 2)],
    "one token of several": [(1, 0, 0), (1, -1, 1), (1, 3, 2), (1, 4, 4)],
    "prompts": [(0, 77, -5), (5, 2, 0), (1, -1, 1), (2, 4, 4), (0, 1, 0), (11, -1, 3)],
}


@pytest.mark.parametrize("about", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step(kernels: str, about: DeltaNetConfig, step: list[tuple[int, int, int]]) -> None:  # noqa: F811
    """What sequences get, and their new states, wherever they are; the states of others stay."""
    net, states = weights(about), filled(about, 6)
    counts = np.array([count for count, _, _ in step])
    tokens, rows = int(counts.sum()), np.repeat(np.arange(len(step), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    runs = np.array([(at, *one) for at, one in zip(first, step, strict=True)], np.int32)
    products = floats(2, tokens, about.channels + about.width + 2 * about.n_value_heads)
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


@pytest.mark.parametrize("about", KINDS.values(), ids=KINDS)
def test_a_text_in_pieces(kernels: str, about: DeltaNetConfig) -> None:  # noqa: F811
    """The same bits in Triton; torch rounds functions by where in a tensor a number is."""
    net, products = weights(about), floats(8, 12, about.channels + about.width + 2 * about.n_value_heads)
    given = []
    for pieces in ([12], [1] * 12, [2, 1, 5, 4]):
        states, at, out = filled(about, 2), 0, []
        for count in pieces:
            runs = np.array([[0, count, -1 if at == 0 else 0, 0]], np.int32)
            rows, x = np.zeros(count, np.int32), products[at : at + count]
            out.append(gpu_delta.delta_net(net, on_device(x), states, on_device(runs), on_device(rows)).cpu().numpy())
            at += count
        given.append([np.concatenate(out), states.window[0].cpu().numpy(), states.heads[0].cpu().numpy()])
    for one in given[1:]:
        for own, other in zip(one, given[0], strict=True):
            if kernels == "triton":
                np.testing.assert_array_equal(own, other)
            assert np.abs(own - other).max() <= 1e-5 * np.abs(other).max()


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
        (states,) = gpu_delta.new_states([about], 3, "cpu")
        assert states.nbytes == 3 * gpu_delta.state_bytes(about)
    both = gpu_delta.new_states(list(KINDS.values()), 5, "cpu")
    assert [one.nbytes for one in both] == [5 * gpu_delta.state_bytes(about) for about in KINDS.values()]
