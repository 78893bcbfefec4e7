# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sums shared by several programs (split K). Each program stores its part; the last adds all parts in order, so equal
inputs give equal bits."""

import triton
import triton.language as tl


@triton.jit
def comes_last(ticket_ptr, SPLITS: tl.constexpr):
    """Return whether this is the last of SPLITS programs to store its part. The barrier orders the stores of all
    threads before the release. ticket_ptr: one int32, zero before and after."""
    tl.debug_barrier()
    is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(ticket_ptr, 0)
    return is_last


@triton.jit
def sum_of_splits(cells, there, step, SPLITS: tl.constexpr):
    """Sum the parts at `cells`, `step` apart. Reads from L2, because L1 is not coherent. there: a mask, or None."""
    other = None if there is None else 0.0
    acc = tl.load(cells, mask=there, other=other, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(cells + split * step, mask=there, other=other, cache_modifier=".cg")
    return acc
