"""Tree construction and acceptance against plain Python walks."""

import random

import pytest
import torch
from torch import Tensor

from aerie.kernels.tree.acceptance import accept, accept_commit, accept_synthetic
from aerie.kernels.tree.nodes import NO_TOKEN, Tree, chain, root_only_trees
from aerie.kernels.tree.tree_growth import best_tree
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.tree_shape import TreeShape
from aerie.speculative.tree_table import TreeTable
from aerie.workers.config import PLAIN
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from aerie.workers.slots import SlotTable
from tests.support.drafts.random_trees import random_candidates
from tests.support.kernels.num_operations import num_operations
from tests.support.slots import enter


def test_a_root_is_committed_in_a_third_of_the_operations_of_a_comparison() -> None:
    """Plain rounds of an engine with a draft have nothing to compare. Beyond what `SlotTable.commit` takes."""
    slots, chosen = torch.arange(2), torch.tensor([[3], [4]])
    table = SlotTable(4, 4, 99, torch.device("cpu"))

    def operations(width: int) -> int:
        tree = root_only_trees(torch.tensor([1, 2]), width)
        choice = chosen.expand(2, width).contiguous()
        commit = num_operations(lambda: table.commit(slots, choice.clone(), torch.ones_like(slots)))
        return (
            num_operations(lambda: accept_commit.reference(slots, tree, choice, table.commit_tables, width - 1))
            - commit
        )

    assert 3 * operations(1) <= operations(2), (operations(1), operations(2))


@pytest.mark.parametrize("top_k,steps,width", [(1, 3, 4), (2, 2, 4), (4, 5, 16), (3, 4, 9), (8, 3, 60)])
def test_best_tree_keeps_the_best_candidates_with_their_parents(top_k: int, steps: int, width: int) -> None:
    candidates = random_candidates(5, top_k, steps, seed=width)
    root = torch.arange(100, 105)
    tree = best_tree(root, candidates, width)
    assert torch.equal(tree.tokens[:, 0], root)
    for b in range(5):
        order = sorted(range(candidates.tokens.shape[1]), key=lambda c: (-candidates.scores[b, c].item(), c))
        kept = order[: width - 1]
        place = {-1: 0} | {c: i + 1 for i, c in enumerate(kept)}
        for c, node in place.items():
            if c < 0:
                continue
            parent = place[int(candidates.parents[b, c])]  # a KeyError here is a kept node without its parent
            assert tree.parents[b, node] == parent < node
            assert tree.tokens[b, node] == candidates.tokens[b, c]
            assert tree.depths[b, node] == candidates.depths[c]
            assert tree.masks[b, node] == tree.masks[b, parent] | 1 << node


def walk(tree: Tree, chosen: Tensor, b: int) -> tuple[list[int], list[int]]:
    """Path of accepted nodes and emitted tokens of tree b, by following matching children from the root."""
    path, tokens = [0], []
    while True:
        token = int(chosen[b, path[-1]])
        tokens.append(token)
        width = tree.tokens.shape[1]
        below = [i for i in range(1, width) if tree.parents[b, i] == path[-1] and tree.tokens[b, i] == token]
        if not below:
            return path, tokens
        path.append(below[0])


@pytest.mark.parametrize("top_k,steps,width", [(1, 4, 5), (4, 5, 16), (3, 3, 12)])
def test_acceptance_equals_a_walk_down_the_tree(top_k: int, steps: int, width: int) -> None:
    candidates = random_candidates(8, top_k, steps, seed=3)
    tree = best_tree(torch.arange(8) + 200, candidates, width)
    random.seed(0)
    longest = 0
    parents = tree.parents.tolist()
    for _ in range(30):
        chosen = torch.randint(0, 99, tree.tokens.shape)
        for b in range(8):
            for node in range(width):
                children = [i for i in range(1, width) if parents[b][i] == node]
                if children and random.random() < 0.8:
                    chosen[b, node] = tree.tokens[b, random.choice(children)]
        accepted = accept(tree, chosen, torch.ones(8, dtype=torch.bool), steps)
        for b in range(8):
            path, tokens = walk(tree, chosen, b)
            n = int(accepted.num_drafts[b])
            assert n == len(path) - 1
            assert accepted.path[b, : n + 1].tolist() == path
            assert accepted.tokens[b, : n + 1].tolist() == tokens
            longest = max(longest, n)
    assert longest == steps  # the deepest path was exercised


def test_a_request_without_speculation_accepts_nothing() -> None:
    tree = chain(torch.tensor([7, 7]), torch.tensor([[1, 2], [1, 2]]))
    chosen = torch.tensor([[1, 2, 3], [1, 2, 3]])
    accepted = accept(tree, chosen, torch.tensor([True, False]), 2)
    assert accepted.num_drafts.tolist() == [2, 0]
    assert accepted.tokens[0].tolist() == [1, 2, 3]
    assert accepted.tokens[1, 0] == 1
    places = torch.arange(2)
    synthetic = accept_synthetic(tree, chosen, torch.tensor([True, False]), 2, 3.0, places, places)
    assert synthetic.num_drafts.tolist() == [2, 0]


def test_a_bare_root_accepts_nothing() -> None:
    tree = root_only_trees(torch.tensor([5]), 4)
    accepted = accept(tree, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, dtype=torch.bool), 3)
    assert accepted.num_drafts.tolist() == [0]


def test_a_commit_says_which_rows_hold_the_path_and_its_newest_token() -> None:
    """Against a walk, beside a request that has finished, one at its limit, one that stops, one without drafts, and a
    padding row."""
    steps, width, before = 3, 9, 20
    tree = best_tree(torch.arange(7) + 200, random_candidates(7, 3, steps, seed=4), width)
    tree.tokens[5, 1:] = NO_TOKEN
    tree.tokens[0, 2:] = NO_TOKEN  # the smallest tree with a draft
    chosen = torch.full(tree.tokens.shape, 99)
    for b in range(7):
        for node in range(width - 1, 0, -1):  # of a node's children the best is chosen
            chosen[b, tree.parents[b, node]] = tree.tokens[b, node].clamp_min(0)
    table = SlotTable(6, 4, 128, torch.device("cpu"))
    walks = [walk(tree, chosen, b) for b in range(7)]
    for slot in range(6):
        limit = before + (2 if slot == 3 else 50)
        stops = (walks[4][1][0],) if slot == 4 else ()
        init = SlotInit(slot, before, 10, limit, SamplingParams(9, 0.0, stop_token_ids=stops), pack_i32([1]), b"")
        enter(table, init)
    table.finished[2] = True
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 6])  # 6 is padding
    expected = {2: 0, 3: 1, 4: 1, 6: 0}
    found = accept_commit(slots, tree, chosen, table.commit_tables, steps)
    for b, (path, tokens) in enumerate(walks):
        count = expected.get(b, len(tokens))
        assert found.commit.counts[b] == count and found.commit.tokens[b, :count].tolist() == tokens[:count]
        drafts = 0 if b in (2, 6) else len(path) - 1
        assert found.reported[b] == (drafts if count and b != 5 else -1)
        assert found.path_rows[b, : drafts + 1].tolist() == [b * width + node for node in path[: drafts + 1]]
        depth = max(count - 1, 0)
        assert found.newest[b] == b * (steps + 1) + depth
        length = before if b < 6 else 0
        assert found.newest_position[b] == length + depth and table.seq_len[b] == length + count
    assert max(len(tokens) for _, tokens in walks) == steps + 1 and int(found.newest_position.dtype == torch.int32)
    alone = accept_commit(
        slots[:1], root_only_trees(torch.tensor([7]), 1), torch.tensor([[8]]), table.commit_tables, steps
    )
    assert alone.reported.tolist() == [-1] and alone.commit.tokens[0, 0] == 8


@pytest.mark.parametrize("length", [1.0, 2.3, 3.0, 3.9, 4.0])
@pytest.mark.parametrize("top_k", [1, 4])
def test_synthetic_acceptance_has_the_wanted_mean(length: float, top_k: int) -> None:
    batch = 4000
    candidates = random_candidates(batch, top_k, 3, seed=1)
    tree = best_tree(torch.zeros(batch, dtype=torch.int64), candidates, candidates.tokens.shape[1] + 1)
    chosen = torch.zeros_like(tree.tokens)
    enabled = torch.ones(batch, dtype=torch.bool)
    accepted = accept_synthetic(tree, chosen, enabled, 3, length, torch.arange(batch), torch.full((batch,), 9))
    mean = 1 + accepted.num_drafts.double().mean().item()
    # standard error at most 0.5 / sqrt(4000) = 0.008; 6 of them: a false alarm in 10^9
    assert mean == pytest.approx(length, abs=0.05)
    assert set(accepted.num_drafts.tolist()) <= {int(length - 1), int(length - 1) + 1}
    for b in range(20):
        n = int(accepted.num_drafts[b])
        path = accepted.path[b, : n + 1].tolist()
        assert all(tree.parents[b, child] == parent for parent, child in zip(path, path[1:], strict=False))


@pytest.mark.parametrize("is_chain", [True, False])
def test_tree_table_gives_back_what_was_written(is_chain: bool) -> None:
    table = TreeTable(4, 3, is_chain, torch.device("cpu"))
    seq_len = torch.tensor([10, 11, 12, 13, 14], dtype=torch.int32)
    tree = chain(torch.tensor([7, 8]), torch.tensor([[1, 2], [3, 4]]))
    table.write(torch.tensor([3, 0]), tree)
    back = table.read(torch.tensor([0, 3, 1]), TreeShape.of(2, 1, 3), seq_len)
    assert back.tree.tokens[:2].tolist() == [[8, 3, 4], [7, 1, 2]]
    assert back.tree.tokens[2, 1:].tolist() == [NO_TOKEN, NO_TOKEN]
    assert back.length.tolist() == [10, 13, 11]
    assert back.positions.tolist() == [10, 11, 12, 13, 14, 15, 11, 12, 13]
    assert back.ids.tolist() == [8, 3, 4, 7, 1, 2, 0, 0, 0]
    assert table.read(torch.tensor([3]), PLAIN, seq_len).tree.masks.tolist() == [[1]]


@pytest.mark.parametrize("drafted", [TreeShape.of(*s) for s in ((3, 1, 4), (4, 3, 12), (5, 4, 16))])
@pytest.mark.parametrize("verified", [TreeShape.of(*s) for s in ((1, 1, 2), (4, 1, 5), (3, 2, 6), (5, 4, 20))])
def test_any_shape_can_be_verified_after_any_other(drafted: TreeShape, verified: TreeShape) -> None:
    """What may be accepted is in both: the drafted tree, and of it the best nodes as far as the verified shape holds
    them, whatever was drafted for the slot before."""
    slots, steps = torch.arange(6), drafted.num_steps
    table = TreeTable(6, 20, False, torch.device("cpu"))
    older = best_tree(torch.arange(6), random_candidates(6, 5, 5, seed=2), 20)
    table.write(slots, older)
    table.write_roots(slots, torch.arange(7) + 200)
    new = best_tree(torch.arange(6) + 200, random_candidates(6, drafted.top_k, steps, seed=9), drafted.width)
    table.write(slots, new)
    read = table.read(slots, verified, torch.zeros(7, dtype=torch.int32)).tree
    depth, width = verified.depth, min(drafted.width, verified.width)
    for b in range(6):
        alive = [0]
        for node in range(1, width):
            deep_enough = int(new.depths[b, node]) <= depth
            straight = int(new.parents[b, node]) == node - 1 == alive[-1] or not verified.is_chain
            if deep_enough and straight:
                alive.append(node)
        assert (read.tokens[b] != NO_TOKEN).nonzero().flatten().tolist() == alive
        for name, written in vars(new).items():
            assert getattr(read, name)[b, alive].tolist() == written[b, alive].tolist()
        assert (read.parents[b, 1:] < torch.arange(1, verified.width)).all()  # of every node, accepted or not
        assert (read.masks[b] >> torch.arange(verified.width) & 1).all()
    chosen = torch.where(read.tokens == NO_TOKEN, 5, read.tokens)
    for accepted in (
        accept(read, chosen, torch.ones(6, dtype=torch.bool), depth),
        accept_synthetic(read, chosen, torch.ones(6, dtype=torch.bool), depth, 9.0, slots, slots),
    ):
        assert int(accepted.num_drafts.max()) <= min(depth, steps)
        assert not (read.tokens.gather(1, accepted.path) == NO_TOKEN).any()
    # as many as the schedule wants, as far as there are any
    assert accepted.num_drafts.tolist() == torch.where(read.tokens == NO_TOKEN, 0, read.depths).amax(1).tolist()


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"num_steps": 3, "top_k": 1, "num_draft_tokens": 8}, "a chain .* has num_steps . 1 = 4 tokens"),
        ({"num_steps": 2, "top_k": 2, "num_draft_tokens": 9}, "has 7 nodes at most"),
        ({"num_steps": 0}, "leave the section `speculative` out"),
        ({"num_steps": 17, "top_k": 4, "num_draft_tokens": 16}, "at most 63"),
        ({"synthetic_acceptance_length": 4.5}, "must be 1 to num_steps . 1 = 4"),
    ],
)
def test_impossible_shapes_are_refused_with_the_remedy(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(path="draft", **settings)  # type: ignore[arg-type]
