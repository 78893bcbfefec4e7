"""Runs two replicas of one engine in step on the same requests. The second runs eagerly; its tokens, slots, trees and
KV must equal the first one's to the bit. Requests run without a scheduler, over random KV."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.tree.nodes import Tree
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.sampling import SamplingNeeds
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, StepPlan, pack_i32
from tests.support.replica import MAX_TOKENS, NUM_FAVOURITES, Arm, Replica
from tests.support.slots import apply_plan

KEY_SCALE = 3.0  # scores of a standard deviation of two or three: attention has its favourites too


@dataclass(frozen=True)
class Round:
    """One step: which slots run, in which order; random: whether tokens are drawn."""

    slots: tuple[int, ...]
    shape: int
    random: bool


# Rows behind those of the round's slots are padding's, and ignored.
Runner = Callable[[Replica, Round], StepTensors]


def step_batch(replica: Replica, slots: Sequence[int], round_: Round) -> StepBatch:
    on_device = torch.tensor(slots, dtype=torch.int64, device=replica.slots.device)
    needs = SamplingNeeds(round_.random)
    limit = replica.layout.max_position
    return StepBatch(on_device, round_.shape, round_.shape, on_device, limit, None, needs)


def as_built(replica: Replica, round_: Round) -> StepTensors:
    """The step as the engine would run it: by a graph, if it has graphs."""
    return replica.strategy.step(step_batch(replica, round_.slots, round_))


def padded_eager(buckets: Sequence[int]) -> Runner:
    """The inner strategy on the same slots, filled up to the bucket with the padding slot."""

    def run(replica: Replica, round_: Round) -> StepTensors:
        bucket = next(size for size in sorted(buckets) if size >= len(round_.slots))
        padding = [replica.slots.padding_slot] * (bucket - len(round_.slots))
        return replica.inner.step(step_batch(replica, [*round_.slots, *padding], round_))

    return run


@dataclass
class Seen:
    """What the rounds that were compared covered."""

    rounds: Counter[tuple[int, bool, int]] = field(default_factory=Counter)  # shape, random, slots
    accepted: Counter[int] = field(default_factory=Counter)
    finish: Counter[int] = field(default_factory=Counter)
    requests: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round that verified drafts."""
        rounds = {k: n for k, n in self.accepted.items() if k >= 0}
        return 1 + sum(k * n for k, n in rounds.items()) / max(1, sum(rounds.values()))


class Twins:
    """`first`, run by any runner, beside `second`, run eagerly. Every slot always has a request, running or ended; an
    ended one stays in batches for a while, as it does when two steps are in flight."""

    def __init__(
        self, arm: Arm, first: Replica, second: Replica, run_first: Runner, run_second: Runner, seed: int = 0
    ) -> None:
        self._arm = arm
        self.first = first
        self._replicas = (first, second)
        self._runners = (run_first, run_second)
        self._random = np.random.default_rng(seed)
        self._ended: set[int] = set()
        self.seen = Seen()
        self._fill_pools(seed)
        for slot in range(arm.num_slots):
            self._begin(slot)

    def compare(self, sizes: Sequence[int], num_steps: int) -> None:
        """Run both for num_steps rounds of all shapes, kinds of sampling and numbers of slots, again and again in a new
        order; AssertionError at the first difference in what they emit or in their slots and trees."""
        for i, round_ in enumerate(self._rounds(sizes, num_steps)):
            pairs = zip(self._runners, self._replicas, strict=True)
            first, second = (_rows(run(replica, round_), round_) for run, replica in pairs)
            where = f"round {i}, {round_}"
            assert torch.equal(first, second), f"{where}: emitted\n{first.tolist()}\nand eagerly\n{second.tolist()}"
            different = self.different_state()
            assert not different, f"{where}: {', '.join(different)} differ"
            self._after(round_, first, self._replicas)
            self.seen.rounds[round_.shape, round_.random, len(round_.slots)] += 1

    def replay(self, sizes: Sequence[int], num_steps: int) -> None:
        """Run the first alone for num_steps, then give the second its state."""
        first, second = self._replicas
        for round_ in self._rounds(sizes, num_steps):
            self._after(round_, _rows(self._runners[0](first, round_), round_), (first,))
        second.slots.facts.update(first.slots.facts)
        names = ("page_table", "seq_len", "_ints", "_floats", "_flags", "stop_ids")
        tensors = [(getattr(first.slots, name), getattr(second.slots, name)) for name in names]
        if first.trees is not None and second.trees is not None:
            tensors += zip(vars(first.trees.trees).values(), vars(second.trees.trees).values(), strict=True)
        for ours, theirs in zip(first.pools, second.pools, strict=True):
            tensors += zip(_kv(ours), _kv(theirs), strict=True)
        for ours, theirs in tensors:
            theirs.copy_(ours)

    def different_state(self) -> list[str]:
        """Which parts of slots and trees differ."""
        first, second = (replica.state() for replica in self._replicas)
        return [name for name in first if not torch.equal(first[name], second[name])]

    def different_kv(self) -> list[str]:
        """Which layers' KV differs, the dummy page left out: all rows that rounds wrote, their tails included."""
        names = []
        for number, (ours, theirs) in enumerate(zip(*(r.pools for r in self._replicas), strict=True)):
            for kind, *tensors in zip(("k", "v"), _kv(ours), _kv(theirs), strict=True):
                pair = zip(*tensors, strict=True)
                names += [
                    f"pool {number} layer {i} {kind}" for i, (a, b) in enumerate(pair) if not torch.equal(a[1:], b[1:])
                ]
        return names

    def _fill_pools(self, seed: int) -> None:
        first, second = self._replicas
        generator = torch.Generator(first.slots.device).manual_seed(seed)
        for ours, theirs in zip(first.pools, second.pools, strict=True):
            for tensor, copy, scale in zip(_kv(ours), _kv(theirs), (KEY_SCALE, 1.0), strict=True):
                tensor[:, 1:].normal_(0.0, scale, generator=generator)
                copy.copy_(tensor)

    def _rounds(self, sizes: Sequence[int], num_steps: int) -> list[Round]:
        shapes = self._replicas[0].strategy.shapes
        # greedy rounds of the shapes between run as random ones, in which requests that are random here are drawn
        kinds = [
            (shape, random, n)
            for shape in range(len(shapes))
            for random in ((False, True) if shape in shapes.unrestricted else (True,))
            for n in sizes
        ]
        rounds: list[Round] = []
        while len(rounds) < num_steps:
            for shape, random, n in self._random.permutation(np.array(kinds)).tolist():
                slots = self._random.permutation(self._arm.num_slots)[:n].tolist()
                rounds.append(Round(tuple(slots), shape, bool(random)))
        return rounds[:num_steps]

    def _after(self, round_: Round, rows: Tensor, replicas: Sequence[Replica]) -> None:
        """Count what a round emitted, and replace requests that have ended."""
        for slot, (*_, finish, accepted) in zip(round_.slots, rows.tolist(), strict=True):
            self.seen.accepted[accepted] += 1
            self.seen.finish[finish] += 1
            if finish:
                self._ended.add(slot)
        for slot in sorted(self._ended):
            if self._random.random() < 0.5:
                self._begin(slot, replicas)
        if round_.shape == 0 and self._arm.acceptance is not None and self._arm.tree is not None:
            # synthetic acceptance would take the tokens that a bare root lacks
            for slot in set(round_.slots):
                self._give_tree(slot, replicas)

    def _begin(self, slot: int, replicas: Sequence[Replica] | None = None) -> None:
        """A new request of a random length takes the slot, with the slot's pages in a new order."""
        random, arm, replicas = self._random, self._arm, replicas or self._replicas
        self._ended.discard(slot)
        self.seen.requests += 1
        length = self._length()
        stops = (3, 5) if random.random() < 0.3 else ()
        sampling = SamplingParams(
            max_tokens=int(MAX_TOKENS ** random.random()),
            temperature=float(random.choice([0.0, 0.7, 1.0])),
            seed=int(random.integers(1 << 62)),
            stop_token_ids=stops,
            speculative=bool(random.random() < 0.9),
        )
        init = SlotInit(slot, length, length, length + 1 + sampling.max_tokens, sampling)
        num_pages = replicas[0].slots.page_table.shape[1]
        assert (slot + 1) * num_pages <= replicas[0].pools[0].num_pages
        pages = 1 + slot * num_pages + random.permutation(num_pages)
        updates = np.stack((np.full(num_pages, slot), np.arange(num_pages), pages), axis=1).astype(np.int32)
        plan = StepPlan(0, 0, b"", 0, 0, page_updates=pack_i32(updates.ravel()), inits=(init,))
        bonus = int(random.integers(NUM_FAVOURITES))
        for replica in replicas:
            apply_plan(replica.slots, plan)
            replica.slots.bonus[slot] = bonus
        if arm.tree is not None:
            self._give_tree(slot, replicas)

    def _length(self) -> int:
        """1 to the longest: even, by magnitude, or at an end."""
        longest, choice = self._arm.longest, self._random.random()
        if choice < 0.1:
            return int(self._random.choice([1, longest]))
        if choice < 0.5:
            return int(longest ** self._random.random())
        return int(self._random.integers(1, longest, endpoint=True))

    def _give_tree(self, slot: int, replicas: Sequence[Replica]) -> None:
        """top_k chains of random tokens below the slot's newest one."""
        assert self._arm.tree is not None
        _, top_k, width = self._arm.tree
        parents = [max(0, i - top_k) for i in range(width)]
        depths, masks = [0], [1]
        for i in range(1, width):
            depths.append(depths[parents[i]] + 1)
            masks.append(masks[parents[i]] | 1 << i)
        drawn = torch.from_numpy(self._random.integers(0, NUM_FAVOURITES, (1, width)))
        for replica in replicas:
            device = replica.slots.device
            tokens = drawn.to(device)
            tokens[:, 0] = replica.slots.bonus[slot]
            shape = (torch.tensor([values], device=device) for values in (parents, depths, masks))
            assert replica.trees is not None
            replica.trees.write(torch.tensor([slot], device=device), Tree(tokens, *shape))


def _rows(out: StepTensors, round_: Round) -> Tensor:
    """[slots, M + 3] int64: tokens, count, finish, accepted of the round's slots; copies, for the next replay writes to
    the same outputs."""
    rows = torch.cat((out.tokens, torch.stack((out.counts, out.finish, out.accepted), dim=1)), dim=1)
    return rows[: len(round_.slots)]


def _kv(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers: [layers, num_pages + 1, page_size, kv_heads, head_dim] each."""
    ((keys, values),) = pool.tensors
    return keys, values
