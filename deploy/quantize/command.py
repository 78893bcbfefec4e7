"""Runs `aerie quantize` if its library is installed."""

import argparse
from importlib.util import find_spec

from aerie.attention.distribution import install_command
from aerie.cluster.config import ConfigError
from aerie.kernels.lazy_import import load


def run(arguments: argparse.Namespace) -> int:
    """Write the quantised checkpoint (`checkpoint.run`). Raises ConfigError without compressed-tensors."""
    if find_spec("compressed_tensors") is None:
        raise ConfigError(
            f"aerie quantize needs compressed-tensors, which is not installed: {install_command('quantize')}"
        )
    return int(load("aerie.deploy.quantize.checkpoint:run")(arguments))
