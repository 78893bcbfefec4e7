"""Remembers a refused start in Ray's key-value store. Serve (2.60) restarts a replica after any exception of its
constructor; later attempts then raise the same error at once, without loading, and `aerie serve` ends."""

import hashlib
import time
from pathlib import Path

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from aerie.cluster.plan import ReplicaPlan

# Serve restarts replicas after 1, 2 and 4 s. A longer memory would outlast a fault of one node.
FRESH_S = 30.0


class Refusal(msgspec.Struct):
    """at: Unix seconds.
    identity: see `identity_of`.
    reason: the error's text.
    """

    at: float
    identity: str
    reason: str


def remember(application: str, plan: ReplicaPlan, reason: str) -> None:
    """Record for all processes of the cluster why an engine of `application` cannot start."""
    _internal_kv_put(_key(application), msgspec.msgpack.encode(Refusal(time.time(), identity_of(plan), reason)))


def remembered(application: str, plan: ReplicaPlan | None = None, since: float = 0.0) -> str:
    """Return why an engine of `application` cannot start; "" if unknown. plan: only a refusal of the same plan and
    files counts. since: Unix time before which refusals do not count."""
    found = _internal_kv_get(_key(application))
    if not found:
        return ""
    refusal = msgspec.msgpack.decode(found, type=Refusal)
    is_same = plan is None or refusal.identity == identity_of(plan)
    is_fresh = refusal.at >= since and abs(time.time() - refusal.at) < FRESH_S
    return refusal.reason if is_same and is_fresh else ""


def identity_of(plan: ReplicaPlan) -> str:
    """Return a digest of the plan and of the names, sizes and times of the checkpoints' files, so that a repaired
    checkpoint is tried at once."""
    rank = plan.rank
    paths = {rank.worker.model.path, *([rank.speculative.path] if rank.speculative is not None else [])}
    files = [file for path in sorted(paths) for file in sorted(Path(path).glob("*")) if file.is_file()]
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((plan, facts)).encode()).hexdigest()


def _key(application: str) -> bytes:
    return f"aerie-refused:{application}".encode()
