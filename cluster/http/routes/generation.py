"""The routes that generate: OpenAI's chat completions and completions."""

import uuid
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.endpoint import Endpoint, post
from cluster.http.replies.chat import ChatReply
from cluster.http.replies.reply import Reply, ReplyContext
from cluster.http.replies.text import TextReply
from cluster.http.requests.edge_request import EdgeRequest, chat_request, text_request
from cluster.http.schema.chat_reply import ChatCompletion, ChatCompletionChunk
from cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from cluster.http.schema.text_reply import Completion, CompletionChunk
from cluster.http.serving import Edge, GenerationResponse
from cluster.logs import request_id


def endpoints(edge: Edge) -> list[Endpoint]:
    """Of one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    def response(
        http: Request, request: EdgeRequest, form: Callable[[ReplyContext], Reply], prefix: str, own_id: str | None
    ) -> Response:
        if own_id is not None:
            http.state.request_id = own_id
            request_id.set(own_id)
        return GenerationResponse(edge, request, form, f"{prefix}-{uuid.uuid4().hex}", http.state.request_id)

    async def checked(request: EdgeRequest) -> EdgeRequest:
        """`request`, once its grammar is known to compile; all choices have the same."""
        grammar = request.choices[0].sampling.grammar
        if grammar is not None:
            await edge.grammars.check(grammar)
        return request

    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        """Continues a conversation."""
        request = await checked(await chat_request(body, config, tokenizer))
        return response(http, request, ChatReply, "chatcmpl", body.request_id)

    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continues a text."""
        request = await checked(await text_request(body, config, tokenizer))
        return response(http, request, TextReply, "cmpl", body.request_id)

    return [
        post(
            "/v1/chat/completions",
            chat_completions,
            ChatCompletionRequest,
            ChatCompletion,
            event=ChatCompletionChunk,
            generates=True,
        ),
        post("/v1/completions", completions, CompletionRequest, Completion, event=CompletionChunk, generates=True),
    ]
