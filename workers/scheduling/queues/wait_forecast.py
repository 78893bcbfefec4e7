"""Simulates the queue to estimate when a new request would start. Used by `aerie.workers.scheduling.queues.admission`;
pure.

The simulation admits requests, computes prompts, runs rounds and preempts as the scheduler does, but many steps at a
time: until the next prompt is computed, the next answer ends, or the pages run out.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.latency_budget import LatencyBudget, StepRounds
from aerie.workers.scheduling.step_time import Step

# Rounds in which a finished request keeps its slot: half a round for tokens beyond its end, and the round that was
# planned before its last result.
ROUNDS_AFTER_END = 1.5
_NUM_BATCHES = 16  # batch sizes for which steps are predicted; and all up to `_EXACT_BATCHES`
_EXACT_BATCHES = 8
MAX_EVENTS = 16  # per group of requests; without preemption, two suffice
_MANY_STEPS = 8  # prompt tokens, in full steps, beyond which more change nothing


class Work(NamedTuple):
    """Equal requests.

    num_requests: requests.
    prompt_tokens: tokens to compute before each one's next token; 0: it decodes.
    kv_tokens: each one's KV tokens, including `prompt_tokens`.
    answer_tokens: tokens that each one has still to generate.
    """

    num_requests: int
    prompt_tokens: float
    kv_tokens: float
    answer_tokens: float


class StepForecast:
    """Expected steps of any batch, from current step times and acceptance.

    tokens: expected tokens per request and round, by shape; 1.0 for all if no request uses drafts.
    kv_tokens: mean KV tokens of a request while it decodes.
    context_tokens: mean tokens before a prompt's chunk.
    """

    def __init__(
        self,
        budget: LatencyBudget,
        shapes: RoundShapes,
        tokens: Sequence[float],
        kv_tokens: float,
        context_tokens: float,
    ) -> None:
        self._budget = budget
        self._shapes = shapes
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._context_tokens = context_tokens
        self._unit = max(1, budget.step_time.costs.rounds[0].num_requests[-1] // _NUM_BATCHES)
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}

    def step(self, num_requests: int, pending_tokens: float) -> tuple[float, float, float]:
        """Return a step's tokens per request, its prompt tokens, and its milliseconds.

        pending_tokens: prompt tokens of admitted requests.
        """
        batch = num_requests if num_requests <= _EXACT_BATCHES else round(num_requests / self._unit) * self._unit
        quarter_octaves = round(4 * math.log2(pending_tokens)) if pending_tokens >= 1.0 else -1
        key = batch, quarter_octaves
        if key not in self._known:
            self._known[key] = self._predict(batch, round(2 ** (quarter_octaves / 4)) if quarter_octaves >= 0 else 0)
        tokens, chunk_tokens, ms = self._known[key]
        return tokens, min(chunk_tokens, pending_tokens), ms

    def _predict(self, num_requests: int, pending_tokens: int) -> tuple[float, float, float]:
        """Compute `step`. The prompt tokens are infinite if one step computes all pending ones."""
        budget = self._budget
        shape = self._shape(num_requests, pending_tokens > 0)
        rounds = StepRounds(shape, num_requests, int(num_requests * self._kv_tokens))
        chunk_tokens, step = 0.0, Step(*rounds)
        if pending_tokens:
            pending_tokens = min(pending_tokens, _MANY_STEPS * budget.max_step_tokens)
            context = int(self._context_tokens)
            room = budget.step(rounds, pending_tokens, context).room(pending_tokens, context)
            step = step._replace(chunk_tokens=max(1, room), context_tokens=self._context_tokens)
            chunk_tokens = math.inf if room == pending_tokens else float(step.chunk_tokens)
        return self._tokens[shape], chunk_tokens, budget.step_time.ms(step)

    def _shape(self, num_requests: int, with_prompts: bool) -> int:
        """Return the shape that rounds of so many requests are expected to have."""
        shapes, tokens = self._shapes, self._tokens
        if not shapes.adaptive:
            return shapes.default
        kv_tokens, step_time = int(num_requests * self._kv_tokens), self._budget.step_time
        restricted = with_prompts and not shapes.eager
        allowed = shapes.mixed_shapes(num_requests) if restricted else tuple(range(len(shapes)))
        return max(
            allowed, key=lambda shape: tokens[shape] / step_time.ms(Step(shape, max(1, num_requests), kv_tokens))
        )


class QueueSimulation:
    """Runs `running`, and `waiting` in its order.

    num_slots: maximum requests that run.
    num_kv_tokens: KV tokens of the pool.
    reserved_tokens: KV tokens that must be free for each decoding request when another one is admitted.
    """

    def __init__(
        self,
        running: Sequence[Work],
        waiting: Sequence[Work],
        steps: StepForecast,
        num_slots: int,
        num_kv_tokens: int,
        reserved_tokens: int = 1,
    ) -> None:
        self._steps = steps
        self._waiting = deque((work, index) for index, work in enumerate(waiting))
        self._num_free_slots, self._num_kv_tokens = num_slots, float(num_kv_tokens)
        self._reserved_tokens = reserved_tokens
        self._prompts: deque[tuple[Work, int]] = deque()  # admitted; the first one is being computed
        self._pending_tokens = 0.0  # prompt tokens of all of them
        self._left_tokens = 0.0  # prompt tokens of the first one
        self._decoding: dict[int, tuple[Work, float]] = {}  # in order of admission, with `_round_tokens` at the start
        self._ends: list[tuple[float, int]] = []  # heap: (`_round_tokens` at the end, key); also of preempted ones
        self._num_decoding, self._kv_tokens = 0, 0.0
        self._ms = 0.0
        self._round_tokens = 0.0  # tokens that a request has generated which decodes since the simulation's start
        self._keys = itertools.count()
        self._start_ms: dict[int, float] = {}
        for work in running:
            self._admit(work, -1)

    def start_s(self) -> list[float]:
        """Return the seconds until the first step of each of `waiting`; a lower bound for those that have not started
        after `MAX_EVENTS` events for each, because preemption may repeat."""
        num_waiting = len(self._waiting)
        for _ in range(MAX_EVENTS * (num_waiting + len(self._decoding) + len(self._prompts))):
            while self._waiting and self._has_room(self._waiting[0][0]):
                self._admit(*self._waiting.popleft())
            if len(self._start_ms) == num_waiting:
                break
            self._advance()
        return [self._start_ms.get(index, self._ms) / 1000 for index in range(num_waiting)]

    def _has_room(self, work: Work) -> bool:
        """Return whether slots and pages suffice to admit the requests."""
        if not self._prompts and not self._num_decoding:
            return True
        kv_tokens = self._kv_tokens + self._num_decoding * self._reserved_tokens + work.num_requests * work.kv_tokens
        return work.num_requests <= self._num_free_slots and kv_tokens <= self._num_kv_tokens

    def _admit(self, work: Work, index: int) -> None:
        """Give requests slots: queue their prompts, or decode. index: their number in `waiting`; -1 for others."""
        self._num_free_slots -= work.num_requests
        self._kv_tokens += work.num_requests * work.kv_tokens
        if work.prompt_tokens <= 0.0:
            if index >= 0:
                self._start_ms[index] = self._ms
            self._begin_decoding(work)
            return
        self._prompts.append((work, index))
        self._pending_tokens += work.num_requests * work.prompt_tokens
        if len(self._prompts) == 1:
            self._begin_prompt()

    def _begin_prompt(self) -> None:
        """Begin to compute the first of the queued prompts."""
        work, index = self._prompts[0]
        self._left_tokens = work.num_requests * work.prompt_tokens
        if index >= 0:
            self._start_ms[index] = self._ms

    def _begin_decoding(self, work: Work) -> None:
        """Decode requests whose prompts are computed, until their answers end."""
        key = next(self._keys)
        self._decoding[key] = work, self._round_tokens
        self._num_decoding += work.num_requests
        heapq.heappush(self._ends, (self._round_tokens + work.answer_tokens, key))

    def _end_decoding(self, key: int) -> Work:
        """Remove a decoding group, which is finished or preempted. Return its work if it must start again."""
        work, start_tokens = self._decoding.pop(key)
        tokens = self._round_tokens - start_tokens  # that each of its requests has generated
        kv_tokens = work.kv_tokens + tokens
        self._num_decoding -= work.num_requests
        self._num_free_slots += work.num_requests
        self._kv_tokens -= work.num_requests * kv_tokens
        return Work(work.num_requests, kv_tokens, kv_tokens, work.answer_tokens - tokens)

    def _next_tokens(self) -> float:
        """Return the prompt tokens that the next steps may compute: at least one while there are prompts, although
        scaling and rounding may leave less."""
        if not self._prompts:
            return 0.0
        # the first group's requests come one after the other in fact, not at once
        others = self._left_tokens - min(self._left_tokens, self._prompts[0][0].prompt_tokens)
        return max(1.0, self._pending_tokens - others)

    def _advance(self) -> None:
        """Run steps up to the next event, and apply it."""
        while self._ends and self._ends[0][1] not in self._decoding:
            heapq.heappop(self._ends)
        tokens, chunk_tokens, ms = self._steps.step(self._num_decoding, self._next_tokens())
        growth = tokens * self._num_decoding
        until_prompt = self._left_tokens / chunk_tokens if self._prompts else math.inf
        until_end = (self._ends[0][0] - self._round_tokens) / tokens + ROUNDS_AFTER_END if self._ends else math.inf
        until_full = (self._num_kv_tokens - self._kv_tokens) / growth if len(self._decoding) > 1 else math.inf
        num_steps = max(0.0, min(until_prompt, until_end, until_full))
        self._ms += num_steps * ms
        self._round_tokens += num_steps * tokens
        self._kv_tokens += num_steps * growth
        if self._prompts:
            self._left_tokens -= num_steps * chunk_tokens
            self._pending_tokens -= num_steps * chunk_tokens
        if until_full < min(until_prompt, until_end):
            self._waiting.appendleft((self._end_decoding(next(reversed(self._decoding))), -1))
        elif until_prompt <= until_end:
            self._begin_decoding(self._prompts.popleft()[0])
            if self._prompts:
                self._begin_prompt()
            else:
                self._pending_tokens = 0.0
        else:
            self._end_decoding(heapq.heappop(self._ends)[1])
