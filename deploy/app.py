"""Entry points of Serve's config files. `build` makes an application of a configuration (deploy/eagle.yaml, for
`serve run`), `build_planned` of a plan made by `aerie serve`."""

from typing import Any

from ray.serve import Application

from cluster.deployments import application
from cluster.plan import Plan
from deploy.nodes import cluster_nodes


def build(args: dict[str, Any]) -> Application:
    """Called by Serve in a Ray process. Relative paths in `args` start at this folder: Serve does not say where their
    file lies. Raises ConfigError, which Serve prints as the cause."""
    from deploy.checks import planned  # torch, which `build_planned` does without

    return application(planned(args, cluster_nodes()))


def build_planned(args: dict[str, Any]) -> Application:
    """Build the application of a plan encoded by `Plan.to_args`."""
    return application(Plan.from_args(args))
