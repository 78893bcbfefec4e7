"""Values passed between the stages of a step of `aerie.speculative.decoding`, its output, and `DraftBacklog`, which on
CPUs writes the draft's KV of several non-speculative rounds at a time.

A non-speculative round has one draft row per request, and a pass over few rows takes almost as long as one over many:
at batch 8 on a CPU, a tenth of the round. So rows are collected, and written at `MAX_ROUNDS` per request, at `MAX_ROWS`
in all, or just before another kind of step. At batch 1, 16 rows take 2.2 to 3.8 ms, one row half of that, and a round
17. On GPUs every non-speculative round writes its rows, which costs 1.2 to 1.7 % of a round (H200, Llama-3.1-8B, batch
1 to 128). A backlog would need two more graphs per batch size."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.kernels.slots.commit import Commit
from aerie.kernels.tree.acceptance import Committed
from aerie.kernels.tree.nodes import RoundRows
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.workers.runner.batch import PromptChunks, StepBatch, StepTensors, joined
from aerie.workers.sampling import Logprobs, PromptRanking, Sampled, logprobs_of
from aerie.workers.slots import SlotTable


@dataclass(frozen=True)
class TargetPass:
    """Results of the target's pass.

    rows: rows of the rounds.
    page_table: [B, max_pages] int32, pages of the rounds.
    hidden: [n, H] of all rows of rounds, then of the last row of each prompt that ends.
    round_features, chunk_features: [rows, F] features for the draft model; None without one.
    prompt_hidden: [n, H] of the batch's prompt targets, if any.
    """

    rows: RoundRows
    page_table: Tensor
    hidden: Tensor
    round_features: Tensor | None
    chunk_features: Tensor | None
    prompt_hidden: Tensor | None = None


@dataclass(frozen=True)
class Rounds:
    """The rounds of a step after verification.

    length: [B] int32 committed KV tokens before the round.
    page_table: [B, max_pages] int32.
    sampled: the target's token after every node.
    features: [B * D, F] of the target on the accepted path, up to its maximum depth; None without a draft model.
    min_entropies: see `StepTensors`.
    """

    length: Tensor
    page_table: Tensor
    sampled: Sampled
    committed: Committed
    features: Tensor | None
    min_entropies: Tensor | None = None


@dataclass(frozen=True)
class Finals:
    """First tokens of the prompts that end in a step."""

    sampled: Sampled
    commit: Commit


def step_tensors(
    batch: StepBatch,
    rounds: Rounds | None,
    finals: Finals | None,
    drafts: Tensor | None,
    ranking: PromptRanking | None,
    matches: Tensor | None = None,
) -> StepTensors:
    """Return the output of a step: entries that ran a round, then those whose prompt ended.

    rounds: None if no request ran a round.
    finals: the first tokens after prompts that ended; None for none.
    drafts, ranking, matches: see `StepTensors`, where ranking is `prompt_logprobs`.
    """
    if rounds is None and finals is None:
        empty = batch.slots.new_zeros(0)
        return StepTensors(
            empty.view(0, 1), empty, finish=empty, accepted=empty, logprobs=None, drafts=None, prompt_logprobs=ranking
        )
    verified, first = rounds.committed if rounds else None, finals.commit if finals else None
    columns = verified.commit.tokens.shape[1] if verified else 1
    first_tokens = F.pad(first.tokens, (0, columns - 1)) if first else None
    no_round = torch.full_like(first.counts, -1) if first else None
    min_entropies = rounds.min_entropies if rounds else None
    return StepTensors(
        tokens=joined((verified.commit.tokens if verified else None, first_tokens)),
        counts=joined((verified.commit.counts if verified else None, first.counts if first else None)),
        finish=joined((verified.commit.finish if verified else None, first.finish if first else None)),
        accepted=joined((verified.reported if verified else None, no_round)),
        logprobs=_logprobs(rounds, finals, columns, batch.needs.num_logprobs),
        drafts=drafts,
        prompt_logprobs=ranking,
        matches=matches,
        min_entropies=None if min_entropies is None else joined((min_entropies, no_round)),
    )


def _logprobs(rounds: Rounds | None, finals: Finals | None, columns: int, num_logprobs: int) -> Logprobs | None:
    """Return log-probabilities along the accepted paths, and of first tokens; None if no request wants them."""
    logits, tokens = [], []
    if rounds is not None and rounds.sampled.logits is not None:
        path = rounds.committed.accepted.path
        index = path.unsqueeze(2).expand(-1, -1, rounds.sampled.logits.shape[2])
        logits.append(rounds.sampled.logits.gather(1, index))
        tokens.append(rounds.committed.commit.tokens)
    if finals is not None and finals.sampled.logits is not None:
        logits.append(finals.sampled.logits.expand(-1, columns, -1))
        tokens.append(F.pad(finals.commit.tokens, (0, columns - 1)))
    return logprobs_of(torch.cat(logits), torch.cat(tokens), num_logprobs) if logits else None


def ids_after(chunks: PromptChunks, finals: Finals | None) -> Tensor:
    """Return [rows] int64: the token after each chunk row, which the draft combines with the row's feature."""
    after_chunk = chunks.next_ids
    if finals is not None:
        final_rows, others = after_chunk[: chunks.num_finals], after_chunk[chunks.num_finals :]
        first = finals.commit.tokens.squeeze(1)
        after_chunk = torch.cat((torch.where(final_rows < 0, first, final_rows), others))
    # look up the chunk of each row, because some chunks of a captured step have no rows
    chunk = chunks.batch.row_chunks().clamp_max(after_chunk.shape[0] - 1)
    row = torch.arange(chunk.shape[0], device=chunk.device)
    return torch.where(row == chunks.batch.last_row_indices[chunk], after_chunk[chunk], chunks.ids.roll(-1))


MAX_ROUNDS = 48  # a mask has 63 bits
MAX_ROWS = 512  # maximum rows of all requests together; bounds the memory of their features


class DraftBacklog:
    """The rows of consecutive rounds of the same requests. A step of other requests writes the backlog first, so pages
    have no new owner before."""

    def __init__(self, draft: DraftRunner, slots: SlotTable) -> None:
        self._draft = draft
        self._table = slots
        self._slots: Tensor | None = None
        self._rounds: list[Rounds] = []
        self._max_kv_len = 0

    def add(self, slots: Tensor, rounds: Rounds, max_kv_len: int) -> None:
        """Add the rows of a round.

        slots: [B] int64.
        max_kv_len: see `DecodeBatch`.
        """
        if self._slots is not None and self._slots is not slots and not torch.equal(self._slots, slots):
            self.write()
        self._slots, self._max_kv_len = slots, max_kv_len
        self._rounds.append(rounds)
        # an ended request does not advance, so its next row would not follow this one
        is_full = len(self._rounds) == max(1, min(MAX_ROUNDS, MAX_ROWS // len(slots)))
        if is_full or bool(self._table.finished[slots].any()):
            self.write()

    def write(self) -> None:
        """Write all waiting rows."""
        if self._slots is None:
            return
        rounds, count, num_requests = self._rounds, len(self._rounds), len(self._slots)
        ids = torch.cat([of.committed.commit.tokens for of in rounds], dim=1)
        features = torch.stack([of.features for of in rounds if of.features is not None], dim=1)
        extend = DecodeBatch(
            Mode.DRAFT_EXTEND,
            count,
            suffix_len=count,
            prefix_len=rounds[0].length,
            mask=causal_mask(num_requests, count, ids.device),
            page_table=rounds[-1].page_table,
            max_kv_len=self._max_kv_len,
        )
        self._draft.keep(ids.flatten(), features.flatten(0, 1), extend, None)
        self._slots, self._rounds = None, []
