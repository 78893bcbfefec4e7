"""Replies of /v1/completions: OpenAI's completion and its chunks."""

from collections.abc import Sequence
from functools import partial

import msgspec

from cluster.http.answer import Piece
from cluster.http.errors import ApiError
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.logprobs import echo_logprobs, joined_logprobs, text_logprobs
from cluster.http.replies.reply import ReplyContext, WholeAnswer
from cluster.http.replies.streaming import DONE, TextEvents, chunk_event, event
from cluster.http.schema.response import FinishReason
from cluster.http.schema.text_reply import Completion, CompletionChunk, TextChoice, TextChunkChoice, TextLogprobs


class TextReply:
    """See `cluster.http.replies.reply.Reply`."""

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        num_plain = len(context.answers) if context.only_text else 0
        self._text_events = [TextEvents(partial(self._text_chunk, index)) for index in range(num_plain)]

    def first_event(self, index: int) -> bytes:
        """The echo of the prompt, if any."""
        request = self._context.request
        prompt = request.choices[index].prompt
        if not request.echo and not request.return_token_ids:
            return b""
        choice = TextChunkChoice(index=index, text=request.echo[prompt] if request.echo else "")
        choice.logprobs = self._echo_logprobs(index)
        if request.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = request.prompts[prompt], ()
        return chunk_event(self._chunk(choice))

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        if self._text_events:
            return self._text_events[index].event(delta.content) if delta.content else b""
        if not delta.content and not piece.tokens:
            return b""
        choice = TextChunkChoice(index=index, text=delta.content, logprobs=self._logprobs(index, piece))
        if self._context.request.return_token_ids:
            choice.token_ids = piece.tokens
        choice.token_origins = self._context.origins(piece)
        return chunk_event(self._chunk(choice))

    def finish_event(self, index: int, finish: FinishReason | None) -> bytes:
        answer = self._context.answers[index]
        choice = TextChunkChoice(index=index, text="", finish_reason=finish, stop_reason=answer.stop_reason)
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
        return msgspec.json.encode(
            Completion(
                id=context.reply_id,
                created=context.created,
                model=context.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=context.usage(),
                metrics=context.metrics(),
            )
        )

    def _choice(self, index: int, answer: WholeAnswer) -> TextChoice:
        piece, delta, _ = answer
        request = self._context.request
        prompt = request.choices[index].prompt
        assert delta.finish is not None
        logprobs, of_echo = self._logprobs(index, piece), self._echo_logprobs(index)
        return TextChoice(
            index=index,
            text=request.echo[prompt] + delta.content if request.echo else delta.content,
            logprobs=logprobs if logprobs is None or of_echo is None else joined_logprobs(of_echo, logprobs),
            finish_reason=delta.finish,
            stop_reason=piece.stop_reason,
            matched_stop=self._context.answers[index].matched_stop,
            token_ids=piece.tokens if request.return_token_ids else None,
            token_origins=self._context.origins(piece),
            prompt_token_ids=request.prompts[prompt] if request.return_token_ids else None,
            prompt_logprobs=self._context.prompt_logprobs(index),
        )

    def _chunk(self, *choices: TextChunkChoice) -> CompletionChunk:
        context = self._context
        return CompletionChunk(
            id=context.reply_id,
            created=context.created,
            model=context.model,
            choices=list(choices),
            usage=context.event_usage(),
        )

    def _text_chunk(self, index: int, text: str) -> CompletionChunk:
        return self._chunk(TextChunkChoice(index=index, text=text))

    def _logprobs(self, index: int, piece: Piece) -> TextLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        begin = len(request.echo[request.choices[index].prompt]) if request.echo else 0
        return text_logprobs(piece, request.logprobs, self._context.tokenizer, request.tokens_as_ids, begin)

    def _echo_logprobs(self, index: int) -> TextLogprobs | None:
        context, request = self._context, self._context.request
        if not request.echo_logprobs:
            return None
        prompt, scores = request.choices[index].prompt, context.answers[index].prompt_scores
        return echo_logprobs(
            request.prompts[prompt],
            scores,
            request.echo[prompt],
            request.logprobs,
            context.tokenizer,
            request.tokens_as_ids,
        )
