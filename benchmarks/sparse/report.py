"""A sparse model beside the dense one that it was made of: quality, neurons, speed.

    python -m benchmarks.sparse.report ORIGINAL SPARSE --text A --text B --task F --task G --out FOLDER

Writes report.json, and of it report.md with plots. Each result is kept as soon as it is measured; the same command goes
on where it was interrupted, and measures again only what has other options or files. Sections (--sections):

perplexity  of both models on each text, as `eval perplexity` measures it
tasks       accuracy of both in each task, as `eval tasks` measures it
firing      of SPARSE: the share of zeros by layer, and what the most active neurons carry
kept        perplexity of both where only the largest 5 to 50 % of the neurons of each token and layer are computed
curve       perplexity and zeros of SPARSE where its thresholds are 0.25 to 1.25 times what they are
predictor   what SPARSE's predictors reach, as they were trained; without measuring
speed       tokens a second of decoding: ORIGINAL, and in llama.cpp (--llama-bench), SPARSE dense, `auto`, `exact` and,
            with predictors, `predicted`, in turn, round by round. `auto`, the default, is as its trial says, the others
            take no trial. Stores SPARSE's neurons first (`powerinfer pack`).

firing, kept and curve are computed in torch (extra `train`) on --windows windows of 512 tokens, spread evenly over the
texts; plots need the extra `report`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, programs, results
from benchmarks.sparse import rounds
from benchmarks.sparse.compare import RATE
from benchmarks.sparse.report_page import page, plots
from benchmarks.sparse.trained import command
from powerinfer.config import THRESHOLDED
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import FIGURES, open_predictor
from powerinfer.tasks import read_items

SECTIONS = ("perplexity", "tasks", "firing", "kept", "curve", "predictor", "speed")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)
"""Of the thresholds."""
ENGINES = {
    "original": ["--selector", "all"],
    "sparse, dense": ["--selector", "all"],
    "sparse, auto": ["--selector", "auto"],
    "sparse, exact": ["--selector", "exact", "--no-trial"],
    "sparse, predicted": ["--selector", "predicted", "--no-trial"],
}
PEER = "original, llama.cpp"

Work = Callable[[], dict[str, Any]]


class Report:
    """The results in a folder's report.json, by name, with what they were measured with."""

    def __init__(self, folder: Path, models: dict[str, Checkpoint]) -> None:
        self.path, self.failed = folder / "report.json", False
        about = {label: described(checkpoint) for label, checkpoint in models.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            read = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {"results": {}}
            if type(read) is not dict or type(read.get("results")) is not dict:
                raise ValueError("it has no results")
            if any(type(one) is not dict or not {"options", "date"} <= one.keys() for one in read["results"].values()):
                raise ValueError("it has results that are not of this program")
        except OSError as error:
            sys.exit(f"--out {folder}: {error.strerror}")
        except ValueError as error:
            sys.exit(f"{self.path}: {error}: remove it to begin anew")
        self.document: dict[str, Any] = read
        if self.document.get("models", about) != about:
            sys.exit(f"{self.path} is the report of other models: give another --out")
        self.results: dict[str, Any] = self.document.pop("results")
        self.document |= {"kind": "sparse-report", **machine.description(), "models": about, "results": self.results}

    def measure(self, name: str, options: dict[str, Any], work: Work) -> None:
        """Keep what `work` finds under a name, unless it is there already, with these options."""
        if (known := self.results.get(name)) is not None and known["options"] == options:
            print(f"{name}: kept, of {known['date']}", file=sys.stderr)
            return
        if known is not None:  # of other options: not beside new ones, if these cannot be measured
            del self.results[name]
            results.write_json(self.path, self.document)
        print(name, file=sys.stderr)
        about = {"options": options, **{key: self.document[key] for key in ("date", "commit")}}
        try:
            self.results[name] = {**about, "cpu": self.document["cpu"]["name"], **work()}
        except (PowerInferError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            # the command has said why
            why = "not measured" if isinstance(error, subprocess.CalledProcessError) else error
            print(f"{name}: {why}", file=sys.stderr)
            self.failed = True
            return
        results.write_json(self.path, self.document)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "file": "/".join(checkpoint.path.parts[-2:]),
        "fingerprint": checkpoint.fingerprint,
        "parameters": checkpoint.parameters,
        "type": checkpoint.main_type,
        "activation": checkpoint.config.activations,
    }


def measure_perplexity(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    for text in args.text:
        for label, model in models.items():
            words = ("eval", "perplexity", "-m", model.path, "--file", text, *args.flags)
            work = eval_work(words, ("perplexity", "error", "tokens", "context"))
            report.measure(f"perplexity, {text.name}, {label}", {"text": digest(text), "flags": args.flags}, work)


def measure_tasks(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    limit = ("--limit", str(args.limit)) if args.limit else ()
    for task in args.task:
        for label, model in models.items():
            words = ("eval", "tasks", "-m", model.path, "--file", task, *limit, *args.flags)
            report.measure(
                f"tasks, {task.name}, {label}",
                {"task": digest(task), "limit": args.limit, "flags": args.flags},
                eval_work(words, ("tasks", "context")),
            )


def eval_work(words: tuple[str | Path, ...], kept: tuple[str, ...]) -> Work:
    def work() -> dict[str, Any]:
        commands: list[str] = []
        found = command(commands, *words)
        return {"command": commands[0], **{name: found[name] for name in kept}}

    return work


def measure_firing(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    from benchmarks.sparse import neurons

    model = models["sparse"]

    def work() -> dict[str, Any]:
        tokens = neurons.windows(model, args.text, args.windows, context_of(models))
        return neurons.firing(neurons.open_torch(model), tokens)

    report.measure("firing", window_options(models, args), work)


def measure_kept(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    from benchmarks.sparse import neurons

    for label, model in models.items():

        def work(label: str = label, model: Checkpoint = model) -> dict[str, Any]:
            tokens = neurons.windows(model, args.text, args.windows, context_of(models))
            torch_model, found = neurons.open_torch(model), []
            for share in SHARES:
                with neurons.only_largest(torch_model, share):
                    value = neurons.perplexity(torch_model, tokens, f"{label}, {100 * share:g} % kept")
                found.append({"share": share, "perplexity": value})
            return {"kept": found, "windows": len(tokens)}

        report.measure(f"kept, {label}", window_options(models, args) | {"shares": list(SHARES)}, work)


def measure_curve(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    from benchmarks.sparse import neurons

    config = models["sparse"].config

    def work() -> dict[str, Any]:
        if not any(layer.ffn.activation in THRESHOLDED for layer in config.layers):
            return {"curve": f"the activation {config.activations} has no thresholds"}
        tokens = {
            label: neurons.windows(model, args.text, args.windows, context_of(models))
            for label, model in models.items()
        }
        original = neurons.perplexity(neurons.open_torch(models["original"]), tokens["original"], "original")
        found = neurons.curve(neurons.open_torch(models["sparse"]), tokens["sparse"], FACTORS)
        return {"curve": found, "original": original, "windows": len(tokens["sparse"])}

    report.measure("curve", window_options(models, args) | {"factors": list(FACTORS)}, work)


def context_of(models: dict[str, Checkpoint]) -> int:
    return min(512, *(model.config.context_length for model in models.values()))


def window_options(models: dict[str, Checkpoint], args: argparse.Namespace) -> dict[str, Any]:
    texts = {text.name: digest(text) for text in args.text}
    return {"texts": texts, "windows": args.windows, "context": context_of(models)}


def measure_predictor(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    found = predictor_of(models["sparse"])
    report.measure("predictor", {"found": found}, lambda: {"predictor": found})


def predictor_of(model: Checkpoint) -> dict[str, Any] | str:
    """How the predictors of a model were trained; or why there are none."""
    try:
        file = open_predictor(model)
    except ModelError as error:
        return str(error).replace(f"{model.path.parent}/", "")
    training = file.training or {}
    about = {
        name: training[name] for name in ("recall_target", "share_of_model", "held_out_tokens") if name in training
    }
    layers = [{name: layer[name] for name in ("rank", *FIGURES)} for layer in training.get("layers", ())]
    return about | {"type": file.type, "layers": layers}


def measure_speed(report: Report, models: dict[str, Checkpoint], args: argparse.Namespace) -> None:
    settings = dict(ENGINES)
    if not isinstance(predictor_of(models["sparse"]), dict):
        del settings["sparse, predicted"]
    peers = {PEER: args.llama_bench.resolve().parent} if args.llama_bench else {}
    engines = programs.Engines(shlex.split(args.powerinfer), peers, 16, args.gen_tokens, settings, rates=(RATE,))
    options = {"engines": engines.labels(), "rounds": args.rounds, "gen_tokens": args.gen_tokens}
    options |= {"powerinfer": args.powerinfer, "llama_bench": str(args.llama_bench and args.llama_bench.resolve())}

    def work(threads: int) -> dict[str, Any]:
        programs.output([*engines.own, "pack", "-m", str(models["sparse"].path), "--no-check"])
        runs = {label: programs.Runs() for label in engines.labels()}

        def job(label: str) -> dict[str, Any]:
            return engines.measure(label, models[label.split(",")[0]].path, threads)

        for number in range(args.rounds):
            programs.one_round(runs, number, args.retries, args.quiet, job)
        found = {label: run.summary((RATE,)) | rounds.own_fields(run) for label, run in runs.items()}
        if not any(RATE in one for one in found.values()):
            raise RuntimeError("no engine could be measured")
        bases = [base for base in ("original", PEER) if base in runs]
        ratio = {label: {base: programs.ratios(run, runs[base], RATE) for base in bases} for label, run in runs.items()}
        return {
            "engines": found,
            "ratio": ratio,
            "peers": {name: programs.peer_facts(at) for name, at in peers.items()},
        }

    for threads in args.threads:
        report.measure(f"speed, {threads} threads", options, lambda threads=threads: work(threads))


MEASURES = (
    measure_perplexity,
    measure_tasks,
    measure_firing,
    measure_kept,
    measure_curve,
    measure_predictor,
    measure_speed,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("original", type=Path)
    made.add_argument("sparse", type=Path)
    made.add_argument("--text", type=Path, action="append", default=[], metavar="FILE", help="UTF-8; repeatable")
    made.add_argument("--task", type=Path, action="append", default=[], metavar="FILE", help="repeatable")
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    made.add_argument("--limit", type=int, help="items of each task; default: all")
    made.add_argument("--windows", type=int, default=32, help="of the texts, computed in torch (%(default)s)")
    made.add_argument("--flags", type=shlex.split, default=[], help="more flags of eval, such as '--threads 2'")
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of speed; default: 1 2")
    made.add_argument("--rounds", type=int, default=5, help="of speed (%(default)s)")
    made.add_argument("--retries", type=int, default=1, help="of a disturbed run (%(default)s)")
    made.add_argument("--quiet", type=float, default=8.0, help="seconds to wait for a quiet machine (%(default)s)")
    made.add_argument("--gen-tokens", type=int, default=128, help="tokens that are decoded (%(default)s)")
    made.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's program")
    own = f"{shlex.quote(sys.executable)} -m powerinfer.cli.main"
    made.add_argument("--powerinfer", default=own, metavar="COMMAND", help="for speed; default: %(default)s")
    return made


def check(made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses what no section could use, before the first one is measured."""
    for name in ("text", "task"):
        files = [path.name for path in getattr(args, name)]
        if missing := [str(path) for path in getattr(args, name) if not path.is_file()]:
            made.error(f"no file {', '.join(missing)}")
        if len(set(files)) < len(files):
            made.error(f"two files of one name: {', '.join(files)}")
    for text in args.text:
        try:
            if not text.read_text("utf-8").strip():
                made.error(f"{text} is empty")
        except UnicodeDecodeError:
            made.error(f"{text} is not UTF-8 text")
    for task in args.task:
        try:
            read_items(task)
        except PowerInferError as error:
            made.error(str(error))
    if args.llama_bench and not (args.llama_bench.is_file() and args.llama_bench.name == "llama-bench"):
        made.error(f"--llama-bench {args.llama_bench} is no program llama-bench")
    if not args.text and {"perplexity", "firing", "kept", "curve"} & set(args.sections):
        made.error("give a --text, or --sections that need none (tasks, predictor, speed)")
    if {"firing", "kept", "curve"} & set(args.sections) and find_spec("torch") is None:
        made.error("firing, kept and curve need torch: install the extra `train`, or leave these --sections out")
    if not args.task and "tasks" in args.sections and args.sections is not SECTIONS:
        made.error("give a --task, or --sections without tasks")
    for name in ("windows", "limit", "threads", "rounds", "gen_tokens"):
        value = getattr(args, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            made.error(f"--{name.replace('_', '-')} must be at least 1")


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(arguments)
    check(made, args)
    try:
        models = {label: open_checkpoint(getattr(args, label)) for label in ("original", "sparse")}
    except PowerInferError as error:
        sys.exit(str(error))
    report = Report(args.out, models)
    for section, measure in zip(SECTIONS, MEASURES, strict=True):
        if section in args.sections:
            measure(report, models, args)
    results.write_whole(args.out / "report.md", page(report.document).encode())
    try:
        for name, image in plots(report.document).items():
            results.write_whole(args.out / name, image)
    except RequestError as error:
        sys.exit(str(error))
    if report.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
