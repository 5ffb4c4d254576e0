"""Neurons beside matrices that have their first product: rows of up and of down, each in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import give_bundles, give_predictor, tiny_llama
from test_partial_ffn import D_FF, D_MODEL, RANK, Case, half
from test_watch import MODELS, batch, opened

from powerinfer import LLM, SamplingParams, _native
from powerinfer.devices.cpu_ffn import CpuFfn
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.bundle_memory import ApartBundles, apart, apart_bytes
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Predictor
from powerinfer.prepare.packing import pack

GROUPS = 3


@pytest.mark.parametrize("shared", [0, 192])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_are_those_of_the_bundles(gated: bool, shared: int) -> None:
    layout = BundleLayout(96, gated, "Q4_0", "Q4_0X32" if shared else "Q8_0", 64, 128, shared)
    groups = np.random.default_rng(1).integers(0, 256, (GROUPS, layout.group_bytes), np.uint8)
    own = apart(layout, groups, np.empty(apart_bytes(layout, GROUPS), np.uint8))
    assert (own.up is not None) == gated and own.down.shape == (GROUPS, BUNDLE_GROUP * 128 + shared)
    for g in range(GROUPS):
        for i in range(BUNDLE_GROUP):
            bundle = groups[g, i * layout.pitch : (i + 1) * layout.pitch]
            assert (own.down[g, 128 * i : 128 * (i + 1)] == bundle[layout.down_at :]).all()
            if own.up is not None:
                assert (own.up[g, 64 * i : 64 * (i + 1)] == bundle[layout.up_at : layout.down_at]).all()
        assert (own.down[g, BUNDLE_GROUP * 128 :] == groups[g, BUNDLE_GROUP * layout.pitch :]).all()


@pytest.mark.parametrize("name", MODELS)
def test_exact_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    path = MODELS[name]().write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, "F16", "F16"))
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    outputs = []
    for copied in (bundles.copied, lambda i: bundles.copied_apart(i, np.empty(bundles.apart_bytes[i], np.uint8))):
        with opened(path) as (executor, _):
            for layer, ffn in executor.ffns.items():
                ffn.add_bundles(bundles.layouts[layer], copied(layer))
                ffn.set_ways({executor.neuron_tokens: "exact"})
            steps = [executor.forward(batch(at, at + 1, logits=True)).copy() for at in range(8)]
            steps.append(executor.forward(batch(8, 13, logits=True)).copy())
            assert all(ffn.counts()["steps"] == len(steps) for ffn in executor.ffns.values())
        outputs.append(np.concatenate(steps))
    assert np.abs(outputs[0]).max() > 0 and (outputs[0] == outputs[1]).all()


@pytest.mark.parametrize(("selector", "kind"), [("exact", ApartBundles), ("predicted", np.ndarray)])
def test_only_predicted_has_gates_in_bundles(
    selector: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    given, add = [], CpuFfn.add_bundles

    def seen(ffn: CpuFfn, layout: BundleLayout, rows: Any, **more: Any) -> None:
        given.append(rows)
        add(ffn, layout, rows, **more)

    monkeypatch.setattr(CpuFfn, "add_bundles", seen)
    with LLM(path, gpu="none", threads=1, selector=selector, trial=False, context=64) as llm:
        llm.generate("a", SamplingParams(max_tokens=4))
        assert llm.sparsity["tokens"] and all(isinstance(rows, kind) for rows in given) and len(given) == 2


def test_what_does_not_go_together_is_refused() -> None:
    case = Case()
    executor = case.executor(np.arange(D_FF), 1)
    layout, bundles = case.bundles(np.arange(D_FF))
    own = apart(layout, bundles, np.empty(apart_bytes(layout, len(bundles)), np.uint8))
    assert own.up is not None
    about = Predictor(RANK, 0.0, 0), half(case.w["inner"]), half(case.w["outer"])
    with pytest.raises(ValueError, match="whole bundles"):
        executor.ffns[0].add_bundles(layout, own, predictor=about)
    for wrong in (
        ApartBundles(own.up[1:], own.down),
        ApartBundles(own.up, own.down[1:]),
        ApartBundles(np.ascontiguousarray(own.up[:, 64:]), own.down),
        ApartBundles(None, own.down),
    ):
        with pytest.raises(ValueError, match=r"number of rows|does not fit|go with gates"):
            executor.ffns[0].add_bundles(layout, wrong)
    with pytest.raises(TypeError):  # a copy of its own would not live
        executor.ffns[0].add_bundles(layout, ApartBundles(np.repeat(own.up, 2, axis=1)[:, ::2], own.down))
    native = _native.apart_bundles(D_FF, D_MODEL, "F16", "F16", "F16", _native.NeuronSpec("relu"), own.up, own.down)
    x, out = np.zeros((1, D_MODEL), np.float32), np.zeros((1, D_MODEL), np.float32)
    with pytest.raises(ValueError, match="first rows"):
        native.add("scalar", x, np.arange(4, dtype=np.int32), out)
    with pytest.raises(ValueError, match="first rows"):
        executor.parts.bundled(0, layout, own, neurons=D_FF).sum(x, out, None, None)
    executor.close()
