"""What the choice of shapes takes of the host's time in each step."""

import statistics

import pytest

from aerie.workers.config import RoundShapes
from tests.support.simulation.host_time import host_us, num_calls
from tests.support.simulation.shapes import CHAIN, TREE
from tests.support.slow import slow


@pytest.mark.parametrize("shapes", [*slow(CHAIN), TREE], ids=["chain", "tree"])
def test_a_choice_takes_few_calls_a_step(shapes: RoundShapes) -> None:
    """Counts calls (some 650 in all), because times depend on the machine. The mean over batch sizes, since one load
    has a few evaluations more or less by chance."""
    calls = [num_calls(shapes, batch) for batch in (1, 4, 8)]
    assert statistics.mean(each["adaptive"] - each["static"] for each in calls) < 26, calls


@pytest.mark.slow  # measures time, which what else a machine runs changes
def test_a_choice_takes_a_small_part_of_the_scheduler_s_time() -> None:
    """A twentieth, measured; a tenth is allowed, in the best of three trials."""
    ratios = []
    for _ in range(3):
        us = host_us(CHAIN, 1, 3)
        ratios.append(us["adaptive"] / us["static"])
        if ratios[-1] < 1.1:
            return
    raise AssertionError(ratios)
