"""A tokenizer from a Hugging Face folder: tokenizer.json or tiktoken.model, and the small JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.text.tokenizer import Added, Engine, Tokenizer, Vocabulary, ends_of_generation, native_errors
from powerinfer.text.tokenizer_ranks import FILE, engine_of_ranks

if TYPE_CHECKING:
    import tokenizers

MAX_FILE_BYTES = 1 << 28  # the largest tokenizer.json in use is a tenth of this
MAX_SIDE_FILE_BYTES = 1 << 24
MAX_TEMPLATES = 64  # of a folder
MAX_FRAME = 16  # tokens around a text

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")  # in the config.json of other models


def tokenizer_from_folder(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json or tiktoken.model, and the files beside it).

    ModelError if the files are malformed or require something unsupported.
    """
    folder = Path(path)
    file = tokenizer_file(folder)
    if file is None:
        raise ModelError(
            f"{folder} has no tokenizer.json: copy it from the model's repository, or from that of its base model; if "
            "those have none, take a GGUF file, or have transformers write it, tokenizer.save_pretrained(folder), "
            "which it can for most"
        )
    data = _read(file, MAX_FILE_BYTES)
    import tokenizers

    with native_errors(f"{file}"):
        if file.name == FILE:
            engine = engine_of_ranks(data, _side_file(folder / "tokenizer_config.json"))
        else:
            engine = tokenizers.Tokenizer.from_buffer(data)
        engine.no_truncation()
        engine.no_padding()
        vocabulary = _vocabulary(engine, folder)
    return Tokenizer(vocabulary, lambda: Engine(engine))


def tokenizer_file(folder: Path) -> Path | None:
    """The file with the vocabulary in a Hugging Face folder, if it has one that can be read."""
    return next((folder / name for name in ("tokenizer.json", FILE) if (folder / name).is_file()), None)


def _read(path: Path, limit: int) -> bytes:
    try:
        if path.stat().st_size > limit:
            raise ModelError(f"{path} is larger than {limit >> 20} MiB: not a tokenizer file")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _side_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path, MAX_SIDE_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {' '.join(str(error).split())[:100]}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _vocabulary(engine: tokenizers.Tokenizer, folder: Path) -> Vocabulary:
    config = {**_side_file(folder / "special_tokens_map.json"), **_side_file(folder / "tokenizer_config.json")}
    _add_configured(engine, config)
    bos, eos, unk = (_named(engine, config, name) for name in ("bos_token", "eos_token", "unk_token"))
    added = tuple(
        Added(token.content, at, token.special, token.lstrip, token.rstrip)
        for at, token in sorted(engine.get_added_tokens_decoder().items())
    )
    ends = {at for at in (eos, *_generation_ends(folder)) if at is not None}
    ends.update(_ends_by_name(engine.get_added_tokens_decoder()).values())
    size = max([engine.get_vocab_size(with_added_tokens=True), *(token.id + 1 for token in added)])
    return Vocabulary(
        piece=engine.id_to_token,
        size=size,
        added=added,
        added_as_pieces=True,
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset(at for at in ends if at < size),
        unk_id=unk,
        chat_templates=_chat_templates(folder, config),
        **_frame(engine, bos, eos),
        **_spelling(engine),
    )


def _token_fields(value: Any) -> dict[str, Any] | None:
    """A token of the side files, which is a string or an object with `content`, as an object."""
    if isinstance(value, str):
        return {"content": value}
    return value if isinstance(value, dict) and isinstance(value.get("content"), str) else None


def _add_configured(engine: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds the tokens that only tokenizer_config.json lists, and marks those of `bos_token` and the like as special."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ModelError("added_tokens_decoder in tokenizer_config.json must be an object")
    present = engine.get_added_tokens_decoder()
    for at, value in sorted((int(at), value) for at, value in listed.items()):
        fields = _token_fields(value)
        if fields is None:
            raise ModelError(f"added_tokens_decoder in tokenizer_config.json: entry {at} has no content")
        if at not in present:
            names = ("lstrip", "rstrip", "normalized", "single_word", "special")
            flags = {name: bool(fields.get(name)) for name in names}
            engine.add_tokens([AddedToken(fields["content"], **flags)])
        if engine.token_to_id(fields["content"]) != at:
            raise ModelError(f"tokenizer_config.json and the vocabulary give {fields['content'][:40]!r} different ids")
    added = engine.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    named = [_token_fields(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")]
    for fields in named:
        if fields and fields["content"] not in special and engine.token_to_id(fields["content"]) is not None:
            engine.add_special_tokens([AddedToken(fields["content"], normalized=False, special=True)])
    for at in _ends_by_name(added).values():
        token = added[at]
        if not token.special:
            token.special = True
            engine.add_special_tokens([token])


def _ends_by_name(added: Mapping[int, Any]) -> dict[str, int]:
    """The added tokens that end an answer, by their names."""
    special = {at for at, token in added.items() if token.special}
    return ends_of_generation({token.content: at for at, token in added.items()}, special)


def _named(engine: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    fields = _token_fields(config.get(name))
    return None if fields is None else engine.token_to_id(fields["content"])


def _generation_ends(folder: Path) -> list[int]:
    """The end tokens in generation_config.json or, in its absence, config.json: an id or a list of them.

    A model that takes more than text has those of its text's part in that part of config.json.
    """
    for name in ("generation_config.json", "config.json"):
        document = _side_file(folder / name)
        inner = [document.get(part) for part in _TEXT_PARTS] if name == "config.json" else []
        values = [part.get("eos_token_id") for part in (document, *inner) if isinstance(part, dict)]
        value = next((value for value in values if value is not None), None)
        if value is not None:
            ends = value if isinstance(value, list) else [value]
            if not all(type(at) is int and at >= 0 for at in ends):
                raise ModelError(f"eos_token_id in {folder / name} must be a token id or a list of them")
            return ends
    return []


def _frame(engine: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> dict[str, Any]:
    """Tokens that the post-processor puts around a text: add_bos and add_eos, or before and after."""
    text: list[int] = []
    framed: list[int] = []
    for probe in ("a", "0", " ", ""):  # the first that has tokens
        text = engine.encode(probe, add_special_tokens=False).ids
        framed = engine.encode(probe, add_special_tokens=True).ids
        if text:
            break
    places = range(len(framed) - len(text) + 1)
    at = next((at for at in places if framed[at : at + len(text)] == text), None)
    if at is None or len(framed) > len(text) + MAX_FRAME:
        raise ModelError("the post-processor in tokenizer.json does more than put a few tokens around a text")
    if not text:
        at = 1 if framed[:1] == [bos] else 0 if framed == [eos] else len(framed)
    before, after = tuple(framed[:at]), tuple(framed[at + len(text) :])
    return {
        "add_bos": before == (bos,),
        "add_eos": after == (eos,),
        "before": () if before == (bos,) else before,
        "after": () if after == (eos,) else after,
    }


def _spelling(engine: tokenizers.Tokenizer) -> dict[str, Any]:
    """Spelling of text by pieces, read off the decoder: byte_level, byte_pieces and strip_space of the Vocabulary."""
    state = json.loads(engine.decoder.__getstate__()) if engine.decoder is not None else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    for name, step in steps.items():
        signs = {"Metaspace": ("replacement",), "Replace": ("pattern", "content")}.get(name, ())
        if [step.get(sign) for sign in signs] not in ([], ["▁"], [{"String": "▁"}, " "], [{"Regex": "▁"}, " "]):
            raise ModelError(f"tokenizer.json: a decoder {name} of another sign than ▁ for a space is not supported")
    if set(steps) == {"ByteLevel"}:
        return {"byte_level": True}
    if "Metaspace" in steps and set(steps) <= {"Metaspace", "ByteFallback", "Fuse"}:
        strip = steps["Metaspace"].get("prepend_scheme", "always") != "never"
    elif "Replace" in steps and set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strip = steps.get("Strip", {}).get("start", 0) > 0
    else:
        name = "+".join(steps)[:60]
        raise ModelError(f"tokenizer.json: decoder {name} is not supported (those of byte-level and SentencePiece are)")
    bytes_of = {engine.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)} if "ByteFallback" in steps else {}
    return {
        "byte_level": False,
        "strip_space": strip,
        "byte_pieces": {at: byte for at, byte in bytes_of.items() if at is not None},
    }


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name. Files of their own take precedence over the entry in tokenizer_config.json."""
    templates = _listed_templates(_side_file(folder / "chat_template.json").get("chat_template"), folder)
    templates = templates or _listed_templates(config.get("chat_template"), folder)
    if (folder / "chat_template.jinja").is_file():
        templates = {"default": _template_file(folder / "chat_template.jinja")}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if len(more) > MAX_TEMPLATES:
        raise ModelError(f"{folder / 'additional_chat_templates'} has more than {MAX_TEMPLATES} chat templates")
    return templates | {path.stem: _template_file(path) for path in more if path.is_file()}


def _listed_templates(value: Any, folder: Path) -> dict[str, str]:
    """The value of `chat_template` in a JSON file: a template, a list of objects with name and template, or an object
    of templates by name."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    named = value if isinstance(value, dict) else {} if value is None else {"default": value}
    if not all(isinstance(text, str) for entry in named.items() for text in entry):
        raise ModelError(f"the chat template in {folder} must be a string, or several with names")
    if len(named) == 1:
        return {"default": next(iter(named.values()))}
    return named


def _template_file(path: Path) -> str:
    try:
        return _read(path, MAX_SIDE_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text") from error
