"""Parses tool calls between marks. `cluster.http.parsers.families` says which family has which."""

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from cluster.http.parsers.json_calls import CallList, CallPart, JsonSpan
from cluster.http.parsers.marks import cut

PYTHON_TAG = "<|python_tag|>"
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?={)")
KIMI_HEAD = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?={)")
DEEPSEEK_HEAD = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([^\n<`{]+?)(?:<｜tool▁sep｜>|\n```json)\s*(?={)")


class CallReader(Protocol):
    """Finds the calls of one answer."""

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """Return content and parts of calls in further text. Text may be held back except at the end."""


class CallBody(Protocol):
    """Reads the calls after an opening mark, up to the closing mark."""

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """Return parts of calls, and the text after the calls once they have ended. end: no text follows."""


class NamedCall:
    """A name, then its arguments as a JSON object.

    head: matches up to the arguments; group 1 is the name.
    tail: the mark that ends the call, before which no text is shown; "": none.
    """

    def __init__(self, head: re.Pattern[str], tail: str = "") -> None:
        self._head = head
        self._tail = tail
        self._held = ""
        self._span: JsonSpan | None = None
        self._complete = False

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """See `CallBody`."""
        parts: list[CallPart] = []
        text, self._held = self._held + text, ""
        if self._span is None:
            found = self._head.match(text)
            if found is None:
                self._held = text
                return parts, (text if end else None)
            parts.append(CallPart(found[1], ""))
            self._span, text = JsonSpan(), text[found.end() :]
        if not self._complete:
            arguments, rest = self._span.take(text)
            if arguments:
                parts.append(CallPart(None, arguments))
            if rest is None:
                return parts, None
            self._complete, text = True, rest
        if not self._tail:
            return parts, text
        _, mark, after = cut(text, (self._tail,))
        if mark is None:
            self._held = after
            return parts, None
        return parts, after


class MistralBody:
    """An array of calls, or (tokenizers from version 11 on) one call's name and arguments."""

    def __init__(self) -> None:
        self._body: CallBody | None = None

    def take(self, text: str, end: bool) -> tuple[list[CallPart], str | None]:
        """See `CallBody`."""
        if self._body is None:
            if not text.strip():
                return [], (text if end else None)
            self._body = CallList() if text.lstrip()[0] in "[{" else NamedCall(_MISTRAL_HEAD)
        return self._body.take(text, end)


class MarkedCalls:
    """Calls after a mark. marks: makers of the body after each mark; None: the mark is dropped."""

    def __init__(self, marks: Mapping[str, Callable[[], CallBody] | None]) -> None:
        self._marks = marks
        self._held = ""
        self._mark = ""
        self._body: CallBody | None = None
        self._body_has_calls = False
        self._has_calls = False

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """See `CallReader`."""
        content: list[str] = []
        parts: list[CallPart] = []
        text, self._held = self._held + text, ""
        while True:
            if self._body is not None:
                found, rest = self._body.take(text, end)
                parts += found
                self._body_has_calls = self._body_has_calls or bool(found)
                self._has_calls = self._has_calls or bool(found)
                if rest is None:
                    break
                if not self._body_has_calls:
                    content.append(self._mark)
                self._body, text = None, rest
            before, mark, after = cut(text, tuple(self._marks))
            shown = before.rstrip() if mark else before
            self._show(shown, content)
            if mark is None:
                if end:
                    self._show(after, content)
                else:
                    self._held = after
                break
            make = self._marks[mark]
            self._mark, self._body, text = before[len(shown) :] + mark, make() if make else None, after
            self._body_has_calls = False
        return "".join(content), parts

    def _show(self, text: str, content: list[str]) -> None:
        """Add content, without white space around calls."""
        if text and not (self._has_calls and not text.strip()):
            content.append(text)


class Llama3Calls:
    """An answer of Llama 3.x is either calls from its start, or content."""

    def __init__(self) -> None:
        self._held = ""
        self._calls: CallList | None = None
        self._is_content = False

    def take(self, text: str, end: bool) -> tuple[str, list[CallPart]]:
        """See `CallReader`."""
        if self._is_content:
            return text, []
        text, self._held = self._held + text, ""
        if self._calls is None:
            stripped = text.lstrip()
            if not end and PYTHON_TAG.startswith(stripped):
                self._held = text
                return "", []
            if not stripped.removeprefix(PYTHON_TAG).lstrip().startswith("{") and stripped != PYTHON_TAG:
                self._is_content = True
                return text, []
            self._calls, text = CallList(), stripped.removeprefix(PYTHON_TAG)
        parts, rest = self._calls.take(text, end)
        if rest is None:
            return "", parts
        self._is_content = True
        return rest, parts
