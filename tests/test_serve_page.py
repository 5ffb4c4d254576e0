"""The page of `powerinfer serve` and its live view: files and headers, frames, and the page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser, browsing
from serving import SlowExecutor, client, running, served_llm, serving
from sparse_models import TEXT, give_bundles, tiny_llama
from toy_model import until

from powerinfer.config import ServeConfig
from powerinfer.devices.cpu import Fired
from powerinfer.errors import ModelError
from powerinfer.hybrid.resolved import Needs
from powerinfer.neurons import Profile
from powerinfer.progress import Progress
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.live import DisplayRanking, bin_edges
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve import live as live_module
from powerinfer.serve.overview import OVERVIEW
from powerinfer.serve.page import FILES
from powerinfer.serve.served import Budget, ModelSource
from powerinfer.serve.server import make_server
from powerinfer.serve.service import ServicePolicy
from powerinfer.text.sampling_defaults import SamplingDefaults

NODE = shutil.which("node")
FOLDER = Path(live_module.__file__).parent / "page_files"
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = give_bundles(tiny_llama(tmp_path_factory.mktemp("page") / "m.gguf"))
    with LLM(path, selector="exact", trial=False, threads=2) as llm:
        yield llm


def test_the_page_has_its_headers_and_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_API_KEY", "secret")
    with serving(served_llm()) as server, client(server) as http:
        for path, (name, kind) in FILES.items():
            answer = http.get(path)
            assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == kind
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.get(live_module.LIVE).status_code == 401
        assert http.get(live_module.LIVE, headers={"Authorization": "Bearer secret"}).status_code == 200
        assert not set(FILES) & set(
            http.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()["paths"]
        )


def test_the_page_makes_no_html_of_text() -> None:
    for name, _ in FILES.values():
        text = (FOLDER / name).read_text(encoding="utf-8")
        for what in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"):
            assert what not in text, f"{name} has {what}"


# ---------------------------------------------------------------- counting


class Counter:
    def __init__(self, layers: int, neurons: int) -> None:
        self.counts = np.zeros((layers, neurons), np.int64)

    def reads(self, layer: int, x: object) -> None:
        pass

    def fires(self, layer: int, fired: Fired) -> None:
        self.counts[layer] += fired.counts


@pytest.mark.parametrize("way", ["exact", "dense", "matrices"])
def test_firings_are_those_that_a_watch_sees(sparse: LLM, way: str) -> None:
    """matrices: steps of `exact` that compute the rest from the matrices, as where many neurons fire."""
    executor, tokens = sparse._executor, sparse.encode(TEXT)[:40]
    sizes = sparse.config.ffn_sizes
    watched = Counter(len(sizes), sizes[0])
    with executor.observed(watched):  # type: ignore[attr-defined]
        sparse.score(tokens, 0, lambda position, logits: None, 1)
    ffns = executor.ffns  # type: ignore[attr-defined]
    before = {layer: ffn.op.dense_above for layer, ffn in ffns.items()}
    try:
        for ffn in ffns.values():
            ffn.set_ways({1: "dense" if way == "dense" else "exact"})
            ffn.op.dense_above = 0.0 if way == "matrices" else 1.0
            ffn.count_fired(True)
        sparse.score(tokens, 0, lambda position, logits: None, 1)
        for layer, ffn in ffns.items():
            count, fired = ffn.take_fired()
            assert count == len(tokens)
            assert fired.sum() and np.array_equal(fired, watched.counts[layer])
            ffn.count_fired(False)
            with pytest.raises(ValueError, match="not counted"):
                ffn.take_fired()
    finally:
        for layer, ffn in ffns.items():
            ffn.set_ways({32: "exact"})
            ffn.op.dense_above = before[layer]


def test_a_look_is_what_the_counters_say(sparse: LLM) -> None:
    want = sparse.generate(TEXT[:40], PARAMS)
    sparse.clear_sparsity()
    live = sparse.live()
    assert all(one.fired is None and one.active is None and one.tokens == 0 for one in live.look())
    assert sparse.generate(TEXT[:40], PARAMS).token_ids == want.token_ids
    layers = live.look(8)
    report = sparse.sparsity
    assert report is not None
    for one, told in zip(layers, report["layers"], strict=True):
        assert (one.way, one.device, one.gpu, one.reason) == ("exact", "cpu", 0, None)
        assert one.tokens == told["tokens"] and one.fired is not None and len(one.fired) == 8
        assert one.active == pytest.approx(told["active_fraction"])
        assert one.ffn_bytes == pytest.approx(told["bytes_per_token"])
    live.close()


def test_bins_have_every_neuron_once() -> None:
    for neurons, bins in ((7, 7), (100, 7), (11008, 128)):
        edges = bin_edges(neurons, bins)
        assert edges[0] == 0 and edges[-1] == neurons and (np.diff(edges) > 0).all()


def test_frames(sparse: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(live_module, "FRAME_SECONDS", 0.0)
    view = live_module.LiveView()
    first = view.frame(sparse)
    assert first["tokens"] == 0 and first["tokens_per_second"] is None
    sparse.generate(TEXT[:40], PARAMS)
    frame = json.loads(json.dumps(view.frame(sparse)))
    assert frame["object"] == "engine.live" and frame["frame"] == 2 and frame["tokens"] == 16
    assert frame["bytes_per_token"] > 0 and 0 < frame["busy"] <= 1
    for layer in frame["layers"]:
        assert layer["on_gpu"] is None and layer["device"] == "cpu" and 0 < layer["active_fraction"] < 1
        assert all(0 <= one <= 1000 for one in layer["fired"])
    time.sleep(0.8)
    assert view._live is None, "counting ends when nobody looks"
    assert view.frame(sparse)["seconds"] == 0
    view.close()


def test_a_model_whose_neurons_always_fire_says_so(tmp_path: Path) -> None:
    with LLM(tiny_llama(tmp_path / "m.gguf", "silu")) as llm:
        view = live_module.LiveView()
        frame = view.frame(llm)
        view.close()
    for layer in frame["layers"]:
        assert layer["fired"] is None and "silu is never exactly zero" in layer["why_not"] and layer["way"] == "dense"
        assert layer["ffn_bytes_per_token"] > 0


def test_the_ranking_puts_the_neurons_that_fire_most_first() -> None:
    ranking = DisplayRanking()
    assert ranking.order(0) is None and ranking.carried(0.5) is None and ranking.tokens == 0
    ranking.add(0, 4, np.array([0, 4, 1, 3]))
    assert ranking.order(0).tolist() == [1, 3, 2, 0]  # type: ignore[union-attr]
    assert ranking.carried(0.25) == 0.5 and ranking.carried(0.5) == 7 / 8
    ranking.add(0, 3, np.array([3, 0, 3, 0]))
    assert ranking.order(0).tolist() == [1, 3, 2, 0], "columns stay until the tokens have doubled"  # type: ignore[union-attr]
    ranking.add(0, 1, np.array([1, 0, 1, 0]))
    assert ranking.order(0).tolist() == [2, 0, 1, 3] and ranking.tokens == 8  # type: ignore[union-attr]


def test_frames_are_in_the_order_of_the_profile(sparse: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sparse.config.ffn_sizes
    counts = tuple(np.arange(size, dtype=np.int64) for size in sizes)  # the last neuron is the hottest
    nothing = np.zeros((0, max(sizes)), np.int64)
    active = tuple(np.zeros(101, np.int64) for _ in sizes)
    profile = Profile(1000, counts, (), (), (nothing,) * len(sizes), active, (0.0,) * len(sizes))
    monkeypatch.setattr(live_module, "open_profile", lambda checkpoint, prepared: profile)
    monkeypatch.setattr(live_module, "FRAME_SECONDS", 0.0)
    view = live_module.LiveView()
    try:
        view.frame(sparse)
        watched = Counter(len(sizes), sizes[0])
        with sparse._executor.observed(watched):  # type: ignore[attr-defined]
            sparse.score(sparse.encode(TEXT)[:40], 0, lambda position, logits: None, 1)
        frame = view.frame(sparse)
    finally:
        view.close()
    assert frame["ranking"]["profile_tokens"] == 1000 and 0.2 < frame["ranking"]["carried"] < 0.4
    for layer, told in enumerate(frame["layers"]):
        edges = bin_edges(sizes[layer], len(told["fired"]))
        backwards = watched.counts[layer][::-1]
        want = np.add.reduceat(backwards, edges[:-1]) / (np.diff(edges) * told["tokens"])
        assert told["fired"] == (1000 * want).round().astype(int).tolist()


def test_the_counts_of_a_stopped_step_wait_for_those_of_the_other_layers(sparse: LLM) -> None:
    """Such a step has been counted by its first layers only: shown alone, they would look unlike the others."""
    executor = sparse._executor
    live = sparse.live()
    try:
        _, *others = executor.ffns.values()  # type: ignore[attr-defined]
        for ffn in others:
            ffn.count_fired(False)
        sparse.score(sparse.encode(TEXT)[:2], 0, lambda position, logits: None, 1)
        for ffn in others:
            ffn.count_fired(True)
        assert all(one.fired is None and one.tokens == 0 for one in live.look())
        sparse.score(sparse.encode(TEXT)[:3], 0, lambda position, logits: None, 1)
        assert [one.tokens for one in live.look()] == [5] + [3] * len(others)
    finally:
        live.close()


def test_the_overview_tells_the_state_and_the_defaults(tmp_path: Path) -> None:
    event = threading.Event()

    def load(progress: Progress, budget: Budget) -> LLM:
        progress("weights", 1, 4)
        assert event.wait(30)
        llm = served_llm()
        llm.sampling = SamplingDefaults({"temperature": 0.2}, "its card")
        return llm

    server = make_server([ModelSource(("toy",), load)], ServeConfig(port=0), 64)
    with running(server), client(server) as http:
        until(lambda: server.service.models[0].progress is not None)
        (row,) = http.get(OVERVIEW).raise_for_status().json()["data"]
        assert row["status"] == "loading" and row["loaded"] is None
        assert row["loading"] == {"label": "weights", "done": 1, "total": 4}
        event.set()
        until(lambda: server.service.status == "ok")
        (row,) = http.get(OVERVIEW).raise_for_status().json()["data"]
    assert (row["id"], row["status"], row["loading"], row["reason"]) == ("toy", "ok", None, None)
    loaded = row["loaded"]
    assert loaded["context"] == 512 and loaded["chats"] is True and loaded["parameters"] is None
    assert loaded["sampling"] == {
        "temperature": 0.2, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.0
    }  # fmt: skip


def test_the_overview_says_why_a_model_failed_and_which_is_small(tmp_path: Path) -> None:
    def fail(progress: Progress, budget: Budget) -> LLM:
        raise ModelError("the file is torn")

    path = tiny_llama(tmp_path / "m.gguf")
    sources = [
        ModelSource((name,), load, lambda budget: Needs(1))
        for name, load in (("bad", fail), ("tiny", lambda progress, budget: LLM(path, threads=1)))
    ]
    server = make_server(sources, ServeConfig(port=0), 64, ServicePolicy())
    with running(server), client(server) as http:
        for name in ("bad", "tiny"):
            http.post("/models/load", json={"model": name})
        bad, tiny = http.get(OVERVIEW).raise_for_status().json()["data"]
    assert (bad["status"], bad["reason"], bad["loaded"]) == ("failed", "the file is torn", None)
    assert 0 < tiny["loaded"]["parameters"] < 1e6 and "small model (1 million weights)" in tiny["loaded"]["note"]
    assert tiny["loaded"]["chats"] is True and tiny["loaded"]["context"] > 0


# ---------------------------------------------------------------- its scripts


def node(script: str, tmp_path: Path) -> Any:
    """What a module prints as JSON that imports the page's scripts, with as much of a document as these need."""
    if NODE is None:
        pytest.skip("needs Node: none is installed")
    for name, kind in FILES.values():
        if "javascript" in kind:
            (tmp_path / name.replace(".js", ".mjs")).write_text(
                re.sub(r'from "\./(\w+)\.js"', r'from "./\1.mjs"', (FOLDER / name).read_text(encoding="utf-8"))
            )
    (tmp_path / "probe.mjs").write_text(DOCUMENT + script)
    done = subprocess.run([NODE, "probe.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DOCUMENT = """
const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
class Element {
  constructor(name) { this.name = name; this.attributes = {}; this.inner = []; this.parent = null; }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...inner) { for (const one of inner) { if (one.name) one.parent = this; this.inner.push(one); } }
  remove() { this.parent.inner = this.parent.inner.filter((one) => one !== this); }
  get html() {
    const inner = this.inner.map((one) => one.html ?? escape(String(one))).join("");
    const pairs = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escape(String(value))}"`);
    return `<${this.name}${pairs.join("")}>${inner}</${this.name}>`;
  }
}
globalThis.document = { createElement: (name) => new Element(name) };
"""


def markdown(tmp_path: Path, *texts: str) -> list[str]:
    """Each text as HTML, as the page's renderer makes it."""
    script = """
import { Rendered } from "./markdown.mjs";
console.log(JSON.stringify(TEXTS.map((text) => {
  const parent = new Element("x");
  new Rendered(parent, () => new Element("copy")).set(text);
  return parent.inner.map((one) => one.html).join("");
})));"""
    return list(node(script.replace("TEXTS", json.dumps(texts)), tmp_path))


LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


def test_markdown(tmp_path: Path) -> None:
    cases = {
        "# Title #\n\na **b *c*** `d`\ne": "<h3>Title</h3><p>a <strong>b <em>c</em></strong> <code>d</code>"
        "<br></br>e</p>",
        "1. one\n   - in\n   - *in*\n\n2. two": "<ol><li>one<ul><li>in</li><li><em>in</em></li></ul></li>"
        "<li>two</li></ol>",
        "3) x": '<ol start="3"><li>x</li></ol>',
        "- [x] a\n- [ ] b": '<ul><li class="task">\u2611 a</li><li class="task">\u2610 b</li></ul>',
        "> q\n> - l\n\n---": "<blockquote><p>q</p><ul><li>l</li></ul></blockquote><hr></hr>",
        "|a|b|\n|-|-:|\n|`1`|x\\|y|\n|2|": '<div class="scroll" tabindex="0"><table><thead><tr><th>a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td><code>1</code></td><td class="right">x|y</td></tr>'
        '<tr><td>2</td><td class="right"></td></tr></tbody></table></div>',
        "```py\nif a < b:\n    **c**": '<div class="code"><div class="code-bar"><span>py</span><copy></copy></div>'
        '<pre tabindex="0"><code>if a &lt; b:\n    **c**</code></pre></div>',
        "snake_case_name 2 * 3 * 4 \\*x\\*": "<p>snake_case_name 2 * 3 * 4 *x*</p>",
        "[a](https://b.c/d_(e)) f": f'<p><a href="https://b.c/d_(e)" title="https://b.c/d_(e)" {LINK}>a</a> f</p>',
        "see https://b.c/d.": f'<p>see <a href="https://b.c/d" title="https://b.c/d" {LINK}>https://b.c/d</a>.</p>',
    }
    assert dict(zip(cases, markdown(tmp_path, *cases), strict=True)) == cases


def test_markdown_makes_no_html_and_no_unsafe_link(tmp_path: Path) -> None:
    html, links, image = markdown(
        tmp_path,
        '<img src=x onerror=alert(1)> **<b>x</b>**\n- `<script>`\n\n```"><script>\n<script>1</script>\n```',
        "[a](javascript:alert(1)) [b](data:text/html,x) [c]( vbscript:x) [d](JaVaScRiPt&#58;x) [e](/v1/models)",
        '![i](https://e.f/track.png) [x](https://e.f/"onclick="y)',
    )
    assert "<img" not in html and "<script" not in html and "<b>" not in html
    assert "&lt;img src=x onerror=alert(1)>" in html and "<pre" in html
    assert "<a" not in links and "alert(1)" in links
    assert "<img" not in image and image.count("<a ") == 2 and 'onclick="' not in image


def test_markdown_of_hostile_text_takes_no_long_time(tmp_path: Path) -> None:
    many, some = 300_000, 20_000  # what is quadratic takes minutes
    texts = ["# a" + " " * many + "b", "|--" + " " * many + "x\n|--" + " " * many + "x", "```" + " " * many + "`"]
    texts += ["https://a" + "." * many, "`" * many, "`a``b" * (many // 5), "> " * many, "- " * many, "[" * many]
    texts += ["*a " * some, "**a *b " * some, "[" * some + "](x", "*[_~`" * some, "- a\n  - b\n    - c\n" * (some // 3)]
    begin = os.times()
    assert len(markdown(tmp_path, *texts)) == len(texts)
    end = os.times()
    assert end.children_user - begin.children_user < 20


def test_text_that_grows_keeps_its_nodes(tmp_path: Path) -> None:
    script = r"""
import { Rendered } from "./markdown.mjs";
const parent = new Element("x"), rendered = new Rendered(parent, () => new Element("copy"));
rendered.set("one\n\ntwo");
const [first, second] = parent.inner;
rendered.set("one\n\ntwo and\n\nthree");
const same = [parent.inner[0] === first, parent.inner[1] === second];
console.log(JSON.stringify([...same, parent.inner.map((one) => one.html)]));"""
    assert node(script, tmp_path) == [True, False, ["<p>one</p>", "<p>two and</p>", "<p>three</p>"]]


CHATS = """
import { Chats } from "./chats.mjs";
import { Memory } from "./storage.mjs";
let time = 0;
const storage = new Memory(), chats = new Chats(storage, () => ++time);
const chat = (text) => Object.assign(Chats.fresh(), { messages: [{ role: "user", content: text }] });
const out = (value) => console.log(JSON.stringify(value));
"""


def test_chats_are_kept_newest_first_within_bounds(tmp_path: Path) -> None:
    script = r"""
const first = chat("  first\n one"), big = chat("x".repeat(3e6));
Object.assign(first, { model: "m", system: "s" });
first.messages.push({ role: "assistant", content: "", thought: "t", seconds: 2, busy: true, before: [1], note: 7 });
chats.write(first);
storage.setItem("powerinfer.chat.torn", "{");
const read = chats.read(first.id), titles = chats.list().map(({ title }) => title);
for (let n = 0; n < 120; n++) chats.write(chat(`c${n}`));
const many = chats.list();
chats.write(big);
chats.write(chat("y".repeat(2e6)));
const left = chats.list().length;
out([read.messages, read.model, read.system, titles, many.length, many[0].title, left, chats.read(big.id)]);
"""
    messages, model, system, titles, count, newest, left, big = node(CHATS + script, tmp_path)
    assert messages[1] == {"role": "assistant", "content": "", "thought": "t", "seconds": 2}
    assert (model, system, titles) == ("m", "s", ["first one"])
    assert (count, newest) == (100, "c119") and left == 1 and big is None


def test_tabs_do_not_overwrite_one_another(tmp_path: Path) -> None:
    script = """
const here = chat("both");
chats.write(here);
const there = chats.read(here.id);
there.messages.push({ role: "assistant", content: "there" });
chats.write(there);
here.messages.push({ role: "assistant", content: "here" });
const outcome = chats.write(here), texts = chats.list().map(({ id }) => chats.read(id).messages[1].content);
chats.forget(there.id);
const after = chats.write(there), left = chats.list().length;
out([outcome, texts, here.id !== there.id, after, left]);
"""
    assert node(CHATS + script, tmp_path) == ["saved", ["here", "there"], True, "forgotten", 1]


def test_a_full_browser_loses_the_oldest_chats_first(tmp_path: Path) -> None:
    script = """
const set = storage.setItem.bind(storage);
storage.setItem = (key, value) => {
  const others = [...storage.values].filter(([name]) => name !== key).reduce((sum, [, text]) => sum + text.length, 0);
  if (others + value.length > 3000) throw new Error("quota");
  set(key, value);
};
for (let n = 0; n < 9; n++) chats.write(chat(`${n}`.repeat(500)));
const titles = chats.list().map(({ title }) => title[0]), long = chat("z".repeat(5000)), full = chats.write(long);
long.messages[0].content = "short";
out([titles, full, chats.write(long), chats.list().length]);
"""
    titles, full, later, left = node(CHATS + script, tmp_path)
    assert titles == sorted(titles, reverse=True) and titles[0] == "8" and 2 <= len(titles) <= 5
    assert (full, later, left) == ("full", "saved", 1)


@pytest.mark.parametrize(
    ("parts", "texts", "error"),
    [
        (['data: {"n": 1}\n\nda', 'ta: {"n": 2}\n\n: ping\n\n', "data: [DONE]\n\n"], [1, 2], None),
        (['data: {"n": 1}\n\n'], [1], "Lost"),
        (['data: {"n": 1}\n\n', None], [1], "Lost"),
        (["data: {\n\n"], [], "Lost"),
    ],
)
def test_a_stream_that_ends_early_is_lost(
    tmp_path: Path, parts: list[str | None], texts: list[int], error: str | None
) -> None:
    script = f"""
import {{ events }} from "./server.mjs";
const parts = {json.dumps(parts)}, bytes = new TextEncoder(), got = [];
const body = new ReadableStream({{ pull(control) {{
  if (!parts.length) control.close();
  else if (parts[0] === null) control.error(new TypeError("network"));
  else control.enqueue(bytes.encode(parts.shift()));
}} }});
let error = null;
try {{
  for await (const event of events({{ body }})) got.push(event.n);
}} catch (problem) {{ error = problem.constructor.name; }}
console.log(JSON.stringify([got, error]));"""
    assert node(script, tmp_path) == [texts, error]


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: none is installed")
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


ANSWER = "document.querySelector('.assistant:last-child > div')?.textContent"
BLOCKED = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });"""
ENDED = "document.getElementById('stop').disabled && document.querySelectorAll('.assistant').length > 0"


def test_a_browser_shows_the_model_and_its_defaults(browser: Browser) -> None:
    llm = served_llm()
    llm.sampling = SamplingDefaults({"temperature": 0.2}, "its card")
    with serving(llm) as server:
        page = browser.page()
        page.open(server.url)
        page.wait("document.getElementById('model').textContent === 'toy'")
        assert page.run("document.getElementById('temperature').placeholder") == "0.2"
        assert page.run("document.getElementById('top_p').placeholder") == "0.95"
        assert len(page.text("#greeting").splitlines()) >= 3 and page.run("document.getElementById('note').hidden")
        other = browser.page()
        other.open(server.url)
        for keeps in ("false", "true"):
            page.run("document.getElementById('keep').click()")
            other.wait(f"document.getElementById('keep').checked === {keeps}")
        assert not page.errors and not other.errors
        page = browser.page()
        page.send("Page.addScriptToEvaluateOnNewDocument", source=BLOCKED)
        page.open(server.url)
        page.wait("document.getElementById('model').textContent === 'toy'")
        page.ask("hello")
        page.wait(f"{ENDED} && {ANSWER}.length > 0")
        assert page.run("document.getElementById('keep').disabled") and "hello" in page.text("#chat-list")
        assert not page.errors


def test_a_browser_keeps_a_chat_through_stops_losses_and_reloads(browser: Browser) -> None:
    page = browser.page()
    with serving(served_llm(SlowExecutor(0.02)), drain=0.0) as server:
        port = int(server.url.rpartition(":")[2])
        page.open(server.url)
        page.wait("document.getElementById('model').textContent")
        page.ask("hello **you**")
        page.wait(f"{ANSWER}.length > 3")
        page.click("Stop", "#ask")
        page.wait(ENDED)
        stopped = page.run(ANSWER)
        assert stopped and "stopped" in page.text(".assistant") and "Continue" in page.text(".assistant")
        page.reload()
        page.wait(f"{ANSWER} === {json.dumps(stopped)}")
        assert page.text(".user p") == "hello **you**" and "hello **you**" in page.text("#chat-list")
        page.click("Retry")
        page.wait(f"{ANSWER}.length > 3")
    page.wait(ENDED)  # the server has ended
    partial = page.run(ANSWER)
    assert partial and page.text(".problem")
    page.click("Retry")
    page.wait("document.querySelector('.problem')?.innerText.includes('lost')")
    assert page.run(ANSWER) == ""
    page.click("Undo")
    assert page.run(ANSWER) == partial
    with serving(served_llm(), port=port):
        page.wait("document.getElementById('status').textContent === ''")
        page.click("Edit")
        page.run("document.querySelector('.editing textarea').value = 'bye'")
        page.click("Send", ".editing")
        page.wait(f"{ENDED} && document.querySelector('.user p')?.innerText === 'bye'")
        assert not page.run("document.querySelectorAll('.error').length")
        assert "tokens" in page.text(".assistant .tools")
        page.click("New chat")
        assert page.run("document.querySelectorAll('.message').length") == 0 and "bye" in page.text("#chat-list")
        page.click("Forget all chats")
        page.wait("!document.querySelector('#chat-list li')")
        assert page.run("Object.keys(localStorage)") == []
    assert not page.errors


def test_a_browser_shows_the_progress_of_loading_and_answers_afterwards(browser: Browser) -> None:
    event = threading.Event()

    def load(progress: Progress, budget: Budget) -> LLM:
        progress("weights", 1, 4)
        assert event.wait(30)
        return served_llm()

    server = make_server([ModelSource(("toy",), load)], ServeConfig(port=0), 64)
    page = browser.page()
    with running(server):
        page.open(server.url)
        page.wait("document.getElementById('loading-bar').value === 0.25")
        assert page.text("#loading-text") == "Loading toy: weights, 25 %"
        page.ask("hello")
        page.wait("document.querySelector('.assistant progress')?.value === 0.25")
        event.set()
        page.wait(f"{ENDED} && {ANSWER}.length > 0 && document.getElementById('loading').hidden")
        assert not page.text(".problem")
    assert not page.errors


def test_a_browser_shows_hot_neurons_and_folds_what_shows_nothing(browser: Browser, tmp_path: Path) -> None:
    relu, silu = give_bundles(tiny_llama(tmp_path / "relu.gguf")), tiny_llama(tmp_path / "silu.gguf", "silu")

    def load_relu(progress: Progress, budget: Budget) -> LLM:
        return LLM(relu, selector="exact", trial=False, threads=1)

    sources = [
        ModelSource(("relu",), load_relu, lambda budget: Needs(1)),
        ModelSource(("silu",), lambda progress, budget: LLM(silu, threads=1), lambda budget: Needs(1)),
    ]
    server = make_server(sources, ServeConfig(port=0), 64, ServicePolicy())
    page = browser.page()
    with running(server):
        page.open(server.url)
        page.wait("document.getElementById('models').length === 2")
        assert page.run("document.getElementById('live').hidden"), "nothing is loaded: there is nothing to show"
        page.ask("hello")
        page.wait(f"{ENDED} && document.getElementById('live').open")
        page.ask("more")  # counted from the first frame on
        page.wait("document.getElementById('figures').innerText.includes('Neurons that fired')")
        assert page.run("document.getElementById('models').selectedOptions[0].text") == "relu (loaded)"
        page.click("New chat")
        page.run("document.getElementById('models').value = 'silu'")
        page.run("document.getElementById('models').dispatchEvent(new Event('change'))")
        page.ask("hello")
        page.wait("document.getElementById('live-note').innerText.includes('never exactly zero')")
        assert not page.run("document.getElementById('live').open")
        assert "small model" in page.text("#note")
    assert not page.errors
