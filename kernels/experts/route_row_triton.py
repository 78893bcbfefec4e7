# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Chooses the experts of one row, for `route_triton` and `norm_route_triton`."""

from typing import Any

import triton
import triton.language as tl

from aerie.kernels.experts.route import Routing

LEAST = tl.constexpr(-(1 << 31))  # below every result of `_ordered` except NaN's


@triton.jit
def _ordered(x):
    """Map float32 to integers in the same order, both zeros to the same one, because an integer maximum over a warp is
    one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(bits):
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _list_used(chosen, slot, used_ptr, num_used_ptr, max_used, slots):
    """Write the experts of one row to used_ptr [max_used] in ascending order, then -1, and their number.

    chosen: [n] experts of the row's choices; negative ones are skipped.
    slot: [n] numbers of the choices, of which `slots` exist.
    """
    there = (slot < slots) & (chosen >= 0)
    number, other = chosen[:, None], chosen[None, :]
    twice = (number == other) & (slot[None, :] < slot[:, None]) & there[None, :]  # only with NaN logits
    distinct = tl.where(there & (tl.max(twice.to(tl.int32), 1) == 0), chosen, -1)
    smaller = (distinct[None, :] >= 0) & (distinct[None, :] < number)
    num_used = tl.sum((distinct >= 0).to(tl.int32), 0)
    tl.store(used_ptr + tl.sum(smaller.to(tl.int32), 1), chosen, mask=distinct >= 0)
    tl.store(used_ptr + slot, -1, mask=(slot >= num_used) & (slot < max_used))
    tl.store(num_used_ptr, num_used)


@triton.jit
def _logits(first_ptr, there, step, PARTS: tl.constexpr):
    """Return logits, minus infinity where not `there`. They are read from L2, because programs of the same launch may
    have written them.

    first_ptr: addresses of the first of PARTS partial sums, which are `step` apart.
    """
    logits = tl.load(first_ptr, mask=there, other=float("-inf"), cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        logits += tl.load(first_ptr + part * step.to(tl.int64), mask=there, other=0.0, cache_modifier=".cg")
    return logits


@triton.jit
def route_row(
    row,
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
):
    """Choose the experts of one row; a program's threads share the work.

    logit_ptr: [PARTS, rows, WIDTH], parts to be added: logits of EXPERTS routed experts; GATED: then the shared one's.
    used_ptr: [max_used], the numbers of used experts, then -1; written if LIST. Else rank_ptr gets each pair's rank
        among those of its expert, and count_ptr the experts' counts.
    token_slot_ptr: HAS_LIVE: rows with a slot below first_slot are padding.
    FIRST, HELD: first and number of the routed experts on this rank.
    K, SHARED: routed and shared experts of a row; together the row's choices, padded to SLOTS_PADDED.
    GROUPS, SIZE_PADDED: groups of experts, and experts of a group.
    BEST_GROUPS: groups from which a row may choose, by the sum of their BEST_OF_GROUP best experts.
    SOFTMAX: else sigmoid.
    NORMALISE: weights add up to `scale`.
    HAS_BIAS: a bias on the scores for the choice, not for the weights.
    SCALES_EXPERTS: each expert has a factor.
    BINS: experts of this rank and one for those of others, padded.
    """
    size: tl.constexpr = EXPERTS // GROUPS
    slots: tl.constexpr = K + SHARED
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, SIZE_PADDED)
    expert = group[:, None] * size + member[None, :]
    there = (group < GROUPS)[:, None] & (member < size)[None, :]
    logit_ptr += row.to(tl.int64) * WIDTH
    logits = _logits(logit_ptr + expert, there, rows * WIDTH, PARTS)
    if SOFTMAX:
        top = tl.max(tl.max(logits, 1), 0)
        scores = tl.exp(logits - top)
        norm = tl.sum(tl.sum(scores, 1), 0)
        scores = scores / norm
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    preference = scores
    if HAS_BIAS:
        preference += tl.load(bias_ptr + expert, mask=there, other=0.0)
    preference = tl.where(there, preference, float("-inf"))
    left = _ordered(preference)
    if BEST_GROUPS < GROUPS:
        rest, worth = left, tl.zeros([GROUPS_PADDED], tl.float32)
        for _ in tl.static_range(BEST_OF_GROUP):
            best = tl.max(rest, 1)
            index = tl.min(tl.where(rest == best[:, None], member[None, :], SIZE_PADDED), 1)
            worth += _unordered(best)
            rest = tl.where(member[None, :] == index[:, None], LEAST, rest)
        is_best = tl.zeros([GROUPS_PADDED], tl.int32)
        for _ in tl.static_range(BEST_GROUPS):
            index = tl.argmax(worth, 0)
            is_best = tl.where(group == index, 1, is_best)
            worth = tl.where(group == index, float("-inf"), worth)
        left = tl.where(is_best[:, None] > 0, left, LEAST)
    left = tl.reshape(left, [GROUPS_PADDED * SIZE_PADDED])
    numbers = tl.reshape(expert, [GROUPS_PADDED * SIZE_PADDED])
    slot = tl.arange(0, SLOTS_PADDED)
    chosen = HELD + slot - K  # shared experts come last
    for i in tl.static_range(K):
        mine = tl.min(tl.where(left == tl.max(left, 0), numbers, EXPERTS - 1), 0)
        left = tl.where(numbers == mine, LEAST, left)
        chosen = tl.where(slot == i, mine, chosen)
    logit = _logits(logit_ptr + chosen, slot < K, rows * WIDTH, PARTS)
    weight = tl.exp(logit - top) / norm if SOFTMAX else 1.0 / (1.0 + tl.exp(-logit))
    weight = tl.where(slot < K, weight, 0.0)
    total = tl.sum(weight, 0)
    factor = scale
    if NORMALISE:
        factor = scale / (total + 1e-20)
    shared_weight = 1.0
    if GATED:
        gate = _logits(logit_ptr + EXPERTS + slot, slot < 1, rows * WIDTH, PARTS)
        shared_weight = 1.0 / (1.0 + tl.exp(-tl.max(gate, 0)))
    weight = tl.where(slot < K, weight * factor, shared_weight)
    if SCALES_EXPERTS:
        weight *= tl.load(expert_scale_ptr + chosen, mask=slot < K, other=1.0)
    if HELD < EXPERTS:
        elsewhere = (slot < K) & ((chosen < FIRST) | (chosen >= FIRST + HELD))
        chosen = tl.where(slot < K, chosen - FIRST, chosen)
        chosen = tl.where(elsewhere, -1, chosen)
        weight = tl.where(elsewhere, 0.0, weight)
    if HAS_LIVE:
        alive = tl.load(token_slot_ptr + row) >= first_slot
        chosen = tl.where(alive, chosen, -1)
        weight = tl.where(alive, weight, 0.0)
    tl.store(chosen_ptr + row * slots + slot, chosen, mask=slot < slots)
    tl.store(weight_ptr + row * slots + slot, weight, mask=slot < slots)
    if not LIST:
        pair, there = row * slots + slot, (slot < slots) & (chosen >= 0)
        tl.store(rank_ptr + pair, tl.atomic_add(count_ptr + chosen, 1, mask=there, sem="relaxed"), mask=there)
    if LIST and ROWS_PADDED == 1:
        _list_used(chosen, slot, used_ptr, num_used_ptr, max_used, slots)
    elif LIST:
        # The program that finishes last sees all choices.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == rows - 1:
            tl.store(ticket_ptr, 0)
            pair = tl.arange(0, ROWS_PADDED)[:, None] * slots + slot[None, :]
            inside = (tl.arange(0, ROWS_PADDED) < rows)[:, None] & (slot < slots)[None, :]
            all_chosen = tl.load(chosen_ptr + pair, mask=inside, other=-1, cache_modifier=".cg")
            bins = tl.where(all_chosen < 0, BINS - 1, all_chosen)
            counts = tl.histogram(tl.reshape(bins, [ROWS_PADDED * SLOTS_PADDED]), BINS)
            number = tl.arange(0, BINS)
            is_used = ((counts > 0) & (number < HELD + SHARED)).to(tl.int32)
            num_used = tl.sum(is_used, 0)
            tl.store(used_ptr + tl.cumsum(is_used, 0) - 1, number, mask=is_used > 0)
            tl.store(used_ptr + number, -1, mask=(number >= num_used) & (number < max_used))
            tl.store(num_used_ptr, num_used)


def routing_constants(routing: Routing, num_shared: int, scales_experts: bool, has_live: bool) -> dict[str, Any]:
    """Return the constants of `route_row` that a rule decides.

    num_shared: shared experts, which every row uses.
    scales_experts: whether experts have a factor each.
    has_live: whether padding rows are marked.
    """
    return {
        "EXPERTS": routing.num_experts,
        "WIDTH": routing.num_logits,
        "GATED": routing.shared_gate,
        "K": routing.experts_per_token,
        "SHARED": num_shared,
        "GROUPS": routing.num_groups,
        "GROUPS_PADDED": triton.next_power_of_2(routing.num_groups),
        "SIZE_PADDED": triton.next_power_of_2(routing.num_experts // routing.num_groups),
        "BEST_GROUPS": routing.groups_per_token,
        "BEST_OF_GROUP": routing.best_of_group,
        "SOFTMAX": routing.scoring == "softmax",
        "NORMALISE": routing.normalise,
        "SCALES_EXPERTS": scales_experts,
        "HAS_LIVE": has_live,
        "SLOTS_PADDED": triton.next_power_of_2(routing.experts_per_token + num_shared),
    }
