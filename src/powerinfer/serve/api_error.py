"""Every refusal of the API, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

On Anthropic's routes it has Anthropic's: {"type": "error", "error": {"type", "message"}}; on Ollama's
{"error": message}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""OpenAI's error types by status; every other status is an invalid_request_error."""

ANTHROPIC_ROUTES = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; every other status is an invalid_request_error."""

OLLAMA_ROUTES = "/api/"
"""Beginning of the paths of Ollama's API."""

LLAMA_ROUTES = ("/completion", "/completions", "/infill")
"""llama-server's own, where a context error is told as it does."""

RETRY_AFTER = {429: 1, 503: 1}
"""Seconds after which a client may try again, by status."""


NO_NAMES: Mapping[str, str] = {}
"""Names of an API whose fields are OpenAI's of chats."""


class ApiError(HTTPException):
    """A request that is not answered. param: the field that is wrong; code: what clients may test for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, headers=headers_of(status))
        self.param, self.code = param, code

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Copy of this error with other names of fields, in its message and its `param`."""
        if names:  # a whole name, or the part of one that begins with a dot
            parts = "|".join(re.escape(name) if name[0] == "." else rf"(?<![\w.]){re.escape(name)}" for name in names)
            pattern = re.compile(rf"(?:{parts})(?!\w)")
            self.detail = pattern.sub(lambda match: names[match[0]], str(self.detail))
            self.param = names.get(self.param or "", self.param)
        return self

    def document(self, path: str = "") -> dict[str, Any]:
        """The body of the answer on a route."""
        return error_document(self.status_code, str(self.detail), self.param, self.code, path)


class NoModelError(ApiError):
    """A name that no model has. known: names that there are, for people."""

    def __init__(self, name: str, available: str) -> None:
        super().__init__(404, f"no model {name!r}; this server has {available}", param="model", code="model_not_found")
        self._name, self._available = name, available

    def document(self, path: str = "") -> dict[str, Any]:
        if not is_ollama(path):
            return super().document(path)
        hint = "`powerinfer pull` gets another one, `serve -m` or `serve --models` offers it"
        message = f"model {self._name!r} not found: this server has {self._available}; {hint}"
        return error_document(404, message, path=path)


class ContextError(ApiError):
    """A prompt that does not fit the context, told in the words by which an API's clients know that.

    prompt: its tokens, `least`: or more; wanted: tokens to generate; context: of both together. Claude Code lowers
    max_tokens by the numbers, and LiteLLM and LangChain tell this error from others by these words alone.
    """

    def __init__(self, prompt: int, wanted: int, context: int, least: bool = False, param: str = "prompt") -> None:
        self._numbers = prompt, wanted, context
        self._most = "at least " if least else ""
        super().__init__(400, self._openai(), param=param, code="context_length_exceeded")

    def document(self, path: str = "") -> dict[str, Any]:
        if is_anthropic(path):
            return error_document(self.status_code, self._anthropic(), path=path)
        document = super().document(path)
        if path in LLAMA_ROUTES:
            document["error"] |= self._llama()
        return document

    def _llama(self) -> dict[str, Any]:
        prompt, _, context = self._numbers
        reason = f"the prompt of {self._most}{prompt} tokens exceeds the available context size of {context} tokens"
        sizes = {"n_prompt_tokens": prompt, "n_ctx": context}
        return {"message": f"{reason}: shorten it", "type": "exceed_context_size_error", **sizes}

    def _openai(self) -> str:
        prompt, wanted, context = self._numbers
        return (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{self._most}{prompt + wanted} tokens ({prompt} in the prompt, {wanted} in the completion): the prompt is "
            "too long" + (" for that; shorten it or lower max_tokens" if prompt < context else "; shorten it")
        )

    def _anthropic(self) -> str:
        prompt, wanted, context = self._numbers
        if prompt >= context:
            return f"prompt is too long: {self._most}{prompt} tokens > {context} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {context}, decrease input "
            "length or `max_tokens` and try again"
        )


def error_document(
    status: int, message: str, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """OpenAI's error object; on Anthropic's and Ollama's routes theirs, which have neither param nor code."""
    if is_ollama(path):
        return {"error": message}
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API."""
    return path == ANTHROPIC_ROUTES or path.startswith(f"{ANTHROPIC_ROUTES}/")


def is_ollama(path: str) -> bool:
    """Whether a route is of Ollama's API."""
    return path.startswith(OLLAMA_ROUTES)


def headers_of(status: int) -> dict[str, str]:
    """Headers that go with a refusal."""
    headers = {"Retry-After": str(RETRY_AFTER[status])} if status in RETRY_AFTER else {}
    specific = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
    return headers | specific.get(status, {})


def shutting_down() -> ApiError:
    """Error that ends an answer when the server shuts down."""
    return ApiError(503, "the server is shutting down: the answer is not complete", code="aborted")


def not_supported(name: str, hint: str = "") -> ApiError:
    """Error for a field or value that this server does not support."""
    return ApiError(400, f"{name} is not supported{hint}", param=path_of(name), code="unsupported_parameter")


def place_in(message: str) -> str | None:
    """The field that a message of the engine begins with, if it is one."""
    match = _PLACE.match(message)
    return match[1] if match else None


_PLACE = re.compile(r"((?:messages|tools)\[[\w.\[\]]+|logit_bias|stop_token_ids|stop|temperature|top_[pk])(?=[ :,])")


def path_of(name: str) -> str:
    """The field of "field 'value'"."""
    return name.partition(" ")[0]
