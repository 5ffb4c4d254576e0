"""Plans: budgets that hold to the byte, the order of claim, both objectives by brute force, keys, hostile files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_models import give_bundles, give_predictor, give_profile, profile_for, profile_of, tiny_llama
from test_cli import error_line, powerinfer

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.devices.step_buffers import step_bytes
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.hardware.description import RATED_ROWS, Hardware, load, save
from powerinfer.neurons import NeuronPlacement, Profile, Tier
from powerinfer.placement import budget, cost, plan
from powerinfer.placement.plan import (
    POLICIES,
    Plan,
    PlanRequest,
    kept_document,
    make_plan,
    save_plan,
    with_working_memory,
)
from powerinfer.placement.power_law import FAMILIES, Law, assumed_profile, fit_skew
from powerinfer.placement.shapes import Model, described_model, find_shape
from powerinfer.placement.solver import GROUP
from powerinfer.sizes import read_size

HIGH, LOW = load("pc-high"), load("pc-low")
MIB, GIB = 1 << 20, 1 << 30


def small_model(layers: int = 3, d_ff: int = 256, gated: bool = True, predictors: bool = True) -> Model:
    layer = LayerConfig(AttentionConfig(8, 8, 64, RopeConfig(dim=64)), FfnConfig(d_ff, "relu", gated=gated))
    config = ModelConfig("llama", 512, 1000, 512, 1e-5, uniform(layers, layer))
    model = described_model(config, "f16", "small", 0.07 if predictors else 0.0)
    assert bool(model.predictors) is predictors
    return model


def machine(vram: int, ram: int = 64 * GIB, reserved: int = 0, sync_us: float = 30.0, disk: bool = True) -> Hardware:
    """pc-low with a card and a memory of these sizes, of which nothing is taken."""
    assert LOW.gpu is not None
    return replace(
        LOW,
        gpu=replace(LOW.gpu, memory_bytes=max(1, vram), reserved_bytes=reserved),
        cpu=replace(LOW.cpu, memory_bytes=ram, reserved_bytes=0),
        sync_us=sync_us,
        disk=LOW.disk if disk else None,
    )


def request_of(
    model: Model, profile: Profile | None = None, hardware: Hardware | None = None, **more: Any
) -> PlanRequest:
    config = model.config
    profile = profile or profile_for(config.ffn_sizes)
    given = {"context": 64, "chunk": 32, "selector": "predicted" if model.predictors else "exact"} | more
    return PlanRequest(model, profile, hardware or machine(4 * GIB), **given)


def dense_on_gpu(request: PlanRequest, head: bool) -> int:
    """VRAM that holds all layers without their neurons."""
    layers = request.model.config.n_layers
    return sum(budget.on_gpu(request.model, request.hardware, request.workload, budget.Division(layers, head)).values())


def with_groups(request: PlanRequest, groups: int, **more: Any) -> PlanRequest:
    """The request with room for that number of groups on the GPU."""
    card = replace(request.hardware.gpu, memory_bytes=request.vram_for(groups))
    return replace(request, hardware=replace(request.hardware, gpu=card), **more)


def check(made: Plan) -> None:
    """What every plan keeps to: budgets to the byte, all neurons somewhere, sums that agree."""
    request, document = made.request, made.document().json()
    vram, ram = budget.budgets(request.hardware, request.vram, request.ram)
    tiers = made.bytes
    assert sum(tiers["gpu"].values()) <= vram and sum(tiers["cpu"].values()) <= ram
    for layer in document["layers"]:
        assert layer["gpu"] + layer["cpu"] + layer["disk"] == max(request.profile.sizes)
        assert 0 <= layer["mass_on_gpu"] <= 1
    assert document["fits"] == (not tiers["disk"])
    assert sum(document["activations"].values()) == pytest.approx(1)
    assert document["activations"]["gpu"] == pytest.approx(made.choice.mass_on_gpu)
    seconds = [
        one["seconds"]["other"]
        + max(one["seconds"]["gpu"], one["seconds"]["cpu"] + one["seconds"]["sync"])
        + one["seconds"]["disk"]
        for one in document["layers"]
    ]
    assert sum(seconds) < made.choice.seconds < sum(seconds) + 1
    placement = made.placement(request.profile)
    for number, layer in enumerate(made.neurons):
        parts = placement.split_by_tier(number)
        if made.claims.bundles:
            assert {tier: len(neurons) for tier, neurons in parts.items()} == layer
    json.dumps(document, allow_nan=False)


# ---------------------------------------------------------------- objectives


def impact_of(request: PlanRequest) -> np.ndarray:
    profile = request.profile
    return np.stack(
        [
            np.add.reduceat(profile.counts[layer][profile.order(layer)], np.arange(0, max(profile.sizes), GROUP))
            for layer in range(profile.n_layers)
        ]
    ).astype(np.float64)


@pytest.mark.parametrize("selector", ["all", "exact", "predicted"])
def test_a_step_on_the_cpu_alone(selector: str) -> None:
    """Layers, head and the step's own time; what a step reads comes faster where the cache holds it."""
    request = request_of(small_model(), selector=selector, vram=0)
    cpu = replace(request.hardware.cpu, row_ns=dict.fromkeys(request.hardware.cpu.row_ns, 0.0), sparse_us=0.0)
    head = request.model.head
    apart = 1e-6 * (cpu.op_us + cpu.step_us) + cpu.head_seconds(head.type, head.panels)

    def seconds(**more: Any) -> float:
        hardware = replace(request.hardware, cpu=replace(cpu, **more))
        made = make_plan(replace(request, hardware=hardware))
        layers = sum(one["cpu"] + one["other"] for one in made.choice.layer_seconds)
        assert more or made.choice.seconds == pytest.approx(layers + apart)
        return made.choice.seconds - 1e-6 * cpu.step_us

    assert seconds(cache_bytes=1 << 40, cache_gain=4.0) == pytest.approx(seconds() / 4)
    assert seconds(cache_bytes=1, cache_gain=4.0) == pytest.approx(seconds())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([200, 256]), st.integers(0, 12), st.floats(0, 100))
def test_ilp_by_brute_force_over_all_sets_of_groups(seed: int, layers: int, d_ff: int, room: int, sync: float) -> None:
    """Every subset of the groups: the most activations of those that hold the capacity and Ineq. 4, 7 and 8."""
    model = small_model(layers, d_ff)
    request = request_of(model, profile_of(layers, d_ff, seed), machine(4 * GIB, sync_us=sync), policy="ilp")
    request = with_groups(request, room)
    gpu_s, cpu_s = (
        device.rows_seconds("F16", 3, model.bundle.stride) for device in (request.hardware.gpu, request.hardware.cpu)
    )
    assert gpu_s < cpu_s
    impact = impact_of(request)
    groups = impact.shape[1]
    best = 0.0
    for chosen in itertools.product(range(2**groups), repeat=layers):
        sets = [[g for g in range(groups) if bits >> g & 1] for bits in chosen]
        pays = all(not s or GROUP * len(s) * gpu_s + 1e-6 * sync <= GROUP * len(s) * cpu_s for s in sets)
        if pays and sum(map(len, sets)) <= room:
            best = max(best, sum(impact[layer, s].sum() for layer, s in enumerate(sets)))
    made = make_plan(request)
    check(made)
    assert made.choice.optimal and made.choice.mass_on_gpu == pytest.approx(best / impact.sum(), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["exact", "predicted"]),
    st.integers(0, 12),
    st.integers(0, 12),
    st.data(),
)
def test_time_by_brute_force_over_all_splits(
    seed: int, selector: str, room: int, kept: int, data: st.DataObject
) -> None:
    """Every (groups on the GPU, groups in RAM) of every layer, with room that is short on both: the shortest step."""
    layers, d_ff = 2, data.draw(st.sampled_from([200, 256]))
    model = small_model(layers, d_ff)
    request = request_of(model, profile_of(layers, d_ff, seed), machine(4 * GIB, sync_us=3), selector=selector)
    request = with_groups(request, room)
    claims = request.claims()
    ram = sum(claims.cpu.values()) + kept * GROUP * model.bundle.stride
    request = replace(request, ram=ram)
    made = make_plan(request)
    check(made)
    if not made.claims.gpu_layers:
        return  # the CPU alone is faster
    tables = plan._tables(request, claims, [request.profile.order(layer) for layer in range(layers)])
    groups = -(-d_ff // GROUP)
    everything = model.bundle.stride * d_ff * layers
    left = kept * GROUP * model.bundle.stride
    best = np.inf
    for chosen in itertools.product([(k, j) for k in range(groups + 1) for j in range(k, groups + 1)], repeat=layers):
        held = sum(j - k for k, j in chosen) <= kept or everything <= left
        if held and sum(k for k, _ in chosen) <= room:
            seconds = 0.0
            for layer, (k, j) in enumerate(chosen):
                parts = {name: float(values[layer, k]) for name, values in tables.parts.items()}
                seconds += parts["other"] + max(parts["gpu"], parts["cpu"] + parts["sync"]) + tables.disk[layer, j]
            best = min(best, seconds + tables.ends)
    assert made.choice.optimal and made.choice.seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "hardware", "share"),
    [  # each machine with every model and every share
        ("opt-30b", HIGH, 0.25), ("falcon-40b", HIGH, 0.5), ("llama-70b", HIGH, 0.75),
        ("opt-30b", LOW, 0.75), ("falcon-40b", LOW, 0.25), ("llama-70b", LOW, 0.5),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)  # fmt: skip
def test_never_below_greedy_and_random(name: str, hardware: Hardware, share: float) -> None:
    """ilp has the most activations on the GPU, time the fastest step, with room for that share of the neurons."""
    shape = find_shape(name)
    model = described_model(shape.config, "q4_0", name, shape.predictor)
    profile = assumed_profile(shape.law, shape.config.ffn_sizes)
    big = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=1 << 40))
    request = PlanRequest(model, profile, big, context=2048, selector="predicted")
    groups = round(share * shape.config.n_layers * shape.config.widest_ffn / GROUP)
    made = make_plan(with_groups(request, groups))
    check(made)
    others = made.others
    assert others["ilp"].optimal and others["time"].optimal
    for policy in ("greedy", "random"):
        assert others["ilp"].mass_on_gpu >= others[policy].mass_on_gpu
        assert others["time"].seconds <= others[policy].seconds
    assert others["time"].seconds <= others["ilp"].seconds
    assert others["random"].mass_on_gpu == pytest.approx(share, abs=0.02)
    assert others["greedy"].mass_on_gpu > share


def test_a_plan_by_the_working_memory_that_was_measured() -> None:
    """It is solved again by its own policy alone, and is the one that such a budget would have had from the start."""
    model = small_model(3, 1024)
    made = make_plan(with_groups(request_of(model, hardware=machine(GIB)), 12))
    group = GROUP * model.gpu_neuron
    assert made.request.policy == "time" and sum(made.choice.gpu) > 2
    less = with_working_memory(made, made.claims.gpu["scratch"] + 2 * group)
    assert less is not None and set(less.others) == {"time"}
    assert sum(less.choice.gpu) == less.claims.gpu_left // group == made.claims.gpu_left // group - 2
    assert less.choice.gpu == make_plan(with_groups(request_of(model, hardware=machine(GIB)), 10)).choice.gpu
    assert with_working_memory(made, made.claims.gpu["scratch"] + made.claims.gpu_left + 1) is None


@pytest.mark.parametrize(("batch", "goes"), [(1, "predicted"), (32, "predicted"), (33, "exact")])
def test_the_times_of_both_devices_are_kept_apart(batch: int, goes: str) -> None:
    """Of each layer those of one way: the GPU's, the CPU's and the wait between them, worked out without the tables."""
    model = small_model(layers=4, d_ff=1024)
    for groups in (20, 64):
        made = make_plan(with_groups(request_of(model, batch=batch), groups))
        request = made.request
        orders = [request.profile.order(layer) for layer in range(4)]
        wanted = cost.expected(request.profile, orders, model.config, model.selected, batch, GROUP)
        hardware, ways = request.hardware, cost.WAYS[goes][:1]
        split = [
            cost.split_time(
                hardware.cpu, hardware.gpu, wanted, model, way, 1e-6 * hardware.sync_us,
                cost.dense_layers(request.profile, model, way, batch),
            )
            for way in ways
        ]  # fmt: skip
        for layer, found in enumerate(made.choice.layer_seconds):
            k = made.choice.gpu[layer]
            each = [[float(part[layer, k]) for part in (one.gpu, one.cpu, one.sync)] for one in split]
            assert [found[name] for name in ("gpu", "cpu", "sync")] in each
            assert found["gpu"] > 0 if k else found["gpu"] == 0


# ---------------------------------------------------------------- budgets


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.integers(0, MIB), st.integers(370 * MIB, 430 * MIB)),
    st.integers(80 * MIB, 140 * MIB),
    st.sampled_from(["all", "exact", "predicted"]),
    st.sampled_from(POLICIES),
    st.sampled_from([200, 256]),
    st.sampled_from(["f16", "q8_0", "f32"]),
    st.integers(1, 3),
)
def test_no_budget_is_exceeded_by_a_byte(
    vram: int, ram: int, selector: str, policy: str, d_ff: int, kv_type: str, batch: int
) -> None:
    request = request_of(
        small_model(d_ff=d_ff), None, machine(GIB, reserved=2 * MIB), vram=vram, ram=ram, selector=selector,
        policy=policy, kv_type=kv_type, batch=batch,
    )  # fmt: skip
    try:
        made = make_plan(request)
    except RequestError as error:
        assert re.search(r"needs .* of RAM.*: give --ram ", str(error))
        return
    check(made)


def test_the_estimate_of_the_dense_model_is_beside() -> None:
    request = request_of(small_model())
    dense = make_plan(replace(request, selector="all"))
    assert dense.dense_tok_s == 1 / dense.choice.seconds
    estimate = make_plan(request).document().predicted
    assert estimate.dense_tok_s == dense.dense_tok_s != estimate.decode_tok_s


def test_the_order_of_claim() -> None:
    """Attention with its cache and predictor, head, neurons: each moves in when the VRAM for all before it is there."""
    request = request_of(small_model(d_ff=200), hardware=machine(4 * GIB, sync_us=3))
    attention, head = dense_on_gpu(request, False), dense_on_gpu(request, True)
    model, layers = request.model, 3
    group = GROUP * model.gpu_neuron
    for vram, expected in [
        (attention - 1, (2, False, None)),
        (attention, (3, False, 0)),
        (head - 1, (3, False, None)),
        (head, (3, True, 0)),
        (head + group - 1, (3, True, 0)),
        (head + group, (3, True, 1)),
        (head + 99 * group, (3, True, 12)),
    ]:
        claims = replace(request, vram=vram).claims()
        made = make_plan(replace(request, vram=vram, policy="greedy"))
        assert (claims.gpu_layers, claims.gpu_head) == expected[:2], vram
        if expected[2] is not None:
            assert min(sum(made.choice.gpu), 12) == expected[2], vram
        norms = claims.gpu["norms"] + claims.cpu["norms"]
        kv = claims.gpu["kv"] + claims.cpu["kv"]
        assert norms == model.vectors + model.rotation_bytes and kv == model.kv_bytes("f16", 64, 1)
        assert claims.gpu["predictor"] == claims.gpu_layers * model.gpu_predictor(model.predictors[0])
        rest = model.predictors[claims.gpu_layers :]
        assert claims.cpu["predictor"] == sum(one.panels for pair in rest for one in pair)
        if rest:  # what the CPU has as a whole asks them, too, and that takes its time
            made = make_plan(replace(request, vram=vram, insist=True))
            cpu = request.hardware.cpu
            other = made.choice.layer_seconds[-1]["other"]
            attention = cost.attention_seconds(cpu, model, layers - 1, "f16", request.past, 1, True)
            assert other == pytest.approx(attention + cost.matrix_seconds(cpu, model.predictors[layers - 1], True))
        check(made)
    nothing = make_plan(replace(request, vram=request.model.kv_bytes("f16", 64, 1, slice(1))))
    assert not nothing.bytes["gpu"] and "driver, scratch and the attention of one layer" in nothing.reasons[0]
    nothing = make_plan(replace(nothing.request, selector="all"))
    assert not nothing.bytes["gpu"] and nothing.reasons[0].endswith("driver, scratch and one layer")


def test_what_groups_of_bundles_share_is_on_both_sides() -> None:
    """Scales of Q4_0X32: once for every group of 32 neurons that has one there, however few these are."""
    config = small_model(layers=2, d_ff=512).config
    model = described_model(config, "q4_0", "small", 0.0)
    assert model.bundle.shared_bytes == 2 * 512 == model.gpu_shared
    request = with_groups(request_of(model, hardware=machine(4 * GIB, sync_us=3), policy="greedy"), 5)
    made = make_plan(request)
    check(made)
    assert sum(made.choice.gpu) == 5
    sides: dict[Tier, int] = dict.fromkeys(Tier, 0)
    for layer in range(2):
        parts = made.placement(request.profile).split_by_tier(layer)
        for tier in (Tier.GPU, Tier.CPU):
            sides[tier] += len({int(neuron) // 32 for neuron in parts[tier]}) * 1024
    neurons = {tier: sum(layer[tier] for layer in made.neurons) for tier in Tier}
    assert made.bytes["gpu"]["ffn"] == neurons[Tier.GPU] * model.gpu_neuron + sides[Tier.GPU]
    assert made.bytes["cpu"]["ffn"] == neurons[Tier.CPU] * model.bundle.pitch + sides[Tier.CPU]
    assert sum(sides.values()) > 2 * 16 * 1024, "more than if each scale were in one place"


def test_the_types_of_a_cache_on_a_gpu() -> None:
    """8 bits and a scale of 16 for 32 values: 1.0625 bytes, for heads of whole blocks."""
    model = small_model()
    values = model.config.n_layers * 2 * 64 * 8 * 64  # keys and values of two pages, 8 heads of 64
    for kv_type, each in (("f16", 2), ("f32", 4), ("q8_0", 1.0625)):
        assert model.gpu_kv_bytes(kv_type, 33, 1) == values * each
    made = make_plan(request_of(small_model(), kv_type="q8_0"))
    assert made.claims.gpu_layers == small_model().config.n_layers
    assert made.claims.gpu["kv"] == small_model().gpu_kv_bytes("q8_0", 64, 1)


def test_insisting_on_a_gpu_that_is_slow() -> None:
    """A stand-in takes part as far as its memory goes, for trying things; a plan for speed leaves it alone."""
    slow = machine(4 * GIB, sync_us=1e5)
    slow = replace(slow, gpu=replace(slow.gpu, dense_gb_s={"other": 0.1}, bundle_gb_s=dict.fromkeys(RATED_ROWS, 0.1)))
    request = with_groups(request_of(small_model(), hardware=slow), 3)
    assert not make_plan(request).claims.gpu_layers
    assert not sum(make_plan(replace(request, policy="greedy")).choice.gpu)
    made = make_plan(replace(request, policy="greedy", insist=True))
    assert made.claims.gpu_head and sum(made.choice.gpu) == 3
    check(made)


def test_a_step_has_the_fixed_times_of_both_devices() -> None:
    request = request_of(small_model(), hardware=machine(4 * GIB), policy="greedy", insist=True)
    longer = replace(request.hardware, gpu=replace(request.hardware.gpu, step_us=250.0))
    made, later = make_plan(request), make_plan(replace(request, hardware=longer))
    assert later.choice.seconds - made.choice.seconds == pytest.approx(250e-6)
    assert later.choice.layer_seconds == made.choice.layer_seconds


def test_neurons_do_not_wait_for_attention_beside_them() -> None:
    model = small_model()
    hardware = machine(4 * GIB, sync_us=0.0)
    beside = described_model(changed(model.config, parallel=True, shared_norm=True), "f16", "small", 0.07)
    plans = [
        make_plan(with_groups(request_of(one, hardware=hardware), 3, policy="greedy", insist=True))
        for one in (model, beside)
    ]
    assert plans[0].choice.gpu == plans[1].choice.gpu and sum(plans[0].choice.gpu) == 3
    seconds = [made.choice.layer_seconds for made in plans]
    for behind, at_once in zip(*seconds, strict=True):
        attention = behind["other"] - at_once["other"]
        assert attention > at_once["other"] > 0  # which is the predictor's
        assert at_once["gpu"] - behind["gpu"] == pytest.approx(attention)
        assert all(at_once[name] == behind[name] for name in ("cpu", "sync", "disk"))
    check(plans[1])


def test_whole_layers() -> None:
    """Attention, FFN and cache of the layers on the GPU, to the byte; the head once all of them are there."""
    model, hardware = small_model(predictors=False), machine(4 * GIB, reserved=MIB)
    work = budget.Workload("f16", context=64, chunk=32, requests=4)
    layer = (
        sum(one.stored for one in (*model.attention[0], *model.ffn[0]))
        + model.gpu_kv_bytes("f16", 64, 1, slice(1))
        + model.layer_vectors(dense=True)
        + model.gpu_scratch(32, 4, 1)
        - model.gpu_scratch(32, 4, 0)
    )
    fixed = MIB + model.gpu_scratch(32, 4, 0) + model.rotation_bytes
    head = model.head.stored + model.end_vectors
    for vram, expected in [
        (fixed + layer - 1, (0, False)),
        (fixed + layer, (1, False)),
        (fixed + 3 * layer - 1, (2, False)),
        (fixed + 3 * layer + head - 1, (3, False)),
        (fixed + 3 * layer + head, (3, True)),
        (4 * GIB, (3, True)),
        (0, (0, False)),
    ]:
        assert budget.layers_that_fit(model, hardware, work, vram, dense=True) == expected
    assert budget.layers_that_fit(model, replace(hardware, gpu=None), work, GIB, dense=True) == (0, False)


def test_ram_beside_whole_layers() -> None:
    """Each layer that goes to the GPU takes its matrices and its cache out of RAM; a GPU's libraries come in once."""
    model = small_model(predictors=False)
    work = budget.Workload("f16", context=64, chunk=32, requests=4)

    def beside(layers: int, head: bool = False) -> int:
        return sum(budget.in_ram(model, work, budget.Division(layers, head, host_bytes=7 * MIB)).values())

    alone = make_plan(request_of(model, selector="all", vram=0, requests=4))
    assert alone.claims.panels and beside(0) == sum(alone.bytes["cpu"].values())
    layer = sum(one.panels for one in (*model.attention[0], *model.ffn[0])) + model.kv_bytes("f16", 64, 1, slice(1))
    layer += model.layer_vectors(dense=True) - 2 * 8 * model.config.widest_ffn
    assert beside(1) - beside(2) == beside(2) - beside(3) == layer
    d_model, vocab = model.config.d_model, model.config.vocab_size
    on_cpu = step_bytes(32, d_model, vocab) + model.scratch_bytes(32, 4) - model.scratch_bytes(32, 0)
    steps = step_bytes(32, d_model, vocab, 4, ahead=True) - on_cpu
    assert beside(3) - beside(3, True) + steps == model.head.panels + model.end_vectors
    assert beside(0) - beside(1) < layer - 7 * MIB


def test_more_room_is_never_slower_and_helps_keep_their_word() -> None:
    """Every budget that a plan suggests does what it says, and one byte less does not."""
    request = request_of(
        small_model(d_ff=256), hardware=machine(4 * GIB, ram=100 * MIB, sync_us=3), vram=0, policy="greedy"
    )
    base = make_plan(replace(request, ram=None))
    assert base.fits
    beside = with_groups(request, 2, vram=None)
    room = make_plan(beside)
    tight = make_plan(replace(beside, ram=sum(room.claims.cpu.values()) + 2 * GROUP * request.model.bundle.stride))
    assert room.fits and not tight.fits and tight.choice.seconds > room.choice.seconds
    assert not tight.loads and "of neurons fit into neither memory, and a load is refused" in " ".join(tight.reasons)
    instead = make_plan(replace(tight.request, chosen=True))
    assert not instead.loads and "and a load places whole layers instead" in " ".join(instead.reasons)
    (more,) = [one for one in tight.helps if one.flag == "--ram"]
    assert make_plan(replace(beside, ram=more.bytes)).fits and not make_plan(replace(beside, ram=more.bytes - 1)).fits
    small = make_plan(replace(request, vram=3 * MIB, ram=None))
    assert {one.flag for one in small.helps} == {"--vram"} and len(small.helps) == 5
    for one in small.helps:
        mass = {"50": 0.5, "80": 0.8, "all": 1.0}
        for vram in (one.bytes, one.bytes - 1):
            found = make_plan(replace(request, vram=vram))
            claims, reached = found.claims, vram == one.bytes
            what = one.what
            if what.startswith("attention"):
                assert (claims.gpu_layers == 3) is reached
            elif what.startswith("the output head"):
                assert claims.gpu_head is reached
            else:
                share = next(share for word, share in mass.items() if word in what)
                assert (found.choice.mass_on_gpu >= share - 1e-12) is reached
    last = 1e9
    for vram in (0, *range(370 * MIB, 430 * MIB, 4 * MIB)):
        seconds = make_plan(replace(request, vram=vram, ram=None, policy="time")).choice.seconds
        assert seconds <= last * (1 + 1e-12)
        last = seconds


def test_budgets_that_are_too_small_say_the_minimum() -> None:
    request = with_groups(request_of(small_model(), hardware=machine(4 * GIB, sync_us=3), policy="greedy"), 1)
    dense = sum(request.claims().cpu.values())
    assert not make_plan(replace(request, ram=dense)).fits
    with pytest.raises(
        RequestError, match=r"small needs at least .* of RAM \+ VRAM for the dense part: give --ram "
    ) as error:
        make_plan(replace(request, ram=dense - 1))
    assert budget.gib(dense) in str(error.value) and "\n" not in str(error.value)
    alone = replace(request, vram=0)
    least = budget.least_ram(alone.model, alone.workload)
    assert make_plan(replace(alone, ram=least)).fits, "so small a model is not read from disk"
    with pytest.raises(RequestError, match=f"give --ram {budget.gib(least)},"):
        make_plan(replace(alone, ram=least - 1))


def test_budgets_beyond_the_machine() -> None:
    request = request_of(small_model(), hardware=machine(8 * GIB, ram=16 * GIB))
    with pytest.raises(RequestError, match=r"--vram 9GiB, but NVIDIA .* has 8GiB"):
        make_plan(replace(request, vram=9 * GIB))
    with pytest.raises(RequestError, match=r"--ram 17GiB, but pc-low has 16GiB"):
        make_plan(replace(request, ram=17 * GIB))
    alone = replace(request, hardware=replace(request.hardware, gpu=None, sync_us=0.0, copy_gb_s=0.0))
    assert make_plan(alone).bytes["gpu"] == {} and make_plan(replace(alone, vram=0)).bytes["gpu"] == {}
    unused = make_plan(replace(alone, vram=GIB))
    assert unused.bytes["gpu"] == {} and any("1GiB of VRAM stay unused" in reason for reason in unused.reasons)


def test_without_a_disk_everything_must_fit() -> None:
    request = with_groups(request_of(small_model(), hardware=machine(4 * GIB, sync_us=3, disk=False)), 1)
    whole = make_plan(request)
    held = sum(whole.bytes["cpu"].values())
    assert whole.claims.gpu_layers and make_plan(replace(request, ram=held + GROUP * request.model.bundle.stride)).fits
    with pytest.raises(RequestError, match=r"needs \S+KiB more of RAM or VRAM, and pc-low describes no disk"):
        make_plan(replace(request, policy="greedy", ram=held - GROUP * request.model.bundle.pitch))


def test_dense_matrices_are_beside_the_bundles() -> None:
    request = request_of(small_model(predictors=False), vram=0)
    whole = make_plan(request)
    assert {"panels", "ffn"} <= whole.bytes["cpu"].keys()
    dense = make_plan(replace(request, selector="all"))
    assert "ffn" not in dense.bytes["cpu"] and dense.bytes["cpu"]["panels"] == whole.bytes["cpu"]["panels"]
    assert dense.neurons[0] == {Tier.GPU: 0, Tier.CPU: 256, Tier.DISK: 0}
    assert "panels" not in make_plan(replace(request, vram=None)).bytes["cpu"], "nor with a GPU"


def test_a_gpu_that_would_only_slow_things_down_is_left_alone() -> None:
    request = request_of(small_model(), hardware=machine(4 * GIB, sync_us=1e5))
    tight = with_groups(request, 1)
    made = make_plan(tight)
    assert made.claims.gpu_layers == 0 and "the CPU alone is faster" in made.reasons[0]
    assert not any("--vram" in line for line in made.reasons)
    check(made)
    assert make_plan(replace(tight, policy="ilp")).claims.gpu_layers == 3, "the paper's program does not ask"


def test_the_cpu_alone_without_room_for_bundles_computes_every_neuron() -> None:
    request = request_of(small_model(predictors=False), hardware=machine(4 * GIB, sync_us=1e5), chosen=True)
    tight = with_groups(request, 1)
    dense = replace(tight, selector="all", chosen=False)
    tight, dense = (replace(one, ram=budget.least_ram(dense.model, dense.workload)) for one in (tight, dense))
    made, alone = make_plan(tight), make_plan(replace(dense, vram=0))
    assert "the CPU alone is faster" in made.reasons[0] and "every neuron is computed" in made.reasons[1]
    document, other = made.document(), alone.document()
    assert (document.selector, document.key) == ("all", tight.key) and other.selector == "all"
    assert document.predicted.dense_tok_s == document.predicted.decode_tok_s == other.predicted.dense_tok_s
    assert document.bytes == other.bytes


def test_requests_that_do_not_go_together() -> None:
    with pytest.raises(RequestError, match="needs a predictor"):
        request_of(small_model(predictors=False), selector="predicted")
    with pytest.raises(RequestError, match="--context 513: small takes 1 to 512 tokens"):
        request_of(small_model(), context=513)


def test_a_profile_in_which_nothing_fires() -> None:
    silent = profile_of(3, 256, most=0.0)
    for policy in POLICIES:
        made = make_plan(with_groups(request_of(small_model(), silent), 3, policy=policy))
        assert made.choice.mass_on_gpu == 0
        vram, ram = budget.budgets(made.request.hardware, None, None)
        assert sum(made.bytes["gpu"].values()) <= vram and sum(made.bytes["cpu"].values()) <= ram
        json.dumps(made.document().json(), allow_nan=False)


# ---------------------------------------------------------------- placements


def test_placement_is_hottest_first() -> None:
    request = with_groups(request_of(small_model(d_ff=200)), 5, policy="ilp")
    made = make_plan(request)
    placement = made.placement(request.profile)
    for layer in range(3):
        counts, parts = request.profile.counts[layer], placement.split_by_tier(layer)
        if len(parts[Tier.GPU]) and len(parts[Tier.CPU]):
            assert counts[parts[Tier.GPU]].min() >= counts[parts[Tier.CPU]].max()
    other = profile_of(3, 200, seed=9)
    with pytest.raises(AssertionError):
        made.placement(other)


def test_random_is_the_same_for_a_seed() -> None:
    request = with_groups(request_of(small_model(d_ff=256)), 5, policy="random")
    first, again = make_plan(request), make_plan(replace(request))
    other = make_plan(replace(request, seed=1))

    def gpu(made: Plan) -> list[list[int]]:
        return [made.placement(request.profile).split_by_tier(layer)[Tier.GPU].tolist() for layer in range(3)]

    assert gpu(first) == gpu(again) != gpu(other)
    assert sum(first.choice.gpu) == 5


def test_placements_with_an_order() -> None:
    order = np.array([3, 1, 4, 0, 2], np.int32)
    placement = NeuronPlacement((5,), 2, (np.array([0, 1, 2], np.int8),), (order,))
    parts = placement.split_by_tier(0)
    assert {tier: neurons.tolist() for tier, neurons in parts.items()} == {0: [1, 3], 1: [0, 4], 2: [2]}
    for wrong in (order[:4], order.astype(np.int64), np.array([0, 0, 1, 2, 3], np.int32)):
        with pytest.raises(AssertionError):
            NeuronPlacement((5,), 2, (np.array([0, 1, 2], np.int8),), (wrong,))
    with pytest.raises(AssertionError):
        NeuronPlacement((5,), 2, (np.array([0, 1, 2], np.int8),), (order, order))


def test_the_same_request_gives_the_same_plan() -> None:
    request = with_groups(request_of(small_model(d_ff=256)), 5)

    def document() -> dict[str, Any]:
        found = make_plan(replace(request)).document().json()
        found.pop("solve_s")
        for other in found["predicted"]["policies"].values():
            other.pop("solve_s")
        return found

    assert document() == document()


# ---------------------------------------------------------------- keys and files


CHANGES: dict[str, Any] = {
    "vram": 10 * MIB, "ram": GIB, "context": 63, "batch": 2, "kv_type": "q8_0", "selector": "exact", "policy": "ilp",
    "chunk": 31, "seed": 1, "time_limit": 1.0, "requests": 3, "insist": True, "frequencies": {0: np.ones(4)},
    "cached": True, "hits": {0: np.ones(4)}, "chosen": True, "scratch": MIB,
    "moves": True, "undo_tokens": 8, "drafts": True, "vrams": (GIB,), "spread": True, "for_others": MIB,
}  # fmt: skip


def test_the_key_depends_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(small_model(d_ff=256))
    others = {"model", "profile", "profiled", "hardware"}
    assert {field.name for field in dataclasses.fields(request)} == others | set(CHANGES)
    changed = [replace(request, **{name: value}) for name, value in CHANGES.items()]
    changed.append(replace(request, profile=profile_of(3, 256, seed=9)))
    changed.append(replace(request, profiled=False))
    changed.append(replace(request, hardware=replace(request.hardware, sync_us=31.0)))
    changed.append(replace(request, model=replace(request.model, fingerprint="another")))
    changed.append(replace(request, model=replace(request.model, selected=(2.0,) * 3)))
    keys = {one.key for one in (request, *changed)}
    assert len(keys) == len(changed) + 1 and all(len(key) == 16 for key in keys)
    assert replace(request).key == request.key
    alone = replace(request, hardware=replace(request.hardware, gpu=None))
    assert replace(alone, insist=True).key == alone.key, "there is no GPU that it could be of"
    monkeypatch.setattr(plan, "__version__", "9.9.9")
    assert replace(request).key not in keys


def test_a_plan_is_kept_and_read_again(tmp_path: Path) -> None:
    for policy in POLICIES:
        request = with_groups(request_of(small_model(d_ff=256)), 5, policy=policy)
        assert kept_document(tmp_path, request) is None
        made = make_plan(request)
        path = save_plan(made, tmp_path)
        assert path.name == f"plan-{request.key}.json" and json.loads(path.read_text())["path"] == str(path)
        assert kept_document(tmp_path, replace(request)) == made.document(path)
        another = replace(request, vram=request.hardware.gpu.memory_bytes - 1)
        assert kept_document(tmp_path, another) is None, "another budget"
    assert not list(tmp_path.glob("*.part"))


def hostile() -> list[Any]:
    def set_at(*way: Any) -> Any:
        def change(document: dict[str, Any]) -> None:
            inner: Any = document
            for name in way[:-2]:
                inner = inner[name]
            inner[way[-2]] = way[-1]

        return pytest.param(change, id="/".join(str(one)[:20] for one in way))

    return [
        set_at("format", 2), set_at("kind", "hardware"), set_at("key", "0" * 16), set_at("gpu_layers", -1),
        set_at("gpu_layers", 10**30), set_at("gpu_layers", None), set_at("layers", []), set_at("layers", 7),
        set_at("layers", 0, None), set_at("layers", 0, "gpu", 1.0), set_at("layers", 0, "gpu", True),
        set_at("layers", 0, "gpu", "1"), set_at("layers", 0, "cpu", -1), set_at("layers", 0, "seconds", 1.0),
        set_at("layers", 0, "seconds", "gpu", -1.0), set_at("layers", 0, "seconds", "gpu", "x"),
        set_at("layers", 0, "mass_on_gpu", None), set_at("predicted", {}),
        set_at("predicted", "ms_per_token", 1e999), set_at("mass_on_gpu", [0]), set_at("optimal", "yes"),
        set_at("optimal", 1), set_at("solve_s", {}),
    ]  # fmt: skip


@pytest.mark.parametrize("change", hostile())
def test_a_plan_that_somebody_changed_is_refused(tmp_path: Path, change: Any) -> None:
    request = with_groups(request_of(small_model(d_ff=256)), 5, policy="ilp")
    path = save_plan(make_plan(request), tmp_path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"plan-[0-9a-f]{16}\.json") as error:
        kept_document(tmp_path, request)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"7", b"[" * 100_000, b" " * (1 << 24) + b"{}"])
def test_a_plan_that_is_none_is_refused(tmp_path: Path, raw: bytes) -> None:
    request = request_of(small_model())
    plan.plan_path(tmp_path, request).write_bytes(raw)
    with pytest.raises(ModelError, match="plan-"):
        kept_document(tmp_path, request)


def test_a_plan_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = make_plan(request_of(small_model()))
    with pytest.raises(PowerInferError, match="--prepared PATH chooses another folder"):
        save_plan(made, tmp_path / "file")


# ---------------------------------------------------------------- power laws


@pytest.mark.parametrize("name", FAMILIES)
def test_assumed_profiles_have_the_shares_they_are_given(name: str) -> None:
    law = FAMILIES[name]
    profile = assumed_profile(law, (8192,) * 48)
    assert profile.active_fraction() == pytest.approx(law.active, rel=1e-3)
    assert np.mean([profile.hot_share(layer) for layer in range(48)]) == pytest.approx(law.hot, abs=0.003)
    assert all((np.diff(counts) <= 0).all() for counts in profile.counts)
    if law.ratio > 1:
        assert profile.active_fraction(47) / profile.active_fraction(0) == pytest.approx(law.ratio, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        ("smallthinker-21b", "smallthinker"),
        ("nemotron-3-nano-30b-a3b", "nemotron-h"),
        ("bamboo-7b", "drelu"),
        ("opt-6.7b", "opt"),
        ("qwen3-8b", "swiglu"),
        ("qwen3-30b-a3b", "swiglu"),
    ],
)
def test_the_law_of_a_shape(shape: str, family: str) -> None:
    assert find_shape(shape).law == FAMILIES[family]


@pytest.mark.parametrize(("name", "layers", "share"), [("opt", 48, 0.17), ("reglu-70b", 80, 0.26)])
def test_assumed_profiles_have_the_papers_share_of_the_model(name: str, layers: int, share: float) -> None:
    assert assumed_profile(FAMILIES[name], (8192,) * layers).hot_share() == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("law", [Law(0.5, 0.1), Law(0.1, 0.9), Law(0.9, 0.5)])
def test_shares_that_no_power_law_has(law: Law) -> None:
    with pytest.raises(RequestError, match="--hot-share"):
        fit_skew(law, 4)
    with pytest.raises(RequestError, match="--active"):
        fit_skew(Law(0.9, 0.7, 74), 4)


# ---------------------------------------------------------------- the command


def run_plan(*args: str) -> dict[str, Any]:
    done = powerinfer("plan", *args, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return dict(json.loads(done.stdout))


KEYS = {
    "fits", "solve_s", "mass_on_gpu", "optimal", "policy", "bytes", "layers", "predicted", "reasons", "key", "path",
    "hardware", "assumed", "helps", "work_on_gpu", "activations",
}  # fmt: skip


def test_the_command_for_a_shape() -> None:
    document = run_plan("--shape", "opt-175b", "--dtype", "f16", "--hardware", "pc-high", "--policy", "ilp")
    assert document.keys() >= KEYS and document["path"] is None
    assert document["policy"] == "ilp" and document["optimal"] is True and document["solve_s"] < 10
    assert document["hardware"] == "pc-high" and document["model"] == "opt-175b" and len(document["layers"]) == 96
    assert set(document["predicted"]["policies"]) == set(POLICIES)
    assert document["budgets"] == {"vram": 24 * GIB, "ram": 188 * GIB}
    assert document["fits"] is False, "350 GB do not fit into 24 and 188 GiB"
    for tier, limit in (("gpu", 24), ("cpu", 188)):
        assert limit - 1 < sum(document["bytes"][tier].values()) / GIB <= limit
    of_layer = {"layer", "gpu", "cpu", "disk", "mass_on_gpu", "seconds", "experts", "experts_in_ram", "inside"}
    assert all(set(one) == of_layer for one in document["layers"])


def test_the_command_says_what_is_where() -> None:
    flags = ("--shape", "llama-7b", "--dtype", "q4_0", "--hardware", "pc-low", "--vram", "4GiB")
    shown = powerinfer("plan", *flags, "--json")
    assert shown.returncode == 0, shown.stderr
    helps = json.loads(shown.stdout.splitlines()[-1])["helps"]
    named = re.findall(r"from (--\w+) ([^\s,]+)", shown.stderr)
    assert [flag for flag, _ in named] == [one["flag"] for one in helps]
    assert all(read_size(size) >= one["bytes"] for (_, size), one in zip(named, helps, strict=True)), "it is enough"
    for text in ("KV cache", "share of activations", "greedy", "tokens/s", "assumed: ", "from --vram"):
        assert text in shown.stderr, shown.stderr


def test_the_command_for_a_model(tmp_path: Path) -> None:
    path = give_profile(give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf"))))
    save(machine(4 * GIB), tmp_path / "pc.json")
    common = ("-m", str(path), "--hardware", str(tmp_path / "pc.json"), "--context", "64")
    dry = run_plan(*common, "--dry-run")
    assert dry["path"] is None and not list(tmp_path.glob("m.gguf.powerinfer/plan-*"))
    kept = run_plan(*common)
    folder = tmp_path / "m.gguf.powerinfer"
    assert kept["path"] == str(folder / f"plan-{kept['key']}.json") and Path(kept["path"]).is_file()
    assert kept["selector"] == "exact" and kept["key"] == dry["key"]
    other = run_plan(*common, "--vram", "3GiB", "--selector", "predicted", "--policy", "ilp")
    assert other["key"] != kept["key"] and other["bytes"]["gpu"]["predictor"] > 0
    assert len(list(folder.glob("plan-*.json"))) == 2
    many = run_plan(*common, "--max-batch", "600")
    assert many["key"] != kept["key"] and many["bytes"]["cpu"]["scratch"] > kept["bytes"]["cpu"]["scratch"]
    elsewhere = run_plan(*common, "--hot-share", "0.3", "--active", "0.1", "--prepared", str(tmp_path / "other"))
    assert Path(elsewhere["path"]).parent == tmp_path / "other" and "30 %" in elsewhere["assumed"][0]
    assert (elsewhere["quantize"], elsewhere["weight_type"]) == (None, "F32")
    again = run_plan(
        *common, "--hot-share", "0.3", "--active", "0.1", "--prepared", str(tmp_path / "other"), "--quantize", "q8_0"
    )
    assert (again["quantize"], again["weight_type"]) == ("q8_0", "Q8_0") and again["key"] != elsewhere["key"]
    assert again["bytes"]["cpu"] != elsewhere["bytes"]["cpu"] or again["bytes"]["gpu"] != elsewhere["bytes"]["gpu"]


def test_the_command_reads_no_weights(tmp_path: Path) -> None:
    """Of a shape nothing but numpy and HiGHS is needed; of a model the file's weights are not touched."""
    code = (
        "import sys; from powerinfer.cli.main import main; "
        "main(['plan', '--shape', 'opt-6.7b', '--hardware', 'pc-low']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--shape", "opt-13b", "-m", "x"], "not both"),
        (["--shape", "nothing"], "no shape"),
        (["-m", "opt-175b"], "--shape opt-175b plans for it"),
        (["-m", "nemotron-nano-9B-v2"], "--shape nemotron-nano-9B-v2 plans for it"),
        (["-m", "opt-17b"], "no model opt-17b"),
        (["--shape", "opt-13b", "--hardware", "nothing"], "no machine"),
        (["--shape", "opt-13b", "--vram", "lots"], "size"),
        (["--shape", "opt-13b", "--vram", "-1GiB"], "vram"),
        (["--shape", "opt-13b", "--ram", "1e9"], "size"),
        (["--shape", "opt-13b", "--vram", "0", "--ram", "1GiB"], "even if its weights stay on disk"),
        (["--shape", "opt-13b", "--vram", "99GiB"], "has 11GiB"),
        (["--shape", "opt-13b", "--context", "4096"], "takes 1 to 2048"),
        (["--shape", "opt-13b", "--batch", "0"], "--batch"),
        (["--shape", "opt-13b", "--hot-share", "1.5"], "--hot-share"),
        (["--shape", "opt-13b", "--hot-share", "nan"], "--hot-share"),
        (["--shape", "opt-13b", "--hot-share", "0.001"], "--hot-share"),
        (["--shape", "opt-13b", "--active", "0"], "--active"),
        (["--shape", "opt-13b", "--time-limit", "nan"], "--time-limit"),
        (["--shape", "opt-13b", "--time-limit", "-1"], "--time-limit"),
        (["--shape", "opt-13b", "--chunk", "4"], "--chunk"),
        (["--shape", "opt-13b", "--prefill-chunk", "100000"], "--prefill-chunk"),
        (["--shape", "mistral-7b", "--selector", "exact"], "never exactly zero"),
        (["--shape", "opt-13b", "--batch", "60000"], "even if its weights stay on disk"),
    ],
)
def test_the_command_refuses(args: list[str], why: str) -> None:
    line = error_line(powerinfer("plan", *args, *([] if "--hardware" in args else ["--hardware", "pc-low"])))
    assert why in line


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    line = error_line(powerinfer("plan", "-m", str(path), "--hardware", "pc-low", "--context", "64"))
    assert "there is no profile of" in line and f"powerinfer profile -m {path}" in line and "--hot-share" in line
    line = error_line(powerinfer("plan", "-m", str(path), "--hardware", "pc-low", "--selector", "predicted"))
    assert "powerinfer train" in line
    silu = tiny_llama(tmp_path / "silu.gguf", "silu")
    document = run_plan("-m", str(silu), "--hardware", "pc-low")
    assert document["selector"] == "all" and "powerinfer profile" in document["assumed"][0]
    give_profile(silu)
    line = error_line(powerinfer("plan", "-m", str(silu), "--hardware", "pc-low", "--selector", "threshold"))
    assert "no thresholds" in line
    assert not run_plan("-m", str(silu), "--hardware", "pc-low")["assumed"]


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    one, other = give_profile(tiny_llama(tmp_path / "a.gguf")), tiny_llama(tmp_path / "b.gguf", "relu2")
    os.rename(f"{one}.powerinfer", f"{other}.powerinfer")
    line = error_line(powerinfer("plan", "-m", str(other), "--hardware", "pc-low", "--context", "64"))
    assert "made for another model" in line and "powerinfer profile" in line


@pytest.mark.model
def test_ram_is_what_the_process_takes(smollm2: Path) -> None:
    """Of SmolLM2, dense: the plan's RAM is never below the process's own, and not far above."""
    code = f"""
import dataclasses, json
from powerinfer import LLM, SamplingParams
from powerinfer.hardware.description import load
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.power_law import Law, assumed_profile
from powerinfer.placement.shapes import checkpoint_model
llm = LLM({str(smollm2)!r}, selector="all", context=1024, max_batch=1, threads=2)
llm.generate([[i % 5000 + 100 for i in range(1000)]], SamplingParams(max_tokens=16, temperature=0))
status = open("/proc/self/status").read()
model = checkpoint_model(llm.checkpoint)
profile = assumed_profile(Law(1.0, 0.8), model.config.ffn_sizes)
machine = dataclasses.replace(load("pc-low"), gpu=None)
made = make_plan(PlanRequest(model, profile, machine, context=1024, selector="all"))
rss = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([rss, sum(made.bytes["cpu"].values())]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured, planned = json.loads(done.stdout)
    assert 0.75 * planned < measured <= planned
