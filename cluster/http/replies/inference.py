"""Replies of vLLM's route /inference/v1/generate: tokens, without text."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.logprobs import finite
from aerie.cluster.http.replies.reply import Reply, WholeAnswer
from aerie.cluster.http.replies.streaming import DONE, chunk_event
from aerie.cluster.http.schema.inference import (
    IdLogprob,
    InferenceChoice,
    InferenceLogprobs,
    InferenceReply,
    SampledLogprob,
)


class TokensReply(Reply):
    """The reply of /inference/v1/generate."""

    def first_event(self, index: int) -> bytes:
        return b""

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        return chunk_event(self._reply([self._choice(index, piece)])) if piece.tokens else b""

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        return chunk_event(self._reply([self._choice(index, piece)]))

    def end_events(self) -> bytes:
        if not self._context.request.include_usage:
            return DONE
        last = self._reply([])
        last.usage = self._context.usage()
        return chunk_event(last) + DONE

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        reply = self._reply([self._choice(index, answer.piece) for index, answer in enumerate(answers)])
        reply.usage = self._context.usage()
        return msgspec.json.encode(reply)

    def _reply(self, choices: list[InferenceChoice]) -> InferenceReply:
        return InferenceReply(self._context.reply_id, choices)

    def _choice(self, index: int, piece: Piece) -> InferenceChoice:
        logprobs = self._logprobs(piece) if self._context.request.logprobs >= 0 else None
        versions = self._context.weight_versions(index) if piece.finish is not None else UNSET
        return InferenceChoice(index, piece.tokens, logprobs, piece.finish, piece.stop_reason, versions)

    def _logprobs(self, piece: Piece) -> InferenceLogprobs:
        num_top = self._context.request.logprobs
        content = []
        for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
            top = list(_listed(zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)))
            content.append(SampledLogprob(f"token_id:{token}", token, finite(entry.logprob), top))
        return InferenceLogprobs(content)


def _listed(tokens: Iterable[tuple[int, float]]) -> Iterable[IdLogprob]:
    return (IdLogprob(f"token_id:{token}", token, finite(logprob)) for token, logprob in tokens)
