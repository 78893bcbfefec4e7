"""What processes of an application share through Ray: coordinators by name, for ingresses and for draining a server,
and the keys of ZeroMQ's transport."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from aerie.cluster.transport.sockets import CurveKeys, Transport, new_keys, private_folder

NAMESPACE = "aerie"  # Ray namespace of the coordinators' names, apart from Serve's own
_KV_NAMESPACE = b"aerie"


def coordinator_prefix(application: str) -> str:
    """Return the name prefix of an application's coordinators; the engine's id follows."""
    return f"coordinator:{application}:"


def find_coordinators(application: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return handles of an application's living coordinators, by engine id; `known` ones are not looked up again."""
    return named_coordinators(coordinator_prefix(application), known)


def named_coordinators(prefix: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return `find_coordinators` of a `coordinator_prefix`."""
    coordinators = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(prefix):
            engine_id = name.removeprefix(prefix)
            with contextlib.suppress(ValueError):  # it died between the two calls
                coordinators[engine_id] = known.get(engine_id) or ray.get_actor(name, namespace=NAMESPACE)
    return coordinators


def make_transport(one_node: bool, application: str) -> Transport:
    """Return the transport of this process's sockets: ipc files in a private folder if everything runs on one node,
    else tcp with keys.

    The caller removes the folder."""
    if one_node:
        return Transport(folder=str(private_folder()))
    return Transport(node_ip=ray.util.get_node_ip_address(), keys=application_keys(application))


def application_keys(application: str) -> CurveKeys:
    """Return the key pair of an application; the first call creates it. It outlives replicas, and is as secret as the
    cluster's key-value store, which Ray's token authentication guards."""
    key = f"curve:{application}".encode()
    stored: bytes | None = _internal_kv_get(key, namespace=_KV_NAMESPACE)
    if stored is None:
        # Stored only if no other process was faster. All processes read the stored one.
        _internal_kv_put(key, msgspec.msgpack.encode(new_keys()), overwrite=False, namespace=_KV_NAMESPACE)
        stored = _internal_kv_get(key, namespace=_KV_NAMESPACE)
        assert stored is not None
    return msgspec.msgpack.decode(stored, type=CurveKeys)
