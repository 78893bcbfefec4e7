"""`aerie.kernels.tree.tree_growth` and `best_first`: trees of several widths and depths, level by level. Many scores
are equal; under a grammar fewer tokens than a level has nodes are finite; and a broken draft's are NaN or infinite."""

from collections.abc import Iterator
from typing import TypeVar

import torch

from aerie.kernels.tree.nodes import Candidates, Children, Level, Tree
from aerie.kernels.tree.tree_growth import grow, grow_best, grow_block, level_rows, write_best
from aerie.speculative.tree_shape import TreeShape
from tests.kernels.ops.case import Case

BATCH = 5
INF = float("inf")
SLOTS = (4, 0, 6, 1, 3)


def proposals(rows: int, k: int, vocab: int, generator: torch.Generator, mapped: bool) -> Children:
    """Log-probabilities of quarters, so that many are equal."""
    scores = -torch.randint(1, 12, (rows, k), generator=generator).float().sort(1).values / 4
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    return Children(scores, ids, torch.randperm(3 * vocab, generator=generator)[:vocab] if mapped else None)


T = TypeVar("T", Candidates, Level, Children)
Grown = tuple[Candidates, Level | None, Children, int, int]


def _growth(top_k: int, steps: int, kind: str) -> Iterator[Grown]:
    """The arguments of `grow` for every level, and at the end the finished candidates."""
    generator = torch.Generator().manual_seed(top_k)
    shape = TreeShape.of(steps, top_k, 2)
    candidates = Candidates.empty(BATCH, torch.tensor(shape.candidate_depths), steps)
    for field in (candidates.tokens, candidates.scores, candidates.parents):
        field.zero_()
    above: Level | None = None
    for step in shape.steps:
        found = proposals(BATCH * step.rows, top_k, 50, generator, kind == "mapped")
        if kind == "broken":  # some rows whole, and some columns
            rows, scores = BATCH * step.rows, found.log_probabilities
            scores[torch.rand(rows, generator=generator) < 0.3] = float("nan")
            scores[torch.rand((rows, top_k), generator=generator) < 0.2] = float("inf")
            scores[torch.rand((rows, top_k), generator=generator) < 0.2] = float("-inf")
        if kind == "masked":
            found.log_probabilities[:, 2 - step.depth % 2 :] = float("-inf")
        yield candidates, above, found, step.first_candidate, step.suffix
        above = grow.reference(candidates, above, found, step.first_candidate, step.suffix)
    yield candidates, above, found, step.first_candidate, step.suffix


def _grow(top_k: int, steps: int, level: int, kind: str) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        for step, (candidates, above, found, first, first_bit) in enumerate(_growth(top_k, steps, kind)):
            if step == level:
                there = None if above is None else moved(above, device)
                return moved(candidates, device), there, moved(found, device), first, first_bit
        raise AssertionError

    return Case(grow, f"{top_k}-level-{level}-{kind}", arguments, written=(0,), exact=True)


def _best(top_k: int, steps: int, width: int, kind: str) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        candidates = [grown[0] for grown in _growth(top_k, steps, kind)][-1]
        # of an engine with a wider shape too
        trees = Tree(*torch.full((4, 7, 70 if width == 60 else width + 2), 3, device=device).unbind(0))
        bonus = torch.arange(14, device=device).view(7, 2)[:, 0] + 900
        return trees, torch.tensor(SLOTS, device=device), bonus, moved(candidates, device), width

    return Case(write_best, f"{top_k}/{steps}/{width}-{kind}", arguments, (0,), exact=True)


def moved(of: T, device: torch.device) -> T:
    return type(of)(
        *(each.to(device).contiguous() if isinstance(each, torch.Tensor) else each for each in vars(of).values())
    )


TREES = ((4, 5, 8), (2, 2, 4), (3, 4, 16), (8, 4, 32), (10, 3, 60), (1, 1, 2))
DEEP = (7, 15, 63)  # the default of block heads: 693 candidates
WIDE = (7, 15, 150)  # masks are spans
KINDS = ("mapped", "plain", "masked", "broken")

BestGrown = tuple[Candidates | None, Level | None, Children, int, int, int]


def _best_growth(top_k: int, steps: int, width: int, kind: str) -> Iterator[BestGrown]:
    generator = torch.Generator().manual_seed(width)
    pool: Candidates | None = None
    level: Level | None = None
    rows = 1
    for depth in range(1, steps + 1):
        parents = 1 if kind == "shared" else rows
        found = proposals(BATCH * parents, top_k, 50, generator, kind == "mapped")
        if kind == "broken":
            scores = found.log_probabilities
            for value in ("nan", "inf", "-inf"):
                scores[torch.rand(scores.shape, generator=generator) < 0.15] = float(value)
        rows = level_rows(depth, steps, top_k, width)
        arguments = pool, level, found, depth, width, rows
        yield arguments
        pool, level = grow_best.reference(*arguments)


def _grow_best(top_k: int, steps: int, width: int, depth: int, kind: str) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        for pool, level, found, at, nodes, rows in _best_growth(top_k, steps, width, kind):
            if at == depth:
                there = (None if each is None else moved(each, device) for each in (pool, level))
                return *there, moved(found, device), at, nodes, rows
        raise AssertionError

    return Case(grow_best, f"{top_k}/{steps}/{width}-level-{depth}-{kind}", arguments, exact=True)


def _grow_block(top_k: int, steps: int, width: int, kind: str) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        generator = torch.Generator().manual_seed(width)
        rows = proposals(BATCH * steps, top_k, 50, generator, kind == "mapped")
        scores = rows.log_probabilities
        if kind == "distinct":
            scores -= torch.rand(scores.shape, generator=generator).sort(1).values
        if kind == "broken":
            for value in ("nan", "inf", "-inf"):
                scores[torch.rand(scores.shape, generator=generator) < 0.05] = float(value)
            scores.copy_(scores.nan_to_num(INF, INF, -INF).sort(1, descending=True).values)
        shape = (BATCH, steps, top_k)
        return moved(Children(scores.view(shape), rows.ids.view(shape), rows.target_ids), device), width

    return Case(grow_block, f"{top_k}/{steps}/{width}-{kind}", arguments, exact=True)


BLOCKS = tuple(
    _grow_block(*tree, kind)
    for tree in ((3, 4, 9), (7, 15, 63), (8, 15, 128), (4, 7, 256), (1, 5, 6), (12, 12, 40))
    for kind in ("mapped", "distinct", "broken")
)
BEST_FIRST = tuple(
    _grow_best(*tree, depth, kind)
    for tree, depths in (((3, 4, 9), (1, 2, 4)), ((7, 15, 63), (1, 3, 4)), ((7, 15, 128), (5,)))
    for depth in depths
    for kind in ("mapped", "shared", "broken")
)


CASES = (
    *BEST_FIRST,
    *BLOCKS,
    *(
        _grow(top_k, steps, level, kind)
        for top_k, steps, width in TREES
        for level in sorted({0, 1, steps - 1} & set(range(steps)))
        for kind in (KINDS if width in (8, 60) else KINDS[:1])
    ),
    *(_best(*tree, kind) for tree in (*TREES, DEEP, WIDE) for kind in KINDS[1:]),
)
