"""The steps that a start measures, in order, and the `CostTable` made of their times. Pure; used by `cost_probe`, which
runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from aerie.workers.config import RoundShapes
from aerie.workers.runner.graphs.graph_keys import bucket_sizes, powers_of_two
from aerie.workers.scheduling.cost_table import TARGET_CHUNK_TOKENS, CostTable, RoundCosts

SMALLEST_CHUNK = 16  # prompt tokens
MIXED_CHUNKS = (128, TARGET_CHUNK_TOKENS, 2048)  # prompt tokens of measured mixed batches, besides the smallest
_QUICK_CHUNK = 128  # prompt tokens of the largest chunk that is always measured
_TOKENS_ABOVE_GRAPHS = 16  # from the largest captured size to the first eager one; kernels are compiled for multiples


@dataclass(frozen=True)
class Point:
    """A kind of step to measure.

    shape: index of the tree shape that its rounds verify and draft.
    num_requests: requests that run a round.
    chunk_tokens: prompt tokens.
    context: committed tokens of each request in a round; in a step with prompt tokens, the tokens before the chunk.
    """

    shape: int
    num_requests: int
    chunk_tokens: int = 0
    context: int = 0


@dataclass(frozen=True)
class PointGroup:
    """Points that are measured together. required: number of runs regardless of the time limit."""

    points: tuple[Point, ...]
    required: int = 0


@dataclass(frozen=True)
class ProbeExtent:
    """Limits of an engine's steps.

    token_buckets: numbers of prompt tokens that steps are padded to, ascending; empty without padding.
    max_context: maximum committed tokens of a request.
    num_kv_tokens: maximum KV tokens of all requests of a measured round together.
    growth: factor between measured batch sizes.
    page_size: tokens per KV page.
    """

    shapes: RoundShapes
    max_running: int
    max_step_tokens: int
    token_buckets: tuple[int, ...]
    max_context: int
    num_kv_tokens: int
    growth: int
    page_size: int

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return _ladder(1, self.max_running, self.growth)

    @property
    def middle(self) -> int:
        """The largest captured batch size of steps with prompt tokens up to half of `max_running`."""
        return self._captured_up_to(self.max_running // 2)

    @property
    def next_to_last(self) -> int:
        """The largest captured batch size of steps with prompt tokens below `max_running`."""
        return self._captured_up_to(self.max_running - 1)

    def _captured_up_to(self, num_requests: int) -> int:
        """Return the largest captured batch size of steps with prompt tokens up to `num_requests`, at least 1."""
        captured = powers_of_two(bucket_sizes(self.max_running))
        return max((size for size in captured if size <= num_requests), default=1)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Numbers of prompt tokens to measure: captured sizes, then eager ones, from 16 tokens more on and doubling."""
        if not self.token_buckets:
            return _ladder(min(SMALLEST_CHUNK, self.max_step_tokens), self.max_step_tokens, 8)
        last = self.token_buckets[-1]
        if last >= self.max_step_tokens:
            return self.token_buckets
        eager = {min(last + _TOKENS_ABOVE_GRAPHS, self.max_step_tokens), *_ladder(2 * last, self.max_step_tokens, 2)}
        return (*self.token_buckets, *sorted(eager))

    def context_of(self, num_requests: int) -> int:
        """Return the committed tokens per request, in whole pages, of a step that reads much KV."""
        return min(self.max_context, self.num_kv_tokens // num_requests) // self.page_size * self.page_size


def points_to_measure(extent: ProbeExtent) -> list[PointGroup]:
    """Return the points to measure, most important first."""
    shapes, sizes, tokens = extent.shapes, extent.batch_sizes, extent.chunk_tokens
    default, max_batch = shapes.default, extent.max_running
    others = [shape for shape in range(len(shapes)) if shape != default]
    quick, long = (
        max((t for t in tokens if t <= limit), default=tokens[0])
        for limit in (_QUICK_CHUNK, TARGET_CHUNK_TOKENS if extent.token_buckets else _QUICK_CHUNK)
    )
    between = [n for n in sizes if n not in (1, max_batch)]
    captured = [t for t in tokens if not extent.token_buckets or t <= extent.token_buckets[-1]]
    eager = [t for t in tokens if t not in captured]
    mixed = [t for t in tokens if t in MIXED_CHUNKS]

    def rounds(which: Sequence[int], numbers: Sequence[int]) -> PointGroup:
        return PointGroup(tuple(Point(shape, n) for shape in which for n in numbers))

    def chunks(num_requests: int, numbers: Sequence[int]) -> PointGroup:
        shape = shapes.largest_mixed_shape(num_requests)
        return PointGroup(tuple(Point(shape, num_requests, t) for t in numbers))

    def reading(which: Sequence[int]) -> PointGroup:
        numbers = [n for n in sorted({1, extent.middle, max_batch}) if n in sizes and extent.context_of(n) > 0]
        return PointGroup(tuple(Point(shape, n, context=extent.context_of(n)) for shape in which for n in numbers))

    alone, full = rounds([default, *others], [1]), rounds([default, *others], [max_batch] if max_batch > 1 else [])
    smallest = chunks(0, sorted({tokens[0], quick}))
    before = min(extent.max_context, extent.num_kv_tokens) - long
    groups = [
        PointGroup(alone.points, required=2),  # the first run may be slower
        PointGroup(full.points, required=1),
        PointGroup(smallest.points, required=1),
        chunks(max_batch, tokens[:1]),
        rounds([default], between),
        chunks(0, [t for t in captured if t not in (tokens[0], quick)]),
        reading([default]),
        # captured steps do not predict eager ones well, which launch kernels one by one
        PointGroup(chunks(0, eager).points, required=1),
        chunks(max_batch, [t for t in mixed if t != tokens[0]]),
        rounds(others, between),
        *(chunks(n, [tokens[0], *mixed]) for n in sorted({1, extent.middle} - {max_batch})),
        PointGroup((Point(default, 0, long, before),) if before > 0 else ()),
        reading(others),
    ]
    return [group for group in groups if group.points]


def measured_steps(extent: ProbeExtent) -> list[tuple[int, int, int, int]]:
    """Return (shape, requests that run a round, prompt tokens, context) of each point of `points_to_measure`."""
    points = [point for group in points_to_measure(extent) for point in group.points]
    return [(point.shape, point.num_requests, point.chunk_tokens, point.context) for point in points]


def least_ms(point: Point, measured: Mapping[Point, float]) -> float:
    """Return a lower bound of a point's time: its measured time, else the longest time of a smaller point."""
    if point in measured:
        return measured[point]
    smaller = (
        ms
        for p, ms in measured.items()
        if p.shape == point.shape and p.num_requests <= point.num_requests and p.chunk_tokens <= point.chunk_tokens
    )
    return max(smaller, default=0.0)


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return first, first * factor, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def table_of(measured: Mapping[Point, float], extent: ProbeExtent) -> CostTable:
    """Return the table of measured milliseconds. Times in it never decrease with more work: if a measured time does,
    the larger time is used for both. measured: includes all required points."""
    shapes, default = extent.shapes, extent.shapes.default
    reads = [_kv_costs(measured, shape) or _kv_costs(measured, default) or {1: 0.0} for shape in range(len(shapes))]
    rounds = tuple(_round_costs(measured, shape, reads[shape]) for shape in range(len(shapes)))
    alone = _chunks_alone(measured, extent.max_step_tokens)
    requests = sorted({p.num_requests for p in measured if p.chunk_tokens})
    if extent.max_running not in requests:
        requests = [0]  # otherwise larger numbers would be extrapolated from two adjacent points
    mixed_shapes = [shapes.largest_mixed_shape(n) for n in requests]
    rows = [_chunk_row(measured, shape, n, alone) for shape, n in zip(mixed_shapes, requests, strict=True)]
    padded = extent.next_to_last + 1
    if extent.token_buckets and requests[-1] > padded > requests[-2]:
        requests.insert(-1, padded)  # larger captured steps are padded to the maximum
        rows.insert(-1, rows[-1])
        mixed_shapes.insert(-1, mixed_shapes[-1])
    chunk_sizes, sources = _chunk_sizes(sorted(alone), extent.token_buckets)
    return CostTable(
        rounds=rounds,
        chunk_requests=tuple(requests),
        chunk_tokens=tuple(chunk_sizes),
        chunk_ms=tuple(tuple(row[i] for i in sources) for row in rows),
        mixed_shapes=tuple(mixed_shapes),
        ms_per_chunk_kv=_chunk_kv_cost(measured, alone),
    )


def _round_costs(measured: Mapping[Point, float], shape: int, reads: Mapping[int, float]) -> RoundCosts:
    ms = {p.num_requests: ms for p, ms in measured.items() if p == Point(shape, p.num_requests) and p.num_requests}
    sizes = sorted(ms)
    per_token = np.interp(sizes, sorted(reads), [reads[n] for n in sorted(reads)]).tolist()
    return RoundCosts(tuple(sizes), tuple(accumulate((ms[n] for n in sizes), max)), tuple(per_token))


def _kv_costs(measured: Mapping[Point, float], shape: int) -> dict[int, float]:
    """Return the milliseconds that each KV token adds to a round, by batch size."""
    return {
        p.num_requests: max(0.0, ms - measured[Point(shape, p.num_requests)]) / (p.num_requests * p.context)
        for p, ms in measured.items()
        if p.shape == shape and p.context and not p.chunk_tokens and Point(shape, p.num_requests) in measured
    }


def _chunks_alone(measured: Mapping[Point, float], max_step_tokens: int) -> dict[int, float]:
    """Return the milliseconds of steps without rounds, by prompt tokens. Those of `max_step_tokens` are extrapolated
    from the last two if they were not measured."""
    alone = {p.chunk_tokens: ms for p, ms in measured.items() if p.num_requests == 0 and p.context == 0}
    last = max(alone)
    if last < max_step_tokens:
        before = max((t for t in alone if t < last), default=0)
        per_token = max(0.0, alone[last] - alone.get(before, 0.0)) / (last - before)
        alone[max_step_tokens] = alone[last] + per_token * (max_step_tokens - last)
    return alone


def _chunk_row(
    measured: Mapping[Point, float], shape: int, num_requests: int, alone: Mapping[int, float]
) -> tuple[float, ...]:
    """Return the milliseconds of mixed batches with rounds of `num_requests`, for the chunk sizes in `alone`. The
    difference between an unmeasured size and the nearest smaller one is taken from steps without rounds."""
    known = {t: measured[p] for t in alone if (p := Point(shape, num_requests, t)) in measured}
    row = []
    for tokens in sorted(alone):
        near = max((t for t in known if t <= tokens), default=min(known))
        row.append(known[near] + alone[tokens] - alone[near])
    return tuple(accumulate(row, max))


def _chunk_sizes(tokens: Sequence[int], buckets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the table's chunk sizes, and for each the index in `tokens` of the size with the same cost: a chunk costs
    as much as the bucket to which it is padded."""
    sizes, sources = list(tokens[:1]), [0]
    for index, (smaller, size) in enumerate(zip(tokens, tokens[1:], strict=False), 1):
        if size in buckets and smaller + 1 < size:
            sizes.append(smaller + 1)
            sources.append(index)
        sizes.append(size)
        sources.append(index)
    return sizes, sources


def _chunk_kv_cost(measured: Mapping[Point, float], alone: Mapping[int, float]) -> float:
    """Return the milliseconds per (token of a chunk, token before the chunk); 0 if not measured."""
    costs = [
        max(0.0, ms - alone[p.chunk_tokens]) / (p.chunk_tokens * p.context)
        for p, ms in measured.items()
        if p.chunk_tokens and p.context
    ]
    return max(costs, default=0.0)
