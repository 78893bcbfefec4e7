"""Chooses and makes the parser of one answer: by the table of families, or by transformers' own parser for checkpoints
with a response template in tokenizer_config.json. That parser needs no torch. Adding a parser: docs/add-a-parser.md."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.harmony import HarmonyParser
from aerie.cluster.http.parsers.json_calls import CallPart
from aerie.cluster.http.parsers.output_parser import (
    CallDeltas,
    CallIds,
    OutputParser,
    ReplyDelta,
    TextParser,
    random_id,
)
from aerie.cluster.http.parsers.reasoning import ReasoningReader, is_reasoning
from aerie.cluster.http.parsers.tool_calls import StreamedCalls
from aerie.cluster.http.requests.edge_request import EdgeRequest
from aerie.cluster.http.text.harmony_prompt import MARKS
from aerie.cluster.http.text.json_text import parsed_repaired
from aerie.cluster.http.text.tokenizer import ChatTokenizer

# Names that response templates give to the part of an answer that is reasoning.
REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})


class _EventParser(Protocol):
    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class ResponseTemplateParser:
    """Reads answers by the checkpoint's `response_template`, with transformers' parser.

    template: the checkpoint's template.
    prompt: text of the prompt.
    tools: in the chat template's form; none: calls are not parsed.
    parallel: whether an answer may have several calls; else further ones are dropped.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], parallel: bool
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: _EventParser = ResponseParser(dict(template), prefix=prompt, tools=[dict(tool) for tool in tools])
        self._with_calls = bool(tools)
        self._deltas = CallDeltas(parallel)

    def push(self, piece: Piece) -> ReplyDelta:
        """Return what the next piece of output adds to the reply (`OutputParser.push`)."""
        events = self._parser.feed(piece.text) if piece.text else []
        if piece.finish is not None:
            events = [*events, *self._last_events()]
        content = reasoning = ""
        parts: list[CallPart] = []
        for event in events:
            name = event["field"]
            if event["type"] == "region_chunk" and not event["dirty"]:
                content += event["text"] if name == "content" else ""
                reasoning += event["text"] if name in REASONING_FIELDS else ""
            elif event["type"] == "region_close" and name == "tool_calls":
                parts += _parts(event["value"])
        deltas = self._deltas.of(parts) if self._with_calls else ()
        finish = "tool_calls" if piece.finish == "stop" and self._deltas.any else piece.finish
        return ReplyDelta(content, reasoning, deltas, finish)

    def _last_events(self) -> list[dict[str, Any]]:
        try:
            return self._parser.finalize()[1]
        except ValueError:  # an answer cut by length lacks parts that the template requires
            return []


def _parts(value: Any) -> list[CallPart]:
    """Return the calls in a field's value, which is one call or several."""
    parts = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if isinstance(function.get("name"), str) and (call_arguments := _object(written)) is not None:
            parts.append(CallPart(function["name"], call_arguments))
    return parts


def _object(written: str) -> str | None:
    """Return the JSON object in a text that a model wrote; None without one. Without any arguments: an empty one."""
    try:
        value = parsed_repaired(written) if written.strip() else None
        return (
            json.dumps({} if value is None else value, ensure_ascii=False)
            if not value or isinstance(value, dict)
            else None
        )
    except ValueError:
        return None


class MarkedParser:
    """Parses one answer. reasoning, calls: readers; None for answers without. ids: makes ids of calls."""

    def __init__(
        self, reasoning: ReasoningReader | None, calls: StreamedCalls | None, parallel: bool, ids: CallIds = random_id
    ) -> None:
        self.reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._deltas = CallDeltas(parallel, ids)

    def push(self, piece: Piece) -> ReplyDelta:
        """Return what the next piece of output adds to the reply (`OutputParser.push`)."""
        end = piece.finish is not None
        reasoning, content = "", piece.text
        if self.reasoning is not None:
            reasoning, content = self.reasoning.take(content, end)
        if self._calls is None:
            return ReplyDelta(content, reasoning, finish=piece.finish)
        content, parts = self._calls.take(content, end)
        deltas = self._deltas.of(parts)
        is_cut = self._calls.is_cut and (self._parallel or self._calls.num_calls == 1)  # in a call that is shown
        ended = piece.finish == "stop" and self._deltas.any and not is_cut
        finish = "tool_calls" if ended else piece.finish
        return ReplyDelta(content, reasoning, deltas, finish)


def _harmony(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
    names = {tool["function"]["name"] for tool in request.tools}
    # a grammar defines marks by characters, which other tokens may also produce
    ids = {} if request.is_constrained else tokenizer.added_ids(MARKS)
    return HarmonyParser(request.reads_calls, request.parallel_calls, ids, names, prompt)


def _response_template(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
    assert tokenizer.response_template is not None
    tools = request.tools if request.reads_calls else ()
    return ResponseTemplateParser(tokenizer.response_template, prompt, tools, request.parallel_calls)


# The parsers of families that differ in more than marks.
PARSERS: dict[OutputParserName, Callable[[EdgeRequest, str, ChatTokenizer], OutputParser]] = {
    "text": lambda request, prompt, tokenizer: TextParser(),
    "harmony": _harmony,
    "response_template": _response_template,
}


def parser_of(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer, continued: str = "") -> OutputParser:
    """Return the parser of an answer to `request`. prompt: its text. continued: the text of the message that the answer
    continues."""
    if request.output_parser in PARSERS:
        return PARSERS[request.output_parser](request, prompt, tokenizer)
    family = FAMILIES[request.output_parser]
    assert family.thinking is not None
    marked = family.marked_calls(request.tools) if request.reads_calls else None
    read = marked.read if marked is not None else family.reader if request.reads_calls else None
    reasoning = None
    if request.separate_reasoning:
        is_inside = is_reasoning(*family.thinking, prompt, continued)
        continues = is_inside and not is_reasoning(*family.thinking, prompt, "")
        reasoning = ReasoningReader(*family.thinking, is_inside, continues, marked, family.calls_end_thinking)
    calls = StreamedCalls(read) if read is not None else None
    return MarkedParser(reasoning, calls, request.parallel_calls, family.ids(prompt))


def parser_of_prompt(request: EdgeRequest, prompt: int, tokenizer: ChatTokenizer) -> OutputParser:
    """Return the parser of an answer to one of a request's prompts. prompt: its index."""
    if not request.chat:
        return parser_of(request, "", tokenizer)
    return parser_of(request, request.prompt_texts[prompt], tokenizer, request.continued[prompt])
