"""Drafts and draft KV under random scheduling are those of the same text alone (see `tests.support.drafts.oracle`)."""

from dataclasses import replace
from pathlib import Path

import pytest

from aerie.speculative.build import EngineSpec
from aerie.speculative.config import SpeculativeConfig
from tests.support.drafts.eagle3_reference import Head, save_head
from tests.support.drafts.oracle import SHAPES, Case, Oracle, run_case, tiny_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return tiny_spec(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def oracles(spec: EngineSpec) -> dict[str, Oracle]:
    return {name: Oracle(spec, shapes) for name, shapes in SHAPES.items()}


# Requests that speculate beside others that do not, and pages for about three of them, so that some are preempted.
CASES = [
    Case(page_size=1, num_pages=170, max_step_tokens=16, speculating=0.5, prefix_cache=True),
    Case(page_size=2, num_pages=67, max_step_tokens=5, speculating=0.4, prefix_cache=True),
    Case(page_size=4, num_pages=45, max_step_tokens=16, speculating=0.8, prefix_cache=False),
    Case(page_size=8, num_pages=150, max_step_tokens=64, speculating=0.5, prefix_cache=True),
    Case(page_size=16, num_pages=11, max_step_tokens=16, speculating=1.0, prefix_cache=True),
    Case(page_size=4, num_pages=50, max_step_tokens=64, speculating=0.6, prefix_cache=True, captured=True),
    Case(page_size=1, num_pages=170, max_step_tokens=20, speculating=0.8, prefix_cache=True, captured=True),
]
# Every shape once, few pages with and without a prefix cache, steps as they are and as they were captured.
QUICK = {("tree", 2), ("changing", 4)}  # chains are among the changing shapes
CROSS = [
    pytest.param(name, seed, marks=() if (name, seed) in QUICK else pytest.mark.slow)
    for name in SHAPES
    for seed in range(len(CASES))
]


@pytest.mark.parametrize("name,seed", CROSS)
def test_drafts_are_those_of_the_text_alone(spec: EngineSpec, oracles: dict[str, Oracle], name: str, seed: int) -> None:
    case = replace(CASES[seed], num_requests=4 if (name, seed) in QUICK else 6)
    rank = run_case(spec, oracles[name], case, SHAPES[name], seed)
    assert rank.num_kv > 30 and rank.num_drafts > 0
    assert not rank.faults, "\n".join(rank.faults[:5])


def test_drafts_in_a_window_are_those_of_the_text_alone(spec: EngineSpec) -> None:
    """Requests of up to 130 tokens, of which drafts see 64."""
    assert spec.speculative is not None
    windowed, shapes = replace(spec, speculative=replace(spec.speculative, window=64)), SHAPES["changing"]
    case = replace(CASES[2], num_requests=6, num_pages=90, longer=30)
    rank = run_case(windowed, Oracle(windowed, shapes), case, shapes, seed=1)
    assert rank.num_kv > 20 and rank.num_drafts > 0
    assert max(map(len, rank._texts.values())) > 100
    assert not rank.faults, "\n".join(rank.faults[:5])


@pytest.mark.parametrize("window", [None, pytest.param(64, marks=pytest.mark.slow)])
def test_drafts_of_a_head_of_several_layers_are_those_of_the_text_alone(
    spec: EngineSpec, tmp_path: Path, window: int | None
) -> None:
    """The KV of its deeper layers is made of every row's output, of which only the newest goes through the last. Each
    row has its own window, whether it is a chunk's or a round's."""
    head = Head(layers=2, draft_vocab=96, fc_norm=True, norm_output=True, norm_before_residual=True)
    config = head.layer_config() | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config |= {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    folder = save_head(tmp_path / "head", config, head.tensors())
    deep, shapes = (
        replace(spec, speculative=SpeculativeConfig(str(folder), "eagle3", 3, 1, 4, window=window)),
        SHAPES["changing"],
    )
    rank = run_case(deep, Oracle(deep, shapes), replace(CASES[0], num_requests=2), shapes, seed=0)
    assert rank.num_kv > 30 and rank.num_drafts > 0
    assert not rank.faults, "\n".join(rank.faults[:5])
