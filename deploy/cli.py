"""The command `aerie`: serve, start, stop, plan, doctor, config, chat, bench, and the training of targets and drafts.

Arguments are parsed first and modules imported after, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.serve.check_process import CheckProcess

DEFAULT_CONFIG = "eagle"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 2 with one line on stderr for what the user has to change, 130
    after Ctrl-C."""
    if argv is None and "serve" in sys.argv[1:2]:
        from deploy.serve.private_arguments import hide_keys

        hide_keys()
    arguments = _parser().parse_args(argv)
    if argv is None and arguments.run is _serve:  # as a program, not called by another
        from cluster.start_log import process_began_s
        from deploy.processes.guard import run_guarded

        began_s = process_began_s()
        return run_guarded(lambda ends: _command(arguments, lambda arguments: _serve(arguments, began_s, ends)))
    return _command(arguments, arguments.run)


def _command(arguments: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    from cluster.config import ConfigError
    from speculative.training import TrainingError

    try:
        code = run(arguments)
    except (ConfigError, TrainingError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `aerie ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Python writes what is left as it ends
        return 128 + signal.SIGPIPE
    except OSError as error:
        # ENOENT without a name: tempfile has found no folder for temporary files
        if error.errno not in _OF_PLACES and (error.errno != errno.ENOENT or error.filename):
            raise
        print(_place_fault(error), file=sys.stderr)
        return 2
    except MemoryError as error:
        remedy = "free memory, or raise the limit (ulimit -v, a container's memory)"
        print(f"aerie: not enough memory{f' ({error})' if str(error) else ''}: {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(str(error) or "aerie: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


# What is wrong with a file's place, and not with us.
_OF_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EMFILE, errno.ENFILE)


def _place_fault(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else "TMPDIR, HOME or the output: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"aerie: {where}{error.strerror}: raise the limit of open files (ulimit -n)"
    remedy = "free some space, or set TMPDIR, HOME or the option that names it to a place that can be written"
    return f"aerie: {where}{error.strerror}: {remedy}"


def _parser() -> argparse.ArgumentParser:
    from deploy.bench.command import add_command as add_bench
    from deploy.chat.command import add_command as add_chat
    from deploy.config.model_options import add_options
    from deploy.evaluate import add_command as add_eval_draft
    from speculative.training.cli import add_commands

    parser = argparse.ArgumentParser(prog="aerie", description="Serves large language models from a Ray cluster.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print Aerie's version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="check a Serve config file, then `serve run` it")
    _add_config(serve)
    add_options(serve)
    serve.add_argument("--host", help="of HTTP, instead of the file's; 0.0.0.0 for all interfaces")
    serve.add_argument("--port", type=_port, help="of HTTP, instead of the file's")
    serve.add_argument("--verbose", action="store_true", help="print what Ray and Serve write, too")
    serve.add_argument("--address", help="of a running Ray cluster; without it Ray starts here, and small")
    serve.add_argument("--object-store-mb", type=int, default=150, help="of a Ray started here (default: 150)")
    serve.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy in any case")
    serve.set_defaults(run=_serve, shows_config=False)
    _add_start(commands)
    stop = commands.add_parser("stop", help="end what `aerie serve` and `aerie start` have begun here, nothing else")
    stop.add_argument("--port", type=int, help="of HTTP, or of the cluster's head (default: every one)")
    stop.add_argument("--now", action="store_true", help="do not wait for running requests")
    stop.set_defaults(run=_stop)
    plan = commands.add_parser("plan", help="check a Serve config file and print what it would start")
    _add_config(plan)
    add_options(plan)
    plan.add_argument("--nodes", type=int, default=1, help="nodes to plan for, 0: only check (default: 1)")
    plan.add_argument("--gpus", type=float, help="GPUs of each (default: this machine's)")
    plan.add_argument("--cpus", type=float, help="CPUs of each (default: this machine's)")
    plan.set_defaults(run=_plan, shows_config=True)
    doctor = commands.add_parser("doctor", help="what is needed next on this machine, a line per finding")
    _add_config(doctor)
    doctor.set_defaults(run=_doctor)
    config = commands.add_parser("config", help="print a packaged config file, to start your own from")
    config.add_argument("name", nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    config.set_defaults(run=_config)
    add_commands(commands)
    add_eval_draft(commands, DEFAULT_CONFIG)
    add_bench(commands)
    add_chat(commands)
    return parser


class _Version(argparse.Action):
    """Print the version, which is looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from attention.distribution import version

        print(f"aerie {version()}")
        parser.exit()


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 to 65535, such as 8000")
    return int(text)


def _add_start(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    start = commands.add_parser("start", help="make this host a Ray cluster's head, or join one; see docs/clusters.md")
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="be the head")
    role.add_argument("--address", default="", help="join the cluster of this head, HOST:PORT")
    start.add_argument("--port", type=_port, default=6379, help="of the head (default: 6379)")
    start.add_argument(
        "--node-ip", default="", help="address of this host by which others reach it (default: Ray's choice)"
    )
    start.add_argument("--interface", default="", help="instead of --node-ip, the network interface, as eth0")
    start.add_argument("--num-cpus", type=int, help="for Ray to place on (default: the host's)")
    start.add_argument("--num-gpus", type=int, help="for Ray to place on (default: the host's)")
    start.add_argument("--object-store-mb", type=int, default=150, help="of Ray's shared memory (default: 150)")
    start.add_argument("--block", action="store_true", help="stay in the foreground, as a supervisor wants it")
    start.set_defaults(run=_start)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        default=DEFAULT_CONFIG,
        help=f"file, or where there is none, a packaged one's name (default: {DEFAULT_CONFIG}, the embedded pair)",
    )


def _serve(
    arguments: argparse.Namespace, began_s: float | None = None, ends_by_itself: Callable[[], None] = lambda: None
) -> int:
    """began_s: Unix time at which the command began; None: with this process. ends_by_itself: see
    `deploy.processes.guard.run_guarded`."""
    from deploy.serve.check_process import CheckProcess

    check = CheckProcess()
    try:
        return _serve_checked(arguments, check, began_s, ends_by_itself)
    finally:
        check.close()


def _serve_checked(
    arguments: argparse.Namespace, check: CheckProcess, began_s: float | None, ends_by_itself: Callable[[], None]
) -> int:
    from cluster.start_log import process_began_s
    from cluster.transport.folders import temporary_folder
    from deploy.config.model import chosen_config
    from deploy.serve.launch import ServeStart, serve
    from deploy.start import use_token

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


def _start(arguments: argparse.Namespace) -> int:
    from deploy.start import NodeStart, start

    return start(
        NodeStart(
            arguments.address,
            arguments.port,
            arguments.node_ip,
            arguments.interface,
            arguments.num_cpus,
            arguments.num_gpus,
            arguments.object_store_mb,
            arguments.block,
        )
    )


def _stop(arguments: argparse.Namespace) -> int:
    from deploy.stop import stop

    return stop(arguments.port, arguments.now)


def _plan(arguments: argparse.Namespace) -> int:
    from cluster.transport.folders import temporary_folder
    from deploy.checks import local_nodes, print_plan
    from deploy.config.model import chosen_config

    nodes = local_nodes(arguments.nodes, arguments.cpus, arguments.gpus)
    with temporary_folder() as scratch:
        return print_plan(chosen_config(arguments, scratch), nodes)


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy.doctor.report import run_doctor

    return run_doctor(arguments.config)


def _config(arguments: argparse.Namespace) -> int:
    from deploy.config.files import starting_point

    print(starting_point(arguments.name), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
