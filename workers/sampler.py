"""Which token comes next, for every row of a pass, the same on every rank.

A random token is argmax(logits / temperature + gumbel noise), which is an exact draw from the softmax (Gumbel-max).
The noise is a hash of (seed, position, token id), so the choice at a position depends on the text before it alone:
speculation verifies it by equality, and a request gives the same tokens with and without speculation, alone and in a
batch, and after a preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.layers.vocab import VocabShard
from workers.slots import SlotFacts, SlotTable


@dataclass(frozen=True)
class SamplingNeeds:
    """What a step's requests need; known on the host, so that greedy batches pay for nothing else."""

    random: bool
    full_logits: bool
    shaping: bool
    num_logprobs: int  # -1: none

    @staticmethod
    def of(facts: Sequence[SlotFacts]) -> "SamplingNeeds":
        return SamplingNeeds(
            random=any(f.is_random for f in facts),
            full_logits=any(f.needs_full_logits for f in facts),
            shaping=any(f.shapes_logits for f in facts),
            num_logprobs=max((f.sampling.logprobs for f in facts), default=-1),
        )


@dataclass(frozen=True)
class Rows:
    """The rows to sample, B requests of R rows: slots [B] int64; positions [B, R] int64 of the token to be chosen;
    path: [B, R, W] bool and path_tokens [B, W] int64, the tree nodes above and at each row that are not yet counted
    as output (None where there are none)."""

    slots: Tensor
    positions: Tensor
    path: Tensor | None = None
    path_tokens: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """tokens: [B, R] int64. logits: [B, R, vocab] float32 as the model gave them, if log-probabilities are wanted."""

    tokens: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of N entries of M tokens: chosen [N, M], and the k most likely, top_ids and top [N, M, k]."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities under logits [N, M, vocab] of tokens [N, M], and the k largest."""
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


class Sampler:
    """Samples from logits that are cut by vocabulary over the ranks."""

    def __init__(self, slots: SlotTable, shard: VocabShard) -> None:
        self._slots = slots
        self._shard = shard
        self._ids = torch.arange(shard.first, shard.first + shard.size, device=slots.device)
        self._all_ids = torch.arange(shard.vocab_size, device=slots.device)

    def sample(self, logits: Tensor, rows: Rows, needs: SamplingNeeds) -> "Sampled":
        """Tokens from logits [B * R, shard size] of this rank."""
        shape = rows.positions.shape
        if needs.full_logits:
            raw = full = self._shard.gather_logits(logits).float()
            if needs.shaping:
                full = self._shape(full.view(*shape, -1), rows).view(full.shape)
            if needs.random:
                full = self._perturb(self._filter(full, rows), rows, self._all_ids)
            return Sampled(full.argmax(-1).view(shape), raw.view(*shape, -1) if needs.num_logprobs >= 0 else None)
        if needs.random:
            logits = self._perturb(logits.float(), rows, self._ids)
        return Sampled(self._shard.argmax(logits).view(shape), None)

    def perturb(self, logits: Tensor, rows: Rows, ids: Tensor) -> Tensor:
        """logits [B * R, n] of tokens `ids` [n] as the draft should see them: what `sample` takes the largest of.
        A draft that uses the target's own noise proposes the token that the target would draw."""
        return self._perturb(logits.float(), rows, ids)

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
        slots, width = rows.slots, rows.positions.shape[1]
        temperature = self._slots.temperature[slots]
        top_k = torch.where(self._slots.top_k[slots] > 0, self._slots.top_k[slots], self._slots.vocab_size)
        per_row = [t.repeat_interleave(width).unsqueeze(1)
                   for t in (torch.where(temperature > 0, temperature, 1.0), top_k, self._slots.top_p[slots],
                             self._slots.min_p[slots])]
        temperature, top_k, top_p, min_p = per_row
        ordered, order = torch.sort(logits / temperature, dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        probability = torch.softmax(ordered.masked_fill(rank >= top_k, float("-inf")), dim=-1)
        mass_before = probability.cumsum(-1) - probability
        keep = (rank < top_k) & ((mass_before < top_p) | (top_p >= 1)) & (probability >= min_p * probability[:, :1])
        keep[:, 0] = True
        kept = torch.zeros_like(keep).scatter_(1, order, keep)
        return logits.masked_fill(~kept, float("-inf"))

    def _shape(self, logits: Tensor, rows: Rows) -> Tensor:
        """Penalties, bias and forbidden stop tokens applied to logits [B, R, vocab] float32."""
        table, slots = self._slots, rows.slots
        assert table.output_counts is not None and table.in_prompt is not None and table.bias is not None
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
