"""Reads streamed answers over raw connections and records the time of each event. Hundreds may run at once, because an
answer needs only a callback per read, no task. Used by `aerie.deploy.bench.load`."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    """The used fields of an event. choices: not decoded."""

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
    request_id: str = "",
    prefix: str = "",
) -> bytes:
    """Return a POST request to `prefix`/v1/`route`. key: the server's API key; request_id: its X-Request-Id; "" for
    none."""
    raw = json.dumps(body).encode()
    more = f"Authorization: Bearer {key}\r\n" if key else ""
    more += f"X-Request-Id: {request_id}\r\n" if request_id else ""
    head = (
        f"POST {prefix}/v1/{route} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


@dataclass
class Answered:
    """The part of an answer received so far. Seconds are of `time.perf_counter`.

    event_s: time of each event with a choice.
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


class Connection(asyncio.Protocol):
    """A connection that reads one answer at a time. Also the callbacks of its httptools parser (`on_*`).

    retry_after: the header, "" without it.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered = Answered()
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0  # time of the read that is being parsed
        self._line = b""
        self.retry_after = ""
        self._ended: asyncio.Future[None] | None = None
        self.is_open = False

    def ask(self, request: bytes, answered: Answered) -> "asyncio.Future[None]":
        """Send `request` and write its answer to `answered`. The future completes with the answer, and never fails."""
        assert self._transport is not None and self._ended is None
        self._answered, self._parser = answered, httptools.HttpResponseParser(self)
        self._line, self.retry_after = b"", ""
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

    @property
    def status(self) -> int:
        """The answer's status; 0 before it has come."""
        return int(self._parser.get_status_code())

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(time.perf_counter())

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = value.decode()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; called by the parser."""
        lines = (self._line + body).split(b"\n")
        self._line = lines.pop()
        if self.status == 200:
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), self._now_s)

    def on_message_complete(self) -> None:
        """Take the end of a reply; called by the parser."""
        if self.status != 200:
            again = f", again after {self.retry_after} s" if self.retry_after else ""
            self._answered.fault = f"{self.status}{again}: {self._line[:300].decode(errors='replace')}"
        self._end(self._now_s)
        if not self._parser.should_keep_alive():
            self.close()

    def _event(self, payload: bytes, now_s: float) -> None:
        """Take one event of a stream."""
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
    """Connections to one server; idle ones are reused."""

    def __init__(self, host: str, port: int, encrypted: bool = False) -> None:
        self._host = host
        self._port = port
        self._encrypted = encrypted
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, answered: Answered) -> None:
        """Send `request` and wait for its answer. A connection that the server has closed is replaced."""
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
        """Return an idle connection, or open one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._encrypted or None)
        return connection
