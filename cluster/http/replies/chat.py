"""Replies of /v1/chat/completions: OpenAI's chat completion and its chunks."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answer import Piece
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.logprobs import chat_logprobs
from cluster.http.replies.openai import OpenAIReply
from cluster.http.replies.reply import WholeAnswer
from cluster.http.replies.streaming import chunk_event
from cluster.http.schema.chat_reply import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
)


class ChatReply(OpenAIReply):
    """See `cluster.http.replies.reply.Reply`."""

    chunk_type = ChatCompletionChunk

    def first_event(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content=self._echo(index), reasoning_content=_reasoning_content())
        return self._first_event(ChatChunkChoice(index=index, delta=delta))

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        reasoning = self._reasoning(delta)
        has_more = bool(reasoning or delta.tool_calls)
        if self._text_events and not has_more:
            return self._plain_event(index, delta.content)
        if not (delta.content or has_more or piece.tokens):
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                content=delta.content if delta.content or not has_more else UNSET,
                reasoning_content=_reasoning_content(reasoning, delta.content),
                reasoning=reasoning or UNSET,
                tool_calls=delta.tool_calls or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
        )
        self._add_tokens(choice, piece)
        return chunk_event(self._chunk(choice))

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        context = self._context
        prompts = context.request.prompts  # a reply to several prompts has no place for them
        with_prompt = context.request.return_token_ids and len(prompts) == 1
        return msgspec.json.encode(
            ChatCompletion(
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                prompt_token_ids=prompts[0] if with_prompt else None,
                prompt_logprobs=context.prompt_logprobs(0),
                **self._document_fields(),
            )
        )

    def _choice(self, index: int, answer: WholeAnswer) -> ChatChoice:
        piece, delta, tool_calls = answer
        assert delta.finish is not None
        reasoning, content = self._reasoning(delta) or None, self._echo(index) + delta.content
        return ChatChoice(
            message=AssistantMessage(
                content=content if content or not tool_calls else None,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=tool_calls or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
            finish_reason=delta.finish,
            **self._choice_fields(index, piece),
        )

    def _chunk_choice(self, index: int, text: str = "") -> ChatChunkChoice:
        delta = ChatDelta(content=text or UNSET, reasoning_content=_reasoning_content(content=text))
        return ChatChunkChoice(index=index, delta=delta)

    def _reasoning(self, delta: ReplyDelta) -> str:
        """Return the reasoning to show, or ""."""
        return delta.reasoning if self._context.request.include_reasoning else ""

    def _logprobs(self, index: int, piece: Piece) -> ChatLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        return chat_logprobs(
            piece, request.choices[index].sampling.logprobs, self._context.tokenizer, request.tokens_as_ids
        )


def _reasoning_content(reasoning: str = "", content: str = "") -> str | None | UnsetType:
    """Return `ChatDelta.reasoning_content`. Without reasoning: null, or left out if there is content."""
    return reasoning or (UNSET if content else None)
