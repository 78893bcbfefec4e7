# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Weights that are read soon, asked for while memory rests: by a product before it waits for its predecessor, or by the
kernel before it when its own reads are done. They come into the L2 cache, which is 50 MB on an H200."""

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers, num_bytes, INTERPRETED: tl.constexpr):
    """Asks for num_bytes, multiples of 16, from each of `pointers` on, which are aligned to as many; for nothing where
    that is 0. As many pointers as the program has threads, else threads ask twice. Those of a warp ask one after the
    other, so let few of them ask for much. Does not wait (PTX ISA, cp.async.bulk.prefetch)."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), num_bytes],
            tl.int32,
            False,
            1,
        )
