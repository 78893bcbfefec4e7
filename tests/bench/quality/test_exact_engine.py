"""Counting of answers that differ, and the bench's runs on a CPU."""

import struct
from pathlib import Path

from aerie.speculative.build import local_engine
from tests.bench.quality.exact_engine import SHAPES, Answer, Differences, prompts_of, run, spec_of
from tests.bench.round import write_checkpoints


def answer(ids: list[int], *logprobs: float) -> Answer:
    return Answer(ids, [struct.pack("f", each) for each in logprobs])


def test_another_id_ends_the_comparison_and_one_bit_is_found() -> None:
    alone = [answer([1, 2, 3], -1.0, -2.0, -3.0), answer([4, 5], -0.5, -0.25)]
    assert Differences.between(alone, alone) == Differences(0, 0, 5)
    another = [answer([1, 7, 3], -1.0, -9.0, -9.0), answer([4, 5], -0.5, -0.25 - 2.0**-25)]
    assert Differences.between(alone, another) == Differences(1, 1, 3)
    assert Differences.between(alone, [alone[0], answer([4], -0.5)]) == Differences(1, 0, 4)


def test_requests_are_preempted_and_copied_drafts_accepted(tmp_path: Path) -> None:
    """Else the bench would show nothing of them."""
    write_checkpoints(tmp_path, "tiny")
    spec = spec_of(tmp_path, "suffix", 32, 48, 24)
    prompts = prompts_of(spec, 32, 48)
    assert {len(prompt) for prompt in prompts} >= {2, 4} and max(map(len, prompts)) > 24
    with local_engine(spec) as engine:
        found = run(engine, prompts, 24, 32, "suffix")
    assert found.preempted > 0 and found.accepted > 0 and len(found.answers) == 32
    assert SHAPES[0] == "plain", "the first engine answers alone"
