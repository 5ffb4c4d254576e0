"""Thinking: the fields by which clients turn it on and off, limit it and show it, and what they mean for a model.

OpenAI's reasoning_effort and reasoning, OpenRouter's reasoning, Anthropic's thinking, and fields of llama-server, vLLM,
DeepSeek and Qwen. A model that does not think takes all of them: an answer without thoughts is all that it can give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from powerinfer.serve.api_error import ApiError, not_supported
from powerinfer.text.thoughts import EFFORTS, Thinking

MAX_INT = 2**31 - 1

Budget = Annotated[int, Field(ge=-1, le=MAX_INT)]  # tokens; -1: any number
Word = Annotated[str, Field(max_length=64)]

FORMATS = {"none": False, "auto": True, "deepseek": True, "deepseek-legacy": True}
"""Values of llama-server's reasoning_format, and whether thoughts are told apart."""

TYPES: Mapping[Any, bool | None] = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, None: None}
"""Values of Anthropic's thinking.type, and whether to think; None: as the model does."""

_REASONING = ("effort", "enabled", "exclude", "max_tokens", "summary", "generate_summary")
_THINKING = ("type", "budget_tokens", "display", "clear_thinking")


class ThinkingWishes(NamedTuple):
    """Wishes of a request. separate: thoughts are told apart from the answer; shows: they are sent."""

    thinking: Thinking
    separate: bool = True
    shows: bool = True


class Defaults(NamedTuple):
    """Values of reasoning_format and reasoning_budget where a request says nothing."""

    form: str = "auto"
    budget: int = -1


class ThinkingFields(BaseModel):
    """Fields of a conversation that concern thinking."""

    reasoning_effort: Word | None = None
    reasoning: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    thinking: Annotated[dict[str, Any], Field(max_length=16)] | bool | None = None
    think: Word | bool | None = None
    enable_thinking: bool | None = None
    reasoning_format: Word | None = None
    reasoning_budget: Budget | None = None
    thinking_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    preserve_thinking: bool | None = None

    def take_defaults(self, defaults: Defaults) -> None:
        """Take the server's for what the request does not say."""
        self.reasoning_format = self.reasoning_format or defaults.form
        budgets = (self.reasoning_budget, self.thinking_budget, self.thinking_budget_tokens, self.thinking_token_budget)
        of_parts = ((self.reasoning or {}).get("max_tokens"), (self._thinking or {}).get("budget_tokens"))
        if all(budget is None for budget in (*budgets, *of_parts)):
            self.reasoning_budget = defaults.budget

    def asked_thinking(self) -> ThinkingWishes:
        """Wishes of all these fields together. ApiError for a value that is none."""
        reasoning = _members(self.reasoning, _REASONING, "reasoning")
        thinking = _members(self._thinking, _THINKING, "thinking")
        kind = thinking.get("type")
        if not isinstance(kind, str | None) or kind not in TYPES:
            raise ApiError(400, "thinking.type must be enabled, disabled or adaptive", param="thinking.type")
        switch = self.think if isinstance(self.think, bool) else None
        switches = [self.enable_thinking, switch, _flag(reasoning, "enabled", "reasoning"), TYPES[kind]]
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.get("effort")}
        efforts["think"] = None if isinstance(self.think, bool) else self.think
        effort = next(filter(None, [_effort(value, where) for where, value in efforts.items()]), None)
        budgets = [
            self.reasoning_budget, self.thinking_budget, self.thinking_budget_tokens, self.thinking_token_budget,
            _budget(reasoning.get("max_tokens"), "reasoning.max_tokens"),
            _budget(thinking.get("budget_tokens"), "thinking.budget_tokens"),
        ]  # fmt: skip
        limits = [budget for budget in budgets if budget is not None and budget >= 0]
        budget, cleared = min(limits, default=None), _flag(thinking, "clear_thinking", "thinking")
        keep = self.preserve_thinking if cleared is None else not cleared
        if False in switches or effort == "none" or budget == 0:
            wanted = Thinking(False, None, 0, keep)
        else:
            wanted = Thinking(True if True in switches else None, effort, budget, keep)
        return self._shown(wanted, reasoning, thinking)

    @property
    def _thinking(self) -> Mapping[str, Any] | None:
        """`thinking` as an object."""
        switch = self.thinking
        return {"type": "enabled" if switch else "disabled"} if isinstance(switch, bool) else switch

    def _shown(self, wanted: Thinking, reasoning: Mapping[str, Any], thinking: Mapping[str, Any]) -> ThinkingWishes:
        form = self.reasoning_format or "auto"
        if form not in FORMATS:
            names = ", ".join(FORMATS)
            raise ApiError(400, f"reasoning_format must be one of {names}", param="reasoning_format")
        hidden = _flag(reasoning, "exclude", "reasoning") or thinking.get("display") == "omitted"
        return ThinkingWishes(wanted, FORMATS[form], self.include_reasoning is not False and not hidden)


def _members(fields: Mapping[str, Any] | None, names: tuple[str, ...], path: str) -> Mapping[str, Any]:
    for name, value in (fields or {}).items():
        if name not in names and value is not None:
            raise not_supported(f"{path}.{name[:64]}")
    return fields or {}


def _flag(values: Mapping[str, Any], name: str, path: str) -> bool | None:
    value = values.get(name)
    if not isinstance(value, bool | None):
        raise ApiError(400, f"{path}.{name} must be a boolean", param=f"{path}.{name}")
    return value


def _effort(value: Any, path: str) -> str | None:
    """None: the model's own; "none": no thinking."""
    if value is None or value == "default":
        return None
    if value not in (*EFFORTS, "none"):
        problem = f"not {value!r}"[:64]
        raise ApiError(400, f"{path} must be one of none, {', '.join(EFFORTS)}; {problem}", param=path)
    return str(value)


def _budget(value: Any, path: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MAX_INT:
        raise ApiError(400, f"{path} must be a whole number of tokens", param=path)
    return value
