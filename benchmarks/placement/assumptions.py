"""Machines for simulations of the GPU path, and everything that these assume, in one table with its sources.

Sizes and bandwidths of cards are published (`hardware/cards.json`), and what a step reaches of them is what
`powerinfer plan --card` assumes (`hardware/cards.py`), but for the fixed times: here they are those measured beside an
H200, in results/gpu-hardware-*.json and gpu-launches-*.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.lib.results import RESULTS, of_kind
from benchmarks.lib.tables import table
from powerinfer.devices.stage import MOST_THREADS
from powerinfer.formats.json_file import checked
from powerinfer.hardware import cards
from powerinfer.hardware.cards import Card, described_machine
from powerinfer.hardware.description import OTHER, Device, Hardware
from powerinfer.kernels.gpu_types import EXPERT_TOKENS, PIECE, piece_elements

GIB = 1 << 30
RAM = 64 * GIB
KINDS = ("ddr4-3200", "ddr5-5600")
CARDS = ("RTX 4060", "RTX 3060", "RTX 4070 Ti SUPER", "RTX 4090", "RTX 5090")
BUSES = ((3, 8), (4, 8), (4, 16), (5, 16))
"""PCIe's generation and lanes."""

TENSOR_FLOP = 512
"""Multiply-adds count two; of a multiprocessor a clock, FP16 with FP32 sums."""
DENSE_SHARE = 0.6
EXPERT_SHARE = 0.25
ATTENTION_SHARE = 0.3
TORCH_US = 7.0
"""Time of the host for an operator of torch: its launch by the driver, and what is around it."""
FOUND_US = 5.9
"""The same for what a launch of Triton's takes before the driver, where it finds what was compiled
(`kernels/triton_launch.py`): the larger of two that tests/test_triton_launch.py measured without a GPU."""
PIECE_LAUNCHES = {"panels": (2, 9), "experts": (3, 9)}
"""Triton's launches and torch's for a piece that streams, of panels of a dense matrix with its product, and of whole
experts without theirs: what is sent, and becomes the GPU's order of bytes. Of types that a kernel makes of panels."""
PRODUCT_LAUNCHES = (1, 4)
"""The same for a dense product with many tokens, of a piece of a matrix."""
EXPERT_LAUNCHES = (4, 6)
"""The same for sums of some experts for a block of tokens: of a layer's on the GPU, or a piece of those that stream."""
ORDER_LAUNCHES = (2, 8)
"""The same for such a block in each layer of experts: its pairs in order, and its rows as float16."""
CHUNK_LAUNCHES = (12, 20)
"""The same for what else a layer does in a chunk of a prompt."""
OPERATOR_LAUNCHES = 2
"""Launches of an operator of a step, about, which take the GPU some time each even where they are replayed."""
COPY_GB_S = 8.0
"""What a thread copies from RAM to RAM, as `devices/stage.py` expects."""
COPIES = 3
"""Times that bytes which are staged cross RAM's bus: read, written, and read by the card."""

H200_SMS, H200_GHZ = 132, 1.98
H200_FLOPS = 989e12
"""Peak of products of FP16, as published."""


@cache
def measured() -> Hardware:
    """The machine with an H200, as it was measured."""
    path = max(RESULTS.glob("gpu-hardware-*.json"))
    document = json.loads(path.read_text())
    return hardware_of(document)


def hardware_of(document: dict[str, Any]) -> Hardware:
    """The machine that a result describes, with whatever is noted beside it."""
    fields = {name: document[name] for name in Hardware.__dataclass_fields__ if name in document}
    return checked(Hardware, fields | {"disturbed": 0.0}, "result")


@cache
def measured_launch_us() -> float:
    """Time of the host for a launch of a step that was not recorded, all that is between launches included, before
    launches found what was compiled by keys of their own."""
    document = json.loads(max(RESULTS.glob("gpu-launches-*.json")).read_text())["one by one"]
    calls = document["calls"]
    return float(document["host_us"] / (calls["cuLaunchKernelEx"] + calls["cudaLaunchKernel"]))


@cache
def kernel_rates() -> dict[str, dict[int, float]]:
    """GB/s of matrices of each type by the number of tokens, on an H200."""
    found: dict[str, dict[int, float]] = {}
    for document in of_kind("gpu-kernels"):
        for one in document["kernels"]:
            if one["kernel"] == "linear":
                found.setdefault(one["type"], {})[one["tokens"]] = one["gb_s"]
    return found


@cache
def step_costs() -> dict[float, float]:
    """Time of steps of several tokens on two cores, by that of one token: of the runs of benchmarks.speed.speculation
    in which most drafts were right; with a draft head without what that takes (`HEAD_STEPS` each)."""
    costs = {1.0: 1.0}
    for document in of_kind("speculation"):
        dense = [entry for entry in document["speculation"] if "most" not in entry or entry["model"] == WITH_HEAD]
        for entry in dense:
            for name in RIGHT & entry["drafts"].keys():
                tokens = entry["tokens_per_step"][name]
                drafted, accepted = entry["drafts"][name]
                drafts = drafted * (tokens - 1) / accepted
                head = drafts * HEAD_STEPS if "most" in entry else 0.0
                if entry["case"] != "prose":
                    costs[1 + drafts] = tokens / entry["ratio"][name] - head
    return costs


RIGHT = {"75 % right", "lookup"}
WITH_HEAD = "r1b-mtp-Q4_0"
HEAD_STEPS = 1 / 16 + 0.06
"""What a draft of the head of that model, of 1.1B, takes, by a step: a layer of 16 and the output head."""


def core_rate(tokens: float) -> float:
    """GB/s of weights that a core reads in products with so many tokens; in proportion beyond those that are known."""
    costs = step_costs()
    sizes = sorted(costs)
    cost = float(np.interp(tokens, sizes, [costs[size] for size in sizes]))
    return cards.CORE_GB_S / (cost * max(1.0, tokens / sizes[-1]))


def for_tokens(hardware: Hardware, tokens: int, on_cpu: float | None = None) -> Hardware:
    """The machine with the rates of steps of several tokens, which are bound by multiplying: on a GPU at most those
    measured on an H200, by multiprocessors and clock, with more than 8 tokens as with 8. on_cpu: with how many of them
    a weight in RAM is multiplied, None: all."""
    gpu, cpu = hardware.gpu, hardware.cpu
    if tokens == 1:
        return hardware
    most = core_rate(tokens if on_cpu is None else on_cpu) * cpu.threads
    cpu = replace(
        cpu, dense_gb_s=_at_most(cpu.dense_gb_s, most), head_gb_s=_at_most(cpu.head_gb_s, most),
        bundle_gb_s=_at_most(cpu.bundle_gb_s, most),
    )  # fmt: skip
    if gpu is not None:
        dense, head = (_for_tokens(gpu, known, tokens) for known in (gpu.dense_gb_s, gpu.head_gb_s))
        gpu = replace(gpu, dense_gb_s=dense, head_gb_s=head)
    return replace(hardware, cpu=cpu, gpu=gpu)


def _for_tokens(gpu: Device, rates: Any, tokens: int) -> dict[str, float]:
    """Rates of a GPU's products, by type, with several tokens."""
    usual, issue = rates.get(OTHER) or min(rates.values()), issue_share(gpu)
    limits = {}
    for kind, known in kernel_rates().items():
        sizes = sorted(known)
        limits[kind] = issue / float(np.interp(tokens, sizes, [1 / known[size] for size in sizes]))
    return {**rates, **{kind: min(rates.get(kind, usual), most) for kind, most in limits.items()}}


def _at_most(rates: Any, most: float) -> dict[str, float]:
    return {kind: min(rate, most) for kind, rate in rates.items()}


def published(gpu: Device) -> Card | None:
    """The card of a described machine; None: it is the H200, or another that is not in the list."""
    return cards.cards().get(gpu.name.removeprefix("NVIDIA "))


def issue_share(gpu: Device) -> float:
    """Instructions a second, by an H200's."""
    card = published(gpu)
    return 1.0 if card is None else card.sms * card.ghz / (H200_SMS * H200_GHZ)


def tensor_flops(gpu: Device) -> float:
    """Peak of products of FP16 with sums of FP32, a second."""
    card = published(gpu)
    if card is None:
        return H200_FLOPS
    return TENSOR_FLOP * 1e9 * card.sms * card.ghz


def machine(
    card: str, kind: str = KINDS[1], ram: int = RAM, bus: tuple[int, int] | None = None, ram_gb_s: float | None = None
) -> Hardware:
    """A PC. bus: PCIe's generation and lanes, None: the card's own; ram_gb_s: what products read of RAM, None: the
    share that is assumed."""
    described = described_machine(card, ram, kind)
    gpu, cpu, fixed = described.gpu, described.cpu, measured()
    assert gpu is not None and fixed.gpu is not None
    gpu = replace(gpu, op_us=fixed.gpu.op_us, step_us=fixed.gpu.step_us)
    cpu = replace(cpu, step_us=fixed.cpu.step_us)
    if ram_gb_s is not None:
        cpu = replace(cpu, dense_gb_s={OTHER: ram_gb_s}, head_gb_s={OTHER: ram_gb_s})
    copies = described.copy_gb_s if bus is None else cards.BUS * cards.LANE_GB_S[bus[0]] * bus[1]
    return replace(described, cpu=cpu, gpu=gpu, sync_us=fixed.sync_us, copy_gb_s=copies)


@cache
def core_flops() -> float:
    """Of a core in prompts, with AVX2, a second."""
    for document in reversed(of_kind("processors")):
        for entry in document["speed"] if document["isa"] == "avx2" else ():
            if entry["model"] == "r1b-Q4_K_M":
                rate = entry["engines"]["powerinfer"]["prefill_tok_s"]["median"]
                return float(2 * R1B * rate / entry["threads"])
    raise LookupError("no result of benchmarks.speed.processors with AVX2")


R1B = 1.1e9
"""Parameters of the model of that measurement."""


@dataclass(frozen=True)
class Assumption:
    what: str
    value: str
    source: str


def launch_us() -> float:
    """Time of the host for a launch of Triton's from Python, outside of recordings."""
    return FOUND_US + TORCH_US


def replayed_us() -> float:
    """Time of a GPU for a launch that is replayed, beside its work: its share of an operator's."""
    gpu = measured().gpu
    assert gpu is not None
    return gpu.op_us / OPERATOR_LAUNCHES


def _both(launches: tuple[int, int]) -> str:
    return "{} and {}".format(*launches)


def assumptions() -> list[Assumption]:
    """All of them, but for the cards' own figures."""
    fixed = measured()
    assert fixed.gpu is not None
    lanes = ", ".join(f"{n}.0: {rate:g}" for n, rate in cards.LANE_GB_S.items())
    costs = ", ".join(f"{core_rate(n):.3g} with {n}" for n in (1, 2, 3, 4, 5))
    of_card = "`hardware/cards.py`, compared with what others measured in [models.md](models.md#how-far-to-trust-it)"
    h200, launches = "measured beside an H200, 14 threads (gpu-hardware)", "(gpu-launches)"
    piece = ", ".join(f"{_both(some)} of {kind}" for kind, some in PIECE_LAUNCHES.items())
    return [
        Assumption("a card's memory, bandwidth, multiprocessors (SM) and clock", "`hardware/cards.json`", "NVIDIA"),
        Assumption("RAM", "DDR4-3200 51.2, DDR5-5600 89.6 GB/s; 64 GiB, two channels", "JEDEC's rates"),
        Assumption("PCIe, GB/s a lane; copies reach", f"{lanes}; {100 * cards.BUS:.0f} %", f"PCI-SIG; {of_card}"),
        Assumption(
            "products reach, of a card's bandwidth and of RAM's",
            f"{100 * cards.DENSE:.0f} %, {100 * cards.CPU_DENSE:.0f} %", of_card,
        ),
        Assumption(
            "a core reads, GB/s, in products with tokens", costs,
            "one: measured on a Xeon; several: what steps with drafts took ([speculation.md](speculation.md#speed))",
        ),
        Assumption(
            "a card's products with several tokens", "at most an H200's, by SM and clock", "measured (gpu-kernels)"
        ),
        Assumption("an operator on the GPU, replayed", f"{fixed.gpu.op_us:.2g} us; 4 to 7 a layer", h200),
        Assumption(
            "an exchange with the CPU in a layer", f"{fixed.sync_us:.3g} us",
            f"{h200}: a call of a function, with two copies, which steps of up to 32 tokens no longer have",
        ),
        Assumption("a step beside these", f"{fixed.cpu.step_us + fixed.gpu.step_us:.0f} us", h200),
        Assumption(
            "a launch from Python: Triton's, torch's", f"{launch_us():.0f} us, {TORCH_US:g} us",
            f"{FOUND_US:g} us to find what was compiled, measured without a GPU, and torch's, an estimate; with all "
            f"that is between launches {measured_launch_us():.0f} us in the code of 27 November {launches}",
        ),
        Assumption(
            "launches in a chunk of a prompt, Triton's and torch's",
            f"{_both(CHUNK_LAUNCHES)} a layer, {_both(PRODUCT_LAUNCHES)} for {PIECE >> 20}M weights of a dense "
            f"product, of 2,048 tokens for {piece_elements(2048) >> 20}M; of a piece that streams {piece}; for "
            f"{EXPERT_TOKENS:,} tokens {_both(ORDER_LAUNCHES)} a layer of experts, and {_both(EXPERT_LAUNCHES)} for "
            "those on the GPU and again for each piece",
            "counted in the code",
        ),
        Assumption(
            "a launch in a chunk that is replayed", f"{replayed_us():.2g} us of the GPU",
            f"an operator's by {OPERATOR_LAUNCHES}, the launches of one, about",
        ),
        Assumption(
            "tensor cores, FP16 with FP32 sums", f"{TENSOR_FLOP} FLOP a clock and SM", "NVIDIA's papers on GA102, AD102"
        ),
        Assumption(
            "dense products, experts' and attention reach of that",
            f"{100 * DENSE_SHARE:.0f}, {100 * EXPERT_SHARE:.0f}, {100 * ATTENTION_SHARE:.0f} %",
            "estimates from compiled kernels; experts' weights become float16 in registers",
        ),
        Assumption(
            "what streams", f"experts from memory that the card reads by itself, once; layers as a whole staged by "
            f"{COPY_GB_S:g} GB/s a core, {MOST_THREADS} at most, and RAM's bandwidth by {COPIES}",
            "`devices/stage.py`; read, written, read by the card",
        ),
        Assumption(
            "a core in prompts", f"{1e-9 * core_flops():.0f} GFLOP/s, {cards.CORES} cores",
            "measured with AVX2 ([benchmarks.md](benchmarks.md))",
        ),
    ]  # fmt: skip


def assumptions_table() -> str:
    return table(["what", "assumed", "from"], [[one.what, one.value, one.source] for one in assumptions()])
