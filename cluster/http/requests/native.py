"""Converts requests for SGLang's /generate into completion requests."""

import re
from dataclasses import replace
from typing import Any

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError, invalid
from aerie.cluster.http.requests.batch import joined_request
from aerie.cluster.http.requests.edge_request import EdgeRequest, text_request
from aerie.cluster.http.requests.parameters import check_total_scores, num_choices
from aerie.cluster.http.requests.prompts import listed_prompts
from aerie.cluster.http.schema.body import validated, without_refused
from aerie.cluster.http.schema.native import DEFAULT_NEW_TOKENS, VALUE_NAMES, NativeRequest, NativeSampling
from aerie.cluster.http.schema.request import CompletionRequest
from aerie.cluster.http.text.tokenizer import ChatTokenizer

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
    prompts, given = _prompts(body), body.sampling_params
    if not isinstance(given, list):
        return await _request(body, prompts, given or NativeSampling(), config, tokenizer)
    try:
        listed = listed_prompts(prompts, config.max_choices, tokenizer)
    except ApiError as error:
        raise _to_native_error(error, "") from None
    if not has_several(body) or len(listed) != len(given):
        message = f"sampling_params has {len(given)} entries for {len(listed)} prompts; give one for each"
        raise invalid("sampling_params", message)
    for i, sampling in enumerate(given):
        if sampling.n != given[0].n:
            raise invalid(f"sampling_params[{i}].n", f"sampling_params[{i}].n must be that of the others")
    n = num_choices(given[0].n, len(given), config)
    each = [await _request(body, listed[i], given[i], config, tokenizer, i) for i in range(len(given))]
    check_total_scores(
        max(request.choices[0].sampling.prompt_logprobs for request in each),
        n * sum(len(request.prompts[0]) for request in each),
        "logprob_start_len",
        config,
    )
    return joined_request(each)


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
    named = [replace(each, grammar_param=_native_name(each.grammar_param, where)) for each in request.choices]
    return replace(request, choices=named)


def _completion(body: NativeRequest, prompt: Any, sampling: NativeSampling) -> CompletionRequest:
    """Return the equivalent completion. Raises ApiError."""
    given = sampling.model_dump(exclude_none=True, include=set(_FIELDS))
    values = {_NAMES.get(name, name): value for name, value in given.items()}
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
