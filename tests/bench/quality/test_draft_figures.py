"""Arms of `draft_methods`, and what `draft_figures` makes of their rows."""

import dataclasses
import json
from pathlib import Path

from tests.bench.machine import physical_cores
from tests.bench.quality.draft_figures import (
    TABLE,
    merged,
    new_figures,
    num_different,
    ratios,
    read,
)
from tests.bench.quality.draft_methods import Row, is_adaptive, models
from tests.bench.results import figures


def row(
    arm: str, tokens: int, cpu_s: float, steps: dict[str, int], answers: tuple[int, ...] = (1, 2), draft: str = "A"
) -> Row:
    per_round = tokens / sum(steps.values())
    return Row(arm, draft, "gsm8k", 1, per_round, tokens / cpu_s, tokens / cpu_s / 2, tokens, cpu_s, steps, [*answers])


# B answered on a faster core than A, which must not count.
ROWS = [
    row("none", 100, 1.0, {"plain": 100}),
    row("A, 3/1/4", 100, 0.8, {"3/1/4": 50}),
    row("A, adaptive", 100, 1.0, {"3/1/4": 40, "plain": 20}, answers=(1, 3)),
    row("none", 100, 0.5, {"plain": 100}, draft="B"),
    row("B, 1/1/2", 100, 0.7, {"1/1/2": 50}, draft="B"),
    row("B, adaptive", 100, 0.5, {"plain": 100}, draft="B"),
]


def test_every_shape_of_an_adaptive_arm_is_also_a_static_arm() -> None:
    for model in models([]).values():
        for draft, arms in model.arms().items():
            static = {
                config.shapes.shapes[-1].name
                for name, config in arms.items()
                if config is not None and not is_adaptive(name)
            }
            assert static and sum(config is None for config in arms.values()) == 1
            for name, config in arms.items():
                if is_adaptive(name):
                    assert config is not None and config.adaptive
                    assert {shape.name for shape in config.shapes.shapes[1:]} <= static, (draft, name)


def test_ratios_compare_with_the_best_static_arm_that_answered_in_turn() -> None:
    assert ratios(ROWS) == {("A, adaptive", "gsm8k"): 0.8, ("B, adaptive", "gsm8k"): 1.0}


def test_answers_that_differ_are_counted_by_arm() -> None:
    assert num_different(ROWS) == {"A, adaptive": 1}


def test_figures_of_a_log_take_the_places_of_former_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    between = row("A, 2/1/3", 10, 1.0, {"2/1/3": 5})  # is not recorded: no such row is there
    some = [*ROWS[:3], dataclasses.replace(ROWS[0], batch=8), between]
    arm = {"bench": "draft_methods", "model": "pair", "rows": [dataclasses.asdict(each) for each in some]}
    log.write_text(f"== start\n{json.dumps(arm)}\n")
    new = new_figures(read([log])["pair"], "a machine", "0123456", "2026-01-02")
    assert [(figure.name, figure.value) for figure in new if "adaptive" in figure.name] == [
        (f"{TABLE}: A, adaptive: GSM8K", 1.67),
        (f"{TABLE}: A, adaptive: GSM8K/s", 100),
    ]
    assert [figure.variants for figure in new if figure.variants] == [{"share-of-best": 0.8}]
    before = figures()
    after = merged(before, new)
    assert len(after) == len(before) + 4  # "none" was there
    assert [figure for figure in after if figure.place[0] != TABLE] == [f for f in before if f.place[0] != TABLE]
    assert merged(after, new) == after


def test_a_processor_of_each_core_is_used() -> None:
    cores = physical_cores()
    assert cores and len(set(cores)) == len(cores)
