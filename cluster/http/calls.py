"""Requests from other programs of the cluster, without HTTP: bodies and replies are plain values. Calls the application
of `aerie.cluster.http.app` in this process, so that checks, admission, counts, traces and replies are those of HTTP.
Used by `aerie.cluster.ingress.deployment`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Scope

from aerie.cluster.http.errors import RequestError

logger = logging.getLogger(__name__)

CALLER = "caller"  # key in a scope's state: the tenant's name of a call without a key; "" for none
_WAITING_EVENTS = 64  # maximum that a stream runs ahead of its reader

Body = Mapping[str, Any] | BaseModel | msgspec.Struct
Reply = dict[str, Any]


class Calls:
    """Calls of one application, of `build_app`."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def call(
        self, path: str, body: Body, request_id: str = "", tenant: str = "", method: str = "POST"
    ) -> Reply | AsyncGenerator[Reply, None]:
        """Return the reply to a request, or the events of its stream if the body has `stream`.

        path: may have a query.
        request_id: as X-Request-Id; "" for a random one.
        tenant: name of the API key whose rights and limits apply; "" for none.
        Raises RequestError, a stream also after its first events. Cancelling the call or closing the stream aborts the
        request."""
        request = _Request(self._app, path, _values(body), request_id, tenant, method)
        return request.events() if request.streams else await request.reply()

    async def administer(self, path: str, body: Body, **options: str) -> Reply:
        """Return the reply of a route that administers engines, by its own method. Raises ValueError for others.
        options: `request_id`, `tenant`."""
        methods: dict[str, str] = self._app.state.administration
        route = path.partition("?")[0]
        if route not in methods:
            known = ", ".join(method.removeprefix("/") for method in methods)
            raise ValueError(f"route {route.removeprefix('/')!r}: must be one of {known}")
        reply = await self.call(path, body, method=methods[route], **options)
        assert isinstance(reply, dict), "these routes do not stream"
        return reply

    async def stream(self, path: str, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """Do `call` with `stream` set in the body. options: `request_id`, `tenant`."""
        return await self.call(path, {**_values(body), "stream": True}, **options)


class _Request:
    """One request to the ASGI application within this process.

    path: with the query, if any.
    values: the JSON body.
    streams: whether the reply is a stream of events.
    """

    def __init__(
        self, app: ASGIApp, path: str, values: Mapping[str, Any], request_id: str, tenant: str, method: str
    ) -> None:
        path, _, query = path.partition("?")
        self.streams = bool(values.get("stream"))
        self._app = app
        try:
            self._body = msgspec.json.encode(values)
        except (TypeError, ValueError) as error:  # ValueError: lone surrogates
            raise RequestError(f"The request body is not valid JSON: {error}", 400, code="invalid_json") from None
        headers = [(b"content-type", b"application/json")]
        if request_id:
            headers.append((b"x-request-id", request_id.encode()))
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "state": {CALLER: tenant},
        }
        self._left = asyncio.Event()
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING_EVENTS)

    async def reply(self) -> Reply:
        async with contextlib.aclosing(self._messages()) as messages:
            start = await anext(messages)
            whole = b"".join([message["body"] async for message in messages])
        return _checked(start, whole)

    async def events(self) -> AsyncGenerator[Reply, None]:
        """Yield the events of a streamed reply; if the reply is one document, only that."""
        async with contextlib.aclosing(self._messages()) as messages:
            start = await anext(messages)
            if (b"content-type", b"text/event-stream; charset=utf-8") not in start["headers"]:
                yield _checked(start, b"".join([message["body"] async for message in messages]))
            async for message in messages:  # each has whole events
                for line in message["body"].split(b"\n"):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield _event(msgspec.json.decode(line[6:]))

    async def _messages(self) -> AsyncGenerator[Message, None]:
        """Run the application, and yield what it sends."""
        running = asyncio.create_task(self._run())
        try:
            while (message := await self._sent.get()) is not None:
                yield message
            await running
        except Exception:
            logger.exception("a call of %s broke off", self._scope["path"])
            raise RequestError("Internal server error", kind="server_error", code="internal_error") from None
        finally:
            self._left.set()
            while not self._sent.empty():  # lets a last `_send` end
                self._sent.get_nowait()
            await asyncio.wait((running,))

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            await self._send(None)

    async def _send(self, message: Message | None) -> None:
        if not self._left.is_set():
            await self._sent.put(message)

    async def _receive(self) -> Message:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}


def _values(body: Body) -> Mapping[str, Any]:
    """Return the fields of a body that were set."""
    if isinstance(body, BaseModel):
        return body.model_dump(mode="json", exclude_unset=True)
    values = msgspec.to_builtins(body) if isinstance(body, msgspec.Struct) else body
    if not isinstance(values, Mapping):
        raise RequestError(
            f"The request body is a {type(body).__name__}; give a dict, a pydantic model or a msgspec struct",
            400,
            code="invalid_json",
        )
    return values


def _checked(start: Message, body: bytes) -> Reply:
    """Return the document of a reply. Raises RequestError for an error."""
    document: Reply = msgspec.json.decode(body)
    if start["status"] == 200:
        return document
    headers = {name.lower(): value for name, value in start["headers"]}
    wait_ms = headers.get(b"retry-after-ms")
    raise _error(document["error"], start["status"], None if wait_ms is None else int(wait_ms) / 1000)


def _event(event: Reply) -> Reply:
    """Return an event of a stream. Raises RequestError for one that reports an error, in any route's format."""
    fault = event if event.get("type") == "error" and "error" not in event else event.get("error")
    if isinstance(fault, dict):
        raise _error(fault, None, None)
    return event


def _error(detail: Reply, status: int | None, retry_after_s: float | None) -> RequestError:
    return RequestError(
        detail["message"],
        status,
        kind=detail.get("type", "server_error"),
        param=detail.get("param"),
        code=detail.get("code"),
        retry_after_s=retry_after_s,
    )
