"""`aerie plan`: checks a Serve config file and prints what it would start."""

import argparse

from cluster.transport.folders import temporary_folder
from deploy.checks import print_plan
from deploy.config.model import chosen_config
from deploy.nodes import local_nodes


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    nodes = local_nodes(arguments.nodes, arguments.cpus, arguments.gpus)
    with temporary_folder() as scratch:
        return print_plan(chosen_config(arguments, scratch), nodes)
