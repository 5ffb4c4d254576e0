"""Every refusal of the API, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

On Anthropic's routes it has Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

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

RETRY_AFTER = {429: 1, 503: 1}
"""Seconds after which a client may try again, by status."""


class ApiError(HTTPException):
    """A request that is not answered. param: the field that is wrong; code: what clients may test for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, headers=headers_of(status))
        self.param, self.code = param, code

    def document(self, path: str = "") -> dict[str, Any]:
        """The body of the answer on a route."""
        return error_document(self.status_code, str(self.detail), self.param, self.code, path)


def error_document(
    status: int, message: str, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """OpenAI's error object; on Anthropic's routes theirs, which has neither param nor code."""
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API."""
    return path == ANTHROPIC_ROUTES or path.startswith(f"{ANTHROPIC_ROUTES}/")


def headers_of(status: int) -> dict[str, str]:
    """Headers that go with a refusal."""
    headers = {"Retry-After": str(RETRY_AFTER[status])} if status in RETRY_AFTER else {}
    own = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
    return headers | own.get(status, {})


def not_supported(name: str, hint: str = "") -> ApiError:
    """What a client asks for and this server does not have."""
    return ApiError(400, f"{name} is not supported{hint}", param=name, code="unsupported_parameter")
