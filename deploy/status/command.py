"""`aerie status`: prints a report as text or JSON."""

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict

from aerie.deploy.access import ADDRESS, find_ray, reach_ray
from aerie.deploy.status.report import ApplicationStatus, Report
from aerie.kernels.lazy_import import load

LIMIT_S = 40.0  # Ray's client tries to reach a GCS that hangs without limit


def run(arguments: argparse.Namespace) -> int:
    """`aerie status`. Return 0 if all applications run with ready engines, 1 if not. Raises ConfigError if there is no
    Ray to ask."""
    reach = find_ray(arguments.port, arguments.address)
    late = threading.Timer(LIMIT_S, _give_up, (reach[ADDRESS],))
    late.daemon = True
    late.start()
    try:
        reach_ray(reach)
        report: Report = load("aerie.deploy.status.collect:read_report")(reach[ADDRESS], arguments.name)
    finally:
        late.cancel()
    print(as_json(report) if arguments.json else "\n".join(lines(report)))
    return 0 if report.is_well else 1


def as_json(report: Report) -> str:
    """Return the report as one JSON object."""
    return json.dumps(asdict(report) | {"is_well": report.is_well})


def lines(report: Report) -> Iterator[str]:
    """Yield the report as text."""
    alive = [node for node in report.nodes if node.is_alive]
    yield f"Ray         {report.address}, {len(alive)} node{'' if len(alive) == 1 else 's'}"
    for node in report.nodes:
        yield f"  node      {node.address}: " + (f"free {node.free} of {node.total}" if node.is_alive else "is gone")
    if not report.applications:
        yield "no application is deployed: `aerie serve FILE --address` deploys one"
    for application in report.applications:
        yield from _application(application)
    for group in report.waiting:
        whose = f"a replica of {group.deployment} of {group.application}" if group.application else "a placement group"
        yield f"waits       {whose}, for {' + '.join(group.bundles)} ({group.strategy}): " + (
            group.lacks or "there is room now"
        )


def _application(application: ApplicationStatus) -> Iterator[str]:
    where = "" if application.route_prefix is None else f" at {application.route_prefix}"
    yield f"application {application.name}{where}: {application.status}{_after(application.message)}"
    for deployment in application.deployments:
        replicas = ", ".join(f"{count} {state}" for state, count in deployment.replicas.items()) or "no replica"
        yield f"  {deployment.name:<9} {deployment.status}: {replicas}{_after(deployment.message)}"
    for engine in application.engines:
        load = f"{engine.num_running} running, {engine.num_waiting} waiting, {engine.kv_usage:.0%} of KV pages"
        ranks = f"{engine.num_ranks} ranks, {engine.num_restarts} restarts"
        yield f"  engine {engine.engine_id}: {engine.status}; {load}; {ranks}{_after(engine.detail)}"


def _after(message: str) -> str:
    """Return the last line of a message, after a dash."""
    last = message.strip().splitlines()
    return f" - {last[-1]}" if last else ""


def _give_up(address: str) -> None:
    print(
        f"{address}: no answer within {LIMIT_S:g} s: Ray's GCS or Serve's controller hangs", file=sys.stderr, flush=True
    )
    os._exit(1)
