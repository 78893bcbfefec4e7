"""Chooses the next token of each row of a pass, the same on all ranks, and computes log-probabilities. Used by decoding
strategies.

A sampled token is argmax(logits / temperature + Gumbel noise), an exact sample of the softmax. The noise is a hash of
(seed, position, token id), so a token depends only on the text before it, and a draft token is accepted if it equals
the sampled one. A request therefore gets the same tokens with and without speculation, alone and in a batch, and after
preemption. GPUs and CPUs may differ in near ties, because their logarithms differ in the last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.sampling.choose import Draws, choose, norms_and_top
from aerie.kernels.sampling.draft_scores import count_bands, perturb
from aerie.kernels.sampling.filters import find_limits
from aerie.kernels.sampling.penalties import apply_masks, apply_penalties
from aerie.kernels.vocabulary.topk_log_softmax import largest
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.slots import SlotFacts, SlotTable
from aerie.workers.structured_output.mask_table import MaskTable

MAX_LOGPROBS = 20  # limit of most likely tokens per position, as in OpenAI's API


@dataclass(frozen=True)
class SamplingNeeds:
    """Sampling features that a step's requests use. The host knows them, so that a step skips unused features."""

    random: bool
    filtered: bool = False  # top-k, top-p or min-p
    shaping: bool = False  # penalties, biases or min_tokens
    num_logprobs: int = -1  # most likely tokens per position; -1: no log-probabilities
    masked: bool = False  # grammar masks

    @staticmethod
    def of(facts: Sequence[SlotFacts]) -> "SamplingNeeds":
        """Return what a step must compute, because any of its requests needs it."""
        return SamplingNeeds(
            random=any(f.is_random for f in facts),
            filtered=any(f.is_filtered for f in facts),
            shaping=any(f.shapes_logits for f in facts),
            num_logprobs=max((f.sampling.logprobs for f in facts), default=-1),
            masked=any(f.sampling.grammar is not None for f in facts),
        )

    @property
    def full_logits(self) -> bool:
        """Whether each rank needs the logits of the whole vocabulary; otherwise a reduction over shards suffices."""
        return self.filtered or self.shaping or self.num_logprobs >= 0

    @property
    def captured(self) -> "SamplingNeeds":
        """The first of `CAPTURED_NEEDS` that covers these: the needs of the graph to use."""
        return next(kind for kind in CAPTURED_NEEDS if kind.covers(self))

    def covers(self, other: "SamplingNeeds") -> bool:
        """Whether a graph captured for these needs can run a step with the needs `other`."""
        return (
            self.random >= other.random
            and self.filtered >= other.filtered
            and self.shaping >= other.shaping
            and self.num_logprobs >= other.num_logprobs
            and self.masked >= other.masked
        )


# Captured sampling needs. A step uses the first that covers its own, so only steps with a grammar use one with masks,
# which takes two graphs. Penalties and log-probabilities cost one pass over the logits each; the last two entries
# compute both, also for requests that need only one.
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
    positions: [B, R] int64, positions of the tokens to be chosen.
    path: [B, R, W] bool, the tree nodes that are a row's ancestors or the row itself; None without a tree.
    path_tokens: [B, W] int64, the nodes' tokens, which the slot's `output_counts` does not include yet.
    """

    slots: Tensor
    positions: Tensor
    path: Tensor | None = None
    path_tokens: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens.

    tokens: [B, R] int64; negative if the row has NaN or plus infinity (NOT_FINITE of `aerie.kernels.vocabulary`).
    logits: [B, R, vocab] before penalties, masks and temperature; None if no log-probabilities are requested.
    """

    tokens: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities in nats at N x M positions.

    chosen: [N, M] float32, of the chosen tokens.
    top_ids, top: [N, M, k] int64 and float32, the k most likely tokens and their log-probabilities, best first.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Return the log-probabilities of tokens [N, M] int64 and of the k most likely, from logits [N, M, vocab]."""
    k = min(k, logits.shape[-1])
    norms, top, top_ids = (t.view(*tokens.shape, *t.shape[1:]) for t in norms_and_top(logits.flatten(0, 1), k))
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return Logprobs(chosen - norms, top_ids, top - norms.unsqueeze(-1))


class Sampler:
    """Samples from logits whose vocabulary is sharded over the ranks. masks: None in engines without grammars."""

    def __init__(self, slots: SlotTable, shard: VocabShard, masks: MaskTable | None = None) -> None:
        self._slots = slots
        self._shard = shard
        self._masks = masks

    def sample(self, logits: Tensor, rows: Rows, needs: SamplingNeeds) -> Sampled:
        """Choose tokens from this rank's logits [B * R, shard size]. May apply grammar masks to them in place."""
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
        """Return the min-entropy (negative logarithm of the largest probability) of each row: [rows] int64, in
        thousandths of a nat, the same on every rank, undefined for rows with NaN. logits: [rows, shard size], this
        rank's."""
        return (self._shard.topk_log_softmax(logits, 1)[0][:, 0] * -1000.0).long()

    def perturb(self, logits: Tensor, rows: Rows, ids: Tensor, filtered: bool, group: TPGroup) -> Tensor:
        """Return draft logits with the noise that `sample` adds, so that the draft proposes the token that the target
        is likely to sample.

        logits: [B * R, n].
        ids: [n] or [B * R, n], their token ids.
        filtered: whether tokens that the request's filters exclude rank below all others.
        group: the ranks over which the draft's vocabulary is sharded.
        """
        filters, summary = self._slots.filters, None
        if filtered:
            # [ranks, rows, parts, n] -> [rows, ranks * parts, n]
            summary = group.all_gather(count_bands(logits, rows.slots, filters)).movedim(0, 1).flatten(1, 2)
        return perturb(logits, self._draws(rows), ids, filters, summary)

    def _mask(self, logits: Tensor, rows: Rows, first: int) -> None:
        assert self._masks is not None, "a step has a grammar, but the engine has no masks"
        apply_masks(logits, rows.slots, self._masks.index, self._masks.words, first)

    def _draw_sharded(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return [B * R] int64 token ids, sampled over all ranks' shards."""
        return self._shard.best_of_ranks(*choose(logits, self._draws(rows), self._shard.first))

    def _draws(self, rows: Rows) -> Draws:
        return Draws(rows.slots, rows.positions, self._slots.values["temperature"], self._slots.values["seed"])


BLOCK_BYTES = 1 << 26  # float32 logits per block: 130 rows of 128,000 tokens


@dataclass(frozen=True)
class PromptRanking:
    """Log-probabilities and ranks of n prompt tokens.

    logprobs: [n] float32, nats.
    ranks: [n] int32, 1 for the most likely token.
    top_ids: [n, k] int32, the k most likely tokens, best first.
    top: [n, k] float32, their log-probabilities.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def rank_prompt(
    logits: Callable[[Tensor, Tensor | None], Tensor],
    shard: VocabShard,
    hidden: Tensor,
    tokens: Tensor,
    num_top: int,
    slots: Tensor | None = None,
) -> PromptRanking:
    """Rank tokens [n] int64, n >= 1, by the logits of hidden [n, H], the preceding rows. The result is equal on all
    ranks.

    logits, slots: `aerie.workers.runner.model_runner.TargetRunner.logits`, and its argument for all rows.
    """
    rows, blocks = ranked_rows(shard), []
    for first in range(0, len(tokens), rows):
        own = slice(first, first + rows)
        part = logits(hidden[own], None if slots is None else slots[own])
        blocks.append(_rank(shard.gather_logits(part), tokens[own], num_top))
    logprobs, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return PromptRanking(logprobs, ranks, top_ids, top)


def ranked_rows(shard: VocabShard) -> int:
    """Return the maximum rows whose logits `rank_prompt` computes at a time."""
    return max(1, BLOCK_BYTES // (4 * shard.vocab_size))


def _rank(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranked = logprobs_of(logits.unsqueeze(0), tokens.unsqueeze(0), num_top)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(1, dtype=torch.int32) + 1
    return ranked.chosen[0], ranks, ranked.top_ids[0].int(), ranked.top[0]
