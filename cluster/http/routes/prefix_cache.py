"""Routes of SGLang and vLLM that empty the prefix cache. As there, a cache in use stays unchanged, and the reply is an
error."""

import asyncio
import time
from collections.abc import Sequence

from starlette.requests import Request

from aerie.cluster.http.endpoint import Endpoint, command
from aerie.cluster.http.errors import ApiError, invalid, unavailable, unfinished, unsupported
from aerie.cluster.http.schema.response import FlushedEngine, FlushReply
from aerie.cluster.http.serving import Edge
from aerie.cluster.transport.messages import FlushOutcome

FLUSH_RETRY_S = 0.05  # delay before a flush is tried again
MAX_FLUSH_WAIT_S = 600.0  # maximum time that a client may let a flush wait


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def flush_cache(http: Request) -> FlushReply:
        """Empties every engine's prefix cache. `timeout`, as in SGLang: maximum seconds to wait for requests to end."""
        for name, value in http.query_params.items():
            if name != "timeout" and value.lower() != "false":
                raise unsupported(name, "only an idle engine's prefix cache is emptied; wait with timeout=SECONDS")
        deadline_s = time.monotonic() + _wait_s(http.query_params.get("timeout", "0"))
        while True:
            outcomes = await edge.engine.flush_cache()
            error = _flush_error(outcomes, edge.config.retry_after_s)
            if error is None:
                flushed = [
                    FlushedEngine(engine_id=outcome.engine_id, num_pages=outcome.num_pages) for outcome in outcomes
                ]
                return FlushReply(engines=flushed)
            if error.status != 409 or time.monotonic() >= deadline_s:
                raise error
            await asyncio.sleep(FLUSH_RETRY_S)

    return [command(path, flush_cache, FlushReply, True) for path in ("/flush_cache", "/reset_prefix_cache")]


def _wait_s(timeout: str) -> float:
    """Parse the query parameter `timeout`. Raises ApiError."""
    try:
        wait_s = float(timeout)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_FLUSH_WAIT_S:  # NaN is not either
        raise invalid("timeout", f"timeout must be from 0 to {MAX_FLUSH_WAIT_S:g} seconds")
    return wait_s


def _flush_error(outcomes: Sequence[FlushOutcome], retry_after_s: float) -> ApiError | None:
    """Return the error that names the engines whose prefix cache is not empty now, or None."""
    if not outcomes:
        return unavailable("No engine is known yet", retry_after_s)
    faults = [f"{outcome.engine_id}: {outcome.fault}" for outcome in outcomes if outcome.fault]
    if faults:
        return unavailable("The prefix cache was not emptied: " + "; ".join(faults), retry_after_s)
    busy = [f"on {outcome.engine_id}, {outcome.unfinished}" for outcome in outcomes if outcome.unfinished]
    if busy:
        return unfinished("The prefix cache was not emptied: " + "; ".join(busy), retry_after_s)
    return None
