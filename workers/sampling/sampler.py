"""Chooses the next token of every row of a pass, equally on all ranks.

A sampled token is argmax(logits / temperature + Gumbel noise), an exact draw from the softmax. The noise is a hash of
(seed, position, token id), so a token depends only on the text before it. Speculation verifies drafts by equality. A
request gives the same tokens with and without speculation, alone and in a batch, and after preemption. Logarithms on
GPUs and CPUs differ in the last bits, so near ties may be drawn differently.
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
    """The sampling features that a step's requests use. Known on the host, so that greedy batches skip the rest."""

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
        """Whether one rank needs the logits of the whole vocabulary, instead of a reduction over shards."""
        return self.filtered or self.shaping or self.num_logprobs >= 0

    @property
    def captured(self) -> "SamplingNeeds":
        """The first of `CAPTURED_NEEDS` that covers these: the captured round that is used."""
        return next(kind for kind in CAPTURED_NEEDS if kind.covers(self))

    def covers(self, other: "SamplingNeeds") -> bool:
        """Return whether a step captured for these needs serves a step with `other`."""
        return (
            self.random >= other.random
            and self.filtered >= other.filtered
            and self.shaping >= other.shaping
            and self.num_logprobs >= other.num_logprobs
            and self.masked >= other.masked
        )


# Needs that rounds are captured for. A step uses the first that covers it, so only steps with a grammar use one with
# masks, which takes two graphs. Penalties and log-probabilities take one pass over the logits each; the last kinds do
# both for requests that need one of them.
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
    """Rows to sample: R for each of B requests.

    slots: [B] int64.
    positions: [B, R] int64 of the token to be chosen.
    path, path_tokens: [B, R, W] bool and [B, W] int64, each row's ancestors and itself, which are not counted as output
        yet; None without a tree.
    """

    slots: Tensor
    positions: Tensor
    path: Tensor | None = None
    path_tokens: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens.

    tokens: [B, R] int64; negative if the row has NaN or plus infinity (NOT_FINITE of `workers.ops.vocabulary`).
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
    """Return log-probabilities of tokens [N, M] under logits [N, M, vocab], and the k largest."""
    k = min(k, logits.shape[-1])
    norms, top, top_ids = (t.view(*tokens.shape, *t.shape[1:]) for t in norms_and_top(logits.flatten(0, 1), k))
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return Logprobs(chosen - norms, top_ids, top - norms.unsqueeze(-1))


class Sampler:
    """Samples from logits that are split by vocabulary over the ranks."""

    def __init__(self, slots: SlotTable, shard: VocabShard, masks: MaskTable | None = None) -> None:
        """masks: grammar masks; None in engines without grammars."""
        self._slots = slots
        self._shard = shard
        self._masks = masks

    def sample(self, logits: Tensor, rows: Rows, needs: SamplingNeeds) -> Sampled:
        """Choose tokens from this rank's logits [B * R, shard size]. Grammar masks are applied in place."""
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

    def min_entropies(self, logits: Tensor) -> Tensor:
        """Return [rows] int64: thousandths of a nat of the min-entropy, the negative logarithm of the largest
        probability, at this rank's logits [rows, shard size]; the same on every rank. Any number for a NaN."""
        return (self._shard.topk_log_softmax(logits, 1)[0][:, 0] * -1000.0).long()

    def perturb(self, logits: Tensor, rows: Rows, ids: Tensor, filtered: bool, group: TPGroup) -> Tensor:
        """Return draft logits [B * R, n] of tokens `ids` [n] with the noise that `sample` adds, so that the draft
        proposes the token that the target would draw. Filtered tokens are below all others.
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
