"""Makes the parser of one answer. Adding one: docs/add-a-parser.md."""

from collections.abc import Callable

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import OutputParserName
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.harmony import HarmonyParser
from aerie.cluster.http.parsers.output_parser import (
    CallDeltas,
    CallIds,
    OutputParser,
    ReplyDelta,
    TextParser,
    random_id,
)
from aerie.cluster.http.parsers.reasoning import ReasoningReader, is_reasoning
from aerie.cluster.http.parsers.response_template import ResponseTemplateParser
from aerie.cluster.http.parsers.tool_calls import StreamedCalls
from aerie.cluster.http.requests.edge_request import EdgeRequest
from aerie.cluster.http.text.harmony_prompt import MARKS
from aerie.cluster.http.text.tokenizer import ChatTokenizer


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
        """See `aerie.cluster.http.parsers.output_parser.OutputParser`."""
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
