"""Facts of models for Ollama's API: /api/tags, /api/show, /api/ps. Of one that is not loaded, its headers have them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from powerinfer.errors import PowerInferError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.mixes import FILE_TYPES
from powerinfer.runtime.thinking import thoughts_by
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.llama_completion import InfillMarks
from powerinfer.serve.ollama_bodies import moment
from powerinfer.serve.service import TAG
from powerinfer.text.dialect_reading import read_dialect
from powerinfer.text.model_text import chat_template_of, sampling_defaults_of, tokenizer_of

if TYPE_CHECKING:
    from powerinfer.config import ModelConfig
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM
    from powerinfer.serve.served import ServedModel
    from powerinfer.text.chat import ChatTemplate
    from powerinfer.text.sampling_defaults import SamplingDefaults
    from powerinfer.text.tokenizer import Tokenizer

NEVER = "9999-12-31T23:59:59Z"  # when a model that stays is unloaded
MAX_TEXT = 4096  # characters of a text of the metadata
SCALARS = (str, int, float, bool)

NAMES = {"repetition_penalty": "repeat_penalty"}
"""Ollama's names of parameters of sampling."""


class Facts(NamedTuple):
    """Facts of a model in a list. bytes: on disk; digest: of the names, sizes and times of its files."""

    bytes: int
    modified: float
    digest: str
    details: dict[str, Any]


def listed(model: ServedModel, llm: LLM | None, name: str) -> dict[str, Any]:
    """A row of /api/tags. llm: None where it is not loaded. Headers may be read for it: not for the event loop."""
    facts = _facts_of(model, llm)
    shown = name if ":" in name else name + TAG
    return {
        "name": shown,
        "model": shown,
        "modified_at": moment(facts.modified),
        "size": facts.bytes,
        "digest": facts.digest,
        "details": facts.details,
    }


def running(model: ServedModel, llm: LLM, keep_alive: float | None) -> dict[str, Any]:
    """A row of /api/ps, of a model that is loaded. keep_alive: seconds without a request, None: it stays."""
    row = listed(model, llm, model.name)
    del row["modified_at"]
    reserved = model.reserved
    if reserved.ram or reserved.vram:  # the only model of a server has no budget
        row |= {"size": reserved.ram + reserved.vram, "size_vram": reserved.vram}
    left = None if keep_alive is None else max(0.0, model.used + keep_alive - time.monotonic())
    return row | {
        "expires_at": NEVER if left is None else moment(time.time() + left),
        "context_length": llm.context,
    }


def _facts_of(model: ServedModel, llm: LLM | None) -> Facts:
    path = model.source.path
    if llm is not None and llm.checkpoint is not None:
        return _facts(llm.checkpoint)
    try:
        if path is not None and llm is None:
            return _stored_facts(path, _changed(path))
    except PowerInferError:  # it is among the models nevertheless, and says why once it is asked
        pass
    family = "" if llm is None else llm.config.architecture
    return Facts(0, 0.0, hashlib.sha256(model.name.encode()).hexdigest(), _details("", family, "", 0))


def _changed(path: Path) -> int:
    """The time when a file was changed; 0 for one that is no more, which is said by whoever opens it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(1024)
def _stored_facts(path: Path, changed: int) -> Facts:
    """changed: when the file was, so that another one is read anew."""
    return _facts(open_checkpoint(path))


def _facts(checkpoint: Checkpoint) -> Facts:
    digest, modified = hashlib.sha256(), 0
    for file in checkpoint.files:
        changed = _changed(file.path)
        modified = max(modified, changed)
        digest.update(f"{file.path.name} {file.size} {changed}\n".encode())
    kind = "gguf" if checkpoint.source == "gguf" else "safetensors"
    stated = checkpoint.metadata.get("general.file_type")
    level = FILE_TYPES.get(stated) if type(stated) is int else None
    details = _details(
        kind, checkpoint.config.architecture, level or checkpoint.main_type.upper(), checkpoint.parameters
    )  # fmt: skip
    return Facts(checkpoint.file_bytes, modified / 1e9, digest.hexdigest(), details)


def _details(kind: str, family: str, level: str, parameters: int) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(parameters),
        "quantization_level": level,
    }


def _short(count: int) -> str:
    """A number of weights as Ollama writes it: 134.52M, 8.0B."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    if count >= 10**6:
        return f"{count / 10**6:.2f}M"
    return f"{count / 10**3:.2f}K" if count >= 1000 else str(count or "")


# ---------------------------------------------------------------------------------------------------------- /api/show


@dataclass(frozen=True)
class _ModelFacts:
    """Facts of a model, loaded or not. context: in tokens."""

    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling: SamplingDefaults
    metadata: Mapping[str, Any]
    parameters: int
    context: int

    @classmethod
    def loaded(cls, llm: LLM) -> _ModelFacts:
        metadata, parameters = {}, 0
        if llm.checkpoint is not None:
            metadata, parameters = llm.checkpoint.metadata, llm.checkpoint.parameters
        return cls(llm.config, llm.tokenizer, llm.template, llm.sampling, metadata, parameters, llm.context)

    @classmethod
    def stored(cls, path: Path) -> _ModelFacts:
        checkpoint = open_checkpoint(path)
        return cls(
            checkpoint.config, tokenizer_of(checkpoint), chat_template_of(checkpoint), sampling_defaults_of(checkpoint),
            checkpoint.metadata, checkpoint.parameters, checkpoint.config.context_length,
        )  # fmt: skip

    @property
    def capabilities(self) -> list[str]:
        """Uses of the model. Every one has embeddings, but clients keep those that say so out of chats."""
        names = ["completion"]
        if self.template is not None:
            form = read_dialect(self.template.tool_template)
            names += ["tools"] * (form.announced_in != "words" or form.history != "words")
        names += ["thinking"] * (thoughts_by(self.template, self.tokenizer) is not None)
        return names + ["insert"] * self._fills_in

    @property
    def _fills_in(self) -> bool:
        try:
            InfillMarks.from_tokenizer(self.tokenizer)
        except ApiError:
            return False
        return True

    @property
    def info(self) -> dict[str, Any]:
        """The metadata without lists and long texts, by GGUF's names. context_length is what the server computes."""
        config, family = self.config, str(self.metadata.get("general.architecture") or self.config.architecture)
        facts: dict[str, Any] = {
            "general.architecture": family,
            "general.name": config.name,
            "general.parameter_count": self.parameters,
            f"{family}.block_count": config.n_layers,
            f"{family}.embedding_length": config.d_model,
            f"{family}.vocab_size": config.vocab_size,
        }
        stated = {name: value for name, value in self.metadata.items() if "." in name and isinstance(value, SCALARS)}
        facts |= {name: value for name, value in stated.items() if not isinstance(value, str) or len(value) <= MAX_TEXT}
        facts.pop("tokenizer.chat_template", None)
        return facts | {f"{family}.context_length": self.context}

    @property
    def document(self) -> dict[str, Any]:
        lines = [f"{NAMES.get(name, name):30} {value}" for name, value in self.sampling.values.items()]
        terms = self.metadata.get("general.license")
        return {
            "license": terms if isinstance(terms, str) else "",
            "parameters": "\n".join(lines),
            "template": "" if self.template is None else self.template.source,
            "model_info": self.info,
            "capabilities": self.capabilities,
        }


def shown(model: ServedModel, llm: LLM | None) -> dict[str, Any]:
    """The answer of /api/show; as `listed`. PowerInferError for a file that cannot be loaded."""
    facts, path = _facts_of(model, llm), model.source.path
    if llm is not None:
        document = _ModelFacts.loaded(llm).document
    elif path is not None:
        document = _stored_document(path, _changed(path))
    else:
        raise model.not_ready()
    return document | {
        "modelfile": f"FROM {model.name}\n",
        "details": facts.details,
        "modified_at": moment(facts.modified),
    }


@lru_cache(64)
def _stored_document(path: Path, changed: int) -> dict[str, Any]:
    """changed: as of `_stored_facts`."""
    return _ModelFacts.stored(path).document
