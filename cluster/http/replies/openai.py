"""What the replies of /v1/chat/completions and /v1/completions share: everything but the form of a choice."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from cluster.http.answer import Piece
from cluster.http.errors import ApiError
from cluster.http.replies.reply import ReplyContext
from cluster.http.replies.streaming import DONE, TextEvents, chunk_event, event
from cluster.http.schema.chat_reply import ChatChunkChoice, ChatCompletionChunk
from cluster.http.schema.response import FinishReason
from cluster.http.schema.text_reply import CompletionChunk, TextChunkChoice

ChunkChoice = ChatChunkChoice | TextChunkChoice
Chunk = ChatCompletionChunk | CompletionChunk


class OpenAIReply(ABC):
    """See `cluster.http.replies.reply.Reply`. chunk_type: struct of a stream's events."""

    chunk_type: ClassVar[type[ChatCompletionChunk] | type[CompletionChunk]]

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    @abstractmethod
    def _chunk_choice(self, index: int, text: str = "") -> ChunkChoice:
        """Return a choice of an event, with this text alone."""

    def finish_event(self, index: int, finish: FinishReason | None) -> bytes:
        answer = self._context.answers[index]
        choice = self._chunk_choice(index)
        choice.finish_reason, choice.stop_reason, choice.matched_stop = finish, answer.stop_reason, answer.matched_stop
        if self._context.request.return_token_ids:
            choice.token_ids = ()  # clients add up the ids of all events
        chunk = self._chunk(choice)
        chunk.metrics = self._context.finish_metrics()
        return chunk_event(chunk)

    def end_events(self) -> bytes:
        if not self._context.request.include_usage:
            return DONE
        chunk = self._chunk()
        chunk.usage, chunk.metrics = self._context.usage(), self._context.metrics()
        return chunk_event(chunk) + DONE

    def error_event(self, error: ApiError) -> bytes:
        return event(error.body())

    def _plain_event(self, index: int, text: str) -> bytes:
        """Return the event of a piece that carries nothing but text."""
        return self._text_events[index].event(text) if text else b""

    def _first_event(self, choice: ChunkChoice) -> bytes:
        """Return the first event of a choice, with the prompt's tokens if the request asks for them."""
        request = self._context.request
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = request.prompts[request.choices[choice.index].prompt], ()
        return chunk_event(self._chunk(choice))

    def _event(self, choice: ChunkChoice, piece: Piece) -> bytes:
        """Return the event of a piece, with its tokens if the request asks for them."""
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        choice.token_origins = self._context.origins(piece)
        return chunk_event(self._chunk(choice))

    def _echo(self, index: int) -> str:
        """Return the echoed prompt of a choice, or ""."""
        request = self._context.request
        return request.echo[request.choices[index].prompt] if request.echo else ""

    def _document_fields(self) -> dict[str, Any]:
        """Return the fields that both documents have."""
        context = self._context
        return {
            "id": context.reply_id,
            "created": context.created,
            "model": context.model,
            "usage": context.usage(),
            "metrics": context.metrics(),
        }

    def _choice_fields(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the fields that choices of both documents have."""
        return {
            "index": index,
            "stop_reason": piece.stop_reason,
            "matched_stop": self._context.answers[index].matched_stop,
            "token_ids": piece.tokens if self._context.request.return_token_ids else None,
            "token_origins": self._context.origins(piece),
        }

    def _chunk(self, *choices: Any) -> Chunk:
        context = self._context
        return self.chunk_type(
            id=context.reply_id,
            created=context.created,
            model=context.model,
            choices=list(choices),
            usage=context.event_usage(),
        )

    def _text_chunk(self, index: int, text: str) -> Chunk:
        return self._chunk(self._chunk_choice(index, text))
