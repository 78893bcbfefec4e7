"""Runs the application, and drains it at the end: running requests finish, new ones are refused. Used by
`aerie.deploy.serve.launch`."""

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from aerie.deploy.serve.applications import read_applications
from aerie.deploy.serve.console import Console
from aerie.deploy.serve.guest import Guest
from aerie.deploy.serve.watches import StartWatch, Watch, end_at_once

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

    empty: a folder without modules.
    start: ends a start that cannot succeed.
    ending: a file to create before the application is deleted.
    guest: deploys in place of `path` on a cluster that others use too."""
    from ray.serve.scripts import run

    def drain(signum: int, frame: object) -> None:
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

    found = [find_coordinators(name, {}) for name in applications]
    drains = [coordinator.drain.remote() for coordinators in found for coordinator in coordinators.values()]
    if drains:
        ray.wait(drains, num_returns=len(drains), timeout=timeout_s + 5)
