"""What policies over experts hit: predictions of a profile, replays of traces, the command, report and inspect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import FF, D, experts_gguf, tiny_gguf

from powerinfer.cli.main import main
from powerinfer.experts import Selected
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.expert_files import open_expert_profile, trace_place, write_expert_profile, write_trace
from powerinfer.placement.expert_slots import (
    band,
    compare,
    curve,
    document,
    expert_bytes,
    keep,
    kept,
    predicted_hits,
    some_tokens,
)
from powerinfer.prepare.expert_counting import count_experts


def skewed(tokens: int, seed: int, layers: int = 2, experts: int = 4, top: int = 2) -> Selected:
    """Experts by a power law, each layer's in another order; a token keeps the last one's with a probability of 0.4."""
    rng, order = np.random.default_rng(seed), np.random.default_rng(1)
    found: Selected = {}
    for layer in range(layers):
        weights = order.permutation(np.arange(1, experts + 1) ** -1.2)
        rows = np.argsort(rng.exponential(size=(tokens, experts)) / weights, axis=1)[:, :top]
        for token in np.flatnonzero(rng.random(tokens) < 0.4):
            rows[token] = rows[token - 1]
        found[layer] = np.sort(rows, axis=1).astype(np.uint8)
    return found


def test_of_experts_on_disk_lfu_suits_both_kinds_of_text() -> None:
    """Whether a token resembles the last ones or not; what a token needs is there, however few slots there are."""
    texts = [skewed(1500, seed, 3, 32, 4) for seed in (2, 3)]
    profile = count_experts(texts[0], dict.fromkeys(range(3), 32), ["a"], [1500])
    found = compare(profile, dict.fromkeys(range(3), 1000), (2, 4, 8, 16), texts[1], disk=True)
    for at in found.at:
        assert list(at.policies) == ["static", "lru", "lfu", "window"]
        measured = {name: one.measured or 0.0 for name, one in at.policies.items()}
        for one in at.policies.values():
            assert one.copies == pytest.approx(3 * 4 * (1 - (one.measured or 0.0)))  # what is missed is read
        assert at.slots < 8 or measured["lfu"] > measured["lru"]
        lru = at.policies["lru"].predicted
        assert lru is not None and abs(lru - measured["lru"]) < 0.02
    few, least = (at.policies["lru"].measured for at in found.at[:2])
    assert few == least


def test_predictions_hold_on_other_text() -> None:
    """Of 32 experts; within two points for static and LRU, although only one text was counted."""
    texts = [skewed(6000, seed, 3, 32, 4) for seed in (2, 3)]
    profile = count_experts(texts[0], dict.fromkeys(range(3), 32), ["a"], [6000])
    found = compare(profile, dict.fromkeys(range(3), 1000), (4, 8, 16), texts[1])
    assert found.tokens == 6000 and (found.off("static") or 1) < 0.02 and (found.off("lru") or 1) < 0.02
    for at, slots in zip(found.at, (4, 8, 16), strict=True):
        static, lru = at.policies["static"], at.policies["lru"]
        assert (at.slots, at.share, at.bytes) == (slots, slots / 32, slots * 3 * 1000)
        assert static.copies == 0 and static.predicted is not None and static.predicted > 1.3 * slots / 32
        assert lru.predicted is not None and lru.measured is not None and abs(lru.predicted - lru.measured) < 0.02
        assert lru.copies == pytest.approx(3 * 4 * (1 - lru.measured)) and lru.bytes == pytest.approx(1000 * lru.copies)
        lfu, dynamic = at.policies["lfu"], at.policies["dynamic"]
        assert lfu.predicted is None and lfu.copies is not None and lfu.copies < lru.copies
        assert dynamic.measured is not None and static.measured is not None and lfu.measured is not None
        assert abs(dynamic.measured - static.measured) < 0.02 and abs(lfu.measured - static.measured) < 0.04


def test_a_prediction_has_the_range_of_the_texts() -> None:
    """A text that keeps fewer of a token's experts lies below the others; the range says so, and covers it."""
    calm, wild = skewed(6000, 2, 3, 32, 4), skewed(6000, 3, 3, 32, 4)
    rng = np.random.default_rng(4)
    wild = {layer: rng.permutation(rows) for layer, rows in wild.items()}
    both = {layer: np.concatenate([calm[layer], wild[layer]]) for layer in calm}
    profile = count_experts(both, dict.fromkeys(range(3), 32), ["a", "b"], [6000, 6000])
    assert [len(own) for own in profile.parts] == [5, 5]
    (at,) = compare(profile, dict.fromkeys(range(3), 1), (8,), wild).at
    lru, static = at.policies["lru"], at.policies["static"]
    assert lru.low is not None and lru.high is not None and lru.predicted is not None and lru.measured is not None
    assert lru.low < lru.predicted < lru.high and lru.low - 0.01 < lru.measured < lru.predicted - 0.05
    assert lru.high - lru.low > 0.1 > 0.04 > (static.high or 1) - (static.low or 0)
    assert at.policies["lfu"].low is None is at.policies["dynamic"].high
    alone = count_experts(skewed(1000, 2, 3, 32, 4), dict.fromkeys(range(3), 32), ["a"], [1000])
    assert compare(alone, dict.fromkeys(range(3), 1), (8,)).at[0].policies["lru"].low is None, "one part has no range"


def test_what_changes_is_followed() -> None:
    """The other way round from half of the text on: dynamic and LFU follow with few copies, static does not."""
    first, other = skewed(3000, 2, 3, 32, 4), skewed(6000, 3, 3, 32, 4)
    profile = count_experts(first, dict.fromkeys(range(3), 32), ["a"], [3000])
    turned = {layer: np.sort(31 - rows, axis=1).astype(np.uint8) for layer, rows in other.items()}
    found = compare(profile, dict.fromkeys(range(3), 1), (8,), turned).at[0].policies
    hits = {name: one.measured or 0 for name, one in found.items()}
    assert hits["dynamic"] > hits["static"] + 0.1 and hits["lfu"] > hits["static"] + 0.1
    assert found["dynamic"].copies is not None and found["dynamic"].copies < 0.1


def test_curves_go_from_nothing_to_everything() -> None:
    profile = count_experts(skewed(500, 2, 3, 32, 4), dict.fromkeys(range(3), 32), ["a"], [500])
    for policy in ("static", "lru"):
        points = list(curve(profile, policy))
        shares, hits = zip(*points, strict=True)
        assert points[0] == (0, 0) and shares[-1] == 1 and hits[-1] > 0.95
        assert list(shares) == sorted(set(shares)) and list(hits) == sorted(hits)
        even = dict.fromkeys(range(3), 8)
        if policy == "lru":
            assert predicted_hits(profile, policy, even) == pytest.approx(dict(points)[0.25])
    assert list(curve(profile, "static"))[16][1] >= (predicted_hits(profile, "static", dict.fromkeys(range(3), 8)) or 0)


def test_a_band_sorts_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = count_experts(skewed(6000, 2, 3, 32, 4), dict.fromkeys(range(3), 32), ["a"], [6000])
    sorts: list[int] = []
    before = np.argsort

    def argsort(*given: Any, **more: Any) -> Any:
        if more.get("kind") == "stable":  # numpy sorts its axes, too
            sorts.append(1)
        return before(*given, **more)

    monkeypatch.setattr(np, "argsort", argsort)
    points = list(band(profile, "static"))
    assert len(points) == 65 and len(sorts) == 3
    for share, low, high in [*points, *band(profile, "lru")]:
        assert (low, high) == (0, 0) if share == 0 else 0 < low <= high <= 1 + 1e-9
    assert points[-1] == pytest.approx((1, 1, 1))


@pytest.mark.parametrize(("limit", "wanted"), [(3, [0, 4, 5]), (5, [0, 1, 4, 5, 6]), (99, list(range(9)))])
def test_some_tokens_of_every_text(limit: int, wanted: list[int]) -> None:
    found = some_tokens({0: np.arange(9, dtype=np.uint8)[:, None]}, [4, 5], limit)[0]
    assert found[:, 0].tolist() == wanted


# ---------------------------------------------------------------- files and commands


def prepared(folder: Path) -> Checkpoint:
    """A model with a profile, and a trace of other text in `trace`."""
    checkpoint = open_checkpoint(experts_gguf().write(folder / "m.gguf"))
    profile = count_experts(skewed(400, 2), {0: 4, 1: 4}, ["a", "b"], [300, 100])
    write_expert_profile(checkpoint, None, profile, {"key": "x"})
    with write_trace(checkpoint, trace_place(checkpoint, None, folder / "trace"), [("c", 300)], {}, False) as writer:
        writer.put(skewed(300, 3))
    return checkpoint


def test_bytes_of_an_expert(tmp_path: Path) -> None:
    checkpoint = prepared(tmp_path)
    assert expert_bytes(checkpoint) == dict.fromkeys((0, 1), 3 * D * FF * 4)
    assert expert_bytes(open_checkpoint(checkpoint.path, "q8_0")) == dict.fromkeys((0, 1), 3 * D * FF // 32 * 34)


def last(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = prepared(tmp_path)
    command = ["experts", "-m", str(checkpoint.path), "--slots", "1,2.5", "--trace", f"{tmp_path}/trace"]
    assert main([*command, "--json"]) == 0
    found = last(capsys)
    wanted = compare(
        open_expert_profile(checkpoint), expert_bytes(checkpoint), (1, 2.5), skewed(300, 3), checkpoint.fingerprint
    )
    assert found["at"] == json.loads(json.dumps(document(wanted)))["at"] and found["off"] == wanted.off("static")
    assert found["off_lru"] == wanted.off("lru")
    assert found["trace"] == {"path": f"{tmp_path}/trace", "tokens": 300, "same_text": False}
    assert found["tokens"] == 400 and found["expert_bytes"] == 3 * D * FF * 4
    assert kept(checkpoint, None) == wanted
    assert main([*command, "--tokens", "50"]) == 0
    text = capsys.readouterr().out
    assert "50 tokens replayed" in text and "static: predicted and" in text and "lru: predicted and" in text
    shown = found["at"][0]["policies"]["lru"]
    assert shown["low"] <= shown["predicted"] <= shown["high"]
    assert f"{100 * shown['predicted']:.1f} % ({100 * shown['low']:.1f} to {100 * shown['high']:.1f})" in text
    assert all(f"  {name} " in text for name in ("static", "lru", "lfu", "dynamic"))


def test_without_a_trace_static_and_lru_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = prepared(tmp_path)
    assert main(["experts", "-m", str(checkpoint.path)]) == 0
    out, err = capsys.readouterr()
    assert "static" in out and "lfu" not in out and "lfu and dynamic need a trace" in err
    assert kept(checkpoint, None) is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--slots", "0"], "--slots must be up to 64 positive numbers"),
        (["--slots", "a"], "--slots must be up to 64 positive numbers"),
        (["--slots", "nan"], "--slots must be up to 64 positive numbers"),
        (["--slots", "-3,4"], "--slots"),
        (["--tokens", "0"], "--tokens must be a whole number of at least 1"),
        (["--trace", "/nowhere/t"], "there is no /nowhere/t; `powerinfer profile -m "),
    ],
)
def test_what_the_command_refuses(
    more: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = prepared(tmp_path)
    assert main(["experts", "-m", str(checkpoint.path), *more]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1


def test_models_without_experts_or_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "-m", str(tiny_gguf().write(tmp_path / "t.gguf"))]) == 2
    assert "this model has no experts" in capsys.readouterr().err
    path = experts_gguf().write(tmp_path / "m.gguf")
    assert main(["experts", "-m", str(path)]) == 2
    assert f"`powerinfer profile -m {path}` makes it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(fingerprint="x"),
        lambda d: d.update(format=1),
        lambda d: d["at"][0]["policies"].pop("static"),
        lambda d: d["at"][0]["policies"].update(best=d["at"][0]["policies"]["lru"]),
        lambda d: d["at"].clear(),
        lambda d: d["at"][0].update(share=-1),
        lambda d: d["at"][0]["policies"]["lru"].update(measured="1"),
        lambda d: d.clear(),
    ],
)
def test_a_damaged_result_is_not_shown(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    checkpoint = prepared(tmp_path)
    found = compare(open_expert_profile(checkpoint), expert_bytes(checkpoint), (2,), None, checkpoint.fingerprint)
    path = keep(checkpoint, None, found)
    assert kept(checkpoint, None) == found
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    assert kept(checkpoint, None) is None
    path.write_bytes(b"\xff{")
    assert kept(checkpoint, None) is None


def test_the_report_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = prepared(tmp_path)
    path = str(checkpoint.path)
    profile = open_expert_profile(checkpoint)
    assert main(["inspect", "-m", path, "--json"]) == 0
    found = last(capsys)["prepared"]["expert_profile"]
    assert found["tokens"] == 400 and found["stale"] is None and found["top_25"] == profile.share_of_top(0.25)
    assert found["slots"][1]["static"] == dict(curve(profile, "static"))[0.5]
    assert main(["inspect", "-m", path]) == 0
    assert "400 tokens of 2 texts" in capsys.readouterr().out
    assert main(["report", "-m", path, "--json"]) == 0
    document = last(capsys)
    page = Path(document["path"]).read_text()
    assert [Path(image).stem for image in document["images"]] == ["experts", "slots"]
    assert "replayed over" not in page and "Shared by the fifth of the experts" in page
    assert main(["experts", "-m", path, "--slots", "2", "--trace", f"{tmp_path}/trace"]) == 0
    assert main(["report", "-m", path, "--json"]) == 0
    assert last(capsys)["made"], "the replay is new"
    page = Path(document["path"]).read_text()
    assert "replayed over 300 tokens" in page and "dynamic, 2 slots" in page


def test_a_stale_profile_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = prepared(tmp_path)
    experts_gguf(top=1).write(Path(checkpoint.path))
    assert main(["inspect", "-m", str(checkpoint.path)]) == 0
    assert "was made for another model" in capsys.readouterr().out
    assert main(["report", "-m", str(checkpoint.path), "--json"]) == 2
    assert "start with `powerinfer profile -m" in capsys.readouterr().err
