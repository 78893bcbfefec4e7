"""Separates reasoning before an answer, between two marks, and counts its tokens for the usage."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from cluster.http.parsers.marks import cut
from cluster.http.parsers.output_parser import ReplyDelta

CALL_END = "</tool_call>"


class ReasoningReader:
    """Separates reasoning from content.

    opens, closes: the marks.
    prompt: the prompt's text; if it ends in the opening mark, the answer starts with reasoning.
    call: start of a tool call, for models that may call within their reasoning without the closing mark
        (vllm-project/vllm#35687). Reasoning may also contain drafts of calls. So a call is held back until the answer
        ends with it; it is reasoning if text follows.
    """

    def __init__(self, opens: str, closes: str, prompt: str, call: str = "") -> None:
        self._opens = opens
        self._closes = closes
        self._marks = (closes, call) if call else (closes,)
        self._call = ""  # held back: a call within reasoning, and the text after it
        self._held = ""
        self._inside = prompt.rstrip().endswith(opens)
        self._started = self._inside
        self._ended = False
        self._shown = False  # whether any reasoning was shown
        self._at_start = False  # whether the text is at the start of the content after reasoning

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._ended and not self._at_start

    @property
    def is_inside(self) -> bool:
        """Whether the text is inside the reasoning."""
        return self._inside

    @property
    def is_possible(self) -> bool:
        """Whether the text is reasoning, or may still start with it."""
        return not self._ended

    def take(self, text: str, end: bool) -> tuple[str, str]:
        """Return reasoning and content of further text, without white space around the marks. end: no text follows."""
        if self.is_over:
            return "", text
        text, self._held = self._held + text, ""
        if not self._started:
            text = self._start(text, end)
        reasoning = ""
        if self._inside:
            if self._call:
                return self._in_call(text, end)
            before, mark, after = cut(text, self._marks)
            if not self._shown:
                before = before.lstrip()
            reasoning, text = (before.rstrip(), after) if mark else (before, "")
            self._shown = self._shown or bool(reasoning)
            if mark not in (None, self._closes):
                self._call = before[len(reasoning) :] + str(mark)
                more, content = self._in_call(after, end)
                return reasoning + more, content
            if mark is None:
                if end:
                    return reasoning + after.rstrip() if self._shown else reasoning, ""
                self._held = after
                return reasoning, ""
            self._inside, self._ended, self._at_start = False, True, True
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return reasoning, text

    def _in_call(self, text: str, end: bool) -> tuple[str, str]:
        """Do `take` after the start of a call within reasoning."""
        seen = max(0, len(self._call) - len(self._closes))
        self._call += text
        at = self._draft_end(self._call.find(self._closes, seen))
        if at < 0 and end:
            self._inside, self._ended = False, True
            return "", self._call.lstrip()
        if at < 0:
            return "", ""
        draft, rest, self._call = self._call[:at], self._call[at:], ""
        self._shown = True
        more, content = self.take(rest, end)
        return (draft.rstrip() if rest.startswith(self._closes) else draft) + more, content

    def _draft_end(self, closed: int) -> int:
        """Return the position where reasoning continues or ends after drafts of calls; -1 while they may be the
        answer's calls. closed: position of the closing mark; -1 without one."""
        marks = (self._closes, *self._marks[1:])
        at = self._call.find(CALL_END)
        while at >= 0 and (closed < 0 or at < closed):
            at += len(CALL_END)
            follows = self._call[at:].lstrip()
            if follows and not any(mark.startswith(follows) or follows.startswith(mark) for mark in marks):
                return at
            at = self._call.find(CALL_END, at)
        return closed

    def _start(self, text: str, end: bool) -> str:
        """Decide whether the answer starts with reasoning; return the text after the opening mark."""
        stripped = text.lstrip()
        if stripped.startswith(self._opens):
            self._started = self._inside = True
            return stripped[len(self._opens) :]
        if self._opens.startswith(stripped) and not end:
            self._held = text
            return ""
        self._started = self._ended = True
        return text


class ReasoningTokens:
    """Counts the tokens of the reasoning's text, without the marks around it.

    A parser holds text back and strips white space, so the reasoning is searched in the text of the tokens.
    """

    def __init__(self) -> None:
        self._text = b""  # text of the tokens, until the reasoning starts
        self._ends: list[int] = []  # end of each token's bytes in the answer's
        self._start = -1  # start of the reasoning's bytes
        self._num_bytes = 0
        self._is_over = False

    def push(self, delta: ReplyDelta, token_bytes: Iterable[bytes]) -> None:
        """token_bytes: bytes of the tokens of `delta`'s piece."""
        if self._is_over:
            return
        for each in token_bytes:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(each))
            if self._start < 0:
                self._text += each
        reasoning = delta.reasoning.encode()
        if reasoning and self._start < 0:
            self._start, self._text = max(0, self._text.find(reasoning)), b""
        self._num_bytes += len(reasoning)
        self._is_over = bool(delta.content or delta.tool_calls)

    @property
    def num(self) -> int:
        """Number of reasoning tokens so far."""
        if not self._num_bytes:
            return 0
        end = self._start + self._num_bytes
        return min(len(self._ends), bisect_left(self._ends, end) + 1) - bisect_right(self._ends, self._start)
