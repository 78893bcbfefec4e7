"""A request to SGLang's own route as one to /v1/completions. Raises ApiError."""

import re

from pydantic import ValidationError

from cluster.http.errors import ApiError, invalid
from cluster.http.schema.body import validation_fault, without_refused
from cluster.http.schema.native_request import DEFAULT_NEW_TOKENS, NativeRequest, NativeSampling
from cluster.http.schema.request import CompletionRequest

_FIELDS = frozenset(NativeSampling.model_fields)
# SGLang's names that differ from ours.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_OURS_TO_THEIRS = {"prompt": "text", "prompt_logprobs": "logprob_start_len"} | {
    ours: name for name, ours in _NAMES.items()
}


def native_completion(body: NativeRequest) -> CompletionRequest:
    """The completion that a request amounts to."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    sampling = body.sampling_params or NativeSampling()
    try:
        without_refused(sampling.model_extra or {}, NativeSampling.refused)
    except ApiError as error:
        raise ApiError(400, error.message, param=f"sampling_params.{error.param}", code=error.code) from None
    given = sampling.model_dump(exclude_none=True, include=set(_FIELDS))
    values = {_NAMES.get(name, name): value for name, value in given.items()}
    if (tag := values.pop("structural_tag", None)) is not None:
        values["structured_outputs"] = {"structural_tag": tag}
    values.setdefault("max_tokens", DEFAULT_NEW_TOKENS)
    values["echo"] = values["max_tokens"] == 0  # which asks for the prompt's log-probabilities alone
    values |= {"prompt": body.input_ids if body.text is None else body.text, "stream": body.stream, "rid": body.rid}
    values["return_token_ids"] = True
    if body.return_logprob:
        values["logprobs"] = body.top_logprobs_num or 0
    if scored_from(body) is not None:
        if body.stream:
            raise invalid("logprob_start_len", "logprob_start_len is not available with stream: true; use -1")
        values["prompt_logprobs"] = values["logprobs"]
    try:
        return CompletionRequest.model_validate(values)
    except ValidationError as error:
        raise to_native_error(validation_fault(error)) from None


def scored_from(body: NativeRequest) -> int | None:
    """Return the first prompt token whose log-probability is wanted, or None. It matters only with return_logprob;
    clients send it always."""
    start = body.logprob_start_len
    return start if body.return_logprob and start is not None and start >= 0 else None


def to_native_error(error: ApiError) -> ApiError:
    """An error of the completion by the names of the request."""
    name = error.param
    if name is None:
        return error
    base = re.split(r"[\[.]", name, maxsplit=1)[0]
    rest = name[len(base) :]
    base = _OURS_TO_THEIRS.get(base, base)
    param = f"sampling_params.{base}{rest}" if base in _FIELDS else base + rest
    return ApiError(error.status, error.message, kind=error.kind, param=param, code=error.code, headers=error.headers)
