"""The solver: optimal against brute force and against the plain binary program, within capacities, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.placement.power_law import FAMILIES, assumed_profile
from powerinfer.placement.solver import (
    Infeasible,
    greedy,
    least_groups,
    mass_costs,
    random_groups,
    solve,
)

INF = np.inf


def brute_force(a: np.ndarray, b: np.ndarray | None, gpu: int, ram: int | None) -> float:
    """The least cost over all pairs of numbers of all layers; infinite where nothing fits."""
    layers, width = a.shape
    if b is None:
        b = np.full(a.shape, INF)
        b[:, -1] = 0
    pairs = np.array([(k, j) for k in range(width) for j in range(k, width)])
    k, j = np.moveaxis(pairs[np.indices((len(pairs),) * layers).reshape(layers, -1)], -1, 0)  # [layers, choices]
    fits = k.sum(0) <= gpu
    if ram is not None:
        fits &= (j - k).sum(0) <= ram
    every = np.arange(layers)[:, None]
    return float((a[every, k] + b[every, j]).sum(0)[fits].min(initial=INF))


def plain_program(impact: np.ndarray, least: list[int | None], gpu: int, ram: int | None) -> float:
    """Eq. 2 under Eq. 3 and Ineq. 6 to 8 as they stand: a binary for each group and for each layer. -> the mass."""
    import highspy

    layers, groups = impact.shape
    h = highspy.Highs()
    for name, value in (("output_flag", False), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-9)):
        h.setOptionValue(name, value)
    a = [[h.addBinary(obj=-impact[n, g]) for g in range(groups)] for n in range(layers)]
    y = [h.addBinary() for _ in range(layers)]
    h.addConstr(sum(one for row in a for one in row) <= gpu)
    if ram is not None:
        h.addConstr(sum(one for row in a for one in row) >= layers * groups - ram)
    for n, fewest in enumerate(least):
        h.addConstr(sum(a[n]) <= (0 if fewest is None else groups) * y[n])
        h.addConstr(sum(a[n]) >= (fewest or 0) * y[n])
    h.run()
    if h.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return -INF
    return -h.getInfo().objective_function_value


def test_least_groups_is_inequality_4() -> None:
    assert least_groups(1.0, 2.0, 640.0) == 10, "640 neurons: 640 * 1 + 640 <= 640 * 2"
    assert least_groups(1.0, 2.0, 641.0) == 11
    assert least_groups(1.0, 2.0, 0.0) == 1
    assert least_groups(2.0, 2.0, 1.0) is None and least_groups(3.0, 2.0, 0.0) is None


@given(st.floats(1e-9, 1e-6), st.floats(1e-9, 1e-6), st.floats(0, 1e-3))
def test_least_groups_is_the_least(gpu_s: float, cpu_s: float, sync_s: float) -> None:
    found = least_groups(gpu_s, cpu_s, sync_s)
    if found is None:
        assert gpu_s >= cpu_s
        return
    pays = [n * gpu_s + sync_s <= n * cpu_s * (1 + 1e-9) for n in (64 * found, 64 * (found - 1))]
    assert pays[0] and (found == 1 or not pays[1] or 64 * (found - 1) * (cpu_s - gpu_s) <= sync_s * (1 + 1e-7))


VALUES = st.one_of(st.integers(-6, 6).map(float), st.floats(-1, 1, width=16))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_any_costs_against_brute_force(data: st.DataObject, layers: int, groups: int) -> None:
    """Costs of any form: holes, ties, rising and falling, with and without a disk and a bound on the RAM."""
    shape = (layers, groups + 1)

    def table(holes: bool) -> np.ndarray:
        values = st.one_of(VALUES, st.just(INF)) if holes else VALUES
        return np.array(
            data.draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        ).reshape(shape)

    a = table(holes=True)
    a[:, 0] = np.where(np.isfinite(a[:, 0]), a[:, 0], 0)
    b = table(holes=False) if data.draw(st.booleans()) else None
    gpu = data.draw(st.integers(0, layers * groups))
    ram = data.draw(st.one_of(st.none(), st.integers(0, layers * groups)))
    wanted = brute_force(a, b, gpu, ram)
    if wanted == INF:
        with pytest.raises(Infeasible):
            solve(a, b, gpu, ram)
        return
    answer = solve(a, b, gpu, ram)
    assert answer.optimal and answer.cost == pytest.approx(wanted, abs=1e-9)
    assert answer.bound <= answer.cost + 1e-9
    assert answer.gpu.sum() <= gpu and (ram is None or (answer.kept - answer.gpu).sum() <= ram)
    assert (answer.gpu >= 0).all() and (answer.gpu <= answer.kept).all() and (answer.kept <= groups).all()
    again = solve(a, b, gpu, ram)
    assert (again.gpu == answer.gpu).all() and (again.kept == answer.kept).all()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.booleans())
def test_the_papers_program_against_plain_binaries(data: st.DataObject, layers: int, groups: int, whole: bool) -> None:
    """The reformulation gives the mass of the program as the paper has it, a binary for each group."""
    value = st.integers(0, 9) if whole else st.floats(0, 1, width=16)
    rows = [data.draw(st.lists(value, min_size=groups, max_size=groups)) for _ in range(layers)]
    impact = -np.sort(-np.array(rows, np.float64), axis=1)
    least = data.draw(st.lists(st.one_of(st.none(), st.integers(1, groups + 1)), min_size=layers, max_size=layers))
    gpu = data.draw(st.integers(0, layers * groups))
    ram = data.draw(st.one_of(st.none(), st.integers(0, layers * groups)))
    wanted = plain_program(impact, least, gpu, ram)
    if wanted == -INF:
        with pytest.raises(Infeasible):
            solve(mass_costs(impact, least), None, gpu, ram)
        return
    answer = solve(mass_costs(impact, least), None, gpu, ram)
    assert answer.optimal and -answer.cost == pytest.approx(wanted, abs=1e-6)
    for taken, fewest in zip(answer.gpu, least, strict=True):
        assert taken == 0 or (fewest is not None and taken >= fewest)
    if ram is None:
        heuristic = greedy(impact, least, gpu)
        assert heuristic.sum() <= gpu
        mass = sum(impact[n, :taken].sum() for n, taken in enumerate(heuristic))
        assert -answer.cost >= mass - 1e-9
        assert all(not taken or (f is not None and taken >= f) for taken, f in zip(heuristic, least, strict=True))


def test_greedy_is_beaten_where_least_counts() -> None:
    """A hot layer that takes many groups or none: greedy gives it up or fills it, the program weighs."""
    impact = np.array([[9.0, 1.0, 1.0], [5.0, 4.0, 0.0]])
    answer = solve(mass_costs(impact, [3, 1]), None, 3, None)
    assert answer.gpu.tolist() == [3, 0] and answer.cost == -11
    assert solve(mass_costs(impact, [3, 1]), None, 2, None).gpu.tolist() == [0, 2]


@pytest.mark.parametrize("least", [1, 37])
def test_the_shape_of_opt_175b(least: int) -> None:
    """96 layers of 49152 neurons: proven optimal, deterministic, never below greedy."""
    profile = assumed_profile(FAMILIES["opt"], (49152,) * 96)
    impact = np.stack([counts.reshape(-1, 64).sum(axis=1) for counts in profile.counts]).astype(np.float64)
    budget = impact.size // 10
    answer = solve(mass_costs(impact, [least] * 96), None, budget, None)
    assert answer.optimal and answer.gpu.sum() <= budget and answer.seconds < 10
    assert ((answer.gpu == 0) | (answer.gpu >= least)).all()
    taken = greedy(impact, [least] * 96, budget)
    assert -answer.cost >= sum(impact[n, :k].sum() for n, k in enumerate(taken))
    assert (answer.gpu == solve(mass_costs(impact, [least] * 96), None, budget, None).gpu).all()


def test_out_of_time_there_is_an_answer_that_says_so() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=(30, 40)) for _ in range(2))
    exact = solve(a, b, 500, 200)
    answer = solve(a, b, 500, 200, time_limit=0.0)
    assert exact.optimal and exact.cost <= answer.cost
    assert answer.bound <= exact.cost + 1e-9 and (answer.optimal or answer.bound < answer.cost)
    assert answer.gpu.sum() <= 500 and (answer.kept - answer.gpu).sum() <= 200


def test_random_groups_are_as_many_as_fit_and_hang_on_the_seed() -> None:
    allowed = np.array([True, False, True])
    one = random_groups(3, 10, 7, allowed, seed=1)
    assert one.sum() == 7 and one[1] == 0 and (one <= 10).all()
    assert (one == random_groups(3, 10, 7, allowed, seed=1)).all()
    assert any((one != random_groups(3, 10, 7, allowed, seed)).any() for seed in range(2, 6))
    assert random_groups(3, 10, 99, allowed, seed=1).tolist() == [10, 0, 10]
    assert random_groups(3, 10, 0, allowed, seed=1).tolist() == [0, 0, 0]
