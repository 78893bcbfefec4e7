"""`aerie serve`: checks a Serve config file, then serves it."""

import argparse
from collections.abc import Callable

from cluster.start_log import process_began_s
from cluster.transport.folders import temporary_folder
from deploy.config.model import chosen_config
from deploy.serve.check_process import CheckProcess
from deploy.serve.launch import ServeStart, serve
from deploy.serve.ray_files import use_token


def run(
    arguments: argparse.Namespace, began_s: float | None = None, ends_by_itself: Callable[[], None] = lambda: None
) -> int:
    """began_s: Unix time at which the command began; None: with this process. ends_by_itself: see
    `deploy.processes.guard.run_guarded`."""
    check = CheckProcess()
    try:
        return _serve(arguments, check, began_s, ends_by_itself)
    finally:
        check.close()


def _serve(
    arguments: argparse.Namespace, check: CheckProcess, began_s: float | None, ends_by_itself: Callable[[], None]
) -> int:
    if arguments.address:
        use_token()
    wanted = ServeStart(
        arguments.address,
        arguments.object_store_mb,
        not arguments.no_haproxy,
        arguments.host,
        arguments.port,
        arguments.verbose,
        process_began_s() if began_s is None else began_s,
    )
    with temporary_folder() as scratch:
        return serve(chosen_config(arguments, scratch), check, wanted, ends_by_itself)
