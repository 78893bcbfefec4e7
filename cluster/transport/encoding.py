"""Encodes messages: a byte for the type, then msgpack. Typed, without pickle."""

import msgspec

from cluster.transport.messages import (
    Abort,
    EngineState,
    GenerateRequest,
    Heartbeat,
    Probe,
    RankFailure,
    Refused,
    Stop,
    Subscribe,
    TokenBatch,
)
from workers.scheduling.plan import StepPlan, StepResult

Message = (
    StepPlan
    | StepResult
    | Heartbeat
    | RankFailure
    | Stop
    | GenerateRequest
    | Probe
    | Abort
    | TokenBatch
    | Refused
    | Subscribe
    | EngineState
)
_KINDS: dict[type, bytes] = {
    StepPlan: b"P",
    StepResult: b"R",
    Heartbeat: b"H",
    RankFailure: b"F",
    Stop: b"S",
    GenerateRequest: b"G",
    Probe: b"B",
    Abort: b"A",
    TokenBatch: b"T",
    Refused: b"N",
    Subscribe: b"W",
    EngineState: b"E",
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    kind[0]: msgspec.msgpack.Decoder(message) for message, kind in _KINDS.items()
}
_NUMBER_BYTES = 8


class BadMessageError(ValueError):
    """Bytes that are no valid message."""


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _KINDS[type(message)] + _ENCODER.encode(message)


def decode(raw: bytes, start: int = 0) -> Message:
    """Decode a message; raises BadMessageError. start: offset of the message in `raw`."""
    kind = raw[start : start + 1]
    decoder = _DECODERS.get(kind[0]) if kind else None
    if decoder is None:
        raise BadMessageError(f"message begins with {kind!r}, known are {sorted(_KINDS.values())}")
    try:
        return decoder.decode(memoryview(raw)[start + 1 :])
    except msgspec.MsgspecError as error:
        raise BadMessageError(f"message {kind!r}: {error}") from error


def encode_numbered(number: int, message: Message) -> bytes:
    """Encode a message with its number, by which a lost one is noticed."""
    return number.to_bytes(_NUMBER_BYTES, "little") + encode(message)


def decode_numbered(raw: bytes, expected: int) -> Message:
    """Decode a numbered message; raises BadMessageError, also for an unexpected number."""
    number = int.from_bytes(raw[:_NUMBER_BYTES], "little")
    if number != expected:
        raise BadMessageError(f"message {expected} was lost: {number} came")
    return decode(raw, _NUMBER_BYTES)
