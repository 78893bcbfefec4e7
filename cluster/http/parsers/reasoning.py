"""Reasoning in front of an answer, between two marks."""

from cluster.http.parsers.marks import cut

CALL_END = "</tool_call>"


class ReasoningReader:
    """Separates reasoning from content.

    opens, closes: the marks.
    prompt: the prompt's text; if it ends in the opening mark, the answer begins with reasoning.
    call: beginning of a tool call, for models that may call from within their reasoning and leave out the closing mark
        (vllm-project/vllm#35687). Reasoning may also have drafts of calls. So a call is held until the answer ends with
        it; it is reasoning if anything follows.
    """

    def __init__(self, opens: str, closes: str, prompt: str, call: str = "") -> None:
        self._opens = opens
        self._closes = closes
        self._marks = (closes, call) if call else (closes,)
        self._call = ""  # held: a call in the thinking, and what follows it
        self._held = ""
        self._inside = prompt.rstrip().endswith(opens)
        self._started = self._inside
        self._ended = False
        self._shown = False  # something of the reasoning
        self._at_start = False  # of the content after reasoning

    @property
    def is_over(self) -> bool:
        """Whether all that follows is content."""
        return self._ended and not self._at_start

    @property
    def is_inside(self) -> bool:
        """Whether the text is in the reasoning now."""
        return self._inside

    @property
    def is_possible(self) -> bool:
        """Whether the text is reasoning, or may still begin with it."""
        return not self._ended

    def take(self, text: str, end: bool) -> tuple[str, str]:
        """(reasoning, content) that more text adds. White space around the marks is not shown. end: none follows."""
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
        """`take` after a call has begun in the thinking."""
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
        """Return the place where reasoning goes on or ends after drafts of calls; -1 while they may be the answer's
        calls. closed: place of the closing mark; -1: there is none."""
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
        """Decide whether the answer begins with thinking; gives the text after the opening mark."""
        stripped = text.lstrip()
        if stripped.startswith(self._opens):
            self._started = self._inside = True
            return stripped[len(self._opens) :]
        if self._opens.startswith(stripped) and not end:
            self._held = text
            return ""
        self._started = self._ended = True
        return text
