"""A client that costs little, so that a server and it fit on two cores: asyncio protocols that only count events.

A process of its own (`start_load`): `num_streams` connections, each with one request after another, until told to end.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from deploy.bench.stream_client import request_bytes

EVENT = b"data: "
BODY_END = b"\r\n0\r\n\r\n"  # of a chunked one
END = b"data: [DONE]\n\n" + BODY_END


def chat_body(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    """A streamed greedy answer of exactly `max_tokens`."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }


class EventStream(asyncio.Protocol):
    """Sends `request` again each time its answer ends; counts events and answers."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.num_events = 0
        self.num_answers = 0
        self.answers_s = 0.0
        self._sent_s = 0.0
        self.fault = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        # Events may be split between reads: the tail is counted again unless it already held the event's beginning.
        self.num_events += seen.count(EVENT) - self._tail.count(EVENT)
        self._tail = seen[-len(END) :]
        if self._tail == END:
            self.num_answers += 1
            self.answers_s += time.monotonic() - self._sent_s
            self._tail = b""
            self._ask()
        elif self.num_events == 0 and b" 200 OK" not in seen[:64]:
            self.fault = seen[:300].decode(errors="replace")

    def _ask(self) -> None:
        assert self._transport is not None
        self._sent_s = time.monotonic()
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        self.fault = self.fault or f"connection lost: {error}"


@contextmanager
def start_load(port: int, model: str, num_streams: int, max_tokens: int) -> Iterator[Connection]:
    """Runs the client; gives the pipe on which `counted` asks it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_main, args=(port, model, num_streams, max_tokens, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.join(5)
        child.kill()
        child.join()


def counted(pipe: Connection) -> dict[str, Any]:
    """The client's figures since its start: events, answers, answers_s (all their seconds), cpu_s; at_s: the monotonic
    clock. Raises RuntimeError if a stream failed."""
    pipe.send("count")
    if not pipe.poll(30):
        raise RuntimeError("the client did not answer in 30 s")
    figures: dict[str, Any] = pipe.recv()
    if figures["faults"]:
        raise RuntimeError(f"streams failed: {figures['faults'][:3]}")
    return figures


def first_event_s(connection: socket.socket, request: bytes) -> float:
    """Seconds from sending `request` to its first event; reads the answer to its end. Raises RuntimeError."""
    started_s = time.perf_counter()
    connection.sendall(request)
    seen, first_s = b"", 0.0
    while not seen.endswith(END):
        data = connection.recv(65536)
        if not data:
            raise RuntimeError(f"the server closed the connection: {seen[:300]!r}")
        seen += data
        if not first_s and EVENT in seen:
            first_s = time.perf_counter() - started_s
    return first_s


def _main(port: int, model: str, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    asyncio.run(_run(port, model, num_streams, max_tokens, pipe))


async def _run(port: int, model: str, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    streams: list[EventStream] = []
    ended = asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
        except EOFError:
            ended.set()
            loop.remove_reader(pipe.fileno())
            return
        times = os.times()
        pipe.send(
            {
                "events": sum(stream.num_events for stream in streams),
                "answers": sum(stream.num_answers for stream in streams),
                "answers_s": sum(stream.answers_s for stream in streams),
                "cpu_s": times.user + times.system,
                "at_s": time.monotonic(),
                "faults": [stream.fault for stream in streams if stream.fault],
            }
        )

    loop.add_reader(pipe.fileno(), answer)
    for number in range(num_streams):
        request = request_bytes(port, chat_body(model, f"Tell story number {number}.", max_tokens))
        _, stream = await loop.create_connection(lambda request=request: EventStream(request), "127.0.0.1", port)
        streams.append(stream)
    await ended.wait()
