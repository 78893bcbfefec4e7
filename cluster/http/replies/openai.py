"""Common parts of the replies of /v1/chat/completions and /v1/completions: everything except the format of a choice."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from cluster.http.answer import Piece
from cluster.http.errors import ApiError
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.reply import ReplyContext
from cluster.http.replies.streaming import DONE, TextEvents, chunk_event, event
from cluster.http.schema.chat_reply import ChatChunkChoice, ChatCompletionChunk
from cluster.http.schema.text_reply import CompletionChunk, TextChunkChoice

ChunkChoice = ChatChunkChoice | TextChunkChoice
Chunk = ChatCompletionChunk | CompletionChunk


class OpenAIReply(ABC):
    """See `cluster.http.replies.reply.Reply`. chunk_type: type of a stream's chunks."""

    chunk_type: ClassVar[type[ChatCompletionChunk] | type[CompletionChunk]]

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    @abstractmethod
    def _chunk_choice(self, index: int, text: str = "") -> ChunkChoice:
        """Return a choice of a chunk that has only this text."""

    @abstractmethod
    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes: ...

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        choice = self._chunk_choice(index)
        if self._context.request.return_token_ids:
            choice.token_ids = ()  # clients add up the ids of all events
        return self.piece_event(index, piece, delta) + self._finish_event(choice, piece, delta)

    def _finish_event(self, choice: ChunkChoice, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the last event of a choice, with its finish reason."""
        choice.finish_reason, choice.stop_reason = delta.finish, piece.stop_reason
        choice.matched_stop = self._context.answers[choice.index].matched_stop
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
        """Return the event of a piece that has only text."""
        return self._text_events[index].event(text) if text else b""

    def _first_event(self, choice: ChunkChoice) -> bytes:
        """Return the first event of a choice, with the prompt's tokens if the request asks for them."""
        request = self._context.request
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = request.prompts[request.choices[choice.index].prompt], ()
        return chunk_event(self._chunk(choice))

    def _add_tokens(self, choice: ChunkChoice, piece: Piece) -> None:
        """Add the tokens of a piece, if the request asks for them."""
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        choice.token_origins = self._context.origins(piece)

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
