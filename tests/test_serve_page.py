"""The page of `powerinfer serve` and its live view: files and headers, frames, and the page in a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import client, running, served_llm, serving
from sparse_models import TEXT, give_bundles, tiny_llama

from powerinfer.config import ServeConfig
from powerinfer.devices.cpu import Fired
from powerinfer.hybrid.resolve import Needs
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.live import bin_edges
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve import live as live_module
from powerinfer.serve.page import FILES
from powerinfer.serve.served import ModelSource
from powerinfer.serve.server import Server, make_server
from powerinfer.serve.service import Policy

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
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
        assert (one.way, one.device, one.gpu, one.why_not) == ("exact", "cpu", 0, None)
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


# ---------------------------------------------------------------- in a browser


def dom(url: str, tmp_path: Path, *options: str) -> str:
    """The page as Chromium has it after a few seconds."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: none is installed")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--timeout=8000",
        "--virtual-time-budget=4000", *options, "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)}
    )
    return done.stdout


@pytest.fixture
def page(sparse: LLM) -> Iterator[Server]:
    llm = served_llm()
    with serving(llm) as server:
        yield server


def test_a_browser_shows_the_model(page: Server, tmp_path: Path) -> None:
    text = dom(page.url, tmp_path)
    assert '<span id="model">toy</span>' in text and "Tokens/s, all requests" in text


def test_a_browser_offers_the_models(tmp_path: Path) -> None:
    sources = [ModelSource((name,), lambda progress, budget: served_llm(), lambda budget: Needs(1)) for name in "ab"]
    server = make_server(sources, ServeConfig(port=0), 64, Policy())
    with running(server):
        text = dom(server.url, tmp_path)
    assert '<select id="models" aria-label="Model"><option value="a">a</option><option value="b">b</option>' in text
    assert '<span id="model"></span>' in text


def test_a_browser_shows_text_as_text(page: Server, tmp_path: Path) -> None:
    """The page's own renderer, on a page of the same origin and policy."""
    evil = "<img src=x onerror=alert(1)> **bold <b>x</b>**\n- one\n- `<script>`\n\n```html\n<script>1</script>\n```"
    probe = tmp_path / "probe.html"
    script = (FOLDER / "markdown.js").read_text().replace("export ", "")
    probe.write_text(
        f"<body><div id=out></div><script>{script}\n"
        f"document.getElementById('out').append(render({json.dumps(evil).replace('<', chr(92) + 'u003c')}));"
        "document.currentScript.remove();</script></body>"
    )
    text = dom(probe.as_uri(), tmp_path / "profile")
    assert "&lt;img src=x onerror=alert(1)&gt; <strong>bold &lt;b&gt;x&lt;/b&gt;</strong>" in text
    assert "<ul><li>one</li><li><code>&lt;script&gt;</code></li></ul>" in text
    assert "<pre><code>&lt;script&gt;1&lt;/script&gt;</code></pre>" in text and "<img" not in text
