"""benchmarks/sparse/report.py: its figures on tiny models, what is kept of an interrupted run, and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from model_files import experts_gguf
from sparse_models import TEXT, give_bundles, give_predictor, tiny_llama
from test_sparse_benchmark import OWN, PEER

from benchmarks.sparse import neurons, report, retyped
from benchmarks.sparse.report_page import page
from powerinfer.cli.main import main as cli
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.gguf import read_gguf
from powerinfer_train.torch_model import TorchModel

ITEMS = [{"context": TEXT[at : at + 20], "choices": [TEXT[30:39], "ab"], "answer": at % 2} for at in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_llama(folder / "dense.gguf", "silu"), give_predictor(give_bundles(tiny_llama(folder / "sparse.gguf")))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """`powerinfer` without processes; the commands so far."""
    seen: list[str] = []

    def command(commands: list[str], *words: str | Path) -> dict[str, Any]:
        capsys.readouterr()
        if cli([*map(str, words), "--json", "--threads", "1"]):
            raise RuntimeError(capsys.readouterr().err)
        commands.append(" ".join(map(str, words[:2])))
        seen.extend(commands)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(report, "command", command)
    return lambda: seen


def test_a_model_in_another_type(tmp_path: Path) -> None:
    source, target = tiny_llama(tmp_path / "m.gguf", "cats", limits=True), tmp_path / "q8_0.gguf"
    retyped.retype(source, "Q8_0", target)
    before, after = read_gguf(source), read_gguf(target)
    assert after.metadata == before.metadata and after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        if not name.startswith("blk.") or len(tensor.shape) == 1:
            assert after.tensors[name].type == tensor.type and (after.tensors[name].data == tensor.data).all()
            continue
        was, now = tensor.float32(), after.tensors[name].float32()
        assert after.tensors[name].type == "Q8_0" and 0 < np.abs(now - was).max() <= np.abs(was).max() / 250
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["m.gguf", "q8_0.gguf"]


def test_the_report(
    models: tuple[Path, Path], here: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neurons, "fast_type", lambda device: torch.float32)
    text, task, own, peer = (tmp_path / name for name in ("text.txt", "task.jsonl", "own.py", "llama-bench"))
    text.write_text(TEXT)
    task.write_text("".join(f"{json.dumps(item)}\n" for item in ITEMS))
    own.write_text(OWN)
    peer.write_text(PEER)
    peer.chmod(0o755)
    command = [*map(str, models), "--text", str(text), "--task", str(task), "--out", str(tmp_path / "out")]
    command += ["--powerinfer", f"{sys.executable} {own}", "--llama-bench", str(peer), "--rounds", "3"]
    command += ["--retries", "0", "--quiet", "0", "--windows", "100"]
    with pytest.raises(SystemExit, match="1"):  # one section cannot be, the others are measured
        report.main([*command, "--sections", "perplexity", "speed", "--powerinfer", "/nowhere/program"])
    document = json.loads((tmp_path / "out/report.json").read_text())
    assert list(document["results"]) == ["perplexity, text.txt, original", "perplexity, text.txt, sparse"]
    report.main(command)
    assert here() == ["eval perplexity"] * 2 + ["eval tasks"] * 2, "perplexities were kept"
    document = json.loads((tmp_path / "out/report.json").read_text())
    found = document["results"]
    assert document["models"]["sparse"]["activation"] == "relu" and found["firing"]["cpu"] == document["cpu"]["name"]

    # the same windows as the engine's, whose cache is float16
    for label in ("original", "sparse"):
        measured = found[f"perplexity, text.txt, {label}"]["perplexity"]
        assert found[f"kept, {label}"]["kept"][-1] == {"share": 1.0, "perplexity": pytest.approx(measured, rel=0.02)}
        assert found[f"kept, {label}"]["kept"][0]["perplexity"] != pytest.approx(measured, rel=0.02)
    fires = found["firing"]["active_fraction"]
    assert 0.3 < fires < 0.7 and np.mean(found["firing"]["zeros_by_layer"]) == pytest.approx(1 - fires)
    assert found["firing"]["tokens"] == 128 * (found["perplexity, text.txt, sparse"]["tokens"] // 63)

    speed = found["speed, 1 threads"]
    assert list(speed["engines"]) == [*report.ENGINES, report.PEER]
    assert speed["engines"]["sparse, exact"]["decode_tok_s"]["median"] == 30
    assert speed["ratio"]["sparse, exact"] == {
        "original": {"median": 1.5, "min": 1.5, "max": 1.5},
        report.PEER: {"median": 1.875, "min": 1.875, "max": 1.875},
    }
    shown = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    for title in ("Perplexity", "Tasks", "Neurons that fire", "Power law", "Only the largest", "Predictors", "Speed"):
        assert f"\n## {title}\n" in shown
    assert "\n## Thresholds\n\nNone: the activation relu has no thresholds.\n" in shown
    assert "| sparse, exact | 30.0" in shown and "| task.jsonl | 6 |" in shown and "training is not recorded" in shown
    for name in ("zeros.png", "power-law.png", "kept.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in shown

    report.main([*command, "--limit", "4"])
    assert here()[4:] == ["eval tasks"] * 2, "only what has other options is measured again"
    with pytest.raises(SystemExit, match="is the report of other models"):
        report.main([command[0], command[0], *command[2:]])
    text.write_text(TEXT.swapcase())
    report.main([*command, "--flags=--context 64", "--sections", "perplexity", "tasks"])
    assert here()[6:] == ["eval perplexity"] * 2 + ["eval tasks"] * 2, "another text of the same size, other flags"
    (tmp_path / "out/report.md").unlink()
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="a report needs matplotlib"):
        patch.setitem(sys.modules, "matplotlib", None)
        report.main([*command, "--sections", "predictor"])
    assert "\n## Speed\n" in (tmp_path / "out/report.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="1"):  # another program is another measurement
        report.main([*command, "--sections", "speed", "--powerinfer", "/nowhere/program"])
    assert "speed, 1 threads" not in json.loads((tmp_path / "out/report.json").read_text())["results"]
    others = ('{"results": {"firing": 5}}', '{"results": {"firing": {"x": 1}}}')
    for broken in ("{", "[]", "{}", '{"results": 5}', "\ud800", *others):
        (tmp_path / "out/report.json").write_text(broken, errors="surrogatepass")
        with pytest.raises(SystemExit, match="remove it to begin anew"):
            report.main(command)


def test_what_the_command_refuses(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, task, short = (tmp_path / name for name in ("text.txt", "task.json", "short.txt"))
    text.write_text(TEXT)
    short.write_text("Once upon a time")
    task.write_text(json.dumps(ITEMS))
    command = [*map(str, models), "--text", str(text), "--out", str(tmp_path / "out")]
    bad = {"none": b"", "binary": b"\xff\xfe\0", "json": b'{"a": 1}'}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    for flags, message in (
        (["--windows", "0"], "--windows must be at least 1"),
        (["--threads", "1", "0"], "--threads must be at least 1"),
        (["--gen-tokens", "0"], "--gen-tokens must be at least 1"),
        (["--limit", "0", "--task", str(task)], "--limit must be at least 1"),
        (["--text", str(tmp_path / "missing")], "no file "),
        (["--text", str(tmp_path / "none")], "none is empty"),
        (["--text", str(tmp_path / "binary")], "binary is not UTF-8 text"),
        (["--task", str(tmp_path / "none")], "none has no items"),
        (["--task", str(tmp_path / "binary")], "binary, item 1: not valid UTF-8"),
        (["--task", str(tmp_path / "json")], "json, item 1: the fields 'a' are those of no known task"),
        (["--sections", "tasks"], "give a --task, or --sections without tasks"),
    ):
        with pytest.raises(SystemExit, match="2"):
            report.main([*command, *flags])
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match=r"--out .*text\.txt: File exists"):
        report.main([*command[:-1], str(text), "--sections", "predictor"])
    command[3] = str(short)
    with pytest.raises(SystemExit, match="1"):
        report.main([*command, "--sections", "firing", "perplexity"])
    said = capsys.readouterr().err
    assert "firing: the text has " in said and (tmp_path / "out/report.md").exists()
    assert "perplexity, short.txt, sparse: not measured" in said and "CalledProcess" not in said


def test_the_page_of_a_few_results() -> None:
    result = {"date": "", "commit": "abc", "cpu": "a processor", "options": None}
    about = {"file": "x.gguf", "parameters": 5, "type": "F16", "activation": "cats"}
    task = {"items": 100, "acc_error": 0.05, "acc_norm_error": 0.05, "chance": 0.5}
    shares = {"original": (0.7, 0.6), "sparse": (0.65, 0.58)}
    found = {
        f"tasks, {name}, {label}": {**result, "tasks": [task | {"acc": acc - less, "acc_norm": norm - less}]}
        for label, (acc, norm) in shares.items()
        for name, less in (("a, b.json", 0.0), ("c.json", 0.2))
    }
    found["predictor"] = {**result, "predictor": "x.gguf has no predictor"}
    shown = page({"models": {"original": about, "sparse": about}, "results": found})
    assert "| a, b.json | 100 | 60.0 ± 5.0 | 58.0 ± 5.0 | 2.0 | 70.0 ± 5.0 | 65.0 ± 5.0 | 5.0 | 50.0 % |" in shown
    assert "| mean | | 50.0 | 48.0 | 2.0 | 60.0 | 55.0 | 5.0 | |" in shown
    for number, label in enumerate(("original", "sparse")):  # of other options
        found[f"perplexity, t, {label}"] = {**result, "options": number, "perplexity": 2.0, "error": 0.1, "tokens": 9}
        found[f"kept, {label}"] = {**result, "options": number, "windows": 1, "kept": [{"share": 1, "perplexity": 3.0}]}
    shown = page({"models": {"original": about, "sparse": about}, "results": found})
    assert "## Perplexity" not in shown and "| kept | sparse |" in shown
    assert "None: x.gguf has no predictor" in shown and "Speed" not in shown and "commit abc on a processor" in shown


def test_the_largest_are_kept() -> None:
    h = torch.tensor([[1.0, -5.0, 0.0, 2.0, -2.5], [0.0, 0.0, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    kept = neurons.largest(h, 0.4)
    assert kept[0].tolist() == [0.0, -5.0, 0.0, 0.0, -2.5] and kept[1].tolist() == h[1].tolist()
    assert (kept[2] != 0).sum() == 2 and (neurons.largest(h, 0.01) != 0).sum(-1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("own", [True, False], ids=["of neurons", "of layers"])
def test_thresholds_times_a_factor(own: bool, models: tuple[Path, Path], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "cats.gguf", "cats", limits=True)

    def with_factor(factor: float) -> TorchModel:
        """The model as if its files stated other thresholds."""
        model = neurons.open_torch(open_checkpoint(path))
        for layer in range(model.config.n_layers):
            if own:
                model.weights[f"layers.{layer}.threshold"] *= factor
            else:
                del model.weights[f"layers.{layer}.threshold"]
        layers = [
            replace(one, ffn=replace(one.ffn, threshold=0 if own else 0.2 * factor)) for one in model.config.layers
        ]
        model.config = replace(model.config, layers=tuple(layers))
        return model

    tokens = torch.arange(96).reshape(2, 48) % open_checkpoint(path).config.vocab_size
    found = neurons.curve(with_factor(1), tokens, (0.5, 1, 1.25))
    for one in found:
        model = with_factor(one["factor"])
        assert one["perplexity"] == neurons.perplexity(model, tokens, "")
        assert one["zeros"] == pytest.approx(1 - neurons.firing(model, tokens)["active_fraction"])
    assert found[0]["zeros"] < found[1]["zeros"] < found[2]["zeros"]
    if own:
        give_predictor(path)
        text = tmp_path / "text.txt"
        text.write_text(TEXT)
        command = [
            str(models[0]),
            str(path),
            "--text",
            str(text),
            "--out",
            str(tmp_path),
            "--sections",
            "kept",
            "curve",
            "predictor",
        ]
        report.main(command)
        results = json.loads((tmp_path / "report.json").read_text())["results"]
        kept = {label: results[f"kept, {label}"]["kept"][-1]["perplexity"] for label in ("original", "sparse")}
        assert results["curve"]["original"] == kept["original"], "on the same windows"
        assert results["curve"]["curve"][4] == {"factor": 1, "perplexity": kept["sparse"], "zeros": ANY}
        assert results["predictor"]["predictor"]["type"] == "F16", "as of any model that has one"
        shown = (tmp_path / "report.md").read_text(encoding="utf-8")
        ratio = kept["sparse"] / kept["original"]
        assert f"{kept['sparse']:.3f} | {ratio:.3f} |" in shown.partition("## Thresholds")[2] and "(curve.png)" in shown
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_experts_that_no_token_selected(tmp_path: Path) -> None:
    """Their neurons are neurons of the model that never fire."""
    model = neurons.open_torch(open_checkpoint(experts_gguf(4, 2).write(tmp_path / "experts.gguf")))
    for layer in range(model.config.n_layers):
        router = model.weights[f"layers.{layer}.router"]
        router[:] = router[:1]  # all alike: every token has the same two experts
    model.hidden = lambda name, gate, up: torch.ones_like(up)
    found = neurons.firing(model, torch.zeros((2, 8), dtype=torch.int64))
    assert found["hot_share"] == pytest.approx(0.8 / 2, abs=0.02) and found["active_fraction"] == 1
    assert found["curve"][50:] == pytest.approx([1.0] * 51) and found["curve"][25] == pytest.approx(0.5)


def test_the_skew() -> None:
    assert neurons.hot_share(np.array([0, 4, 0, 3, 1, 1, 1, 0, 0, 0])) == 0.3  # 4 + 3 + 1 of 10
    assert neurons.hot_share(np.zeros(5, np.int64)) == 0


def test_firing_counts_what_is_not_zero(models: tuple[Path, Path]) -> None:
    """A model of 2 layers whose h is known: the first neuron of a layer always fires, the others never."""
    model = neurons.open_torch(open_checkpoint(models[0]))

    def hidden(name: str, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(up)
        h[..., 0] = -1e-3
        return h

    model.hidden = hidden
    found = neurons.firing(model, torch.zeros((5, 8), dtype=torch.int64))
    size = model.config.ffn_sizes[0]
    assert found["tokens"] == 40 and found["active_fraction"] == 1 / size
    assert found["zeros_by_layer"] == pytest.approx([1 - 1 / size] * 2) and found["hot_share"] == 1 / size
    assert found["hot_share_by_layer"] == [1 / size] * 2 and found["curve"][0] == 0 and found["curve"][2:] == [1.0] * 99
