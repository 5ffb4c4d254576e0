"""A smaller model that drafts on a GPU, or on one that torch's CPU emulates: its place and memory, what a load says,
who leaves first, and answers beside a model that is divided."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_device import device_name  # noqa: E402
from sparse_models import TEXT, tiny_llama  # noqa: E402
from test_draft_ahead import ahead, threads  # noqa: E402, F401
from test_speculation import _three  # noqa: E402

from powerinfer.cli import serve  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.errors import GpuMemoryError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid import load as loading  # noqa: E402
from powerinfer.hybrid.beside_gpu import planned_beside  # noqa: E402
from powerinfer.placement import draft_place  # noqa: E402
from powerinfer.placement.budget import Division, on_gpu  # noqa: E402
from powerinfer.placement.draft_place import bytes_on_gpu  # noqa: E402
from powerinfer.progress import silent  # noqa: E402
from powerinfer.runtime.draft_ahead import BesideThread  # noqa: E402
from powerinfer.runtime.draft_model import DraftModel as SmallerDrafts  # noqa: E402
from powerinfer.runtime.draft_sources import smaller_model  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.runtime.speculation import Speculation  # noqa: E402
from powerinfer.serve.service import Budget  # noqa: E402

OPTIONS: dict[str, Any] = {"threads": 1, "context": 128, "max_batch": 2, "prefill_chunk": 32, "kv_type": "f32"}
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def faster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft takes nothing on the GPU, and long elsewhere: tests of what pays are in test_draft_place.py."""
    monkeypatch.setattr(draft_place, "draft_seconds", lambda *_: (1e-9, 1.0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", "silu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in another file: a model that is nearly always right."""
    return tiny_llama(tmp_path_factory.mktemp("small") / "small.gguf", "silu")


def budget(path: Path, small: Path, layers: int) -> tuple[int, int]:
    """(--vram that holds the smaller model, and so many layers of the other; the bytes of the smaller one)."""
    engine = EngineConfig(**OPTIONS, gpu=device_name(), vram=1 << 33, speculate=str(small))
    smaller = smaller_model(engine, 128, silent)
    assert smaller is not None
    request = planned_beside(open_checkpoint(path), engine, silent, smaller._model.rated_types)
    assert request is not None
    division, nbytes = Division(layers), bytes_on_gpu(smaller._request(request))
    taken = sum(on_gpu(request.model, request.hardware, request.workload, division, dense=True).values())
    return nbytes + taken, nbytes


def llm_of(path: Path, vram: int, speculate: object) -> LLM:
    return LLM(path, gpu=device_name(), vram=vram, speculate=str(speculate), **OPTIONS)


def source_of(llm: LLM) -> SmallerDrafts:
    speculation = llm._runner._speculation
    assert speculation is not None and isinstance(speculation.source, SmallerDrafts)
    return speculation.source


def agree(answers: Any, expected: Any) -> bool:
    """Up to the first token of which two were as good, but for rounding."""
    for ours, other in zip(answers.logprobs, expected.logprobs, strict=True):
        if ours.token_id != other.token_id:
            return True
        if abs(ours.logprob - other.logprob) > 1e-3:
            return False
    return True


def patiently(end: Callable[[BesideThread], None]) -> Callable[[BesideThread], None]:
    """The end of a thread's work once that is done: a step takes longer than what is drafted ahead."""

    def wait(thread: BesideThread) -> None:
        while thread._busy and thread._outcomes.empty():
            time.sleep(1e-4)
        end(thread)

    return wait


@pytest.mark.parametrize("whole", [False, True])
def test_it_drafts_there(path: Path, small: Path, whole: bool, monkeypatch: pytest.MonkeyPatch, ahead: None) -> None:  # noqa: F811
    """Ahead, too, where the model that answers is divided."""
    monkeypatch.setattr(Speculation, "_counts", _three)
    monkeypatch.setattr(BesideThread, "end", patiently(BesideThread.end))
    vram, nbytes = (1 << 33, 0) if whole else budget(path, small, 1)
    with llm_of(path, vram - nbytes, "off") as plain:
        expected = plain.generate([TEXT[:40], TEXT[:7]], PARAMS)
    with llm_of(path, vram, small) as llm:
        assert "on the GPU" in llm.choices["drafts"]
        executor, source = llm._executor, source_of(llm)
        assert isinstance(executor, SplitExecutor) and executor.divided != whole
        drafting = source._executor
        assert isinstance(drafting, SplitExecutor) and not drafting.divided
        assert (source.thread is not None) != whole
        answers = llm.generate([TEXT[:40], TEXT[:7]], PARAMS)
        stats = llm.stats().speculation
        assert stats.accepted > 0.5 * stats.drafted > 0 and not stats.failed
        assert (stats.ahead > 0.3 * stats.drafted) != whole
        assert not source._sequences
    assert all(agree(*pair) for pair in zip(answers, expected, strict=True)) and threads() == 0


def test_it_takes_no_more_than_was_planned(path: Path, small: Path) -> None:
    vram, nbytes = budget(path, small, 1)
    with llm_of(path, vram, small) as llm:
        drafting = source_of(llm)._executor
        assert isinstance(drafting, SplitExecutor)
        assert 0 < sum(drafting.gpu.memory().values()) <= nbytes
        assert llm.choices["gpu"].startswith("1 layer ")
    with llm_of(path, vram - 1, small) as llm:
        assert "in RAM (the GPU has no room for it and a layer of the model)" in llm.choices["drafts"]
        assert not isinstance(source_of(llm)._executor, SplitExecutor) and source_of(llm).thread is None


@pytest.mark.parametrize("short", ["small.gguf", "m.gguf"])
def test_it_leaves_first(short: str, path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two the GPU had too little memory for; then the other one has all of it."""
    real: Callable[..., Any] = loading.load_split
    failures = list[str]()

    def failing(resolved: Any, *arguments: Any, **options: Any) -> Any:
        if resolved.checkpoint.path.name == short and not failures:
            failures.append(short)
            raise GpuMemoryError("the GPU ran out of memory while a test said so: give less --vram")
        return real(resolved, *arguments, **options)

    monkeypatch.setattr(loading, "load_split", failing)
    vram, _ = budget(path, small, 1)
    with llm_of(path, vram, small) as llm:
        assert failures and "in RAM (the GPU ran out of memory with it)" in llm.choices["drafts"]
        assert len([note for note in llm.notes if "drafts on the CPU: the GPU ran out" in note]) == 1
        assert not llm.choices["gpu"].startswith("none")
        llm.generate(TEXT[:40], replace(PARAMS, max_tokens=60))
        assert llm.drafts == "model" and llm.stats().speculation.drafted > 0


def test_commands_count_it(path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vram, nbytes = budget(path, small, 1)
    flags = ["-m", str(path), "--gpu", device_name(), "--context", "128", "--max-batch", "2", "--kv-type", "f32"]
    flags += ["--threads", "1", "--prefill-chunk", "32"]

    def shown(command: str, *more: str) -> tuple[dict[str, Any], str]:
        assert main([command, *flags, "--json", *more]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    drafts, _ = shown("inspect", "--vram", f"{vram}B", "--speculate", str(small))
    alone, _ = shown("inspect", "--vram", f"{vram - nbytes}B", "--speculate", "off")
    assert drafts["memory"]["vram"] == alone["memory"]["vram"] + nbytes <= vram
    assert drafts["memory"]["drafts"] > 0 and "on the GPU" in drafts["choices"]["drafts"]
    plan, said = shown("plan", "--dry-run", "--vram", f"{vram}B", "--speculate", str(small))
    assert plan["budgets"]["vram"] == vram - nbytes and "of VRAM and" in said and "it is on the GPU" in said
    engine = EngineConfig(**OPTIONS, gpu=device_name(), vram=vram, speculate=str(small))
    needs = serve._needs(path, engine, Budget(1 << 33, vram))
    assert needs.vram == drafts["memory"]["vram"]
