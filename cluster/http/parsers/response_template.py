"""Parses answers of checkpoints with a response template (tokenizer_config.json). transformers' module for it imports
no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.parsers.json_calls import CallPart
from aerie.cluster.http.parsers.output_parser import CallDeltas, ReplyDelta
from aerie.cluster.http.text.json_text import parsed_repaired

REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})


class _EventParser(Protocol):
    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class ResponseTemplateParser:
    """template: the checkpoint's template. prompt: text of the prompt. tools: in the chat template's form; none: calls
    are not parsed."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], parallel: bool
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: _EventParser = ResponseParser(dict(template), prefix=prompt, tools=[dict(tool) for tool in tools])
        self._with_calls = bool(tools)
        self._deltas = CallDeltas(parallel)

    def push(self, piece: Piece) -> ReplyDelta:
        """See `aerie.cluster.http.parsers.output_parser.OutputParser`."""
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
        if isinstance(function.get("name"), str) and (found := _object(written)) is not None:
            parts.append(CallPart(function["name"], found))
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
