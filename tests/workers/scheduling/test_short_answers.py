"""The choice of shapes where answers are short, so that prompts come between their rounds all the time.

The embedded pair on an H200: answers of 64 tokens are some fifteen rounds of 0.45 ms, about what the host takes for one
of any shape. There and where rounds take what the device does, after 200 steps.
"""

import pytest

from tests.support.simulation.answers import Answers, Pair
from tests.support.simulation.shapes import CHAIN, TREE, chances_of
from workers.config import RoundShapes
from workers.scheduling.cost_table import CostTable, RoundCosts

BATCHES = (1, 8, 32)
PLAIN_MS, CHAIN_MS, TREE_MS = (0.12, 0.15, 0.25), (0.33, 0.38, 0.60), (0.47, 0.56, 1.20)
ROUNDS_MS = {CHAIN: (PLAIN_MS, (0.20, 0.23, 0.40), CHAIN_MS), TREE: (PLAIN_MS, CHAIN_MS, (0.40, 0.48, 0.80), TREE_MS)}
HOST_MS = 0.42


def pair(shapes: RoundShapes, mean: float, host_ms: float) -> Pair:
    """mean: tokens of a round of a chain of four drafts."""
    rounds = tuple(RoundCosts(BATCHES, ms, (0.0,) * 3) for ms in ROUNDS_MS[shapes])
    chunks = tuple(
        tuple(alone + ms for ms in (0.30, 0.32, 0.40)) for alone in (0.05, *ROUNDS_MS[shapes][shapes.default])
    )
    costs = CostTable(rounds, (0, *BATCHES), (16, 128, 512), chunks, default=shapes.default)
    return Pair(shapes, chances_of(shapes, mean).tolist(), costs, host_ms)


@pytest.mark.parametrize(
    ("shapes", "batch", "mean", "host_ms", "best"),
    [
        (CHAIN, 1, 3.0, HOST_MS, "3/1/4"),
        (CHAIN, 8, 3.0, HOST_MS, "3/1/4"),
        (TREE, 1, 3.5, HOST_MS, "5/4/16"),
        (TREE, 8, 3.5, HOST_MS, "5/4/16"),
        (CHAIN, 1, 1.3, 0.1, "plain"),
        (TREE, 1, 1.3, 0.1, "plain"),
        (CHAIN, 8, 1.3, 0.1, "plain"),
        (TREE, 8, 1.3, 0.1, "plain"),
        (TREE, 4, 2.0, 0.1, "plain"),
    ],
)
def test_short_answers_come_as_fast_as_with_the_best_shape(
    shapes: RoundShapes, batch: int, mean: float, host_ms: float, best: str
) -> None:
    """Against the best shape in all steps that may have it, and in the others what is captured beside prompts. What is
    accepted differs between both by chance, which makes a standard error of 0.015: 0.97 less two of them."""
    of, index = pair(shapes, mean, host_ms), [shape.name for shape in shapes.shapes].index(best)
    beside = shapes.largest_beside_chunks(batch)
    count = 40 + 10 * batch
    forced = Answers(of, choose=lambda has_prompts: beside if has_prompts else index)
    chosen = Answers(of)
    for answers in (forced, chosen):
        answers.warm_up(batch)
    before = chosen.steps
    share = chosen.tokens_per_ms(batch, count) / forced.tokens_per_ms(batch, count)
    assert share > 0.94, (share, chosen.steps - before)
