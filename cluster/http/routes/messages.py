"""Anthropic's Messages API, over chats. A reply is a message, which consists of blocks, or the events of a stream,
which build the blocks."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.endpoint import Endpoint, ignore, post
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer
from aerie.cluster.http.replies.streaming import named_event
from aerie.cluster.http.requests.edge_request import chat_prompt_of, chat_request
from aerie.cluster.http.requests.messages import (
    error_detail,
    ignored_by_model,
    messages_chat,
    to_messages_error,
    without_places,
)
from aerie.cluster.http.requests.parameters import chat_parser
from aerie.cluster.http.schema.completions import ToolCall, ToolCallDelta
from aerie.cluster.http.schema.messages import (
    ContentBlock,
    CountTokensRequest,
    InputDelta,
    MessageEnd,
    MessagesError,
    MessagesEvent,
    MessagesReply,
    MessagesRequest,
    MessagesUsage,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.schema.response import FinishReason
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.text.json_text import parsed_repaired

_STOP_REASONS: dict[FinishReason, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesForm(Reply):
    """A stream has one open block at a time, the last."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
        self._num_blocks = 0
        self._open: type[ContentBlock] | None = None
        self._has_answer = False  # whether there is a block other than the reasoning

    def first_event(self, index: int) -> bytes:
        usage = self._context.usage()
        message = self._message([], MessagesUsage(usage.prompt_tokens, 0))
        return _event("message_start", message=message)

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        continued, opened = delta.split_calls()
        events = [self._call(call) for call in continued]
        if delta.reasoning:
            events += [self._begin(ThinkingBlock("")), self._delta(ThinkingDelta(delta.reasoning))]
        if delta.content:
            events += [self._begin(TextBlock("")), self._delta(TextDelta(delta.content))]
        return b"".join([*events, *(self._call(call) for call in opened)])

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        assert delta.finish is not None
        end = MessageEnd(*self._stop(delta.finish))
        last = self.piece_event(index, piece, delta)
        if not self._has_answer:
            last += self._begin(TextBlock(""))  # as in the document
        return (
            last
            + self._close()
            + _event(
                "message_delta", delta=msgspec.to_builtins(end), usage=self._usage(), metrics=self._context.metrics()
            )
        )

    def end_events(self) -> bytes:
        return _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return _event("error", error=error_detail(to_messages_error(error)))

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        answer, content = answers[0], list[ContentBlock]()
        assert answer.delta.finish is not None
        calls = {call.id: call for call in answer.tool_calls}
        for _, delta in answer.in_order():
            if delta.reasoning:
                if not (content and isinstance(content[-1], ThinkingBlock)):
                    content.append(ThinkingBlock(""))
                content[-1].thinking += delta.reasoning  # type: ignore[union-attr]
            if delta.content:
                if not (content and isinstance(content[-1], TextBlock)):
                    content.append(TextBlock(""))
                content[-1].text += delta.content  # type: ignore[union-attr]
            begun = [calls[part.id] for part in delta.split_calls()[1] if part.id is not UNSET]
            content += [ToolUseBlock(call.id, call.function.name, _arguments(call)) for call in begun]
        if all(isinstance(block, ThinkingBlock) for block in content):
            content.append(TextBlock(""))
        message = self._message(content, self._usage())
        message.stop_reason, message.stop_sequence = self._stop(answer.delta.finish)
        message.metrics = self._context.metrics()
        return msgspec.json.encode(message)

    def _call(self, call: ToolCallDelta) -> bytes:
        """Return the events for a call, or for more of its arguments."""
        events = b""
        if call.id is not UNSET:
            assert call.function.name is not UNSET
            events = self._close() + self._begin(ToolUseBlock(call.id, call.function.name, {}))
        if call.function.arguments is UNSET or not call.function.arguments:
            return events
        return events + self._delta(InputDelta(call.function.arguments))

    def _begin(self, block: ContentBlock) -> bytes:
        """Open `block`, unless a block of its kind is open."""
        if self._open is type(block):
            return b""
        events = self._close()
        self._open = type(block)
        self._has_answer = self._has_answer or not isinstance(block, ThinkingBlock)
        self._num_blocks += 1
        return events + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=msgspec.to_builtins(delta))

    def _close(self) -> bytes:
        """Close the open block, if any."""
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _stop(self, finish: FinishReason) -> tuple[StopReason, str | None]:
        stop = self._context.answers[0].stop_reason
        if finish == "stop" and isinstance(stop, str):
            return "stop_sequence", stop
        return _STOP_REASONS[finish], None

    def _message(self, content: list[ContentBlock], usage: MessagesUsage) -> MessagesReply:
        context = self._context
        return MessagesReply(id=context.reply_id, model=context.model, content=content, stop_reason=None, usage=usage)

    def _usage(self) -> MessagesUsage:
        usage, cached = self._context.usage(), self._context.num_cached_tokens
        return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call; {} if the answer was cut off, so that they are not valid JSON."""
    try:
        arguments = parsed_repaired(call.function.arguments or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, MessagesEvent(kind, **fields))


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer
    parser = chat_parser(config)

    async def chat_of(http: Request, body: CountTokensRequest) -> ChatCompletionRequest:
        ignore(http, config, *ignored_by_model(body, tokenizer.efforts, parser))
        chat = messages_chat(body, tokenizer.efforts, parser)
        with without_places():
            await edge.images.read(chat.messages)
        return chat

    async def messages(http: Request, body: MessagesRequest) -> Response:
        """Continues a conversation, in Anthropic's format."""
        chat = await chat_of(http, body)
        with without_places():
            request = await chat_request(chat, config, tokenizer)
        reply_id = f"msg_{uuid.uuid4().hex}"
        return await edge.response(http, request, body.request_id, MessagesForm, reply_id, to_messages_error)

    async def count_tokens(http: Request, body: CountTokensRequest) -> TokenCount:
        """Return the number of prompt tokens of a request to /v1/messages."""
        chat = await chat_of(http, body)
        with without_places():
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
