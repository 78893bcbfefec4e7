"""Replies of /v1/chat/completions: OpenAI's chat completion and its chunks."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answer import Piece
from cluster.http.errors import ApiError
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.logprobs import chat_logprobs
from cluster.http.replies.reply import ReplyContext, WholeAnswer
from cluster.http.replies.streaming import DONE, TextEvents, chunk_event, event
from cluster.http.schema.chat_reply import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
)
from cluster.http.schema.response import FinishReason


class ChatReply:
    """See `cluster.http.replies.reply.Reply`."""

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    def first_event(self, index: int) -> bytes:
        request = self._context.request
        prefix = request.echo[request.choices[index].prompt] if request.echo else ""
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=prefix))
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = request.prompts[request.choices[index].prompt], ()
        return chunk_event(self._chunk(choice))

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        reasoning = self._reasoning(delta)
        other = reasoning is not UNSET or bool(delta.tool_calls)  # than content
        if self._text_events and not other:
            return self._text_events[index].event(delta.content) if delta.content else b""
        if not (delta.content or other or piece.tokens):
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                content=delta.content if delta.content or not other else UNSET,
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=delta.tool_calls or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
        )
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        choice.token_origins = self._context.origins(piece)
        return chunk_event(self._chunk(choice))

    def finish_event(self, index: int, finish: FinishReason | None) -> bytes:
        answer = self._context.answers[index]
        choice = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=finish, stop_reason=answer.stop_reason)
        choice.matched_stop = answer.matched_stop
        if self._context.request.return_token_ids:
            choice.token_ids = ()  # clients add up what every event has
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

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        context = self._context
        prompts = context.request.prompts  # several in a batch, whose reply has room for none of them
        with_prompt = context.request.return_token_ids and len(prompts) == 1
        return msgspec.json.encode(
            ChatCompletion(
                id=context.reply_id,
                created=context.created,
                model=context.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=context.usage(),
                metrics=context.metrics(),
                prompt_token_ids=prompts[0] if with_prompt else None,
                prompt_logprobs=context.prompt_logprobs(0),
            )
        )

    def _choice(self, index: int, answer: WholeAnswer) -> ChatChoice:
        piece, delta, tool_calls = answer
        assert delta.finish is not None
        request, reasoning = self._context.request, self._reasoning(delta)
        content = request.echo[request.choices[index].prompt] + delta.content if request.echo else delta.content
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=content if content or not tool_calls else None,
                reasoning_content=None if reasoning is UNSET else reasoning,
                reasoning=None if reasoning is UNSET else reasoning,
                tool_calls=tool_calls or UNSET,
            ),
            logprobs=self._logprobs(index, piece),
            finish_reason=delta.finish,
            stop_reason=piece.stop_reason,
            matched_stop=self._context.answers[index].matched_stop,
            token_ids=piece.tokens if request.return_token_ids else None,
            token_origins=self._context.origins(piece),
        )

    def _reasoning(self, delta: ReplyDelta) -> str | UnsetType:
        return delta.reasoning if delta.reasoning and self._context.request.include_reasoning else UNSET

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
        return chat_logprobs(
            piece, request.choices[index].sampling.logprobs, self._context.tokenizer, request.tokens_as_ids
        )
