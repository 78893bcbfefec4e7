"""How values are stored in the KV cache, without NaN and perhaps in FP8 (e4m3). Used by the layouts, by the torch
references of kernels that write KV, and by the torch backend.

Masked attention multiplies unread values by 0, and 0 * NaN is NaN. So NaN of a rejected draft token, or of a page's
earlier owner, would spread to rows that do not attend to it. Therefore NaN is moved to the key, whose masked scores are
minus infinity: only rows that attend to the token become NaN.

In FP8 a number x is stored as x / scale, rounded to the nearest e4m3 number; beyond 448 it saturates, and NaN stays
NaN. Stored numbers convert to float16, bfloat16 and float32 exactly. Attention multiplies in 16 or 32 bits, never in
FP8, and sums in float32. The key scale is multiplied into the score scale, the value scale into the output."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def without_nan(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return v with 0 instead of NaN, and k, all NaN where v had one.

    k: [..., key size].
    v: [..., value size]; the other dimensions are equal.
    """
    # A sum takes 4 us for 16 rows and 19 for 512 (embedded pair, one core); `isnan` and `any` take 13 and 175.
    if v.device.type == "cpu" and not math.isnan(v.sum().item()):
        return k, v
    spoilt = v.isnan()
    return k.masked_fill(spoilt.any(-1, keepdim=True), torch.nan), v.masked_fill(spoilt, 0.0)


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number
WEIGHT_UNIT = 32768.0  # see `weight_unit`


@dataclass(frozen=True)
class KVScales:
    """Scales of one layer, the same on all ranks: a stored number times its scale is the key or value. Latent rows have
    the scale of k."""

    k: float = 1.0
    v: float = 1.0


def stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Convert rows of any shape to `dtype`, as the cache stores them."""
    if dtype != FP8:
        return rows
    return (rows.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_rows(pages: Tensor, slot_mapping: Tensor, rows: Tensor, scale: float) -> None:
    """Write rows [n, ...] to token indexes slot_mapping [n] int64 of pages [num_pages, page_size, ...], in place."""
    rows = stored(rows, pages.dtype, scale)
    if pages.dtype == FP8:  # torch 2.13 copies no FP8 by index
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages.view(-1, *rows.shape[1:]).index_copy_(0, slot_mapping, rows)


def read_pages(pages: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return pages `numbers` [n] int64 in `dtype`, without their scale: [n, page_size, ...]."""
    if pages.dtype != FP8:
        return pages.index_select(0, numbers)
    return pages.view(torch.uint8).index_select(0, numbers).view(FP8).to(dtype)


def weight_unit(dtype: torch.dtype) -> float:
    """Return the factor by which kernels scale softmax weights over pages of `dtype`, which the factor on the output
    undoes. Over FP8 pages products are in float16, where with this factor weights down to 2^-29 keep all bits."""
    return WEIGHT_UNIT if dtype == FP8 else 1.0
