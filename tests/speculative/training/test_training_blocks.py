"""DFlash heads: the model that is trained is the one that is served, its blocks are those of the published module, and
training makes it guess the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from speculative.drafts.registry import read_draft
from speculative.training import TrainingError
from speculative.training.blocks.files import block_config, build_block_head, read_block_config
from speculative.training.blocks.head import BlockHead
from speculative.training.draft import DraftVocabulary, draft_loss, view_target
from speculative.training.rows import read_conversations
from speculative.training.samples import Sample, collate
from speculative.training.target import build_tokenizer
from tests.speculative.training.conftest import VOCAB_SIZE, run
from tests.support.drafts import block_reference
from tests.support.drafts.block_reference import BlockHead as Sizes
from tests.support.drafts.block_reference import BlockReference
from workers.config import ModelSource
from workers.models.loading import read_target_config

BLOCK = 5


@pytest.fixture
def head(target: PreTrainedModel) -> BlockHead:
    method = read_block_config(block_config(target, BLOCK, 2, 0), target, Path("draft"))
    head = build_block_head(target, method, seed=3)
    for name, parameter in head.named_parameters():
        scale = 0.2 if "proj" in name or name == "fc.weight" else 1.0
        torch.nn.init.normal_(parameter, std=scale) if scale < 1 else torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head


def test_blocks_are_those_of_the_published_module(target: PreTrainedModel, head: BlockHead) -> None:
    """At chosen and at all positions, of two texts of which one is padded."""
    samples = [Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)]
    batch = collate(samples)
    view = view_target(target, batch, head, DraftVocabulary.of(torch.arange(VOCAB_SIZE), VOCAB_SIZE))
    model = head.method.model
    sizes = Sizes(
        model.hidden_size, 2, model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size, VOCAB_SIZE
    )
    sizes = Sizes(**{**vars(sizes), "block": BLOCK, "mask_id": 0})
    tensors = {name: parameter.detach() for name, parameter in head.named_parameters()}
    embedding = target.get_input_embeddings().weight.detach()
    theirs = BlockReference(sizes, tensors, embedding, target.get_output_embeddings().weight.detach())
    picked = torch.tensor([5, 9, 18, batch.tokens.shape[1] + 3, batch.tokens.shape[1] + 8])
    eps, block_reference.EPS = block_reference.EPS, model.rms_eps
    try:
        with torch.no_grad():
            chosen = head(view.embeddings, view.captured, BLOCK - 1, picked)
            every = head.unroll(view.embeddings, view.captured, BLOCK - 1)
        for i, flat in enumerate(picked.tolist()):
            row, n = divmod(flat, batch.tokens.shape[1])
            newest = int(batch.tokens[row, n + 1])
            expected = theirs.logits(view.captured[row, : n + 1], newest)
            for step in range(BLOCK - 1):
                torch.testing.assert_close(chosen[step][i], expected[step], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(head.logits(every[step][row, n]), expected[step], atol=1e-4, rtol=1e-4)
    finally:
        block_reference.EPS = eps


def test_chosen_anchors_have_the_loss_that_they_have_among_all(target: PreTrainedModel, head: BlockHead) -> None:
    """The loss of all anchors is the mean of those of each alone, weighted by judged steps; here of one step."""
    batch = collate([Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)])
    vocabulary = DraftVocabulary.of(torch.arange(VOCAB_SIZE), VOCAB_SIZE)
    view = view_target(target, batch, head, vocabulary)
    with torch.no_grad():
        whole = draft_loss(head(view.embeddings, view.captured, 1, batch.anchors), view, batch, 0.8)
        parts = []
        for index in range(len(batch.anchors)):
            picked = torch.tensor([index])
            steps = head(view.embeddings, view.captured, 1, batch.anchors[picked])
            parts.append(draft_loss(steps, view, batch, 0.8, picked))
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_a_head_is_trained_saved_measured_and_read_by_the_engine(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    small = "--vocab-size 300 --hidden-size 32 --intermediate-size 48 --layers 7 --heads 4 --kv-heads 2"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.2"
    assert run(f"train-target {common} --output {target} --steps 2 {small} --max-positions 256") == 0
    made = "--method dflash --block-size 6 --draft-layers 1 --anchors 9 --gamma 3 --steps 25 --lr 1e-2 --warmup-steps 2"
    measured = f"--max-new-tokens 9 --max-length 128 --measure-rows 3 --measure-depths 3 9 --measure {rows}"
    assert run(f"train-draft {common} --target {target} --output {draft} {made} {measured}") == 0
    said = capsys.readouterr().out
    assert "greedy chain of 3: acceptance_length" in said and "greedy chain of 5" in said and "chain of 9" not in said
    method = read_draft("dflash", str(draft), str(target), read_target_config(ModelSource(path=str(target)), 1))
    assert method.max_num_steps == 5 and method.capture == (2, 3, 5)
    state = json.loads((draft / "checkpoint-25" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses[-1] < losses[0]
    assert not any("lm_head" in name or "embed" in name for name in load_file(draft / "model.safetensors"))


@pytest.mark.parametrize(
    "option,message",
    [
        ("--draft-vocab 64", "draft_vocab=64: is of EAGLE-3 heads; leave it out with --method dflash"),
        ("--mask-token 300", "mask_token_id=300: the target's vocabulary has 300 tokens"),
        ("--block-size 64", "block_size.*from 1 to 63"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, rows: Path, target: PreTrainedModel, option: str, message: str
) -> None:
    target.save_pretrained(tmp_path / "t")
    build_tokenizer(read_conversations([str(rows)]), VOCAB_SIZE, 256).save_pretrained(tmp_path / "t")
    with pytest.raises(TrainingError, match=message):
        run(f"train-draft --method dflash --target {tmp_path}/t --data {rows} --output {tmp_path}/out {option}")
