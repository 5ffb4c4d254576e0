"""Models whose neurons are silent at a chosen rate: as GGUF and as a folder they are one model, and they are silent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import silent_models
from benchmarks.sparse import expert_time
from powerinfer import LLM, SamplingParams
from powerinfer.cli.main import main
from powerinfer.formats.checkpoint import open_checkpoint

SMALL = {
    "hidden_size": 64, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
VOCAB = 1500


def small(pattern: str) -> silent_models.Sizes:
    document = silent_models.FOLDERS["nemotron_h"].defaults | {"model_type": "nemotron_h"} | SMALL
    return silent_models.Sizes(document, pattern, VOCAB)


@pytest.mark.parametrize("pattern", ["ME*EM", "M-*-"])
def test_a_file_and_a_folder_are_one_model(pattern: str, tmp_path: Path) -> None:
    sizes = small(pattern)
    silent_models.write(tmp_path / "m.gguf", sizes, "f16", [0.9])
    silent_models.write_folder(tmp_path / "m", sizes, [0.9])
    file, folder = (open_checkpoint(tmp_path / name) for name in ("m.gguf", "m"))
    assert file.config.layers == folder.config.layers and file.parameters == folder.parameters
    for name in ("layers.0.mamba_a", "layers.1.up" if "-" in pattern else "layers.1.experts_up"):
        one, other = (checkpoint.take(name) for checkpoint in (file, folder))
        assert one.shape == other.shape
    answers = []
    for name in ("m.gguf", "m"):
        with LLM(tmp_path / name, gpu="none", threads=1, context=64, prefill_chunk=32) as llm:
            answers.append(llm.generate([[5, 9, 2]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids)
    assert len(answers[0]) and answers[0] == answers[1]


def test_shares_of_blocks() -> None:
    """The first block's neurons fire for tokens as often as was asked for, within what chance allows."""
    sizes = small("-*-")
    values = silent_models.Values(sizes, [0.8, 0.95])
    assert [values.share(layer) for layer in range(3)] == [0.8, None, 0.95]
    x = values.embedding(VOCAB)
    x /= np.sqrt((x * x).mean(1, keepdims=True))
    for share in (0.8, 0.95):
        fires = x @ values.part("ffn_up.weight", (96, 64), share).T > 0
        assert abs(fires.mean() - (1 - share)) < 0.03
    with pytest.raises(ValueError, match="2: one for each block"):
        silent_models.Values(sizes, [0.8, 0.9, 0.9])


def test_shapes_that_are_cut() -> None:
    sizes = silent_models.cut("nemotron-3-nano-30b-a3b", 8, 2048)
    assert (sizes.pattern, sizes.width, sizes.vocab) == ("MEMEM*EM", 2688, 2048)
    for name, layers, why in (
        ("nemotron-3-nano-30b-a3b", 3, "no attention"),
        ("nemotron-3-nano-30b-a3b", 53, "from 1 to 52"),
        ("qwen3.5-2b", 4, "only nemotron_h"),
        ("nemotron-9", 4, "there is no shape"),
    ):
        with pytest.raises(ValueError, match=why):
            silent_models.cut(name, layers)


@pytest.mark.parametrize("recall", [0.9, 0.98])
def test_predictors_select_a_chosen_share_of_what_fires(tmp_path: Path, recall: float) -> None:
    """By the engine's own count; and as many fire in every block as were asked for."""
    document = silent_models.FOLDERS["nemotron_h"].defaults | {"model_type": "nemotron_h"} | SMALL
    sizes = silent_models.Sizes(document | {"hidden_size": 256, "intermediate_size": 1024}, "M-*-M-*-", VOCAB)
    path = tmp_path / "m.gguf"
    silent_models.write(path, sizes, "q8_0", [0.9])
    silent_models.write_predictors(path, sizes, [0.9], recall)
    assert main(["pack", "-m", str(path), "--no-check"]) == 0
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60).tolist()
    with LLM(path, threads=1, gpu="none", selector="predicted", trial=False, recall_every=1, max_batch=1) as llm:
        llm.generate([tokens[:4]], SamplingParams(temperature=3.0, seed=1, max_tokens=60, ignore_eos=True))
        counted = llm.sparsity
    assert counted["recall"] == pytest.approx(recall, abs=0.04) and counted["sampled"] >= 59
    assert counted["active_fraction"] < counted["candidate_fraction"] < 0.35
    for layer in counted["layers"]:  # the constant stays as large beside the rest
        assert layer["active_fraction"] == pytest.approx(0.1, abs=0.025)


def test_predictors_select_what_was_asked_for(tmp_path: Path) -> None:
    """Of experts and the shared one; a run counts the recall."""
    sizes = small("ME*EM")
    silent_models.write(tmp_path / "m.gguf", sizes, "f16", [0.85])
    silent_models.write_predictors(tmp_path / "m.gguf", sizes, [0.85], 0.95)
    with LLM(tmp_path / "m.gguf", gpu="none", threads=1, selector="predicted", recall_every=1) as llm:
        llm.generate([[5, 9, 2]], SamplingParams(max_tokens=60, temperature=1.5, seed=1, ignore_eos=True))
        report = llm.sparsity
    assert report is not None and report["sampled"] > 50 and len(report["layers"]) == 2
    assert 0.9 < report["recall"] < 0.99
    assert report["active_fraction"] < report["candidate_fraction"] < 0.4


def test_the_expert_part_alone_is_timed_in_every_way(tmp_path: Path) -> None:
    sizes, path = small("ME*EM"), tmp_path / "m.gguf"
    silent_models.write(path, sizes, "q8_0", [0.9])
    silent_models.write_predictors(path, sizes, [0.9])
    found = expert_time.measure(path, 2, 2, 6)
    assert found["layers"] == [1, 3] and set(found["seconds"]) == {"all", "exact", "predicted"}
    assert min(*found["seconds"].values(), *found["ratio"].values()) > 0
    exact, predicted = found["computed"]["exact"], found["computed"]["predicted"]
    assert 0.02 < exact["active"] == exact["candidates"] < 0.25, "a tenth fires"
    assert 0.5 * exact["active"] < predicted["active"] <= exact["active"] < predicted["candidates"] < 0.6
