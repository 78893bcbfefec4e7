"""The messages between scheduler and ranks: one `StepPlan` to all ranks, and one `StepResult` from rank 0, per step.

Encoded as msgpack by `msgspec`: array-like structs, and int32 arrays as little-endian bytes (`pack_i32`). A plan of
rounds for 128 running requests is under 1 KB; a chunk adds 4 bytes per token. Ranks execute plans in the order of
`step`. The scheduler reads the result of a step while the next step runs.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from aerie.workers.prompt_inputs import Encoding, PromptInputs
from aerie.workers.request_values import Value, declared_values, uses

MAX_STOP_TOKEN_IDS = 64  # per request, including end-of-sequence ids; the size of a device tensor's row


def pack_i32(values: Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> bytes:
    """Return `values` as little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(raw: bytes) -> npt.NDArray[np.int32]:
    """Return a read-only int32 view [n] of the bytes of `pack_i32`."""
    return np.frombuffer(raw, dtype="<i4")


GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that an answer must follow, up to one of end_token_ids (docs/structured-output.md). Compiled by
    `aerie.workers.structured_output`.

    kind, text: "json_schema", a schema checked by `aerie.workers.structured_output.json_schema`; "regex"; "ebnf", whose
        first rule is `root`; "choice", a JSON list of strings; "structural_tag", a JSON object in xgrammar's format.
    end_token_ids: the model's end-of-sequence ids; allowed only where the text may end.
    any_whitespace: whether any whitespace is allowed between parts of JSON; else exactly one space after each comma and
        colon.
    """

    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]
    any_whitespace: bool = True


MIN_TEMPERATURE = 1e-5  # below this, sampling is greedy in effect, and dividing logits by the temperature overflows


def _signed_seed(init: "SlotInit") -> int:
    """Return the lowest 64 bits of the seed as a signed integer."""
    seed = init.sampling.seed & ((1 << 64) - 1)
    return seed - (1 << 64) if seed >> 63 else seed


def _temperature(init: "SlotInit") -> float:
    """Return the temperature; 0 for greedy requests."""
    return init.sampling.temperature if init.sampling.is_random else 0.0


def _less_one(init: "SlotInit") -> float:
    """Return the repetition penalty less 1, which is 0 in slots that no request has used."""
    return init.sampling.repetition_penalty - 1.0


_TEMPERATURE = Value(ge=0.0, le=2.0, least=MIN_TEMPERATURE, server_default=True, on_device=True, stored=_temperature)
_TOP_K = Value(ge=-1, lt=2**31, least=0, server_default=True, on_device=True, use="filter")
_SHARE = Value(ge=0.0, le=1.0, server_default=True, on_device=True, use="filter")
_SEED = Value(ge=-(2**63), lt=2**64, generate_name="sampling_seed", on_device=True, stored=_signed_seed)
_PENALTY = Value(ge=-2.0, le=2.0, on_device=True, use="counts")
_FACTOR = Value(gt=0.0, le=100.0, server_default=True, on_device=True, use="counts", stored=_less_one)


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of a request. Defaults: sampling from the model's distribution. A field with a `Value` is a
    declaration from which fields of requests, defaults of servers, and columns of slots follow.

    temperature 0, top_k 1 or top_p 0: greedy; ties go to the lowest id.
    top_k, top_p, min_p: filters after temperature, in this order; 0, 1 and 0 turn them off. top_p and min_p apply to
        the distribution that top_k leaves. Tokens that tie with the last kept one are kept
        (`aerie.kernels.sampling.filters`).
    seed: 64 bits. A token depends only on (seed, position, logits), so it is the same with and without speculation.
    presence_penalty, frequency_penalty: OpenAI's.
    repetition_penalty: Hugging Face's, over prompt and output.
    logit_bias: token id -> bias.
    stop_token_ids: end the request; include the model's end-of-sequence ids unless the request ignores them. Not chosen
        before `min_tokens` output tokens.
    logprobs: -1: none; 0: of the chosen token; k: also of the k most likely tokens. They are computed before penalties,
        grammar and temperature.
    grammar: tokens that it forbids are never chosen.
    cache_salt: requests share cached pages only with requests of the same salt; does not affect tokens.
    prompt_logprobs: like logprobs, for the prompt's tokens after the first. Unless -1, the prompt does not use the
        prefix cache.
    adapter: name of the adapter that changes the target's layers; "": none.
    routed_experts: whether the last output has the experts of each token (`ReadRoutedExperts`).
    """

    max_tokens: int
    temperature: Annotated[float, _TEMPERATURE] = 1.0
    top_k: Annotated[int, _TOP_K] = 0
    top_p: Annotated[float, _SHARE] = 1.0
    min_p: Annotated[float, _SHARE] = 0.0
    seed: Annotated[int, _SEED] = 0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    repetition_penalty: Annotated[float, _FACTOR] = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: Annotated[int, Value(ge=0, lt=2**31, generate_name="min_new_tokens", use="shaping")] = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    speculative: Annotated[bool, Value()] = True
    grammar: Grammar | None = None
    cache_salt: bytes = b""
    prompt_logprobs: int = -1
    adapter: str = ""
    routed_experts: bool = False

    @property
    def is_random(self) -> bool:
        """Whether the request is sampled. Filters that keep one token make it greedy, so that ties, which are common in
        bfloat16, go to the lowest id."""
        return self.temperature > 0 and self.top_k != 1 and self.top_p > 0

    @property
    def is_filtered(self) -> bool:
        """Whether filters may exclude tokens."""
        return self.is_random and _filters(self)

    @property
    def needs_token_counts(self) -> bool:
        """Whether sampling needs the number of occurrences of each token."""
        return _counts(self)

    @property
    def shapes_logits(self) -> bool:
        """Whether the request changes logits before sampling: penalties, biases, or min_tokens."""
        return bool(self.logit_bias) or _shapes(self)

    @property
    def is_rare(self) -> bool:
        """Whether sampling needs more than temperature and filters, for which not all shapes have graphs."""
        return self.shapes_logits or self.logprobs >= 0 or self.grammar is not None


VALUES = declared_values(SamplingParams)
_filters, _counts, _shapes = uses(VALUES, "filter"), uses(VALUES, "counts"), uses(VALUES, "counts", "shaping")


class SlotInit(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters a slot. Sent in the plan with its first prompt chunk.

    num_cached: tokens that need not be computed; the first chunk starts after them.
    prompt_len: length of the prompt. Chunks of a resumed request also contain its earlier output.
    max_len: position after its last permitted token, prompt_len + max_tokens.
    prompt: its tokens, int32; empty unless sampling needs token counts, or drafts are copied from them.
    output: its tokens so far, int32; empty unless needed for counts, a grammar or copied drafts.
    number: the request's number, the same each time it enters a slot.
    state_row: with recurrent layers, the row of the state after `num_cached` tokens, which is copied to the slot before
        the plan runs; -1: the request starts at position 0.
    position_shift: `PromptInputs.shift`.
    adapter: index of its adapter in the ranks' tables; -1: none.
    """

    slot: int
    num_cached: int
    prompt_len: int
    max_len: int
    sampling: SamplingParams
    prompt: bytes = b""
    output: bytes = b""
    number: int = -1
    state_row: int = -1
    position_shift: int = 0
    adapter: int = -1


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A prompt chunk of a slot, from position `start`.

    tokens: int32 bytes.
    next_token: the prompt token after the chunk, for the draft; -1 for the last chunk, after which the first output
        token is sampled.
    logprobs: -1: none; k: the result has log-probabilities of the prompt tokens after each of `tokens`, with the k most
        likely tokens. There is at least one such token.
    store_from: the first position whose KV is written; earlier tokens only advance recurrent states.
    inputs: inputs besides `tokens`, at positions of the prompt.
    """

    slot: int
    start: int
    tokens: bytes
    next_token: int
    logprobs: int = -1
    store_from: int = 0
    inputs: PromptInputs | None = None

    @property
    def num_logprobs(self) -> int:
        """Number of prompt tokens whose log-probabilities the result has."""
        return len(self.tokens) // 4 - (self.next_token < 0) if self.logprobs >= 0 else 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step of all ranks: page-table changes, slot initialisation, then one target pass over rounds and chunks.

    All decisions are in the plan; ranks make none. Built by `Scheduler`. Below, "From" names the part of it that writes
    a field, and "->" the reader.

    epoch: number of the worker group. -> `RankChannel`, which drops plans of another epoch
    step: its number, one more than that of the previous plan or `Command`. -> the result
    slots: int32, slots of the requests that run a round. -> `PlanBatches`
    shape: index of the tree shape to verify; larger drafted trees are cut to it. From `ShapeChoice`. -> the strategy,
        `GraphKeys`
    next_shape: index of the tree shape to draft; 0: none. From `ShapeChoice`. -> as shape
    drafting: uint8 per entry of the result (rounds, then last chunks). 1: draft a tree of `next_shape`; 0: only write
        the draft's KV of committed tokens; empty: all 0. Without a draft model (`RoundShapes.model_free`) rounds of
        shape 0 draft, too. -> `PlanBatches`
    max_kv_len: exclusive host-side bound on the positions that this step reads or writes. From `PlanBuilder`. ->
        attention backends
    page_updates: int32 triples (slot, index in its page table, page), at most one per entry of a table. Page 0, the
        dummy page, replaces a page that was taken away. From `SlotPages`. -> `SlotTable`
    cleared_pages, cleared_window_pages: int32, pages to zero before the step, because they may hold NaN. From
        `SlotPages`. -> `KVPool`
    inits: requests that enter slots. From `PlanBuilder`. -> `SlotTable`, `SlotGrammars`
    chunks: prompt chunks. From `PrefillPlanner`. -> `PlanBatches`; `PlanTiming` checks for any
    grammars: grammars of waiting requests, to compile ahead. From `GrammarQueue`. -> `SlotGrammars`
    ended: int32, numbers of requests with grammars that have ended since the last plan, with or without a slot. From
        `GrammarQueue`. -> `SlotGrammars`
    mask_wait_ms: milliseconds that this step may wait for the masks of its requests. -> `SlotGrammars`
    saved_states: int32 triples (slot, position, row), at most one per slot. The state of recurrent layers after exactly
        `position` tokens is saved to that row, by the slot's chunk in this plan, or else by its first round at or after
        the position. From `StateSaves`. -> `PlanBatches`
    window_updates: int32 pairs (page, window page): from this plan on, layers with a window use the window page for
        this page; 0, the dummy page, for none. From `WindowPages`. -> `KVPool`
    placed_adapters: int32 pairs (number, index): from this plan on, the adapter is at this index of the tables. From
        `Adapters`. -> `RankAdapters`
    encodings: parts of images to encode before the pass. From `ImageChunks`. -> `VisionTower`
    """

    epoch: int
    step: int
    slots: bytes
    shape: int
    max_kv_len: int
    next_shape: int = 0
    drafting: bytes = b""
    page_updates: bytes = b""
    inits: tuple[SlotInit, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    grammars: tuple[Grammar, ...] = ()
    ended: bytes = b""
    mask_wait_ms: float = 1000.0
    cleared_pages: bytes = b""
    saved_states: bytes = b""
    window_updates: bytes = b""
    cleared_window_pages: bytes = b""
    placed_adapters: bytes = b""
    encodings: tuple[Encoding, ...] = ()


class GraphCount(msgspec.Struct, frozen=True, array_like=True):
    """CUDA graphs of a rank.

    missed_rows: padding rows so far that the next graph would have saved.
    capture_ms: mean milliseconds of a capture.
    """

    num_captured: int = 0
    num_waiting: int = 0
    missed_rows: int = 0
    capture_ms: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (nats) of an emitted token, and the most likely tokens at its position, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n prompt tokens from position `start`, each given those before it. All arrays are
    little-endian bytes.

    logprobs: float32 [n], in nats.
    ranks: int32 [n], one more than the number of more likely tokens.
    top_ids, top_logprobs: int32 and float32 [n * k], the k most likely tokens per position, best first.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def end(self) -> int:
        """The position after the last of these tokens."""
        return self.start + len(self.logprobs) // 4


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why one request must end, for its client. is_invalid: the request is impossible (HTTP 400), else HTTP
    500."""

    message: str
    is_invalid: bool = False


NOT_FINITE = Failure("the model's logits for its next token are NaN or infinite")  # FINISH_NOT_FINITE


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The output of a step. Its n entries are in the order of `StepPlan.slots`, then of the plan's last chunks. Built
    by `PendingStep`. "->" names the readers of a field besides `StepResults`.

    epoch, step: those of the plan. -> the coordinator, which drops results of another epoch
    counts: int32 [n], tokens emitted per entry; 0 for a slot that had already finished, a request with a late mask, and
        a request whose parameters failed on any rank.
    tokens: int32, ragged by counts.
    finish: uint8 [n], codes of `aerie.kernels.slots.finish`.
    accepted: int32 [n], draft tokens accepted before truncation by a stop; -1 if the entry did not verify drafts. ->
        `Acceptance`, statistics
    logprobs: per entry, one per emitted token; only for requests with log-probabilities.
    prompt_logprobs: one for each chunk of the plan with log-probabilities, in their order.
    elapsed_s: seconds from the plan's arrival on this rank to the end of the step. -> the coordinator, the worker loop
    took_s: the part of elapsed_s after the end of the previous step: the time of the step itself. -> `StepTime`
    failed: per entry, why its request ends; its output of this step is dropped. From `SlotGrammars`, and for logits
        that are not finite.
    failed_requests: why requests end, by request number; they may have no entry. From `SlotGrammars`, `PlanBatches`.
    masks_ready: int32, numbers of requests whose late mask is ready now. From `SlotGrammars`.
    grammars_ready: int32, grammars that are compiled now, as numbers in the order of their announcement by plans of
        this epoch. From `SlotGrammars`. -> `GrammarQueue`
    graphs: graph counts after this step. From `GraphedDecoding`. -> `CapturePacing`
    matches: int32 [n, 3], `StepTensors.matches`; empty in engines that do not copy drafts. -> `Acceptance`
    min_entropies: int32 [n], `StepTensors.min_entropies`; empty in engines without them. -> `Acceptance`
    """

    epoch: int
    step: int
    counts: bytes
    tokens: bytes
    finish: bytes
    accepted: bytes
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    elapsed_s: float = 0.0
    took_s: float = 0.0
    failed: dict[int, Failure] = {}
    masks_ready: bytes = b""
    failed_requests: dict[int, Failure] = {}
    grammars_ready: bytes = b""
    graphs: GraphCount = GraphCount()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    matches: bytes = b""
    min_entropies: bytes = b""
