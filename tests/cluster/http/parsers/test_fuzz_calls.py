"""A short run of `tests.fuzz_calls`, whose module says what it checks, and the places that once took quadratic time or
more."""

import contextlib
import random
import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from aerie.cluster.http.answer import Answer
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.text.detokenizer import PrefixDetokenizer, StopMatcher
from aerie.cluster.http.text.json_text import nesting, parsed, parsed_repaired, repaired
from aerie.cluster.http.text.user_text import ControlTexts
from aerie.cluster.transport.messages import TokenDelta
from tests.fuzz_calls import MAX_RATIO, Repeated, case, check, check_time, ratio, repeated
from tests.support.fake_engine import small_tokenizer


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_keep_the_invariants(seed: int) -> None:
    for number in range(80):
        rng = random.Random(1000 * seed + number)
        check(case(rng), rng)


THINKS = "<think>hm "
SLOW: list[tuple[OutputParserName, str, str]] = [
    ("hermes", '<tool_call>{"name": "stop"', " "),
    ("hermes", '<tool_call>{"name": "stop", "arguments": {"a": "', "\\"),
    ("hermes", "x", " "),
    ("hermes", THINKS, "<tool_call>"),
    ("hermes", THINKS, " "),
    ("kimi_k2", "<|tool_call_begin|>", "a"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>", " "),
    ("qwen3_coder", "<tool_call><function=stop><parameter=a>", "</function> "),
    ("qwen3_coder", "<tool_call><function=stop><parameter=", "a"),
    ("gemma4", "<|tool_call>call:stop{", " "),
    ("pythonic", "[stop(a=", "["),
    ("harmony", "<|start|>", " "),
    ("harmony", "<|start|>assistant<|channel|>", "<|message|>"),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("name", "start", "unit"), SLOW)
def test_time_is_linear(name: OutputParserName, start: str, unit: str, whole: bool) -> None:
    check_time(Repeated(name, start, unit, whole))


@pytest.mark.parametrize("seed", range(4))
def test_time_is_linear_at_random_places(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        check_time(repeated(rng))


def _stops(text: str) -> None:
    matcher = StopMatcher([text[:40] + "!", "a" * 60 + "!"])
    for letter in text:
        matcher.push(letter)


def _decodes(text: str) -> None:
    tokenizer: Tokenizer = small_tokenizer()
    answer = Answer(PrefixDetokenizer(tokenizer, frozenset(), ()), ["never"])
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        answer.push(TokenDelta("", (token,)))


def _refused(read: Callable[[str], object]) -> Callable[[str], None]:
    def tries(text: str) -> None:
        with contextlib.suppress(ValueError):
            read(text)

    return tries


AROUND: list[Callable[[str], object]] = [
    _stops,
    _decodes,
    _refused(parsed),
    _refused(parsed_repaired),
    repaired,
    lambda text: nesting(text.encode()),
    lambda text: ControlTexts(["<think>", "<tool_call>", "[a]"]).places(text, True),
]


@pytest.mark.parametrize("unit", [" ", '"', "{", "\\", "a", "\\ud83d", "<think"])
@pytest.mark.parametrize("around", AROUND)
def test_what_is_around_the_parsers_takes_linear_time_too(around: Callable[[str], object], unit: str) -> None:
    def seconds(num: int) -> float:
        started = time.process_time()
        around(unit * num)
        return time.process_time() - started

    assert ratio(seconds, 20_000 // len(unit)) < MAX_RATIO
