"""The Kubernetes manifest, started as KubeRay's operator starts it: head, worker and operator in network namespaces of
their own. The operator's flags and requests are those of KubeRay 1.6 (ray-operator/controllers/ray/common/pod.go and
utils/dashboardclient); pods, probes and policies need a Kubernetes cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.load.network import address, namespace, network
from tests.load.sandbox import run_inside, unavailable
from tests.support import ROOT
from tests.support.embedded import read_config_file

MANIFEST = ROOT / "deploy" / "kuberay" / "rayservice.yaml"
BIN = Path(sys.executable).parent
TOKEN = "0" * 32
LIMIT_S = 180.0  # as long as a busy machine needs

if __name__ != "__main__":
    pytestmark = [
        pytest.mark.ray,
        pytest.mark.timeout(600),
        pytest.mark.skipif(bool(unavailable(False)), reason=unavailable(False) or "it can"),
    ]


def test_the_operator_deploys_and_clients_reach_both_pods() -> None:
    assert run_inside(["-m", "tests.deploy.test_kuberay"]) == 0


def ray_start(group: dict[str, Any], head: bool) -> list[str]:
    """Return the command of a group's pods: its `rayStartParams`, and what the operator adds where they say nothing."""
    given = {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080", **group["rayStartParams"]}
    if head:
        given = {"dashboard-host": "0.0.0.0", **given}
    role = ["--head"] if head else [f"--address={address(1)}:6379"]
    return ["start", *role, "--block", *(f"--{name}={value}" for name, value in given.items())]


def environment(group: dict[str, Any], folder: Path, mode: str) -> dict[str, str]:
    """Return the environment of a group's container, with what `authOptions` adds."""
    (container,) = group["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    given["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(BIN / "aerie-haproxy")  # where this machine has the image's file
    given |= {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": TOKEN, "RAY_TMPDIR": str(folder)}
    return os.environ | given


def serve_config(spec: dict[str, Any]) -> dict[str, Any]:
    """The manifest's Serve configuration with the embedded pair as its model."""
    content: dict[str, Any] = yaml.safe_load(spec["serveConfigV2"])
    args = read_config_file(ROOT / "deploy" / "eagle.yaml")["applications"][0]["args"]
    manifests = content["applications"][0]["args"]
    kept = {name: manifests[name] for name in ("ingress", "engine", "scheduler")}
    args |= kept | {"parallel": {"tensor_parallel": 1, "autoscaling": True}, "ingress": {"num_replicas": 1}}
    args["model"]["path"] = str(ROOT / "deploy" / "models" / "target")
    args["speculative"]["path"] = str(ROOT / "deploy" / "models" / "dspark")
    content["applications"][0]["args"] = args
    return content


def _inside() -> None:
    import tempfile

    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    cluster = spec["rayClusterConfig"]
    mode = cluster["authOptions"]["mode"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    with tempfile.TemporaryDirectory(prefix="kr", dir="/tmp") as folder, network() as made:
        pods = []
        for node, group in enumerate(groups, start=1):
            made.add_node(node, wired=False)
            command = [str(BIN / "ray"), *ray_start(group, head=node == 1), "--object-store-memory=100000000"]
            if node > 1:
                command.append("--num-cpus=4")  # of the container's limits
            own = environment(group, Path(folder, str(node)), mode)
            pod = ["ip", "netns", "exec", namespace(node), *command]
            with Path(folder, f"{node}.log").open("w") as log:
                pods.append(subprocess.Popen(pod, env=own, cwd=ROOT, stdout=log, stderr=log))
            if node == 1:
                _wait(lambda: _status(f"http://{address(1)}:8265/api/version") is not None, pods, folder)
        url = f"http://{address(1)}:8265/api/serve/applications/"
        assert _status(url) == 401, "without a token"
        operator = {"Authorization": f"Bearer {TOKEN}"}
        sent = httpx.put(url, json=serve_config(spec), headers=operator, timeout=30)
        assert sent.status_code == 200, sent.text

        def is_running() -> bool:
            found = httpx.get(url, headers=operator, timeout=10).json()["applications"]
            return found.get("aerie", {}).get("status") == "RUNNING"

        _wait(is_running, pods, folder)
        body = {"model": "target", "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}
        texts = set()
        for node in (1, 2):
            pod_url = f"http://{address(node)}:8000"
            _wait(lambda pod_url=pod_url: _status(f"{pod_url}/-/healthz") == 200, pods, folder)  # the operator's check
            answer = httpx.post(f"{pod_url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        for process in pods:
            process.kill()


def _status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None


def _wait(condition: Any, pods: "list[subprocess.Popen[bytes]]", folder: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline and all(pod.poll() is None for pod in pods), "\n".join(
            path.read_text()[-3000:] for path in sorted(Path(folder).glob("*.log"))
        )
        time.sleep(0.3)


if __name__ == "__main__":
    _inside()
