"""Replies of /v1/completions: OpenAI's completion and its chunks."""

from collections.abc import Sequence

import msgspec

from cluster.http.answer import Piece
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.replies.logprobs import echo_logprobs, joined_logprobs, text_logprobs
from cluster.http.replies.openai import OpenAIReply
from cluster.http.replies.reply import WholeAnswer
from cluster.http.replies.streaming import chunk_event
from cluster.http.schema.text_reply import Completion, CompletionChunk, TextChoice, TextChunkChoice, TextLogprobs


class TextReply(OpenAIReply):
    """See `cluster.http.replies.reply.Reply`."""

    chunk_type = CompletionChunk

    def first_event(self, index: int) -> bytes:
        """Return the echo of the prompt, if requested."""
        request = self._context.request
        if not request.echo and not request.return_token_ids:
            return b""
        choice = self._chunk_choice(index, self._echo(index))
        choice.logprobs = self._echo_logprobs(index)
        return self._first_event(choice)

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        if self._text_events:
            return self._plain_event(index, delta.content)
        if not delta.content and not piece.tokens:
            return b""
        return chunk_event(self._chunk(self._piece_choice(index, piece, delta)))

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the last piece and the finish reason in one event, as vLLM and SGLang do: their clients expect
        log-probabilities in every event."""
        return self._finish_event(self._piece_choice(index, piece, delta), piece, delta)

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return msgspec.json.encode(Completion(choices=choices, **self._document_fields()))

    def _choice(self, index: int, answer: WholeAnswer) -> TextChoice:
        piece, delta, _ = answer
        request = self._context.request
        assert delta.finish is not None
        logprobs, of_echo = self._logprobs(index, piece), self._echo_logprobs(index)
        return TextChoice(
            text=self._echo(index) + delta.content,
            logprobs=logprobs if logprobs is None or of_echo is None else joined_logprobs(of_echo, logprobs),
            finish_reason=delta.finish,
            prompt_token_ids=request.prompts[request.choices[index].prompt] if request.return_token_ids else None,
            prompt_logprobs=self._context.prompt_logprobs(index),
            **self._choice_fields(index, piece),
        )

    def _piece_choice(self, index: int, piece: Piece, delta: ReplyDelta) -> TextChunkChoice:
        choice = self._chunk_choice(index, delta.content)
        choice.logprobs = self._logprobs(index, piece) if piece.tokens else None
        self._add_tokens(choice, piece)
        return choice

    def _chunk_choice(self, index: int, text: str = "") -> TextChunkChoice:
        return TextChunkChoice(index=index, text=text)

    def _logprobs(self, index: int, piece: Piece) -> TextLogprobs | None:
        request = self._context.request
        if request.logprobs < 0:
            return None
        begin = len(self._echo(index))
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
