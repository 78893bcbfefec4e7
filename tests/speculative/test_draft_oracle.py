"""Drafts and draft KV under random scheduling are those of the same text alone (see `tests.support.draft_oracle`)."""

from dataclasses import replace

import pytest

from speculative.build import EngineSpec
from tests.support.draft_oracle import SHAPES, Case, Oracle, run_case, tiny_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return tiny_spec(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module", params=list(SHAPES))
def arm(request: pytest.FixtureRequest, spec: EngineSpec) -> tuple[str, Oracle]:
    return request.param, Oracle(spec, SHAPES[request.param])


# Requests that speculate beside others that do not, and pages for about three of them, so that some are preempted.
CASES = [
    Case(page_size=1, num_pages=170, max_step_tokens=16, speculating=0.5, prefix_cache=True),
    Case(page_size=2, num_pages=67, max_step_tokens=5, speculating=0.4, prefix_cache=True),
    Case(page_size=4, num_pages=45, max_step_tokens=16, speculating=0.8, prefix_cache=False),
    Case(page_size=8, num_pages=150, max_step_tokens=64, speculating=0.5, prefix_cache=True),
    Case(page_size=16, num_pages=11, max_step_tokens=16, speculating=1.0, prefix_cache=True),
]


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_drafts_are_those_of_the_text_alone(spec: EngineSpec, arm: tuple[str, Oracle], seed: int) -> None:
    name, oracle = arm
    rank = run_case(spec, oracle, replace(CASES[seed], num_requests=8), SHAPES[name], seed)
    assert rank.num_kv > 30 and rank.num_drafts > 0
    assert not rank.faults, "\n".join(rank.faults[:5])
