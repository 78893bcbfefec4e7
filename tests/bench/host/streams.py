"""Streams of a closed loop in a process of their own, beside a server on the same cores; the parent asks for counts."""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from aerie.deploy.bench.stream_client import Answered, Pool, request_bytes
from tests.support.clients.closed_loop import closed_loop

UNENDED = ("", "unfinished")  # faults of an answer that is whole, or still under way


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


@contextmanager
def start_load(port: int, model: str, num_streams: int, max_tokens: int) -> Iterator[Connection]:
    """Run the client; yield the pipe on which `counted` asks it."""
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
    """The client's figures since its start: events, answers, answers_s (seconds of all answers), cpu_s, and at_s, the
    monotonic clock. Raises RuntimeError if a stream failed."""
    pipe.send("count")
    if not pipe.poll(30):
        raise RuntimeError("the client did not answer in 30 s")
    figures: dict[str, Any] = pipe.recv()
    if figures["faults"]:
        raise RuntimeError(f"streams failed: {figures['faults'][:3]}")
    return figures


def _main(port: int, model: str, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    asyncio.run(_run(port, model, num_streams, max_tokens, pipe))


async def _run(port: int, model: str, num_streams: int, max_tokens: int, pipe: Connection) -> None:
    answers: list[Answered] = []
    texts = (f"Tell story number {number % num_streams}." for number in itertools.count())
    requests = (request_bytes(port, chat_body(model, text, max_tokens)) for text in texts)
    pool = Pool("127.0.0.1", port)
    streams = asyncio.create_task(closed_loop(pool, requests, num_streams, answers))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            ended.set()
            return
        pipe.send(_figures(answers))

    loop.add_reader(pipe.fileno(), answer)
    await ended.wait()
    streams.cancel()
    await asyncio.gather(streams, return_exceptions=True)
    pool.close()


def _figures(answers: list[Answered]) -> dict[str, Any]:
    times, whole = os.times(), [each for each in answers if not each.fault]
    return {
        "events": sum(len(each.event_s) for each in answers),
        "answers": len(whole),
        "answers_s": sum(each.end_s - each.sent_s for each in whole),
        "cpu_s": times.user + times.system,
        "at_s": time.monotonic(),
        "faults": [each.fault for each in answers if each.fault not in UNENDED],
    }
