"""Messages between ingresses, engine replicas, coordinators and ranks, besides the plans and results of
`aerie.workers.scheduling.plan` and the commands of `aerie.workers.scheduling.commands.command`.

An ingress sends a `GenerateRequest` to a coordinator. The replies come in order on the same connection: `Refused`, or
the tokens and the end in `TokenBatch`es, one per ingress and step.
"""

from typing import Annotated

import msgspec

from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.adapters import AdapterChange
from aerie.workers.scheduling.plan import GraphCount, PromptLogprobs, SamplingParams, TokenLogprobs
from aerie.workers.scheduling.request import Owner
from aerie.workers.scheduling.stats import Metric, SchedulerStats

MAX_CRASHES = 1  # maximum hung or crashed steps of a request that is resumed


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One generation.

    request_id: unique.
    prompt: int32 little-endian token ids.
    output: int32 token ids already delivered to the client (a stream that is resumed on another engine); they count
        against sampling.max_tokens.
    resumed: an engine had accepted it and was lost. Such a request may wait for a restart, and a full queue accepts it.
    num_crashes: steps with it that hung or crashed on other engines.
    running_stats: fill the statistics of every delta, because the ingress may end the answer at any of them.
    token_origins: report for every token whether it was drafted.
    owner: whose request it is.
    inputs: inputs of the prompt besides its tokens.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    output: bytes = b""
    running_stats: bool = False
    token_origins: bool = False
    resumed: bool = False
    num_crashes: int = 0
    owner: Owner = Owner()
    inputs: PromptInputs | None = None


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks whether a request would run. It takes the path of a request, costs no step, and ends with a last delta, or a
    refusal with the reason."""

    request_id: str


class SpeculationStats(msgspec.Struct, frozen=True):
    """Speculation in one request. Acceptance length = 1 + accepted / num_rounds.

    num_rounds: rounds that verified drafts.
    histogram: [k] rounds that accepted k draft tokens.
    num_draft_tokens: tokens drafted per round of the default shape.
    num_drafted: tokens drafted in all rounds.
    """

    num_rounds: int
    histogram: tuple[int, ...]
    num_draft_tokens: int
    num_drafted: int


class RequestTimings(msgspec.Struct, frozen=True, array_like=True):
    """Timings of one request in one engine: seconds from arrival to its first step; worker groups lost."""

    queue_s: float
    num_resumes: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request. The first delta has none; it confirms that the engine has queued the request.

    finish: None while it runs, else "stop", "length", "abort", "error" or "invalid": the request turned out
        to be impossible while it ran.
    error: the reason, with finish="error" or "invalid".
    cached_tokens: prompt tokens found in the prefix cache; in the last delta, or in all with `running_stats`.
    speculation: statistics so far, in the same deltas; None without a draft.
    prompt_logprobs: those of further prompt tokens, if requested; sent before the first token.
    timings: sent in the deltas that have `cached_tokens`.
    attempt: number of times that the request moved to another engine; counted by the ingress.
    drafted: whether each token was drafted and accepted; empty without `token_origins`.
    num_crashes: steps with the request that hung or crashed; in a delta of its own, after each.
    weight_versions: which weights wrote the tokens: pairs of a version and a number of tokens, in their order. Empty:
        those of the engine's start.
    routed_experts: file of `RoutedExperts`, in the last delta, if requested.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    cached_tokens: int | None = None
    speculation: SpeculationStats | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    timings: RequestTimings | None = None
    attempt: int = 0
    drafted: tuple[bool, ...] = ()
    num_crashes: int = 0
    weight_versions: tuple[tuple[str, int], ...] = ()
    routed_experts: bytes = b""


def add_versions(versions: list[tuple[str, int]], delta: TokenDelta) -> None:
    """Add the versions of a delta's tokens to a list of pairs as in `TokenDelta.weight_versions`. Neighbours of one
    version become one pair."""
    for version, count in delta.weight_versions or (("", len(delta.tokens)),):
        if versions and versions[-1][0] == version:
            versions[-1] = version, versions[-1][1] + count
        else:
            versions.append((version, count))


class TokenBatch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """One step's tokens for one ingress."""

    deltas: tuple[TokenDelta, ...]


class Refusal(msgspec.Struct, frozen=True):
    """The engine refused a request. kind: "too_large" (HTTP 400), "queue_full" (429), "not_ready" (503),
    "leaving": the engine is being replaced; the ingress asks its successor (503 if there is none)."""

    kind: str
    message: str
    retry_after_s: float = 1.0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop a request and free its pages; unknown ids are ignored (it may just have finished)."""

    request_id: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's loop runs. num_steps: number of finished steps. step_s: their total seconds. graphs: state of its
    graphs."""

    rank: int
    epoch: int
    num_steps: int
    step_s: float = 0.0
    graphs: GraphCount = GraphCount()


class RankFailure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's executor raised an error, and its loop has ended. message: the traceback."""

    rank: int
    epoch: int
    message: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a rank's loop."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The coordinator refused a request."""

    request_id: str
    refusal: Refusal


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message on a connection: send `EngineState` to this ingress until it disconnects."""


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter of an engine.

    path: its folder.
    number: counts loads; a part of the digests (`salt_of_adapter`).
    is_placed: whether it is in the tables of the ranks' devices.
    """

    path: str
    number: int
    is_placed: bool = False


class EngineState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The state by which an ingress chooses an engine. It is slightly stale, which may cost time, but no tokens.

    engine_id: id of the coordinator's engine.
    status: as in `EngineStats`.
    fault: why a request would not reach the ranks now, or "".
    is_leaving: another engine replaces this one; new requests are refused.
    num_received: requests of this subscriber that the numbers below include.
    num_running, num_waiting, num_slots: requests.
    backlog_tokens: prompt tokens that are not computed yet, without those found in the prefix cache.
    prefill_tokens_per_s: speed of prefill together with the current rounds; 0: unknown.
    wait_s: expected time until a new request starts, beyond the time of `backlog_tokens`: the wait for a slot.
    page_size, lookahead: settings of the prefix cache; page_size 0: no cache.
    weight_epoch: number of the engine's weights, a part of the digests (`salt_of_weights`).
    identity: see `aerie.cluster.plan.identity`.
    stride: every `stride`-th page of a prompt is advertised.
    added, removed: digests (`aerie.attention.kv_cache.radix_node`) of pages added to or removed from the prefix
        cache since the last message on this connection.
    adapters: its LoRA adapters by name; None: those of the last message on this connection.
    adapter_changes: the last load or unload of each by a call; None: those of the last message.
    """

    engine_id: str
    status: str
    fault: str = ""
    is_leaving: bool = False
    num_received: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 1
    backlog_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    wait_s: float = 0.0
    page_size: int = 0
    lookahead: int = 0
    stride: int = 1
    added: bytes = b""
    removed: bytes = b""
    weight_epoch: int = 0
    identity: str = ""
    adapters: dict[str, AdapterState] | None = None
    adapter_changes: dict[str, AdapterChange] | None = None


class FlushOutcome(msgspec.Struct, frozen=True):
    """The result of emptying an engine's prefix cache.

    num_pages: pages it had.
    unfinished: the requests that prevented it.
    fault: why it did not answer.
    """

    engine_id: str
    num_pages: int = 0
    unfinished: str = ""
    fault: str = ""


class EngineStats(msgspec.Struct, frozen=True):
    """An engine's state, and its counters since its coordinator started, for /health and /metrics.

    status: "starting", "ready", "recovering" (workers are being restarted), "draining" or "dead".
    detail: the reason, for the operator.
    kv_usage: 0 to 1.
    num_slots: requests that can run at once.
    heartbeat_age_s: seconds since each rank's last heartbeat.
    rank_steps, rank_step_s: finished steps of each rank, and their total seconds.
    scheduler: None for an engine without a scheduler yet, or without an answer.
    cache_config: configuration of the KV cache by vLLM's names; empty without a scheduler.
    """

    engine_id: str
    status: str
    detail: str = ""
    num_running: Annotated[int, Metric("vllm:num_requests_running", "Requests that decode", "gauge")] = 0
    num_waiting: Annotated[int, Metric("vllm:num_requests_waiting", "Requests in the queue", "gauge")] = 0
    kv_usage: Annotated[float, Metric("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", "gauge")] = 0.0
    num_pages: int = 0
    num_slots: int = 1
    backlog_s: Annotated[float, Metric("aerie:backlog_seconds", "Time that pending prompts take", "gauge")] = 0.0
    slot_wait_s: Annotated[
        float, Metric("aerie:slot_wait_seconds", "Wait of a new request for a slot, beyond backlog_seconds", "gauge")
    ] = 0.0
    last_step_age_s: Annotated[
        float,
        Metric("aerie:last_step_age_seconds", "Age of the last step", "gauge"),
    ] = 0.0
    prefix_queries: Annotated[
        int, Metric("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
    ] = 0
    prefix_hits: Annotated[int, Metric("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")] = 0
    prefix_recomputed: Annotated[
        int,
        Metric("aerie:prefix_cache_recomputed_tokens", "Prompt tokens whose KV was cached, but no state after them"),
    ] = 0
    num_draft_tokens: Annotated[int, Metric("vllm:spec_decode_num_draft_tokens", "Tokens drafted")] = 0
    num_worker_restarts: Annotated[
        int, Metric("aerie:worker_restarts", "Times that an engine's workers were restarted")
    ] = 0
    num_graphs: Annotated[
        int, Metric("aerie:cuda_graphs", "Steps that each rank has captured as CUDA graphs", "gauge")
    ] = 0
    num_graphs_waiting: Annotated[
        int, Metric("aerie:cuda_graphs_waiting", "Steps that are still to be captured", "gauge")
    ] = 0
    num_dead_drafts: Annotated[
        int, Metric("aerie:dead_drafts", "1 while the draft's acceptance is lost since an update of weights", "gauge")
    ] = 0
    rounds_by_adapter: Annotated[
        dict[str, int],
        Metric("aerie:adapter_draft_rounds", "Rounds of a LoRA adapter that verified drafts", label="adapter"),
    ] = {}
    accepted_by_adapter: Annotated[
        dict[str, int],
        Metric("aerie:adapter_accepted_tokens", "Draft tokens that these rounds accepted", label="adapter"),
    ] = {}
    draft_version: Annotated[
        int,
        Metric("aerie:draft_version", "Number of the learned draft that is served; 0: the configured one", "gauge"),
    ] = 0
    draft_gain: Annotated[
        float, Metric("aerie:draft_gain_ratio", "Gain of the newest candidate in acceptance length", "gauge")
    ] = 0.0
    num_draft_candidates: Annotated[int, Metric("aerie:draft_candidates", "Drafts trained and measured")] = 0
    num_draft_rollbacks: Annotated[int, Metric("aerie:draft_rollbacks", "Learned drafts that were taken back")] = 0
    num_learned_texts: Annotated[int, Metric("aerie:learned_texts", "Answers handed to the draft's training")] = 0
    heartbeat_age_s: tuple[float, ...] = ()
    rank_steps: tuple[int, ...] = ()
    rank_step_s: tuple[float, ...] = ()
    scheduler: SchedulerStats | None = None
    cache_config: dict[str, str] = {}
