"""Engines over weights of 4 and 8 bits: ranks, drafts and their heads change no token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.support.int_checkpoints import Recipe, awq, gptq, int_quantized, is_linear, pack_quantized, quantise
from tests.support.tiny_models import VOCAB, add_mtp, add_qwen_mtp, make_eagle, make_eagle3, make_target
from tests.workers.models.test_targets import check_greedy

MOE = {"architecture": "Qwen3Moe", "moe_intermediate_size": 64, "num_hidden_layers": 2}
LATENT = {"architecture": "DeepseekV3", "kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 24}
LATENT |= {"moe_intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "recipe,ranks,settings",
    [
        pytest.param(gptq(desc_act=True), 4, {}, marks=pytest.mark.slow),
        (pack_quantized(symmetric=False, ordered=True), 2, {"vocab_size": 101}),
        pytest.param(pack_quantized(8, None), 4, {"intermediate_size": 224}, marks=pytest.mark.slow),
        (awq(), 4, {"intermediate_size": 160}),  # 40 inputs of a rank: one group and a quarter
        (int_quantized(), 2, MOE),
        pytest.param(awq(), 2, MOE, marks=pytest.mark.slow),
        pytest.param(gptq(bits=8), 4, MOE, marks=pytest.mark.slow),
        pytest.param(gptq(symmetric=False), 2, LATENT, marks=pytest.mark.slow),
        pytest.param(pack_quantized(), 4, LATENT, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.config["quant_method"] if isinstance(value, Recipe) else None,
)
def test_shards_together_are_the_model(tmp_path: Path, recipe: Recipe, ranks: int, settings: dict[str, Any]) -> None:
    """Borders of ranks cut groups, and words of codes."""
    source = make_target(tmp_path / "t", **{"num_hidden_layers": 2, **settings})
    folder = quantise(source, tmp_path / "q", recipe)
    check_greedy(folder, ranks, like=folder / "plain")


def answers(pair: Pair, speculative: SpeculativeConfig | None, ranks: int = 1) -> tuple[list[list[int]], int]:
    """Greedy tokens, and how many of them drafts proposed."""
    with local_engine(pair.spec(speculative, tensor_parallel=ranks)) as engine:
        requests = engine.generate(pair.prompts, SamplingParams(16, 0.0), 3)
    return [r.output for r in requests], sum(k * n for r in requests for k, n in enumerate(r.acceptance_histogram))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 41, 18, 60)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of 4 bits, its vocabulary head of 8, with an EAGLE head in 16 bits that guesses well."""
    folder = tmp_path_factory.mktemp("packed")
    plain = make_target(folder / "t", calm=0.01, num_hidden_layers=4)
    rule = {"+:lm_head": {"bits": 8}}
    recipe, wide = gptq(desc_act=True), gptq(bits=8, desc_act=True)

    def chosen(name: str) -> Recipe | None:
        return wide if name == "lm_head.weight" else recipe if is_linear(name) else None

    target = quantise(plain, folder / "q", recipe, chosen, recipe.config | {"dynamic": rule})
    eagle = make_eagle(folder / "eagle", plain, copying=True)
    eagle3 = make_eagle3(folder / "eagle3", plain, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    return Pair(target, eagle, eagle3, prompts())


@pytest.fixture(scope="module")
def alone(packed: Pair) -> list[list[int]]:
    return answers(packed, None)[0]


def whole(pair: Pair) -> SpeculativeConfig:
    """Every rank has the whole draft, and so its own copy of the target's quantised head."""
    return pair.chain(draft_tp=1)


SHAPES: dict[str, tuple[Callable[[Pair], SpeculativeConfig], int]] = {
    "chain": (lambda pair: pair.chain(), 1),
    "tree": (lambda pair: pair.tree(), 2),
    "whole draft": (whole, 2),
    "EAGLE-3": (lambda pair: SpeculativeConfig(str(pair.eagle3), "eagle3", 3, 4, 12), 1),
}


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == "tree" else pytest.mark.slow) for shape in SHAPES]
)
def test_a_draft_in_16_bits_changes_no_token(packed: Pair, alone: list[list[int]], shape: str) -> None:
    make, ranks = SHAPES[shape]
    speculative = make(packed)
    outputs, accepted = answers(packed, speculative, ranks)
    assert outputs == alone
    assert accepted > 10 or speculative.method == "eagle3"


@pytest.mark.parametrize("method", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_draft_in_4_bits_changes_no_token(packed: Pair, alone: list[list[int]], tmp_path: Path, method: str) -> None:
    is_eagle = method == "eagle"
    recipe = pack_quantized(ignore=["lm_head", "fc"]) if is_eagle else gptq()
    head = quantise(packed.eagle if is_eagle else packed.eagle3, tmp_path / "head", recipe)
    outputs, accepted = answers(packed, SpeculativeConfig(str(head), method, 4, 3, 10))
    assert outputs == alone and (accepted > 10 or not is_eagle)


@pytest.mark.parametrize(
    "family,quantises_module",
    [
        ("DeepseekV3", True),
        pytest.param("Qwen3_5", False, marks=pytest.mark.slow),
        pytest.param("DeepseekV3", False, marks=pytest.mark.slow),
        pytest.param("Qwen3_5", True, marks=pytest.mark.slow),
    ],
)
def test_a_module_of_the_checkpoint_drafts(tmp_path: Path, family: str, quantises_module: bool) -> None:
    """Whether its weights are quantised is read from the files where quantization_config says nothing of it, or says
    otherwise."""
    settings = LATENT if family == "DeepseekV3" else {"architecture": family}
    source = make_target(tmp_path / "t", calm=0.005, **settings)
    (add_mtp if family == "DeepseekV3" else add_qwen_mtp)(source, copying=True)
    recipe = awq() if family == "DeepseekV3" else pack_quantized()
    module = "model.layers.2." if family == "DeepseekV3" else "mtp."

    def chosen(name: str) -> Recipe | None:
        return recipe if is_linear(name) and (quantises_module or not name.startswith(module)) else None

    config = recipe.config | ({} if family == "DeepseekV3" else {"ignore": ["lm_head", "mtp.fc"]})
    folder = quantise(source, tmp_path / "q", recipe, chosen, config)
    pair = Pair(folder, folder, folder, prompts())
    outputs, accepted = answers(pair, SpeculativeConfig("", "mtp", 4, 3, 10))
    assert outputs == answers(pair, None)[0] and accepted > 10
