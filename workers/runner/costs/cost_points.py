"""The steps whose costs are measured at a start, in their order. Pure; `cost_probe` runs them, and `measured_table`
makes a table of their times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.config import RoundShapes
from workers.runner.graphs.graph_keys import bucket_sizes, powers_of_two
from workers.scheduling.cost_table import TARGET_CHUNK_TOKENS

SMALLEST_CHUNK = 16
CHUNKS_BESIDE = (128, TARGET_CHUNK_TOKENS, 2048)  # tokens of chunks, next to the smallest, that run beside rounds too
_QUICK_CHUNK = 128  # tokens of the largest chunk that is measured whatever that takes
_EAGER_ROWS = 16  # after the largest captured size: by a multiple of what kernels are compiled for


@dataclass(frozen=True)
class Point:
    """One kind of step.

    shape: of its rounds, verified and drafted again.
    num_requests: that run a round.
    chunk_tokens: prompt tokens beside them.
    context: committed tokens of each request that runs a round; in a step with prompt tokens, those before the chunk.
    """

    shape: int
    num_requests: int
    chunk_tokens: int = 0
    context: int = 0


@dataclass(frozen=True)
class PointGroup:
    """Points that are measured together. required: times, whatever that takes."""

    points: tuple[Point, ...]
    required: int = 0


@dataclass(frozen=True)
class ProbeExtent:
    """What an engine's steps may be.

    token_buckets: numbers of prompt tokens that steps are padded to, ascending; empty if they are not.
    max_context: committed tokens of a request.
    num_kv_tokens: that all requests of a round have together, at most, in a step that is measured.
    growth: factor from one measured batch size to the next.
    page_size: tokens of a KV page.
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
        """A captured batch size of about half of all requests."""
        return self._captured_up_to(self.max_running // 2)

    @property
    def next_to_last(self) -> int:
        """The largest number of requests below all of them that steps with prompt tokens are captured for."""
        return self._captured_up_to(self.max_running - 1)

    def _captured_up_to(self, num_requests: int) -> int:
        """The largest number of requests, of at most so many or 1, that steps with prompt tokens are captured for."""
        captured = powers_of_two(bucket_sizes(self.max_running))
        return max((size for size in captured if size <= num_requests), default=1)

    @property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Captured sizes, then 16 tokens more, by which steps run eagerly, then twice as many and again."""
        if not self.token_buckets:
            return _ladder(min(SMALLEST_CHUNK, self.max_step_tokens), self.max_step_tokens, 8)
        last = self.token_buckets[-1]
        if last >= self.max_step_tokens:
            return self.token_buckets
        eager = {min(last + _EAGER_ROWS, self.max_step_tokens), *_ladder(2 * last, self.max_step_tokens, 2)}
        return (*self.token_buckets, *sorted(eager))

    def context_of(self, num_requests: int) -> int:
        """Committed tokens, whole pages, of each of so many requests in a step that reads much KV."""
        return min(self.max_context, self.num_kv_tokens // num_requests) // self.page_size * self.page_size


def wanted(extent: ProbeExtent) -> list[PointGroup]:
    """What is to be measured, in this order: what most decisions rest on first."""
    shapes, sizes, tokens = extent.shapes, extent.batch_sizes, extent.chunk_tokens
    default, most = shapes.default, extent.max_running
    others = [shape for shape in range(len(shapes)) if shape != default]
    quick, long = (
        max((t for t in tokens if t <= limit), default=tokens[0])
        for limit in (_QUICK_CHUNK, TARGET_CHUNK_TOKENS if extent.token_buckets else _QUICK_CHUNK)
    )
    between = [n for n in sizes if n not in (1, most)]
    captured = [t for t in tokens if not extent.token_buckets or t <= extent.token_buckets[-1]]
    eager = [t for t in tokens if t not in captured]
    beside = [t for t in tokens if t in CHUNKS_BESIDE]

    def rounds(which: Sequence[int], numbers: Sequence[int]) -> PointGroup:
        return PointGroup(tuple(Point(shape, n) for shape in which for n in numbers))

    def chunks(num_requests: int, numbers: Sequence[int]) -> PointGroup:
        shape = shapes.largest_beside_chunks(num_requests)
        return PointGroup(tuple(Point(shape, num_requests, t) for t in numbers))

    def reading(which: Sequence[int]) -> PointGroup:
        numbers = [n for n in sorted({1, extent.middle, most}) if n in sizes and extent.context_of(n) > 0]
        return PointGroup(tuple(Point(shape, n, context=extent.context_of(n)) for shape in which for n in numbers))

    alone, full = rounds([default, *others], [1]), rounds([default, *others], [most] if most > 1 else [])
    smallest = chunks(0, sorted({tokens[0], quick}))
    before = min(extent.max_context, extent.num_kv_tokens) - long
    groups = [
        PointGroup(alone.points, required=2),  # a first run may be the slower one
        PointGroup(full.points, required=1),
        PointGroup(smallest.points, required=1),
        chunks(most, tokens[:1]),
        rounds([default], between),
        chunks(0, [t for t in captured if t not in (tokens[0], quick)]),
        reading([default]),
        # captured steps tell little of eager ones, whose kernels are launched one by one, but may do more at once
        PointGroup(chunks(0, eager).points, required=1),
        chunks(most, [t for t in beside if t != tokens[0]]),
        rounds(others, between),
        *(chunks(n, [tokens[0], *beside]) for n in sorted({1, extent.middle} - {most})),
        PointGroup((Point(default, 0, long, before),) if before > 0 else ()),
        reading(others),
    ]
    return [group for group in groups if group.points]


def measured_steps(extent: ProbeExtent) -> list[tuple[int, int, int, int]]:
    """Of each point of `wanted`: shape, requests that run a round, prompt tokens, and tokens before those."""
    points = [point for group in wanted(extent) for point in group.points]
    return [(point.shape, point.num_requests, point.chunk_tokens, point.context) for point in points]


def expected_ms(point: Point, found: Mapping[Point, float]) -> float:
    """What a point will take at least, as far as others tell: itself, or its parts, or a smaller one."""
    if point in found:
        return found[point]
    smaller = (
        ms
        for p, ms in found.items()
        if p.shape == point.shape and p.num_requests <= point.num_requests and p.chunk_tokens <= point.chunk_tokens
    )
    return max(smaller, default=0.0)


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
