"""How many tokens a round a block head's trees would accept on given texts, by growth and number of nodes.

Greedy verification emits the text itself, so a round's accepted tokens are the longest path of the tree that the text
goes on with. Trees of all positions of a text are grown at once, with the training's head and without an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from aerie.kernels.tree.nodes import Candidates, Children
from aerie.kernels.tree.tree_growth import grow_best, level_rows
from aerie.speculative.drafts.blocks.dspark import CORRECTED
from aerie.speculative.training.block_kinds import DSparkHead
from aerie.speculative.training.blocks import BlockHead
from aerie.speculative.training.losses import run_target
from aerie.speculative.training.samples import Sample, collate

TOP_K = 7  # children of a node, as `aerie serve --draft` grows trees
_AT_ONCE = 128  # trees; bounds the memory of their scores


@dataclass(frozen=True)
class BlockScoresOfText:
    """A row's best tokens after each of M positions: scores [M, S, n] float32 log-probabilities, ids [M, S, n] int64.
    root [M] int64: the newest token. truth [M, S] int64: the text's next tokens, -1 after its end."""

    scores: Tensor
    ids: Tensor
    root: Tensor
    truth: Tensor

    def part(self, rows: slice) -> "BlockScoresOfText":
        return BlockScoresOfText(*(each[rows] for each in vars(self).values()))


@torch.no_grad()
def scores_of(head: BlockHead, target: PreTrainedModel, sample: Sample) -> BlockScoresOfText:
    """Return the head's scores at every position of the sample's answer at which a round may begin."""
    device = target.device
    num_steps, length = head.method.form.max_depth, len(sample.tokens)
    tokens = collate([sample]).tokens.to(device)
    output = run_target(target, tokens)
    embeddings = target.get_input_embeddings()(tokens).float()
    captured = head.features(output).float()
    anchors = torch.arange(sample.num_prompt - 1, length - 2, device=device)
    scores, ids = [], []
    for part in anchors.split(_AT_ONCE):
        states = head.states(embeddings, captured, part[None], num_steps)[0]
        best = torch.log_softmax(head.logits(states).float(), -1).topk(min(CORRECTED, target.config.vocab_size), -1)
        scores.append(best.values)
        ids.append(best.indices)
    after = anchors.unsqueeze(1) + 2 + torch.arange(num_steps, device=device)
    truth = torch.where(after < length, tokens[0][after.clamp(max=length - 1)], -1)
    return BlockScoresOfText(torch.cat(scores), torch.cat(ids), tokens[0][anchors + 1], truth)


def children_after(head: BlockHead, of: BlockScoresOfText, row: int, previous: Tensor, top_k: int) -> Children:
    """Return the best tokens of a row after each of previous [M, k] int64, as the engine's heads score them."""
    scores, ids = (each[:, row].unsqueeze(1).expand(-1, previous.shape[1], -1) for each in (of.scores, of.ids))
    if isinstance(head, DSparkHead):
        before = head.markov_head.markov_w1(previous).float()
        after = head.markov_head.markov_w2.weight[of.ids[:, row]].float()
        scores = torch.log_softmax(scores + torch.einsum("mkr,mnr->mkn", before, after), -1)
    best = scores.topk(top_k, -1)
    ids = ids.gather(2, best.indices)
    return Children(best.values.flatten(0, 1).contiguous(), ids.flatten(0, 1).contiguous(), None)


def best_first(head: BlockHead, of: BlockScoresOfText, width: int, top_k: int = TOP_K) -> Candidates:
    """Return the best `width` - 1 nodes of all."""
    num_steps, pool, level = of.scores.shape[1], None, None
    previous = of.root.unsqueeze(1)
    for depth in range(1, num_steps + 1):
        children = children_after(head, of, depth - 1, previous, top_k)
        pool, level = grow_best(pool, level, children, depth, width, level_rows(depth, num_steps, top_k, width))
        previous = level.tokens
    assert pool is not None, "blocks have rows"
    return pool


def eagle2(head: BlockHead, of: BlockScoresOfText, width: int, top_k: int = TOP_K) -> Candidates:
    """Return the best `width` - 1 nodes of those that EAGLE-2 (arXiv 2406.16858, section 4) expands: of each level, the
    `top_k` best have children. top_k 1: a chain."""
    num_steps, count = of.scores.shape[1], of.root.shape[0]
    device = of.root.device
    previous, path = of.root.unsqueeze(1), torch.zeros(count, 1, device=device)
    index = torch.full((count, 1), -1, device=device)
    tokens, scores, parents, first = [], [], [], 0
    for depth in range(num_steps):
        found = children_after(head, of, depth, previous, top_k)
        shape = (count, previous.shape[1], top_k)
        level = found.log_probabilities.view(shape) + path.unsqueeze(2)
        tokens.append(found.ids.view(count, -1))
        scores.append(level.flatten(1))
        parents.append(index.unsqueeze(2).expand(shape).flatten(1))
        path, chosen = scores[-1].topk(min(top_k, scores[-1].shape[1]), 1)
        previous, index = tokens[-1].gather(1, chosen), chosen + first
        first += scores[-1].shape[1]
    all_tokens, all_scores, all_parents = (torch.cat(each, 1) for each in (tokens, scores, parents))
    kept = torch.sort(all_scores, dim=1, descending=True, stable=True).indices[:, : width - 1]
    dropped = torch.full_like(all_tokens, -2).scatter(1, kept, all_tokens.gather(1, kept))
    return Candidates(dropped, all_scores, all_parents, torch.zeros_like(all_parents), num_steps)


def accepted(nodes: Candidates, truth: Tensor) -> Tensor:
    """Return how many tokens of truth [M, S] each tree has from its root on, [M] int64."""
    at = torch.full_like(truth[:, :1], -1)
    alive, count = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
    for depth in range(truth.shape[1]):
        found = (nodes.parents == at) & (nodes.tokens == truth[:, depth, None]) & alive
        alive = found.any(1, keepdim=True)
        at = torch.where(alive, found.long().argmax(1, keepdim=True), -3)
        count += alive
    return count[:, 0]


GROWTHS = {"best-first": best_first, "EAGLE-2": eagle2}


@torch.no_grad()
def tokens_per_round(
    head: BlockHead, target: PreTrainedModel, samples: Sequence[Sample], widths: Sequence[int]
) -> dict[str, float]:
    """Return the mean tokens of a round on the texts, by name of the tree: "chain", "best-first 63" and so on."""
    rounds: dict[str, list[int]] = {}
    for sample in samples:
        if len(sample.tokens) < sample.num_prompt + 2:
            continue
        of = scores_of(head, target, sample)
        parts = [of.part(slice(i, i + _AT_ONCE)) for i in range(0, len(of.root), _AT_ONCE)]
        depth = of.truth.shape[1]
        runs = {"chain": torch.cat([accepted(eagle2(head, each, depth + 1, 1), each.truth) for each in parts])}
        for name, grow in GROWTHS.items():
            for width in widths:
                found = [accepted(grow(head, each, width), each.truth) for each in parts]
                runs[f"{name} {width}"] = torch.cat(found)
        for name, run in runs.items():
            rounds.setdefault(name, []).extend(_walk(run.tolist()))
    return {name: sum(found) / len(found) for name, found in rounds.items()}


def _walk(run: list[int]) -> list[int]:
    """Return the tokens of each round of a text, from the accepted ones at every position."""
    found, at = [], 0
    while at < len(run):
        found.append(run[at] + 1)
        at += run[at] + 1
    return found
