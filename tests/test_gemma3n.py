"""Gemma 3n beside what its cases in families.py compare: neurons that a cutoff makes zero, and are not read; several
residual streams, on disk, beside a GPU and with narrow weights; files that are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
families = pytest.importorskip("families")

from families import CONTEXT, TOKENS, case_named, open_executor, run_chunks, scattered_pages  # noqa: E402
from sparse_models import give_bundles  # noqa: E402
from test_architectures import check_same_bits  # noqa: E402
from test_disk import ENGINE, answers, on_disk  # noqa: E402
from test_sparse import opened, side_by_side, split_calls  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer import _native  # noqa: E402
from powerinfer.config import GAUSSIAN, EngineConfig, FfnConfig, TrainConfig  # noqa: E402
from powerinfer.devices.cpu import Fired  # noqa: E402
from powerinfer.errors import ModelError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.folder_config import read_config  # noqa: E402
from powerinfer.formats.gguf import read_gguf  # noqa: E402
from powerinfer.formats.gguf_model import open_gguf  # noqa: E402
from powerinfer.hardware.description import load as load_hardware  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.placement.budget import Workload, no_layer_fits, whole_layers  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.prepare.training import check as check_training  # noqa: E402

CUT = [0, 1, 2, 4]
"""The layers of the case whose neurons a cutoff makes zero."""


@pytest.fixture
def truth() -> Truth:
    return Truth(case_named("gemma3n"), half=True)  # bundles in F16 hold its weights


def fired(truth: Truth) -> list[np.ndarray]:
    """Of each cut layer, which neurons fire for which token of the first text: bool [T, neurons], by transformers."""
    seen: dict[int, np.ndarray] = {}
    model = truth.model
    for number in CUT:

        def note(of: Any, inputs: Any, number: int = number) -> None:
            gates = of.act_fn(of._gaussian_topk(of.gate_proj(inputs[0])))
            seen[number] = (gates * of.up_proj(inputs[0]))[0].numpy() != 0

        model.model.layers[number].mlp.register_forward_pre_hook(note)
    families.logits(model, truth.texts[0])
    return [seen[number] for number in CUT]


# ---------------------------------------------------------------- neurons that a cutoff makes zero


def test_exact_reads_the_neurons_that_fire(truth: Truth, tmp_path: Path) -> None:
    """Token by token and side by side, in rows of bundles and, once many fire, in whole matrices."""
    path, share = give_bundles(truth.save("folder", tmp_path)), [one.mean() for one in fired(truth)]
    for threads, above in ((1, 1.0), (1, 0.0), (2, 0.3)):
        with opened(path, selector="exact", threads=threads) as (executor, sparsity):
            assert sparsity is not None
            for layer in CUT:
                executor.ffns[layer].op.dense_above = above
            truth.check(split_calls(executor, truth.texts[0]), what="token by token")
            report = sparsity.report()["layers"]
            for text, ours in enumerate(side_by_side(executor, truth.texts)):
                truth.check(ours, text, "side by side")
        assert [layer for layer, one in enumerate(report) if "exact" in one["ways"].values()] == CUT
        active = [report[layer]["active_fraction"] for layer in CUT]
        assert active == pytest.approx(share, abs=0.003) and active[0] < 0.1 < active[3]


def test_bundles_are_used_without_being_asked_for(truth: Truth, tmp_path: Path) -> None:
    path = give_bundles(truth.save("gguf", tmp_path))
    assert resolve(open_checkpoint(path), EngineConfig(gpu="none")).selection.selector == "exact"


class Seen:
    """The neurons that fired in each layer, bool [T, neurons]."""

    def __init__(self) -> None:
        self.layers: dict[int, np.ndarray] = {}

    def reads(self, layer: int, x: np.ndarray) -> None:
        """Nothing is kept of it."""

    def fires(self, layer: int, fired: Fired) -> None:
        active = np.unpackbits(fired.active, axis=1, bitorder="little", count=len(fired.counts)).astype(bool)
        assert (active.sum(axis=0) == fired.counts).all()
        self.layers[layer] = active


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("thresholds", [None, [0.0] * 6])
def test_a_profile_sees_them(thresholds: list[float] | None, threads: int, truth: Truth, tmp_path: Path) -> None:
    """By products, and by activations."""
    executor, seen = open_executor(truth.save("folder", tmp_path), threads=threads), Seen()
    pages = scattered_pages(executor, 1)[0]  # type: ignore[arg-type]
    try:
        with executor.observed(seen, thresholds):  # type: ignore[attr-defined]
            watched = run_chunks(executor, truth.texts[0], [TOKENS], pages)
        assert np.array_equal(run_chunks(executor, truth.texts[0], [TOKENS], pages), watched)
    finally:
        executor.close()
    for layer, wanted in zip(CUT, fired(truth), strict=True):
        assert np.mean(seen.layers[layer] != wanted) < 0.002, "but for what is near the cutoff"
    assert seen.layers[3].mean() > 0.99


def test_what_needs_predictors_is_refused(truth: Truth, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(give_bundles(truth.save("folder", tmp_path)))
    with pytest.raises(RequestError, match="activations of gelu_tanh are never exactly zero"):
        check_training(checkpoint, TrainConfig())
    with pytest.raises(RequestError, match=r"can select neurons of the activation gelu_tanh: use --selector exact"):
        resolve(checkpoint, EngineConfig(selector="predicted"))


def test_bundles_alone_do_not_know_the_cutoff() -> None:
    pool = _native.Pool(1)
    spec = _native.NeuronSpec(GAUSSIAN, 1.5)
    packed = _native.pack_matrix(pool, _native.Arena(), "F32", 16, 16, np.zeros(1024, np.uint8), None)
    with pytest.raises(ValueError, match="gaussian needs gates"):
        _native.DenseNeurons(spec, None, packed, packed)
    with pytest.raises(ValueError, match="thresholds of neurons are for fatrelu and cats"):
        _native.NeuronSpec(GAUSSIAN, 1.5, limits=np.ones(16, np.float32))


def test_on_a_gpu_what_gates_exceed_their_cutoff_by(device: str) -> None:
    gates = torch.randn(5, 131, generator=torch.Generator().manual_seed(1))
    cutoff = gates.mean(-1, keepdim=True) + 0.7 * gates.std(-1, keepdim=True, unbiased=False)
    ours = gpu.exceeding(gates.to(device), 0.7).cpu()
    assert torch.allclose(ours, (gates - cutoff).relu(), atol=1e-6) and 0.1 < (ours > 0).float().mean() < 0.4
    gates[2, 3] = math.nan
    assert gpu.exceeding(gates.to(device), 0.7).isnan().all(dim=1).tolist() == [False, False, True, False, False]


# ---------------------------------------------------------------- several residual streams


@pytest.mark.parametrize(
    ("weights", "kv_type"), [("float16", "f16"), ("bfloat16", "q8_0"), ("q8_0", "f16"), ("q4_0", "q8_0")]
)
def test_the_same_bits_with_narrow_types(weights: str, kv_type: str, tmp_path: Path) -> None:
    case = replace(case_named("gemma3n"), settings={"head_dim": 32, "intermediate_size": 96, "laurel_rank": 32})
    model = families.random_model(case, case.config(), seed=11)
    quantize = weights if weights.startswith("q") else None
    if quantize is None:
        model = model.to(getattr(torch, weights))
    path = families.save(case, model.config, model, "folder", tmp_path)
    check_same_bits(case, path, quantize=quantize, kv_type=kv_type)


def test_eight_bits_are_near(truth: Truth, tmp_path: Path) -> None:
    """Where laurel_rank and the rows of coefficients are no whole blocks, these stay as they are."""
    executor = open_executor(truth.save("gguf", tmp_path), quantize="q8_0")
    try:
        ours = run_chunks(executor, truth.texts[0], [50, 1, 24], scattered_pages(executor, 1)[0])  # type: ignore[arg-type]
    finally:
        executor.close()
    exact = truth.logits[0]
    assert truth.allowed() < families.rms(ours - exact) < 0.1 * families.rms(exact)


def test_matrices_on_disk(truth: Truth, tmp_path: Path) -> None:
    """What they pass through changes no bit; those of the streams are in memory."""
    path = truth.save("gguf", tmp_path)
    whole, checkpoint = load(open_checkpoint(path), ENGINE), open_checkpoint(path)
    tier = on_disk(checkpoint, 0)
    executor = load(checkpoint, ENGINE, disk=tier)
    try:
        for own, right in zip(answers(executor), answers(whole), strict=True):
            assert np.array_equal(own, right)
        assert tier.counts()["bytes"] > 0
    finally:
        executor.close()
        whole.close()


def test_a_gpu_has_all_layers_or_none(truth: Truth, tmp_path: Path) -> None:
    checkpoint, hardware = open_checkpoint(truth.save("folder", tmp_path)), load_hardware("pc-low")
    model, work = checkpoint_model(checkpoint), Workload("f16", CONTEXT, 64)
    found = {whole_layers(model, hardware, work, vram << 20)[0] for vram in range(0, 2048, 16)}
    assert found == {0, 6}
    error = no_layer_fits(model, hardware, work, 16 << 20)
    assert "hold not all 6 layers of" in str(error)
    assert checkpoint.config.unsplit_reason == "layers with several residual streams run whole beside a GPU"
    give_bundles(checkpoint.path)
    with pytest.raises(RequestError, match="--selector exact: layers with several residual streams run whole"):
        resolve(open_checkpoint(checkpoint.path), EngineConfig(gpu="cpu", vram=1 << 30, selector="exact"))


D = 24


class Streams:
    """A program for residual streams alone, of a width that fills no lanes."""

    def __init__(self, streams: int = 3, active: int = 1, width: int = D) -> None:
        self.pool, self.arena, self.rng = _native.Pool(2), _native.Arena(), np.random.default_rng(streams)
        self.program = _native.Program(
            _native.Workspace(self.pool, ""), _native.Cache("f32", [(1, 16)], 2), 40, D, 64, [1], None, None, 0
        )
        self.norm = _native.Norm(self.values(D), 1e-6)
        self.program.expand_streams(streams, active, self.stack(streams - 1, width))

    def values(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def stack(self, n: int, rows: int = D, cols: int = D) -> _native.Matrix:
        """n matrices one below the other, in whole panels."""
        padded = np.zeros((n, -(-rows // 16) * 16, cols), np.float32)
        padded[:, :rows] = self.values(n, rows, cols)
        return self.matrix(padded.reshape(-1, cols))

    def matrix(self, values: np.ndarray) -> _native.Matrix:
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return _native.pack_matrix(self.pool, self.arena, "F32", *values.shape, data, None)


def test_native_streams_are_checked() -> None:
    with pytest.raises(ValueError, match="number of residual streams that is not supported"):
        Streams(17, 0)
    with pytest.raises(ValueError, match="number of residual streams that is not supported"):
        Streams(3, 3)
    with pytest.raises(ValueError, match="matrices of residual streams have a wrong shape"):
        Streams(width=56)
    one = Streams()
    with pytest.raises(ValueError, match="there are residual streams already"):
        one.program.expand_streams(3, 0, one.stack(2))
    for change in ((3, D), (9, 3), (2, D), (9, 2)):
        wrong = {"router": one.values(*change)} if change[1] == D else {"w": one.values(*change)}
        right = {"router": one.values(3, D), "w": one.values(9, 3)}
        if change in ((3, D), (9, 3)):
            one.program.predict_streams(one.norm, **right | wrong)
            continue
        with pytest.raises(ValueError, match="coefficients of streams have a wrong shape"):
            one.program.predict_streams(one.norm, **right | wrong)
    with pytest.raises(ValueError, match="coefficients of streams have a wrong shape"):
        one.program.correct_streams(one.norm, one.values(3, D), one.values(9, 3))
    with pytest.raises(ValueError, match="scale of a stream"):
        one.program.correct_streams(one.norm, one.values(3, D), one.values(3, 3), one.values(5))
    narrow = one.matrix(one.values(D, 8))
    with pytest.raises(ValueError, match="a matrix of LAuReL"):
        one.program.add_laurel(one.norm, narrow, narrow, one.norm)
    with pytest.raises(ValueError, match="matrices of residual streams have a wrong shape"):
        one.program.merge_streams(one.stack(3))
    plain = _native.Program(
        _native.Workspace(one.pool, ""), _native.Cache("f32", [(1, 16)], 2), 40, D, 64, [1], None, None, 0
    )
    with pytest.raises(ValueError, match="no residual streams but x"):
        plain.predict_streams(one.norm, one.values(3, D), one.values(9, 3))


# ---------------------------------------------------------------- files


def test_a_missing_key_of_a_folder_means_what_it_means_in_transformers(tmp_path: Path) -> None:
    import transformers

    ours = read_config({"architectures": ["Gemma3nForCausalLM"]}, tmp_path)
    theirs = transformers.Gemma3nTextConfig()
    assert ours.altup is not None and (ours.d_model, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
    assert (ours.altup.streams, ours.altup.active) == (theirs.altup_num_inputs, theirs.altup_active_idx)
    assert (ours.altup.rank, ours.altup.scaled) == (theirs.laurel_rank, theirs.altup_correct_scale)
    assert ours.layer_inputs == theirs.hidden_size_per_layer_input
    assert ours.layer_input_rows == theirs.vocab_size_per_layer_input
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert [layer.heads.window for layer in ours.layers] == [windows[kind] for kind in theirs.layer_types]
    shares = [layer.heads.kv_from is not None for layer in ours.layers]
    assert shares == [mode == "reuse" for mode in theirs.kv_sharing_modes]
    bases = {kind: values["rope_theta"] for kind, values in theirs.rope_parameters.items()}
    assert [layer.heads.rope.theta for layer in ours.layers if layer.heads.rope] == [
        bases[kind] for kind in theirs.layer_types
    ]
    ffns = [layer.neurons for layer in ours.layers]
    assert [ffn.size for ffn in ffns] == theirs.intermediate_size
    assert [ffn.activation == GAUSSIAN for ffn in ffns] == [share > 0 for share in theirs.activation_sparsity_pattern]
    assert ffns[0].threshold == pytest.approx(1.6448536, abs=1e-6) and ours.logit_cap == theirs.final_logit_softcapping


def test_a_missing_key_of_a_gguf_file_means_what_it_means_in_llama_cpp(tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("gemma3n")).save("gguf", tmp_path))
    stated = open_gguf(file).config
    without = {key: value for key, value in file.metadata.items() if not key.startswith("gemma3n.altup.")}
    assert open_gguf(replace(file, metadata=without)).config.altup == stated.altup
    fewer = dict(file.metadata)
    for key in ("activation_sparsity_scale", "sliding_window_pattern", "final_logit_softcapping", "shared_kv_layers"):
        names = [name for name in fewer if name.endswith(key)]
        assert len(names) == 1
        del fewer[names[0]]
    config = _config(file, fewer)
    assert [layer.heads.window for layer in config.layers] == [20, 20, 20, 20, None, 20]
    assert config.logit_cap == 30 and {layer.neurons.activation for layer in config.layers} == {"gelu_tanh"}
    assert all(layer.heads.kv_from is None for layer in config.layers)
    fewer["gemma3n.block_count"] = 25
    many = _config(file, fewer)
    assert [layer.neurons.activation == GAUSSIAN for layer in many.layers] == [True] * 10 + [False] * 15
    assert many.layers[0].neurons.threshold == pytest.approx(1.6448536, abs=1e-6)
    assert [layer.heads.kv_from for layer in many.layers] == [None] * 20 + [18] * 4 + [19]
    del fewer["gemma3n.embedding_length_per_layer_input"]
    assert _config(file, fewer).layer_inputs == 256


def _config(file: Any, metadata: dict[str, Any]) -> Any:
    from powerinfer.formats.gguf_model import read_config as read_gguf_config

    return read_gguf_config(replace(file, metadata=metadata))


def test_as_ollama_writes_it(tmp_path: Path) -> None:
    """With keys of its own, the size of heads in another place, and a table that lacks the tokens of pictures."""
    truth = Truth(case_named("gemma3n"), head_dim=16, vocab_size_per_layer_input=80)
    file = read_gguf(truth.save("gguf", tmp_path))
    metadata = {key: value for key, value in file.metadata.items() if not key.endswith(("_length", "_swa"))}
    assert len(metadata) == len(file.metadata) - 6
    lengths = ("context_length", "embedding_length", "feed_forward_length")
    kept = {key: file.metadata[f"gemma3n.{key}"] for key in lengths}
    own = {"head_dim": 16, "rope.freq_base_local": 10000.0, "altup.lr_multiplier": 1.0, "altup.correct_scale": True}
    metadata |= {f"gemma3n.{key}": value for key, value in (kept | own).items()}
    found, expected = open_gguf(replace(file, metadata=metadata)), open_gguf(file)
    assert found.config == expected.config and found.config.layer_input_rows == 80
    unscaled = open_gguf(replace(file, metadata=metadata | {"gemma3n.altup.correct_scale": False}))
    assert unscaled.config.altup is not None and not unscaled.config.altup.scaled
    with pytest.raises(ModelError, match=r"gemma3n\.head_dim is '24', which this engine"):
        open_gguf(replace(file, metadata=metadata | {"gemma3n.head_dim": 24}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation_sparsity_pattern": [0.95] * 5}, "not a number from 0 to 1 for every layer"),
    ({"activation_sparsity_pattern": [0.95] * 5 + [1.0]}, "not a share below 1 for every layer"),
    ({"activation_sparsity_pattern": [0.95] * 5 + [-0.1]}, "not a number from 0 to 1 for every layer"),
    ({"activation_sparsity_pattern": 0.95}, "not a share below 1 for every layer"),
    ({"altup_num_inputs": 1}, "1 residual streams; only 2 to 16"),
    ({"altup_num_inputs": 17}, "17 residual streams; only 2 to 16"),
    ({"altup_num_inputs": "4"}, "altup_num_inputs is '4', not a number"),
    ({"altup_active_idx": 4}, "altup_active_idx is '4', not a number from 0 to 3"),
    ({"laurel_rank": 0}, "laurel_rank is '0'"),
    ({"altup_correct_scale": 1}, "altup_correct_scale is '1', not true or false"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; of this family only gelu_pytorch_tanh"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is '6', not a number from 0 to 5"),
    ({"num_kv_shared_layers": 5}, "layer_types has no layer whose keys and values"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is '0'"),
    ({"hidden_size_per_layer_input": 24}, "inputs of layers of 24 numbers, no multiple of 16"),
    ({"intermediate_size": [88] * 5}, "intermediate_size is .* for every layer"),
    ({"laurel_rank": 13}, r"laurel\.linear_left\.weight has shape \[12, 64\], not \[13, 64\]"),
    ({"altup_num_inputs": 5}, r"model\.altup_projections\.3\.weight is missing"),
    ({"vocab_size_per_layer_input": 91}, r"embed_tokens_per_layer\.weight has shape \[90, 96\], not \[91, 96\]"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=lambda one: str(one)[:50])
def test_folders_that_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = Truth(case_named("gemma3n")).save("folder", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=why):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("activation_sparsity_scale", [1.6] * 5, "not a number of standard deviations for every layer"),
        ("activation_sparsity_scale", [math.nan] * 6, "not a number of standard deviations for every layer"),
        ("activation_sparsity_scale", [math.inf] * 6, "not a number of standard deviations for every layer"),
        ("activation_sparsity_scale", 1.6, "not a number of standard deviations for every layer"),
        ("altup.num_inputs", 3, r"altup_proj\.weight has shape \[3, 64, 64\], not \[2, 64, 64\]"),
        ("altup.active_idx", 4, "altup.active_idx is '4', not a number from 0 to 3"),
        ("altup.coef_clip", 120.0, "altup.coef_clip is set, and this engine does not know what it means"),
        ("embedding_length_per_layer_input", 0, "several residual streams need inputs of layers"),
    ],
)
def test_gguf_files_that_are_refused(key: str, value: Any, why: str, tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("gemma3n")).save("gguf", tmp_path))
    with pytest.raises(ModelError, match=why):
        open_gguf(replace(file, metadata=file.metadata | {f"gemma3n.{key}": value}))
    del file.tensors["blk.0.laurel_l.weight"]
    with pytest.raises(ModelError, match=r"blk\.0\.laurel_l\.weight is missing"):
        open_gguf(file)


def test_a_cutoff_is_of_gated_ffns_alone() -> None:
    assert FfnConfig(64, GAUSSIAN, 1.6).problem() is None
    for wrong in ({"gated": False}, {"bias": True}, {"thresholds": True}):
        assert "activation gaussian with biases or thresholds" in str(FfnConfig(64, GAUSSIAN, **wrong).problem())
