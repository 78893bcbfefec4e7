"""What the prefix cache of a hybrid model saves under open-loop load, against what any cache could save.

    python -m tests.support.simulation.states --snapshots 64 128 256 --models qwen3.6-27b qwen3.6-35b-a3b

The scheduler, the prefix cache and the choice of states to save are the real ones. Time is simulated, no model runs.
Steps take what Qwen3.6-27B on one H200 is to take (`COSTS`: goals, not measurements), which decides how much runs at
once. Columns: prompt tokens saved, of what a cache without limits saves; the same of what so many states could save if
all arrivals were known before (`prefix_loads.possible_tokens`); tokens with KV that ran again. All figures are
simulated.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from aerie.workers.config import SchedulerConfig
from aerie.workers.engine_layout import MAX_SNAPSHOTS, snapshot_share
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from tests.support.simulation.load import SHAPES, Arrival, LoadFigures, Policy, simulate
from tests.support.simulation.prefix_loads import PAGE, agents, chats, possible_tokens, prompt_heavy

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
    mixed_shapes=(1,) * 5,
    ms_per_chunk_kv=1e-6,
)


@dataclass(frozen=True)
class Memory:
    """Memory of one H200, computed from the dimensions as `aerie plan` does.

    for_cache: bytes for pages and saved states, besides the weights and 64 slots.
    per_page: bytes of a page in target and draft.
    per_state: bytes of a state in float32.
    """

    for_cache: float
    per_page: int
    per_state: float

    def sizes(self, state_bytes: int) -> tuple[int, int]:
        """Pages and snapshots of `state_snapshots: auto`, with numbers of `state_bytes` bytes in the states."""
        per_state = int(self.per_state * state_bytes / 4)
        share = snapshot_share(per_state, self.per_page, PAGE)
        snapshots = min(MAX_SNAPSHOTS, int(share * self.for_cache) // per_state)
        return int(self.for_cache - snapshots * per_state) // self.per_page, snapshots


MEMORY = {
    "qwen3.6-27b": Memory(62e9, PAGE * 17 * 4096, 154e6),
    "qwen3.6-35b-a3b": Memory(52e9, PAGE * 11 * 2048, 65e6),
}


def hits(arrivals: Sequence[Arrival], num_pages: int, num_snapshots: int | None) -> LoadFigures:
    """Served by an engine of 64 slots."""
    config = SchedulerConfig(max_running=64, max_step_tokens=2048, max_waiting=10**6)
    policy = Policy(COSTS, COSTS, config=config, shapes=SHAPES, num_pages=num_pages, num_snapshots=num_snapshots)
    return simulate(arrivals, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument(
        "--models", nargs="*", choices=MEMORY, default=[], help="with the sizes that they get on an H200"
    )
    parser.add_argument("--loads", nargs="+", choices=("prompt-heavy", "chats", "agents"), default=None)
    parser.add_argument("--tokens", type=int, default=650_000, help="of KV beside --snapshots")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--rates", type=float, nargs=3, default=(3.0, 1.0, 0.25), help="prompt-heavy requests, conversations, tasks"
    )
    args = parser.parse_args()
    print("| load | states | saved of possible | of possible with so many states | ran again | TTFT p50, p99 ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    make = dict(zip(("prompt-heavy", "chats", "agents"), (prompt_heavy, chats, agents), strict=True))
    for (name, load), rate in zip(make.items(), args.rates, strict=True):
        if args.loads is not None and name not in args.loads:
            continue
        arrivals = load(rate, args.seconds)
        possible = possible_tokens(arrivals)
        sizes = {str(count): (args.tokens // PAGE, count) for count in args.snapshots}
        for model in args.models:
            for kind, state_bytes in (("float32", 4), ("bfloat16", 2)):
                pages, count = MEMORY[model].sizes(state_bytes)
                sizes[f"{count}: {model}, {kind}, {pages * PAGE // 1000}k tokens"] = pages, count
        for label, (pages, count) in sizes.items():
            found = hits(arrivals, pages, count)
            p50, p99 = found.milliseconds()["TTFT"]
            saved, again = found.hit_tokens / possible, found.recomputed_tokens / possible
            bound = found.hit_tokens / possible_tokens(arrivals, count)
            print(f"| {name} | {label} | {saved:.1%} | {bound:.1%} | {again:.1%} | {p50:.0f}, {p99:.0f} |", flush=True)


if __name__ == "__main__":
    main()
