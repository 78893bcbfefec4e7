"""Makes the parser of one answer. Adding one: docs/add-a-parser.md."""

from collections.abc import Callable

from cluster.http.answer import Piece
from cluster.http.config import OutputParserName
from cluster.http.parsers.families import FAMILIES
from cluster.http.parsers.harmony import HarmonyParser
from cluster.http.parsers.output_parser import CallDeltas, CallIds, OutputParser, ReplyDelta, TextParser, random_id
from cluster.http.parsers.reasoning import ReasoningReader
from cluster.http.parsers.response_template import ResponseTemplateParser
from cluster.http.parsers.tool_calls import CallReader
from cluster.http.requests.edge_request import EdgeRequest
from cluster.http.text.harmony_prompt import MARKS
from cluster.http.text.tokenizer import ChatTokenizer


class MarkedParser:
    """Parses one answer. reasoning, calls: readers; None for answers without. ids: makes ids of calls."""

    def __init__(
        self, reasoning: ReasoningReader | None, calls: CallReader | None, parallel: bool, ids: CallIds = random_id
    ) -> None:
        self.reasoning = reasoning
        self._calls = calls
        self._deltas = CallDeltas(parallel, ids)

    def push(self, piece: Piece) -> ReplyDelta:
        """See `cluster.http.parsers.output_parser.OutputParser`."""
        end = piece.finish is not None
        reasoning, content = "", piece.text
        if self.reasoning is not None:
            reasoning, content = self.reasoning.take(content, end)
        if self._calls is None:
            return ReplyDelta(content, reasoning, finish=piece.finish)
        content, parts = self._calls.take(content, end)
        deltas = self._deltas.of(parts)
        finish = "tool_calls" if piece.finish == "stop" and self._deltas.any else piece.finish
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


def parser_of(request: EdgeRequest, prompt: str, tokenizer: ChatTokenizer) -> OutputParser:
    """Return the parser of an answer to `request`. prompt: its text."""
    if request.output_parser in PARSERS:
        return PARSERS[request.output_parser](request, prompt, tokenizer)
    family = FAMILIES[request.output_parser]
    assert family.thinking is not None
    reader = family.call_reader(request.tools) if request.reads_calls else None
    call = family.calls_in_thinking if reader is not None else ""
    reasoning = ReasoningReader(*family.thinking, prompt, call) if request.separate_reasoning else None
    return MarkedParser(reasoning, reader, request.parallel_calls, family.ids(prompt))
