"""Checks of a request against the `ingress` section and the model's length. Called by
`cluster.http.requests.edge_request`."""

from collections.abc import Sequence
from typing import Any

from cluster.http.config import EdgeConfig
from cluster.http.errors import invalid, model_not_found, too_long
from cluster.http.schema.request import ChatCompletionRequest, CompletionRequest
from cluster.http.text.long_text import Truncation

SERVED_MODEL = "default"  # the name of the served model in SGLang's examples, whatever its own name
DEFAULT_TEXT_TOKENS = 16  # OpenAI's default for /v1/completions


def check_model(name: str | None, config: EdgeConfig) -> None:
    """Raise ApiError unless the model is served under this name."""
    if name is not None and name != SERVED_MODEL and name not in config.model_names:
        raise model_not_found(name, config.served_model_name)


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
            raise invalid("stop", f"each stop must be a string of 1 to {config.max_stop_length} characters")
    return tuple(entries)


def check_scores(
    body: ChatCompletionRequest | CompletionRequest, num_top: int, num_tokens: int, config: EdgeConfig
) -> None:
    """Raise ApiError for too many log-probabilities of prompts.

    num_tokens: prompt tokens of all choices. num_top: likely tokens reported for each; -1: none."""
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
