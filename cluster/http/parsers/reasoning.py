"""Thinking that stands in front of an answer, between two marks."""

from cluster.http.parsers.marks import cut


class ReasoningReader:
    """What of an answer is thinking.

    opens, closes: the marks.
    prompt: the prompt's text; where it ends in the opening mark, the answer begins inside.
    """

    def __init__(self, opens: str, closes: str, prompt: str) -> None:
        self._opens = opens
        self._closes = closes
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
        """Whether the answer is thinking."""
        return self._inside

    @property
    def is_possible(self) -> bool:
        """Whether it thinks, or may still begin to."""
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
            before, mark, after = cut(text, (self._closes,))
            if not self._shown:
                before = before.lstrip()
            reasoning, text = (before.rstrip(), after) if mark else (before, "")
            self._shown = self._shown or bool(reasoning)
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
