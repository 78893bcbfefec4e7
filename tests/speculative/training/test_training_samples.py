"""Samples, batches and the tokenizer under them."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedTokenizerBase

from aerie.speculative.training.rows import Conversation, Turn
from aerie.speculative.training.samples import (
    LENGTH_STEP,
    Sample,
    collate,
    encode_answers,
    padded_length,
    plan_batches,
    plan_steps,
    prompt_tokens,
)
from tests.support.targets.llama import train_tokenizer


def test_the_tokenizer_round_trips_arbitrary_unicode(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    texts = ["", " a  b\n\t c ", "naïve 12345 $1,000.50", "日本語 🦅👩‍👩‍👧 \u200d\ufeff", "e\u0301 vs é", "\x00\x7f"]
    for _ in range(50):
        points = [rng.randrange(0x110000) for _ in range(20)]
        texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokens) == text


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=100: must be at least 262"):
        train_tokenizer(["a"], 100, 64)


def test_the_chat_template_opens_the_assistant_s_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = Conversation((Turn("system", "S"), Turn("user", "U")))
    text = tokenizer.decode(prompt_tokens(asked, tokenizer))
    assert text == "<|bos|><|system|>S<|end|><|user|>U<|end|><|assistant|>"


def test_each_assistant_turn_is_a_sample_that_ends_its_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = Conversation((Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")))
    first, second = encode_answers([talk], tokenizer, 64)
    assert tokenizer.decode(first.tokens[first.num_prompt :]) == "b<|end|>"
    assert tokenizer.decode(second.tokens[second.num_prompt :]) == "d<|end|>"
    assert "b<|end|>" in tokenizer.decode(second.tokens[: second.num_prompt])


def test_rows_that_are_all_too_long_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = Conversation((Turn("user", "a"), Turn("assistant", "b" * 50)))
    with pytest.raises(ValueError, match="max_length=5: none of 1 answers fits; raise it"):
        encode_answers([talk], tokenizer, 5)


def test_an_epoch_s_batches_hold_every_sample_once_within_the_budget() -> None:
    rng = random.Random(4)
    lengths = [rng.randrange(1, 500) for _ in range(237)]
    batches = plan_batches(lengths, 1100, seed=5)
    assert sorted(index for batch in batches for index in batch) == list(range(237))
    assert all(max(padded_length(lengths[i]) for i in batch) * len(batch) <= 1100 for batch in batches)
    assert batches == plan_batches(lengths, 1100, seed=5) != plan_batches(lengths, 1100, seed=6)


def test_steps_go_before_epochs_and_epochs_may_be_broken() -> None:
    lengths = [64] * 40
    assert len(plan_steps(lengths, 128, 0, epochs=1.0, steps=33)) == 33
    assert len(plan_steps(lengths, 128, 0, epochs=1.5, steps=None)) == 30


def test_anchors_are_where_a_chain_can_start_and_count_what_remains() -> None:
    samples = [Sample((1, 2, 3, 4, 5, 6, 7), 3), Sample((1, 2, 3, 4), 3)]
    batch = collate(samples)
    # Token n+1 must be the answer's (n >= 2) and token n+2 exist (n <= 4); the second text is over too soon.
    assert batch.tokens.shape == (2, LENGTH_STEP)
    assert batch.anchors.tolist() == [2, 3, 4]
    assert batch.remaining.tolist() == [3, 2, 1]


def test_full_batches_are_filled_up_with_rows_and_anchors_that_count_for_nothing() -> None:
    batch = collate([Sample((1, 2, 3, 4, 5, 6, 7), 3)], full_tokens=4 * LENGTH_STEP)
    assert batch.tokens.shape == (4, LENGTH_STEP)
    assert batch.lengths.tolist() == [7, 0, 0, 0]
    assert len(batch.anchors) == LENGTH_STEP
    assert batch.remaining[3:].sum() == 0
