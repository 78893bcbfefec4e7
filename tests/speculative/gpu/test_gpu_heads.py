"""EAGLE-3 heads of every published kind on a GPU, with its fused kernels and its attention, and in captured rounds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.speculative.build import EngineSpec
from aerie.speculative.config import SpeculativeConfig
from tests.speculative.conftest import DEEP, Pair
from tests.speculative.drafts.test_eagle3_heads import HEADS, check, config_of, flat
from tests.support.drafts.eagle3_reference import Head, save_head
from tests.support.drafts.oracle import SHAPES, Case, Oracle, run_case, tiny_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", HEADS)
def test_states_and_logits_are_those_of_the_published_module(deep_pair: Pair, tmp_path: Path, name: str) -> None:
    head, tensors = HEADS[name][0], HEADS[name][0].tensors()
    folder = save_head(tmp_path / "d", config_of(name), tensors)
    # attention may multiply float32 with the 10 bits of TF32; a flag that is missed differs by about 1
    check(deep_pair, head, folder, tensors, torch.device("cuda"), tolerance=2e-2)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return tiny_spec(tmp_path_factory.mktemp("oracle"), "cuda", num_hidden_layers=DEEP)


@pytest.mark.parametrize("shapes", list(SHAPES))
@pytest.mark.parametrize(
    "head",
    [
        Head(layers=2, fc_norm=True, norm_output=True, norm_before_residual=True, draft_vocab=96),
        Head(hidden=32, heads=2, kv_heads=1, own_embedding=True, norm_before_fc=True),
        Head(num_captured=0),
    ],
    ids=["two layers", "narrow", "final state"],
)
def test_captured_rounds_draft_as_the_text_alone(spec: EngineSpec, tmp_path: Path, head: Head, shapes: str) -> None:
    config = flat(head, eagle_config={"use_aux_hidden_state": bool(head.num_captured)})
    folder = save_head(tmp_path / "head", config, head.tensors())
    drafting = replace(spec, speculative=SpeculativeConfig(str(folder), "eagle3", 3, 1, 4))
    case = Case(page_size=4, num_pages=50, max_step_tokens=64, speculating=0.6, prefix_cache=True, num_requests=12)
    rank = run_case(drafting, Oracle(drafting, SHAPES[shapes]), case, SHAPES[shapes], seed=2)
    assert rank.num_kv > 30 and rank.num_drafts > 0
    assert not rank.faults, "\n".join(rank.faults[:5])
