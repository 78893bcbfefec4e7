"""A router's logits: a product of rows and a weight, summed and kept in float32."""

import torch.nn.functional as F
from torch import Tensor

from attention.ops.operation import Implementation, operation
from workers.ops.gemm.workspace import Workspace


@operation(
    Implementation(
        "triton",
        "workers.ops.experts.router_gemm_triton:router_gemm",
        lambda here: True,
        serves=lambda x, weight, workspace, deterministic: workspace is not None,
        limits="16 bits, K a multiple of 128, with a workspace",
    )
)
def router_gemm(x: Tensor, weight: Tensor, workspace: Workspace | None, deterministic: bool) -> Tensor:
    """x W^T.

    x              [rows, K], last stride 1
    weight         [N, K], contiguous, of x's type
    workspace      of a model in 16 bits on a GPU, where K is a multiple of 128
    deterministic  a row's result must not depend on how many there are
    ->             [rows, N] float32; or [parts, rows, N], which the routing adds up in their order: so programs that
                   share a sum need not wait for each other
    """
    return F.linear(x.float(), weight.float())
