"""prepare: all steps, each only if needed, and nothing half-done after any interruption."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sparse_models import TEXT, tiny_llama
from test_cli import error_line

from powerinfer.cli.main import main
from powerinfer.formats import prepared
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.profile_file import open_profile
from powerinfer.prepare import packing, profiling, training
from powerinfer.report import plots
from powerinfer.report.findings import findings

QUICK = ["--window", "64", "--tokens", "1024", "--steps", "4", "--hardware", "pc-8gb", "--threads", "1"]
MODEL = "tiny.gguf"
FILES = {"profile.safetensors", "samples.safetensors", "predictor.safetensors", "neurons.safetensors", "report"}


def with_text(folder: Path) -> Path:
    """A model, with a text for its profile beside it."""
    (folder / "text.txt").write_text(TEXT * 6)
    return tiny_llama(folder / MODEL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_text(tmp_path)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Plots are drawn in tests/test_report.py, and in one test here."""
    if request.node.name != "test_all_steps_and_then_none":
        monkeypatch.setattr(plots, "png", lambda draw, look: b"a plot")


def argv(model: Path, *more: str) -> list[str]:
    """The command line, with a corpus beside the model."""
    corpus = [] if "--corpus" in more else ["--corpus", str(model.with_name("text.txt"))]
    return ["prepare", "-m", str(model), *corpus, *QUICK, *more, "--json"]


def run(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> dict[str, Any]:
    """The document of a run that must succeed."""
    status = main(argv(model, *more))
    out, err = capsys.readouterr()
    assert status == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def fails(capsys: pytest.CaptureFixture[str], status: int, model: Path, *more: str) -> str:
    """The line of a run that must fail."""
    found = main(argv(model, *more))
    out, err = capsys.readouterr()
    line = err.splitlines()[-1].removeprefix("powerinfer: ")
    assert found == status and json.loads(out)["error"]["message"] == line, (out, err)
    return line


def states(document: dict[str, Any]) -> dict[str, str]:
    return {name: step["state"] for name, step in document["steps"].items()}


def left(model: Path) -> set[str]:
    folder = model.with_name(f"{model.name}.powerinfer")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def plans(model: Path) -> set[str]:
    return {name for name in left(model) if name.startswith("plan-")}


# ---------------------------------------------------------------- all of it


def test_all_steps_and_then_none(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, model)
    everything = dict.fromkeys(("profile", "train", "pack", "plan", "report"), "done")
    assert states(first) == {"measure": "not needed", **everything}
    assert left(model) - plans(model) == FILES and len(plans(model)) == 1
    assert first["model"] == str(model) and first["folder"] == f"{model}.powerinfer"
    steps = first["steps"]
    assert all(Path(steps[name]["path"]).exists() for name in everything) and "pc-8gb" in steps["measure"]["why"]
    assert all(step["seconds"] >= 0 for step in steps.values())
    assert steps["profile"]["tokens"] == 1024 and 0 < steps["profile"]["active_fraction"] < 1
    assert 0 < steps["train"]["recall"] <= 1 and steps["pack"]["types"] == {"gate": "F16", "up": "F16", "down": "F16"}
    assert first["plan"]["path"] == steps["plan"]["path"] and first["plan"]["selector"] == "predicted"
    assert first["plan"]["hardware"] and first["plan"]["predicted"]["decode_tok_s"] > 0
    found = findings(open_checkpoint(model))
    assert found.lacking == [] and found.plan.value is not None and str(found.plan.path) == first["plan"]["path"]

    again = run(capsys, model)
    assert states(again) == {"measure": "not needed", **dict.fromkeys(everything, "skipped")}
    assert again["plan"] == first["plan"]
    for name in everything:
        assert {**again["steps"][name], **_times(steps[name])} == steps[name], name
    assert left(model) - plans(model) == FILES


def _times(step: dict[str, Any]) -> dict[str, Any]:
    """Without fields that may differ if nothing was done, and the errors of weights, which only packing measures."""
    return {name: step[name] for name in ("state", "seconds", "error", "resumed", "notes") if name in step}


def test_steps_that_depend_on_a_change_are_repeated(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def done(*more: str) -> set[str]:
        document = run(capsys, model, *more)
        return {name for name, state in states(document).items() if state == "done"}

    assert done() == {"profile", "train", "pack", "plan", "report"}
    model.with_name("text.txt").write_text(("dead cab beef face " + TEXT) * 6)
    assert done() == {"profile", "train", "plan", "report"}, "bundles do not depend on the corpus"
    assert done("--vram", "1GiB") == {"plan", "report"}
    assert done() == {"report"}, "the first plan is still there"
    assert done("--recall", "0.9") >= {"train", "plan", "report"}
    assert done("--force") == {"profile", "train", "pack", "plan", "report"}
    tiny_llama(model, "relu2")
    assert done() == {"profile", "train", "pack", "plan", "report"}, "another model"


def test_a_described_and_a_measured_machine(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dataclasses import replace

    from powerinfer.hardware import measure
    from powerinfer.hardware.description import load

    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    described = load("pc-8gb")

    def measured(engine: Any, progress: Any = None, effort: Any = None) -> Any:
        return replace(described, name="here", key=measure.machine_key(engine))

    monkeypatch.setattr(measure, "measure", measured)
    arguments = [one for one in argv(model, "--no-train") if one not in ("--hardware", "pc-8gb")]
    for state in ("done", "skipped"):
        assert main(arguments) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document["steps"]["measure"]["state"] == state and document["plan"]["hardware"] == "here"
    assert Path(document["steps"]["measure"]["path"]).parent == tmp_path / "cache"


@pytest.mark.parametrize(
    ("flags", "why", "selector"),
    [
        (["--no-train", "--ram", "2GB", "--context", "128"], "--no-train", "exact"),
        (["--selector", "exact"], "uses no predictor", "exact"),
    ],
)
def test_without_predictors(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], why: str, selector: str
) -> None:
    assert main([one for one in argv(model, *flags) if one != "--json"]) == 0
    asked = " --selector exact" if "exact" in flags else " --context 128 --ram 2GB"
    assert f'ready: powerinfer run "..." -m {model}{asked} --threads 1' in capsys.readouterr().out.splitlines(), (
        "what was prepared for"
    )
    document = run(capsys, model, *flags)
    assert document["steps"]["train"]["state"] == "not needed" and why in document["steps"]["train"]["why"]
    assert document["plan"]["selector"] == selector and "predictor.safetensors" not in left(model)
    assert "samples.safetensors" in left(model), "`train` can use them later"


def test_a_model_that_is_never_silent(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(model, "silu")
    document = run(capsys, model, "--perplexity-cost", "0.05")
    steps = document["steps"]
    assert steps["train"]["state"] == "not needed" and "never exactly zero" in steps["train"]["why"]
    assert open_profile(open_checkpoint(model)).thresholds is not None
    assert document["plan"]["selector"] in ("all", "threshold")
    assert main(argv(model, "--perplexity-cost", "0.05", "--selector", "all")) == 0
    assert "nothing to gain: silu is never exactly zero" in capsys.readouterr().err
    forced = run(capsys, model, "--perplexity-cost", "0.05", "--selector", "threshold")
    assert forced["steps"]["pack"]["state"] in ("done", "skipped") and forced["plan"]["selector"] == "threshold"
    assert "powerinfer train" not in fails(capsys, 2, model, "--selector", "predicted")
    assert "silu" in fails(capsys, 2, model, "--selector", "exact")


def test_neurons_that_fire_on_both_sides_of_zero(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their predictors, which select many others too, are trained where they are asked for, and then kept."""
    tiny_llama(model, "cats", limits=True)
    first = run(capsys, model)
    train = first["steps"]["train"]
    assert train["state"] == "not needed" and "--selector predicted trains them" in train["why"]
    assert first["plan"]["selector"] == "exact" and "predictor.safetensors" not in left(model)
    assert findings(open_checkpoint(model)).lacking == [], "a report does not ask for it"
    assert "samples.safetensors" not in left(model) and first["steps"]["profile"]["samples"] is None
    asked = run(capsys, model, "--selector", "predicted")
    assert asked["steps"]["train"]["state"] == "done" and asked["plan"]["selector"] == "predicted"
    assert findings(open_checkpoint(model)).predictor.value is not None and "samples.safetensors" in left(model)
    assert main(argv(model)) == 0
    out, err = capsys.readouterr()
    assert re.search(r"samples.safetensors \([0-9]+ MB\) is removed: no predictors are trained on it", err)
    again = json.loads(out)
    assert again["steps"]["profile"]["state"] == "skipped", "a profile that had samples counts the same"
    assert again["steps"]["profile"]["samples"] is None and "samples.safetensors" not in left(model)
    file = model.with_name(f"{model.name}.powerinfer") / "predictor.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [one.noun for one in findings(open_checkpoint(model)).lacking] == ["predictor"], "a damaged one is told"


# ---------------------------------------------------------------- stopped half-way


STOP = """
import json, os, signal, sys
import torch  # for every command here, each of which would take seconds for that
from powerinfer.formats.prepared import PartFile
from powerinfer.cli.main import entry
finish = PartFile.finish
for where, how, said, arguments in json.load(sys.stdin):
    def stop(self):
        if self._path.name.startswith(where):
            os.kill(os.getpid(), getattr(signal, how))
        finish(self)
    command = os.fork()
    if command == 0:
        for number, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{said}.{name}", os.O_CREAT | os.O_WRONLY), number)
        PartFile.finish = stop
        sys.argv[1:] = arguments
        sys.exit(entry())
    print(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))
"""
STOPPED = (  # by a signal, when this file is to be finished, in this step
    ("profile.", "SIGKILL", "profile"),
    ("predictor.1.", "SIGKILL", "train"),
    ("predictor.safetensors", "SIGTERM", "train"),
    ("neurons", "SIGINT", "pack"),
)


def test_it_resumes_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[tuple[str, str, str, list[str]]] = []
    for where, signal_name, _ in STOPPED:
        folder = tmp_path / where
        folder.mkdir()
        commands.append((where, signal_name, str(folder / "said"), argv(with_text(folder))))
    command = [sys.executable, "-c", STOP]
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, timeout=300)
    for (where, signal_name, step), status in zip(STOPPED, done.stdout.split(), strict=True):
        folder, number = tmp_path / where, signal.Signals[signal_name]
        model, (out, err) = folder / MODEL, ((folder / f"said.{name}").read_text() for name in ("out", "err"))
        if signal_name == "SIGINT":  # a request to stop is answered with a document, as called with --json
            assert json.loads(out)["status"] == 130
        else:
            assert out == ""
        assert int(status) == (-9 if number == signal.SIGKILL else 128 + number), (where, err)
        if number != signal.SIGKILL:
            assert re.fullmatch(rf"stopped in step \d/6 {step}; .*", err.splitlines()[-1])
            assert not [name for name in left(model) if name.endswith(".part")]
        document = run(capsys, model)
        order = list(states(document))
        before, after = order[1 : order.index(step)], order[order.index(step) :]
        assert {states(document)[name] for name in before} <= {"skipped"}, where
        assert {states(document)[name] for name in after} == {"done"}, where
        if where == "predictor.1.":
            assert document["steps"]["train"]["resumed"] > 0, "sizes of layer 0 were there"
        assert left(model) - plans(model) == FILES, "nothing unfinished stays"


def test_a_disk_that_fills_up(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        real = os.write
        patch.setattr(prepared.os, "write", lambda fd, data: full(model) if "neurons" in _name(fd) else real(fd, data))
        line = fails(capsys, 1, model)
    assert "neurons.safetensors (No space left on device)" in line and "--prepared" in line
    assert left(model) == {"profile.safetensors", "samples.safetensors", "predictor.safetensors"}
    document = run(capsys, model)
    assert states(document)["train"] == "skipped" and states(document)["pack"] == "done"


def _name(fd: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))


# ---------------------------------------------------------------- checks before the work


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step that would take long is a failure."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the work began")

    for room, name in ((profiling, "profile"), (training, "train"), (packing, "pack")):
        monkeypatch.setattr(room, name, never)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ram", "1MB"], "--ram"),
        (["--ram", "900TB"], "--ram"),
        (["--vram", "64GiB"], "--vram"),
        (["--hardware", "pc-none"], "pc-none"),
        (["--context", "4096"], "context"),
        (["--selector", "predicted", "--no-train"], "--selector predicted needs predictors"),
        (["--recall", "2"], "--recall"),
        (["--share", "0.0001"], "--share 0.0"),
        (["--window", "4"], "--window"),
        (["--window", "4096"], "--window"),
        (["--corpus", "/nowhere.txt"], "/nowhere.txt"),
        (["--batch", "0"], "--batch"),
        (["--tokens", "-5"], "--tokens"),
        (["--isa", "z80"], "z80"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_requests_cost_no_time(
    model: Path, capsys: pytest.CaptureFixture[str], no_work: None, flags: list[str], says: str
) -> None:
    assert says in fails(capsys, 2, model, *flags)
    assert left(model) == set()


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff\xfe" * 100, b"\0" * 1000], ids=["empty", "short", "bad", "zero"]
)
def test_unusable_corpora(model: Path, capsys: pytest.CaptureFixture[str], no_work: None, content: bytes) -> None:
    model.with_name("text.txt").write_bytes(content)
    assert "text.txt" in fails(capsys, 2, model)
    assert left(model) == set()


def test_a_disk_that_is_too_small(
    model: Path, capsys: pytest.CaptureFixture[str], no_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    line = fails(capsys, 1, model)
    assert f"{model}.powerinfer needs room for" in line and "--prepared PATH" in line
    assert left(model) == set()


def test_a_folder_that_cannot_be_written(model: Path, capsys: pytest.CaptureFixture[str], no_work: None) -> None:
    model.with_name("tiny.gguf.powerinfer").write_text("a file")
    line = fails(capsys, 1, model)
    assert "cannot write into" in line and "--prepared PATH" in line


def test_torch_that_is_missing(model: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom powerinfer.cli.main import entry; entry()"
    done = subprocess.run([sys.executable, "-c", code, *argv(model)], capture_output=True, text=True, timeout=60)
    assert "pip install '.[train]' in a clone" in error_line(done, 1)
    assert left(model) == set()


def test_matplotlib_that_is_missing(model: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nfrom powerinfer.cli.main import entry; entry()"
    command = [sys.executable, "-c", code, *argv(model, "--no-train")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert document["steps"]["report"]["state"] == "not needed" and "pip install" in document["steps"]["report"]["why"]
