"""`aerie.kernels.tree.acceptance`: trees, chains and roots alone; trees with fewer levels; requests near their
limits, finished, with stop tokens, with penalties and without finite logits; padding rows."""

import torch

from aerie.kernels.tree.acceptance import accept_commit
from aerie.kernels.tree.nodes import NO_TOKEN, Tree
from aerie.kernels.tree.tree_growth import best_tree
from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from aerie.workers.slots import SlotTable
from tests.kernels.ops.case import Case
from tests.support.drafts.random_trees import random_candidates
from tests.support.slots import enter

BATCH = 14
VOCAB = 128


def _table(seed: int, device: torch.device) -> SlotTable:
    """Two slots are free; every third request counts its tokens."""
    table = SlotTable(BATCH + 2, 4, VOCAB, device)
    for slot in range(BATCH):
        penalty = 1.0 if slot % 3 == 0 else 0.0
        sampling = SamplingParams(
            9, 0.0, frequency_penalty=penalty, seed=slot * 7919 + seed, stop_token_ids=(slot % 99, 50)
        )
        enter(table, SlotInit(slot, 20 + slot, 10, 22 + slot + slot % 7, sampling, pack_i32([1]), pack_i32([slot])))
    table.finished[1] = True
    return table


def _trees(top_k: int, steps: int, width: int) -> Tree:
    tree = best_tree(torch.arange(BATCH) % 100, random_candidates(BATCH, top_k, steps, seed=width), width)
    tree.tokens[3::5, 1:] = NO_TOKEN  # requests that were not drafted for
    tree.tokens[1::5, 1 + width // 2 :] = NO_TOKEN  # and some for which a smaller shape was
    return tree


def _chosen(tree: Tree, turn: int) -> torch.Tensor:
    """Follows a child where there is one, three times of four."""
    chosen = torch.randint(0, 99, tree.tokens.shape, generator=torch.Generator().manual_seed(turn))
    for b, parents in enumerate(tree.parents.tolist()):
        for node in range(len(parents)):
            children = [child for child, parent in enumerate(parents) if parent == node and child]
            if children and (b + node + turn) % 4:
                chosen[b, node] = tree.tokens[b, children[turn % len(children)]].clamp_min(0)
    chosen[2::6] = NOT_FINITE  # after every node, so wherever the path ends
    return chosen


def _case(top_k: int, steps: int, width: int, turn: int, synthetic: float | None) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        tree = _trees(top_k, steps, width)
        chosen, slots = _chosen(tree, turn), torch.arange(BATCH)
        padded = Tree(*(torch.cat((f, f[:2])).to(device) for f in tree.fields))
        slots = torch.cat((slots, torch.full((2,), BATCH + 2))).to(device)
        return (
            slots,
            padded,
            torch.cat((chosen, chosen[:2])).to(device),
            _table(turn, device).commit_tables,
            steps,
            synthetic,
        )

    name = f"{top_k}/{steps}/{width}-{turn}-{'real' if synthetic is None else synthetic}"
    quick = turn == 1 and width < 60 and (synthetic is None or width == 4) or (width, turn) in ((12, 3), (130, 1))
    return Case(accept_commit, name, arguments, written=(3,), exact=True, slow=not quick)


CASES = tuple(
    _case(*shape, turn, synthetic)
    for shape in ((1, 3, 4), (4, 5, 16), (3, 3, 12), (1, 1, 2), (8, 8, 63), (7, 7, 130))
    for turn in (0, 1, 3)
    for synthetic in ((None, 1.6) if turn < 3 else (None,))
)
