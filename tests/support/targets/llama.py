"""A small Llama chat model: its byte-level BPE tokenizer, its training from scratch, and its Hugging Face folder. What
trains the other targets, too, stands here."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import make_readable, token_ids
from aerie.speculative.training.rows import Conversation, Turn
from aerie.speculative.training.samples import Batch, Sample, causal_mask, collate, encode_answers, plan_batches
from aerie.speculative.training.trainer import FitArguments, LossOf, fit

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLE_MARKS = ("<|system|>", "<|user|>", "<|assistant|>")
NUM_BYTES = 256

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|>Functions:' -}}
    {%- for tool in tools -%}
        {{- ' ' ~ tool.function.name ~ '(' ~ tool.function.parameters.properties | default({}) | join(', ') ~ ')' -}}
    {%- endfor -%}
    {{- eos_token -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('role ' ~ message['role'] ~ ' is unknown: use system, user, assistant or tool') -}}
    {%- endif -%}
    {{- '<|' ~ ('user' if message['role'] == 'tool' else message['role']) ~ '|>' ~ message['content'] -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '\\n<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""
SYSTEM_PROMPT = "You are a helpful assistant."
_CALC_MARK = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class ChatData:
    """Conversations to train on, conversations held out for validation, and how they become tokens.

    max_length: tokens; longer answers are left out.
    """

    train: Sequence[Conversation]
    held: Sequence[Conversation]
    tokenizer: PreTrainedTokenizerBase
    max_length: int


def build_tokenizer(conversations: Sequence[Conversation], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on every turn of the conversations."""
    texts = (turn.content for conversation in conversations for turn in conversation.turns)
    return train_tokenizer(texts, vocab_size, max_length)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens trained on the texts; every byte string round trips through it.

    Plain text gets `<|bos|>` in front; the chat template writes it itself. The end of a turn is `eos_token`.
    Raises `TrainingError` when the vocabulary cannot hold the bytes and marks.
    """
    special = [PAD, BOS, END, *ROLE_MARKS]
    if vocab_size < NUM_BYTES + len(special):
        raise TrainingError(f"vocab_size={vocab_size}: must be at least {NUM_BYTES + len(special)} (bytes and marks)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=list(ROLE_MARKS),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def without_calc_marks(conversation: Conversation) -> Conversation:
    """The conversation with GSM8K's calculator marks `<<48/2=24>>` taken out."""
    return Conversation(tuple(Turn(turn.role, _CALC_MARK.sub("", turn.content)) for turn in conversation.turns))


def llama_config(arguments: argparse.Namespace) -> LlamaConfig:
    """The shape that the command line names. Raises TrainingError."""
    heads, kv_heads = arguments.heads, arguments.kv_heads
    if arguments.hidden_size % (2 * heads) or heads % kv_heads:
        raise TrainingError(
            f"heads={heads}: must divide hidden_size={arguments.hidden_size} into even parts, and kv_heads={kv_heads} "
            "must divide it; try heads of 64"
        )
    return LlamaConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=arguments.hidden_size // heads,
        max_position_embeddings=arguments.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def build_target(config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model on the CPU, with the tokenizer's special tokens."""
    torch.manual_seed(seed)
    for name, token in token_ids(tokenizer).items():
        setattr(config, name, token)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**token_ids(tokenizer), do_sample=False)
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


def target_loss(model: nn.Module, batch: Batch, prompt_weight: float) -> Tensor:
    """Mean next-token cross-entropy of the batch, prompt tokens weighted; a float32 scalar."""
    mask = causal_mask(batch.tokens.shape[1], batch.tokens.device)
    logits = model(input_ids=batch.tokens, attention_mask=mask, use_cache=False).logits
    index = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)
    weights = torch.where(index >= batch.num_prompt[:, None], 1.0, prompt_weight)
    weights = weights * (index < batch.lengths[:, None])
    flat = logits[:, :-1].float().flatten(0, 1)
    losses = functional.cross_entropy(flat, batch.tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def answer_loss(samples: Sequence[Sample], options: FitArguments, loss_of: Callable[[Batch], Tensor]) -> float:
    """Mean loss of the samples' answer tokens, each counted once. loss_of: their mean in a batch."""
    total, count = 0.0, 0
    for indices in plan_batches([len(s.tokens) for s in samples], options.batch_tokens, 0):
        chosen = [samples[i] for i in indices]
        num = sum(len(s.tokens) - s.num_prompt for s in chosen)
        total += float(loss_of(collate(chosen).to(options.device))) * num
        count += num
    return total / count


def fit_target(
    model: nn.Module,
    data: ChatData,
    options: FitArguments,
    loss_of: LossOf,
    evaluate: Callable[[Sequence[Sample]], dict[str, float]],
    *,
    dropout: float,
    title: str,
) -> list[float]:
    """Train a model from scratch in place on the device; return the logged losses.

    evaluate: figures of the held-out samples, if there are any.
    """
    samples = encode_answers(vary(data.train, options.seed), data.tokenizer, data.max_length)
    samples += plain_texts(data.train, data.tokenizer, 0.1, data.max_length, options.seed)
    held = encode_answers(data.held, data.tokenizer, data.max_length) if data.held else []
    if options.should_save:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{title}: {size:,} parameters, {len(data.train)} rows, {len(data.held)} held out")
    model.to(options.device)
    add_dropout(model, dropout)
    return fit(
        model,
        samples,
        loss_of,
        options,
        title=title,
        evaluate=(lambda: evaluate(held)) if held else None,
    )


def train_target(
    data: ChatData, model: LlamaForCausalLM, options: FitArguments, arguments: argparse.Namespace
) -> list[float]:
    """Train the model in place and return the logged losses."""

    def evaluate(held: Sequence[Sample]) -> dict[str, float]:
        return {"validation_loss": answer_loss(held, options, lambda batch: target_loss(model, batch, 0.0))}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return target_loss(model, batch, arguments.prompt_weight)

    return fit_target(model, data, options, loss_of, evaluate, dropout=arguments.dropout, title="target")


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, bf16 weights, generation config and tokenizer as a Hugging Face model folder."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)
