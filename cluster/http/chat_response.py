"""Replies of /v1/chat/completions: OpenAI's chat completion and its chunks."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET

from cluster.http.answer import Piece
from cluster.http.logprobs import chat_logprobs
from cluster.http.response import ReplyContext
from cluster.http.schema.response import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
)
from cluster.http.streaming import TextEvents, chunk_event


class ChatReply:
    """See `cluster.http.response.Reply`."""

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    def first_event(self, index: int) -> bytes:
        request = self._context.request
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        if request.return_token_ids:
            choice.prompt_token_ids = request.prompts[request.choices[index].prompt]
        return chunk_event(self._chunk(choice))

    def piece_event(self, index: int, piece: Piece) -> bytes:
        if self._text_events:
            return self._text_events[index].event(piece.text) if piece.text else b""
        if not piece.text and not piece.tokens:
            return b""
        choice = ChatChunkChoice(
            index=index, delta=ChatDelta(content=piece.text), logprobs=self._logprobs(index, piece)
        )
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        return chunk_event(self._chunk(choice))

    def finish_event(self, index: int) -> bytes:
        answer = self._context.answers[index]
        chunk = self._chunk(
            ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=answer.finish, stop_reason=answer.stop_reason)
        )
        chunk.metrics = self._context.finish_metrics()
        return chunk_event(chunk)

    def usage_event(self) -> bytes:
        chunk = self._chunk()
        chunk.usage, chunk.metrics = self._context.usage(), self._context.metrics()
        return chunk_event(chunk)

    def document(self, pieces: Sequence[Piece]) -> bytes:
        context = self._context
        return msgspec.json.encode(
            ChatCompletion(
                id=context.reply_id,
                created=context.created,
                model=context.model,
                choices=[self._choice(index, piece) for index, piece in enumerate(pieces)],
                usage=context.usage(),
                metrics=context.metrics(),
                prompt_token_ids=context.request.prompts[0] if context.request.return_token_ids else UNSET,
            )
        )

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        assert piece.finish is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=piece.text),
            logprobs=self._logprobs(index, piece),
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            token_ids=piece.tokens if self._context.request.return_token_ids else UNSET,
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        context = self._context
        return ChatCompletionChunk(
            id=context.reply_id,
            created=context.created,
            model=context.model,
            choices=list(choices),
            usage=context.event_usage(),
        )

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=text)))

    def _logprobs(self, index: int, piece: Piece) -> ChatLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        return chat_logprobs(piece, request.choices[index].sampling.logprobs, self._context.tokenizer)
