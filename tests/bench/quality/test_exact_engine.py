"""Counting of answers that differ, and the bench's runs on a CPU."""

import struct
from pathlib import Path

import pytest

from aerie.speculative.build import local_engine, plan_engine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.models import configured
from tests.bench.quality import exact_engine
from tests.bench.quality.exact_engine import ENGINES, SHAPES, Answer, Differences, compare, prompts_of, run, spec_of
from tests.bench.round import MODELS, has_draft, keep_layers, write_checkpoints
from tests.support.ranks import forked_ranks  # noqa: F401 - every test has it


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


def test_an_incomplete_answer_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoints(tmp_path, "tiny")
    spec = spec_of(tmp_path, "plain", 2, 48, 24)
    stops = SamplingParams(24, 0.0, logprobs=0, stop_token_ids=tuple(range(256)))
    monkeypatch.setattr(exact_engine, "sampling_of", lambda *args: stops)
    with local_engine(spec) as engine, pytest.raises(AssertionError, match=r"r0, prompt of .*, 0 cached: .*stop"):
        run(engine, prompts_of(spec, 2, 48), 24, 2, "plain")


def test_two_ranks_answer_the_same_requests(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, "tiny")
    spec = spec_of(tmp_path, "suffix", 4, 40, 6, tensor_parallel=2)
    row, other = compare([(spec, ("suffix", "mixed"))], 4, 40, 6, [4])
    assert (row["shape"], other["shape"]) == ("suffix", "mixed")
    assert row["compared"] == other["compared"] == 24 and row["answers"] == other["answers"] == 0, "float32"


@pytest.mark.parametrize("name", [*MODELS, *configured.CONFIGS])
def test_every_model_can_keep_its_first_layers(tmp_path: Path, name: str) -> None:
    if name == "dsv3-tiny":
        pytest.skip("has three layers")
    write_checkpoints(tmp_path, name)
    keep_layers(tmp_path, 4)
    for shapes in ENGINES[: 3 if has_draft(tmp_path) else 2]:
        planned = plan_engine(spec_of(tmp_path, shapes[0], 64, 2048, 24, tensor_parallel=2))
        assert planned.target.num_layers == 4
