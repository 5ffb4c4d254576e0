"""A tokenizer from a Hugging Face folder: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.formats.tokenizer import Added, Engine, Tokenizer, Vocabulary, ends_of_generation, native_errors

if TYPE_CHECKING:
    import tokenizers

MAX_FILE_BYTES = 1 << 28  # the largest tokenizer.json in use is a tenth of this
MAX_SIDE_FILE_BYTES = 1 << 24


def tokenizer_from_folder(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json and the files beside it).

    ModelError if the files are malformed or require something unsupported.
    """
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: copy it from the model's repository, or from that of its base model; "
            "transformers writes it for any tokenizer: tokenizer.save_pretrained(folder)"
        )
    data = _read(folder / "tokenizer.json", MAX_FILE_BYTES)
    import tokenizers

    with native_errors(f"{folder / 'tokenizer.json'}"):
        engine = tokenizers.Tokenizer.from_buffer(data)
        engine.no_truncation()
        engine.no_padding()
        vocabulary = _vocabulary(engine, folder)
    return Tokenizer(vocabulary, lambda: Engine(engine))


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
    ends |= ends_of_generation(added)
    add_bos, add_eos = _frame(engine, bos, eos)
    size = max([engine.get_vocab_size(with_added_tokens=True), *(token.id + 1 for token in added)])
    return Vocabulary(
        piece=engine.id_to_token,
        size=size,
        added=added,
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset(at for at in ends if at < size),
        unk_id=unk,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_chat_template(folder, config),
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
            raise ModelError(f"tokenizer_config.json and tokenizer.json give {fields['content'][:40]!r} different ids")
    special = {token.content for token in engine.get_added_tokens_decoder().values() if token.special}
    for name in ("bos_token", "eos_token", "unk_token"):
        fields = _token_fields(config.get(name))
        if fields and fields["content"] not in special and engine.token_to_id(fields["content"]) is not None:
            engine.add_special_tokens([AddedToken(fields["content"], normalized=False, special=True)])


def _named(engine: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    fields = _token_fields(config.get(name))
    return None if fields is None else engine.token_to_id(fields["content"])


def _generation_ends(folder: Path) -> list[int]:
    """The end tokens in generation_config.json or, in its absence, config.json: an id or a list of them."""
    for name in ("generation_config.json", "config.json"):
        value = _side_file(folder / name).get("eos_token_id")
        if value is not None:
            ends = value if isinstance(value, list) else [value]
            if not all(type(at) is int and at >= 0 for at in ends):
                raise ModelError(f"eos_token_id in {folder / name} must be a token id or a list of them")
            return ends
    return []


def _frame(engine: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> tuple[bool, bool]:
    """Whether the post-processor puts the beginning token first and the end token last."""
    frame = engine.encode("", add_special_tokens=True).ids
    known = {(): (False, False), (bos,): (True, False), (eos,): (False, True), (bos, eos): (True, True)}
    if bos is not None and bos == eos and tuple(frame) == (bos,):
        probe = engine.encode("a", add_special_tokens=True).ids
        return probe[0] == bos, probe[-1] == bos
    if tuple(frame) not in known:
        names = ", ".join(str(engine.id_to_token(at)) for at in frame)
        raise ModelError(f"the post-processor in tokenizer.json adds {names[:100]}, not the model's bos and eos tokens")
    return known[tuple(frame)]


def _spelling(engine: tokenizers.Tokenizer) -> dict[str, Any]:
    """How pieces spell text, read off the decoder: byte_level, byte_pieces and strip_space of the Vocabulary."""
    state = json.loads(engine.decoder.__getstate__()) if engine.decoder is not None else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
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


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a separate file takes precedence over the entry in tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        try:
            return _read(folder / "chat_template.jinja", MAX_SIDE_FILE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{folder / 'chat_template.jinja'} is not UTF-8 text") from error
    value = _side_file(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        templates = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = templates.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"the chat template in {folder} must be a string")
    return value
