"""Offline generation with the embedded pair: what comes back, and that a refused prompt leaves the engine usable."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import ConfigError
from cluster.http.text.chat_template import ChatTemplateError
from deploy.offline import LLM, SamplingParams
from workers.scheduling.request import FinishReason, RequestTooLargeError

GREETING = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM("eagle", tensor_parallel=1) as llm:
        yield llm


def test_chat_answers_in_order_and_ends_at_the_models_end_of_turn(llm: LLM) -> None:
    problem = [{"role": "user", "content": "Tom has 3 bags with 4 apples each. How many apples does he have?"}]
    greeting, solved = llm.chat([GREETING, problem], SamplingParams(max_tokens=60, temperature=0.0))
    assert greeting.text == "Hello! How can I help you today?"
    assert greeting.finish_reason is FinishReason.STOP and greeting.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert "apples" in solved.text
    assert solved.acceptance_length is not None and solved.acceptance_length > 1.2


def test_generation_continues_a_text(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, speculative=False)
    (completion,) = llm.generate(["Question: What is 2 + 2? Answer:"], sampling)
    assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 9
    assert completion.acceptance_length is None


def test_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestTooLargeError, match="2048"):
        llm.generate(["short", "seven " * 4000])
    assert llm.chat([GREETING])[0].text == "Hello! How can I help you today?"


def test_messages_that_the_template_refuses(llm: LLM) -> None:
    with pytest.raises(ChatTemplateError, match="role tool is unknown"):
        llm.chat([[{"role": "tool", "content": "x"}]])


def test_configuration_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="absent: no such file; give a Serve config file or one of deepseek-v3"):
        LLM(Path("absent"))
    with pytest.raises(ConfigError, match="tensor_parallel=3"):
        LLM("eagle", tensor_parallel=3)
