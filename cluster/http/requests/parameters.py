"""Parameters of a body, checked against the `ingress` section and the model, and the engine's `SamplingParams` of them.
Called by `aerie.cluster.http.requests.edge_request`."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from aerie.cluster.http.config import EdgeConfig, OutputParserName
from aerie.cluster.http.errors import invalid, model_not_found, too_long, unsupported
from aerie.cluster.http.parsers.families import FAMILIES
from aerie.cluster.http.parsers.reasoning import ThinkingBudget
from aerie.cluster.http.schema.request import ChatCompletionRequest, CompletionRequest, requested
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.text.user_text import Truncation
from aerie.workers.scheduling.plan import MAX_STOP_TOKEN_IDS, VALUES, Grammar, SamplingParams

logger = logging.getLogger(__name__)

SERVED_MODEL = "default"  # the name of the served model in SGLang's examples, whatever its own name
DEFAULT_TEXT_TOKENS = 16  # OpenAI's default for /v1/completions


def check_model(name: str | None, config: EdgeConfig) -> None:
    """Raise ApiError unless the model is served under this name, or it may be the name of an adapter."""
    if adapter_of(name, config) and not config.serves_adapters:
        raise model_not_found(name or "", config.served_model_name)


def adapter_of(name: str | None, config: EdgeConfig) -> str:
    """Return the LoRA adapter that a request's model names, by itself or as MODEL:ADAPTER; "" for the model itself.
    `aerie.cluster.http.serving.Edge.response` checks that an engine has it."""
    if name is None or name == SERVED_MODEL or name in config.model_names:
        return ""
    model, _, adapter = name.rpartition(":")
    return adapter if adapter and model in config.model_names else name


def num_choices(n: int | None, num_prompts: int, config: EdgeConfig) -> int:
    """Return the number of choices per prompt. Raises ApiError."""
    n = 1 if n is None else n
    if not 1 <= n <= config.max_n:
        raise invalid("n", f"n must be from 1 to {config.max_n}")
    if n * num_prompts > config.max_choices:
        raise invalid(
            "n", f"{num_prompts} prompts with n={n} are more than {config.max_choices} choices; send several requests"
        )
    return n


def truncation_of(
    body: ChatCompletionRequest | CompletionRequest, max_tokens: int | None, config: EdgeConfig
) -> Truncation | None:
    """Return the part of a prompt that `truncate_prompt_tokens` keeps: its end, or its start with `truncation_side:
    right`; None for all of it. -1 keeps as many tokens as leave room for the answer. Raises ApiError."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    if limit == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for the length")
    if limit == -1:
        limit = max(1, config.max_model_len - (max_tokens or 1))
    return Truncation(limit, at_end=body.truncation_side != "right")


def answer_tokens(prompt_len: int, max_tokens: int | None, chat: bool, config: EdgeConfig) -> int:
    """Return the maximum number of tokens of an answer to a prompt of `prompt_len` tokens. Raises ApiError."""
    param = "messages" if chat else "prompt"
    if prompt_len == 0:
        raise invalid(param, f"{param} must contain at least one token")
    left = config.max_model_len - prompt_len
    if left < 1:
        raise too_long(
            f"This model's maximum context length is {config.max_model_len} tokens, prompt and answer "
            f"together, but the prompt alone has {prompt_len}; shorten it",
            param,
        )
    if max_tokens is None:
        return left if chat else min(DEFAULT_TEXT_TOKENS, left)
    if max_tokens > left:
        raise too_long(
            f"This model's maximum context length is {config.max_model_len} tokens, but the request wants "
            f"{prompt_len + max_tokens}: {prompt_len} in the prompt and {max_tokens} in the answer; shorten "
            "the prompt or lower max_tokens",
            param,
        )
    return max_tokens


def stop_strings(stop: Any, config: EdgeConfig) -> tuple[str, ...]:
    """Return the stop strings of a request. Raises ApiError."""
    entries: Sequence[Any] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list):
        raise invalid("stop", "stop must be a string or a list of strings")
    if len(entries) > config.max_stop_strings:
        raise invalid("stop", f"stop may have at most {config.max_stop_strings} entries")
    for entry in entries:
        if not isinstance(entry, str) or not 1 <= len(entry) <= config.max_stop_length:
            raise invalid("stop", f"stop: each entry must be a string of 1 to {config.max_stop_length} characters")
    return tuple(entries)


def check_scores(
    body: ChatCompletionRequest | CompletionRequest, num_top: int, num_tokens: int, config: EdgeConfig
) -> None:
    """Raise ApiError for too many log-probabilities of prompts.

    num_tokens: prompt tokens of all choices.
    num_top: likely tokens reported for each; -1: none.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not available with stream: true; ask for the whole reply")
    check_total_scores(num_top, num_tokens, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs", config)


def check_total_scores(num_top: int, num_tokens: int, param: str, config: EdgeConfig) -> None:
    """Do `check_scores` for a whole request. param: the parameter that requested them."""
    if num_top >= 0 and num_tokens * (1 + num_top) > config.max_prompt_logprobs:
        raise invalid(
            param,
            f"{num_tokens} prompt tokens with {num_top} likely ones each are more than {config.max_prompt_logprobs} "
            "log-probabilities (ingress.max_prompt_logprobs); ask for fewer, or send several requests",
        )


def sampling_params(
    body: ChatCompletionRequest | CompletionRequest,
    logprobs: int,
    eos: frozenset[int],
    grammar: Grammar | None,
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
) -> SamplingParams:
    """Return the parameters shared by all choices; max_tokens and seed are set later. eos: the model's end-of-sequence
    ids. Raises ApiError."""
    # Scripts written for another model send its ids. Ids outside of this model's vocabulary have no effect.
    stop_tokens = eos.union(token for token in body.stop_token_ids or [] if token < tokenizer.num_ids)
    if len(stop_tokens) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids",
            f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}, the model's own {len(eos)} "
            "included; send fewer, or use stop strings",
        )
    values = {name: VALUES[name].of(value) for name, value in (config.sampling_defaults | requested(body)).items()}
    if grammar is not None and values.get("min_tokens"):
        raise invalid("min_tokens", "min_tokens cannot be combined with a form of answer, which says where it may end")
    if values.get("top_p") == 0.0:  # permitted by OpenAI; keeps the most likely token, which is what top_k=1 says
        values |= {"top_k": 1, "top_p": 1.0}
    return SamplingParams(
        max_tokens=0,
        **values,
        logit_bias=_logit_bias(body.logit_bias or {}, tokenizer),
        stop_token_ids=tuple(sorted(stop_tokens)),
        logprobs=logprobs,
        grammar=grammar,
        cache_salt=b"" if body.cache_salt is None else _salt(body.cache_salt),
        adapter=adapter_of(body.model, config),
    )


def choice_seed(seed: int, index: int) -> int:
    """Return 64 bits for choice `index`. The first choice has the seed itself, so that it does not depend on the number
    of choices."""
    seed &= 2**64 - 1
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _salt(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _logit_bias(bias_by_token: dict[str, float], tokenizer: ChatTokenizer) -> dict[int, float]:
    """Return the biases by token id. Raises ApiError for keys that are no token of the model."""
    biases = {}
    for key, bias in bias_by_token.items():
        # str.isdigit alone would accept digits of other scripts.
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < tokenizer.num_ids:
            raise invalid(
                "logit_bias", f"logit_bias: {key[:20]!r} must be a token id from 0 to {tokenizer.num_ids - 1}"
            )
        biases[token] = float(bias)
    return biases


def chat_parser(config: EdgeConfig) -> OutputParserName:
    """Return the parser of chats' answers."""
    assert config.output_parser != "auto", "the application's builder finds it"
    return config.output_parser


def separates_reasoning(body: ChatCompletionRequest, parser: OutputParserName) -> bool:
    """Return whether the reply has reasoning and content in separate fields. Raises ApiError."""
    separates = body.separate_reasoning is not False
    if not separates and parser in ("harmony", "response_template"):
        raise unsupported("separate_reasoning", "this model's answer format always separates reasoning")
    return separates


async def thinking_budget(
    body: ChatCompletionRequest, parser: OutputParserName, tokenizer: ChatTokenizer
) -> ThinkingBudget | None:
    """Return the request's limit of thinking tokens, None without one. Raises ApiError if the model's thinking has no
    marks."""
    limit = body.thinking_token_budget
    if limit is None or limit < 0:
        return None
    marks = FAMILIES[parser].thinking
    if marks is None or body.separate_reasoning is False:
        known = ", ".join(name for name, family in FAMILIES.items() if family.thinking is not None)
        raise unsupported("thinking_token_budget", f"answers have no thinking between marks; output parsers: {known}")
    if body.allowed_token_ids:
        raise unsupported("thinking_token_budget", "thinking cannot be ended with allowed_token_ids")
    closing = await tokenizer.encode(marks[1], add_special_tokens=False)
    return ThinkingBudget(limit, tuple(closing))


def with_sampling_defaults(config: EdgeConfig, recommended: Mapping[str, float]) -> EdgeConfig:
    """Fill open defaults of the configuration with the model's recommendations. Raises ValueError."""
    known = config.sampling_defaults
    values = {
        f"default_{name}": VALUES[name].of(value)  # Hugging Face writes 0 and -1 for a top_k that is off
        for name, value in recommended.items()
        if name not in known
    }
    if not values:
        return config
    logger.info("sampling defaults of generation_config.json: %s", ", ".join(f"{k}={v:g}" for k, v in values.items()))
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; correct it, or set ingress.{next(iter(values))}") from None
