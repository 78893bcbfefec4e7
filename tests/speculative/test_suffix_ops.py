"""`aerie.kernels.drafting.suffix_match`: what the contracts say, against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.kernels.capability import Capability
from aerie.kernels.drafting.suffix_match import MatchLimits, attach_chains, find_matches, record_tokens
from aerie.kernels.tree.nodes import NO_TOKEN, Tree, root_only_trees
from tests.support.kernels.num_operations import num_operations


def plain_match(text: list[int], shortest: int, longest: int, num_nodes: int) -> tuple[int, list[int]]:
    """The longest, then newest match, and what followed it, token by token."""
    best, at = 0, -1
    for end in range(len(text) - 1):
        length = 0
        while length < longest and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length >= max(best, 1):
            best, at = length, end
    if best < shortest:
        return 0, [NO_TOKEN] * num_nodes
    proposed = list(text)
    for ahead in range(num_nodes):
        proposed.append(proposed[at + 1 + ahead])  # past the end of the text it repeats the proposal
    return best, proposed[len(text) :]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 12), st.integers(1, 17))
def test_matches_are_the_longest_and_newest(rows: list[list[int]], shortest: int, more: int, num_nodes: int) -> None:
    """The reference and the one for CPUs."""
    history = torch.full((len(rows) + 1, 64), 1, dtype=torch.int32)  # garbage after each text
    for row, text in enumerate(rows):
        history[row, : len(text)] = torch.tensor(text)
    seq_len = torch.tensor([len(text) - 1 for text in rows] + [0], dtype=torch.int32)
    limits = MatchLimits(shortest, shortest + more)
    slots = torch.tensor([*range(len(rows)), len(rows)])
    expected = [plain_match(text, shortest, shortest + more, num_nodes) for text in [*rows, [1]]]
    host = find_matches.serving(Capability("cpu"))
    assert [each.name for each in host] == ["numpy"]
    for find in (find_matches.reference, host[0].function):
        chains = torch.full((len(rows) + 1, num_nodes), 5)
        lengths = find(history, slots, seq_len, limits, chains, max_tokens=max(map(len, rows)))
        assert list(zip(lengths.tolist(), chains.tolist(), strict=True)) == expected


def _drawn(data: st.DataObject, num_rows: int, width: int, lowest: int) -> torch.Tensor:
    row = st.lists(st.integers(lowest, 1), min_size=width, max_size=width)
    return torch.tensor(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_emitted_tokens_enter_the_history_and_are_compared(data: st.DataObject) -> None:
    num_rows, width, num_nodes = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 6)),
        data.draw(st.integers(1, 6)),
    )
    history = torch.arange(num_rows * 20, dtype=torch.int32).view(num_rows, 20) + 100
    before = history.tolist()
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=num_rows, max_size=num_rows))
    counts = data.draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows))
    tokens = _drawn(data, num_rows, width, 0)
    chains = _drawn(data, num_rows, num_nodes, NO_TOKEN)
    slots = torch.arange(num_rows).flip(0)
    found = record_tokens(
        history, slots, torch.tensor(lengths, dtype=torch.int32), tokens, torch.tensor(counts), chains
    )
    for row, slot in enumerate(slots.tolist()):
        emitted, chain = tokens[row, : counts[row]].tolist(), chains[slot].tolist()
        start = lengths[row] + 1
        assert history[slot].tolist() == before[slot][:start] + emitted + before[slot][start + len(emitted) :]
        equal = 0
        while equal < min(len(emitted), num_nodes) and emitted[equal] == chain[equal]:
            equal += 1
        assert found[row] == (-1 if chain[0] == NO_TOKEN else equal)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_chain_joins_the_tree_where_its_path_leaves_it(data: st.DataObject) -> None:
    """The tree then has the paths of both and no equal siblings, and its masks are those of its parents."""
    first, num_nodes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    tokens, parents = [0], [0]
    for node in range(1, first):
        parent = data.draw(st.integers(0, node - 1))
        tokens.append(sum(other == parent for other in parents[1:]))
        parents.append(parent)
    chain = data.draw(st.lists(st.integers(0, 2), min_size=0, max_size=num_nodes))
    spare = data.draw(st.integers(0, 3))
    fields = torch.zeros((4, 1, first + num_nodes + spare), dtype=torch.int64)
    fields[0, 0, :first], fields[1, 0, :first] = torch.tensor(tokens), torch.tensor(parents)
    for node in range(first):
        fields[2, 0, node] = fields[2, 0, parents[node]] + 1 if node else 0
        fields[3, 0, node] = fields[3, 0, parents[node]] | 1 << node if node else 1
    before = fields.clone()
    tree = Tree(*fields.unbind(0))
    chains = torch.tensor([chain + [NO_TOKEN] * (num_nodes - len(chain))])
    attach_chains(tree, torch.tensor([0]), chains, first)
    for ours, former in zip(tree.fields, before, strict=True):
        assert torch.equal(ours[:, :first], former[:, :first])
        assert torch.equal(ours[:, first + num_nodes :], former[:, first + num_nodes :])
    nodes = [node for node in range(first + num_nodes) if node < first or tree.tokens[0, node] != NO_TOKEN]
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in nodes[1:]:
        parent = int(tree.parents[0, node])
        paths[node] = (*paths[parent], int(tree.tokens[0, node]))
        assert tree.masks[0, node] == tree.masks[0, parent] | 1 << node
        assert tree.depths[0, node] == len(paths[node]) == tree.depths[0, parent] + 1
    assert len(set(paths.values())) == len(paths), "two nodes have the same path"
    former_paths = {paths[node] for node in nodes if node < first}
    assert set(paths.values()) == former_paths | {tuple(chain[: end + 1]) for end in range(len(chain))}


def test_a_longer_chain_under_a_root_takes_no_more_operations() -> None:
    """A root has no child to merge with, but every copied draft took twelve operations to find that out: 8 % of a plain
    round of the embedded pair on a CPU."""
    slots = torch.arange(2)

    def operations(num_nodes: int) -> int:
        trees = root_only_trees(torch.tensor([3, 4, 0]), num_nodes + 1)
        trees = Tree(*(each.contiguous().clone() for each in trees.fields))
        chains = torch.arange(3 * num_nodes).view(3, num_nodes)
        counted = num_operations(lambda: attach_chains.reference(trees, slots, chains, 1))
        assert torch.equal(trees.tokens[:2, 1:], chains[:2])
        assert all(map(torch.equal, trees.fields[1:], root_only_trees(slots.new_zeros(3), num_nodes + 1).fields[1:]))
        return counted

    assert operations(15) == operations(2)


def test_a_text_that_repeats_itself_is_continued() -> None:
    history = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 0, 0, 0]], dtype=torch.int32)
    chains = torch.zeros((1, 6), dtype=torch.int64)
    length = find_matches(
        history, torch.tensor([0]), torch.tensor([6], dtype=torch.int32), MatchLimits(2, 8), chains, 10
    )
    assert (length.item(), chains.tolist()) == (4, [[8, 9, 7, 8, 9, 7]])


@pytest.mark.parametrize("seq_len", [0, 5])
def test_a_text_without_a_match_proposes_nothing(seq_len: int) -> None:
    history = torch.arange(10, dtype=torch.int32).unsqueeze(0)
    chains = torch.zeros((1, 3), dtype=torch.int64)
    length = find_matches(
        history, torch.tensor([0]), torch.tensor([seq_len], dtype=torch.int32), MatchLimits(1, 8), chains, 10
    )
    assert (length.item(), chains.tolist()) == (0, [[NO_TOKEN] * 3])
