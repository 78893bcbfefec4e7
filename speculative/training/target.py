"""Trains a small Llama-architecture chat model from scratch, in the Hugging Face folder layout.

Called by `aerie train-target`. The model is small enough to live in a repository, so that speculation can be tried
and tested end to end without a download.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from speculative.training.checkpoint import Checkpoint
from speculative.training.draft_files import make_readable
from speculative.training.errors import TrainingError
from speculative.training.graphs import LossOf
from speculative.training.loop import LoopOptions, fit
from speculative.training.rows import Conversation, Turn
from speculative.training.samples import Batch, Sample, causal_mask, collate, encode_answers, plan_steps
from speculative.training.tokenizer import train_tokenizer

SYSTEM_PROMPT = "You are a helpful assistant."


@dataclass(frozen=True)
class TargetShape:
    """The model's dimensions, named as in a Llama `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 896
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How a target is trained; `prompt_weight` is the weight of a prompt's tokens in the loss (an answer's is 1)."""

    epochs: float
    steps: int | None
    batch_tokens: int
    max_length: int
    dropout: float
    prompt_weight: float
    seed: int
    dtype: torch.dtype
    loop: LoopOptions


def build_tokenizer(conversations: Sequence[Conversation], shape: TargetShape) -> PreTrainedTokenizerFast:
    """The target's tokenizer, trained on every turn of the conversations."""
    texts = (turn.content for conversation in conversations for turn in conversation.turns)
    return train_tokenizer(texts, shape.vocab_size, shape.max_position_embeddings)


def build_target(shape: TargetShape, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model on the CPU, with tied embeddings and the tokenizer's special tokens.

    Raises `TrainingError` when the heads do not divide the hidden size.
    """
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if shape.hidden_size % (2 * heads) or heads % kv_heads:
        raise TrainingError(
            f"heads={heads}: must divide hidden_size={shape.hidden_size} into even parts, and kv_heads={kv_heads} must "
            "divide it; try heads of 64"
        )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    assert tokenizer.eos_token_id is not None
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


def vary(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """The conversations, a fifth of them after a system prompt and a tenth after another conversation's turns.

    Rows of one question and one answer teach neither system prompts nor second turns; this does.
    """
    rng = random.Random(seed)
    varied = []
    for conversation in conversations:
        turns = conversation.turns
        if turns[0].role != "system":
            if rng.random() < 0.1:
                before = rng.choice(conversations).turns
                turns = (before if before[0].role != "system" else ()) + turns
            if rng.random() < 0.2:
                turns = (Turn("system", SYSTEM_PROMPT), *turns)
        varied.append(Conversation(turns))
    return varied


def plain_texts(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, share: float, max_length: int, seed: int
) -> list[Sample]:
    """A share of the conversations as plain text without role marks, for prompts that are not chats."""
    rng = random.Random(seed)
    samples = []
    for conversation in conversations:
        if rng.random() < share:
            text = "\n".join(turn.content for turn in conversation.turns if turn.role != "system")
            tokens = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
            if len(tokens) <= max_length:
                samples.append(Sample(tokens, 1))
    return samples


def add_dropout(model: nn.Module, rate: float) -> None:
    """Drops out what each attention, MLP and mixture of experts adds to the residual stream, in training mode only."""

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, rate, module.training)

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", ".experts")) and rate > 0:
            module.register_forward_hook(drop)


def target_loss(model: nn.Module, batch: Batch, prompt_weight: float, dtype: torch.dtype) -> Tensor:
    """Mean next-token cross-entropy of the batch, prompt tokens weighted; a float32 scalar."""
    device_type = batch.tokens.device.type
    with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
        mask = causal_mask(batch.tokens.shape[1], batch.tokens.device)
        logits = model(input_ids=batch.tokens, attention_mask=mask, use_cache=False).logits
    places = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)
    weights = torch.where(places >= batch.num_prompt[:, None], 1.0, prompt_weight)
    weights = weights * (places < batch.lengths[:, None])
    flat = logits[:, :-1].float().flatten(0, 1)
    losses = functional.cross_entropy(flat, batch.tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def answer_loss(samples: Sequence[Sample], batch_tokens: int, device: torch.device, loss_of: LossOf) -> float:
    """`loss_of` the samples' answer tokens, of which it is the mean for a batch, each token counted once."""
    total, count = 0.0, 0
    plan = plan_steps([len(s.tokens) for s in samples], batch_tokens, 0, epochs=1, steps=None)
    with torch.no_grad():
        for indices in plan:
            chosen = [samples[i] for i in indices]
            num = sum(len(s.tokens) - s.num_prompt for s in chosen)
            total += float(loss_of(collate(chosen, 0, device))) * num
            count += num
    return total / count


def fit_target(
    model: nn.Module,
    train: Sequence[Conversation],
    held: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    options: TargetOptions,
    device: torch.device,
    loss_of: LossOf,
    evaluate: Callable[[Sequence[Sample]], dict[str, float]],
    *,
    title: str,
    after_step: Callable[[], None] | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[float]:
    """Trains a model from scratch in place on the device and returns the loss of every step. evaluate: figures of the
    samples of `held`, if there are any, which are only measured."""
    samples = encode_answers(vary(train, options.seed), tokenizer, options.max_length)
    samples += plain_texts(train, tokenizer, 0.1, options.max_length, options.seed)
    held_samples = encode_answers(held, tokenizer, options.max_length) if held else []
    plan = plan_steps(
        [len(s.tokens) for s in samples], options.batch_tokens, options.seed, epochs=options.epochs, steps=options.steps
    )
    model.to(device)
    add_dropout(model, options.dropout)
    torch.manual_seed(options.seed)
    full_tokens = options.batch_tokens if options.loop.graphs else None
    return fit(
        model,
        plan,
        lambda indices: collate([samples[i] for i in indices], 0, device, full_tokens=full_tokens),
        loss_of,
        options.loop,
        checkpoint=checkpoint,
        resume=resume,
        evaluate=(lambda: evaluate(held_samples)) if held_samples else None,
        after_step=after_step,
        title=title,
        progress=progress,
    )


def train_target(
    train: Sequence[Conversation],
    held: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    model: LlamaForCausalLM,
    options: TargetOptions,
    device: torch.device,
    *,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[float]:
    """Trains the model in place on the device and returns the loss of every step; `held` is only measured."""

    def loss_of(batch: Batch, prompt_weight: float = options.prompt_weight) -> Tensor:
        return target_loss(model, batch, prompt_weight, options.dtype)

    def evaluate(samples: Sequence[Sample]) -> dict[str, float]:
        loss = answer_loss(samples, options.batch_tokens, device, lambda batch: loss_of(batch, 0.0))
        return {"validation_loss": loss}

    return fit_target(
        model,
        train,
        held,
        tokenizer,
        options,
        device,
        loss_of,
        evaluate,
        title="target",
        checkpoint=checkpoint,
        resume=resume,
        progress=progress,
    )


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes config, bf16 weights, generation config and tokenizer as a Hugging Face model folder."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
