"""Replies of /v1/responses: a response of items, and the events in which they grow."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from cluster.http.answer import Piece
from cluster.http.errors import ApiError
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.logprobs import chat_logprobs
from cluster.http.replies.reply import ReplyContext, WholeAnswer
from cluster.http.schema.chat_reply import TokenLogprob, ToolCallDelta
from cluster.http.schema.response import FinishReason
from cluster.http.schema.responses_reply import (
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
    ResponseStatus,
    ResponseUsage,
)
from cluster.http.schema.responses_request import NamedFunction, ResponsesRequest

Keep = Callable[[Response, bytes], None]


class ResponsesReply:
    """See `cluster.http.replies.reply.Reply`. Whole replies are made of the same events, which nobody sees.

    body: the request.
    keep: gets the finished response and its document.
    """

    def __init__(self, context: ReplyContext, body: ResponsesRequest, store: bool, keep: Keep) -> None:
        self._context = context
        self._body = body
        self._store = store
        self._keep = keep
        self._num_events = 0
        self._output: list[OutputItem] = []
        self._is_open = False  # the last item
        self._num_reasoning_tokens = 0

    def first_event(self, index: int) -> bytes:
        """See `cluster.http.replies.reply.Reply`; so are the others."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        events = []
        if delta.reasoning:
            self._num_reasoning_tokens += self._num_tokens_of(delta.reasoning, piece)
            events.append(self._reasoning(delta.reasoning))
        if delta.content:
            events.append(self._content(delta.content, self._logprobs(piece)))
        events += [self._call(call) for call in delta.tool_calls]
        return b"".join(events)

    def finish_event(self, index: int, finish: FinishReason | None) -> bytes:
        cut_short = finish == "length"
        events = self._close("incomplete" if cut_short else "completed")
        response = self._response("incomplete" if cut_short else "completed")
        if cut_short:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._keep(response, msgspec.json.encode(response))
        return events + self._event(f"response.{response.status}", response=response)

    def end_events(self) -> bytes:
        return b""

    def error_event(self, error: ApiError) -> bytes:
        failed = self._response("failed")
        failed.error = ResponseError(error.code or error.kind, error.message)
        events = self._event("error", code=error.code, message=error.message, param=error.param)
        return events + self._event("response.failed", response=failed)

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        piece, delta, calls = answers[0]
        parts = tuple(
            ToolCallDelta(index=i, id=call.id, type="function", function=call.function)  # type: ignore[arg-type]
            for i, call in enumerate(calls)
        )
        self.piece_event(0, piece, ReplyDelta(delta.content, delta.reasoning, parts, delta.finish))
        cut_short = delta.finish == "length"
        self._close("incomplete" if cut_short else "completed")
        response = self._response("incomplete" if cut_short else "completed")
        if cut_short:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.metrics = self._context.metrics()
        document = msgspec.json.encode(response)
        self._keep(response, document)
        return document

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if not (self._is_open and isinstance(self._output[-1], ReasoningItem)):
            item = ReasoningItem(id=_id("rs"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", ReasoningText(""))
            item.content = [ReasoningText("")]
        last = self._output[-1]
        assert isinstance(last, ReasoningItem)
        last.content[0].text += text
        return events + self._event("response.reasoning_text.delta", **self._place(0), delta=text)

    def _content(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        events = b""
        if not (self._is_open and isinstance(self._output[-1], OutputMessage)):
            item = OutputMessage(id=_id("msg"), status="in_progress", content=[])
            events = self._open(item) + self._part("response.content_part.added", OutputText(""))
            item.content = [OutputText("", [], [])]
        last = self._output[-1]
        assert isinstance(last, OutputMessage)
        last.content[0].text += text
        last.content[0].logprobs += logprobs
        return events + self._event("response.output_text.delta", **self._place(0), delta=text, logprobs=logprobs)

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.id is not UNSET:
            assert call.function.name is not UNSET
            item = FunctionCallItem(
                id=_id("fc"), call_id=call.id, name=call.function.name, arguments="", status="in_progress"
            )
            events = self._open(item)
        last = self._output[-1]
        assert isinstance(last, FunctionCallItem)
        arguments = call.function.arguments
        if arguments is UNSET or not arguments:
            return events
        last.arguments += arguments
        return events + self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)

    def _open(self, item: OutputItem) -> bytes:
        events = self._close("completed")
        self._output.append(item)
        self._is_open = True
        return events + self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: ItemStatus) -> bytes:
        """End the item that is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        item.status = status
        place = self._place(0)
        if isinstance(item, FunctionCallItem):
            done = {"name": item.name, "arguments": item.arguments}
            events = self._event("response.function_call_arguments.done", **self._place(), **done)
        elif isinstance(item, ReasoningItem):
            events = self._event("response.reasoning_text.done", **place, text=item.content[0].text)
            events += self._part("response.content_part.done", item.content[0])
        else:
            text = item.content[0]
            events = self._event("response.output_text.done", **place, text=text.text, logprobs=text.logprobs)
            events += self._part("response.content_part.done", text)
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self, kind: str, part: OutputText | ReasoningText) -> bytes:
        return self._event(kind, **self._place(0), part=part)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self._output) - 1, "item_id": self._output[-1].id}
        return place if content_index is None else place | {"content_index": content_index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = msgspec.json.encode(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"

    def _logprobs(self, piece: Piece) -> list[TokenLogprob]:
        request = self._context.request
        if request.logprobs < 0:
            return []
        num_top = request.choices[0].sampling.logprobs
        return chat_logprobs(piece, num_top, self._context.tokenizer, request.tokens_as_ids).content

    def _num_tokens_of(self, text: str, piece: Piece) -> int:
        """How many of a piece's tokens `text`, its beginning but for marks, is made of."""
        left, count = len(text.encode()), 0
        for token in piece.tokens:
            if left <= 0:
                break
            left -= len(self._context.tokenizer.token_bytes(token))
            count += 1
        return count

    def _response(self, status: ResponseStatus) -> Response:
        body, context = self._body, self._context
        sampling = context.request.choices[0].sampling
        choice: Any = body.tool_choice or "auto"
        return Response(
            id=context.reply_id,
            created_at=context.created,
            status=status,
            model=context.model,
            output=self._output if status != "in_progress" else [],
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
        usage = self._context.usage()
        cached = 0 if usage.prompt_tokens_details is UNSET else usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
