"""Placing groups of neurons on the GPU, in RAM and on disk: the optimum, for any cost function per layer.

The programs
------------
The paper's (arXiv 2312.12456, section 6.3) has a binary a_(d,e) for each group e of 64 neurons and device d, and a
binary y_l for each layer:

    v_e = f_e, how often the group's neurons fire together                                  (Eq. 1)
    maximise  sum over e of a_(gpu,e) v_e                                                   (Eq. 2)
    sum over d of a_(d,e) = 1 for every e                                                   (Eq. 3)
    C_l T_l^gpu + T_sync <= C_l T_l^cpu, with T_l^d = M_l / bandwidth_d                     (Ineq. 4, Eq. 5)
    sum over e of a_(d,e) M_e <= MCap_d                                                     (Ineq. 6)
    C_l y_l <= (neurons of layer l on the GPU) <= K y_l                                     (Ineq. 7, 8)

Ours has the same variables and capacities, a third device, the disk, and minimises the predicted time of a token.

The reformulation
-----------------
Groups have equal bytes, so capacities are numbers of groups. Let a layer's groups be sorted by impact, v_e.

*Prefixes.* Take a feasible answer of the paper's program that has group e of a layer on the GPU and a hotter one e' of
the same layer not. Swapping them changes neither the number of the layer's groups on the GPU nor any capacity, so all
constraints hold, and the objective grows by v_e' - v_e >= 0. Repeating this, some optimum selects the first k_l groups
of every layer: 73,728 binaries of OPT-175B become 96 whole numbers k_l, each 0 or at least C_l (the binary y_l is
whether k_l > 0), with the value F_l(k_l), the sum of the first k_l impacts. For time, a placement is by definition a
prefix of the order on the GPU, the next groups in RAM and the rest on disk: k_l <= j_l. (T_cpu and T_disk decrease with
what is removed from them, so no other set of that size is faster, unless the layer waits for the GPU.)

Both programs are then one: with A_l(k) = -F_l(k), infinite from 1 to C_l - 1, or A_l(k) the time of layer l with k
groups on the GPU, and B_l(j) the time of reading the groups from j on,

    minimise sum of A_l(k_l) + B_l(j_l)   with   k_l <= j_l,   sum of k_l <= G,   sum of j_l - k_l <= R

for capacities of G and R groups. A and B may be any functions.

*Prices.* For prices x, y >= 0 of a group of GPU and RAM, the sum over the layers of

    m_l = min over k <= j of A_l(k) + B_l(j) + x k + y (j - k)

less x G + y R is a lower bound L of the optimum (Lagrange). The best prices are the optimum of a linear program in two
unknowns, which HiGHS solves by cutting planes, with one constraint for each answer found. If an answer of cost U is
known, then in every better one a layer costs at most U - L more than m_l: all numbers k and j beyond that can be
excluded, exactly. Often U = L, and nothing remains. Otherwise the remaining numbers are searched: with one capacity (no
disk) by dynamic programming, whose time does not depend on the instance; with two as binaries of an integer program
that HiGHS solves to proven optimality, or until its time limit.

`greedy` and `random_groups` need no solver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import highspy

Float64 = NDArray[np.float64]
Numbers = NDArray[np.int64]

GROUP = 64
"""Neurons per placement group."""

TIME_LIMIT = 10.0
"""Default limit in seconds of CPU time; then the best answer so far is used."""

_ROUNDS = 200  # maximum iterations of the search for prices


@dataclass(frozen=True, eq=False)
class Answer:
    """gpu: number of groups on the GPU, kept: on the GPU or in RAM; int64 [layers].

    cost: the objective; bound: a lower bound of any answer; optimal: whether this one is proven optimal, within
    rounding. seconds: solving time; considered: numbers k and j that the prices could not exclude, 0 if they proved the
    answer.
    """

    gpu: Numbers
    kept: Numbers
    cost: float
    bound: float
    optimal: bool
    seconds: float
    considered: int


class Infeasible(Exception):
    """No answer fits the capacities, or none was found in time."""


def least_groups(gpu_s: float, cpu_s: float, sync_s: float) -> int | None:
    """C_l in groups, at least one: the smallest n with n T_gpu + T_sync <= n T_cpu (Ineq. 4); None: there is none.

    Times are in seconds per neuron.
    """
    if gpu_s >= cpu_s:
        return None
    return max(1, math.ceil(sync_s / (cpu_s - gpu_s) / GROUP - 1e-9))


def mass_costs(impact: Float64, least: Sequence[int | None]) -> Float64:
    """A_l(k) of the paper's program, [layers, groups + 1]. impact: v of every group, descending, [layers, groups]."""
    costs = np.zeros((impact.shape[0], impact.shape[1] + 1))
    np.cumsum(-impact, axis=1, out=costs[:, 1:])
    for layer, fewest in enumerate(least):
        costs[layer, 1 : costs.shape[1] if fewest is None else min(fewest, costs.shape[1])] = np.inf
    return costs


def solve(
    gpu_costs: Float64,
    disk_costs: Float64 | None,
    gpu_groups: int,
    ram_groups: int | None,
    time_limit: float = TIME_LIMIT,
    starts: Sequence[tuple[Numbers, Numbers]] = (),
) -> Answer:
    """The best k_l and j_l (see above).

    gpu_costs: A [layers, groups + 1], finite at 0, infinite where a number is forbidden; disk_costs: B of the same
    shape, None without a disk, then all j_l are `groups`. gpu_groups, ram_groups: the capacities; None: RAM has room
    for all. starts: feasible answers (k, j); none of them is better than the result. Infeasible if nothing fits.
    Deterministic, unless `time_limit` (seconds) expires.
    """
    begin = time.perf_counter()
    until = time.process_time() + time_limit  # CPU time, so that the answer does not depend on other programs
    program = _Program(gpu_costs, disk_costs, gpu_groups, ram_groups)
    priced = program.priced(starts)
    best, bound, considered = priced.found, priced.bound, 0
    if best is None or best.cost - bound > program.rounding:
        method = program.by_table if disk_costs is None else program.by_highs
        best, bound, considered = method(priced, until)
    if best is None:
        raise Infeasible
    optimal = best.cost - bound <= program.rounding
    seconds = time.perf_counter() - begin
    return Answer(best.gpu, best.kept, best.cost, best.cost if optimal else bound, optimal, seconds, considered)


@dataclass(frozen=True, eq=False)
class _Found:
    gpu: Numbers
    kept: Numbers
    cost: float


@dataclass(frozen=True, eq=False)
class _Priced:
    """The best prices found, x and y; their bound; the best feasible answer found on the way.

    gpu_slack, kept_slack: [layers, groups + 1], minimum cost above the bound of an answer with this k or this j. a, b:
    the separate costs of k and j, prices included, relative to those of the layer's best pair.
    """

    x: float
    y: float
    bound: float
    found: _Found | None
    gpu_slack: Float64
    kept_slack: Float64
    a: Float64
    b: Float64

    def tried(self, slack: Float64, rounding: float) -> list[Numbers]:
        """For each layer the numbers k and j that a better answer could have."""
        gap = np.inf if self.found is None else self.found.cost - self.bound
        return [np.flatnonzero(row <= min(gap + rounding, 1e300)) for row in slack]


class _Program:
    def __init__(self, a: Float64, b: Float64 | None, gpu_groups: int, ram_groups: int | None) -> None:
        layers, width = a.shape
        assert np.isfinite(a[:, 0]).all() and not np.isnan(a).any() and gpu_groups >= 0
        if b is None:
            b = np.full(a.shape, np.inf)
            b[:, -1] = 0.0
        self.a, self.b = a, b
        self.capacity = (gpu_groups, layers * width if ram_groups is None else ram_groups)
        self.ranges = sum(float(np.ptp(row[np.isfinite(row)])) for costs in (a, b) for row in costs)
        size = sum(float(np.abs(row[np.isfinite(row)]).max()) for costs in (a, b) for row in costs)
        self.rounding = 1e-13 * max(size, 1e-300)

    def answer(self, gpu: Numbers, kept: Numbers) -> _Found:
        rows = np.arange(len(gpu))
        return _Found(gpu, kept, math.fsum(self.a[rows, gpu]) + math.fsum(self.b[rows, kept]))

    def nothing_on_the_gpu(self) -> _Found | None:
        """An answer that always exists if there is a disk; None if it does not fit."""
        gpu = np.zeros(len(self.a), np.int64)
        kept = np.isfinite(self.b).argmax(axis=1)
        return self.answer(gpu, kept) if self.fits(gpu, kept) else None

    def fits(self, gpu: Numbers, kept: Numbers) -> bool:
        return int(gpu.sum()) <= self.capacity[0] and int((kept - gpu).sum()) <= self.capacity[1]

    def at(self, x: float, y: float) -> tuple[float, Numbers, Numbers]:
        """The bound for the prices, and the k and j where it is attained."""
        a, b = self._with_prices(x, y)
        later = _suffix_min(b)
        whole = a + later
        gpu = whole.argmin(axis=1)
        rows = np.arange(len(gpu))
        kept = np.where(np.arange(a.shape[1]) >= gpu[:, None], b, np.inf).argmin(axis=1)
        return math.fsum(whole[rows, gpu]) - x * self.capacity[0] - y * self.capacity[1], gpu, kept

    def _with_prices(self, x: float, y: float) -> tuple[Float64, Float64]:
        numbers = np.arange(self.a.shape[1])
        return self.a + (x - y) * numbers, self.b + y * numbers

    def priced(self, starts: Sequence[tuple[Numbers, Numbers]]) -> _Priced:
        """Prices by cutting planes (Kelley): every answer found bounds the dual function for all prices."""
        scale = self.ranges / max(1, self.a.size) or 1.0  # approximate cost of a group
        master = _Master(max_price=1e3 * self.ranges / scale)
        best, found, beyond = (-np.inf, 0.0, 0.0), self.nothing_on_the_gpu(), None
        x = y = 0.0
        for _ in range(_ROUNDS):
            bound, gpu, kept = self.at(x * scale, y * scale)
            if bound > best[0]:
                best = (bound, x * scale, y * scale)
            one = self.answer(gpu, kept)
            if not self.fits(gpu, kept):
                beyond = one if beyond is None or one.cost > beyond.cost else beyond
            elif found is None or one.cost < found.cost:
                found = one
            over = (int(gpu.sum()) - self.capacity[0], int((kept - gpu).sum()) - self.capacity[1])
            upper, x, y = master.add(one.cost / scale, over)
            if upper * scale - best[0] <= max(self.rounding, 1e-9 * scale):
                break
        known = [self.answer(gpu, kept) for gpu, kept in starts] + ([] if found is None else [found])
        if found is not None and beyond is not None:
            known.append(self.between(found, beyond))
        found = min((self.polished(one) for one in known), key=lambda one: one.cost, default=None)
        bound, x, y = best
        a, b = self._with_prices(x, y)
        later, earlier = _suffix_min(b), np.minimum.accumulate(a, axis=1)
        gpu = (a + later).argmin(axis=1)[:, None]
        kept = np.where(np.arange(a.shape[1]) >= gpu, b, np.inf).argmin(axis=1)[:, None]
        a0, b0 = np.take_along_axis(a, gpu, 1), np.take_along_axis(b, kept, 1)
        return _Priced(x, y, bound, found, a + later - a0 - b0, b + earlier - a0 - b0, a - a0, b - b0)

    def between(self, found: _Found, beyond: _Found) -> _Found:
        """A feasible answer with the numbers of `beyond` for as many layers as fit, from the first, else of `found`."""
        gpu, kept = found.gpu.copy(), found.kept.copy()
        for layer in range(len(gpu)):
            before = gpu[layer], kept[layer]
            gpu[layer], kept[layer] = beyond.gpu[layer], beyond.kept[layer]
            if not self.fits(gpu, kept):
                gpu[layer], kept[layer] = before
        mixed = self.answer(gpu, kept)
        return mixed if mixed.cost < found.cost else found

    def polished(self, found: _Found) -> _Found:
        """The same with the remaining room given to the layers that gain most, one after another."""
        gpu, kept = found.gpu.copy(), found.kept.copy()
        rows, numbers = np.arange(len(gpu)), np.arange(self.a.shape[1])
        for _ in range(len(gpu)):
            left = self.capacity[0] - int(gpu.sum())
            within = (numbers >= gpu[:, None]) & (numbers <= np.minimum(gpu + left, kept)[:, None])
            costs = np.where(within, self.a, np.inf)
            numbers_there = costs.argmin(axis=1)
            gain = self.a[rows, gpu] - costs[rows, numbers_there]
            layer = int(gain.argmax())
            if gain[layer] <= 0:
                break
            gpu[layer] = numbers_there[layer]
        if np.isfinite(self.b).all():
            kept = fill(gpu, self.b, self.capacity[1], int(numbers[-1]))
        better = self.answer(gpu, kept)
        return better if better.cost < found.cost else found

    def by_table(self, priced: _Priced, until: float) -> tuple[_Found | None, float, int]:
        """Without a disk: (the best answer, a bound, number of k searched)."""
        layers, width = self.a.shape
        tried = priced.tried(priced.gpu_slack, self.rounding)
        least = max(0, layers * (width - 1) - self.capacity[1])  # what does not fit into RAM
        gpu = _table(self.a, tried, self.capacity[0], least, until)
        considered = sum(map(len, tried))
        if gpu is None:
            return priced.found, priced.bound, considered
        found = self.answer(gpu, np.full(layers, width - 1))
        return found, found.cost, considered

    def by_highs(self, priced: _Priced, until: float) -> tuple[_Found | None, float, int]:
        """The same with a disk, by HiGHS: the remaining numbers k and j, each a binary."""
        gap = np.inf if priced.found is None else priced.found.cost - priced.bound
        considered = sum(map(len, priced.tried(priced.gpu_slack, self.rounding)))
        considered += sum(map(len, priced.tried(priced.kept_slack, self.rounding)))
        found, solved = self._binaries(priced, gap, until)
        known = [one for one in (found, priced.found) if one is not None]
        best = min(known, key=lambda one: one.cost, default=None)
        return best, best.cost if solved and best is not None else priced.bound, considered

    def _binaries(self, priced: _Priced, gap: float, until: float) -> tuple[_Found | None, bool]:
        """(the best answer with numbers k and j of slack up to `gap`, each a binary; whether HiGHS finished)."""
        import highspy

        reach = gap + self.rounding
        gpu_layer, gpu_number = np.nonzero(priced.gpu_slack <= reach)
        kept_layer, kept_number = np.nonzero(priced.kept_slack <= reach)
        m, n, layers = len(gpu_layer), len(kept_layer), len(self.a)
        # Columns: a binary for each number, and the unused part of either capacity, at its price.
        prices = [priced.x, priced.y]
        cost = np.concatenate([priced.a[gpu_layer, gpu_number], priced.b[kept_layer, kept_number], prices])
        left = np.array([2 * layers, 2 * layers + 1])
        entries = [  # (rows, columns, values)
            (gpu_layer, np.arange(m), np.ones(m)),  # one k of each layer
            (layers + kept_layer, m + np.arange(n), np.ones(n)),  # one j
            (np.full(m, left[0]), np.arange(m), gpu_number),
            (np.full(m, left[1]), np.arange(m), -gpu_number),
            (np.full(n, left[1]), m + np.arange(n), kept_number),
            (left, m + n + np.arange(2), np.ones(2)),
            (left[1] + 1 + gpu_layer, np.arange(m), -gpu_number),  # k <= j
            (left[1] + 1 + kept_layer, m + np.arange(n), kept_number),
        ]
        rows, columns, values = (np.concatenate(each) for each in zip(*entries, strict=True))
        by_column = np.lexsort((rows, columns))
        equal = np.concatenate([np.ones(2 * layers), self.capacity])
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = m + n + 2, 3 * layers + 2
        lp.col_cost_ = cost / (gap or max(prices) or 1.0)  # so that relevant differences are not small
        lp.col_lower_ = np.zeros(m + n + 2)
        lp.col_upper_ = np.concatenate([np.ones(m + n), [highspy.kHighsInf] * 2])
        lp.row_lower_ = np.concatenate([equal, np.zeros(layers)])
        lp.row_upper_ = np.concatenate([equal, np.full(layers, highspy.kHighsInf)])
        lp.integrality_ = [highspy.HighsVarType.kInteger] * (m + n) + [highspy.HighsVarType.kContinuous] * 2
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=m + n + 2))])
        lp.a_matrix_.index_ = rows[by_column]
        lp.a_matrix_.value_ = values[by_column].astype(np.float64)
        highs = _highs(time_limit=max(0.0, until - time.process_time()))
        highs.passModel(lp)
        highs.run()
        solved = highs.getModelStatus() in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
        if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, solved
        chosen = np.array(highs.getSolution().col_value)
        gpu, kept = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
        np.add.at(gpu, gpu_layer, gpu_number * (chosen[:m] > 0.5))
        np.add.at(kept, kept_layer, kept_number * (chosen[m : m + n] > 0.5))
        assert self.fits(gpu, kept) and (gpu <= kept).all(), "HiGHS exceeded the capacities"
        return self.answer(gpu, kept), solved


class _Master:
    """max t, t <= cost + x over_gpu + y over_ram for every answer met, 0 <= x, y <= max_price."""

    def __init__(self, max_price: float) -> None:
        import highspy

        self._infinity = highspy.kHighsInf
        self._highs = _highs()
        for cost, low, high in ((-1.0, -self._infinity, self._infinity), (0.0, 0.0, max_price), (0.0, 0.0, max_price)):
            self._highs.addCol(cost, low, high, 0, np.array([], np.int32), np.array([]))

    def add(self, cost: float, over: tuple[int, int]) -> tuple[float, float, float]:
        """Add the constraint of an answer; (t, x, y)."""
        values = np.array([1.0, -over[0], -over[1]])
        self._highs.addRow(-self._infinity, cost, 3, np.arange(3, dtype=np.int32), values)
        self._highs.run()
        t, x, y = self._highs.getSolution().col_value
        return t, max(0.0, x), max(0.0, y)


def _highs(**options: Any) -> highspy.Highs:
    import highspy

    highs = highspy.Highs()
    fixed = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-7}
    for name, value in (fixed | options).items():
        highs.setOptionValue(name, value)
    return highs


def _table(costs: Float64, tried: Sequence[Numbers], room: int, least: int, until: float) -> Numbers | None:
    """The best number of groups of each layer, of those to be searched, `least` to `room` in total.

    Dynamic programming: layer by layer, the least cost for each number of groups used so far. None: there is none, or
    the time limit expired.
    """
    layers, width = costs.shape
    room = min(room, layers * (width - 1))
    best, top = np.full(room + 1, np.inf), 0
    best[0] = 0.0
    chosen = np.zeros((layers, room + 1), np.int32)
    for layer, numbers in enumerate(tried):
        last, before = best, top + 1
        best, top = np.full(room + 1, np.inf), min(room, top + int(numbers[-1]))
        for number in numbers[numbers <= room]:
            n = min(before, room + 1 - number)
            new = last[:n] + costs[layer, number]
            better = new < best[number : number + n]
            np.copyto(best[number : number + n], new, where=better)
            np.copyto(chosen[layer, number : number + n], number, where=better)
        if time.process_time() > until:
            return None
    used = least + int(np.argmin(best[least:])) if least <= room else 0
    if least > room or best[used] == np.inf:
        return None
    gpu = np.zeros(layers, np.int64)
    for layer in reversed(range(layers)):
        gpu[layer] = chosen[layer, used]
        used -= int(gpu[layer])
    return gpu


def _suffix_min(values: Float64) -> Float64:
    return np.asarray(np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1])


# ---------------------------------------------------------------- without a solver


def greedy(impact: Float64, least: Sequence[int | None], gpu_groups: int) -> Numbers:
    """The groups of largest impact, whatever their layer, up to the capacity; int64 [layers].

    Layers that would get fewer than `least` are excluded, the worst first, and the rest is distributed again.
    impact: [layers, groups], descending.
    """
    layers, groups = impact.shape
    allowed = np.array([fewest is not None and fewest <= groups for fewest in least])
    while True:
        order = np.argsort(np.where(allowed[:, None], -impact, np.inf), axis=None, kind="stable")
        taken = np.bincount(order[: min(gpu_groups, groups * int(allowed.sum()))] // groups, minlength=layers)
        short = [n for n in range(layers) if allowed[n] and 0 < taken[n] < (least[n] or 0)]
        if not short:
            return taken.astype(np.int64)
        allowed[min(short, key=lambda n: float(impact[n, : least[n]].sum()))] = False


def random_groups(layers: int, groups: int, gpu_groups: int, allowed: NDArray[np.bool_], seed: int) -> Numbers:
    """Number of groups per layer in a random choice of `gpu_groups` groups of the allowed layers; int64 [layers]."""
    which = np.flatnonzero(allowed)
    chosen = np.random.default_rng(seed).permutation(len(which) * groups)[:gpu_groups]
    return np.bincount(which[chosen // groups] if len(chosen) else chosen, minlength=layers).astype(np.int64)


def fill(gpu: Numbers, disk_costs: Float64 | None, ram_groups: int | None, groups: int) -> Numbers:
    """The j_l for given k_l: RAM holds the groups that cost most to read from disk; int64 [layers].

    Optimal if the costs are convex, as for groups sorted by impact.
    """
    if disk_costs is None or ram_groups is None:
        return np.full(len(gpu), groups)
    gain = -np.diff(disk_costs, axis=1)
    gain = np.where(np.arange(groups) < gpu[:, None], np.inf, gain)
    gain = np.minimum.accumulate(gain, axis=1)  # a group is placed only after those before it
    gain = np.where(np.arange(groups) < gpu[:, None], -np.inf, gain)
    count = min(ram_groups, groups * len(gpu) - int(gpu.sum()))
    order = np.argsort(-gain, axis=None, kind="stable")[:count]
    return np.asarray(gpu + np.bincount(order // groups, minlength=len(gpu)), np.int64)


def top_up(gpu: Numbers, kept: Numbers, ram_groups: int, groups: int) -> Numbers:
    """Give RAM that no needed group uses to the first layers that have groups on disk."""
    kept, left = kept.copy(), ram_groups - int((kept - gpu).sum())
    for layer in range(len(kept)):
        more = min(left, groups - int(kept[layer]))
        kept[layer] += more
        left -= more
    return kept
