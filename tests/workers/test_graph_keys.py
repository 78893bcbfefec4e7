"""Whether every step that the scheduler may plan has a graph, of the shapes of chains and of trees."""

from dataclasses import replace

import pytest

from workers.config import PLAIN, RoundShape, RoundShapes
from workers.runner.graphs.graph_keys import (
    CHUNK_NEEDS,
    EXPANDED_TOKENS,
    MASKED_CHUNK_NEEDS,
    TOKEN_BUCKETS,
    GraphKeys,
    bucket_sizes,
    serves,
)
from workers.sampling.sampler import SamplingNeeds

CHAIN, TREE = RoundShape("3/1/4", 4, 4, 3), RoundShape("5/4/16", 16, 6, 20)
SHAPES = {
    "none": RoundShapes(),
    "static tree": RoundShapes((PLAIN, TREE), default=1),
    "chains": RoundShapes((PLAIN, RoundShape("1/1/2", 2, 2, 1), CHAIN), default=2, adaptive=True),
    "trees": RoundShapes((PLAIN, CHAIN, RoundShape("4/2/8", 8, 5, 8), TREE), default=3, adaptive=True),
    "trees alone": RoundShapes((PLAIN, RoundShape("4/2/8", 8, 5, 8), TREE), default=2, adaptive=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("max_running", [1, 3, 8, 12, 16, 40, 128])
def test_whatever_runs_beside_prompts_is_captured(name: str, max_running: int) -> None:
    shapes = SHAPES[name]
    keys = GraphKeys(shapes, bucket_sizes(max_running), TOKEN_BUCKETS)
    captured = set(keys.wanted())
    for count in range(max_running + 1):
        for needs in (SamplingNeeds(False), CHUNK_NEEDS, MASKED_CHUNK_NEEDS):
            for shape in shapes.beside_chunks(count, needs.masked) if count else (shapes.default,):
                for tokens in (1, *TOKEN_BUCKETS):
                    key = keys.of_chunks(shape, count, tokens, needs)
                    assert key in captured, (count, shape, tokens, needs)


@pytest.mark.parametrize("max_running", [1, 12, 64])
def test_chunks_that_begin_their_requests_have_graphs_of_their_own_where_they_are_expanded(max_running: int) -> None:
    shapes, sizes = SHAPES["chains"], bucket_sizes(max_running)
    keys, plain = GraphKeys(shapes, sizes, TOKEN_BUCKETS, expands=True), GraphKeys(shapes, sizes, TOKEN_BUCKETS)
    captured = keys.wanted()
    assert len(captured) == len(set(captured)) and set(captured) >= set(plain.wanted())
    for count in range(max_running + 1):
        shape = shapes.beside_chunks(count, False)[0] if count else shapes.default
        for tokens in TOKEN_BUCKETS:
            begun, goes_on = (keys.of_chunks(shape, count, tokens, CHUNK_NEEDS, begins) for begins in (True, False))
            assert begun in captured and goes_on in captured and goes_on == replace(begun, from_start=False)
            assert begun.from_start == (tokens >= EXPANDED_TOKENS)
            assert serves(goes_on, begun) and serves(begun, goes_on) == (begun == goes_on)
            assert keys.stand_in(begun, captured) == begun and keys.stand_in(goes_on, captured) == goes_on
            assert plain.of_chunks(shape, count, tokens, CHUNK_NEEDS, True) == goes_on
            masked = keys.of_chunks(shape, count, tokens, MASKED_CHUNK_NEEDS, True)
            assert masked in captured and not masked.from_start


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_runs_alone_is_captured(name: str) -> None:
    shapes = SHAPES[name]
    keys = GraphKeys(shapes, bucket_sizes(40), TOKEN_BUCKETS)
    captured = set(keys.wanted())
    for count in range(1, 41):
        for needs in (SamplingNeeds(False), CHUNK_NEEDS):
            for shape in range(len(shapes)):
                assert keys.of_rounds(shape, count, needs) in captured, (count, shape, needs)
        for needs in (SamplingNeeds(False, shaping=True), SamplingNeeds(False, masked=True)):
            for shape in shapes.unrestricted:
                assert keys.of_rounds(shape, count, needs) in captured, (count, shape, needs)
