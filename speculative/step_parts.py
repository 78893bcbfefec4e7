"""Values passed between the stages of a step of `aerie.speculative.decoding`, and its output."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.slots.commit import Commit
from aerie.kernels.tree.acceptance import Committed
from aerie.kernels.tree.nodes import RoundRows
from aerie.workers.runner.batch import PromptChunks, StepBatch, StepTensors, joined
from aerie.workers.sampling.prompt_logprobs import PromptRanking
from aerie.workers.sampling.sampler import Logprobs, Sampled, logprobs_of


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


def emitted(
    batch: StepBatch,
    rounds: Rounds | None,
    finals: Finals | None,
    drafts: Tensor | None,
    ranking: PromptRanking | None,
    matches: Tensor | None = None,
) -> StepTensors:
    """Return the output: entries that ran a round, then those whose prompt ended. drafts, ranking, matches: see
    `StepTensors`."""
    if rounds is None and finals is None:
        empty = batch.slots.new_zeros(0)
        return StepTensors(empty.view(0, 1), empty, empty, empty, None, None, ranking)
    done, first = rounds.committed if rounds else None, finals.commit if finals else None
    columns = done.commit.tokens.shape[1] if done else 1
    tokens = F.pad(first.tokens, (0, columns - 1)) if first else None
    nothing = torch.full_like(first.counts, -1) if first else None
    min_entropies = rounds.min_entropies if rounds else None
    return StepTensors(
        tokens=joined((done.commit.tokens if done else None, tokens)),
        counts=joined((done.commit.counts if done else None, first.counts if first else None)),
        finish=joined((done.commit.finish if done else None, first.finish if first else None)),
        accepted=joined((done.reported if done else None, nothing)),
        logprobs=_logprobs(rounds, finals, columns, batch.needs.num_logprobs),
        drafts=drafts,
        prompt_logprobs=ranking,
        matches=matches,
        min_entropies=None if min_entropies is None else joined((min_entropies, nothing)),
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
        of_finals, others = after_chunk[: chunks.num_finals], after_chunk[chunks.num_finals :]
        first = finals.commit.tokens.squeeze(1)
        after_chunk = torch.cat((torch.where(of_finals < 0, first, of_finals), others))
    # look up the chunk of each row, because some chunks of a captured step have no rows
    chunk = chunks.batch.row_chunks().clamp_max(after_chunk.shape[0] - 1)
    row = torch.arange(chunk.shape[0], device=chunk.device)
    return torch.where(row == chunks.batch.last_row_indices[chunk], after_chunk[chunk], chunks.ids.roll(-1))
