"""`continue_final_message`: the prompt ends with the last message's text, whatever the text is."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from aerie.cluster.http.text.chat_template import ChatTemplate, ContinuationError
from aerie.cluster.http.text.harmony_prompt import HarmonyPrompt
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.fake_engine import CHATML, EOS, small_tokenizer

TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
TEMPLATES = {"as it is": CHATML, "trimmed": TRIMMED, "Llama 3": LLAMA3, "with reasoning": REASONING}
ASK = {"role": "user", "content": "assistant id end <|im_end|> < i"}
PARTS = ["<", "|", "<|", "i", "id", "im", "end", "<|im_end|>", "assistant", "\n", " ", "é", "</think>", "\ufdd0", "x"]


def tokenizer_of(template: str) -> ChatTokenizer:
    tokenizer: Tokenizer = small_tokenizer()
    return ChatTokenizer(tokenizer, ChatTemplate(template, {}), (tokenizer.token_to_id(EOS),))


EDGES = {name: tokenizer_of(template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
@hypothesis.given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_prompt_ends_with_the_text_as_in_transformers(name: str, text: str) -> None:
    messages = [ASK, {"role": "assistant", "content": text}]
    found = EDGES[name].render(messages, False, continued=True)
    (expected,), _ = render_jinja_template([messages], chat_template=TEMPLATES[name], continue_final_message=True)
    assert found.text == expected and found.text.rstrip().endswith(text.strip())


def test_reasoning_without_an_answer_is_continued() -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "It is ", "reasoning": "It is "}
    found = EDGES["with reasoning"].render([ASK, turn | {"thinking": "It is "}], False, continued=True)
    assert found.text.endswith("<|im_start|>assistant\n<think>\nIt is ")
    harmony = ChatTokenizer(small_tokenizer(), HarmonyPrompt("", {}), (0,))
    for field, head in (("content", "final"), ("reasoning_content", "analysis")):
        turn = {"role": "assistant", "content": "", "reasoning": "<|en", "thinking": "<|en"} | {field: "<|en"}
        assert harmony.render([ASK, turn], False, continued=True).text.endswith(f"<|channel|>{head}<|message|><|en")


def test_a_message_that_the_template_does_not_show_is_refused() -> None:
    for template in ("{{ messages[0].content }}", "{{ messages[-1].content[:2] }}"):
        with pytest.raises(ContinuationError, match="shows as it is"):
            tokenizer_of(template).render([ASK, {"role": "assistant", "content": "Well"}], False, continued=True)


def test_a_message_with_images_is_continued_after_its_text() -> None:
    shown = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    edge = tokenizer_of("{% for m in messages %}<|im_start|>" + shown + "<|im_end|>{% endfor %}")
    text, image = {"type": "text", "text": "It shows "}, {"type": "image"}
    found = edge.render([{"role": "assistant", "content": [image, text]}], False, continued=True)
    assert found.text == "<|im_start|><image>It shows "
    with pytest.raises(ContinuationError, match="ends with text"):
        edge.render([{"role": "assistant", "content": [text, image]}], False, continued=True)
