"""One log line for each generation request, and its key's counts. Used by `aerie.cluster.http.middleware`, which ends
every request, and `aerie.cluster.http.serving`, which knows its tokens."""

import logging
from dataclasses import dataclass

from starlette.types import Scope

from aerie.cluster.http.errors import RATE_LIMITED
from aerie.cluster.http.metrics import RequestCounts
from aerie.cluster.http.tenants import tenant_of
from aerie.cluster.logs import REQUEST_LOG, fields

_KEY = "tokens"
logger = logging.getLogger(REQUEST_LOG)


@dataclass(frozen=True)
class RequestTokens:
    """Tokens of a request that reached an engine.

    cached: prompt tokens found in the prefix cache, among `prompt`.
    finish: why its choices ended, separated by commas.
    """

    prompt: int
    cached: int
    output: int
    finish: str


def set_tokens(scope: Scope, tokens: RequestTokens) -> None:
    """Set the tokens of the request of `scope`."""
    scope["state"][_KEY] = tokens


def log_generation(scope: Scope, counts: RequestCounts, status: int, reason: str, seconds: float) -> None:
    """Log and count a generation request that has ended. reason: an error's code; "" for success."""
    key = tenant_of(scope).name
    tokens: RequestTokens = scope["state"].get(_KEY, RequestTokens(0, 0, 0, ""))
    if key in counts.by_key:
        usage = counts.by_key[key]
        usage.requests += 1
        usage.limited += reason == RATE_LIMITED
        usage.prompt_tokens += tokens.prompt
        usage.cached_tokens += tokens.cached
        usage.output_tokens += tokens.output
    logger.info(
        "request %s ended",
        scope["state"]["request_id"],
        extra=fields(
            path=scope["path"],
            status=status,
            reason=reason,
            seconds=round(seconds, 3),
            key=key,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            finish=tokens.finish,
        ),
    )
