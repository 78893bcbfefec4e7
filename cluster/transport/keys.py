"""The ZeroMQ transport of a process, and the application's keys, distributed through Ray."""

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from cluster.transport.folders import private_folder
from cluster.transport.sockets import CurveKeys, Transport, new_keys

_KV_NAMESPACE = b"aerie"


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
