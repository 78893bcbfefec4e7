"""Limits the time of a step, and so its prompt tokens and the growth of the batch.

Used by the scheduler; pure. The constants were chosen by simulation (`tests.support.simulation.load` and `closed_loop`;
figures in tests/bench/RESULTS.md)."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from aerie.workers.config import SchedulerConfig
from aerie.workers.scheduling.step_time import Step, StepTime

MIN_SHARE = 0.25  # minimum time for prompts, as a share of the target, however long rounds are
MAX_STRETCH = 3.0  # for "auto", a backlog extends a step to at most this multiple of the target
BACKLOG_SHARE = 0.5  # an extended step takes at most this share of the time of all pending prompts
_MANY_STEPS = 8  # backlog, in full steps of prompts, that extends steps fully
PATIENCE = 4.0  # `patience_s` as a multiple of the prompt's own time
MAX_PATIENCE = 6.0  # bound on `patience_s`, as a multiple of the target, while few prompts are pending
QUEUE_PATIENCE = 2.0  # bound on `patience_s`, as a multiple of the time of all pending prompts, if that is larger
REST_SHARE = 0.2  # see `may_rest`
MIN_MASK_WAIT_MS = 5.0  # lower bound of the time that a step may wait for masks
GROWTH_SHARE = 0.1  # share of the target by which a joining request may make rounds longer than the mean gap
PATIENT_TARGETS = 800.0  # wait, in targets, that doubles the mean gap in that limit
SHAPE_SHARE, SHAPE_GAPS = 0.25, 1.25  # limit of a slower shape: sum of shares of target and mean gap
_ROUNDING_MS = 1e-6  # added against rounding errors


class StepRounds(NamedTuple):
    """The rounds of a step.

    shape: index of the shape that they verify.
    num_requests: number of requests that run one.
    kv_tokens: committed tokens of all these requests.
    """

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True)
class LatencyBudget:
    """The ITL target as limits of step times.

    step_time: predicts step times.
    target_ms: maximum time of a step with prompt tokens if few prompts wait.
    limit_ms: maximum time with any number of waiting prompts.
    max_step_tokens: maximum prompt tokens of a step.
    """

    step_time: StepTime
    target_ms: float
    limit_ms: float
    max_step_tokens: int

    @classmethod
    def of(cls, config: SchedulerConfig, step_time: StepTime) -> "LatencyBudget":
        """Return the configured budget. A backlog may extend steps only with "auto", not with a numeric target."""
        target_ms = config.itl_target_ms
        if target_ms != "auto":
            return cls(step_time, target_ms, target_ms, config.step_token_limit)
        target_ms = step_time.itl_target_ms()
        return cls(step_time, target_ms, MAX_STRETCH * target_ms, config.step_token_limit)

    @property
    def may_stretch(self) -> bool:
        """Return whether a backlog may extend steps beyond the target."""
        return self.limit_ms > self.target_ms

    def updated(self) -> "LatencyBudget":
        """Return the budget with the target for the current step times if the target is "auto"."""
        if not self.may_stretch:
            return self
        target_ms = self.step_time.itl_target_ms()
        return replace(self, target_ms=target_ms, limit_ms=MAX_STRETCH * target_ms)

    def prompt_ms(self, num_tokens: int) -> float:
        """Return the milliseconds to compute `num_tokens` prompt tokens in steps of maximum size without rounds."""
        longest = min(self.max_step_tokens, self.step_time.costs.chunk_tokens[-1])
        whole, rest = divmod(num_tokens, longest)
        return (whole * self._chunk_ms(longest) if whole else 0.0) + self._chunk_ms(rest)

    def tokens_per_s(self, rounds: StepRounds) -> float:
        """Return the prompt tokens per second in mixed batches with these rounds, if many are pending."""
        step = self.step(rounds, self.max_step_tokens * _MANY_STEPS)
        step.take(step.room(self.max_step_tokens, 0), 0)
        ms = self.step_time.ms(step.planned(rounds))
        return step.tokens * 1000.0 / ms if ms else 0.0

    def patience_s(self, num_tokens: int, backlog_tokens: int) -> float:
        """Return the seconds from a prompt's arrival to its deadline, with `backlog_tokens` prompt tokens pending.

        It is a multiple of the prompt's own time, so that short prompts pass long ones, with a bound, so that later
        prompts cannot pass forever. The bound grows with the backlog, because a long prompt waits for most of it
        anyway, and a short one that passes adds little.
        """
        bound_ms = max(MAX_PATIENCE * self.target_ms, QUEUE_PATIENCE * self.prompt_ms(backlog_tokens))
        return min(PATIENCE * self.prompt_ms(num_tokens), bound_ms) / 1000

    def mask_wait_ms(self, expected_ms: float) -> float:
        """Return the milliseconds that a step of `expected_ms` may wait for grammar masks: the rest of the target, but
        at least a quarter and at most half of it. Ranks wait up to 1.5 times as long for a process that does not
        answer."""
        target_ms = self.target_ms
        return max(MIN_MASK_WAIT_MS, min(target_ms / 2, max(target_ms / 4, target_ms - expected_ms)))

    def may_rest(self, rounds: StepRounds, backlog_tokens: int, backlog_context: float) -> bool:
        """Return whether `rounds` may be left out of a step, so that it computes more of the prompts. Only with "auto".
        Arguments as in `step_limit_ms`.

        They may if both hold:
        - The target leaves prompt tokens for later steps, and the backlog is not so long that it extends steps.
        - Beside prompts, the rounds take at least `REST_SHARE` of their time alone, as they do where arithmetic limits
          steps: then requests lose few tokens per second, and prompts wait for fewer rounds. In a large mixture of
          experts, rounds beside prompts are almost free.
        """
        if not self.may_stretch or rounds.num_requests == 0 or backlog_tokens == 0:
            return False
        step_time, alone = self.step_time, Step(*rounds)
        fitting = step_time.chunk_tokens_within(self.target_ms, alone, backlog_tokens, backlog_context)
        if fitting >= backlog_tokens or BACKLOG_SHARE * self.prompt_ms(backlog_tokens) > self.target_ms:
            return False
        mixed = alone._replace(chunk_tokens=max(fitting, step_time.costs.chunk_tokens[0]))
        added_ms = step_time.ms(mixed) - step_time.ms(mixed._replace(num_requests=0, kv_tokens=0))
        return added_ms >= REST_SHARE * step_time.ms(alone)

    def step_limit_ms(
        self, rounds: StepRounds, backlog_tokens: int, backlog_context: float = 0.0, rests: bool = False
    ) -> float:
        """Return the maximum milliseconds of a step with these rounds and `backlog_tokens` pending prompt tokens.

        backlog_context: number of cached or computed tokens before a pending one, averaged over `backlog_tokens`.
        rests: the step leaves out the rounds of running requests (`may_rest`); the limit is the target.

        With rounds, the largest of three times:
        - the target;
        - `BACKLOG_SHARE` of the time of the backlog, up to `limit_ms`, because longer steps have a smaller share of
          rounds;
        - the rounds and `MIN_SHARE` of the target.

        Without rounds no request waits for its next token, so the limit is `limit_ms`. With "auto" it is longer by the
        smallest step if the whole backlog then fits, because a rest would take a step of its own.
        """
        if rests:
            return self.target_ms
        if rounds.num_requests == 0:
            if not self.may_stretch or backlog_tokens > self.max_step_tokens:
                return self.limit_ms
            stretched_ms, step = self.limit_ms + self._chunk_ms(1), Step(*rounds)
            fitting = self.step_time.chunk_tokens_within(stretched_ms, step, backlog_tokens, backlog_context)
            return stretched_ms + _ROUNDING_MS if fitting == backlog_tokens else self.limit_ms
        stretched_ms = min(BACKLOG_SHARE * self.prompt_ms(backlog_tokens), self.limit_ms)
        rounds_ms = self.step_time.ms(Step(*rounds))
        return max(self.target_ms, stretched_ms, rounds_ms + MIN_SHARE * self.target_ms)

    def growth_limit_ms(self, mean_gap_ms: float, waited_s: float) -> float:
        """Return the maximum milliseconds of rounds, including its own, that a request may join. Only for numeric
        targets, because "auto" is above all measured rounds.

        mean_gap_ms: shortest mean gap between tokens of a running request; 0 if unknown.
        waited_s: seconds that the request has waited.

        Above the target, rounds may be slightly longer than the mean gap, which then grows with them. So the batch
        grows slowly, and no gap of an answer is many times the others. The limit rises with the wait, so that no
        request starves.
        """
        waited = waited_s * 1000 / (PATIENT_TARGETS * self.target_ms)
        return max(self.target_ms, GROWTH_SHARE * self.target_ms + (1.0 + waited) * (mean_gap_ms or self.target_ms))

    def shape_limit_ms(self, mean_gap_ms: float) -> float:
        """Return the maximum milliseconds of rounds of a slower shape than the last, for numeric targets."""
        return max(self.target_ms, SHAPE_SHARE * self.target_ms + SHAPE_GAPS * mean_gap_ms)

    def _chunk_ms(self, num_tokens: int) -> float:
        """Return the milliseconds of a step with `num_tokens` prompt tokens and no rounds."""
        step_time = self.step_time
        return step_time.ms(Step(chunk_tokens=num_tokens)) if num_tokens else 0.0

    def step(
        self, rounds: StepRounds, backlog_tokens: int, backlog_context: float = 0.0, rests: bool = False
    ) -> "StepBudget":
        """Return the budget of the next step. Arguments as in `step_limit_ms`."""
        limit_ms = self.step_limit_ms(rounds, backlog_tokens, backlog_context, rests)
        return StepBudget(self.max_step_tokens, self.step_time, rounds, limit_ms)


class StepBudget:
    """The prompt tokens that the step being planned may still take. Without `step_time` only `max_tokens` limits them.

    tokens: prompt tokens taken so far.
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
        self._only_rounds = rounds
        self._rounds = Step(*rounds)
        self._limit_ms = limit_ms
        self._pairs = 0  # number of (token of a chunk, token before the chunk)
        self._offered = self._wanted = 0  # last result and argument of `room`
        self._is_full = False

    @property
    def tokens_left(self) -> int:
        """Prompt tokens that the step may still take, whatever its time."""
        return self._max_tokens - self.tokens

    def room(self, wanted: int, context: int) -> int:
        """Return how many of a prompt's next `wanted` tokens fit. context: tokens of the prompt before them."""
        self._wanted = wanted
        self._offered = 0 if self._is_full else self._fitting(min(wanted, self._max_tokens - self.tokens), context)
        return self._offered

    def take(self, count: int, context: int) -> None:
        """Take a chunk of `count` tokens. context: tokens of the prompt before it."""
        self.tokens += count
        self._pairs += count * context
        # A prompt that was cut fills the step: the next prompt adds no small piece.
        self._is_full = count == self._offered < self._wanted

    @property
    def ms_left(self) -> float:
        """Milliseconds until the step's limit."""
        if self._step_time is None:
            return math.inf
        return self._limit_ms - self._step_time.ms(self.planned(self._only_rounds))

    def spend(self, ms: float) -> None:
        """Take time for other work than tokens."""
        self._limit_ms -= ms

    def planned(self, rounds: StepRounds) -> Step:
        """Return the planned step, with `rounds` as its final ones."""
        context = self._pairs / self.tokens if self.tokens else 0.0
        return Step(*rounds, self.tokens, context)

    def _fitting(self, count: int, context: int) -> int:
        """Return how many of `count` tokens keep the step within its limit. The step's first prompt gets at least the
        smallest measured chunk, because smaller ones cost as much."""
        step_time = self._step_time
        if count <= 0 or step_time is None:
            return count
        # correction for the tokens taken so far, which have another context
        others = self._pairs - self.tokens * context

        fitting = step_time.chunk_tokens_within(self._limit_ms, self._rounds, self.tokens + count, context, others)
        return max(fitting - self.tokens, 0 if self.tokens else min(count, step_time.costs.chunk_tokens[0]))
