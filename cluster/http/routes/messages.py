"""Anthropic's Messages: a chat in its form, over the same machinery."""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from cluster.http.endpoint import Endpoint, post
from cluster.http.replies.messages import MessagesForm
from cluster.http.requests.edge_request import chat_prompt_of, chat_request
from cluster.http.requests.messages import messages_chat, restated
from cluster.http.requests.reasoning import chat_parser
from cluster.http.schema.messages_reply import MessagesError, MessagesEvent, MessagesReply, TokenCount
from cluster.http.schema.messages_request import CountTokensRequest, MessagesRequest
from cluster.http.serving import Edge, GenerationResponse


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer
    parser = chat_parser(config)

    async def messages(http: Request, body: MessagesRequest) -> Response:
        """Continues a conversation, in Anthropic's form."""
        chat = messages_chat(body, tokenizer.template_source, parser)
        request = await chat_request(chat, config, tokenizer)
        if (grammar := request.choices[0].sampling.grammar) is not None:
            await edge.grammars.check(grammar)
        if body.request_id is not None:
            http.state.request_id = body.request_id
        reply_id = f"msg_{uuid.uuid4().hex}"
        return GenerationResponse(edge, request, MessagesForm, reply_id, http.state.request_id, restated)

    async def count_tokens(http: Request, body: CountTokensRequest) -> TokenCount:
        """Return the number of prompt tokens of a request to /v1/messages."""
        chat = messages_chat(body, tokenizer.template_source, parser)
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
            restate=restated,
        ),
        post(
            "/v1/messages/count_tokens",
            count_tokens,
            CountTokensRequest,
            TokenCount,
            error=MessagesError,
            restate=restated,
        ),
    ]
