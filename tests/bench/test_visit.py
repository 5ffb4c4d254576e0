"""benchmarks/hybrid/visit.py, experts.py and carry.py without a GPU: all calls at a tiny scale, and their time."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.hybrid import carry, compare, experts, visit, worker  # noqa: E402
from benchmarks.hybrid.visit import Step  # noqa: E402
from benchmarks.lib import cuda_wheels, llama_cpp, machine  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("call", [call for call in visit.CALLS if call != "llama.cpp"])
def test_every_call_at_a_tiny_scale(call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [call, "--trial", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    status = visit.main(where)
    said = capsys.readouterr().out
    assert status == 0, (said, (tmp_path / f"work/{call}.log").read_text()[-3000:])
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert told and all(one["rc"] == 0 for one in told.values())
    measured = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    jobs = [job for one in measured for key, job in one.get("jobs", {}).items() if "powerinfer" in key]
    assert (call == "kernels") == (not jobs) and all(job["off"] for job in jobs), "checked, then timed"
    assert visit.main(where) == 0 and "---" not in capsys.readouterr().out, "nothing is done twice"


def test_models_are_made_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    assert visit.default_work(memory, disk) == disk / "powerinfer"
    memory.mkdir()
    monkeypatch.setattr(visit, "ROOM", 1)
    assert visit.default_work(memory, disk) == memory / "powerinfer"
    monkeypatch.setattr(visit, "ROOM", 1 << 60)
    assert visit.default_work(memory, disk) == disk / "powerinfer"
    (memory / "powerinfer").mkdir()
    assert visit.default_work(memory, disk) == memory / "powerinfer", "where the last call was"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_call_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take too long are ended, those that need them are left out, and both are done when called again."""
    seconds = 100

    def steps(_: Any) -> list[Step]:
        return [
            Step("first", python("print('one')"), 60),
            Step("slow", python(f"print('begun', flush=True); import time; time.sleep({seconds})"), 1),
            Step("wrong", python("print('no'); raise SystemExit(3)"), 60),
            Step("after", python("print('two')"), 60, ("slow",)),
            Step("last", python("print('three')"), 60, ("first",)),
        ]

    monkeypatch.setattr(visit, "steps", steps)
    where = ["falcon", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert visit.main(where) == 1
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert {key.split("/")[1]: (one["rc"], one.get("last")) for key, one in told.items()} == {
        "first": (0, "one"), "slow": (None, "begun"), "wrong": (3, "no"), "after": (None, None), "last": (0, "three")
    }  # fmt: skip
    assert told["falcon/slow"]["why"].startswith("took more than 1") and told["falcon/after"]["why"] == "slow failed"
    assert "begun" in (tmp_path / "out/falcon.log").read_text()
    capsys.readouterr()
    seconds = 0
    assert visit.main(where) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- slow", "--- wrong", "--- after"]
    monkeypatch.setattr(visit, "steps", lambda _: [*steps(_), Step("new", python("print('four')"), 60)])
    assert visit.main([*where, "--minutes", "0"]) == 1 and "no time left" in capsys.readouterr().out
    assert visit.main(where) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- new", "--- wrong"], "failed last"
    monkeypatch.setattr(visit, "steps", steps)
    seconds = 100
    (tmp_path / "work/visit.json").unlink()
    assert visit.main([*where, "--regardless"]) == 1
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert (told["falcon/slow"]["rc"], told["falcon/after"]["rc"]) == (None, 0)


def test_a_step_that_the_calls_end_cuts_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call begins with it; none is begun that would be cut in its first half."""
    seconds, expected = 100, 60

    def steps(_: Any) -> list[Step]:
        slow = python(f"print('begun', flush=True); import time; time.sleep({seconds})")
        return [
            Step("slow", slow, 60),
            Step("long", python("print('long')"), 60, expected=expected),
            Step("quick", python("print('quick')"), 60),
        ]

    monkeypatch.setattr(visit, "steps", steps)
    monkeypatch.setattr(visit, "LEFT", 0.0)
    assert visit.main(["falcon", "--work", str(tmp_path), "--minutes", "0.05"]) == 1
    told = json.loads((tmp_path / "visit.json").read_text())
    assert told["falcon/slow"]["cut"] and told["falcon/slow"]["why"].startswith("cut by the call's end after 3")
    assert told["falcon/quick"]["why"] == "no time left"
    capsys.readouterr()
    seconds = 0
    assert visit.main(["falcon", "--work", str(tmp_path), "--minutes", "0.3"]) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- slow", "--- quick"]
    expected = 20
    assert visit.main(["falcon", "--work", str(tmp_path), "--minutes", "0.3"]) == 0


def test_models_are_removed_when_their_steps_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of them; of a step that was cut they are kept. One that is done again finds them gone."""
    seconds, one, other = 100, tmp_path / "one", tmp_path / "other"

    def steps(_: Any) -> list[Step]:
        make = (
            f"import pathlib; [pathlib.Path(path).mkdir(exist_ok=True) for path in {[str(one), str(other)]}]; print(1)"
        )
        slow = f"print('begun', flush=True); import time; time.sleep({seconds})"
        return [
            Step("ours", python(make), 60, models=one),
            Step("peer", python("print('no'); raise SystemExit(3)"), 60, models=one),
            Step("slow", python(slow), 60, models=other, after=("peer",)),
        ]

    monkeypatch.setattr(visit, "steps", steps)
    monkeypatch.setattr(visit, "LEFT", 0.0)
    assert visit.main(["short", "--work", str(tmp_path), "--minutes", "0.05"]) == 1
    told = json.loads((tmp_path / "visit.json").read_text())
    assert not one.exists() and other.exists() and told["short/slow"]["cut"]
    seconds = 0
    assert visit.main(["short", "--work", str(tmp_path)]) == 1 and not other.exists()


def test_what_a_step_writes_is_copied_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    seen = f"while not p.Path({str(out / 'own.json')!r}).exists(): time.sleep(0.02)"
    code = f"import pathlib as p, time\np.Path({str(work / 'own.json')!r}).write_text('7')\n{seen}\nprint('seen')"
    monkeypatch.setattr(visit, "steps", lambda _: [Step("own", python(code), 30)])
    monkeypatch.setattr(visit, "SLICE", 0.1)
    assert visit.main(["short", "--work", str(work), "--out", str(out)]) == 0


def test_a_call_goes_on_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates are copied; what is gone is made again before the step that needs it, not first."""
    work, made = tmp_path / "work", tmp_path / "made"
    rates = f"import pathlib; pathlib.Path({str(work / 'cache/rates.json')!r}).write_text('7'); print(7)"
    make = f"import pathlib; pathlib.Path({str(made)!r}).mkdir(); print(1)"
    first = [Step("rates", python(rates), 60), Step("model", python(make), 60, makes=made)]
    more = [Step("other", python("print(2)"), 60), Step("late", python("print(3)"), 60, after=("model",))]
    monkeypatch.setattr(visit, "steps", lambda _: first)
    (work / "cache").mkdir(parents=True)
    assert visit.main(["short", "--work", str(work), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/cache/rates.json").read_text() == "7"
    made.rmdir()
    monkeypatch.setattr(visit, "steps", lambda _: [*first, *more])
    capsys.readouterr()
    assert visit.main(["short", "--work", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- other", "--- model", "--- late"]


def test_models_of_other_calls_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that is gone on with keeps its own; where they are gone, they are made again if a step needs them."""
    fails = True

    def steps(arguments: Any) -> list[Step]:
        made = visit.models_of(tmp_path, arguments.call)
        make = f"import pathlib; pathlib.Path({str(made)!r}).mkdir(parents=True); print('made')"
        used = f"print('used'); raise SystemExit({int(fails)})"
        return [Step("model", python(make), 60, makes=made), Step("ours", python(used), 60, ("model",))]

    def begun(call: str) -> list[str]:
        visit.main([call, "--clear", "--work", str(tmp_path)])
        return [line[4:] for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]

    monkeypatch.setattr(visit, "steps", steps)
    assert begun("falcon") == ["model", "ours"] and begun("falcon") == ["ours"]
    assert begun("drelu") == ["model", "ours"] and not visit.models_of(tmp_path, "falcon").exists()
    assert begun("falcon") == ["model", "ours"]
    fails = False
    assert begun("falcon") == ["ours"] and begun("drelu") == ["model", "ours"]
    assert begun("falcon") == [], "nothing needs it any more"


def test_a_peer_is_one_that_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Step]] = []
    monkeypatch.setattr(visit.Visit, "run", lambda self: seen.append([*visit.steps(self.arguments)]) or True)
    program = tmp_path / "llama.cpp/build-cuda-90/bin/llama-bench"
    program.parent.mkdir(parents=True)
    visit.main(["falcon", "--work", str(tmp_path)])
    program.touch()
    visit.main(["falcon", "--work", str(tmp_path)])
    half, whole = ([step.name for step in one] for one in seen)
    assert half == ["model", "ours", "prompt"] and whole == ["model", "ours", "peer", "prompt"]
    assert str(program.parent) in seen[1][-1].command


def test_rates_are_measured_before_long_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    take = lambda self: names.extend(step.name for step in visit.steps(self.arguments)) or True  # noqa: E731
    monkeypatch.setattr(visit.Visit, "run", take)
    visit.main(["kernels", "--work", str(tmp_path)])
    assert names[:4] == ["probe", "host calls", "hardware", "kernel tests"]


def test_every_test_of_gpu_code_is_part_of_a_visit() -> None:
    tests = machine.ROOT / "tests"
    takes = re.compile(r"\bdevice: str|usefixtures\(.device.\)|gpu_device import")
    found = {path.stem for path in tests.glob("test_*.py") if takes.search(path.read_text())}
    beside = {"test_deferred"}  # has a device of its own
    assert found - beside <= {*visit.KERNEL_TESTS, *visit.LAYER_TESTS, "test_host_calls", "test_flags"}


def test_every_row_of_the_aims_has_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of the kernels, and what the peer is compared in; each call in ten minutes."""
    seen: dict[str, list[Step]] = {}
    monkeypatch.setattr(visit.Visit, "run", lambda self: seen.update({call: [*visit.steps(self.arguments)]}) or True)
    program = tmp_path / "llama.cpp/build-cuda-90/bin/llama-bench"
    program.parent.mkdir(parents=True)
    program.touch()
    for call in visit.CALLS:
        visit.main([call, "--work", str(tmp_path)])
    assert all(step.seconds <= 570 for steps in seen.values() for step in steps)

    def given(call: str, name: str) -> str:
        return " ".join(next(step.command for step in seen[call] if step.name == name))

    assert "--d-model 8192 --d-ff 32768 --plain" in given("kernels", "kernels falcon-40b")
    assert "--d-model 4096 --d-ff 14336 --activation drelu" in given("kernels", "kernels drelu-7b")
    assert "--d-model 8192 --d-ff 28672 --tokens" in given("kernels", "kernels reglu-70b")
    assert "--d-model 4096 --d-ff 14336 --activation drelu --sweep" in given("drelu", "tiles")
    assert "--names reglu-70b" in given("reglu", "ours") and "--peer" in given("reglu", "peer")
    assert "--prompt 2048 --times 2 --peer" in given("falcon", "prompt")
    short = [step.name for step in seen["short"]]
    assert short.index("new tests") < short.index("layers"), "checked, then timed"
    for name in ("whole experts, peer", "dense prompt, peer", "locality, peer", "drelu, peer"):
        assert "--peer" in given("short", name) and short.index(name) < short.index("driver error")
    assert "--cards 8 12 --prompts 512 2048 --peer" in given("short", "whole experts, peer")
    assert "--times 2 --prompts 2048" in given("short", "dense prompt")
    assert given("short", "policies").endswith("--policies static lru lfu dynamic")
    assert not any(step.needs for step in seen["short"]), "a peer that fails cancels nothing of ours"
    assert {8, 12} < {*experts.CARDS} and experts.BATCHES == (1, 8, 32)


def test_the_budget_of_a_prompt_is_half_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[dict[str, Any]] = []
    monkeypatch.setattr(compare, "run", lambda task: tasks.append(task) or {})
    given = ["--models", tmp_path, "--names", "falcon-40b", "--sections", "prefill", "--times", 2, "--prompt", 2048]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, given)])
    arguments = compare.parse()
    card = {"fixed": {"head": 200, "runtime": 100, "scratch": 100}}  # of 15 layers of 60
    document = {"jobs": {"card/falcon-40b": card}}
    measurement = compare.Measurement(document=document, out=tmp_path, quiet=0, arguments=arguments, peer=None)
    (tmp_path / "falcon-40b-own.gguf").write_bytes(bytes(1000 + 200 + 100))
    monkeypatch.setattr(compare, "open_checkpoint", lambda path: path)
    monkeypatch.setattr(compare, "checkpoint_model", lambda _: SimpleNamespace(tables=100))
    (key, work), *_ = compare.jobs(measurement, "falcon-40b")
    work()
    assert key == "prefill/falcon-40b/0/powerinfer" and tasks[0]["prompt"] == 2048
    assert tasks[0]["vram"] == 400 + (4300 // 2 - 400) // 4


def test_experts_whose_logits_differ_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "decoded", lambda *_: pytest.fail("timed"))
    plain = worker.logits_of
    by = lambda llm: 1 if llm.choices["gpu"].startswith("none") else 1.1  # noqa: E731
    beside_a_gpu = lambda llm, most: {of: own * by(llm) for of, own in plain(llm, most).items()}  # noqa: E731
    monkeypatch.setattr(worker, "logits_of", beside_a_gpu)
    out = tmp_path / "experts.json"
    given = ["--models", str(tmp_path), "--gpu", "cpu", "--tiny", "--threads", "1", "--out", str(out)]
    assert experts.main([*given, "--make"]) == 0 and set(json.loads(out.read_text())["jobs"]) == {"make"}
    assert experts.main(given) == 1
    jobs = json.loads(out.read_text())["jobs"]
    assert "not timed: logits are off by 0.1" in jobs["experts/8/powerinfer"]["error"]
    one = np.ones((8, 5), np.float32)
    assert experts.checked(one, one) == 0
    with pytest.raises(RuntimeError, match="off by nan"):
        experts.checked(one * np.nan, one)


def test_flags_for_experts_of_the_peer() -> None:
    assert compare.ncmoe_flags(3, 16) == ["-ngl", "999", "-ncmoe", "13"]


class CachingPeer(compare.Peer):
    """Takes 1 GiB, and a cache with a MiB more than it is asked for."""

    def knows(self, flag: str) -> bool:
        return flag == compare.CACHE_FLAG

    def alone(self, model: Path, threads: int, flags: list[str], tokens: int) -> tuple[float, int | None]:
        cache = int(flags[-1]) + 1 if compare.CACHE_FLAG in flags else 0
        return 8.0 / threads, (1 << 30) + (cache << 20)


def test_a_cache_of_experts_fills_what_is_left() -> None:
    peer = CachingPeer(Path(), "cuda", [])
    found = compare.cached_limit(peer, Path("m"), 16, 3 << 30, 4)
    assert found["flags"] == ["-ngl", "999", "-ncmoe", "16", compare.CACHE_FLAG, "2047"]
    assert [one["count"] for one in found["tries"]] == [2048, 2047] and found["threads"] == 2
    with pytest.raises(RuntimeError, match="no room"):
        compare.cached_limit(peer, Path("m"), 16, 1 << 30, 4)
    every = SimpleNamespace(cards=experts.CARDS)
    of = lambda peer: [key for key, _ in experts.jobs(SimpleNamespace(peer=peer, arguments=every))]  # type: ignore[arg-type]  # noqa: E731
    ways = [f"experts/{card}/llama.cpp-{way}" for card in experts.CARDS for way in ("ncmoe", "cache")]
    assert of(None) == [f"experts/{card}/powerinfer" for card in experts.CARDS] and of(peer)[3:] == ways
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(CachingPeer, "knows", lambda *_: False)
        assert of(peer)[3:] == ways[::2], "a build without it"


def test_a_copy_of_the_source_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() == ""
    (tmp_path / "COMMIT").write_text("0123456789ab+changes\n")
    assert machine.commit() == "0123456789ab+changes"


def test_packages_are_those_that_the_project_requires() -> None:
    stated = dict(zip(carry.MISSING, carry.requirements(list(carry.MISSING)), strict=True))
    assert stated["highspy"].startswith("highspy>=") and stated["gguf"].startswith("gguf>=")
    assert stated["prompt_toolkit"].startswith("prompt_toolkit>=") and stated["wcwidth"] == "wcwidth"


def test_some_steps_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step(name, python(f"print('{name}')"), 60) for name in ("one", "two", "three")]
    monkeypatch.setattr(visit, "steps", lambda _: steps)
    where = ["kernels", "--work", str(tmp_path)]
    assert visit.main([*where, "--only", "three", "one"]) == 0
    assert [key.partition("/")[2] for key in json.loads((tmp_path / "visit.json").read_text())] == ["one", "three"]
    with pytest.raises(SystemExit, match="no step 'four': one, two, three"):
        visit.main([*where, "--only", "four"])
    steps.append(Step("five", python("print(5)"), 60, ("two",)))
    assert visit.main([*where, "--only", "five"]) == 1
    assert "two was not run" in capsys.readouterr().out


def test_models_of_another_scale_are_made_and_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done with a tenth of the layers is not taken for the whole model, and lies in other files."""
    run: list[tuple[str, ...]] = []
    monkeypatch.setattr(visit.Visit, "one", lambda self, step, *_: run.append(step.command) or {"rc": 0, "why": ""})
    (tmp_path / "peer").mkdir()
    where = ["falcon", "--work", str(tmp_path), "--peer", str(tmp_path / "peer")]
    assert visit.main([*where, "--scale", "0.1"]) == visit.main([*where, "--scale", "0.1"]) == 0
    count = len(run)
    assert visit.main(where) == 0 and len(run) == 2 * count > 0
    given = [command[command.index("--out") + 1] for command in run]
    assert not set(given[:count]) & set(given[count:])
    assert all(command[command.index("--scale") + 1] == "0.1" for command in run[:count])
    assert [command[command.index("--peer") + 1] for command in run if "--peer" in command] == [
        str(tmp_path / "peer")
    ] * 4


def test_rates_that_were_measured_before(tmp_path: Path) -> None:
    """Of this machine under this build's key; of another one they are refused."""
    from powerinfer.config import EngineConfig
    from powerinfer.hardware import measure
    from powerinfer.hardware.description import load, read, save

    key = measure.machine_key(EngineConfig(threads=1))
    before, other = tmp_path / "before.json", tmp_path / "other.json"
    save(replace(load("pc-high"), gpu=None, key=key | {"build": "an older one"}), before)
    visit.keep_rates([before], tmp_path / "cache")
    kept = read(tmp_path / "cache" / measure.kept_at(key).name)
    assert kept.key == key and kept.cpu == load("pc-high").cpu
    save(replace(load("pc-high"), gpu=None, key=key | {"cpu": "another one"}), other)
    with pytest.raises(SystemExit, match="of another machine: cpu another one"):
        visit.keep_rates([other], tmp_path / "cache")
    save(replace(load("pc-high"), gpu=None, key={}), other)
    with pytest.raises(SystemExit, match="was not measured"):
        visit.keep_rates([other], tmp_path / "cache")


def test_a_link_is_made_again(tmp_path: Path) -> None:
    for to in ("one", "two"):
        cuda_wheels.link(tmp_path / "lib64", to)
        assert os.readlink(tmp_path / "lib64") == to


def test_a_build_of_the_peer_without_some_kernels(tmp_path: Path) -> None:
    """Files of kernels that no benchmark runs are empty; programs link all the same, and abort where they run one."""
    folder = tmp_path / "ggml/src/ggml-cuda/template-instances"
    folder.mkdir(parents=True)
    heads = "".join(f"DECL_FATTN_MMA_F16_CASE({n}, {n}, 1, 8);\n" for n in (64, 96, 128, 256))
    names = ("fattn-tile-instance-dkq64-dv64", "fattn-tile-instance-dkq96-dv96", "fattn-vec-instance-f16-f16")
    names += ("fattn-vec-instance-f16-q4_0", "mmq-instance-q4_0", "mmq-instance-iq1_s", "mmf-instance-ncols_1")
    for name in ("fattn-mma-f16-instance-ncols1_1-ncols2_8", *names):
        (folder / f"{name}.cu").write_text(heads)
    llama_cpp.leave_out(tmp_path)
    empty = {path.stem for path in folder.iterdir() if path.read_text() == "// left out\n"}
    assert empty == {names[1], names[3], names[5]}
    kept = (folder / "fattn-mma-f16-instance-ncols1_1-ncols2_8.cu").read_text()
    assert kept == heads.replace("DECL_FATTN_MMA_F16_CASE(96, 96, 1, 8);\n", "").replace(
        "DECL_FATTN_MMA_F16_CASE(256, 256, 1, 8);\n", ""
    )
    (tmp_path / "main.cpp").write_text("void missing(int);\nint main(int n, char**) { if (n > 1) missing(n); }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(one CXX)\nadd_executable(some main.cpp)\n"
    )
    environment = dict(os.environ) | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    subprocess.run(configure, check=True, env=environment, capture_output=True)
    made = llama_cpp.aborting(tmp_path / "build", ("some",), environment)
    linked = [*configure, f"-DCMAKE_EXE_LINKER_FLAGS={made}"]
    subprocess.run(linked, check=True, env=environment, capture_output=True)
    subprocess.run(["ninja", "-C", str(tmp_path / "build")], check=True, env=environment, capture_output=True)
    assert subprocess.run([tmp_path / "build/some"]).returncode == 0
    assert subprocess.run([tmp_path / "build/some", "1"]).returncode == -signal.SIGABRT


def test_a_peer_is_carried(tmp_path: Path) -> None:
    for program in llama_cpp.CUDA_PROGRAMS:
        (tmp_path / "build/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", tmp_path / "build/bin" / program)
    (tmp_path / "build/CMakeCache.txt").write_text("GGML_CUDA:BOOL=ON\n")
    carry.pack_peer(tmp_path / "build", tmp_path / "peer.txz")
    subprocess.run(["tar", "-xJf", tmp_path / "peer.txz", "-C", tmp_path], check=True)
    assert (tmp_path / "CMakeCache.txt").read_text() == "GGML_CUDA:BOOL=ON\n"
    assert all(subprocess.run([tmp_path / "bin" / program]).returncode == 0 for program in llama_cpp.CUDA_PROGRAMS)
