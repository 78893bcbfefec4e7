"""The recurrence of deterministic engines: a row has the same bits in prompts, however they are cut, in rounds of one
row, in chains and in trees. On a GPU, or with small heads under Triton's interpreter, see `test_delta_kernels`."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.delta_rule.chunks import delta_rule_chunks  # noqa: E402
from aerie.kernels.delta_rule.rounds import commit_rows, delta_rule_rounds  # noqa: E402
from aerie.kernels.delta_rule.tables import ChunkTables, DeltaHeads, DeltaState, RoundTables  # noqa: E402
from tests.support.kernels.delta_rule import RandomTree, random_rows, random_weights  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS
HEADS = DeltaHeads(1, 2, 16, 16) if INTERPRETED else DeltaHeads(16, 48, 128, 128)  # the latter of Qwen3.5-27B
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
LENGTH = 26 if INTERPRETED else 300
WIDTH, PATH, SLOTS = 9, 6, 3
SAVED = 14  # tokens before the snapshot
MASKS = [1, 0b11, 0b101, 0b1101, 0b10011, 0b100101, 0b1000011, 0b10001101, 0b100010011]
BRANCH = [0, 2, 3, 7]  # a path of MASKS


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels_of_operations():
        yield


class Life:
    """A text in slot 1, computed in any passes, beside another request in slot 0 if `beside`. out: of the text's rows.
    fixed: see `RoundTables`."""

    text = random_rows(HEADS, LENGTH, DTYPE, DEVICE, 1)
    others = random_rows(HEADS, LENGTH, DTYPE, DEVICE, 2)
    weights = random_weights(HEADS, DTYPE, DEVICE)

    def __init__(self, beside: bool = False, fixed: bool = True) -> None:
        self.kept = DeltaState.zeros(1, HEADS, SLOTS, 2, WIDTH, PATH, DTYPE, DEVICE)
        self.beside, self.fixed, self.length, self.out = beside, fixed, 0, torch.empty(0, device=DEVICE)
        self.counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)

    @property
    def slots(self) -> Tensor:
        return torch.tensor([0, 1] if self.beside else [1], device=DEVICE)

    def _rows(self, mine: list[int | None], num_others: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of another request, then rows of the text by position; None: of neither."""
        fields = []
        for text, others in zip(vars(self.text).values(), vars(self.others).values(), strict=True):
            last = [others[i if i is not None else -1] if i is None else text[i] for i in mine]
            fields.append(torch.cat([others[:num_others], torch.stack(last)]))
        return tuple(fields)  # type: ignore[return-value]

    def prompt(self, end: int) -> "Life":
        others = 5 if self.beside else 0
        rows = self._rows(list(range(self.length, end)), others)
        counts = [others, end - self.length] if self.beside else [end - self.length]
        ends = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
        starts = torch.tensor([0, self.length][-len(counts) :], dtype=torch.int32, device=DEVICE)
        at = SAVED if self.length < SAVED <= end else -1
        snapshot = torch.tensor([-1, at][-len(counts) :], dtype=torch.int32, device=DEVICE)
        entries = torch.ones(len(counts), dtype=torch.int64, device=DEVICE)
        tables = ChunkTables(self.slots, ends, starts, snapshot, entries, self.fixed)
        out = torch.empty((len(rows[0]), HEADS.value_heads * HEADS.value_dim), dtype=DTYPE, device=DEVICE)
        delta_rule_chunks(type(self.text)(*rows), self.weights, self.kept.layer(0), tables, out)
        self._keep(out[others:], end)
        return self

    def round(self, masks: list[int], path: list[int]) -> "Life":
        """Verify a tree whose `path` has the next tokens of the text, and commit it."""
        width, batch = len(masks), len(self.slots)
        mine: list[int | None] = [self.length + path.index(i) if i in path else None for i in range(width)]
        rows = self._rows(mine, width * (batch - 1))
        lengths = torch.tensor([40, self.length][-batch:], dtype=torch.int32, device=DEVICE)
        at = torch.tensor([-1, SAVED, -1, -1], dtype=torch.int32, device=DEVICE)
        entries = torch.ones(SLOTS + 1, dtype=torch.int64, device=DEVICE)
        mask = torch.tensor([masks] * batch, device=DEVICE)
        tables = RoundTables(self.slots, lengths, mask, at, entries, self.fixed)
        out = torch.empty((width * batch, HEADS.value_heads * HEADS.value_dim), dtype=DTYPE, device=DEVICE)
        delta_rule_rounds(type(self.text)(*rows), self.weights, self.kept.layer(0), tables, out)
        self._keep(out[-width:][path], self.length + len(path))
        paths = torch.tensor([path] * batch, device=DEVICE)
        commit_rows(self.kept, self.slots, paths, torch.full((batch,), len(path), dtype=torch.int32, device=DEVICE))
        return self

    def _keep(self, out: Tensor, end: int) -> None:
        self.out, self.length = torch.cat([self.out, out.float()]), end

    @property
    def state(self) -> Tensor:
        """Before the committed rows."""
        return self.kept.state[0, 1]


def test_prompts_are_the_same_however_they_are_cut() -> None:
    whole = Life().prompt(LENGTH)
    for cuts, beside in (([1, 2, SAVED - 1, LENGTH], True), ([SAVED, SAVED + 1, LENGTH], False)):
        life = Life(beside)
        for end in cuts:
            life.prompt(end)
        assert torch.equal(life.out, whole.out) and torch.equal(life.state, whole.state)
        for saved in (life.kept.saved_state, life.kept.saved_conv):
            assert saved[0, 1].any()
        assert torch.equal(life.kept.saved_state[0, 1], whole.kept.saved_state[0, 1])


@pytest.mark.parametrize("beside", [*slow(False), True])
@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
def test_rounds_are_the_same_as_prompts(shape: str, beside: bool) -> None:
    """The outputs, the states, and the snapshot that a round saves on its way."""
    masks, path = {
        "plain": ([1], [0]),
        "chain": ([(2 << i) - 1 for i in range(5)], [0, 1, 2]),
        "tree": (MASKS, BRANCH),
    }[shape]
    life, first = Life(beside).prompt(7), 7
    rounds = 0
    while life.length + len(path) <= LENGTH and rounds < (9 if INTERPRETED else 60):
        accepted = 1 + rounds % len(path)
        life.round(masks, path[:accepted])
        rounds += 1
    whole = Life().prompt(life.length)
    assert torch.equal(life.out[first:], whole.out[first:])
    assert torch.equal(life.state, Life().prompt(life.length - int(life.kept.count[1])).state)
    saved = Life().prompt(SAVED)
    assert torch.equal(life.kept.saved_state[0, 1], saved.state)
    assert torch.equal(life.kept.saved_conv[0, 1], saved.kept.conv[0, 1])


def test_every_row_of_a_tree_is_that_of_its_path() -> None:
    """Also of random trees with as many nodes as fit, whose rows start again at the committed state."""
    rng = random.Random(0)
    for _ in range(1 if INTERPRETED else 10):
        masks = RandomTree.draw(rng, WIDTH, WIDTH).masks
        for node in (5, WIDTH - 1) if INTERPRETED else range(WIDTH):
            path = [i for i in range(WIDTH) if masks[node] >> i & 1][:PATH]
            tree, chain = Life().prompt(3).round(masks, path), Life().prompt(3 + len(path))
            assert torch.equal(tree.out, chain.out), (masks, node)


def test_other_kernels_would_be_noticed() -> None:
    whole, rounds = Life(fixed=False).prompt(12), Life(fixed=False).prompt(7)
    for _ in range(6):
        rounds.round([1], [0])
    torch.testing.assert_close(rounds.state, whole.state, atol=0.05, rtol=0.05)
    assert not torch.equal(rounds.state, whole.state)
