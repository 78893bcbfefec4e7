"""Streams of recorded answers: their comparison with static shapes is exact."""

import dataclasses

import pytest

from tests.support.simulation.streams import Stream
from tests.support.simulation.texts import costs_of, recorded, recorded_shapes


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("draft", "batch", "shape"), [("dspark", 1, 0), ("dspark", 8, 2), ("eagle3", 3, 3)])
def test_a_static_shape_takes_what_static_shapes_are_said_to_take(
    draft: str, batch: int, shape: int, eager: bool
) -> None:
    """Up to the rounds of answers that have begun or not ended, which are counted in part."""
    shapes = dataclasses.replace(recorded_shapes(draft), eager=eager)
    answers = [a for a in recorded(draft)["gsm8k"] if a.num_tokens > 1]
    stream = Stream(shapes, costs_of(shapes), batch=batch)
    stream.choice.choose = lambda load, step_time: shape  # type: ignore[method-assign]
    segment = stream.run(answers, 200)
    assert segment.static_ms[shape] == pytest.approx(segment.ms, rel=1e-6)
    assert segment.share <= 1.0 + 1e-6
