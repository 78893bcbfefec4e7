"""The operations between attention and experts, for one row: residual addition, RMSNorm, router GEMM and routing. One
launch instead of three makes rounds of gpt-oss 3 % faster, but rounds of Qwen3.5-35B-A3B (257 logits) and GLM-4.5 (FP8
rows) 1 % slower."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.experts.route import NO_EXPERT, Routed, RouterLogits, Routing, TokenSlots
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.norm.norm import add_rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight and epsilon.

    weight: [size] in the model's dtype or float32.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class RouterWeights:
    """The weights of a router's linear layer.

    weight: [num_logits, size] in the model's dtype, contiguous.
    bias: [num_logits] in the model's dtype, added to the logits; or None.
    correction: float32 [num_experts] if the routing has a bias.
    expert_scales: float32 [num_experts] if the routing scales experts.
    num_shared: shared experts, which every row uses.
    """

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    expert_scales: Tensor | None
    routing: Routing
    num_shared: int


@dataclass(frozen=True)
class NormedAndRouted:
    """The results of `norm_route`.

    normed: [1, size] in the model's dtype.
    stream: [1, size], x + residual.
    routed: with listed experts.
    """

    normed: Tensor
    stream: Tensor
    routed: Routed


def cells_of(num_logits: int) -> int:
    """Return the float32 cells of workspace that a router with `num_logits` logits needs."""
    return MAX_PARTS * num_logits


MAX_PARTS = 64  # maximum split of the router's K
MAX_LOGITS = 128


def _serves(
    x: Tensor,
    residual: Tensor,
    norm: Norm,
    router: RouterWeights,
    live: TokenSlots | None,
    workspace: Workspace | None,
) -> bool:
    return workspace is not None and x.shape[1] <= 128 * MAX_PARTS and x.shape[1] % 8 == 0


def _check(
    x: Tensor,
    residual: Tensor,
    norm: Norm,
    router: RouterWeights,
    live: TokenSlots | None,
    workspace: Workspace | None,
) -> None:
    assert x.shape == residual.shape == (1, router.weight.shape[1]) and x.dtype == residual.dtype == router.weight.dtype
    assert x.is_contiguous() and residual.is_contiguous() and router.weight.is_contiguous()
    assert norm.weight.shape == x.shape[1:] and norm.weight.is_contiguous()
    assert router.weight.shape[0] == router.routing.num_logits
    for tensor in (router.correction, router.expert_scales):
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())


@operation(
    Implementation("triton", "aerie.kernels.experts.norm_route_triton:norm_route", on_gpu, _serves), contract=_check
)
def norm_route(
    x: Tensor,
    residual: Tensor,
    norm: Norm,
    router: RouterWeights,
    live: TokenSlots | None,
    workspace: Workspace | None,
) -> NormedAndRouted:
    """Return norm(x + residual), x + residual, and the experts that the router chooses for the norm.

    x, residual  [1, size] in the model's dtype, contiguous
    live         marks the row if it is padding
    workspace    at least `cells_of` cells and one ticket; None only for the reference
    """
    stream = residual.clone()
    normed = add_rms_norm.reference(x, stream, norm.weight, norm.eps)
    logits = F.linear(normed.float(), router.weight.float(), None if router.bias is None else router.bias.float())
    router_logits = RouterLogits(logits, router.correction, router.routing, live, router.expert_scales)
    chosen, weight = router_logits.choose()
    routing, shared = router.routing, torch.arange(router.num_shared, device=x.device) + router.routing.num_experts
    chosen = torch.cat((chosen[0], shared)).int()[None]
    shared_weight = router_logits.shared_gate().sigmoid() if routing.shared_gate else torch.ones_like(weight[:, :1])
    weight = torch.cat((weight, shared_weight.expand(-1, router.num_shared)), 1)
    if live is not None:
        is_padding = (live.slots < live.first)[:, None]
        chosen, weight = chosen.masked_fill(is_padding, NO_EXPERT), weight.masked_fill(is_padding, 0.0)
    used = chosen[0].sort(stable=True).values
    routed = Routed(chosen, weight, used, (chosen >= 0).sum(1).int())
    return NormedAndRouted(normed, stream, routed)
