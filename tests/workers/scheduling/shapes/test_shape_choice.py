"""The choice of a shape against every static one and none, on a simulated engine with the costs of a GPU."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shapes.shape_choice import Load, Reason, ShapeChoice
from aerie.workers.scheduling.step_time import StepTime
from tests.support.simulation.shapes import CHAIN, GPU, TREE, Engine, Ints, chances_of

BATCHES = (1, 4, 16, 32, 64, 128, 256)
CASES = tuple(itertools.product((1024, 8192, 32768), (1.3, 2.0, 3.0, 4.5)))


@pytest.mark.parametrize(
    ("shapes", "batch", "cases"),
    [
        *(
            pytest.param((CHAIN, TREE)[i % 2], batch, CASES[i % 6 :: 6], id=f"{('chain', 'tree')[i % 2]}-{batch}")
            for i, batch in enumerate(BATCHES)
        ),
        *(
            pytest.param(shapes, batch, CASES, id=f"{name}-{batch}, every case", marks=pytest.mark.slow)
            for name, shapes in (("chain", CHAIN), ("tree", TREE))
            for batch in BATCHES
        ),
    ],
)
def test_it_is_as_good_as_the_best_static_shape(
    shapes: RoundShapes, batch: int, cases: Sequence[tuple[int, float]]
) -> None:
    """At a context and an acceptance, after 200 steps: at least 0.97 of the best shape and 0.98 of none. Neighbouring
    batches have other cases."""
    short = []
    for context, mean in cases:
        engine = Engine(shapes, batch, context, chances_of(shapes, mean), seed=batch)
        engine.rate(200)
        rate = engine.rate(500)
        rates = [engine.static(shape) for shape in range(len(shapes))]
        if rate < 0.97 * max(rates) or rate < 0.98 * rates[0]:
            short.append((context, mean, [round(r / max(rates), 3) for r in (*rates, rate)], engine.seen))
    assert not short, "\n".join(map(str, short))


@pytest.mark.parametrize(
    ("shapes", "batch", "mean", "took"),
    [
        (CHAIN, 128, 3.0, (9.4, 10.9, 18.95)),  # one H200, 1,024 tokens each: drafts of one were best, and never tried
        (CHAIN, 16, 1.3, (4.99, 4.77, 5.66)),
        (CHAIN, 16, 3.0, (30.0, 30.0, 30.0)),  # a host slower than any round: drafts cost nothing
        (TREE, 8, 1.3, (6.0, 6.2, 6.9, 24.0)),  # a tree takes longer than any start has seen
        (TREE, 1, 4.5, (0.39, 0.39, 0.39, 0.39)),
        (TREE, 1, 3.0, (0.39, 0.4, 0.42, 0.454)),  # 16 rows take 8 % longer than 8
        (TREE, 8, 3.0, (4.4, 4.6, 4.7, 5.08)),
    ],
)
def test_steps_that_take_longer_than_expected_count_as_they_are(
    shapes: RoundShapes, batch: int, mean: float, took: tuple[float, ...]
) -> None:
    engine = Engine(shapes, batch, 1024, chances_of(shapes, mean), seed=batch, took=took)
    engine.rate(500)
    rate, rates = engine.rate(400), [engine.static(shape) for shape in range(len(shapes))]
    assert rate > 0.97 * max(rates), (rate, rates, engine.seen)


@pytest.mark.parametrize("took_ms,most", [(0.4, 0.5), (5.0, 1.0)])
def test_of_rounds_faster_than_learning_only_some_are_learnt_from(took_ms: float, most: float) -> None:
    engine = Engine(TREE, 4, 1024, chances_of(TREE, 3.0), took=(took_ms,) * len(TREE))
    engine.rate(300)
    acceptance, learnt = engine.choice.acceptance, 0
    record = acceptance.record

    def counted(shape: int, slots: Ints, numbers: Ints, drafted: Ints, accepted: npt.NDArray[np.int32]) -> None:
        nonlocal learnt
        learnt += 1
        record(shape, slots, numbers, drafted, accepted)

    acceptance.record = counted  # type: ignore[method-assign, assignment]
    assert engine.rate(300) > 0.97 * max(engine.static(shape) for shape in range(len(TREE)))
    assert (most - 0.2) * 300 < learnt <= most * 300, learnt


def test_rounds_that_wait_for_the_host_are_rarely_evaluated() -> None:
    """An evaluation takes as long as one of the embedded pair's rounds on an H200, where answers that end and begin
    had one follow the other: 5 % of the time."""
    engine = Engine(CHAIN, 8, 1024, chances_of(CHAIN, 3.0), took=(0.5, 0.6, 0.7), request_steps=30)
    engine.rate(400)
    evaluate, count = engine.choice._evaluate, 0

    def counted(load: Load, step_time: StepTime) -> None:
        nonlocal count
        count += 1
        evaluate(load, step_time)

    engine.choice._evaluate = counted  # type: ignore[method-assign]
    for batch in (8, 5, 8, 3) * 8:
        engine.batch = batch
        engine.rate(25)
    assert 2 <= count <= 12, count


def test_plain_rounds_are_left_when_drafts_become_right() -> None:
    """They tell nothing of drafts: probes do, and cost little."""
    engine = Engine(CHAIN, 64, 1024, chances_of(CHAIN, 1.1))
    engine.rate(100)
    before = Counter(engine.seen)
    assert engine.rate(1500) > 0.99 * engine.static(0)
    # what a probe may cost is saved for, and its rounds tell of all shapes that go no deeper
    probes = sum(n for (_, reason), n in (engine.seen - before).items() if reason is Reason.PROBE)
    assert 0 < probes < 45 and (engine.drafted == 0 or engine.choice.reason is Reason.PROBE)
    engine.chances = chances_of(CHAIN, 4.5)
    steps = 0
    while engine.step() != CHAIN.default or engine.choice.reason is Reason.PROBE:
        steps += 1
        assert steps < 1500
    assert engine.rate(300) > 0.98 * engine.static(2)


def test_drafts_that_become_wrong_are_given_up_soon() -> None:
    engine = Engine(CHAIN, 64, 1024, chances_of(CHAIN, 4.5))
    engine.rate(300)
    engine.chances = chances_of(CHAIN, 1.1)
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 200


def test_beside_prompts_and_rare_sampling_only_shapes_that_are_captured_there_run() -> None:
    """A shape between plain decoding and the default has no graphs for them; of few requests the default alone has."""
    for batch, best, mean in ((4, 2, 2.0), (64, 1, 1.5), (128, 0, 1.2)):
        engine = Engine(CHAIN, batch, 1024, chances_of(CHAIN, mean))
        engine.rate(400)
        assert engine.drafted == best
        allowed = {CHAIN.default} if batch <= 8 else {0, CHAIN.default}
        assert {engine.step(with_prompts=True) for _ in range(50)} <= allowed
        assert engine.choice.reason in (Reason.PROMPTS, Reason.PROBE)
        assert Counter(engine.step() for _ in range(100))[best] > 80, engine.seen
        assert {engine.step(rare_sampling=True) for _ in range(50)} <= {0, CHAIN.default}
        assert engine.choice.reason in (Reason.SAMPLING, Reason.PROBE)


def test_beside_prompts_many_requests_run_what_accepts_all_its_rows() -> None:
    """A tree's default gives way to the widest chain; what only plain and default rounds are captured for has those."""
    assert [shape.name for shape in TREE.shapes] == ["plain", "3/1/4", "4/2/8", "5/4/16"]
    assert TREE.mixed_shapes(8) == (3,) and TREE.mixed_shapes(9) == (0, 1)
    assert TREE.mixed_shapes(9, rare_sampling=True) == (0, 3) and CHAIN.mixed_shapes(9) == (0, CHAIN.default)
    for mean, names in ((3.0, {1}), (1.1, {0})):
        engine = Engine(TREE, 64, 1024, chances_of(TREE, mean))
        engine.rate(400)
        assert {engine.step(with_prompts=True) for _ in range(50)} == names
        assert {engine.step(with_prompts=True, rare_sampling=True) for _ in range(50)} <= {0, 3}


@pytest.mark.parametrize("before,after", [(1.05, 4.5), (4.5, 1.05)])
def test_drafts_that_change_are_noticed_where_every_step_has_prompts(before: float, after: float) -> None:
    """Plain rounds tell nothing of drafts, and no step without prompts comes that could."""
    engine = Engine(TREE, 64, 1024, chances_of(TREE, before))
    for mean in (before, after):
        engine.chances = chances_of(TREE, mean)
        for _ in range(400):
            engine.step(with_prompts=True)
        best = max(TREE.mixed_shapes(64), key=engine.static)
        assert Counter(engine.step(with_prompts=True) for _ in range(100))[best] > 80, engine.seen


@pytest.mark.parametrize("batch,mean", [(4, 1.05), (4, 4.5), (16, 3.0), (16, 4.5)])
def test_where_nothing_is_captured_the_best_shape_runs_beside_prompts_too(batch: int, mean: float) -> None:
    engine = Engine(TREE, batch, 1024, chances_of(TREE, mean))
    engine.choice = ShapeChoice(replace(TREE, eager=True), batch)
    for _ in range(400):
        engine.step(with_prompts=True)
    best = max(range(len(TREE)), key=engine.static)
    assert Counter(engine.step(with_prompts=True) for _ in range(100))[best] > 80, engine.seen


def test_without_costs_or_where_it_is_off_the_default_runs() -> None:
    static = RoundShapes(CHAIN.shapes, CHAIN.default)
    for shapes, costs in ((CHAIN, None), (static, GPU[CHAIN])):
        choice, slots = ShapeChoice(shapes, 4), np.arange(4)
        load = Load(slots, slots, slots < 2, 100)
        assert {choice.choose(load, costs and StepTime(costs, 4)) for _ in range(20)} == {CHAIN.default}
        assert choice.reason is Reason.STATIC and choice.expected == {}


def test_requests_without_drafts_count_for_plain_rounds() -> None:
    """Where most do not speculate, the few that do are not worth their rows."""
    engine = Engine(CHAIN, 64, 1024, chances_of(CHAIN, 3.0))
    engine.rate(200)
    assert engine.drafted
    engine.speculative = engine.slots < 4
    engine.rate(100)
    assert engine.drafted == 0


def test_equal_calls_give_equal_answers() -> None:
    first, second = (Engine(TREE, 16, 1024, chances_of(TREE, 2.0), seed=3) for _ in range(2))
    assert [first.step() for _ in range(400)] == [second.step() for _ in range(400)]
    assert first.choice.expected == second.choice.expected


def test_prompts_alone_draft_what_their_first_rounds_will_verify() -> None:
    """Where only the default is captured beside prompts, that; else what runs now."""
    nobody = np.empty(0, np.int64)
    load = Load(nobody, nobody, nobody.astype(np.bool_), 0, with_prompts=True)
    for eager in (False, True):
        engine = Engine(CHAIN, 128, 1024, chances_of(CHAIN, 1.1))
        engine.choice = ShapeChoice(replace(CHAIN, eager=eager), 128)
        engine.rate(200)
        assert engine.drafted == 0
        assert engine.choice.choose(load, engine.step_time) == (0 if eager else CHAIN.default)
