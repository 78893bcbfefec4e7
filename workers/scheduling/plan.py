"""What travels between the scheduler and the ranks: one `StepPlan` down and one `StepResult` up per step.

msgpack through `msgspec`: array-like structs and int32 arrays as raw little-endian bytes (`pack_i32`), so that a plan
for 128 running requests is under 1 KB. Plans are executed in the order of `step`; a result answers the plan with its
number and is read one step late.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

FINISH_NONE, FINISH_STOP, FINISH_LENGTH = 0, 1, 2
FINISH_NOT_FINITE = 3  # the logits of its next token are NaN or infinite; the rank makes a `Failure` of it
MAX_STOP_TOKEN_IDS = 64  # of one request, the model's end-of-sequence ids included: a row of a device tensor


def pack_i32(values: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Little-endian int32 bytes of `values`."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(raw: bytes) -> npt.NDArray[np.int32]:
    """[n] int32 view of what `pack_i32` made; read-only."""
    return np.frombuffer(raw, dtype="<i4")


GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must be: a whole text of a grammar, then one of end_token_ids (docs/structured-output.md). A plain
    value; `workers.structured_output` compiles it.

    kind, text: "json_schema", a schema that `workers.structured_output.json_schema` has checked; "regex"; "ebnf", whose
        first rule is `root`; "choice", a JSON list of strings; "structural_tag", a JSON object as xgrammar has it.
    end_token_ids: the model's end-of-sequence ids, allowed where the text may end and nowhere else.
    any_whitespace: between the parts of JSON; else one space after each comma and colon and no other.
    """

    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]
    any_whitespace: bool = True


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How one request's tokens are chosen. Defaults: plain sampling from the model's distribution.

    temperature 0, top_k 1 and top_p 0 are greedy: the most likely token, of equals the lowest id. top_k 0, top_p 1 and
    min_p 0 switch those filters off; they apply in that order after temperature, top_p and min_p on the distribution
    that top_k left, and keep what ties with the last one they keep (`workers.ops.sampling.filters`). seed: 64 bits; the
    token at a position depends on (seed, position, logits) alone, so it is the same with and without speculation.
    Penalties follow OpenAI's and (for `repetition_penalty`, over prompt and output) Hugging Face's definitions.
    logit_bias: token id -> bias. stop_token_ids end the request and include the model's end-of-sequence ids unless the
    request ignores them; they cannot be chosen before `min_tokens` output tokens. logprobs: -1 none, 0 the chosen
    token's, k also the k most likely, of the model's distribution before penalties, grammar and temperature.
    grammar: tokens that it does not allow are never chosen.
    cache_salt: the prefix cache shares pages only between requests of the same one; changes no token.
    prompt_logprobs: as logprobs, of the prompt's tokens but the first. The prefix cache is not asked for such a prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    speculative: bool = True
    grammar: Grammar | None = None
    cache_salt: bytes = b""
    prompt_logprobs: int = -1

    @property
    def needs_token_counts(self) -> bool:
        """Whether choosing a token needs to know how often each one occurred."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_rare(self) -> bool:
        """Whether choosing a token needs more than temperature and filters, so that not all shapes are captured for
        it."""
        shaped = self.needs_token_counts or self.logit_bias or self.min_tokens
        return bool(shaped or self.logprobs >= 0 or self.grammar is not None)


class SlotInit(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a slot: sent in the plan that carries its first prompt chunk.

    num_cached: KV tokens that the prefix cache already holds, where the first chunk starts. prompt_len: the request's
    own prompt (a resumed request's chunks also replay tokens generated before). max_len: the position after its last
    permitted token, prompt_len + max_tokens. prompt, output: int32 tokens so far; prompt is filled only if the
    sampling parameters need counts, output then and for a grammar. number: the request's, the same whenever it enters.
    """

    slot: int
    num_cached: int
    prompt_len: int
    max_len: int
    sampling: SamplingParams
    prompt: bytes = b""
    output: bytes = b""
    number: int = -1


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens `start .. start + n - 1` (int32 bytes) of a slot. next_token: the prompt token after them, which
    the draft needs; -1 if this is the last chunk, and then the step samples the slot's first token. logprobs: -1 none,
    k: the result has log-probabilities of those prompt tokens that come after one of these, and of the k most likely;
    there is at least one such."""

    slot: int
    start: int
    tokens: bytes
    next_token: int
    logprobs: int = -1

    @property
    def num_logprobs(self) -> int:
        """Prompt tokens whose log-probabilities the result has."""
        return len(self.tokens) // 4 - (self.next_token < 0) if self.logprobs >= 0 else 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step on every rank: page-table changes, then slots initialised, then one target pass over rounds and chunks.

    The plan says everything: a rank verifies, drafts and writes KV as it is told here, and concludes nothing from the
    requests in its slots. `Scheduler` makes it; after the arrow stands what reads a field.

    epoch: of the worker group. -> `RankChannel`, which drops plans of another epoch
    step: its number, one more than that of the plan before. -> the result
    slots: int32, the requests that run a round. -> `PlanBatches`
    shape: index of the shape that these rounds verify: of the trees that the step before drafted, in whatever shape, as
        much as this one holds. From `ShapeChoice`. -> the strategy, `GraphKeys`
    next_shape: index of the shape that is drafted in this step; 0: nothing is. From `ShapeChoice`. -> as shape
    drafting: uint8 per entry of the result (rounds, then last chunks), 1 where it gets a tree of `next_shape`; empty if
        nothing is drafted. The others write no draft KV but that of their own committed tokens. -> `PlanBatches`
    max_kv_len: no position that this step reads or writes reaches it (a host-side bound; no device value is read).
        From `PlanBuilder`. -> attention backends
    page_updates: int32 triples (slot, index in its table, page), at most one per entry of a table. A page that was
        taken back is replaced by page 0, the dummy page. From `SlotPages`. -> `SlotTable`
    cleared_pages: int32, pages to be zeroed first. They may hold NaN, and a new owner's rows multiply what they do not
        attend to by zero. From `SlotPages`. -> `KVPool`
    inits: requests that enter slots. From `PlanBuilder`. -> `SlotTable`, `SlotGrammars`
    chunks: of prompts. From `PrefillPlanner`. -> `PlanBatches`, and `PlanTiming` whether there are any
    grammars: of waiting requests, to be compiled meanwhile. From `GrammarQueue`. -> `SlotGrammars`
    ended: int32, numbers of requests with grammars that have ended since the last plan, in whatever state. From
        `GrammarQueue`. -> `SlotGrammars`
    mask_wait_ms: how long this step may wait for the masks of its requests. -> `SlotGrammars`
    capture: no step: every rank captures one that has no graph yet, the same on all. Sent while nothing else is in
        flight; its result has no entries. From `CapturePacing`. -> `GraphedDecoding`
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
    capture: bool = False
    ended: bytes = b""
    mask_wait_ms: float = 1000.0
    cleared_pages: bytes = b""


class GraphCount(msgspec.Struct, frozen=True, array_like=True):
    """CUDA graphs of a rank's steps: how many there are, and how many are still to be captured.

    missed_rows: of padding so far, in steps that the next graph would have run.
    capture_ms: what capturing one took, in the mean.
    """

    num_captured: int = 0
    num_waiting: int = 0
    missed_rows: int = 0
    capture_ms: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (nats) of one emitted token, and the most likely tokens at its position, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n prompt tokens from position `start` on, each after those before it.

    logprobs, ranks: float32 [n] in nats, and int32 [n], one more than how many tokens are likelier.
    top_ids, top_logprobs: int32 and float32 [n * k], of the k most likely tokens in each place, best first.
    All are little-endian bytes.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.logprobs) // 4


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why one request cannot go on, while all others do. message: for its client. is_invalid: the request asks for what
    cannot be done (HTTP 400); else it met a fault of ours (500)."""

    message: str
    is_invalid: bool = False


NOT_FINITE = Failure("the model's logits for its next token are NaN or infinite")  # FINISH_NOT_FINITE


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step emitted. Entries stand in the order of `StepPlan.slots`, then of those chunks that were a prompt's
    last. `PendingStep` makes it; after the arrow stands what reads a field, if not `StepResults` alone.

    epoch, step: of the plan. -> the coordinator, which drops results of another epoch
    counts: int32 [n], tokens emitted per entry. 0 for a slot that had already finished, and for a request whose mask
        was not there in time, on no rank.
    tokens: int32, ragged by counts.
    finish: uint8 [n], FINISH_*.
    accepted: int32 [n], draft tokens accepted before truncation by a stop; -1 where the entry did not verify drafts
        (prompt chunk, plain round, speculation off). -> `Survival`, statistics
    logprobs: by entry, one per emitted token, of requests that asked.
    prompt_logprobs: of the plan's chunks that ask for them, in their order.
    elapsed_s: seconds that the step took on this rank. -> `StepTime`, the coordinator, the worker loop
    failed: by entry, why that request ends here; nothing that it emitted may be shown. From `SlotGrammars`, and for
        logits that are not finite.
    failed_requests: by a request's number, whether or not it has an entry here, why it cannot go on. From
        `SlotGrammars`, `PlanBatches`.
    masks_ready: int32, numbers of late requests whose next mask is there now. From `SlotGrammars`.
    grammars_ready: int32, grammars that are compiled, by their number among all in the plans of this epoch. From
        `SlotGrammars`. -> `GrammarQueue`
    graphs: after this step. From `GraphedDecoding`. -> `CapturePacing`
    """

    epoch: int
    step: int
    counts: bytes
    tokens: bytes
    finish: bytes
    accepted: bytes
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    elapsed_s: float = 0.0
    failed: dict[int, Failure] = {}
    masks_ready: bytes = b""
    failed_requests: dict[int, Failure] = {}
    grammars_ready: bytes = b""
    graphs: GraphCount = GraphCount()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
