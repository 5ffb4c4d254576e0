"""A sample of the cases of a test, where all of them would take `make test` too long: a mark, and a flag of pytest.

    @pytest.mark.sampled("kind", ("level", "rows"))
    def test_products(kind: str, level: str, rows: int) -> None: ...

`make test` runs the fewest cases, greedily chosen, among which each kind occurs, and each pair of a level and a number
of rows; without arguments each value of each parameter does. Cases of models count by their kind and activation, so
that each kind occurs with each of its activations; "case.name" stands for each case. On each device anew.

Where only each value occurs, a level meets few types: tests of kernels name pairs with levels. A machine with other
levels runs another sample; sample and rest together are all cases that it has, so nothing is lost on it.

`make test-rest` runs the other cases, and those that are marked as `rest`, of which another test has a part
(`--cases rest`). `--cases all` runs all, as does a case that the command line names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable

import pytest

CHOICES = ("sample", "rest", "all")
ACTIVATIONS = ("hidden_act", "activation_fn_name")
"""Settings of cases of models that name one."""


def counted(item: pytest.Function, name: str) -> str:
    """What a parameter counts by: a case of a model by what its operators are."""
    parameter, _, attribute = name.partition(".")
    value = item.callspec.params[parameter]
    if attribute:
        value = getattr(value, attribute)
    elif hasattr(value, "kind"):
        value = value.kind, *(value.settings.get(key) for key in ACTIVATIONS)
    return repr(value)


def features(item: pytest.Function) -> frozenset[Hashable]:
    """What a case has that must occur in the sample."""
    marker, every = item.get_closest_marker("sampled"), item.callspec.params
    assert marker is not None
    names = [(one,) if isinstance(one, str) else tuple(one) for one in marker.args or every if one != "device"]
    return frozenset((every.get("device"), of, *(counted(item, name) for name in of)) for of in names)


def sample(cases: Iterable[pytest.Function]) -> set[str]:
    """The ids of the fewest cases, greedily, that have all features of all of them."""
    of = {item.nodeid: features(item) for item in cases}
    missing, chosen, times = set().union(*of.values()), set(), Counter[Hashable]()
    while missing:  # of several as good the rarest, so that each of few values meets some of the many; then the first
        best = max(of, key=lambda name: (len(of[name] & missing), -sum(times[feature] for feature in of[name])))
        chosen.add(best)
        times.update(of[best])
        missing -= of.pop(best)
    return chosen


def left_out(items: list[pytest.Function], cases: str, named: Iterable[str] = ()) -> list[pytest.Function]:
    """The tests that do not run. cases: of `CHOICES`; named: arguments of the command line."""
    if cases == "all":
        return []
    of_test: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    some = set().union(*map(sample, of_test.values()), (one for one in named if "[" in one))
    rest = {item.nodeid for item in items if item.get_closest_marker("sampled") or item.get_closest_marker("rest")}
    rest -= some
    return [item for item in items if (item.nodeid in rest) is (cases == "sample")]
