"""Vocabularies that are small beside the number of ranks: shards with padding, and shards that are all padding."""

import pytest
import torch
from torch import Tensor

from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.sampling import Rows, Sampler, SamplingNeeds
from aerie.workers.scheduling.plan import SamplingParams, SlotInit
from aerie.workers.slots import SlotTable
from tests.support.slots import enter
from tests.support.thread_group import on_ranks

CPU = torch.device("cpu")
ROWS = 40
CASES = [(2, 5), (4, 5), (8, 9), (8, 3), (3, 1)]  # ranks, tokens: of the last four some ranks have none
PARAMS = (
    SamplingParams(9, 0.0),
    SamplingParams(9, 1.0, seed=3),
    SamplingParams(9, 0.7, top_k=2, seed=4),
    SamplingParams(9, 1.5, top_p=0.8, min_p=0.05, seed=5),
)


def shard_of(logits: Tensor, shard: VocabShard) -> Tensor:
    """A rank's columns, as its head would give them."""
    mine = logits.new_zeros((logits.shape[0], shard.size))
    mine[:, : shard.end - shard.first] = logits[:, shard.first : shard.end]
    return shard.mask_padding(mine)


def logits_of(vocab: int, dtype: torch.dtype) -> Tensor:
    """With ties, and with rows far from zero on either side."""
    logits = torch.randint(-3, 4, (ROWS, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[::4] *= 20
    logits[1::4] -= 200
    return logits


@pytest.mark.parametrize("ranks,vocab", [(1, 7), (2, 5), (4, 5)])
@pytest.mark.parametrize("sampling", PARAMS)
def test_a_row_that_is_not_finite_chooses_nothing_on_any_rank(ranks: int, vocab: int, sampling: SamplingParams) -> None:
    """Whichever shard the NaN is in; the other rows choose what they choose without it."""
    logits = logits_of(vocab, torch.float32)
    broken = logits.clone()
    broken[0], broken[5, vocab - 1], broken[11, 0] = float("nan"), float("nan"), float("inf")
    slots = SlotTable(ROWS, 4, vocab, CPU)
    for slot in range(ROWS):
        enter(slots, SlotInit(slot, 0, 1, 10, sampling))
    rows = Rows(torch.arange(ROWS), torch.arange(ROWS).unsqueeze(1))
    needs = SamplingNeeds.of([slots.facts[slot] for slot in range(ROWS)])

    def run(group: TPGroup) -> list[Tensor]:
        shard = VocabShard(vocab, group)
        sampler = Sampler(slots, shard)
        return [sampler.sample(shard_of(each, shard), rows, needs).tokens.flatten() for each in (logits, broken)]

    for whole, hurt in on_ranks(ranks, run):
        assert (hurt < 0).nonzero().flatten().tolist() == [0, 5, 11]
        assert torch.equal(hurt[hurt >= 0], whole[hurt >= 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks,vocab", CASES)
def test_the_likeliest_of_all_shards(ranks: int, vocab: int, dtype: torch.dtype) -> None:
    logits = logits_of(vocab, dtype)
    expected = torch.log_softmax(logits.float(), -1)

    def run(group: TPGroup) -> list[tuple[Tensor, Tensor]]:
        shard = VocabShard(vocab, group)
        mine = shard_of(logits, shard)
        assert torch.equal(shard.argmax(mine), logits.float().argmax(-1))
        assert torch.equal(shard.gather_logits(mine), logits)
        return [shard.topk_log_softmax(mine, k) for k in range(1, vocab + 3)]

    ours = on_ranks(ranks, run)
    for k in range(1, vocab + 3):
        kept = min(k, vocab)
        for best, ids in (each[k - 1] for each in ours):
            assert best.shape == ids.shape == (ROWS, kept)
            assert torch.isfinite(best).all() and int(ids.max()) < vocab
            torch.testing.assert_close(best, expected.topk(kept, -1).values, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(best, expected.gather(1, ids), atol=1e-5, rtol=1e-5)
            assert all(len(set(row)) == kept for row in ids.tolist())
            assert torch.equal(ids, ours[0][k - 1][1])


@pytest.mark.parametrize("ranks,vocab", CASES)
def test_masked_rows_find_each_token_once_and_no_padding(ranks: int, vocab: int) -> None:
    """A grammar leaves one token or none: the others are minus infinity, as the padding of a shard is."""
    logits = torch.full((3, vocab), float("-inf"))
    logits[1, vocab - 1], logits[2, 0] = 1.0, 1.0

    def run(group: TPGroup) -> list[Tensor]:
        shard = VocabShard(vocab, group)
        return [shard.topk_log_softmax(shard_of(logits, shard), k)[1] for k in range(1, vocab + 1)]

    for found in on_ranks(ranks, run):
        for k, ids in enumerate(found, start=1):
            assert all(len(set(row)) == k and max(row) < vocab for row in ids.tolist()), (k, ids)
            assert ids[1, 0] == vocab - 1 and ids[2, 0] == 0


@pytest.mark.parametrize("ranks,vocab", CASES)
def test_draws_from_all_shards(ranks: int, vocab: int) -> None:
    """The tokens of one rank with the whole vocabulary; drafts see no NaN either."""
    logits = logits_of(vocab, torch.float32)
    rows = Rows(torch.arange(len(PARAMS)), torch.arange(ROWS).view(len(PARAMS), -1))
    kinds = (SamplingNeeds(False), SamplingNeeds(True), SamplingNeeds(True, True))

    def run(group: TPGroup) -> list[Tensor]:
        slots = SlotTable(len(PARAMS), 4, vocab, CPU)
        for i, sampling in enumerate(PARAMS):
            enter(slots, SlotInit(i, 0, 5, 14, sampling))
        shard = VocabShard(vocab, group)
        sampler, mine = Sampler(slots, shard), shard_of(logits, shard)
        ids = torch.arange(shard.first, shard.first + shard.size).clamp_max(vocab - 1)
        noisy = sampler.perturb(mine, rows, ids, True, group)
        assert not noisy.isnan().any()
        best, _ = shard.topk_log_softmax(noisy, 2)
        assert torch.isfinite(best).all()
        return [sampler.sample(mine, rows, needs).tokens for needs in kinds]

    expected = run(SOLO)
    for tokens in on_ranks(ranks, run):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(tokens, expected, strict=True))
