"""Where a target copies, drafts that are copied from the text are accepted whole: alone, and as a branch beside the
tree of a model whose drafts are wrong.

The embedded target writes word problems and hardly copies (2 tokens a round), so a small target is trained for it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.targets.copies import copying_target, shuffled
from tests.support.tiny_models import make_eagle

pytestmark = pytest.mark.slow  # half a minute of training
ANSWER = 96
SUFFIX = SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copying") / "target"
    copying_target().save_pretrained(folder)  # type: ignore[operator]
    return folder


def prompts() -> list[tuple[list[int], list[int]]]:
    """Prompts that end in the beginning of a part of their text, and how that part goes on."""
    generator, found = torch.Generator().manual_seed(5), []
    for first in (10, 35, 60, 85, 110):
        text = [0, *shuffled(230, generator).tolist()]
        found.append((text + text[first : first + 4], text[first + 4 : first + 4 + ANSWER]))
    return found


def answers(target: Path, speculative: SpeculativeConfig | None, measure_costs: bool = False) -> list[Request]:
    model = ModelSource(str(target), dtype="float32", device="cpu")
    limits = CacheConfig(16, num_pages=200), SchedulerConfig(max_running=4, max_step_tokens=512)
    spec = EngineSpec(WorkerConfig(model, *limits, measure_costs=measure_costs), speculative)
    with local_engine(spec) as engine:
        return engine.generate([prompt for prompt, _ in prompts()], SamplingParams(ANSWER, 0.0), 1)


def tokens_a_round(requests: list[Request]) -> float:
    accepted = sum(k * count for request in requests for k, count in enumerate(request.acceptance_histogram))
    return 1 + accepted / sum(request.num_rounds for request in requests)


def test_copied_drafts_are_accepted_whole(target: Path) -> None:
    expected = [text for _, text in prompts()]
    assert [request.output for request in answers(target, None)] == expected
    requests = answers(target, replace(SUFFIX, adaptive=False))
    assert [request.output for request in requests] == expected
    assert tokens_a_round(requests) > 15.5


def test_a_branch_is_accepted_whole_beside_drafts_that_are_wrong(target: Path, tmp_path: Path) -> None:
    eagle = str(make_eagle(tmp_path / "eagle", target))
    tree = SpeculativeConfig(eagle, "eagle", 3, 2, 6, adaptive=False)
    without, beside = (answers(target, replace(tree, suffix_tokens=tokens)) for tokens in (0, 8))
    assert [request.output for request in beside] == [text for _, text in prompts()]
    assert tokens_a_round(without) < 1.2 and tokens_a_round(beside) > 8.5


def test_the_choice_of_shapes_finds_long_copies(target: Path) -> None:
    """From the first round on, with costs as a start measures them."""
    requests = answers(target, SUFFIX, measure_costs=True)
    assert [request.output for request in requests] == [text for _, text in prompts()]
    assert tokens_a_round(requests) > 8
