"""How long a step may take, and so how many prompt tokens it carries beside its rounds. Asked by the scheduler; pure.

The constants were chosen by simulation (`tests.support.simulation.load`; figures in tests/bench/RESULTS.md).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from workers.config import SchedulerConfig
from workers.scheduling.step_time import Step, StepTime

MIN_SHARE = 0.25  # of the target, which prompts get beside rounds however long those are
MAX_STRETCH = 3.0  # times the target, if that is no number of the configuration
BACKLOG_SHARE = 0.5  # of what pending prompts take together, which a stretched step may take
_MANY_STEPS = 8  # of prompts, which stretch a step as far as it goes
PATIENCE = 2.0  # times what a prompt takes by itself, from its arrival to its deadline
MAX_PATIENCE = 4.0  # times the target, which that is at most while few prompts are pending
QUEUE_PATIENCE = 2.0  # times what the pending prompts take, which that is at most while many are
MIN_MASK_WAIT_MS = 5.0
_ROUNDING_MS = 1e-6


class StepRounds(NamedTuple):
    """The rounds of a step: of which shape, of how many requests, which have so many committed tokens together."""

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True)
class LatencyBudget:
    """step_time: predicts what steps take.
    target_ms: what a step with prompt tokens takes at most while few prompts wait.
    limit_ms: what it takes at most however many wait.
    max_step_tokens: prompt tokens of a step, however quick they are.
    """

    step_time: StepTime
    target_ms: float
    limit_ms: float
    max_step_tokens: int

    @classmethod
    def of(cls, config: SchedulerConfig, step_time: StepTime) -> "LatencyBudget":
        """What the configuration asks for. A target that is a number is kept whatever waits; "auto" gives way to a
        backlog."""
        target_ms = config.itl_target_ms
        if target_ms != "auto":
            return cls(step_time, target_ms, target_ms, config.step_token_limit)
        target_ms = step_time.itl_target_ms()
        return cls(step_time, target_ms, MAX_STRETCH * target_ms, config.step_token_limit)

    @property
    def gives_way(self) -> bool:
        """Whether a backlog stretches steps beyond the target."""
        return self.limit_ms > self.target_ms

    def updated(self) -> "LatencyBudget":
        """The same by what steps take now: a target that is no number follows the machine's pace."""
        if not self.gives_way:
            return self
        target_ms = self.step_time.itl_target_ms()
        return replace(self, target_ms=target_ms, limit_ms=MAX_STRETCH * target_ms)

    def prompt_ms(self, num_tokens: int) -> float:
        """Milliseconds that so many prompt tokens take where nothing else runs, in steps as long as they may be."""
        longest = min(self.max_step_tokens, self.step_time.costs.chunk_tokens[-1])
        whole, rest = divmod(num_tokens, longest)
        return (whole * self._chunk_ms(longest) if whole else 0.0) + self._chunk_ms(rest)

    def tokens_per_s(self, rounds: StepRounds) -> float:
        """Prompt tokens per second where many are pending, beside such rounds."""
        step = self.step(rounds, self.max_step_tokens * _MANY_STEPS)
        step.take(step.room(self.max_step_tokens, 0), 0)
        ms = self.step_time.ms(step.planned(rounds))
        return step.tokens * 1000.0 / ms if ms else 0.0

    def patience_s(self, num_tokens: int, backlog_tokens: int) -> float:
        """Seconds from a prompt's arrival to its deadline, while `backlog_tokens` prompt tokens are pending.

        A multiple of what computing the prompt takes, so that short prompts pass long ones. Bounded, so that no prompt
        is passed by those that come later: in a queue the bound grows with the queue, because a long prompt waits for
        most of it anyway, and a short one that passes adds little; without one, being passed is the only wait."""
        bound_ms = max(MAX_PATIENCE * self.target_ms, QUEUE_PATIENCE * self.prompt_ms(backlog_tokens))
        return min(PATIENCE * self.prompt_ms(num_tokens), bound_ms) / 1000

    def mask_wait_ms(self, expected_ms: float) -> float:
        """Milliseconds that a step of `expected_ms` may wait for masks: what it leaves of the target, within a quarter
        and a half of it. Ranks may wait half as long again where the process that fills masks does not answer."""
        target_ms = self.target_ms
        return max(MIN_MASK_WAIT_MS, min(target_ms / 2, max(target_ms / 4, target_ms - expected_ms)))

    def step_limit_ms(self, rounds: StepRounds, backlog_tokens: int) -> float:
        """What a step with these rounds may take while `backlog_tokens` prompt tokens are pending.

        A backlog stretches steps, because rounds between them keep prompts waiting, in proportion: what takes twice the
        target or less stretches none, and a queue is worked off in long steps. Prompts get `MIN_SHARE` at least. Where
        no request runs a round, none waits for its next token, and a step may be as long as a backlog's; unless the
        target is a number, it also carries what would be left of all prompts, if a step for that would take longer."""
        if rounds.num_requests == 0:
            all_ms = self.prompt_ms(backlog_tokens)
            gives_way = self.gives_way and backlog_tokens <= self.max_step_tokens
            is_near = all_ms <= self.limit_ms + self._chunk_ms(1)
            return max(self.limit_ms, all_ms + _ROUNDING_MS) if gives_way and is_near else self.limit_ms
        stretched_ms = min(BACKLOG_SHARE * self.prompt_ms(backlog_tokens), self.limit_ms)
        rounds_ms = self.step_time.ms(Step(*rounds))
        return max(self.target_ms, stretched_ms, rounds_ms + MIN_SHARE * self.target_ms)

    def _chunk_ms(self, num_tokens: int) -> float:
        """Milliseconds of a step with so many prompt tokens alone."""
        step_time = self.step_time
        return step_time.ms(Step(step_time.costs.default, chunk_tokens=num_tokens)) if num_tokens else 0.0

    def step(self, rounds: StepRounds, backlog_tokens: int) -> "StepBudget":
        """For the next step."""
        return StepBudget(self.max_step_tokens, self.step_time, rounds, self.step_limit_ms(rounds, backlog_tokens))


class StepBudget:
    """What a step has room for while it is filled with prompt tokens. Without `step_time` that is `max_tokens`.

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
        self._pairs = 0  # of a chunk's token and one of its request before the chunk
        self._offered = self._wanted = 0  # the last answer of `room`, and to what
        self._is_full = False

    def room(self, wanted: int, context: int) -> int:
        """How many of a prompt's next `wanted` tokens fit; of a step's first prompt at least as many as cost no more
        than one. context: the tokens before them."""
        self._wanted = wanted
        self._offered = 0 if self._is_full else self._most(min(wanted, self._max_tokens - self.tokens), context)
        return self._offered

    def take(self, count: int, context: int) -> None:
        """A chunk of `count` tokens after `context` others is planned."""
        self.tokens += count
        self._pairs += count * context
        self._is_full = count == self._offered < self._wanted  # no scrap of the next prompt fills up what is left

    def planned(self, rounds: StepRounds) -> Step:
        """The step with the prompt tokens that it was given, beside the rounds that it has in the end."""
        context = self._pairs / self.tokens if self.tokens else 0.0
        return Step(*rounds, self.tokens, context)

    def _most(self, count: int, context: int) -> int:
        """How many of `count` tokens keep the step within its limit; of a step's first prompt at least the smallest
        chunk that was measured, since none costs less."""
        step_time = self._step_time
        if count <= 0 or step_time is None:
            return count
        others = self._pairs - self.tokens * context  # what was taken has another context
        fitting = step_time.chunk_tokens_within(self._limit_ms, self._rounds, self.tokens + count, context, others)
        return max(fitting - self.tokens, 0 if self.tokens else min(count, step_time.costs.chunk_tokens[0]))
