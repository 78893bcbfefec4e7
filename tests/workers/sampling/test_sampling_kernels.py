"""The sampling kernels against their torch references: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1),
which `tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")


from aerie.kernels.sampling.choose import Draws  # noqa: E402
from aerie.kernels.sampling.choose_triton import choose, norms_and_top  # noqa: E402
from aerie.kernels.sampling.draft_scores import DROPPED, lower_bound, scaled_logits  # noqa: E402
from aerie.kernels.sampling.draft_scores import count_bands as count_bands_operation  # noqa: E402
from aerie.kernels.sampling.draft_scores_triton import count_bands, perturb  # noqa: E402
from aerie.kernels.sampling.filters import MAX_GAP, Limits, gap_limits, gaps  # noqa: E402
from aerie.kernels.sampling.filters_triton import find_limits  # noqa: E402
from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE  # noqa: E402
from aerie.kernels.vocabulary.topk_log_softmax_triton import topk_log_softmax  # noqa: E402
from aerie.workers.scheduling.plan import SamplingParams, SlotInit  # noqa: E402
from aerie.workers.slots import SlotTable  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402
from tests.support.slots import enter

pytestmark = MARKS

# temperature, top_k, top_p, min_p: each filter alone, all pairs, none, and their ends
FILTERS = [
    (0.0, 5, 0.9, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.6, 50, 0.8, 0.0),
    (2.0, 40, 1.0, 0.02),
    (1.0, 0, 0.95, 0.1),
    (0.5, 7, 0.5, 0.01),
    (1.0, 10**6, 0.999, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 1.0),
]
SIZES = [17, 5000] if INTERPRETED else [17, 4096, 5000, 32000, 128256, 151936]


def table(size: int, device: torch.device = DEVICE) -> SlotTable:
    """One slot per entry of FILTERS, in another order than theirs; slot numbers are those of FILTERS."""
    slots = SlotTable(len(FILTERS), 4, size, device)
    for i, (temperature, top_k, top_p, min_p) in enumerate(FILTERS):
        sampling = SamplingParams(9, temperature, top_k, top_p, min_p, seed=i * 7919 - 3)
        enter(slots, SlotInit(i, 0, 5, 14, sampling))
    return slots


def logits_of(rows: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows flat, some peaked, some with many ties, some with forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, size), generator=generator) * torch.tensor([1.0, 3.0, 8.0]).repeat(rows)[:rows, None]
    logits[1::4] = (logits[1::4] * 4).round() / 4
    logits[2::4, ::3] = float("-inf")
    return logits.to(dtype).to(DEVICE)


def kept_by_reference(logits: Tensor, slots: SlotTable, of: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n]: what each row keeps, and the gaps."""
    temperature, filtered = slots.filters.temperature[of], slots.filters.temperature[of] > 0
    gap = gaps(logits.float(), torch.where(filtered, temperature, 1.0))
    limit = gap_limits(gap, slots.filters.top_k[of], slots.filters.top_p[of], slots.filters.min_p[of])
    return gap <= torch.where(filtered, limit, MAX_GAP).unsqueeze(1), gap


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [2] if INTERPRETED else [1, 3])
def test_limits_keep_what_the_sort_keeps(size: int, width: int) -> None:
    slots = table(size)
    who = torch.randperm(len(FILTERS) + 1, generator=torch.Generator().manual_seed(size)).to(DEVICE)  # and padding
    of = who.repeat_interleave(width)
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16):
        logits = logits_of(len(of), size, size + width, dtype)
        limits = find_limits(logits, who, slots.filters)
        expected, gap = kept_by_reference(logits, slots, of)
        kept = (gap <= limits.gaps.unsqueeze(1)) | limits.peaks.isinf().unsqueeze(1)
        for row, slot in enumerate(of.tolist()):
            difference = int((kept[row] != expected[row]).sum())
            # float32 sums of up to 151,936 masses against float64: top-p's last token is decided to 1e-5 of the mass
            mass = torch.exp(gap[row].double() / -262144.0)
            doubtful = float(mass[kept[row] != expected[row]].sum() / mass.sum())
            assert difference == 0 or (slot < len(FILTERS) and FILTERS[slot][2] < 1 and doubtful < 1e-5), (row, slot)


def test_a_rows_limit_does_not_depend_on_its_neighbours() -> None:
    size = 5000 if INTERPRETED else 128256
    slots = table(size)
    who = torch.arange(len(FILTERS), device=DEVICE)
    logits = logits_of(len(FILTERS), size, 1)
    together = find_limits(logits, who, slots.filters)
    for i in (3, 5, 8):
        alone = find_limits(logits[i : i + 1], who[i : i + 1], slots.filters)
        assert torch.equal(alone.gaps, together.gaps[i : i + 1]) and torch.equal(alone.peaks, together.peaks[i : i + 1])


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[1:])])
def test_draws_are_those_of_torch_up_to_near_ties(size: int) -> None:
    """Noise in float32 differs from float64's by less than 1e-6 where it is largest."""
    slots, width, first = table(size), 2, 1000
    who = torch.arange(len(FILTERS), device=DEVICE)
    positions = torch.randint(0, 10**6, (1, width), device=DEVICE).expand(len(FILTERS), -1)  # strides of zero
    logits = logits_of(len(FILTERS) * width, size, size)
    draws = Draws(who, positions, slots.filters.temperature, slots.commit_tables.seed)
    on_cpu = table(size, torch.device("cpu"))
    in_torch = Draws(who.cpu(), positions.cpu(), on_cpu.filters.temperature, on_cpu.commit_tables.seed)
    expected = in_torch.perturbed(logits.cpu(), torch.arange(first, first + size))
    ids = torch.arange(first, first + size, device=DEVICE)
    noisy = perturb(logits, draws, ids, slots.filters, None).cpu()
    finite = expected.isfinite()
    torch.testing.assert_close(noisy[finite], expected[finite], atol=5e-6, rtol=1e-6)
    kept, _ = kept_by_reference(logits, slots, who.repeat_interleave(width))
    for limits, scores in (
        (None, expected),
        (find_limits(logits, who, slots.filters), expected.masked_fill(~kept.cpu(), float("-inf"))),
    ):
        value, column = choose(logits, draws, first, limits)
        chosen, best = scores.gather(1, column.cpu().unsqueeze(1)).squeeze(1), scores.amax(1)
        torch.testing.assert_close(chosen, best, atol=5e-6, rtol=1e-6)
        torch.testing.assert_close(value.cpu(), best, atol=5e-6, rtol=1e-6)
        assert (column.cpu() == scores.argmax(1)).float().mean() > 0.9


@pytest.mark.slow
def test_every_path_on_a_device_draws_the_same() -> None:
    """Filtered and not, one row and many, and the draft's scores: the same bits."""
    size = 5000 if INTERPRETED else 128256
    slots = table(size)
    who = torch.full((12,), 1, device=DEVICE)  # the slot without filters
    positions = torch.arange(24, device=DEVICE).view(12, 2)
    logits, ids = logits_of(24, size, 3), torch.arange(size, device=DEVICE)
    draws = Draws(who, positions, slots.filters.temperature, slots.commit_tables.seed)
    value, column = choose(logits, draws, 0)
    all_kept = Limits(torch.full_like(value, float("inf")), torch.full_like(value, MAX_GAP).int())
    filtered = choose(logits, draws, 0, all_kept)
    assert torch.equal(filtered[0], value) and torch.equal(filtered[1], column)
    noisy = perturb(logits, draws, ids, slots.filters, None)
    assert torch.equal(noisy.amax(1), value) and torch.equal(noisy.gather(1, column.unsqueeze(1)).squeeze(1), value)
    for row in (0, 5, 23):
        draw = dataclasses.replace(draws, slots=who[:1], positions=positions.view(-1, 1)[row : row + 1])
        alone = choose(logits[row : row + 1], draw, 0)
        assert torch.equal(alone[0], value[row : row + 1]) and torch.equal(alone[1], column[row : row + 1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shards", [1, 2])
def test_drafts_drop_what_torch_drops(size: int, shards: int) -> None:
    """Summaries of a row's parts, or of parts of two shards, keep what the row's own summary keeps: to the bit but for
    min-p, whose logarithm is another one."""
    slots, width = table(size), 2
    who = torch.randperm(len(FILTERS) + 1, generator=torch.Generator().manual_seed(size)).to(DEVICE)  # and padding
    of = who.repeat_interleave(width)
    logits = logits_of(len(of), size, size + 7)
    temperature = slots.filters.temperature[of]
    scaled = scaled_logits(logits, torch.where(temperature > 0, temperature, 1.0))
    summary = count_bands_operation.reference(logits, who, slots.filters)
    lowest = lower_bound(summary, slots.filters.top_k[of], slots.filters.top_p[of], slots.filters.min_p[of])
    dropped = (temperature > 0).unsqueeze(1) & (scaled < lowest.unsqueeze(1))
    doubtful = (scaled - lowest.unsqueeze(1)).abs() < 1e-5
    chosen = slots.filters
    # contiguous, as a rank's logits are
    parts = [part.contiguous() for part in logits.chunk(shards, dim=1)]
    summary = torch.cat([count_bands(part, who, chosen) for part in parts], dim=1)
    draws = Draws(
        who, torch.arange(len(of), device=DEVICE).view(-1, width), slots.filters.temperature, slots.commit_tables.seed
    )
    ids = torch.arange(size, device=DEVICE)
    noisy = perturb(logits, draws, ids, chosen, None)
    ours = perturb(logits, draws, ids, chosen, summary)
    finite = logits.isfinite()
    assert torch.equal(ours[finite & ~dropped & ~doubtful], noisy[finite & ~dropped & ~doubtful])
    assert torch.equal(ours[finite & dropped & ~doubtful], noisy[finite & dropped & ~doubtful] - DROPPED)
    assert bool(dropped.any()) and float(doubtful.float().mean()) < 0.01
    # whatever a filter drops is below whatever it keeps
    for row, score in enumerate(ours):
        kept = score[finite[row] & ~dropped[row] & ~doubtful[row]]
        gone = score[finite[row] & dropped[row] & ~doubtful[row]]
        assert not len(gone) or not len(kept) or kept.min() > gone.max()


def topk_in_order(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `topk_log_softmax`; of equal columns the smallest first, which torch's topk does not promise."""
    norms = torch.logsumexp(logits.float(), -1)
    ordered, order = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    return ordered[:, :k] - norms.masked_fill(norms.isneginf(), 0.0).unsqueeze(-1), order[:, :k], norms


@pytest.mark.parametrize("rows,size,k", [(1, 128256, 4), (40, 32000, 10), (3, 17, 4), (2, 4097, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_of_log_softmax_is_torch_s(rows: int, size: int, k: int, dtype: torch.dtype) -> None:
    if INTERPRETED and (size > 40000 or dtype == torch.bfloat16):
        pytest.skip("too large, or computed on raw bits, under the interpreter")
    torch.manual_seed(size)
    logits = (torch.randn((rows, size), device=DEVICE) * 3).to(dtype)
    logits[0, size // 2] = logits[0].max()  # equals: the smaller column comes first
    best, ids, norms = topk_log_softmax(logits, k)
    expected = topk_in_order(logits, k)
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
    best, ids, norms = topk_log_softmax(logits, k)
    expected = topk_in_order(logits, k)
    assert all(len(set(row)) == k for row in ids.tolist()), ids
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(best, expected[0])
    torch.testing.assert_close(norms, expected[2])


@pytest.mark.parametrize("size", SIZES[:2])
def test_a_shard_of_padding_gives_no_nan(size: int) -> None:
    """Rows of minus infinity alone beside others, in every reduction over a shard."""
    logits = logits_of(5, size, 9)
    logits[[0, 3]] = float("-inf")
    for k in (1, 5):
        best, _, norms = topk_log_softmax(logits, k)
        expected, _, expected_norms = topk_in_order(logits, k)
        # float32 sums of up to 5000 exponentials in another order
        torch.testing.assert_close(best, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(norms, expected_norms, atol=1e-5, rtol=1e-5)
        assert bool((best[[0, 3]] == float("-inf")).all()) and not norms.isnan().any()
    slots = table(size)
    draws = Draws(
        torch.zeros(5, dtype=torch.int64, device=DEVICE) + 1,
        torch.arange(5, device=DEVICE).unsqueeze(1),
        slots.filters.temperature,
        slots.commit_tables.seed,
    )
    value, column = choose(logits, draws, 0)
    assert bool((value[[0, 3]] == float("-inf")).all()) and column[[0, 3]].tolist() == [0, 0]
    assert bool(torch.isfinite(value[[1, 2, 4]]).all())
    norms, top, _ = norms_and_top(logits, 1)
    assert bool((norms[[0, 3]] == float("-inf")).all()) and bool((top[[0, 3]] == float("-inf")).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_that_is_not_finite_chooses_nothing(filtered: bool) -> None:
    size = 5000 if INTERPRETED else 128256
    slots = table(size)
    who = torch.arange(len(FILTERS), device=DEVICE)
    logits = logits_of(len(FILTERS), size, 5)
    draws = Draws(who, who.unsqueeze(1), slots.filters.temperature, slots.commit_tables.seed)
    limits = find_limits(logits, who, slots.filters) if filtered else None
    _, expected = choose(logits, draws, 0, limits)
    logits[1, size // 2], logits[3], logits[4, 7] = float("nan"), float("nan"), float("inf")
    limits = find_limits(logits, who, slots.filters) if filtered else None
    value, column = choose(logits, draws, 0, limits)
    expected[[1, 3, 4]] = NOT_FINITE
    assert torch.equal(column, expected) and value[[1, 3, 4]].isposinf().all()
