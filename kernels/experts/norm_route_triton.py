# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `aerie.kernels.experts.norm_route`. A program computes some outputs of the router from some inputs;
it reads their weights before the wait. Each program computes the whole row's RMS; the last one routes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.experts.norm_route import Norm, NormedAndRouted, RouterWeights
from aerie.kernels.experts.route import Routed, TokenSlots
from aerie.kernels.experts.route_row_triton import route_row, routing_constants
from aerie.kernels.gemm.splits_triton import comes_last
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.norm.norm_triton import inverse_rms, scaled_by
from aerie.kernels.pdl import pdl_wait

_SPAN = 128  # inputs per program
_OUTPUTS = 64  # maximum outputs per program


@triton.jit
def _sums(x_ptr, residual_ptr, column, there):
    """Return x + residual in float32, rounded to the residual stream's dtype."""
    x = tl.load(x_ptr + column, mask=there, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + column, mask=there, other=0.0).to(tl.float32)
    return (x + residual).to(residual_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["max_used", "first_slot"])
def _norm_route(
    x_ptr,
    residual_ptr,
    norm_ptr,
    w_ptr,
    logit_bias_ptr,
    stream_ptr,
    normed_ptr,
    part_ptr,
    ticket_ptr,
    bias_ptr,
    expert_scale_ptr,
    token_slot_ptr,
    chosen_ptr,
    weight_ptr,
    used_ptr,
    num_used_ptr,
    max_used,
    first_slot,
    eps,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BEST_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_EXPERTS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one row, and choose its experts. The last program sums the logits and routes.

    x_ptr, residual_ptr: [SIZE] the row, and the residual stream, to be added.
    norm_ptr, eps: [SIZE] weights and epsilon of the norm.
    w_ptr, logit_bias_ptr: [WIDTH, SIZE] weights of the router, and their bias or None.
    stream_ptr, normed_ptr: [SIZE], written: the residual stream, and the normed row.
    part_ptr, ticket_ptr: [PARTS, WIDTH] float32 logits of each part of the columns, and a counter of programs.
    BLOCK: SIZE, padded.
    SPAN: columns of a program.
    BLOCK_N: logits of a program.
    The other arguments are those of `route_row`.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), split * SPAN + tl.arange(0, SPAN)
    inside = k < SIZE
    w = tl.load(w_ptr + n[:, None] * SIZE + k[None, :], mask=(n < WIDTH)[:, None] & inside[None, :], other=0.0)
    gain = tl.load(norm_ptr + k, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, BLOCK)
    whole = _sums(x_ptr, residual_ptr, column, column < SIZE)
    own = _sums(x_ptr, residual_ptr, k, inside)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    inverse = inverse_rms(tl.sum(whole * whole, 0), SIZE, eps)
    normed = scaled_by(own, inverse, gain, dtype).to(dtype).to(tl.float32)
    if tile == 0:
        tl.store(stream_ptr + k, own.to(stream_ptr.dtype.element_ty), mask=inside)
        tl.store(normed_ptr + k, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    logits = tl.sum(w.to(tl.float32) * normed[None, :], 1)
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + n, mask=(n < WIDTH) & (split == 0), other=0.0).to(tl.float32)
    tl.store(part_ptr + split * WIDTH + n, logits, mask=n < WIDTH)
    if comes_last(ticket_ptr, PARTS * ((WIDTH + BLOCK_N - 1) // BLOCK_N)):
        row = tile * 0
        route_row(
            row, part_ptr, bias_ptr, expert_scale_ptr, token_slot_ptr, chosen_ptr, weight_ptr, used_ptr, num_used_ptr,
            ticket_ptr, None, None, row + 1, max_used, first_slot, scale, PARTS, EXPERTS, WIDTH, GATED, 0, EXPERTS, K,
            SHARED, GROUPS, GROUPS_PADDED, SIZE_PADDED, BEST_GROUPS, BEST_OF_GROUP, SOFTMAX, NORMALISE, HAS_BIAS,
            SCALES_EXPERTS, HAS_LIVE, SLOTS_PADDED, True, 1, 1,
        )  # fmt: skip


def norm_route(
    x: Tensor,
    residual: Tensor,
    norm: Norm,
    router: RouterWeights,
    live: TokenSlots | None,
    workspace: Workspace | None,
) -> NormedAndRouted:
    """Implement `aerie.kernels.experts.norm_route.norm_route`: return norm(x + residual), x + residual, and the experts
    that the router chooses for the norm."""
    assert workspace is not None
    size, routing, device = x.shape[1], router.routing, x.device
    slots = routing.experts_per_token + router.num_shared
    routed = Routed.empty(1, slots, slots, device)
    stream, normed = torch.empty_like(residual), torch.empty_like(x)
    parts, block_n = triton.cdiv(size, _SPAN), min(_OUTPUTS, triton.next_power_of_2(routing.num_logits))
    _norm_route[(triton.cdiv(routing.num_logits, block_n), parts)](
        x,
        residual,
        norm.weight,
        router.weight,
        router.bias,
        stream,
        normed,
        workspace.part,
        workspace.tickets,
        router.correction,
        router.expert_scales,
        None if live is None else live.slots,
        routed.chosen,
        routed.weight,
        routed.used,
        routed.num_used,
        slots,
        0 if live is None else live.first,
        norm.eps,
        routing.scale,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SPAN=_SPAN,
        BLOCK_N=block_n,
        PARTS=parts,
        HAS_BIAS=router.correction is not None,
        **routing_constants(routing, router.num_shared, router.expert_scales is not None, live is not None),
        num_warps=4,
        **pdl_wait(device),
    )
    return NormedAndRouted(normed, stream, routed)
