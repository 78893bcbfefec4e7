"""Which steps are measured, and what table their times make, with the padding of captured steps."""

import pytest

from aerie.workers.config import PLAIN, RoundShape, RoundShapes
from aerie.workers.runner.costs.cost_points import Point, ProbeExtent, points_to_measure, table_of
from aerie.workers.runner.graphs.graph_keys import (
    CHUNK_NEEDS,
    TOKEN_BUCKETS,
    GraphKeys,
    bucket_sizes,
    buckets_of,
    token_buckets,
)
from aerie.workers.sampling import CAPTURED_NEEDS

CHAIN = RoundShape(name="3/1/4", width=4, max_new_tokens=4, draft_tokens=2)
SHAPES = RoundShapes((PLAIN, CHAIN), default=1)


def extent(max_running: int, max_step_tokens: int, max_context: int = 8192) -> ProbeExtent:
    tokens = token_buckets(max_step_tokens)
    return ProbeExtent(SHAPES, max_running, max_step_tokens, tokens, max_context, 1 << 17, growth=2, page_size=16)


def padded(sizes: tuple[int, ...], count: int) -> int:
    return next((size for size in sizes if size >= count), count)


def captured_ms(of: ProbeExtent, point: Point) -> float:
    """Milliseconds of steps whose prompt tokens and requests are padded to captured sizes."""
    requests, tokens = point.num_requests, padded(of.token_buckets, point.chunk_tokens)
    if tokens and tokens in of.token_buckets:
        requests = padded((0, *buckets_of(CAPTURED_NEEDS[-1], bucket_sizes(of.max_running))), requests)
    return 5.0 + 0.1 * (1 + point.shape) * requests + 0.02 * tokens


@pytest.mark.parametrize(("max_running", "max_step_tokens"), [(64, 8192), (128, 1024), (24, 300), (2, 8192), (1, 40)])
def test_chunks_cost_what_the_captured_size_does(max_running: int, max_step_tokens: int) -> None:
    of = extent(max_running, max_step_tokens)
    table = table_of({point: captured_ms(of, point) for group in points_to_measure(of) for point in group.points}, of)
    for tokens in (1, 16, 17, 64, 65, 200, 300, 512, 513, 1000, 1024, 1040, 3000, 8192):
        if tokens <= max_step_tokens:
            assert table.step_ms(1, 0, 0, tokens) == pytest.approx(captured_ms(of, Point(1, 0, tokens)))
    for requests in {1, max_running // 2 + 1, max_running - 1, max_running}:
        for tokens in (16, 100, 300, 1024):
            if requests > 0 and tokens <= max_step_tokens and of.next_to_last < requests:
                step = Point(1, requests, tokens)
                assert table.step_ms(1, requests, 0, tokens) == pytest.approx(captured_ms(of, step)), step


def test_what_is_measured_is_captured_and_fits() -> None:
    of = extent(40, 8192, max_context=1000)
    points = [point for group in points_to_measure(of) for point in group.points]
    assert len(points) == len(set(points)), "no point is measured twice in a pass"
    assert {p.num_requests for p in points} <= {0, *bucket_sizes(40)}
    assert {p.chunk_tokens for p in points} == {0, *TOKEN_BUCKETS, 2064, 4096, 8192}
    assert {p.num_requests for p in points if p.chunk_tokens > 2048} == {0}
    for p in points:
        assert p.num_requests * p.context <= 1 << 17 and p.context + min(p.chunk_tokens, 1000) <= 1000
        assert p.num_requests == 0 or p.context % 16 == 0, "pages of their own, and no more than there are"
    required = [point for group in points_to_measure(of) if group.required for point in group.points]
    assert {(p.shape, p.num_requests, p.chunk_tokens) for p in required} == {
        *((shape, n, 0) for shape in (0, 1) for n in (1, 40)),
        *((1, 0, tokens) for tokens in (16, 128, 2064, 4096, 8192)),
    }


@pytest.mark.parametrize("eager_ms_per_token", [0.01, 0.05])
def test_long_steps_cost_what_they_do_however_short_the_time_is(eager_ms_per_token: float) -> None:
    """Eagerly prompts are attended to in another form, and launched kernel by kernel: captured steps say neither."""
    of = extent(64, 8192)

    def ms(point: Point) -> float:
        return 100.0 + eager_ms_per_token * point.chunk_tokens if point.chunk_tokens > 2048 else captured_ms(of, point)

    groups, most = points_to_measure(of), max(of.token_buckets)
    in_time = [group for group in groups if group.required or all(p.chunk_tokens <= most for p in group.points)]
    table = table_of({point: ms(point) for group in in_time for point in group.points}, of)
    for tokens in (2064, 4096, 6000, 8192):
        assert table.step_ms(1, 0, 0, tokens) == pytest.approx(ms(Point(1, 0, tokens)))


def test_steps_with_prompts_are_measured_with_the_shape_that_runs_there() -> None:
    tree = RoundShape(name="5/4/8", width=8, max_new_tokens=6, draft_tokens=16)
    shapes = RoundShapes((PLAIN, CHAIN, tree), default=2, adaptive=True)
    of = ProbeExtent(shapes, 64, 2048, token_buckets(2048), 8192, 1 << 17, growth=2, page_size=16)
    keys = GraphKeys(shapes, bucket_sizes(64), of.token_buckets)
    points = [point for group in points_to_measure(of) for point in group.points]
    beside = [point for point in points if point.chunk_tokens and point.num_requests]
    assert {(point.shape, point.num_requests) for point in beside} == {(2, 1), (1, 32), (1, 64)}
    captured = set(keys.wanted())
    for point in beside:
        assert keys.chunk_key(point.shape, point.num_requests, point.chunk_tokens, CHUNK_NEEDS) in captured
    table = table_of({point: captured_ms(of, point) for point in points}, of)
    assert table.mixed_shapes == (2, 2, 1, 1, 1)
    for point in beside:
        ms = table.step_ms(point.shape, point.num_requests, 0, point.chunk_tokens)
        assert ms == pytest.approx(captured_ms(of, point)), point
