"""What routes for administrators have in common: the check of the key, and the calls to all engines."""

from collections.abc import Sequence

from starlette.requests import Request

from aerie.cluster.http.calls import CALLER
from aerie.cluster.http.errors import forbidden, unavailable
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import tenant_of
from aerie.cluster.transport.admin import AdminCall, AdminOutcome, Inspect


def check_administrator(http: Request) -> None:
    """Raise ApiError unless the request's key administers the server."""
    tenant = tenant_of(http.scope)
    is_of_cluster = http.scope["state"].get(CALLER) == ""  # programs of the cluster need no key
    if not ((tenant.name or is_of_cluster) and tenant.is_admin):
        raise forbidden(tenant.name)


async def administer(edge: Edge, http: Request, call: AdminCall) -> Sequence[AdminOutcome]:
    """Let every engine do what an administrator asks, and return each one's outcome.

    Outcomes may have errors: engines that refused the call. Raises ApiError if the key may not do this, if no engine is
    known, and if engines did not answer (`AdminOutcome.fault`) while no other refused; not for `Inspect`, which shows
    the faults.
    """
    check_administrator(http)
    outcomes = await edge.engine.administer(call)
    if not outcomes:
        raise unavailable("No engine is known yet", edge.config.retry_after_s)
    lost = [f"{outcome.engine_id}: {outcome.fault}" for outcome in outcomes if outcome.fault]
    if lost and not errors_of(outcomes) and not isinstance(call, Inspect):
        raise unavailable("; ".join(lost), edge.config.retry_after_s)
    return outcomes


def errors_of(outcomes: Sequence[AdminOutcome]) -> str:
    """Return the errors of all engines; "" without one."""
    return "; ".join(f"{outcome.engine_id}: {outcome.error}" for outcome in outcomes if outcome.error)
