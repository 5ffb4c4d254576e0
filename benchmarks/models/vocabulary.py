"""The tokenizer of random models: a byte-level BPE vocabulary of any size, as GGUF and folders have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from powerinfer.text.tokenizer_gguf import CONTROL, NORMAL, UNKNOWN, UNUSED


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names = {byte: chr(byte) for byte in plain}
    for extra, byte in enumerate(b for b in range(256) if b not in names):
        names[byte] = chr(256 + extra)
    return [names[byte] for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: (tokens, token types, merges), padded to `size` with unused tokens."""
    tokens = ["<|unk|>", "<|bos|>", "<|eos|>"]
    types = [UNKNOWN, CONTROL, CONTROL]
    tokens += byte_characters()
    space, letters = byte_characters()[ord(" ")], "etaoinshrdlcumwfgypbvkjxqz"
    merges = [f"{space} {letter}" for letter in letters]
    merges += [f"{first} {second}" for first in letters for second in letters]
    tokens += [merge.replace(" ", "") for merge in merges]
    types += [NORMAL] * (len(tokens) - len(types))
    unused = size - len(tokens)
    tokens += [f"<|unused{number}|>" for number in range(unused)]
    types += [UNUSED] * unused
    return tokens, types, merges


def gguf_fields(size: int) -> dict[str, Any]:
    """The metadata of `vocabulary(size)`, under `tokenizer.ggml.`."""
    tokens, types, merges = vocabulary(size)
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    return keys | {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False}


def write_tokenizer_files(folder: Path, vocab: int) -> None:
    """The vocabulary of the GGUF file as tokenizer.json."""
    tokens, _, merges = vocabulary(vocab)
    special = dict(zip(("unk_token", "bos_token", "eos_token"), tokens, strict=False))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": id, "content": text, **flags} for id, text in enumerate(special.values())],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges},
        },
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
