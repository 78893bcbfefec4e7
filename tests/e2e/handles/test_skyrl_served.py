"""SkyRL's calls to a served mixture of experts with a draft: rollouts, pauses, and weights over gloo."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aerie.workers.distributed.ports import free_port
from aerie.workers.distributed.weight_transfer.sender import WeightSender
from tests.clients.skyrl_calls import SkyRLCalls
from tests.e2e.checkpoint import VOCAB, make_tokenizer
from tests.e2e.serving import Server, serving
from tests.support.tiny_models import make_eagle, make_target

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
KEY, PROMPT = "r" * 20, [5, 9, 12, 7, 30]
LAYERS, PER_TOKEN = 4, 2
EXPERTS: dict[str, Any] = {
    "architecture": "Qwen3Moe",
    "num_experts": 6,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    target = make_target(folder / "target", vocab_size=VOCAB, calm=0.01, **EXPERTS)
    make_tokenizer(target)
    args: dict[str, Any] = {
        "model": {"path": str(target), "device": "cpu", "dtype": "float32"},
        "speculative": {
            "path": str(make_eagle(folder / "draft", target, copying=True)),
            "method": "eagle",
            "num_steps": 3,
            "top_k": 2,
            "num_draft_tokens": 6,
            "adaptive": False,
        },
        "cache": {"num_pages": 400, "routed_experts": True},
        "scheduler": {"max_running": 8},
        "parallel": {"tensor_parallel": 1},
        "ingress": {"api_keys": [{"name": "root", "key": KEY, "admin": True}]},
    }
    with serving(ray_port, args, folder) as running:
        yield running


@pytest.fixture(scope="module")
def calls(server: Server) -> Iterator[SkyRLCalls]:
    url = server.url.replace("://", f"://skyrl:{KEY}@")
    with httpx.Client(base_url=url, timeout=120) as client:
        yield SkyRLCalls(client, server.model)


def test_rollouts_have_ids_log_probabilities_and_experts(calls: SkyRLCalls) -> None:
    plain, recorded = (calls.generate(PROMPT, experts, seed=3) for experts in (False, True))
    assert plain["token_ids"] == recorded["token_ids"] and plain["finish_reason"] in ("stop", "length")
    assert len(plain["logprobs"]["content"]) == len(plain["token_ids"]) and "routed_experts" not in plain
    experts = np.asarray(recorded["routed_experts"])
    assert experts.shape == (len(PROMPT) + len(plain["token_ids"]) - 1, LAYERS, PER_TOKEN)
    assert experts.max() < EXPERTS["num_experts"] and (experts[..., 0] != experts[..., 1]).all()
    samples = calls.sample(PROMPT, 3, seed=7, temperature=0.8, max_tokens=9)
    assert len(samples) == 3 and all(len(one["token_ids"]) <= 9 and one["logprobs"]["content"] for one in samples)
    text = calls.detokenize(plain["token_ids"])
    assert isinstance(text, str) and calls.tokenize("the quick fox")


def test_a_request_freezes_in_a_pause_and_continues(calls: SkyRLCalls) -> None:
    expected = calls.generate(PROMPT, seed=1, max_tokens=120, min_tokens=120)["token_ids"]
    found: list[Any] = []
    calls.control("/pause", mode="keep", clear_cache="false")
    asked = threading.Thread(
        target=lambda: found.append(calls.generate(PROMPT, seed=1, max_tokens=120, min_tokens=120)["token_ids"])
    )
    asked.start()
    asked.join(0.5)
    assert not found
    calls.control("/resume")
    asked.join(60)
    assert found == [expected]
    calls.post("/reset_prefix_cache", {"reset_running_requests": False})


def test_weights_come_over_gloo_through_the_worker_extensions_methods(calls: SkyRLCalls, folder: Path) -> None:
    before = calls.generate(PROMPT, seed=5, temperature=0.0)["token_ids"]
    size, port = calls.world_size() + 1, free_port()
    joined: list[WeightSender] = []
    trainer = threading.Thread(target=lambda: joined.append(WeightSender("127.0.0.1", port, size)))
    trainer.start()
    calls.init("127.0.0.1", port, size)
    trainer.join(60)
    (sender,) = joined
    generator = torch.Generator().manual_seed(0)
    old = load_file(str(folder / "target" / "model.safetensors"))
    tensors: dict[str, Tensor] = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()
    }
    send(calls, sender, tensors)
    after = calls.generate(PROMPT, seed=5, temperature=0.0)
    assert after["token_ids"] != before and after["weight_versions"][0]["version"] == "1"
    send(calls, sender, old)
    assert calls.generate(PROMPT, seed=5, temperature=0.0)["token_ids"] == before
    sender.close()


def send(calls: SkyRLCalls, sender: WeightSender, tensors: dict[str, Tensor]) -> None:
    """As SkyRL's broadcast does: keep-pause, start, send beside the call, finish, resume."""
    calls.control("/pause", mode="keep", clear_cache="false")
    calls.rpc("skyrl_start_weight_update", is_checkpoint_format=True)
    sending = threading.Thread(target=sender.send, args=(tensors,))
    sending.start()
    info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "packed": True,
    }
    calls.rpc("update_weights_nccl", update_info=info)
    sending.join(60)
    calls.rpc("skyrl_finish_weight_update")
    calls.control("/resume")


def test_what_is_not_there_is_refused_by_name(calls: SkyRLCalls, server: Server) -> None:
    for method, kwargs in (
        ("update_weights_ipc", {"update_info": {"names": []}}),
        ("skyrl_start_weight_update", {"is_checkpoint_format": False}),
        ("eval", {}),
    ):
        reply = calls.client.post("/collective_rpc", json={"method": method, "kwargs": kwargs})
        assert reply.status_code == 400, reply.text
    assert calls.client.post("/sleep", params={"level": "2"}).status_code == 400
    body = {"method": "skyrl_start_weight_update"}
    assert httpx.post(f"{server.url}/collective_rpc", json=body).status_code == 401
    wrong = server.url.replace("://", "://skyrl:wrong-key-entirely@")
    assert httpx.post(f"{wrong}/collective_rpc", json=body).status_code == 401
