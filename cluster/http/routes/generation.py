"""The routes that generate: OpenAI's chat completions and completions."""

from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.endpoint import Endpoint, ignore, post
from aerie.cluster.http.replies.completions import ChatReply, TextReply
from aerie.cluster.http.requests.batch import batch_request
from aerie.cluster.http.requests.edge_request import chat_request, text_request
from aerie.cluster.http.schema.completions import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from aerie.cluster.http.schema.request import (
    BatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    Invocation,
)
from aerie.cluster.http.serving import Edge

CHATS = "/v1/chat/completions"
CHAT_ID = "chatcmpl-{}"


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    def ignore_effort(http: Request, body: ChatCompletionRequest) -> None:
        if body.reasoning_effort not in (None, *tokenizer.efforts):
            ignore(http, config, "reasoning_effort")

    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        """Continues a conversation."""
        ignore_effort(http, body)
        await edge.images.read(body.messages)
        request = await chat_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, ChatReply, CHAT_ID)

    async def batch(http: Request, body: BatchRequest) -> Response:
        """Continues several independent conversations, with a choice for each."""
        ignore_effort(http, body)
        for i, messages in enumerate(body.messages):
            await edge.images.read(messages, f"messages[{i}]")
        request = await batch_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, ChatReply, CHAT_ID)

    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continues a text."""
        request = await text_request(body, config, tokenizer)
        return await edge.response(http, request, body.request_id or body.rid, TextReply, "cmpl-{}")

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
