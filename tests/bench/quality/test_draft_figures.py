"""Arms of `draft_methods`, and what `draft_figures` makes of their rows."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.bench.machine import physical_cores
from tests.bench.quality.draft_figures import (
    TABLE,
    draft_of,
    is_adaptive,
    merged,
    new_figures,
    num_different,
    ratios,
    read,
)
from tests.bench.quality.draft_methods import Row, models
from tests.bench.results import figures


def row(arm: str, tokens: int, cpu_s: float, steps: dict[str, int], answers: tuple[int, ...] = (1, 2)) -> Row:
    per_round = tokens / sum(steps.values())
    return Row(arm, "gsm8k", 1, per_round, tokens / cpu_s, tokens / cpu_s / 2, tokens, cpu_s, steps, list(answers))


# The static chain makes 2 tokens a round of 20 ms, plain rounds take 10 ms. The adaptive arm ran on a slower core.
ROWS = [
    row("none", 100, 1.0, {"plain": 100}),
    row("A, 3/1/4", 100, 1.0, {"3/1/4": 50}),
    row("B, 1/1/2", 100, 0.5, {"1/1/2": 50}),
    row("A, adaptive", 100, 1.2, {"3/1/4": 40, "plain": 20}, answers=(1, 3)),
]


def test_every_shape_of_an_adaptive_arm_is_also_a_static_arm() -> None:
    for model in models([]).values():
        arms = model.arms()
        static = {
            (draft_of(name), config.shapes.shapes[-1].name)
            for name, config in arms.items()
            if config is not None and not is_adaptive(name)
        }
        for name, config in arms.items():
            if is_adaptive(name):
                assert config is not None and config.adaptive
                assert {(draft_of(name), shape.name) for shape in config.shapes.shapes[1:]} <= static, name


def test_ratios_compare_with_the_best_static_arm_of_the_draft_or_of_all() -> None:
    own = ratios(ROWS, own=True)["A, adaptive", "gsm8k"]
    assert own.measured == pytest.approx(1 / 1.2)
    assert own.by_shape == pytest.approx(1.0)  # 40 rounds of 20 ms and 20 of 10 ms: as long as both others
    every = ratios(ROWS, own=False)["A, adaptive", "gsm8k"]
    assert (every.measured, every.by_shape) == (pytest.approx(0.5 / 1.2), pytest.approx(0.5))


def test_a_shape_that_no_static_arm_ran_has_no_mean_time() -> None:
    found = ratios([*ROWS[:2], row("A, adaptive", 10, 1.0, {"5/1/6": 5})], own=True)
    assert math.isnan(found["A, adaptive", "gsm8k"].by_shape)


def test_answers_that_differ_are_counted_by_arm() -> None:
    assert num_different(ROWS) == {"A, adaptive": 1}


def test_figures_of_a_log_take_the_places_of_former_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    between = row("A, 2/1/3", 10, 1.0, {"2/1/3": 5})  # is not recorded: no such row is there
    some = [*ROWS, dataclasses.replace(ROWS[0], batch=8), between]
    arm = {"bench": "draft_methods", "model": "pair", "arm": "all", "rows": [dataclasses.asdict(each) for each in some]}
    log.write_text(f"== start\n{json.dumps(arm)}\n")
    new = new_figures(read([log])["pair"], "a machine", "0123456", "2026-01-02")
    assert [(figure.name, figure.value) for figure in new if "adaptive" in figure.name] == [
        (f"{TABLE}: A, adaptive: GSM8K", 1.67),
        (f"{TABLE}: A, adaptive: GSM8K/s", 83),
    ]
    assert [figure.variants for figure in new if figure.variants] == [{"share-of-best": 1.0}]
    before = figures()
    after = merged(before, new)
    assert len(after) == len(before) + 6  # "none" was there
    assert [figure for figure in after if figure.place[0] != TABLE] == [f for f in before if f.place[0] != TABLE]
    assert merged(after, new) == after


def test_a_processor_of_each_core_is_used() -> None:
    cores = physical_cores()
    assert cores and len(set(cores)) == len(cores)
