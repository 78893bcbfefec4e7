"""The page's files as routes. They need no API key: the page asks the reader for one, and sends it with its own
requests."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# path -> file
_FILES = {"/": "page.html"} | {
    f"/page/{name}": name
    for name in sorted(str(file.relative_to(_FOLDER)) for file in _FOLDER.rglob("*") if file.suffix in _TYPES)
    if name != "page.html"
}
PAGE_ROUTES = frozenset(_FILES)
_HEADERS = {
    # Forbids external and inline content but the page's own pictures, requests to other hosts, and frames.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # so that a browser asks again after an upgrade, and gets 304 if nothing changed
}


def page_routes() -> list[Route]:
    """Read the files, and return a route for each."""
    return [_route(path, name) for path, name in _FILES.items()]


def _route(path: str, name: str) -> Route:
    """Return the route that serves one file, unless the browser's copy (ETag) is the same."""
    file = _FOLDER / name
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-type": _TYPES[file.suffix], "etag": tag}

    async def answer(http: Request) -> Response:
        # A proxy that compresses the file makes the tag a weak one.
        if http.headers.get("if-none-match", "").removeprefix("W/") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return Route(path, answer)
