"""One answer: the engine's token deltas, cut at stop strings and turned into text. Pure; no HTTP, no clock."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from aerie.cluster.http.text.detokenizer import Detokenizer, StopMatcher
from aerie.cluster.transport.messages import SpeculationStats, TokenDelta, add_versions
from aerie.workers.scheduling.plan import NOT_FINITE, PromptLogprobs, TokenLogprobs, unpack_i32

EndReason = Literal["stop", "length"]
_END_REASONS: dict[str | None, EndReason | None] = {None: None, "stop": "stop", "length": "length"}


class EngineFailedError(Exception):
    """The engine ended the answer early. The message is for the log; `shown` is the part that the client may read."""

    def __init__(self, message: str, shown: str = "") -> None:
        super().__init__(message)
        self.shown = shown


class RequestInvalidError(Exception):
    """The request was found to be impossible while it ran; the message is for the client."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The part of an answer that one delta adds. A msgspec struct, because each chunk creates one: 0.2 us instead of a
    dataclass's 1 us.

    offsets: start of each token's text in the answer's text.
    texts, drafted: each token's text, including the marks of reasoning and calls, and whether it was an accepted draft;
        empty unless the request asks for token origins.
    finish: finish reason; set in the last piece.
    stop_reason: the stop string or the stop token's id; None for end of sequence.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    drafted: tuple[bool, ...] = ()
    finish: EndReason | None = None
    stop_reason: str | int | None = None


class Answer:
    """A choice while it is generated.

    include_stop: whether the answer includes the stop string or the stop token's text.
    min_tokens: stop strings count only after that many tokens.
    eos_token_ids: reported as end of sequence.
    finish: finish reason; None until the last piece.
    num_tokens: number of tokens including the one that ended the answer, as in vLLM's usage.
    cached_tokens, speculation: those of the last delta that had them.
    prompt_scores: log-probabilities of the prompt, if requested; complete with the first token.
    num_reasoning_tokens: tokens whose text is reasoning; counted by the answer's driver, which has a parser.
    versions: `TokenDelta.weight_versions` of all tokens, those dropped after a stop string included.
    routed_experts: `TokenDelta.routed_experts`.
    matched_stop: the stop string, or the id of the token that ended the answer, end of sequence included.
    stop_reason: as matched_stop, but None at end of sequence.

    Without include_stop, the text of a stop token is not shown. Accepted tokens after a stop string are dropped from
    text, tokens, logprobs and counts.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._eos_token_ids = eos_token_ids
        self._decoded_len = 0
        self.num_tokens = 0
        self.finish: EndReason | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens: int | None = None
        self.speculation: SpeculationStats | None = None
        self.matched_stop: str | int | None = None
        self.prompt_scores = PromptScores()
        self.num_reasoning_tokens = 0
        self.versions: list[tuple[str, int]] = []
        self.routed_experts = b""

    def push(self, delta: TokenDelta) -> Piece:
        """Return the next piece. Raises EngineFailedError or RequestInvalidError if the delta reports such a
        failure."""
        assert self.finish is None, "a delta after the last one"
        if delta.finish == "invalid":
            raise RequestInvalidError(delta.error or "it cannot be answered")
        if delta.finish not in _END_REASONS:
            detail = NOT_FINITE.message if delta.error == NOT_FINITE.message else ""
            raise EngineFailedError(f"{delta.finish}: {delta.error or 'no reason given'}", detail)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
            self.speculation = delta.speculation
        if delta.tokens:
            add_versions(self.versions, delta)
        self.routed_experts = delta.routed_experts
        for part in delta.prompt_logprobs:
            self.prompt_scores.push(part)
        shown: list[str] = []
        offsets: list[int] = []
        texts: list[str] = []
        last = len(delta.tokens) - 1
        hides_last = delta.finish == "stop" and not self._include_stop
        for i, token in enumerate(delta.tokens):
            self.num_tokens += 1
            offsets.append(self._decoded_len)
            text = "" if hides_last and i == last else self._detokenizer.step(token)
            texts.append(text)
            if self._show(text, shown):
                return self._piece(delta, shown, offsets, texts)
        if delta.finish is not None:
            held = self._detokenizer.flush()
            if texts:
                texts[-1] += held
            self._finish(delta, held, shown)
        return self._piece(delta, shown, offsets, texts)

    def _show(self, text: str, shown: list[str]) -> bool:
        """Add the visible part of `text` to `shown`, the parts to send. Return whether a stop string ended the
        answer."""
        self._decoded_len += len(text)
        if self.num_tokens <= self._min_tokens:
            shown.append(text)
            return False
        result = self._matcher.push(text)
        if isinstance(result, str):
            shown.append(result)
            return False
        shown.append(result.shown + result.stop if self._include_stop else result.shown)
        self.finish = "stop"
        self.stop_reason = self.matched_stop = result.stop
        return True

    def _finish(self, delta: TokenDelta, held: str, shown: list[str]) -> None:
        """Process the engine's last delta. A stop string completed by held-back text has priority.

        held: text that the detokenizer still held back, from its `flush`.
        shown: receives the text to send; also what the stop matcher held back.
        """
        if not self._show(held, shown):
            shown.append(self._matcher.flush())
            self.finish = _END_REASONS[delta.finish]
            if delta.finish == "stop" and delta.tokens:
                self.matched_stop = delta.tokens[-1]
                self.stop_reason = None if self.matched_stop in self._eos_token_ids else self.matched_stop

    def _piece(self, delta: TokenDelta, shown: list[str], offsets: list[int], texts: list[str]) -> Piece:
        """Return the piece that a delta adds to the answer.

        shown: parts of the text to send.
        offsets, texts: those of the delta's tokens that belong to the answer.
        """
        num_tokens = len(offsets)
        return Piece(
            text="".join(shown),
            tokens=delta.tokens[:num_tokens],
            logprobs=(delta.logprobs or ())[:num_tokens],
            offsets=tuple(offsets),
            texts=tuple(texts) if delta.drafted else (),
            drafted=delta.drafted[:num_tokens],
            finish=self.finish,
            stop_reason=self.stop_reason,
        )


def joined(pieces: Sequence[Piece]) -> Piece:
    """Join all pieces of an answer."""
    return Piece(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        texts=tuple(text for piece in pieces for text in piece.texts),
        drafted=tuple(flag for piece in pieces for flag in piece.drafted),
        finish=pieces[-1].finish,
        stop_reason=pieces[-1].stop_reason,
    )


def without_tokens(delta: TokenDelta) -> TokenDelta:
    """Return `delta` without tokens, for answers of no tokens: the engine always computes one."""
    finish = "length" if delta.finish == "stop" else delta.finish
    return msgspec.structs.replace(delta, tokens=(), logprobs=None, finish=finish)


class TokenScore(NamedTuple):
    """A prompt token's log-probability in nats, and its rank; rank 1 is the most likely token."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptScores:
    """Scores of a prompt's tokens after the first, in order. A prompt that is computed again, after a preemption or a
    loss, sends the same scores again; they count once."""

    def __init__(self) -> None:
        self._parts: list[PromptLogprobs] = []
        self._end = 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the first one, which has no score, included."""
        return self._end

    def push(self, part: PromptLogprobs) -> None:
        """Add what is new in `part`."""
        assert part.start <= self._end, "log-probabilities of a prompt with a gap"
        if part.end > self._end:
            self._parts.append(_after(part, self._end - part.start))
            self._end = part.end

    def __iter__(self) -> Iterator[TokenScore]:
        for part in self._parts:
            count = part.end - part.start
            rows = zip(
                np.frombuffer(part.logprobs, "<f4").tolist(),
                unpack_i32(part.ranks).tolist(),
                unpack_i32(part.top_ids).reshape(count, -1).tolist(),
                np.frombuffer(part.top_logprobs, "<f4").reshape(count, -1).tolist(),
                strict=True,
            )
            for logprob, rank, ids, top in rows:
                yield TokenScore(logprob, rank, tuple(ids), tuple(top))


def _after(part: PromptLogprobs, count: int) -> PromptLogprobs:
    """Drop the first `count` tokens."""
    width = len(part.top_ids) // (part.end - part.start)
    return PromptLogprobs(
        part.start + count,
        part.logprobs[4 * count :],
        part.ranks[4 * count :],
        part.top_ids[width * count :],
        part.top_logprobs[width * count :],
    )
