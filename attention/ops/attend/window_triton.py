# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""KV positions that a row of a round sees through a sliding window (see `DecodeBatch.window`). WINDOW is 0 without a
window; such kernels contain no code for it."""

import triton
import triton.language as tl

from attention.ops.attend.tree_mask_triton import num_seen


@triton.jit
def oldest_seen(bits, prefix, WINDOW: tl.constexpr):
    """Return the first KV position that rows with masks `bits` see after `prefix` tokens; negative if they see all."""
    return prefix + num_seen(bits) - WINDOW


def first_seen(prefix_len: int, window: int | None) -> int:
    """Return the first KV position that any row may see: that of a row that sees only itself in the suffix."""
    return 0 if window is None else max(prefix_len + 1 - window, 0)
