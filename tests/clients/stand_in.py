"""A server for tests of peers that assert what a capable model answers: the product's HTTP application over an engine
that thinks, calls tools and answers as these tests ask it to.

    python -m tests.clients.stand_in PORT

`tests.clients.peer_suites` starts it. Its tokenizer is the embedded pair's; its chat template writes the conversation
as JSON, which the engine reads back. Calls are in Hermes' form, reasoning is between `<think>` and `</think>`.
"""

import contextlib
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import uvicorn
import xgrammar

from aerie.cluster.http.app import build_app
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from tests.support import MODELS
from tests.support.embedded import eos_token_ids
from tests.support.fake_engine import FakeEngine, logprobs_of, prompt_deltas

FOLDER = MODELS / "target"
ALIASES = ("claude-3-7-sonnet-latest", "HuggingFaceH4/zephyr-7b-beta", "default")
# Marks of Hermes' form and of thinking show the family; the engine reads the JSON.
TEMPLATE = (
    "{# <tool_call> arguments <think> </think> #}"
    "{% set thinks = enable_thinking is not defined or enable_thinking %}"
    "{{ {'messages': messages, 'tools': tools or [], 'thinks': thinks} | tojson }}"
)
# What the last question or result contains, and the calls or the text that tests want for it.
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("Dallas", "get_current_weather", {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}),
    ("Orlando", "get_current_weather", {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}),
    ("weather is in Berlin", "get_current_weather", {"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}),
    ("next 5 days", "get_forecast", {"city": "Berlin", "country": "Germany", "days": 5, "unit": "fahrenheit"}),
    ("Boston", "get_current_weather", {"location": "Boston, MA"}),
    ("Berlin", "get_weather", {"location": "Berlin"}),
    ("New York", "get_current_weather", {"location": "New York"}),
    ("Paris", "get_weather", {"location": "Paris"}),
    ("7355608", "get_product_info", {"product_id": 7355608, "inserted": True}),
    ("What time", "get_current_time", {}),
    ("get_time for Tokyo", "get_time", {"location": "Tokyo"}),
    ("current time in New York", "get_time", {"city": "New York"}),
    ("123 + 456", "calculator", {"expression": "123 + 456"}),
    ("7 * 8", "calculator", {"expression": "7 * 8"}),
    ("(3+5)", "add", {"a": 3, "b": 5}),
    ("sum 5 and 7", "add", {"a": 5, "b": 7}),
    ("compute 5 - 7", "sub", {"int_a": 5, "int_b": 7}),
    ("Paris in celsius", "get_current_weather", {"city": "Paris", "unit": "celsius"}),
    ("Paris in celsius", "get_weather", {"city": "Paris", "unit": "celsius"}),
    ("stock price for IBM", "get_stock_price", {"ticker": "IBM"}),
]
RANGE = {"start_time": "2026-01-26", "end_time": "2026-01-27"}
AFTER_RESULTS = [("2026-01-26T09", "get_acme_region_name_for_transaction_id", RANGE)]
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Australia": "Canberra",
}
TEXTS: list[tuple[str, str]] = [
    *((f"capital of {country}", f" The capital is {city}.") for country, city in CAPITALS.items()),
    (r"13 \* 24", "13 * 24 is 312. QED."),
    ("Multiply the result by 2", "30. QED."),
    (r"1\+1.*without any other text", "2"),
    (r"1 ?\+ ?1", '{"result": 2}'),
    (r"17 multiplied by 23[^\n]*\nA:$", " 391"),
    (r"primary colors", " yellow"),
    ("another one with a different name", '{"name": "Bea", "age": 41}'),
    ("science fair on Friday", '{"event_name": "Science Fair", "date": "Friday", "participants": ["Alice", "Bob"]}'),
]
THOUGHT = "<think>\nBefore I answer, I think about this: {}\n</think>\n\n"
SENTENCE = "This is a plain answer of several words, as long as anybody may want it to be.\n"


@dataclass(frozen=True)
class Conversation:
    """What the template wrote."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinks: bool

    @cached_property
    def last(self) -> str:
        """The text of the last message."""
        return _text_of(self.messages[-1])


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def intended(talk: Conversation) -> str:
    """What a capable model would answer."""
    if calls := calls_for(talk):
        written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    texts = [_text_of(message) for message in talk.messages]
    if talk.messages[-1]["role"] == "tool":
        told = [text for message, text in zip(talk.messages, texts, strict=True) if message["role"] == "tool"]
        return f"The tools say: {' '.join(told)}"
    if "name again" in talk.last:
        return re.findall(r"name is (?!not)(\w+)", " ".join(texts))[-1]
    return _text_for(talk.last, SENTENCE * 2)


def _text_for(asked: str, otherwise: str) -> str:
    return next((text for pattern, text in TEXTS if re.search(pattern, asked, re.DOTALL)), otherwise)


def calls_for(talk: Conversation) -> list[tuple[str, dict[str, Any]]]:
    """The calls that a question is answered with, of tools that have a rule's arguments."""
    properties = {tool["function"]["name"]: tool["function"]["parameters"].get("properties", {}) for tool in talk.tools}
    return [
        (name, arguments)
        for asked, name, arguments in (AFTER_RESULTS if talk.messages[-1]["role"] == "tool" else CALLS)
        if name in properties and arguments.keys() <= properties[name].keys() and asked in talk.last
    ]


class StandIn:
    """A script of `FakeEngine`."""

    def __init__(self) -> None:
        vocabulary = Vocabulary(FOLDER)
        self._raw, self._vocab_size = vocabulary.tokenizer, vocabulary.size
        self.tokenizer = ChatTokenizer(self._raw, ChatTemplate(TEMPLATE, {}), eos_token_ids())
        self._compiler = GrammarCompiler(vocabulary)
        self._rng = random.Random(0)
        texts = [self._raw.decode([token], skip_special_tokens=False) for token in range(self._vocab_size)]
        self._closing = {token for token, text in enumerate(texts) if text in ('"', "}", "]", ",")}
        self._words = {token for token, text in enumerate(texts) if text.isascii() and text.isalnum()}
        self._blank = {token for token, text in enumerate(texts) if not text.strip()}

    def __call__(self, prompt: list[int], sampling: SamplingParams) -> Iterator[TokenDelta]:
        yield from prompt_deltas(prompt, sampling)
        text = self._text(self._raw.decode(prompt, skip_special_tokens=False), sampling)
        tokens = self._raw.encode(text, add_special_tokens=False).ids
        at = 0
        limit = sampling.max_tokens
        tokens = [*tokens, eos_token_ids()[0]]
        while at < min(limit, len(tokens)):
            chosen = tuple(tokens[at : min(limit, at + self._rng.randint(1, 6))])
            at += len(chosen)
            finish = "stop" if at == len(tokens) else "length" if at == limit else None
            yield TokenDelta("", chosen, finish=finish, logprobs=logprobs_of(chosen, sampling), cached_tokens=0)

    def _text(self, prompt: str, sampling: SamplingParams) -> str:
        start = prompt.find('{"messages"')
        found, end = None, 0
        with contextlib.suppress(ValueError):  # a message that is continued is cut in its text
            found, end = json.JSONDecoder().raw_decode(prompt[start:]) if start >= 0 else (None, 0)
        talk = Conversation(**found) if found else None
        answer = _text_for(prompt, SENTENCE * 40) if talk is None else intended(talk)
        has_thought = "</think>" in prompt[start + end :]  # the thinking budget ended the thought
        thought = THOUGHT.format(talk.last[:80]) if talk is not None and talk.thinks and not has_thought else ""
        thought = thought if sampling.max_tokens > 16 else ""
        if sampling.grammar is None:  # JSON only for those who ask for it
            return thought + (SENTENCE if answer.startswith("{") else answer)
        matcher = xgrammar.GrammarMatcher(self._compiler.compile(sampling.grammar))
        for begun in (thought + answer, answer, f"{thought}<tool_call>", "<tool_call>", thought, ""):
            if matcher.accept_string(begun):
                return begun + self._walk(matcher)
            matcher.reset()
        raise AssertionError("the empty text begins every answer")

    def _walk(self, matcher: xgrammar.GrammarMatcher) -> str:
        """A short text that ends what the grammar has begun."""
        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        tokens: list[int] = []
        while len(tokens) < 4096:
            matcher.fill_next_token_bitmask(mask)
            allowed = _allowed(mask)
            if allowed & set(eos_token_ids()):
                break
            chosen = allowed & self._closing if self._rng.random() < 0.4 else set()
            chosen = chosen or allowed & self._words or allowed & self._closing or allowed - self._blank or allowed
            tokens.append(self._rng.choice(sorted(chosen)))
            assert matcher.accept_token(tokens[-1])
        return str(self._raw.decode(tokens, skip_special_tokens=False))


def _allowed(mask: torch.Tensor) -> set[int]:
    bits = (mask[0].unsqueeze(-1) >> torch.arange(32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def main() -> None:
    """The command."""
    script = StandIn()
    config = EdgeConfig(
        served_model_name="stand-in", max_model_len=32768, output_parser="hermes", model_aliases=list(ALIASES)
    )
    app = build_app(config, script.tokenizer, FakeEngine(script))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", lifespan="off", ws="none")


if __name__ == "__main__":
    main()
