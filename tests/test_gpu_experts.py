"""Experts on a GPU: the router and the sum against float64, in plain torch and in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import EPS, device_name
from stored_weights import stored_evenly
from test_gpu_kernels import by_interpreter, floats, is_settled, kernels, on_device, skip_twins, unanswered  # noqa: F401

from powerinfer import _native
from powerinfer.config import ExpertsConfig, RouterConfig
from powerinfer.formats.quant import Float32
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu, gpu_experts
from powerinfer.kernels.gpu_types import Elsewhere

N, TOP = 12, 3
ROUTERS = {
    "softmax": RouterConfig(TOP, normalise=False),
    "normalised": RouterConfig(TOP, scale=2.5),
    "all": RouterConfig(N),
    "sigmoid": RouterConfig(TOP, scoring="sigmoid", normalise=False, scale=1.5),
    "correction": RouterConfig(TOP, scoring="sigmoid", correction=True),
    "groups": RouterConfig(2, groups=4, top_groups=2),
    "sparsemixer": RouterConfig(2, scoring="sparsemixer", normalise=False, nearness=0.1),
    "groups by two": RouterConfig(4, scoring="sigmoid", correction=True, groups=3, top_groups=2, group_best=2),
    "factors": RouterConfig(TOP, factors=True),
    "scaled inputs": RouterConfig(1, scoring="sigmoid", normalise=False, scales_input=True),
}


def routed(about: RouterConfig, logits: Float32, correction: Float32 | None) -> tuple[np.ndarray, np.ndarray]:
    """As on the GPU."""
    tokens = len(logits)
    experts = torch.full((tokens, about.top_k), -7, dtype=torch.int32, device=device_name())
    weights = torch.empty((tokens, about.top_k), device=device_name())
    own, sent = None if correction is None else on_device(correction), (experts.clone(), weights.clone())
    table = on_device(np.arange(N, dtype=np.int32) - 2)
    for elsewhere in (table, table + 2):
        answer = unanswered(experts.device)
        gpu_experts.route(on_device(logits), about, own, experts, weights, sent, Elsewhere(elsewhere, answer))
        assert is_settled(answer, int((elsewhere[experts.long()] < 0).sum()))
    for one, own in zip(sent, (experts, weights), strict=True):
        np.testing.assert_array_equal(one.cpu(), own.cpu(), "the host gets the same")
    return experts.cpu().numpy(), weights.cpu().numpy()


@pytest.mark.parametrize("about", ROUTERS.values(), ids=ROUTERS)
def test_the_router_is_that_of_the_cpu(kernels: str, about: RouterConfig) -> None:  # noqa: F811
    correction = floats(3, N) if about.correction else None
    logits = 2 * floats(4, 40, N)
    experts, weights = routed(about, logits, correction)
    factors = floats(5, N) if about.factors else None
    if factors is not None:
        weights = weights * factors[experts]  # as `HybridExperts` does behind it
    settings: dict[str, Any] = asdict(about) | {"correction": correction, "bias": None, "factors": factors}
    native = _native.RouterSpec(**settings)
    for row, own, by in zip(logits, experts, weights, strict=True):
        expected, exact = _native.route(native, row)
        assert own.tolist() == expected
        np.testing.assert_allclose(by, exact, rtol=1e-5)


@pytest.mark.parametrize("about", ROUTERS.values(), ids=ROUTERS)
def test_experts_of_one_token_are_selected_by_one_kernel(kernels: str, about: RouterConfig) -> None:  # noqa: F811
    """Again and again, by whichever program finishes last; as from the router's logits."""
    correction = floats(3, N) if about.correction else None
    bias = floats(12, N) if about.groups > 1 else None
    stored = RawTensor("F32", (N, 64), floats(10, N, 64).view(np.uint8).reshape(-1))
    router = gpu_experts.upload_router(stored, bias, correction, about, device_name())
    assert router.nbytes == 4 * (N * 64 + 1 + N * (bias is not None) + N * (correction is not None))
    for seed in (13, 14):
        x = on_device(floats(seed, 1, 64))
        logits = gpu.linear(router.weight, x, router.bias).cpu().numpy()
        expected, exact = routed(about, logits, correction)
        experts = torch.full((1, about.top_k), -7, dtype=torch.int32, device=device_name())
        weights = torch.empty((1, about.top_k), device=device_name())
        sent = experts.clone(), weights.clone()
        table, answer = on_device(np.arange(N, dtype=np.int32) - seed % 2 * N // 2), unanswered(x.device)
        gpu_experts.select(router, x, experts, weights, sent, Elsewhere(table, answer))
        assert is_settled(answer, int((table[experts.long()] < 0).sum()))
        assert torch.equal(sent[0], experts) and torch.equal(sent[1], weights), "the host gets the same"
        np.testing.assert_array_equal(experts.cpu().numpy(), expected)
        np.testing.assert_allclose(weights.cpu().numpy(), exact, rtol=1e-6)
        assert not router.arrived.any()


@pytest.mark.parametrize("about", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_whatever_the_logits_are_experts_are_valid(kernels: str, about: RouterConfig, number: float) -> None:  # noqa: F811
    correction = floats(3, N) if about.correction else None
    logits = floats(5, 3, N)
    logits[0, 4], logits[1], logits[2, 1:] = number, number, number
    experts, _ = routed(about, logits, correction)
    assert ((experts >= 0) & (experts < N)).all()
    assert (np.diff(experts, axis=1) > 0).all()


def some_experts(kind: str, d: int, size: int, gated: bool, activation: str) -> tuple[ExpertsConfig, list[RawTensor]]:
    about = ExpertsConfig(N, size, RouterConfig(TOP), activation, 0.1 if activation == "fatrelu" else 0.0, gated)
    rng = np.random.default_rng([d, size])
    shapes = [(d, size) if name == "down" else (size, d) for name in about.matrices]
    return about, [
        RawTensor(kind, (N, *shape), stored_evenly(kind, N * shape[0], shape[1], shape[1] ** -0.5, rng))
        for shape in shapes
    ]


def some_biases(tensors: list[RawTensor]) -> list[Float32]:
    return [3 * floats(at, *tensor.shape[:2]) for at, tensor in enumerate(tensors)]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Triton's kernels, which are of float32, are not used within this context."""
    before = gpu._forced[0]
    gpu.force_triton(False)
    try:
        yield
    finally:
        gpu.force_triton(before)


def exact_sum(
    about: ExpertsConfig, tensors: list[RawTensor], x: Float32, experts: np.ndarray, weights: Float32, biases: Any
) -> tuple[np.ndarray, float]:
    """float64 [T, d_model] of the experts that are not negative, and a bound of a float32 sum's error."""
    values = [tensor.float32().astype(np.float64) for tensor in tensors]
    out, most = np.zeros(x.shape), 0.0
    for i, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(experts[i], weights[i], strict=True):
            if expert < 0:
                continue
            *gate, up, down = (one[expert] for one in values)
            read, weight = (weight * row, 1.0) if about.router.scales_input else (row, weight)
            *of_gate, of_up, of_down = (np.float64(0) if bias is None else bias[expert] for bias in biases)
            second = torch.from_numpy(up @ read + of_up)
            first = torch.from_numpy(gate[0] @ read + of_gate[0]) if gate else second
            with plain_torch():
                h = gpu.activate(about.activation, first, second if gate else None, about.threshold).numpy()
            out[i] += weight * (down @ h + of_down)
            most = max(most, float((np.abs(down) @ np.abs(weight * h)).max()))
    return out, most


OF_MANY = ("F32", True), ("Q4_0", True)
"""Kinds of which the interpreter multiplies many tokens: how these are sorted depends on none."""


@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
@pytest.mark.parametrize(
    ("kind", "gated", "activation"),
    [
        ("F32", True, "silu"), ("F16", True, "drelu"), ("BF16", False, "relu2"), ("Q8_0", True, "fatrelu"),
        ("Q4_0", True, "silu"), ("Q4_0", False, "gelu_tanh"), ("MXFP4", True, "swiglu_oai"), ("F32", False, "relu"),
        ("Q4_K", True, "silu"), ("Q5_K", False, "gelu_tanh"), ("Q6_K", True, "silu"),
    ],
)  # fmt: skip
def test_the_sum_of_the_experts_that_are_here(
    kernels: str,  # noqa: F811
    kind: str,
    gated: bool,
    activation: str,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = tokens == 2 and kind not in ("Q8_0", "Q4_0", "Q6_K")  # as 9 are multiplied, or as Q6_K's are
    # Of F32, of Q6_K's many codes, and of Q4_0 with gates
    twin = tokens > 1 and (kind in ("BF16", "Q5_K") or (kind == "Q4_0" and not gated))
    skip_twins(kind, kind == "BF16")
    if by_interpreter() and (several or twin or (tokens > 9 and (kind, gated) not in OF_MANY)):
        pytest.skip("the interpreter goes through every kernel and type with other numbers of tokens")
    if kernels == "triton" and tokens > 9:
        from powerinfer.kernels import triton_experts, triton_prompt_experts

        monkeypatch.setattr(triton_prompt_experts, "TOKENS", 34)
        monkeypatch.setattr(triton_experts, "PAIRS", 16)
        monkeypatch.setattr(triton_experts, "COMPARED", 32)
        monkeypatch.setattr(triton_experts, "MOST_COLUMNS", 16)
    d, size = (256, 256) if kind in gpu.K_CODES else (64, 96)
    if kernels == "triton" and kind in gpu.K_CODES:  # fewer programs, each of which takes milliseconds here
        from powerinfer.kernels import triton_kernels

        for tiles in (triton_kernels.ONE, triton_kernels.WIDE):
            monkeypatch.setitem(tiles, kind, tiles[kind]._replace(rows=128))
    about, tensors = some_experts(kind, d, size, gated, activation)
    about = replace(about, router=replace(about.router, scales_input=kind in ("F32", "Q4_K") and gated))
    index = np.array([0, 3, 4, 8, 11], np.int32)
    biases = some_biases(tensors) if activation in ("swiglu_oai", "relu") else [None] * len(tensors)
    experts = gpu_experts.resident(tensors, index, about, device_name(), biases)
    each = sum(gpu.weight_bytes(one.type, *one.shape[1:]) for one in tensors)
    assert experts.slots == 5
    assert experts.nbytes == 5 * (each + sum(bias[0].nbytes for bias in biases if bias is not None))
    x, weights = floats(6, tokens, d), np.abs(floats(7, tokens, TOP))
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1)
    places = np.full(N, -1, np.int32)
    places[index] = np.arange(len(index))
    slots = places[selected]
    assert (slots < 0).any() and (slots >= 0).any()
    found = gpu_experts.expert_sum(experts, on_device(x), on_device(slots), on_device(weights)).cpu().numpy()
    exact, most = exact_sum(about, tensors, x, np.where(slots < 0, -1, selected), weights, biases)
    assert np.abs(found - exact).max() <= 40 * (d + size) * EPS * most
    other, _ = exact_sum(about, tensors, x, selected, weights, biases)
    assert np.abs(other - exact).max() > 0.01 * most, "an expert that is not here would be noticed"
    to = on_device(floats(9, tokens, d))
    grown = (to + on_device(found)).cpu().numpy()
    given = on_device(selected.astype(np.int32)), on_device(weights), on_device(places)  # by the experts' numbers
    assert gpu_experts.expert_sum(experts, on_device(x), *given, to) is to
    np.testing.assert_array_equal(to.cpu().numpy(), grown)  # the same bits as if it were added afterwards


@pytest.mark.parametrize(("kind", "by_neuron"), [("Q4_0", False), ("F16", True), ("BF16", False), ("Q6_K", False)])
def test_prompts_are_as_exact_as_dense_ones(
    kernels: str, kind: str, by_neuron: bool, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """In the narrow types in which a GPU multiplies many tokens: errors against float64 as of dense FFNs there. A token
    with numbers beyond float16 spoils no other; slots without an expert and pairs without a slot add nothing."""
    if kernels == "torch" or (by_interpreter() and kind == "Q6_K"):
        pytest.skip("plain torch sums experts in float32, and the interpreter takes long for K-quants")
    from powerinfer.kernels import triton_experts, triton_prompt_experts

    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    for module, name, value in ((triton_prompt_experts, "TOKENS", 34), (triton_experts, "MOST_COLUMNS", 16)):
        monkeypatch.setattr(module, name, value)
    tokens, (d, size) = 40, (256, 256) if kind in gpu.K_CODES else (64, 96)
    about, tensors = some_experts(kind, d, size, True, "drelu" if by_neuron else "silu")
    x, weights = floats(6, tokens, d), np.abs(floats(7, tokens, TOP))
    x[3] *= 1e6 if by_neuron else 10  # of silu the interpreter warns
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1).astype(np.int32)
    index = np.array([0, 3, 4, 8, 11], np.int32)
    experts = gpu_experts.resident(tensors, index, about, device_name(), by_neuron=by_neuron)
    table, members = np.full(N, -1, np.int32), index.copy()
    table[index] = np.arange(len(index))
    table[8], members[3] = -1, -1  # its slot is being exchanged
    there = table[selected] >= 0
    routed = gpu_experts.Routed(on_device(x), on_device(selected), on_device(weights), N)
    total = torch.zeros_like(routed.x)
    gpu_experts.add_some([(experts, on_device(table), on_device(members))], routed, total)
    exact, _ = exact_sum(about, tensors, x, np.where(there, selected, -1), weights, [None] * 3)
    dense = np.zeros_like(exact)
    for expert in index:
        gate, up, down = (gpu.upload(one.matrix(int(expert)), device_name()) for one in tensors)
        rows = gpu.activations_of(on_device(x))
        h = gpu.activate(about.activation, gpu.linear(gate, rows), gpu.linear(up, rows))
        weight = (weights * ((selected == expert) & there)).sum(axis=1, keepdims=True)
        dense += weight * gpu.linear(down, h).double().cpu().numpy()
    size_of = np.abs(exact).max(axis=1, keepdims=True) + 1e-30
    errors = [np.sqrt(np.square((one - exact) / size_of).mean()) for one in (total.double().cpu().numpy(), dense)]
    assert 1e-6 < errors[0] <= 1.2 * errors[1] < 0.02, errors


def test_pairs_are_ordered_once(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """For all pieces of a layer's experts, whose sums are those of all at once but for their rounding."""
    from powerinfer.kernels import triton_prompt_experts

    ordered, real = [], triton_prompt_experts.order
    monkeypatch.setattr(triton_prompt_experts, "order", lambda *given: (ordered.append(1), real(*given))[1])
    tokens, d, size = 40, 64, 64
    about, tensors = some_experts("F16", d, size, True, "silu")
    x, weights = on_device(floats(6, tokens, d)), on_device(np.abs(floats(7, tokens, TOP)))
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1).astype(np.int32)
    routed = gpu_experts.Routed(x, on_device(selected), weights, N)
    totals, two = list[torch.Tensor](), [np.arange(7), np.arange(7, N)]
    for pieces, blocks in (([np.arange(N)], 2), (two, 2), (two, 0)):  # merged at the end, and one by one
        monkeypatch.setattr(triton_prompt_experts, "KEPT_BLOCKS", blocks)
        totals.append(torch.zeros_like(x))
        parts = []
        for piece in pieces:
            index = piece.astype(np.int32)
            experts = gpu_experts.resident(tensors, index, about, device_name())
            table = np.full(N, -1, np.int32)
            table[index] = np.arange(len(index))
            given = on_device(table), on_device(index)
            parts.append((experts, *given))
            assert torch.equal(gpu_experts.members(given[0], len(index)), given[1])
        gpu_experts.add_some(iter(parts), routed, totals[-1])
    exact, most = exact_sum(about, tensors, x.cpu().numpy(), selected, weights.cpu().numpy(), [None] * 3)
    for total in totals:
        assert np.abs(total.cpu().numpy() - exact).max() <= 40 * (d + size) * EPS * most
    assert len(ordered) == (kernels == "triton")
    if kernels == "triton":
        assert torch.equal(totals[0], totals[1]), "a token's experts are added in their order, whatever the pieces"


@pytest.mark.parametrize("tokens", [1, 3])
def test_no_expert_is_here(kernels: str, tokens: int) -> None:  # noqa: F811
    about, tensors = some_experts("F32", 32, 32, True, "silu")
    experts = gpu_experts.resident(tensors, np.array([2], np.int32), about, device_name())
    slots = torch.full((tokens, TOP), -1, dtype=torch.int32, device=device_name())
    weights = torch.ones((tokens, TOP), device=device_name())
    assert not gpu_experts.expert_sum(experts, on_device(floats(1, tokens, 32)), slots, weights).any()


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(
    ("kind", "gate", "activation"),
    [
        ("F16", "F16", "relu"), ("BF16", "Q8_0", "drelu"), ("Q4_0", "Q4_0", "fatrelu"), ("Q4_0", "F32", "relu2"),
        ("Q4_0", None, "relu2"), ("Q5_0", None, "relu2"),
    ],
)  # fmt: skip
def test_neurons_that_fire(
    kernels: str,  # noqa: F811
    kind: str,
    gate: str | None,
    activation: str,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum is that of whole experts. What no token needs may be no numbers."""
    twin = (tokens == 1 and kind == "BF16") or (tokens > 1 and (kind, gate) == ("Q4_0", None))
    if by_interpreter() and (twin or (tokens > 9 and (kind, gate) != ("Q4_0", "F32"))):
        pytest.skip("the interpreter goes through every kernel and type with other numbers of tokens")
    if kernels == "triton" and tokens > 9:
        from powerinfer.kernels import triton_experts, triton_prompt_experts

        monkeypatch.setattr(triton_prompt_experts, "TOKENS", 34)
        monkeypatch.setattr(triton_experts, "MOST_COLUMNS", 16)
    d, size = 96, 64
    about, tensors = some_experts(kind, d, size, gate is not None, activation)
    if gate is not None:
        tensors[0] = some_experts(gate, d, size, True, activation)[1][0]
    index = np.array([0, 3, 4, 8, 11], np.int32)
    experts = gpu_experts.resident(tensors, index, about, device_name(), by_neuron=True)
    assert experts.nbytes == 5 * sum(gpu.weight_bytes(one.type, *one.shape[1:]) for one in tensors)
    x, weights = floats(6, tokens, d), np.abs(floats(7, tokens, TOP))
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1)
    places = np.full(N, -1, np.int32)
    places[index] = np.arange(len(index))
    slots = places[selected]
    given = on_device(x), on_device(slots), on_device(weights)
    found = gpu_experts.expert_sum(experts, *given).cpu().numpy()
    exact, most = exact_sum(about, tensors, x, np.where(slots < 0, -1, selected), weights, [None] * 3)
    assert np.abs(found - exact).max() <= 40 * (d + size) * EPS * most
    whole = gpu_experts.resident(tensors, index, about, device_name())
    np.testing.assert_allclose(found, gpu_experts.expert_sum(whole, *given).cpu(), atol=40 * (d + size) * EPS * most)
    if kernels == "torch" or tokens > gpu.FEW:
        np.testing.assert_array_equal(found, gpu_experts.expert_sum(experts, *given).cpu().numpy())
    else:
        monkeypatch.undo()
        gates = tensors[0].float32().astype(np.float64)[index]
        limit = about.threshold + 1e-4
        fires = np.zeros((len(index), size), bool)
        for row, own in zip(x, slots, strict=True):
            for slot in own[own >= 0]:
                fires[slot] |= gates[slot] @ row > -limit if activation != "fatrelu" else gates[slot] @ row > 0
        unused = torch.from_numpy(~fires.reshape(-1))
        assert unused.any()
        for weight in (experts.down,) if gate is None else (experts.up, experts.down):
            damage(weight, unused.to(weight.data.device))
        np.testing.assert_array_equal(found, gpu_experts.expert_sum(experts, *given).cpu().numpy())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("kind", "gated"), [("F16", False), ("Q4_0", True), ("Q5_0", False)])
def test_some_neurons_of_each_expert(kernels: str, kind: str, gated: bool, tokens: int) -> None:  # noqa: F811
    """Those here and the others add up to all of them, with a predictor and without."""
    if by_interpreter() and tokens not in {"F16": (), "Q4_0": (3,), "Q5_0": (1, 3)}[kind]:
        pytest.skip("the interpreter goes through these kernels with another type")
    d, size, rank = 96, 96, 32
    about, tensors = some_experts(kind, d, size, gated, "relu")
    rng = np.random.default_rng(11)
    selecting = RawTensor("Q8_0", (N, size, rank), stored_evenly("Q8_0", N * size, rank, rank**-0.5, rng))
    index = np.array([0, 3, 4, 8, 11], np.int32)
    order = rng.permuted(np.tile(np.arange(size, dtype=np.int32), (N, 1)), axis=1)
    weights = on_device(np.abs(floats(7, tokens, TOP)))
    slots = on_device(rng.permuted(np.tile(np.arange(-1, 5, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP].copy())
    x, hidden = on_device(floats(6, tokens, d)), on_device(np.abs(floats(5, tokens, rank)))

    def sum_of(neurons: np.ndarray | None, hidden: Any) -> np.ndarray:
        about_them: dict[str, Any] = {"by_neuron": True, "predictor": (0.3, selecting), "neurons": neurons}
        experts = gpu_experts.resident(tensors, index, about, device_name(), **about_them)
        assert experts.size == (size if neurons is None else neurons.shape[1])
        return gpu_experts.expert_sum(experts, x, slots, weights, hidden=hidden).cpu().numpy()

    for given in (hidden,) if by_interpreter() else (None, hidden):
        whole, parts = sum_of(None, given), [sum_of(np.sort(own), given) for own in np.split(order, [32], axis=1)]
        assert np.abs(whole - sum(parts)).max() <= 1e-4 * np.abs(whole).max()
        assert all(np.abs(part).max() > 0.05 * np.abs(whole).max() for part in parts)


@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize(
    ("kind", "gated", "outer"), [("F16", True, "Q8_0"), ("Q4_0", True, "F16"), ("Q5_0", False, "Q8_0")]
)
def test_neurons_that_a_predictor_selects(
    kernels: str,  # noqa: F811
    kind: str,
    gated: bool,
    outer: str,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may be no numbers in every matrix. A z that is no number selects."""
    if by_interpreter() and tokens not in {"F16": (1, 12), "Q4_0": (3,), "Q5_0": (1, 3)}[kind]:
        pytest.skip("the interpreter goes through these kernels with another type")
    d, size, rank, threshold = 96, 64, 32, 0.3
    about, tensors = some_experts(kind, d, size, gated, "relu2")
    rng = np.random.default_rng(11)
    selecting = RawTensor(outer, (N, size, rank), stored_evenly(outer, N * size, rank, rank**-0.5, rng))
    index = np.array([0, 3, 4, 8, 11], np.int32)
    experts = gpu_experts.resident(
        tensors, index, about, device_name(), by_neuron=True, predictor=(threshold, selecting)
    )
    every = [*tensors, selecting]
    assert experts.nbytes == 5 * sum(gpu.weight_bytes(one.type, *one.shape[1:]) for one in every)
    x, weights, hidden = floats(6, tokens, d), np.abs(floats(7, tokens, TOP)), np.maximum(floats(9, tokens, rank), 0)
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1)
    places = np.full(N, -1, np.int32)
    places[index] = np.arange(len(index))
    slots = places[selected]
    z = np.einsum("snr,tr->tsn", selecting.float32().astype(np.float64)[index], hidden)
    assert np.abs(z - threshold).min() > 1e-5, "which are selected does not depend on rounding"
    candidates = z >= threshold
    assert 0.1 < candidates.mean() < 0.6
    given = on_device(x), on_device(slots), on_device(weights)

    def found(hidden: Float32 | None) -> np.ndarray:
        own = None if hidden is None else on_device(hidden)
        return gpu_experts.expert_sum(experts, *given, hidden=own).cpu().numpy()

    expected, most = np.zeros_like(x, np.float64), 0.0
    *gate, up, down = (one.float32().astype(np.float64)[index] for one in tensors)
    for token, slot_row in enumerate(slots):
        for place, slot in enumerate(slot_row):
            if slot >= 0:
                u = up[slot] @ x[token]
                h = np.maximum(gate[0][slot] @ x[token], 0) ** 2 * u if gated else np.maximum(u, 0) ** 2
                h *= weights[token, place]
                expected[token] += down[slot] @ (h * candidates[token, slot])
                most = max(most, float((np.abs(down[slot]) @ np.abs(h)).max()))
    first, whole, bound = found(hidden), found(None), 40 * (d + size) * EPS * most
    assert np.abs(first - expected).max() <= bound < 0.01 * most < np.abs(whole - expected).max()
    unknown = hidden.copy()
    unknown[0] = np.nan
    np.testing.assert_allclose(found(unknown)[0], whole[0], atol=bound)
    np.testing.assert_array_equal(found(unknown)[1:], first[1:])
    if kernels == "triton":
        needed = np.zeros((len(index), size), bool)
        for token, slot_row in enumerate(slots):
            for slot in slot_row[slot_row >= 0]:
                needed[slot] |= candidates[token, slot]
        unused = torch.from_numpy(~needed.reshape(-1)).to(device_name())
        for weight in (experts.gate, experts.up, experts.down):
            if weight is not None:
                damage(weight, unused)
        np.testing.assert_array_equal(found(hidden), first)


def damage(weight: gpu.Weight, rows: torch.Tensor) -> None:
    """Make rows that do not count no numbers or, of codes, whose scales others share, other ones."""
    if weight.data.dtype in (torch.float16, torch.bfloat16):
        weight.data[rows] = float("nan")
    else:
        weight.data[rows] ^= 0x55
    if weight.scales is not None:
        weight.scales[rows] = float("nan")


def test_an_expert_by_neuron_takes_anothers_slot(
    kernels: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block by block of its down, it is the expert that was put there as a whole."""
    for kind in ("F16", "Q4_0"):
        about, tensors = some_experts(kind, 64, 96, True, "relu")
        index = np.array([1, 2, 5], np.int32)
        experts = gpu_experts.resident(tensors, np.array([1, 7, 5], np.int32), about, device_name(), by_neuron=True)
        own = [RawTensor(one.type, one.shape[1:], one.data.reshape(N, -1)[2]) for one in tensors]
        with monkeypatch.context() as patch:
            patch.setattr(gpu_experts, "TURNED", 1)
            gpu_experts.replace(experts, 1, own)
        expected = gpu_experts.resident(tensors, index, about, device_name(), by_neuron=True)
        for name in ("gate", "up", "down"):
            assert torch.equal(getattr(experts, name).data, getattr(expected, name).data)
        assert experts.shared is None or (expected.shared is not None and torch.equal(experts.shared, expected.shared))


@pytest.mark.parametrize("factors", [1, 6])
def test_factors_beside_blocks_come_along(factors: int) -> None:
    """NVFP4's, one of all experts or one of each, of experts that stream as of those that are uploaded."""
    rng, about = np.random.default_rng(6), ExpertsConfig(6, 64, RouterConfig(2))
    tensors = []
    for shape in ((6, 64, 128), (6, 64, 128), (6, 128, 64)):
        blocks = rng.integers(0, 256, (int(np.prod(shape)) // 64, 36), np.uint8)
        blocks[:, :4] = rng.integers(0x10, 0x40, (len(blocks), 4))
        scales = rng.uniform(0.1, 10, factors).astype(np.float32)
        tensors.append(RawTensor("NVFP4", shape, blocks.reshape(-1), scales))
    index = np.array([4, 1, 5], np.int32)
    parts = [on_device(tensor.subset(index).data) for tensor in tensors]
    streamed = gpu_experts.from_rows(about, tensors, parts, index)
    for weight, tensor in zip((streamed.gate, streamed.up, streamed.down), tensors, strict=True):
        exact = tensor.subset(index).float32().reshape(-1, tensor.shape[2])
        assert weight is not None
        assert np.allclose(gpu.values(weight, 0, len(exact)).cpu().numpy(), exact, rtol=1e-6)
