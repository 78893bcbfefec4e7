"""`aerie.kernels.drafting.suffix_match`: texts of one token, shorter than a match, that repeat one token, and longer
than a block; padding rows; chains that begin in the tree, end in it, or are not there."""

import torch

from aerie.kernels.drafting.suffix_match import MatchLimits, attach_chains, find_matches, record_tokens
from aerie.kernels.tree.nodes import NO_TOKEN, Tree
from tests.kernels.ops.case import Case

LENGTHS = (0, 1, 2, 7, 30, 500, 1023, 1024, 1025, 1990, 11, 3, 0)  # committed; the last row is the padding slot
SLOTS = (12, 3, 0, 9, 1, 8, 5, 2, 10, 12, 6, 7, 4, 11)
COLUMNS = 2048


def _history(alphabet: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(alphabet)
    history = torch.randint(0, alphabet, (len(LENGTHS), COLUMNS), generator=generator, dtype=torch.int32)
    history[10] = 5  # one token again and again
    history[9, 1970:1991] = history[9, 3:24]  # a copy that ends far behind its source
    return history


def _find(alphabet: int, shortest: int, longest: int, num_nodes: int) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        chains = torch.full((len(LENGTHS), num_nodes), 77, device=device)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        limits = MatchLimits(shortest, longest)
        slots = torch.tensor(SLOTS, device=device)
        return _history(alphabet).to(device), slots, lengths, limits, chains, COLUMNS

    return Case(find_matches, f"{alphabet}-{shortest}-{longest}-{num_nodes}", arguments, written=(4,), exact=True)


def _record(num_columns: int, num_nodes: int) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        generator = torch.Generator().manual_seed(num_columns)
        tokens = torch.randint(0, 2, (len(SLOTS), num_columns), generator=generator)
        counts = torch.arange(len(SLOTS)) % (num_columns + 1)
        counts[torch.tensor(SLOTS) == 12] = 0
        chains = torch.randint(0, 2, (len(LENGTHS), num_nodes), generator=generator)
        chains[::4] = NO_TOKEN
        slots = torch.tensor(SLOTS)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)[slots]
        given = (_history(9), slots, lengths, tokens, counts, chains)
        return tuple(each.to(device) for each in given)

    return Case(record_tokens, f"{num_columns}-{num_nodes}", arguments, written=(0,), exact=True)


def _tries(batch: int, num_nodes: int) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, depths and masks of random trees; the children of a node are 0, 1, 2 and so on."""
    generator = torch.Generator().manual_seed(num_nodes)
    tokens, parents, depths, masks = torch.zeros((4, batch, num_nodes), dtype=torch.int64)
    masks[:, 0] = 1
    for row in range(batch):
        for node in range(1, num_nodes):
            parent = int(torch.randint(0, node, (1,), generator=generator))
            tokens[row, node] = (parents[row, 1:node] == parent).sum()
            parents[row, node], depths[row, node] = parent, depths[row, parent] + 1
            masks[row, node] = masks[row, parent] | 1 << node
    return tokens, parents, depths, masks


def _attach(first: int, num_nodes: int) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        wide = [torch.cat((field, torch.full((10, num_nodes + 1), 9)), 1) for field in _tries(10, first)]
        generator = torch.Generator().manual_seed(num_nodes)
        chains = torch.randint(0, 3, (10, num_nodes), generator=generator)
        chains[2, num_nodes // 2 :] = NO_TOKEN
        chains[5] = NO_TOKEN
        slots = torch.tensor((9, 2, 5, 0, 9, 1, 7, 3, 4), device=device)
        return Tree(*(each.contiguous().to(device) for each in wide)), slots, chains.to(device), first

    return Case(attach_chains, f"{first}-{num_nodes}", arguments, written=(0,), exact=True)


CASES = (
    _find(3, 2, 16, 15),
    _find(40, 1, 3, 4),
    _find(100000, 3, 8, 1),
    _record(1, 15),
    _record(16, 15),
    _record(4, 7),
    _attach(1, 15),
    _attach(8, 7),
    _attach(30, 16),
)
