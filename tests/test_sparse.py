"""Sparse decode of every ReLU family against `transformers`: exact is the dense answer, predicted the masked one.

The truth and the bound are those of families.py: float64, and four times the error that `transformers` makes
in float32. Weights are float16 numbers, so bundles of F16 hold them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
from families import case_named  # noqa: E402
from model_files import family_gguf  # noqa: E402
from sparse_models import give_bundles, predictors_of, some_neurons, tiny_llama  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import Batch  # noqa: E402
from powerinfer.errors import RequestError  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.predictor_file import write_predictor  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.neurons import Predictor  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402
from powerinfer.sparsity.attach import CpuSparsity, attach  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402
from powerinfer_train.torch_model import NeuronValues, TorchModel  # noqa: E402
from powerinfer_train.torch_model import load as load_torch  # noqa: E402

RELU = [
    case
    for case in families.CASES
    if case.kind in ("sparsellama", "bamboo", "opt", "falcon", "nemotron", "jais2", "nanochat", "plm")
    or case.name.endswith("-relu")
]
RANK = 8


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[Any, CpuSparsity | None]]:
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    engine = EngineConfig(**(settings | {"max_batch": 8, "trial": False, "recall_every": 1} | options))
    checkpoint = open_checkpoint(path, engine.quantize)
    executor = load(checkpoint, engine)
    try:
        found = attach(executor, checkpoint, engine, select(checkpoint, engine), lambda: list(range(40)))
        yield executor, found if isinstance(found, CpuSparsity) else None
    finally:
        executor.close()


def packed(model: Truth, folder: Path) -> Path:
    """The model as a folder with its bundles beside it."""
    return give_bundles(model.save("folder", folder))


def split_calls(executor: Any, tokens: np.ndarray) -> np.ndarray:
    pages = families.scattered_pages(executor, 1)[0]
    return families.run_chunks(executor, tokens, [1] * len(tokens), pages)


def side_by_side(executor: Any, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of sequences whose tokens are computed together, one of each a step."""
    pages = families.scattered_pages(executor, len(sequences))
    each = np.arange(len(sequences), dtype=np.int32)
    steps = [
        executor.forward(
            Batch(np.asarray(tokens, np.int32), np.full(len(each), at, np.int32), each, pages, each)
        ).copy()
        for at, tokens in enumerate(zip(*sequences, strict=True))
    ]
    return list(np.stack(steps, axis=1))


@pytest.mark.sampled
@pytest.mark.parametrize("case", RELU, ids=lambda case: case.name)
def test_exact_is_the_dense_answer(case: families.Case, tmp_path: Path) -> None:
    model = Truth(case, half=True)
    tokens = model.texts
    truth = model.logits
    allowed = model.allowed()
    path = packed(model, tmp_path)
    with opened(path, selector="exact") as (executor, sparsity):
        assert sparsity is not None
        alone = split_calls(executor, tokens[0])
        assert families.rms(alone - truth[0]) <= allowed
        report = sparsity.report()
        assert 0.02 < report["active_fraction"] < 0.8 and report["layers"][0]["tokens"] == families.TOKENS
        together = side_by_side(executor, tokens)
        assert max(families.rms(ours - exact) for ours, exact in zip(together, truth, strict=True)) <= 2 * allowed
        np.testing.assert_array_equal(split_calls(executor, tokens[0]), alone)  # same bits again
    with opened(path, selector="exact", threads=2) as (executor, _):
        for ours, exact in zip(side_by_side(executor, [one[:12] for one in tokens]), truth, strict=True):
            assert families.rms(ours - exact[:12]) <= 2 * allowed, "with two threads"


@pytest.mark.sampled
@pytest.mark.parametrize("case", RELU, ids=lambda case: case.name)
def test_a_step_in_which_many_fire_continues_densely(case: families.Case, tmp_path: Path) -> None:
    model = Truth(case, half=True)
    tokens = model.texts
    truth = model.logits
    allowed = model.allowed()
    path = packed(model, tmp_path)
    active, rows = [], []
    for above in (0.0, 0.3, 1.0):  # every step, some, none
        with opened(path, selector="exact") as (executor, sparsity):
            assert sparsity is not None
            for ffn in executor.ffns.values():
                ffn.op.dense_above = above
            assert families.rms(split_calls(executor, tokens[0]) - truth[0]) <= allowed
            active.append(sparsity.report()["active_fraction"])
            rows.append(executor.ffns[0].counts()["rows"])
            together = side_by_side(executor, [one[:35] for one in tokens])
            off = [families.rms(ours - exact[:35]) for ours, exact in zip(together, truth, strict=True)]
            assert max(off) <= 2 * allowed
    assert max(active) - min(active) < 2e-3  # gates near zero
    assert rows[0] > rows[2] and rows[0] >= rows[1] >= rows[2]


def residual_of(case: families.Case, layer: Any) -> Any:
    """The module whose input is that of the layer's predictor."""
    if case.base == "opt":
        return layer.final_layer_norm if layer.do_layer_norm_before else layer.fc1
    if case.base == "falcon":
        if hasattr(layer, "ln_mlp"):
            return layer.ln_mlp
        return layer.input_layernorm if layer.config.parallel_attn else layer.post_attention_layernorm
    if case.base == "openelm":
        return layer.ffn_norm
    return layer.mlp if case.base == "olmo2" else layer.post_attention_layernorm


@pytest.mark.sampled
@pytest.mark.parametrize("case", RELU, ids=lambda case: case.name)
def test_an_observer_reads_what_a_predictor_does(case: families.Case, tmp_path: Path) -> None:
    truth = Truth(case, half=True)
    model, tokens = truth.model, truth.texts[0]
    blocks = {"falcon": lambda: model.transformer.h, "opt": lambda: model.model.decoder.layers}
    blocks["openelm"] = lambda: model.transformer.layers
    expected: list[Any] = []
    for layer in blocks.get(case.base, lambda: model.model.layers)():
        keep = lambda module, args: expected.append(args[0].detach().numpy().reshape(len(tokens), -1).copy())  # noqa: E731
        residual_of(case, layer).register_forward_pre_hook(keep)
    families.logits(model, tokens)
    read: list[np.ndarray] = []

    class Reader:
        def reads(self, layer: int, x: np.ndarray) -> None:
            read.append(x.copy())

        def fires(self, layer: int, fired: Any) -> None:
            pass

    with opened(truth.save("folder", tmp_path), selector="all") as (executor, _):
        pages = families.scattered_pages(executor, 1)[0]
        with executor.observed(Reader()):
            families.run_chunks(executor, tokens, [len(tokens)], pages)
    for ours, theirs in zip(read, expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def masked_ffn(case: families.Case, mlp: Any, mask: Callable[[], Any]) -> Callable[[Any], Any]:
    def gated(x: Any) -> Any:
        up = torch.relu(mlp.up_proj(x)) if case.kind == "bamboo" else mlp.up_proj(x)
        return mlp.down_proj(torch.relu(mlp.gate_proj(x)) * up * mask())

    def plain(x: Any) -> Any:
        return mlp.dense_4h_to_h(torch.relu(mlp.dense_h_to_4h(x)) * mask())

    return plain if case.base == "falcon" else gated


def predictor_weights(d_model: int, d_ff: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """A neuron is a candidate where one of RANK / 2 sums of the residual is positive: far from any rounding."""
    rng = np.random.default_rng([layer, 9])
    half = rng.standard_normal((RANK // 2, d_model)).astype(np.float16)
    inner = np.concatenate([half, -half]).astype(np.float32)
    outer = np.zeros((d_ff, RANK), np.float32)
    which = rng.integers(0, RANK // 2, d_ff)
    outer[np.arange(d_ff), which] = 1
    outer[np.arange(d_ff), which + RANK // 2] = -1
    return inner, outer


@pytest.mark.parametrize("name", ["llama-relu", "turbosparse", "falcon-40b"])
def test_predicted_is_the_dense_answer_masked(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    model = Truth(case, half=True)
    tokens = model.texts[0]
    path = packed(model, tmp_path)
    checkpoint = open_checkpoint(path)
    d_model, d_ff, layers = (getattr(checkpoint.config, size) for size in ("d_model", "widest_ffn", "n_layers"))
    weights = [predictor_weights(d_model, d_ff, layer) for layer in range(layers)]
    write_predictor(checkpoint, None, "F16", [Predictor(RANK, 0.0, 0)] * layers, weights)

    candidates: list[Any] = []

    def mask_with(wide: Any) -> None:
        blocks = wide.transformer.h if case.base == "falcon" else wide.model.layers
        for layer, (inner, outer) in zip(blocks, weights, strict=True):
            seen: dict[str, Any] = {}
            keep = lambda module, args, seen=seen: seen.update(r=args[0])  # noqa: E731
            residual_of(case, layer).register_forward_pre_hook(keep)

            def mask(seen: dict[str, Any] = seen, inner: Any = inner, outer: Any = outer) -> Any:
                kind = seen["r"].dtype
                inside, outside = (torch.from_numpy(part).to(kind) for part in (inner, outer))
                chosen = torch.relu(seen["r"] @ inside.T) @ outside.T >= 0
                candidates.append(chosen.double().mean().item())
                return chosen.to(kind)

            layer.mlp.forward = masked_ffn(case, layer.mlp, mask)

    build = families.build

    def masked(case: families.Case, config: Any) -> Any:
        wide = build(case, config)
        mask_with(wide)
        return wide

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "build", masked)
        truth = families.exact_logits(case, model.config, model.model, tokens)
    fraction = np.mean(candidates)
    mask_with(model.model)
    allowed = families.ROUNDING * families.rms(families.logits(model.model, tokens) - truth)
    assert families.rms(model.logits[0] - truth) > 1000 * allowed, "the mask changes nothing"

    with opened(path, selector="predicted") as (executor, sparsity):
        assert sparsity is not None
        assert families.rms(split_calls(executor, tokens) - truth) <= allowed
        report = sparsity.report()
        assert report["candidate_fraction"] == pytest.approx(fraction, rel=1e-6)
        assert report["sampled"] == families.TOKENS
        assert report["recall"] == pytest.approx(0.5, abs=0.1)  # of neurons whose signs have nothing to do with it
        split_calls(executor, tokens)  # the samples did not change the answer
        both = side_by_side(executor, [tokens, tokens[::-1].copy()])
        assert families.rms(both[0] - truth) <= 2 * allowed


def test_a_floor_of_candidates(tmp_path: Path) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    checkpoint = open_checkpoint(path)
    layers, d_ff = checkpoint.config.n_layers, checkpoint.config.widest_ffn
    weights = [predictor_weights(checkpoint.config.d_model, d_ff, layer) for layer in range(layers)]
    for floor in (0, 1, 7, d_ff):
        write_predictor(checkpoint, None, "F16", [Predictor(RANK, 1e5, floor)] * layers, weights)
        with opened(path, selector="predicted") as (executor, sparsity):
            assert sparsity is not None
            ours = split_calls(executor, families.prompt(case))
            assert sparsity.report()["candidate_fraction"] == pytest.approx(floor / d_ff)
        if floor == d_ff:
            model.check(ours, texts=1)


def test_what_is_counted(tmp_path: Path) -> None:
    """The report against the numbers of active neurons that torch sees."""
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    active: list[int] = []
    for layer in model.model.model.layers:
        hook = lambda module, args, out: active.append(int((out != 0).sum()))  # noqa: E731
        layer.mlp.act_fn.register_forward_hook(hook)
    families.logits(model.model, tokens)
    with opened(packed(model, tmp_path), selector="exact") as (executor, sparsity):
        assert sparsity is not None
        split_calls(executor, tokens)
        report = sparsity.report()
        d_model, d_ff = model.config.hidden_size, model.config.intermediate_size
        total = sum(active) / (len(tokens) * len(active) * d_ff)
        assert report["active_fraction"] == pytest.approx(total, abs=2e-4)
        part = 2 * d_model  # bytes of a row of F16
        for layer, number in zip(report["layers"], active, strict=True):
            gate = executor.ffns[0].matrices[0].nbytes
            assert layer["bytes_per_token"] == pytest.approx(gate + number / len(tokens) * 2 * part, rel=1e-3)


def test_a_threshold_leaves_more_out_the_higher_it_is(tmp_path: Path) -> None:
    case = case_named("llama2")
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    truth = model.logits[0]
    path = packed(model, tmp_path)
    off, active = [], []
    for threshold in (1e-9, 0.05, 0.3):
        with opened(path, selector="threshold", threshold=threshold) as (executor, sparsity):
            assert sparsity is not None
            off.append(families.rms(split_calls(executor, tokens) - truth))
            active.append(sparsity.report()["active_fraction"])
    assert active[0] == 1 > active[1] > active[2] and off[0] < off[1] < off[2]
    assert off[0] <= model.allowed()


def far_from_thresholds(models: Sequence[TorchModel], number: int = 3) -> list[np.ndarray]:
    """Sequences of 30 random tokens, of which no model has a neuron so near its threshold that rounding decides whether
    it fires."""
    rng = np.random.default_rng(1)
    found: list[np.ndarray] = []
    while len(found) < number:
        one = rng.integers(0, models[0].config.vocab_size, 30).astype(np.int32)
        nearest: list[float] = []
        for model in models:

            def measure(name: str, seen: NeuronValues, model: TorchModel = model, near: list[float] = nearest) -> None:
                ffn = model.config.layers[int(name.split(".")[1])].ffn
                assert seen.gate is not None
                active = torch.nn.functional.silu(seen.gate)
                decides = active.abs() if ffn.activation == "cats" else seen.gate
                limit = model.weights.get(f"{name}threshold", torch.tensor(ffn.threshold))
                near.append(float((decides - limit).abs().min()))
                if ffn.neurons.product_thresholds:
                    least = model.weights[f"{name}product_threshold"]
                    near.append(float((((active * seen.up).abs() - least).abs() / (1 + least)).min()))

            with torch.no_grad():
                model.states(torch.from_numpy(one).long()[None], measure)
        if min(nearest) > 3e-5:  # values about 1, sums of a few hundred products
            found.append(one)
    return found


@pytest.mark.parametrize("activation", ["cats", "fatrelu"])
def test_thresholds_of_neurons(activation: str, tmp_path: Path) -> None:
    """Dense and sparse, tokens alone and together, are what torch computes."""
    products = activation == "cats"
    path = give_bundles(tiny_llama(tmp_path / "m.gguf", activation, limits=True, products=products))
    checkpoint = open_checkpoint(path)
    weights = load_torch(checkpoint)
    tokens = far_from_thresholds([TorchModel(checkpoint.config, weights, torch.float32)])

    def truth(weights: dict[str, Any]) -> list[np.ndarray]:
        model = TorchModel(checkpoint.config, weights, torch.float32)
        with torch.no_grad():
            return [model.logits(model.states(torch.from_numpy(one).long()[None]))[0].numpy() for one in tokens]

    wanted = truth(weights)
    bound = 1e-4 * np.abs(wanted).max()
    for name in ("threshold", "product_threshold") if products else ("threshold",):
        other = weights | {f"layers.1.{name}": weights[f"layers.1.{name}"].roll(1)}
        assert np.abs(truth(other)[0] - wanted[0]).max() > 100 * bound, "other thresholds change nothing"
    between = 0.3 if products else 0.0  # more gates fire, but products of some tokens are fewer
    for selector, above in (("all", 1.0), ("exact", 1.0), ("exact", between), ("threshold", 1.0)):
        options = {"threshold": 1e-6} if selector == "threshold" else {}
        with opened(path, selector=selector, **options) as (executor, sparsity):
            for ffn in executor.ffns.values():
                ffn.op.dense_above = above
            assert np.abs(split_calls(executor, tokens[0]) - wanted[0]).max() < bound
            if sparsity is not None:
                assert 0.1 < sparsity.report()["active_fraction"] < 0.8
            for ffn in executor.ffns.values() if products and above == between else ():
                counts = ffn.op.counts()  # up from its matrix, down by rows
                assert counts["down_rows"] < counts["up_rows"] == counts["steps"] * ffn.neurons
            together = side_by_side(executor, tokens)
            assert max(np.abs(ours - one).max() for ours, one in zip(together, wanted, strict=True)) < bound


@pytest.mark.parametrize("limits", [True, 0.3], ids=["of neurons", "of layers"])
@pytest.mark.parametrize("activation", ["cats", "fatrelu"])
def test_predicted_with_thresholds(activation: str, limits: bool | float, tmp_path: Path) -> None:
    """What is selected counts where it fires, on either side of zero, and what is not selected is left out."""
    path = give_bundles(tiny_llama(tmp_path / "m.gguf", activation, limits, activation == "cats" and limits is True))
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    choices = [some_neurons(config.n_layers, config.widest_ffn, share) for share in (1.1, 0.7)]
    models = [TorchModel(config, load_torch(checkpoint), torch.float32) for _ in choices]
    for model, selected in zip(models, choices, strict=True):
        for layer, own in enumerate(selected):
            model.weights[f"layers.{layer}.down"] *= torch.from_numpy(own)
    tokens = far_from_thresholds(models)
    whole = None
    for model, selected in zip(models, choices, strict=True):
        about, weights = predictors_of(selected, config.d_model)
        write_predictor(checkpoint, None, "F16", [about] * config.n_layers, weights)
        fires: list[torch.Tensor] = []

        def count(name: str, seen: NeuronValues, fires: list[torch.Tensor] = fires) -> None:
            fires.append((seen.h != 0).flatten(0, -2))

        with torch.no_grad():
            wanted = [model.logits(model.states(torch.from_numpy(tokens[0]).long()[None], count))[0].numpy()]
            each = torch.stack(fires, 1)  # [tokens, layers, neurons]
            for one in tokens[1:]:
                wanted.append(model.logits(model.states(torch.from_numpy(one).long()[None]))[0].numpy())
        bound = 1e-4 * np.abs(wanted).max()
        whole = wanted[0] if whole is None else whole
        found = float((each & torch.from_numpy(selected)).sum() / each.sum())
        with opened(path, selector="predicted") as (executor, sparsity):
            assert sparsity is not None
            assert np.abs(split_calls(executor, tokens[0]) - wanted[0]).max() < bound
            report = sparsity.report()
            assert report["sampled"] == len(tokens[0]) and report["recall"] == pytest.approx(found, abs=1e-3)
            assert report["candidate_fraction"] == pytest.approx(selected.mean())
            fired = float((each & torch.from_numpy(selected)).float().mean())
            assert report["active_fraction"] == pytest.approx(fired, abs=1e-3) and 0.05 < fired < 0.8
            together = side_by_side(executor, tokens)
            assert max(np.abs(ours - one).max() for ours, one in zip(together, wanted, strict=True)) < bound
    assert np.abs(wanted[0] - whole).max() > 100 * bound, "what is left out changes nothing"


def test_the_trial_decides_for_every_layer_and_batch(tmp_path: Path) -> None:
    case = case_named("turbosparse")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    truth = model.logits[0]
    with opened(path, selector="auto", trial=True, max_batch=5) as (executor, sparsity):
        assert sparsity is not None and str(executor.choices.selector).startswith("exact in ")
        for layer in sparsity.report()["layers"]:
            assert set(layer["ways"]) == {"1", "2", "4"} and set(layer["ways"].values()) <= {"dense", "exact"}
            assert "dense " in layer["reason"] and "exact " in layer["reason"] and layer["tokens"] == 0
        ours = split_calls(executor, families.prompt(case))
    allowed = model.allowed()
    assert families.rms(ours - truth) <= allowed


def test_impossible_selectors_are_refused_or_explained(tmp_path: Path) -> None:
    swiglu, relu = case_named("llama2"), case_named("llama-relu")
    dense, bare = (Truth(case, half=True).save("folder", tmp_path / case.name) for case in (swiglu, relu))
    for name, advice in (("exact", "leave out --selector; threshold"), ("predicted", "use --selector threshold")):
        with pytest.raises(RequestError, match=f"silu.*{advice}"), opened(dense, selector=name):
            pass
    with pytest.raises(RequestError, match="needs --threshold"), opened(bare, selector="threshold"):
        pass
    with pytest.raises(RequestError, match="not with exact"), opened(bare, selector="exact", threshold=0.1):
        pass
    with pytest.raises(Exception, match="powerinfer pack -m"), opened(bare, selector="exact"):
        pass
    with opened(bare, selector="auto") as (executor, sparsity):
        assert sparsity is None and "powerinfer pack -m" in str(executor.choices.selector)
    with opened(dense, selector="auto") as (executor, sparsity):
        assert sparsity is None and "silu is never exactly zero" in str(executor.choices.selector)


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
def test_files_of_powerinfer_have_their_own_predictors(architecture: str, tmp_path: Path) -> None:
    path = family_gguf(architecture, published=True).write(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint))
    tokens = np.arange(40, dtype=np.int32) % checkpoint.config.vocab_size
    answers = {}
    for selector in ("all", "exact", "predicted"):
        with opened(path, selector=selector) as (executor, sparsity):
            answers[selector] = split_calls(executor, tokens)
            if selector == "predicted":
                assert sparsity is not None
                report = sparsity.report()
                assert 0 < report["candidate_fraction"] < 1 and 0 < report["recall"] < 1
                d_ff, d_model = checkpoint.config.widest_ffn, checkpoint.config.d_model
                inner = checkpoint.take("layers.0.predictor_in")
                weights = inner.data.nbytes + checkpoint.take("layers.0.predictor_out").data.nbytes
                read = report["layers"][0]["bytes_per_token"]
                assert weights <= read < weights * 1.5 + 3 * 2 * d_ff * d_model
    scale = families.rms(answers["all"])
    assert families.rms(answers["exact"] - answers["all"]) < 2e-3 * scale  # float32 weights became float16
    assert families.rms(answers["predicted"] - answers["all"]) > 2e-2 * scale  # these predictors know nothing
