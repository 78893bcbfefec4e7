"""Reads streamed answers over raw connections and records the time of each event. Hundreds may run at once, because an
answer costs a callback per read and no task. Used by `deploy.bench.load`."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    """The fields of an event that are used. choices: not decoded."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(Event).decode


def request_bytes(
    port: int,
    body: Mapping[str, Any],
    route: str = "chat/completions",
    host: str = "127.0.0.1",
    key: str = "",
) -> bytes:
    """Return a POST request to /v1/`route`. key: the server's API key, "" for none."""
    raw = json.dumps(body).encode()
    authorised = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/{route} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"{authorised}Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


@dataclass
class Answered:
    """The part of an answer received so far. Seconds are of `time.perf_counter`.

    event_s: time of each event that carries a choice.
    num_tokens, num_prompt, num_cached: answer tokens, prompt tokens and cached prompt tokens in the server's usage; 0
        without.
    fault: why it is incomplete; "" for a complete answer.
    """

    event_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    sent_s: float = 0.0
    end_s: float = 0.0
    fault: str = "unfinished"
    num_prompt: int = 0
    num_cached: int = 0


class BodyReader:
    """Decodes a reply's body piece by piece: chunked, or of a given length."""

    def __init__(self) -> None:
        self._left = b""
        self._head: bytes | None = None
        self._missing = 0  # bytes of the current chunk, or of the body
        self._is_chunked = False
        self.status = 0
        self.is_over = False

    @property
    def keeps_open(self) -> bool:
        return self._head is not None and b"\r\nconnection: close" not in self._head

    def header(self, name: bytes) -> bytes:
        """Return a header's value, b"" without it. name: lower case."""
        _, _, rest = (self._head or b"").partition(b"\r\n" + name + b": ")
        return rest.split(b"\r\n")[0]

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in `data`."""
        self._left += data
        if self._head is None and not self._read_head():
            return b""
        body = b""
        while not self.is_over:
            if self._missing == 0 and not self._next_chunk():
                break
            taken = self._left[: self._missing]
            self._left = self._left[len(taken) :]
            self._missing -= len(taken)
            body += taken
            if self._missing:
                break
            self.is_over = not self._is_chunked
        return body

    def _read_head(self) -> bool:
        head, end, rest = self._left.partition(b"\r\n\r\n")
        if not end:
            return False
        self._head, self._left = head.lower(), rest
        self.status = int(head[9:12])
        self._is_chunked = b"\r\ntransfer-encoding: chunked" in self._head
        _, _, length = self._head.partition(b"\r\ncontent-length: ")
        if not self._is_chunked:
            self._missing = int(length.split(b"\r\n")[0] or 0)
            self.is_over = self._missing == 0
        return True

    def _next_chunk(self) -> bool:
        """Read the next chunk's size, after the line end of the previous chunk; False until it has arrived."""
        line, end, rest = self._left.removeprefix(b"\r\n").partition(b"\r\n")
        if not end or not line:
            return False
        self._missing = int(line.split(b";")[0], 16)
        if self._missing == 0:
            if len(rest) < 2:
                return False  # the empty line after the last chunk
            self.is_over, rest = True, rest[2:]
        self._left = rest
        return not self.is_over


class Connection(asyncio.Protocol):
    """A connection that reads one answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered = Answered()
        self._body = BodyReader()
        self._line = b""
        self._ended: asyncio.Future[None] | None = None
        self.is_open = False

    def ask(self, request: bytes, answered: Answered) -> "asyncio.Future[None]":
        """Send `request` and write its answer to `answered`. The future completes with the answer, and never fails."""
        assert self._transport is not None and self._ended is None
        self._answered, self._body, self._line = answered, BodyReader(), b""
        self._ended = asyncio.get_running_loop().create_future()
        answered.sent_s = time.perf_counter()
        self._transport.write(request)
        return self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        body = self._body
        lines = (self._line + body.feed(data)).split(b"\n")
        self._line = lines.pop()
        if body.status == 200:
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
        if body.is_over:
            if body.status != 200:
                wait = body.header(b"retry-after").decode()
                status = f"{body.status}, again after {wait} s" if wait else f"{body.status}"
                self._answered.fault = f"{status}: {self._line[:300].decode(errors='replace')}"
            self._end(now_s)
            if not body.keeps_open:
                self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(time.perf_counter())

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            if self._answered.fault == "unfinished":
                self._answered.fault = ""
            return
        event = _decode(payload)
        if bytes(event.error) != b"null":
            self._answered.fault = bytes(event.error)[:300].decode(errors="replace")
        if event.choices:
            self._answered.event_s.append(now_s)
        if event.usage is not None:
            self._count(event.usage)

    def _count(self, usage: Usage) -> None:
        self._answered.num_tokens, self._answered.num_prompt = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._answered.num_cached = usage.prompt_tokens_details.cached_tokens or 0

    def _end(self, now_s: float) -> None:
        if self._ended is not None:
            self._answered.end_s = now_s
            ended, self._ended = self._ended, None
            if not ended.done():
                ended.set_result(None)


class Pool:
    """Connections to one server; one that is idle is used again."""

    def __init__(self, host: str, port: int, encrypted: bool = False) -> None:
        self._host = host
        self._port = port
        self._encrypted = encrypted
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, answered: Answered) -> None:
        """Send `request` and wait for its answer. A connection that the server has closed meanwhile is replaced."""
        connection = await self._connection()
        try:
            await connection.ask(request, answered)
            if connection.is_open:
                self._idle.append(connection)
        except asyncio.CancelledError:
            connection.close()
            raise

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._encrypted or None)
        return connection
