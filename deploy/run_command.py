"""Runs a parsed command of `aerie`; errors of the user become one line and an exit code."""

import argparse
import errno
import os
import signal
import sys

from aerie.cluster.config import ConfigError
from aerie.cluster.start_log import process_began_s
from aerie.deploy.processes.guard import run_guarded
from aerie.kernels.lazy_import import load
from aerie.speculative.training import TrainingError


def run_guarded_command(arguments: argparse.Namespace) -> int:
    """Run `aerie serve` under the guard process."""
    began_s = process_began_s()
    return run_guarded(lambda ends_by_itself: run_command(arguments, began_s, ends_by_itself))


def run_command(arguments: argparse.Namespace, *more: object) -> int:
    """Run the parsed command. more: further arguments of its function."""
    try:
        code: int = load(arguments.run)(arguments, *more)
    except (ConfigError, TrainingError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `aerie ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes its buffer there at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        # ENOENT without a file name: tempfile has found no temporary folder
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


# Errors of the file system: a full disk, a read-only folder, too many open files.
_OF_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EMFILE, errno.ENFILE)


def _place_fault(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else "TMPDIR, HOME or the output: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"aerie: {where}{error.strerror}: raise the limit of open files (ulimit -n)"
    remedy = "free some space, or set TMPDIR, HOME or the option that names it to a place that can be written"
    return f"aerie: {where}{error.strerror}: {remedy}"
