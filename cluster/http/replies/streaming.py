"""Server-sent events. An event that differs from another in its text only is made by joining bytes, without encoding it
anew."""

from collections.abc import Callable

import msgspec

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect events
]

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER = "\x00text\x00"  # placeholder of the text; occurs in no id or model name


def event(payload: bytes) -> bytes:
    """Return `payload` as a server-sent event."""
    return b"data: " + payload + b"\n\n"


def named_event(kind: str, content: msgspec.Struct) -> bytes:
    """Return an event of a kind."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode(content) + b"\n\n"


def chunk_event(chunk: msgspec.Struct) -> bytes:
    """Return the event of a chunk."""
    return b"data: " + _encode(chunk) + b"\n\n"


class TextEvents:
    """Events that differ in one text. chunk: returns the chunk with a given text; called once."""

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        self._before, marker, self._after = chunk_event(chunk(_PLACEHOLDER)).partition(_encode(_PLACEHOLDER))
        assert marker

    def event(self, text: str) -> bytes:
        """Return the event with `text`."""
        return b"".join((self._before, _encode(text), self._after))
