"""Block heads: the model that is trained is the one that is served, its blocks are those of the published modules, and
training makes it guess the target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from aerie.speculative.drafts.blocks.dflash2 import DFlash2
from aerie.speculative.drafts.blocks.domino import Domino
from aerie.speculative.drafts.blocks.dspark import DSpark
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.training import TrainingError
from aerie.speculative.training.block_kinds import KINDS, BlockOptions, block_config, build_block_head, captured_layers
from aerie.speculative.training.blocks import BlockHead
from aerie.speculative.training.commands import load_target
from aerie.speculative.training.draft import DraftVocabulary, Unrolling, read_head
from aerie.speculative.training.losses import Objective, block_loss, block_targets, draw_anchors, view_target
from aerie.speculative.training.rows import read_conversations
from aerie.speculative.training.samples import Sample, collate
from aerie.speculative.training.trainer import TimeLimit
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from tests.speculative.training.conftest import VOCAB_SIZE, run, train_small
from tests.support import ROOT
from tests.support.drafts import block_reference
from tests.support.drafts.block_reference import BlockHead as Sizes
from tests.support.drafts.block_reference import BlockReference
from tests.support.slow import slow
from tests.support.targets.llama import build_tokenizer

BLOCK = 5


@pytest.fixture(params=["dflash", "dspark", "dflash2", "domino", "causal dflash", "causal dspark"])
def head(request: pytest.FixtureRequest, target: PreTrainedModel) -> BlockHead:
    kind, causal = request.param.removeprefix("causal "), "causal" in request.param
    config = block_config(target, BlockOptions(kind, BLOCK, 2, mask_token_id=0, rank=12, causal=causal))
    method = read_head(KINDS[kind].method, config, target, Path("draft"))
    head = build_block_head(target, method, Objective(0.5), seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in head.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            torch.nn.init.normal_(
                parameter, std=1.0 if "markov" in name or "code" in name else 0.2, generator=generator
            )
    return head.requires_grad_(False)


def test_blocks_are_those_of_the_published_module(target: PreTrainedModel, head: BlockHead) -> None:
    """At chosen and at all positions, of two texts of which one is padded."""
    batch = collate([Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)])
    view = view_target(target, batch, head, DraftVocabulary.of(torch.arange(VOCAB_SIZE), VOCAB_SIZE))
    theirs, num_steps = published(target, head), head.method.form.max_depth
    anchors = torch.tensor([[5, 9, 18], [3, 8, 8]])
    previous = (
        batch.tokens[:, :, None]
        .expand(-1, -1, num_steps)
        .gather(1, (anchors[:, :, None] + 1 + torch.arange(num_steps)).clamp(max=batch.tokens.shape[1] - 1))
    )
    chosen = head(view.embeddings, view.captured, anchors, previous)
    proposed = head.proposals(view.embeddings, view.captured, batch.tokens, num_steps)
    eps, block_reference.EPS = block_reference.EPS, head.method.model.rms_eps
    try:
        for row, column in itertools.product(range(2), range(3)):
            n = int(anchors[row, column])
            states = theirs.hidden(view.captured[row, : n + 1], int(batch.tokens[row, n + 1]))
            for step in range(num_steps):
                expected = theirs.after(states, step + 1, *previous[row, column, : step + 1].tolist())
                seen = expected > float("-inf")  # DFlash2 scores its candidates only
                torch.testing.assert_close(chosen.logits[row, column, step][seen], expected[seen], atol=1e-4, rtol=1e-4)
                assert int(proposed[step][row, n]) == int(expected.argmax())
    finally:
        block_reference.EPS = eps


def published(target: PreTrainedModel, head: BlockHead) -> BlockReference:
    """The plain implementation with the head's weights."""
    model, method = head.method.model, head.method
    others = {"rank": method.rank} if isinstance(method, DSpark | DFlash2 | Domino) else {}
    if isinstance(method, Domino):
        others |= {"state": method.state_size, "plain": method.num_plain}
    if isinstance(method, DFlash2):
        others |= {"taps": method.taps, "group": method.group_size, "candidates": method.candidates}
    sizes = Sizes(
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        dim=model.head_dim,
        mlp=model.intermediate_size,
        vocab=VOCAB_SIZE,
        block=BLOCK,
        mask_id=0,
        from_anchor=method.form.from_anchor,
        kind=method.name,
        causal=(head.causal,) * model.num_layers,
        **others,
    )
    tensors = {name: parameter.detach() for name, parameter in head.named_parameters()}
    embedding = target.get_input_embeddings().weight.detach()
    return BlockReference(sizes, tensors, embedding, target.get_output_embeddings().weight.detach())


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 3),
)
def test_blocks_start_where_a_chain_can_start(sizes: list[tuple[int, int]], most: int, seed: int) -> None:
    """And as many times as there are places, if there are few."""
    batch = collate([Sample(tuple(range(p + a)), p) for p, a in sizes], full_tokens=512)
    torch.manual_seed(seed)
    anchors, live = draw_anchors(batch, most)
    drawn = [row * batch.tokens.shape[1] + int(n) for row, n in live.nonzero().tolist() for n in [anchors[row, n]]]
    possible = set(batch.anchors[batch.remaining > 0].tolist())
    assert len(set(drawn)) == len(drawn) and set(drawn) <= possible
    per_text = [sum(n // batch.tokens.shape[1] == row for n in possible) for row in range(len(sizes))]
    assert len(drawn) == sum(min(count, anchors.shape[1]) for count in per_text)


def test_blocks_of_a_depth_of_their_own_are_shorter_blocks(target: PreTrainedModel, head: BlockHead) -> None:
    """Down to its depth; else a head that is trained on random depths would be drafted with otherwise."""
    batch = collate([Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)])
    view = view_target(target, batch, head, DraftVocabulary.of(torch.arange(VOCAB_SIZE), VOCAB_SIZE))
    num_steps = head.method.form.max_depth
    anchors, depths = torch.tensor([[5, 9, 14], [3, 8, 5]]), torch.tensor([[1, 2, num_steps], [2, 1, num_steps - 1]])
    states = head.states(view.embeddings, view.captured, anchors, num_steps, depths)
    whole = head.states(view.embeddings, view.captured, anchors, num_steps)
    for row, column in itertools.product(range(2), range(3)):
        depth = int(depths[row, column])
        alone = head.states(view.embeddings, view.captured, anchors, depth)[row, column]
        torch.testing.assert_close(states[row, column, :depth], alone, atol=1e-5, rtol=1e-5)
        longer = (whole[row, column, :depth] - alone).abs().max()
        assert longer < 1e-5 if depth == num_steps or head.causal else longer > 1e-3


def test_the_loss_of_random_depths_counts_no_row_below_them(target: PreTrainedModel, head: BlockHead) -> None:
    batch = collate([Sample(tuple(range(5, 25)), 4)])
    torch.manual_seed(1)
    blocks = block_targets(head, target, batch, Unrolling(head.method.form.max_depth, 0.7, 1000, random_depths=True))
    assert blocks.depths is not None and set(blocks.depths.flatten().tolist()) == set(
        range(1, head.method.form.max_depth + 1)
    )
    steps = torch.arange(head.method.form.max_depth)
    assert not (blocks.counted & (steps >= blocks.depths.unsqueeze(2))).any() and blocks.counted[..., 0].any()
    torch.manual_seed(1)
    loss = block_loss(
        head, Objective(0.5), head, target, batch, Unrolling(head.method.form.max_depth, 0.7, 1000, random_depths=True)
    )
    torch.manual_seed(1)
    assert loss != block_loss(head, Objective(0.5), head, target, batch, Unrolling(blocks.counted.shape[2], 0.7, 1000))


def test_the_loss_is_that_of_each_row_by_itself(target: PreTrainedModel, head: BlockHead) -> None:
    batch = collate([Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)])
    unrolling = Unrolling(head.method.form.max_depth, 0.7, max_anchors=1000)
    torch.manual_seed(0)
    whole = block_loss(head, head.objective, head, target, batch, unrolling)
    theirs, steps = published(target, head), unrolling.num_steps
    log_p = torch.log_softmax(target(batch.tokens).logits, -1)
    view = view_target(target, batch, head, DraftVocabulary.of(torch.arange(VOCAB_SIZE), VOCAB_SIZE))
    eps, block_reference.EPS = block_reference.EPS, head.method.model.rms_eps
    losses: list[list[float]] = [[] for _ in range(steps)]
    try:
        for row, (prompt, length) in enumerate(((4, 20), (3, 11))):
            for n in range(prompt - 1, length - 2):
                states = theirs.hidden(view.captured[row, : n + 1], int(batch.tokens[row, n + 1]))
                for step in range(min(steps, length - n - 2)):
                    losses[step].append(row_loss(head, theirs, states, step, batch.tokens[row], log_p[row], n))
    finally:
        block_reference.EPS = eps
    weights = [0.7**step for step in range(steps)]
    expected = sum(w * sum(each) / len(each) for w, each in zip(weights, losses, strict=True)) / sum(weights)
    assert float(whole.detach()) == pytest.approx(expected, rel=1e-4)


def row_loss(
    head: BlockHead, theirs: BlockReference, states: Tensor, step: int, tokens: Tensor, log_p: Tensor, n: int
) -> float:
    """The loss of the row that predicts token n + step + 2."""
    p = log_p[n + step + 1].exp()
    state = states[step if head.method.form.from_anchor else step + 1]
    unary, tensors, previous = state @ theirs.lm_head.T, theirs.tensors, int(tokens[n + step + 1])
    logits = theirs.after(states, step + 1, *tokens[n + 1 : n + step + 2].tolist())
    if isinstance(head.method, DFlash2):  # of all tokens, not the candidates only
        code = tensors["candidate_selector.predecessor_codebook"][previous]
        code = code * (tensors["candidate_selector.hidden_projection.weight"] @ state)
        logits = unary + tensors["candidate_selector.successor_codebook"] @ code
    log_q = torch.log_softmax(logits, -1)
    tv = (p - log_q.exp()).abs().sum() / 2
    loss = -(p * log_q).sum() / 2 + tv / 2
    if isinstance(head.method, DFlash2):
        loss = (loss - (p * torch.log_softmax(unary, -1)).sum()) / 2
    if isinstance(head.method, DSpark):
        joined = torch.cat((state, tensors["markov_head.markov_w1.weight"][previous]))
        confidence = tensors["confidence_head.proj.weight"][0] @ joined + tensors["confidence_head.proj.bias"][0]
        loss = loss + binary_cross_entropy_with_logits(confidence, 1 - tv)
    return float(loss.detach())


def test_heads_are_trained_saved_measured_and_read_by_the_engine(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later heads learn from the answers that the first one's training has written; a time ends the last one."""
    target = tmp_path / "target"
    small = "--vocab-size 300 --hidden-size 32 --intermediate-size 48 --layers 7 --heads 4 --kv-heads 2"
    common = f"--data {rows} --batch-tokens 512 --val-fraction 0.2"
    assert train_small(f"llama {common} --output {target} --steps 2 {small} --max-positions 256") == 0
    made = "--block-size 6 --draft-layers 1 --head-rank 8 --gamma 3 --lr 1e-2 --warmup-steps 2"
    measured = f"--max-new-tokens 9 --max-length 128 --measure-rows 3 --measure-depths 3 9 --measure {rows}"
    text = f"--regenerated {tmp_path}/dflash/regenerated.jsonl"
    chosen = {
        "dflash": ("--regenerate --steps 25 --anchors 9", 5),
        "dspark": (f"{text} --steps 25 --tv-weight 0.5 --random-depths", 6),
        "dflash2": (f"{text} --steps 100000 --minutes 0.005", 5),
        "domino": (f"{text} --steps 25", 6),
    }
    for method, (how, depth) in chosen.items():
        draft = tmp_path / method
        line = f"train-draft --method {method} {common} --target {target} --output {draft} {made} {measured} {how}"
        assert run(line) == 0
        said = capsys.readouterr().out
        assert "greedy chain of 3: acceptance_length" in said and f"greedy chain of {depth}" in said
        assert f"chain of {depth + 1}" not in said and "chain of 9" not in said
        read = read_draft(method, str(draft), str(target), read_target_config(ModelSource(path=str(target)), 1))
        assert read.max_num_steps == depth and read.capture == (2, 3, 4, 5)
        assert not any("lm_head" in name or "embed_tokens" in name for name in load_file(draft / "model.safetensors"))
    for method in ("dflash", "dspark", "domino"):
        state = json.loads((tmp_path / method / "checkpoint-25" / "trainer_state.json").read_text())
        losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["dspark", *slow("dflash2")])
def test_a_head_of_a_small_hybrid_is_trained_and_read_by_the_engine(kind: str, tmp_path: Path) -> None:
    """It reads every layer but the last, and rotates whole heads, of which the target rotates a quarter."""
    folder = ROOT / "tests" / "models" / "hybrid_tiny"
    _, target = load_target(folder, torch.device("cpu"), torch.float32)
    config = block_config(target, BlockOptions(kind, BLOCK, 1, mask_token_id=0, rank=12))
    head = build_block_head(target, read_head(KINDS[kind].method, config, target, tmp_path), Objective(0.5), seed=3)
    batch = collate([Sample(tuple(range(5, 25)), 4), Sample(tuple(range(40, 51)), 3)])
    vocabulary = DraftVocabulary.of(torch.arange(512), 512)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        torch.manual_seed(0)  # the same blocks
        loss = head.batch_loss(head, target, vocabulary, batch, Unrolling(head.method.form.max_depth, 0.8, 64))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_draft(kind, str(tmp_path), str(folder), read_target_config(ModelSource(path=str(folder)), 1))
    assert read.capture == (1, 2, 3) and read.max_num_steps == head.method.form.max_depth


def test_heads_read_layers_from_the_second_to_the_third_last() -> None:
    """A target of fewer than six layers: all but the last. One of 36 layers: those that z-lab chose."""
    assert [captured_layers(count) for count in (2, 4, 6, 8)] == [[0], [0, 1, 2], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert captured_layers(36) == [1, 9, 17, 25, 33]


def test_a_time_limit_ends_the_schedule_and_steps_may_end_it_earlier() -> None:
    now = [7.0]
    limit = TimeLimit(10.0, lambda: now[0])
    assert [limit.learning_rate(step, 4, 100) for step in (0, 2, 4)] == [0.0, 0.5, 1.0]
    now[0] = 12.0
    assert limit.share() == 0.5 and limit.learning_rate(5, 4, 10**6) == pytest.approx(0.505)
    assert limit.learning_rate(52, 4, 100) == limit.learning_rate(5, 4, 10**6)
    assert limit.learning_rate(100, 4, 100) == pytest.approx(0.01)
    now[0] = 30.0
    assert limit.share() > 1 and limit.learning_rate(5, 4, 10**6) == pytest.approx(0.01)
    assert TimeLimit(None).share() == 0 and TimeLimit(None).left_s() is None


def test_measuring_afterwards_takes_its_part_of_a_time_limit() -> None:
    now = [0.0]
    limit = TimeLimit(10.0, lambda: now[0])
    limit.reserved = 4.0
    now[0] = 3.0
    assert limit.share() == 0.5 and limit.left_s() == 3.0


@pytest.mark.parametrize(
    "option,message",
    [
        ("--draft-vocab 64", "draft_vocab=64: is only for EAGLE-3 heads; leave it out with --method dflash"),
        ("--mask-token 300", "mask_token_id=300: the target's vocabulary has 300 tokens"),
        ("--block-size 64", "block_size.*from 1 to 63"),
        ("--regenerated nowhere.jsonl", "regenerated=nowhere.jsonl: no such file; use --regenerate first"),
        ("--regenerate --regenerated nowhere.jsonl", "give it or --regenerate, not both"),
        ("--method eagle3 --causal", "causal: is only for dflash, dspark, dflash2, domino; leave it out"),
        ("--method eagle3 --random-depths", "random_depths: is only for dflash, dspark, dflash2, domino; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, rows: Path, target: PreTrainedModel, option: str, message: str
) -> None:
    target.save_pretrained(tmp_path / "t")
    build_tokenizer(read_conversations([str(rows)]), VOCAB_SIZE, 256).save_pretrained(tmp_path / "t")
    with pytest.raises(TrainingError, match=message):
        run(f"train-draft --method dflash --target {tmp_path}/t --data {rows} --output {tmp_path}/out {option}")
