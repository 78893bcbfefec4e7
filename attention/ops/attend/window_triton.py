# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Which KV positions a row of a round sees through a window (see `DecodeBatch.window`). WINDOW is a constant of a
kernel, 0 where there is none, so that kernels without one have nothing of it."""

import triton
import triton.language as tl


@triton.jit
def oldest_seen(bits, prefix, WINDOW: tl.constexpr):
    """The first KV position that rows with masks `bits` (int64, 0 or more) see after a prefix of `prefix` tokens; below
    0 where they see all of it."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    sixteens = eights + (eights >> 8)
    halves = sixteens + (sixteens >> 16)
    ones = (halves + (halves >> 32)) & 127
    return prefix + ones.to(tl.int32) - WINDOW


def first_seen(prefix_len: int, window: int | None) -> int:
    """The first KV position that any row of a request may see: that of one which sees of the suffix itself alone."""
    return 0 if window is None else max(prefix_len + 1 - window, 0)
