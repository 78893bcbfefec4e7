"""The interface of an endpoint's reply to a generation request. Called by `aerie.cluster.http.serving`; implemented by
the other modules of this folder."""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from msgspec import UNSET, UnsetType

from aerie.cluster.http.answer import Answer, Piece, joined
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.parsers.output_parser import ReplyDelta, joined_deltas
from aerie.cluster.http.replies.logprobs import LogprobFormats
from aerie.cluster.http.replies.streaming import DONE, event
from aerie.cluster.http.requests.edge_request import EdgeRequest
from aerie.cluster.http.schema.completions import ToolCall
from aerie.cluster.http.schema.response import (
    CachedTokens,
    PromptToken,
    ReasoningTokens,
    RequestMetrics,
    SpeculationMetrics,
    TokenOrigin,
    Usage,
    WeightVersion,
)
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import SpeculationStats


class WholeAnswer(NamedTuple):
    """A finished choice: its pieces joined to one, and the parser's result. parts: both as they came."""

    piece: Piece
    delta: ReplyDelta
    tool_calls: list[ToolCall]
    parts: Sequence[tuple[Piece, ReplyDelta]]

    def in_order(self) -> Iterator[tuple[Piece, ReplyDelta]]:
        """Yield the parts, with neighbouring ones of text, or of reasoning, joined."""
        for kind, run in itertools.groupby(self._kinds(), key=lambda pair: pair[0]):
            parts = [part for _, part in run]
            if kind == "calls":
                yield from parts
            else:
                pieces, deltas = zip(*parts, strict=True)
                yield joined(pieces), joined_deltas(deltas)[0]

    def _kinds(self) -> Iterator[tuple[str, tuple[Piece, ReplyDelta]]]:
        """Yield each part with its kind. Parts without text are of the kind before."""
        last = ""
        for part in self.parts:
            _, delta = part
            if delta.tool_calls or (delta.reasoning and delta.content):
                last = "calls"
            elif delta.reasoning or delta.content:
                last = "reasoning" if delta.reasoning else "content"
            yield last, part


class Reply(ABC):
    """Builds the reply to one request in an endpoint's format: `document`, or the events of a stream, in this order.

    opens_together: the first events of all choices precede all others.
    """

    opens_together: ClassVar[bool] = False

    def __init__(self, context: "ReplyContext") -> None:
        self._context = context

    @abstractmethod
    def first_event(self, index: int) -> bytes:
        """Return the first event of choice `index`; b"" for none."""

    @abstractmethod
    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the event of a piece that is not the last; b"" if there is nothing to show. delta: what the parser
        made of the piece."""

    @abstractmethod
    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        """Return the last event of a choice: its last piece and its finish reason."""

    def end_events(self) -> bytes:
        """Return the events after all choices have ended."""
        return DONE

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error.body())

    @abstractmethod
    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        """Return the reply to a request that does not stream. answers: one per choice."""


@dataclass(frozen=True)
class ReplyContext:
    """Data shared by all documents and events of one reply.

    answers: one per choice, in order; updated by `aerie.cluster.http.serving`.
    reply_id: id of the reply, which the client may have chosen.
    created: Unix seconds.
    """

    request: EdgeRequest
    answers: Sequence[Answer]
    reply_id: str
    created: int
    model: str
    tokenizer: ChatTokenizer

    @functools.cached_property
    def logprobs(self) -> LogprobFormats:
        """The formats of log-probabilities."""
        return LogprobFormats(self.tokenizer, self.request.tokens_as_ids)

    @property
    def only_text(self) -> bool:
        """Whether the event of a piece with text has only text."""
        request = self.request
        more = request.return_token_ids or request.return_token_origins or request.continuous_usage
        return not (more or request.logprobs >= 0)

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of choice `index`."""
        return self.request.prompts[self.request.choices[index].prompt]

    def origins(self, piece: Piece) -> list[TokenOrigin] | UnsetType:
        """Return the origin of each token of a piece, if requested."""
        if not self.request.return_token_origins:
            return UNSET
        return [TokenOrigin(text, drafted) for text, drafted in zip(piece.texts, piece.drafted, strict=True)]

    def weight_versions(self, index: int) -> list[WeightVersion] | UnsetType:
        """Return which weights wrote the tokens of choice `index`, if requested."""
        if not self.request.return_weight_versions:
            return UNSET
        answer, start, versions = self.answers[index], 0, []
        for version, count in answer.versions:
            end = min(start + count, answer.num_tokens)
            versions += [WeightVersion(version or "0", start, end)] if end > start else []
            start = end
        return versions

    def usage(self) -> Usage:
        """Return the numbers of tokens so far. Cached tokens are left out until they are known."""
        request = self.request
        num_prompt = sum(map(len, request.prompts))
        num_output = sum(answer.num_tokens for answer in self.answers)
        n = len(request.choices) // len(request.prompts)
        cached = [answer.cached_tokens for answer in self.answers[::n]]
        known = [tokens for tokens in cached if tokens is not None]
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(known)) if len(known) == len(cached) else UNSET,
            completion_tokens_details=ReasoningTokens(self.num_reasoning_tokens) if request.chat else UNSET,
        )

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 before they are known."""
        details = self.usage().prompt_tokens_details
        return 0 if details is UNSET else details.cached_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices so far."""
        return sum(answer.num_reasoning_tokens for answer in self.answers)

    def event_usage(self) -> Usage | None | UnsetType:
        """Return `usage` of an event other than the usage event."""
        if self.request.continuous_usage:
            return self.usage()
        return None if self.request.include_usage else UNSET

    def finish_metrics(self) -> RequestMetrics | UnsetType:
        """Return `metrics` of the last event of a choice; UNSET if a usage event follows, which has them."""
        return UNSET if self.request.include_usage else self.metrics()

    def prompt_logprobs(self, index: int) -> list[dict[str, PromptToken] | None] | None:
        """Return choice `index`'s `prompt_logprobs`, if requested by this name."""
        request = self.request
        if request.prompt_logprobs < 0:
            return None
        scores = self.answers[index].prompt_scores
        return self.logprobs.prompt(self.prompt(index), scores, request.prompt_logprobs)

    def metrics(self) -> RequestMetrics | UnsetType:
        """Return statistics of speculation for a reply of a single choice; UNSET for several."""
        stats = self.answers[0].speculation
        if len(self.answers) != 1 or stats is None or stats.num_rounds == 0:
            return UNSET
        return RequestMetrics(speculative_decoding=speculation_metrics(stats))


def speculation_metrics(stats: SpeculationStats) -> SpeculationMetrics:
    """Return the fields that vLLM's clients and AIPerf read. The mean length is 1 + accepted / rounds, because every
    round also emits one token of the target."""
    num_accepted = sum(count * accepted for accepted, count in enumerate(stats.histogram))
    return SpeculationMetrics(
        mean_acceptance_length=1.0 + num_accepted / stats.num_rounds,
        draft_acceptance_rate=num_accepted / stats.num_drafted if stats.num_drafted else 0.0,
        acceptance_histogram=stats.histogram,
        num_spec_steps=stats.num_rounds,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=stats.num_drafted,
        num_spec_tokens=stats.num_draft_tokens,
    )
