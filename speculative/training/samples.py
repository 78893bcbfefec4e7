"""Converts conversations to token sequences, and batches sequences of similar length. Batches are padded on the right,
so a causal model needs no padding mask.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from aerie.speculative.training import TrainingError
from aerie.speculative.training.rows import Conversation, RowError

# Batches are cut from length-sorted runs of this many batches. Longer runs need less padding, shorter ones are more
# random.
_WINDOW_BATCHES = 32  # batches in a window of samples that are sorted by length
# Batch lengths are multiples of this: fewer shapes, and rows aligned for the attention kernels.
LENGTH_STEP = 64


@dataclass(frozen=True)
class Sample:
    """One answer with its prompt: `tokens[:num_prompt]` is the prompt, the rest is the answer."""

    tokens: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True)
class Batch:
    """Samples side by side, padded on the right.

    tokens: [B, T] int64.
    num_prompt, lengths: [B] int64.
    anchors: [A] int64, ascending flat positions b * T + n at which a chain can start: token n+1 is in the answer and
        token n+2 exists.
    remaining: [A] int64, tokens of the text after token n+1; step s of a chain has a target if `remaining > s`.
    """

    tokens: Tensor
    num_prompt: Tensor
    lengths: Tensor
    anchors: Tensor
    remaining: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


def prompt_tokens(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the chat template's tokens up to and including the start of the assistant's turn.

    Raises `TrainingError` for a tokenizer without a chat template or end of turn, and for a conversation that the
    template refuses.
    """
    if not tokenizer.chat_template:
        raise TrainingError("tokenizer: has no chat template; add chat_template.jinja to the model's folder")
    if tokenizer.eos_token_id is None:
        raise TrainingError("tokenizer: has no eos_token; set it in tokenizer_config.json")
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
    """Return a sample per assistant turn, ended by the end-of-turn token. Samples longer than `max_length` are left
    out.

    Raises `TrainingError` if no sample fits, and what `prompt_tokens` raises.
    """
    samples = []
    for conversation in conversations:
        for index, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                prompt = prompt_tokens(Conversation(conversation.turns[:index]), tokenizer)
                answer = [*tokenizer(turn.content, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                samples.append(Sample((*prompt, *answer), len(prompt)))
    fitting = [sample for sample in samples if len(sample.tokens) <= max_length]
    if not fitting:
        raise TrainingError(
            f"max_length={max_length}: none of {len(samples)} answers fits; raise it or give other rows"
        )
    return fitting


def answer_prompts(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the prompts of assistant turns and of last user turns, without repetitions."""
    prompts: dict[tuple[int, ...], None] = {}
    for conversation in conversations:
        turns = conversation.turns
        ends = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        ends += [len(turns)] if turns[-1].role == "user" else []
        for end in ends:
            prompts[tuple(prompt_tokens(Conversation(turns[:end]), tokenizer))] = None
    return [list(prompt) for prompt in prompts]


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write one JSON line per sample: `prompt_tokens` and `answer_tokens`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for sample in samples:
            prompt, answer = sample.tokens[: sample.num_prompt], sample.tokens[sample.num_prompt :]
            file.write(json.dumps({"prompt_tokens": prompt, "answer_tokens": answer}) + "\n")
    partial.replace(path)


def read_samples(path: Path) -> list[Sample]:
    """Return the samples that `write_samples` wrote. Raises `RowError` for a line in another format."""
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            samples.append(Sample((*row["prompt_tokens"], *row["answer_tokens"]), len(row["prompt_tokens"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise RowError(f"{path}:{number}: not a regenerated row; delete the file to generate anew") from error
    return samples


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return one epoch's batches as lists of sample indices, each of at most `batch_tokens` tokens including padding.

    Every sample occurs once; a sample longer than `batch_tokens` gets a batch of its own. Samples are sorted by length
    within random windows, so that batches have little padding and differ between epochs. seed: of the order.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    lengths = [padded_length(length) for length in lengths]
    mean = sum(lengths) / max(len(lengths), 1)
    window = max(1, round(_WINDOW_BATCHES * batch_tokens / max(mean, 1)))  # samples that are sorted by length
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        batch: list[int] = []
        for index in sorted(order[start : start + window], key=lambda i: lengths[i]):
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
    """Return the batches of a training run: `steps` of them, or those of `epochs` passes if `steps` is None."""
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


def collate(samples: Sequence[Sample], *, full_tokens: int | None = None) -> Batch:
    """Return the samples as one batch on the CPU, padded with zeros to a multiple of `LENGTH_STEP` tokens.

    full_tokens: pad the batch with empty rows to this many tokens, and with anchors without a target to a multiple of a
        quarter of them, so that batches have few shapes.
    Anchors are counted on the host, because a boolean index on the device would sync in every step.
    """
    length = padded_length(max(len(sample.tokens) for sample in samples))
    num_rows = len(samples) if full_tokens is None else max(full_tokens // length, len(samples))
    tokens = torch.zeros((num_rows, length), dtype=torch.int64)
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
    return Batch(tokens, num_prompt, lengths, anchors, remaining)


def padded_length(length: int) -> int:
    """Round the length up to a multiple of `LENGTH_STEP`."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return [1, 1, T, T] bool, true where a row may attend.

    Without a whole mask, transformers (5.17, packing check) would read position values back to the host.
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def attention_masks(config: PreTrainedConfig, length: int, device: torch.device) -> Tensor | dict[str, Tensor | None]:
    """Return `attention_mask` for transformers' models and right-padded samples: `causal_mask`, or for hybrid models a
    mask per kind of layer (None for recurrent layers)."""
    mask, kinds = causal_mask(length, device), set(getattr(config, "layer_types", None) or ())
    if "linear_attention" not in kinds:
        return mask
    return {kind: None if kind == "linear_attention" else mask for kind in kinds}
