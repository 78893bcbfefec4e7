"""y = x W^T + b for a weight of few bits (`workers.ops.packed.weight`)."""

import torch.nn.functional as F
from torch import Tensor

from workers.ops.packed.weight import PackedWeight, dequantize


def packed_product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return x W^T + b: [rows, out_features] in x's dtype.

    x: [rows, in_features] bfloat16, float16 or float32, last stride 1.
    weight: of a linear layer, without experts.
    bias: [out_features], or None.
    out: contiguous memory for the result; None allocates it.

    Sums are float32; a row's result does not depend on the other rows' values.
    """
    y = F.linear(x.float(), dequantize(weight, x.float().dtype), None if bias is None else bias.float())
    return y.to(x.dtype) if out is None else out.copy_(y)
