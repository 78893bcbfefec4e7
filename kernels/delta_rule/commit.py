"""Moves the accepted rows of all layers to the committed rows, which the next round replays."""

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.delta_rule.tables import HISTORY, DeltaState
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(kept: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    check_slots(slots)
    assert path.dtype == torch.int64 and counts.dtype in (torch.int32, torch.int64)
    assert slots.shape == counts.shape and counts.is_contiguous()
    assert path.dim() == 2 and path.shape[0] == slots.shape[0] and path.stride(1) == 1
    assert path.shape[1] <= kept.committed.shape[2]
    assert kept.conv.is_contiguous() and kept.pending.is_contiguous() and kept.committed.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.delta_rule.commit_triton:commit_rows", on_gpu), contract=_check)
def commit_rows(kept: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Make the accepted path of a round the committed rows of its slots, in all layers. Called once, after the pass.

    The pass has replayed the previous committed rows into `state`. So `conv` advances over them, committed[j] becomes
    pending[path[j]] for j < counts, and `count` becomes counts. The padding slot does not change.

    kept    conv, committed and count are written
    slots   [B] int64, distinct except for the padding slot of padding rows
    path    [B, D] int64, nodes by depth, D <= P; without speculation zeros [B, 1]
    counts  [B] int32 or int64, number of committed nodes of the path, at most D
    """
    heads, depth = kept.heads, path.shape[1]
    slots, path, counts = (each[slots != kept.padding_slot] for each in (slots, path, counts))
    seen = torch.cat((kept.conv[:, slots], kept.committed[:, slots, :, : heads.channels]), 2)
    newest = kept.count[slots].long().unsqueeze(1) + torch.arange(HISTORY, device=slots.device)
    kept.conv[:, slots] = seen[:, torch.arange(len(slots), device=slots.device).unsqueeze(1), newest]
    moves = (torch.arange(depth, device=slots.device) < counts.unsqueeze(1)).unsqueeze(-1)
    moved = torch.where(moves, kept.pending[:, slots.unsqueeze(1), path], kept.committed[:, slots, :depth])
    kept.committed[:, slots, :depth] = moved
    kept.count[slots] = counts.int()
