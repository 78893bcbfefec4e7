"""Tasks of one request: run several together, cancel them, notice that the client has left. Used by
`aerie.cluster.http.serving`."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_all(choices: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; if one fails, cancel the others, wait until they have ended, and raise its exception."""
    if len(choices) == 1:
        return await choices[0]
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence["asyncio.Future[None]"]) -> None:
    """Cancel all, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
