"""All-reduce of a few rows over the GPUs of one node, with residual addition and RMSNorm, in one launch; and the sum of
the ranks' parts in rank order, after a collective that only moved them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aerie.kernels.norm.norm import add_rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation

_WORD_BYTES = 4  # two 16-bit numbers, which kernels load and store together
ONE_SHOT = Implementation("triton", "aerie.kernels.collectives.all_reduce_triton:one_shot_all_reduce", on_gpu)


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
    weight            [width] of x's dtype or float32: see `aerie.kernels.norm.norm.rms_norm`
    inbox             [2, capacity, ranks, width / 2] int64, this rank's inbox; zero before the first call
    inboxes           [ranks] int64, addresses of the inboxes of all ranks
    epochs            [capacity] int32, written; zero before the first call
    capacity          maximum rows, at most the GPU's number of multiprocessors, each of which runs one program
    """
    _check(x, inbox, inboxes, epochs, out, norm)
    ONE_SHOT.function(x, inbox, inboxes, epochs, rank, out, norm)


def _check(
    x: Tensor, inbox: Tensor, inboxes: Tensor, epochs: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, float] | None
) -> None:
    (rows, width), (world,), (capacity,) = x.shape, inboxes.shape, epochs.shape
    assert x.dtype in (torch.bfloat16, torch.float16) and width % 2 == 0 and world & (world - 1) == 0
    assert 0 < rows <= capacity and inbox.shape == (2, capacity, world, width // 2) and inbox.is_contiguous()
    assert inbox.dtype == inboxes.dtype == torch.int64 and epochs.dtype == torch.int32
    residual, weight, _ = norm if norm is not None else (x, None, 0.0)
    for tensor in (x, out, residual):
        assert tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % _WORD_BYTES == 0, "two numbers are read as one word"
    if weight is not None:
        assert weight.shape == (width,) and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)


def reference(parts: Sequence[Tensor], norm: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
    """Return `out` from all ranks' x; writes the residual."""
    total = torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    return total if norm is None else add_rms_norm.reference(total, *norm)


def _check_sum_in_order(parts: Tensor) -> None:
    assert parts.dim() == 2 and parts.is_contiguous() and parts.shape[0] > 0


@operation(
    Implementation("triton", "aerie.kernels.collectives.all_reduce_triton:sum_in_order", on_gpu),
    contract=_check_sum_in_order,
)
def sum_in_order(parts: Tensor) -> Tensor:
    """Return the sum of the parts, added one after another in float32 and rounded once; wider types in their own.

    parts  [ranks, n], contiguous
    ->     [n], in the parts' dtype
    """
    is_narrow = parts.is_floating_point() and parts.itemsize < 4
    total = parts[0].to(torch.float32 if is_narrow else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
