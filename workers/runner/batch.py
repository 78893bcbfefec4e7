"""A step's batch as tensors, the order of its rows, and its output. Built by `aerie.workers.runner.plan_batch`, read by
decoding strategies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aerie.kernels.kv.batches import PrefillBatch
from aerie.workers.sampling import Logprobs, PromptRanking, SamplingNeeds


@dataclass(frozen=True)
class PromptChunks:
    """C prompt chunks of a step, on the device. The first F end their prompts. A captured step has F = C and padding:
    chunks without rows, rows without a chunk, and the padding slot for chunks that do not end their prompt.

    batch: rows of the chunks.
    ids: [rows] int64 prompt tokens.
    next_ids: [C] int64 prompt token after each chunk; -1 for chunks that end their prompt.
    final_slots: [F] int64.
    final_lengths: [F] int32 prompt lengths without the last token; 0 for the padding slot.
    """

    batch: PrefillBatch
    ids: Tensor
    next_ids: Tensor
    final_slots: Tensor
    final_lengths: Tensor

    @property
    def num_finals(self) -> int:
        return self.final_slots.shape[0]


@dataclass(frozen=True)
class PromptTargets:
    """The n prompt tokens of a step whose log-probabilities are requested.

    rows: [n] int64 rows of the preceding tokens, counted from the first chunk row.
    tokens: [n] int64.
    num_top: number of most likely tokens to return for each.
    """

    rows: Tensor
    tokens: Tensor
    num_top: int


@dataclass(frozen=True)
class StepBatch:
    """A step: B requests that run a round, and prompt chunks, F of which end their prompts. Its entries are these B
    requests, then these F chunks. They emit tokens.

    slots: [B] int64 slots of the requests in a round.
    shape, next_shape: indexes of the tree shapes that rounds verify and draft (`aerie.workers.config.RoundShapes`).
    draft_slots: [B + F] int64 slot of each entry that drafts, else the padding slot.
    max_kv_len: host-side bound of the KV positions that the step reads or writes.
    needs: sampling needs of all entries.
    prompt_targets: None if no prompt log-probabilities are requested.
    is_shifted: whether the rounds' rotary positions are the slots' `position_shift` from their KV positions; else they
        are equal.
    shift_is_captured: whether captured steps do so.
    adapted: whether any request has an adapter.
    """

    slots: Tensor
    shape: int
    next_shape: int
    draft_slots: Tensor
    max_kv_len: int
    chunks: PromptChunks | None
    needs: SamplingNeeds
    prompt_targets: PromptTargets | None = None
    is_shifted: bool = False
    shift_is_captured: bool = False
    adapted: bool = False

    @property
    def is_eager(self) -> bool:
        """Whether no captured step can run it: captured steps compute only the last row of each chunk in the last
        layer, and embed all ids but images'; those of models without M-RoPE have KV positions as rotary positions."""
        inputs = None if self.chunks is None else self.chunks.batch.inputs
        has_inputs = inputs is not None and not (self.shift_is_captured and inputs.is_captured)
        is_shifted = self.is_shifted and not self.shift_is_captured
        return self.prompt_targets is not None or has_inputs or is_shifted

    @property
    def num_requests(self) -> int:
        """Requests that run a round, including the padding of a captured step."""
        return self.slots.shape[0]

    @cached_property
    def entry_slots(self) -> Tensor:
        """Slots that emit tokens, [B + F] int64."""
        return self.slots if self.chunks is None else torch.cat((self.slots, self.chunks.final_slots))

    def head_slots(self, width: int) -> Tensor | None:
        """Return the slots of the vocabulary head's rows, [B * width + F] int64: `width` rows per round, then the last
        rows of prompts. None without adapters."""
        if not self.adapted:
            return None
        return joined((self.slots.repeat_interleave(width), None if self.chunks is None else self.chunks.final_slots))

    @property
    def prompt_target_slots(self) -> Tensor | None:
        """Slots of the prompt targets, [n] int64; None without adapters or targets."""
        if not self.adapted or self.prompt_targets is None:
            return None
        assert self.chunks is not None and self.chunks.batch.slots is not None, "targets are of chunks, in eager steps"
        return self.chunks.batch.slots[self.chunks.batch.row_chunks()[self.prompt_targets.rows]].long()

    def rows(self, width: int) -> "RowLayout":
        """Return the order of rows of a pass with `width` rows per round."""
        return RowLayout(self.num_requests, width, self.chunks)


@dataclass(frozen=True)
class RowLayout:
    """Order of a pass's rows: `width` rows per round, then the rows of prompt chunks."""

    num_requests: int
    width: int
    chunks: PromptChunks | None

    @property
    def num_round_rows(self) -> int:
        return self.num_requests * self.width

    def round_rows(self, x: Tensor) -> Tensor:
        """Select the round rows from x [rows, ...]."""
        return x if self.chunks is None else x[: self.num_round_rows]

    def chunk_rows(self, x: Tensor) -> Tensor:
        """Select the chunk rows from x [rows, ...]."""
        return x[self.num_round_rows :]

    def with_finals(self, x: Tensor, every_row: bool = False) -> Tensor:
        """Select the round rows, then the last row of each chunk that ends its prompt, from x [rows, ...].

        every_row: x has all chunk rows; else only the last row of each chunk.
        """
        if self.chunks is None:
            return x
        num_finals = self.chunks.num_finals
        if not every_row:
            return x[: self.num_round_rows + num_finals]
        finals = self.chunks.batch.last_row_indices[:num_finals]
        return torch.cat((x[: self.num_round_rows], x[self.num_round_rows + finals]))


def prompt_hidden(batch: StepBatch, hidden: Tensor, width: int) -> Tensor | None:
    """Return the hidden states [n, H] from which prompt targets are ranked; None without targets.

    hidden: [rows, H] with all chunk rows.
    width: rows per round.
    """
    targets = batch.prompt_targets
    return None if targets is None else hidden.index_select(0, batch.num_requests * width + targets.rows)


def joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Concatenate the parts that are not None. A single part is returned without a copy."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present)


@dataclass(frozen=True)
class StepTensors:
    """The output of a step's entries.

    tokens: [B + F, M] int64; the first `counts` of a row are valid.
    counts, finish, accepted: [B + F] int64; see `StepResult`. accepted is -1 if nothing was verified.
    logprobs: log-probabilities of the emitted tokens, if requested.
    drafts: [B + F, 2, W] int64 tokens and parents of the next trees, if a request has a grammar and there is a draft.
    prompt_logprobs: log-probabilities of the batch's prompt targets, if any.
    matches: [B + F, 3] int64, in engines that copy drafts from the requests' text. Three counts per entry: leading
        tokens of this step that the last proposal predicted, -1 without a proposal; length of the match from which the
        next proposal is copied, 0 without one; accepted drafts that were copied.
    min_entropies: [B + F] int64, in engines that choose shapes by acceptance: the target's min-entropy after the newest
        token before the step, in thousandths of a nat; negative where a prompt ended.
    """

    tokens: Tensor
    counts: Tensor
    finish: Tensor
    accepted: Tensor
    logprobs: Logprobs | None
    drafts: Tensor | None = None
    prompt_logprobs: PromptRanking | None = None
    matches: Tensor | None = None
    min_entropies: Tensor | None = None
