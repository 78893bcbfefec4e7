"""The optimisation loop that target and draft training share: AdamW, warm-up and cosine, clipping, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from speculative.training.checkpoint import Checkpoint
from speculative.training.errors import TrainingError, TrainingInterrupted
from speculative.training.graphs import EagerStep, GraphedStep, LossOf
from speculative.training.samples import Batch
from workers.interrupt import interrupts_between_steps

_BETAS = (0.9, 0.95)
_LOG_EVERY = 20


@dataclass(frozen=True)
class LoopOptions:
    """`lr` is the peak after `warmup_steps`, falling on a cosine to a hundredth of it at the last step.

    `graphs` replays the steps from CUDA graphs; the batches must then come in few shapes.
    """

    lr: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    checkpoint_every: int
    eval_every: int
    graphs: bool


def learning_rate(step: int, num_steps: int, options: LoopOptions) -> float:
    """The rate of step `step` (from 0) of `num_steps`."""
    warmup = min(options.warmup_steps, max(num_steps - 1, 0))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - warmup, 1)
    return options.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, options: LoopOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, vectors (norms) do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=_BETAS, fused=trainable[0].is_cuda)


def fit(
    model: nn.Module,
    plan: Sequence[list[int]],
    batch_of: Callable[[list[int]], Batch],
    loss_of: LossOf,
    options: LoopOptions,
    *,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    after_step: Callable[[], None] | None = None,
    title: str = "train",
    progress: bool = True,
) -> list[float]:
    """Trains the model in place with one step for each batch of `plan`; returns the loss of every step.

    `batch_of` makes a batch of sample indices, `loss_of` its scalar loss. `evaluate` runs every
    `options.eval_every` steps and at the end; its numbers are printed. `after_step` runs after every step's update, for
    what has no gradient. `stop_after` ends the run early with a checkpoint, as a kill would.
    With a checkpoint the state is kept every `options.checkpoint_every` steps and at the end, so that a resume with a
    longer plan of the same batches goes on; from there the learning rate follows the longer plan.
    Raises `TrainingError` for a loss that is not finite, a plan shorter than what is done, and what
    `Checkpoint.restore` raises; `TrainingInterrupted` after Ctrl-C, once the step has ended and the state is kept.
    """
    optimizer = make_optimizer(model, options)
    start, losses = 0, list[float]()
    if resume:
        assert checkpoint is not None
        start, losses = checkpoint.restore(model, optimizer)
        if start > len(plan):
            raise TrainingError(
                f"steps={len(plan)}: the training in {checkpoint.path.parent} has done {start}; give more with --steps "
                "or --epochs"
            )
    run = GraphedStep(model, loss_of) if options.graphs else EagerStep(model, loss_of)
    pending: list[Tensor] = []
    with (
        interrupts_between_steps() as is_interrupted,
        tqdm(total=len(plan), initial=start, desc=title, disable=not progress, mininterval=2.0) as bar,
    ):
        for step in range(start, len(plan)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(plan), options)
            model.train()
            pending.append(run(batch_of(plan[step])))
            nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            optimizer.step()
            if after_step is not None:
                after_step()
            bar.update()
            done = step + 1
            is_stopped = is_interrupted() and done < len(plan)
            leaving = done in (stop_after, len(plan)) or is_stopped
            if done == start + 1 or done % _LOG_EVERY == 0 or leaving:
                losses += _drain(pending, done)
                bar.set_postfix(loss=f"{losses[-1]:.4f}")
            if checkpoint is not None and (done % options.checkpoint_every == 0 or leaving):
                losses += _drain(pending, done)
                checkpoint.save(done, model, optimizer, losses)
            if is_stopped:
                raise TrainingInterrupted(_kept(title, done, len(plan), checkpoint))
            if evaluate is not None and (done % options.eval_every == 0 or done == len(plan)):
                model.eval()
                figures = " ".join(f"{name} {value:.4f}" for name, value in evaluate().items())
                tqdm.write(f"{title}: step {done}/{len(plan)} {figures}")
            if leaving:
                break
    return losses


def _kept(title: str, done: int, num_steps: int, checkpoint: Checkpoint | None) -> str:
    where = "" if checkpoint is None else f"; {checkpoint.path} keeps it: the same command with --resume goes on"
    return f"{title}: stopped after step {done} of {num_steps}{where}"


def _drain(pending: list[Tensor], step: int) -> list[float]:
    """The pending losses as numbers: one wait for the device instead of one a step."""
    values = [float(value) for value in torch.stack(pending).tolist()] if pending else []
    pending.clear()
    if not all(math.isfinite(value) for value in values):
        raise TrainingError(f"loss: not finite near step {step}; lower --lr or use --dtype float32")
    return values
