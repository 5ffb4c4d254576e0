"""trials.json: found under the same conditions only, and harmless whatever its contents."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_models import checkpoint
from sparse_models import TEXT, give_bundles, give_predictor, tiny_llama

from powerinfer import _native
from powerinfer.config import EngineConfig
from powerinfer.devices.cpu_ffn import CpuFfn
from powerinfer.errors import PowerInferError
from powerinfer.formats.prepared import write_small
from powerinfer.kernels import cpu
from powerinfer.runtime.engine import LLM
from powerinfer.sparsity import trials
from powerinfer.sparsity.selection import Selection
from powerinfer.sparsity.selector_trial import SELECTORS, TimedLayer, TimedLayers, Way
from powerinfer.sparsity.trials import LIMIT, MAX_TRIALS, Key, Trial, TrialSubject, conditions, read_trials, take_turns

SIZES = [1, 2, 4, 8]
KEY: Key = {"cpu": "one", "sizes": "1 2 4 8"}
LAYERS = [
    TimedLayer({"1": "exact", "2": "exact", "4": "dense", "8": "dense"}, {"dense": 2e-4, "exact": 1.5e-4}),
    TimedLayer({"1": "dense", "2": "dense", "4": "dense", "8": "dense"}, {"dense": 1e-4, "exact": 1.5e-4}),
]
RESULT, OTHER = TimedLayers(LAYERS), TimedLayers(LAYERS[::-1])


def saved(folder: Path, key: Key = KEY) -> Trial[TimedLayers]:
    return Trial(SELECTORS, checkpoint(folder / "m"), EngineConfig(), key)


def keep(folder: Path, result: TimedLayers = RESULT, key: Key = KEY) -> str | None:
    return saved(folder, key).keep(result).unsaved


def found(
    folder: Path, key: Key = KEY, layers: int = 2, ways: Sequence[Way] = ("exact",)
) -> list[TimedLayer] | None:
    outcome = saved(folder, key).find(lambda result: result.fits(layers, ways, SIZES))
    return None if outcome is None else outcome.result.layers


# ---------------------------------------------------------------- the file


def test_a_saved_trial_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert keep(tmp_path) is None
    assert found(tmp_path) == LAYERS
    assert os.listdir(tmp_path / "m.powerinfer") == ["trials.json"]


def test_other_conditions_are_another_trial(tmp_path: Path) -> None:
    keep(tmp_path)
    assert found(tmp_path, {**KEY, "cpu": "two"}) is None and found(tmp_path, {**KEY, "isa": "avx2"}) is None
    assert found(tmp_path, layers=3) is None, "of a model of two layers"
    assert found(tmp_path, ways=["exact", "predicted"]) is None, "nothing was predicted"
    keep(tmp_path, OTHER, {**KEY, "cpu": "two"})
    first, second = found(tmp_path), found(tmp_path, {**KEY, "cpu": "two"})
    assert first is not None and second is not None and first == second[::-1] != second


def test_a_new_trial_replaces_the_old(tmp_path: Path) -> None:
    keep(tmp_path)
    keep(tmp_path, OTHER)
    assert found(tmp_path) == OTHER.layers
    assert len(json.loads(saved(tmp_path).path.read_text())["trials"]) == 1


def test_the_number_of_trials_is_bounded(tmp_path: Path) -> None:
    keys = [{**KEY, "cpu": str(number)} for number in range(MAX_TRIALS + 3)]
    for key in keys:
        assert keep(tmp_path, key=key) is None
    assert [key for key in keys if found(tmp_path, key) is not None] == keys[3:]


def test_the_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes more than a third of what the file may."""
    limit = LIMIT // 16
    monkeypatch.setattr(trials, "LIMIT", limit)
    many = LAYERS * (limit // 4 // len(json.dumps(dataclasses.asdict(LAYERS[0]))))
    keys = [{**KEY, "cpu": str(number)} for number in range(4)]
    for key in keys:
        assert keep(tmp_path, TimedLayers(many), key) is None
        assert saved(tmp_path).path.stat().st_size <= limit
    kept = [found(tmp_path, key, len(many)) is not None for key in keys]
    assert kept[-1] and not kept[0]
    assert keep(tmp_path, TimedLayers(many * 4)) is None and found(tmp_path) is None, "too large to be kept"


@dataclasses.dataclass(frozen=True)
class Answer:
    number: int


def test_subjects_share_the_file(tmp_path: Path) -> None:
    """Trials of one do not push those of another out, and a result of another form is none."""
    one, other = TrialSubject("one", Answer), TrialSubject("other", Answer)

    def trial(subject: TrialSubject[Any], key: str = "a") -> Trial[Any]:
        return Trial(subject, checkpoint(tmp_path / "m"), EngineConfig(), {"key": key})

    keep(tmp_path)
    trial(other).keep(Answer(-1))
    for number in range(MAX_TRIALS + 2):
        trial(one, str(number)).keep(Answer(number))
    numbers = [result.number for _, result in read_trials(saved(tmp_path).path, one)]
    assert numbers == list(range(MAX_TRIALS + 1, 1, -1))
    assert [result.number for _, result in read_trials(saved(tmp_path).path, other)] == [-1]
    assert found(tmp_path) == LAYERS
    assert trial(TrialSubject("one", TimedLayers), "9").find() is None and trial(one, "9").find() is not None


def test_a_file_of_many_subjects_takes_no_time(tmp_path: Path) -> None:
    keep(tmp_path)
    path = saved(tmp_path).path
    entries = [{"subject": str(number), "key": {}, "result": 0} for number in range(LIMIT // 50)]
    path.write_text(json.dumps({"format": 1, "kind": "trials", "trials": entries}))
    assert len(path.read_bytes()) < LIMIT
    begin = time.process_time()
    assert found(tmp_path) is None and keep(tmp_path) is None and found(tmp_path) == LAYERS
    assert time.process_time() - begin < 5 and path.stat().st_size <= LIMIT


@pytest.mark.parametrize("forgives", [False, True])
@pytest.mark.parametrize("error", [PowerInferError("no"), MemoryError(), ValueError("no"), KeyboardInterrupt()])
def test_a_trial_that_fails(tmp_path: Path, error: BaseException, forgives: bool) -> None:
    """It is tried again at the next start; where it is forgiven, the fallback stays then, and where it is not forgiven
    but did not outlive its process."""
    subject = TrialSubject("one", Answer, Answer(0), forgives)

    def trial() -> Trial[Answer]:
        return Trial(subject, checkpoint(tmp_path / "m"), EngineConfig(), {})

    def fails() -> Answer:
        ((entry, result),) = read_trials(trial().path, subject)
        assert (entry.problem, result) == (trials.INTERRUPTED, Answer(0)), "what stays if the process dies now"
        raise error

    if forgives and isinstance(error, PowerInferError | MemoryError):
        for failures in (1, 2):
            begun = trial()
            assert begun.find() is None, failures
            assert begun.run(fails).problem == f"the trial failed: {str(error) or 'out of memory'}"
    else:
        with pytest.raises(type(error)):
            trial().run(fails)
    left = trial().find()
    assert (left is not None) == forgives
    assert left is None or left.result == Answer(0)
    assert trial().run(lambda: Answer(7)).problem == "" and read_numbers(trial()) == [7]


def read_numbers(trial: Trial[Answer]) -> list[int]:
    return [result.number for _, result in read_trials(trial.path, TrialSubject("one", Answer))]


def test_ways_take_turns() -> None:
    seen: list[tuple[str, int]] = []

    def measure(way: str, turn: int) -> int:
        seen.append((way, turn))
        return len(seen)

    assert take_turns("abc", 3, measure, warm_up=1) == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert seen == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1), ("c", 2), ("a", 2), ("b", 2)]


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Of a good file, its document changed."""

    def apply(raw: bytes) -> bytes:
        document = json.loads(raw)
        change(document)
        return json.dumps(document).encode()

    return apply


def ways(**change: Any) -> Callable[[bytes], bytes]:
    return changed(lambda document: document["trials"][0]["result"]["layers"][0]["ways"].update(change))


def seconds(**change: Any) -> Callable[[bytes], bytes]:
    return changed(lambda document: document["trials"][0]["result"]["layers"][0]["seconds"].update(change))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[:-20],
    "not text": lambda raw: b"\xff\xfe" + raw,
    "not an object": lambda raw: b"[" + raw + b"]",
    "endless nesting": lambda raw: b"[" * LIMIT,
    "too large": lambda raw: raw + b" " * LIMIT,
    "another format": changed(lambda document: document.update(format=2)),
    "another kind": changed(lambda document: document.update(kind="neurons")),
    "no list": changed(lambda document: document.update(trials={"0": 1})),
    "numbers": changed(lambda document: document.update(trials=[1, None, "x", []])),
    "no key": changed(lambda document: document["trials"][0].pop("key")),
    "a key that is no text": changed(lambda document: document["trials"][0]["key"].update(cpu=["one"])),
    "another subject": changed(lambda document: document["trials"][0].update(subject="steps")),
    "a subject that is no text": changed(lambda document: document["trials"][0].update(subject=["selectors"])),
    "no result": changed(lambda document: document["trials"][0].pop("result")),
    "a result of nothing": changed(lambda document: document["trials"][0].update(result=None)),
    "failures without end": changed(lambda document: document["trials"][0].update(failures=1 << 70)),
    "no layers": changed(lambda document: document["trials"][0]["result"].update(layers=7)),
    "one layer": changed(lambda document: document["trials"][0]["result"]["layers"].pop()),
    "layers of nothing": changed(lambda document: document["trials"][0]["result"].update(layers=[None, None])),
    "an unknown way": ways(**{"1": "fast"}),
    "a way that was not tried": ways(**{"1": "predicted"}),
    "a way that is no text": ways(**{"1": ["exact"]}),
    "an unknown size": ways(**{"3": "exact"}),
    "no number": seconds(dense="1"),
    "true": seconds(dense=True),
    "negative": seconds(dense=-1.0),
    "infinite": lambda raw: raw.replace(b"0.0002", b"1e999"),
    "NaN": lambda raw: raw.replace(b"0.0002", b"NaN"),
    "a name of another kind": seconds(**{"\x1b[2J": 1.0}),
    "seconds of nothing": changed(lambda document: document["trials"][0]["result"]["layers"][0].update(seconds={})),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    keep(tmp_path)
    path = saved(tmp_path).path
    worse = damage(path.read_bytes())
    assert worse != path.read_bytes()
    path.write_bytes(worse)
    assert found(tmp_path) is None
    assert keep(tmp_path) is None and found(tmp_path) is not None


def test_no_bytes_do_harm(tmp_path: Path) -> None:
    """Either what was kept is found as it is, or other verdicts of the same form, or nothing."""
    keep(tmp_path)
    path = saved(tmp_path).path
    good = path.read_bytes()
    rng = random.Random(4)
    for _ in range(1500):
        worse = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(worse))
            worse[at : at + rng.randint(0, 3)] = rng.choice(
                [b"", b"9", b'"', b"}", b"null", bytes([rng.randrange(256)])]
            )
        path.write_bytes(worse)
        outcome = saved(tmp_path).find(lambda result: result.fits(2, ["exact"], SIZES))
        for verdict in () if outcome is None else outcome.result.verdicts(earlier=True):
            assert list(verdict.ways) == ["1", "2", "4", "8"] and set(verdict.ways.values()) <= {"dense", "exact"}
            assert verdict.reason.isprintable() and set(verdict.seconds) == {"dense", "exact"}


@pytest.mark.parametrize("failure", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int) -> None:
    keep(tmp_path)
    for name in ("replace", "fsync", "write", "open"):
        real = getattr(os, name)

        def fail(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            raise OSError(failure, os.strerror(failure))

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            assert keep(tmp_path, OTHER) == os.strerror(failure)
        assert os.listdir(tmp_path / "m.powerinfer") == ["trials.json"]
        assert found(tmp_path) is not None, "what was there stays"


def test_things_that_are_no_files(tmp_path: Path) -> None:
    path = saved(tmp_path).path
    path.mkdir(parents=True)
    assert found(tmp_path) is None and "directory" in (keep(tmp_path) or "").lower()
    path.rmdir()
    os.mkfifo(path)  # reading it would wait for ever
    assert found(tmp_path) is None and keep(tmp_path) is None
    assert found(tmp_path) is not None
    assert os.listdir(path.parent) == ["trials.json"]


def test_a_link_that_came_with_the_model_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = saved(tmp_path).path
    path.parent.mkdir()
    path.symlink_to(precious)
    assert keep(tmp_path) is None and found(tmp_path) is not None and not path.is_symlink()
    path.with_name("trials.json.part").symlink_to(precious)
    assert keep(tmp_path, OTHER) is not None
    assert precious.read_text() == "mine"


def test_another_process_is_writing(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "small"
    with open(tmp_path / "small.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PowerInferError, match="another process"):
            write_small(path, b"1")
    write_small(path, b"2")
    assert path.read_bytes() == b"2" and os.listdir(tmp_path) == ["small"]


# ---------------------------------------------------------------- the key


def key_of(folder: Path, **options: Any) -> Key:
    """For a model in the folder, with the bundles there."""
    model = {name: options.pop(name) for name in ("seed", "quantize") if name in options}
    selector, sizes = options.pop("selector", "exact"), options.pop("sizes", SIZES)
    files = tuple(folder / name for name in options.pop("files", ["neurons"]))
    selection = Selection(selector, "a test", options.pop("thresholds", ()), files=files)
    key = conditions(checkpoint(folder / "m", **model), EngineConfig(**options), selection)
    return key | {"sizes": " ".join(map(str, sizes))}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1},
        {"isa": _native.levels()[-1]},
        {"thresholds": (0.5, 0.5)},
        {"recall_every": 7},
        {"selector": "predicted"},
        {"selector": "threshold", "thresholds": (0.5, 0.25)},
        {"sizes": [1, 2, 4]},
        {"files": ["neurons", "predictor"]},
        {"seed": 2},
        {"quantize": "q8_0"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_option_is_in_the_key(tmp_path: Path, change: dict[str, Any]) -> None:
    for name in ("neurons", "predictor"):
        (tmp_path / name).write_text(name)
    plain, other = key_of(tmp_path, threads=2), key_of(tmp_path, **{"threads": 2, **change})
    keep(tmp_path, key=plain)
    assert found(tmp_path, key_of(tmp_path, threads=2)) is not None
    if change == {"isa": _native.levels()[0]}:
        pytest.skip("this build has one instruction set for this CPU")
    assert found(tmp_path, other) is None and found(tmp_path, plain) is not None


def test_files_the_machine_and_the_program_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "neurons"
    file.write_text("1")
    keys = [key_of(tmp_path)]
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    keys.append(key_of(tmp_path))
    at = file.stat().st_mtime_ns
    file.write_text("12")
    os.utime(file, ns=(at, at))
    keys.append(key_of(tmp_path))
    monkeypatch.setattr(trials, "cpu_name", lambda: "another")
    keys.append(key_of(tmp_path))
    monkeypatch.setattr(cpu, "build", lambda: "another")
    keys.append(key_of(tmp_path))
    monkeypatch.setattr(trials, "__version__", "another")
    keys.append(key_of(tmp_path))
    assert all(type(text) is str for key in keys for text in key.values())
    assert len({json.dumps(key) for key in keys}) == len(keys)


# ---------------------------------------------------------------- a model that is loaded again


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return give_predictor(give_bundles(tiny_llama(tmp_path / "tiny.gguf")))


def loaded(path: Path, **options: Any) -> tuple[dict[str, str], list[dict[str, Any]], np.ndarray]:
    """(choices, layers, logits of a text computed token by token)."""
    rows: list[np.ndarray] = []
    with LLM(path, **({"threads": 2, "selector": "predicted"} | options)) as llm:
        llm.score(llm.tokenizer.encode(TEXT)[:40], 0, lambda at, logits: rows.append(logits.copy()), 1)
        report = llm.sparsity
        assert report is not None
        return llm.choices, report["layers"], np.concatenate(rows)


def never(*args: object) -> Any:
    raise AssertionError("tried again")


def test_the_second_load_measures_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices, first, logits = loaded(model)
    path = Path(f"{model}.powerinfer/trials.json")
    assert choices["trial"].startswith("measured in ") and choices["trial"].endswith(f"kept in {path}")
    assert not any("earlier" in layer["reason"] for layer in first)
    monkeypatch.setattr("powerinfer.sparsity.selector_trial.measured", never)
    choices, second, again = loaded(model)
    assert choices["trial"] == f"measured earlier ({path})"
    assert [layer["ways"] for layer in second] == [layer["ways"] for layer in first]
    assert all(layer["reason"].endswith("us, measured earlier (trials.json)") for layer in second)
    np.testing.assert_array_equal(again, logits)
    for changed in ({"retrial": True}, {"threads": 1}, {"max_batch": 4}, {"selector": "exact"}, {"recall_every": 3}):
        with pytest.raises(AssertionError, match="tried again"):
            loaded(model, **changed)
    give_bundles(model)
    with pytest.raises(AssertionError, match="tried again"):
        loaded(model)


def test_the_saved_trial_decides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has ways that no trial would find, and the layers use them; those that need no bundles get none."""
    given, add = [], CpuFfn.add_bundles
    monkeypatch.setattr(CpuFfn, "add_bundles", lambda ffn, *some, **more: (given.append(ffn), add(ffn, *some, **more)))
    loaded(model)
    assert len(given) == 2
    path = Path(f"{model}.powerinfer/trials.json")
    document = json.loads(path.read_text())
    wanted = [dict.fromkeys("1248", "predicted"), dict.fromkeys("1248", "dense")]
    for layer, kept in zip(document["trials"][0]["result"]["layers"], wanted, strict=True):
        layer["ways"] = kept
    path.write_text(json.dumps(document))
    _, layers, _ = loaded(model)
    assert len(given) == 3
    assert [layer["ways"] for layer in layers] == wanted and [layer["tokens"] for layer in layers] == [40, 0]
    assert [bool(layer["candidate_fraction"]) for layer in layers] == [True, False]
    choices, _, _ = loaded(model, retrial=True)
    assert choices["trial"].startswith("measured in") and len(given) == 5
    assert json.loads(path.read_text()) != document


def test_the_prepared_folder_holds_it(tmp_path: Path) -> None:
    path = give_bundles(tiny_llama(tmp_path / "tiny.gguf"), str(tmp_path / "elsewhere"))
    loaded(path, selector="exact", prepared=str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere/trials.json").exists() and not Path(f"{path}.powerinfer").exists()


def test_a_trial_that_cannot_be_kept_is_no_error(model: Path) -> None:
    Path(f"{model}.powerinfer/trials.json").mkdir()
    choices, layers, _ = loaded(model)
    assert "cannot be kept: Is a directory" in choices["trial"] and layers[0]["tokens"] in (0, 40)


def test_without_a_trial_nothing_is_kept(model: Path) -> None:
    choices, layers, _ = loaded(model, trial=False)
    assert "trial" not in choices and layers[0]["reason"] == "asked for: --no-trial"
    assert not Path(f"{model}.powerinfer/trials.json").exists()
