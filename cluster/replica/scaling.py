"""Number of engines for the load, for Serve's autoscaling. Its controller calls `desired_replicas` with each replica's
load (`Engine.record_autoscaling_stats`), and bounds and delays the result. Pure."""

import math
from collections.abc import Collection
from typing import Any, Protocol

FULL_WAIT_S = 2.0  # an engine where a new request would wait this long is full
AIM = 0.7  # target load of an engine, as a share of full
SLACK = 0.85  # scale down only if the remaining engines stay below this share of the target


class ScalingContext(Protocol):
    """The used fields of `ray.serve.config.AutoscalingContext`. aggregated_metrics: by name, of each replica."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


def engine_load(num_requests: int, num_slots: int, backlog_s: float, wait_s: float) -> float:
    """Return an engine's load; 1 is its maximum.

    num_requests: unfinished requests.
    backlog_s: time to compute pending prompts.
    wait_s: expected wait of a new request for a slot, beyond `backlog_s`.
    """
    return max(num_requests / num_slots, (backlog_s + wait_s) / FULL_WAIT_S)


def replicas_for(loads: Collection[float], current: int) -> int:
    """Return the number of engines for these loads. It is lower than `current` only if the remaining engines would stay
    well below their target; otherwise a load at the limit would start and stop an engine again and again."""
    if not loads:
        return current
    total = sum(loads)
    wanted = max(1, math.ceil(total / AIM))
    return wanted if wanted >= current else min(current, max(1, math.ceil(total / (AIM * SLACK))))


def desired_replicas(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """Called by Serve. The second result is a state for Serve to keep; it is empty."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    return replicas_for(loads.values(), context.target_num_replicas), {}
