"""Messages as bytes: one that says which, msgpack after it. Typed, and no pickle."""

import msgspec

from cluster.transport.messages import (
    Abort,
    EngineState,
    GenerateRequest,
    GenerateSummary,
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
    | GenerateSummary
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
    GenerateSummary: b"D",
    Refused: b"N",
    Subscribe: b"W",
    EngineState: b"E",
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    kind[0]: msgspec.msgpack.Decoder(message) for message, kind in _KINDS.items()
}
_TOKENS = msgspec.msgpack.Decoder(TokenBatch)


class BadMessageError(ValueError):
    """Bytes that are not one of our messages."""


def encode(message: Message) -> bytes:
    """One byte that says which, and msgpack."""
    return _KINDS[type(message)] + _ENCODER.encode(message)


def decode(raw: bytes) -> Message:
    """What `encode` was given; raises BadMessageError."""
    decoder = _DECODERS.get(raw[0]) if raw else None
    if decoder is None:
        raise BadMessageError(f"message begins with {raw[:1]!r}, known are {sorted(_KINDS.values())}")
    try:
        return decoder.decode(memoryview(raw)[1:])
    except msgspec.MsgspecError as error:
        raise BadMessageError(f"message {raw[:1]!r}: {error}") from error


def encode_tokens(batch: TokenBatch) -> bytes:
    """For the socket of `bind_ingress`, which has one kind of message."""
    return _ENCODER.encode(batch)


def decode_tokens(raw: bytes) -> TokenBatch:
    """What `encode_tokens` was given."""
    return _TOKENS.decode(raw)
