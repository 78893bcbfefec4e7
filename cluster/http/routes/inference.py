"""vLLM's route for trainers: token ids in and out, and which weights wrote each token."""

from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.endpoint import Endpoint, post
from aerie.cluster.http.replies.inference import TokensReply
from aerie.cluster.http.requests.inference import inference_request
from aerie.cluster.http.schema.inference import InferenceReply, InferenceRequest
from aerie.cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def generate(http: Request, body: InferenceRequest) -> Response:
        """Continues token ids, in vLLM's format."""
        request = await inference_request(body, edge.config, edge.tokenizer)
        return await edge.response(http, request, body.request_id, TokensReply, "generate-tokens-{}")

    return [
        post(
            "/inference/v1/generate",
            generate,
            InferenceRequest,
            InferenceReply,
            event=InferenceReply,
            generates=True,
        )
    ]
