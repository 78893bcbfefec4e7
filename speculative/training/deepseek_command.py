"""What `aerie train-deepseek` does, from parsed arguments to a saved model folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from speculative.training.arguments import check_arguments, choose_device, choose_dtype, loop_options, open_checkpoint
from speculative.training.commands import mean_tail, preview
from speculative.training.deepseek import (
    SIZES,
    DeepseekOptions,
    DeepseekShape,
    build_deepseek,
    save_deepseek,
    train_deepseek,
)
from speculative.training.errors import TrainingError
from speculative.training.rows import Conversation, read_conversations, split_validation
from speculative.training.tokenizer import train_tokenizer


def run_train_deepseek(arguments: argparse.Namespace) -> int:
    """Trains a small model of DeepSeek-V3's shape with its module, and saves them; prints losses and how evenly experts
    are used. Returns 0."""
    check_arguments(arguments, {"mtp_steps": 1, "mtp_weight": 0, "router_bias_speed": 0})
    device = choose_device(arguments.device)
    checkpoint = open_checkpoint(arguments)
    train, held = split_validation(read_conversations(arguments.data), arguments.val_fraction, arguments.seed)
    shape = SIZES[arguments.size]
    tokenizer = read_tokenizer(arguments.tokenizer) if arguments.tokenizer else tokenizer_of(train, shape)
    model = build_deepseek(shape, tokenizer, arguments.seed)
    options = DeepseekOptions(
        epochs=arguments.epochs,
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        max_length=min(arguments.max_length, shape.max_position_embeddings),
        dropout=arguments.dropout,
        prompt_weight=arguments.prompt_weight,
        mtp_steps=arguments.mtp_steps,
        mtp_weight=arguments.mtp_weight,
        bias_speed=arguments.router_bias_speed,
        seed=arguments.seed,
        dtype=choose_dtype(arguments.dtype, device),
        loop=loop_options(arguments, device),
    )
    print(
        f"deepseek: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train)} rows, {len(held)} held out"
    )
    losses = train_deepseek(
        train, held, tokenizer, model, options, device, checkpoint=checkpoint, resume=arguments.resume
    )
    save_deepseek(model, shape, tokenizer, arguments.output)
    if not arguments.keep_checkpoint:
        checkpoint.discard()
    print(f"deepseek: loss {mean_tail(losses):.4f} over the last steps; saved to {arguments.output}")
    preview(arguments.output, arguments.preview, device)
    return 0


def tokenizer_of(conversations: Sequence[Conversation], shape: DeepseekShape) -> PreTrainedTokenizerBase:
    """One of the model's size, trained on every turn of the conversations."""
    texts = (turn.content for conversation in conversations for turn in conversation.turns)
    return train_tokenizer(texts, shape.vocab_size, shape.max_position_embeddings)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """That of a model's folder. Raises `TrainingError` if there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise TrainingError(f"tokenizer={folder}: cannot be loaded ({cause}); give the folder of a model") from None
    return tokenizer
