"""The EAGLE-3 model that is trained and the one that is served are the same function of the same files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.kv_cache.pool import KVPool
from aerie.deploy.train_draft import HEAD_FLAGS
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.config import BLOCK_METHODS
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.drafts.eagle3_config import HeadFlags
from aerie.speculative.drafts.loading import load_draft as load_served
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.training import TrainingError
from aerie.speculative.training.block_kinds import KINDS
from aerie.speculative.training.draft import DraftVocabulary
from aerie.speculative.training.eagle3 import build_head, draft_config, load_draft, read_draft_config, save_draft
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import load_target, read_target_config

CPU = torch.device("cpu")
LENGTH, NUM_STEPS, PAGE_SIZE, NUM_PAGES = 19, 4, 4, 9
MAX_POSITION = PAGE_SIZE * NUM_PAGES


def served(draft: Path, target: Path) -> DraftRunner:
    """The head in `draft` as an engine loads it, with a pool and the oracle's attention."""
    source = ModelSource(path=str(target), device="cpu")
    config = read_target_config(source, 1)
    method = read_draft("eagle3", str(draft), str(target), config)
    decoder = load_target(source, config, SOLO, CPU, MAX_POSITION, method.capture)
    model = load_served(method, source, decoder, SOLO, CPU, MAX_POSITION)
    pool = KVPool(method.model.kv_groups(1, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    return DraftRunner(model, pool, dict.fromkeys(Mode, TorchBackend()))


EAGLE31 = ("fc_norm", "norm_output")
EVERY = ("norm_before_residual", "norm_before_fc", *EAGLE31)


@pytest.mark.parametrize(
    "rope,flags", [("default", ()), ("llama3", ()), ("yarn", ()), ("default", EAGLE31), ("default", EVERY)]
)
def test_training_and_serving_compute_the_same_states_and_logits(
    tmp_path: Path, target: PreTrainedModel, rope: str, flags: tuple[str, ...]
) -> None:
    """A text read in one pass, then a chain drafted from its last row with the text's own tokens."""
    if rope != "default":
        factors = {"factor": 8.0} | ({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {})
        target.config.rope_parameters |= {"rope_type": rope, "original_max_position_embeddings": 16, **factors}
    config = draft_config(target, 64, flags=flags)
    method = read_draft_config(config, target, tmp_path / "draft")
    vocabulary = DraftVocabulary.of(torch.arange(64) * 3, method.model.vocab_size)
    head = build_head(target, method, vocabulary, seed=0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    target.save_pretrained(tmp_path / "target")
    save_draft(head, vocabulary, config, tmp_path / "draft")
    head, _ = load_draft(tmp_path / "draft", target)
    assert head.method.model.rope.kind == rope
    runner = served(tmp_path / "draft", tmp_path / "target")

    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, method.model.vocab_size, (LENGTH + NUM_STEPS,), generator=generator)
    captured = torch.randn(LENGTH, 3 * method.model.hidden_size, generator=generator)
    padded = torch.cat((captured, torch.zeros(NUM_STEPS, captured.shape[1])))  # rows that nothing below looks at
    table = torch.arange(1, NUM_PAGES + 1, dtype=torch.int32)[None]
    with torch.inference_mode():
        embeddings = target.get_input_embeddings()(tokens)[None].float()
        trained = head.unroll(embeddings, padded[None], NUM_STEPS)
        chunks = PrefillBatch.from_lists([0], [LENGTH], table)
        states = runner.model.extend(tokens[1 : LENGTH + 1], captured, runner.context(None, None, chunks))
        # float32, sums in another order: within 1e-5 of values of about 1
        torch.testing.assert_close(states, trained[0][0, :LENGTH], atol=1e-4, rtol=1e-4)
        state, length = states[-1:], torch.tensor([LENGTH], dtype=torch.int32)
        for step in range(1, NUM_STEPS):
            mask = causal_mask(1, step, CPU)[:, -1:]
            decode = DecodeBatch(Mode.DRAFT_DECODE, 1, step, length, mask, table, MAX_POSITION)
            state = runner.model.step(tokens[LENGTH + step, None], state, runner.context(decode))
            torch.testing.assert_close(state[0], trained[step][0, LENGTH - 1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(runner.model.logits(state), head.logits(state), atol=1e-4, rtol=1e-4)
    ids = torch.arange(64)
    assert torch.equal(runner.model.to_target(ids), vocabulary.target_ids)


def test_every_flag_and_every_kind_of_head_can_be_trained() -> None:
    assert set(HEAD_FLAGS) == {flag.name for flag in fields(HeadFlags)}
    assert set(BLOCK_METHODS) == set(KINDS)


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"num_hidden_layers": 2},
            "has num_hidden_layers=2, which can be served but not trained; use a head without",
        ),
        ({"attention_bias": True}, "has attention_bias=true, which can be served but not"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "has norms on the heads of its attention, which can be served"),
        ({"hidden_size": 64}, "has hidden_size=64 and its target has 32, which can be served"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}},
            "the output of the target's last layer among",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state=false, which can be served"),
    ],
)
def test_what_is_served_but_not_trained_is_refused(
    target: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        read_draft_config(draft_config(target, 64) | changes, target, tmp_path)
