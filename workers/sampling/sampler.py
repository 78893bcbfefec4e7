"""Which token comes next, for every row of a pass, the same on every rank.

A random token is argmax(logits / temperature + Gumbel noise), an exact draw from the softmax. The noise is a hash of
(seed, position, token id), so the choice at a position depends on the text before it alone: speculation verifies it by
equality, and a request gives the same tokens with and without speculation, alone and in a batch, and after preemption.
GPUs and CPUs take logarithms that differ in the last bits, so they may draw differently at a near tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.distributed.tp_group import TPGroup
from workers.layers.vocab import VocabShard
from workers.ops.sampling.choose import choose
from workers.ops.sampling.draft_scores import count_levels, perturb
from workers.ops.sampling.filters import find_limits
from workers.ops.sampling.gumbel import Draws
from workers.ops.sampling.logprobs import norms_and_top
from workers.ops.sampling.masks import apply_masks
from workers.ops.sampling.penalties import apply_penalties
from workers.ops.vocabulary.largest import largest
from workers.slots.slot_table import SlotFacts, SlotTable
from workers.structured_output.mask_table import MaskTable

MAX_LOGPROBS = 20  # most likely tokens that a request may ask for, as OpenAI's API has it


@dataclass(frozen=True)
class SamplingNeeds:
    """What a step's requests need; known on the host, so that greedy batches pay for nothing else."""

    random: bool
    filtered: bool = False
    shaping: bool = False
    num_logprobs: int = -1  # -1: none
    masked: bool = False

    @staticmethod
    def of(facts: Sequence[SlotFacts]) -> "SamplingNeeds":
        return SamplingNeeds(
            random=any(f.is_random for f in facts),
            filtered=any(f.is_filtered for f in facts),
            shaping=any(f.shapes_logits for f in facts),
            num_logprobs=max((f.sampling.logprobs for f in facts), default=-1),
            masked=any(f.sampling.grammar is not None for f in facts),
        )

    @property
    def full_logits(self) -> bool:
        """Whether choosing tokens takes the whole vocabulary on one rank, not a reduction over shards."""
        return self.filtered or self.shaping or self.num_logprobs >= 0

    @property
    def captured(self) -> "SamplingNeeds":
        """The first of `CAPTURED_NEEDS` that has all of these: what a captured round serves. Rows that need less lose
        little."""
        return next(kind for kind in CAPTURED_NEEDS if kind.covers(self))

    def covers(self, other: "SamplingNeeds") -> bool:
        """Whether a step with these needs does all that one with `other` does."""
        return (
            self.random >= other.random
            and self.filtered >= other.filtered
            and self.shaping >= other.shaping
            and self.num_logprobs >= other.num_logprobs
            and self.masked >= other.masked
        )


# The kinds that rounds are captured for; a step takes the first that covers it, so that only those with a grammar take
# one with masks, whose graphs are cut in two. Log-probabilities and penalties take a pass over the logits each, so
# requests of the last kinds that want one of the two pay for both.
CAPTURED_NEEDS = (
    SamplingNeeds(False),
    SamplingNeeds(True),
    SamplingNeeds(True, filtered=True),
    SamplingNeeds(False, masked=True),
    SamplingNeeds(True, filtered=True, masked=True),
    SamplingNeeds(True, filtered=True, shaping=True),
    SamplingNeeds(True, filtered=True, shaping=True, num_logprobs=MAX_LOGPROBS),
    SamplingNeeds(True, filtered=True, shaping=True, num_logprobs=MAX_LOGPROBS, masked=True),
)


@dataclass(frozen=True)
class Rows:
    """The rows to sample, B requests of R rows.

    slots: [B] int64.
    positions: [B, R] int64 of the token to be chosen.
    path, path_tokens: [B, R, W] bool and [B, W] int64, the tree nodes above and at each row that are not yet counted as
        output; None where there are none.
    """

    slots: Tensor
    positions: Tensor
    path: Tensor | None = None
    path_tokens: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """What was chosen.

    tokens: [B, R] int64, below 0 where the row's logits are NaN or infinite (NOT_FINITE of `workers.ops.vocabulary`).
    logits: [B, R, vocab] as the model gave them, if log-probabilities are wanted.
    """

    tokens: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of N entries of M tokens.

    chosen: [N, M] float32, of the tokens.
    top_ids, top: [N, M, k] int64 and float32, of the k most likely.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities under logits [N, M, vocab] of tokens [N, M], and the k largest (or all that there are)."""
    k = min(k, logits.shape[-1])
    norms, top, top_ids = (t.view(*tokens.shape, *t.shape[1:]) for t in norms_and_top(logits.flatten(0, 1), k))
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return Logprobs(chosen - norms, top_ids, top - norms.unsqueeze(-1))


class Sampler:
    """Samples from logits that are split by vocabulary over the ranks."""

    def __init__(self, slots: SlotTable, shard: VocabShard, masks: MaskTable | None = None) -> None:
        """masks: of the tokens that grammars allow, for engines that have any."""
        self._slots = slots
        self._shard = shard
        self._masks = masks

    def sample(self, logits: Tensor, rows: Rows, needs: SamplingNeeds) -> Sampled:
        """Tokens from logits [B * R, shard size] of this rank, which masks change in place."""
        shape = rows.positions.shape
        if not needs.full_logits:
            if needs.masked:
                self._mask(logits, rows, self._shard.first)
            tokens = self._draw_sharded(logits, rows) if needs.random else self._shard.argmax(logits, checked=True)
            return Sampled(tokens.view(shape), None)
        raw = logits = self._shard.gather_logits(logits)
        if needs.shaping:
            tables = self._slots.penalty_tables
            logits = apply_penalties(logits, rows.slots, rows.positions, tables, rows.path, rows.path_tokens)
        if needs.masked:
            if logits is raw and needs.num_logprobs >= 0:
                logits = raw.clone()
            self._mask(logits, rows, 0)
        if needs.random:
            limits = find_limits(logits, rows.slots, self._slots.filters) if needs.filtered else None
            _, tokens = choose(logits, self._draws(rows), 0, limits)
        else:
            _, tokens = largest(logits, checked=True)
        return Sampled(tokens.view(shape), raw.view(*shape, -1) if needs.num_logprobs >= 0 else None)

    def perturb(self, logits: Tensor, rows: Rows, ids: Tensor, filtered: bool, group: TPGroup) -> Tensor:
        """logits [B * R, n] of tokens `ids` [n] as the draft should see them: with the noise that `sample` adds, so
        that the draft proposes the token that the target would draw, and tokens that filters drop below all others.
        group: the ranks that hold the other tokens of the draft's vocabulary."""
        filters, summary = self._slots.filters, None
        if filtered:
            # [ranks, rows, parts, n] -> [rows, ranks * parts, n]
            summary = group.all_gather(count_levels(logits, rows.slots, filters)).movedim(0, 1).flatten(1, 2)
        return perturb(logits, self._draws(rows), ids, filters, summary)

    def _mask(self, logits: Tensor, rows: Rows, first: int) -> None:
        assert self._masks is not None, "a grammar in an engine without masks"
        apply_masks(logits, rows.slots, self._masks.index, self._masks.words, first)

    def _draw_sharded(self, logits: Tensor, rows: Rows) -> Tensor:
        """[B * R] int64 token ids drawn from this and the other ranks' logits [B * R, shard size]."""
        return self._shard.best_of_ranks(*choose(logits, self._draws(rows), self._shard.first))

    def _draws(self, rows: Rows) -> Draws:
        return Draws(rows.slots, rows.positions, self._slots.temperature, self._slots.seed)
