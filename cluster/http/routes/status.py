"""How the engines are: for probes and for Prometheus."""

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.config import EdgeConfig
from cluster.http.endpoint import Endpoint, get, json_response
from cluster.http.engine_client import EngineClient
from cluster.http.errors import unavailable
from cluster.http.metrics import prometheus_text
from cluster.http.schema.response import EngineHealth, ErrorReply, HealthReply
from cluster.http.serving import Edge
from cluster.transport.messages import EngineStats

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def endpoints(edge: Edge) -> list[Endpoint]:
    """Of one ingress."""

    async def health(http: Request) -> HealthReply | Response:
        """Whether an engine can work."""
        return _health(await _stats(edge.engine), edge.config)

    async def ready(http: Request) -> HealthReply | Response:
        """Whether an engine can work and this ingress takes requests."""
        edge.admission.check(0)
        return _health(await _stats(edge.engine), edge.config)

    async def metrics(http: Request) -> Response:
        """Prometheus' text format, under vLLM's names."""
        text = prometheus_text(await _stats(edge.engine), edge.config.served_model_name, edge.counts)
        return Response(text, headers={"content-type": METRICS_TYPE})

    errors = (HealthReply, ErrorReply)
    return [
        get("/health", health, HealthReply, errors),
        get("/ready", ready, HealthReply, errors),
        get("/metrics", metrics),
    ]


def _health(engines: Sequence[EngineStats], config: EdgeConfig) -> HealthReply | Response:
    """200 if an engine can work, else 503 and why none can."""
    states = [
        EngineHealth(
            engine_id=engine.engine_id,
            status=engine.status,
            detail=engine.detail,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            last_step_age_s=engine.last_step_age_s,
        )
        for engine in engines
    ]
    if any(engine.status == "ready" for engine in engines):
        return HealthReply(status="ok", engines=states)
    reasons = [f"{e.engine_id} is {e.status}" + (f" ({e.detail})" if e.detail else "") for e in engines]
    error = unavailable("No engine is ready: " + ("; ".join(reasons) or "none is known yet"), config.retry_after_s)
    reply = HealthReply(status="unavailable", engines=states, error=error.detail())
    return json_response(reply, error.status, error.headers)


async def _stats(engine: EngineClient) -> list[EngineStats]:
    """All engines' statistics; none if they cannot be had, which then is the answer to how the engines are."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await engine.stats()
    except Exception:
        logger.exception("the engines' statistics cannot be had")
        return []
