"""Options of `aerie serve MODEL` and `aerie plan MODEL`, which `deploy.config.model` reads. Imports nothing heavy."""

import argparse
from pathlib import Path

from deploy.config import vllm_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that replace a Serve config file."""
    options = parser.add_argument_group("with a model instead of a config file")
    options.add_argument(
        "--draft",
        metavar="HEAD",
        help="EAGLE or DFlash head: folder or name on the hub; or suffix: copy from the request's own text",
    )
    options.add_argument("--tensor-parallel", type=int, metavar="N", help="workers of one engine (default: 1)")
    options.add_argument("--revision", help="of the model on the hub: branch, tag or commit")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of docs/configuration.md, such as cache.memory_gb=4; can be repeated",
    )
    options.add_argument("--save", type=Path, metavar="FILE", help="keep the config file that this amounts to")
    vllm_options.add_options(parser)
