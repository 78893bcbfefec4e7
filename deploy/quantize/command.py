"""Runs `aerie quantize` if its library is installed."""

import argparse
from importlib.util import find_spec

from attention.distribution import install_command
from attention.lazy_import import load
from cluster.config import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """See `deploy.quantize.checkpoint.run`. Raises ConfigError without compressed-tensors."""
    if find_spec("compressed_tensors") is None:
        raise ConfigError(
            f"aerie quantize needs compressed-tensors, which is not installed: {install_command('quantize')}"
        )
    return int(load("deploy.quantize.checkpoint:run")(arguments))
