"""Server-sent events: what stands around a stream's chunks, and chunks that carry nothing but text at a join of bytes
each."""

from collections.abc import Callable

import msgspec

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect events
]

_encode = msgspec.json.Encoder().encode
_PLACE = "\x00text\x00"  # where the text goes; no id or model name has it


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


def chunk_event(chunk: msgspec.Struct) -> bytes:
    """The event of one chunk."""
    return b"data: " + _encode(chunk) + b"\n\n"


class TextEvents:
    """Events that differ in one text. chunk: makes the chunk for a text; called once, here."""

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        self._before, place, self._after = chunk_event(chunk(_PLACE)).partition(_encode(_PLACE))
        assert place

    def event(self, text: str) -> bytes:
        """The event for `text`."""
        return b"".join((self._before, _encode(text), self._after))
