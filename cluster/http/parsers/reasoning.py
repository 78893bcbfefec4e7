"""Separates reasoning before an answer, between two marks, counts its tokens for the usage, and ends it after a number
of tokens (vLLM's `thinking_token_budget`).

The engine does not know about thinking. When the budget is used up, the generation is aborted, the closing mark is
appended to the tokens so far, and a new generation continues from there; the prefix cache makes this cheap.
"""

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from aerie.cluster.http.parsers.json_calls import Parsed
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.parsers.source import SPACES, Marks, Reading, Running, Source
from aerie.cluster.http.parsers.tool_calls import MarkedCalls
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import TokenLogprobs


def is_reasoning(opens: str, closes: str, prompt: str, continued: str) -> bool:
    """Return whether an answer starts within reasoning.

    opens, closes: the marks.
    prompt: the prompt's text, which may end in the opening mark.
    continued: the text of the message that the answer continues, which may end within reasoning; "": none.
    """
    return prompt.rstrip().endswith(opens) or continued.rfind(opens) > continued.rfind(closes)


class ReasoningReader:
    """Separates reasoning from content.

    opens, closes: the marks.
    is_inside: whether the answer starts within reasoning.
    continues: whether it does so after other reasoning, from which white space may separate it.
    calls: reads the model's calls, with which reasoning may end without the closing mark. Reasoning may also mention
        their marks, and contain drafts of calls. So a call is held back until the answer ends with it; if text follows,
        it is reasoning.
    at_once: the marks are in no reasoning, so that the first call ends it.
    """

    def __init__(
        self,
        opens: str,
        closes: str,
        is_inside: bool,
        continues: bool = False,
        calls: MarkedCalls | None = None,
        at_once: bool = False,
    ) -> None:
        self._opens = opens
        self._closes = closes
        self._continues = continues
        self._calls = calls
        self._marks = Marks((closes, *(calls.bodies if calls is not None else ())))
        self._at_once = at_once
        self._source = Source()
        self._running = Running(self._source, self._read())
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._spaces: list[str] = []  # after the reasoning so far
        self.is_inside = is_inside  # whether the text is inside the reasoning
        self.is_possible = True  # whether the text is reasoning, or may still start with it

    def take(self, text: str, end: bool) -> tuple[str, str]:
        """Return reasoning and content of further text, without white space around the marks. end: no text follows."""
        if self._running.is_done:
            return "", text
        self._running.push(text, end)
        if self._running.is_done:
            self._content.append(self._source.rest())
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return reasoning, content

    def _read(self) -> Reading[None]:
        """Read optional reasoning at the start, up to its closing mark. The content's reader reads what follows."""
        source = self._source
        if not self.is_inside:
            source.record()
            yield from source.run(SPACES)
            self.is_inside = yield from source.take(self._opens)
            text = source.recorded()
            if not self.is_inside:
                self._content.append(text)
        if self.is_inside:
            yield from self._inside()
            self.is_inside = self.is_possible = False
            yield from source.run(SPACES)
        self.is_possible = False

    def _inside(self) -> Reading[None]:
        """Read and show reasoning until after its closing mark, until calls that end the answer, or to the end of the
        text. Calls that other text follows were drafts, and are shown."""
        source = self._source
        if not self._continues:
            yield from source.run(SPACES)
        while True:
            text, mark = yield from self._marks.find(source)
            self._show(text)
            if mark is None or mark == self._closes:
                return
            if not mark:
                continue
            source.back(mark)
            source.record()
            parsed = yield from self._read_calls()
            draft = source.recorded()
            is_last = source.is_over and not (parsed.is_cut and self._closes in draft)
            if parsed.num_calls and (self._at_once or is_last):
                source.back(draft)
                return
            before, closes, after = draft.partition(self._closes)  # a draft of a call, without its end
            self._show(before)
            if closes:
                source.back(after)
                return

    def _read_calls(self) -> Reading[Parsed]:
        """Read calls up to other text, or only the start of one where it ends reasoning."""
        assert self._calls is not None, "no mark of a call was searched"
        parsed = Parsed()
        for _ in self._calls.read_only_calls(self._source, parsed):
            if self._at_once and parsed.num_calls:
                break
            yield
        return parsed

    def _show(self, text: str) -> None:
        """Add reasoning. White space is held back until other text follows."""
        shown = text.rstrip()
        if shown:
            self._reasoning.append("".join(self._spaces) + shown)
            self._spaces = []
        self._spaces.append(text[len(shown) :])


class ReasoningTokens:
    """Counts the tokens of the reasoning's text, without the marks around it.

    A parser holds text back and strips white space, so the reasoning is searched in the text of the tokens.
    """

    def __init__(self) -> None:
        self._text = bytearray()  # text of the tokens, until the reasoning starts
        self._ends: list[int] = []  # end of each token's bytes in the answer's
        self._start = -1  # start of the reasoning's bytes
        self._num_bytes = 0
        self._is_over = False

    def push(self, delta: ReplyDelta, token_bytes: Iterable[bytes]) -> None:
        """Count the tokens of a delta that write reasoning. token_bytes: bytes of the tokens of `delta`'s piece."""
        if self._is_over:
            return
        for piece in token_bytes:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(piece))
            if self._start < 0:
                self._text += piece
        reasoning = delta.reasoning.encode()
        if reasoning and self._start < 0:
            self._start, self._text = max(0, self._text.find(reasoning)), bytearray()
        self._num_bytes += len(reasoning)
        self._is_over = bool(delta.content or delta.tool_calls)

    @property
    def num(self) -> int:
        """Number of reasoning tokens so far."""
        if not self._num_bytes:
            return 0
        end = self._start + self._num_bytes
        return min(len(self._ends), bisect_left(self._ends, end) + 1) - bisect_right(self._ends, self._start)


@dataclass(frozen=True)
class ThinkingBudget:
    """The limit of an answer's reasoning.

    limit: maximum tokens of thinking, without marks.
    closing: tokens of the mark that ends it.
    """

    limit: int
    closing: tuple[int, ...]


async def within_budget(
    generate: Callable[[Sequence[int]], AsyncGenerator[TokenDelta, None]],
    budget: ThinkingBudget,
    thinking: ReasoningReader,
    logprobs: bool,
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one answer, token by token while it may think.

    generate: generates what follows the given tokens.
    thinking: the caller updates it with each delta, before it takes the next one.
    logprobs: whether deltas have them; the mark's, which was not sampled, are 0.
    """
    output: list[int] = []
    num_thought = 0

    def is_spent() -> bool:
        return thinking.is_inside and num_thought >= budget.limit

    while True:
        if is_spent():
            yield _forced(budget.closing, logprobs)
            output += budget.closing
        async with contextlib.aclosing(generate(output)) as deltas:
            async for delta in deltas:
                for part in _parts(delta, thinking):
                    num_thought += thinking.is_inside and bool(part.tokens)
                    output += part.tokens
                    yield part
                    if part.finish is not None:
                        return
                    if is_spent():
                        break
                if is_spent():
                    break
            else:
                return


def _parts(delta: TokenDelta, thinking: ReasoningReader) -> Iterator[TokenDelta]:
    """Yield `delta` token by token while the answer may think. The last part keeps the fields of a last delta."""
    while len(delta.tokens) > 1 and thinking.is_possible:
        yield TokenDelta(
            delta.request_id,
            delta.tokens[:1],
            logprobs=None if delta.logprobs is None else delta.logprobs[:1],
            prompt_logprobs=delta.prompt_logprobs,
            attempt=delta.attempt,
            drafted=delta.drafted[:1],
        )
        delta = msgspec.structs.replace(
            delta,
            tokens=delta.tokens[1:],
            logprobs=None if delta.logprobs is None else delta.logprobs[1:],
            prompt_logprobs=(),
            drafted=delta.drafted[1:],
        )
    yield delta


def _forced(tokens: tuple[int, ...], logprobs: bool) -> TokenDelta:
    forced_logprobs = tuple(TokenLogprobs(0.0) for _ in tokens) if logprobs else None
    return TokenDelta("", tokens, logprobs=forced_logprobs, drafted=(False,) * len(tokens))
