"""The parsers by name. Adding one: docs/add-a-parser.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.http.config import OutputParserName
from cluster.http.parsers.harmony import HarmonyParser
from cluster.http.parsers.literal_calls import PythonCalls
from cluster.http.parsers.marked import CallIds, MarkedParser, random_id
from cluster.http.parsers.marks import CALLS_IN_THINKING, THINKING_MARKS
from cluster.http.parsers.output_parser import OutputParser, TextParser
from cluster.http.parsers.reasoning import ReasoningReader
from cluster.http.parsers.response_template import ResponseTemplateParser
from cluster.http.parsers.tool_calls import (
    CallReader,
    Llama3Calls,
    deepseek_calls,
    gemma_calls,
    glm_calls,
    hermes_calls,
    kimi_calls,
    listed_calls,
    minimax_calls,
    mistral_calls,
    seed_calls,
    xml_calls,
)
from cluster.http.requests.edge_request import EdgeRequest
from cluster.http.text.harmony_prompt import MARKS
from cluster.http.text.tokenizer import ChatTokenizer

_Maker = Callable[[EdgeRequest, str, ChatTokenizer], OutputParser]  # arguments: request, prompt text, tokenizer


def _marked(
    calls: Callable[[Sequence[Mapping[str, Any]]], CallReader] | None,
    ids: Callable[[str], CallIds] = lambda prompt: random_id,
) -> _Maker:
    """Return a maker of parsers by marks.

    calls: makes the reader of calls, given the tools in the chat template's form.
    ids: makes ids of calls, given the prompt.
    """

    def make(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
        marks = THINKING_MARKS[request.output_parser]
        reader = calls(request.tools) if calls is not None and request.reads_calls else None
        call = CALLS_IN_THINKING.get(request.output_parser, "") if reader is not None else ""
        reasoning = ReasoningReader(*marks, prompt, call) if request.separate_reasoning else None
        return MarkedParser(reasoning, reader, request.parallel_calls, ids(prompt))

    return make


def _kimi_ids(prompt: str) -> CallIds:
    """Return Kimi-K2's ids: `functions.NAME:N`, where N counts the calls of the whole conversation."""
    num_before = prompt.count("<|tool_call_begin|>")
    return lambda name, number: f"functions.{name}:{num_before + number}"


def _harmony(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
    names = {tool["function"]["name"] for tool in request.tools}
    # a grammar defines marks by characters, which other tokens may also produce
    ids = {} if request.is_constrained else tokenizer.added_ids(MARKS)
    return HarmonyParser(request.reads_calls, request.parallel_calls, ids, names, prompt)


def _response_template(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
    assert tokenizer.response_template is not None
    tools = request.tools if request.reads_calls else ()
    return ResponseTemplateParser(tokenizer.response_template, prompt, tools, request.parallel_calls)


PARSERS: dict[OutputParserName, _Maker] = {
    "text": lambda request, prompt, tokenizer: TextParser(),
    "think": _marked(None),
    "hermes": _marked(lambda tools: hermes_calls()),
    "llama3": _marked(lambda tools: Llama3Calls()),
    "mistral": _marked(lambda tools: mistral_calls()),
    "deepseek_v3": _marked(lambda tools: deepseek_calls()),
    "kimi_k2": _marked(lambda tools: kimi_calls(), _kimi_ids),
    "qwen3_coder": _marked(xml_calls),
    "glm45": _marked(glm_calls),
    "minimax_m2": _marked(minimax_calls),
    "seed_oss": _marked(seed_calls),
    "granite": _marked(lambda tools: listed_calls("<response>", "</response>")),
    "phi4_mini": _marked(lambda tools: listed_calls("<|/tool_call|>")),
    "gemma4": _marked(lambda tools: gemma_calls()),
    "pythonic": _marked(lambda tools: PythonCalls()),
    "harmony": _harmony,
    "response_template": _response_template,
}
