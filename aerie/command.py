"""The entry point of the command `aerie`: `aerie.deploy.cli`, and Ctrl-C while it is imported."""

import os
import signal
import sys
from types import FrameType


def _interrupted(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while Python imports, where a KeyboardInterrupt would be a traceback."""
    os.write(2, b"aerie: interrupted\n")
    os._exit(128 + signal.SIGINT)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)


def main() -> int:
    """Run the command; returns its exit code: 130 after Ctrl-C."""
    from aerie.deploy.cli import main as run

    try:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        print("aerie: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
