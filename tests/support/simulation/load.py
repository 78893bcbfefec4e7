"""Open-loop load on the scheduler without a GPU: what a policy makes of first tokens and of gaps between tokens.

    python -m tests.support.simulation.load --rates 4 12 20

The scheduler and the rule by which plans are sent are the real ones; time is simulated, and a step takes what a
`CostTable` says. Arrivals are Poisson; lengths of prompts and answers are lognormal; a round emits 2 to 4 tokens, 3 in
the mean. All figures are simulated; those of a GPU are in tests/bench/RESULTS.md.
"""

import argparse
import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.plan_timing import PlanTiming
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from aerie.workers.config import PLAIN, GraphCapture, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.runner.graphs.graph_keys import TOKEN_BUCKETS
from aerie.workers.scheduling.commands.command import Captured, Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.latency_budget import LatencyBudget
from aerie.workers.scheduling.plan import GraphCount, SamplingParams, StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.request import Owner, Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.graphs import CAPTURE_MS, SimulatedGraphs
from tests.support.simulation.scheduler import Clock

CHAIN = RoundShape(name="chain", width=4, max_new_tokens=4, draft_tokens=3)
SHAPES = RoundShapes((PLAIN, CHAIN), default=1)

# One H200, Llama-3.1-8B's dimensions, chain 3/1/4, as the start of a server measured it (`202c6b7`); as if
# captured steps took what their tokens need, padded to nothing.
_KV_MS = 131_072 / 4.0e12 * 1e3  # 131 KB of KV per token and round at 4.0 TB/s
H200 = CostTable(
    rounds=(
        RoundCosts((1, 8, 32, 64, 128), (4.3, 4.4, 4.8, 5.0, 5.4), (_KV_MS,) * 5),
        RoundCosts((1, 8, 32, 64, 128), (4.9, 5.0, 6.2, 8.4, 12.5), (_KV_MS,) * 5),
    ),
    chunk_requests=(0, 1, 8, 32, 65),
    chunk_tokens=(16, 64, 128, 256, 512, 768, 1024, 2048),
    chunk_ms=(
        (5.2, 5.4, 7.0, 8.4, 11.7, 16.2, 20.6, 40.5),
        (5.8, 8.0, 9.3, 9.5, 14.4, 18.3, 22.8, 42.5),
        (6.5, 8.2, 10.0, 10.6, 16.0, 20.2, 25.0, 45.0),
        (9.5, 9.9, 12.5, 14.5, 19.3, 24.0, 29.0, 49.0),
        (14.0, 15.0, 17.0, 19.0, 25.0, 30.0, 35.0, 55.0),
    ),
    mixed_shapes=(1,) * 5,
    ms_per_chunk_kv=1.9e-6,  # 512 tokens behind 8,192 take 8 ms more
)

# The same GPU with a tree 5/4/8, whose engine also has the chain's graphs: few requests run it beside prompts, more the
# chain.
TREE = RoundShape(name="tree", width=8, max_new_tokens=6, draft_tokens=16)
TREE_SHAPES = RoundShapes((PLAIN, CHAIN, TREE), default=2, adaptive=True)
TREE_H200 = CostTable(
    rounds=(*H200.rounds, RoundCosts((1, 8, 32, 64, 128), (5.4, 6.0, 10.4, 16.7, 32.4), (_KV_MS,) * 5)),
    chunk_requests=H200.chunk_requests,
    chunk_tokens=H200.chunk_tokens,
    chunk_ms=tuple(
        tuple(ms + more for ms in row) for row, more in zip(H200.chunk_ms, (0.0, 0.5, 1.0, 0.0, 0.0), strict=True)
    ),
    mixed_shapes=(2, 2, 2, 1, 1),
    ms_per_chunk_kv=H200.ms_per_chunk_kv,
)


def deepseek_rank() -> CostTable:
    """One of eight ranks of DeepSeek-V3 on an H200, MTP 3/1/4, 64 slots, after rounds and prompts alone that were
    measured. A step takes 2.5 ms for weights that every row reads, 22 for all experts, of
    which few rows read few, and what each row takes; from 768 prompt tokens on 5.5 more, of keys and values of 8,192
    tokens, which steps made when that was measured."""
    requests, tokens = (1, 8, 32, 64), (16, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192)
    per_kv = 61 * 1152 / 4.0e12 * 1e3  # ms: 1,152 bytes of each layer at 4.0 TB/s

    def forward(rows: int) -> float:
        experts = 256 * (1.0 - (31 / 32) ** rows) + 1
        each = float(np.interp(rows, (1, 256, 1024, 4096, 8192), (0.0165, 0.0165, 0.0185, 0.0235, 0.0265)))
        return 2.5 + 22.0 * experts / 257 + rows * each

    def chain(count: int, chunk: int) -> float:
        expanding = 0.0 if chunk == 0 else 5.5 if chunk >= 768 else 0.003 * chunk
        return forward(4 * count + chunk) + 0.7 + 0.008 * count + expanding

    mixed_requests = (0, *requests)
    return CostTable(
        rounds=(
            RoundCosts(requests, tuple(forward(count) for count in requests), (per_kv,) * 4),
            RoundCosts(requests, tuple(chain(count, 0) for count in requests), (per_kv,) * 4),
        ),
        chunk_requests=mixed_requests,
        chunk_tokens=tokens,
        chunk_ms=tuple(tuple(chain(count, chunk) for chunk in tokens) for count in mixed_requests),
        mixed_shapes=(1,) * len(mixed_requests),
        ms_per_chunk_kv=1e-5,
    )


def two_to_four(shape: int, rng: random.Random) -> int:
    """Tokens of a round, whatever its shape."""
    return rng.randint(2, 4)


def by_depth(shape: int, rng: random.Random) -> int:
    """Tokens of a round of `TREE_SHAPES` where each drafted token goes on with a chance: 3.0 of a chain, 3.1 of a tree,
    whose chance is lower here than it would be, since a tree must pay where it brings little."""
    chance = (0.0, 0.81, 0.72)[shape]
    count = 1
    while count < TREE_SHAPES[shape].max_new_tokens and rng.random() < chance:
        count += 1
    return count


def padded(costs: CostTable, buckets: Sequence[int] = TOKEN_BUCKETS) -> CostTable:
    """`costs` where a step with fewer prompt tokens than a bucket takes as long as with all of them."""
    beyond = [tokens for tokens in costs.chunk_tokens if tokens > buckets[-1]]
    starts = [1, *(bucket + 1 for bucket in buckets[:-1])]
    at = [x for pair in zip(starts, buckets, strict=True) for x in pair] + beyond
    rows = [np.interp(at, costs.chunk_tokens, row) for row in costs.chunk_ms]
    for row in rows:
        row[0 : 2 * len(buckets) : 2] = row[1 : 2 * len(buckets) : 2]
    return replace_struct(costs, chunk_tokens=tuple(at), chunk_ms=tuple(tuple(row.tolist()) for row in rows))


def replace_struct(costs: CostTable, **changes: object) -> CostTable:
    """A copy with other fields."""
    return CostTable(**{name: changes.get(name, getattr(costs, name)) for name in costs.__struct_fields__})


def eager_ms(tokens: int) -> float:
    """What a step with prompt tokens took beyond `H200` before such steps were captured: 24 ms of launches, unless the
    device took longer, and 5 ms of reading lengths and planning attention on the host."""
    return 5.0 + max(0.0, 24.0 - 0.0235 * tokens - 5.0)


@dataclass(frozen=True)
class Arrival:
    """A request that comes at `at_s` whatever the server does. prompt: its tokens, if others may share some of them.
    answer: tokens after which it stops; 0: `max_tokens`. tenant, weight, priority: see `Owner`."""

    at_s: float
    prompt_len: int
    max_tokens: int
    prompt: tuple[int, ...] = ()
    answer: int = 0
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


def poisson_load(
    rate: float, duration_s: float, seed: int, prompt_mean: int = 1024, prompt_cap: int = 4096, sigma: float = 0.8
) -> list[Arrival]:
    """Poisson arrivals; lognormal lengths: prompts about `prompt_mean`, answers about 256 tokens, at most 1,024."""
    rng = random.Random(f"{seed} {rate}")
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < duration_s:
        prompt_len = lognormal_length(rng, prompt_mean, prompt_cap, sigma)
        arrivals.append(Arrival(now, prompt_len, lognormal_length(rng, 256, 1024)))
    return arrivals


def lognormal_length(rng: random.Random, mean: int, most: int, sigma: float = 0.8) -> int:
    """Tokens of a prompt or an answer."""
    return min(most, max(1, round(mean * math.exp(rng.gauss(-sigma * sigma / 2, sigma)))))


class SimulatedRank:
    """A rank that takes `step_ms(plan, kv_tokens)` for a plan, one after the other.

    send_s: from making a plan until the device could begin it: transport, unpacking, launch. receive_s: from a step's
    end until the coordinator has its result.
    emitted: tokens of a round of a shape.
    graphs: told with every result, and captured when a plan says so; None: there are none to come.
    answers: tokens after which a request stops, by its number; others end at their limit.
    busy_s, idle_s: what the device computed, and waited for a plan while requests ran.
    """

    def __init__(
        self,
        num_slots: int,
        step_ms: Callable[[StepPlan, int], float],
        seed: int,
        emitted: Callable[[int, random.Random], int] = two_to_four,
        send_s: float = 0.0005,
        receive_s: float = 0.0002,
        graphs: SimulatedGraphs | None = None,
    ) -> None:
        self.busy_s = self.idle_s = 0.0
        self.results: deque[tuple[float, StepResult | CommandAnswer]] = deque()
        self._step_ms = step_ms
        self._rng = random.Random(seed)
        self._emitted = emitted
        self._send_s, self._receive_s = send_s, receive_s
        self._graphs = graphs
        self._free_s = 0.0
        self._seq_len = [0] * num_slots
        self._max_len = [0] * num_slots
        self._finished = [True] * num_slots
        self._stops = [False] * num_slots
        self.answers: dict[int, int] = {}

    def execute(self, plan: StepPlan, now: float) -> None:
        """Take over a plan that is made at `now`; its result is appended with the time when it can be read."""
        rounds = unpack_i32(plan.slots).tolist()
        took_s = self._step_ms(plan, sum(self._seq_len[slot] for slot in rounds)) / 1000
        arrived_s = now + self._send_s
        if rounds:
            self.idle_s += max(0.0, arrived_s - self._free_s)
        self._free_s = max(self._free_s, arrived_s) + took_s
        self.busy_s += took_s
        for init in plan.inits:
            stop_len = init.prompt_len + self.answers.get(init.number, math.inf)
            self._stops[init.slot] = stop_len < init.max_len
            self._seq_len[init.slot], self._max_len[init.slot] = init.num_cached, int(min(init.max_len, stop_len))
            self._finished[init.slot] = True
        counts = [self._round(slot, plan.shape) for slot in rounds]
        for chunk in plan.chunks:
            self._seq_len[chunk.slot] += len(chunk.tokens) // 4
        last = [chunk.slot for chunk in plan.chunks if chunk.next_token < 0]
        for slot in last:
            counts.append(1)
            self._finished[slot] = self._seq_len[slot] + 1 >= self._max_len[slot]
        finish = bytes(
            (FINISH_STOP if self._stops[slot] else FINISH_LENGTH) if n > 0 and self._finished[slot] else FINISH_NONE
            for slot, n in zip(rounds + last, counts, strict=True)
        )
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            counts=pack_i32(counts),
            tokens=pack_i32([1] * sum(counts)),
            finish=finish,
            accepted=pack_i32([max(0, n - 1) if plan.shape else -1 for n in counts[: len(rounds)]] + [-1] * len(last)),
            elapsed_s=self._free_s - arrived_s,
            took_s=took_s,
            graphs=GraphCount() if self._graphs is None else self._graphs.count,
        )
        self.results.append((self._free_s + self._receive_s, result))

    def carry_out(self, command: Command, now: float) -> None:
        """Capture a graph; the answer is appended with the time when it can be read."""
        if self._graphs is not None:
            self._graphs.capture()
        self._free_s = max(self._free_s, now + self._send_s) + CAPTURE_MS / 1000
        self.busy_s += CAPTURE_MS / 1000
        graphs = GraphCount() if self._graphs is None else self._graphs.count
        answer = CommandAnswer(command.epoch, command.step, 0, Captured(graphs))
        self.results.append((self._free_s + self._receive_s, answer))

    def _round(self, slot: int, shape: int) -> int:
        if self._finished[slot]:
            return 0
        count = min(self._emitted(shape, self._rng), self._max_len[slot] - 1 - self._seq_len[slot])
        self._seq_len[slot] += count
        self._finished[slot] = self._seq_len[slot] + 1 >= self._max_len[slot]
        return count


@dataclass
class Served:
    """When a request came and when its tokens did. tokens: of each event."""

    arrival: Arrival
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_tokens: int = 0


@dataclass
class LoadFigures:
    """What clients saw, and the shares of the time in which the device computed and waited for plans.

    hit_tokens, recomputed_tokens: prompt tokens that the prefix cache saved, and those that it had the KV of but no
        state, of a model with recurrent layers.
    """

    served: list[Served]
    busy: float = 0.0
    idle: float = 0.0
    hit_tokens: int = 0
    recomputed_tokens: int = 0

    def milliseconds(self, http_ms: float = 0.0) -> dict[str, tuple[float, float]]:
        """TTFT, TPOT and ITL, each (p50, p99). ITL: between two events of a stream, all streams together."""
        assert all(s.num_tokens == (s.arrival.answer or s.arrival.max_tokens) for s in self.served), "requests are left"
        several = [s for s in self.served if len(s.times_s) > 1]
        values = {
            "TTFT": [s.times_s[0] - s.arrival.at_s + http_ms / 1000 for s in self.served],
            "TPOT": [(s.times_s[-1] - s.times_s[0]) / (s.num_tokens - 1) for s in several],
            "ITL": [later - sooner for s in several for sooner, later in zip(s.times_s, s.times_s[1:], strict=False)],
        }
        return {
            name: (1000 * float(np.quantile(v, 0.5)), 1000 * float(np.quantile(v, 0.99))) for name, v in values.items()
        }


class FirstComeBudget(LatencyBudget):
    """Prompts are computed in the order of arrival."""

    def patience_s(self, num_tokens: int, backlog_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Policy:
    """What is simulated.

    costs: what the scheduler is told; None for a count of tokens.
    actual: what steps take.
    extra_ms: what a step with so many prompt tokens takes beyond that.
    by_deadline: order of prompts; else by arrival.
    just_in_time: hold plans back; else two are always in flight.
    noise: of a step's time, as the sigma of a lognormal factor.
    shapes: of rounds. emitted: tokens of a round of each.
    graphs: makes those of an engine; without, steps are padded to nothing.
    capture: how it captures while it serves.
    num_pages: of 16 tokens.
    num_snapshots: saved states of a model with recurrent layers.
    state_interval: tokens between those of an answer.
    """

    costs: CostTable | None = H200
    actual: CostTable = H200
    extra_ms: Callable[[int], float] = lambda tokens: 0.0
    config: SchedulerConfig = SchedulerConfig(max_running=128, max_step_tokens=2048, max_waiting=10**6)  # noqa: RUF009
    by_deadline: bool = True
    just_in_time: bool = True
    noise: float = 0.02
    shapes: RoundShapes = SHAPES
    emitted: Callable[[int, random.Random], int] = two_to_four
    graphs: Callable[[], SimulatedGraphs] | None = None
    capture: GraphCapture = GraphCapture()  # noqa: RUF009
    num_pages: int = 50_000
    num_snapshots: int | None = None
    state_interval: int = CacheConfig.state_interval


def simulate(
    arrivals: Sequence[Arrival],
    policy: Policy,
    seed: int = 0,
    again_s: Callable[[Scheduler, Request], float | None] = lambda scheduler, request: None,
) -> LoadFigures:
    """Serve `arrivals` to their end. again_s: seconds after which a request comes again that is not queued now; None:
    it is queued."""
    clock, rng = Clock(), random.Random(seed)
    has_texts = any(arrival.prompt for arrival in arrivals)
    cache = CacheConfig(page_size=16, prefix_cache=has_texts, state_interval=policy.state_interval)
    scheduler = Scheduler(
        policy.config,
        cache,
        policy.num_pages,
        8192,
        clock,
        policy.shapes,
        1,
        graph_capture=policy.capture,
        num_snapshots=policy.num_snapshots,
    )
    graphs = None if policy.graphs is None else policy.graphs()
    if graphs is not None:
        scheduler.captures.graphs = graphs.count
    if policy.costs is not None:
        scheduler.use_costs(policy.costs)
        if not policy.by_deadline:
            budget = scheduler._prefill.budget
            scheduler._prefill.budget = FirstComeBudget(**vars(budget))

    def step_ms(plan: StepPlan, kv_tokens: int) -> float:
        counts = [len(chunk.tokens) // 4 for chunk in plan.chunks]
        tokens, pairs = sum(counts), sum(n * chunk.start for n, chunk in zip(counts, plan.chunks, strict=True))
        num_requests, context, extra_ms = len(plan.slots) // 4, pairs / max(1, tokens), 0.0
        if graphs is not None:
            padded_to = graphs.padded(plan.shape, num_requests, tokens)
            if padded_to is None:
                extra_ms = eager_ms(tokens)
            else:
                num_requests, tokens = padded_to
        elif tokens:
            extra_ms = policy.extra_ms(tokens)
        ms = policy.actual.step_ms(plan.shape, num_requests, kv_tokens, tokens, context)
        return ms * rng.lognormvariate(0, policy.noise) + extra_ms

    rank = SimulatedRank(policy.config.max_running, step_ms, seed, policy.emitted, graphs=graphs)
    timing = PlanTiming(2)
    served = [Served(arrival) for arrival in arrivals]
    coming, num_submitted = deque(enumerate(arrivals)), 0
    plan_due_s = math.inf
    while True:
        result_s = rank.results[0][0] if rank.results else math.inf
        next_s = min(coming[0][1].at_s if coming else math.inf, result_s, plan_due_s)
        if next_s == math.inf:
            found = scheduler.prefix_cache
            counted = (0, 0) if found is None else (found.num_hit_tokens, found.num_recomputed_tokens)
            return LoadFigures(served, rank.busy_s / clock.now, rank.idle_s / clock.now, *counted)
        clock.now = max(clock.now, next_s)
        while coming and coming[0][1].at_s <= clock.now:
            number, arrival = coming.popleft()
            prompt = list(arrival.prompt) or [1] * arrival.prompt_len
            request = Request(
                str(number),
                prompt,
                SamplingParams(arrival.max_tokens),
                owner=Owner(arrival.tenant, arrival.weight, arrival.priority),
            )
            later_s = again_s(scheduler, request)
            if later_s is not None:
                insort(coming, (number, replace(arrival, at_s=clock.now + later_s)), key=lambda entry: entry[1].at_s)
                continue
            scheduler.submit(request)
            if arrival.answer:
                rank.answers[num_submitted] = arrival.answer
            num_submitted += 1
        if result_s <= clock.now:
            result = rank.results.popleft()[1]
            if isinstance(result, CommandAnswer):
                scheduler.command_answered([result])
            else:
                timing.record_result(clock.now, result.elapsed_s)
                _count(scheduler.apply(result), served, clock.now)
        plan_due_s = math.inf
        while scheduler.num_in_flight < 2:
            due_s = timing.due_s() if policy.just_in_time else -math.inf
            if clock.now < due_s:
                plan_due_s = due_s
                break
            plan = scheduler.schedule()
            if plan is None:
                command = scheduler.next_command()
                if command is not None:
                    rank.carry_out(command, clock.now)
                break
            timing.record_plan(clock.now, scheduler.expected)
            rank.execute(plan, clock.now)


def _count(outputs: Iterable[RequestOutput], served: list[Served], now: float) -> None:
    for output in outputs:
        request = served[int(output.request.request_id)]
        request.times_s.append(now)
        request.tokens.append(len(output.tokens))
        request.num_tokens += len(output.tokens)


def policies(target_ms: float | None, config: SchedulerConfig = Policy.config) -> dict[str, Policy]:
    """Each with one element more than the one before; the last is what is served. target_ms: kept whatever waits."""
    config = replace(config, itl_target_ms="auto" if target_ms is None else target_ms)
    return {
        "eager steps with prompts": Policy(None, config=config, extra_ms=eager_ms, just_in_time=False),
        "captured": Policy(None, config=config, just_in_time=False),
        "latency budget": Policy(config=config, by_deadline=False, just_in_time=False),
        "+ plans just in time": Policy(config=config, by_deadline=False),
        "+ prompts by deadline": Policy(config=config),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 12.0, 20.0], help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="loads whose requests are pooled")
    parser.add_argument("--prompt-mean", type=int, default=1024)
    parser.add_argument("--prompt-sigma", type=float, default=0.8)
    parser.add_argument("--targets", type=float, nargs="*", help="only the last policy, with these itl_target_ms")
    parser.add_argument(
        "--deepseek-rank", action="store_true", help="costs of a rank of DeepSeek-V3, not Llama-3.1-8B's"
    )
    parser.add_argument(
        "--just-started", action="store_true", help="only the last policy, with all graphs and with those of a start"
    )
    parser.add_argument("--buckets", type=int, nargs="*", default=TOKEN_BUCKETS, help="that steps are padded to")
    parser.add_argument("--http-ms", type=float, default=8.0, help="added to every first token")
    args = parser.parse_args()
    costs, config = H200, Policy.config
    if args.deepseek_rank:
        costs, config = deepseek_rank(), replace(config, max_running=64, max_step_tokens=8192)
    chosen = policies(None, config)
    if args.targets:
        chosen = {f"itl_target_ms {ms:g}": [*policies(ms, config).values()][-1] for ms in args.targets}
    unpadded, costs = costs, padded(costs, args.buckets) if args.buckets else costs
    if args.just_started:
        *_, policy = policies(None, config).values()
        chosen = {
            name: replace(policy, graphs=partial(SimulatedGraphs, SHAPES, config.num_slots, 2048, warm=is_warm))
            for name, is_warm in (("all graphs", True), ("just started", False))
        }
    print("| req/s | policy | TTFT p50 / p99 | TPOT p50 / p99 | ITL p50 / p99 | device idle |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rate in args.rates:
        for name, policy in chosen.items():
            actual = costs if policy.graphs is None else unpadded  # graphs pad
            policy = replace(policy, actual=actual, costs=policy.costs and costs)
            loads = [
                poisson_load(rate, args.seconds, seed, args.prompt_mean, 4096, args.prompt_sigma) for seed in args.seeds
            ]
            runs = [simulate(load, policy, seed) for seed, load in zip(args.seeds, loads, strict=True)]
            ms = LoadFigures([s for run in runs for s in run.served]).milliseconds(args.http_ms)
            cells = [f"{a:.3g} / {b:.3g}" for a, b in ms.values()]
            idle = f"{100 * sum(run.idle for run in runs) / len(runs):.2g} %"
            print("|", " | ".join([f"{rate:g}", name, *cells, idle]), "|", flush=True)


if __name__ == "__main__":
    main()
