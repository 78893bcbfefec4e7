"""Growth under a budget finds the tree that a heap finds, which always expands the best node that is left."""

import heapq

import pytest
import torch
from torch import Tensor

from aerie.kernels.tree.nodes import Children, Tree
from aerie.kernels.tree.tree_growth import best_tree, grow_best, grow_block, level_rows

Path = tuple[int, ...]


def grown(table: Tensor, width: int) -> Tree:
    """Trees whose tokens are the columns of their nodes. table [B, depths, columns of the parent or 1, k] float32."""
    batch, num_steps, conditions, top_k = table.shape
    pool, level, previous = None, None, torch.zeros(batch, 1, dtype=torch.int64)
    request = torch.arange(batch).unsqueeze(1)
    for depth in range(1, num_steps + 1):
        scores = table[request, depth - 1, previous].flatten(0, 1) if conditions > 1 else table[:, depth - 1, 0]
        ids = torch.arange(top_k).expand(scores.shape)
        rows = level_rows(depth, num_steps, top_k, width)
        found = Children(scores.contiguous(), ids.contiguous(), None)
        pool, level = grow_best.reference(pool, level, found, depth, width, rows)
        previous = level.tokens
    assert pool is not None
    return best_tree(torch.zeros(batch, dtype=torch.int64), pool, width)


def grown_at_once(table: Tensor, width: int) -> Tree:
    """As `grown`, of a table without columns of parents, in one call."""
    scores = table[:, :, 0].contiguous()
    ids = torch.arange(table.shape[3]).expand(scores.shape).contiguous()
    candidates = grow_block.reference(Children(scores, ids, None), width)
    return best_tree(torch.zeros(table.shape[0], dtype=torch.int64), candidates, width)


def by_heap(table: list[list[list[float]]], width: int) -> list[Path]:
    """Paths of the best nodes, best first: by score, then depth, then order of drafting."""
    left: list[tuple[float, int, Path]] = []

    def push(path: Path, score: float) -> None:
        if len(path) < len(table):
            of_depth = table[len(path)]
            for column, value in enumerate(of_depth[path[-1] if path and len(of_depth) > 1 else 0]):
                heapq.heappush(left, (-(score + value), len(path) + 1, (*path, column)))

    push((), 0.0)
    found: list[Path] = []
    while left and len(found) < width - 1:
        score, _, path = heapq.heappop(left)
        found.append(path)
        push(path, -score)
    return found


def paths(tree: Tree, b: int) -> list[Path]:
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    of: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        of.append((*of[parent], token))
    return of[1:]


SHAPES = [(1, 3, 3), (2, 2, 6), (5, 3, 9), (4, 4, 24), (7, 2, 17), (3, 7, 57), (6, 5, 63), (15, 7, 128), (15, 3, 256)]


@pytest.mark.parametrize("conditional", [False, True], ids=["marginal", "conditional"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_tree_is_the_heaps(ties: bool, conditional: bool) -> None:
    """10,000 tables of scores in all. Scores are multiples of 2^-10, whose sums are exact in float32."""
    generator = torch.Generator().manual_seed(2 * ties + conditional)
    for num_steps, top_k, width in SHAPES:
        batch = 20 if width > 63 else 352
        shape = (batch, num_steps, top_k if conditional else 1, top_k)
        steps = torch.randint(0, 4, shape, generator=generator) * 512 if ties else None
        if steps is None:
            steps = torch.randint(1, 6000, shape, generator=generator)
        table = -(steps.sort(-1).values.float() / 1024)
        tree = grown(table, width)
        for b in range(batch):
            assert paths(tree, b) == by_heap(table[b].tolist(), width)
        if not conditional:
            assert all(torch.equal(*pair) for pair in zip(tree.fields, grown_at_once(table, width).fields, strict=True))


def test_masked_and_broken_scores_take_the_last_places() -> None:
    """NaN and plus infinity rank like masked tokens, so parents still precede their children."""
    table = torch.full((3, 4, 1, 3), -1.0)
    table[0, :, :, 1:] = float("-inf")
    table[1, 1] = float("nan")
    table[2, 2, :, 0] = float("inf")
    tree = grown(table, 11)
    assert (tree.parents[:, 1:] < torch.arange(1, 11)).all()
    depths = tree.depths.gather(1, tree.parents)
    assert torch.equal(depths[:, 1:], tree.depths[:, 1:] - 1)
    assert paths(tree, 0)[:4] == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert paths(tree, 1)[:3] == [(0,), (1,), (2,)]


def test_levels_have_rows_for_every_node_that_may_have_children() -> None:
    assert [level_rows(depth, 15, 7, 128) for depth in (1, 2, 3, 4, 14, 15)] == [7, 49, 125, 124, 114, 1]
    assert [level_rows(depth, 4, 2, 4) for depth in (1, 2, 3, 4)] == [2, 2, 1, 1]
