"""What this engine makes of the trained ReLU models of runs/relu_stories.py, and the tables of runs/README.md.

    python benchmarks/trained.py OUT [--models NAME ...]    measure, into runs/results.json, and write the tables
    python benchmarks/trained.py --tables                   write the tables again

OUT is what relu_stories.py made. Each model is profiled and packed and its predictors are trained on train.txt; the
perplexities are those of heldout.txt in windows of the whole context, their second halves scored: dense, and token by
token with the selectors exact and predicted. Commands that were run stand in the result.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "runs/results.json"
PAGE = ROOT / "runs/README.md"
MARKERS = re.compile(r"(<!-- tables: begin -->\n).*?(<!-- tables: end -->)", re.DOTALL)
ORIGINAL = "stories15M"
CONTEXT = "256"


def command(commands: list[str], *words: str | Path) -> dict[str, Any]:
    """Run `powerinfer WORDS --json`; its document. `commands` gets the line."""
    line = [*map(str, words), "--json"]
    print("powerinfer", shlex.join(line), file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "powerinfer.cli.main", *line], stdout=subprocess.PIPE, check=True)
    commands.append(" ".join(["powerinfer", *map(machine.without_folders, line)]))
    document: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return document


def measure(out: Path, name: str) -> dict[str, Any]:
    """Every figure of one model."""
    path, corpus, text = out / f"{name}-F16.gguf", out / "train.txt", out / "heldout.txt"
    commands: list[str] = []
    quality = ("eval", "perplexity", "-m", path, "--file", text, "--context", CONTEXT)
    found: dict[str, Any] = {"commands": commands, "all": command(commands, *quality)}
    if name == ORIGINAL:
        return found
    found["profile"] = command(commands, "profile", "-m", path, "--corpus", corpus, "--window", CONTEXT)
    found["train"] = command(commands, "train", "-m", path)
    found["pack"] = command(commands, "pack", "-m", path, "--no-check")
    for selector in ("exact", "predicted"):
        found[selector] = command(commands, *quality, "--selector", selector)
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def tables(result: dict[str, Any]) -> str:
    """Markdown: the models, then the layers of each."""
    models = result["models"]
    base = models[ORIGINAL]["all"]["perplexity"]
    rows = [[ORIGINAL, f"{base:.3f}", "", "", "", "", "", ""]]
    for name, found in models.items():
        if name == ORIGINAL:
            continue
        perplexities = [found[selector]["perplexity"] for selector in ("all", "exact", "predicted")]
        predicted = found["predicted"]["sparsity"]
        shares = (1 - found["profile"]["active_fraction"], found["profile"]["hot_share"])
        shares += (predicted["recall"], predicted["candidate_fraction"])
        cells = [f"{value:.3f} ({value / base:.3f} x)" for value in perplexities]
        rows.append([name, *cells, *map(share, shares)])
    head = ["model", "dense", "exact", "predicted", "zeros", "hot share", "recall", "candidates"]
    parts = [table(head, rows)]
    for name, found in models.items():
        if name == ORIGINAL:
            continue
        head = ["layer", "zeros", "hot share", "reuse", "rank", "method", "recall", "candidates", "in vain"]
        rows = []
        for profiled, trained in zip(found["profile"]["layers"], found["train"]["layers"], strict=True):
            vain = trained["candidate_fraction"] - trained["recall"] * trained["active_fraction"]
            shares = (1 - profiled["active_fraction"], profiled["hot_share"], profiled["reuse"])
            cells = [*map(share, shares), str(trained["rank"]), trained["method"]]
            rows.append(
                [str(profiled["layer"]), *cells, *map(share, (trained["recall"], trained["candidate_fraction"], vain))]
            )
        parts.append(f"\n`{name}`, layer by layer:\n\n{table(head, rows)}")
    return "".join(parts) + f"\nMeasured at commit {result['commit']} on {result['cpu']['name']}.\n"


def write_tables() -> None:
    made = tables(json.loads(RESULT.read_text()))
    PAGE.write_text(MARKERS.sub(lambda found: found[1] + made + found[2], PAGE.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder that runs/relu_stories.py made")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: those of OUT/figures.json")
    parser.add_argument("--tables", action="store_true", help="only write the tables of runs/README.md again")
    args = parser.parse_args()
    if args.out is None and not args.tables:
        parser.error("name the folder that runs/relu_stories.py made, or --tables")
    if not args.tables:
        torch_figures = json.loads((args.out / "figures.json").read_text())
        names = [ORIGINAL, *(name for name in args.models or torch_figures if name != ORIGINAL)]
        result = {**machine.description(), "models": {}}
        for name in names:
            result["models"][name] = {"torch": torch_figures.get(name), **measure(args.out, name)}
        machine.write_json(RESULT, result)
    write_tables()


if __name__ == "__main__":
    main()
