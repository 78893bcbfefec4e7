"""Replies of SGLang's route /generate. Each event of a stream contains the whole answer so far."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from aerie.cluster.http.answer import Piece, TokenScore
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.logprobs import finite
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer, speculation_metrics
from aerie.cluster.http.replies.streaming import chunk_event
from aerie.cluster.http.schema.native import NamedLogprob, NativeAnswer, NativeFinish, NativeMeta
from aerie.workers.scheduling.plan import TokenLogprobs


class NativeReply(Reply):
    """The reply of /generate.

    several: the request has a list of prompts (perhaps of one), so the reply has a list of answers.
    texts: include the tokens' texts in log-probabilities.
    scored_from: index of the first prompt token whose log-probability is shown; None: none is.
    """

    def __init__(self, context: ReplyContext, several: bool, texts: bool, scored_from: int | None = None) -> None:
        super().__init__(context)
        self._scored_from = scored_from
        self._several = several or len(context.answers) > 1
        self._texts = texts
        self._begin_s = time.monotonic()
        self._shown = [_Shown() for _ in context.answers]

    def first_event(self, index: int) -> bytes:
        return b""

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        self._add(index, piece, delta.content)
        return chunk_event(self._answer(index)) if delta.content or piece.tokens else b""

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        self._add(index, piece, delta.content)
        return chunk_event(self._answer(index))

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        for index, answer in enumerate(answers):
            self._add(index, answer.piece, answer.delta.content)
        found = [self._answer(index) for index in range(len(answers))]
        return msgspec.json.encode(found if self._several else found[0])

    def _add(self, index: int, piece: Piece, text: str) -> None:
        shown = self._shown[index]
        shown.text += text
        shown.tokens += piece.tokens
        num_top = self._context.request.logprobs
        if num_top >= 0:
            for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
                shown.logprobs.append(self._named(token, entry.logprob))
                shown.tops.append(self._tops(entry))

    def _named(self, token: int, logprob: float | None) -> NamedLogprob:
        text = self._context.tokenizer.token_text(token) if self._texts else None
        return None if logprob is None else finite(logprob), token, text

    def _tops(self, entry: TokenLogprobs | TokenScore) -> list[NamedLogprob]:
        num_top = self._context.request.logprobs
        tops = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        return [self._named(token, logprob) for token, logprob in tops]

    def _answer(self, index: int) -> NativeAnswer:
        context, shown = self._context, self._shown[index]
        request, answer = context.request, context.answers[index]
        finish = None
        if answer.finish == "stop":
            finish = NativeFinish("stop", matched=answer.matched_stop)
        elif answer.finish is not None:
            finish = NativeFinish("length", length=answer.num_tokens)
        meta = NativeMeta(
            id=context.reply_id,
            finish_reason=finish,
            prompt_tokens=len(context.prompt(index)),
            completion_tokens=answer.num_tokens,
            cached_tokens=answer.cached_tokens or 0,
            e2e_latency=round(time.monotonic() - self._begin_s, 6),
            output_token_logprobs=shown.logprobs if request.logprobs >= 0 else UNSET,
            output_top_logprobs=shown.tops if request.logprobs > 0 else UNSET,
        )
        self._add_prompt(index, meta)
        if (speculation := answer.speculation) is not None and speculation.num_rounds:
            metrics = speculation_metrics(speculation)
            meta.spec_verify_ct = metrics.num_spec_steps
            meta.spec_draft_token_num = metrics.num_draft_tokens
            meta.spec_accept_token_num = metrics.num_accepted_draft_tokens
            meta.spec_accept_length = round(metrics.mean_acceptance_length, 4)
        return NativeAnswer(shown.text, shown.tokens, meta, index if self._several and request.stream else UNSET)

    def _add_prompt(self, index: int, meta: NativeMeta) -> None:
        """Add the log-probabilities of the prompt, which are complete before the answer begins."""
        start, request = self._scored_from, self._context.request
        if start is None:
            return
        prompt = self._context.prompt(index)
        entries = [None, *self._context.answers[index].prompt_scores][start:]
        meta.input_token_logprobs = [
            self._named(token, None if entry is None else entry.logprob)
            for token, entry in zip(prompt[start:], entries, strict=True)
        ]
        if request.logprobs > 0:
            meta.input_top_logprobs = [None if entry is None else self._tops(entry) for entry in entries]


class _Shown:
    """The part of one answer received so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[NamedLogprob] = []
        self.tops: list[list[NamedLogprob]] = []
