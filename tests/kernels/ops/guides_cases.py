"""`aerie.kernels.drafting.guides`: random guides of some requests, none of others and of the padding slot; states that
are none; forced tokens among and beside the proposals; chains and levels of trees."""

import torch

from aerie.kernels.drafting import guides
from aerie.kernels.drafting.guides import GuideTable, block_size
from aerie.kernels.tree.nodes import Level
from aerie.workers.structured_output.mask_table import MaskTable
from tests.kernels.ops.case import Case
from tests.kernels.ops.tree_growth_cases import proposals

BATCH = 6
SLOTS = (2, 6, 0, 5, 1, 3)  # 1 has no guide, 6 is padding
UNLIKELY = -1024.0


class _Step:
    """Guides and masks of one step, the same on every device. rows: of each request."""

    def __init__(self, vocab: int, width: int, rows: int, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(vocab + rows)
        shape = MaskTable(BATCH, width, vocab, torch.device("cpu")).words.shape
        made = GuideTable.of(
            torch.empty(BATCH + 1, dtype=torch.int32), torch.empty((BATCH, block_size(width)), dtype=torch.int32)
        )
        made.index[:BATCH] = torch.randperm(BATCH, generator=self._generator)
        made.index[[1, BATCH]] = -1
        made.nodes.copy_(self.numbers(-1, 12, *made.nodes.shape))
        made.forced.copy_(self.numbers(0, vocab, *made.forced.shape) * self.numbers(0, 2, *made.forced.shape))
        made.forced[:, ::3] = self.numbers(0, 8, *made.forced[:, ::3].shape).int()  # that may be proposed, too
        made.forced[made.forced == 0] = -1
        made.other.copy_(self.numbers(-1, 12, *made.other.shape))
        made.rows.copy_(self.numbers(-1, shape[0], *made.rows.shape))
        pairs = torch.stack([torch.randperm(12 * 8, generator=self._generator) for _ in range(BATCH)])
        made.origins.fill_(-2)
        made.tokens.zero_()
        made.targets.zero_()
        made.origins[:, : 12 * 8], made.tokens[:, : 12 * 8] = pairs // 8, pairs % 8
        made.targets[:, : 12 * 8] = self.numbers(-1, 12, BATCH, 12 * 8)
        self.guides = GuideTable.of(made.index.to(device), made.blocks.to(device))
        self.words = self.numbers(-(2**31), 2**31, *shape).int().to(device)
        self.slots = torch.tensor(SLOTS, device=device)
        states = self.numbers(-1, 12, BATCH, rows).int()
        states[made.index[list(SLOTS)] < 0] = -1
        self.states = states.to(device)

    def numbers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator)


def _case(operation: str, vocab: int, rows: int, width: int = 7) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        step, k = _Step(vocab, width, rows, device), 3
        of = step.guides, step.slots
        tokens = step.numbers(0, 8, BATCH, k).to(device)
        if operation == "begin":
            return *of, step.numbers(0, width, BATCH).to(device), tokens[:, 0]
        if operation == "follow_chain":
            return *of, step.states, tokens[:, 0]
        if operation == "follow_level":
            parent = torch.arange(BATCH).repeat_interleave(k) * rows + step.numbers(0, rows, BATCH * k)
            return *of, step.states, Level(tokens, tokens.float(), tokens, tokens, parent.to(device))
        if operation == "mask":
            logits = torch.randn((BATCH * rows, vocab - 3), generator=torch.Generator().manual_seed(rows)).to(device)
            ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[: vocab - 3].to(device)
            return logits, step.guides, step.words, step.slots, step.states, ids
        found = proposals(BATCH * rows, k, 8, torch.Generator().manual_seed(rows), mapped=width == 4)
        maps = None if found.target_ids is None else found.target_ids.to(device)
        found = type(found)(found.log_probabilities.to(device), found.ids.to(device), maps)
        return *of, step.states, found, UNLIKELY

    written = (0,) if operation == "mask" else ()
    name = f"{vocab}x{rows}-nodes-{width}"
    return Case(getattr(guides, operation), name, arguments, written, exact=True)


CASES = tuple(
    _case(operation, vocab, rows, width)
    for vocab, width in ((40, 4), (5000, 7))
    for operation, all_rows in (
        ("begin", (1,)),
        ("follow_chain", (1,)),
        ("follow_level", (1, 3)),
        ("mask", (1, 3)),
        ("children", (1, 3)),
    )
    for rows in all_rows
)
