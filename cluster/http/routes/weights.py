"""Routes of vLLM that change the weights of running engines, and pause them meanwhile (docs/weight-updates.md). They
exist only for API keys that administer the server."""

from collections.abc import Sequence
from typing import get_args

from starlette.requests import Request

from aerie.cluster.http.endpoint import Endpoint, command, get, post
from aerie.cluster.http.errors import conflict, forbidden, invalid, unavailable
from aerie.cluster.http.schema.response import EngineWeights, PausedReply, PauseReply, WeightsReply
from aerie.cluster.http.schema.weights import UpdateWeightsRequest
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import tenant_of
from aerie.cluster.transport.messages import AdminCall, AdminOutcome, Inspect, Pause, PauseMode, Resume
from aerie.workers.scheduling.commands.command import Folder, LoadWeights


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def ask(http: Request, call: AdminCall) -> Sequence[AdminOutcome]:
        tenant = tenant_of(http.scope)
        if not (tenant.name and tenant.is_admin):
            raise forbidden(tenant.name)
        outcomes = await edge.engine.administer(call)
        if not outcomes:
            raise unavailable("No engine is known yet", edge.config.retry_after_s)
        if failed := [f"{each.engine_id}: {each.error}" for each in outcomes if each.error]:
            raise conflict("; ".join(failed))
        lost = [f"{each.engine_id}: {each.fault}" for each in outcomes if each.fault]
        if lost and not isinstance(call, Inspect):
            raise unavailable("; ".join(lost), edge.config.retry_after_s)
        return outcomes

    async def pause(http: Request) -> PauseReply:
        """Runs no steps until /resume. `mode`: abort ends running requests, wait lets them end, keep keeps them where
        they are. New requests are refused, or queued with keep."""
        mode = http.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise invalid("mode", f"mode={mode}: must be one of {', '.join(get_args(PauseMode))}")
        await ask(http, Pause(mode))  # type: ignore[arg-type]
        return PauseReply("paused")

    async def resume(http: Request) -> PauseReply:
        """Ends a pause."""
        await ask(http, Resume())
        return PauseReply("resumed")

    async def is_paused(http: Request) -> PausedReply:
        """Whether engines are paused."""
        return PausedReply(any(outcome.is_paused for outcome in await ask(http, Inspect())))

    async def update_weights(http: Request, body: UpdateWeightsRequest) -> WeightsReply:
        """Loads weights from folders that every rank can read, between two steps of every engine. Running requests
        continue with them."""
        paths = body.update_info
        if paths.path is None and paths.draft_path is None:
            raise invalid("update_info", "update_info: give path, draft_path, or both")
        work = LoadWeights(*(None if path is None else Folder(path) for path in (paths.path, paths.draft_path)))
        return _weights(await ask(http, work))

    async def weight_info(http: Request) -> WeightsReply:
        """The number of each engine's weights."""
        return _weights(await ask(http, Inspect()))

    return [
        command("/pause", pause, PauseReply, True),
        command("/resume", resume, PauseReply, True),
        get("/is_paused", is_paused, PausedReply),
        post("/update_weights", update_weights, UpdateWeightsRequest, WeightsReply),
        get("/weight_info", weight_info, WeightsReply),
    ]


def _weights(outcomes: Sequence[AdminOutcome]) -> WeightsReply:
    return WeightsReply(
        [EngineWeights(each.engine_id, each.weight_epoch, each.missing, each.fault) for each in outcomes]
    )
