"""The Helm chart, rendered and linted by Helm's own Go library (helm-python-sdk).

`deploy/kuberay/rayservice.yaml` is the owner of what both say: the chart's defaults must give the same."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.cluster.config import parse
from tests.support import ROOT

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has wheels for Linux on x86-64")

CHART = ROOT / "deploy" / "helm" / "aerie"
KUBERAY = ROOT / "deploy" / "kuberay"
RANGE = {"config": {"parallel": {"replicas": {"min": 1, "max": 4}}}, "autoscaling": {"enabled": True}}


def rendered(values: dict[str, Any], name: str = "aerie") -> dict[str, dict[str, Any]]:
    """Return the manifests by kind, of a chart that `helm lint --strict` accepts."""
    report = helm.lint(CHART, values, strict=True)
    assert not report["errors"], report
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace="serving")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text) if each}


def arguments(found: dict[str, dict[str, Any]]) -> Any:
    (application,) = yaml.safe_load(found["RayService"]["spec"]["serveConfigV2"])["applications"]
    return application["args"]


def groups(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    cluster = found["RayService"]["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups(found)]


def test_the_defaults_are_the_manifest_of_kuberay() -> None:
    wanted = {}
    for path in (KUBERAY / "rayservice.yaml", KUBERAY / "policies.yaml"):
        wanted |= {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}
    found = rendered({})
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for pod in pods(found) for container in pod["containers"]} == {f"aerie:{version}"}
    for pod in pods(found):
        pod["containers"][0]["image"] = "aerie"
    for manifests in (found, wanted):
        spec = manifests["RayService"]["spec"]
        spec["serveConfigV2"] = yaml.safe_load(spec["serveConfigV2"])
    assert found.keys() == wanted.keys()
    for kind in wanted:
        assert found[kind]["metadata"]["name"] == wanted[kind]["metadata"]["name"]
        assert found[kind]["spec"] == wanted[kind]["spec"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_options_are_the_components_of_kuberay(tmp_path: Path) -> None:
    shutil.copytree(KUBERAY, tmp_path / "kuberay")
    (tmp_path / "own").mkdir()
    overlay = {
        "resources": ["../kuberay"],
        "components": ["../kuberay/autoscaling", "../kuberay/gcs-fault-tolerance"],
    }
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "own")], capture_output=True, text=True, timeout=60, check=True
    )
    (wanted,) = [
        each["spec"]["rayClusterConfig"] for each in yaml.safe_load_all(done.stdout) if each["kind"] == "RayService"
    ]
    found = rendered({"gcsFaultTolerance": {"enabled": True}} | RANGE)
    cluster = found["RayService"]["spec"]["rayClusterConfig"]
    for option in ("enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions"):
        assert cluster[option] == wanted[option]
    (workers,), (wanted_workers,) = cluster["workerGroupSpecs"], wanted["workerGroupSpecs"]
    assert [workers[key] for key in ("minReplicas", "maxReplicas")] == [
        wanted_workers[key] for key in ("minReplicas", "maxReplicas")
    ]
    assert arguments(found)["parallel"]["replicas"] == {"min": 1, "max": 4}


def test_pods_follow_the_configuration(tmp_path: Path) -> None:
    """A larger model over two GPUs, without a draft; numbers stay whole numbers."""
    (tmp_path / "config.json").write_text("{}")
    found = rendered(
        {
            "config": {
                "model": {"path": str(tmp_path), "max_model_len": 1048576},
                "speculative": None,
                "parallel": {"tensor_parallel": 2, "replicas": 3},
                "engine": {"drain_timeout_s": 599.5},
            },
            "image": {"repository": "registry.example/aerie", "tag": "9", "pullSecrets": [{"name": "registry"}]},
        },
        name="llama",
    )
    config = parse(arguments(found), tmp_path)
    assert config.speculative is None and config.parallel.replicas == 3
    assert config.model.max_model_len == 1048576 and isinstance(config.model.max_model_len, int)
    head, workers = pods(found)
    limits = [pod["containers"][0]["resources"]["limits"] for pod in (head, workers)]
    assert "nvidia.com/gpu" not in limits[0] and limits[1]["nvidia.com/gpu"] == "2"
    assert workers["terminationGracePeriodSeconds"] == 630
    assert {group.get("replicas") for group in groups(found)[1:]} == {3}
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] == 3, "all of head and workers but one"
    assert {pod["containers"][0]["image"] for pod in (head, workers)} == {"registry.example/aerie:9"}
    assert workers["imagePullSecrets"] == [{"name": "registry"}]
    labels = {group["template"]["metadata"]["labels"]["app"] for group in groups(found)}
    assert labels == {"llama"} == {each["metadata"]["name"] for each in found.values()}
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"app": "llama"}


def test_keys_are_files_of_a_secret_that_the_configuration_never_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    keys = {"secret": "team-keys", "entries": [{"name": "search", "tokens_per_minute": 2000000}, {"name": "operators"}]}
    found = rendered({"keys": keys, "config": {"model": {"path": str(tmp_path)}, "speculative": None}})
    given = arguments(found)["ingress"]
    assert given == {
        "num_replicas": 2,
        "api_keys": [
            {"name": "search", "tokens_per_minute": 2000000, "file": "/run/secrets/aerie/search"},
            {"name": "operators", "file": "/run/secrets/aerie/operators"},
        ],
    }
    for pod in pods(found):
        mounted = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted["keys"]["mountPath"] == "/run/secrets/aerie" and mounted["keys"]["readOnly"]
        assert {"name": "keys", "secret": {"secretName": "team-keys"}} in pod["volumes"]
    for name in ("search", "operators"):
        (tmp_path / name).write_text("a-key-of-" + name)
    for entry in given["api_keys"]:
        entry["file"] = str(tmp_path / entry["name"])
    assert len(parse(arguments(found) | {"ingress": given}, tmp_path).ingress.api_keys) == 2


def test_what_is_switched_off_is_left_out_and_fields_of_pods_are_taken() -> None:
    probe = {"readinessProbe": {"httpGet": {"path": "/-/healthz", "port": 8000}, "periodSeconds": 5}}
    found = rendered(
        {
            "podDisruptionBudget": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "tokenAuth": False,
            "workers": {"probes": probe, "pod": {"nodeSelector": {"gpu": "h200"}}},
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        }
    )
    assert found.keys() == {"RayService"}
    assert "authOptions" not in found["RayService"]["spec"]["rayClusterConfig"]
    head, workers = pods(found)
    assert workers["nodeSelector"] == {"gpu": "h200"} and "nodeSelector" not in head
    assert workers["containers"][0]["readinessProbe"] == probe["readinessProbe"]
    assert "readinessProbe" not in head["containers"][0]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in head["containers"][0]["env"]
    own = [{"namespaceSelector": {"matchLabels": {"team": "search"}}}]
    rules = rendered({"networkPolicy": {"from": own}})["NetworkPolicy"]["spec"]["ingress"]
    assert {"ports": [{"port": 8000}], "from": own} in rules


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"repo": "aerie"}}, "additional properties 'repo' not allowed"),
        ({"config": {"model": None}}, "missing property 'model'"),
        ({"config": {"parallel": {"tensor_parallel": 0}}}, "minimum"),
        ({"keys": {"secret": "k", "entries": [{"name": "a", "key": "secret"}]}}, "keys"),
        ({"keys": {"entries": [{"name": "a"}]}}, "want keys.secret, the Secret whose files hold the keys"),
        ({"keys": {"secret": "k"}}, "wants keys.entries, such as"),
        ({"config": {"parallel": {"replicas": {"min": 1, "max": 2}}}}, "a range wants autoscaling.enabled=true"),
        ({"autoscaling": {"enabled": True}}, "wants config.parallel.replicas as a range"),
    ],
)
def test_wrong_values_are_refused_with_what_is_wrong(values: dict[str, Any], said: str) -> None:
    with pytest.raises((AssertionError, helm.HelmError), match=re.escape(said)):
        rendered(values)


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version
