"""The command `aerie`: serve, start, stop, plan, doctor, config, chat, bench, exact, check-server, quantize, and the
training of targets and drafts.

Modules are imported after arguments are parsed, so that `--help` and errors in options are printed at once.
"""

import sys

from aerie.deploy.arguments import SERVE, parser
from aerie.deploy.command_line import parsed
from aerie.deploy.serve.private_arguments import hide_keys
from aerie.kernels.lazy_import import load


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 with one line on stderr for errors of the user, 130 after Ctrl-C."""
    is_program = argv is None  # not called by another
    if is_program and "serve" in sys.argv[1:2]:
        hide_keys()
    arguments = parsed(parser(), sys.argv[1:] if argv is None else argv)
    is_guarded = is_program and arguments.run == SERVE
    run = load(f"aerie.deploy.run_command:{'run_guarded_command' if is_guarded else 'run_command'}")
    return int(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
