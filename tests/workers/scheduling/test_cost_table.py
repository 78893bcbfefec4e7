"""What a step costs between the points that were measured, and how many prompt tokens a budget holds."""

import itertools

import msgspec
import pytest

from aerie.workers.scheduling.cost_table import CostTable, RoundCosts, default_itl_target_ms
from aerie.workers.scheduling.step_time import Step, StepTime
from tests.support.slow import slow

PLAIN = RoundCosts(num_requests=(1, 8, 32), ms=(4.0, 4.4, 5.2), ms_per_kv_token=(1e-4, 1e-4, 2e-4))
CHAIN = RoundCosts(num_requests=(1, 8, 32), ms=(5.0, 5.4, 7.8), ms_per_kv_token=(1e-4, 1e-4, 2e-4))
TABLE = CostTable(
    rounds=(PLAIN, CHAIN),
    chunk_requests=(0, 8, 32),
    chunk_tokens=(16, 512, 1024),
    chunk_ms=((5.0, 13.0, 23.0), (6.0, 15.4, 25.4), (10.0, 18.0, 28.0)),
    mixed_shapes=(1,) * 3,
)


def chunk_tokens_within(costs: CostTable, limit_ms: float, rounds: Step, most: int, context_tokens: float = 0.0) -> int:
    """The result of the table alone."""
    return StepTime(costs, 40, noise=0.0).chunk_tokens_within(limit_ms, rounds, most, context_tokens)


@pytest.mark.parametrize(
    ("shape", "num_requests", "kv_tokens", "ms"),
    [
        (0, 0, 0, 0.0),
        (0, 1, 0, 4.0),
        (0, 2, 0, 4.0 + 0.4 / 7),
        (1, 32, 0, 7.8),
        (1, 40, 0, 8.6),  # beyond what was measured: on as between the last two
        (1, 8, 8000, 5.4 + 0.8),
        (0, 20, 1000, 4.8 + 0.15),
    ],
)
def test_rounds(shape: int, num_requests: int, kv_tokens: int, ms: float) -> None:
    assert TABLE.round_ms(shape, num_requests, kv_tokens) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("shape", "num_requests", "chunk_tokens", "ms"),
    [
        (1, 0, 8, 5.0),  # a step of prompt tokens alone costs no less than the smallest
        (1, 0, 768, 18.0),
        (1, 8, 512, 15.4),
        (0, 8, 512, 14.4),  # what a chunk adds is the same beside another shape
        (1, 20, 512, 6.6 + (10.0 + 10.2) / 2),
        (1, 8, 0, 5.4),
    ],
)
def test_chunks_beside_rounds(shape: int, num_requests: int, chunk_tokens: int, ms: float) -> None:
    assert TABLE.step_ms(shape, num_requests, 0, chunk_tokens) == pytest.approx(ms)


def test_a_few_requests_of_a_mixture_of_experts_add_little_beside_a_chunk() -> None:
    """Alone, their rounds read many experts; beside a chunk, all are read anyway."""
    mixture = RoundCosts((1, 8, 32), (6.0, 18.0, 26.0), (0.0, 0.0, 1e-4))
    steps = ((25.0, 36.0, 44.0), (29.0, 40.0, 48.0))
    table = CostTable((PLAIN, mixture), (0, 32), (16, 512, 1024), steps, (1, 1))
    assert [table.step_ms(1, count, 0, 512) for count in (0, 8, 16, 32, 40)] == pytest.approx(
        [36.0, 37.0, 38.0, 40.0, 40.0 + 8.0 / 3]
    )
    assert table.step_ms(1, 16, 8000, 512) == pytest.approx(38.0 + 8000 * 1e-4 / 3)
    assert chunk_tokens_within(table, 37.0, Step(1, 8), 4096) == 512


def test_what_chunks_add_beside_another_shape_does_not_hang_on_how_slow_its_rounds_are() -> None:
    """Up to eight requests run a tree beside chunks, and 32 a chain, whose steps say nothing about a tree's."""
    tree = RoundCosts((1, 8, 32), (18.0, 19.0, 60.0), (0.0, 0.0, 0.0))
    table = CostTable((PLAIN, CHAIN, tree), (0, 32), (16, 512), ((5.0, 13.0), (10.0, 18.0)), (2, 1))
    assert table.step_ms(2, 8, 0, 16) == pytest.approx(19.0 + 0.75 * 5.0 + 0.25 * 2.2)


@pytest.mark.parametrize(("limit_ms", "tokens"), [(5.0, 0), (15.4, 512), (20.4, 768), (1000.0, 4096)])
def test_a_budget_is_filled_and_kept(limit_ms: float, tokens: int) -> None:
    assert chunk_tokens_within(TABLE, limit_ms, Step(1, 8), 4096) == pytest.approx(tokens, abs=1)
    assert TABLE.step_ms(1, 8, 0, chunk_tokens_within(TABLE, limit_ms, Step(1, 8), 4096)) <= max(limit_ms, 5.4)


@pytest.mark.parametrize(
    ("num_requests", "context_tokens"),
    [(0, 3000), (8, 0), *slow((40, 3000), (0, 0), *itertools.product((1, 20, 32), (0, 3000)), (8, 3000), (40, 0))],
)
def test_a_budget_is_filled_to_the_last_token(num_requests: int, context_tokens: int) -> None:
    """For any limit; in tables with jumps (padded sizes), with flat parts, and with a single size."""
    stairs = msgspec.structs.replace(
        TABLE,
        chunk_tokens=(16, 17, 512, 600, 1024),
        chunk_ms=((5.0, 13.0, 13.0, 18.0, 23.0), (6.0, 15.4, 15.4, 20.4, 25.4), (10.0, 18.0, 18.0, 23.0, 28.0)),
        ms_per_chunk_kv=1e-6,
    )
    single = msgspec.structs.replace(TABLE, chunk_tokens=(64,), chunk_ms=((5.0,), (7.0,), (9.0,)), ms_per_chunk_kv=1e-6)
    for table in (TABLE, stairs, single):
        for limit_ms in (4.0, 8.0, 10.3, 13.05, 15.4, 19.99, 26.0, 40.0):
            found = chunk_tokens_within(table, limit_ms, Step(1, num_requests, 5000), 3000, context_tokens)
            ms = [table.step_ms(1, num_requests, 5000, tokens, context_tokens) for tokens in range(3001)]
            fitting = [tokens for tokens in range(1, 3001) if ms[tokens] <= limit_ms]
            assert found == pytest.approx(max(fitting, default=0), abs=1)
            assert found == 0 or ms[found] <= limit_ms + 1e-9


def test_a_row_costs_what_prompts_alone_take_for_each() -> None:
    assert StepTime(TABLE, 40, noise=0.0).row_ms() == pytest.approx(18.0 / 1008)
    single = msgspec.structs.replace(TABLE, chunk_tokens=(64,), chunk_ms=((5.0,), (7.0,), (9.0,)))
    assert StepTime(single, 40, noise=0.0).row_ms() == 0.0


def test_where_tokens_cost_next_to_nothing_all_fit() -> None:
    """Less than a float can divide by."""
    flat = msgspec.structs.replace(TABLE, chunk_ms=((5.0,) * 3, (6.0,) * 3, (10.0,) * 3), ms_per_chunk_kv=5e-324)
    assert chunk_tokens_within(flat, 15.0, Step(1, 8), 3000, 10) == 3000


def test_it_travels_as_a_message() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(TABLE), type=CostTable) == TABLE


def test_the_default_target_lets_a_chunk_run_beside_half_a_batch_and_stays_above_slow_rounds() -> None:
    assert (
        default_itl_target_ms(TABLE)
        == pytest.approx(TABLE.step_ms(1, 16, 0, 768))
        == pytest.approx(6.2 + 15.0 + 0.2 / 3)
    )
    slow = msgspec.structs.replace(TABLE, rounds=(PLAIN, msgspec.structs.replace(CHAIN, ms=(5.0, 5.4, 20.0))))
    assert default_itl_target_ms(slow) == pytest.approx(2.0 * 20.0)


def test_the_default_target_stays_above_the_larger_shape_of_a_few_requests() -> None:
    """Beside prompts eight requests run a tree and more of them a chain, whose rounds are quicker."""
    tree = RoundCosts((1, 8, 32), (18.0, 19.0, 40.0), (0.0, 0.0, 0.0))
    table = msgspec.structs.replace(TABLE, rounds=(PLAIN, CHAIN, tree), mixed_shapes=(2, 2, 1))
    assert default_itl_target_ms(table) == pytest.approx(2.0 * 19.0)


def test_the_default_target_lets_a_chunk_run_beside_the_larger_shape_of_a_few_requests() -> None:
    """Where nearly all of a chunk's time is that of its first token, a target below it would let prompts in by the
    fewest tokens that a step can have."""
    small = [
        RoundCosts((1, 8, 32), ms, (0.0, 0.0, 0.0)) for ms in ((0.2, 0.25, 0.3), (0.4, 0.4, 0.5), (0.5, 0.55, 1.0))
    ]
    steps = ((0.73, 0.8, 0.88), (1.07, 1.13, 1.17), (0.88, 0.94, 1.0))
    table = CostTable(tuple(small), (0, 8, 32), (16, 17, 512), steps, (2, 2, 1))
    target_ms = default_itl_target_ms(table)
    assert target_ms == pytest.approx(1.17)
    assert chunk_tokens_within(table, target_ms, Step(2, 8), 4096) >= 512


def test_a_chunk_pays_for_attention_over_what_comes_before_it() -> None:
    table = msgspec.structs.replace(TABLE, ms_per_chunk_kv=2e-6)
    assert table.step_ms(1, 8, 0, 512, context_tokens=10000) == pytest.approx(15.4 + 10.24)
    assert table.step_ms(1, 8, 0, 0, context_tokens=10000) == pytest.approx(5.4)
    fitting = chunk_tokens_within(table, 15.4, Step(1, 8), 4096, 10000)
    assert 0 < fitting < 512 and table.step_ms(1, 8, 0, fitting, 10000) <= 15.4
