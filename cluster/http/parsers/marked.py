"""A parser of marks in the text: reasoning first, then content and tool calls."""

import secrets
import string
from collections.abc import Callable

from cluster.http.answer import Piece
from cluster.http.parsers.json_calls import CallPart
from cluster.http.parsers.output_parser import ReplyDelta
from cluster.http.parsers.reasoning import ReasoningReader
from cluster.http.parsers.tool_calls import CallReader
from cluster.http.schema.completions import FunctionDelta, ToolCallDelta

CallIds = Callable[[str, int], str]  # arguments: a function's name and the call's number in the answer
_ID_CHARACTERS = string.ascii_letters + string.digits


def random_id(name: str, number: int) -> str:
    """Return nine letters and digits, the only form that Mistral's templates accept; 53 random bits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class CallDeltas:
    """Converts parts of calls to the reply's deltas. parallel: whether to show more than the first call. ids: makes ids
    of calls."""

    def __init__(self, parallel: bool, ids: CallIds = random_id) -> None:
        self._parallel = parallel
        self._ids = ids
        self._num = 0

    def of(self, parts: list[CallPart]) -> tuple[ToolCallDelta, ...]:
        """Return the deltas of further parts."""
        deltas = []
        for name, arguments in parts:
            self._num += name is not None
            if self._num > 1 and not self._parallel:
                continue
            if name is not None:
                function, call_id = FunctionDelta(name=name, arguments=arguments), self._ids(name, self._num - 1)
                deltas.append(ToolCallDelta(index=self._num - 1, id=call_id, type="function", function=function))
            elif arguments:
                deltas.append(ToolCallDelta(index=self._num - 1, function=FunctionDelta(arguments=arguments)))
        return tuple(deltas)

    @property
    def any(self) -> bool:
        """Return whether there was a call."""
        return self._num > 0


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
