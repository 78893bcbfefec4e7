"""One route: its schemas and its handler. `aerie.cluster.http.app` builds its routes and its OpenAPI document from
these."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from aerie.cluster.http.admission import Admission
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import (
    JSON_HEADERS,
    ApiError,
    body_lost,
    body_too_large,
    body_too_slow,
    forbidden,
    not_json,
)
from aerie.cluster.http.schema.body import check_ignored, parse_body
from aerie.cluster.http.schema.response import ErrorReply
from aerie.cluster.http.tenants import tenant_of

Body = TypeVar("Body", bound=BaseModel)
Reply = TypeVar("Reply", bound=msgspec.Struct)
Handler = Callable[..., Awaitable[msgspec.Struct | Response]]

GENERATES = "generates"  # in a request's state: its route is one that generates
IGNORED = "ignored"  # in a request's state: paths of the body's fields that have no effect
IGNORED_HEADER = b"x-aerie-ignored"
MAX_IGNORED_LISTED = 20  # maximum ignored fields that a reply's header names
_NOT_IN_A_LIST = re.compile(r"[^!-+\--~]")  # not allowed in a header's list: controls, spaces, commas, other scripts


@dataclass(frozen=True)
class Endpoint:
    """A route. `get` and `post` check that the handler fits the types.

    handler: takes the HTTP request and the checked body, if there is one; returns the reply, or a Response of its own.
        Raises ApiError. Its docstring describes the route.
    body: schema of the request's body.
    reply: schemas of the reply; none for plain text.
    event: schemas of a stream's events, if it can stream.
    errors: schemas of replies with other statuses than 200.
    restate: converts errors to the route's own format, if it has one.
    is_administrative: only for keys that administer the server.
    generates: refused before the body is read while the ingress is full or drains.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    body: type[BaseModel] | None
    reply: tuple[type[msgspec.Struct], ...]
    event: tuple[type[msgspec.Struct], ...] = ()
    errors: tuple[type[msgspec.Struct], ...] = (ErrorReply,)
    generates: bool = False
    restate: Callable[[ApiError], ApiError] | None = None
    is_administrative: bool = False


def get(
    path: str,
    handler: Callable[[Request], Awaitable[Reply | Response]],
    reply: type[Reply] | None = None,
    errors: tuple[type[msgspec.Struct], ...] = (ErrorReply,),
) -> Endpoint:
    """Define a GET route."""
    return Endpoint("GET", path, handler, None, () if reply is None else (reply,), errors=errors)


def post(
    path: str,
    handler: Callable[[Request, Body], Awaitable[Reply | Response]],
    body: type[BaseModel],
    reply: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...],
    event: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] = (),
    generates: bool = False,
    error: type[msgspec.Struct] = ErrorReply,
    restate: Callable[[ApiError], ApiError] | None = None,
) -> Endpoint:
    """Define a route with a JSON body."""
    return Endpoint("POST", path, handler, body, _several(reply), _several(event), (error,), generates, restate)


def command(
    path: str,
    handler: Callable[[Request], Awaitable[Reply | Response]],
    reply: type[Reply],
    is_administrative: bool = False,
) -> Endpoint:
    """Define a POST route without a body."""
    return Endpoint("POST", path, handler, None, (reply,), is_administrative=is_administrative)


def delete(path: str, handler: Callable[[Request], Awaitable[Reply | Response]], reply: type[Reply]) -> Endpoint:
    """Define a DELETE route."""
    return Endpoint("DELETE", path, handler, None, (reply,))


def _several(kinds: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]) -> tuple[type[msgspec.Struct], ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def answering(endpoint: Endpoint, admission: Admission, config: EdgeConfig) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that the web framework calls for `endpoint`. It lists ignored fields in the request's state
    (`IGNORED`). Raises ApiError."""

    async def answer(http: Request) -> Response:
        """Serve a request; errors get the endpoint's own form."""
        try:
            return await answer_or_raise(http)
        except ApiError as error:
            if endpoint.restate is None:
                raise
            raise endpoint.restate(error) from None

    async def answer_or_raise(http: Request) -> Response:
        """Check rights and admission, read and check the body, and call the handler."""
        tenant = tenant_of(http.scope)
        if endpoint.is_administrative and not tenant.is_admin:
            raise forbidden(tenant.name)
        if endpoint.generates:
            http.scope["state"][GENERATES] = True
            admission.check()
            tenant.limits.begin()
        if endpoint.body is None:
            return _response(await endpoint.handler(http))
        _check_type(http.headers.get("content-type", ""))
        with admission.reading() as count:
            raw = await _read(http, config.max_body_bytes, config.body_timeout_s, count)
            body, ignored = parse_body(raw, endpoint.body, config.strict)
            http.scope["state"][IGNORED] = ignored
            return _response(await endpoint.handler(http, body))

    return answer


def route_path(scope: Scope) -> str:
    """Return the request's path without the prefix that the application is served below (Serve's `route_prefix` and
    `http_options.root_path`), as Starlette matches routes; "" for the prefix itself."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


def ignore(http: Request, config: EdgeConfig, *names: str) -> None:
    """Name further fields of the body in the reply's header, which have no effect on this model. Raises ApiError where
    `ingress.strict` refuses such fields."""
    check_ignored(names, config.strict)
    http.scope["state"][IGNORED] += names


def json_response(reply: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a reply as JSON."""
    return Response(msgspec.json.encode(reply), status, {**JSON_HEADERS, **(headers or {})})


def _response(reply: msgspec.Struct | Response) -> Response:
    return reply if isinstance(reply, Response) else json_response(reply)


def ignored_header(ignored: Sequence[str]) -> bytes:
    """Return the value of `IGNORED_HEADER`: paths separated by commas; three dots if there are too many."""
    paths = [_NOT_IN_A_LIST.sub("?", path[:100]) for path in ignored[:MAX_IGNORED_LISTED]]
    return ",".join(paths + ["..."] * (len(ignored) > MAX_IGNORED_LISTED)).encode()


def _check_type(content_type: str) -> None:
    """Raise ApiError unless the content type is JSON's."""
    kind, _, rest = content_type.partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (rest == "json" or rest.endswith("+json")):
        raise not_json(content_type)


async def _read(http: Request, max_bytes: int, timeout_s: float, count: Callable[[int], None]) -> bytes:
    """Read the body. Raises ApiError as soon as it is too large, or if it does not arrive in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_parts(http, max_bytes, count)
    except TimeoutError:
        raise body_too_slow(timeout_s) from None


async def _read_parts(http: Request, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """Read the body. count: called with the size of each part that arrives."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise body_too_large(max_bytes)
    body = bytearray()
    async for part in http.stream():
        count(len(part))
        body += part
        if len(body) > max_bytes:
            raise body_too_large(max_bytes)
    # uvicorn with httptools, which plain `serve run` has
    if not body and "upgrade" in http.headers and (declared not in ("", "0") or "transfer-encoding" in http.headers):
        raise body_lost()
    return bytes(body)
