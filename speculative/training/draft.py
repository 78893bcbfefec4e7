"""Trains a draft for a frozen target: soft cross-entropy over unrolled steps, and greedy acceptance.

Called by `aerie train-draft`, for EAGLE-3 heads and for modules of multi-token prediction. The target runs beside the
draft in every step, so no hidden state is ever stored. Paper: EAGLE-3, arXiv 2503.01840 (training-time test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.draft_models.eagle3 import Eagle3
from speculative.training.acceptance import AcceptanceTally, add_rounds
from speculative.training.checkpoint import Checkpoint
from speculative.training.draft_model import Eagle3Head, TrainedDraft
from speculative.training.loop import LoopOptions, fit
from speculative.training.samples import Batch, Sample, causal_mask, collate, plan_batches, plan_steps
from speculative.training.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class DraftOptions:
    """How a draft is trained: `num_steps` unrolled steps, step s weighted by `step_decay ** s`."""

    epochs: float
    steps: int | None
    batch_tokens: int
    num_steps: int
    step_decay: float
    seed: int
    dtype: torch.dtype
    loop: LoopOptions


@dataclass(frozen=True)
class TargetView:
    """What a batch's target run gives the head: `embeddings` [B, T, H] and `captured` [B, T, F], in its dtype.

    For each of the batch's anchors n, the target's prediction at position n+1: `probabilities` [A, draft_vocab]
    float32, within the draft vocabulary, and `in_vocabulary` [A] bool, whether its first choice is in there.
    """

    embeddings: Tensor
    captured: Tensor
    probabilities: Tensor
    in_vocabulary: Tensor


def build_head(target: PreTrainedModel, method: Eagle3, vocabulary: DraftVocabulary, seed: int) -> Eagle3Head:
    """A float32 head on the target's device; its output rows start as the target's rows of the same tokens."""
    torch.manual_seed(seed)
    head = Eagle3Head(method)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    rows = target.get_output_embeddings().weight.detach()
    head.lm_head.weight.data.copy_(rows[vocabulary.target_ids].float())
    return head.to(target.device)


@torch.no_grad()
def view_target(target: PreTrainedModel, batch: Batch, head: TrainedDraft, vocabulary: DraftVocabulary) -> TargetView:
    """Runs the frozen target over the batch and keeps what the head reads and is judged by."""
    mask = causal_mask(batch.tokens.shape[1], batch.tokens.device)
    output = target.base_model(input_ids=batch.tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
    judged = output.last_hidden_state.flatten(0, 1)[batch.anchors + 1]
    logits = target.get_output_embeddings()(judged).float()
    return TargetView(
        embeddings=target.get_input_embeddings()(batch.tokens),
        captured=head.features(output),
        probabilities=torch.softmax(logits[:, vocabulary.target_ids], dim=-1),
        in_vocabulary=vocabulary.t2d[logits.argmax(-1)],
    )


def draft_loss(head: TrainedDraft, view: TargetView, batch: Batch, options: DraftOptions) -> Tensor:
    """Weighted mean over the steps of the cross-entropy to the target's distribution within the draft vocabulary.

    Step s from anchor n is judged by the target at position n + s + 1, which is the anchor s places later as long
    as the text lasts. A float32 scalar.
    """
    total = torch.zeros((), device=batch.tokens.device)
    places = torch.arange(len(batch.anchors), device=batch.tokens.device)
    with torch.autocast(batch.tokens.device.type, dtype=options.dtype, enabled=options.dtype != torch.float32):
        for step, hidden in enumerate(head(view.embeddings, view.captured, options.num_steps)):
            logits = head.logits(hidden.flatten(0, 1)[batch.anchors])
            rows = (places + step).clamp(max=len(places) - 1)
            losses = -(view.probabilities[rows] * torch.log_softmax(logits.float(), dim=-1)).sum(-1)
            judged = (batch.remaining > step) & view.in_vocabulary[rows]
            total = total + options.step_decay**step * (losses * judged).sum() / judged.sum().clamp(min=1)
    return total / sum(options.step_decay**step for step in range(options.num_steps))


@torch.no_grad()
def measure_acceptance(
    head: TrainedDraft,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    depth: int,
    batch_tokens: int,
) -> AcceptanceTally:
    """Plays greedy chain speculation of the given depth over the target's own greedy answers."""
    tally = AcceptanceTally.empty(depth)
    device = target.device
    for indices in plan_batches([len(sample.tokens) for sample in samples], batch_tokens, 0):
        batch = collate([samples[i] for i in indices], 0, device)
        view = view_target(target, batch, head, vocabulary)
        hidden = head(view.embeddings.float(), view.captured.float(), depth)
        matches = []
        for step, states in enumerate(hidden):
            proposed = vocabulary.target_ids[head.logits(states).argmax(-1)]
            matches.append((proposed == batch.tokens.roll(-(step + 2), dims=1)).tolist())
        for row, index in enumerate(indices):
            own = [match[row] for match in matches]
            add_rounds(tally, own, samples[index].num_prompt, len(samples[index].tokens))
    return tally


def report(tally: AcceptanceTally) -> dict[str, float]:
    """The tally's figures by name: acceptance length, then each depth's share."""
    depths = {f"depth_{place}": share for place, share in enumerate(tally.per_depth(), start=1)}
    return {"acceptance_length": tally.acceptance_length(), **depths}


def train_draft(
    head: TrainedDraft,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    held: Sequence[Sample],
    options: DraftOptions,
    *,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    progress: bool = True,
) -> list[float]:
    """Trains the head in place and returns the loss of every step; `held` answers are only measured."""
    lengths = [len(sample.tokens) for sample in samples]
    plan = plan_steps(lengths, options.batch_tokens, options.seed, epochs=options.epochs, steps=options.steps)
    target.eval().requires_grad_(False)

    full_tokens = options.batch_tokens if options.loop.graphs else None

    def batch_of(indices: list[int]) -> Batch:
        return collate([samples[i] for i in indices], 0, target.device, full_tokens=full_tokens)

    def loss_of(batch: Batch) -> Tensor:
        return draft_loss(head, view_target(target, batch, head, vocabulary), batch, options)

    def evaluate() -> dict[str, float]:
        return report(measure_acceptance(head, target, vocabulary, held, options.num_steps, options.batch_tokens))

    return fit(
        head,
        plan,
        batch_of,
        loss_of,
        options.loop,
        checkpoint=checkpoint,
        resume=resume,
        stop_after=stop_after,
        evaluate=evaluate if held else None,
        title="draft",
        progress=progress,
    )
