"""The report: a page that stands alone, plots that are pictures, and figures from what is really there."""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
import subprocess
import sys
import zlib
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import give_bundles, give_predictor, give_profile, profile_of, tiny_llama
from test_cli import COMMAND, error_line, powerinfer

from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.json_file import checked, of_kind
from powerinfer.neurons import Profile
from powerinfer.placement.plan_document import PlanDocument, read_plan_document
from powerinfer.report import plots, writing
from powerinfer.report.findings import findings, next_steps, plan_findings, with_plan
from powerinfer.report.page import Section, Table, mark_of, page
from powerinfer.report.writing import report_key, verdict_of, write_report
from powerinfer.sparsity.selector_trial import SELECTORS, MeasuredFfns, TimedLayer, TimedLayers, Way
from powerinfer.sparsity.trials import Trial

HOSTILE = "<script>alert(1)</script>\"'&</title>\u202egpj.\x1b[2J $\\frac{$ \ud800"
"""A name that would leave its place in markup, in a terminal, and in a plot; and is no text at the end."""


def a_plan(**changes: Any) -> dict[str, Any]:
    """The document of a plan for two layers of 96 neurons."""
    layer = {"layer": 0, "gpu": 64, "cpu": 24, "disk": 8, "mass_on_gpu": 0.75}
    shares = {"mass_on_gpu": 0.7, "work_on_gpu": 0.8}
    document = {
        "format": 1,
        "kind": "plan",
        "key": "0123456789abcdef",
        "model": "Tiny",
        "fingerprint": "",
        "quantize": None,
        "weight_type": "F16",
        "profile": "",
        "fits": True,
        "policy": "time",
        "selector": "exact",
        "context": 128,
        "batch": 1,
        "kv_type": "f16",
        "optimal": True,
        "solve_s": 0.01,
        "budgets": {"vram": 20000, "ram": 40000},
        "hardware": "pc-high",
        "mass_on_gpu": 0.75,
        "work_on_gpu": 0.8,
        "bytes": {"gpu": {"attention": 4000, "ffn": 9000}, "cpu": {"ffn": 3000}, "disk": {"ffn": 1000}},
        "activations": {"gpu": 0.75, "cpu": 0.2, "disk": 0.05},
        "gpu_layers": 2,
        "layers": [layer | {"layer": n, "seconds": {"gpu": 1e-5, "cpu": 2e-5, "sync": 1e-6}} for n in range(2)],
        "predicted": {
            "decode_tok_s": 12.5,
            "ms_per_token": 80.0,
            "at_position": 64,
            "policies": {"greedy": {"decode_tok_s": 11.0, "optimal": None, "solve_s": 0.0, **shares}},
        },
        "reasons": ["8 neurons a layer are on disk"],
        "helps": [{"what": "all of it in RAM", "flag": "--ram", "bytes": 3 << 30, "within_machine": False}],
        "path": None,
    }
    return document | changes


def a_layer(**changes: Any) -> dict[str, Any]:
    return {**a_plan()["layers"][0], **changes}


def plan_from(**changes: Any) -> PlanDocument:
    """That plan with some of its fields changed, read from its document."""
    whole = of_kind(json.loads(json.dumps(a_plan(**changes))), "plan", 1, "plan.json")
    return checked(PlanDocument, whole, "plan.json")


class Reader(HTMLParser):
    """What a browser would make of a page."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(path: Path) -> Reader:
    """A page, after checking that it needs nothing else and can do nothing."""
    document = path.read_text(encoding="utf-8")
    reader = Reader(document)
    allowed = {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "header",
            "h1",
            "h2",
            "h3",
            "p",
            "main",
            "div",
            "b",
            "span",
        ),
        *("section", "ul", "li", "pre", "figure", "picture", "source", "img", "figcaption", "details", "summary"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    for tag, attributes in reader.tags:
        assert tag in allowed
        assert not any(name.startswith("on") or name in ("href", "style", "action") for name in attributes)
        for name in ("src", "srcset"):
            assert name not in attributes or str(attributes[name]).startswith("data:image/png;base64,")
    assert "url(" not in document and "@import" not in document
    assert not re.search(r"(https?|file)://", document)
    return reader


def pixels(raw: bytes) -> tuple[int, int, bytes]:
    """Width, height and inflated rows of a PNG image, its checksums checked."""
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", (0, 0)
    while at < len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        body = raw[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", raw[at + 8 + length : at + 12 + length])[0]
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    assert kind == b"IEND"
    return *size, zlib.decompress(data)


def is_a_plot(raw: bytes) -> None:
    width, height, rows = pixels(raw)
    assert 600 <= width <= 2000 and 300 <= height <= 1500 and len(raw) < 200_000
    assert len(set(rows)) > 20, "nothing is drawn"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which everything but a plan is prepared."""
    path = tmp_path_factory.mktemp("report") / "tiny.gguf"
    return give_profile(give_predictor(give_bundles(tiny_llama(path))))


@pytest.fixture
def opened(model: Path) -> Checkpoint:
    return open_checkpoint(model)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots that take no time, for tests of what becomes of them."""
    monkeypatch.setattr(plots, "png", lambda draw, look: f"a plot for {look.paper}".encode())


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller plots, in light colours alone: all of both are in the report of everything."""
    real = plots.png
    monkeypatch.setattr(plots, "_DPI", 90)
    monkeypatch.setattr(plots, "png", lambda draw, look=plots.LIGHT: real(draw) if look is plots.LIGHT else b"dark")


# ---------------------------------------------------------------- the whole report


def test_a_report_of_everything(opened: Checkpoint, tmp_path: Path) -> None:
    found = with_plan(findings(opened), plan_from(), tmp_path / "plan.json", opened)
    (tmp_path / "plan.json").write_text(json.dumps(a_plan()))
    report = write_report(found, tmp_path / "out")
    assert report.is_new and report.page == tmp_path / "out" / "index.html"
    names = {path.name for path in report.images}
    assert names == {f"{name}.png" for name in ("cumulative", "heat", "sparsity", "bytes", "neurons", "time")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"index.html"}
    for path in report.images:
        is_a_plot(path.read_bytes())
    reader = read(report.page)
    sources = [str(attributes["src"]) for tag, attributes in reader.tags if tag == "img"]
    assert [b64decode(source.partition(",")[2]) for source in sources] == [path.read_bytes() for path in report.images]
    dark = [str(attributes["srcset"]) for tag, attributes in reader.tags if tag == "source"]
    assert len(dark) == len(sources) and not set(dark) & set(sources)
    assert all(attributes["alt"] for tag, attributes in reader.tags if tag == "img")
    assert "What is missing" not in reader.text
    profile = found.profile.value
    assert profile is not None
    active = f"{100 * profile.active_fraction():.0f} %"
    assert f"A token needs {active} of the neurons on average, dense decoding computes all" in reader.text
    hot = f"{100 * profile.hot_share():.0f} %"
    assert f"Hot: the {hot} of all neurons" in reader.text and f"{hot} of the neurons are hot" in reader.text
    assert "2 layers, each with an FFN of 96 neurons, activation relu" in reader.text
    assert "machine's rates: 12.5 tokens a second." in reader.text and "8 neurons a layer are on disk." in reader.text
    assert "all of it in RAM --ram 3GiB more than the machine has" in reader.text
    assert "greedy 11 70 %" in reader.text and "hidden sizes 32" in reader.text


def test_the_next_command(opened: Checkpoint, tmp_path: Path, undrawn: None) -> None:
    (tmp_path / "plan.json").write_text("{}")
    found = findings(opened)
    assert next_steps(found) == [("Make the plan:", f"powerinfer plan -m {opened.path}")]
    found = with_plan(found, plan_from(hardware="mine", budgets={"vram": 2 << 30, "ram": 40000}), tmp_path, opened)
    model = f"-m {opened.path} --selector predicted --vram 2GiB --ram 40000B"
    bench, run = (command for _, command in next_steps(found))
    assert (bench, run) == (f"powerinfer bench {model}", f'powerinfer run "Once upon a time" {model}')
    between = plan_from(hardware="mine", budgets={"vram": 2 << 30, "ram": 40000}, split_mode="expert")
    assert next_steps(with_plan(found, between, tmp_path, opened))[1][1] == f"{run} --split-mode expert"
    page = write_report(with_plan(found, plan_from(), tmp_path / "plan.json", opened), tmp_path / "out").page
    text = read(page).text
    assert f"Next Measure what the model reaches on this machine: powerinfer bench -m {opened.path}" in text
    assert text.endswith(f'Use it: powerinfer run "Once upon a time" -m {opened.path} --selector predicted')
    ((_, prepare),) = next_steps(plan_findings(plan_from(), tmp_path / "plan.json"))
    assert prepare == "powerinfer prepare -m MODEL --corpus TEXT --vram 20000B --ram 40000B"


def test_without_a_gpu_nothing_is_said_of_one(tmp_path: Path, undrawn: None) -> None:
    (tmp_path / "plan.json").write_text("{}")
    layers = [a_layer(layer=n, gpu=0, cpu=96, disk=0, mass_on_gpu=0, seconds={"cpu": 2e-5}) for n in range(2)]
    plan = plan_from(
        layers=layers, gpu_layers=0, mass_on_gpu=0, budgets={"vram": 0, "ram": 40000}, reasons=[], helps=[],
        bytes={"gpu": {}, "cpu": {"ffn": 3000}, "disk": {}},
        predicted=a_plan()["predicted"] | {"dense_tok_s": 10.0},
    )  # fmt: skip
    report = write_report(plan_findings(plan, tmp_path / "plan.json"), tmp_path / "out")
    text = read(report.page).text.partition(" Next ")[0]
    assert "12.5 tokens a second; computing every neuron (dense) 10: 1.25 times that." in text
    assert "GPU" not in text and "VRAM" not in text and "disk" not in text and "Policies" not in text
    assert {path.stem for path in report.images} == {"bytes", "time"}


def test_the_time_of_ffns_as_measured(model: Path, tmp_path: Path, undrawn: None) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(model.read_bytes())
    checkpoint = open_checkpoint(path)
    key = {"model": checkpoint.fingerprint, "quantize": "None", "selector": "exact", "cpu": "A CPU", "threads": "3"}
    slow: dict[Way, float] = {"dense": 3e-3, "exact": 1e-3}
    fast: dict[Way, float] = {"dense": 2e-3, "exact": 5e-3}
    result = TimedLayers([TimedLayer({"1": "exact"}, slow), TimedLayer({"1": "dense"}, fast)])
    give_profile(path)
    for wrong in (key | {"model": "another"}, key | {"quantize": "q8_0"}):
        assert Trial(SELECTORS, checkpoint, EngineConfig(), wrong).keep(result).unsaved is None
        assert findings(checkpoint).measured is None
    before = report_key(findings(checkpoint))
    Trial(SELECTORS, checkpoint, EngineConfig(), key).keep(result)
    assert report_key(findings(checkpoint)) != before
    text = read(write_report(findings(checkpoint), tmp_path / "out").page).text
    assert "On A CPU with 3 threads, selector exact: the FFNs of all layers take 3 ms a token, and 5 ms" in text
    assert "1 of 2 layers decode sparsely" in text
    assert "1.67 x as fast as dense: the FFNs, measured; 1 of 2 layers sparse" in text
    first = "Sparse decoding of the FFNs is 1.67 x as fast as dense on A CPU, measured at load: worth it."
    assert f"activation relu {first} " in text, "the verdict follows the title"
    assert "3000 1000 exact" in text and "2000 5000 dense" in text


def test_the_verdict_comes_first(model: Path, tmp_path: Path, undrawn: None) -> None:
    """Measured, else estimated; for what never is zero the reason; nothing where nothing is known."""
    slow = MeasuredFfns("exact", "A CPU", "2", [0, 1], ["exact", "dense"], [{"dense": 1e-3, "exact": 1e-3}] * 2)
    (tmp_path / "plan.json").write_text("{}")
    checkpoint = open_checkpoint(model)
    plain = findings(checkpoint)
    assert verdict_of(plain) is None
    estimated = {"gpu_layers": 0, "predicted": a_plan()["predicted"] | {"dense_tok_s": 10.0}}
    planned = with_plan(plain, plan_from(**estimated), tmp_path / "plan.json", checkpoint)
    assert verdict_of(planned) == "Sparse decoding is 1.25 x as fast as dense on pc-high, as estimated: worth it."
    assert "1.00 x as fast as dense on A CPU, measured at load: not worth it." in str(
        verdict_of(replace(planned, measured=slow))
    )
    disturbed = replace(planned, measured=replace(slow, disturbed=1.2))
    assert "as estimated" in str(verdict_of(disturbed)), "of times that others disturbed nothing follows"
    text = read(write_report(disturbed, tmp_path / "disturbed").page).text
    assert "Other programs took 1.2 cores meanwhile" in text and "x as fast as dense: the FFNs" not in text
    on_gpu = with_plan(plain, plan_from(predicted=estimated["predicted"]), tmp_path, checkpoint)
    assert "as estimated" in str(verdict_of(replace(on_gpu, measured=slow))), "the trial knows nothing of the GPU"
    dense = with_plan(plain, plan_from(**estimated, selector="all"), tmp_path, checkpoint)
    assert verdict_of(dense) is None
    silent = findings(open_checkpoint(give_profile(tiny_llama(tmp_path / "silu.gguf", "silu"))))
    told = "Nothing to gain: silu is never exactly zero; only --selector threshold skips neurons,"
    told += " which changes answers."
    assert verdict_of(silent) == told
    assert f"activation silu {told} " in read(write_report(silent, tmp_path / "out").page).text


def test_what_training_measured(opened: Checkpoint, tmp_path: Path, light: None) -> None:
    found = findings(opened)
    assert found.predictor.value is not None
    figures = {"precision": 0.5, "candidate_fraction": 0.2, "active_fraction": 0.1, "svd_recall": 0.9}
    figures["svd_candidate_fraction"] = 0.3
    layers = [
        figures | {"rank": 32, "method": method, "recall": recall, "steps": 5}
        for method, recall in (("svd", 0.987), ("trained", 0.991))
    ]
    training = {"recall_target": 0.985, "held_out_tokens": 1234, "share_of_model": 0.0625, "layers": layers}
    value = replace(found.predictor.value, training=training)
    report = write_report(replace(found, predictor=replace(found.predictor, value=value)), tmp_path / "out")
    is_a_plot((tmp_path / "out" / "recall.png").read_bytes())
    text = read(report.page).text
    assert "They are 6.2 % of the model. On 1,234 held-out tokens" in text
    assert "selected 98.9 % of the neurons that fired, where 98.5 % was the target, and 20 % of all neurons." in text
    assert "In 1 of 2 layers the training-free baseline was as good." in text and "99.1 % 50 % 20 % training" in text


def test_a_report_is_drawn_once(opened: Checkpoint, tmp_path: Path, undrawn: None) -> None:
    folder = tmp_path / "out"
    assert write_report(findings(opened), folder).is_new
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = write_report(findings(opened), folder)
    assert not again.is_new and {again.page, *again.images} == set(before)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert write_report(findings(opened), folder, force=True).is_new
    give_profile(opened.path, seed=9)
    assert write_report(findings(open_checkpoint(opened.path)), folder).is_new, "the profile is another"
    os.unlink(folder / "heat.png")
    assert write_report(findings(opened), folder).is_new, "a plot was deleted"


def test_the_same_findings_give_the_same_bytes(opened: Checkpoint, tmp_path: Path, light: None) -> None:
    one, other = (write_report(findings(opened), tmp_path / name).page for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_what_is_missing_is_named_with_its_command(tmp_path: Path, undrawn: None) -> None:
    path = give_profile(tiny_llama(tmp_path / "a b.gguf"))
    report = write_report(findings(open_checkpoint(path)), tmp_path / "out")
    assert {one.stem for one in report.images} == {"cumulative", "heat", "sparsity"}
    reader = read(report.page)
    assert "What is missing" in reader.text
    for command in ("train", "pack"):
        assert f"powerinfer {command} -m '{path}'" in reader.text
    assert "powerinfer plan" in reader.text


def test_what_is_stale_is_not_shown(model: Path, tmp_path: Path, undrawn: None) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", "silu")
    os.symlink(f"{model}.powerinfer", f"{path}.powerinfer")
    found = findings(open_checkpoint(path))
    assert all(one.value is None for one in found)
    with pytest.raises(RequestError, match="nothing is prepared"):
        write_report(found, tmp_path / "out")
    os.unlink(f"{path}.powerinfer")
    give_profile(path)
    os.symlink(f"{model}.powerinfer/neurons.safetensors", f"{path}.powerinfer/neurons.safetensors")
    reader = read(write_report(findings(open_checkpoint(path)), tmp_path / "out").page)
    assert "was made for another model" in reader.text and f"powerinfer pack -m {path}" in reader.text
    assert "powerinfer train" not in reader.text, "no predictor can serve a SwiGLU model"


def test_nothing_is_known(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    line = error_line(powerinfer("report", "-m", str(path)))
    assert f"start with `powerinfer profile -m {path}`" in line
    assert [one.name for one in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_plan_of_a_model_that_is_only_described(tmp_path: Path, light: None) -> None:
    file = tmp_path / "opt.json"
    layers = [
        {"layer": n, "gpu": 100, "cpu": 2900 - n, "disk": n, "mass_on_gpu": 0.3, "seconds": {}} for n in range(96)
    ]
    file.write_text("a line of progress\n" + json.dumps(a_plan(model="OPT-175B", layers=layers)) + "\n")
    report = write_report(plan_findings(read_plan_document(file), file), tmp_path / "out")
    assert {one.stem for one in report.images} == {"bytes", "neurons"}, "no times are predicted, no profile is there"
    reader = read(report.page)
    assert "OPT-175B" in reader.text and "What is missing" not in reader.text
    rows = re.findall(r"(\d+) 100 ([\d,]+) (\d+) 30 %", reader.text)
    assert [(int(n), int(disk)) for n, _, disk in rows] == [(n, n) for n in range(96)]


def test_plots_of_a_former_report_go(model: Path, tmp_path: Path, undrawn: None) -> None:
    opened = open_checkpoint(model)
    (tmp_path / "plan.json").write_text("")
    found = with_plan(findings(opened), plan_from(), tmp_path / "plan.json", opened)
    write_report(found, tmp_path / "out")
    (tmp_path / "out" / "mine.png").write_bytes(b"not ours")
    left = {path.name for path in write_report(findings(opened), tmp_path / "out").page.parent.iterdir()}
    assert left == {"index.html", "cumulative.png", "heat.png", "sparsity.png", "mine.png"}


# ---------------------------------------------------------------- names that mean harm


def test_hostile_names_are_only_text(opened: Checkpoint, tmp_path: Path, light: None) -> None:
    found = findings(opened)
    profile = found.profile.value
    assert profile is not None
    evil = replace(profile, corpora=(HOSTILE, HOSTILE * 2))
    predicted = a_plan()["predicted"]
    plan = plan_from(
        hardware=HOSTILE,
        policy=HOSTILE,
        reasons=[HOSTILE],
        assumed=[HOSTILE],
        helps=[{"what": HOSTILE, "flag": HOSTILE, "bytes": 1, "within_machine": True}],
        bytes={tier: {HOSTILE: 5, "ffn": 9} for tier in ("gpu", "cpu", "disk")},
        predicted=predicted | {"policies": {HOSTILE: predicted["policies"]["greedy"]}},
    )
    (tmp_path / "plan.json").write_text("")
    found = with_plan(
        replace(found, model=HOSTILE, summary=HOSTILE, profile=replace(found.profile, value=evil)),
        plan, tmp_path / "plan.json", opened,
    )  # fmt: skip
    report = write_report(found, tmp_path / "out")
    document = report.page.read_text(encoding="utf-8")
    reader = read(report.page)
    assert "<script" not in document and "\x1b" not in document and "\u202e" not in document
    assert reader.text.count("<script>alert(1)</script>") >= 8, "shown as it is"
    for path in report.images:
        is_a_plot(path.read_bytes())


def test_a_page_escapes_everything_it_is_given(tmp_path: Path) -> None:
    table = Table([HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE, fold=True)
    section = Section(HOSTILE, [HOSTILE], [(HOSTILE, HOSTILE)], [], [table, replace(table, fold=False)])
    document = page(HOSTILE, HOSTILE, [(HOSTILE, HOSTILE)], [section], HOSTILE)
    (tmp_path / "page.html").write_text(document, encoding="utf-8")
    assert (
        read(tmp_path / "page.html").text.count("<script>") == 2 + 2 + 1 + 1 + 2 + 2 * 5 + 1
    )  # the title is there twice
    assert mark_of(page("a", "b", [], [], 'c"d')) == 'c"d'
    assert mark_of("<html>") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "its format is '2'"),
        ({"kind": "hardware"}, "its kind is 'hardware'"),
        ({"layers": []}, "layers has a length of 0"),
        ({"layers": "x"}, "layers is 'x', not a list"),
        ({"layers": [{}] * 5000}, "layers has a length of 5000"),
        ({"layers": [a_layer(gpu=-1)]}, r"layers\[0\].gpu is '-1'"),
        ({"layers": [a_layer(), a_layer(cpu=0.5)]}, r"layers\[1\].cpu is '0.5', not a whole number"),
        ({"layers": [a_layer(mass_on_gpu=7)]}, r"layers\[0\].mass_on_gpu is '7'"),
        ({"layers": [a_layer(seconds=None)]}, r"layers\[0\].seconds is 'None'"),
        ({"layers": [a_layer(seconds={"gpu": -1})]}, r"layers\[0\].seconds.gpu is '-1'"),
        ({"layers": [{"gpu": 1}]}, r"layers\[0\].layer is missing"),
        ({"fits": "yes"}, "fits is 'yes'"),
        ({"mass_on_gpu": True}, "mass_on_gpu is 'True'"),
        ({"mass_on_gpu": 1.01}, "mass_on_gpu is '1.01'"),
        ({"predicted": a_plan()["predicted"] | {"decode_tok_s": 1e300}}, "decode_tok_s is '1e.300'"),
        ({"predicted": {"decode_tok_s": 1}}, "predicted.ms_per_token is missing"),
        ({"bytes": {"gpu": {}}}, "bytes does not have just gpu, cpu, disk"),
        ({"activations": {}}, "activations does not have just gpu, cpu, disk"),
        ({"bytes": {"gpu": {"x": 10**30}, "cpu": {}, "disk": {}}}, "bytes.gpu.x is '1000"),
        ({"reasons": [1]}, r"reasons\[0\] is '1', not a text"),
        ({"assumed": {}}, "assumed is"),
        ({"helps": [{"what": "x", "flag": "--ram", "bytes": 1.5}]}, r"helps\[0\].bytes is '1.5'"),
        ({"reasons": ["x" * 3000]}, r"reasons\[0\] has a length of 3000"),
        ({"policy": None}, "policy is 'None', not a text"),
        ({"surprise": 1}, "surprise is not known"),
    ],
)
def test_plans_that_are_none(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        plan_from(**change)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 50_000, b"7", b"null", b"x" * (17 << 20)]
)
def test_files_that_hold_no_plan(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(file))):
        read_plan_document(file)


def test_plans_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RequestError, match=re.escape(str(path))):
            read_plan_document(path)


def test_a_plan_of_another_model_is_refused(opened: Checkpoint) -> None:
    other = plan_from(layers=a_plan()["layers"] * 2)
    with pytest.raises(RequestError, match="4 layers of 96 neurons, but Tiny has 2 layers of 96 neurons"):
        with_plan(findings(opened), other, Path("other.json"), opened)


# ---------------------------------------------------------------- writing


def test_a_folder_that_cannot_be_written(opened: Checkpoint, tmp_path: Path, undrawn: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PowerInferError, match=r"cannot write the report into .*--out FOLDER"):
        write_report(findings(opened), tmp_path / "file" / "out")


def test_a_full_disk_leaves_the_former_report(
    opened: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    page = write_report(findings(opened), tmp_path / "out").page
    before = page.read_bytes()
    written: list[Path] = []

    def full(path: Path, data: bytes) -> None:
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)

    monkeypatch.setattr(writing, "write_small", full)
    with pytest.raises(PowerInferError, match="No space left on device"):
        write_report(findings(opened), tmp_path / "out", force=True)
    assert written[0].suffix == ".png" and page.read_bytes() == before
    assert not list((tmp_path / "out").glob("*.part"))


def test_without_matplotlib_one_line_says_how_to_get_it(model: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nfrom powerinfer.cli.main import entry; entry()"
    command = [sys.executable, "-c", code, "report", "-m", str(model)]
    line = error_line(subprocess.run(command, capture_output=True, text=True, timeout=60))
    assert "pip install '.[report]' in a clone" in line


def test_drawing_leaves_matplotlib_as_it_was(opened: Checkpoint, tmp_path: Path) -> None:
    import matplotlib

    profile = findings(opened).profile.value
    draw = lambda figure: plots.draw_cumulative(figure, profile)  # noqa: E731
    image = plots.png(draw)
    with matplotlib.rc_context({"lines.linewidth": 7.0, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        assert plots.png(draw) == image, "the user's taste is not asked"
        assert dict(matplotlib.rcParams) == before


# ---------------------------------------------------------------- the figures


def test_cumulative_shares() -> None:
    assert plots.cumulative(np.array([1, 3, 0, 4])).tolist() == [0, 0.5, 0.875, 1, 1]
    assert plots.cumulative(np.zeros(3, np.int64)).tolist() == [0, 0, 0, 0]


def test_the_heat_map_holds_every_neuron_once() -> None:
    for d_ff in (1, 5, 256, 1000):
        profile = profile_of(layers=3, d_ff=d_ff)
        values = plots.heat(profile)
        assert values.shape == (3, min(256, d_ff)) and (np.diff(values) <= 1e-9).all()
        edges = np.linspace(0, d_ff, values.shape[1] + 1).astype(int)
        means = (values * np.diff(edges)).sum(axis=1) / d_ff
        assert means == pytest.approx([100 * profile.active_fraction(layer) for layer in range(3)])


def test_the_spread_of_tokens() -> None:
    histogram = np.zeros(101, np.int64)
    histogram[[3, 10, 90]] = [10, 80, 10]
    assert [plots.spread(histogram, share) for share in (0.05, 0.1, 0.11, 0.9, 0.91)] == [3, 3, 10, 10, 90]
    assert plots.spread(np.zeros(101, np.int64), 0.9) == 0


@pytest.mark.parametrize(
    "profile", [profile_of(1, 1), profile_of(1, 2000), profile_of(70, 3), profile_of(70, 3, most=0)],
    ids=["of one neuron", "wide", "deep", "silent"],
)  # fmt: skip
def test_profiles_of_any_shape_are_drawn(profile: Profile, light: None) -> None:
    for draw in (plots.draw_cumulative, plots.draw_heat_map, lambda fig, one: plots.draw_sparsity(fig, one, None)):
        is_a_plot(plots.png(lambda figure, draw=draw: draw(figure, profile)))


# ---------------------------------------------------------------- plans that are kept


def test_the_newest_plan_is_shown_while_it_holds(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = give_profile(give_bundles(tiny_llama(tmp_path / "tiny.gguf")))

    def plan(*flags: str) -> dict[str, Any]:
        assert main(["plan", "-m", str(path), "--hardware", "pc-8gb", "--selector", "exact", *flags, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    first = plan()
    found = findings(open_checkpoint(path)).plan
    assert found.value is not None and found.value.json() == first
    second = plan("--vram", "2GiB", "--batch", "3")
    os.utime(first["path"], ns=(1, 1))
    found = findings(open_checkpoint(path)).plan
    assert str(found.path) == second["path"] and found.value is not None and found.value.batch == 3
    reader = read(write_report(findings(open_checkpoint(path)), tmp_path / "out").page)
    assert "with 2 GiB of VRAM" in reader.text and "for 3 requests" in reader.text

    main(["inspect", "-m", str(path), "--json"])
    shown = json.loads(capsys.readouterr().out)["prepared"]["plan"]
    assert (shown["batch"], shown["mass_on_gpu"], shown["stale"]) == (3, second["mass_on_gpu"], None)
    main(["inspect", "-m", str(path)])
    assert re.search(r"^plan +2 GiB of VRAM and .* tokens/s estimated", capsys.readouterr().out, re.MULTILINE)

    found = findings(open_checkpoint(path, quantize="q8_0")).plan
    assert found.value is None and "without --quantize, and the model is opened with --quantize" in str(found.stale)
    assert "--quantize q8_0" in found.command, "the command makes a plan of the model as it is opened"

    give_profile(path, seed=8)
    found = findings(open_checkpoint(path)).plan
    assert found.value is None and "made from another profile" in str(found.stale)
    main(shlex.split(found.command)[1:])
    renewed = findings(open_checkpoint(path)).plan
    assert renewed.value is not None and renewed.value.batch == 3 and renewed.value.budgets.vram == 2 << 30
    assert renewed.path != found.path, "the command in the report makes the same plan again"
    tiny_llama(path, "relu2")
    stale = [one.stale for one in findings(open_checkpoint(path))]
    assert all("another model" in str(why) for why in stale if why) and len([why for why in stale if why]) == 3


def test_damaged_plans_are_stale(tmp_path: Path, undrawn: None) -> None:
    path = give_profile(tiny_llama(tmp_path / "tiny.gguf"))
    kept = Path(f"{path}.powerinfer/plan-0123456789abcdef.json")
    for content in (b"", b"[1]", b'{"layers": 3}', b"\0" * 100, json.dumps(a_plan(fits=7)).encode()):
        kept.write_bytes(content)
        found = findings(open_checkpoint(path))
        assert found.plan.value is None and str(kept) in str(found.plan.stale)
        reader = read(write_report(found, tmp_path / "out").page)
        assert f"powerinfer plan -m {path}" in reader.text
    kept.unlink()
    kept.mkdir()
    assert findings(open_checkpoint(path)).plan.value is None


# ---------------------------------------------------------------- the command


def test_the_command(model: Path, tmp_path: Path, undrawn: None) -> None:
    done = powerinfer("report", "-m", str(model), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["path"] == f"{model}.powerinfer/report/index.html" and document["made"] and document["seconds"] > 0
    assert document["shown"] == {"profile": True, "predictor": True, "bundles": True, "plan": False}
    assert [one["noun"] for one in document["missing"]] == ["plan"]
    read(Path(document["path"]))
    (tmp_path / "plan.json").write_text(json.dumps(a_plan()))
    done = powerinfer("report", "--plan", str(tmp_path / "plan.json"))
    assert done.returncode == 0 and f"{tmp_path}/plan.json.report/index.html: plan, 3 plots" in done.stdout
    both = ["-m", str(model), "--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "both")]
    done = powerinfer("report", *both, "--json")
    assert all(json.loads(done.stdout)["shown"].values()) and len(list((tmp_path / "both").glob("*.png"))) == 6


def test_other_verbs_do_not_import_matplotlib(model: Path) -> None:
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "inspect", "-m", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "matplotlib" not in done.stderr
