"""Measure how many of a text's tokens the draft vocabulary has that a model drafts from (runtime/draft_vocabulary.py).

    python -m benchmarks.quality.draft_vocabulary -m MODEL [--text NAME=FOLDER_OR_FILE ...]

Of each file's first characters the first half is taken as a prompt and the second as its answer, token by token: a
token counts as covered if it is of the first ones, or in a panel of 16 of which the text had a token before. Without
--text: this project's documents, its Python and its C++. Files may be compressed by gzip (manual pages are texts in
many languages). Tokens that are not covered are rare ones, which drafts seldom get right in any case, so the share of
drafts that are right falls by less.

Writes a JSON of the kind "draft-vocabulary".
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels.cpu import LANES
from powerinfer.runtime.draft_vocabulary import DraftVocabulary
from powerinfer.text.model_text import tokenizer_of
from powerinfer.text.tokenizer import Tokenizer

DEFAULT = {"documents": "docs/*.md", "Python": "src/powerinfer/*/*.py", "C++": "src/powerinfer/csrc/*.cpp"}
CHARACTERS = 8000
FILES = 30  # of a text, at most, evenly chosen
LEAST = 400  # characters; shorter files say little


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode(errors="replace")[:CHARACTERS]


def texts(paths: Iterable[Path]) -> list[str]:
    files = sorted(path for path in paths if path.is_file())
    read_in = (read(path) for path in files[:: max(1, len(files) // FILES)][:FILES])
    return [text for text in read_in if len(text) >= LEAST]


def coverage(tokenizer: Tokenizer, some: Sequence[str]) -> dict[str, Any]:
    """Shares of the tokens of the second halves that are of the first ones, and that are covered; and how many tokens
    the vocabulary has in the end, on average."""
    tokens = first = covered = listed = 0
    n_first = DraftVocabulary(tokenizer.vocab_size).first
    for text in some:
        ids = tokenizer.encode(text)
        half = len(ids) // 2
        seen = {token // LANES for token in ids[:half] if token >= n_first}
        for token in ids[half:]:
            tokens += 1
            first += token < n_first
            covered += token < n_first or token // LANES in seen
            if token >= n_first:
                seen.add(token // LANES)
        listed += n_first + LANES * len(seen)
    return {
        "files": len(some),
        "tokens": tokens,
        "first": first / tokens,
        "covered": covered / tokens,
        "listed": listed / len(some),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="a model whose tokenizer is used")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=PATH", help="a file, or a folder's files")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/draft-vocabulary-DATE.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    tokenizer = tokenizer_of(open_checkpoint(arguments.model))
    every = {name: texts(machine.ROOT.glob(pattern)) for name, pattern in DEFAULT.items()}
    for text in arguments.text:
        name, _, path = text.partition("=")
        every[name] = texts([Path(path)] if Path(path).is_file() else Path(path).rglob("*"))
    vocab = tokenizer.vocab_size
    document = {"kind": "draft-vocabulary", **machine.description(), "model": arguments.model.stem, "vocab": vocab}
    document["texts"] = [{"text": name} | coverage(tokenizer, some) for name, some in every.items() if some]
    for one in document["texts"]:
        print(f"{one['text']:12s} {one['tokens']:7d} tokens, first {one['first']:.3f}, covered {one['covered']:.3f}")
    results.write_json(arguments.out or results.path_of(document), document)


if __name__ == "__main__":
    main()
