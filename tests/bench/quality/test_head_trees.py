"""The simulation of trees agrees with itself, a literal search, and the training's own measure of chains."""

import heapq
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from aerie.speculative.training.block_kinds import KINDS, BlockOptions, block_config, build_block_head
from aerie.speculative.training.blocks import BlockHead
from aerie.speculative.training.draft import DraftVocabulary, read_head
from aerie.speculative.training.losses import Objective, measure_acceptance
from aerie.speculative.training.samples import Sample
from tests.bench.quality.head_trees import (
    BlockScoresOfText,
    accepted,
    best_first,
    children_after,
    scores_of,
    tokens_per_round,
)

VOCAB_SIZE, BLOCK, WIDTH = 8, 5, 9


@pytest.fixture
def target() -> PreTrainedModel:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=7,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).requires_grad_(False)


@pytest.fixture(params=["dspark", "dflash"])
def head(request: pytest.FixtureRequest, target: PreTrainedModel) -> BlockHead:
    config = block_config(target, BlockOptions(request.param, BLOCK, 2, mask_token_id=0, rank=6, causal=True))
    method = read_head(KINDS[request.param].method, config, target, Path("draft"))
    head = build_block_head(target, method, Objective(), seed=4)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.requires_grad_(False)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    return [Sample(tuple(torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist()), 4) for n in (30, 21)]


def test_chains_are_what_the_training_measures(head: BlockHead, target: PreTrainedModel) -> None:
    depth = head.method.form.max_depth
    found = tokens_per_round(head, target, samples(), [WIDTH])
    whole = DraftVocabulary.whole(target)
    tally = measure_acceptance(head, target, whole, samples(), depth, 4096)
    assert found["chain"] == pytest.approx(tally.acceptance_length()) and found["chain"] > 1


def test_best_first_trees_are_a_heap_s(head: BlockHead, target: PreTrainedModel) -> None:
    """Paths, with the tokens that the text goes on with among them or not."""
    of = scores_of(head, target, samples()[0])
    counts = accepted(best_first(head, of, WIDTH, 3), of.truth)
    assert counts.max() > 0
    for position in range(len(of.root)):
        paths = heap_tree(head, of.part(slice(position, position + 1)))
        truth = of.truth[position].tolist()
        depth = max(n for n in range(len(truth) + 1) if n == 0 or tuple(truth[:n]) in paths)
        assert counts[position] == depth


def heap_tree(head: BlockHead, of: BlockScoresOfText) -> set[tuple[int, ...]]:
    heap, paths = [(0.0, ())], set()
    while len(paths) < WIDTH:
        score, path = heapq.heappop(heap)
        paths.add(path)
        if len(path) < head.method.form.max_depth:
            previous = torch.tensor([[path[-1]]]) if path else of.root[None]
            found = children_after(head, of, len(path), previous, 3)
            for token, value in zip(found.ids[0].tolist(), found.log_probabilities[0].tolist(), strict=True):
                heapq.heappush(heap, (score - value, (*path, token)))
    return paths


def test_wider_trees_take_no_fewer_tokens(head: BlockHead, target: PreTrainedModel) -> None:
    found = tokens_per_round(head, target, samples(), [6, 24])
    assert found["best-first 24"] >= found["best-first 6"] and found["EAGLE-2 24"] >= found["EAGLE-2 6"]
