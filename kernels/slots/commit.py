"""Appends a round's tokens to its requests' slots, and decides which requests are finished."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NOT_FINITE, FINISH_STOP


@dataclass(frozen=True)
class CommitTables:
    """The columns of a slot table that commits read and write, for S slots.

    seq_len        [S] int32, written: committed tokens, without the bonus token
    bonus          [S] int64, written: the last emitted token, whose KV is not computed yet
    max_len        [S] int64
    finished       [S] bool, written
    shapes_logits  [S] bool: requests whose output is counted
    stop_ids       [S, n] int64
    output_counts  [S, vocab] int32, written
    seed           [S] int64, for `aerie.kernels.tree.acceptance.accept_synthetic`
    """

    seq_len: Tensor
    bonus: Tensor
    max_len: Tensor
    finished: Tensor
    shapes_logits: Tensor
    stop_ids: Tensor
    output_counts: Tensor
    seed: Tensor


@dataclass(frozen=True)
class Commit:
    """Tokens that a commit emitted.

    tokens: [B, M] int64; the first `counts` of a row are valid.
    counts, finish: [B] int64; finish is one of FINISH_*.
    """

    tokens: Tensor
    counts: Tensor
    finish: Tensor


def _check(slots: Tensor, tokens: Tensor, counts: Tensor, tables: CommitTables) -> None:
    check_slots(slots)
    assert tokens.dtype == counts.dtype == torch.int64
    assert tokens.dim() == 2 and tokens.shape[0] == slots.shape[0] == counts.shape[0]
    assert tokens.is_contiguous() and tables.stop_ids.is_contiguous()


@operation(
    Implementation(
        "triton",
        "aerie.kernels.slots.commit_triton:commit_one",
        on_gpu,
        serves=lambda slots, tokens, counts, tables: tokens.shape[1] == 1,
        limits="one token a request; `speculative` commits accepted paths in its own kernel",
    ),
    contract=_check,
)
def commit(slots: Tensor, tokens: Tensor, counts: Tensor, tables: CommitTables) -> tuple[Tensor, Tensor]:
    """Append tokens to slots. Return the number of committed tokens and the finish reason of each request.

    Tokens after the first stop token and beyond the length limit are dropped. Finished slots do not change. Tokens of
    requests with `shapes_logits` are counted. A negative last token means that logits were not finite; it is dropped,
    and the request finishes with FINISH_NOT_FINITE.

    slots   [B] int64; the padding slot, which is always finished, for padding rows
    tokens  [B, M] int64, contiguous, written: negative ones become 0
    counts  [B] int64, 1 to M: number of valid tokens
    tables  written
    ->      [B] int64 committed tokens; [B] int64 finish reason (FINISH_*), or 0
    """
    length = tables.seq_len[slots].long()
    column = torch.arange(tokens.shape[1], device=tokens.device)
    counts = torch.minimum(counts, tables.max_len[slots] - length - 1)
    is_stop = (tokens.unsqueeze(-1) == tables.stop_ids[slots].unsqueeze(1)).any(-1)
    first_stop = torch.where(is_stop, column, tokens.shape[1]).amin(-1)
    stopped = first_stop < counts
    counts = torch.where(stopped, first_stop + 1, counts)
    was_finished = tables.finished[slots]
    counts = torch.where(was_finished, 0, counts)
    new_length = length + counts
    at_limit = new_length + 1 >= tables.max_len[slots]
    finish = torch.where(stopped, FINISH_STOP, torch.where(at_limit, FINISH_LENGTH, 0))
    last = tokens.gather(1, (counts - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    broken = (last < 0) & (counts > 0)
    last = last.clamp_min(0)
    tokens.clamp_min_(0)
    counts = torch.where(broken, counts - 1, counts)
    new_length = length + counts
    finish = torch.where(broken, FINISH_NOT_FINITE, finish)
    finish = torch.where(was_finished, 0, finish)
    tables.seq_len[slots] = new_length.int()
    tables.bonus[slots] = torch.where(was_finished, tables.bonus[slots], last)
    tables.finished[slots] = was_finished | (finish > 0)
    valid = (column < counts.unsqueeze(1)) & tables.shapes_logits[slots].unsqueeze(1)
    index = slots.unsqueeze(1) * tables.output_counts.shape[1] + tokens
    tables.output_counts.view(-1).scatter_add_(0, index.flatten(), valid.int().flatten())
    return counts, finish
