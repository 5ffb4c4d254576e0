"""A folder with act-order, whoever computes it: matrices and bundles on the CPU, layers on a GPU, and streamed ones.

Its neurons, norms and attention give rows in the order of the columns that read them: any other gives other logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
import test_sparse as sparse  # noqa: E402
import test_streamed as streamed  # noqa: E402
from model_files import VOCAB, as_stored, safetensors_bytes, weights  # noqa: E402
from test_quantised_folders import folder, gptq, gptq_settings  # noqa: E402

from benchmarks.models.vocabulary import write_tokenizer_files  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402

TOKENS = np.random.default_rng(2).integers(0, VOCAB, families.TOKENS).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ReLU, so that bundles compute what fires."""
    packer, settings = gptq(4, 32, False, shuffled="alike"), gptq_settings(4, 32, sym=False, desc_act=True)
    path = folder(tmp_path_factory.mktemp("models") / "model", packer, settings)
    config = json.loads((path / "config.json").read_text()) | {"hidden_act": "relu"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The logits of a model in F32 with the values that the codes stand for."""
    path = tmp_path_factory.mktemp("exact") / "model"
    path.mkdir()
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    values = weights("llama") | {name: v.astype(np.float32) for name, v in np.load(model / "expected.npz").items()}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors_bytes(as_stored(values)))
    with sparse.opened(path, selector="all") as (executor, _):
        return sparse.split_calls(executor, TOKENS)


def check(logits: np.ndarray, right: np.ndarray) -> None:
    """But for activations of 8 bits."""
    assert families.rms(logits - right) < 0.05 * families.rms(right)


def test_matrices(model: Path, right: np.ndarray) -> None:
    with sparse.opened(model, selector="all") as (executor, _):
        check(sparse.split_calls(executor, TOKENS), right)
        pages = families.scattered_pages(executor, 1)[0]
        check(families.run_chunks(executor, TOKENS, [len(TOKENS)], pages), right)


@pytest.mark.parametrize("kind", [None, "F16"])
def test_bundles(kind: str | None, model: Path, right: np.ndarray) -> None:
    """With the codes of the file, and with rows of F16 made of them."""
    checkpoint = open_checkpoint(model)
    pack(checkpoint, None, choose_types(checkpoint, kind, kind))
    with sparse.opened(model, selector="exact") as (executor, sparsity):
        assert sparsity is not None
        check(sparse.split_calls(executor, TOKENS), right)
        assert sparsity.report()["active_fraction"] < 0.9


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_a_file_made_of_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file has no order of columns: they are in their places there, whatever the type."""
    monkeypatch.setattr("model_files.VOCAB", 1200)
    packer, settings = gptq(4, 32, True, shuffled="alike"), gptq_settings(4, 32, desc_act=True)
    path, made = folder(tmp_path / "model", packer, settings), tmp_path / "m.gguf"
    write_tokenizer_files(path, 1200)
    assert main(["quantize", str(path), kind, "-o", str(made)]) == 0
    stored, written = open_checkpoint(path), open_checkpoint(made)
    for name in ("layers.0.up", "layers.1.v", "layers.1.o", "layers.0.down"):
        values = stored.take(name).float32()
        difference = written.take(name).float32() - values
        assert families.rms(difference) < (0.15 if kind == "q4_0" else 0.01) * families.rms(values), name


@pytest.mark.parametrize("least", [None, 33])
@pytest.mark.usefixtures("device")
def test_layers_on_a_gpu_and_those_that_stream(least: int | None, model: Path, right: np.ndarray) -> None:
    with streamed.opened(model, 1) as executor:
        layers: Any = executor.streamed
        layers.stage.least = least
        pages = families.scattered_pages(executor, 1)[0]
        check(families.run_chunks(executor, TOKENS, [40, 1, len(TOKENS) - 41], pages), right)
