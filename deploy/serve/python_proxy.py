"""Makes Serve's Python proxy read every request. Serve loads `middlewares` in the proxy's process, before its server
starts. HAProxy's configuration has the same rules (`aerie.deploy.haproxy`).

The proxy (Ray 2.60) decodes some headers strictly: a byte that is not UTF-8 gives a 500 without a body on every path.
Its server (uvicorn 0.54 with httptools) loses the body of a request that offers another protocol, as Java's HttpClient
does with each POST ("Upgrade: h2c"). With h11 it ignores the offer; that takes 0.2 ms more per request and 3 us per
chunk, where the proxy takes 1 ms per chunk.
"""

import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from aerie.cluster.start_log import REQUEST_ID
from aerie.deploy.haproxy import SERVES_OWN, TRACE_HEADERS

ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.middlewares"}
_UNREADABLE = b"not printable"  # replaces a request id: the ingress refuses it with an explanation
_READABLE_ID = re.compile(REQUEST_ID.pattern.encode())
_PRINTABLE = re.compile(rb"[ -~]*")
_SERVES_OWN = re.compile(SERVES_OWN.encode(), re.IGNORECASE)
_TRACE_HEADERS = tuple(name.encode() for name in TRACE_HEADERS)


class CleanHeaders:
    """Replaces invalid request ids, and removes headers that control Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [
                (name, _UNREADABLE if name == b"x-request-id" and not _READABLE_ID.fullmatch(value) else value)
                for name, value in scope["headers"]
                if not _SERVES_OWN.match(name) and (name not in _TRACE_HEADERS or _PRINTABLE.fullmatch(value))
            ]
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares for Serve's proxy, and let its server read HTTP with h11."""
    HTTP_PROTOCOLS["auto"] = HTTP_PROTOCOLS["h11"]
    return [Middleware(CleanHeaders)]
