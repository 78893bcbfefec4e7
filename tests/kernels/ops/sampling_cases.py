"""Operations of sampling: whole vocabularies and later ranks' shards; slots of every kind, and padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.sampling.choose import Draws, choose, norms_and_top
from aerie.kernels.sampling.draft_scores import count_bands, perturb
from aerie.kernels.sampling.filters import Limits, find_limits, gaps
from aerie.kernels.sampling.penalties import FREE, apply_masks, apply_penalties
from aerie.kernels.slots.commit import commit
from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE, largest, topk_log_softmax
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from aerie.workers.slots import SlotTable
from tests.kernels.ops.case import Case
from tests.kernels.ops.norm_cases import rows
from tests.support.slots import enter

Arguments = Callable[[torch.device], tuple[Any, ...]]
BF16 = torch.bfloat16
SIZES = ((17, False), (4096, True), (5000, False), (32000, True), (128256, True), (151936, True))  # and whether slow


def logits_of(count: int, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows flat, some peaked, and every fifth minus infinity alone, as a shard of padding is."""
    logits = rows(count, size, dtype=torch.float32, device=torch.device("cpu"))
    logits *= torch.tensor([1.0, 3.0, 8.0]).repeat(count)[:count, None]
    logits[4::5] = float("-inf")
    return logits.to(dtype).to(device)


def _masks(size: int, first: int, dtype: torch.dtype) -> Arguments:
    """Three rows of each of five requests: with and without a grammar, and padding."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(size)
        words = torch.randint(-(2**31), 2**31, (9, -(-(size + first) // 32)), generator=generator, dtype=torch.int32)
        index = torch.tensor([6, FREE, 0, 3, FREE], dtype=torch.int32)
        slots = torch.tensor([2, 1, 4, 0, 3])
        return rows(15, size, dtype=dtype, device=device), *(t.to(device) for t in (slots, index, words)), first

    return arguments


def _penalties(size: int, nodes: int) -> Arguments:
    """Slot 0 has penalties, 1 nothing, 2 biases and min_tokens, 3 everything, 4 is padding."""
    generator = torch.Generator().manual_seed(2)
    some = [torch.randint(0, size, (40,), generator=generator).tolist() for _ in range(2)]
    everything: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5}
    everything |= {"min_tokens": 3, "logit_bias": {4: 2.0, size - 1: -100.0}, "stop_token_ids": (3, size - 2)}
    params = (
        SamplingParams(9, 0.0, presence_penalty=-1.0, frequency_penalty=0.3, repetition_penalty=0.8),
        SamplingParams(9, 0.0),
        SamplingParams(9, 0.0, logit_bias={i: float(i) for i in range(9)}, min_tokens=2, stop_token_ids=(1,)),
        SamplingParams(9, 0.0, **everything),
    )

    def arguments(device: torch.device) -> tuple[Any, ...]:
        table = SlotTable(4, 4, size, device)
        for i, sampling in enumerate(params):
            enter(table, SlotInit(i, 0, 5, 14, sampling, pack_i32(some[0]), pack_i32(some[1])))
        random, width = torch.Generator().manual_seed(nodes), max(1, nodes)
        slots = torch.tensor([3, 0, 1, 4, 2, 4], device=device)
        positions = torch.randint(4, 10, (6, width), generator=random).to(device)
        path = (torch.rand((6, width, nodes), generator=random) < 0.5).to(device) if nodes else None
        tokens = torch.randint(-1, 8, (6, nodes), generator=random).to(device) if nodes else None
        logits = rows(6 * width, size, dtype=torch.float32, device=device) * 4
        return logits, slots, positions, table.penalty_tables, path, tokens

    return arguments


def _commit(device: torch.device) -> tuple[Any, ...]:
    """Requests that stop, reach their length, are finished already, are counted and not, whose logits are not finite;
    slot 8 is padding."""
    table = SlotTable(8, 4, 50, device)
    for i in range(8):
        sampling = SamplingParams(9, 0.0, presence_penalty=float(i % 3), stop_token_ids=(i % 4,))
        enter(table, SlotInit(i, 10, 5, 12 + i, sampling, pack_i32([1]), pack_i32([i])))
    table.finished[6] = True
    slots = torch.tensor([0, 3, 1, 6, 8, 2, 8, 5], device=device)
    tokens = torch.randint(0, 4, (8, 1), generator=torch.Generator().manual_seed(6)).to(device)
    tokens[2:5] = NOT_FINITE
    return slots, tokens, torch.ones_like(slots), table.commit_tables


FILTERS = (
    (0.0, 5, 0.9, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (1.3, 0, 1.0, 0.05),
    (2.0, 40, 0.9, 0.02),
    (1.0, 10**6, 0.5, 0.0),
)
"""Temperature, top_k, top_p, min_p by slot. Where float32 and float64 sums decide differently, and near ties:
`tests/workers/sampling/test_sampling_kernels.py`."""


def _draw(size: int, device: torch.device) -> tuple[Tensor, Draws, SlotTable]:
    """Two rows of each of FILTERS' slots; positions whose strides are zero."""
    table = SlotTable(len(FILTERS), 4, size, device)
    for i, (temperature, top_k, top_p, min_p) in enumerate(FILTERS):
        enter(table, SlotInit(i, 0, 5, 14, SamplingParams(9, temperature, top_k, top_p, min_p, seed=i * 7919 - 3)))
    slots = torch.arange(len(FILTERS), device=device)
    positions = torch.tensor([[3, 10**6]], device=device).expand(len(FILTERS), -1)
    logits = rows(2 * len(FILTERS), size, dtype=torch.float32, device=device) * 3
    return logits, Draws(slots, positions, table.filters.temperature, table.commit_tables.seed), table


def _limits(size: int, device: torch.device) -> tuple[Any, ...]:
    logits, draws, table = _draw(size, device)
    return logits, draws.slots, table.filters


def _kept(arguments: tuple[Any, ...], limits: Limits) -> Tensor:
    logits, slots, filters = arguments
    gap = gaps(logits, filters.row_values(slots, logits.shape[0]).temperature)
    return gap <= limits.gaps.unsqueeze(1)


def _choose(size: int, filtered: bool, device: torch.device) -> tuple[Any, ...]:
    logits, draws, table = _draw(size, device)
    return logits, draws, 1000, find_limits.reference(logits, draws.slots, table.filters) if filtered else None


def _perturb(size: int, shards: int, device: torch.device) -> tuple[Any, ...]:
    logits, draws, table = _draw(size, device)
    parts = [count_bands.reference(part, draws.slots, table.filters) for part in logits.chunk(max(1, shards), 1)]
    ids = torch.arange(7, 7 + size, device=device)
    return logits, draws, ids, table.filters, torch.cat(parts, 1) if shards else None


def _perturb_candidates(device: torch.device) -> tuple[Any, ...]:
    logits, draws, _, filters, summary = _perturb(17, 1, device)
    return logits, draws, torch.arange(logits.numel(), device=device).view(logits.shape) % 23, filters, summary


def _is_random(arguments: tuple[Any, ...], summary: Tensor) -> Tensor:
    """Summaries of rows without filters are undefined: those of the first two slots."""
    return summary[4:]


CASES = (
    *(
        case
        for size, slow in SIZES
        for case in (
            Case(find_limits, f"{size}", lambda device, n=size: _limits(n, device), seen=_kept, slow=slow or size > 17),
            Case(count_bands, f"{size}", lambda device, n=size: _limits(n, device), seen=_is_random, slow=slow),
            *(
                Case(
                    choose,
                    f"{size}-{filtered}",
                    lambda device, n=size, f=filtered: _choose(n, f, device),
                    slow=slow or (size > 17 and not filtered),
                )
                for filtered in (False, True)
            ),
            *(
                Case(
                    perturb,
                    f"{size}-{shards}",
                    lambda device, n=size, s=shards: _perturb(n, s, device),
                    slow=slow or (size > 17 and shards < 2),
                )
                for shards in (0, 1, 2)
            ),
        )
    ),
    Case(perturb, "ids-of-rows", _perturb_candidates),
    Case(commit, "8", _commit, written=(1, 3)),
    *(
        Case(
            apply_masks, f"{size}-after-{first}-{dtype}", _masks(size, first, dtype), (0,), exact=True, slow=size > 5000
        )
        for size, first in ((17, 0), (5000, 0), (128256, 0), (50, 50), (64, 128))
        for dtype in (torch.float32, BF16)
    ),
    # one rounding fewer than torch, of numbers up to 100
    *(
        Case(apply_penalties, f"{size}-{nodes}-nodes", _penalties(size, nodes), slow=size > 17 and nodes > 0)
        for size in (17, 5000)
        for nodes in (0, 1, 7)
    ),
    *(
        case
        for size, slow in SIZES
        for dtype in (torch.float32, BF16)
        for logits in (lambda device, size=size, dtype=dtype: logits_of(11, size, device, dtype),)
        for case in (
            Case(largest, f"{size}-{dtype}", lambda device, logits=logits: (logits(device),), slow=slow),
            # float32 sums of up to 151,936 exponentials in another order; equal numbers in bfloat16 in any order
            *(
                Case(operation, f"{size}-{k}", lambda device, k=k, logits=logits: (logits(device)[:4], k), slow=slow)
                for operation in (topk_log_softmax, norms_and_top)
                for k in (1, 4, 16, *((33, 64) if operation is topk_log_softmax and size > 64 else ()))
                if dtype == torch.float32
            ),
        )
    ),
)
