# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Weights that are read soon, asked for while memory rests: by a product before it waits for its predecessor, or by the
kernel before it when its own reads are done. They come into the L2 cache, which is 50 MB on an H200."""

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers, NUM_BYTES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Asks for NUM_BYTES, a multiple of 16, from each of `pointers` on, which are aligned to as many; as many pointers
    as the program has threads, else threads ask twice. Does not wait (PTX ISA, cp.async.bulk.prefetch)."""
    tl.static_assert(NUM_BYTES % 16 == 0)
    if not INTERPRETED:
        addresses = pointers.to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [addresses, NUM_BYTES],
            tl.int32,
            False,
            1,
        )
