"""OpenAI's Responses: generation over items, with replies kept for the next turn."""

import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from aerie.cluster.http.endpoint import Endpoint, command, delete, get, ignore, post
from aerie.cluster.http.errors import JSON_HEADERS, ApiError, invalid
from aerie.cluster.http.replies.reply import ReplyContext
from aerie.cluster.http.replies.response_items import replayed
from aerie.cluster.http.replies.responses import ResponsesReply
from aerie.cluster.http.replies.streaming import STREAM_HEADERS
from aerie.cluster.http.requests.edge_request import chat_request
from aerie.cluster.http.requests.responses import (
    ResponseStore,
    StoredResponse,
    chat_body,
    input_messages,
    output_messages,
    to_responses_error,
)
from aerie.cluster.http.schema.responses import DeletedResponse, Response, ResponseEvent, ResponsesRequest
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import tenant_of


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer
    stored = ResponseStore(config.max_stored_responses, config.max_stored_bytes)

    async def responses(http: Request, body: ResponsesRequest) -> HTTPResponse:
        """Continues a conversation of items."""
        store = body.store is not False
        if not config.max_stored_responses:
            if body.store or body.previous_response_id:
                raise invalid(
                    "store" if body.store else "previous_response_id",
                    "store: responses are not stored here (ingress.max_stored_responses)",
                )
            store = False
        if body.reasoning is not None and body.reasoning.effort not in (None, *tokenizer.efforts):
            ignore(http, config, "reasoning.effort")
        owner, previous = tenant_of(http.scope).name, body.previous_response_id
        earlier = stored.get(owner, previous, "previous_response_id") if previous else None
        conversation = [*(earlier.messages if earlier else ()), *input_messages(body.input)]

        def keep(response: Response, document: bytes) -> None:
            if store:
                messages = [*conversation, *output_messages(response.output)]
                num_bytes = len(document) + len(msgspec.json.encode(messages))
                stored.put(owner, response.id, StoredResponse(document, messages), num_bytes)

        def form(context: ReplyContext) -> ResponsesReply:
            return ResponsesReply(context, body, store, keep)

        try:
            chat = chat_body(body, conversation)
            await edge.images.read(chat.messages)
            request = await chat_request(chat, config, tokenizer)
            return await edge.response(http, request, body.request_id or body.rid, form, f"resp_{uuid.uuid4().hex}")
        except ApiError as error:
            raise to_responses_error(error) from None

    async def retrieve(http: Request) -> HTTPResponse:
        """A stored response. `stream=true`: as events, starting after event number `starting_after`."""
        document = stored.get(tenant_of(http.scope).name, http.path_params["response_id"], None).document
        if http.query_params.get("stream", "").lower() != "true":
            return HTTPResponse(document, headers=JSON_HEADERS)
        events = list(replayed(msgspec.json.decode(document, type=Response)))
        content = b"".join(events[_starting_after(http) + 1 :])
        return HTTPResponse(content, headers={key.decode(): value.decode() for key, value in STREAM_HEADERS})

    async def compact(http: Request) -> DeletedResponse:
        """Not available: conversations are not shortened here (404)."""
        raise ApiError(404, "Responses are not compacted here; send the conversation as input", code="not_found")

    async def remove(http: Request) -> DeletedResponse:
        """Forgets a stored response."""
        stored.remove(tenant_of(http.scope).name, http.path_params["response_id"])
        return DeletedResponse(id=http.path_params["response_id"])

    return [
        command("/v1/responses/compact", compact, DeletedResponse),
        post("/v1/responses", responses, ResponsesRequest, Response, event=ResponseEvent, generates=True),
        get("/v1/responses/{response_id}", retrieve, Response),
        delete("/v1/responses/{response_id}", remove, DeletedResponse),
    ]


def _starting_after(http: Request) -> int:
    given = http.query_params.get("starting_after", "-1")
    try:
        return max(-1, int(given[:10]))
    except ValueError:
        raise invalid("starting_after", "starting_after must be the number of an event") from None
