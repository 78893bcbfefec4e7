"""Finds marks in streamed text: the strings around reasoning and tool calls, such as `<think>` and `<tool_call>`."""

from typing import NamedTuple

from cluster.http.config import OutputParserName
from cluster.http.text import harmony_prompt
from cluster.http.text.stop_strings import start_of_partial


class Cut(NamedTuple):
    """Text cut at the first mark. after: the text after the mark; without a mark, the end that may start one."""

    before: str
    mark: str | None
    after: str


def cut(text: str, marks: tuple[str, ...]) -> Cut:
    """Cut `text` at the earliest of `marks`, none of which is a prefix of another. White space before a mark stays with
    it."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return Cut(text[:at], mark, text[at + len(mark) :])
    start = len(text[: start_of_partial(text, marks)].rstrip())
    return Cut(text[:start], None, text[start:])


_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
# Opening and closing marks of reasoning.
THINKING_MARKS: dict[OutputParserName, tuple[str, str]] = {
    "think": _THINK,
    "hermes": _THINK,
    "llama3": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "deepseek_v3": _THINK,
    "qwen3_coder": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": _THINK,
    "phi4_mini": _THINK,
    "gemma4": ("<|channel>thought", "<channel|>"),
    "pythonic": _THINK,
}
# Start of calls, for models that may call within their reasoning (Qwen3.5).
CALLS_IN_THINKING: dict[OutputParserName, str] = {"qwen3_coder": "<tool_call>\n<function="}
# A parser's marks, which its text contains even if they are special tokens. None: it contains all special tokens.
MARKS: dict[OutputParserName, tuple[str, ...] | None] = {
    "text": (),
    "think": _THINK,
    "hermes": (*_THINK, *_TOOL_CALL),
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
    "qwen3_coder": (*_THINK, *_TOOL_CALL),
    "glm45": (*_THINK, *_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": (
        *_THINK,
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": (*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": (*THINKING_MARKS["seed_oss"], "<seed:tool_call>", "</seed:tool_call>"),
    "granite": (*_THINK, "<|tool_call|>", "<response>", "</response>"),
    "phi4_mini": (*_THINK, "<|tool_call|>", "<|/tool_call|>"),
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": (*_THINK, "<|python_start|>", "<|python_end|>"),
    "harmony": harmony_prompt.MARKS,
    "response_template": None,
}
