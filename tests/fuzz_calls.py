"""Fuzzes the readers of reasoning and tool calls: `python -m tests.fuzz_calls --minutes 10 [--seed N]`.

Answers of every family of `aerie.cluster.http.parsers.families.FAMILIES`: prose, reasoning, and calls, well-formed and
malformed, ended anywhere. Every word is unique. It checks:

- arguments: all arguments are JSON objects, whatever the finish reason.
- text: no word is shown twice. Without calls, content and reasoning are the answer, up to white space and marks. With
  `finish_reason: tool_calls`, each word outside of calls is shown exactly once, in order.
- pieces: whole and in any pieces, the reply is the same.
- time: the time for 2n equal texts is at most 2.5 times that for n, at every place of an answer.
"""

import argparse
import functools
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.cluster.http.answer import EndReason, Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.output_parser import HeldReasoning, ReplyDelta, joined_deltas
from aerie.cluster.http.parsers.reasoning import ReasoningTokens
from aerie.cluster.http.parsers.table import parser_of
from aerie.cluster.http.text.json_text import parsed
from tests.cluster.http.parsers.written_calls import Words, call, malformed, marks_of
from tests.support.fake_engine import chat_tokenizer

READ: list[OutputParserName] = [name for name in FAMILIES if name != "response_template"]
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("look_up", {"text": {"type": "string"}, "count": {"type": "integer"}, "rows": {"type": "array"}}),
        ("stop", {}),
    )
)
_tokenizer = functools.cache(chat_tokenizer)


@dataclass(frozen=True)
class Request:
    """The fields of an `EdgeRequest` that parsers read."""

    output_parser: OutputParserName
    separate_reasoning: bool = True
    reads_calls: bool = True
    parallel_calls: bool = True
    is_constrained: bool = False
    tools: tuple[Any, ...] = TOOLS


@dataclass(frozen=True)
class Reply:
    """What a client gets."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish: str | None


def read(name: OutputParserName, pieces: Sequence[str], finish: EndReason, prompt: str = "", begun: str = "") -> Reply:
    """Return the reply to an answer in these pieces. begun: the text of the message that it continues."""
    parser = parser_of(Request(name), prompt, _tokenizer(), begun)  # type: ignore[arg-type]
    deltas: list[ReplyDelta] = [parser.push(Piece(text, (0,))) for text in pieces]
    whole, calls = joined_deltas([*deltas, parser.push(Piece("", (0,), finish=finish))])
    named = tuple((call.function.name, call.function.arguments) for call in calls)
    return Reply(whole.content, whole.reasoning, named, whole.finish)


@dataclass(frozen=True)
class Case:
    """One answer. outside: words that are not in calls."""

    name: OutputParserName
    text: str
    outside: tuple[str, ...]
    finish: EndReason
    prompt: str = ""


def case(rng: random.Random) -> Case:
    """Return a random answer."""
    name, words = rng.choice(READ), Words()
    family = FAMILIES[name]
    parts: list[str] = []
    outside: list[str] = []

    def prose() -> None:
        said = [words.word() for _ in range(rng.randrange(3))]
        outside.extend(said)
        parts.append(rng.choice([" ", "\n", "\n\n"]).join(["", *said, ""]))

    prompt = ""
    if family.thinking is not None and rng.random() < 0.5:
        opens, closes = family.thinking
        prompt = opens if rng.random() < 0.3 else ""
        parts.append("" if prompt else opens)
        prose()
        if rng.random() < 0.2:
            parts.append(rng.choice(marks_of(name)) + " " + words.word() + " ")
        if rng.random() < 0.6:
            parts.append(closes)
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.6 and name not in ("llama3", "pythonic"):
            if name == "harmony":
                parts.append("<|start|>assistant<|channel|>final<|message|>")
            prose()
            if name == "harmony":
                parts.append("<|end|>")
        called = call(rng, words, name)
        parts.append(malformed(rng, words, name, called) if rng.random() < 0.6 else called)
    text = "".join(parts)
    if rng.random() < 0.2:
        text = text[: rng.randrange(len(text) + 1)]
    outside = [word for word in outside if text.count(word) == 1]
    return Case(name, text, tuple(outside), rng.choice(["stop", "stop", "length"]), prompt)


def pieces(rng: random.Random, text: str) -> list[str]:
    """Cut a text at random places."""
    found, at = [], 0
    longest = rng.choice([1, 3, 8, 40])
    while at < len(text):
        size = rng.randint(1, longest)
        found.append(text[at : at + size])
        at += size
    return found


_WORD = re.compile(r"w\d+z")


def check(found: Case, rng: random.Random) -> None:
    """Raise AssertionError if a reply breaks an invariant."""
    reply = read(found.name, [found.text], found.finish, found.prompt)
    for split in ([*found.text], pieces(rng, found.text)):
        assert read(found.name, split, found.finish, found.prompt) == reply, f"pieces {split}"
    for _, arguments in reply.calls:
        assert isinstance(parsed(arguments), dict), arguments
    assert reply.finish != "tool_calls" or (reply.calls and found.finish == "stop")
    shown = reply.reasoning + " " + reply.content
    everything = shown + " ".join(arguments for _, arguments in reply.calls)
    counts = {word: everything.count(word) for word in _WORD.findall(found.text)}
    assert all(count <= found.text.count(word) for word, count in counts.items()), f"shown twice: {counts}"
    if not reply.calls and found.name != "harmony":
        assert _bare(found, shown) == _bare(found, found.text), "lost"
    if reply.finish == "tool_calls":
        assert all(counts[word] == 1 for word in found.outside), f"lost: {counts} {found.outside}"
        order = [word for word in _WORD.findall(shown) if word in found.outside]
        assert order == sorted(order, key=lambda word: int(word[1:-1])), order


def _bare(found: Case, text: str) -> str:
    """The text without white space and marks."""
    text, before = "".join(text.split()), ""
    while text != before:
        before = text
        for mark in marks_of(found.name):
            text = text.replace("".join(mark.split()), "")
    return text


# Repeated, with the marks of a family and parts of them.
_UNITS = [
    *(
        " ",
        "\n",
        "\t",
        '"',
        "'",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "\\",
        "a",
        "1",
        "-",
        "<",
        ">",
        "`",
        ",",
        ":",
        ";",
        "|",
        "/",
    ),
    *('{"a":', "[1,", '"a",', '{"name":', "\\u", "\\ud83d", '\\"', "to=", "é"),
]
MAX_RATIO = 2.5
_MIN_S = 0.004  # below, times are noise
_MAX_CHARACTERS = 200_000


@dataclass(frozen=True)
class Repeated:
    """An answer that repeats `unit` after `start`. whole: in one piece; else a piece for each unit."""

    name: OutputParserName
    start: str
    unit: str
    whole: bool

    def seconds(self, num: int) -> float:
        """Return the CPU time of an answer with `num` units."""
        texts = [self.start, self.unit * num] if self.whole else [self.start, *[self.unit] * num]
        parser = parser_of(Request(self.name), "", _tokenizer())  # type: ignore[arg-type]
        answer = [Piece(text, (0,)) for text in texts]
        tokens = ReasoningTokens()
        held = HeldReasoning()
        started = time.process_time()
        deltas = []
        for piece in [*answer, Piece("", (0,), finish="stop")]:
            deltas.append(parser.push(piece))
            tokens.push(deltas[-1], [piece.text.encode()])
            held.push(deltas[-1])
        joined_deltas(deltas)
        return time.process_time() - started


def repeated(rng: random.Random) -> Repeated:
    """Return a random place of an answer, and a text to repeat there."""
    name = rng.choice(READ)
    thinking, called = FAMILIES[name].thinking, call(rng, Words(), name)
    start = rng.choice(["", "x "])
    if thinking is not None and rng.random() < 0.5:
        start = thinking[0] + "hm " + rng.choice(["", thinking[1]])
    start += called[: rng.randrange(len(called) + 1)]
    mark = rng.choice(marks_of(name) or ["<"])
    unit = rng.choice([*_UNITS, mark, mark, mark[:-1], mark[: len(mark) // 2], mark[:2]]) or mark
    return Repeated(name, start, unit, rng.random() < 0.3)


def ratio(seconds: Callable[[int], float], max_num: int) -> float:
    """Return how much longer twice as many units take; 0 if they take no time worth measuring. Noise cannot raise it:
    the least of six."""
    num = 64
    while seconds(num) < _MIN_S:
        num *= 2
        if num > max_num:
            return 0.0
    found = 9.0
    for _ in range(6):
        found = min(found, seconds(2 * num) / min(seconds(num) for _ in range(2)))
        if found < MAX_RATIO:
            break
    return found


def check_time(found: Repeated) -> None:
    """Raise AssertionError if the time is not linear."""
    slower = ratio(found.seconds, _MAX_CHARACTERS // len(found.unit))
    assert slower < MAX_RATIO, f"twice as many take {slower:.1f} times as long"


def _show(kind: str, seed: int, found: object, error: Exception) -> None:
    print(f"{kind} {seed}: {type(error).__name__}: {str(error)[:300]}\n    {found}", flush=True)


def main() -> int:
    """Fuzz for some minutes; print what fails."""
    options = argparse.ArgumentParser(description="Fuzz the readers of reasoning and tool calls.")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0, help="of the first answer; the others count up")
    given = options.parse_args()
    end, seed, num_failed, num_times = time.monotonic() + 60 * given.minutes, given.seed, 0, 0
    while time.monotonic() < end:
        rng = random.Random(seed)
        answer = case(rng)
        try:
            check(answer, rng)
        except Exception as error:
            num_failed += 1
            _show("answer", seed, answer, error)
        if seed % 8 == 0:
            place = repeated(rng)
            num_times += 1
            try:
                check_time(place)
            except AssertionError as error:
                num_failed += 1
                _show("time", seed, place, error)
        seed += 1
    print(f"{seed - given.seed} answers, {num_times} times, {num_failed} failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
