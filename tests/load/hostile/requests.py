"""Hostile requests at all routes of a served engine, beside plain streams: whether anything but 2xx and 4xx comes back.

    python -m tests.load.hostile.requests http://127.0.0.1:8000 --seconds 120 --seed 1

Sixteen at a time: bodies that hypothesis makes of the routes' own fields (all of Unicode, lone surrogates, numbers that
are none, any depth and size, keys twice), headers and paths, whole or in chunks cut anywhere, in JSON or almost. Prints
one line of JSON and ends with 1 if a request got 5xx or no answer within its limit, a stream ended with an error of the
server's, or a plain stream's text changed.
"""

import argparse
import asyncio
import collections
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.load.hostile.generated import Asked, made_requests
from tests.load.hostile.plain_streams import ended, plain_streams

NUM_CONNECTIONS = 16
ANSWER_LIMIT_S = 90.0
_READ_BYTES = 1 << 16
REFUSED_FOR_NOW = (429, 503)
POLITE = b"\r\nretry-after:"  # what a 503 must have


@dataclass
class Report:
    """statuses: of all answers. faults: what must not be."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)


async def send(host: str, port: int, asked: Asked) -> bytes:
    """The whole answer. Raises OSError and TimeoutError."""
    async with asyncio.timeout(ANSWER_LIMIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            for piece in asked.pieces():
                writer.write(piece)
                await asyncio.sleep(0)
            answer = bytearray()
            while raw := await reader.read(_READ_BYTES):
                answer += raw
            return bytes(answer)
        finally:
            writer.close()


def judged(asked: Asked, answer: bytes) -> tuple[str, str]:
    """The status of an answer, and what is wrong with it or ""."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode(errors="replace")
    if not head.startswith(b"HTTP/1.1 ") or not status.isdigit():
        return "none", f"{asked}: {answer[:100]!r}"
    if int(status) >= 500 and not (int(status) in REFUSED_FOR_NOW and POLITE in head.lower() + b"\r\n"):
        return status, f"{asked}: {status} {body[:300]!r}"
    if status == "200" and (b'"server_error"' in body or b'"internal_error"' in body or b'"api_error"' in body):
        return "200, error", f"{asked}: {body[-500:]!r}"
    return status, ""


async def attack(url: str, seconds: float, number: int, count: int = 3_000) -> Report:
    """Send the requests of a seed again and again until `seconds` are over, beside plain streams."""
    report, parts = Report(), urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    queue = itertools.cycle(made_requests(number, count))
    host, port = parts.hostname, parts.port

    async def one_by_one(end_s: float) -> None:
        while time.monotonic() < end_s:
            asked = next(queue)
            try:
                status, fault = judged(asked, await send(host, port, asked))
            except (OSError, TimeoutError) as error:
                status, fault = type(error).__name__, f"{asked}: {type(error).__name__}: {error}"
            report.statuses[status] += 1
            if fault:
                report.faults.append(fault)

    async with plain_streams(url, "target") as (process, alone):
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(one_by_one(end_s) for _ in range(NUM_CONNECTIONS)))
        report.faults += alone.faults + (await ended(process)).faults
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args(arguments)
    report = asyncio.run(attack(given_.url, given_.seconds, given_.seed))
    print(json.dumps({"statuses": dict(report.statuses.most_common()), "faults": report.faults}, ensure_ascii=True))
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
