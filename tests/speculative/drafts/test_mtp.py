"""The MTP modules of DeepSeek-V3, GLM, Qwen3-Next and Qwen3.5: the states of transformers' or of a literal module, the
same answers with a module as without, and refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, check_weights, local_engine, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.registry import read_draft
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import load_target, read_target_config
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.drafts.mtp import FEW_PAGES, answers, check_answers, check_fp8_states, check_states, read_mtp
from tests.support.slow import slow
from tests.support.tiny_models import add_mtp, add_qwen_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from tests.workers.models.test_targets import GREEDY, by_transformers, prompts, worker_of

CPU = torch.device("cpu")
V3 = {"architecture": "DeepseekV3"}
HYBRIDS = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")


def within_a_model_of_images(target: Path, folder: Path) -> Path:
    """The checkpoint by the names of a model of images and text."""
    config = json.loads((target / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(str(target / "model.safetensors")).items()
    }
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    folder.mkdir()
    whole = {"architectures": [architecture], "text_config": config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors | {"model.visual.x": torch.zeros(2)}, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("architecture", ["DeepseekV3", "Glm4Moe", "Glm4MoeLite", *HYBRIDS])
def test_its_states_are_those_of_transformers_or_of_a_literal_module(tmp_path: Path, architecture: str) -> None:
    """transformers has the parts of the hybrids' module, and no model that uses them: the two norms, the projection of
    the embedding and then the state, a layer, the last norm."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = target = make_target(tmp_path / "t", architecture=architecture)
    stacked = architecture == "Qwen3_5Moe"
    module = add_qwen_mtp(target, stacked=stacked) if architecture in HYBRIDS else add_mtp(target)
    if "Qwen3_5" in architecture:
        folder = within_a_model_of_images(target, tmp_path / "w")
    rotary = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).model.rotary_emb

    def reference(embedded: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n = mask.shape[-1]
        positions = torch.arange(n).unsqueeze(0)
        grids = positions.expand(3, 1, n) if "Qwen3_5" in architecture else positions  # time, height and width
        state: torch.Tensor = module(embedded, features, rotary(embedded, grids), mask, positions, None)
        return state

    check_states(folder, reference)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Pair:
    """A target whose module is right about half the time."""
    hybrid = request.param in HYBRIDS
    folder = tmp_path_factory.mktemp("mtp") / "t"
    target = make_target(folder, calm=0.002 if hybrid else 0.01, architecture=request.param)
    (add_qwen_mtp if hybrid else add_mtp)(target, copying=True)
    return Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6])


@pytest.fixture(scope="module")
def plain(served: Pair) -> list[list[int]]:
    return [request.output for request in answers(served, None)]


CHAIN, TREE = (3, 1, 4), (4, 3, 10)
CASES: dict[str, tuple[tuple[int, int, int], int, CacheConfig | None, dict[str, Any]]] = {
    "chain": (CHAIN, 1, None, {}),
    "tree, pages of 1": (TREE, 1, CacheConfig(page_size=1, num_pages=1600), {}),
    "tree, few pages": (TREE, 1, FEW_PAGES, {}),
    "chain, 2 ranks": (CHAIN, 2, None, {}),
    "tree, 2 ranks, draft whole": (TREE, 2, None, {"draft_tp": 1}),
    "tree, whole experts": (TREE, -2, None, {}),
    "chain, 2 ranks, draft whole": (CHAIN, 2, None, {"draft_tp": 1}),
    "tree, 2 ranks, trimmed head": (TREE, 2, None, {"draft_vocab_size": 48}),
    "fixed tree": (TREE, 1, None, {"adaptive": False}),
}
OF_HYBRIDS = list(CASES)[6:]  # of other targets: the three before
# The families share the code of rounds, so that by default few cases run; all others are slow.
QUICK = {
    ("DeepseekV3", "tree, few pages"),
    ("DeepseekV3", "tree, whole experts"),
    ("Qwen3Next", "tree, pages of 1"),
}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.slow)
        for family in ("DeepseekV3", *HYBRIDS)
        for case in list(CASES)[:3] + (OF_HYBRIDS if family in HYBRIDS else list(CASES)[3:6])
    ],
    indirect=["served"],
)
def test_it_changes_no_token(served: Pair, plain: list[list[int]], case: str) -> None:
    """Greedy and sampled."""
    shape, ranks, cache, settings = CASES[case]
    drafted = answers(served, SpeculativeConfig("", "mtp", *shape, **settings), ranks, cache)
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


@pytest.mark.parametrize("architecture", ["DeepseekV3", "Qwen3_5"])
def test_its_weights_may_be_fp8(tmp_path: Path, architecture: str) -> None:
    """But for its projection, which is published in bf16."""
    kept: dict[str, Any] = {}
    if architecture in HYBRIDS:
        target = make_target(tmp_path / "t", architecture=architecture)
        add_qwen_mtp(target)
        whole = [f"model.layers.{i}.linear_attn.in_proj_{part}" for i in range(4) for part in "ab"]
        kept = {"modules_to_not_convert": [*whole, "mtp.fc"]}
    else:
        target = make_target(tmp_path / "t", num_hidden_layers=2, architecture=architecture)
        add_mtp(target)
    check_fp8_states(quantised(target, tmp_path / "q", **kept))


@pytest.mark.parametrize("served", ["DeepseekV3"], indirect=True)
def test_whole_experts_take_the_memory_of_slices(served: Pair) -> None:
    """For the target and its MTP module."""
    draft = SpeculativeConfig("", "mtp", 3, 1, 4)
    specs = [served.spec(draft, tensor_parallel=2, expert_parallel=each) for each in (False, True)]
    slices, whole = (plan_weights(spec, plan_engine(spec), multiplies_fp8=False) for spec in specs)
    assert slices == whole and slices.draft > 0


def test_a_target_without_one_is_refused(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=2, num_mtp_layers=0, **V3)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: the checkpoint has no module for drafting; use"):
        read_mtp(target)
    with pytest.raises(ValueError, match=r"\(architecture LlamaForCausalLM\) has no module for drafting in its"):
        read_mtp(pair.target)
    other = edited(target, tmp_path / "o", hidden_size=32, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match="was made for a target of hidden_size=32, the target .* has hidden_size=64"):
        read_draft("mtp", str(other), str(target), read_target_config(ModelSource(path=str(target)), 1))


def test_a_hybrid_without_one_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    without = edited(target, tmp_path / "o", mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers=0: the checkpoint has no module for drafting; use"):
        read_mtp(without)
    own = edited(target, tmp_path / "e", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings=true is not supported"):
        read_mtp(own)


@pytest.mark.parametrize("architecture,name", [("DeepseekV3", "model.layers.4"), ("Qwen3_5", "mtp")])
def test_what_the_checkpoint_lacks_is_named(tmp_path: Path, architecture: str, name: str) -> None:
    target = make_target(tmp_path / "t", architecture=architecture)
    source = ModelSource(path=str(target), device="cpu")
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    with pytest.raises(ValueError, match=rf"missing: {name}.\S+, .*more$"):
        load_draft(read_mtp(target), source, whole, SOLO, CPU, 64)


def test_its_kv_is_of_one_layer_and_it_has_no_state(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    add_qwen_mtp(target)
    spec = Pair(target, pair.eagle, pair.eagle3, pair.prompts).spec(SpeculativeConfig("", "mtp"))
    speculation = plan_engine(spec).speculation
    (group,) = speculation.kv_groups(torch.float32)
    assert group.layers == (0,)
    assert read_mtp(target).model.state_groups(1, torch.float32) == ()


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
