"""The shipped files: each is a Serve configuration that Serve and Aerie accept."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cluster.config import EngineConfig, parse
from aerie.cluster.placement import NodeResources, place
from aerie.deploy.serve.environment import FAULT_ENVIRONMENT, HAPROXY_ENVIRONMENT
from aerie.deploy.serve.launch import END_LIMIT_S, STOP_MARGIN_S
from aerie.deploy.start import NODE_ENVIRONMENT
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MANIFEST = DEPLOY / "kuberay" / "rayservice.yaml"


def _contents() -> list[Any]:
    paths = [*sorted(DEPLOY.glob("*.yaml")), DEPLOY.parent / "examples" / "cluster.yaml"]
    serve_files = [pytest.param(yaml.safe_load(path.read_text()), id=path.name) for path in paths]
    inner = yaml.safe_load(MANIFEST.read_text())["spec"]["serveConfigV2"]
    return [*serve_files, pytest.param(yaml.safe_load(inner), id=MANIFEST.name)]


@pytest.mark.parametrize("content", _contents())
def test_configuration_is_accepted_and_fits_eight_gpus(content: dict[str, Any], tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(content)
    (application,) = content["applications"]
    assert application["import_path"] == "aerie.deploy.app:build"
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    args = application["args"]
    args["model"]["path"] = "target"
    if "speculative" in args:
        args["speculative"]["path"] = "draft"
    placement = place(parse(args, tmp_path), [NodeResources("n", "10.0.0.1", 64, 8)])
    assert placement.device == "cuda"


def test_pods_have_the_settings_of_aerie_start() -> None:
    """But for authentication, whose settings the operator adds."""
    cluster = yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        wanted = NODE_ENVIRONMENT | FAULT_ENVIRONMENT | HAPROXY_ENVIRONMENT
        assert environment == {
            **{name: value for name, value in wanted.items() if name != "RAY_AUTH_MODE"},
            "RAY_SERVE_HAPROXY_BINARY_PATH": "/home/ray/aerie-haproxy",
        }
    assert cluster["authOptions"] == {"mode": "token"}


def test_pods_run_without_privileges_and_within_their_requests() -> None:
    cluster = yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["capabilities"] == {
            "drop": ["ALL"]
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_renders_the_base_and_its_options(tmp_path: Path) -> None:
    """An overlay of a user's own, with every option and another image. Policies select the pods that are deployed."""
    folder = shutil.copytree(MANIFEST.parent, tmp_path / "kuberay")
    (tmp_path / "own").mkdir()
    overlay = {
        "resources": ["../kuberay"],
        "components": ["../kuberay/autoscaling", "../kuberay/gcs-fault-tolerance"],
        "images": [{"name": "aerie", "newName": "registry.example/aerie", "newTag": "9"}],
    }
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    for source, tag in ((folder, f"aerie:{VERSION}"), (tmp_path / "own", "registry.example/aerie:9")):
        done = subprocess.run(["kubectl", "kustomize", str(source)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found = {each["kind"]: each["spec"] for each in yaml.safe_load_all(done.stdout)}
        cluster = found["RayService"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        assert {group["template"]["spec"]["containers"][0]["image"] for group in groups} == {tag}
        (labels,) = [set(group["template"]["metadata"]["labels"].items()) for group in groups[:1]]
        for kind, selector in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            assert set(found[kind][selector]["matchLabels"].items()) <= labels
    assert cluster["enableInTreeAutoscaling"] and cluster["gcsFaultToleranceOptions"]["redisAddress"]


def _stop_s() -> float:
    return EngineConfig().drain_timeout_s + END_LIMIT_S + STOP_MARGIN_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_waits_for_draining(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "aerie.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))
    assert float(settings["TimeoutStopSec"]) == _stop_s() and settings["KillMode"] == "mixed"
    assert settings["RestartPreventExitStatus"] == "2", "a refused configuration"
    unit = tmp_path / "aerie.service"
    unit.write_text(text.replace("/opt/aerie/bin/aerie ", f"{shutil.which('true')} "))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_compose_file_waits_for_draining_and_has_no_privileges() -> None:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["aerie"]
    assert service["command"][:2] == ["aerie", "serve"] and service["stop_grace_period"] == f"{_stop_s():g}s"
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]


def test_an_example_that_listens_beyond_the_loopback_wants_a_key() -> None:
    content = yaml.safe_load((DEPLOY.parent / "examples" / "cluster.yaml").read_text())
    (application,) = content["applications"]
    assert content["http_options"]["host"] == "0.0.0.0" and application["args"]["ingress"]["api_keys"]


def test_nothing_but_kubernetes_listens_beyond_the_loopback() -> None:
    for path in DEPLOY.glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1", path
