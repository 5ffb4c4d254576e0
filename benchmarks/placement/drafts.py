"""What drafts of a model's own head gain where its layers are divided between a GPU and RAM, simulated; the table of
docs/speculation.md.

    python -m benchmarks.placement.drafts [--check]     --check: only say whether the table is up to date

A step of several tokens reads all weights once, at the rates of so many tokens (`assumptions.for_tokens`), and takes
what a plan says of it. A draft reads the head's layer, its projection and the output head. The engine has the head on
the GPU beside a whole model (`budget.draft_fits`), else in RAM; simulated is either: on the GPU it takes the place of
layers, with an output head of its own if the model's is in RAM.

In Mirror-SD's order the GPU drafts what follows its own drafts while the CPU still verifies these. That serves where
all of them turn out right, and the token behind them as it was guessed: then the next step's drafts are there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from benchmarks.lib.cells import fixed, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest
from benchmarks.lib.tables import Pages, paragraphs, table, write_tables
from benchmarks.placement.assumptions import GIB, for_tokens, machine
from powerinfer.config import AttentionConfig
from powerinfer.devices.states import UNDO_TOKENS
from powerinfer.errors import RequestError
from powerinfer.hardware.description import Device, Hardware, load
from powerinfer.kernels.draft_rows import first_tokens, recent_tokens
from powerinfer.models.inventory import Matrix, matrix
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.context_cost import CONTEXT
from powerinfer.placement.cost import end_seconds, matrix_seconds
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import Plan, PlanRequest, make_plan, place
from powerinfer.placement.shapes import described_model, find_shape

SHAPE, DTYPE = "qwen3.6-27b", "q4_k_m"
RAM_GB_S = 70.0
MOST = 4
ASKED = 1.7
"""The gain that is asked for."""
RATES = ((0.65, 0.55, 0.45, 0.40), (0.75, 0.65, 0.55, 0.50), (0.85, 0.80, 0.75, 0.70))
"""Shares of drafts that are right, by their place, of those whose forerunners are."""


TEXTS = ("documents", "Python", "C++")
"""Those on which the draft vocabulary was measured that count."""
USUAL = RATES[1]
ASKED_OF = ("RTX 4060, 8 GB; RAM at 70 GB/s", "RTX 3060, 12 GB; RAM at 70 GB/s")
DRAFTS = 2
"""Drafts of the step that is taken apart."""


def machines() -> dict[str, Hardware]:
    """By their titles: what is asked for, PCs, and the paper's."""
    return {
        ASKED_OF[0]: machine("RTX 4060", ram=32 * GIB, ram_gb_s=RAM_GB_S),
        ASKED_OF[1]: machine("RTX 3060", ram=32 * GIB, ram_gb_s=RAM_GB_S),
        "RTX 4060, 32 GB of DDR5-5600": machine("RTX 4060", "ddr5-5600", 32 * GIB),
        "RTX 3060, 32 GB of DDR4-3200": machine("RTX 3060", "ddr4-3200", 32 * GIB),
        "PC-High (RTX 4090)": load("pc-high"),
        "PC-Low (RTX 2080 Ti)": load("pc-low"),
    }


@dataclass(frozen=True)
class Head:
    """A draft head: its layer with the projection before it, and the output head, which is the model's."""

    layer: tuple[Matrix, ...]
    output: Matrix

    @property
    def on_gpu(self) -> int:
        """Bytes of it on a GPU."""
        return sum(one.stored for one in (*self.layer, self.output))

    def seconds(self, device: Device, panels: bool) -> float:
        """Time of a draft; of the output head it reads the draft vocabulary, on a GPU with all of its room."""
        vocab = find_shape(SHAPE).config.vocab_size
        room = (first_tokens(vocab) + recent_tokens(vocab)) / vocab
        head = device.head_seconds(
            self.output.type if panels else self.output.gpu_type,
            vocabulary().listed * self.output.panels if panels else room * self.output.stored,
        )
        return matrix_seconds(device, self.layer, panels) + head + 6e-6 * device.op_us


@cache
def draft_head() -> Head:
    """The head of the model: a layer like its last one with attention, all of Q4_K_M."""
    config = find_shape(SHAPE).config
    kind = next(layer for layer in reversed(config.layers) if isinstance(layer.attention, AttentionConfig))
    longer = described_model(replace(config, layers=(*config.layers, kind)), DTYPE, SHAPE, 0.0)
    join = matrix("Q4_K", config.d_model, 2 * config.d_model)
    return Head((*longer.attention[-1], *longer.ffn[-1], join), longer.head)


@dataclass(frozen=True)
class Vocabulary:
    """The draft vocabulary as it was measured on texts: the share of tokens that it lists, and of a text's next tokens
    that are of these."""

    listed: float
    covered: float


@cache
def vocabulary() -> Vocabulary:
    measured = newest("draft-vocabulary")
    assert measured is not None
    texts = [one for one in measured["texts"] if one["text"] in TEXTS]
    tokens = sum(one["tokens"] for one in texts)
    return Vocabulary(
        sum(one["listed"] for one in texts) / len(texts) / measured["vocab"],
        sum(one["covered"] * one["tokens"] for one in texts) / tokens,
    )


def expected_tokens(right: Sequence[float], drafts: int) -> float:
    """Tokens that a step with so many drafts brings."""
    tokens = reached = 1.0
    for share in right[:drafts]:
        reached *= share
        tokens += reached
    return tokens


def foreseen(right: Sequence[float], drafts: int) -> float:
    """Probability that all drafts of a step are right, and so is the token behind them."""
    reached = 1.0
    for share in (*right, right[-1])[: drafts + 1]:
        reached *= share
    return reached


@dataclass(frozen=True)
class Gain:
    """The best number of drafts, and its tokens a second by those without any."""

    drafts: int
    gain: float

    @property
    def cell(self) -> str:
        return f"{fixed(self.gain)} ({self.drafts})" if self.drafts else "1 (0)"


@dataclass(frozen=True)
class Speculation:
    """Steps of a machine, with the head on either device; None: the GPU has no room for it.

    plain: seconds of a step without drafts; steps: by their number, with the head in RAM and on the GPU; each: seconds
    of a draft there; busy: of these steps, seconds in which the CPU computes layers while the GPU has nothing to do;
    whole: the GPU has the model and the head, as the engine then places it; covered: share of tokens that the draft
    vocabulary has.
    """

    plain: float
    on_cpu: tuple[float, ...]
    on_gpu: tuple[float, ...] | None
    each_on_cpu: float
    each_on_gpu: float
    busy: tuple[float, ...]
    whole: bool = False
    covered: float = 1.0

    def best(self, steps: Sequence[float] | None, right: Sequence[float], each: Sequence[float]) -> Gain:
        """each: seconds that the drafts of a step add, by their number. Every token that the draft vocabulary lacks is
        taken for one that would have been right as often as others."""
        right = [share * self.covered for share in right]
        chosen = Gain(0, 1.0)
        for drafts in range(1, MOST + 1) if steps is not None else ():
            seconds = steps[drafts] + each[drafts]
            gain = expected_tokens(right, drafts) * self.plain / seconds
            if gain > chosen.gain:
                chosen = Gain(drafts, gain)
        return chosen

    def gain_on_cpu(self, right: Sequence[float]) -> Gain:
        return self.best(self.on_cpu, right, [n * self.each_on_cpu for n in range(MOST + 1)])

    def gain_on_gpu(self, right: Sequence[float]) -> Gain:
        return self.best(self.on_gpu, right, [n * self.each_on_gpu for n in range(MOST + 1)])

    def gain_as_placed(self, right: Sequence[float]) -> Gain:
        """With the head where the engine places it."""
        return self.gain_on_gpu(right) if self.whole else self.gain_on_cpu(right)

    def mirrored(self, right: Sequence[float], always: bool = False) -> Gain:
        """With the GPU drafting while the CPU verifies. always: as if every guess were drafted for."""
        added = [0.0]
        for drafts in range(1, MOST + 1):
            whole = drafts * self.each_on_gpu
            hidden = min(whole, self.busy[drafts])
            covered = [share * self.covered for share in right]
            added.append(whole - hidden * (1.0 if always else foreseen(covered, drafts)))
        return self.best(self.on_gpu, right, added)


def _request(hardware: Hardware) -> PlanRequest:
    request = estimate_request(SHAPE, DTYPE, hardware)
    return with_long_chunks(replace(request, requests=1))


def _step(plan: Plan, tokens: int) -> Plan:
    """The plan with the rates of steps of so many tokens; layers stay where they are."""
    request = plan.request
    return make_plan(replace(request, hardware=for_tokens(request.hardware, tokens)))


def _cpu_seconds(plan: Plan) -> float:
    """Seconds in which the CPU computes layers as a whole, and the output head if that is in RAM."""
    layers, request = plan.choice.layer_seconds, plan.request
    own = sum(one["other"] + one["gpu"] + one["cpu"] for one in layers[plan.claims.gpu_layers :])
    return own if plan.claims.gpu_head else own + end_seconds(request.hardware.cpu, request.model, panels=True)


def _beside(request: PlanRequest) -> Plan | RequestError:
    """The plan with the draft head on the GPU, too; the error where it leaves too little."""
    head, gpu = draft_head(), request.hardware.gpu
    assert gpu is not None
    undone = replace(request, undo_tokens=UNDO_TOKENS)
    there = place(undone)
    shares = not isinstance(there, RequestError) and there.claims.gpu_head
    return place(replace(undone, vram=gpu.memory_bytes - head.on_gpu + shares * head.output.stored))


def simulate(hardware: Hardware) -> Speculation:
    """The steps of the model on a machine."""
    head, gpu = draft_head(), hardware.gpu
    assert gpu is not None
    request = _request(hardware)
    plain = make_plan(request)
    on_cpu = make_plan(replace(request, undo_tokens=UNDO_TOKENS))
    steps = tuple(_step(on_cpu, 1 + n).choice.seconds for n in range(MOST + 1))
    beside = _beside(request)
    there: tuple[float, ...] | None = None
    busy, whole = (0.0,) * (MOST + 1), False
    if not isinstance(beside, RequestError) and beside.claims.gpu_layers:
        plans = [_step(beside, 1 + n) for n in range(MOST + 1)]
        whole = beside.claims.gpu_head and beside.claims.gpu_layers == request.model.config.n_layers
        there, busy = tuple(one.choice.seconds for one in plans), tuple(map(_cpu_seconds, plans))
    each_on_cpu = head.seconds(hardware.cpu, True)
    each = each_on_cpu, head.seconds(gpu, False)
    return Speculation(plain.choice.seconds, steps, there, *each, busy, whole, vocabulary().covered)


HEADS = ("machine", "tokens/s without", "right, first draft", "the engine has it", "head in RAM", "on the GPU",
         "GPU, Mirror-SD's order",         "the same, every branch drafted")  # fmt: skip


def gains(made: Speculation, right: Sequence[float]) -> list[Gain]:
    """By the columns of the table."""
    return [made.gain_on_cpu(right), made.gain_on_gpu(right), made.mirrored(right), made.mirrored(right, always=True)]


def gains_table(every: Mapping[str, Speculation]) -> str:
    body = [
        [
            name,
            fixed(1 / made.plain, 1),
            percent(right[0], 0),
            "on the GPU" if made.whole else "in RAM",
            *(gain.cell for gain in gains(made, right)),
        ]
        for name, made in every.items()
        for right in RATES
    ]
    return table(HEADS, body)


def verdict(every: Mapping[str, Speculation]) -> str:
    """Where the gain that is asked for is reached."""
    said = []
    for name in ASKED_OF:
        reached = [(right, every[name].gain_as_placed(right).gain) for right in RATES]
        cells = ", ".join(f"{fixed(gain)}x at {percent(right[0], 0)}" for right, gain in reached)
        usual = dict(reached)[USUAL]
        said.append(f"{name}: {'reached' if usual >= ASKED else 'not reached'} ({cells})")
    asked = (
        f"The aim is {ASKED:g}x with {percent(USUAL[0], 0)} of first drafts right. With the head where the engine has "
        "it:"
    )
    return f"{asked} {'. '.join(said)}."


def step_table() -> str:
    """What a step with two drafts takes, part by part, with the head on the GPU."""
    body = []
    for name in ASKED_OF:
        hardware = machines()[name]
        request, head = _request(hardware), draft_head()
        plain, beside = make_plan(request), _beside(request)
        assert not isinstance(beside, RequestError) and hardware.gpu is not None
        many = for_tokens(hardware, 1 + DRAFTS)
        slower = [replace(hardware, cpu=many.cpu), many]
        seconds = [plain.choice.seconds, beside.choice.seconds]
        seconds += [make_plan(replace(beside.request, hardware=one)).choice.seconds for one in slower]
        seconds.append(seconds[-1] + DRAFTS * head.seconds(hardware.gpu, False))
        parts = [seconds[0], *(b - a for a, b in pairwise(seconds)), seconds[-1]]
        tokens = expected_tokens([share * vocabulary().covered for share in USUAL], DRAFTS)
        gain = tokens * seconds[0] / seconds[-1]
        body.append([name, *(fixed(1e3 * one, 1) for one in parts), fixed(tokens), fixed(gain)])
    heads = ["ms", "a plain step", "layers that give way to the head", "three tokens: the CPU", "the GPU"]
    return table([*heads, "two drafts", "in all", "tokens a step", "gain"], body)


def body() -> str:
    every = {name: simulate(hardware) for name, hardware in machines().items()}
    missing = percent(1 - vocabulary().covered, 1)
    shares = ("/".join(percent(share, 0).removesuffix(" %") for share in right) for right in RATES)
    about = (
        f"Simulated, not measured (`python -m benchmarks.placement.drafts`): {SHAPE} in {DTYPE.upper()} with its draft "
        f"head, {CONTEXT:,} tokens of context half full. Gains over decoding without drafts, in brackets the best "
        f"number of drafts, at most {MOST}. Of the drafts that follow right ones {', '.join(shares)} % are right, by "
        f"place. In RAM a draft reads {percent(vocabulary().listed, 0)} of the output head; the {missing} of tokens "
        f"outside that part are never drafted, so {missing} fewer drafts are right. Rates: "
        "[hybrid.md](hybrid.md#assumed)."
    )
    return paragraphs(about, gains_table(every), verdict(every), step_table())


PAGES: Pages = {ROOT / "docs/speculation.md": lambda: {"speculation simulated": body()}}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
