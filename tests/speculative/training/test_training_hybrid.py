"""A small Qwen3.5 and its module: what is trained is what transformers and the engine compute from the saved files; the
module is trained further by `aerie train-draft`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from attention.config import CacheConfig
from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from speculative.training.mtp import read_module, save_module
from tests.speculative.training.conftest import run, train_small
from tests.support.drafts.mtp import check_states, check_trained
from tests.support.targets.deepseek import ModuleTarget, save_module_target
from tests.support.targets.hybrid import SIZES, build_hybrid
from tests.support.tiny_models import add_qwen_mtp, make_target
from workers.config import ModelSource, WorkerConfig
from workers.scheduling.plan import SamplingParams

EXPERTS = (
    "gate.weight",
    "experts.gate_up_proj",
    "experts.down_proj",
    "shared_expert.up_proj.weight",
    "shared_expert_gate.weight",
)
SHAPE = SIZES["tiny"] | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> ModuleTarget:
    """Random, with norms that are not ones."""
    model = build_hybrid(SHAPE, tokenizer, seed=1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    for name, tensor in model.state_dict().items():
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
    assert all(name.startswith("mtp.") for name in load_file(tmp_path / "alone" / "model.safetensors"))
    again = read_module(tmp_path / "alone").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("architecture, stacked", [("Qwen3_5Moe", True), ("Qwen3Next", False)])
def test_a_module_with_experts_computes_what_is_served(tmp_path: Path, architecture: str, stacked: bool) -> None:
    """Read from stacked and from single matrices."""
    target = make_target(tmp_path / "t", architecture=architecture)
    add_qwen_mtp(target, stacked=stacked)
    head = read_module(target).eval()

    def states(embeddings: torch.Tensor, features: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The head takes the embedding of the token after a row, `check_states` of the row's own."""
        first = torch.nn.functional.pad(embeddings, (0, 0, 1, 0))
        with torch.inference_mode():
            return head.unroll(first, torch.nn.functional.pad(features, (0, 0, 0, 1)), 1)[0][:, :-1]

    check_states(target, states)


@pytest.mark.slow  # `test_a_module_with_experts_computes_what_is_served`, and the training of one without
def test_the_module_of_a_mixture_of_experts_is_trained_and_served(
    tmp_path: Path, rows: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = make_target(tmp_path / "t", architecture="Qwen3_5Moe", vocab_size=300), tmp_path / "draft"
    add_qwen_mtp(target, stacked=True)
    tokenizer.save_pretrained(target)
    before = read_module(target).state_dict()
    line = f"train-draft --method mtp --target {target} --output {draft} --data {rows} --batch-tokens 512"
    assert run(f"{line} --val-fraction 0.1 --warmup-steps 2 --steps 2 --ttt-length 2 --measure-depths 2") == 0
    assert "acceptance_length" in capsys.readouterr().out
    after = read_module(draft).state_dict()
    assert all(not torch.equal(after[f"layer.mlp.{name}"], before[f"layer.mlp.{name}"]) for name in EXPERTS)
    prompts, answers = [list(range(40, 60)), list(range(70, 83))], []
    for speculation in (None, SpeculativeConfig(str(draft), "mtp", num_steps=2, top_k=2, num_draft_tokens=4)):
        worker = WorkerConfig(ModelSource(str(target), dtype="float32", device="cpu"), CacheConfig(4, num_pages=80))
        with local_engine(EngineSpec(worker, speculation)) as engine:
            answers.append([each.output for each in engine.generate(prompts, SamplingParams(12, 0.0))])
    assert answers[0] == answers[1]


def test_the_module_of_a_trained_model_is_trained_further(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint's own module, on the target's own answers."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.1 --warmup-steps 2"
    assert train_small(f"hybrid --size tiny {common} --output {target} --steps 2 --mtp-steps 1") == 0
    assert json.loads((target / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    before = load_file(target / "model.safetensors")
    again = f"train-draft --method mtp --target {target} --output {draft} {common} --regenerate --temperatures 0"
    assert run(f"{again} --steps 2 --ttt-length 2 --max-new-tokens 8 --measure-depths 2") == 0
    assert "acceptance_length" in capsys.readouterr().out
    after = load_file(draft / "model.safetensors")
    assert set(after) == {name for name in before if name.startswith("mtp.")}
    assert not torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])
