"""`aerie.kernels.tree.tree_growth`: trees of several widths and depths, level by level. Many scores are equal; under
a grammar fewer tokens than a level has nodes are finite; and a broken draft's are NaN or infinite."""

from collections.abc import Iterator
from typing import TypeVar

import torch

from aerie.kernels.tree.nodes import Candidates, Children, Level, Tree
from aerie.kernels.tree.tree_growth import grow, write_best
from aerie.speculative.tree_shape import TreeShape
from tests.kernels.ops.case import Case

BATCH = 5
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
                there = None if above is None else _moved(above, device)
                return _moved(candidates, device), there, _moved(found, device), first, first_bit
        raise AssertionError

    return Case(grow, f"{top_k}-level-{level}-{kind}", arguments, written=(0,), exact=True)


def _best(top_k: int, steps: int, width: int, kind: str) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        candidates = [grown[0] for grown in _growth(top_k, steps, kind)][-1]
        trees = Tree(*torch.full((4, 7, width + 2), 3, device=device).unbind(0))  # of an engine with a wider shape too
        bonus = torch.arange(14, device=device).view(7, 2)[:, 0] + 900
        return trees, torch.tensor(SLOTS, device=device), bonus, _moved(candidates, device), width

    return Case(write_best, f"{top_k}/{steps}/{width}-{kind}", arguments, (0,), exact=True)


def _moved(of: T, device: torch.device) -> T:
    return type(of)(
        *(each.to(device).contiguous() if isinstance(each, torch.Tensor) else each for each in vars(of).values())
    )


TREES = ((4, 5, 8), (2, 2, 4), (3, 4, 16), (8, 4, 32), (10, 3, 60), (1, 1, 2))
DEEP = (7, 15, 63)  # the default of block heads: 693 candidates
KINDS = ("mapped", "plain", "masked", "broken")
CASES = (
    *(
        _grow(top_k, steps, level, kind)
        for top_k, steps, width in TREES
        for level in sorted({0, 1, steps - 1} & set(range(steps)))
        for kind in (KINDS if width in (8, 60) else KINDS[:1])
    ),
    *(_best(*tree, kind) for tree in (*TREES, DEEP) for kind in KINDS[1:]),
)
