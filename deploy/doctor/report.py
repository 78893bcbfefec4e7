"""`aerie doctor`: prints a line per finding about this machine and a configuration."""

import argparse

from cluster.config import ConfigError
from cluster.placement import place
from deploy.config.files import find_config
from deploy.doctor.findings import Finding, findings
from deploy.doctor.machine import read_machine
from deploy.nodes import local_nodes


def run(arguments: argparse.Namespace) -> int:
    """`aerie doctor`; see `run_doctor`."""
    return run_doctor(arguments.config)


def run_doctor(given: str) -> int:
    """Print the findings; return 1 if one prevents a start."""
    failed = False
    for finding in (*findings(read_machine()), _configuration(given)):
        failed = failed or finding.level == "FAIL"
        print(f"{finding.level:4}  {finding.name}: {finding.text}", flush=True)
    return 1 if failed else 0


def _configuration(given: str) -> Finding:
    from deploy.checks import check_devices, checked_file  # torch: findings about the machine are printed first

    try:
        path = find_config(given)
        config, nodes = checked_file(path), local_nodes(1, None, None)
        check_devices(config, nodes)
        placed = place(config, nodes)
    except (ConfigError, OSError) as error:
        return Finding("FAIL", "configuration", str(error))
    return Finding("ok", "configuration", f"{path} fits this machine, on {placed.device}")
