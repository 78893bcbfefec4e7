"""Documents and events of SGLang's own route, and what it tells of the model."""

from typing import Literal

from msgspec import UNSET, UnsetType

from cluster.http.schema.response import Struct

NamedLogprob = tuple[float, int, str | None]  # log-probability, token id, its text where it is asked for


class NativeFinish(Struct):
    """matched: the stop string or the token that ended the answer. length: tokens, where they are as many as wanted."""

    type: Literal["stop", "length"]
    matched: str | int | None | UnsetType = UNSET
    length: int | UnsetType = UNSET


class NativeMeta(Struct):
    """e2e_latency: seconds from the request to this event."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    output_token_logprobs: list[NamedLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NamedLogprob]] | UnsetType = UNSET


class NativeAnswer(Struct):
    """An answer; in a stream's event, as much of it as there is. index: set where a request has several answers."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | UnsetType = UNSET


class NativeModel(Struct):
    """The model information that SGLang's clients request first."""

    model_path: str
    tokenizer_path: str
    is_generation: Literal[True] = True
    max_model_len: int = 0
