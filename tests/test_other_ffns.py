"""A kind of FFN whose neurons are not told apart: one class and one function, and everything that asks about neurons
either leaves it whole or says why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import FF, LAYERS, D, gguf_name, tiny_config, tiny_fields, weights
from sparse_models import CHAT, TEXT

from benchmarks.models.gguf_writer import STRING
from powerinfer import LLM, ModelError, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, FfnConfig, FfnKind, Shape
from powerinfer.formats import folder_parts, gguf_model
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.layout import shapes
from powerinfer.formats.prepared import PROFILE, PreparedFile
from powerinfer.hardware.description import load
from powerinfer.hybrid.resolve import resolve
from powerinfer.kernels import cpu
from powerinfer.models.blocks import FFNS
from powerinfer.models.builder import vector
from powerinfer.placement.plan import PlanRequest, kept_document, make_plan, save_plan
from powerinfer.placement.request import model_subject

TITLE = "linear map, 0.5 of it a token"
WHY = f"have another kind of FFN ({TITLE}), whose neurons are not told apart"


@dataclass(frozen=True)
class LinearConfig(FfnKind):
    """x += down . attended: a matrix, and not an activation in it."""

    size: int
    activation: str = "none"
    gated: bool = False

    @property
    def width(self) -> int:
        return self.size

    @property
    def title(self) -> str:
        return TITLE

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        yield "down", (d_model, self.size)

    def problem(self) -> str | None:
        return None if self.size == D else f"{self.size} numbers are not what attention gives"

    def share_read(self, tokens: int) -> float:
        return 0.5


def wire(builder: Any, checkpoint: Any, layer: int, norm: Any, out_norm: Any, own: Any) -> None:
    assert own is None, "it has no bundles"
    name = f"layers.{layer}.down"
    builder.project(layer, builder.matrix(checkpoint.take(name)), vector(checkpoint, name + "_bias"), out_norm)


@pytest.fixture(autouse=True, params=["all", "last"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layers that have it. Readers of configurations make it where they would make an `FfnConfig`."""
    monkeypatch.setitem(FFNS, LinearConfig, wire)
    if request.param == "all":
        for reader in (gguf_model, folder_parts):
            monkeypatch.setattr(reader, "FfnConfig", lambda *_, **__: LinearConfig(D))
    else:
        made = iter([FfnConfig(FF, "relu"), LinearConfig(D)] * 100)
        monkeypatch.setattr(gguf_model, "FfnConfig", lambda *_, **__: next(made))
        monkeypatch.setattr(folder_parts, "LayerConfig", _alternating(folder_parts.LayerConfig))
    return str(request.param)


def _alternating(config: Callable[..., Any]) -> Callable[..., Any]:
    made = iter([False, True] * 100)
    return lambda attention, ffn, **more: config(attention, LinearConfig(D) if next(made) else ffn, **more)


def own_weights(kind: str) -> dict[str, np.ndarray]:
    values = {}
    for name, array in weights("llama").items():
        linear = kind == "all" or name.startswith("layers.1.")
        if not linear or not name.endswith((".gate", ".up")):
            values[name] = array[:, :D] if linear and name.endswith(".down") else array
    return values


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    builder = tiny_fields().add("tokenizer.chat_template", STRING, CHAT)
    for name, values in own_weights(kind).items():
        builder.tensor(gguf_name(name), np.ascontiguousarray(values))
    return builder.write(tmp_path / "m.gguf")


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    status = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def test_it_is_read(model: Path, kind: str) -> None:
    config = open_checkpoint(model).config
    assert config.ffn_sizes == ((0, 0) if kind == "all" else (FF, 0)) and config.widest_ffn == (
        D if kind == "all" else FF
    )
    assert config.whole_reason == f"{2 if kind == 'all' else 1} of 2 layers {WHY}"
    assert not config.rectified and not config.partly_rectified


def test_it_runs_dense(model: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model, gpu="none", threads=1) as llm:
        (answer,) = llm.generate([TEXT[:8]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert len(answer.token_ids) == 4 and WHY in llm.choices["selector"]
        live = llm.live()
        try:
            assert [one.layer for one in live.look()] == ([] if kind == "all" else [0])
        finally:
            live.close()
    flags = ["--gpu", "none", "--threads", "1", "--prompt-tokens", "3", "--gen-tokens", "2", "--repeat", "1"]
    found = document(capsys, "bench", "-m", str(model), *flags)
    assert found["choices"]["selector"].startswith("all ") and found["bytes_per_token"] > 0


def test_inspect_describes_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "-m", str(model), "--gpu", "none"]) == 0
    out = capsys.readouterr().out
    assert TITLE in out and WHY in out and "nothing in" in out


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("vram", ["0", "2GiB"])
def test_whole_layers_are_placed(model: Path, vram: str) -> None:
    found = resolve(open_checkpoint(model), EngineConfig(gpu="cpu", vram=0 if vram == "0" else 2 << 30, context=64))
    assert found.placement.plan is None and found.selection.bundles is None and WHY in found.selection.reason
    assert found.placement.layers == (0 if vram == "0" else LAYERS)


@pytest.mark.parametrize("vram", [0, 2 << 30, None])
def test_a_plan_counts_it(model: Path, vram: int | None, tmp_path: Path, kind: str) -> None:
    """Its bytes are where its layer is, and a step reads half of them."""
    subject = model_subject(open_checkpoint(model), None, "auto")
    assert subject.selector == "all"
    request = PlanRequest(
        subject.model, subject.profile, load("pc-low"), vram=vram, context=64, selector="all", insist=True
    )
    plan = make_plan(request)
    matrices = [one for layer, each in enumerate(subject.model.ffn) if kind == "all" or layer for one in each]
    assert [(one.type, one.stored) for one in matrices] == [("F32", 4 * D * D)] * (2 if kind == "all" else 1)
    held = {tier: parts.get("ffn", 0) + parts.get("panels", 0) for tier, parts in plan.bytes.items()}
    whole = sum(one.stored for one in matrices) if plan.claims.gpu_layers else sum(one.panels for one in matrices)
    assert (plan.claims.gpu_layers == 0) == (vram == 0) and sum(held.values()) >= whole
    assert [sum(neurons.values()) for neurons in plan.neurons] == list(request.model.config.ffn_sizes)
    assert plan.fits and all(part >= 0 for layer in plan.choice.layer_seconds for part in layer.values())
    document = plan.document(save_plan(plan, tmp_path))
    assert kept_document(tmp_path, request) == document and document.bytes == plan.bytes
    lazy = make_plan(_with_share(request, kind, 0.0))
    assert lazy.choice.seconds < plan.choice.seconds


def _with_share(request: PlanRequest, kind: str, share: float) -> PlanRequest:
    """The same model, of which a step reads another share."""

    class Other(LinearConfig):
        def share_read(self, tokens: int) -> float:
            return share

    config = request.model.config
    layers = tuple(
        replace(layer, ffn=Other(D)) if isinstance(layer.ffn, LinearConfig) else layer for layer in config.layers
    )
    return replace(request, model=replace(request.model, config=replace(config, layers=layers)))


def test_a_described_model_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    found = document(capsys, "plan", "--shape", str(tmp_path), "--hardware", "pc-8gb", "--context", "64")
    assert found["selector"] == "all" and found["predicted"]["decode_tok_s"] > 0 and len(found["layers"]) == LAYERS


@pytest.mark.parametrize("verb", ["profile", "train", "pack", "prepare"])
def test_what_is_for_neurons_says_why_not(model: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "-m", str(model)]) == 2
    err = capsys.readouterr().err
    assert WHY in err and err.count("\n") == 1
    assert not Path(f"{model}.powerinfer").exists()


@pytest.mark.parametrize("selector", ["exact", "predicted", "threshold"])
def test_selectors_say_why_not(model: Path, selector: str) -> None:
    with pytest.raises(RequestError, match="neurons are not told apart"):
        resolve(open_checkpoint(model), EngineConfig(gpu="none", selector=selector, threshold=None))


def test_prepared_files_are_of_no_use(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    place = PreparedFile(PROFILE, checkpoint)
    place.path.parent.mkdir()
    place.path.write_bytes(b"profile")
    with pytest.raises(ModelError, match=r"of no use.*not told apart"):
        place.read()
    with pytest.raises(ModelError, match="not told apart"):
        open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    assert main(["inspect", "-m", str(model), "--gpu", "none"]) == 0
    assert dict(shapes(checkpoint.config))["layers.1.down"] == (D, D)
