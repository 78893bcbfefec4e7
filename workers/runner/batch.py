"""A step's plan as tensors, the layout of its rows, and what it emits. Made by `workers.runner.worker`, read by
decoding strategies."""

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
    """C prompt chunks of a step, all on the device. The first F of them end their prompts; the sizes say so, no list on
    the host does. In a captured step F = C, and what there is too much of is padding: chunks without rows, rows that
    belong to no chunk, and the padding slot for chunks that end no prompt.

    batch: their rows.
    ids: [rows] int64.
    next_ids: [C] int64, the prompt token after each chunk, -1 where there is none.
    final_slots: [F] int64.
    final_lengths: [F] int32, tokens of their prompts but for the last; 0 for the padding slot.
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
    """The n prompt tokens of a step whose log-probabilities are wanted.

    rows: [n] int64, of the rows of the chunks those after which they come.
    tokens: [n] int64.
    num_top: so many most likely tokens are wanted beside them.
    """

    rows: Tensor
    tokens: Tensor
    num_top: int


@dataclass(frozen=True)
class StepBatch:
    """What a step runs: B requests in rounds, and prompt chunks of which F end their prompts. Its entries are those
    requests, then those chunks.

    slots: [B] int64, the requests that verify trees of `shape`.
    shape, next_shape: indices of the verified and of the drafted shape (`workers.config.RoundShapes`).
    draft_slots: [B + F] int64, per entry its slot if it drafts, else the padding slot.
    max_kv_len: host-side bound of any KV position that the step touches.
    needs: of all entries.
    prompt_targets: None where no chunk asks. A captured step has none: those with any run eagerly.
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
        """Requests that run a round; a captured step has more, for padding."""
        return self.slots.shape[0]

    @cached_property
    def entry_slots(self) -> Tensor:
        """[B + F] int64: the slots that emit tokens."""
        return self.slots if self.chunks is None else torch.cat((self.slots, self.chunks.final_slots))

    def rows(self, width: int) -> "RowLayout":
        """The layout of a pass with `width` rows for each round."""
        return RowLayout(self.num_requests, width, self.chunks)


@dataclass(frozen=True)
class RowLayout:
    """Who has which rows of a pass: `width` rows for each of the rounds, then the rows of the prompt chunks."""

    num_requests: int
    width: int
    chunks: PromptChunks | None

    @property
    def num_round_rows(self) -> int:
        return self.num_requests * self.width

    def of_rounds(self, x: Tensor) -> Tensor:
        """Of x [rows, ...] the rows of rounds."""
        return x if self.chunks is None else x[: self.num_round_rows]

    def of_chunks(self, x: Tensor) -> Tensor:
        """Of x [rows, ...] the rows of chunks."""
        return x[self.num_round_rows :]

    def with_finals(self, x: Tensor, every_row: bool = False) -> Tensor:
        """Of x the rows of rounds, then one for each chunk that ends its prompt. x has all rows of the chunks where
        `every_row`, else the last of each."""
        if self.chunks is None:
            return x
        num_finals = self.chunks.num_finals
        if not every_row:
            return x[: self.num_round_rows + num_finals]
        finals = self.chunks.batch.last_row_indices[:num_finals]
        return torch.cat((x[: self.num_round_rows], x[self.num_round_rows + finals]))


def prompt_hidden(batch: StepBatch, hidden: Tensor, width: int) -> Tensor | None:
    """[n, H] of hidden [rows, H], which has all rows of the chunks, those of the prompt targets; None where there are
    none. width: rows of each round."""
    targets = batch.prompt_targets
    return None if targets is None else hidden.index_select(0, batch.num_requests * width + targets.rows)


def joined(parts: Sequence[Tensor | None]) -> Tensor:
    """The parts that there are, below each other; one alone is not copied."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present)


@dataclass(frozen=True)
class StepTensors:
    """What the entries of a step emitted: tokens [B + F, M] int64, counts, finish, accepted [B + F] int64 (accepted is
    -1 where nothing was verified), logprobs if any request asked; drafts [B + F, 2, W] int64, tokens and parents of the
    trees that they verify next, if any has a grammar and there is a draft; prompt_logprobs of the batch's prompt
    targets, if any."""

    tokens: Tensor
    counts: Tensor
    finish: Tensor
    accepted: Tensor
    logprobs: Logprobs | None
    drafts: Tensor | None = None
    prompt_logprobs: PromptRanking | None = None
