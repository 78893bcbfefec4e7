"""What changes of shape cost and evaluations take where nothing is captured, and a step may verify one shape and draft
another."""

from dataclasses import replace

import pytest

from aerie.workers.scheduling.shapes.shape_choice import EVALUATION_MS, ShapeChoice
from aerie.workers.scheduling.shapes.shape_rates import Rates, verified_shape
from tests.support.simulation.shapes import CPU, TREE, Engine, chances_of

EAGER = replace(TREE, eager=True)


def test_changes_cost_little_where_a_step_verifies_what_was_drafted() -> None:
    """Drafts that still pay are verified; others are thrown away, which costs what drafting them took."""
    tokens, ms, upper = [1.0, 2.0, 2.4, 3.0], [10.0, 20.0, 40.0, 60.0], [0.1] * 4
    former, eager = (Rates(tokens, ms, upper, [0.0] * 4, 0.1, of) for of in (TREE, EAGER))
    assert former.change_loss(0, 1) == pytest.approx(10.0) and former.change_loss(0, 3) == pytest.approx(20.0)
    assert eager.change_loss(0, 1) < 1.0 and 15.0 < eager.change_loss(0, 3) < 16.0
    assert eager.change_loss(3, 0) == eager.change_loss(0, 3) and eager.change_loss(2, 2) == 0.0
    assert [verified_shape(EAGER, eager, 0, next_shape) for next_shape in range(4)] == [0, 0, 0, 0]
    assert [verified_shape(EAGER, eager, 1, next_shape) for next_shape in range(4)] == [1, 1, 1, 1]
    assert [verified_shape(EAGER, eager, 3, next_shape) for next_shape in range(4)] == [0, 1, 3, 3]
    assert verified_shape(EAGER, None, 3, 1) == 1
    assert [verified_shape(TREE, former, 3, next_shape) for next_shape in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("eager", "least", "most"), [(True, 0.003, 0.0045), (False, 0.003, 0.05)])
def test_evaluations_take_less_of_a_host_that_computes_the_rounds(
    eager: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the host is idle during a long round. On the embedded pair they took 0.9 % of the time."""
    shapes, num, evaluate = replace(TREE, eager=eager), 0, ShapeChoice._evaluate

    def counted(choice: ShapeChoice, *arguments: object) -> None:
        nonlocal num
        num += 1
        evaluate(choice, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShapeChoice, "_evaluate", counted)
    engine = Engine(shapes, 1, 100, chances_of(shapes, 1.8), actual=CPU[TREE], max_batch=4)
    engine.rate(300)
    num, before = 0, engine.ms
    engine.rate(600)
    assert least < num * EVALUATION_MS / (engine.ms - before) < most, num
