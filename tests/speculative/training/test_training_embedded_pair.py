"""The committed pair: it loads with public tools, answers, ends its answers, and the draft guesses them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aerie.speculative.training.block_kinds import load_block_head
from aerie.speculative.training.eagle3 import load_draft
from aerie.speculative.training.generation import generate_answers
from aerie.speculative.training.losses import measure_acceptance
from aerie.speculative.training.rows import Conversation, Turn
from aerie.speculative.training.samples import Sample, answer_prompts
from tests.support import MODELS

WORD_PROBLEM = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs $3. "
    "How much money does the baker make in a day?"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODELS / "target")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()


def ask(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> Sample:
    prompts = answer_prompts([Conversation((Turn("user", question),))], tokenizer)
    (answer,) = generate_answers(
        target, tokenizer, prompts, temperature=0, max_new_tokens=200, batch_size=1, seed=0, progress=False
    )
    return answer


def test_the_target_greets_back_and_ends_its_turn(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    answer = ask(target, tokenizer, "Hello")
    assert tokenizer.decode(answer.tokens[answer.num_prompt :]) == "Hello! How can I help you today?<|end|>"


@pytest.mark.slow  # `examples/offline.py` asks it, `tests.deploy.test_evaluate` measures its draft
def test_the_target_works_a_word_problem_to_a_result_and_the_draft_follows(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    answer = ask(target, tokenizer, WORD_PROBLEM)
    text = tokenizer.decode(answer.tokens[answer.num_prompt :])
    assert "12" in text and "####" in text and text.endswith("<|end|>")
    head, vocabulary = load_draft(MODELS / "draft", target)
    tally = measure_acceptance(head, target, vocabulary, [answer], 3, 2048)
    # Mean over 100 GSM8K test prompts is 3.0; a head that learnt nothing gives 1.0 to 1.3.
    assert tally.acceptance_length() > 2.0
    for method in ("dspark", "dflash2"):  # their means over 64 prompts are 4.1 and 4.2
        block, own = load_block_head(MODELS / method, method, target)
        tally = measure_acceptance(block, target, own, [answer], block.method.form.max_depth, 2048)
        assert tally.acceptance_length() > 2.5, method
