"""The entry point of the command `aerie`: starts `deploy.cli` from any folder, whatever modules lie there."""

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

from aerie.shadows import ROOT, hidden  # noqa: E402


def main() -> int:
    """Run the command; returns its exit code: 130 after Ctrl-C, 2 if other modules hide Aerie's."""
    _leave_out_current_folder()
    if fault := hidden():
        print(fault, file=sys.stderr)
        return 2
    from deploy.cli import main as run

    try:
        if signal.getsignal(signal.SIGINT) is _interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        print("aerie: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _leave_out_current_folder() -> None:
    """Remove the current folder from Python's path, also for child processes, unless Aerie itself is there. An empty
    entry of PYTHONPATH, as in `PYTHONPATH=$PYTHONPATH:/x`, means the current folder."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if os.path.realpath("") == str(ROOT):
        return
    sys.path[:] = [path for path in sys.path if _is_elsewhere(path)]
    if paths := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths.split(os.pathsep) if _is_elsewhere(path))


def _is_elsewhere(path: str) -> bool:
    return os.path.realpath(path) != os.path.realpath("")
