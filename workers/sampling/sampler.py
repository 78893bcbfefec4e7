"""Which token comes next, for every row of a pass, the same on every rank.

A random token is argmax(logits / temperature + gumbel noise), which is an exact draw from the softmax (Gumbel-max).
The noise is a hash of (seed, position, token id), so the choice at a position depends on the text before it alone:
speculation verifies it by equality, and a request gives the same tokens with and without speculation, alone and in a
batch, and after a preemption. What is here runs on a CPU; on a GPU the kernels that it names do the same in one pass,
with logarithms that differ in the last bits, so that the two devices may draw otherwise at a near tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.distributed.tp_group import TPGroup
from workers.layers.vocab import VocabShard, finite_choice, largest
from workers.sampling.filters import (
    DROPPED,
    MAX_GAP,
    count_levels,
    gap_limits,
    gaps,
    lowest_kept,
    scaled_logits,
)
from workers.sampling.masks import apply_masks
from workers.slots.slot_table import SlotFacts, SlotTable
from workers.structured_output.mask_table import MaskTable

if TYPE_CHECKING:
    from workers.sampling.kernels.filters import Filters, Limits
    from workers.sampling.kernels.gumbel import Draws


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

    tokens: [B, R] int64, below 0 where the row's logits are NaN or infinite (`workers.layers.vocab.NOT_FINITE`).
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
    if logits.is_cuda:
        from workers.sampling.kernels.logprobs import norms_and_top

        norms, top, top_ids = (t.view(*tokens.shape, *t.shape[1:]) for t in norms_and_top(logits.flatten(0, 1), k))
        chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
        return Logprobs(chosen - norms, top_ids, top - norms.unsqueeze(-1))
    logits = logits.float()
    log_probability = torch.log_softmax(logits, dim=-1)
    top, top_ids = log_probability.topk(k, dim=-1)
    return Logprobs(log_probability.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), top_ids, top)


def gumbel_noise(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: a hash of seed, position and token id (int64, broadcast against each other).

    The hash is two rounds of the 64-bit finaliser of MurmurHash3; its upper 32 bits become a uniform in (0, 1).
    """
    x = _mix(seed + position * _GOLDEN)
    x = _mix(x + token * _GOLDEN)
    uniform = ((x >> 32 & 0xFFFFFFFF).double() + 0.5) / 4294967296.0
    # -log1p(-u) is exponential and precise where it is small, which is where the noise is large
    return -torch.log(-torch.log1p(-uniform)).float()


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed integer
_MIX_1, _MIX_2 = -49064778989728563, -4265267296055464877


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * _MIX_1
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * _MIX_2
    return x ^ (x >> 33 & 0x7FFFFFFF)


def _of_all_ranks(summaries: Tensor, group: TPGroup) -> Tensor:
    """[rows, ranks * parts, n] from each rank's [rows, parts, n]."""
    return group.all_gather(summaries).movedim(0, 1).flatten(1, 2)


class Sampler:
    """Samples from logits that are cut by vocabulary over the ranks."""

    def __init__(self, slots: SlotTable, shard: VocabShard, masks: MaskTable | None = None) -> None:
        """masks: of the tokens that grammars allow, for engines that have any."""
        self._slots = slots
        self._shard = shard
        self._masks = masks

    def sample(self, logits: Tensor, rows: Rows, needs: SamplingNeeds) -> "Sampled":
        """Tokens from logits [B * R, shard size] of this rank, which masks change in place."""
        shape = rows.positions.shape
        if not needs.full_logits:
            if needs.masked:
                self._mask(logits, rows, self._shard.first)
            tokens = self._draw_sharded(logits, rows) if needs.random else self._shard.argmax(logits, checked=True)
            return Sampled(tokens.view(shape), None)
        raw = logits = self._shard.gather_logits(logits)
        if needs.shaping:
            logits = self._shaped(logits, rows)
        if needs.masked:
            if logits is raw and needs.num_logprobs >= 0:
                logits = raw.clone()
            self._mask(logits, rows, 0)
        if needs.random:
            _, tokens = self._draw(logits, rows, 0, needs.filtered)
        else:
            _, tokens = largest(logits, checked=True)
        return Sampled(tokens.view(shape), raw.view(*shape, -1) if needs.num_logprobs >= 0 else None)

    def perturb(self, logits: Tensor, rows: Rows, ids: Tensor, filtered: bool, group: TPGroup) -> Tensor:
        """logits [B * R, n] of tokens `ids` [n] as the draft should see them: with the noise of what `sample` takes the
        largest of, so that it proposes the token that the target would draw, and tokens that filters drop below all
        others. group: the ranks that have the other tokens of its vocabulary."""
        if logits.is_cuda:
            from workers.sampling.kernels.draft_scores import count_levels as fast_count_levels
            from workers.sampling.kernels.draft_scores import perturb

            chosen = self._filters()
            summary = _of_all_ranks(fast_count_levels(logits, rows.slots, chosen), group) if filtered else None
            return perturb(logits, self._draws(rows), ids, chosen, summary)
        logits = logits.float()
        noisy = self._perturb(logits, rows, ids)
        return self._drop(noisy, logits, rows, group) if filtered else noisy

    def _drop(self, noisy: Tensor, logits: Tensor, rows: Rows, group: TPGroup) -> Tensor:
        """noisy [B * R, n], tokens that are dropped by their logits [B * R, n] below all others."""
        table, slots = self._slots, rows.slots.repeat_interleave(rows.positions.shape[1])
        temperature = table.temperature[slots]
        scaled = scaled_logits(logits, torch.where(temperature > 0, temperature, 1.0))
        summaries = _of_all_ranks(count_levels(scaled), group)
        lowest = lowest_kept(summaries, table.top_k[slots], table.top_p[slots], table.min_p[slots])
        dropped = (temperature > 0).unsqueeze(1) & (scaled < lowest.unsqueeze(1))
        return torch.where(dropped, noisy - DROPPED, noisy)

    def _mask(self, logits: Tensor, rows: Rows, first: int) -> None:
        assert self._masks is not None, "a grammar in an engine without masks"
        apply_masks(logits, rows.slots, self._masks, first)

    def _draw_sharded(self, logits: Tensor, rows: Rows) -> Tensor:
        """[B * R] int64 token ids drawn from this and the other ranks' logits [B * R, shard size]."""
        return self._shard.best_of_ranks(*self._draw(logits, rows, self._shard.first, filtered=False))

    def _draw(self, logits: Tensor, rows: Rows, first: int, filtered: bool) -> tuple[Tensor, Tensor]:
        """The largest noisy logit [B * R] and its column [B * R] int64, of tokens first, first + 1, ..."""
        if logits.is_cuda:
            from workers.sampling.kernels.choose import choose

            return choose(logits, self._draws(rows), first, self._limits(logits, rows) if filtered else None)
        logits = logits.float()
        ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        noisy = self._perturb(self._filter(logits, rows) if filtered else logits, rows, ids)
        value, index = noisy.max(-1)
        return value, finite_choice(value, index)

    def _perturb(self, logits: Tensor, rows: Rows, ids: Tensor) -> Tensor:
        """logits / temperature + noise; greedy rows (temperature 0) unchanged."""
        view = logits.view(*rows.positions.shape, -1)
        temperature = self._slots.temperature[rows.slots].view(-1, 1, 1)
        seed = self._slots.seed[rows.slots].view(-1, 1, 1)
        noise = gumbel_noise(seed, rows.positions.unsqueeze(-1), ids)
        random = temperature > 0
        noisy = view / torch.where(random, temperature, 1.0) + noise
        return torch.where(random, noisy, view).view(logits.shape)

    def _filter(self, logits: Tensor, rows: Rows) -> Tensor:
        """Tokens outside top-k, top-p and min-p to minus infinity; logits [B * R, vocab] float32 before temperature."""
        table, slots = self._slots, rows.slots.repeat_interleave(rows.positions.shape[1])
        temperature = table.temperature[slots]
        gap = gaps(logits, torch.where(temperature > 0, temperature, 1.0))
        limit = gap_limits(gap, table.top_k[slots], table.top_p[slots], table.min_p[slots])
        limit = torch.where(temperature > 0, limit, MAX_GAP)
        return logits.masked_fill(gap > limit.unsqueeze(1), float("-inf"))

    def _draws(self, rows: Rows) -> "Draws":
        from workers.sampling.kernels.gumbel import Draws

        return Draws(rows.slots, rows.positions, self._slots.temperature, self._slots.seed)

    def _limits(self, logits: Tensor, rows: Rows) -> "Limits":
        from workers.sampling.kernels.filters import find_limits

        return find_limits(logits, rows.slots, self._filters())

    def _filters(self) -> "Filters":
        from workers.sampling.kernels.filters import Filters

        table = self._slots
        return Filters(table.temperature, table.top_k, table.top_p, table.min_p)

    def _shaped(self, logits: Tensor, rows: Rows) -> Tensor:
        """`_shape` of logits [B * R, vocab]."""
        if logits.is_cuda:
            from workers.sampling.kernels.penalties import shape

            return shape(logits, rows.slots, rows.positions, self._slots, rows.path, rows.path_tokens)
        return self._shape(logits.float().view(*rows.positions.shape, -1), rows).flatten(0, 1)

    def _shape(self, logits: Tensor, rows: Rows) -> Tensor:
        """Penalties, bias and forbidden stop tokens applied to logits [B, R, vocab] float32."""
        table, slots = self._slots, rows.slots
        counts = table.output_counts[slots].unsqueeze(1).expand(logits.shape)
        if rows.path is not None and rows.path_tokens is not None:
            tokens = rows.path_tokens.clamp_min(0).unsqueeze(1).expand(rows.path.shape)
            counts = counts.scatter_add(2, tokens, rows.path.int())
        presence, frequency, repetition = table.penalties[slots].view(-1, 1, 3).unbind(-1)
        seen = (counts > 0) | table.in_prompt[slots].unsqueeze(1)
        factor = repetition.unsqueeze(-1) + 1.0
        shaped = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        shaped = shaped - counts * frequency.unsqueeze(-1) - (counts > 0) * presence.unsqueeze(-1)
        shaped = shaped + table.bias[slots].unsqueeze(1)
        early = rows.positions < table.min_len[slots].unsqueeze(1)
        stop = torch.zeros(logits.shape[0], logits.shape[2] + 1, dtype=torch.bool, device=logits.device)
        ids = table.stop_ids[slots]
        stop.scatter_(1, torch.where(ids >= 0, ids, logits.shape[2]), True)
        shaped = shaped.masked_fill(early.unsqueeze(-1) & stop[:, None, :-1], float("-inf"))
        return torch.where(table.shapes_logits[slots].view(-1, 1, 1), shaped, logits)
