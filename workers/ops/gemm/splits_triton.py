# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sums that several programs share: each writes its part, and the one that comes last adds them in their order, so that
equal inputs give equal bits."""

import triton
import triton.language as tl


@triton.jit
def comes_last(ticket_ptr, SPLITS: tl.constexpr):
    """Whether this is the last of SPLITS programs that have written their parts. ticket_ptr: one int32, zero before and
    after. The barrier puts every thread's stores before the one thread's release."""
    tl.debug_barrier()
    is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(ticket_ptr, 0)
    return is_last


@triton.jit
def sum_of_splits(cells, there, step, SPLITS: tl.constexpr):
    """cells: of the first part, from which the others are `step` apart. there: a mask, or None. L1 is not coherent:
    what other programs wrote is read from L2."""
    other = None if there is None else 0.0
    acc = tl.load(cells, mask=there, other=other, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(cells + split * step, mask=there, other=other, cache_modifier=".cg")
    return acc
