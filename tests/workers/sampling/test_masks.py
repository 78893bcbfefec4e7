"""What a grammar does not allow is never chosen: masks against lists of tokens, of a whole vocabulary and of one cut
over ranks, with all that a choice may need besides."""

import pytest
import torch

from aerie.kernels.sampling.penalties import FREE
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.sampling import CAPTURED_NEEDS, Rows, Sampler, SamplingNeeds
from aerie.workers.scheduling.plan import SamplingParams, SlotInit
from aerie.workers.slots import SlotTable
from aerie.workers.structured_output.mask_table import MaskTable
from tests.support.slots import enter
from tests.support.thread_group import on_ranks

CPU = torch.device("cpu")
VOCAB, WIDTH = 75, 3
KINDS = [kind for kind in CAPTURED_NEEDS if kind.masked]


def table() -> SlotTable:
    slots = SlotTable(4, 4, VOCAB, CPU)
    for slot, sampling in enumerate(
        (
            SamplingParams(9, 0.0),
            SamplingParams(9, 1.0, seed=1),
            SamplingParams(9, 0.7, seed=2, top_k=5, top_p=0.9),
            SamplingParams(9, 1.3, seed=3, min_p=0.01, frequency_penalty=0.5),
        )
    ):
        enter(slots, SlotInit(slot, 0, 5, 14, sampling))
    return slots


def masks(allowed: dict[int, list[list[int]]]) -> MaskTable:
    """allowed: by slot, the tokens of each of its rows."""
    made, row = MaskTable(4, WIDTH, VOCAB, CPU), 0
    made.host_words.zero_()
    for slot, rows in allowed.items():
        made.host_index[slot] = row
        for tokens in rows:
            for token in tokens:
                bit = 1 << token % 32
                made.host_words[row, token // 32] |= bit - (1 << 32) if bit >> 31 else bit
            row += 1
    made.upload(row)
    return made


ALLOWED = {0: [[31], [32, 63], [74]], 2: [[0], [5, 6, 7], [64, 74]], 3: [[1, 2], [33], [40, 41]]}
SLOTS = torch.tensor([3, 1, 4, 0, 2])  # 4 is padding, and 1 is free
POSITIONS = torch.arange(5, 5 + WIDTH).expand(5, -1)


@pytest.mark.parametrize("needs", KINDS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_choices_are_of_what_is_allowed(needs: SamplingNeeds, num_ranks: int) -> None:
    logits = torch.randn((SLOTS.shape[0] * WIDTH, VOCAB), generator=torch.Generator().manual_seed(1)) * 3
    free = Sampler(table(), VocabShard(VOCAB, SOLO)).sample(
        logits.clone(), Rows(SLOTS, POSITIONS), SamplingNeeds(True, True, True)
    )

    def run(group: TPGroup) -> torch.Tensor:
        shard = VocabShard(VOCAB, group)
        mine = torch.full((logits.shape[0], shard.size), float("-inf"))
        mine[:, : shard.end - shard.first] = logits[:, shard.first : shard.end]
        sampler = Sampler(table(), shard, masks(ALLOWED))
        return sampler.sample(mine, Rows(SLOTS, POSITIONS), needs).tokens

    outcomes = on_ranks(num_ranks, run)
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)
    for slot, chosen in zip(SLOTS.tolist(), outcomes[0].tolist(), strict=True):
        for row, token in enumerate(chosen):
            if slot in ALLOWED:
                assert token in ALLOWED[slot][row]
    if needs.random:
        assert outcomes[0][1].tolist() == free.tokens[1].tolist(), "a mask changed a request that has none"


def test_log_probabilities_are_of_the_model() -> None:
    logits = torch.randn((SLOTS.shape[0] * WIDTH, VOCAB), generator=torch.Generator().manual_seed(2))
    sampler = Sampler(table(), VocabShard(VOCAB, SOLO), masks(ALLOWED))
    needs = SamplingNeeds(True, num_logprobs=2, masked=True)
    sampled = sampler.sample(logits.clone(), Rows(SLOTS, POSITIONS), needs)
    assert sampled.logits is not None and torch.equal(sampled.logits.flatten(0, 1), logits)


def test_a_table_begins_without_grammars() -> None:
    assert bool((MaskTable(4, WIDTH, VOCAB, CPU).index == FREE).all())
