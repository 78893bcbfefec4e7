"""Routes that SkyRL's client calls besides vLLM's (skyrl 0.3: `RemoteInferenceClient`)."""

import io
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.endpoint import Endpoint, post
from aerie.cluster.http.errors import invalid
from aerie.cluster.http.routes import adapters, weights
from aerie.cluster.http.routes.inference import InferenceReply, InferenceRequest, TokensReply, inference_request
from aerie.cluster.http.schema.body import Schema, validated
from aerie.cluster.http.schema.response import AdapterReply, WeightsReply
from aerie.cluster.http.serving import Edge
from aerie.cluster.transport.admin import AdminCall, FinishUpdate
from aerie.workers.scheduling.commands.command import StartUpdate

METHODS = "skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update"


class RpcRequest(Schema):
    """A method of SkyRL's worker extension for vLLM. Other methods are refused."""

    method: str
    kwargs: dict[str, Any] = {}
    args: list[Any] = []


class StartArguments(Schema):
    """is_checkpoint_format: whether tensors have the names and shapes of checkpoints, the only form here."""

    is_checkpoint_format: Literal[True] = True


class ListedExperts(TokensReply):
    """The reply with routed experts as lists."""

    def experts_of(self, file: bytes) -> list[list[list[int]]]:
        listed: list[list[list[int]]] = np.load(io.BytesIO(file), allow_pickle=False).tolist()
        return listed


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    ask, load_adapter = weights.asking(edge), adapters.endpoints(edge)[0].handler

    async def collective_rpc(http: Request, body: RpcRequest) -> WeightsReply:
        """Carries out the methods by which SkyRL sends weights over NCCL."""
        return weights.weights_reply(await ask(http, _call(body)))

    async def generate(http: Request, body: InferenceRequest) -> Response:
        """Continues token ids, and answers the routed experts of each token as lists."""
        body = body.model_copy(update={"return_routed_experts": True})
        request = await inference_request(body, edge.config, edge.tokenizer)
        return await edge.response(http, request, body.request_id, ListedExperts, "generate-tokens-{}")

    async def load(http: Request, body: adapters.LoadAdapterRequest) -> AdapterReply:
        """Loads a LoRA adapter, also in place of one with its name."""
        reply = await load_adapter(http, body.model_copy(update={"load_inplace": True}))
        assert isinstance(reply, AdapterReply)
        return reply

    return [
        post("/collective_rpc", collective_rpc, RpcRequest, WeightsReply),
        post("/skyrl/v1/load_lora_adapter", load, adapters.LoadAdapterRequest, AdapterReply),
        post("/skyrl/v1/generate", generate, InferenceRequest, InferenceReply, event=InferenceReply, generates=True),
    ]


def _call(body: RpcRequest) -> AdminCall:
    """Return what engines do. Raises ApiError."""
    if body.method not in METHODS:
        remedy = "; weights come by NCCL or gloo (weight_sync_backend: nccl)" if "ipc" in body.method else ""
        raise invalid("method", f"method={body.method}: must be one of {', '.join(METHODS)}{remedy}")
    if body.args:
        raise invalid("args", "args: these methods take kwargs")
    if body.method == METHODS[0]:
        validated(body.kwargs, StartArguments)
        return StartUpdate("target")
    if body.method == METHODS[1]:
        return weights.loads_of(validated(body.kwargs, weights.UpdateWeightsRequest).update_info)
    return FinishUpdate("")
