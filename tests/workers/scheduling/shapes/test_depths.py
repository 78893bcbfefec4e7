"""The arithmetic of `tests.support.simulation.depths`."""

import pytest

from tests.support.simulation.depths import LENGTHS, best, by_entropy, chain_tokens, probability_of


def test_texts_of_one_kind_gain_nothing_by_depths_of_their_own() -> None:
    one, each = best(32, [(1, 2.0, 2.5), (1, 2.0, 2.5)], [1, 3, 9])
    assert one == each


def test_texts_that_differ_gain_more_where_rows_cost_more() -> None:
    kinds, rows = [(1, 1.2, 1.2), (1, 3.0, 8.0)], [1, 3, 16]
    gains = [each / one for one, each in (best(batch, kinds, rows) for batch in (8, 32))]
    assert 1.0 < gains[0] < gains[1]


def test_a_choice_by_entropy_is_best_where_entropy_says_all() -> None:
    """Half of the rounds accept everything, and say so."""
    rounds = {"text": [(0, (1.0, 8.0)), (1, (1.0, 1.0))]}
    one, each = by_entropy(32, rounds, [1, 16])
    assert each > 1.2 * one


@pytest.mark.parametrize("name", LENGTHS)
def test_a_chains_probability_gives_its_length(name: str) -> None:
    depth, *lengths = LENGTHS[name]
    for length in lengths:
        assert chain_tokens(probability_of(length, depth), depth) == pytest.approx(length)
