"""vLLM's route for trainers, /inference/v1/generate: token ids in and out, without text, and which weights wrote each
token. Has its bodies and replies, and converts its requests into completion requests."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType, structs
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.answer import Piece
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, post
from aerie.cluster.http.errors import ApiError, invalid
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.logprobs import finite
from aerie.cluster.http.replies.reply import Reply, WholeAnswer
from aerie.cluster.http.replies.streaming import DONE, chunk_event
from aerie.cluster.http.requests.edge_request import EdgeRequest, text_request
from aerie.cluster.http.schema.body import Schema, validated, without_refused
from aerie.cluster.http.schema.request import (
    OTHER_SAMPLERS,
    REFUSED,
    CommonSampling,
    CompletionRequest,
    RequestId,
    StreamOptions,
    TokenIds,
    with_values,
)
from aerie.cluster.http.schema.response import Struct, Usage, WeightVersion
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.text.tokenizer import ChatTokenizer


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
    output_kind: Literal[2] | None = None  # without effect: vLLM's mark of replies in one piece


class InferenceRequest(Schema):
    """Continue the tokens of a prompt. return_routed_experts: needs a server with `cache.routed_experts: true`."""

    refused = {
        "features": ("prompts are token ids", ()),
        "kv_transfer_params": REFUSED["kv_transfer_params"],
    }

    token_ids: TokenIds
    sampling_params: InferenceSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: int | None = None
    request_id: RequestId | None = None
    return_routed_experts: bool | None = None


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
    routed_experts: with the last tokens, the experts of each token of prompt and answer but the last: base64 of an .npy
        file with an array [tokens - 1, layers, experts of a token] of uint8, or of uint16 with more than 256 experts.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: InferenceLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    routed_experts: str | list[list[list[int]]] | UnsetType = UNSET


class InferenceReply(Struct):
    """The reply, or an event of a stream."""

    request_id: str
    choices: list[InferenceChoice]
    usage: Usage | UnsetType = UNSET


_SAMPLING_FIELDS = frozenset(InferenceSampling.model_fields)
_SAME = {"model", "stream", "stream_options", "cache_salt", "priority", "request_id"}


async def inference_request(body: InferenceRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the request with `n` choices. Raises ApiError with the body's names of parameters."""
    sampling = body.sampling_params
    try:
        without_refused(sampling.model_extra or {}, InferenceSampling.refused, InferenceSampling.ignored)
        values = sampling.model_dump(exclude_none=True, include=set(_SAMPLING_FIELDS - {"detokenize", "output_kind"}))
        values |= body.model_dump(exclude_none=True, include=_SAME)
        values |= {"prompt": body.token_ids, "return_token_ids": True, "return_weight_versions": True}
        request = await text_request(validated(values, CompletionRequest), config, tokenizer)
        return _with_experts(request, config) if body.return_routed_experts else request
    except ApiError as error:
        raise _renamed(error) from None


def _with_experts(request: EdgeRequest, config: EdgeConfig) -> EdgeRequest:
    """Return the request so that each choice has its routed experts. Raises ApiError."""
    name = "return_routed_experts"
    if not config.records_experts:
        raise invalid(name, f"{name}: this server does not record them; start it with cache.routed_experts: true")
    if request.choices[0].form.stops:
        raise invalid(name, f"{name}: the engine does not know stop strings; use stop_token_ids")
    choices = [
        replace(choice, sampling=structs.replace(choice.sampling, routed_experts=True)) for choice in request.choices
    ]
    return replace(request, choices=choices)


def _renamed(error: ApiError) -> ApiError:
    base = (error.param or "").partition(".")[0].partition("[")[0]
    param = f"sampling_params.{error.param}" if base in {*_SAMPLING_FIELDS, *InferenceSampling.refused} else error.param
    param = "token_ids" if base == "prompt" else param
    return ApiError(error.status, error.message, kind=error.kind, param=param, code=error.code, headers=error.headers)


class TokensReply(Reply):
    """The reply of /inference/v1/generate."""

    def first_event(self, index: int) -> bytes:
        return b""

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        return chunk_event(self._reply([self._choice(index, piece)])) if piece.tokens else b""

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        return chunk_event(self._reply([self._choice(index, piece)]))

    def end_events(self) -> bytes:
        if not self._context.request.include_usage:
            return DONE
        last = self._reply([])
        last.usage = self._context.usage()
        return chunk_event(last) + DONE

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        reply = self._reply([self._choice(index, answer.piece) for index, answer in enumerate(answers)])
        reply.usage = self._context.usage()
        return msgspec.json.encode(reply)

    def _reply(self, choices: list[InferenceChoice]) -> InferenceReply:
        return InferenceReply(self._context.reply_id, choices)

    def _choice(self, index: int, piece: Piece) -> InferenceChoice:
        logprobs = self._logprobs(piece) if self._context.request.logprobs >= 0 else None
        versions = self._context.weight_versions(index) if piece.finish is not None else UNSET
        choice = InferenceChoice(index, piece.tokens, logprobs, piece.finish, piece.stop_reason, versions)
        if piece.finish is not None and (file := self._context.answers[index].routed_experts):
            choice.routed_experts = self.experts_of(file)
        return choice

    def experts_of(self, file: bytes) -> str | list[list[list[int]]]:
        """Return routed experts as the reply shows them."""
        return base64.b64encode(file).decode()

    def _logprobs(self, piece: Piece) -> InferenceLogprobs:
        num_top = self._context.request.logprobs
        content = []
        for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
            top = list(_listed(zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)))
            content.append(SampledLogprob(f"token_id:{token}", token, finite(entry.logprob), top))
        return InferenceLogprobs(content)


def _listed(tokens: Iterable[tuple[int, float]]) -> Iterable[IdLogprob]:
    return (IdLogprob(f"token_id:{token}", token, finite(logprob)) for token, logprob in tokens)


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    async def generate(http: Request, body: InferenceRequest) -> Response:
        """Continues token ids, in vLLM's format."""
        request = await inference_request(body, edge.config, edge.tokenizer)
        return await edge.response(http, request, body.request_id, TokensReply, "generate-tokens-{}")

    return [
        post(
            "/inference/v1/generate",
            generate,
            InferenceRequest,
            InferenceReply,
            event=InferenceReply,
            generates=True,
        )
    ]
