"""Keeps NaN out of the values in the KV cache, for the torch references of kernels that write KV.

Masked attention multiplies unread values by 0, and 0 * NaN is NaN. So NaN of a rejected draft token, or of a page's
earlier owner, would spread to rows that do not attend to it. Therefore NaN is moved to the key, whose masked scores are
minus infinity: only rows that attend to the token become NaN.
"""

import math

import torch
from torch import Tensor


def without_nan(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return v with 0 instead of NaN, and k, all NaN where v had one.

    k: [..., key size]. v: [..., value size]; the other dimensions are equal.
    """
    # A sum takes 4 us for 16 rows and 19 for 512 (embedded pair, one core); `isnan` and `any` take 13 and 175.
    if v.device.type == "cpu" and not math.isnan(v.sum().item()):
        return k, v
    spoilt = v.isnan()
    return k.masked_fill(spoilt.any(-1, keepdim=True), torch.nan), v.masked_fill(spoilt, 0.0)
