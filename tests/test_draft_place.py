"""The place of a smaller model that drafts, by the plans of described PCs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from powerinfer.hardware.description import Hardware, load
from powerinfer.placement.draft_place import (
    DraftPlace,
    best_speed,
    bytes_beside_gpu,
    bytes_on_gpu,
    draft_seconds,
    place_drafts,
)
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import PlanRequest, make_plan

MOST = 4


def request(shape: str, hardware: Hardware, vram: int | None = None) -> PlanRequest:
    return replace(estimate_request(shape, "q4_k_m", hardware), vram=vram, requests=1)


def placed(answers: str, drafts: str, hardware: Hardware, vram: int | None = None) -> DraftPlace:
    return place_drafts(request(answers, hardware, vram), request(drafts, hardware), MOST)


@pytest.mark.parametrize("drafts", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"])
@pytest.mark.parametrize("machine", ["pc-low", "pc-8gb"])
def test_it_is_where_both_together_are_faster(drafts: str, machine: str) -> None:
    hardware = load(machine)
    answers, small = request("qwen3-32b", hardware), request(drafts, hardware)
    assert hardware.gpu is not None
    vram, nbytes = hardware.gpu.memory_bytes, bytes_on_gpu(small)
    place = placed("qwen3-32b", drafts, hardware)
    there, here = draft_seconds(small, nbytes)
    left = make_plan(replace(answers, vram=vram - nbytes))
    if not left.claims.gpu_layers:
        assert place.vram == 0 and "no room" in place.text
        return
    speeds = best_speed(left.choice.seconds, there, MOST), best_speed(make_plan(answers).choice.seconds, here, MOST)
    assert there < here and (place.vram > 0) == (speeds[0] > speeds[1])
    assert place.text.startswith("on the GPU" if place.vram else "in RAM")
    if place.vram:
        assert (place.vram, place.ram, place.left) == (nbytes, bytes_beside_gpu(small), vram - nbytes)
    else:
        assert place.left is None


def test_what_gives_way_counts() -> None:
    """Where layers that give way would be read from disk, or are all that the CPU would have, it is in RAM."""
    small = [placed("qwen3-32b", "qwen3-1.7b", load(machine)).vram > 0 for machine in ("pc-low", "pc-8gb")]
    assert small == [True, False]
    hardware = load("pc-high")
    assert [placed("qwen3-32b", drafts, hardware).vram > 0 for drafts in ("qwen3-0.6b", "qwen3-8b")] == [True, False]


def test_where_it_cannot_be() -> None:
    hardware = load("pc-low")
    small = request("qwen3-0.6b", hardware)
    for vram in (bytes_on_gpu(small), 1 << 28):
        assert "no room" in placed("qwen3-32b", "qwen3-0.6b", hardware, vram).text
    assert "experts" in placed("qwen3-32b", "qwen3-30b-a3b", hardware).text


def test_ram_that_does_not_hold_both() -> None:
    """Of a model that RAM holds only without the smaller one, it goes to the GPU."""
    hardware = load("pc-low")
    answers, small = request("qwen3-32b", hardware), request("qwen3-1.7b", hardware)
    assert hardware.gpu is not None
    left = make_plan(replace(answers, vram=hardware.gpu.memory_bytes - bytes_on_gpu(small)))
    ram = sum(left.bytes["cpu"].values()) + bytes_beside_gpu(small) + (64 << 20)
    place = place_drafts(replace(answers, ram=ram), small, MOST)
    assert place.vram > 0


def test_the_best_speed_is_of_all_numbers_of_drafts() -> None:
    assert best_speed(1.0, 10.0, MOST) == 1.0
    assert best_speed(1.0, 0.0, 2) == pytest.approx(1 + 0.7 + 0.49)
    assert best_speed(1.0, 0.4, MOST) == pytest.approx(max((1.7) / 1.4, 2.19 / 1.8, 2.533 / 2.2, 2.7731 / 2.6))
