"""Trains the small target's tokenizer: byte-level BPE with single digits, role marks and a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from speculative.training.errors import TrainingError

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLE_MARKS = ("<|system|>", "<|user|>", "<|assistant|>")
NUM_BYTES = 256

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('role ' ~ message['role'] ~ ' is unknown: use system, user or assistant') -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


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
