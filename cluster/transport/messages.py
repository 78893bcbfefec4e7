"""What travels between ingresses, the engine replica and its coordinator, as msgpack (`msgspec`), never pickle.

A request is one unary Serve call that carries a `GenerateRequest` and returns a `GenerateSummary`. Its tokens go from
the coordinator straight to the ingress's ZeroMQ socket (`reply_to`): one `TokenBatch` a step with the tokens of all
requests of that ingress.
"""

from typing import Annotated

import msgspec

from workers.scheduling.plan import SamplingParams, TokenLogprobs
from workers.scheduling.stats import Metric, SchedulerStats


class GenerateRequest(msgspec.Struct, frozen=True):
    """request_id: unique. prompt: int32 little-endian token ids. reply_to: endpoint of the ingress that reads tokens.
    output: int32 token ids already delivered to the client (a stream that is resumed on another engine); they count
    against sampling.max_tokens. running_stats: fill the statistics of every delta, because the ingress may end the
    answer at any of them."""

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    reply_to: str
    output: bytes = b""
    running_stats: bool = False


class SpeculationStats(msgspec.Struct, frozen=True):
    """num_rounds: rounds that verified drafts. histogram[k]: rounds that accepted k draft tokens. num_draft_tokens:
    tokens drafted per round. Acceptance length = 1 + accepted / num_rounds."""

    num_rounds: int
    histogram: tuple[int, ...]
    num_draft_tokens: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. finish: None while it runs, else "stop", "length", "abort" or "error" (then `error`
    says why). cached_tokens and speculation, so far, are filled with the last delta, with `running_stats` with every
    one; None: not told, or no draft."""

    request_id: str
    tokens: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    cached_tokens: int | None = None
    speculation: SpeculationStats | None = None


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """One step's tokens for one ingress. source: the coordinator's id; sequence counts from 0 per (source, ingress)
    and shows a lost message."""

    source: str
    sequence: int
    deltas: tuple[TokenDelta, ...]


class GenerateSummary(msgspec.Struct, frozen=True):
    """What the unary call returns: how the request ended. Tokens do not travel here."""

    request_id: str
    finish: str
    num_output_tokens: int
    error: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    """The engine did not take a request. kind: "too_large" (HTTP 400), "queue_full" (429), "not_ready" (503)."""

    kind: str
    message: str
    retry_after_s: float = 1.0


class EngineAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What the unary call of an engine replica returns: one of both."""

    summary: GenerateSummary | None = None
    refusal: Refusal | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """Stop a request and free its pages; unknown ids are ignored (it may just have finished)."""

    request_id: str


class FlushOutcome(msgspec.Struct, frozen=True):
    """What an engine replica did when told to empty its prefix cache. num_pages: how many it had. unfinished: which
    requests kept it from doing so; fault: it could not be asked."""

    engine_id: str
    num_pages: int = 0
    unfinished: str = ""
    fault: str = ""


class EngineStats(msgspec.Struct, frozen=True):
    """One engine's state now, and its counters since its coordinator started; /health and /metrics are made of these.

    status: "starting", "ready", "recovering" (workers are being restarted), "draining" or "dead".
    detail: why, for the operator.
    kv_usage: 0 to 1.
    scheduler: None of an engine that has no scheduler yet, or could not be asked.
    """

    engine_id: str
    status: str
    detail: str = ""
    num_running: Annotated[int, Metric("vllm:num_requests_running", "Requests that decode", "gauge")] = 0
    num_waiting: Annotated[int, Metric("vllm:num_requests_waiting", "Requests in the queue", "gauge")] = 0
    kv_usage: Annotated[
        float, Metric("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", "gauge", across="mean")
    ] = 0.0
    num_pages: int = 0
    last_step_age_s: Annotated[
        float,
        Metric(
            "aerie:last_step_age_seconds",
            "Age of the last step, of the engine where it is oldest",
            "gauge",
            across="max",
        ),
    ] = 0.0
    prefix_queries: Annotated[
        int, Metric("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
    ] = 0
    prefix_hits: Annotated[int, Metric("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")] = 0
    num_draft_tokens: Annotated[int, Metric("vllm:spec_decode_num_draft_tokens", "Tokens drafted")] = 0
    num_worker_restarts: Annotated[
        int, Metric("aerie:worker_restarts", "Times that an engine's workers were restarted")
    ] = 0
    scheduler: SchedulerStats | None = None
