"""Ray for `aerie serve`: joins a cluster, or starts a small one of this machine. Called by `deploy.serve.launch`."""

import os
import site
from pathlib import Path
from typing import Any

from deploy.processes import server_record
from deploy.serve.ray_files import keep_to_owner

# Processes of a small application: controller, two proxies, the task that builds the application, two ingresses, an
# engine's replica and its coordinator. Ray starts them in sequence, and each imports for seconds.
SERVING_PROCESSES = 8
SERVING_MODULES = (
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "deploy.app",
)
CORES_TO_PREPARE = 8  # with at least so many, processes start before they are needed


def join_ray(address: str | None) -> None:
    """Join a cluster. address: None for RAY_ADDRESS."""
    import ray

    ray.init(address, namespace="serve")


def start_own_ray(object_store_mb: int, num_ranks: int) -> Any:
    """Run `start_ray` with files private to this user, which are removed when the server has ended."""
    keep_to_owner(os.environ)
    node = start_ray(object_store_mb, num_ranks)
    session = node.get_session_dir_path()
    os.chmod(session, 0o700)  # Ray lets everybody in
    server_record.note(session=session)
    return node


def start_ray(object_store_mb: int, num_ranks: int = 1) -> Any:
    """Start a minimal Ray on this machine: no dashboard, a small object store. With enough cores, the processes of
    Serve and of an engine with `num_ranks` start at once and import in parallel. Return Ray's record of its
    processes."""
    if (os.cpu_count() or 1) >= CORES_TO_PREPARE:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "1")
        # Ray 2.60 starts as many as there are cores, and never more at once than this.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(SERVING_PROCESSES + num_ranks))
        os.environ.setdefault("RAY_preload_python_modules", ",".join(SERVING_MODULES))
        _let_find_us()
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # the default of 30 s is too short on a busy machine
    import ray

    # "local": by default Ray would join a cluster that this host is a node of.
    ray.init("local", namespace="serve", include_dashboard=False, object_store_memory=object_store_mb * 10**6)
    return ray._private.worker._global_node


def _let_find_us() -> None:
    """Add Aerie's folder to PYTHONPATH: processes that Ray starts ahead of a job find modules only there."""
    root, paths = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    if root not in site.getsitepackages() and root not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, paths)))
