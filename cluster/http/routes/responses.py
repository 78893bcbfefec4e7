"""OpenAI's Responses: generation over items, with replies kept for the next turn. A reply is a response, which consists
of items, or the events of a stream, which build the items."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, command, delete, get, ignore, post
from aerie.cluster.http.errors import JSON_HEADERS, ApiError, invalid
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer
from aerie.cluster.http.replies.streaming import STREAM_HEADERS, named_event
from aerie.cluster.http.requests.edge_request import chat_request
from aerie.cluster.http.requests.responses import (
    ResponseStore,
    StoredResponse,
    chat_body,
    input_messages,
    joined_name,
    namespaces,
    output_messages,
    to_responses_error,
)
from aerie.cluster.http.schema.body import Schema
from aerie.cluster.http.schema.completions import FunctionDelta, TokenLogprob, ToolCallDelta
from aerie.cluster.http.schema.response import FinishReason
from aerie.cluster.http.schema.responses import (
    DeletedResponse,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import tenant_of


class ItemEvents:
    """Builds items and their events. Only the last item can be open.

    namespaces: namespace and own name of functions that have one, by the name that the model sees.
    output: the items so far.
    Argument item_id of methods: the item's id; "" for a new one.
    """

    def __init__(self, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self.output: list[OutputItem] = []
        self._is_open = False  # whether the last item is open
        self._num_events = 0

    def reasoning(self, text: str, item_id: str = "") -> bytes:
        """Return the events for more reasoning."""
        events = b""
        if not (self._is_open and isinstance(self.output[-1], ReasoningItem)):
            item = ReasoningItem(id=item_id or _id("rs"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", ReasoningText(""))
            item.content = [ReasoningText("")]
        last = self.output[-1]
        assert isinstance(last, ReasoningItem)
        last.content[0].text += text
        return events + self.event("response.reasoning_text.delta", **self._location(0), delta=text)

    def content(self, text: str, logprobs: list[TokenLogprob], item_id: str = "") -> bytes:
        """Return the events for more text of the answer."""
        events = b""
        if not (self._is_open and isinstance(self.output[-1], OutputMessage)):
            item = OutputMessage(id=item_id or _id("msg"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", OutputText(""))
            item.content = [OutputText("", [], [])]
        last = self.output[-1]
        assert isinstance(last, OutputMessage)
        last.content[0].text += text
        last.content[0].logprobs += logprobs
        return events + self.event("response.output_text.delta", **self._location(0), delta=text, logprobs=logprobs)

    def add_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        """Add log-probabilities of tokens without text to the open text."""
        if self._is_open and isinstance(last := self.output[-1], OutputMessage):
            last.content[0].logprobs += logprobs

    def call(self, call: ToolCallDelta, item_id: str = "") -> bytes:
        """Return the events for the beginning of a tool call, or for more of it."""
        events = b""
        if call.id is not UNSET:
            assert call.function.name is not UNSET
            namespace, name = self._namespaces.get(call.function.name, (UNSET, call.function.name))
            item = FunctionCallItem(
                id=item_id or _id("fc"),
                call_id=call.id,
                name=name,
                namespace=namespace,
                arguments="",
                status="in_progress",
            )
            events = self._open(item)
        last = self.output[-1]
        assert isinstance(last, FunctionCallItem)
        arguments = call.function.arguments
        if arguments is UNSET or not arguments:
            return events
        last.arguments += arguments
        return events + self.event("response.function_call_arguments.delta", **self._location(), delta=arguments)

    def _open(self, item: OutputItem) -> bytes:
        events = self.close("completed")
        self.output.append(item)
        self._is_open = True
        return events + self.event("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def close(self, status: ItemStatus) -> bytes:
        """Return the events that close the open item."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.output[-1]
        item.status = status
        location = self._location(0)
        if isinstance(item, FunctionCallItem):
            done = {"name": item.name, "arguments": item.arguments}
            events = self.event("response.function_call_arguments.done", **self._location(), **done)
        elif isinstance(item, ReasoningItem):
            events = self.event("response.reasoning_text.done", **location, text=item.content[0].text)
            events += self._part("response.content_part.done", item.content[0])
        else:
            text = item.content[0]
            events = self.event("response.output_text.done", **location, text=text.text, logprobs=text.logprobs)
            events += self._part("response.content_part.done", text)
        return events + self.event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part(self, kind: str, part: OutputText | ReasoningText) -> bytes:
        return self.event(kind, **self._location(0), part=part)

    def _location(self, content_index: int | None = None) -> dict[str, Any]:
        location: dict[str, Any] = {"output_index": len(self.output) - 1, "item_id": self.output[-1].id}
        return location if content_index is None else location | {"content_index": content_index}

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, numbered."""
        self._num_events += 1
        return named_event(kind, ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields))

    def whole(self, item: OutputItem) -> Iterator[bytes]:
        """Yield the events of a finished item."""
        if isinstance(item, ReasoningItem):
            events = self.reasoning(item.content[0].text, item.id)
        elif isinstance(item, FunctionCallItem):
            function = FunctionDelta(name=_shown_name(item), arguments=item.arguments)
            events = self.call(ToolCallDelta(index=0, id=item.call_id, function=function), item.id)
        else:
            events = self.content(item.content[0].text, item.content[0].logprobs, item.id)
        for event in (events + self.close(item.status)).split(b"\n\n")[:-1]:
            yield event + b"\n\n"


def replayed(response: Response) -> Iterator[bytes]:
    """Yield the events of a finished response. Each text is one delta."""
    calls = [item for item in response.output if isinstance(item, FunctionCallItem)]
    items = ItemEvents({_shown_name(item): (item.namespace, item.name) for item in calls if item.namespace})
    initial = msgspec.structs.replace(
        response, status="in_progress", output=[], usage=None, incomplete_details=None, metrics=UNSET
    )
    yield items.event("response.created", response=initial)
    yield items.event("response.in_progress", response=initial)
    for item in response.output:
        yield from items.whole(item)
    yield items.event(f"response.{response.status}", response=response)


def _shown_name(item: FunctionCallItem) -> str:
    return joined_name(item.namespace or None, item.name)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


Keep = Callable[[Response, bytes], None]


class ResponsesReply(Reply):
    """`document` builds the items through the same events, and discards these.

    body: the request.
    keep: called with the finished response and its document.
    """

    def __init__(self, context: ReplyContext, body: ResponsesRequest, store: bool, keep: Keep) -> None:
        super().__init__(context)
        self._body = body
        self._store = store
        self._keep = keep
        self._items = ItemEvents(namespaces(body))
        self._unsent: list[TokenLogprob] = []  # for tokens without text, or whose text the parser still holds

    def first_event(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._items.event("response.created", response=response) + self._items.event(
            "response.in_progress", response=response
        )

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        continued, opened = delta.split_calls()
        events = [self._items.call(call) for call in continued]
        if delta.reasoning:
            events.append(self._items.reasoning(delta.reasoning))
        self._unsent += self._logprobs(piece)
        if delta.content:
            events.append(self._items.content(delta.content, self._unsent))
            self._unsent = []
        return b"".join([*events, *(self._items.call(call) for call in opened)])

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        last = self.piece_event(index, piece, delta)
        events, response = self._finished(delta.finish)
        self._keep(response, msgspec.json.encode(response))
        return last + events + self._items.event(f"response.{response.status}", response=response)

    def end_events(self) -> bytes:
        return b""

    def error_event(self, error: ApiError) -> bytes:
        failed = self._response("failed")
        failed.error = ResponseError(error.code or error.kind, error.message)
        events = self._items.event("error", code=error.code, message=error.message, param=error.param)
        return events + self._items.event("response.failed", response=failed)

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        for piece, delta in answers[0].in_order():
            self.piece_event(0, piece, delta)
        _, response = self._finished(answers[0].delta.finish)
        response.metrics = self._context.metrics()
        document = msgspec.json.encode(response)
        self._keep(response, document)
        return document

    def _finished(self, finish: FinishReason | None) -> tuple[bytes, Response]:
        """Return the events that close the open item, and the finished response."""
        status: Literal["completed", "incomplete"] = "incomplete" if finish == "length" else "completed"
        self._items.add_logprobs(self._unsent)
        events, response = self._items.close(status), self._response(status)
        if finish == "length":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        return events, response

    def _logprobs(self, piece: Piece) -> list[TokenLogprob]:
        request = self._context.request
        if request.logprobs < 0:
            return []
        return self._context.logprobs.chat(piece, request.choices[0].sampling.logprobs).content

    def _response(self, status: ResponseStatus) -> Response:
        body, context = self._body, self._context
        sampling = context.request.choices[0].sampling
        choice: Any = body.tool_choice or "auto"
        return Response(
            id=context.reply_id,
            created_at=context.created,
            status=status,
            model=context.model,
            output=self._items.output if status != "in_progress" else [],
            usage=None if status == "in_progress" else self._usage(),
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            max_output_tokens=body.max_output_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=choice.model_dump(exclude_none=True) if isinstance(choice, Schema) else choice,
            tools=[tool.model_dump() for tool in body.tools or ()],
            text={"format": (body.text and body.text.format) or {"type": "text"}},
            reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
            store=self._store,
            metadata=body.metadata or {},
            user=body.user,
        )

    def _usage(self) -> ResponseUsage:
        usage, cached = self._context.usage(), self._context.num_cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._context.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer
    stored = ResponseStore(config.max_stored_responses, config.max_stored_bytes)

    async def responses(http: Request, body: ResponsesRequest) -> HTTPResponse:
        """Continues a conversation of items."""
        store = _is_stored(body, config)
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
            own_id, reply_id = body.request_id or body.rid, f"resp_{uuid.uuid4().hex}"
            return await edge.response(http, request, own_id, form, reply_id, to_responses_error)
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


def _is_stored(body: ResponsesRequest, config: EdgeConfig) -> bool:
    """Return whether to store the response. Raises ApiError if the request needs stored ones, and there are none."""
    if config.max_stored_responses:
        return body.store is not False
    if body.store or body.previous_response_id:
        raise invalid(
            "store" if body.store else "previous_response_id",
            "store: responses are not stored here (ingress.max_stored_responses)",
        )
    return False


def _starting_after(http: Request) -> int:
    value = http.query_params.get("starting_after", "-1")
    try:
        return max(-1, int(value[:10]))
    except ValueError:
        raise invalid("starting_after", "starting_after must be the number of an event") from None
