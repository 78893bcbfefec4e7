"""A start goes on when Serve's proxies need longer than Serve waits."""

import subprocess
import sys

import pytest

from aerie.deploy.serve.launch import past_slow_proxies
from aerie.workers.distributed.ports import free_port
from tests.support import ROOT

_START = """
import sys
import ray
from ray import serve
from ray.serve._private import api
from aerie.deploy.serve.launch import past_slow_proxies

api.HTTP_PROXY_TIMEOUT = 0.001  # as if the machine were so busy
ray.init(num_cpus=1, include_dashboard=False, namespace="serve", log_to_driver=False)
calls = []

def start():
    calls.append(1)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})

past_slow_proxies(start)
print(len(calls), serve.status().proxies, flush=True)
serve.shutdown()
"""


@pytest.mark.ray
def test_a_second_call_finds_the_proxies_of_the_first() -> None:
    command = [sys.executable, "-c", _START, str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and done.stdout.startswith("2 "), done.stdout + done.stderr


def test_a_second_failure_is_the_callers() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        raise TimeoutError("HTTP proxies not available after 60s.")

    with pytest.raises(TimeoutError, match="60s"):
        past_slow_proxies(fails)
    assert len(calls) == 2
