"""How many engines a load wants. Pure."""

from types import SimpleNamespace

import pytest

from aerie.cluster.replica.engine import AIM, desired_replicas, engine_load, replicas_for


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [
        ([], 3, 3),  # nobody has said anything yet
        ([0.0], 1, 1),
        ([0.0, 0.0, 0.0], 3, 1),
        ([AIM], 1, 1),
        ([0.9], 1, 2),
        ([3.0], 1, 5),
        ([0.5, 0.5], 2, 2),
        ([0.34, 0.34], 2, 2),  # 0.68 for one: it fits, without slack
        ([0.25, 0.25], 2, 1),
        ([1.0], 2, 2),  # one is still starting
    ],
)
def test_engines_for_a_load(loads: list[float], current: int, wanted: int) -> None:
    assert replicas_for(loads, current) == wanted


def test_a_load_that_does_not_change_never_swings() -> None:
    """From whatever number, spread over what there is then."""
    for hundredths in range(1, 600, 7):
        for start in range(1, 12):
            current = start
            seen = [current := replicas_for([hundredths / 100 / current] * current, current) for _ in range(6)]
            assert len(set(seen[1:])) == 1, (hundredths, start, seen)


def test_load_is_requests_by_slots_or_the_wait_whichever_is_more() -> None:
    assert engine_load(8, 32, 0.0, 0.0) == 0.25
    assert engine_load(8, 32, 1.0, 2.0) == 1.5


def test_what_serve_hands_over() -> None:
    metrics = {"load": {"r1": 0.9, "r2": 0.9}, "ongoing_requests": {"r1": 0.0}}
    assert desired_replicas(SimpleNamespace(target_num_replicas=2, aggregated_metrics=metrics)) == (3, {})
    assert desired_replicas(SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)) == (2, {})
