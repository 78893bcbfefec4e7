"""Two nodes: one engine spread over them, and everything that leaves a process goes over tcp with CURVE."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.checkpoint import make_tokenizer
from tests.e2e.serving import RAY_ENVIRONMENT, free_port, serving, wait_idle
from tests.support.scripted import VOCABULARY, scripted_token
from tests.support.tiny_models import make_target

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A cluster of two nodes, each too small for the whole engine."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ae", dir="/tmp")
    os.environ |= RAY_ENVIRONMENT | {"RAY_TMPDIR": folder}
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=100 * 10**6, include_dashboard=False)
    try:
        ray.init(address=cluster.address, namespace="serve")
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def test_engine_over_two_nodes_answers(port: int, tmp_path: Path) -> None:
    make_tokenizer(make_target(tmp_path / "target", vocab_size=VOCABULARY), VOCABULARY)
    args = {"model": {"path": "target", "device": "cpu"}, "parallel": {"tensor_parallel": 2}}
    with serving(port, args, tmp_path, scripted=True) as server:
        body = {
            "model": "target",
            "prompt": [5, 6, 7],
            "max_tokens": 50,
            "seed": 3,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == [scripted_token(3, p) for p in range(3, 53)]
        wait_idle()
