# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Chooses experts per row in one launch. With few rows it lists the used experts; with more it counts each expert's
rows. Reference: `aerie.kernels.experts.route.route`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.experts.route import MAX_LISTED, Routed, RouterLogits
from aerie.kernels.experts.route_row_triton import route_row, routing_constants
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.span import Span


@triton.jit(do_not_specialize=["rows", "max_used", "first_slot"])
def _route(
    logit_ptr,
    bias_ptr,
    expert_scale_ptr,
    token_slot_ptr,
    chosen_ptr,
    weight_ptr,
    used_ptr,
    num_used_ptr,
    ticket_ptr,
    rank_ptr,
    count_ptr,
    rows,
    max_used,
    first_slot,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
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
    LIST: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one row per program: `route_row`, which describes the arguments."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    route_row(
        tl.program_id(0), logit_ptr, bias_ptr, expert_scale_ptr, token_slot_ptr, chosen_ptr, weight_ptr, used_ptr,
        num_used_ptr, ticket_ptr, rank_ptr, count_ptr, rows, max_used, first_slot, scale, PARTS, EXPERTS, WIDTH, GATED,
        FIRST, HELD, K, SHARED, GROUPS, GROUPS_PADDED, SIZE_PADDED, BEST_GROUPS, BEST_OF_GROUP, SOFTMAX, NORMALISE,
        HAS_BIAS, SCALES_EXPERTS, HAS_LIVE, SLOTS_PADDED, LIST, ROWS_PADDED, BINS,
    )  # fmt: skip


def route(
    router: RouterLogits,
    num_shared: int,
    tickets: Tensor,
    list_used: bool = True,
    held: Span | None = None,
    fixed: bool = False,
) -> Routed:
    """Choose the experts of each row; ties go to the lowest index.

    num_shared: shared experts, which every row uses.
    tickets: int32, one per expert of this rank, zero between launches. Becomes `Routed.count`, which the experts' first
        GEMM or `Routed.reset_count` zeroes.
    list_used: list the used experts of up to MAX_LISTED rows. If false, rows are always counted.
    held: the routed experts on this rank; None: all.
    fixed: a row's weights must not depend on the number of rows.

    Reference: `aerie.kernels.experts.route.route`.
    """
    if router.routed is not None:
        return router.routed
    logits, bias, routing, live = router.values, router.bias, router.routing, router.live
    rows, experts = logits.shape[-2], routing.num_experts
    assert logits.is_contiguous() and logits.dtype == torch.float32 and logits.shape[-1] == routing.num_logits
    assert live is None or (live.slots.is_contiguous() and live.slots.shape == (rows,))
    held, listed = held or Span.whole(experts), list_used and rows <= MAX_LISTED
    assert held.total == experts
    max_used = min(held.size, rows * routing.experts_per_token) + num_shared
    routed = Routed.empty(rows, routing.experts_per_token + num_shared, max_used if listed else 0, logits.device)
    if not listed:
        rank, count = torch.empty_like(routed.chosen), tickets[: held.size + num_shared]
        routed = Routed(routed.chosen, routed.weight, rank=rank, count=count)
    if rows == 0:
        return routed
    _route[(rows,)](
        logits,
        bias,
        router.expert_scales,
        None if live is None else live.slots,
        *(routed.chosen, routed.weight, routed.used, routed.num_used, tickets, routed.rank, routed.count),
        rows,
        max_used,
        0 if live is None else live.first,
        routing.scale,
        PARTS=logits.shape[0] if logits.dim() == 3 else 1,
        FIRST=held.first,
        HELD=held.size,
        HAS_BIAS=bias is not None,
        **routing_constants(routing, num_shared, router.expert_scales is not None, live is not None),
        LIST=listed,
        ROWS_PADDED=triton.next_power_of_2(rows) if listed else 1,
        BINS=triton.next_power_of_2(held.size + num_shared + 1),
        num_warps=4 if listed and rows > 8 and not fixed else 1,  # sums over experts depend on it
        **pdl_wait(logits.device),
    )
    return routed
