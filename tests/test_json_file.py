"""The checked reader: what fits the type hints becomes the dataclass, else one line names the field."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.json_file import Between, Length, Line, checked, of_kind, parse_json, read_limited


@dataclass(frozen=True)
class Inner:
    name: Line
    share: Annotated[float, Between(0, 1)]


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Between(1, 9)]
    flag: bool
    way: Literal["dense", "exact"]
    inner: Inner
    table: Annotated[Mapping[str, float], Length(3)]
    sizes: dict[Annotated[int, Between(1, 100)], int]
    pair: tuple[int, float]
    many: tuple[Inner, ...]
    rows: list[list[int]]
    text: Annotated[str, Length(5)] | None
    about: Any
    more: Annotated[list[int], Length(2, smallest=1)] = field(default_factory=lambda: [1])
    low: int = 0

    def __post_init__(self) -> None:
        if self.low > self.count:
            raise ValueError("low is more than count")


def document() -> dict[str, Any]:
    return {
        "count": 3,
        "flag": True,
        "way": "exact",
        "inner": {"name": "a", "share": 1},
        "table": {"x": 1, "y": 2.5},
        "sizes": {"4": 7},
        "pair": [1, 2],
        "many": [{"name": "b", "share": 0.5}],
        "rows": [[1], []],
        "text": None,
        "about": {"anything": [None, {}]},
    }


def test_what_fits_is_read() -> None:
    outer = checked(Outer, document(), "f")
    assert outer == Outer(
        3, True, "exact", Inner("a", 1.0), {"x": 1.0, "y": 2.5}, {4: 7}, (1, 2.0), (Inner("b", 0.5),), [[1], []], None,
        {"anything": [None, {}]},
    )  # fmt: skip
    assert type(outer.inner.share) is float and type(outer.pair[1]) is float and type(outer.table["x"]) is float
    again = json.loads(json.dumps(dataclasses.asdict(outer)))
    assert checked(Outer, again, "f") == outer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count is '0', not a whole number from 1 to 9"),
        ({"count": 10**300}, "count is "),
        ({"count": True}, "count is 'True', not a whole number"),
        ({"count": 3.0}, "count is '3.0', not a whole number"),
        ({"flag": 1}, "flag is '1', not true or false"),
        ({"way": "guess"}, "way is 'guess', not one of dense, exact"),
        ({"way": ["dense"]}, "way is "),
        ({"inner": []}, r"inner is '\[\]', not a JSON object"),
        ({"inner": {"name": "a"}}, "inner.share is missing"),
        ({"inner": {"name": "a", "share": 1.5}}, "inner.share is '1.5', not a number from 0 to 1"),
        ({"inner": {"name": "a", "share": float("nan")}}, "inner.share is 'nan'"),
        ({"inner": {"name": "a", "share": False}}, "inner.share is 'False'"),
        ({"inner": {"name": "a\nb", "share": 1}}, "inner.name is .*, not a line of text"),
        ({"inner": {"name": "a" * 3000, "share": 1}}, "inner.name has a length of 3000"),
        ({"table": {"x": None}}, "table.x is 'None'"),
        ({"table": {"x": 10**400}}, "table.x is "),
        ({"table": dict.fromkeys("abcd", 1)}, "table has a length of 4, not 0 to 3"),
        ({"table": {"bad\nkey": "x"}}, r"table.bad\\nkey is 'x'"),
        ({"sizes": {"0": 1}}, "a key of sizes is '0', not a whole number from 1 to 100"),
        ({"sizes": {"7": 1, "07": 2}}, "a key of sizes is '07', not a whole number from 1 to 100"),
        ({"sizes": {"1.5": 1}}, "a key of sizes is '1.5'"),
        ({"sizes": {"-1": 1}}, "a key of sizes is '-1'"),
        ({"sizes": {"٣": 1}}, "a key of sizes is"),
        ({"sizes": {"9" * 5000: 1}}, "a key of sizes is"),
        ({"pair": [1]}, "pair has a length of 1, not 2"),
        ({"pair": [1, 2, 3]}, "pair has a length of 3, not 2"),
        ({"pair": [1.5, 2]}, r"pair\[0\] is '1.5', not a whole number"),
        ({"many": [{"name": "b", "share": 0.5}, 3]}, r"many\[1\] is '3', not a JSON object"),
        ({"many": {}}, "many is '{}', not a list"),
        ({"rows": [[1], [2, "x"]]}, r"rows\[1\]\[1\] is 'x'"),
        ({"rows": [[0]] * 5000}, "rows has a length of 5000"),
        ({"text": "longer"}, "text has a length of 6"),
        ({"text": 3}, "text is '3', not a text"),
        ({"more": []}, "more has a length of 0, not 1 to 2"),
        ({"low": 4}, "low is more than count"),
        ({"other": 1}, "other is not known"),
        ({"x\x1b" * 500: 1}, "is not known"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^f: {message}" if "known" not in message else message) as caught:
        checked(Outer, document() | change, "f")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(Outer) if one.name not in ("more", "low")])
def test_a_field_without_default_must_be_there(name: str) -> None:
    whole = document()
    del whole[name]
    with pytest.raises(ModelError, match=f"^f: {name} is missing$"):
        checked(Outer, whole, "f")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


@given(VALUES, st.sampled_from(sorted(document())))
def test_any_value_is_read_or_refused(value: Any, name: str) -> None:
    for whole in (value, document() | {name: value}, document() | {"inner": {"name": "a", "share": value}}):
        try:
            outer = checked(Outer, whole, "f")
        except ModelError as error:
            assert str(error).startswith("f: ") and "\n" not in str(error) and len(str(error)) < 300
        else:
            assert 1 <= outer.count <= 9 and 0 <= outer.inner.share <= 1


def test_a_type_that_it_does_not_know_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError):
        checked(set, {}, "f")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff{}", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1, "a": 1}', b"[" * 100_000, b"9" * 5000,
     b"\xef\xbb\xbf{}"],
)  # fmt: skip
def test_text_that_is_no_json(text: bytes) -> None:
    with pytest.raises(ModelError, match=r"^f: "):
        parse_json(text, "f")


def test_kind_and_format() -> None:
    assert of_kind({"kind": "k", "format": 2, "a": 1}, "k", 2, "f") == {"a": 1}
    for bad in (None, [], {}, {"kind": ["k"], "format": 2}, {"kind": "other", "format": 2}):
        with pytest.raises(ModelError, match=r"^f: its kind is "):
            of_kind(bad, "k", 2, "f")
    for format in (None, 1, True, 2.0, "2"):
        with pytest.raises(ModelError, match=r"^f: its format is .* reads 2$"):
            of_kind({"kind": "k", "format": format}, "k", 2, "f")


def test_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_limited(tmp_path / "f", 5) == b"12345"
    with pytest.raises(ModelError, match="too large"):
        read_limited(tmp_path / "f", 4)
    os.mkfifo(tmp_path / "pipe")
    for missing in (tmp_path, tmp_path / "none", tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(RequestError, match="cannot read"):
            read_limited(missing, 4)


def test_a_pipe_is_read_where_the_user_gave_it(tmp_path: Path) -> None:
    """`--plan <(...)`: also one whose writer takes its time."""
    reading, writing = os.pipe()
    begin = threading.Event()

    def write() -> None:
        begin.wait(10)
        time.sleep(0.1)
        os.write(writing, b"123")
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        begin.set()
        assert read_limited(Path(f"/dev/fd/{reading}"), 4, pipe=True) == b"123"
    finally:
        thread.join()
        os.close(reading)


@pytest.mark.parametrize("error", [TypeError, OverflowError, ZeroDivisionError])
def test_errors_of_a_post_init_are_mistakes_of_the_file(error: type[Exception]) -> None:
    @dataclass(frozen=True)
    class Picky:
        size: int

        def __post_init__(self) -> None:
            raise error("no such size")

    with pytest.raises(ModelError, match=r"^f: no such size$"):
        checked(Picky, {"size": 1}, "f")
