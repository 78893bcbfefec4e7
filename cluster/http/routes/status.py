"""State of the engines, for probes and Prometheus."""

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, command, get, json_response
from aerie.cluster.http.engine_client import EngineClient
from aerie.cluster.http.errors import unavailable
from aerie.cluster.http.metrics import prometheus_text
from aerie.cluster.http.schema.response import EngineHealth, ErrorReply, HealthReply, LiveReply
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import tenant_of
from aerie.cluster.transport.messages import EngineStats

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0  # maximum time to wait for statistics
NEWS_WAIT_S = 2.0  # maximum wait for new states of engines, which are at most a second old
NEWS_POLL_S = 0.1  # seconds between two looks for changes
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def health(http: Request) -> HealthReply | Response:
        """Whether requests succeed: a recent probe, which takes their path, has reached an engine's ranks. Replies
        within half a second with the last known state."""
        return _health(*await _known(edge.engine), edge.config)

    async def ready(http: Request) -> HealthReply | Response:
        """Whether to send requests to this ingress: requests succeed, and it accepts them."""
        edge.admission.check(0)
        return _health(*await _known(edge.engine), edge.config)

    async def live(http: Request) -> LiveReply:
        """Answer 200 while this ingress runs, whatever the state of the engines: restarting the ingress would not help
        them."""
        return LiveReply()

    async def metrics(http: Request) -> Response:
        """Prometheus' text format, under vLLM's names."""
        tenant = tenant_of(http.scope)
        keys = edge.counts.by_key if tenant.is_admin else [tenant.name]
        text = prometheus_text(await _stats(edge.engine), edge.config.served_model_name, edge.counts, keys)
        return Response(text, headers={"content-type": METRICS_TYPE})

    errors = (HealthReply, ErrorReply)
    return [
        get("/health", health, HealthReply, errors),
        get("/health_generate", health, HealthReply, errors),  # SGLang generates a token instead
        get("/ping", health, HealthReply, errors),  # of hosting services
        command("/ping", health, HealthReply),
        get("/health/live", live, LiveReply),
        get("/health/ready", ready, HealthReply, errors),
        get("/ready", ready, HealthReply, errors),
        get("/metrics", metrics),
    ]


async def require_engine(edge: Edge) -> None:
    """Raise ApiError until an engine has been ready once, for routes that clients poll for the server's start. Waits as
    long as this ingress may need to find an engine that another ingress already knows."""
    waited_s = 0.0
    while not edge.admission.engine_seen:
        reply = _health(*await _known(edge.engine), edge.config)
        if not isinstance(reply, Response):
            edge.admission.engine_seen = True
        elif waited_s >= NEWS_WAIT_S:
            raise unavailable("The server is starting; no engine has been ready yet", edge.config.retry_after_s)
        else:
            await asyncio.sleep(NEWS_POLL_S)
            waited_s += NEWS_POLL_S


def _health(engines: Sequence[EngineStats], fault: str, config: EdgeConfig) -> HealthReply | Response:
    """Return 200 if an engine is ready and requests reach it, else 503 with the reason."""
    states = [
        EngineHealth(
            engine_id=engine.engine_id,
            status=engine.status,
            detail=engine.detail,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            last_step_age_s=engine.last_step_age_s,
            heartbeat_age_s=list(engine.heartbeat_age_s),
        )
        for engine in engines
    ]
    if not any(engine.status == "ready" for engine in engines):
        reasons = [f"{e.engine_id} is {e.status}" + (f" ({e.detail})" if e.detail else "") for e in engines]
        message = "No engine is ready: " + ("; ".join(reasons) or "none is known yet")
    elif fault:
        message = f"Requests do not get through: {fault}"
    else:
        return HealthReply(status="ok", engines=states)
    error = unavailable(message, config.retry_after_s)
    reply = HealthReply(status="unavailable", engines=states, error=error.detail())
    return json_response(reply, error.status, error.headers)


async def _known(engine: EngineClient) -> tuple[list[EngineStats], str]:
    """Return all engines' statistics, and why requests do not reach them; no engines if that is unavailable."""
    try:
        return await engine.health()
    except Exception:
        logger.exception("the engines' health cannot be had")
        return [], ""


async def _stats(engine: EngineClient) -> list[EngineStats]:
    """Return all engines' statistics; none if they are unavailable, which then is the reported state."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await engine.stats()
    except Exception:
        logger.exception("the engines' statistics cannot be had")
        return []
