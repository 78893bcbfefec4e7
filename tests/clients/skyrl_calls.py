"""The requests of SkyRL's client (skyrl 0.3), by its field names: what `RemoteInferenceClient` sends for each call.

`tests.e2e.handles.test_skyrl_served` sends them to a server. The client knows nothing but URLs, so an API key is the
password of the URL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class SkyRLCalls:
    """client: has the server's URL, with the key as password."""

    client: httpx.Client
    model: str

    def generate(self, token_ids: Sequence[int], experts: bool = False, **sampling: Any) -> dict[str, Any]:
        """One choice of `generate`. experts: as with `enable_return_routed_experts`."""
        params = {
            "min_tokens": 1,
            "skip_special_tokens": True,
            "include_stop_str_in_output": True,
            "max_tokens": 16,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 1,
            "stop": None,
        }
        body = {"sampling_params": params | sampling, "model": self.model, "token_ids": list(token_ids)}
        path = "/skyrl/v1/generate" if experts else "/inference/v1/generate"
        reply = self.post(path, body | {"cache_salt": "policy-0"}, {"X-Session-ID": "trajectory 1"})
        choice: dict[str, Any] = reply["choices"][0]
        return choice

    def sample(self, token_ids: Sequence[int], num_samples: int, **sampling: Any) -> list[dict[str, Any]]:
        """The choices of `sample`, Tinker's interface."""
        params = {"n": num_samples, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None} | sampling
        body = {"sampling_params": params, "model": self.model, "token_ids": list(token_ids)}
        choices: list[dict[str, Any]] = self.post("/inference/v1/generate", body)["choices"]
        return choices

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self.post("/detokenize", {"model": self.model, "tokens": list(token_ids)})["prompt"])

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": True}
        tokens: list[int] = self.post("/tokenize", body)["tokens"]
        return tokens

    def control(self, path: str, **params: str) -> Any:
        """A call without a body, such as /pause and /resume."""
        return self.client.post(path, params=params).raise_for_status().json()

    def world_size(self) -> int:
        return int(self.client.get("/get_world_size").raise_for_status().json()["world_size"])

    def init(self, address: str, port: int, world_size: int) -> Any:
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        return self.post("/init_weight_transfer_engine", {"init_info": info})

    def rpc(self, method: str, **kwargs: Any) -> Any:
        body: dict[str, Any] = {"method": method}
        return self.post("/collective_rpc", body | ({"kwargs": kwargs} if kwargs else {}))

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return self.client.post(path, json=body, headers=headers).raise_for_status().json()
