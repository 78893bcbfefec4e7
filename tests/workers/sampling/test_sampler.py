"""Sampling: exact draws, filters and penalties against plain Python, and independence of everything but the text."""

import itertools
import math

import pytest
import torch
from scipy import stats

from aerie.kernels.sampling.choose import gumbel_noise
from aerie.kernels.sampling.draft_scores import DROPPED
from aerie.kernels.sampling.filters import MAX_GAP, find_limits, gap_limits, gaps
from aerie.kernels.sampling.penalties import apply_penalties
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.sampling import (
    CAPTURED_NEEDS,
    MAX_LOGPROBS,
    Rows,
    Sampler,
    SamplingNeeds,
    logprobs_of,
)
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from aerie.workers.slots import SlotTable
from tests.support.slots import enter

VOCAB = 23
CPU = torch.device("cpu")


def sampler_with(
    *params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> tuple[Sampler, SlotTable, SamplingNeeds]:
    """A sampler whose slots 0, 1, ... hold requests with these parameters."""
    slots = SlotTable(len(params), 4, VOCAB, CPU)
    for i, sampling in enumerate(params):
        init = SlotInit(i, 0, 5, 5 + sampling.max_tokens, sampling, pack_i32(prompt or []), pack_i32(output or []))
        enter(slots, init)
    needs = SamplingNeeds.of([slots.facts[i] for i in range(len(params))])
    return Sampler(slots, VocabShard(VOCAB, SOLO)), slots, needs


def draws(sampling: SamplingParams, logits: torch.Tensor, count: int) -> torch.Tensor:
    """[count] tokens drawn at positions 0 .. count - 1 from one distribution."""
    sampler, _, needs = sampler_with(sampling)
    rows = Rows(torch.zeros(1, dtype=torch.int64), torch.arange(count).unsqueeze(0))
    return sampler.sample(logits.expand(count, -1).contiguous(), rows, needs).tokens.flatten()


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.tensor(123), torch.arange(200).unsqueeze(1), torch.arange(500))
    # a false alarm in 10^6
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-6
    other = gumbel_noise(torch.tensor(124), torch.arange(200).unsqueeze(1), torch.arange(500))
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_softmax(temperature: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    count = 20000
    seen = torch.bincount(draws(SamplingParams(1, temperature, seed=9), logits, count), minlength=VOCAB).double()
    expected = torch.softmax(logits.double() / temperature, 0) * count
    keep = expected >= 5
    chi2 = ((seen - expected)[keep] ** 2 / expected[keep]).sum()
    # a false alarm in 10^6
    assert stats.chi2.sf(chi2.item(), int(keep.sum()) - 1) > 1e-6
    wrong = torch.softmax(logits.double() / (temperature * 1.2), 0) * count
    keep = wrong >= 5
    assert stats.chi2.sf((((seen - wrong)[keep] ** 2) / wrong[keep]).sum().item(), int(keep.sum()) - 1) < 1e-6


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that the filters keep, one group of equal gaps after the other."""
    scale = (torch.tensor(2.0**18) / torch.tensor(temperature)).item()
    gap = [min(int(torch.tensor(max(logits.tolist()) - x) * scale), 2**24 - 1) for x in logits.tolist()]
    groups = [[i for i in range(len(gap)) if gap[i] == g] for g in sorted(set(gap))]
    weight = [math.exp(-g / 2.0**18) for g in gap]
    left: list[list[int]] = []
    for group in groups:
        if not top_k or sum(map(len, left)) < top_k:
            left.append(group)
    total = sum(weight[i] for group in left for i in group)
    kept: set[int] = set()
    for group in left:
        before = sum(weight[i] for i in kept) / total
        if not kept or ((before < top_p or top_p >= 1) and weight[group[0]] >= min_p):
            kept |= set(group)
    return kept


@pytest.mark.parametrize("filters", [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05), (1, 1.0, 0.0)])
def test_filters_keep_exactly_what_they_should(filters: tuple[int, float, float]) -> None:
    top_k, top_p, min_p = filters
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
    sampling = SamplingParams(1, 1.3, top_k, top_p, min_p, seed=4)
    seen = set(draws(sampling, logits, 20000).tolist())
    assert seen == allowed(logits, 1.3, top_k, top_p, min_p)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_equal_logits_stay_or_go_together(seed: int) -> None:
    """Logits of few values, as bfloat16 gives them, in any order: what is kept is a set of values."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, generator=generator).mul(4).round() / 2
    shuffled = torch.randperm(40, generator=generator)
    for temperature, top_k, top_p, min_p in (
        (1.0, 3, 1.0, 0.0),
        (0.6, 0, 0.7, 0.0),
        (2.0, 11, 0.9, 0.1),
        (1.0, 0, 0.0, 0.0),
        (1.0, 0, 1.0, 1.0),
        (0.01, 1000, 0.99, 0.0),
        (50.0, 0, 0.3, 0.9),
    ):
        filters = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
        gap = gaps(logits.unsqueeze(0), torch.tensor([temperature]))
        kept = gap <= gap_limits(gap, *filters).unsqueeze(1)
        assert set(kept[0].nonzero().flatten().tolist()) == allowed(logits, temperature, top_k, top_p, min_p)
        assert kept[0].sum() >= min(max(top_k, 1), 40) or top_p < 1 or min_p > 0
        other = gaps(logits[shuffled].unsqueeze(0), torch.tensor([temperature]))
        assert torch.equal((other <= gap_limits(other, *filters).unsqueeze(1))[0], kept[0][shuffled])


def kept_by_a_draft(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids in levels of a factor of two, taken level by level; a level's tokens weigh what its lowest may."""
    scaled = [x / temperature * math.log2(math.e) for x in logits.tolist()]
    top = math.floor(max(scaled))
    levels = [[i for i, x in enumerate(scaled) if math.floor(x) == top - level] for level in range(32)]
    left: list[list[int]] = []
    for level in levels:
        if not top_k or sum(map(len, left)) < top_k:
            left.append(level)
    total = sum(len(level) / 2**place for place, level in enumerate(left))
    kept: set[int] = set()
    mass = 0.0
    for place, level in enumerate(left):
        if mass < top_p * total or top_p >= 1:
            kept |= set(level)
            mass += len(level) / 2**place
    short = (not top_k or sum(map(len, left)) < top_k) and top_p >= 1
    kept = set(range(len(scaled))) if short else kept
    return {i for i in kept if not min_p or scaled[i] >= max(scaled) + math.log2(min_p)}


@pytest.mark.parametrize("filters", [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05), (2, 0.999, 0.0)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_drafts_keep_whole_levels(filters: tuple[int, float, float], temperature: float) -> None:
    """What is dropped is far below what is kept; of top-k nothing is dropped that the target keeps, of min-p alone the
    same."""
    top_k, top_p, min_p = filters
    sampler, _, _ = sampler_with(SamplingParams(1, temperature, top_k, top_p, min_p, seed=3))
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    rows = Rows(torch.zeros(1, dtype=torch.int64), torch.arange(50).unsqueeze(0))
    ids = torch.arange(VOCAB)
    plain, ours = (sampler.perturb(logits, rows, ids, filtered, SOLO) for filtered in (False, True))
    kept = ours == plain
    assert torch.equal(ours[~kept], plain[~kept] - DROPPED)
    num_dropped = 0
    for row in range(50):
        mine = set(kept[row].nonzero().flatten().tolist())
        assert mine == kept_by_a_draft(logits[row], temperature, top_k, top_p, min_p)
        wanted = allowed(logits[row], temperature, top_k, top_p, min_p)
        assert top_p < 1 or (wanted <= mine if top_k else wanted == mine)
        num_dropped += VOCAB - len(mine)
    assert num_dropped > 50


def test_filters_of_a_greedy_request_change_nothing() -> None:
    _, slots, _ = sampler_with(SamplingParams(1, 0.0, top_k=1, top_p=0.1, min_p=0.9), SamplingParams(1, 1.0))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    rows = Rows(torch.tensor([0, 1]), torch.zeros(2, 1, dtype=torch.int64))
    limits = find_limits(logits, rows.slots, slots.filters)
    assert limits.gaps.tolist() == [MAX_GAP, MAX_GAP]


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 0.0}, {"top_k": 1, "top_p": 0.3}, {"top_p": 0.0, "min_p": 0.1}]
)
@pytest.mark.parametrize("shaping", [{}, {"presence_penalty": 1e-9}])
def test_one_token_kept_is_greedy_ties_included(filters: dict[str, float], shaping: dict[str, float]) -> None:
    """Logits of few values: of equals the lowest id is taken, whatever the seed, by the target and the draft."""
    logits = torch.randint(0, 3, (200, VOCAB), generator=torch.Generator().manual_seed(5)).bfloat16()
    greedy = logits.float().argmax(-1)
    rows = Rows(torch.zeros(1, dtype=torch.int64), torch.arange(200).unsqueeze(0))
    for seed in range(3):
        kept = SamplingParams(1, 1.3, seed=seed, **filters, **shaping)  # type: ignore[arg-type]
        sampler, _, needs = sampler_with(kept)
        assert not needs.random and not needs.filtered
        for captured in (needs, needs.captured, SamplingNeeds(True), SamplingNeeds(True, True)):
            assert torch.equal(sampler.sample(logits, rows, captured).tokens.flatten(), greedy)
        drafted = sampler.perturb(logits, rows, torch.arange(VOCAB), True, SOLO)
        assert torch.equal(drafted.argmax(-1), greedy)


def test_captured_rounds_come_in_few_kinds() -> None:
    """A graph may do more than its requests need, never less, and no more than the next cheaper one lacks."""
    flags = itertools.product((False, True), (False, True), (False, True), (-1, 0, 7, 20), (False, True))
    for random, filtered, shaping, k, masked in flags:
        needs = SamplingNeeds(random, filtered, shaping, k, masked)
        kind = needs.captured
        assert kind in CAPTURED_NEEDS and kind.covers(needs) and kind.captured == kind
        assert kind.masked == masked, "who has no grammar pays for none"
        assert not any(cheaper.covers(needs) for cheaper in CAPTURED_NEEDS[: CAPTURED_NEEDS.index(kind)])
    for masked in (False, True):
        kinds = [kind for kind in CAPTURED_NEEDS if kind.masked == masked]
        assert all(later.covers(sooner) for sooner, later in itertools.pairwise(kinds))
    assert CAPTURED_NEEDS[-1].num_logprobs == MAX_LOGPROBS


def test_a_token_depends_on_its_seed_and_position_alone() -> None:
    random, greedy = SamplingParams(1, 1.0, seed=7), SamplingParams(1, 0.0)
    filtered = SamplingParams(1, 0.8, top_k=4, seed=8)
    logits = torch.randn(3, 6, VOCAB, generator=torch.Generator().manual_seed(3))
    sampler, _, needs = sampler_with(random, greedy, filtered)
    positions = torch.arange(40, 46).expand(3, 6)
    together = sampler.sample(logits.flatten(0, 1), Rows(torch.arange(3), positions), needs).tokens
    for i, sampling in enumerate((random, greedy, filtered)):
        alone, _, own_needs = sampler_with(sampling)
        for j in range(6):
            rows = Rows(torch.zeros(1, dtype=torch.int64), positions[i : i + 1, j : j + 1])
            assert alone.sample(logits[i, j : j + 1], rows, own_needs).tokens.item() == together[i, j]
    assert torch.equal(together[1], logits[1].argmax(-1))


def test_penalties_follow_their_definitions() -> None:
    prompt, output = [1, 2, 2], [2, 3, 3, 3]
    sampling = SamplingParams(
        9, 0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={4: 2.0, 5: -100.0}
    )
    _, slots, needs = sampler_with(sampling, prompt=prompt, output=output)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    path = torch.tensor([[[False, False], [False, True]]])  # the second row has node 1 (token 3) on its path
    who, positions, tokens = torch.tensor([0]), torch.tensor([[9, 10]]), torch.tensor([[3, 3]])
    shaped = apply_penalties(logits.expand(2, -1), who, positions, slots.penalty_tables, path, tokens)
    for row, counts in enumerate(({2: 1, 3: 3}, {2: 1, 3: 4})):
        for token in range(VOCAB):
            value = logits[token].item()
            if token in (1, 2, 3):
                value = value / 1.5 if value > 0 else value * 1.5
            value -= 0.25 * counts.get(token, 0) + 0.5 * (token in counts)
            value += {4: 2.0, 5: -100.0}.get(token, 0.0)
            assert shaped[row, token].item() == pytest.approx(value, abs=1e-5)
    assert needs.full_logits and needs.shaping


def test_stop_tokens_wait_for_min_tokens() -> None:
    sampling = SamplingParams(9, 0.0, min_tokens=2, stop_token_ids=(3, 8))
    sampler, _, needs = sampler_with(sampling)
    logits = torch.zeros(3, VOCAB)
    logits[:, 8], logits[:, 6] = 5.0, 4.0
    rows = Rows(torch.tensor([0]), torch.tensor([[5, 6, 7]]))  # the prompt has 5 tokens, so outputs 1, 2, 3
    assert sampler.sample(logits, rows, needs).tokens.tolist() == [[6, 6, 8]]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(6))
    out = logprobs_of(logits, torch.tensor([[4, 7]]), 3)
    expected = logits[0, 1, 7] - torch.logsumexp(logits[0, 1], 0)
    assert out.chosen[0, 1].item() == pytest.approx(expected.item(), abs=1e-6)
    assert out.top_ids[0, 0].tolist() == logits[0, 0].topk(3).indices.tolist()
    assert math.isclose(out.top[0, 0, 0].item(), torch.log_softmax(logits[0, 0], 0).max().item(), abs_tol=1e-6)
