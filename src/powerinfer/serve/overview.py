"""The route `OVERVIEW`: every model of the server and its state, for the page. Nothing is loaded for it, and unlike
/v1/models it answers while the only model is being loaded, too, or cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powerinfer.serve.served import ServedModel

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM

OVERVIEW = "/v1/engine/models"
SMALL = 1_000_000_000  # weights, below which an instruct model is often wrong about facts


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
    """The facts of a loaded model. chats: whether it has a chat template; small: whether its answers are often wrong;
    sampling: its defaults."""
    parameters = None if llm.checkpoint is None else llm.checkpoint.parameters
    params = llm.default_params(max_tokens=None)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "context": llm.context,
        "chats": llm.template is not None,
        "parameters": parameters,
        "small": parameters is not None and parameters < SMALL,
        "sampling": {name: getattr(params, name) for name in names},
    }
