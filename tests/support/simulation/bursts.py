"""Bursts of requests at an engine: which of them the expected wait would refuse, and which would have started in time.

    python -m tests.support.simulation.bursts [--models 8B 70B] [--sizes 100 500 2000 10000]

Scheduler and queue are the real ones; steps take what a `CostTable` says. Nothing is refused here: each request notes
its expected wait when it arrives, and later how long it did wait. For each limit, the table has the number of requests
that started within it, and the number that the expectation would have taken. Requests start in the order of arrival:
with deadlines a short prompt passes long ones, which then wait longer than if it had been refused.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from aerie.workers.config import PLAIN, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.load import (
    CHAIN,
    H200,
    SHAPES,
    TREE_H200,
    TREE_SHAPES,
    Arrival,
    Policy,
    by_depth,
    lognormal_length,
    simulate,
)

LIMITS_S = (30.0, 100.0, 300.0)  # the last is the default of `engine.queue_timeout_s`
PAUSE_S = 600.0  # from the first requests to the burst: they have ended

# Llama-2-70B on two H200: rounds of 1 to 32 requests as in tests/bench/RESULTS.md. Larger rounds and prompts are
# computed: 1.1 PFLOP/s of two cards from 256 rows on, 90 us a row before.
_SEVENTY_KV_MS = 163_840 / 4.0e12 * 1e3  # bytes of KV per token and card at 4.0 TB/s
_SIZES = (1, 8, 32, 64, 128)
_PLAIN_MS, _CHAIN_MS = (18.5, 18.9, 20.2, 22.5, 27.0), (20.0, 21.0, 27.6, 40.0, 70.0)
_CHUNKS, _CHUNK_MS = (16, 64, 128, 256, 512, 1024, 2048), (19.0, 22.5, 26.0, 38.0, 66.0, 128.0, 252.0)


def _seventy(rounds: dict[int, tuple[float, ...]]) -> CostTable:
    """The table of 70B on two cards. rounds: milliseconds by shape."""
    of_last = rounds[max(rounds)]
    beside = (0, 1, 8, 32, 64)
    chunk_ms = [_CHUNK_MS] + [
        tuple(ms + of_last[_SIZES.index(count)] - 17.0 for ms in _CHUNK_MS) for count in beside[1:]
    ]
    return CostTable(
        tuple(RoundCosts(_SIZES, ms, (_SEVENTY_KV_MS,) * 5) for ms in rounds.values()),
        beside,
        _CHUNKS,
        tuple(chunk_ms),
        mixed_shapes=(max(rounds),) * len(beside),
        ms_per_chunk_kv=8e-6,
    )


_PLAIN_H200 = CostTable(
    H200.rounds[:1],
    H200.chunk_requests,
    H200.chunk_tokens,
    tuple(
        tuple(max(ms - (H200.round_ms(1, count) - H200.round_ms(0, count)), 0.0) for ms in row)
        for count, row in zip(H200.chunk_requests, H200.chunk_ms, strict=True)
    ),
    mixed_shapes=(0,) * len(H200.chunk_requests),
    ms_per_chunk_kv=H200.ms_per_chunk_kv,
)


def _three(shape: int, rng: random.Random) -> int:
    """Tokens of a round of `SHAPES`, a chance of 0.7 each."""
    count = 1
    while shape and count < CHAIN.max_new_tokens and rng.random() < 0.7:
        count += 1
    return count


def _policy(costs: CostTable, shapes: RoundShapes, num_pages: int, **changes: object) -> Policy:
    config = SchedulerConfig(max_running=128, max_step_tokens=2048, max_waiting_bytes=2**40)
    return Policy(costs, costs, config=config, shapes=shapes, num_pages=num_pages, emitted=_three, **changes)  # type: ignore[arg-type]


ENGINES = {
    "8B": _policy(_PLAIN_H200, RoundShapes((PLAIN,)), 50_000),
    "8B chain": _policy(H200, SHAPES, 50_000),
    "8B adaptive": replace(_policy(TREE_H200, TREE_SHAPES, 50_000), emitted=by_depth),
    "8B, little KV": _policy(_PLAIN_H200, RoundShapes((PLAIN,)), 4_000),
    "70B": _policy(_seventy({0: _PLAIN_MS}), RoundShapes((PLAIN,)), 20_000),
    "70B chain": _policy(_seventy({0: _PLAIN_MS, 1: _CHAIN_MS}), SHAPES, 20_000),
}


class Answers(NamedTuple):
    """Lengths of a load. longest: mean tokens of an answer. limit: `max_tokens`; 0: the answer's length."""

    prompt: int
    answer: int
    limit: int = 0

    def arrival(self, at_s: float, rng: random.Random) -> Arrival:
        """One request: lengths between 0.7 and 1 of the largest without a limit, as in a benchmark with ignored ends,
        lognormal with one."""
        if not self.limit:
            return Arrival(at_s, *(max(1, round(rng.uniform(0.7, 1.0) * most)) for most in (self.prompt, self.answer)))
        prompt, answer = (lognormal_length(rng, mean, 4 * mean) for mean in (self.prompt, self.answer))
        return Arrival(at_s, prompt, self.limit, answer=answer if answer < self.limit else 0)


LENGTHS = {
    "1024/1024": Answers(1024, 1024),
    "512/64": Answers(512, 64),
    "1024/256 of 4096": Answers(1024, 256, 4096),
    "256/1024 of 4096": Answers(256, 1024, 4096),
}
HISTORIES: dict[str, Callable[[Answers, random.Random], Iterator[Arrival]]] = {
    "idle": lambda lengths, rng: iter(()),
    "one": lambda lengths, rng: iter([lengths.arrival(0.0, rng)]),
    "load": lambda lengths, rng: (lengths.arrival(0.5 * index, rng) for index in range(200)),
}


@dataclass(frozen=True)
class Outcome:
    """in_time: requests of the burst that started within a limit. taken: those that the expectation would have taken
    before the first refusal."""

    in_time: int
    taken: int

    @property
    def error(self) -> float:
        return self.taken / self.in_time - 1 if self.in_time else float(self.taken)


def burst(engine: str, history: str, lengths: str, size: int, seed: int = 0) -> dict[float, Outcome]:
    """Outcomes by limit."""
    rng, of = random.Random(f"{seed} {lengths}"), LENGTHS[lengths]
    former = list(HISTORIES[history](of, rng))
    arrivals = former + [of.arrival(PAUSE_S if former else 0.0, rng) for _ in range(size)]
    expected_s, requests = list[float | None](), list[Request]()

    def again_s(scheduler: Scheduler, request: Request) -> None:
        expected_s.append(scheduler.admission.wait_s())
        requests.append(request)

    simulate(arrivals, replace(ENGINES[engine], by_deadline=False), seed, again_s)
    waited_s = sorted(request.queue_s for request in requests[len(former) :])
    told_s = expected_s[len(former) :]
    return {
        limit: Outcome(
            sum(waited <= limit for waited in waited_s),
            next((i for i, told in enumerate(told_s) if told is not None and told > limit), size),
        )
        for limit in LIMITS_S
    }


def table(engines: Sequence[str], histories: Sequence[str], lengths: Sequence[str], sizes: Sequence[int]) -> None:
    """Print a row for each burst."""
    columns = " | ".join(f"{limit:g} s: in time | taken" for limit in LIMITS_S)
    print(f"| engine | before | prompt/answer | burst | {columns} |")
    print("| --- | --- | --- | --- |" + " --- | --- |" * len(LIMITS_S))
    for engine, history, length, size in itertools.product(engines, histories, lengths, sizes):
        found = burst(engine, history, length, size).values()
        cells = " | ".join(f"{outcome.in_time:,} | {outcome.taken:,} ({outcome.error:+.0%})" for outcome in found)
        print(f"| {engine} | {history} | {length} | {size:,} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--histories", nargs="+", default=list(HISTORIES), choices=list(HISTORIES))
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 500, 2000, 10_000])
    args = parser.parse_args()
    table(args.engines, args.histories, args.lengths, args.sizes)


if __name__ == "__main__":
    main()
