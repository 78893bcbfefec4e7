"""The choice of shapes on recorded answers of several kinds of text, one kind after the other."""

import numpy as np
import pytest

from tests.support.simulation.texts import DRAFTS, Texts, in_turn, recorded, recorded_shapes, shares

ORDERS = (
    ("mt_bench", "JSON to copy", "humaneval", "gsm8k"),
    ("JSON to copy", "gsm8k", "humaneval", "mt_bench"),
    ("gsm8k", "JSON to copy", "mt_bench", "humaneval"),
)


def of_orders(draft: str, orders: tuple[tuple[str, ...], ...], seed: int = 0) -> list[float]:
    """Return each kind's rate over the best static shape's, in each order, from its first answer on. seed: of the noise
    of step times."""
    answers = [answer for some in recorded(draft).values() for answer in some]
    found = (shares(Texts(draft), answers, in_turn(answers, order), batch=1, seed=seed) for order in orders)
    return [share for each in found for _, share, _, _ in each]


def test_a_text_whose_drafts_fail_locks_none_of_the_next_ones_out() -> None:
    """Copied JSON is best without drafts; one probe of a tree there took what the next thousand steps could spend, so
    that code and mathematics ran without drafts too: 0.81 and 0.79 of the best shape."""
    found = of_orders("dspark", ORDERS[:1])
    assert min(found) > 0.9, found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kinds_of_text_in_turns_get_their_shapes() -> None:
    """Eight answers of some 60 tokens are too few to learn each kind for nothing. Of 144 streams 0.862 is the lowest,
    0.969 the mean (one seed: 0.72 and 0.92 before probes had budgets; 0.967 before requests whose drafts failed were
    tried again)."""
    found = np.array([[share for draft in DRAFTS for share in of_orders(draft, ORDERS, seed)] for seed in range(4)])
    assert found.min() > 0.85 and found.mean(axis=0).min() > 0.9 and found.mean() > 0.968, found


def test_recordings_are_of_shapes_that_drafts_have() -> None:
    """Else record them anew."""
    for draft, config in DRAFTS.items():
        shapes = recorded_shapes(draft).shapes[1:]
        assert config.shapes.shapes[-1] in shapes
        for answer in (answer for answers in recorded(draft).values() for answer in answers):
            assert len({len(of_shape) for of_shape in answer.accepted}) == 1
            deepest = [max(of_shape, default=0) for of_shape in answer.accepted]
            assert all(most <= shape.depth for most, shape in zip(deepest, shapes, strict=True))
