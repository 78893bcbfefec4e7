"""The loss of block heads: blocks after random positions of each text are compared with the target's distributions.

All shapes depend on the batch's shape alone, so that a step can be replayed from a CUDA graph. Papers: DFlash,
arXiv 2602.06036 (random anchors, weights by depth); DSpark (total variation and confidence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from speculative.training.draft import TrainedDraft, Unrolling, run_target
from speculative.training.samples import Batch


@dataclass(frozen=True)
class Objective:
    """The loss of a row of a block.

    tv_weight: weight of the total variation distance, which is the probability of rejection at temperature 1; the
        cross-entropy has the weight 1 - tv_weight.
    """

    tv_weight: float = 0.0


class BlockScores(NamedTuple):
    """A head's output for the rows of blocks.

    logits: [.., vocabulary] of each row, given the token before if the head reads it.
    unary: [.., vocabulary] logits that ignore the token before, by which DFlash2 chooses candidates; None in other
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
        anchors,
        batch.tokens.gather(1, flat).view(positions.shape),
        torch.softmax(logits, dim=-1).view(*positions.shape, -1),
        counted,
        depths,
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

    logits: [.., vocabulary]. probabilities: [.., vocabulary] float32, the target's.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    losses = -(probabilities * scores).sum(-1)
    drafted = (scores if objective.tv_weight else scores.detach()).exp()
    rejection = (probabilities - drafted).abs().sum(-1) / 2
    return (1 - objective.tv_weight) * losses + objective.tv_weight * rejection, rejection
