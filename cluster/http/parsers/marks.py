"""Marks in text that comes in pieces."""

from typing import NamedTuple

from cluster.http.config import OutputParserName
from cluster.http.text import harmony_prompt


class Cut(NamedTuple):
    """Text cut at the first mark. after: what follows the mark; without one, the end that may begin a mark."""

    before: str
    mark: str | None
    after: str


def cut(text: str, marks: tuple[str, ...]) -> Cut:
    """`text` at the earliest of `marks`, none of which begins another; white space in front of one stays with it."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return Cut(text[:at], mark, text[at + len(mark) :])
    start = len(text)
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= at < start:
            if mark.startswith(text[at:]):
                start = at
            at = text.find(mark[0], at + 1)
    start = len(text[:start].rstrip())
    return Cut(text[:start], None, text[start:])


_THINK = ("<think>", "</think>")
# What opens and closes thinking, for parsers whose forms put it between two marks.
THINKING_MARKS: dict[OutputParserName, tuple[str, str]] = {
    "think": _THINK,
    "hermes": _THINK,
    "llama3": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "deepseek_v3": _THINK,
    "qwen3_coder": _THINK,
}
# How calls begin of models that may call from within their thinking (Qwen3.5).
CALLS_IN_THINKING: dict[OutputParserName, str] = {"qwen3_coder": "<tool_call>\n<function="}
# The marks that a parser looks for. Where they are special tokens, the text that the parser gets has them anyway; None:
# it gets all special tokens.
MARKS: dict[OutputParserName, tuple[str, ...] | None] = {
    "text": (),
    "think": _THINK,
    "hermes": (*_THINK, "<tool_call>", "</tool_call>"),
    "llama3": (*_THINK, "<|python_tag|>"),
    "mistral": (*THINKING_MARKS["mistral"], "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek_v3": (
        *_THINK,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": (*_THINK, "<tool_call>", "</tool_call>"),
    "harmony": harmony_prompt.MARKS,
    "response_template": None,
}
