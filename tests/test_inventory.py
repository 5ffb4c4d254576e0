"""The inventory has every matrix and vector of a model once, by the operator that uses it."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from powerinfer.config import DeltaNetConfig, GatedAttentionConfig, LatentAttentionConfig
from powerinfer.formats.layout import is_matrix, shapes
from powerinfer.models.inventory import take_inventory
from powerinfer.placement.shapes import find_shape, shape_names

USES = ("attention", "heads", "router", "experts", "panels")


@pytest.mark.parametrize("name", shape_names())
def test_every_tensor_is_there_once(name: str) -> None:
    config = find_shape(name).config
    inventory = take_inventory(config, lambda name: "F16")
    known = dict(shapes(config))
    names = Counter(name for unit in inventory.units for name in unit.names)
    tables = {"embed", "positions", "input_table"} & known.keys()
    assert names.pop("embed", 1) == 1, "the head, where it is tied"
    assert set(names) == {name for name, shape in known.items() if is_matrix(name, shape)} - tables
    assert set(names.values()) == {1}
    vectors = {name: prod(shape) for name, shape in known.items() if not is_matrix(name, shape)}
    assert inventory.vectors == vectors
    assert inventory.parameters == sum(map(prod, known.values()))
    assert inventory.tables == sum(2 * prod(known[name]) for name in tables)


def test_units_are_in_the_order_of_a_step() -> None:
    config = find_shape("qwen3.6-35b-a3b").config
    inventory = take_inventory(config, lambda name: "Q8_0")
    numbers = [unit.layer for unit in inventory.units if unit.layer is not None]
    assert numbers == sorted(numbers) and inventory.units[-1].use == "head"
    delta = next(layer for layer, one in enumerate(config.layers) if isinstance(one.attention, DeltaNetConfig))
    uses = [(unit.use, len(unit.matrices)) for unit in inventory.of_layer(delta, *USES)]
    assert uses == [("attention", 6), ("attention", 1), ("router", 1), ("experts", 3), ("panels", 3)]
    gated = next(layer for layer, one in enumerate(config.layers) if isinstance(one.attention, GatedAttentionConfig))
    units = [[name.rpartition(".")[2] for name in unit.names] for unit in inventory.of_layer(gated, "attention")]
    assert units == [["q", "k", "v"], ["q_gate"], ["o"]]


def test_a_router_is_exact_and_matrices_of_heads_are_units_of_their_own() -> None:
    config = find_shape("deepseek-v2-lite").config
    assert isinstance(config.layers[1].attention, LatentAttentionConfig)
    inventory = take_inventory(config, lambda name: "Q4_0")
    types = {unit.use: {one.type for one in unit.matrices} for unit in inventory.of_layer(1, *USES)}
    assert types["router"] == {"F32"} and types["experts"] == {"Q4_0"}
    heads = inventory.of_layer(1, "heads")
    assert [unit.names for unit in heads] == [("layers.1.k_b",), ("layers.1.v_b",)]
    (experts,) = inventory.of_layer(1, "experts")
    about = config.experts[1]
    rows = about.n_experts * about.size
    assert experts.file == 3 * rows * config.d_model // 32 * 18
    assert experts.only(["layers.1.experts_up"]).names == ("layers.1.experts_up",)
    assert experts.first(1).names + experts.after(1).names == experts.names
