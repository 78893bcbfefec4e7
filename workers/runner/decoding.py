"""`DecodingStrategy`: how a step turns running requests and prompt chunks into tokens; and plain decoding, the
simplest one. Speculation is another (`speculative.decoding`); the worker does not know which it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention.metadata import DecodeBatch, Mode, PrefillBatch, causal_mask, to_device
from workers.config import PLAIN, RoundShape
from workers.layers.vocab import LMHead
from workers.runner.model_runner import TargetRunner
from workers.runner.slot_table import SlotTable
from workers.sampling.sampler import Logprobs, Rows, Sampler, SamplingNeeds, logprobs_of


@dataclass(frozen=True)
class PromptChunks:
    """The chunks of a step. slots: [C] on the host and device. ids: [rows] int64. next_ids: per chunk the prompt token
    behind it, -1 if it is the prompt's last chunk. finals: which chunks are, final_chunks: [F] int64 the same;
    final_slots: [F] int64; final_lengths: their prompts' lengths."""

    batch: PrefillBatch
    slots: tuple[int, ...]
    ids: Tensor
    next_ids: tuple[int, ...]
    finals: tuple[int, ...]
    final_chunks: Tensor
    final_slots: Tensor
    final_lengths: tuple[int, ...]

    @property
    def final_rows(self) -> Tensor:
        """[F] int64: the last rows of `finals`, counted from the first chunk row."""
        return self.batch.last_row_indices[self.final_chunks]

    @property
    def final_slot_ids(self) -> tuple[int, ...]:
        """`final_slots` on the host."""
        return tuple(self.slots[c] for c in self.finals)


@dataclass(frozen=True)
class StepBatch:
    """A plan as tensors. slots: [B] int64, requests that run a round of `shape`; slot_ids: the same on the host.
    max_kv_len: host-side bound of any length in the step. speculates: whether any request that emits wants drafts."""

    slots: Tensor
    slot_ids: tuple[int, ...]
    shape: int
    max_kv_len: int
    chunks: PromptChunks | None
    needs: SamplingNeeds
    speculates: bool = False

    @property
    def num_requests(self) -> int:
        """Requests that run a round; a captured step has more, for padding."""
        return self.slots.shape[0]

    @property
    def entry_slots(self) -> tuple[int, ...]:
        """The slots that emit tokens in this step, in the order of its result."""
        return self.slot_ids + (self.chunks.final_slot_ids if self.chunks else ())


@dataclass(frozen=True)
class StepTensors:
    """What a step emitted, B requests then F final chunks: tokens [B + F, M] int64, counts, finish, accepted
    [B + F] int64 (accepted is -1 where nothing was verified), logprobs if any request asked."""

    tokens: Tensor
    counts: Tensor
    finish: Tensor
    accepted: Tensor
    logprobs: Logprobs | None


class DecodingStrategy(Protocol):
    """shapes: the kinds of round it can run; index 0 is plain decoding."""

    @property
    def shapes(self) -> Sequence[RoundShape]: ...

    def step(self, batch: StepBatch) -> StepTensors:
        """Run one step; changes slots, KV pools and its own state in place."""


def begin_finals(slots: SlotTable, chunks: PromptChunks) -> None:
    """Prepare slots whose prompt ends in this step: its last token takes the place of a round's root."""
    if chunks.finals:
        lengths = torch.tensor(chunks.final_lengths, dtype=torch.int32) - 1
        slots.seq_len[chunks.final_slots] = to_device(lengths, slots.device)


class Autoregressive:
    """One token per request and step."""

    def __init__(self, target: TargetRunner, slots: SlotTable, sampler: Sampler) -> None:
        self._target = target
        self._slots = slots
        self._sampler = sampler
        self._sees_itself = causal_mask(1, 1, slots.device)

    @property
    def shapes(self) -> Sequence[RoundShape]:
        return (PLAIN,)

    def step(self, batch: StepBatch) -> StepTensors:
        slots, chunks = self._slots, batch.chunks
        decode = self._decode_batch(batch) if batch.num_requests else None
        ids = slots.bonus[batch.slots]
        emitting = batch.slots
        if chunks is not None:
            begin_finals(slots, chunks)
            ids = torch.cat((ids, chunks.ids))
            emitting = torch.cat((emitting, chunks.final_slots))
        out = self._target.forward(ids, decode, None, chunks.batch if chunks else None)
        hidden = out.hidden[: batch.slots.shape[0]]
        if chunks is not None:
            hidden = torch.cat((hidden, out.hidden[batch.slots.shape[0] + chunks.final_chunks]))
        return self._emit(hidden, emitting, batch)

    def _decode_batch(self, batch: StepBatch) -> DecodeBatch:
        """One row per running request, which writes its bonus token's KV."""
        slots, mask = self._slots, self._sees_itself.expand(batch.num_requests, 1)
        length, page_table = slots.seq_len[batch.slots], slots.page_table[batch.slots]
        return DecodeBatch(Mode.DECODE, 1, 1, length, mask, page_table, batch.max_kv_len)

    def _emit(self, hidden: Tensor, emitting: Tensor, batch: StepBatch) -> StepTensors:
        head: LMHead = self._target.model.lm_head
        positions = (self._slots.seq_len[emitting] + 1).long().unsqueeze(1)
        sampled = self._sampler.sample(head(hidden), Rows(emitting, positions), batch.needs)
        logprobs = None
        if sampled.logits is not None:
            logprobs = logprobs_of(sampled.logits, sampled.tokens, batch.needs.num_logprobs)
        commit = self._slots.commit(emitting, sampled.tokens, torch.ones_like(emitting))
        nothing_verified = torch.full_like(emitting, -1)
        return StepTensors(commit.tokens, commit.counts, commit.finish, nothing_verified, logprobs)
