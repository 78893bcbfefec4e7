"""An engine's counters. Each counter's annotation has its meaning and its Prometheus export.

The scheduler fills them, `aerie.cluster.transport.messages.EngineStats` carries them, `aerie.cluster.http.metrics`
exports them. Times are in seconds of the scheduler's clock, from `submit` on.
"""

import functools
from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

_SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
_FIRST_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_STEP_TOKENS = (1.0, *(float(8 << power) for power in range(12)))  # up to 16,384, as in vLLM
_TOKENS = tuple(float(step * 10**power) for power in range(5) for step in (1, 2, 5))


@dataclass(frozen=True)
class Metric:
    """Prometheus export of a number: `Annotated[int, Metric(...)]`.

    name: vLLM's name if vLLM has the metric; for counters without the suffix `_total`.
    help: its meaning.
    kind: its Prometheus type.
    label: name of the label for the keys of a mapping, or for the positions of a tuple.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    label: str = ""


class Histogram(msgspec.Struct, array_like=True):
    """A Prometheus histogram.

    counts[i]: observations <= bounds[i] and above the previous bound; the last count is for those above all bounds.
    total: sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Return a histogram without observations."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count all of `values`."""
        for bucket, count in enumerate(np.bincount(_bounds_array(self.bounds).searchsorted(values)).tolist()):
            self.counts[bucket] += count
        self.total += float(values.sum())


@functools.cache
def _bounds_array(bounds: tuple[float, ...]) -> npt.NDArray[np.float64]:
    return np.asarray(bounds)


def _empty(bounds: tuple[float, ...]) -> Histogram:
    """Return a default that creates an empty histogram per instance."""
    return msgspec.field(default_factory=lambda: Histogram.empty(bounds))


class SchedulerStats(msgspec.Struct):
    """Totals since the start.

    num_stale_results: dropped results of an older worker group.
    accepted_histogram: [k] rounds that accepted k draft tokens.
    num_draft_tokens: drafted tokens, verified or not.
    tokens_by_shape, steps_by_shape, expected_tokens_per_ms: keys are shape names (`aerie.workers.config.RoundShape`).
    steps_by_reason: keys are `aerie.workers.scheduling.shapes.shape_choice.Reason`.
    inter_token_s: time between two steps with tokens; one observation per request and step.
    time_per_output_token_s: one observation per finished request.
    """

    num_steps: Annotated[int, Metric("aerie:steps", "Steps executed")] = 0
    num_preemptions: Annotated[
        int, Metric("vllm:num_preemptions", "Requests that gave their pages back and started again")
    ] = 0
    num_resumed: Annotated[
        int, Metric("aerie:requests_resumed", "Requests replayed after workers, or another engine, were lost")
    ] = 0
    num_late_masks: Annotated[
        int, Metric("aerie:late_masks", "Steps that requests sat out because a grammar's mask was late")
    ] = 0
    num_stale_results: int = 0
    prompt_tokens: Annotated[int, Metric("vllm:prompt_tokens", "Prompt tokens of admitted requests")] = 0
    generation_tokens: Annotated[int, Metric("vllm:generation_tokens", "Tokens generated")] = 0
    finished: Annotated[
        dict[str, int], Metric("vllm:request_success", "Requests that ended", label="finished_reason")
    ] = msgspec.field(default_factory=dict)
    accepted_histogram: list[int] = msgspec.field(default_factory=list)
    num_draft_tokens: int = 0
    accepted_by_branch: Annotated[
        dict[str, int],
        Metric(
            "aerie:spec_decode_accepted_tokens_by_branch",
            "Accepted drafts, by the draft's method; suffix: copied from the request's own text",
            label="branch",
        ),
    ] = msgspec.field(default_factory=dict)
    tokens_by_shape: Annotated[
        dict[str, int], Metric("aerie:shape_tokens", "Tokens of rounds, by the shape that they verified", label="shape")
    ] = msgspec.field(default_factory=dict)
    steps_by_shape: Annotated[
        dict[str, int], Metric("aerie:shape_steps", "Steps with rounds, by the shape that they verified", label="shape")
    ] = msgspec.field(default_factory=dict)
    steps_by_reason: Annotated[
        dict[str, int], Metric("aerie:shape_reasons", "Steps with rounds, by why they had their shape", label="reason")
    ] = msgspec.field(default_factory=dict)
    expected_tokens_per_ms: Annotated[
        dict[str, float],
        Metric("aerie:shape_expected_tokens_per_ms", "What a round of each shape promises now", "gauge", label="shape"),
    ] = msgspec.field(default_factory=dict)
    time_to_first_token_s: Annotated[
        Histogram, Metric("vllm:time_to_first_token_seconds", "From arrival to the first token", "histogram")
    ] = _empty(_FIRST_S)
    inter_token_s: Annotated[
        Histogram,
        Metric(
            "vllm:inter_token_latency_seconds",
            "Between deliveries of tokens; one delivery may carry several",
            "histogram",
        ),
    ] = _empty(_SHORT_S)
    time_per_output_token_s: Annotated[
        Histogram,
        Metric(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, per request",
            "histogram",
        ),
    ] = _empty(_SHORT_S)
    e2e_s: Annotated[
        Histogram, Metric("vllm:e2e_request_latency_seconds", "From arrival to the last token", "histogram")
    ] = _empty(_LONG_S)
    queue_s: Annotated[
        Histogram, Metric("vllm:request_queue_time_seconds", "From arrival to the first step", "histogram")
    ] = _empty(_LONG_S)
    request_prompt_tokens: Annotated[
        Histogram, Metric("vllm:request_prompt_tokens", "Prompt tokens per request", "histogram")
    ] = _empty(_TOKENS)
    request_generation_tokens: Annotated[
        Histogram, Metric("vllm:request_generation_tokens", "Tokens generated per request", "histogram")
    ] = _empty(_TOKENS)
    prefill_s: Annotated[
        Histogram,
        Metric("vllm:request_prefill_time_seconds", "From a request's first step to its first token", "histogram"),
    ] = _empty(_LONG_S)
    decode_s: Annotated[
        Histogram,
        Metric("vllm:request_decode_time_seconds", "From a request's first token to its last", "histogram"),
    ] = _empty(_LONG_S)
    request_max_generation_tokens: Annotated[
        Histogram,
        Metric("vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request", "histogram"),
    ] = _empty(_TOKENS)
    request_max_tokens: Annotated[
        Histogram, Metric("vllm:request_params_max_tokens", "max_tokens of requests", "histogram")
    ] = _empty(_TOKENS)
    iteration_tokens: Annotated[
        Histogram, Metric("vllm:iteration_tokens_total", "Prompt and generated tokens of a step", "histogram")
    ] = _empty(_STEP_TOKENS)
    step_s: Annotated[Histogram, Metric("aerie:step_seconds", "Time of a step on rank 0", "histogram")] = _empty(
        _SHORT_S
    )

    @property
    def num_drafts(self) -> Annotated[int, Metric("vllm:spec_decode_num_drafts", "Rounds that verified drafts")]:
        return sum(self.accepted_histogram)

    @property
    def num_accepted_tokens(
        self,
    ) -> Annotated[int, Metric("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted")]:
        return sum(k * count for k, count in enumerate(self.accepted_histogram))

    @property
    def accepted_per_position(
        self,
    ) -> Annotated[
        tuple[int, ...],
        Metric(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the draft at a position",
            label="position",
        ),
    ]:
        """[k] rounds that accepted at least k + 1 draft tokens."""
        return tuple(sum(self.accepted_histogram[k + 1 :]) for k in range(len(self.accepted_histogram) - 1))

    def count_finished(self, reason: str) -> None:
        """Count one finished request."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_accepted(self, method: str, num_accepted: int, num_copied: int) -> None:
        """Count accepted drafts of `method`; num_copied of them were copied from the requests' own text."""
        for branch, number in ((method, num_accepted - num_copied), ("suffix", num_copied)):
            if number:
                self.accepted_by_branch[branch] = self.accepted_by_branch.get(branch, 0) + number

    def count_rounds(self, shape: str, num_tokens: int, reason: str) -> None:
        """Count one step whose rounds verified `shape` for `reason` and emitted num_tokens."""
        self.tokens_by_shape[shape] = self.tokens_by_shape.get(shape, 0) + num_tokens
        self.steps_by_shape[shape] = self.steps_by_shape.get(shape, 0) + 1
        self.steps_by_reason[reason] = self.steps_by_reason.get(reason, 0) + 1

    def copy(self) -> "SchedulerStats":
        """Return a snapshot."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SchedulerStats)
