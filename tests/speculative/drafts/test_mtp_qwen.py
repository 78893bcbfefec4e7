"""The module of Qwen3-Next and Qwen3.5: the states of a literal one, the same answers with it as without, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.config import CacheConfig
from speculative.build import plan_engine
from speculative.config import SpeculativeConfig
from speculative.drafts.loading import load_draft
from speculative.drafts.mtp_qwen import QwenMtp
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited
from tests.support.drafts.mtp import FEW_PAGES, answers, check_answers, check_fp8_states, check_states, read_mtp
from tests.support.tiny_models import add_qwen_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.models.loading import load_target, read_target_config

CPU = torch.device("cpu")
ARCHITECTURES = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")


def read(target: Path) -> QwenMtp:
    draft = read_mtp(target)
    assert isinstance(draft, QwenMtp)
    return draft


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_states_are_those_of_a_literal_module(tmp_path: Path, architecture: str) -> None:
    """transformers has its parts, and no model that uses them: the two norms, the projection of the embedding and then
    the state, a layer, the last norm."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = make_target(tmp_path / "t", architecture=architecture)
    module = add_qwen_mtp(target, stacked=architecture == "Qwen3_5Moe")
    folder = within_a_model_of_images(target, tmp_path / "w") if architecture.startswith("Qwen3_5") else target
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
    """A hybrid whose module is right about half the time."""
    target = make_target(tmp_path_factory.mktemp("mtp") / "t", calm=0.002, architecture=request.param)
    add_qwen_mtp(target, copying=True)
    return Pair(target, pair.eagle, pair.eagle3, pair.prompts[:6])


@pytest.fixture(scope="module")
def plain(served: Pair) -> list[list[int]]:
    return [request.output for request in answers(served, None)]


CHAIN, TREE = (3, 1, 4), (4, 3, 10)
CASES: dict[str, tuple[tuple[int, int, int], int, CacheConfig | None, dict[str, Any]]] = {
    "chain": (CHAIN, 1, None, {}),
    "tree, pages of 1": (TREE, 1, CacheConfig(page_size=1, num_pages=1600), {}),
    "tree, few pages": (TREE, 1, FEW_PAGES, {}),
    "tree, 2 ranks, trimmed head": (TREE, 2, None, {"draft_vocab_size": 48}),
    "chain, 2 ranks, draft whole": (CHAIN, 2, None, {"draft_tp": 1}),
    "fixed tree": (TREE, 1, None, {"adaptive": False}),
}
# The three families share the code of rounds, so that two run one case each by default; all others are slow.
QUICK = {("Qwen3Next", "tree, pages of 1")}


@pytest.mark.parametrize(
    ("served", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.slow)
        for family in ARCHITECTURES
        for case in CASES
    ],
    indirect=["served"],
)
def test_it_changes_no_token(served: Pair, plain: list[list[int]], case: str) -> None:
    """Greedy and sampled."""
    shape, ranks, cache, settings = CASES[case]
    drafted = answers(served, SpeculativeConfig("", "mtp", *shape, **settings), ranks, cache)
    check_answers(drafted, plain, cache)


def test_its_weights_may_be_fp8(tmp_path: Path) -> None:
    """But for its projection, which is published in bf16."""
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    add_qwen_mtp(target)
    whole = [f"model.layers.{i}.linear_attn.in_proj_{part}" for i in range(4) for part in "ab"]
    folder = quantised(target, tmp_path / "q", modules_to_not_convert=[*whole, "mtp.fc"])
    check_fp8_states(folder)


def test_a_target_without_one_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    without = edited(target, tmp_path / "o", mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers=0: the checkpoint has no module for drafting; use"):
        read(without)
    own = edited(target, tmp_path / "e", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings=true is not supported"):
        read(own)
    source = ModelSource(path=str(target), device="cpu")
    whole = load_target(source, read_target_config(source, 1), SOLO, CPU, 64)
    with pytest.raises(ValueError, match=r"missing: mtp.\S+, .*more$"):
        load_draft(read(target), source, whole, SOLO, CPU, 64)


def test_its_kv_is_of_one_layer_and_it_has_no_state(tmp_path: Path, pair: Pair) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5")
    add_qwen_mtp(target)
    spec = Pair(target, pair.eagle, pair.eagle3, pair.prompts).spec(SpeculativeConfig("", "mtp"))
    speculation = plan_engine(spec).speculation
    (group,) = speculation.kv_groups(torch.float32)
    assert group.layers == (0,)
    assert read(target).model.state_groups(1, torch.float32) == ()
