"""The arithmetic of `tests.bench.host.learning`: which gaps belong to which blocks, and their ratio."""

import asyncio

import numpy as np
import pytest

from aerie.deploy.bench.stream_client import Answered
from tests.bench.host.learning import Bench, Blocks, programs, word_problems


def test_gaps_count_in_the_block_in_which_they_end_and_pairs_are_compared() -> None:
    blocks = Blocks(5.0)
    begin_s = 100.0
    for block in range(8):
        gap_s = 0.02 if block % 2 else 0.01  # twice as long while the training runs
        blocks.add([Answered(event_s=[begin_s + 5 * block + 1 + gap_s * i for i in range(100)])], begin_s)
    assert [len(gaps) for gaps in blocks.gaps] == [99] * 8
    found = blocks.ratio(99)
    assert (found["stopped_ms"], found["runs_ms"]) == (pytest.approx(10, rel=1e-6), pytest.approx(20, rel=1e-6))
    assert all(found[name] == pytest.approx(2, rel=1e-6) for name in ("ratio", "low", "high"))


def test_prompts_of_a_phase_differ_and_depend_on_the_seed_alone() -> None:
    for texts in (programs, word_problems):
        assert len(set(texts(60, 1))) > 50 and texts(9, 1) == texts(9, 1) != texts(9, 2)


def test_a_phase_that_ends_within_a_minute_has_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([np.array([10.0, 5.0, 1.0, 2.0]), np.array([30.0, 15.0, 2.0, 5.0])])
    bench = object.__new__(Bench)
    monkeypatch.setattr(bench, "counts", lambda: next(seen))

    async def phase() -> list[dict[str, float]]:
        minutes, has_ended = list[dict[str, float]](), asyncio.Event()
        watch = asyncio.create_task(bench._watch(minutes, has_ended))
        await asyncio.sleep(0.05)
        has_ended.set()
        await watch
        return minutes

    assert asyncio.run(phase()) == [{"length": 1.5, "rounds": 20, "version": 2, "learner_cpu_s": 3}]
