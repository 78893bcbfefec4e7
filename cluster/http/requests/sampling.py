"""Converts a checked body's parameters to the engine's `SamplingParams`. Called by
`cluster.http.requests.edge_request`."""

import hashlib

from cluster.http.config import EdgeConfig
from cluster.http.errors import invalid
from cluster.http.requests.prompts import check_token_ids
from cluster.http.requests.structured_output import GrammarMaker
from cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from cluster.http.text.tokenizer import ChatTokenizer
from workers.scheduling.plan import MAX_STOP_TOKEN_IDS, SamplingParams

MIN_TEMPERATURE = 1e-5  # below this, sampling is greedy in effect, and dividing logits by the temperature overflows


def sampling_params(
    body: ChatCompletionRequest | CompletionRequest,
    logprobs: int,
    eos: frozenset[int],
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
) -> SamplingParams:
    """Return the parameters shared by all choices; max_tokens and seed are set later. eos: the model's end-of-sequence
    ids. Raises ApiError."""
    temperature = _given(body.temperature, config.default_temperature, 1.0)
    top_p = _given(body.top_p, config.default_top_p, 1.0)
    top_k = max(0, int(_given(body.top_k, config.default_top_k, 0)))
    # Scripts written for another model send its ids. Ids outside of this model's vocabulary have no effect.
    stop_tokens = eos.union(token for token in body.stop_token_ids or [] if token < tokenizer.vocab_size)
    if len(stop_tokens) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}, the model's own {len(eos)} "
            "included; send fewer, or use stop strings",
        )
    check_token_ids("allowed_token_ids", body.allowed_token_ids or [], tokenizer)
    grammar = GrammarMaker(config, eos).of_body(body)
    if grammar is not None and body.min_tokens:
        raise invalid("min_tokens", "min_tokens cannot be combined with a form of answer, which says where it may end")
    return SamplingParams(
        max_tokens=0,
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        # top_p=0 is permitted by OpenAI and keeps the most likely token, which is what top_k=1 says.
        top_k=top_k if top_p > 0.0 else 1,
        top_p=top_p if top_p > 0.0 else 1.0,
        min_p=_given(body.min_p, config.default_min_p, 0.0),
        presence_penalty=_given(body.presence_penalty, None, 0.0),
        frequency_penalty=_given(body.frequency_penalty, None, 0.0),
        repetition_penalty=_given(body.repetition_penalty, config.default_repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, tokenizer),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(sorted(stop_tokens)),
        logprobs=logprobs,
        speculative=body.speculative is not False,
        grammar=grammar,
        cache_salt=b"" if body.cache_salt is None else _salt(body.cache_salt),
    )


def _salt(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _logit_bias(given: dict[str, float], tokenizer: ChatTokenizer) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        # str.isdigit alone would accept digits of other scripts.
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < tokenizer.vocab_size:
            raise invalid(
                "logit_bias", f"logit_bias: {key[:20]!r} must be a token id from 0 to {tokenizer.vocab_size - 1}"
            )
        biases[token] = float(bias)
    return biases


def _given(value: float | None, configured: float | None, otherwise: float) -> float:
    """Return the request's value, else the configuration's or the model's, else `otherwise`."""
    return next((each for each in (value, configured) if each is not None), otherwise)
