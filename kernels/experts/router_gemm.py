"""A router's logits, computed and returned in float32."""

import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.operation import Implementation, operation


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace | None, deterministic: bool) -> None:
    assert x.dim() == 2 and x.shape[1] == weight.shape[1] and x.stride(1) == 1 and x.dtype == weight.dtype
    assert weight.is_contiguous() and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))


@operation(
    Implementation(
        "triton",
        "aerie.kernels.experts.router_gemm_triton:router_gemm",
        lambda device: True,
        serves=lambda x, weight, bias, workspace, deterministic: workspace is not None,
        limits="16 bits, K a multiple of 64, with a workspace",
    ),
    contract=_check,
)
def router_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace | None, deterministic: bool
) -> Tensor:
    """Return x W^T + b.

    x              [rows, K], last stride 1
    weight         [N, K], contiguous, x's dtype
    bias           [N], x's dtype, or None
    workspace      for 16-bit models on a GPU with K a multiple of 64; else None
    deterministic  a row's result must not depend on the number of rows
    ->             [rows, N] float32; or split-K partial sums [parts, rows, N], which the routing adds in order
    """
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
