"""The route `OVERVIEW`: every model of the server and its state, for the page. Nothing is loaded for it, and unlike
/v1/models it answers while the only model is being loaded, too, or cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powerinfer.hub import pinned_at
from powerinfer.serve.served import ServedModel

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM

OVERVIEW = "/v1/engine/models"
SMALL = 1_000_000_000  # weights, below which a model is often wrong about facts


def overview_row(model: ServedModel) -> dict[str, Any]:
    """A model and its state. loading: its progress; reason: why it failed; `loaded`: None unless it is."""
    return {
        "id": model.name,
        "status": model.status,
        "loading": model.loading(),
        "waiting": model.waiting,
        "reason": None if model.failure is None else str(model.failure),
        "loaded": _loaded(model.llm) if model.ready else None,
    }


def _loaded(llm: LLM) -> dict[str, Any]:
    """The facts of a loaded model. chats: whether it has a chat template; note: for those who may take a small model
    for a good one; sampling: its defaults."""
    parameters = None if llm.checkpoint is None else llm.checkpoint.parameters
    params = llm.default_params(max_tokens=None)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "context": llm.context,
        "chats": llm.template is not None,
        "parameters": parameters,
        "note": _note(llm.checkpoint),
        "sampling": {name: getattr(params, name) for name in names},
    }


def _note(checkpoint: Checkpoint | None) -> str | None:
    """A line about a small model, in Markdown: what is known about this one, else by its size."""
    if checkpoint is None or checkpoint.parameters >= SMALL:
        return None
    if (pinned := pinned_at(checkpoint.path)) is not None and pinned.note:
        return pinned.note
    size = f"{max(1, round(checkpoint.parameters / 1e6))} million weights"
    return f"This is a small model ({size}), and often wrong; `powerinfer pull --names` lists larger ones"
