"""Trees of more nodes than a mask has bits: masks are spans of a numbering in pre-order."""

import pytest
import torch
from torch import Tensor

from aerie.attention.registry import build_backend
from aerie.kernels.attend import references
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, LayerKV, Mode, newest_columns
from aerie.kernels.kv.tree_masks import chain_spans, seen_columns, span_masks
from aerie.kernels.tree.acceptance import accept, accept_synthetic
from aerie.kernels.tree.nodes import NO_TOKEN, Tree, chain
from aerie.kernels.tree.tree_growth import best_tree
from aerie.speculative.tree_shape import TreeShape
from aerie.speculative.tree_table import TreeTable
from tests.speculative.tree.test_tree import walk
from tests.support.drafts.random_trees import random_candidates

STEPS = 7


def tree_of(batch: int, width: int, seed: int = 1) -> Tree:
    return best_tree(torch.arange(batch) + 200, random_candidates(batch, 7, STEPS, seed), width)


def path_of(tree: Tree, b: int, node: int) -> set[int]:
    return {0} if node == 0 else {node} | path_of(tree, b, int(tree.parents[b, node]))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_node_sees_itself_and_its_ancestors(width: int) -> None:
    tree = tree_of(3, width)
    seen = seen_columns(tree.masks, width)
    for b in range(3):
        for node in range(width):
            assert set(seen[b, node].nonzero().flatten().tolist()) == path_of(tree, b, node)
    assert torch.equal(tree.masks >> 32, tree.depths + 1)
    part = seen_columns(tree.masks[:, :100], min(width, 100))  # a narrower tree has the same spans
    assert width == 64 or torch.equal(part, seen[:, :100, :100])


def test_a_chains_spans_are_those_of_a_tree_without_branches() -> None:
    parents = (torch.arange(90) - 1).clamp_min(0).unsqueeze(0)
    assert torch.equal(span_masks(parents, 89)[0], chain_spans(90, torch.device("cpu")))


@pytest.mark.parametrize("verified", [TreeShape.of(*s, True) for s in ((4, 1, 5), (7, 7, 33), (5, 7, 63), (7, 7, 128))])
def test_any_shape_can_be_verified_after_any_other(verified: TreeShape) -> None:
    """An alive node sees its ancestors only, whatever was drafted for the slot before."""
    for drafted in (tree_of(5, 30, seed=4), tree_of(5, 128, seed=5), chain(torch.arange(5), torch.ones(5, 6).long())):
        table, slots = TreeTable(5, 128, False, torch.device("cpu")), torch.arange(5)
        candidates = random_candidates(5, 7, STEPS, seed=9)
        table.write_best(slots, torch.arange(6), candidates, 128)
        table.write_roots(slots, torch.arange(6) + 200)
        width = drafted.tokens.shape[1]
        if width == 7:
            table.write(slots, drafted)
        else:
            table.write_best(slots, torch.arange(6) + 200, random_candidates(5, 7, STEPS, 4 + (width > 30)), width)
        read = table.read(slots, verified, torch.zeros(6, dtype=torch.int32)).tree
        seen = seen_columns(read.masks, verified.width)
        alive = read.tokens != NO_TOKEN
        assert alive.any(0).sum() > 1
        for b in range(5):
            for node in alive[b].nonzero().flatten().tolist():
                assert set(seen[b, node].nonzero().flatten().tolist()) == path_of(read, b, node)
        assert torch.equal(seen.sum(2)[alive], read.depths[alive] + 1)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_acceptance_equals_a_walk_down_the_tree(width: int) -> None:
    tree = tree_of(6, width)
    generator = torch.Generator().manual_seed(width)
    longest = 0
    for turn in range(12):
        chosen = torch.randint(0, 99, tree.tokens.shape, generator=generator)
        for b in range(6):
            if turn == 0:
                for node in path_of(tree, b, int(tree.depths[b].argmax())) - {0}:
                    chosen[b, tree.parents[b, node]] = tree.tokens[b, node]
                continue
            for node in range(1, width):
                if torch.rand((), generator=generator) < 0.6:
                    chosen[b, tree.parents[b, node]] = tree.tokens[b, node]
        accepted = accept(tree, chosen, torch.ones(6, dtype=torch.bool), STEPS)
        for b in range(6):
            path, tokens = walk(tree, chosen, b)
            num_drafts = int(accepted.num_drafts[b])
            assert accepted.path[b, : num_drafts + 1].tolist() == path
            assert accepted.tokens[b, : num_drafts + 1].tolist() == tokens
            longest = max(longest, num_drafts)
    assert longest == int(tree.depths.max()) > 2
    slots = torch.arange(6)
    synthetic = accept_synthetic(tree, chosen, torch.ones(6, dtype=torch.bool), STEPS, 4.0, slots, slots)
    assert torch.equal(synthetic.num_drafts, tree.depths.amax(1).clamp_max(3))
    for b in range(6):
        path = synthetic.path[b, : int(synthetic.num_drafts[b]) + 1].tolist()
        assert all(tree.parents[b, child] == parent for parent, child in zip(path, path[1:], strict=False))


def batch_of(tree: Tree, prefixes: list[int], page_size: int, device: str = "cpu") -> tuple[LayerKV, DecodeBatch]:
    width = tree.masks.shape[1]
    pages = -(-(max(prefixes) + width) // page_size)
    table = (torch.randperm(len(prefixes) * pages).view(len(prefixes), pages) + 1).int().to(device)
    k, v = torch.randn(2, len(prefixes) * pages + 1, page_size, 2, 32, device=device).unbind(0)
    lengths = torch.tensor(prefixes, dtype=torch.int32, device=device)
    masks = tree.masks.to(device)
    return LayerKV(k, v), DecodeBatch(Mode.VERIFY, width, width, lengths, masks, table, max(prefixes) + width)


@pytest.mark.parametrize("width,page_size", [(64, 16), (128, 1), (256, 16)])
def test_rows_attend_to_the_text_and_their_ancestors(width: int, page_size: int) -> None:
    torch.manual_seed(width)
    kv, batch = batch_of(tree_of(3, width), [5, 0, 71], page_size)
    q: Tensor = torch.randn(batch.num_rows, 4, 32)
    for rule in (ScoreRule(0.2), ScoreRule(0.2, window=257)):
        ours = build_backend("torch", Mode.VERIFY).prepare(batch).forward(q, kv, rule)
        theirs = references.decode(q, kv, batch, rule)
        torch.testing.assert_close(ours, theirs.float(), atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=f"a window of 63 tokens is shorter than a tree of {width} nodes"):
        newest_columns(batch.mask, width, 63)
