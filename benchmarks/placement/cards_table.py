"""Which of the catalogue's models suit which card: the tables of docs/models.md and README.md.

    python -m benchmarks.placement.cards_table [--check]

Nothing is measured, and the same code gives the same tables: `powerinfer plan --card CARD --ram SIZE` says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import Pages, paragraphs, table, write_tables
from powerinfer.formats.catalogue import catalogue
from powerinfer.hardware.cards import described_machine, find_card
from powerinfer.placement.estimates import Estimate, Offer, estimate, offers, speed

GIB = 1 << 30
MACHINES = (("RTX 4060", 32), ("RTX 3060", 32), ("RTX 4060 Ti 16GB", 32), ("RTX 3090", 64), ("none", 32))
"""Cards, and GB of RAM beside them."""

SHORT = (
    ("qwen3-8b", 0), ("gpt-oss-20b", 0), ("qwen3-30b-a3b", 0), ("qwen3-14b", 1), ("qwen3.6-35b-a3b", 1),
    ("qwen3.6-35b-a3b", 2), ("qwen3-32b", 3), ("gpt-oss-120b", 3), ("qwen3-30b-a3b", 4),
)  # fmt: skip
"""Models of README.md, each on one of MACHINES."""

NAME = "models table"

_DAI = "https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference"
_RECIPES = "https://smeltcore.com/recipes"
PUBLISHED = (
    *(("llama-3.1-8b", "Q4_K_M", card, 32, tok_s, _DAI) for card, tok_s in (
        ("RTX 3070", 70.94), ("RTX 3080", 106.40), ("RTX 4070 Ti", 82.21), ("RTX 4080", 106.22), ("RTX 3090", 111.74),
        ("RTX 4090", 127.74),
    )),
    ("gpt-oss-20b", "MXFP4", "RTX 3060", 32, 64.0,
     f"{_RECIPES}/gpt-oss-20b-on-rtx-3060-mxfp4-chat-at-64-tok-s-in-12-gb-via-llama-cpp-expert-offload/"),
    ("gpt-oss-20b", "MXFP4", "RTX 3090", 64, 147.5,
     f"{_RECIPES}/gpt-oss-20b-on-rtx-3090-mxfp4-chat-at-147-tok-s-via-ollama-or-vllm/"),
    ("gpt-oss-20b", "MXFP4", "RTX 4090", 64, 225.0,
     "https://runaihome.com/blog/gpt-oss-20b-local-ai-hardware-guide-2026/"),
    ("qwen3-30b-a3b", "Q4_K_M", "RTX 4090", 64, 196.0,
     "https://runaihome.com/blog/qwen3-30b-a3b-local-ai-guide-2026/"),
    ("qwen3.6-35b-a3b", "Q4_K_S", "RTX 4060 Ti 8GB", 32, 41.6,
     "http://threadnavigator.com/visualize/2052133499994251574/"),
)  # fmt: skip
"""Shape, type, card, GB of RAM, tokens a second that others measured with llama.cpp, and where they say so."""

IN_RAM = (
    "qwen3.6-35b-a3b", "Q4_K_M", "RTX 4070", 32, 34.6,
    "https://dev.to/kenimo49/rtx-4070-qwen-35b-28x-speedup-from-one-llamacpp-flag-cpu-moe-569o",
)  # fmt: skip
"""The same with all experts in RAM (--cpu-moe), which `HELD` of VRAM leave there, and the output head."""
HELD = 18 * GIB // 5
_LEAST = 1.0  # billions of parameters of a model in docs/models.md


@cache
def _offers(card: str, ram: int) -> list[Offer]:
    return offers(described_machine(card, ram * GIB))


def _title(card: str, ram: int) -> str:
    if card == "none":
        return f"no card, {ram} GB of RAM"
    full, about = find_card(card)
    name = full.removeprefix("GeForce ")
    short = name.removesuffix(f" {about.gib} GB")
    if find_card(short)[0] != full:  # there --card means one with other memory
        short = f"{short} {about.gib}GB"
    return f"{about.gib} GB ({short}), {ram} GB of RAM"


def _cell(offer: Offer, usual: str | None) -> str:
    """Tokens a second, the context, and where it goes; the type where it is not the usual one."""
    about = offer.estimate
    other = f" in {offer.download.quantisation}" if offer.download.quantisation != usual else ""
    where = about.where.replace(" GPU, RAM", "").replace("RAM, ", "")
    where = "" if about.place in ("gpu", "ram") else f", {where}"
    return f"{speed(about.tok_s)}{other}, {_tokens(about.context)}{where}"


def _tokens(context: int) -> str:
    return f"{context / 1024:.0f}K"


def cards_table() -> str:
    """Models by machines."""
    found = [{one.name: one for one in _offers(*machine)} for machine in MACHINES]
    body = []
    every = sorted(catalogue().items(), key=lambda pair: -pair[1].parameters)
    for name, model in every:
        if model.parameters < _LEAST or not any(name in one for one in found):
            continue
        usual = model.downloads[0]
        cells = [_cell(one[name], usual.quantisation) if name in one else "-" for one in found]
        body.append([f"`{name}`", usual.quantisation or "BF16", f"{usual.gigabytes:g}", *cells])
    heads = ["model", "type", "GB", *(_title(*machine) for machine in MACHINES)]
    about = (
        "`python -m benchmarks.placement.cards_table`; predicted, not measured. Tokens a second of one request 2,048 "
        "tokens into its context; the longest context that leaves the weights where they are (K: 1,024 tokens); what "
        "is on the GPU, unless all is: the rest is in RAM and, where disk stands there, on disk."
    )
    return paragraphs(about, table(heads, body))


def compared(shape: str, dtype: str, card: str, ram: int) -> Estimate:
    """The prediction that stands beside what others measured."""
    machine = described_machine(card, ram * GIB)
    if (shape, dtype, card, ram) == IN_RAM[:4]:
        assert machine.gpu is not None
        machine = replace(machine, gpu=replace(machine.gpu, memory_bytes=HELD))
    found = estimate(shape, dtype, machine)
    assert found is not None
    return found


def published_table() -> str:
    """What others measured with llama.cpp, beside predictions for the same card."""
    body = []
    for shape, dtype, card, ram, tok_s, address in (*PUBLISHED, IN_RAM):
        found = compared(shape, dtype, card, ram)
        model = "Llama 3 8B" if shape == "llama-3.1-8b" else shape
        said = f"[{speed(tok_s)}]({address})"
        body.append([f"{model}, {dtype}", _title(card, ram), said, f"{speed(found.tok_s)}, {found.where}"])
    return table(["model", "card", "llama.cpp, as published", "predicted here"], body)


def short_table() -> str:
    """A few models, each with a card, the command and its speed."""
    body = []
    for name, at in SHORT:
        one = next(one for one in _offers(*MACHINES[at]) if one.name == name)
        command, gigabytes = f"`powerinfer chat {one.flags}`", f"{one.download.gigabytes:g} GB"
        body.append([_model(one), gigabytes, _title(*MACHINES[at]), command, speed(one.estimate.tok_s)])
    return table(["model", "download", "your card", "command", "tokens/s, predicted"], body)


def _model(offer: Offer) -> str:
    return f"{offer.name}, {offer.download.quantisation or 'BF16'}"


README = ROOT / "README.md"


def _pages() -> Pages:
    pages: dict[Path, Callable[[], dict[str, str | None]]] = {
        ROOT / "docs/models.md": lambda: {NAME: cards_table(), "published table": published_table()}
    }
    if f"<!-- {NAME}: begin -->" in README.read_text("utf-8"):
        pages[README] = lambda: {NAME: short_table()}
    return pages


PAGES = _pages()

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
