"""The module for multi-token prediction that comes with DeepSeek-V3 and GLM: the same states as transformers', the
same answers with it as without, and refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from attention.config import CacheConfig
from speculative.build import EngineSpec, check_weights, plan_engine, plan_weights
from speculative.config import SpeculativeConfig
from speculative.drafts.loading import load_draft
from speculative.drafts.mtp_deepseek import DeepseekMtp
from speculative.drafts.registry import read_draft
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.drafts.mtp import FEW_PAGES, answers, check_answers, check_fp8_states, check_states, read_mtp
from tests.support.slow import slow
from tests.support.tiny_models import add_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from tests.workers.models.test_targets import GREEDY, by_transformers, prompts, worker_of
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.models.loading import load_target, read_target_config

CPU = torch.device("cpu")
V3 = {"architecture": "DeepseekV3"}


def read(target: Path) -> DeepseekMtp:
    draft = read_mtp(target)
    assert isinstance(draft, DeepseekMtp)
    return draft


@pytest.mark.parametrize("architecture", ["DeepseekV3", "Glm4Moe", "Glm4MoeLite"])
def test_its_states_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    target = make_target(tmp_path / "t", architecture=architecture)
    module, rotary = add_mtp(target), AutoModelForCausalLM.from_pretrained(target).model.rotary_emb

    def reference(embedded: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(mask.shape[-1]).unsqueeze(0)
        return module(embedded, features, rotary(embedded, positions), mask, positions, None)

    check_states(target, reference)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Pair:
    """A target of DeepSeek-V3's shape, latent attention and experts, whose module is right about half the time."""
    target = make_target(tmp_path_factory.mktemp("mtp") / "t", calm=0.01, **V3)
    add_mtp(target, copying=True)
    return Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6])


@pytest.fixture(scope="module")
def plain(served: Pair) -> list[list[int]]:
    return [request.output for request in answers(served, None)]


@pytest.mark.parametrize(
    "shape,ranks,draft_tp,cache",
    [
        pytest.param((3, 1, 4), 1, None, None, marks=pytest.mark.slow),
        pytest.param((4, 3, 10), 1, None, CacheConfig(page_size=1, num_pages=1600), marks=pytest.mark.slow),
        ((4, 3, 10), 1, None, FEW_PAGES),
        pytest.param((3, 1, 4), 2, None, None, marks=pytest.mark.slow),  # the two after it have what it has
        pytest.param((4, 3, 10), 2, 1, None, marks=pytest.mark.slow),
        ((4, 3, 10), -2, None, None),
    ],
    ids=[
        "chain",
        "tree, pages of 1",
        "tree, few pages",
        "chain, 2 ranks",
        "tree, 2 ranks, draft whole on each",
        "tree, whole experts",
    ],
)
def test_it_changes_no_token(
    served: Pair,
    plain: list[list[int]],
    shape: tuple[int, int, int],
    ranks: int,
    draft_tp: int | None,
    cache: CacheConfig | None,
) -> None:
    """Greedy and sampled."""
    drafted = answers(served, SpeculativeConfig("", "mtp", *shape, draft_tp), ranks, cache)
    check_answers(drafted, plain, cache)


@pytest.mark.slow  # greedy: as a target of transformers' modules, which is compared with it
@pytest.mark.parametrize("architecture", ["Glm4Moe", "Glm4MoeLite"])
def test_a_module_of_glm_changes_no_token(tmp_path: Path, pair: Pair, architecture: str) -> None:
    target = make_target(tmp_path / "t", calm=0.01, architecture=architecture)
    add_mtp(target, copying=True)
    served = Pair(target, pair.eagle, pair.eagle3, pair.prompts[:4])
    plain = [request.output for request in answers(served, None)]
    for shape in ((3, 1, 4), (4, 3, 10)):
        check_answers(answers(served, SpeculativeConfig("", "mtp", *shape)), plain, None)


def test_its_weights_may_be_fp8(tmp_path: Path) -> None:
    """But for its projection, which is published in bf16."""
    target = make_target(tmp_path / "t", num_hidden_layers=2, **V3)
    add_mtp(target)
    folder = quantised(target, tmp_path / "q")
    check_fp8_states(folder)


def test_whole_experts_take_the_memory_of_slices(served: Pair) -> None:
    """For the target and its MTP module."""
    draft = SpeculativeConfig("", "mtp", 3, 1, 4)
    specs = [served.spec(draft, tensor_parallel=2, expert_parallel=each) for each in (False, True)]
    slices, whole = (plan_weights(spec, plan_engine(spec), multiplies_fp8=False) for spec in specs)
    assert slices == whole and slices.draft > 0


def test_a_target_without_one_is_refused(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=2, num_mtp_layers=0, **V3)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: the checkpoint has no module for drafting; use"):
        read(target)
    with pytest.raises(ValueError, match=r"is an eagle head \(architecture LlamaForCausalLM\); set method: eagle$"):
        read(pair.target)
    other = edited(target, tmp_path / "o", hidden_size=32, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="was made for a target of hidden_size=32, the target .* has hidden_size=64"):
        read_draft("mtp", str(other), str(target), read_target_config(ModelSource(path=str(target)), 1))


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=2, **V3)
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
    source = ModelSource(path=str(target), device="cpu")
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    with pytest.raises(ValueError, match=r"missing: model.layers.2.\S+, .*more$"):
        load_draft(read(target), source, whole, SOLO, CPU, 64)


@pytest.mark.parametrize("architecture", ["Glm4Moe", *slow("DeepseekV3", "Glm4MoeLite")])
def test_a_module_drafts_for_a_target_of_transformers_modules(tmp_path: Path, architecture: str) -> None:
    """`--model-impl transformers`. The module's tensors were unexpected, and the start ended."""
    target = make_target(tmp_path / "t", calm=0.01, architecture=architecture)
    add_mtp(target, copying=True)
    accepted = {}
    for implementation in ("auto", "transformers"):
        worker = worker_of(target)
        model = dataclasses.replace(worker.model, implementation=implementation)
        spec = EngineSpec(dataclasses.replace(worker, model=model), SpeculativeConfig("", "mtp", 3, 1, 4))
        check_weights(spec, plan_engine(spec))
        with local_engine(spec) as engine:
            found = engine.generate(prompts(), GREEDY, 4)
        outputs = [request.output for request in found]
        assert outputs == by_transformers(target, outputs)
        accepted[implementation] = [request.acceptance_histogram for request in found]
    assert accepted["transformers"] == accepted["auto"]
    assert sum(sum(histogram[1:]) for histogram in accepted["auto"]) > 0
