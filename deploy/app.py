"""Entry points of Serve's config files and commands. `build` builds an application from a configuration (`serve run
deploy/eagle.yaml`), `build_planned` from a plan of `aerie serve`. Each packaged configuration is an attribute,
for `serve build`."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from aerie.cluster.config import read_args
from aerie.cluster.ingress.deployment import Ingress
from aerie.cluster.ingress.engine_links import SUCCESSOR_WAIT_S
from aerie.cluster.parallel import ReplicasConfig
from aerie.cluster.placement import ENGINE_CPUS
from aerie.cluster.plan import Plan
from aerie.cluster.replica.engine import Engine, desired_replicas
from aerie.deploy.config.files import find_config, packaged_names
from aerie.deploy.nodes import cluster_nodes, local_nodes


def build(args: dict[str, Any]) -> Application:
    """Build the application of a configuration. Called by Serve in a Ray process, and by programs
    (`docs/serve-handles.md`).

    Relative paths in `args` start at this folder, because Serve does not report the file's folder. Without Ray, as in
    `serve build`, this machine stands for the cluster. Raises ConfigError, which Serve prints as the cause.
    """
    from aerie.deploy.checks import planned  # imports torch, which `build_planned` does not need

    return application(planned(args, cluster_nodes() if ray.is_initialized() else local_nodes(1, None, None)))


def __getattr__(name: str) -> Application:
    """Return the application of the packaged configuration `name`."""
    if name not in packaged_names():
        raise AttributeError(f"module {__name__} has no attribute {name}, and no packaged configuration has this name")
    return build(read_args(find_config(name)))


def build_planned(args: dict[str, Any]) -> Application:
    """Build the application of a plan encoded by `Plan.to_args`."""
    return application(Plan.from_args(args))


INGRESS_CPUS = 0.1  # CPUs that an ingress reserves in Ray
# Serve's own limits are higher than the ingress's, which refuses and times out first, with OpenAI's errors.
INGRESS_MAX_ONGOING = 100_000
# A replica that misses three health checks in a row is replaced, after 15 s at most.
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 4.0  # time without an answer after which Serve counts a replica as unhealthy

LOAD_PERIOD_S = 2.0  # between replicas' reports of load; Serve averages over twice this time


def application(plan: Plan, engine_class: type[Engine] = Engine) -> Application:
    """Return the application for Serve."""
    drain_s = plan.replica.engine.drain_timeout_s
    engine = serve.deployment(
        engine_class,
        name="Engine",
        **_replicas(plan.num_engines),
        placement_group_bundles=[dict(bundle) for bundle in plan.placement.bundles],
        placement_group_strategy=plan.placement.strategy,
        ray_actor_options={"num_cpus": ENGINE_CPUS},
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    ).bind(plan.replica)
    return serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=plan.num_ingresses,
        max_ongoing_requests=INGRESS_MAX_ONGOING,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        # An update starts the next ingresses before it stops these, so that some accept requests throughout.
        max_surge_percent=100,
        # Requests may wait here for the next engine, and then run.
        graceful_shutdown_timeout_s=SUCCESSOR_WAIT_S + drain_s + 5,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    ).bind(plan.ingress, engine)


def _replicas(replicas: int | ReplicasConfig) -> dict[str, Any]:
    """Return the options of `serve.deployment` for this number of replicas."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    scaling = AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        initial_replicas=replicas.min,
        metrics_interval_s=LOAD_PERIOD_S,
        look_back_period_s=2 * LOAD_PERIOD_S,
        upscale_delay_s=replicas.up_after_s,
        downscale_delay_s=replicas.down_after_s,
        policy=AutoscalingPolicy(policy_function=desired_replicas),
    )
    return {"autoscaling_config": scaling}
