"""SGLang's own routes, for scripts written for it. Requests for /generate are converted into completion requests; each
event of its streams contains the whole answer so far."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from aerie.cluster.http.answer import Piece, TokenScore
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, get, post
from aerie.cluster.http.errors import ApiError, invalid
from aerie.cluster.http.parsers.output_parser import ReplyDelta
from aerie.cluster.http.replies.logprobs import finite
from aerie.cluster.http.replies.reply import Reply, ReplyContext, WholeAnswer, speculation_metrics
from aerie.cluster.http.replies.streaming import chunk_event
from aerie.cluster.http.requests.edge_request import EdgeRequest, joined_request, text_request
from aerie.cluster.http.requests.parameters import check_total_scores, num_choices
from aerie.cluster.http.requests.prompts import listed_prompts
from aerie.cluster.http.routes.status import require_engine
from aerie.cluster.http.schema.body import validated, without_refused
from aerie.cluster.http.schema.native import (
    DEFAULT_NEW_TOKENS,
    VALUE_NAMES,
    NamedLogprob,
    NativeAnswer,
    NativeFinish,
    NativeMeta,
    NativeModel,
    NativeRequest,
    NativeSampling,
)
from aerie.cluster.http.schema.request import CompletionRequest
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import TokenLogprobs

_FIELDS = frozenset(NativeSampling.model_fields)
# SGLang's names that differ from the completion's.
_NAMES = {"max_new_tokens": "max_tokens"} | {theirs: ours for ours, theirs in VALUE_NAMES.items()}
_OURS_TO_THEIRS = {"prompt": "text", "prompt_logprobs": "logprob_start_len"} | {
    ours: name for name, ours in _NAMES.items()
}


async def native_request(body: NativeRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the request with `n` choices for each prompt. Raises ApiError."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    prompts, samplings = _prompts(body), body.sampling_params
    if not isinstance(samplings, list):
        return await _request(body, prompts, samplings or NativeSampling(), config, tokenizer)
    try:
        listed = listed_prompts(prompts, config.max_choices, tokenizer)
    except ApiError as error:
        raise _to_native_error(error, "") from None
    if not has_several(body) or len(listed) != len(samplings):
        message = f"sampling_params has {len(samplings)} entries for {len(listed)} prompts; give one for each"
        raise invalid("sampling_params", message)
    for i, sampling in enumerate(samplings):
        if sampling.n != samplings[0].n:
            raise invalid(f"sampling_params[{i}].n", f"sampling_params[{i}].n must be that of the others")
    n = num_choices(samplings[0].n, len(samplings), config)
    requests = [await _request(body, listed[i], samplings[i], config, tokenizer, i) for i in range(len(samplings))]
    check_total_scores(
        max(request.choices[0].sampling.prompt_logprobs for request in requests),
        n * sum(len(request.prompts[0]) for request in requests),
        "logprob_start_len",
        config,
    )
    return joined_request(requests)


def has_several(body: NativeRequest) -> bool:
    """Whether the request has a list of prompts, which gets a list of answers."""
    prompts = _prompts(body)
    return isinstance(prompts, list) and not (prompts and type(prompts[0]) is int)


def _prompts(body: NativeRequest) -> Any:
    """Return the request's prompt or list of prompts."""
    return body.input_ids if body.text is None else body.text


async def _request(
    body: NativeRequest,
    prompt: Any,
    sampling: NativeSampling,
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
    index: int | None = None,
) -> EdgeRequest:
    """Return the request for a prompt, or a list of prompts with the same sampling parameters. index: index of the
    prompt in the body's list. Raises ApiError with the body's parameter names."""
    where = "" if index is None else f"[{index}]"
    try:
        without_refused(sampling.model_extra or {}, NativeSampling.refused, NativeSampling.ignored)
    except ApiError as error:
        raise ApiError(400, error.message, param=f"sampling_params{where}.{error.param}", code=error.code) from None
    try:
        request = await text_request(_completion(body, prompt, sampling), config, tokenizer)
    except ApiError as error:
        raise _to_native_error(error, where) from None
    named = [replace(choice, grammar_param=_native_name(choice.grammar_param, where)) for choice in request.choices]
    return replace(request, choices=named)


def _completion(body: NativeRequest, prompt: Any, sampling: NativeSampling) -> CompletionRequest:
    """Return the equivalent completion. Raises ApiError."""
    fields = sampling.model_dump(exclude_none=True, include=set(_FIELDS))
    values = {_NAMES.get(name, name): value for name, value in fields.items()}
    if (tag := values.pop("structural_tag", None)) is not None:
        values["structured_outputs"] = {"structural_tag": tag}
    values.setdefault("max_tokens", DEFAULT_NEW_TOKENS)
    values["echo"] = values["max_tokens"] == 0  # which requests only the prompt's log-probabilities
    values |= {"prompt": prompt, "stream": body.stream, "rid": body.rid, "return_token_ids": True}
    if body.return_logprob:
        values["logprobs"] = body.top_logprobs_num or 0
    if scored_from(body) is not None:
        if body.stream:
            raise invalid("logprob_start_len", "logprob_start_len is not available with stream: true; use -1")
        values["prompt_logprobs"] = values["logprobs"]
    return validated(values, CompletionRequest)


def scored_from(body: NativeRequest) -> int | None:
    """Return the first prompt token with a requested log-probability, or None. Clients always send the field, but it
    has an effect only with return_logprob."""
    start = body.logprob_start_len
    return start if body.return_logprob and start is not None and start >= 0 else None


def _to_native_error(error: ApiError, where: str) -> ApiError:
    """Return an error of the completion with the request's parameter names. where: index in its list of prompts, in
    brackets."""
    if error.param is None:
        return error
    param = _native_name(error.param, where)
    return ApiError(error.status, error.message, kind=error.kind, param=param, code=error.code, headers=error.headers)


def _native_name(name: str, where: str) -> str:
    """Return /generate's name for a parameter of the completion."""
    name = re.sub(r"^structured_outputs(\.structural_tag)?", "structural_tag", name)
    base = re.split(r"[\[.]", name, maxsplit=1)[0]
    rest = name[len(base) :]
    base = _OURS_TO_THEIRS.get(base, base)
    if base in _FIELDS:
        return f"sampling_params{where}.{base}{rest}"
    return f"{base}{where}{rest}" if base == "text" else base + rest


class NativeReply(Reply):
    """The reply of /generate.

    several: the request has a list of prompts (perhaps of one), so the reply has a list of answers.
    texts: include the tokens' texts in log-probabilities.
    scored_from: index of the first prompt token whose log-probability is shown; None: none is.
    """

    def __init__(self, context: ReplyContext, several: bool, texts: bool, scored_from: int | None = None) -> None:
        super().__init__(context)
        self._scored_from = scored_from
        self._several = several or len(context.answers) > 1
        self._texts = texts
        self._begin_s = time.monotonic()
        self._shown = [_Shown() for _ in context.answers]

    def first_event(self, index: int) -> bytes:
        return b""

    def piece_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        self._add(index, piece, delta.content)
        return chunk_event(self._answer(index)) if delta.content or piece.tokens else b""

    def finish_event(self, index: int, piece: Piece, delta: ReplyDelta) -> bytes:
        self._add(index, piece, delta.content)
        return chunk_event(self._answer(index))

    def document(self, answers: Sequence[WholeAnswer]) -> bytes:
        for index, answer in enumerate(answers):
            self._add(index, answer.piece, answer.delta.content)
        documents = [self._answer(index) for index in range(len(answers))]
        return msgspec.json.encode(documents if self._several else documents[0])

    def _add(self, index: int, piece: Piece, text: str) -> None:
        """Add a piece to the answer so far of choice `index`. text: the part of the piece to show."""
        shown = self._shown[index]
        shown.text += text
        shown.tokens += piece.tokens
        num_top = self._context.request.logprobs
        if num_top >= 0:
            for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
                shown.logprobs.append(self._named(token, entry.logprob))
                shown.tops.append(self._tops(entry))

    def _named(self, token: int, logprob: float | None) -> NamedLogprob:
        text = self._context.tokenizer.token_text(token) if self._texts else None
        return None if logprob is None else finite(logprob), token, text

    def _tops(self, entry: TokenLogprobs | TokenScore) -> list[NamedLogprob]:
        num_top = self._context.request.logprobs
        tops = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        return [self._named(token, logprob) for token, logprob in tops]

    def _answer(self, index: int) -> NativeAnswer:
        """Return the answer so far of the choice `index`, with SGLang's `meta_info`."""
        context, shown = self._context, self._shown[index]
        request, answer = context.request, context.answers[index]
        finish = None
        if answer.finish == "stop":
            finish = NativeFinish("stop", matched=answer.matched_stop)
        elif answer.finish is not None:
            finish = NativeFinish("length", length=answer.num_tokens)
        meta = NativeMeta(
            id=context.reply_id,
            finish_reason=finish,
            prompt_tokens=len(context.prompt(index)),
            completion_tokens=answer.num_tokens,
            cached_tokens=answer.cached_tokens or 0,
            e2e_latency=round(time.monotonic() - self._begin_s, 6),
            output_token_logprobs=shown.logprobs if request.logprobs >= 0 else UNSET,
            output_top_logprobs=shown.tops if request.logprobs > 0 else UNSET,
        )
        self._add_prompt(index, meta)
        if (speculation := answer.speculation) is not None and speculation.num_rounds:
            metrics = speculation_metrics(speculation)
            meta.spec_verify_ct = metrics.num_spec_steps
            meta.spec_draft_token_num = metrics.num_draft_tokens
            meta.spec_accept_token_num = metrics.num_accepted_draft_tokens
            meta.spec_accept_length = round(metrics.mean_acceptance_length, 4)
        return NativeAnswer(shown.text, shown.tokens, meta, index if self._several and request.stream else UNSET)

    def _add_prompt(self, index: int, meta: NativeMeta) -> None:
        """Add the log-probabilities of the prompt, which are complete before the answer begins."""
        start, request = self._scored_from, self._context.request
        if start is None:
            return
        prompt = self._context.prompt(index)
        entries = [None, *self._context.answers[index].prompt_scores][start:]
        meta.input_token_logprobs = [
            self._named(token, None if entry is None else entry.logprob)
            for token, entry in zip(prompt[start:], entries, strict=True)
        ]
        if request.logprobs > 0:
            meta.input_top_logprobs = [None if entry is None else self._tops(entry) for entry in entries]


class _Shown:
    """The part of one answer received so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[NamedLogprob] = []
        self.tops: list[list[NamedLogprob]] = []


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""
    config, tokenizer = edge.config, edge.tokenizer

    async def generate(http: Request, body: NativeRequest) -> Response:
        """Continues a text, in SGLang's format."""
        request = await native_request(body, config, tokenizer)

        def form(context: ReplyContext) -> NativeReply:
            return NativeReply(context, has_several(body), body.return_text_in_logprobs is True, scored_from(body))

        return await edge.response(http, request, body.rid, form, reply_id="{}")

    async def model(http: Request) -> NativeModel:
        """The served model, in SGLang's format."""
        await require_engine(edge)
        name = config.served_model_name
        return NativeModel(model_path=name, tokenizer_path=name, max_model_len=config.max_model_len)

    return [
        post("/generate", generate, NativeRequest, NativeAnswer, event=NativeAnswer, generates=True),
        get("/get_model_info", model, NativeModel),
        get("/model_info", model, NativeModel),
    ]
