"""The router and the native operator of experts, against numpy; and models whose experts cannot be right."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, each_level
from model_files import FF, LAYERS, D, experts_gguf, tiny_gguf
from safetensors.numpy import save_file
from stored_weights import stored_evenly

from benchmarks.models.gguf_writer import F32, U32
from powerinfer import LLM, ModelError, SamplingParams, _native
from powerinfer.cli.main import main
from powerinfer.config import ExpertsConfig, RouterConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.quant import dequantize

EXPERTS, TOP = 6, 3

# ---- the router


def routed(spec: dict[str, Any], logits: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The rule in numpy, for logits without ties."""
    logits = logits.astype(np.float64) + spec.get("bias", 0.0)
    if spec.get("scoring") == "sparsemixer":
        left, shares = logits.copy(), {}
        for _ in range(spec["top_k"]):
            best = int(left.argmax())
            near = (left[best] - logits) / np.maximum(np.abs(logits), left[best]) <= 2 * spec["nearness"]
            shares[best], left[best] = 1 / np.exp(left[near] - left[best]).sum(), -np.inf
        return sorted(shares), np.array([shares[at] for at in sorted(shares)])
    if spec.get("scoring") == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    wanted = scores + spec.get("correction", 0.0)
    groups = wanted.reshape(spec.get("groups", 1), -1)
    best = np.sort(groups, axis=1)[:, -spec.get("group_best", 1) :].sum(axis=1)
    kept = np.argsort(-best)[: spec.get("top_groups", 1)]
    outside = np.isin(np.arange(len(groups)), kept, invert=True)
    wanted = np.where(outside[:, None], -np.inf, groups).reshape(-1)
    selected = np.sort(np.argsort(-wanted)[: spec["top_k"]])
    weights = scores[selected]
    if spec.get("normalise"):
        weights /= weights.sum()
    return selected.tolist(), weights * spec.get("scale", 1.0)


def some(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


SPECS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 2},
    "normalised": {"top_k": 3, "normalise": True},
    "all of them": {"top_k": 8, "normalise": True, "scale": 2.5},
    "sigmoid": {"top_k": 3, "scoring": "sigmoid", "scale": 1.5},
    "correction": {"top_k": 3, "scoring": "sigmoid", "normalise": True, "correction": some(2, 8)},
    "bias": {"top_k": 3, "normalise": True, "bias": 3 * some(4, 8)},
    "groups": {"top_k": 2, "groups": 4, "top_groups": 2},
    "sparsemixer": {"top_k": 2, "scoring": "sparsemixer", "nearness": 0.2},
    "groups by two": {
        "top_k": 4, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "group_best": 2, "correction": some(3, 8),
    },
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_router_selects_what_the_rule_says(spec: dict[str, Any]) -> None:
    native = _native.RouterSpec(**spec)
    for seed in range(200):
        logits = 2 * some(100 + seed, 8)
        selected, weights = _native.route(native, logits)
        expected, exact = routed(spec, logits)
        assert selected == expected
        np.testing.assert_allclose(weights, exact, rtol=1e-5)


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=8, max_size=8),
    st.sampled_from(sorted(SPECS)),
)
def test_whatever_the_logits_are_experts_are_valid(logits: list[float], name: str) -> None:
    spec = SPECS[name]
    selected, weights = _native.route(_native.RouterSpec(**spec), np.array(logits, np.float32))
    assert len(weights) == len(selected) == spec["top_k"]
    assert all(0 <= one < 8 for one in selected) and all(a < b for a, b in pairwise(selected))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"top_k": 0}, "cannot have"),
        ({"top_k": 9}, "more experts than there are"),
        ({"top_k": 2, "groups": 3}, "evenly"),
        ({"top_k": 3, "groups": 4, "top_groups": 1}, "too few experts"),
        ({"top_k": 1, "groups": 8, "top_groups": 1, "group_best": 2}, "for its score"),
        ({"top_k": 1, "correction": some(0, 9)}, "wrong length"),
        ({"top_k": 1, "bias": some(0, 7)}, "wrong length"),
        ({"top_k": 2, "scoring": "sparsemixer", "normalise": True}, "no other setting"),
        ({"top_k": 2, "scoring": "sparsemixer", "nearness": -1.0}, "no other setting"),
    ],
)
def test_a_router_that_cannot_be(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _native.route(_native.RouterSpec(**spec), some(0, 8))


# ---- the operator


class Layer:
    """Random experts, native and in numpy."""

    def __init__(self, kind: str, d: int, size: int, gated: bool, shared: int, seed: int = 5) -> None:
        self.kind, self.d, self.size, self.gated, self.shared = kind, d, size, gated, shared
        self.rng = np.random.default_rng(seed)
        self.activation = "silu" if gated else "relu"
        self.top = TOP
        self.record = False
        self.selected: tuple[list[int], bool] = ([], False)
        self.stored = {name: self._stack(EXPERTS, *shape) for name, shape in self.shapes(size)}
        self.stored |= {f"shared_{name}": self._stack(1, *shape) for name, shape in self.shapes(shared) if shared}
        self.router = self.rng.standard_normal((EXPERTS, d)).astype(np.float32) / np.float32(d**0.5)
        self.shared_gate = self.rng.standard_normal(d).astype(np.float32) / np.float32(d**0.5) if shared else None

    def shapes(self, size: int) -> list[tuple[str, tuple[int, int]]]:
        gate = [("gate", (size, self.d))] if self.gated else []
        return [*gate, ("up", (size, self.d)), ("down", (self.d, size))]

    def _stack(self, n: int, rows: int, k: int) -> list[np.ndarray]:
        return [stored_evenly(self.kind, rows, k, k**-0.5, self.rng) for _ in range(n)]

    def _program(self, level: str, tokens: int, threads: int) -> tuple[_native.Pool, _native.Program]:
        pool = _native.Pool(threads)
        workspace, cache = _native.Workspace(pool, level), _native.Cache("f32", [(1, 16)], 1)
        return pool, _native.Program(workspace, cache, tokens, self.d, max(self.size, self.shared), [1])

    def _packed(self, pool: _native.Pool, name: str, experts: list[int] | None = None) -> _native.Matrix | None:
        """experts: which of them, None: all."""
        every = self.stored.get(name)
        if every is None:
            return None
        every = every if experts is None else [every[one] for one in experts]
        rows, k = dict(self.shapes(self.shared if "shared" in name else self.size))[name.split("_")[-1]]
        padded = -(-rows // _native.LANES) * _native.LANES
        within = np.arange(padded)
        row_map = np.where(within < rows, np.arange(len(every))[:, None] * rows + within, -1)
        row_map = row_map.reshape(-1).astype(np.int32) if len(every) > 1 else None
        data = np.concatenate(every)
        return _native.pack_matrix(pool, _native.Arena(), self.kind, len(every) * rows, k, data, row_map)

    def sum(
        self, level: str, x: np.ndarray, experts: list[int], selected: np.ndarray, weights: np.ndarray
    ) -> tuple[bool, np.ndarray]:
        """The sum of some experts alone, outside of a program's steps. selected: places in `experts`."""
        program, some = self.made(level, len(x), experts)
        out = np.full_like(x, np.nan)
        return some.sum(program, x, selected.astype(np.int32), weights.astype(np.float32), out), out

    def made(
        self, level: str, tokens: int, experts: list[int], threads: int = 2
    ) -> tuple[_native.Program, _native.Experts]:
        """Some experts alone, outside of a program's steps."""
        pool, program = self._program(level, tokens, threads)
        matrices = (self._packed(pool, name, experts) for name in ("gate", "up", "down"))
        of_some = _native.ExpertMatrices(len(experts), self.size, _native.NeuronSpec(self.activation), *matrices)
        return program, program.expert_sum(of_some, _native.RouterSpec(self.top))

    def experts(self, pool: _native.Pool) -> _native.ExpertMatrices:
        """All of them."""
        matrices = (self._packed(pool, name) for name in ("gate", "up", "down"))
        return _native.ExpertMatrices(EXPERTS, self.size, _native.NeuronSpec(self.activation), *matrices)

    def run(self, level: str, x: np.ndarray, threads: int) -> np.ndarray:
        """What the operator adds to x [tokens, d]."""
        pool, program = self._program(level, len(x), threads)
        spec = _native.NeuronSpec(self.activation)
        packed = partial(self._packed, pool)
        experts = self.experts(pool)
        shared = None
        if self.shared:
            shared = _native.DenseNeurons(spec, *(packed(f"shared_{name}") for name in ("gate", "up", "down")))
        router = _native.pack_matrix(
            pool, _native.Arena(), "F32", EXPERTS, self.d, self.router.view(np.uint8).reshape(-1)
        )
        table = np.ascontiguousarray(x, np.float32)
        program.embed(_native.Table("F32", len(x), self.d, table.view(np.uint8).reshape(-1)))
        how = _native.RouterSpec(self.top, normalise=True)
        op = program.experts(_native.FfnSpec(), how, router, experts, shared, self.shared_gate)
        op.record(self.record)
        tokens = np.arange(len(x), dtype=np.int32)
        zeros = np.zeros(len(x), np.int32)
        pages = np.zeros((1, -(-len(x) // 32)), np.int32)
        program.run(
            tokens, tokens, zeros, pages, zeros[:0], np.empty((0, -(-len(x) // 16) * 16), np.float32), 0, 2, len(x)
        )
        self.selected = op.selected()
        return program.residual(len(x)).copy() - x

    def linear(self, x: np.ndarray, name: str, expert: int) -> np.ndarray:
        rows = dict(self.shapes(self.shared if "shared" in name else self.size))[name.split("_")[-1]][0]
        return reference.linear(x, self.stored[name][expert], self.kind, rows)

    def hidden(self, x: np.ndarray, prefix: str, expert: int) -> np.ndarray:
        up = self.linear(x, f"{prefix}up", expert)
        if not self.gated:
            return reference.activate(self.activation, up)
        return reference.activate(self.activation, self.linear(x, f"{prefix}gate", expert), up)

    def exact(self, x: np.ndarray, wrong: int = 0) -> np.ndarray:
        """wrong: experts that are mistaken for others."""
        out = np.zeros(x.shape)
        for i, row in enumerate(x):
            selected, weights = routed({"top_k": self.top, "normalise": True}, row.astype(np.float64) @ self.router.T)
            for expert, weight in zip(selected, weights, strict=True):
                expert = (expert + wrong) % EXPERTS
                h = weight * self.hidden(row[None], "", expert)
                out[i] += self.linear(h, "down", expert)[0]
        if self.shared:
            gate = 1 / (1 + np.exp(-x.astype(np.float64) @ self.shared_gate))
            out += gate[:, None] * self.linear(self.hidden(x, "shared_", 0), "shared_down", 0)
        return out


KINDS = {"F32": (40, 24), "F16": (48, 40), "BF16": (64, 40), "Q8_0": (64, 96), "Q4_0": (96, 64), "Q4_K": (256, 256)}
ALLOWED = {"F32": 1e-6, "F16": 1e-6}  # of the values; other types round activations, some of them the other way


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.sampled(("level", "kind"), ("kind", "tokens"), ("level", "tokens"))
@pytest.mark.parametrize("tokens", [1, 5, 70])
@each_level("kind", [*KINDS])
def test_the_operator_sums_what_the_router_selects(level: str, kind: str, tokens: int) -> None:
    """Sizes that are no whole panels, with and without gate and shared expert; as many experts a token as there are."""
    d, size = KINDS[kind]
    layer = Layer(kind, d, size, gated=kind != "F16", shared=size if kind in ("F32", "Q4_0") else 0)
    layer.top = EXPERTS if kind == "BF16" else TOP
    x = np.random.default_rng(9).standard_normal((tokens, d)).astype(np.float32)
    exact = layer.exact(x)
    found = layer.run(level, x, threads=2)
    assert rms(found - exact) <= ALLOWED.get(kind, 2e-3) * rms(exact)
    assert layer.top == EXPERTS or rms(layer.exact(x, wrong=1) - exact) > 0.3 * rms(exact), (
        "other experts would be noticed"
    )


@each_level("kind", [*KINDS])
def test_bits_depend_on_neither_the_batch_nor_the_threads(level: str, kind: str) -> None:
    """With so many tokens that experts get enough rows for every kernel, AMX's tiles included."""
    d, size = KINDS[kind]
    layer = Layer(kind, d, size, gated=True, shared=size)
    x = np.random.default_rng(9).standard_normal((120, d)).astype(np.float32)
    whole = layer.run(level, x, threads=1)
    for threads in (2, 7):
        assert np.array_equal(layer.run(level, x, threads), whole)
    for first, last in ((0, 1), (1, 9), (9, 40), (40, 120)):
        assert np.array_equal(layer.run(level, x[first:last], 2), whole[first:last])


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_two_places_add_up(kind: str, tokens: int) -> None:
    """What two devices compute of it, each the experts that it has."""
    d, size = KINDS[kind]
    layer = Layer(kind, d, size, gated=kind != "F16", shared=0)
    x = np.random.default_rng(9).standard_normal((tokens, d)).astype(np.float32)
    selections = [routed({"top_k": TOP, "normalise": True}, row.astype(np.float64) @ layer.router.T) for row in x]
    selected, weights = np.array([one[0] for one in selections]), np.array([one[1] for one in selections])
    found = np.zeros_like(x)
    for experts in ([0, 4], [1, 2, 3, 5]):
        places = np.full(EXPERTS, -1)
        places[experts] = np.arange(len(experts))
        some, part = layer.sum(LEVELS[-1], x, experts, places[selected], weights)
        assert some == (places[selected] >= 0).any()
        found += part
    exact = layer.exact(x)
    assert rms(found - exact) <= ALLOWED.get(kind, 2e-3) * rms(exact)


def test_no_expert_is_no_work() -> None:
    layer = Layer("F32", 40, 24, gated=True, shared=0)
    x = np.ones((2, 40), np.float32)
    some, out = layer.sum(LEVELS[0], x, [1], np.full((2, TOP), -1), np.ones((2, TOP)))
    assert not some and not out.any()
    with pytest.raises(ValueError, match="no such expert"):
        layer.sum(LEVELS[0], x, [1], np.full((2, TOP), 1), np.ones((2, TOP)))


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sum_whose_input_comes_after_its_selection(threads: int, tokens: int) -> None:
    """Whatever was fetched in between, it has the bits of a sum that was given both at once."""
    layer = Layer("Q4_0", 96, 64, gated=True, shared=0)
    x = np.random.default_rng(9).standard_normal((tokens, 96)).astype(np.float32)
    rng = np.random.default_rng(10)
    selected = np.sort(rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOP], axis=1)
    selected, weights = selected.astype(np.int32), rng.random((tokens, TOP)).astype(np.float32)
    program, experts = layer.made(LEVELS[-1], tokens, list(range(EXPERTS)), threads)
    whole, found = (np.full_like(x, np.nan) for _ in range(2))
    assert experts.sum(program, x, selected, weights, whole)
    for fetches in (0, 1, 5):
        experts.order(program, selected, weights)
        for _ in range(fetches):
            assert not experts.fetch(program), "experts as small as these are fetched at once"
        assert experts.sum_ordered(program, x, found)
        np.testing.assert_array_equal(found, whole)
    experts.order(program, np.full_like(selected, -1), weights)
    assert not experts.fetch(program) and not experts.sum_ordered(program, x, found) and not found.any()


def test_large_experts_are_fetched_bit_by_bit() -> None:
    layer = Layer("F32", 512, 512, gated=True, shared=0)
    program, experts = layer.made(LEVELS[-1], 1, list(range(EXPERTS)), threads=1)
    selected, weights = np.arange(TOP, dtype=np.int32)[None], np.ones((1, TOP), np.float32)
    experts.order(program, selected, weights)
    calls = 1
    while experts.fetch(program):
        calls += 1
    assert 1 < calls <= 1 + TOP * 3 * 512 * 512 * 4 // (256 << 10)
    x = np.random.default_rng(9).standard_normal((1, 512)).astype(np.float32)
    found, whole = np.empty_like(x), np.empty_like(x)
    assert experts.sum_ordered(program, x, found) and experts.sum(program, x, selected, weights, whole)
    np.testing.assert_array_equal(found, whole)


def test_what_was_not_ordered_is_not_summed() -> None:
    layer = Layer("F32", 40, 24, gated=True, shared=0)
    program, experts = layer.made(LEVELS[0], 4, list(range(EXPERTS)))
    x, out = np.ones((2, 40), np.float32), np.empty((2, 40), np.float32)
    selected, weights = np.tile(np.arange(TOP, dtype=np.int32), (2, 1)), np.ones((2, TOP), np.float32)
    with pytest.raises(ValueError, match="not ordered"):
        experts.sum_ordered(program, x, out)
    with pytest.raises(ValueError, match="no such expert"):
        experts.order(program, selected + EXPERTS, weights)
    with pytest.raises(ValueError, match="top_k"):
        experts.order(program, selected[:, :1].copy(), weights)
    experts.order(program, selected, weights)
    with pytest.raises(ValueError, match="not ordered"):
        experts.sum_ordered(program, x[:1], out[:1])  # another number of tokens
    experts.sum(program, x, selected, weights, out)
    for call in (lambda: experts.sum_ordered(program, x, out), lambda: experts.fetch(program)):
        with pytest.raises(ValueError, match="not ordered"):  # others were, in between
            call()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(number: float) -> None:
    layer = Layer("F32", 40, 24, gated=True, shared=24)
    x = np.random.default_rng(9).standard_normal((6, 40)).astype(np.float32)
    damaged = x.copy()
    damaged[2, 3] = number
    whole, found = layer.run(LEVELS[0], x, 2), layer.run(LEVELS[0], damaged, 2)
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(found[others], whole[others]) and not np.isfinite(found[2]).all()


@pytest.mark.parametrize("tokens", [1, 6])
def test_what_a_step_selects_can_be_read(tokens: int) -> None:
    layer = Layer("F32", 40, 24, gated=True, shared=24)
    x = np.random.default_rng(9).standard_normal((tokens, 40)).astype(np.float32)
    out = layer.run(LEVELS[0], x, 2)
    assert layer.selected == ([], False), "only if it is asked for"
    layer.record = True
    assert np.array_equal(layer.run(LEVELS[0], x, 2), out)
    how = {"top_k": TOP, "normalise": True}
    wanted = [int(expert) for row in x for expert in routed(how, row.astype(np.float64) @ layer.router.T)[0]]
    assert layer.selected == (wanted, False)
    x[-1, 3] = np.nan
    layer.run(LEVELS[0], x, 2)
    assert layer.selected[0][:-TOP] == wanted[:-TOP] and layer.selected[1]


# ---- models


def model(folder: Path, **change: Any) -> Path:
    return experts_gguf(**change).write(folder / "m.gguf")


def test_a_model_of_experts_answers(tmp_path: Path) -> None:
    path = model(tmp_path)
    config = open_checkpoint(path).config
    assert {layer.ffn for layer in config.layers} == {ExpertsConfig(4, FF, RouterConfig(2))}
    with LLM(path, gpu="none", threads=2) as llm:
        settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        first, again = llm.generate(["ab", "ab"], settings)
        assert len(first.token_ids) == 6 and first.token_ids == again.token_ids
        read = llm.bytes_per_token
    more = model(tmp_path, top=4)
    with LLM(more, gpu="none", threads=2) as llm:
        every = LAYERS * 3 * 2 * 4 * 16 * -(-FF // 16) * D  # two more experts of three matrices, in whole panels
        assert read is not None and llm.bytes_per_token is not None
        assert 0.8 * every <= llm.bytes_per_token - read <= 1.2 * every


@pytest.mark.parametrize("layout", ["q8_0", "q4_0"])
def test_quantised_on_load_the_router_is_not(layout: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model(tmp_path), layout)
    assert checkpoint.taken_type("layers.0.router") == "F32"
    wanted = layout.upper() if D % 32 == 0 else "F32"
    assert checkpoint.taken_type("layers.0.experts_up") == wanted


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"experts": 1, "top": 2}, "expert_used_count is '2'"),
        ({"top": 0}, "expert_used_count is '0'"),
        ({"leave": "1.gate_exps"}, "tensor blk.1.ffn_gate_exps.weight is missing"),
        ({"leave": "1.gate_inp"}, "tensor blk.1.ffn_gate.weight is missing"),
        ({"router": 5}, r"ffn_gate_inp.weight has shape \[5, "),
        ({"router": 3}, r"ffn_gate_inp.weight has shape \[3, "),
    ],
)
def test_models_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why):
        open_checkpoint(model(tmp_path, **change))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (RouterConfig(0), "0 experts a token of 4"),
        (RouterConfig(5), "5 experts a token of 4"),
        (RouterConfig(2, scoring="max"), "scores 'max'"),
        (RouterConfig(2, groups=3), "3 groups evenly"),
        (RouterConfig(2, scoring="sparsemixer"), "two experts, whose weights nothing else changes"),
        (RouterConfig(3, scoring="sparsemixer", normalise=False), "two experts, whose weights nothing else changes"),
        (RouterConfig(2, nearness=0.1), "nearness of 0.1 with softmax"),
        (RouterConfig(3, groups=4, top_groups=2), "too few"),
        (RouterConfig(2, groups=4, top_groups=2, group_best=2), "too small"),
    ],
)
def test_settings_that_do_not_go_together(settings: RouterConfig, why: str) -> None:
    assert why in str(ExpertsConfig(4, 8, settings).problem())
    right = replace(settings, top_k=1, scoring="softmax", groups=1, top_groups=1, group_best=1, nearness=0.0)
    assert ExpertsConfig(4, 8, right).problem() is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_none(value: float, tmp_path: Path) -> None:
    made = tiny_gguf().add("llama.expert_count", U32, 4).add("llama.expert_used_count", U32, 2)
    made.add("llama.expert_weights_scale", F32, value)
    with pytest.raises(ModelError, match="expert_weights_scale"):
        open_checkpoint(made.write(tmp_path / "n.gguf"))


def test_files_with_a_tensor_for_each_expert(tmp_path: Path) -> None:
    builder = experts_gguf()
    builder.tensor("blk.0.ffn_gate.0.weight", np.zeros((FF, D), np.float32))
    with pytest.raises(ModelError, match="as files of 2023 do: convert the model again"):
        open_checkpoint(builder.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.shared_expert_gate.weight", ()),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 1, 8)),
        (f"model.layers.{'9' * 5000}.mlp.gate.weight", (8,)),
    ],
)
def test_odd_tensors_of_folders(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    settings |= {"moe_intermediate_size": 8, "intermediate_size": 8, "shared_expert_intermediate_size": 8}
    settings |= {"vocab_size": 8, "max_position_embeddings": 8, "num_nextn_predict_layers": 1, "num_experts": 4}
    document = {"architectures": ["Qwen2MoeForCausalLM"], **settings}
    (tmp_path / "config.json").write_text(json.dumps(document))
    save_file({name: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"is missing|tensors that a"):
        open_checkpoint(tmp_path)


def test_what_is_said_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan says what a step reads; a report asks for nothing that cannot be made."""
    path = str(model(tmp_path))
    assert main(["plan", "-m", path, "--hardware", "pc-8gb"]) == 0
    out = capsys.readouterr().out
    assert "of 4 experts of" in out and "a step reads" in out and "policy  " not in out and "count alike" not in out
    assert main(["report", "-m", path, "--json"]) == 0
    missing = json.loads(capsys.readouterr().out.splitlines()[-1])["missing"]
    assert [one["noun"] for one in missing] == ["expert profile"] and "powerinfer profile -m" in missing[0]["command"]


def test_weights_of_experts_are_the_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model(tmp_path))
    tensor = checkpoint.take("layers.0.experts_up")
    assert tensor.shape == (4, FF, D) and dequantize(tensor.rows(), tensor.type).shape == (4 * FF, D)


def test_a_predictor_of_the_head_is_left_out(tmp_path: Path) -> None:
    builder = experts_gguf()
    builder.tensor("lm_head_profiler.weight", np.zeros((7, D), np.float32))
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    assert checkpoint.notes == ["the file's predictor of the head is not used"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rope_layout": [1, 2]}, "rope_layout"),
        ({"sliding_window_layout": [1]}, "sliding_window_layout"),
        ({"moe_layer_layout": [1, 0]}, "layers without experts"),
        ({"moe_num_active_primary_experts": 5}, "moe_num_active_primary_experts is .5"),
        ({"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts"),
        ({"hidden_act": "silu"}, "hidden_act"),
    ],
)
def test_settings_of_smallthinker_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    settings = {"architectures": ["SmallThinkerForCausalLM"], "num_hidden_layers": 2, "moe_num_primary_experts": 4}
    assert read_config(settings, tmp_path).layers[0].ffn.title == "4 experts of 768 neurons, 4 a token, relu"
    with pytest.raises(ModelError, match=why):
        read_config(settings | change, tmp_path)


MINIMAX = {  # of the published config.json, what is read
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_hidden_layers": 2, "rotary_dim": 64,
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"}, "scoring_func": "sigmoid",
    "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"use_routing_bias": False}, "use_routing_bias"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ({"rotary_dim": 129}, "rotary_dim is '129'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "GGUF files are"),
    ],
)
def test_settings_of_minimax_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    layer = read_config(MINIMAX, tmp_path).layers[0]
    assert layer.ffn.title == "256 experts of 1536 neurons, 8 a token, silu"
    rope = layer.attention.rope
    assert rope is not None and (rope.dim, rope.theta, layer.attention.head_dim) == (64, 5e6, 128)
    with pytest.raises(ModelError, match=why):
        read_config(MINIMAX | change, tmp_path)


@pytest.mark.parametrize("value", [2, 0])
def test_layers_between_those_with_experts(value: int, tmp_path: Path) -> None:
    """A file that says that they have none, and whose layers have some."""
    builder = experts_gguf().add("llama.interleave_moe_layer_step", U32, value)
    with pytest.raises(ModelError, match="interleave_moe_layer_step is"):
        open_checkpoint(builder.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_bias": True}, "use_bias"),
        ({"moe_k": 65}, "moe_k is '65'"),
        ({"moe_layer_interval": 0}, "moe_layer_interval is '0'"),
        ({"moe_layer_end_index": -2}, "moe_layer_end_index is '-2'"),
    ],
)
def test_settings_of_ernie_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    settings = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 3}
    layers = read_config(settings, tmp_path).layers
    titles, rope = [layer.ffn.title for layer in layers], layers[0].attention.rope
    assert rope is not None and (rope.theta, rope.interleaved) == (5e5, True)
    wanted = "64 experts of 1536 neurons, 6 a token, a shared one of 3072, silu"
    assert titles[1:] == [wanted] * 2 and "experts" not in titles[0]
    with pytest.raises(ModelError, match=why):
        read_config(settings | change, tmp_path)
