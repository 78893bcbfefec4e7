"""gpt-oss's answers: messages, each with a head that names its channel and perhaps the function it is for."""

import re

from cluster.http.answer import Piece
from cluster.http.parsers.json_calls import CallPart
from cluster.http.parsers.marked import CallDeltas
from cluster.http.parsers.marks import cut
from cluster.http.parsers.output_parser import ReplyDelta

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyParser:
    """State of one answer. The prompt ends in a message's role, so that the answer begins with the rest of a head.

    with_calls: whether messages to functions are tool calls; else they are not shown.
    """

    def __init__(self, with_calls: bool, parallel: bool) -> None:
        self._with_calls = with_calls
        self._deltas = CallDeltas(parallel)
        self._held = ""
        self._in_head = True
        self._any_message = False
        self._channel = ""
        self._recipient: str | None = None

    def push(self, piece: Piece) -> ReplyDelta:
        """See `cluster.http.parsers.output_parser.OutputParser`."""
        end = piece.finish is not None
        text, self._held = self._held + piece.text, ""
        content, reasoning = "", ""
        parts: list[CallPart] = []
        while True:
            before, mark, after = cut(text, (MESSAGE,) if self._in_head else ENDS)
            if self._in_head:
                if mark is None:
                    self._held = text
                    break
                parts += self._open(before)
                text = after
                continue
            body = before if mark or not end else before + after
            if self._channel == "analysis":
                reasoning += body
            elif self._recipient is None:
                content += body
            elif body:
                parts.append(CallPart(None, body))
            if mark is None:
                self._held = "" if end else after
                break
            self._in_head, text = True, after
        if end and not self._any_message:
            content += self._held  # a constraint on the answer can leave no room for heads
        deltas = self._deltas.of(parts) if self._with_calls else ()
        finish = "tool_calls" if piece.finish == "stop" and self._deltas.any else piece.finish
        return ReplyDelta(content, reasoning, deltas, finish)

    def _open(self, head: str) -> list[CallPart]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        self._in_head, self._any_message = False, True
        return [CallPart(self._recipient, "")] if self._recipient else []
