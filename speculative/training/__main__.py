"""`python -m speculative.training train-target ...`: the training commands without the rest of `aerie`."""

from __future__ import annotations

import argparse
import sys

from speculative.training.cli import add_commands
from speculative.training.errors import TrainingError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m speculative.training")
    add_commands(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    try:
        return int(arguments.run(arguments))
    except TrainingError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
