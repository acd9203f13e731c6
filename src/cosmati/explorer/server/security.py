"""What every answer says to the browser, and who may ask: this machine alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

_STYLES = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
"""Two style elements that Plotly writes when it is loaded: an empty one, and its map's."""
_DIRECTIVES = (
    "default-src 'none'",
    "script-src 'self'",
    f"style-src-elem 'self' {_STYLES}",
    "style-src-attr 'unsafe-inline'",  # sizes of figures; no text of a run ever stands in a style
    "img-src 'self' data: blob:",  # pictures that a figure is saved as
    "connect-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
)
CONTENT_POLICY = "; ".join(_DIRECTIVES)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FAILED = (
    "This page failed, and that is a mistake of Cosmati's: the terminal that serves it says where. "
    "Please report that text. Other pages go on working."
)
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
Handler = Callable[[Request], Awaitable[Response]]


def _host_of(request: Request) -> str:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


async def guard(request: Request, proceed: Handler) -> Response:
    """Refuse a request that names another host, and put the headers on every answer.

    A page elsewhere can point a name of its own at this machine's loopback address; its requests carry that name.
    What fails without a word is told in the terminal and answered with the headers too.
    """
    if _host_of(request) not in LOOPBACK:
        return PlainTextResponse("This server answers to localhost alone.", status_code=421, headers=HEADERS)
    method = request.method
    if method == "HEAD":
        request.scope["method"] = "GET"  # answered as the page itself; the server leaves its body out
    try:
        answer = await proceed(request)
    except Exception:
        logging.getLogger("uvicorn.error").exception("The page %r failed", str(request.url)[:200])
        answer = PlainTextResponse(FAILED, status_code=500)
    request.scope["method"] = method
    answer.headers.update(HEADERS)
    return answer
