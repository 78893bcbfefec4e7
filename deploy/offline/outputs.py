"""What `LLM` and `AsyncLLM` return, named as vLLM's: answers, also while they are generated, and an engine's metrics as
plain values."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from aerie.cluster.http.answer import Answer, EngineFailedError, RequestInvalidError, TokenScore
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import TokenDelta
from aerie.deploy.offline.engine_thread import EngineDeadError
from aerie.deploy.offline.sampling_params import RequestOutputKind, SamplingParams
from aerie.workers.scheduling import plan
from aerie.workers.scheduling.request import Request


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability in nats, its rank if it is among the most likely ones (1 is the first), and its
    text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    token_ids: tokens, including the one that ended the answer.
    logprobs: for each token, by token id; the chosen token first.
    finish_reason: "stop", "length", "abort", or None while it runs.
    stop_reason: the stop text, or the id of a stop token other than the end of text.
    acceptance_length: tokens per round with drafts, 1 + accepted / rounds; None without drafts.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    acceptance_length: float | None

    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestStateStats:
    """Times of a prompt's answers. Those that end in `_ts` are seconds of time.monotonic, 0.0 before they come.

    num_generation_tokens: tokens of all answers.
    arrival_time: seconds since 1970.
    queued_ts: when the request was made, `scheduled_ts`: when the engine took it into its first step.
    first_token_latency: seconds from `queued_ts` to `first_token_ts`.
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt.

    prompt: its text, None if it was given as token ids.
    prompt_logprobs: for each of its tokens, by token id; None for the first.
    num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool = True
    metrics: RequestStateStats | None = None


class RunningAnswer:
    """An answer while it is generated.

    num_cached_tokens: prompt tokens found in the prefix cache.
    num_tokens: tokens of the answer so far.
    arrival_time and `*_ts`: see `RequestStateStats`.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        stops: Sequence[str],
        grammar_param: str,
        index: int,
        tokenizer: ChatTokenizer,
    ) -> None:
        """stops: texts that end the answer.
        grammar_param: the request's parameter with a grammar, which errors of the grammar name; "" without one.
        index: its number among the answers to its prompt."""
        self.request = request
        self._grammar_param = grammar_param
        self._params = params
        self._index = index
        self._tokenizer = tokenizer
        self._answer = Answer(
            tokenizer.detokenizer(params.skip_special_tokens, request.prompt),
            stops,
            params.include_stop_str_in_output,
            params.min_tokens,
            frozenset(() if params.ignore_eos else tokenizer.eos_token_ids),
        )
        self._is_aborted = False
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[plan.TokenLogprobs] = []
        self._total_logprob = 0.0
        self.num_tokens = 0
        self.arrival_time, self.queued_ts = time.time(), time.monotonic()
        self.first_token_ts = self.last_token_ts = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_finished(self) -> bool:
        return self._is_aborted or self._answer.finish is not None

    @property
    def num_cached_tokens(self) -> int:
        return self._answer.cached_tokens or 0

    def push(self, delta: TokenDelta) -> None:
        """Add a step's tokens; a stop text may end the answer before the engine does. Raises ValueError for a request
        that cannot be answered, EngineDeadError if the engine has failed."""
        if delta.finish == "abort":
            return self.abort()
        try:
            piece = self._answer.push(delta)
        except RequestInvalidError as error:
            param = f"{self._grammar_param}: " if self._grammar_param else ""
            raise ValueError(f"{param}the request cannot be answered: {error}") from None
        except EngineFailedError as error:
            raise EngineDeadError(str(error)) from None
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        if piece.tokens:
            self.num_tokens += len(piece.tokens)
            self.last_token_ts = time.monotonic()
            self.first_token_ts = self.first_token_ts or self.last_token_ts
        self._logprobs += piece.logprobs
        self._total_logprob += sum(score.logprob for score in piece.logprobs)

    def abort(self) -> None:
        """End the answer."""
        self._is_aborted = True

    def output(self) -> CompletionOutput:
        """Return the answer so far."""
        answer, speculation = self._answer, self._answer.speculation
        rounds = 0 if speculation is None else speculation.num_rounds
        accepted = 0 if speculation is None else sum(k * times for k, times in enumerate(speculation.histogram))
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts) if self._params.detokenize else "",
            token_ids=tuple(self._tokens),
            cumulative_logprob=self._total_logprob if wanted else None,
            logprobs=list(map(self._listed, self._tokens, self._logprobs)) if wanted else None,
            finish_reason="abort" if self._is_aborted else answer.finish,
            stop_reason=answer.stop_reason,
            acceptance_length=1 + accepted / rounds if rounds else None,
        )

    def delta(self) -> CompletionOutput:
        """Return the part since the last call."""
        output = self.output()
        self._texts, self._tokens, self._logprobs = [], [], []
        return output

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return those of each token of the prompt, of which the first has none; None if they were not requested."""
        if self._params.prompt_logprobs is None:
            return None
        scores = zip(self.request.prompt[1:], self._answer.prompt_scores, strict=False)
        return [None, *(self._listed(token, score, score.rank) for token, score in scores)]

    def _listed(
        self, token: int, scores: plan.TokenLogprobs | TokenScore, rank: int | None = None
    ) -> dict[int, Logprob]:
        values = {token: (scores.logprob, rank)}
        for position, (other, logprob) in enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True), 1):
            values[other] = (logprob, position)
        return {id_: Logprob(*value, self._tokenizer.token_text(id_)) for id_, value in values.items()}


def request_output(
    request_id: str,
    text: str | None,
    answers: Sequence[RunningAnswer],
    finished: bool = True,
    kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
) -> RequestOutput:
    """Return the output of some answers to a prompt. text: the prompt's, if known. finished: whether all have ended."""
    is_delta, first = kind is RequestOutputKind.DELTA, answers[0]
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=list(first.request.prompt),
        outputs=[answer.delta() if is_delta else answer.output() for answer in answers],
        prompt_logprobs=first.prompt_logprobs(),
        num_cached_tokens=first.num_cached_tokens,
        finished=finished,
        metrics=_metrics(answers),
    )


def _metrics(answers: Sequence[RunningAnswer]) -> RequestStateStats:
    """Return the times of the answers to one prompt."""
    first = answers[0]
    first_token_ts = min((answer.first_token_ts for answer in answers if answer.first_token_ts), default=0.0)
    return RequestStateStats(
        num_generation_tokens=sum(answer.num_tokens for answer in answers),
        arrival_time=first.arrival_time,
        queued_ts=first.queued_ts,
        scheduled_ts=first.queued_ts + first.request.queue_s if first_token_ts else 0.0,
        first_token_ts=first_token_ts,
        last_token_ts=max(answer.last_token_ts for answer in answers),
        first_token_latency=first_token_ts - first.queued_ts if first_token_ts else 0.0,
    )


@dataclass
class Metric:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: float = 0


@dataclass
class Gauge(Metric):
    """A number that may fall."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """A metric with buckets, as vLLM's.

    buckets: cumulative counts by upper bound.
    """

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def metrics_of(text: str) -> list[Metric]:
    """Return the metrics of Prometheus' text format."""
    return [metric for family in text_string_to_metric_families(text) for metric in _request_metrics(family)]


def _request_metrics(family: Family) -> Iterator[Metric]:
    """Yield the metrics of one Prometheus family; a histogram for each of its label sets."""
    if family.type != "histogram":
        kind = Counter if family.type == "counter" else Gauge
        yield from (kind(family.name, dict(point.labels), point.value) for point in family.samples)
        return
    by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        metric = by_labels.setdefault(tuple(labels.items()), Histogram(family.name, labels))
        if sample.name.endswith("_bucket"):
            metric.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            metric.sum = sample.value
        elif sample.name.endswith("_count"):
            metric.count = int(sample.value)
    yield from by_labels.values()
