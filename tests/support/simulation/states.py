"""What the prefix cache of a hybrid model saves under open-loop load, against what a cache without limits could save.

    python -m tests.support.simulation.states --snapshots 16 64 256

The scheduler, the prefix cache and the choice of states to save are the real ones. Time is simulated, no model runs.
Steps take what Qwen3.6-27B on one H200 is to take (`COSTS`: goals, not measurements), which decides how much runs at
once. All figures are simulated.
"""

import argparse
import random
from collections.abc import Sequence

import numpy as np

from attention.kv_cache.page_allocator import PageAllocator
from attention.kv_cache.prefix_cache import PrefixCache
from deploy.bench.arrivals import MIXES, Traffic
from tests.support.simulation.load import SHAPES, Arrival, LoadFigures, Policy, lognormal_length, simulate
from workers.config import SchedulerConfig
from workers.scheduling.cost_table import CostTable, RoundCosts

PAGE, MAX_LEN = 16, 8192
_TOKENS = (16, 64, 128, 256, 512, 1024, 2048)
_KV_MS = 65_536 / 4.0e12 * 1e3
COSTS = CostTable(
    rounds=(
        RoundCosts((1, 8, 32, 64), (13.2, 13.9, 16.2, 19.0), (_KV_MS,) * 4),
        RoundCosts((1, 8, 32, 64), (14.2, 15.3, 19.5, 26.0), (_KV_MS,) * 4),
    ),
    chunk_requests=(0, 1, 8, 32, 64),
    chunk_tokens=_TOKENS,
    chunk_ms=tuple(tuple(base + 0.073 * n for n in _TOKENS) for base in (13.0, 14.5, 15.5, 19.5, 26.0)),
    default=1,
    ms_per_chunk_kv=1e-6,
)


def prompt_heavy(rate: float, seconds: float) -> list[Arrival]:
    """Those of `aerie bench --mix prompt-heavy`: 40 % of the prompts begin with one of eight texts of 2,048 tokens."""
    traffic = Traffic(MIXES["prompt-heavy"], seconds, 10**6, 300, 16_000)
    return [Arrival(a.due_s, len(a.prompt), a.num_tokens, a.prompt) for a in traffic.arrivals(rate)]


def chats(rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Conversations of two to seven turns, 30 s apart. Each begins with one of eight system prompts of 700 tokens.
    Messages have about 150 tokens, answers about 250. One in six turns is asked again, for another answer."""
    rng = random.Random(seed)
    systems = [[rng.randrange(300, 16_000) for _ in range(700)] for _ in range(8)]
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        prompt, at_s = list(rng.choice(systems)), now
        for _ in range(rng.randint(2, 7)):
            prompt = prompt + [rng.randrange(300, 16_000) for _ in range(lognormal_length(rng, 150, 1000))]
            answer = lognormal_length(rng, 250, 1024)
            if len(prompt) + answer > MAX_LEN - 16:
                break
            arrivals.append(Arrival(at_s, len(prompt), answer, tuple(prompt)))
            if rng.random() < 1 / 6:
                arrivals.append(Arrival(at_s + 20, len(prompt), answer, tuple(prompt)))
            prompt, at_s = [*prompt, *[1] * answer], at_s + rng.uniform(20, 45)  # the simulated answer
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def possible_tokens(arrivals: Sequence[Arrival]) -> int:
    """What a cache without limits would save that has each earlier prompt and answer at once."""
    pages = sum((a.prompt_len + a.max_tokens) // PAGE + 1 for a in arrivals)
    allocator = PageAllocator(pages)
    cache, found = PrefixCache(allocator, PAGE, 1), 0
    for arrival in arrivals:
        found += cache.num_cached(np.array(arrival.prompt, np.int32))
        text = np.array([*arrival.prompt, *[1] * arrival.max_tokens], np.int32)
        own = allocator.allocate(len(text) // PAGE)
        cache.insert(text, own)
        allocator.release(own)
    return found


def hits(arrivals: Sequence[Arrival], num_pages: int, num_snapshots: int | None) -> LoadFigures:
    """Served by an engine of 64 slots."""
    config = SchedulerConfig(max_running=64, max_step_tokens=2048, max_waiting=10**6)
    policy = Policy(COSTS, COSTS, config=config, shapes=SHAPES, num_pages=num_pages, num_snapshots=num_snapshots)
    return simulate(arrivals, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=650_000, help="of KV")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rates", type=float, nargs=2, default=(3.0, 1.0), help="prompt-heavy requests, conversations")
    args = parser.parse_args()
    print("| load | snapshots | saved of what is possible | KV there, computed again | TTFT p50, p99 ms |")
    print("| --- | --- | --- | --- | --- |")
    loads = ("prompt-heavy", prompt_heavy(args.rates[0], args.seconds)), ("chats", chats(args.rates[1], args.seconds))
    for name, arrivals in loads:
        possible = possible_tokens(arrivals)

        def row(label: str, found: LoadFigures, name: str = name, possible: int = possible) -> None:
            p50, p99 = found.milliseconds()["TTFT"]
            saved, again = found.hit_tokens / possible, found.recomputed_tokens / possible
            print(f"| {name} | {label} | {saved:.1%} | {again:.1%} | {p50:.0f}, {p99:.0f} |", flush=True)

        row("attention only", hits(arrivals, args.tokens // PAGE, None))
        for count in args.snapshots:
            row(str(count), hits(arrivals, args.tokens // PAGE, count))


if __name__ == "__main__":
    main()
