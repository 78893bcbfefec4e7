"""The fused steps of drafting against their torch references: on a GPU, or under Triton's interpreter
(TRITON_INTERPRET=1), which `tests/attention/test_triton_interpreter.py` starts in a process of its own."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from attention.backends.trtllm_backend import mask_words  # noqa: E402
from speculative import guidance  # noqa: E402
from speculative.kernels import guidance as kernel  # noqa: E402
from speculative.kernels import head_input, read_trees, tree_growth  # noqa: E402
from speculative.shapes import is_chain, tree_shape  # noqa: E402
from speculative.tree import Candidates, Children, Level, candidate_depths  # noqa: E402
from speculative.tree_growth import best_tree, grow  # noqa: E402
from speculative.tree_table import TreeTable  # noqa: E402
from tests.support.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402
from workers.config import PLAIN, RoundShape  # noqa: E402
from workers.layers.kernels import topk  # noqa: E402
from workers.structured_output.mask_table import MaskTable  # noqa: E402

pytestmark = MARKS
CPU = torch.device("cpu")


def children(rows: int, k: int, vocab: int, generator: torch.Generator, mapped: bool) -> Children:
    """Log-probabilities of quarters, so that many are equal."""
    scores = -torch.randint(1, 12, (rows, k), generator=generator).float().sort(1).values / 4
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    return Children(scores, ids, torch.randperm(3 * vocab, generator=generator)[:vocab] if mapped else None)


def moved(c: Children) -> Children:
    return Children(
        c.log_probabilities.to(DEVICE), c.ids.to(DEVICE), None if c.target_ids is None else c.target_ids.to(DEVICE)
    )


@pytest.mark.parametrize("top_k,steps,width", [(4, 5, 8), (2, 2, 4), (3, 4, 16), (8, 4, 32), (10, 3, 60)])
@pytest.mark.parametrize("mapped,masked", [(True, False), (False, False), (False, True)])
def test_a_tree_grown_and_cut_by_kernels_is_the_reference_s(
    top_k: int, steps: int, width: int, mapped: bool, masked: bool
) -> None:
    """masked: a grammar leaves fewer tokens than a level has nodes; the rest are minus infinity, and no child comes
    twice."""
    batch, generator = 5, torch.Generator().manual_seed(top_k)
    depths = torch.tensor(candidate_depths(steps, top_k))
    plain = Candidates.empty(batch, depths, steps)
    fused = Candidates.empty(batch, depths.to(DEVICE), steps)
    above: Level | None = None
    above_fused: Level | None = None
    for step in range(steps):
        found = children(batch * (top_k if step else 1), top_k, 50, generator, mapped)
        if masked:
            found.log_probabilities[:, 1 + step % 2 :] = float("-inf")
        first = 0 if step == 0 else top_k + (step - 1) * top_k**2
        above = grow(plain, above, found, first, step * top_k)
        above_fused = tree_growth.grow(fused, above_fused, moved(found), first, step * top_k)
        for name in ("tokens", "scores", "candidate", "mask", "parent"):
            assert torch.equal(getattr(above, name), getattr(above_fused, name).cpu()), (step, name)
    for name in ("tokens", "scores", "parents"):
        assert torch.equal(getattr(plain, name), getattr(fused, name).cpu()), name
    slots, bonus = torch.tensor([4, 0, 6, 1, 3]), torch.arange(7) + 900
    table = TreeTable(6, width + 2, False, DEVICE)  # of an engine with a wider shape too
    tree_growth.cut(fused, slots.to(DEVICE), bonus.to(DEVICE), table._fields, width)
    expected = best_tree(bonus[slots], plain, width)
    for field, wanted in zip(
        table._fields, (expected.tokens, expected.parents, expected.depths, expected.masks), strict=True
    ):
        assert torch.equal(field[slots.to(DEVICE), :width].cpu(), wanted)
    assert table._fields[0][2].tolist() == [0] + [-1] * (width + 1)  # others' trees stay


def test_roots_without_drafts_are_written_as_torch_writes_them() -> None:
    table, other = TreeTable(9, 5, False, CPU), TreeTable(9, 5, False, DEVICE)
    for fields in (table._fields, other._fields):
        for field in fields:
            field.fill_(3)
    slots, ints = torch.tensor([2, 9, 0, 9]), torch.arange(20).view(10, 2)
    table.write_roots(slots, ints[:, 0])
    read_trees.write_roots(slots.to(DEVICE), ints.to(DEVICE)[:, 0], other._fields[0])
    assert table._fields[0][2].tolist() == [4, -1, -1, -1, -1]
    for ours, theirs in zip(table._fields, other._fields, strict=True):
        assert torch.equal(ours, theirs.cpu())


@pytest.mark.parametrize("shape", [PLAIN, tree_shape(2, 1, 3), tree_shape(4, 1, 5), tree_shape(2, 2, 5)])
def test_trees_are_read_as_torch_reads_them(shape: RoundShape) -> None:
    """As chains where a chain is verified, and no deeper than the shape."""
    table, other, width = TreeTable(9, 5, False, CPU), TreeTable(9, 5, False, DEVICE), shape.width
    generator = torch.Generator().manual_seed(width)
    for ours, theirs in zip(table._fields, other._fields, strict=True):
        ours.copy_(torch.randint(-1, 60, ours.shape, generator=generator))
        theirs.copy_(ours)
    for fields in (table._fields, other._fields):
        fields[1][:5] = torch.tensor([0, 0, 1, 1, 3])
        fields[2][:5] = torch.tensor([0, 1, 2, 2, 3])
    slots, seq_len = torch.tensor([2, 9, 0, 9]), torch.arange(10, dtype=torch.int32) * 7
    expected = table.read(slots, shape, seq_len)
    words = torch.full((4, width, 2), 7, dtype=torch.uint16, device=DEVICE)
    straight, depth = width > 1 and is_chain(shape), shape.max_new_tokens - 1
    rows = read_trees.read_trees(other._fields, slots.to(DEVICE), width, depth, straight, seq_len.to(DEVICE), words)
    assert torch.equal(words.cpu(), mask_words(expected.tree.masks))
    for name in ("tokens", "parents", "depths", "masks"):
        assert torch.equal(getattr(rows.tree, name).cpu(), getattr(expected.tree, name)), name
    for name in ("length", "ids", "positions"):
        assert torch.equal(getattr(rows, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize("rows,size,k", [(1, 128256, 4), (40, 32000, 10), (3, 17, 4), (2, 4097, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_of_log_softmax_is_torch_s(rows: int, size: int, k: int, dtype: torch.dtype) -> None:
    if INTERPRETED and (size > 40000 or dtype == torch.bfloat16):
        pytest.skip("too large, or computed on raw bits, under the interpreter")
    torch.manual_seed(size)
    logits = (torch.randn((rows, size), device=DEVICE) * 3).to(dtype)
    logits[0, size // 2] = logits[0].max()  # equals: the smaller column comes first
    best, ids, norms = topk.topk_log_softmax(logits, k)
    expected = topk.reference(logits, k)
    assert torch.equal(ids, expected[1])
    # sums of up to 128,256 float32 terms in another order
    torch.testing.assert_close(best, expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(norms, expected[2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size,k", [(17, 4), (5000, 8), (4097, 16), (8, 8)])
def test_no_column_is_found_twice_where_fewer_are_finite(size: int, k: int) -> None:
    """As a grammar's mask leaves rows: none finite, one at the end, and one less than is asked for."""
    logits = torch.full((3, size), float("-inf"), device=DEVICE)
    logits[1, size - 1] = 2.0
    logits[2, :: max(1, size // (k - 1))][: k - 1] = torch.arange(k - 1, device=DEVICE).float()
    logits[2, 0] = float("-inf")
    best, ids, norms = topk.topk_log_softmax(logits, k)
    expected = topk.reference(logits, k)
    assert all(len(set(row)) == k for row in ids.tolist()), ids
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(best, expected[0])
    torch.testing.assert_close(norms, expected[2])


@pytest.mark.parametrize("rows,size", [(1, 4096), (5, 896), (33, 64)])
def test_head_input_is_both_norms(rows: int, size: int) -> None:
    torch.manual_seed(size)
    table, hidden = torch.randn((70, size), device=DEVICE), torch.randn((rows, size), device=DEVICE)
    weights = (torch.rand((2, size), device=DEVICE) + 0.5).unbind(0)
    ids = torch.randint(0, 70, (rows,), device=DEVICE)
    ours = head_input.head_input(ids, table, hidden, *weights, 1e-5)
    torch.testing.assert_close(ours, head_input.reference(ids, table, hidden, *weights, 1e-5))


def guides(batch: int, width: int, vocab: int, generator: torch.Generator) -> MaskTable:
    """Of random guides: slot 1 has none, and neither has the padding slot."""

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    table = MaskTable(batch, width, vocab, CPU)
    assert table.host_guides is not None
    made = table.host_guides
    table.host_words.copy_(numbers(-(2**31), 2**31, *table.words.shape))
    made.index[:batch] = torch.randperm(batch, generator=generator)
    made.index[1] = -1
    made.nodes.copy_(numbers(-1, 12, *made.nodes.shape))
    made.forced.copy_(numbers(0, vocab, *made.forced.shape) * numbers(0, 2, *made.forced.shape))
    made.forced[made.forced == 0] = -1
    made.other.copy_(numbers(-1, 12, *made.other.shape))
    made.rows.copy_(numbers(-1, table.words.shape[0], *made.rows.shape))
    pairs = torch.stack([torch.randperm(12 * 8, generator=generator) for _ in range(batch)])
    made.origins.fill_(-2)
    made.origins[:, : 12 * 8], made.tokens[:, : 12 * 8] = pairs // 8, pairs % 8
    made.targets[:, : 12 * 8] = numbers(-1, 12, batch, 12 * 8)
    return table


def on_device(table: MaskTable, batch: int, width: int, vocab: int) -> MaskTable:
    moved = MaskTable(batch, width, vocab, DEVICE)
    assert moved.host_guides is not None and table.host_guides is not None
    moved.host_words.copy_(table.host_words)
    moved.host_guides.index.copy_(table.host_guides.index)
    moved.host_guides.blocks.copy_(table.host_guides.blocks)
    moved.upload(moved.words.shape[0])
    return moved


@pytest.mark.parametrize("vocab,width", [(40, 4), (5000, 7)])
def test_drafts_under_grammars_are_the_reference_s(vocab: int, width: int) -> None:
    """Masks, forced tokens and the states after them, of chains and of trees of three, along some levels."""
    batch, k, generator = 6, 3, torch.Generator().manual_seed(vocab)
    table = guides(batch, width, vocab, generator)
    copied = on_device(table, batch, width, vocab)
    assert table.guides is not None and copied.guides is not None
    slots = torch.tensor([2, 6, 0, 5, 1, 3])
    nodes, bonus = (torch.randint(high, (6,), generator=generator) for high in (width, 8))
    there = slots.to(DEVICE)
    states = guidance.begin(table.guides, slots, nodes, bonus)
    found = kernel.begin(copied.guides, there, nodes.to(DEVICE), bonus.to(DEVICE))
    assert torch.equal(found.cpu(), states) and (states >= 0).sum() > 2
    ids = torch.randperm(vocab, generator=generator)[: vocab - 3]
    for _ in range(3):
        logits = torch.randn((6 * states.shape[1], vocab - 3), generator=generator)
        ours = logits.clone().to(DEVICE)
        guidance.mask(logits, table.guides, table.words, slots, states, ids)
        kernel.mask(ours, copied.guides, copied.words, there, found, ids.to(DEVICE))
        assert torch.equal(ours.cpu(), logits) and (logits == float("-inf")).any()
        if states.shape[1] == 1:  # as the first level of a tree, and as a chain
            tokens = torch.randint(8, (6, 1), generator=generator)
            wanted = guidance.forced_or(table.guides, slots, states, tokens)
            forced, after = kernel.follow_chain(copied.guides, there, found, tokens[:, 0].to(DEVICE))
            assert torch.equal(forced.cpu(), wanted[:, 0])
            assert torch.equal(after.cpu(), guidance.follow(table.guides, slots, states, wanted))
        given = children(6 * states.shape[1], k, 8, generator, mapped=False)
        given.ids[0, 1] = guidance.forced_or(table.guides, slots, states, states.long())[0, 0].clamp_min(0)
        expected = guidance.children(table.guides, slots, states, given)
        proposed = kernel.children(copied.guides, there, found, moved(given), guidance.UNLIKELY)
        assert torch.equal(proposed.ids.cpu(), expected.ids)
        assert torch.equal(proposed.log_probabilities.cpu(), expected.log_probabilities)
        tokens = torch.randint(8, (6, k), generator=generator)
        parent = torch.arange(6).repeat_interleave(k) * states.shape[1]
        parent += torch.randint(states.shape[1], (6 * k,), generator=generator)
        level = Level(tokens, torch.zeros(6, k), tokens, tokens, parent)
        states = guidance.follow(table.guides, slots, states.flatten()[parent].view(6, k), tokens)
        level = Level(*(t.to(DEVICE) for t in (tokens, torch.zeros(6, k), tokens, tokens, parent)))
        found = kernel.follow_level(copied.guides, there, found, level)
        assert torch.equal(found.cpu(), states)
