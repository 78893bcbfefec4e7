"""The shipped files: each is a Serve configuration that Serve and Aerie accept."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import parse
from cluster.placement import NodeResources, place
from deploy.serve.environment import FAULT_ENVIRONMENT, HAPROXY_ENVIRONMENT
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
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
    assert application["import_path"] == "deploy.app:build"
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    args = application["args"]
    args["model"]["path"] = "target"
    if "speculative" in args:
        args["speculative"]["path"] = "draft"
    placement = place(parse(args, tmp_path), [NodeResources("n", "10.0.0.1", 64, 8)])
    assert placement.device == "cuda"


def test_the_manifest_gives_up_what_does_not_answer_as_aerie_serve_does() -> None:
    head = yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterConfig"]["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment.items() >= FAULT_ENVIRONMENT.items()
    for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"):
        assert environment[name] == HAPROXY_ENVIRONMENT[name]


def test_an_example_that_listens_beyond_the_loopback_wants_a_key() -> None:
    content = yaml.safe_load((DEPLOY.parent / "examples" / "cluster.yaml").read_text())
    (application,) = content["applications"]
    assert content["http_options"]["host"] == "0.0.0.0" and application["args"]["ingress"]["api_keys"]


def test_nothing_but_kubernetes_listens_beyond_the_loopback() -> None:
    for path in DEPLOY.glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1", path
