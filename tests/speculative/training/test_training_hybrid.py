"""A small Qwen3.5 and its module: what is trained is what transformers and the engine compute from the saved files; the
module is trained further by `aerie train-draft`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from attention.backends.torch_backend import TorchBackend
from attention.kv_cache.pool import KVPool
from attention.metadata import DecodeBatch, Mode, PrefillBatch, causal_mask
from speculative.drafts.drafter import DraftRunner
from speculative.drafts.loading import load_draft
from speculative.drafts.registry import read_draft
from speculative.training import TrainingError
from speculative.training.hybrid import SIZES, HybridTarget, build_hybrid, save_hybrid
from speculative.training.mtp_files import read_module, save_module
from tests.speculative.training.conftest import run
from tests.support.tiny_models import add_qwen_mtp, make_target
from workers.config import ModelSource
from workers.distributed.tp_group import SOLO
from workers.models.loading import load_target, read_target_config

CPU = torch.device("cpu")
LENGTH, NUM_STEPS, PAGE_SIZE, NUM_PAGES = 19, 4, 4, 9
MAX_POSITION = PAGE_SIZE * NUM_PAGES
SHAPE = SIZES["tiny"] | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> HybridTarget:
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
    tmp_path: Path, model: HybridTarget, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of the saved target by transformers, and of the module: a text in one pass, then a chain drafted from its last
    row with the text's own tokens. In float32, sums in another order: within 1e-4 of values of about 1."""
    save_hybrid(model, tokenizer, tmp_path)
    source = ModelSource(path=str(tmp_path), dtype="float32", device="cpu")
    config = read_target_config(source, 1)
    decoder = load_target(source, config, SOLO, CPU, MAX_POSITION)
    method = read_draft("mtp", "", str(tmp_path), config)
    served = load_draft(method, source, decoder, SOLO, CPU, MAX_POSITION)
    pool = KVPool(method.model.kv_groups(1, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    runner = DraftRunner(served, pool, dict.fromkeys(Mode, TorchBackend()))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (LENGTH + NUM_STEPS,), generator=torch.Generator().manual_seed(4))
    table = torch.arange(1, NUM_PAGES + 1, dtype=torch.int32)[None]
    with torch.inference_mode():
        hidden = model.hidden(tokens[None])
        torch.testing.assert_close(model.model.lm_head(hidden), reference(tokens[None]).logits, atol=1e-4, rtol=1e-4)
        trained = model.mtp.unroll(model.model.model.embed_tokens(tokens)[None], hidden, NUM_STEPS)
        chunks = PrefillBatch.from_lists([0], [LENGTH], table)
        states = served.extend(tokens[1 : LENGTH + 1], hidden[0, :LENGTH], runner.context(None, None, chunks))
        torch.testing.assert_close(states, trained[0][0, :LENGTH], atol=1e-4, rtol=1e-4)
        state, length = states[-1:], torch.tensor([LENGTH], dtype=torch.int32)
        for step in range(1, NUM_STEPS):
            mask = causal_mask(1, step, CPU)[:, -1:]
            decode = DecodeBatch(Mode.DRAFT_DECODE, 1, step, length, mask, table, MAX_POSITION)
            state = served.step(tokens[LENGTH + step, None], state, runner.context(decode))
            torch.testing.assert_close(state[0], trained[step][0, LENGTH - 1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(served.logits(state), model.mtp.logits(state), atol=1e-4, rtol=1e-4)


def test_what_follows_a_row_does_not_change_it(model: HybridTarget) -> None:
    """Samples are padded at their ends."""
    tokens = torch.randint(0, 300, (2, 70), generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(tokens, (0, 58))
    with torch.inference_mode():
        torch.testing.assert_close(model.hidden(padded)[:, :70], model.hidden(tokens), atol=1e-4, rtol=1e-4)


def test_a_saved_module_is_read_again(tmp_path: Path, model: HybridTarget, tokenizer: PreTrainedTokenizerBase) -> None:
    save_hybrid(model, tokenizer, tmp_path / "target")
    head = read_module(tmp_path / "target")
    for name, tensor in model.mtp.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name
    save_module(head, tmp_path / "alone")
    assert all(name.startswith("mtp.") for name in load_file(tmp_path / "alone" / "model.safetensors"))
    again = read_module(tmp_path / "alone").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in head.state_dict().items())


def test_a_module_with_experts_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3_5Moe")
    add_qwen_mtp(target)
    with pytest.raises(TrainingError, match="its module has experts, which cannot be trained; take a dense model"):
        read_module(target)


def test_the_module_of_a_trained_model_is_trained_further(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint's own module, on the target's own answers."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.1 --warmup-steps 2"
    assert run(f"train-hybrid --size tiny {common} --output {target} --steps 2 --mtp-steps 1") == 0
    assert json.loads((target / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    before = load_file(target / "model.safetensors")
    again = f"train-draft --method mtp --target {target} --output {draft} {common} --regenerate --temperatures 0"
    assert run(f"{again} --steps 2 --ttt-length 2 --max-new-tokens 8 --measure-depths 2") == 0
    assert "acceptance_length" in capsys.readouterr().out
    after = load_file(draft / "model.safetensors")
    assert set(after) == {name for name in before if name.startswith("mtp.")}
    assert not torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])
