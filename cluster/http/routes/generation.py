"""The routes that generate: OpenAI's chat completions and completions."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.endpoint import Endpoint, post
from cluster.http.replies.chat import ChatReply
from cluster.http.replies.reply import Reply, ReplyContext
from cluster.http.replies.text import TextReply
from cluster.http.requests.batch import batch_request
from cluster.http.requests.edge_request import EdgeRequest, chat_request, text_request
from cluster.http.schema.chat_reply import ChatCompletion, ChatCompletionChunk
from cluster.http.schema.request import (
    BatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    Invocation,
    SamplingFields,
)
from cluster.http.schema.text_reply import Completion, CompletionChunk
from cluster.http.serving import Edge, GenerationResponse
from cluster.logs import request_id

CHATS = "/v1/chat/completions"


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    async def response(
        http: Request, body: SamplingFields, request: EdgeRequest, form: Callable[[ReplyContext], Reply], prefix: str
    ) -> Response:
        """Return the reply after a check of the request's grammars."""
        await edge.check_grammars(request)
        own_id = body.request_id or body.rid
        if own_id is not None:
            http.state.request_id = own_id
            request_id.set(own_id)
        name = http.state.request_id
        return GenerationResponse(edge, request, form, f"{prefix}-{name}", name)

    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        """Continues a conversation."""
        return await response(http, body, await chat_request(body, config, tokenizer), ChatReply, "chatcmpl")

    async def batch(http: Request, body: BatchRequest) -> Response:
        """Continues several independent conversations, with a choice for each."""
        return await response(http, body, await batch_request(body, config, tokenizer), ChatReply, "chatcmpl")

    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continues a text."""
        return await response(http, body, await text_request(body, config, tokenizer), TextReply, "cmpl")

    async def invocations(http: Request, body: ChatCompletionRequest | CompletionRequest) -> Response:
        """Continues a conversation or a text, whichever the body has. Hosting services (SageMaker) call this route."""
        if isinstance(body, ChatCompletionRequest):
            return await chat_completions(http, body)
        return await completions(http, body)

    chunks = (ChatCompletionChunk, CompletionChunk)
    return [
        post(CHATS, chat_completions, ChatCompletionRequest, ChatCompletion, event=ChatCompletionChunk, generates=True),
        post(f"{CHATS}/batch", batch, BatchRequest, ChatCompletion, generates=True),
        post("/v1/completions", completions, CompletionRequest, Completion, event=CompletionChunk, generates=True),
        post("/invocations", invocations, Invocation, (ChatCompletion, Completion), event=chunks, generates=True),
    ]
