"""How many engines the load wants. Serve's own autoscaling asks: its controller calls `desired_replicas` with what each
replica says of its load (`Engine.record_autoscaling_stats`), and bounds and delays what it answers. Pure.
"""

import math
from collections.abc import Collection
from typing import Any, Protocol

FULL_WAIT_S = 2.0  # of a request that comes now, for its turn: an engine where it is so long is full
AIM = 0.7  # of full, that each engine should be
SLACK = 0.85  # of the aim, which the load must leave to fewer engines


class ScalingContext(Protocol):
    """What is read of `ray.serve.config.AutoscalingContext`. aggregated_metrics: by name, of each replica."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


def engine_load(num_requests: int, num_slots: int, backlog_s: float, wait_s: float) -> float:
    """How full an engine is, 1: as full as it should ever be. num_requests: unfinished. backlog_s: what pending prompts
    take. wait_s: until what waits for a slot has one."""
    return max(num_requests / num_slots, (backlog_s + wait_s) / FULL_WAIT_S)


def replicas_for(loads: Collection[float], current: int) -> int:
    """Engines that carry what those of `loads` do; fewer than now only if they would not be near their aim: a load
    at the border would start and stop one again and again."""
    if not loads:
        return current
    total = sum(loads)
    wanted = max(1, math.ceil(total / AIM))
    return wanted if wanted >= current else min(current, max(1, math.ceil(total / (AIM * SLACK))))


def desired_replicas(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """What Serve calls; its second result is state to be kept, of which there is none."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    return replicas_for(loads.values(), context.target_num_replicas), {}
