"""Whether every step that the scheduler may plan has a graph, of the shapes of chains and of trees."""

import pytest

from aerie.workers.config import PLAIN, RoundShape, RoundShapes
from aerie.workers.runner.graphs.graph_keys import (
    CHUNK_NEEDS,
    EXPANDED_SEEN,
    EXPANDED_TOKENS,
    MASKED_CHUNK_NEEDS,
    TOKEN_BUCKETS,
    GraphKeys,
    bucket_sizes,
    serves,
)
from aerie.workers.sampling import SamplingNeeds

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
            for shape in shapes.mixed_shapes(count, needs.masked) if count else (shapes.default,):
                for tokens in (1, *TOKEN_BUCKETS):
                    key = keys.chunk_key(shape, count, tokens, needs)
                    assert key in captured, (count, shape, tokens, needs)


@pytest.mark.parametrize("max_running", [1, 12, 64])
def test_many_prompt_tokens_are_expanded_by_graphs_with_room_for_what_they_look_at(max_running: int) -> None:
    shapes, sizes = SHAPES["chains"], bucket_sizes(max_running)
    keys, plain = (GraphKeys(shapes, sizes, TOKEN_BUCKETS, expands) for expands in (True, False))
    captured = keys.wanted()
    assert len(captured) == len(set(captured))
    for count in range(max_running + 1):
        shape = shapes.mixed_shapes(count, False)[0] if count else shapes.default
        for tokens in TOKEN_BUCKETS:
            alone, most, too_many = (
                keys.chunk_key(shape, count, tokens, CHUNK_NEEDS, seen)
                for seen in (tokens, EXPANDED_SEEN, EXPANDED_SEEN + 1)
            )
            absorbed = plain.chunk_key(shape, count, tokens, CHUNK_NEEDS, EXPANDED_SEEN + 1)
            assert absorbed is not None and absorbed.seen == 0
            if tokens < EXPANDED_TOKENS:
                assert alone == most == too_many == absorbed and absorbed in captured
                continue
            assert alone in captured and alone == most and too_many is None
            assert alone.seen == EXPANDED_SEEN and not serves(absorbed, alone) and not serves(alone, absorbed)
            assert keys.fallback(alone, captured) == alone
            masked = keys.chunk_key(shape, count, tokens, MASKED_CHUNK_NEEDS, EXPANDED_SEEN + 1)
            assert masked in captured and masked.seen == 0


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_runs_alone_is_captured(name: str) -> None:
    shapes = SHAPES[name]
    keys = GraphKeys(shapes, bucket_sizes(40), TOKEN_BUCKETS)
    captured = set(keys.wanted())
    for count in range(1, 41):
        for needs in (SamplingNeeds(False), CHUNK_NEEDS):
            for shape in range(len(shapes)):
                assert keys.round_key(shape, count, needs) in captured, (count, shape, needs)
        for needs in (SamplingNeeds(False, shaping=True), SamplingNeeds(False, masked=True)):
            for shape in shapes.unrestricted:
                assert keys.round_key(shape, count, needs) in captured, (count, shape, needs)
