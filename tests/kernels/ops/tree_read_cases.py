"""`aerie.kernels.tree.tree_read`: plain rounds, chains of trees, and trees no deeper than a shape, of a wider table;
padding rows; masks for a backend's buffer."""

import torch

from aerie.kernels.tree.nodes import Tree
from aerie.kernels.tree.tree_growth import best_tree
from aerie.kernels.tree.tree_read import read_trees, write_roots
from tests.kernels.ops.case import Case
from tests.support.drafts.random_trees import random_candidates

WIDTH = 37
SLOTS = (2, 9, 0, 9)  # 9 is padding


def _trees(device: torch.device) -> Tree:
    """Any numbers, but in the first nodes, which are a tree."""
    generator = torch.Generator().manual_seed(3)
    fields = torch.randint(-1, 60, (4, 10, WIDTH), generator=generator)
    fields[1, :, :5] = torch.tensor([0, 0, 1, 1, 3])
    fields[2, :, :5] = torch.tensor([0, 1, 2, 2, 3])
    fields[3] <<= 30  # masks have bits beyond the first word
    return Tree(*fields.to(device).unbind(0))


def _read(width: int, max_depth: int, as_chain: bool, num_words: int) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        words = torch.full((len(SLOTS), width, num_words), 7, dtype=torch.uint16, device=device) if num_words else None
        seq_len = torch.arange(10, dtype=torch.int32, device=device) * 7
        return _trees(device), torch.tensor(SLOTS, device=device), width, max_depth, as_chain, seq_len, words

    name = f"{width}-deep-{max_depth}{'-chain' if as_chain else ''}-{num_words}"
    return Case(read_trees, name, arguments, written=(6,), exact=True)


def _read_wide(width: int, as_chain: bool) -> Case:
    """Trees with up to 90 nodes."""

    def arguments(device: torch.device) -> tuple[object, ...]:
        tree = best_tree(torch.arange(10), random_candidates(10, 6, 7, seed=1), 90)
        tree.tokens[::3, 21:] = -1
        trees = Tree(*(each.to(device).contiguous() for each in tree.fields))
        seq_len = torch.arange(10, dtype=torch.int32, device=device)
        return trees, torch.tensor(SLOTS, device=device), width, 5, as_chain, seq_len, None

    return Case(read_trees, f"wide-{width}{'-chain' if as_chain else ''}", arguments, exact=True)


def _roots(device: torch.device) -> tuple[object, ...]:
    bonus = torch.arange(20, device=device).view(10, 2)[:, 0]
    return _trees(device), torch.tensor(SLOTS, device=device), bonus


CASES = (
    *(
        _read(*shape, num_words)
        for shape in ((1, 0, False), (3, 2, True), (5, 4, True), (5, 3, False), (WIDTH, 9, False))
        for num_words in ((0, 2, 4) if shape[0] == WIDTH else (0, 2))
    ),
    *(_read_wide(*shape) for shape in ((1, False), (6, True), (40, False), (90, False))),
    Case(write_roots, "padding", _roots, written=(0,), exact=True),
)
