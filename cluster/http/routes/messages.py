"""Anthropic's Messages API, over chats."""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.endpoint import Endpoint, ignore, post
from aerie.cluster.http.replies.messages import MessagesForm
from aerie.cluster.http.requests.edge_request import chat_prompt_of, chat_request
from aerie.cluster.http.requests.messages import ignored_by_model, messages_chat, to_messages_error
from aerie.cluster.http.requests.parameters import chat_parser
from aerie.cluster.http.schema.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesEvent,
    MessagesReply,
    MessagesRequest,
    TokenCount,
)
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.serving import Edge


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer
    parser = chat_parser(config)

    def chat_of(http: Request, body: CountTokensRequest) -> ChatCompletionRequest:
        ignore(http, config, *ignored_by_model(body, tokenizer.efforts, parser))
        return messages_chat(body, tokenizer.efforts, parser)

    async def messages(http: Request, body: MessagesRequest) -> Response:
        """Continues a conversation, in Anthropic's format."""
        chat = chat_of(http, body)
        await edge.images.read(chat.messages)
        request = await chat_request(chat, config, tokenizer)
        reply_id = f"msg_{uuid.uuid4().hex}"
        return await edge.response(http, request, body.request_id, MessagesForm, reply_id, to_messages_error)

    async def count_tokens(http: Request, body: CountTokensRequest) -> TokenCount:
        """Return the number of prompt tokens of a request to /v1/messages."""
        chat = chat_of(http, body)
        await edge.images.read(chat.messages)
        return TokenCount(len(await chat_prompt_of(chat, config, tokenizer)))

    return [
        post(
            "/v1/messages",
            messages,
            MessagesRequest,
            MessagesReply,
            event=MessagesEvent,
            generates=True,
            error=MessagesError,
            restate=to_messages_error,
        ),
        post(
            "/v1/messages/count_tokens",
            count_tokens,
            CountTokensRequest,
            TokenCount,
            error=MessagesError,
            restate=to_messages_error,
        ),
    ]
