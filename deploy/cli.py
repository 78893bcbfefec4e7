"""The command `aerie`: serve, start, stop, plan, doctor, config, chat, bench, exact, check-server, quantize, and the
training of targets and drafts. Imports modules after arguments are parsed, so that `--help` and errors in options are
printed at once. With API keys among the arguments, which every user of a machine can read (/proc/PID/cmdline), it first
restarts itself with digests in their place."""

import os
import sys
from collections.abc import Sequence

from aerie.cluster.http.keys import digest
from aerie.deploy.arguments import SERVE, parser
from aerie.deploy.command_line import parsed
from aerie.kernels.lazy_import import load

_OPTION = "--api-key"


def hide_keys() -> None:
    """Replace this process by the same command with digests, if it has keys. An invalid key stays, and the command ends
    with its error."""
    words = with_digests(sys.orig_argv)
    if words != sys.orig_argv:
        sys.stdout.flush()
        os.execv(sys.executable, words)


def with_digests(words: Sequence[str]) -> list[str]:
    """Return a command line with the digest of each key that follows `--api-key`."""
    hidden, is_key = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == _OPTION:
            hidden.append(f"{name}={_digest(value)}" if equals else word)
            is_key = True
        elif is_key and not word.startswith("-"):
            hidden.append(_digest(word))
        else:
            is_key = False
            hidden.append(word)
    return hidden


def _digest(word: str) -> str:
    try:
        return digest(word)
    except ValueError:
        return word


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 with one line on stderr for errors of the user, 130 after Ctrl-C."""
    is_program = argv is None  # not called by another
    if is_program and "serve" in sys.argv[1:2]:
        hide_keys()
    arguments = parsed(parser(), sys.argv[1:] if argv is None else argv)
    is_guarded = is_program and arguments.run == SERVE
    run = load(f"aerie.deploy.command_line:{'run_guarded_command' if is_guarded else 'run_command'}")
    return int(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
