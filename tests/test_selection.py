"""Which selector `auto` stands for: decided in one function, which every verb asks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sparse_models import TEXT, give_bundles, give_predictor, give_profile, tiny_llama
from test_imports import parsed

from powerinfer import LLM, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, PlanConfig, TrainConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hybrid.resolve import resolve
from powerinfer.placement.request import model_subject, shape_subject
from powerinfer.prepare.counting import Task
from powerinfer.prepare.pipeline import Work
from powerinfer.sparsity import selection
from powerinfer.sparsity.selection import auto, choose, select

PACKAGE = Path(selection.__file__).parent.parent
ALONE = ["--gpu", "none", "--threads", "1"]


def config_of(activation: str, folder: Path) -> Any:
    return open_checkpoint(tiny_llama(folder / f"{activation}.gguf", activation)).config


def test_what_auto_stands_for(tmp_path: Path) -> None:
    relu, silu = config_of("relu", tmp_path), config_of("silu", tmp_path)
    assert auto(relu)[0] == "exact" and auto(relu, "no bundles") == ("all", "no bundles")
    assert auto(relu, predictors=True)[0] == "predicted" and auto(relu, "no bundles", predictors=True)[0] == "all"
    assert auto(relu, thresholds=True)[0] == "exact"
    for lacking in (None, "no bundles"):
        name, why = auto(silu, lacking, predictors=True)
        assert name == "all" and "silu is never exactly zero" in why
    assert auto(silu, thresholds=True)[0] == "threshold"


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    status = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def loaded(path: Path) -> str:
    """The selector and the reason, as the loaded model says, which must answer."""
    with LLM(path, gpu="none", threads=1, trial=False) as llm:
        llm.generate(TEXT[:20], SamplingParams(max_tokens=2))
        return llm.choices["selector"]


@pytest.mark.parametrize("activation", ["relu", "cats", "silu"])
@pytest.mark.parametrize("predictor", [False, True])
def test_auto_answers_the_same_everywhere(
    activation: str, predictor: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before and behind `pack`; a plan takes the bundles for granted, so it says what will be true then."""
    path = give_profile(tiny_llama(tmp_path / "m.gguf", activation, limits=activation == "cats"))
    if predictor:
        give_predictor(path)
    for packed in (False, True):
        if packed:
            give_bundles(path)
        checkpoint, engine = open_checkpoint(path), EngineConfig(gpu="none")
        name, why = choose(checkpoint, engine)
        assert name == ("exact" if packed and activation != "silu" else "all")
        found = resolve(checkpoint, engine)
        assert (found.selection.selector, found.selection.reason) == (name, why)
        assert (found.selection.bundles is None) == (name == "all")
        assert document(capsys, "inspect", "-m", str(path))["choices"]["selector"] == f"{name} ({why})"
        told = loaded(path)
        assert told.startswith(f"{name} ") and why in told
        bench = ["bench", "-m", str(path), *ALONE, "--no-trial", "--prompt-tokens", "3", "--gen-tokens", "2"]
        assert document(capsys, *bench, "--repeat", "1")["choices"]["selector"] == told
        planned = document(capsys, "plan", "-m", str(path), "--hardware", "pc-8gb", "--context", "64")["selector"]
        assert planned == model_subject(checkpoint, None, "auto").selector == auto(checkpoint.config)[0]
        if packed:
            assert planned == name


def test_every_verb_asks_one_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = give_profile(give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf"))))
    silu = give_profile(tiny_llama(tmp_path / "silu.gguf", "silu"))

    def answers(of: Path) -> list[str]:
        checkpoint = open_checkpoint(of)
        corpus: Any = SimpleNamespace()  # which no step asks for here
        work: Any = Work(checkpoint, EngineConfig(), TrainConfig(), PlanConfig(), Task(corpus, 0, None))
        work.gain = None  # what thresholds would gain is not asked here
        return [
            loaded(of).split()[0],
            resolve(checkpoint, EngineConfig(gpu="none")).selection.selector,
            document(capsys, "inspect", "-m", str(of))["choices"]["selector"].split()[0],
            document(capsys, "plan", "-m", str(of), "--hardware", "pc-8gb", "--context", "64")["selector"],
            work.selector,
        ]

    assert answers(path) == ["exact"] * 4 + ["predicted"], "prepare names the selector that it recommends"
    assert answers(silu) == ["all"] * 5
    assert shape_subject("opt-6.7b", "f16", "auto").selector == "predicted"
    real = selection.auto
    for module in [module for name, module in sys.modules.items() if name.startswith("powerinfer.")]:
        if getattr(module, "auto", None) is real:
            monkeypatch.setattr(module, "auto", lambda *_, **__: ("all", "a test"))
    assert answers(path) == ["all"] * 5
    assert shape_subject("opt-6.7b", "f16", "auto").selector == "all"


def test_nobody_else_knows_what_auto_means() -> None:
    """A conditional that gives a selector by the activation would be another opinion."""
    names = {"exact", "predicted", "threshold"}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == Path(selection.__file__):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(parsed(path)) if any(name in text for name in names) else ():
            if isinstance(node, ast.IfExp):
                given = {one.value for one in (node.body, node.orelse) if isinstance(one, ast.Constant)}
                asks = ast.unparse(node.test) if given & names else ""
                assert not (given & names and ("rectified" in asks.lower() or "activation" in asks)), f"{path}: {asks}"


AUTO = {  # where "auto" is compared or listed; what a selector auto stands for is asked of selection.auto, not decided
    "cli/eval.py": ["('auto', 'all')", "('auto', 'off')"],  # of selectors, of drafts
    "cli/pack.py": [
        "('auto', 'auto')",
        "('auto', *map(str.lower, weight_types.DOWN_TYPES))",
        "('auto', *map(str.lower, weight_types.ROW_TYPES))",
        "name == 'auto'",
    ],
    "config.py": [
        "('auto', 'all', 'exact', 'predicted', 'threshold')",
        "('auto', 'cpu', 'cuda')",
        "('auto', 'cpu', 'cuda')",
        "('auto', 'deepseek', 'none')",  # how a server shows thoughts
        "('auto', 'direct', 'cached', 'none')",  # how the disk is read
        "('auto', 'json', 'text')",  # how a server logs
        "('auto', 'mtp')",  # whether a draft head is read
        "('auto', 'mtp')",
        "('auto', 'q8_0', 'f16')",
        "('auto', 'same', 'f32', 'f16', 'bf16', 'q8_0', 'q5_0', 'q4_0')",  # of the matrices that sparsify makes
        "('static', 'lru', 'lfu', 'dynamic', 'auto')",  # over experts
    ],
    "cli/prepare.py": ["engine.selector == 'auto'"],
    "cli/serve.py": [
        "('auto', 'lookup', 'off')",  # drafts that no model is read for
        "config.log_format == 'auto'",
        "engine.gpu == 'auto'",  # of which a load says why it is not used
    ],
    "devices/wanted.py": ["engine.gpu != 'auto'", "engine.gpu != 'auto'"],
    "text/tools.py": ["('none', 'auto', 'required')"],  # whether tools are called
    "hardware/measure.py": ["engine.gpu != 'auto'"],
    "placement/spread.py": ["engine.expert_policy == 'auto'"],  # a policy over experts
    "hybrid/beside_gpu.py": [
        "engine.selector != 'auto'",
        "engine.selector != 'auto'",
        "engine.selector == 'auto'",  # not all neurons fit: whole layers then
    ],
    "hybrid/disk.py": ["asked != 'auto'"],
    "hybrid/disk_hints.py": ["engine.selector != 'auto'", "engine.selector != 'auto'"],
    "hybrid/expert_policy.py": ["engine.expert_policy != 'auto'"],
    "hybrid/in_ram.py": ["engine.selector != 'auto'", "resolved.engine.selector == 'auto'"],
    "hybrid/load.py": [
        "resolved.engine.expert_policy == 'auto'",
        "resolved.engine.gpu != 'auto'",
        "resolved.engine.selector == 'auto'",  # for people
    ],
    "hybrid/several.py": ["engine.selector == 'auto'"],  # where the disk is faster so: whole layers
    "hybrid/resolve.py": ["('static', 'auto')", "engine.gpu != 'auto'", "engine.gpu == 'auto'"],
    "placement/draft_gain.py": ["engine.speculate != 'auto'", "speculate != 'auto'"],  # a head that nobody asked for
    "placement/request.py": [
        "('static', 'auto')",
        "engine.gpu != 'auto'",
        "engine.gpu == 'auto'",
        "selector == 'auto'",
        "selector == 'auto'",
    ],
    "prepare/pipeline.py": [
        "('auto', 'predicted')",
        "('auto', 'predicted')",
        "self.engine.selector != 'auto'",
        "self.engine.selector != 'auto'",
        "self.engine.selector == 'auto'",
    ],
    "prepare/training.py": ["config.type != 'auto'"],
    "runtime/draft_sources.py": [  # of drafts
        "('auto', 'mtp')",
        "('auto', 'mtp', 'lookup', 'off')",
        "engine.speculate == 'auto'",
    ],
    "runtime/options.py": [  # the names that are allowed
        "('auto', 'all', 'exact', 'predicted', 'threshold')",
        "('auto', 'direct', 'cached', 'none')",
        "('static', 'lru', 'lfu', 'dynamic', 'auto')",
    ],
    "serve/thinking.py": [  # of Anthropic's and llama-server's fields
        "{'enabled': True, 'disabled': False, 'adaptive': None, 'auto': None, None: None}",
        "{'none': False, 'auto': True, 'deepseek': True, 'deepseek-legacy': True}",
    ],
    "sparsity/attach.py": ["engine.selector != 'auto'"],  # whether a selector was asked for
    "serve/constraints.py": ["choice.kind != 'auto'", "tools.choice.kind != 'auto'"],  # of tools, too
    "serve/messages.py": ["{'auto': 'auto', 'any': 'required', 'none': 'none'}"],
    "serve/responses.py": ["('auto', 'disabled')", "self.truncation == 'auto'"],  # of prompts
    "serve/schema.py": ["('none', 'auto')", "('none', 'auto')"],
}


def test_whoever_looks_for_auto_is_known() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        texts, text = [], path.read_text(encoding="utf-8")
        for node in ast.walk(parsed(path)) if "auto" in text else ():
            if not isinstance(node, (ast.Compare, ast.Dict, ast.Tuple, ast.List, ast.Set, ast.MatchValue)):
                continue
            parts = node.keys if isinstance(node, ast.Dict) else ast.iter_child_nodes(node)
            if any(isinstance(part, ast.Constant) and part.value == "auto" for part in parts):
                texts.append(ast.unparse(node))
        if texts and path != Path(selection.__file__):
            found[path.relative_to(PACKAGE).as_posix()] = sorted(texts)
    assert found == AUTO


def test_a_load_opens_what_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.formats import bundle_file

    path = give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    real, opened = bundle_file.open_bundles, []

    def noted(*args: Any) -> Any:
        opened.append(args)
        return real(*args)

    monkeypatch.setattr(bundle_file, "open_bundles", noted)
    with LLM(path, selector="predicted", gpu="none", threads=1, trial=False):
        assert len(opened) == 1


def test_a_load_without_a_gpu_imports_no_planner(tmp_path: Path) -> None:
    """Every start would pay for it."""
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    code = (
        f"import sys\nfrom powerinfer import LLM\nwith LLM({str(path)!r}, gpu='none', threads=1, trial=False) as llm:\n"
        "    assert llm.choices['selector'].startswith('exact in')\n"
        "wrong = 'torch', *(f'powerinfer.{room}' for room in ('placement', 'hardware', 'kernels.gpu', 'prepare'))\n"
        "print([name for name in sys.modules if name.startswith(wrong)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_what_cannot_be_had_is_refused_before_loading(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "silu.gguf", "silu")
    checkpoint = open_checkpoint(path)
    for selector, says in (
        ("exact", "never exactly zero"),
        ("predicted", "no predictor"),
        ("threshold", "--threshold"),
    ):
        with pytest.raises(RequestError, match=says):
            select(checkpoint, EngineConfig(selector=selector))
    with pytest.raises(RequestError, match="--adjust is for models"):
        resolve(checkpoint, EngineConfig(adjust=True, gpu="none"))
