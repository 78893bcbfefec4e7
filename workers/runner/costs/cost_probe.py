"""Measures the times of real steps, after captures and warm-up and before the first request. Used by
`aerie.workers.runner.build`; the scheduler gets the table.

Steps run on slots without requests, which have dummy lengths and pages and are marked as finished, so that commits do
not change them. Their tokens differ, so that rows choose different experts. Their KV goes to free pages, because rows
on the dummy page choose no experts; requests write a page before they read it. Every rank runs the same steps in the
same order, and times are the maximum over ranks, so that all ranks have the same table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from aerie.attention.recurrent.pool import StatePool
from aerie.kernels.kv.batches import PrefillBatch, RowInputs
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.batch import PromptChunks, StepBatch
from aerie.workers.runner.costs.cost_points import Point, PointGroup, ProbeExtent, least_ms, points_to_measure, table_of
from aerie.workers.runner.decoding import DecodingStrategy
from aerie.workers.sampling import SamplingNeeds
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.slots import SlotTable
from aerie.workers.timer import Timer

LIMIT_S = {"cuda": 2.0, "cpu": 0.6}  # time of all measurements
GROWTH = {"cuda": 2, "cpu": 8}  # factor between measured batch sizes
KV_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 12}  # KV tokens of all requests in a step; enough to time their reads
PASSES = 3  # maximum runs of a point; the fastest run counts
_NEEDS = SamplingNeeds(random=True)  # the needs of most requests


@dataclass(frozen=True)
class CostProbe:
    """Runs and times the points of one engine."""

    strategy: DecodingStrategy
    slots: SlotTable
    group: TPGroup
    layout: EngineLayout
    page_size: int
    timer: Timer
    states: StatePool | None = None

    @torch.inference_mode()
    def measure(self, groups: Sequence[PointGroup], limit_s: float) -> dict[Point, float]:
        """Return the milliseconds of each point on the slowest rank, the same on all ranks.

        Runs the groups in order, up to `PASSES` times. Skips groups with which the total time would reach `limit_s`
        seconds, except for their required runs.
        """
        measured: dict[Point, float] = {}
        spent_ms = 0.0
        try:
            for number in range(PASSES):
                for group in groups:
                    due_ms = spent_ms + sum(least_ms(point, measured) for point in group.points)
                    if due_ms >= limit_s * 1e3 and number >= group.required:
                        continue
                    for point, ms in zip(group.points, self._run(group.points), strict=True):
                        measured[point] = min(ms, measured.get(point, ms))
                        spent_ms += ms
        finally:
            self._set_dummy_requests(0, 0)
        return measured

    def _run(self, points: Sequence[Point]) -> list[float]:
        """Return the milliseconds of one step of each point; the maximum over the ranks."""
        for point in points:
            self._set_dummy_requests(point.num_requests, 0 if point.chunk_tokens else point.context)
            batch = self._batch(point)
            self.timer.mark()
            self.strategy.step(batch)
            self.timer.mark()
        own = torch.tensor(self.timer.read(), dtype=torch.float64, device=self.slots.device)
        slowest: list[float] = self.group.all_gather(own).amax(0).tolist()
        return slowest

    def _set_dummy_requests(self, num_requests: int, context: int) -> None:
        """Reset all slots. Then give slots 0 .. num_requests - 1 `context` committed tokens each, on separate pages,
        because shared pages would be read from the GPU's cache. Pages for a round's writes follow. Slots share pages if
        the pool has too few, and those of a few tokens if it has fewer pages than slots."""
        slots, num_pages = self.slots, self.layout.num_pages
        slots.finished.fill_(True)
        slots.page_table.zero_()
        slots.seq_len.zero_()
        slots.bonus.zero_()
        if self.states is not None:  # each slot replays one row, the last of its tokens
            context = max(context, 1)
            self.states.pretend(num_requests)
        if num_requests:
            pages = -(-(context + self.layout.shapes.max_kv_tokens) // self.page_size)
            pages = min(pages, slots.page_table.shape[1])
            own = torch.arange(num_requests * pages, dtype=torch.int32, device=slots.device).view(pages, num_requests)
            slots.page_table[:num_requests, :pages] = own.T % num_pages + 1
            slots.seq_len[:num_requests] = context
            slots.bonus[:num_requests] = torch.arange(num_requests, device=slots.device) % slots.vocab_size

    def _batch(self, point: Point) -> StepBatch:
        """Return the batch of one measured step: `point.num_requests` rounds and `point.chunk_tokens` prompt tokens."""
        running = torch.arange(point.num_requests, device=self.slots.device)
        drafting, longest, chunks = running, point.context, None
        if point.chunk_tokens:
            chunks = self._chunks(point.chunk_tokens, point.context)
            drafting = torch.cat((running, chunks.final_slots))
            longest += min(point.chunk_tokens, self.layout.max_model_len)
        shape = point.shape if point.num_requests else 0
        longest += self.layout.shapes.max_kv_tokens
        shifts = self.slots.always_shifts
        return StepBatch(
            running,
            shape,
            next_shape=point.shape,
            draft_slots=drafting,
            max_kv_len=longest,
            chunks=chunks,
            needs=_NEEDS,
            is_shifted=shifts,
            shift_is_captured=shifts,
        )

    def _chunks(self, num_tokens: int, context: int) -> PromptChunks:
        """Return `num_tokens` prompt tokens after `context` others, in as few chunks as possible. The first chunk ends
        its prompt, in the padding slot, and samples a token."""
        slots, longest = self.slots, self.layout.max_model_len - context
        counts = [min(longest, num_tokens - begin) for begin in range(0, num_tokens, longest)]
        page_table = torch.zeros_like(slots.page_table[:1])
        pages = min(-(-(context + counts[0]) // self.page_size), self.layout.num_pages)
        page_table[0, :pages] = torch.arange(1, pages + 1, dtype=torch.int32, device=slots.device)
        padding = torch.full((1,), slots.padding_slot, dtype=torch.int64, device=slots.device)
        next_ids = torch.ones(len(counts), dtype=torch.int64, device=slots.device)
        next_ids[0] = -1
        batch = PrefillBatch.from_lists(
            [context] * len(counts), counts, page_table.expand(len(counts), -1).contiguous()
        )
        inputs = None
        if slots.always_shifts:
            positions = torch.cat([torch.arange(context, context + count, device=slots.device) for count in counts])
            inputs = RowInputs(None, None, positions.expand(slots.num_axes, -1))
        return PromptChunks(
            batch=replace(batch, slots=padding.expand(len(counts)).contiguous(), inputs=inputs),
            ids=torch.arange(num_tokens, dtype=torch.int64, device=slots.device) % slots.vocab_size,
            next_ids=next_ids,
            final_slots=padding,
            final_lengths=torch.zeros(1, dtype=torch.int32, device=slots.device),
        )


def probe_extent(
    layout: EngineLayout, page_size: int, token_buckets: Sequence[int], device: torch.device
) -> ProbeExtent:
    """Return the extent of an engine. token_buckets: as in `ProbeExtent`."""
    scheduler = layout.scheduler
    return ProbeExtent(
        shapes=layout.shapes,
        max_running=scheduler.num_slots,
        max_step_tokens=scheduler.step_token_limit,
        token_buckets=tuple(token_buckets),
        max_context=layout.max_model_len,
        num_kv_tokens=min(layout.num_pages * page_size, KV_TOKENS[device.type]),
        growth=GROWTH[device.type],
        page_size=page_size,
    )


def probe_costs(
    strategy: DecodingStrategy,
    slots: SlotTable,
    group: TPGroup,
    layout: EngineLayout,
    page_size: int,
    token_buckets: Sequence[int],
    states: StatePool | None = None,
) -> CostTable:
    """Return the cost table of this engine, the same on every rank. Takes about `LIMIT_S` seconds, or longer for the
    required points on a slow device. See `CostProbe.measure`."""
    device = slots.device
    extent = probe_extent(layout, page_size, token_buckets, device)
    probe = CostProbe(strategy, slots, group, layout, page_size, Timer(device), states)
    return table_of(probe.measure(points_to_measure(extent), LIMIT_S[device.type]), extent)
