"""All-reduce of a few rows over the GPUs of one node, with residual addition and RMSNorm, in one launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.ops.operation import Implementation, on_gpu
from workers.ops.norm import add_rms_norm

ONE_SHOT = Implementation("triton", "workers.ops.collectives.one_shot_all_reduce_triton:one_shot_all_reduce", on_gpu)


def one_shot_all_reduce(
    x: Tensor,
    inbox: Tensor,
    inboxes: Tensor,
    epochs: Tensor,
    rank: int,
    out: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Write the sum of x over the ranks to out, with the same bits on every rank.

    With norm = (residual, weight, eps): add the sum to residual, and write the RMSNorm of residual to out. Blocks the
    stream until every rank has made the same call.

    x, out, residual  [rows, width], bfloat16 or float16, contiguous; out may be x; residual is written
    weight            [width] of x's dtype or float32: see `workers.ops.norm.rms_norm`
    inbox             [2, capacity, ranks, width / 2] int64, of this rank; zero before the first call
    inboxes           [ranks] int64, addresses of the inboxes of all ranks
    epochs            [capacity] int32, written; zero before the first call
    capacity          maximum rows, at most the GPU's number of multiprocessors: each holds one program
    """
    ONE_SHOT.function(x, inbox, inboxes, epochs, rank, out, norm)


def reference(parts: Sequence[Tensor], norm: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
    """Return `out` from all ranks' x; writes the residual."""
    total = torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    return total if norm is None else add_rms_norm.reference(total, *norm)
