"""A small tokenizer with harmony's special tokens, and gpt-oss's template as far as it is looked at."""

from datetime import date

from tokenizers import Tokenizer

from aerie.cluster.http.text.harmony_prompt import MARKS, STOPS, HarmonyPrompt
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.fake_engine import small_tokenizer

# What tells the published template; it is not rendered.
SOURCE = "<|start|><|channel|><|message|> # Valid channels: {{ reasoning_effort }} namespace functions {"
DAY = date(2025, 6, 28)


def harmony_tokenizer() -> Tokenizer:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(list(MARKS))
    return tokenizer


def harmony_chat_tokenizer() -> ChatTokenizer:
    tokenizer = harmony_tokenizer()
    ends = tuple(tokenizer.token_to_id(text) for text in STOPS)
    return ChatTokenizer(tokenizer, HarmonyPrompt(SOURCE, {}, lambda: DAY), ends)
