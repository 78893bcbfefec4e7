"""Encodes messages: msgpack arrays, which begin with the tag of their type. Typed, without pickle."""

import msgspec

from aerie.cluster.transport.messages import (
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
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.plan import StepPlan, StepResult

Message = (
    StepPlan
    | StepResult
    | Command
    | CommandAnswer
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
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_NUMBER_BYTES = 8  # bytes of the number before a message


class BadMessageError(ValueError):
    """Bytes that are no valid message."""


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def decode(raw: bytes | memoryview) -> Message:
    """Decode a message; raises BadMessageError."""
    try:
        return _DECODER.decode(raw)
    except msgspec.MsgspecError as error:
        raise BadMessageError(f"message {bytes(raw[:40])!r}: {error}") from error


def encode_numbered(number: int, message: Message) -> bytes:
    """Encode a message with its number, by which a lost one is noticed."""
    return number.to_bytes(_NUMBER_BYTES, "little") + encode(message)


def decode_numbered(raw: bytes, expected: int) -> Message:
    """Decode a numbered message; raises BadMessageError, also for an unexpected number."""
    number = int.from_bytes(raw[:_NUMBER_BYTES], "little")
    if number != expected:
        raise BadMessageError(f"message {expected} was lost: {number} came")
    return decode(memoryview(raw)[_NUMBER_BYTES:])
