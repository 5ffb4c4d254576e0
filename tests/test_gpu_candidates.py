"""Candidates of rows of logits, by plain torch and by Triton; what samplers draw from them is what they draw from all
logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import CUDA, torch_device
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gpu_kernels import kernels, on_device  # noqa: F401

from powerinfer.devices.batch import LogitsNeed
from powerinfer.errors import PowerInferError
from powerinfer.kernels import gpu_candidates
from powerinfer.kernels.candidates import CANDIDATES, ERROR, LIKELIEST, MOST, WORDS, drawn_token
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.sampling import Sampler, largest

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 11}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    "top_k": {"top_k": LIKELIEST, "temperature": 3.0},
    "top_p": {"top_p": 0.9},
    "a low temperature": {"top_p": 0.99, "temperature": 0.05},
    "min_p": {"min_p": 0.1, "temperature": 2.0},
    "both": {"min_p": 0.02, "top_p": 0.9, "temperature": 1.5},
    "a large nucleus": {"top_p": 0.97, "temperature": 4.0},
}


@pytest.fixture
def small_tiles(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Tiles so small that the loops of a Triton kernel go round, and so few that the interpreter is soon done."""
    if kernels == "triton" and not CUDA:
        from powerinfer.kernels import triton_candidates

        for name, value in {"PARTS": 512, "COLUMNS": 128, "DEPTH": 2, "PLACES": 512}.items():
            monkeypatch.setattr(triton_candidates, name, value)


def selected(rows: np.ndarray, temperatures: float | np.ndarray = 1.0) -> np.ndarray:
    """Records of the candidates of rows of logits, with what they do not fill spoilt."""
    out = torch.full((len(rows), WORDS), 0x7FC00000, dtype=torch.int32, device=torch_device())
    sharpness = on_device((1 / np.broadcast_to(temperatures, len(rows))).astype(np.float32))
    gpu_candidates.select(on_device(rows), sharpness, out)
    return np.ascontiguousarray(out.cpu().numpy()).view(CANDIDATES)[:, 0]


def best_first(logits: np.ndarray) -> list[int]:
    """Tokens, NaN and the largest logits first, of equals the lowest."""
    return sorted(range(len(logits)), key=lambda i: (not np.isnan(logits[i]), -logits[i], i))


@pytest.mark.usefixtures("kernels")
def test_the_largest_logits_are_among_them_in_real_tiles() -> None:
    check_largest(5000, 1)


@pytest.mark.parametrize("vocab", [1, 63, 300, 513, 5000])
@pytest.mark.usefixtures("small_tiles")
def test_the_largest_logits_are_among_them(vocab: int) -> None:
    check_largest(vocab, 4)


def check_largest(vocab: int, n: int) -> None:
    """Of so many rows."""
    rng = np.random.default_rng(vocab)
    rows = rng.normal(0, 3, (4, vocab)).astype(np.float32)
    rows[1] = np.round(4 * rows[1]) / 4  # ties, of zeros of both signs too
    rows[2, rng.permutation(vocab)[: vocab // 3]] = -np.inf
    rows[3] += np.linspace(20, -20, vocab)  # the most likely ones are neighbours
    temperatures = np.array([1.0, 30.0, 0.7, 0.01])[:n]
    for logits, record, temperature in zip(rows[:n], selected(rows[:n], temperatures), temperatures, strict=True):
        count = int(record["count"])
        assert min(vocab, LIKELIEST) <= count <= min(vocab, MOST)
        ids, values = record["ids"][:count], record["values"][:count]
        np.testing.assert_array_equal(values, logits[ids])
        ours = ids[np.lexsort((ids, -values))].tolist()
        assert ours == best_first(logits)[:count], "all that are as large as the smallest of them"
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        assert record["total"] == pytest.approx(weights.sum(), rel=ERROR)


@pytest.mark.usefixtures("small_tiles")
def test_more_candidates_than_there_is_room_for() -> None:
    rows = np.zeros((3, 3000), np.float32)
    rows[1, : MOST + 1] = 1.0
    rows[2, :MOST] = 1.0
    counts = selected(rows)["count"].tolist()
    assert counts[0] > MOST and counts[1] > MOST and counts[2] == MOST


@pytest.mark.usefixtures("small_tiles")
def test_damaged_logits_are_named_alike() -> None:
    rows = np.random.default_rng(0).normal(0, 3, (4, 2500)).astype(np.float32)
    rows[0, 2400], rows[1, 7], rows[2, 3], rows[2, 9] = np.nan, np.inf, np.inf, -np.nan
    rows[3] = -np.inf
    for logits, record in zip(rows, selected(rows), strict=True):
        for options in (SETTINGS["defaults"], {"temperature": 0}):
            messages = []
            for by in ("draw", "sample"):
                sampler = Sampler(SamplingParams(**options), len(logits))
                with pytest.raises(PowerInferError, match="may be damaged") as told:
                    if by == "sample" or sampler.draw(record) is None:
                        sampler.sample(logits)
                messages.append(str(told.value))
            assert messages[0] == messages[1]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("small_tiles")
def test_what_is_drawn(name: str) -> None:
    """The same tokens with the same seed, whether some logits are there or all; few need all."""
    rng, params = np.random.default_rng(3), SamplingParams(**(OFF | SETTINGS[name]))
    rows = (rng.normal(0, 1, (12, 3000)) * rng.uniform(2, 6, (12, 1))).astype(np.float32)
    rows[::4] = np.round(16 * rows[::4]) / 16
    records = selected(rows, params.temperature)
    ours, wanted = Sampler(params, 3000), Sampler(params, 3000)
    assert ours.needs == LogitsNeed.CANDIDATES
    missed = 0
    for logits, record in zip(rows, records, strict=True):
        token = ours.draw(record)
        if token is None:
            missed += 1
            token = ours.sample(logits)
        assert token == wanted.sample(logits)
    assert missed == 12 if name == "a large nucleus" else missed <= (6 if name in ("min_p", "both", "top_p") else 0)
    assert (ours.needs == LogitsNeed.LOGITS) == (missed > 1 + 12 / 4), "it takes all where that is often so"


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.99), st.sampled_from([0.0, 0.01, 0.2]), st.floats(-1, 1))
def test_no_error_of_the_total_changes_a_token(seed: int, top_p: float, min_p: float, error: float) -> None:
    """Where the total is off by as much as it may be, a token is drawn only if it is the right one."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 1, 400) * rng.uniform(1, 4)).astype(np.float32)
    ids = largest(logits, LIKELIEST)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    if seed % 2:  # where the nucleus just ends behind some tokens
        top_p = min(0.999, float(weights[ids[: 1 + seed % 50]].sum() / weights.sum()) * (1 + error * ERROR))
    record = np.zeros((), CANDIDATES)
    record["count"], record["total"] = LIKELIEST, weights.sum() * (1 + error * ERROR)
    record["values"][:LIKELIEST], record["ids"][:LIKELIEST] = logits[ids], ids
    params = SamplingParams(**(OFF | {"top_p": top_p, "min_p": min_p, "seed": seed}))
    for uniform in (None, lambda: 1 - 1e-12):  # the latter draws the least likely token that is left
        samplers = [Sampler(params, 400) for _ in range(2)]
        for sampler in samplers if uniform else ():
            sampler._uniform = uniform
        drawn = samplers[0].draw(record)
        if drawn is not None:
            assert drawn == samplers[1].sample(logits)


def record_of(values: np.ndarray, total: float) -> Any:
    """Of these logits, whose tokens have any numbers."""
    record = np.zeros((), CANDIDATES)
    record["count"], record["total"] = len(values), total
    record["values"][: len(values)] = values[:MOST]
    record["ids"][: len(values)] = np.random.default_rng(len(values)).permutation(1000)[: min(MOST, len(values))]
    return record


def test_the_native_module_draws_what_numpy_draws() -> None:
    """Where it draws, and it nearly always does where numpy can; ties, single tokens and -inf among them."""
    rng, drawn, left, none = np.random.default_rng(1), 0, 0, 0
    for turn in range(2000):
        count = int(rng.choice([1, 2, LIKELIEST, 70, MOST]))
        values = (rng.normal(0, 1, count) * rng.uniform(0.1, 6)).astype(np.float32)
        if turn % 3 == 0:
            values = np.round(values)  # of several equal ones the lowest tokens
        if turn % 7 == 0:
            values[1 + int(rng.integers(count)) :] = -np.inf
        kind = turn % 4  # top_k with all others, then some of them
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1e-3, 0.7, 1.0, 5.0], p=[0.1, 0.1, 0.3, 0.3, 0.2])),
            top_k=int(rng.integers(1, LIKELIEST + 1)) if kind < 2 else 0,
            top_p=float(rng.choice([0.05, 0.5, 0.9, 0.99])) if kind != 3 else 1.0,
            min_p=float(rng.choice([0.02, 0.3, 1.0])) if kind in (0, 3) else 0.0,
            seed=turn,
        )  # fmt: skip
        sampler, other = (Sampler(params, 1000) for _ in range(2))
        weights = np.exp((values.astype(np.float64) - values.max()) / max(params.temperature, 1e-3))
        record = record_of(values, float(weights.sum() * rng.choice([1, 1.5, 1 + ERROR])))
        draw = sampler.next_draw()
        token, wanted = drawn_token(record, draw), other._draw_candidates(record)
        assert sampler.next_draw() == draw, "it is not used up"
        if token >= 0:
            assert token == sampler.take(token) == wanted
            assert sampler._random() == other._random() or sampler._greedy, "as many numbers were used"
        drawn, left, none = drawn + (token >= 0), left + (token < 0 and wanted is not None), none + (wanted is None)
    assert drawn > 1500 and left <= 4 and none > 50


def test_what_the_native_module_leaves_to_numpy() -> None:
    """Candidates that are too many, damaged, or of no total; and a choice that depends on a rounding."""
    plain = np.array([2.0, 1.0, 0.5], np.float32)
    sum_of = float(np.exp(plain - 2.0, dtype=np.float64).sum())
    limited, open_ended = (0.7, 3.0, 1.0, 0.0, 0.5), (1.0, 0.0, 0.9, 0.0, 0.5)
    assert drawn_token(record_of(plain, sum_of), limited) >= 0 and drawn_token(record_of(plain, 1.0), open_ended) >= 0
    for value in (np.nan, np.inf):
        assert drawn_token(record_of(np.array([1.0, value], np.float32), 1.0), limited) == -1
    assert drawn_token(record_of(np.full(2, -np.inf, np.float32), 1.0), limited) == -1
    assert drawn_token(record_of(np.zeros(MOST + 1, np.float32)[:0], 1.0), limited) == -1
    more = record_of(np.zeros(MOST, np.float32), 128.0)
    more["count"] = MOST + 1
    assert drawn_token(more, limited) == drawn_token(more, (0.0, *limited[1:])) == -1
    for total in (0.5, np.nan, np.inf, 100.0):
        assert drawn_token(record_of(plain, total), open_ended) == -1
    weights = np.exp((plain.astype(np.float64) - 2.0) / 0.7).cumsum()
    for error, certain in ((0.0, False), (1e-15, False), (1e-9, True), (-1e-9, True)):
        uniform = float(weights[0] / weights[2]) * (1 + error)
        assert (drawn_token(record_of(plain, sum_of), (*limited[:4], uniform)) >= 0) == certain
    equal = record_of(np.zeros(40, np.float32), 40.0)  # of which all is exact
    assert all(drawn_token(equal, (0.7, 40.0, 0.9, 1.0, place / 36)) >= 0 for place in range(36))


def test_who_needs_what() -> None:
    def needs(**options: Any) -> LogitsNeed:
        return Sampler(SamplingParams(**(OFF | options)), 1000).needs

    assert needs(temperature=0) == LogitsNeed.LARGEST
    assert needs(top_k=LIKELIEST) == needs(top_p=0.9) == needs(min_p=0.1) == LogitsNeed.CANDIDATES
    assert needs() == needs(top_k=LIKELIEST + 1) == needs(top_p=0.9, temperature=1e6) == LogitsNeed.LOGITS
    assert needs(top_k=1000, top_p=0.9) == LogitsNeed.CANDIDATES, "that is no limit"
    assert needs(top_k=1000) == LogitsNeed.LOGITS
    assert needs(top_k=5, presence_penalty=0.5) == needs(top_k=5, logit_bias={3: 1.0}) == LogitsNeed.LOGITS
