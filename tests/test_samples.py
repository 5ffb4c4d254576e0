"""Samples of cases: every value and pair that a mark names occurs in one, and `--cases rest` has what it leaves out."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from families import CASES
from samples import features, left_out, sample


def make(test: str, marks: tuple[Any, ...] | None, rest: bool = False, **params: Any) -> Any:
    """A case of a test, as pytest collects it. marks: arguments of its mark as sampled; None: it has none; rest: it is
    marked so."""
    markers = {} if marks is None else {"sampled": pytest.mark.sampled(*marks).mark}
    markers |= {"rest": pytest.mark.rest.mark} if rest else {}
    name = "-".join(str(getattr(value, "name", value)) for value in params.values())
    about = SimpleNamespace(params=params)
    return SimpleNamespace(nodeid=f"{test}[{name}]", callspec=about, get_closest_marker=markers.get)


def grid(test: str, *marks: Any, **values: Any) -> list[Any]:
    return [make(test, marks, **dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]


def values_of(cases: list[Any], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(case.callspec.params[name] for name in names) for case in cases}


@pytest.mark.parametrize("marks", [(), (("kind", "level"),), (("kind", "level"), ("rows", "kind"), "level")])
def test_nothing_that_a_mark_names_is_lost(marks: tuple[Any, ...]) -> None:
    cases = grid("a", *marks, device=["cpu", "cuda"], kind="pqrst", level=[1, 2, 3], rows=[1, 9])
    names = sample(cases)
    some = [case for case in cases if case.nodeid in names]
    assert set().union(*map(features, some)) == set().union(*map(features, cases))
    for of in marks or ("kind", "level", "rows"):
        of = ("device", *((of,) if isinstance(of, str) else of))
        assert values_of(some, *of) == values_of(cases, *of), of
    fewest = 2 * (15 if marks else 5)  # on either device
    assert fewest <= len(some) <= 1.2 * fewest


def test_values_of_the_shorter_parameter_occur_equally_often() -> None:
    cases = grid("a", kind="pqrstuvwxyz", level=[1, 2, 3])
    names = sample(cases)
    levels = Counter(case.callspec.params["level"] for case in cases if case.nodeid in names)
    assert sorted(levels.values()) == [3, 4, 4]


def test_each_kind_of_model_is_in_a_sample_with_each_activation() -> None:
    cases = [make("a", (), case=case) for case in CASES]
    names = sample(cases)
    some = [case.callspec.params["case"] for case in cases if case.nodeid in names]
    of_sample, of_all = (
        [(case.kind, case.settings.get("hidden_act"), case.settings.get("activation_fn_name")) for case in cases]
        for cases in (some, CASES)
    )
    assert of_sample == list(dict.fromkeys(of_all))
    assert len({kind for kind, *_ in of_sample}) < len(of_sample) < 0.6 * len(CASES)
    assert "openelm-relu" in {case.name for case in some}, "its activation has a name of its own"


def test_a_mark_may_name_every_case() -> None:
    marks = "case.name", ("case", "layout")
    cases = [make("a", marks, case=case, layout=layout) for case in CASES for layout in case.layouts]
    names = sample(cases)
    some = [case for case in cases if case.nodeid in names]
    assert {case.callspec.params["case"].name for case in some} == {case.name for case in CASES}
    pairs = [
        {(case.callspec.params["case"].kind, case.callspec.params["layout"]) for case in each} for each in (some, cases)
    ]
    assert pairs[0] == pairs[1] and len(some) < 0.8 * len(cases)


def test_the_others_run_with_the_rest() -> None:
    """Of each test by itself; tests without a mark do not run again, and a case that is named runs."""
    cases = [
        *grid("a", kind="pq", rows=[1, 2]),
        *grid("b", kind="pq"),
        make("c", None, kind="p"),
        make("c", None, True),
    ]
    without, rest = left_out(cases, "sample"), left_out(cases, "rest")
    assert [case.nodeid for case in without] == ["a[p-2]", "a[q-1]", "c[]"]
    assert len(without) + len(rest) == len(cases) and not {case.nodeid for case in without} & {
        case.nodeid for case in rest
    }
    assert left_out(cases, "all") == []
    assert [case.nodeid for case in left_out(cases, "sample", ["-x", "a[p-2]"])] == ["a[q-1]", "c[]"]
