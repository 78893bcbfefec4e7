"""A step's batch as tensors, the layout of its rows, and its output. Built by `workers.runner.worker`, read by decoding
strategies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention.metadata import PrefillBatch
from workers.sampling.prompt_logprobs import PromptRanking
from workers.sampling.sampler import Logprobs, SamplingNeeds


@dataclass(frozen=True)
class PromptChunks:
    """C prompt chunks of a step, on the device. The first F end their prompts. A captured step has F = C and padding:
    chunks without rows, rows without a chunk, and the padding slot for chunks that end no prompt.

    batch: their rows.
    ids: [rows] int64.
    next_ids: [C] int64 prompt token after each chunk; -1 without one.
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

    rows: [n] int64 chunk rows that they follow.
    tokens: [n] int64.
    num_top: number of most likely tokens to return with them.
    """

    rows: Tensor
    tokens: Tensor
    num_top: int


@dataclass(frozen=True)
class StepBatch:
    """A step: B requests that run rounds, and prompt chunks of which F end their prompts. Its entries are those
    requests, then those chunks.

    slots: [B] int64 requests that verify trees of `shape`.
    shape, next_shape: indexes of the verified and of the drafted shape (`workers.config.RoundShapes`).
    draft_slots: [B + F] int64 slot of each entry that drafts, else the padding slot.
    max_kv_len: host-side bound of the KV positions that the step reads or writes.
    needs: of all entries.
    prompt_targets: None if no chunk asks. Steps with prompt targets run eagerly.
    """

    slots: Tensor
    shape: int
    next_shape: int
    draft_slots: Tensor
    max_kv_len: int
    chunks: PromptChunks | None
    needs: SamplingNeeds
    prompt_targets: PromptTargets | None = None

    @property
    def num_requests(self) -> int:
        """Requests that run a round, padding of a captured step included."""
        return self.slots.shape[0]

    @cached_property
    def entry_slots(self) -> Tensor:
        """[B + F] int64 slots that emit tokens."""
        return self.slots if self.chunks is None else torch.cat((self.slots, self.chunks.final_slots))

    def rows(self, width: int) -> "RowLayout":
        """Return the layout of a pass with `width` rows per round."""
        return RowLayout(self.num_requests, width, self.chunks)


@dataclass(frozen=True)
class RowLayout:
    """Layout of a pass's rows: `width` rows per round, then the rows of prompt chunks."""

    num_requests: int
    width: int
    chunks: PromptChunks | None

    @property
    def num_round_rows(self) -> int:
        return self.num_requests * self.width

    def of_rounds(self, x: Tensor) -> Tensor:
        """Select the rows of rounds from x [rows, ...]."""
        return x if self.chunks is None else x[: self.num_round_rows]

    def of_chunks(self, x: Tensor) -> Tensor:
        """Select the rows of chunks from x [rows, ...]."""
        return x[self.num_round_rows :]

    def with_finals(self, x: Tensor, every_row: bool = False) -> Tensor:
        """Select the rows of rounds, then one per chunk that ends its prompt.

        every_row: x has all rows of chunks; else only the last row of each.
        """
        if self.chunks is None:
            return x
        num_finals = self.chunks.num_finals
        if not every_row:
            return x[: self.num_round_rows + num_finals]
        finals = self.chunks.batch.last_row_indices[:num_finals]
        return torch.cat((x[: self.num_round_rows], x[self.num_round_rows + finals]))


def prompt_hidden(batch: StepBatch, hidden: Tensor, width: int) -> Tensor | None:
    """Return hidden [n, H] of the prompt targets; None without any.

    hidden: [rows, H] with all rows of chunks.
    width: rows per round.
    """
    targets = batch.prompt_targets
    return None if targets is None else hidden.index_select(0, batch.num_requests * width + targets.rows)


def joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Concatenate the parts that are not None; a single part is not copied."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present)


@dataclass(frozen=True)
class StepTensors:
    """The output of a step's entries.

    tokens: [B + F, M] int64.
    counts, finish, accepted: [B + F] int64; accepted is -1 where nothing was verified.
    logprobs: if any request asked.
    drafts: [B + F, 2, W] int64 tokens and parents of the next trees, if a request has a grammar and there is a draft.
    prompt_logprobs: of the batch's prompt targets, if any.
    matches: [B + F, 3] int64, if drafts are copied from the requests' text: how many of the tokens, from the first, the
        last proposal foresaw, -1 without one; the length of the match that the next proposal follows, 0 without one;
        accepted drafts that were copied.
    min_entropies: [B + F] int64, in engines that choose shapes by acceptance: the target's min-entropy after the newest
        token before the step, in thousandths of a nat; below 0 where a prompt ended.
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
