"""A closed loop of requests: each stream sends its next one when its last answer has ended."""

import asyncio
from collections.abc import Iterator

from aerie.deploy.bench.load import ask
from aerie.deploy.bench.stream_client import Answered, Pool


async def closed_loop(pool: Pool, requests: Iterator[bytes], num_streams: int, answers: list[Answered]) -> None:
    """Send `requests` over `num_streams` streams, one at a time on each. A stream stops at its first failed answer.
    answers: a list that grows by one with each request sent; may be read at any time."""

    async def stream() -> None:
        for request in requests:
            answers.append(answered := Answered())
            await ask(pool, request, answered)
            if answered.fault:
                return

    await asyncio.gather(*(stream() for _ in range(num_streams)))
