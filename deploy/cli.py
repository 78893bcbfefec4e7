"""The command `aerie`: serve, plan, doctor, config, and the training of targets and drafts.

Arguments are parsed first and modules imported after, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DEFAULT_CONFIG = "eagle"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 2 with one line on stderr for what the user has to change."""
    arguments = _parser().parse_args(argv)
    if argv is None and arguments.run is _serve:  # as a program, not called by another
        from deploy.guard import run_guarded

        return run_guarded(lambda: _command(arguments))
    return _command(arguments)


def _command(arguments: argparse.Namespace) -> int:
    from cluster.config import ConfigError
    from speculative.training.errors import TrainingError

    try:
        code: int = arguments.run(arguments)
    except (ConfigError, TrainingError) as error:
        print(error, file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    from deploy.evaluate import add_command as add_eval_draft
    from speculative.training.cli import add_commands

    parser = argparse.ArgumentParser(prog="aerie", description="Serves large language models from a Ray cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="check a Serve config file, then `serve run` it")
    _add_config(serve)
    serve.add_argument("--port", type=int, help="of HTTP, instead of the file's")
    serve.add_argument("--address", help="of a running Ray cluster; without it Ray starts here, and small")
    serve.add_argument("--object-store-mb", type=int, default=150, help="of a Ray started here (default: 150)")
    serve.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy in any case")
    serve.set_defaults(run=_serve)
    plan = commands.add_parser("plan", help="check a Serve config file and print what it would start")
    _add_config(plan)
    plan.add_argument("--nodes", type=int, default=1, help="nodes to plan for, 0: only check (default: 1)")
    plan.add_argument("--gpus", type=float, help="GPUs of each (default: this machine's)")
    plan.add_argument("--cpus", type=float, help="CPUs of each (default: this machine's)")
    plan.add_argument("--checked-to", type=Path, help=argparse.SUPPRESS)  # a file for what checkpoints say
    plan.set_defaults(run=_plan)
    doctor = commands.add_parser("doctor", help="check this machine and a config file; prints one line per check")
    _add_config(doctor)
    doctor.set_defaults(run=_doctor)
    config = commands.add_parser("config", help="print a packaged config file, to start your own from")
    config.add_argument("name", nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    config.set_defaults(run=_config)
    add_commands(commands)
    add_eval_draft(commands, DEFAULT_CONFIG)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        default=DEFAULT_CONFIG,
        help=f"file, or where there is none, a packaged one's name (default: {DEFAULT_CONFIG}, the embedded pair)",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from deploy.configs import find_config
    from deploy.launch import serve

    return serve(
        find_config(arguments.config),
        arguments.address,
        arguments.object_store_mb,
        haproxy=not arguments.no_haproxy,
        port=arguments.port,
    )


def _plan(arguments: argparse.Namespace) -> int:
    from deploy.checks import local_nodes, print_plan
    from deploy.configs import find_config

    nodes = local_nodes(arguments.nodes, arguments.cpus, arguments.gpus)
    return print_plan(find_config(arguments.config), nodes, arguments.checked_to)


def _doctor(arguments: argparse.Namespace) -> int:
    from deploy.checks import run_doctor

    return run_doctor(arguments.config)


def _config(arguments: argparse.Namespace) -> int:
    from deploy.configs import starting_point

    print(starting_point(arguments.name), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
