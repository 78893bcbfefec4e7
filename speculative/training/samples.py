"""Turns conversations into token sequences, and sequences into batches of about equal length.

Used by both trainings and by regeneration. Batches are padded on the right, so that a causal model needs no mask.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from speculative.training.errors import TrainingError
from speculative.training.rows import Conversation

# Batches are made of length-sorted runs of this many batches: less padding when larger, more random when smaller.
_RUN_BATCHES = 32
# Lengths of batches are multiples of this: fewer shapes, and rows aligned for the attention kernels.
LENGTH_STEP = 64


@dataclass(frozen=True)
class Sample:
    """One answer with all that led to it: `tokens[:num_prompt]` is given, the rest is what the model says."""

    tokens: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class Batch:
    """Samples side by side, padded on the right: `tokens` [B, T] int64, `num_prompt` and `lengths` [B] int64.

    `anchors` [A] int64 are flat positions b * T + n, in order, from which a served chain can start and draft a token
    that the text has: token n+1 is the answer's and token n+2 exists. `remaining` [A] int64 is how many tokens the
    text has after token n+1, so a chain's step s is judged where `remaining > s`.
    """

    tokens: Tensor
    num_prompt: Tensor
    lengths: Tensor
    anchors: Tensor
    remaining: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the fields."""
        return self.tokens, self.num_prompt, self.lengths, self.anchors, self.remaining


def prompt_tokens(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The chat template's tokens up to and including the mark after which the assistant speaks.

    Raises `TrainingError` for a conversation that the template refuses.
    """
    try:
        text = tokenizer.apply_chat_template(conversation.messages(), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        start = conversation.turns[0].content[:40] if conversation.turns else ""
        raise TrainingError(
            f"data: the model's chat template refuses the conversation that starts {start!r} ({error}); change its "
            "roles or take it out"
        ) from None
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_answers(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Sample]:
    """One sample for each assistant turn, ended by the end-of-turn token; those over `max_length` are left out.

    Raises `TrainingError` if the tokenizer has no chat template or none of the samples fits.
    """
    require_chat_template(tokenizer)
    samples = []
    for conversation in conversations:
        for place, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                prompt = prompt_tokens(Conversation(conversation.turns[:place]), tokenizer)
                answer = [*tokenizer(turn.content, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                samples.append(Sample((*prompt, *answer), len(prompt)))
    fitting = [sample for sample in samples if len(sample.tokens) <= max_length]
    if not fitting:
        raise TrainingError(
            f"max_length={max_length}: none of {len(samples)} answers fits; raise it or give other rows"
        )
    return fitting


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `TrainingError` when the tokenizer cannot render chats or has no end-of-turn token."""
    if not tokenizer.chat_template:
        raise TrainingError("tokenizer: has no chat template; add chat_template.jinja to the model's folder")
    if tokenizer.eos_token_id is None:
        raise TrainingError("tokenizer: has no eos_token; set it in tokenizer_config.json")


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """One epoch's batches as lists of sample indices, each of at most `batch_tokens` tokens with its padding.

    Every sample occurs once; a sample longer than `batch_tokens` gets a batch of its own.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    lengths = [padded_length(length) for length in lengths]
    mean = sum(lengths) / max(len(lengths), 1)
    run = max(1, round(_RUN_BATCHES * batch_tokens / max(mean, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), run):
        batch: list[int] = []
        for index in sorted(order[start : start + run], key=lambda i: lengths[i]):
            if batch and lengths[index] * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    rng.shuffle(batches)
    return batches


def plan_steps(
    lengths: Sequence[int], batch_tokens: int, seed: int, *, epochs: float, steps: int | None
) -> list[list[int]]:
    """The batches of a whole training: `steps` of them, or those of `epochs` passes when `steps` is None."""
    if not lengths:
        raise TrainingError("data: no sample to train on; give more rows or a larger max_length")
    plan: list[list[int]] = []
    epoch = 0
    while (len(plan) < steps) if steps is not None else (epoch < epochs):
        batches = plan_batches(lengths, batch_tokens, seed + epoch)
        share = 1.0 if steps is not None else min(1.0, epochs - epoch)
        plan += batches[: max(1, round(len(batches) * share))]
        epoch += 1
    return plan if steps is None else plan[:steps]


def collate(samples: Sequence[Sample], pad_id: int, device: torch.device, *, full_tokens: int | None = None) -> Batch:
    """The samples as one batch on the device, padded with `pad_id` to a multiple of `LENGTH_STEP` tokens.

    With `full_tokens` the batch is filled up with empty rows to that many tokens, and with judged-nowhere anchors to
    a quarter of them, so that the batches of a whole training come in few shapes. Everything is counted on the
    host: a boolean index on the device would wait for it in every step.
    """
    length = padded_length(max(len(sample.tokens) for sample in samples))
    num_rows = len(samples) if full_tokens is None else max(full_tokens // length, len(samples))
    tokens = torch.full((num_rows, length), pad_id, dtype=torch.int64)
    num_prompt, lengths = torch.zeros(2, num_rows, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        num_prompt[row], lengths[row] = sample.num_prompt, len(sample.tokens)
    left = lengths[:, None] - 2 - torch.arange(length)
    starts = (torch.arange(length) + 1 >= num_prompt[:, None]) & (left > 0)
    anchors = starts.flatten().nonzero()[:, 0]
    remaining = left.flatten()[anchors]
    if full_tokens is not None:
        extra = -len(anchors) % max(full_tokens // 4, 1)
        anchors, remaining = (functional.pad(part, (0, extra)) for part in (anchors, remaining))
    parts = (tokens, num_prompt, lengths, anchors, remaining)
    if device.type == "cuda":
        return Batch(*(part.pin_memory().to(device, non_blocking=True) for part in parts))
    return Batch(*(part.to(device) for part in parts))


def padded_length(length: int) -> int:
    """The length rounded up to a multiple of `LENGTH_STEP`."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[1, 1, T, T] bool, true where attention may look.

    Handed to transformers whole: it would otherwise read position values back to the host (5.17, packing check).
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
