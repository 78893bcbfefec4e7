"""A draft compared with its target: the losses of chains and of blocks, and greedy acceptance.

All shapes of a loss depend on the batch's shape alone, so that a step can be replayed from a CUDA graph. Papers:
EAGLE-3, arXiv 2503.01840 (training-time test); DFlash, arXiv 2602.06036 (random anchors, weights by depth); DSpark
(total variation and confidence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from aerie.speculative.training.draft import DraftVocabulary, TrainedDraft, Unrolling
from aerie.speculative.training.samples import Batch, Sample, attention_masks, collate, plan_batches


@dataclass(frozen=True)
class TargetView:
    """The result of running a frozen target over a batch.

    embeddings: [B, T, H] and captured: [B, T, F], in the target's dtype.
    probabilities: [A, draft_vocab] float32, the target's distribution at position n+1 of each anchor n, over the draft
        vocabulary.
    in_vocabulary: [A] bool, whether it has the most likely token.
    """

    embeddings: Tensor
    captured: Tensor
    probabilities: Tensor
    in_vocabulary: Tensor


@torch.no_grad()
def run_target(target: PreTrainedModel, tokens: Tensor) -> Any:
    """Return transformers' output for tokens [B, T] padded at their ends, with all hidden states."""
    mask = attention_masks(target.config, tokens.shape[1], tokens.device)
    return target.base_model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)


@torch.no_grad()
def view_target(target: PreTrainedModel, batch: Batch, head: TrainedDraft, vocabulary: DraftVocabulary) -> TargetView:
    """Run the frozen target over the batch; return the draft's inputs and training targets."""
    output = run_target(target, batch.tokens)
    next_states = output.last_hidden_state.flatten(0, 1)[batch.anchors + 1]
    logits = target.get_output_embeddings()(next_states).float()
    return TargetView(
        embeddings=target.get_input_embeddings()(batch.tokens),
        captured=head.features(output),
        probabilities=torch.softmax(logits[:, vocabulary.target_ids], dim=-1),
        in_vocabulary=vocabulary.t2d[logits.argmax(-1)],
    )


def draft_loss(steps: Sequence[Tensor], view: TargetView, batch: Batch, step_decay: float) -> Tensor:
    """Return the float32 cross-entropy with the target over the draft vocabulary: the mean over steps, weighted
    `step_decay ** s`.

    steps: logits [A, draft_vocab] of each step. Step s of anchor n is compared with the target at position n + s + 1,
        which is s anchors later unless the text has ended.
    """
    total = torch.zeros((), device=batch.tokens.device)
    count = len(batch.anchors)
    anchors = torch.arange(count, device=batch.tokens.device)
    for step, logits in enumerate(steps):
        rows = (anchors + step).clamp(max=count - 1)
        losses = -(view.probabilities[rows] * torch.log_softmax(logits.float(), dim=-1)).sum(-1)
        counted = (batch.remaining > step) & view.in_vocabulary[rows]
        total = total + step_decay**step * (losses * counted).sum() / counted.sum().clamp(min=1)
    return total / sum(step_decay**step for step in range(len(steps)))


@dataclass(frozen=True)
class Objective:
    """The loss of a row of a block.

    tv_weight: weight of the total variation distance, which is the probability of rejection at temperature 1; the
        cross-entropy has the weight 1 - tv_weight.
    """

    tv_weight: float = 0.0


class BlockScores(NamedTuple):
    """A head's output for the rows of blocks.

    logits: [.., vocabulary] of each row, given the previous token if the head reads it.
    unary: [.., vocabulary] logits that ignore the previous token, by which DFlash2 chooses candidates; None in other
        heads.
    confidence: [..] logits of being accepted; None in heads without a confidence head.
    """

    logits: Tensor
    unary: Tensor | None = None
    confidence: Tensor | None = None


def draw_anchors(batch: Batch, max_anchors: int) -> tuple[Tensor, Tensor]:
    """Draw the same number of random positions n in each text, about `max_anchors` in total.

    Return positions [B, M] int64, and whether a block can start there, [B, M] bool: token n+1 is the answer's and
    token n+2 exists.
    """
    num_rows, length = batch.tokens.shape
    positions = torch.arange(length, device=batch.tokens.device)
    can_start = (positions + 1 >= batch.num_prompt.unsqueeze(1)) & (positions + 2 < batch.lengths.unsqueeze(1))
    order = torch.rand(num_rows, length, device=batch.tokens.device) + can_start
    anchors = order.topk(min(length, max(1, max_anchors // num_rows)), dim=1).indices
    return anchors, can_start.gather(1, anchors)


@dataclass(frozen=True)
class BlockTargets:
    """Blocks of a batch, and the target's distributions for their rows. Step s after anchor n predicts token n + s + 2.

    embeddings: [B, T, H] and captured: [B, T, F], the draft's input.
    anchors: [B, M] int64.
    previous: [B, M, S] int64, the tokens before the predicted ones.
    probabilities: [B, M, S, vocabulary] float32, the target's.
    counted: [B, M, S] bool, false after the end of the text and beyond the block's depth.
    depths: [B, M] int64, the blocks' own depths; None if all have S.
    """

    embeddings: Tensor
    captured: Tensor
    anchors: Tensor
    previous: Tensor
    probabilities: Tensor
    counted: Tensor
    depths: Tensor | None


@torch.no_grad()
def block_targets(head: TrainedDraft, target: PreTrainedModel, batch: Batch, unrolling: Unrolling) -> BlockTargets:
    """Run the frozen target over the batch, and draw blocks of it."""
    assert unrolling.max_anchors is not None
    anchors, live = draw_anchors(batch, unrolling.max_anchors)
    length = batch.tokens.shape[1]
    output = run_target(target, batch.tokens)
    steps = torch.arange(unrolling.num_steps, device=anchors.device)
    positions = anchors.unsqueeze(2) + 1 + steps
    counted = live.unsqueeze(2) & (positions + 1 < batch.lengths[:, None, None])
    depths = None
    if unrolling.random_depths:
        depths = torch.randint(1, unrolling.num_steps + 1, anchors.shape, device=anchors.device)
        counted &= steps < depths.unsqueeze(2)
    flat = positions.clamp(max=length - 1).flatten(1)
    states = output.last_hidden_state.gather(1, flat.unsqueeze(2).expand(-1, -1, output.last_hidden_state.shape[2]))
    logits = target.get_output_embeddings()(states).float()
    return BlockTargets(
        target.get_input_embeddings()(batch.tokens),
        head.features(output),
        anchors=anchors,
        previous=batch.tokens.gather(1, flat).view(positions.shape),
        probabilities=torch.softmax(logits, dim=-1).view(*positions.shape, -1),
        counted=counted,
        depths=depths,
    )


def block_loss(
    head: TrainedDraft,
    objective: Objective,
    model: nn.Module,
    target: PreTrainedModel,
    batch: Batch,
    unrolling: Unrolling,
) -> Tensor:
    """Return the loss of blocks after random positions, a float32 scalar: the mean over steps, with weight `step_decay
    ** s` for step s. model: the head, wrapped if there are several processes; it returns `BlockScores`."""
    blocks = block_targets(head, target, batch, unrolling)
    scores = model(blocks.embeddings, blocks.captured, blocks.anchors, blocks.previous, blocks.depths)
    losses, rejection = row_losses(scores.logits, blocks.probabilities, objective)
    if scores.unary is not None:
        losses = (losses + row_losses(scores.unary, blocks.probabilities, Objective())[0]) / 2
    if scores.confidence is not None:
        accepted = (1 - rejection).detach()
        confidence = scores.confidence.float()
        losses = losses + functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    counts = blocks.counted.sum((0, 1))
    means = (losses * blocks.counted).sum((0, 1)) / counts.clamp(min=1)
    steps = torch.arange(unrolling.num_steps, device=means.device, dtype=torch.float32)
    weights = unrolling.step_decay**steps
    return (means * weights).sum() / weights.sum()


def row_losses(logits: Tensor, probabilities: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return each row's loss and its total variation distance, [..] float32.

    logits: [.., vocabulary].
    probabilities: [.., vocabulary] float32, the target's.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    losses = -(probabilities * scores).sum(-1)
    drafted = (scores if objective.tv_weight else scores.detach()).exp()
    rejection = (probabilities - drafted).abs().sum(-1) / 2
    return (1 - objective.tv_weight) * losses + objective.tv_weight * rejection, rejection


@dataclass
class AcceptanceTally:
    """Counts of rounds and, by depth, of verified (`offered`) and accepted draft tokens."""

    offered: list[int]
    accepted: list[int]
    num_rounds: int = 0

    @classmethod
    def empty(cls, depth: int) -> AcceptanceTally:
        return cls([0] * depth, [0] * depth)

    def acceptance_length(self) -> float:
        """Mean tokens per round: 1 + accepted / rounds."""
        return 1 + sum(self.accepted) / max(self.num_rounds, 1)

    def per_depth(self) -> list[float]:
        """Share accepted at each depth among the rounds whose earlier depths were accepted."""
        return [accepted / max(offered, 1) for accepted, offered in zip(self.accepted, self.offered, strict=True)]

    def report(self) -> dict[str, float]:
        """Return the figures by name: acceptance length, then each depth's share."""
        depths = {f"depth_{depth}": share for depth, share in enumerate(self.per_depth(), start=1)}
        return {"acceptance_length": self.acceptance_length(), **depths}


def add_rounds(tally: AcceptanceTally, matches: Sequence[Sequence[bool]], num_prompt: int, length: int) -> None:
    """Simulate the rounds of one sequence and add them to the tally.

    matches: `matches[s][n]` says whether the draft anchored at position n proposes, as its step s, token n + s + 2.

    Greedy verification emits the target's own text. Step s counts only if the steps before it matched, and then its
    inputs are the text's tokens, so teacher forcing gives the exact acceptance. The first round's bonus token is the
    answer's first token. A round accepts consecutive matches, up to the tally's depth and the text's end.
    """
    depth = len(tally.offered)
    anchor = num_prompt - 1
    while anchor + 2 < length:
        run = 0
        while run < depth and anchor + run + 2 < length:
            tally.offered[run] += 1
            if not matches[run][anchor]:
                break
            tally.accepted[run] += 1
            run += 1
        tally.num_rounds += 1
        anchor += run + 1


@torch.no_grad()
def measure_acceptance(
    head: TrainedDraft,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    depth: int,
    batch_tokens: int,
) -> AcceptanceTally:
    """Simulate greedy chains of `depth` draft tokens over the target's own greedy answers."""
    tally = AcceptanceTally.empty(depth)
    for indices in plan_batches([len(sample.tokens) for sample in samples], batch_tokens, 0):
        batch = collate([samples[i] for i in indices]).to(target.device)
        view = view_target(target, batch, head, vocabulary)
        matches = []
        proposals = head.proposals(view.embeddings.float(), view.captured.float(), batch.tokens, depth)
        for step, ids in enumerate(proposals):
            # row i has read token i + 1, so step 0 proposes token i + 2
            matches.append((vocabulary.target_ids[ids] == batch.tokens.roll(-(step + 2), dims=1)).tolist())
        for row, index in enumerate(indices):
            own = [match[row] for match in matches]
            add_rounds(tally, own, samples[index].num_prompt, len(samples[index].tokens))
    return tally
