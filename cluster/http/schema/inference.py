"""Bodies and replies of vLLM's /inference/v1/generate: token ids in and out."""

from typing import Annotated, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field

from aerie.cluster.http.schema.body import Schema
from aerie.cluster.http.schema.request import (
    OTHER_SAMPLERS,
    REFUSED,
    CommonSampling,
    RequestId,
    StreamOptions,
    TokenIds,
    with_values,
)
from aerie.cluster.http.schema.response import Struct, Usage, WeightVersion


@with_values()
class InferenceSampling(CommonSampling):
    """`sampling_params`, by the names of vLLM's `SamplingParams`."""

    refused = {name: REFUSED[name] for name in OTHER_SAMPLERS} | {
        "prompt_logprobs": ("use prompt_logprobs of /v1/completions", ()),
        "logprob_token_ids": REFUSED["logprob_token_ids"],
    }

    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool | None = None  # without effect: there is no text


class InferenceRequest(Schema):
    """Continue the tokens of a prompt."""

    refused = {
        "features": ("prompts are token ids", ()),
        "kv_transfer_params": REFUSED["kv_transfer_params"],
        "return_routed_experts": REFUSED["return_routed_experts"],
    }

    token_ids: TokenIds
    sampling_params: InferenceSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: int | None = None
    request_id: RequestId | None = None


class IdLogprob(Struct):
    """A likely token. token: its id, as "token_id:7"."""

    token: str
    token_id: int
    logprob: float


class SampledLogprob(IdLogprob):
    """A token of the answer, and the most likely ones at its place."""

    top_logprobs: list[IdLogprob]


class InferenceLogprobs(Struct):
    """Log-probabilities in nats, of the model's distribution: before temperature, filters and penalties."""

    content: list[SampledLogprob]


class InferenceChoice(Struct):
    """An answer; in a stream's event, its further tokens.

    weight_versions: which weights wrote the answer's tokens; with its last tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: InferenceLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class InferenceReply(Struct):
    """The reply, or an event of a stream."""

    request_id: str
    choices: list[InferenceChoice]
    usage: Usage | UnsetType = UNSET
