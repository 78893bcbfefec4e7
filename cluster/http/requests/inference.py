"""Converts requests for vLLM's /inference/v1/generate into completion requests."""

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.requests.edge_request import EdgeRequest, text_request
from aerie.cluster.http.schema.body import validated, without_refused
from aerie.cluster.http.schema.inference import InferenceRequest, InferenceSampling
from aerie.cluster.http.schema.request import CompletionRequest
from aerie.cluster.http.text.tokenizer import ChatTokenizer

_OF_SAMPLING = frozenset(InferenceSampling.model_fields)
_SAME = {"model", "stream", "stream_options", "cache_salt", "priority", "request_id"}


async def inference_request(body: InferenceRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the request with `n` choices. Raises ApiError with the body's names of parameters."""
    sampling = body.sampling_params
    try:
        without_refused(sampling.model_extra or {}, InferenceSampling.refused, InferenceSampling.ignored)
        values = sampling.model_dump(exclude_none=True, include=set(_OF_SAMPLING - {"detokenize"}))
        values |= body.model_dump(exclude_none=True, include=_SAME)
        values |= {"prompt": body.token_ids, "return_token_ids": True, "return_weight_versions": True}
        return await text_request(validated(values, CompletionRequest), config, tokenizer)
    except ApiError as error:
        raise _renamed(error) from None


def _renamed(error: ApiError) -> ApiError:
    base = (error.param or "").partition(".")[0].partition("[")[0]
    param = f"sampling_params.{error.param}" if base in {*_OF_SAMPLING, *InferenceSampling.refused} else error.param
    param = "token_ids" if base == "prompt" else param
    return ApiError(error.status, error.message, kind=error.kind, param=param, code=error.code, headers=error.headers)
