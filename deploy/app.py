"""Entry points of Serve's config files. `build` builds an application from a configuration (`serve run
deploy/eagle.yaml`), `build_planned` from a plan of `aerie serve`."""

from typing import Any

from ray.serve import Application

from cluster.deployments import application
from cluster.plan import Plan
from deploy.nodes import cluster_nodes


def build(args: dict[str, Any]) -> Application:
    """Called by Serve in a Ray process. Relative paths in `args` start at this folder, because Serve does not report
    the file's folder. Raises ConfigError, which Serve prints as the cause."""
    from deploy.checks import planned  # imports torch, which `build_planned` does not need

    return application(planned(args, cluster_nodes()))


def build_planned(args: dict[str, Any]) -> Application:
    """Build the application of a plan encoded by `Plan.to_args`."""
    return application(Plan.from_args(args))
