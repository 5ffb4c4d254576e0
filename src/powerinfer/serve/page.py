"""The page at /: its files, and the headers that say what a browser may do with them."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/server.js": ("server.js", "text/javascript; charset=utf-8"),
    "/chats.js": ("chats.js", "text/javascript; charset=utf-8"),
    "/storage.js": ("storage.js", "text/javascript; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
}
"""File and type by path. They hold nothing of the model, so they are sent without an API key."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """The page's routes; not in the API's schema."""
    folder = Path(__file__).parent / "page_files"
    for path, (name, kind) in FILES.items():
        _add_file(app, path, (folder / name).read_bytes(), kind)


def _add_file(app: FastAPI, path: str, body: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(body, headers=HEADERS, media_type=kind)
