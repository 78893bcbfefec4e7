"""`build(args) -> Application`: what `serve run deploy/eagle.yaml` names. Engines behind ingresses; see `cluster`."""

from typing import Any

import ray
from ray.serve import Application

from cluster.config import parse
from cluster.deployments import application
from cluster.replica.placement import NodeResources
from deploy.checks import check_devices, checked
from deploy.config.files import PACKAGED


def build(args: dict[str, Any]) -> Application:
    """Called by Serve in a Ray process. Relative paths in `args` start at this folder: Serve does not say where their
    file lies. Raises ConfigError, which Serve prints as the cause."""
    config, nodes = checked(args), cluster_nodes()
    check_devices(config, nodes)
    return application(config, nodes)


def build_checked(args: dict[str, Any]) -> Application:
    """The same for `args` whose checkpoints `aerie serve` has checked. Raises ConfigError."""
    return application(parse(args, PACKAGED), cluster_nodes())


def cluster_nodes() -> list[NodeResources]:
    """What the nodes that are alive have in all."""
    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
