"""The gated delta rule one token at a time, and random lives of slots held against it: prompts in chunks, rounds with
trees, accepted paths, snapshots.

`DeltaLives` calls the operations, so under `kernels_of_operations` it runs kernels. Memory that no operation may read
is NaN from the start.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.rounds import commit_rows, delta_rule_rounds, replay_rows
from aerie.kernels.delta_rule.tables import (
    AllWeights,
    ChunkTables,
    DeltaHeads,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    LayerState,
    RoundTables,
)

SMALL = DeltaHeads(key_heads=2, value_heads=4, key_dim=16, value_dim=16)


def random_weights(heads: DeltaHeads, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DeltaWeights:
    """Decays between almost none and strong ones."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.float64 if dtype is torch.float64 else torch.float32
    a_log = torch.rand(heads.value_heads, generator=generator) * 4 - 3
    dt_bias = torch.randn(heads.value_heads, generator=generator)
    conv = torch.randn((4, heads.channels), generator=generator) * 0.5
    norm = 1 + 0.2 * torch.randn(heads.value_dim, generator=generator)
    return DeltaWeights(
        conv.to(dtype).to(device),
        a_log.to(full).to(device),
        dt_bias.to(full).to(device),
        norm.to(dtype).to(device),
        1e-6,
    )


def random_rows(heads: DeltaHeads, count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DeltaRows:
    """Views of one product, as a layer has them."""
    values = heads.value_heads * heads.value_dim
    sizes = (heads.channels, values, heads.value_heads, heads.value_heads)
    generator = torch.Generator().manual_seed(seed)
    product = torch.randn((count, sum(sizes)), generator=generator).to(dtype).to(device)
    return DeltaRows(*product.split(sizes, 1))


@dataclass
class Literal:
    """One layer of one request, one token after the other, in the type of its tensors. state: [Hv, dk, dv].
    history: [3, C]."""

    heads: DeltaHeads
    weights: DeltaWeights
    state: Tensor
    history: Tensor

    @staticmethod
    def empty(heads: DeltaHeads, weights: DeltaWeights) -> "Literal":
        weights = DeltaWeights(
            *(each.double().cpu() for each in (weights.conv, weights.a_log, weights.dt_bias, weights.norm)),
            weights.eps,
            weights.sigmoid,
        )
        state = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64)
        return Literal(heads, weights, state, torch.zeros(3, heads.channels, dtype=torch.float64))

    def after(self, row: DeltaRows) -> tuple["Literal", Tensor]:
        """Return what there is after one more token, and the token's output [Hv * dv]. row: of one row."""
        heads, weights = self.heads, self.weights
        taps = torch.cat((self.history, row.qkv.double().cpu()))
        channels = F.silu((taps * weights.conv).sum(0))
        if row.qkv.dtype is not torch.float64:
            channels = channels.to(row.qkv.dtype).double()
        q, k, v = channels.split((heads.key_heads * heads.key_dim,) * 2 + (heads.value_heads * heads.value_dim,))
        states, outputs = [], []
        for h in range(heads.value_heads):
            of_key = slice(h // heads.group * heads.key_dim, (h // heads.group + 1) * heads.key_dim)
            one_q, one_k = (each[of_key] / (each[of_key].square().sum() + 1e-6).sqrt() for each in (q, k))
            one_v = v.view(heads.value_heads, -1)[h]
            beta = torch.sigmoid(row.b[0, h].double().cpu())
            decay = torch.exp(-weights.a_log[h].exp() * F.softplus(row.a[0, h].double().cpu() + weights.dt_bias[h]))
            state = self.state[h] * decay
            state = state + torch.outer(one_k, beta * (one_v - one_k @ state))
            o = one_q @ state / heads.key_dim**0.5
            z = row.z.view(heads.value_heads, -1)[h].double().cpu()
            gate = torch.sigmoid(z) if weights.sigmoid else F.silu(z)
            outputs.append(o / (o.square().mean() + weights.eps).sqrt() * weights.norm * gate)
            states.append(state)
        return replace(self, state=torch.stack(states), history=taps[1:]), torch.cat(outputs)


@dataclass(frozen=True)
class RandomTree:
    """parents: of each node, the root's is -1; nodes in topological order."""

    parents: tuple[int, ...]

    @staticmethod
    def draw(rng: random.Random, width: int, deepest: int) -> "RandomTree":
        parents, depths = [-1], [0]
        for _ in range(1, width):
            parent = rng.choice([i for i, depth in enumerate(depths) if depth < deepest] or [0])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return RandomTree(tuple(parents))

    def path(self, node: int) -> list[int]:
        """From the root to the node."""
        return [*(self.path(self.parents[node]) if node else ()), node]

    @cached_property
    def masks(self) -> list[int]:
        return [sum(1 << j for j in self.path(i)) for i in range(len(self.parents))]


@dataclass
class DeltaLives:
    """`slots` slots of two layers, of which the second one is watched. Errors are relative to the largest number of
    what is compared.

    ahead: wide rounds replay the committed rows of both layers before they compute their own.
    """

    heads: DeltaHeads
    dtype: torch.dtype
    rng: random.Random
    tolerance: float
    device: torch.device = torch.device("cpu")
    slots: int = 3
    snapshots: int = 2
    width: int = 8
    path: int = 4
    ahead: bool = False
    lives: dict[int, Literal] = field(default_factory=dict)
    length: dict[int, int] = field(default_factory=dict)
    replayed: dict[int, list[Literal]] = field(default_factory=dict)  # before and after each committed row
    worst: float = 0.0  # error so far

    def __post_init__(self) -> None:
        self.weights = random_weights(self.heads, self.dtype, self.device, self.rng.randrange(1 << 30))
        self.kept = DeltaState.zeros(
            2, self.heads, self.slots, self.snapshots, self.width, self.path, self.dtype, self.device
        )
        kept = self.kept
        for tensor in (
            kept.state,
            kept.conv,
            kept.pending,
            kept.committed,
            kept.saved_state,
            kept.saved_conv,
        ):
            tensor.fill_(torch.nan)
        self.kept.state[:, self.slots], self.kept.conv[:, self.slots] = 0, 0

    @property
    def layer(self) -> LayerState:
        return self.kept.layer(1)

    def run_chunks(self, chunks: list[tuple[int, int]], padding: int = 0) -> None:
        """Chunks of (slot, rows), each where its slot's prompt ends; a slot that is not alive starts."""
        counts = [n for _, n in chunks]
        starts = [self.length.get(slot, 0) for slot, _ in chunks]
        at = [
            start + self.rng.randint(1, n) if n and self.rng.random() < 0.7 else -1
            for start, n in zip(starts, counts, strict=True)
        ]
        entries = self.rng.sample(range(self.snapshots), len(chunks))
        rows = self._rows(sum(counts) + padding)
        out = self._out(sum(counts) + padding)
        borders = [sum(counts[:i]) for i in range(len(counts) + 1)]
        tables = ChunkTables(
            self._tensor([slot for slot, _ in chunks]),
            self._int32(borders),
            self._int32(starts),
            self._int32(at),
            self._tensor(entries),
        )
        delta_rule_chunks(rows, self.weights, self.layer, tables, out)
        for c, (slot, n) in enumerate(chunks):
            if not n:
                continue
            life = self.lives.get(slot) or Literal.empty(self.heads, self.weights)
            for i in range(borders[c], borders[c + 1]):
                life, o = life.after(rows.part(i, i + 1))
                self._close(out[i], o)
                if starts[c] + i - borders[c] + 1 == at[c]:
                    self._saved(entries[c], life)
            self.lives[slot], self.length[slot], self.replayed[slot] = life, starts[c] + n, [life]
            self.kept.count[slot] = 0
            self._holds(slot, life)
        assert not out[borders[-1] :].any()

    def run_round(self, slots: list[int], width: int, padding: int = 0) -> None:
        """A round of trees of `width` nodes, then the commit of a random path of each."""
        trees = [RandomTree.draw(self.rng, width, self.path - 1) for _ in slots]
        batch = [*slots, *[self.slots] * padding]
        masks = [*(tree.masks for tree in trees), *[RandomTree.draw(self.rng, width, 9).masks] * padding]
        rows, out = self._rows(len(batch) * width), self._out(len(batch) * width)
        at, entries = torch.full((self.slots + 1,), -1), torch.zeros(self.slots + 1, dtype=torch.int64)
        if slots:
            at[slots[0]], entries[slots[0]] = self.length[slots[0]] - self.rng.randint(0, self.path), 1
        tables = RoundTables(
            self._tensor(batch),
            self._int32([*(self.length[slot] for slot in slots), *[0] * padding]),
            self._tensor(masks),
            at.int().to(self.device),
            entries.to(self.device),
        )
        if self.ahead and tables.is_wide(self.path):
            replay_rows(self.kept, AllWeights.of([self.weights] * 2), tables)
            tables = replace(tables, replayed=True)
        delta_rule_rounds(rows, self.weights, self.layer, tables, out)
        assert out.isfinite().all()
        if slots and (back := self.length[slots[0]] - int(at[slots[0]])) < len(self.replayed[slots[0]]):
            self._saved(1, self.replayed[slots[0]][-1 - back])
        paths, counts = torch.zeros((len(batch), self.path), dtype=torch.int64), [0] * len(batch)
        for r, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            self._close(self.layer.state[slot], self.lives[slot].state)
            nodes: list[Literal] = []
            for i, parent in enumerate(tree.parents):
                here = nodes[parent] if i else self.lives[slot]
                life, o = here.after(rows.part(r * width + i, r * width + i + 1))
                nodes.append(life)
                self._close(out[r * width + i], o)
            path = tree.path(self.rng.randrange(width))
            path = path[: self.rng.randint(0, len(path))]
            paths[r, : len(path)], counts[r] = torch.tensor(path, dtype=torch.int64), len(path)
            self.replayed[slot] = [self.lives[slot], *(nodes[i] for i in path)]
            self.lives[slot] = self.replayed[slot][-1]
            self.length[slot] += len(path)
        commit_rows(self.kept, self._tensor(batch), paths.to(self.device), self._int32(counts))
        assert self.kept.count[self.slots] == 0 and not self.layer.state[self.slots].any()

    def finish(self) -> None:
        """A last round of all, so that every committed row is in the states."""
        self.run_round(sorted(self.lives), 1)

    def _holds(self, entry: int, life: Literal) -> None:
        self._close(self.layer.state[entry], life.state)
        self._close(self.layer.conv[entry], life.history)

    def _saved(self, snapshot: int, life: Literal) -> None:
        self._close(self.layer.saved_state[snapshot], life.state)
        self._close(self.layer.saved_conv[snapshot], life.history)

    def _rows(self, count: int) -> DeltaRows:
        return random_rows(self.heads, count, self.dtype, self.device, self.rng.randrange(1 << 30))

    def _out(self, count: int) -> Tensor:
        size = self.heads.value_heads * self.heads.value_dim
        return torch.full((count, size), torch.nan, dtype=self.dtype, device=self.device)

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _int32(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _close(self, ours: Tensor, expected: Tensor) -> None:
        error = (ours.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        self.worst = max(self.worst, float(error))
        assert error <= self.tolerance, f"relative error {error:.2e}"
