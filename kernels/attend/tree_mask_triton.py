# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What a row of a round sees, in kernels: suffix columns by its tree mask, and KV positions through a sliding window.

Tree masks are bits or spans (`aerie.kernels.kv.tree_masks`), computed by `aerie.kernels.tree.tree_growth`. WINDOW (see
`DecodeBatch.window`) is 0 without a window; such kernels contain no code for it.
"""

import triton
import triton.language as tl

from aerie.kernels.interpreter_triton import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def num_seen(bits):
    """Return the number of set bits, int32, of masks `bits`."""
    if _INTERPRETED:
        pairs = bits - ((bits >> 1) & 0x5555555555555555)
        fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
        eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
        sixteens = eights + (eights >> 8)
        halves = sixteens + (sixteens >> 16)
        ones = (halves + (halves >> 32)) & 127
        return ones.to(tl.int32)
    return tl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [bits], dtype=tl.int32, is_pure=True, pack=1)


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
    are not; both get column 0.
    """
    place = over * 0
    for step in tl.static_range(6):  # the largest place with at most `over` set bits before it
        later = place + (32 >> step)
        before = num_seen(path & ((tl.full([1], 1, tl.int64) << later.to(tl.int64)) - 1))
        place = tl.where(before <= over, later, place)
    seen = over < num_seen(path)
    return tl.where(seen, place, 0), seen


@triton.jit
def oldest_seen(bits, prefix, WINDOW: tl.constexpr, SPANS: tl.constexpr = False):
    """Return the first KV position that rows with masks `bits` see after `prefix` tokens; negative if they see all."""
    return prefix + path_length(bits, SPANS) - WINDOW


@triton.jit
def path_tile(path, start, n, prefix, WINDOW: tl.constexpr):
    """Return the KV positions of a tile whose columns `start + n` [N] count along a row's path, and whether the row
    sees them."""
    place, seen = path_columns(path, start + n - prefix)
    if WINDOW:
        seen = seen & (start + n >= oldest_seen(path, prefix, WINDOW))
    return tl.where(start + n < prefix, start + n, prefix + place), seen


def first_seen(prefix_len: int, window: int | None) -> int:
    """Return the first KV position that any row may see: that of a row that sees only itself in the suffix."""
    return 0 if window is None else max(prefix_len + 1 - window, 0)
