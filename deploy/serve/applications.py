"""What Serve says of its applications, and the content of those that `aerie serve --address` deployed, by which a
failed update is undone. Used by `aerie serve`, from its threads too, and by `aerie status`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True)
class DeploymentStatus:
    """The status of one Serve deployment.

    replicas: number of replicas by Serve's state of them.
    """

    name: str
    status: str
    message: str
    replicas: Mapping[str, int]


@dataclass(frozen=True)
class Application:
    """An application on the cluster.

    status: one of Ray's `ApplicationStatus`, as text.
    message: Serve's message, several lines, or "".
    route_prefix: None if it has no route.
    deployments: deployments of the application, in Serve's order."""

    status: str
    message: str = ""
    route_prefix: str | None = None
    deployments: list[DeploymentStatus] = field(default_factory=list)


def read_applications() -> dict[str, Application]:
    """Return the applications by name; none if Serve does not run, or this process has left Ray (Serve would start
    one). Any thread may call it.

    Ray 2.60's `serve.status` must not be called beside a thread that builds or deploys an application: it builds a
    `RequestRouterConfig` for each deployment, whose constructor registers and unregisters a module in a table of the
    whole process; of two threads at once, one gets "is not registered for pickle by value" (ValueError). The details
    as the controller sends them are plain values, and name route prefixes too."""
    import ray
    from ray.serve.context import _get_global_client

    if not ray.is_initialized():
        return {}
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    return {name: _application(details) for name, details in client.get_serve_details()["applications"].items()}


def record(name: str, content: Mapping[str, Any] | None) -> None:
    """Keep what an application runs for all processes of the cluster, in Ray's key-value store. None: forget it."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    if content is None:
        _internal_kv_del(_key(name))
    else:
        _internal_kv_put(_key(name), msgspec.json.encode(content))


def recorded(name: str) -> dict[str, Any] | None:
    """Return the content of `record`; None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    record: dict[str, Any] | None = msgspec.json.decode(_internal_kv_get(_key(name)) or "null")
    return record


def _key(name: str) -> bytes:
    return f"aerie-application:{name}".encode()


def _application(details: Mapping[str, Any]) -> Application:
    """Read one application of Serve's `ServeInstanceDetails`."""
    deployments = [
        DeploymentStatus(
            name,
            deployment["status"].value,
            deployment["message"],
            dict(Counter(replica["state"].value for replica in deployment["replicas"])),
        )
        for name, deployment in details["deployments"].items()
    ]
    return Application(details["status"].value, details["message"], details.get("route_prefix"), deployments)
