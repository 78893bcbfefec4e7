"""Replies of /v1/responses: a response, which consists of items, or the events of a stream, which build the items."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer
from aerie.cluster.http.replies.response_items import ItemEvents
from aerie.cluster.http.requests.responses import namespaces
from aerie.cluster.http.schema.completions import TokenLogprob, ToolCallDelta
from aerie.cluster.http.schema.response import FinishReason
from aerie.cluster.http.schema.responses import (
    IncompleteDetails,
    InputTokensDetails,
    NamedFunction,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)

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

    def first_event(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._items.event("response.created", response=response) + self._items.event(
            "response.in_progress", response=response
        )

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        continued, begun = delta.split_calls()
        events = [self._items.call(call) for call in continued]
        if delta.reasoning:
            events.append(self._items.reasoning(delta.reasoning))
        if delta.content:
            events.append(self._items.content(delta.content, self._logprobs(piece)))
        return b"".join([*events, *(self._items.call(call) for call in begun)])

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
        piece, delta, calls = answers[0]
        parts = tuple(
            ToolCallDelta(index=i, id=call.id, type="function", function=call.function)  # type: ignore[arg-type]
            for i, call in enumerate(calls)
        )
        self.piece_event(0, piece, ReplyDelta(delta.content, delta.reasoning, parts, delta.finish))
        _, response = self._finished(delta.finish)
        response.metrics = self._context.metrics()
        document = msgspec.json.encode(response)
        self._keep(response, document)
        return document

    def _finished(self, finish: FinishReason | None) -> tuple[bytes, Response]:
        """Return the events that close the open item, and the finished response."""
        status: Literal["completed", "incomplete"] = "incomplete" if finish == "length" else "completed"
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
            tool_choice=choice.model_dump() if isinstance(choice, NamedFunction) else choice,
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
