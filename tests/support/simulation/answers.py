"""Simulates short answers: the real scheduler with two steps in flight, over rounds and prompts whose times come from a
table.

Tests the choice of shapes while prompts arrive all the time. Steps of a small model wait for the host, which takes
equally long for every shape. Time is simulated and everything is seeded.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from aerie.attention.config import CacheConfig
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NONE
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import GraphCount, SamplingParams, StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from aerie.workers.scheduling.shapes.shape_choice import Load
from aerie.workers.scheduling.step_time import StepTime
from tests.support.simulation.scheduler import Clock
from tests.support.simulation.shapes import CHAIN, TREE, chances_of, misread

SLOTS = 32
WARM_UP_STEPS = 200

# milliseconds of a round of the embedded models on an H200, and of what the host does for it
BATCHES = (1, 8, 32)
PLAIN_MS, CHAIN_MS, TREE_MS = (0.12, 0.15, 0.25), (0.33, 0.38, 0.60), (0.47, 0.56, 1.20)
ROUNDS_MS = {CHAIN: (PLAIN_MS, (0.20, 0.23, 0.40), CHAIN_MS), TREE: (PLAIN_MS, CHAIN_MS, (0.40, 0.48, 0.80), TREE_MS)}
HOST_MS = 0.42
EVALUATION_MS = 0.45  # of the host, for one evaluation of all shapes
# each draft's chance by depth, as the embedded pair's chat answers to held-out prompts had them: 2.99, 3.83 and 4.52
# tokens a round
MEASURED = ((), (0.806, 0.799, 0.833), (0.869, 0.842, 0.906, 0.85), (0.893, 0.877, 0.873, 0.919, 0.842))


@dataclass(frozen=True)
class Pair:
    """A target and its draft on a device.

    chances: [shapes] of [depth], with which each draft is accepted if its parent was.
    costs: what the device takes.
    host_ms: what the host takes to launch a step, during which the device may run the one before.
    noise: of a step's time, as the sigma of a lognormal factor.
    told: step times that the scheduler starts from; None: the true ones.
    slow_first: how many times as long as others the host takes to launch a shape at a number of requests for the first
        time.
    """

    shapes: RoundShapes
    chances: Sequence[Sequence[float]]
    costs: CostTable
    host_ms: float
    noise: float = 0.05
    told: CostTable | None = None
    slow_first: float = 1.0


def embedded_pair(shapes: RoundShapes, mean: float, host_ms: float = HOST_MS) -> Pair:
    """The embedded models on an H200. mean: tokens of a round of a chain of four drafts."""
    rounds = tuple(RoundCosts(BATCHES, ms, (0.0,) * 3) for ms in ROUNDS_MS[shapes])
    chunks = tuple(
        tuple(alone + ms for ms in (0.30, 0.32, 0.40)) for alone in (0.05, *ROUNDS_MS[shapes][shapes.default])
    )
    costs = CostTable(rounds, (0, *BATCHES), (16, 128, 512), chunks, (shapes.default,) * 4)
    chances = [(chance,) * shape.depth for chance, shape in zip(chances_of(shapes, mean), shapes.shapes, strict=True)]
    return Pair(shapes, chances, costs, host_ms)


def measured_tree(told: Sequence[float] = (1.0,) * 4, slow_first: float = 1.0) -> Pair:
    """The embedded models with the acceptance that trees have there; 16 rows take 8 % longer than 8. told: by what
    factor the start measured each shape too slow."""
    rounds = tuple(RoundCosts(BATCHES, (ms, ms * 1.08, ms * 1.3), (0.0,) * 3) for ms in (0.12, 0.33, 0.40, 0.43))
    chunks = tuple(tuple(alone + ms for ms in (0.30, 0.32, 0.40)) for alone in (0.05, *rounds[TREE.default].ms))
    costs = CostTable(rounds, (0, *BATCHES), (16, 128, 512), chunks, (TREE.default,) * 4)
    wrong = misread(costs, [(factor,) * len(BATCHES) for factor in told])
    return Pair(TREE, MEASURED, costs, HOST_MS, told=wrong, slow_first=slow_first)


class Slot:
    """kv: committed tokens. left: tokens until the answer's end. drafted: shape of the tree that it has. prompt: the
    last token of its prompt. emitted: tokens of its answer so far."""

    def __init__(self) -> None:
        self.kv = self.max_len = self.left = self.drafted = self.prompt = self.emitted = 0


class PairRank:
    """Implements `aerie.workers.runner.executor.StepExecutor` over simulated time.

    reason: of the shape of the step that is submitted.
    leg_ms, leg_tokens: milliseconds and tokens of steps so far, by reason and shape.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self.costs: CostTable | None = pair.told or pair.costs
        self.graphs = GraphCount()
        self.clock = Clock()
        self._pair = pair
        self._random = random.Random(seed)
        self._slots = [Slot() for _ in range(SLOTS)]
        self._pending: deque[tuple[float, StepResult]] = deque()
        self._free_s = 0.0
        self._launched: set[tuple[int, int]] = set()
        self.reason: Callable[[], str] = lambda: ""
        self.leg_ms: dict[tuple[str, str], float] = {}
        self.leg_tokens: Counter[tuple[str, str]] = Counter()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def ready(self) -> bool:
        return bool(self._pending) and self.clock.now >= self._pending[0][0]

    def take(self) -> StepResult:
        done_s, result = self._pending.popleft()
        self.clock.now = max(self.clock.now, done_s)
        return result

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        raise AssertionError("no graph waits")

    def submit(self, plan: StepPlan) -> None:
        pair, started_s = self._pair, self.clock.now
        num_requests = len(plan.slots) // 4
        num_chunk_tokens = sum(len(chunk.tokens) // 4 for chunk in plan.chunks)
        kv_tokens = sum(self._slots[slot].kv for slot in unpack_i32(plan.slots).tolist())
        result = self.result(plan)
        took_ms = pair.costs.step_ms(plan.shape, num_requests, kv_tokens, num_chunk_tokens)
        kind = plan.shape, num_requests
        is_slow = num_requests > 0 and not num_chunk_tokens and kind not in self._launched
        self._launched.add(kind)
        self.clock.now += pair.host_ms / 1e3 * (pair.slow_first if is_slow else 1.0)
        before_s = self._free_s
        self._free_s = max(self._free_s, self.clock.now) + took_ms / 1e3 * self._random.lognormvariate(0.0, pair.noise)
        elapsed_s, took_s = self._free_s - started_s, self._free_s - max(before_s, started_s)
        self._pending.append((self._free_s, msgspec.structs.replace(result, elapsed_s=elapsed_s, took_s=took_s)))
        leg = self.reason(), pair.shapes[plan.shape].name
        self.leg_ms[leg] = self.leg_ms.get(leg, 0.0) + (self._free_s - before_s) * 1e3
        self.leg_tokens[leg] += len(result.tokens) // 4

    def result(self, plan: StepPlan) -> StepResult:
        """Run the step."""
        for init in plan.inits:
            slot = self._slots[init.slot]
            slot.kv, slot.max_len, slot.left = init.num_cached, init.max_len, 0
        rounds = [self._slots[slot] for slot in unpack_i32(plan.slots).tolist()]
        found = [self.min_entropy(slot) for slot in rounds]
        any_known = any(nats is not None for nats in found)
        found += [None] * sum(chunk.next_token < 0 for chunk in plan.chunks)
        entries = [(slot, *self._round(slot, plan.shape)) for slot in rounds]
        for chunk in plan.chunks:
            slot = self._slots[chunk.slot]
            slot.kv += len(chunk.tokens) // 4
            if chunk.next_token < 0:
                slot.left, slot.emitted = slot.max_len - slot.kv - 1, 1
                slot.prompt = int(unpack_i32(chunk.tokens)[-1])
                entries.append((slot, 1, -1))
        for (slot, _, _), drafts in zip(entries, plan.drafting or bytes(len(entries)), strict=True):
            slot.drafted = plan.next_shape if drafts else 0
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            counts=pack_i32([count for _, count, _ in entries]),
            tokens=pack_i32([1] * sum(count for _, count, _ in entries)),
            finish=bytes(FINISH_LENGTH if count and slot.left <= 0 else FINISH_NONE for slot, count, _ in entries),
            accepted=pack_i32([accepted for _, _, accepted in entries]),
            elapsed_s=0.0,
            min_entropies=pack_i32([-1 if nats is None else round(1e3 * nats) for nats in found]) if any_known else b"",
        )

    def _round(self, slot: Slot, shape: int) -> tuple[int, int]:
        """Tokens that a round emits, and drafts that it accepts: -1 if it has none."""
        if slot.left <= 0:
            return 0, -1
        shapes, verified = self._pair.shapes, min(slot.drafted, shape)
        most = min(shapes[slot.drafted].max_new_tokens, shapes[shape].max_new_tokens) - 1
        accepted = self.accepts(slot, verified, most)
        count = min(1 + accepted, slot.left)
        slot.left -= count
        slot.kv += count
        slot.emitted += count
        return count, accepted if verified else -1

    def min_entropy(self, slot: Slot) -> float | None:
        """Nats of the target's min-entropy after the newest token; None if ranks do not tell."""
        return None

    def accepts(self, slot: Slot, shape: int, most: int) -> int:
        """Drafts of at most `most` that a round of a shape accepts."""
        accepted = 0
        while accepted < most and self._random.random() < self._pair.chances[shape][accepted]:
            accepted += 1
        return accepted


class Answers:
    """An engine that answers. choose: the shape of the next step, given whether prompts wait; None: `ShapeChoice`."""

    def __init__(
        self,
        pair: Pair,
        seed: int = 0,
        choose: Callable[[bool], int] | None = None,
        rank: Callable[[Pair, int], PairRank] = PairRank,
    ) -> None:
        self.rank = rank(pair, seed)
        self.num_evaluations = 0

        def chosen(shapes: RoundShapes) -> int:
            assert choose is not None
            queues = self.scheduler.queues
            return choose(bool(queues.prefilling or queues.waiting))

        self.scheduler = self._new_scheduler(pair)
        self.scheduler.rounds.choose_shape = None if choose is None else chosen
        self.scheduler.use_costs(pair.told or pair.costs)
        self.rank.reason = lambda: self.scheduler.shape_choice.reason.value
        self._charge_evaluations()
        self._engine = LocalEngine(self.scheduler, self.rank)
        self._random = random.Random(seed)
        self._num_requests = 0

    def _new_scheduler(self, pair: Pair) -> Scheduler:
        config, cache = SchedulerConfig(max_running=SLOTS, max_step_tokens=512), CacheConfig(16, prefix_cache=False)
        return Scheduler(config, cache, 64 * SLOTS, 1024, self.rank.clock, pair.shapes, 1)

    def _charge_evaluations(self) -> None:
        """Evaluations of the shapes take the host's time, too."""
        choice = self.scheduler.shape_choice
        evaluate = choice._evaluate

        def charged(load: Load, step_time: StepTime) -> None:
            self.num_evaluations += 1
            self.rank.clock.now += EVALUATION_MS / 1e3
            evaluate(load, step_time)

        choice._evaluate = charged  # type: ignore[method-assign]

    def tokens_per_ms(self, concurrency: int, count: int, mean_tokens: int = 64) -> float:
        """Return tokens per ms of `count` answers, `concurrency` at a time, to prompts of 40 to 120 tokens."""
        asked = []
        for _ in range(count):
            max_tokens = self._random.randint(mean_tokens // 2, mean_tokens * 3 // 2)
            asked.append(([1] * self._random.randint(40, 120), max_tokens))
        return self.rate(concurrency, asked)

    def rate(self, concurrency: int, asked: Sequence[tuple[list[int], int]]) -> float:
        """Return tokens per ms of answers to prompts, with each answer's tokens."""
        started_s, first = self.rank.clock.now, self._num_requests
        self._num_requests += len(asked)
        requests = [
            Request(str(first + i), prompt, SamplingParams(max_tokens, 0.0))
            for i, (prompt, max_tokens) in enumerate(asked)
        ]
        self._engine.run(requests, concurrency)
        return sum(len(request.output) for request in requests) / (self.rank.clock.now - started_s) / 1e3

    def warm_up(self, concurrency: int) -> None:
        """Answer until the choice has had its steps to learn."""
        while self.scheduler.stats.num_steps < WARM_UP_STEPS:
            self.tokens_per_ms(concurrency, concurrency)

    @property
    def steps(self) -> Counter[str]:
        """Steps so far, by shape and reason."""
        stats = self.scheduler.stats
        return Counter(stats.steps_by_shape) + Counter(stats.steps_by_reason)
