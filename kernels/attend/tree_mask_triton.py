# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What a row of a round sees, in kernels: suffix columns by its tree mask, and KV positions through a sliding window.

Tree masks are bits or spans (`aerie.kernels.kv.tree_masks`), computed by `aerie.kernels.tree.tree_growth`. WINDOW (see
`DecodeBatch.window`) is 0 without a window; such kernels contain no code for it.
"""

import triton
import triton.language as tl


@triton.jit
def num_seen(bits):
    """Return the number of set bits, int32, of masks `bits`."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    sixteens = eights + (eights >> 8)
    halves = sixteens + (sixteens >> 16)
    ones = (halves + (halves >> 32)) & 127
    return ones.to(tl.int32)


@triton.jit
def path_length(mask, SPANS: tl.constexpr):
    """Return the number of suffix columns, int32, that rows with masks `mask` see."""
    if SPANS:
        return (mask >> 32).to(tl.int32)
    return num_seen(mask)


@triton.jit
def sees(mask, of_columns):
    """Return [N, M] bool: whether rows with spans `mask` [N] see columns with spans `of_columns` [M]."""
    number, end = (of_columns & 0xFFFF).to(tl.int32), ((of_columns >> 16) & 0xFFFF).to(tl.int32)
    own = (mask & 0xFFFF).to(tl.int32)
    return (number[None, :] <= own[:, None]) & (own[:, None] < end[None, :])


@triton.jit
def path_columns(path, over):
    """Return the suffix columns of indices `over` [N] in a row's path, and whether the row sees them.

    The path is the set bits of the row's mask, in order. Negative indices (the prefix) are seen, indices after the path
    are not.
    """
    place, length = over * 0, 0
    for part in tl.static_range(4):  # 16 bits at a time, for few registers
        bit = part * 16 + tl.arange(0, 16)
        ones = ((path >> bit.to(tl.int64)) & 1).to(tl.int32)
        rank = length + tl.cumsum(ones, 0) - ones
        hit = (ones != 0)[None, :] & (rank[None, :] == over[:, None])
        place += tl.sum(tl.where(hit, bit[None, :], 0), 1)
        length += tl.sum(ones, 0)
    return place, over < length


@triton.jit
def oldest_seen(bits, prefix, WINDOW: tl.constexpr, SPANS: tl.constexpr = False):
    """Return the first KV position that rows with masks `bits` see after `prefix` tokens; negative if they see all."""
    return prefix + path_length(bits, SPANS) - WINDOW


def first_seen(prefix_len: int, window: int | None) -> int:
    """Return the first KV position that any row may see: that of a row that sees only itself in the suffix."""
    return 0 if window is None else max(prefix_len + 1 - window, 0)
