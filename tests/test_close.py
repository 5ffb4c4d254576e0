"""A model that was closed: its memory and its threads are free, and what needs it says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files
import pytest
from sparse_models import TEXT, give_bundles, tiny_llama
from toy_model import toy_llm

from powerinfer import LLM, RequestError, SamplingParams

OPTIONS: dict[str, Any] = {"threads": 3, "prefill_chunk": 32, "max_batch": 2, "gpu": "none", "trial": False}

# In a process of its own, whose memory nothing else uses. What is printed: anonymous memory and threads after a close,
# with the model, and after each further close. The closed models themselves are kept.
LOADS = """
import os, sys, time
from powerinfer import LLM, SamplingParams

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

def threads():
    return len(os.listdir("/proc/self/task"))

def closed(llm):
    llm.close()
    deadline = time.monotonic() + 10
    while threads() > idle and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that has ended is counted a moment longer
    print(anonymous(), threads())

def use():
    llm = LLM({path!r}, **{options!r})
    llm.generate({text!r}, SamplingParams(max_tokens=4))
    return llm

idle = threads()
kept = [use()]  # modules, and what is made once
closed(kept[0])
kept.append(use())
print(anonymous(), threads())
closed(kept[1])
for _ in range(3):
    kept.append(use())
    closed(kept[-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("selector", ["all", "exact"])
def test_memory_and_threads(selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", 1 << 16)
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    weights = path.stat().st_size // 2  # stored as F32, packed as F16
    weights *= 2 if selector == "exact" else 1
    code = LOADS.format(path=str(path), options=OPTIONS | {"selector": selector}, text=TEXT[:20])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (before, idle), (loaded, most), *after = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert loaded - before > weights * 3 // 4, "the model is too small to see"
    assert most > idle and [threads for _, threads in after] == [idle] * len(after)
    assert max(nbytes for nbytes, _ in after) - before < weights // 8, (before, loaded, after)


USES: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("ab"),
    "generate nothing": lambda llm: llm.generate([]),
    "stream": lambda llm: list(llm.stream("ab")),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "ab"}]),
    "chat_stream": lambda llm: list(llm.chat_stream([{"role": "user", "content": "ab"}])),
    "grammar": lambda llm: llm.generate("ab", SamplingParams(regex="a+")),
    "score": lambda llm: llm.score([1, 2], 1, lambda *_: None),
    "embed": lambda llm: llm.embed("ab"),
    "sparsity": lambda llm: llm.sparsity,
    "clear_sparsity": lambda llm: llm.clear_sparsity(),
    "bytes_per_token": lambda llm: llm.bytes_per_token,
    "live": lambda llm: llm.live(),
    "traced": lambda llm: llm.traced().__enter__(),
    "every_neuron": lambda llm: llm.every_neuron().__enter__(),
}


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("selector", ["all", "exact"])
def test_what_needs_the_model_says_that_it_was_closed(selector: str, used: bool, tmp_path: Path) -> None:
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    llm = LLM(path, selector=selector, **OPTIONS)
    if used:
        llm.generate("ab", SamplingParams(max_tokens=2))
    for _ in range(2):
        llm.close()
        for name, use in USES.items():
            with pytest.raises(RequestError) as caught:
                use(llm)
            assert str(caught.value) == "the model was closed", name
    assert llm.choices["selector"].startswith(selector) and llm.stats().running == 0
    assert llm.encode("ab") and llm.context > 0


def test_the_thread_that_compiles_grammars_ends() -> None:
    llm = toy_llm()
    llm.generate([[1, 2]], SamplingParams(max_tokens=3, regex="a+"))
    grammars = llm._runner._grammars
    threads = list(grammars._worker._threads)
    assert threads and grammars.nbytes
    llm.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not grammars.nbytes
    for compile_ in (grammars.compile, grammars.mask):
        with pytest.raises(RequestError, match="the model was closed"):
            compile_(SamplingParams(regex="a+").grammar)  # type: ignore[operator]
