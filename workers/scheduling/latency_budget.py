"""Limits the time of a step, and so its prompt tokens and the growth of the batch. Used by the scheduler; pure.
Constants were chosen by simulation (`tests.support.simulation.load` and `closed_loop`; figures in
tests/bench/RESULTS.md)."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from workers.config import SchedulerConfig
from workers.scheduling.step_time import Step, StepTime

MIN_SHARE = 0.25  # minimum share of the target for prompts, however long rounds are
MAX_STRETCH = 3.0  # a backlog stretches steps to this times the target, for "auto"
BACKLOG_SHARE = 0.5  # a stretched step takes at most this share of the time of all pending prompts
_MANY_STEPS = 8  # steps of prompts that stretch a step fully
PATIENCE = 4.0  # deadline after arrival, in times the prompt's own time
MAX_PATIENCE = 6.0  # bound on it while few prompts are pending, in times the target
QUEUE_PATIENCE = 2.0  # bound on it while many are pending, in times the time of all of them
MIN_MASK_WAIT_MS = 5.0
GROWTH_SHARE = 0.1  # of the target by which another request may delay the others beyond their mean gap
PATIENT_TARGETS = 800.0  # wait of a request, in times the target, that doubles the mean gap allowed for it
SHAPE_SHARE, SHAPE_GAPS = 0.25, 1.25  # of the target and the mean gap, for a change to a slower shape
_ROUNDING_MS = 1e-6


class StepRounds(NamedTuple):
    """The rounds of a step.

    shape: that they verify.
    num_requests: requests that run one.
    kv_tokens: committed tokens of all these requests.
    """

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True)
class LatencyBudget:
    """step_time: predicts step times.
    target_ms: maximum time of a step with prompt tokens while few prompts wait.
    limit_ms: maximum however many wait.
    max_step_tokens: maximum prompt tokens of a step.
    """

    step_time: StepTime
    target_ms: float
    limit_ms: float
    max_step_tokens: int

    @classmethod
    def of(cls, config: SchedulerConfig, step_time: StepTime) -> "LatencyBudget":
        """Return the configured budget. A numeric target always holds; a backlog may stretch "auto"."""
        target_ms = config.itl_target_ms
        if target_ms != "auto":
            return cls(step_time, target_ms, target_ms, config.step_token_limit)
        target_ms = step_time.itl_target_ms()
        return cls(step_time, target_ms, MAX_STRETCH * target_ms, config.step_token_limit)

    @property
    def gives_way(self) -> bool:
        """Whether a backlog may stretch steps beyond the target."""
        return self.limit_ms > self.target_ms

    def updated(self) -> "LatencyBudget":
        """Return the budget by current step times: "auto" follows them."""
        if not self.gives_way:
            return self
        target_ms = self.step_time.itl_target_ms()
        return replace(self, target_ms=target_ms, limit_ms=MAX_STRETCH * target_ms)

    def prompt_ms(self, num_tokens: int) -> float:
        """Milliseconds to compute `num_tokens` prompt tokens with nothing else running, in the longest steps
        allowed."""
        longest = min(self.max_step_tokens, self.step_time.costs.chunk_tokens[-1])
        whole, rest = divmod(num_tokens, longest)
        return (whole * self._chunk_ms(longest) if whole else 0.0) + self._chunk_ms(rest)

    def tokens_per_s(self, rounds: StepRounds) -> float:
        """Prompt tokens per second beside these rounds, with many pending."""
        step = self.step(rounds, self.max_step_tokens * _MANY_STEPS)
        step.take(step.room(self.max_step_tokens, 0), 0)
        ms = self.step_time.ms(step.planned(rounds))
        return step.tokens * 1000.0 / ms if ms else 0.0

    def patience_s(self, num_tokens: int, backlog_tokens: int) -> float:
        """Seconds from a prompt's arrival to its deadline, with `backlog_tokens` prompt tokens pending.

        A multiple of the prompt's own time, so that short prompts pass long ones. It is bounded, so that later prompts
        cannot pass forever. In a queue the bound grows with the queue: a long prompt waits for most of it anyway, and a
        short one that passes adds little.
        """
        bound_ms = max(MAX_PATIENCE * self.target_ms, QUEUE_PATIENCE * self.prompt_ms(backlog_tokens))
        return min(PATIENCE * self.prompt_ms(num_tokens), bound_ms) / 1000

    def mask_wait_ms(self, expected_ms: float) -> float:
        """Milliseconds that a step of `expected_ms` may wait for masks: the rest of the target, but at least a quarter
        and at most half of it. Ranks wait up to half as long again if the process that fills masks does not answer."""
        target_ms = self.target_ms
        return max(MIN_MASK_WAIT_MS, min(target_ms / 2, max(target_ms / 4, target_ms - expected_ms)))

    def step_limit_ms(self, rounds: StepRounds, backlog_tokens: int) -> float:
        """Maximum milliseconds of a step with these rounds and `backlog_tokens` pending prompt tokens.

        A backlog stretches steps, because rounds delay waiting prompts. The stretch is proportional: none for up to
        twice the target. Prompts get at least `MIN_SHARE`. Without rounds no request waits for its next token, so a
        step may be as long as with a full backlog. Unless the target is a number, it then also takes a rest of prompts
        that would need a longer step of its own.
        """
        if rounds.num_requests == 0:
            all_ms = self.prompt_ms(backlog_tokens)
            gives_way = self.gives_way and backlog_tokens <= self.max_step_tokens
            is_near = all_ms <= self.limit_ms + self._chunk_ms(1)
            return max(self.limit_ms, all_ms + _ROUNDING_MS) if gives_way and is_near else self.limit_ms
        stretched_ms = min(BACKLOG_SHARE * self.prompt_ms(backlog_tokens), self.limit_ms)
        rounds_ms = self.step_time.ms(Step(*rounds))
        return max(self.target_ms, stretched_ms, rounds_ms + MIN_SHARE * self.target_ms)

    def growth_limit_ms(self, mean_gap_ms: float, waited_s: float) -> float:
        """Maximum milliseconds of rounds that a request may join after waiting for `waited_s`.

        mean_gap_ms: shortest mean gap between tokens of a running request; 0: unknown.

        Beyond a target that is a number the batch grows as slowly as this mean, which follows it, so that any size is
        reached and no gap is many times the others of its answer. The limit rises with the wait, so that no request
        starves. For targets that are a number: "auto" is beyond all rounds that were measured.
        """
        waited = waited_s * 1000 / (PATIENT_TARGETS * self.target_ms)
        return max(self.target_ms, GROWTH_SHARE * self.target_ms + (1.0 + waited) * (mean_gap_ms or self.target_ms))

    def shape_limit_ms(self, mean_gap_ms: float) -> float:
        """Maximum milliseconds of rounds of a slower shape than the last, for targets that are a number."""
        return max(self.target_ms, SHAPE_SHARE * self.target_ms + SHAPE_GAPS * mean_gap_ms)

    def _chunk_ms(self, num_tokens: int) -> float:
        """Milliseconds of a step with only `num_tokens` prompt tokens."""
        step_time = self.step_time
        return step_time.ms(Step(step_time.costs.default, chunk_tokens=num_tokens)) if num_tokens else 0.0

    def step(self, rounds: StepRounds, backlog_tokens: int) -> "StepBudget":
        """Return the budget of the next step."""
        return StepBudget(self.max_step_tokens, self.step_time, rounds, self.step_limit_ms(rounds, backlog_tokens))


class StepBudget:
    """Room for prompt tokens in the step being planned. Without `step_time` the limit is `max_tokens`.

    tokens: taken so far.
    """

    def __init__(
        self,
        max_tokens: int,
        step_time: StepTime | None = None,
        rounds: StepRounds = StepRounds(),  # noqa: B008 - immutable
        limit_ms: float = math.inf,
    ) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._step_time = step_time
        self._rounds = Step(*rounds)
        self._limit_ms = limit_ms
        self._pairs = 0  # pairs of a chunk's token and a token before the chunk
        self._offered = self._wanted = 0  # the last result and argument of `room`
        self._is_full = False

    def room(self, wanted: int, context: int) -> int:
        """Return how many of a prompt's next `wanted` tokens fit. A step's first prompt gets at least the tokens that
        cost no more than one.

        context: tokens before them.
        """
        self._wanted = wanted
        self._offered = 0 if self._is_full else self._most(min(wanted, self._max_tokens - self.tokens), context)
        return self._offered

    def take(self, count: int, context: int) -> None:
        """Take a chunk of `count` tokens after `context` others."""
        self.tokens += count
        self._pairs += count * context
        # a small piece of the next prompt shall not fill the rest
        self._is_full = count == self._offered < self._wanted

    def planned(self, rounds: StepRounds) -> Step:
        """Return the step with its prompt tokens and its final rounds."""
        context = self._pairs / self.tokens if self.tokens else 0.0
        return Step(*rounds, self.tokens, context)

    def _most(self, count: int, context: int) -> int:
        """Return how many of `count` tokens keep the step within its limit. A step's first prompt gets at least the
        smallest measured chunk, because smaller ones cost as much."""
        step_time = self._step_time
        if count <= 0 or step_time is None:
            return count
        others = self._pairs - self.tokens * context  # of the tokens taken so far, which have another context

        fitting = step_time.chunk_tokens_within(self._limit_ms, self._rounds, self.tokens + count, context, others)
        return max(fitting - self.tokens, 0 if self.tokens else min(count, step_time.costs.chunk_tokens[0]))
