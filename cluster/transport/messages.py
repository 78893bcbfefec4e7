"""What travels between ingresses, the engine replica and its coordinator, as msgpack (`msgspec`), never pickle.

A request is one unary Serve call that carries a `GenerateRequest` and returns a `GenerateSummary`. Its tokens go from
the coordinator straight to the ingress's ZeroMQ socket (`reply_to`): one `TokenBatch` a step with the tokens of all
requests of that ingress.
"""

import msgspec

from workers.scheduling.plan import SamplingParams, TokenLogprobs


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


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Prometheus-style: counts[i] observations <= bounds[i], not cumulative; the last count is +Inf's."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class EngineStats(msgspec.Struct, frozen=True):
    """One engine replica's state and counters since its coordinator started; /health and /metrics are made of these,
    summed over replicas. status: "starting", "ready", "recovering" (workers are being restarted), "draining", "dead".
    kv_usage: share of pages in use by requests, 0-1. prefix_*: prompt tokens looked up and found. Speculation:
    num_drafts rounds verified, num_draft_tokens drafted, num_accepted_tokens, accepted_per_position[k] rounds that
    accepted at least k + 1. histograms: "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "step_seconds", measured in the coordinator."""

    engine_id: str
    status: str
    detail: str = ""
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_worker_restarts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = {}
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    last_step_age_s: float = 0.0
    histograms: dict[str, Histogram] = {}
