"""What this engine makes of the trained ReLU models of runs/relu_stories.py, and the tables of runs/README.md.

    python -m benchmarks.sparse.trained OUT                  measure, into runs/results.json; write the tables
    python -m benchmarks.sparse.trained OUT --models stories15M-reglu       only some; figures of the others stay
    python -m benchmarks.sparse.trained OUT --models ... --recall 0.96      beside them, with such predictors
    python -m benchmarks.sparse.trained --tables             write the tables again

OUT is what relu_stories.py made, and the default is all models of its figures.json, which comes first in the tables.
Each model is profiled and packed and its predictors are trained on train.txt; the perplexities are those of the
first 100 kB of heldout.txt in windows of the whole context, their second halves scored: dense, and with the selectors
exact and predicted token by token, as decode computes them. Commands that were run stand in the result.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.lib.cells import percent
from benchmarks.lib.tables import filled, table

RESULT = machine.ROOT / "runs/results.json"
PAGE = machine.ROOT / "runs/README.md"
ORIGINAL = "stories15M"
CONTEXT = "256"
SCORED = 100_000
"""Bytes of heldout.txt that are scored, whole stories: token by token takes its time."""


def command(commands: list[str], *words: str | Path) -> dict[str, Any]:
    """Run `powerinfer WORDS --json`; its document. `commands` gets the line."""
    line = [*map(str, words), "--json"]
    print("powerinfer", shlex.join(line), file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "powerinfer.cli.main", *line], stdout=subprocess.PIPE, check=True)
    commands.append(" ".join(["powerinfer", *map(machine.without_folders, line)]))
    document: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return document


def measure(out: Path, name: str, recall: str | None) -> dict[str, Any]:
    """Every figure of one model. recall: what its predictors are trained for, None for the default."""
    path, corpus, text = out / f"{name}-F16.gguf", out / "train.txt", out / "scored.txt"
    whole = (out / "heldout.txt").read_bytes()
    text.write_bytes(whole[: whole.rindex(b"\n\n", 0, SCORED)])
    commands: list[str] = []
    found: dict[str, Any] = {"commit": machine.commit(), "commands": commands}
    quality = ("eval", "perplexity", "-m", path, "--file", text, "--context", CONTEXT, "--threads", "1")
    if name != ORIGINAL:
        found["profile"] = command(commands, "profile", "-m", path, "--corpus", corpus, "--window", CONTEXT)
        found["train"] = command(commands, "train", "-m", path, *(("--recall", recall) if recall else ()))
        found["pack"] = command(commands, "pack", "-m", path, "--no-check")
    for selector in ("all",) if name == ORIGINAL else ("all", "exact", "predicted"):
        found[selector] = command(commands, *quality, "--selector", selector)
    return found


def tables(result: dict[str, Any]) -> str:
    """Markdown: figures by torch, perplexities, predictors and skew, then the layers of each model."""
    by_torch = []
    for name, found in result["torch"].items():
        fires = "" if name == ORIGINAL else percent(found["zeros"])
        layers = "" if name == ORIGINAL else ", ".join(f"{100 * one:.0f}" for one in found["zeros_by_layer"])
        by_torch.append([name, f"{found['perplexity']:.3f}", fires, layers])
    models = dict(result["models"])
    original = models.pop(ORIGINAL)
    base = original["all"]["perplexity"]
    rows = [[ORIGINAL, f"{base:.3f}", "", ""]]
    for name, found in models.items():
        perplexities = [found[selector]["perplexity"] for selector in ("all", "exact", "predicted")]
        rows.append([name, *(f"{value:.3f} ({value / base:.3f} x)" for value in perplexities)])
    parts = ["By torch, while they were made:\n\n"]
    parts += [table(["model", "perplexity", "zeros", "by layer, per cent"], by_torch, numbers=True)]
    parts += ["\nBy this engine:\n\n", table(["model", "dense", "exact", "predicted"], rows, numbers=True), "\n"]
    rows = []
    for name, found in models.items():
        met, profiled = found["predicted"]["sparsity"], found["profile"]
        fires = found["exact"]["sparsity"]["active_fraction"]
        shares = (1 - fires, profiled["hot_share"], profiled["reuse"], met["recall"], met["candidate_fraction"])
        shares += (met["candidate_fraction"] - fires, found["train"]["share_of_model"])
        rows.append([name, *map(percent, shares)])
    head = ["model", "zeros", "hot share", "reuse", "recall", "candidates", "beyond", "bytes"]
    parts.append(table(head, rows, numbers=True))
    for name, found in models.items():
        head = ["layer", "zeros", "hot share", "reuse", "rank", "method", "recall", "candidates", "beyond"]
        rows = []
        for profiled, trained in zip(found["profile"]["layers"], found["train"]["layers"], strict=True):
            beyond = trained["candidate_fraction"] - trained["active_fraction"]
            shares = (1 - profiled["active_fraction"], profiled["hot_share"], profiled["reuse"])
            cells = [*map(percent, shares), str(trained["rank"]), trained["method"]]
            cells += map(percent, (trained["recall"], trained["candidate_fraction"], beyond))
            rows.append([str(profiled["layer"]), *cells])
        parts.append(f"\n`{name}`, layer by layer:\n\n{table(head, rows, numbers=True)}")
    commits = ", ".join(dict.fromkeys(found["commit"] for found in (original, *models.values())))
    return "".join(parts) + f"\nMeasured at commit {commits} on {result['cpu']['name']}.\n"


def write_tables() -> None:
    PAGE.write_text(filled(PAGE.read_text(), "tables", tables(json.loads(RESULT.read_text()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder that runs/relu_stories.py made")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: those of OUT/figures.json")
    parser.add_argument("--recall", metavar="X", help="of the predictors; such figures stand beside the usual ones")
    parser.add_argument("--tables", action="store_true", help="only write the tables of runs/README.md again")
    args = parser.parse_args()
    if args.out is None and not args.tables:
        parser.error("name the folder that runs/relu_stories.py made, or --tables")
    if not args.tables:
        known = [path.name.removesuffix("-F16.gguf") for path in sorted(args.out.glob("*-F16.gguf"))]
        unknown = [name for name in args.models or [] if name not in known]
        if unknown:
            parser.error(f"{args.out} holds {', '.join(known)}, not {', '.join(unknown)}")
        models = json.loads(RESULT.read_text())["models"] if (args.models or args.recall) and RESULT.exists() else {}
        wanted = args.models or json.loads((args.out / "figures.json").read_text())
        for name in dict.fromkeys([*([] if ORIGINAL in models else [ORIGINAL]), *wanted]):
            label = name if args.recall is None or name == ORIGINAL else f"{name} --recall {args.recall}"
            models[label] = measure(args.out, name, args.recall)
            by_torch = json.loads((args.out / "figures.json").read_text())
            results.write_json(RESULT, {**machine.description(), "torch": by_torch, "models": models})
    write_tables()


if __name__ == "__main__":
    main()
