"""A small DeepSeek-V3 and a small Qwen3.5 with their modules: what is trained is what transformers and the engine
compute from the saved files; a module is trained further by `aerie train-draft`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerBase
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.training import TrainingError
from aerie.speculative.training.commands import DRAFTS
from aerie.speculative.training.layers import dense_experts
from aerie.speculative.training.mtp import read_module, save_module
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.training.conftest import run, train_small
from tests.support.drafts.mtp import check_states, check_trained
from tests.support.targets import hybrid
from tests.support.targets.deepseek import SIZES, Balance, ModuleTarget, build_deepseek, save_module_target
from tests.support.targets.hybrid import build_hybrid
from tests.support.tiny_models import add_mtp, add_qwen_mtp, make_target

EXPERTS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
PARTS = {
    "Qwen3_5Moe": (*EXPERTS, "shared_expert.up_proj.weight", "shared_expert_gate.weight"),
    "Glm4Moe": (*EXPERTS, "shared_experts.up_proj.weight"),
}
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
SHAPE = SMALL | {
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


@pytest.fixture(params=["deepseek", "hybrid"])
def model(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> ModuleTarget:
    """Random: with routers that choose various experts, biases, and norms that are not ones."""
    if request.param == "deepseek":
        model, low, high = build_deepseek(SIZES["tiny"] | SHAPE, tokenizer, seed=1), 0.5, 1.5
    else:
        model, low, high = build_hybrid(hybrid.SIZES["tiny"] | SMALL | {"head_dim": 16}, tokenizer, seed=1), -0.5, 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, low, high)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(tensor, -0.2, 0.2)
        if not name.endswith(("A_log", "dt_bias")):
            tensor.copy_(tensor.bfloat16())  # what is saved
    return model.eval()


def test_training_and_serving_compute_the_same_states_and_logits(
    tmp_path: Path, model: ModuleTarget, tokenizer: PreTrainedTokenizerBase
) -> None:
    save_module_target(model, tokenizer, tmp_path)
    check_trained(tmp_path, model.hidden, model.model.lm_head, model.unroll, model.mtp.logits)


def test_what_follows_a_row_does_not_change_it(model: ModuleTarget) -> None:
    """Samples are padded at their ends."""
    tokens = torch.randint(0, 300, (2, 70), generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(tokens, (0, 58))
    with torch.inference_mode():
        torch.testing.assert_close(model.hidden(padded)[:, :70], model.hidden(tokens), atol=1e-4, rtol=1e-4)


def test_a_saved_module_is_read_again(tmp_path: Path, model: ModuleTarget, tokenizer: PreTrainedTokenizerBase) -> None:
    save_module_target(model, tokenizer, tmp_path / "target")
    head = read_module(tmp_path / "target")
    for name, tensor in model.mtp.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name
    save_module(head, tmp_path / "alone")
    again = read_module(tmp_path / "alone").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in head.state_dict().items())
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert all(name.startswith(("model.layers.3.", "mtp.")) for name in alone)


@pytest.mark.parametrize(
    "architecture, stacked", [("Qwen3_5Moe", True), ("Qwen3Next", False), ("Glm4Moe", False), ("Glm4MoeLite", False)]
)
def test_a_module_with_experts_computes_what_is_served(tmp_path: Path, architecture: str, stacked: bool) -> None:
    """Read from stacked and from single matrices."""
    target = make_target(tmp_path / "t", architecture=architecture)
    add_mtp(target) if architecture.startswith("Glm") else add_qwen_mtp(target, stacked=stacked)
    head = read_module(target).eval()

    def states(embeddings: torch.Tensor, features: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The head takes the embedding of the token after a row, `check_states` of the row's own."""
        first = torch.nn.functional.pad(embeddings, (0, 0, 1, 0))
        with torch.inference_mode():
            return head.unroll(first, torch.nn.functional.pad(features, (0, 0, 0, 1)), 1)[0][:, :-1]

    check_states(target, states)


@pytest.mark.slow  # `test_a_module_with_experts_computes_what_is_served`, and the training of one without
@pytest.mark.parametrize("architecture", PARTS)
def test_the_module_of_a_mixture_of_experts_is_trained_and_served(
    tmp_path: Path,
    rows: Path,
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
) -> None:
    target, draft = make_target(tmp_path / "t", architecture=architecture, vocab_size=300), tmp_path / "draft"
    add_mtp(target) if architecture == "Glm4Moe" else add_qwen_mtp(target, stacked=True)
    tokenizer.save_pretrained(target)
    before = read_module(target).state_dict()
    line = f"train-draft --method mtp --target {target} --output {draft} --data {rows} --batch-tokens 512"
    assert run(f"{line} --val-fraction 0.1 --warmup-steps 2 --steps 2 --ttt-length 2 --measure-depths 2") == 0
    assert "acceptance_length" in capsys.readouterr().out
    after = read_module(draft).state_dict()
    parts = [f"layer.mlp.{name}" for name in PARTS[architecture]]
    assert all(not torch.equal(after[part], before[part]) for part in parts)
    prompts, answers = [list(range(40, 60)), list(range(70, 83))], []
    for speculation in (None, SpeculativeConfig(str(draft), "mtp", num_steps=2, top_k=2, num_draft_tokens=4)):
        worker = WorkerConfig(ModelSource(str(target), dtype="float32", device="cpu"), CacheConfig(4, num_pages=80))
        with local_engine(EngineSpec(worker, speculation)) as engine:
            answers.append([each.output for each in engine.generate(prompts, SamplingParams(12, 0.0))])
    assert answers[0] == answers[1]


def test_experts_compute_the_same_together_and_one_by_one() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(hidden_size=16, moe_intermediate_size=6, n_routed_experts=5)
    config._experts_implementation = "eager"
    experts = DeepseekV3Experts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weight = torch.randn(11, 16), torch.rand(11, 2)
    chosen = torch.rand(11, 5).topk(2).indices
    torch.testing.assert_close(dense_experts(experts, x, chosen, weight), experts(x, chosen, weight))


def test_the_bias_of_a_router_evens_out_who_is_chosen() -> None:
    """A router that would send every row to the same experts."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    router = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=16, **sizes)).train()
    torch.nn.init.normal_(router.weight, std=0.05)
    router.weight.data += torch.linspace(-0.2, 0.2, 8)[:, None]
    x, balance = torch.randn(256, 16) + 0.5, Balance([router])
    balance.live = torch.arange(256) < 200
    used = []
    for _ in range(300):
        router(x)
        assert int(balance.counts[0].sum()) == 2 * 200  # not the padding
        used.append(balance.shares())
        balance.step(0.01)
    assert float(used[0].max()) > 3 and float(used[0].min()) < 0.05
    assert float(used[-1].max()) < 2 and float(used[-1].min()) > 0.3


@pytest.mark.parametrize("kind", ["deepseek", "hybrid"])
def test_the_module_of_a_trained_model_is_trained_further(
    kind: str, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint's own module, on the target's own answers."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.1 --warmup-steps 2"
    assert train_small(f"{kind} --size tiny {common} --output {target} --steps 2 --mtp-steps 1") == 0
    assert ("least_used_expert" in capsys.readouterr().out) == (kind == "deepseek")
    made = "--regenerate --temperatures 0 --max-new-tokens 5 --ttt-length 2 --measure-depths 3"
    assert run(f"train-draft --method mtp {common} --target {target} --output {draft} --steps 2 {made}") == 0
    said = capsys.readouterr().out
    assert "greedy chain of 3: acceptance_length" in said and "covers 100.00%" in said
    before, after = (read_module(folder).state_dict() for folder in (target, draft))
    changes = {name: float((after[name] - tensor).abs().max()) for name, tensor in before.items()}
    assert 0 < max(changes.values()) < 0.05, "it does not start from the checkpoint's own module"


@pytest.mark.parametrize("model", ["deepseek"], indirect=True)
def test_what_cannot_be_trained_further_is_refused(
    tmp_path: Path, model: ModuleTarget, tokenizer: PreTrainedTokenizerBase
) -> None:
    save_module_target(model, tokenizer, tmp_path)
    nothing = dict.fromkeys(("draft_vocab", "intermediate_size", "head_flags", "random_depths", "causal"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        TrainingError, match="draft_vocab=64: is only for EAGLE-3 heads; leave it out with --method mtp"
    ):
        DRAFTS["mtp"](argparse.Namespace(target=tmp_path, **nothing | {"draft_vocab": 64}), reference)
    with pytest.raises(TrainingError, match="model_type='deepseek_v3' is not supported"):
        DRAFTS["eagle3"](argparse.Namespace(target=tmp_path, output=tmp_path / "x", **nothing), reference)
    weights = load_file(tmp_path / "model.safetensors")
    quantised = weights | {"model.layers.3.eh_proj.weight_scale_inv": torch.ones(1)}
    save_file(quantised, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match="its module is quantised, which cannot be trained; give one in bfloat16"):
        read_module(tmp_path)
    del weights["model.layers.3.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match="lacks model.layers.3.eh_proj.weight; download it again"):
        read_module(tmp_path)
    for changes, text in (
        ({"num_nextn_predict_layers": 0}, "the checkpoint has no module for drafting"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "has no MTP module; only DeepseekV3ForCausalLM",
        ),
    ):
        config = json.loads((tmp_path / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(TrainingError, match=text):
            read_module(tmp_path)
    with pytest.raises(TrainingError, match="tokenizer: has .* tokens, the model 40; give another, or a larger --size"):
        build_deepseek(SIZES["tiny"] | SHAPE | {"vocab_size": 40}, tokenizer, seed=0)
