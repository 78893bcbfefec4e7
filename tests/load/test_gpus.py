"""What can be known without a GPU of the scenarios that have some: that their configurations are valid and fit on their
nodes, what their nodes see, and why they are skipped."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aerie.cluster.config import AerieConfig, parse
from aerie.cluster.placement import NodeResources, place
from aerie.deploy.checks import check_checkpoints
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.deterministic import refusal
from tests.load.cluster import serve_content
from tests.load.gpu_matrix import ACROSS, FOUR, GPU_SCENARIOS, PEER, PEER_OWN, REPLICAS_BESIDE_HEAD
from tests.load.gpus import host_name, node_environment, too_few, visible_gpus
from tests.load.sandbox import ROOT, unavailable
from tests.load.scenario import Hosts, Scenario

TARGET = ROOT / "deploy/models/target"


def _config(hosts: Hosts, target: Path) -> AerieConfig:
    args = serve_content(hosts, hosts.args)["applications"][0]["args"]
    args["model"]["path"] = str(target)
    config = parse(args, Path())
    check_checkpoints(config)
    return config


@pytest.mark.parametrize("scenario", GPU_SCENARIOS, ids=lambda scenario: scenario.name)
def test_engines_fit_on_the_nodes_and_their_texts_are_comparable(scenario: Scenario) -> None:
    hosts = scenario.hosts
    config = _config(hosts, TARGET)
    assert hosts.cpus is not None and hosts.ranks == hosts.gpus and not hosts.wired
    nodes = [NodeResources(f"n{i}", f"n{i}", *each) for i, each in enumerate(zip(hosts.cpus, hosts.gpus, strict=True))]
    assert place(config, nodes).device == "cuda"
    assert sum(hosts.gpus) == config.parallel.tensor_parallel * config.parallel.min_replicas
    worker = config.worker
    target = read_target_config(worker.model, worker.tensor_parallel)
    if config.deterministic:
        assert refusal(worker, target, torch.bfloat16) is None
    else:
        assert worker.model.dtype == "float32"


def test_nodes_take_gpus_in_turn_and_know_their_number() -> None:
    visible = ["2", "3", "6", "7"]
    devices = [node_environment(FOUR, node, visible)["CUDA_VISIBLE_DEVICES"] for node in (1, 2, 3, 4)]
    assert devices == visible
    assert node_environment(REPLICAS_BESIDE_HEAD, 1, visible) == {"CUDA_VISIBLE_DEVICES": ""}
    assert node_environment(REPLICAS_BESIDE_HEAD, 3, visible) == {"CUDA_VISIBLE_DEVICES": "3"}
    joined = dataclasses.replace(FOUR, gpus=(1, 1))
    assert node_environment(joined, 3, visible) == {"CUDA_VISIBLE_DEVICES": ""}
    assert node_environment(PEER_OWN, 2, visible) == {"NCCL_HOSTID": "n2", "CUDA_VISIBLE_DEVICES": "3"}
    assert node_environment(PEER, 1, visible) == {"NCCL_CUMEM_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "2"}
    assert node_environment(Hosts(), 1, []) == {}


def test_too_few_gpus_are_said() -> None:
    assert too_few(FOUR, visible_gpus({"CUDA_VISIBLE_DEVICES": "0, 1"})) == (
        "its nodes have 4 GPUs in all, and this machine 2"
    )
    assert too_few(ACROSS, visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"})) == ""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.skipif(bool(unavailable(wires=False)), reason=unavailable(wires=False) or "it can")
def test_scenario_without_its_gpus_is_skipped_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.load", "--only", "gpu-four-kill", "--out", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "skipped: gpu-four-kill: its nodes have 4 GPUs in all, and this machine 1\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(bool(unavailable(wires=False)), reason=unavailable(wires=False) or "it can")
def test_nodes_have_host_names_of_their_own_where_ranks_must_not_share_a_host() -> None:
    asked = [sys.executable, "-c", "import socket; print(socket.gethostname())"]

    def said(hosts: Hosts) -> str:
        command = ["unshare", "--user", "--map-root-user", *host_name(hosts, "n3", sys.executable), *asked]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    assert said(ACROSS) == "n3"
    assert said(PEER) == os.uname().nodename
