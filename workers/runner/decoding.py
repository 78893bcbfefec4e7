"""`DecodingStrategy`, the interface by which the worker runs a step, and non-speculative decoding. Another strategy is
`aerie.speculative.decoding`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.workers.config import RoundShapes
from aerie.workers.runner.batch import PromptChunks, StepBatch, StepTensors, joined, prompt_hidden
from aerie.workers.runner.model_runner import TargetRunner
from aerie.workers.sampling import PromptRanking, Rows, Sampler, logprobs_of, rank_prompt
from aerie.workers.slots import SlotTable

FillMasks = Callable[[], None]


class DecodingStrategy(Protocol):
    """Runs steps on one rank."""

    @property
    def shapes(self) -> RoundShapes:
        """Tree shapes that its rounds may verify and draft."""

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        """Run one step. Changes slots, KV pools and the strategy's own state in place.

        fill_masks: copies the step's grammar masks to the device. Called between the launch of the target's pass and
            the choice of tokens.
        """


class CuttableStrategy(DecodingStrategy, Protocol):
    """A strategy whose steps can be split into a part before and a part after grammar masks are filled."""

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        passed = self.forward(batch)
        if fill_masks is not None:
            fill_masks()
        return self.choose(batch, passed)

    def forward(self, batch: StepBatch) -> Any:
        """Run a step up to the target's last hidden states. Return what `choose` needs: a dataclass whose fields are
        tensors, None, or such dataclasses."""

    def choose(self, batch: StepBatch, passed: Any) -> StepTensors:
        """Run the rest of a step. passed: the result of `forward` for the same batch."""


def begin_finals(slots: SlotTable, chunks: PromptChunks) -> None:
    """Set the lengths of slots whose prompt ends in this step (`PromptChunks.final_slots`). The last prompt token
    becomes the root, from which the first output token follows."""
    if chunks.num_finals:
        slots.seq_len[chunks.final_slots] = chunks.final_lengths


def ranking_of(target: TargetRunner, batch: StepBatch, hidden: Tensor | None) -> PromptRanking | None:
    """Rank the batch's prompt targets. hidden: [n, H] of `prompt_hidden`. Return None without targets."""
    targets, shard = batch.prompt_targets, target.model.lm_head.shard
    if targets is None or hidden is None:
        return None
    return rank_prompt(target.logits, shard, hidden, targets.tokens, targets.num_top, batch.prompt_target_slots)


@dataclass(frozen=True)
class Passed:
    """Result of the target's pass.

    hidden: [B * W + F, H]: the W rows of each of B running requests, then the last row of each of F prompts that end.
    prompt_hidden: [n, H], from which prompt targets are ranked; None without targets.
    """

    hidden: Tensor
    prompt_hidden: Tensor | None = None


class Autoregressive(CuttableStrategy):
    """Non-speculative decoding: one token per request and step."""

    def __init__(self, target: TargetRunner, slots: SlotTable, sampler: Sampler) -> None:
        self._target = target
        self._slots = slots
        self._sampler = sampler
        self._mask = causal_mask(1, 1, slots.device)

    @property
    def shapes(self) -> RoundShapes:
        return RoundShapes()

    def forward(self, batch: StepBatch) -> Passed:
        """See `CuttableStrategy`. The pass has one row per running request, for its bonus token, then the rows of
        prompt chunks. A prompt that ends gets its first token from the last row of its last chunk."""
        slots, chunks = self._slots, batch.chunks
        rounds = self._rounds(batch) if batch.num_requests else None
        # rotary positions differ from KV positions after images (M-RoPE) or where a request gave positions
        positions = slots.seq_len[batch.slots] + slots.shifts[batch.slots] if batch.is_shifted else None
        if chunks is not None:
            begin_finals(slots, chunks)
        ids = joined((slots.bonus[batch.slots], chunks.ids if chunks else None))
        # log-probabilities of prompts, and records of experts, need more than the last row of each chunk
        every_row = batch.prompt_targets is not None or self._target.records_experts
        out = self._target.forward(ids, rounds, positions, chunks.batch if chunks else None, every_row, batch.adapted)
        return Passed(batch.rows(width=1).with_finals(out.hidden, every_row), prompt_hidden(batch, out.hidden, 1))

    def _rounds(self, batch: StepBatch) -> DecodeBatch:
        """Return one row per running request, which writes the KV of the bonus token."""
        slots, mask = self._slots, self._mask.expand(batch.num_requests, 1)
        length, page_table = slots.seq_len[batch.slots], slots.page_table[batch.slots]
        return DecodeBatch(
            Mode.DECODE,
            1,
            suffix_len=1,
            prefix_len=length,
            mask=mask,
            page_table=page_table,
            max_kv_len=batch.max_kv_len,
            slots=batch.slots,
        )

    def choose(self, batch: StepBatch, passed: Passed) -> StepTensors:
        entries = batch.entry_slots
        positions = (self._slots.seq_len[entries] + 1).long().unsqueeze(1)
        logits = self._target.logits(passed.hidden, batch.head_slots(width=1))
        sampled = self._sampler.sample(logits, Rows(entries, positions), batch.needs)
        commit = self._slots.commit(entries, sampled.tokens, torch.ones_like(entries))
        if batch.num_requests:
            root = torch.zeros_like(batch.slots).unsqueeze(1)
            self._target.commit(batch.slots, root, commit.counts[: batch.num_requests])
        logprobs = None
        if sampled.logits is not None:
            logprobs = logprobs_of(sampled.logits, commit.tokens, batch.needs.num_logprobs)
        nothing_verified = torch.full_like(entries, -1)
        ranking = ranking_of(self._target, batch, passed.prompt_hidden)
        return StepTensors(
            commit.tokens,
            commit.counts,
            finish=commit.finish,
            accepted=nothing_verified,
            logprobs=logprobs,
            drafts=None,
            prompt_logprobs=ranking,
        )
