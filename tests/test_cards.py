"""Machines described by a card's name, and which of the catalogue's models suit them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.placement.cards_table import IN_RAM, PUBLISHED, compared
from powerinfer.cli.main import main
from powerinfer.errors import RequestError
from powerinfer.formats.catalogue import catalogue
from powerinfer.hardware import cards
from powerinfer.hardware.cards import described_machine, find_card, memory_rate, typical_card
from powerinfer.hardware.description import Hardware, load
from powerinfer.placement import estimates
from powerinfer.placement.estimates import (
    LARGER,
    Estimate,
    catalogue_shape,
    estimate,
    offer,
    offers,
    shape_of,
)
from powerinfer.placement.mixes import read_dtype
from powerinfer.placement.plan import PlanRequest
from powerinfer.placement.power_law import assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import described_model, file_bytes, find_shape, shape_names

GIB = 1 << 30
PC = described_machine("RTX 4060", 32 * GIB)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4060", "GeForce RTX 4060"), ("rtx4060", "GeForce RTX 4060"), ("4060", "GeForce RTX 4060"),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", "GeForce RTX 4060 Ti 16 GB"), ("4060ti", "GeForce RTX 4060 Ti 8 GB"),
        ("RTX 3060", "GeForce RTX 3060 12 GB"), ("3060 8gb", "GeForce RTX 3060 8 GB"),
        ("4090 Mobile", "GeForce RTX 4090 Laptop"), ("GeForce RTX 4070 Laptop GPU", "GeForce RTX 4070 Laptop"),
        ("4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER"), ("rtx a4000", "RTX A4000"),
        ("RTX 4000 Ada Generation", "RTX 4000 Ada"), ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
    ],
)  # fmt: skip
def test_cards_as_people_write_them(text: str, name: str) -> None:
    assert find_card(text)[0] == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("RX 7900 XTX", "NVIDIA's cards alone; --card none"), ("Intel Arc B580", "NVIDIA's cards alone"),
        ("RTX 2080 Ti", "too old .* capability is 7.5, and 8.0 is needed"), ("GTX 1660", "too old"),
        ("4060 12GB", "such a card has 8 GB"), ("4065", "did you mean GeForce RTX 4060"), ("", "no card ''"),
        ("a\x1b[2J" * 99, "no card"), ("8gb", "no card"),
    ],
)  # fmt: skip
def test_cards_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        find_card(text)
    assert "--card none" in str(caught.value) or "has 8 GB" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_every_card_is_found_by_its_own_name() -> None:
    for name, card in cards.cards().items():
        if card.supported:
            assert find_card(name) == (name, card), name
        bus = card.lanes * {3: 1, 4: 2, 5: 4}[card.pcie]
        assert 7 <= bus <= 64 and 90 <= card.gb_s <= 1800 and 4 <= card.gib <= 96
        assert card.supported == (card.capability >= 8)
    for name in cards.TYPICAL:
        assert cards.cards()[name].supported
    sizes = {size: cards.cards()[typical_card(size * GIB)].gib for size in (6, 8, 10, 16, 20, 80)}
    assert sizes == {6: 8, 8: 8, 10: 12, 16: 16, 20: 24, 80: 24}


def test_ram_by_its_kind() -> None:
    assert memory_rate("ddr4-3200") == ("2 channels of DDR4-3200", 51.2)
    assert memory_rate("DDR5-5600")[1] == 89.6 and memory_rate("ddr5-4800x8")[1] == 307.2
    assert memory_rate("lpddr5x-7500")[0] == "2 channels of LPDDR5X-7500"
    for text in ("ddr5", "5600", "ddr6-9000", "ddr5-99999", "ddr5-5600x99", "ddr4-3200x0", "\x1b"):
        with pytest.raises(RequestError, match="--memory"):
            memory_rate(text)


def test_a_described_machine_has_shares_of_the_published_figures() -> None:
    for name, share in (("RTX 4060", 272), ("RTX 5090", 1792), ("RTX 3060", 360)):
        machine = described_machine(name, 64 * GIB, "ddr5-4800")
        assert machine.gpu is not None and machine.disk is not None and not machine.key
        for device, most in ((machine.gpu, share), (machine.cpu, 76.8)):
            rates = (*device.dense_gb_s.values(), *device.head_gb_s.values(), *device.bundle_gb_s.values())
            assert all(0.3 * most < rate < 0.8 * most for rate in rates), "no more than its memory gives"
        assert machine.cpu.memory_bytes == 64 * GIB and machine.cpu.reserved_bytes == 4 * GIB
        assert "ddr5-4800" not in machine.assumed and "DDR5-4800" in machine.source
    base, alike = load("pc-8gb"), described_machine("RTX 5060", 16 * GIB, "ddr5-4800")
    assert base.gpu is not None and alike.gpu is not None
    assert alike.copy_gb_s == pytest.approx(base.copy_gb_s, rel=0.01)
    assert (alike.gpu.memory_bytes, alike.cpu.threads) == (base.gpu.memory_bytes, base.cpu.threads)
    old, new = described_machine("RTX 3060"), described_machine("RTX 4060")
    assert "ddr4-3200, as --memory does not say" in old.assumed and "ddr5-5600" in new.assumed
    few = described_machine("none", 8 * GIB, "ddr5-8000", threads=2)
    assert few.gpu is None and few.cpu.dense_gb_s["other"] == 2 * cards.CORE_GB_S
    assert few.cpu.reserved_bytes == 2 * GIB


# ---------------------------------------------------------------- estimates


def limit(name: str, dtype: str, machine: Hardware, gpu: bool) -> float:
    """Tokens a second if each byte of a dense model's matrices were read at the whole bandwidth."""
    model = described_model(find_shape(name).config, dtype)
    nbytes = sum(one.file for layer in (*model.attention, *model.ffn) for one in layer) + model.head.file
    device = machine.gpu if gpu else machine.cpu
    assert device is not None
    return 1e9 * device.dense_gb_s["other"] / (cards.DENSE if gpu else cards.CPU_DENSE) / nbytes


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.2-3b", "gemma-3-4b"])
def test_no_estimate_is_beyond_the_bandwidth(name: str) -> None:
    for machine, gpu in ((PC, True), (described_machine("none", 32 * GIB), False)):
        found = estimate(name, "Q4_K_M", machine)
        assert found is not None and found.place == ("gpu" if gpu else "ram")
        most = limit(name, "q4_k_m", machine, gpu)
        assert 0.5 * most < found.tok_s < 0.8 * most


@pytest.mark.parametrize(("shape", "dtype", "card", "ram", "tok_s"), [row[:5] for row in (*PUBLISHED, IN_RAM)])
def test_estimates_are_near_what_others_measured(shape: str, dtype: str, card: str, ram: int, tok_s: float) -> None:
    assert 0.8 < compared(shape, dtype, card, ram).tok_s / tok_s < 1.2


def test_where_models_go() -> None:
    def where(shape: str, machine: Hardware) -> tuple[str, str]:
        found = estimate(shape, "MXFP4" if "oss" in shape else "Q4_K_M", machine)
        assert found is not None
        return found.place, found.where

    assert where("qwen3-8b", PC) == ("gpu", "GPU")
    place, text = where("qwen3-14b", PC)
    assert place == "split" and text.endswith("of 40 layers GPU, RAM")
    place, text = where("qwen3-30b-a3b", PC)
    assert place == "split" and text.endswith("% of experts GPU, RAM")
    assert where("gpt-oss-120b", PC)[0] == "disk"
    assert where("qwen3-30b-a3b", described_machine("none", 32 * GIB)) == ("ram", "RAM")
    assert where("qwen3-8b", described_machine("none", 4 * GIB))[0] == "disk"
    assert estimate("llama-3.3-70b", "Q4_K_M", replace(described_machine("none", 8 * GIB), disk=None)) is None


def test_a_context_leaves_the_weights_where_they_are() -> None:
    """With it a model still fits; with twice as much it does not."""

    def fits(context: int) -> bool:
        model = described_model(find_shape("qwen3-8b").config, "q4_k_m")
        profile = assumed_profile(EVEN, model.config.ffn_sizes)
        claims = PlanRequest(model, profile, PC, context=context, chunk=512, requests=8, selector="all").claims()
        return claims.whole and claims.gpu_head and claims.gpu_layers == model.config.n_layers

    found = estimate("qwen3-8b", "Q4_K_M", PC)
    assert found is not None and found.context == 8192 and fits(8192) and not fits(16384)
    short = estimate("olmo-2-7b", "Q4_K_M", PC)
    assert short is not None and short.context == 4096, "what the model was made for"


def test_offers_of_the_catalogue() -> None:
    found = offers(PC)
    names = [one.name for one in found]
    known = {name for name, model in catalogue().items() if shape_of(name, model) is not None}
    assert set(names) == known and len(known) > 35
    well = [one.estimate.runs_well for one in found]
    assert well == sorted(well, reverse=True) and 0 < sum(well) < len(well)
    sizes = [one.model.parameters for one in found if one.estimate.runs_well]
    assert sizes == sorted(sizes, reverse=True)
    assert all(one.flags.split()[:2] == ["-m", one.full_name] for one in found)


def test_the_largest_download_that_is_fast_is_offered() -> None:
    name = "qwen3-coder-30b-a3b"
    model, found = catalogue()[name], {}
    shape = shape_of(name, model)
    assert shape is not None and [one.quantisation for one in model.downloads][:2] == ["Q4_K_M", "Q6_K"]
    for card in ("RTX 4060", "RTX 3090", "RTX 5090"):
        machine = described_machine(card, 64 * GIB)
        offered = offer(name, model, lambda dtype, machine=machine: estimate(shape, dtype, machine))
        assert offered is not None
        found[card] = offered
    assert found["RTX 4060"].full_name == found["RTX 3090"].full_name == name
    assert found["RTX 5090"].full_name == f"{name}:Q8_0", "which is all on it, with a prompt's working memory"
    assert [one.estimate.place for one in found.values()] == ["split", "gpu", "gpu"]
    assert found["RTX 5090"].estimate.tok_s >= LARGER


def test_shapes_of_the_catalogue() -> None:
    assert catalogue_shape("Qwen3-8B") == ("qwen3-8b", "Q4_K_M")
    assert catalogue_shape("qwen3-coder:Q6_K") == ("qwen3-30b-a3b", "Q6_K")
    assert catalogue_shape("qwen3:8b") == catalogue_shape("Qwen3-8B-Instruct") == ("qwen3-8b", "Q4_K_M")
    assert catalogue_shape("qwen3:8b-q8_0") == ("qwen3-8b", "q8_0")
    assert catalogue_shape("qwen/qwen3-8b-gguf:Q8_0") == ("qwen3-8b", "Q8_0")
    assert catalogue_shape("nothing") is None and catalogue_shape("nobody/nothing") is None
    assert all(model.shape is None or model.shape in shape_names() for model in catalogue().values())
    for model in catalogue().values():
        for download in model.downloads:
            assert file_bytes(find_shape("qwen3-0.6b").config, read_dtype(download.quantisation or "bf16"))


# ---------------------------------------------------------------- the command


FEW = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "gpt-oss-20b", "gpt-oss-120b", "qwen3.6-35b-a3b")


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of a few."""
    whole = catalogue()
    monkeypatch.setattr(estimates, "catalogue", lambda: {name: whole[name] for name in FEW})


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    assert main(["plan", *args, "--json"]) == 0
    said = capsys.readouterr()
    return dict(json.loads(said.out)), said.err


def test_the_catalogue_for_a_card(capsys: pytest.CaptureFixture[str], few_models: None) -> None:
    document, text = plan(capsys, "--card", "rtx 4060", "--ram", "32GiB")
    assert document["hardware"]["name"] == PC.name and document["context"] == 4096
    first = document["models"][0]
    assert first["runs_well"] and first["command"] == f"powerinfer chat -m {first['name']} -c {first['context']}"
    assert {"type", "gigabytes", "tok_s", "place", "where"} <= first.keys()
    assert Estimate(first["tok_s"], first["context"], first["place"], first["where"]).runs_well
    for part in ("272 GB/s", "assumed: ddr5-5600", "slower than most people read", f"{first['name']} "):
        assert part in text
    for one in document["models"]:
        (row,) = [line for line in text.splitlines() if line.endswith(f"  -m {one['name']} -c {one['context']}")]
        assert len(re.split("  +", row)) == 7, "columns stay apart"
    less, _ = plan(capsys, "--card", "4060", "--vram", "4GiB")
    assert {one["name"]: one["place"] for one in less["models"]}["qwen3-8b"] == "split"
    none, _ = plan(capsys, "--card", "4060", "--vram", "0", "--memory", "ddr4-2666")
    assert {one["place"] for one in none["models"]} <= {"ram", "disk"} and "DDR4-2666" in none["hardware"]["source"]


def test_a_model_of_the_catalogue_for_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """It need not be here; the plan says what the list says."""
    document, text = plan(capsys, "-m", "qwen3-14b", "--card", "RTX 4060", "--ram", "32GiB", "-c", "4096")
    found = estimate("qwen3-14b", "Q4_K_M", PC)
    assert found is not None and document["predicted"]["decode_tok_s"] == pytest.approx(found.tok_s)
    assert f"{document['gpu_layers']} of 40 layers are on the GPU as a whole" in text
    assert {"gpu", "cpu"} == {tier for tier, held in document["bytes"].items() if held}
    assert sum(document["bytes"]["gpu"].values()) <= 8 * GIB
    assert [layer["gpu"] > 0 for layer in document["layers"]] == [at < document["gpu_layers"] for at in range(40)]
    assert "is not on this machine" in text


def test_the_context_of_a_plan_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = plan(capsys, "-m", "qwen3-14b", "--card", "RTX 4060")
    assert "the model's longest, 40960 tokens" in text and "counts with 4096" in text
    _, text = plan(capsys, "-m", "qwen3-14b", "--card", "RTX 4060", "-c", "40960")
    assert "counts with" not in text


def test_a_plan_says_what_a_long_context_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one that nobody has asked for, whose cache takes the place of layers."""
    planned = []
    for more in ((), ("-c", "4096")):
        planned.append(plan(capsys, "--shape", "qwen3-8b", "--card", "RTX 4060", *more)[0])
    (told,) = (line for line in planned[0]["reasons"] if line.startswith("with -c 4096 "))
    rates = [each["predicted"]["decode_tok_s"] for each in planned]
    assert f": {rates[1]:.2f} tokens/s, not {rates[0]:.2f}, each in the middle" in told and rates[1] > rates[0]
    assert not any("with -c" in line for line in planned[1]["reasons"])


def test_a_plan_says_what_drafts_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """Those from elsewhere than a head, whose gain it does not predict, and which states are undone for."""
    rates, told = {}, {}
    for shape in ("qwen3.6-35b-a3b", "qwen3-8b"):
        for way in ("lookup", "off"):
            args = ("--shape", shape, "--card", "RTX 3060", "-c", "4096", "--speculate", way)
            document, _ = plan(capsys, *args)
            rates[shape, way] = document["predicted"]["decode_tok_s"]
            told[shape, way] = [line for line in document["reasons"] if "--speculate" in line]
    with_states, off = (rates["qwen3.6-35b-a3b", way] for way in ("lookup", "off"))
    (line,) = told["qwen3.6-35b-a3b", "lookup"]
    assert line.endswith(f", which makes {with_states:.2f} tokens/s of {off:.2f}") and with_states < off
    (line,) = told["qwen3-8b", "lookup"]
    assert line.endswith("depends on the text") and rates["qwen3-8b", "lookup"] == rates["qwen3-8b", "off"]
    assert told["qwen3.6-35b-a3b", "off"] == told["qwen3-8b", "off"] == []


@pytest.mark.parametrize(
    ("shape", "card", "goal"), [("qwen3-8b", "RTX 4060", "on the GPU"), ("qwen3-32b", "none", "on disk")]
)
def test_a_plan_names_contexts_that_fit(
    shape: str, card: str, goal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest with which the machine has the memory that it lacks, and the same with a smaller cache."""
    command = ["--shape", shape, "--card", card]
    (told,) = (line for line in plan(capsys, *command)[0]["reasons"] if " with -c " in line and goal in line)
    ways = re.findall(r"with ((?:-c \d+)?(?: ?--kv-type q8_0)?)", told)
    assert len(ways) == 2 and ways[1].endswith("q8_0")
    for way in ways:
        flags = way.split()
        assert plan(capsys, *command, *flags)[0]["helps"] == []
        if "-c" in flags:
            flags[1] = str(int(flags[1]) + 1024)
            more = plan(capsys, *command, *flags)[0]
            assert more["helps"] and any(goal in line for line in more["reasons"])


def test_a_plan_without_a_context_takes_one_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for model, ram, context in (("qwen3-8b", "8GiB", 20480), ("llama-4-scout", "96GiB", 327680)):
        pc = ("-m", model, "--card", "none", "--ram", ram)
        document, text = plan(capsys, *pc)
        longest = find_shape(model).config.context_length
        assert document["context"] == context < longest
        assert f"context: {context} tokens, since the model's {longest} do not fit and -c does not say" in text
        assert main(["plan", *pc, "-c", str(2 * context)]) == 2
        assert f"{model} needs " in capsys.readouterr().err
    assert main(["plan", "-m", "llama-4-scout", "--card", "none", "--ram", "100MiB"]) == 2
    assert "the model's longest, 10485760 tokens" in capsys.readouterr().err


def test_a_plan_that_skips_neurons_assumes_bundles(capsys: pytest.CaptureFixture[str]) -> None:
    document, text = plan(capsys, "-m", "nemotron-mini-4b", "--card", "RTX 4060", "-c", "4096")
    assert document["selector"] == "predicted" and "assumed: that bundles are packed (`powerinfer pack`)" in text
    document, text = plan(capsys, "-m", "nemotron-mini-4b", "--card", "RTX 4060", "-c", "4096", "--selector", "all")
    assert "bundles" not in "".join(document["assumed"])


def test_a_described_machine_is_as_large_as_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """Never refused because this machine, or the built-in one, is smaller."""
    shape = ("--shape", "qwen3-30b-a3b", "-c", "4096")
    document, _ = plan(capsys, *shape, "--hardware", "pc-8gb", "--ram", "32GiB")
    assert document["budgets"]["ram"] == 28 * GIB
    document, _ = plan(capsys, *shape, "--card", "4060", "--ram", "2000GiB")
    assert document["budgets"]["ram"] == 1996 * GIB
    document, text = plan(capsys, *shape, "--vram", "8GiB", "--ram", "32GiB")
    assert document["budgets"] == {"vram": 8 * GIB, "ram": 28 * GIB}
    assert "GeForce RTX 4060, as --card does not say" in text and "weights in Q4_K_M" in text
    document, _ = plan(capsys, "--shape", "gpt-oss-20b", "-c", "4096", "--card", "none")
    assert document["weight_type"] == "MXFP4" and document["gpu_layers"] == 0
    document, text = plan(capsys, *shape, "--card", "4060", "--dtype", "Q3_K_M")
    assert document["weight_type"] == "Q3_K" and "weights in" not in text


@pytest.mark.parametrize(
    "flags",
    [
        "--shape qwen3-30b-a3b --card none --ram 1GiB",  # from disk
        "--shape qwen3-30b-a3b --card none --ram 8GiB -c 40960 --max-batch 60000",  # of the system a whole share
        "--shape opt-13b --card 4060 --ram 1GiB",
    ],
)
def test_the_ram_that_an_error_asks_for_does(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The system's share of a described machine's RAM is counted in."""
    assert main(["plan", *flags.split()]) == 2
    asked = re.search(r"give --ram ([\d.]+\w+)", capsys.readouterr().err)
    assert asked
    document, _ = plan(capsys, *flags.split(), "--ram", asked[1])
    everything = [one["bytes"] for one in document["helps"] if one["what"] == "everything in memory"]
    if everything:
        document, _ = plan(capsys, *flags.split(), "--ram", f"{everything[0]}B")
        assert document["fits"]


def test_a_described_machine_has_the_threads_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Also more than this machine has cores."""
    shape = ("--shape", "qwen3-8b", "-c", "4096", "--card", "none", "--memory", "ddr5-8000")
    few, many = (plan(capsys, *shape, "--threads", str(n))[0]["predicted"]["decode_tok_s"] for n in (2, 64))
    assert many > 3 * few
    _, text = plan(capsys, *shape, "--threads", "64")
    assert "becomes" not in text and "64 cores" in text


def test_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    document, text = plan(capsys, "--names")
    assert document["shapes"] == shape_names() and "GeForce RTX 4060" in document["cards"]
    assert "GeForce RTX 2080 Ti" not in document["cards"] and "q4_k_m" in document["dtypes"]
    assert "--shape: " in text and "pc-8gb" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert all(any(name in line for line in text.splitlines()) for name in document["cards"]), "no name is broken"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--card", "4060", "--hardware", "pc-8gb"], "leave out --card, or --hardware"),
        (["--shape", "qwen3-8b", "--memory", "ddr5-5600"], "give --card NAME"),
        (["--card", "4060", "--memory", "ddr9-1"], "not a kind of RAM"),
        (["--card", "4060", "--vram", "12GiB"], "has 8GiB"),
        (["--card", "none", "--ram", "200MiB"], "holds no model of the catalogue"),
        (["--card", "none", "--ram", "0"], "more than 0"),
        (["--card", "4060", "--kv-type", "q8_0"], "--kv-type is for the plan of one model"),
        (["--card", "4060", "--active", "0.1"], "--active is for the plan of one model"),
        (["--card", "GTX 1080"], "cards before the RTX 30 series are too old"),
        (["--card", "radeon"], "NVIDIA's cards alone"),
        (["--card", "4060", "--threads", "-3"], "--threads must lie between 0 (automatic) and 1024"),
        (["--dtype", "q4_0", "--card", "4060"], "--shape NAME"),
        (["--shape", "qwen3-8b", "--dtype", "q4km", "--card", "4060"], "no type of weights"),
    ],
)
def test_what_the_command_refuses(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str], few_models: None
) -> None:
    assert main(["plan", *args]) == 2
    *before, line = capsys.readouterr().err.strip().splitlines()
    assert why in line and all(one.startswith("estimate: ") for one in before)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--ram", "9999TiB"], "but this machine has .*--card NAME"),
        (["--card", "None", "--vram", "8GiB"], "--card none has none"),
        (["--card", "4060", "--gpu", "none"], "--gpu is of this machine: leave it out"),
        (["--card", "4060", "--gpu", "cuda", "-m", "qwen3-8b"], "--gpu is of this machine: leave it out"),
        (["--hardware", "pc-8gb", "--gpu", "none", "--vram", "4GiB"], "--gpu none uses none"),
        (["--memory", "ddr5-5600"], "give --card NAME"),
        (["--hardware", "pc-8gb", "--card", "4060", "-m", "qwen3-8b"], "leave out --card, or --hardware"),
    ],
)
def test_contradictions_are_found_before_anything_is_downloaded(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powerinfer.hub.resolve_model", None)
    assert main(["plan", *args]) == 2
    assert re.search(why, capsys.readouterr().err)


def test_the_list_measures_nothing_and_needs_no_torch() -> None:
    code = (
        "import sys; from powerinfer.cli.main import main; from powerinfer.hardware import measure; "
        "measure.measured = None; from powerinfer.placement import estimates; whole = estimates.catalogue(); "
        "estimates.catalogue = lambda: {'qwen3-8b': whole['qwen3-8b']}; "
        "main(['plan', '--card', '4060']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'tokenizers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "qwen3-8b" in done.stderr + done.stdout
