# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `delta_rule_rounds`: one launch per layer. A program computes one value head of one request, and reads
and writes its state once. Programs are independent. Wide rounds: `wide_rounds_triton`.

A program's tile has the slot's committed rows, then its new rows. A committed row sees earlier committed rows; a new
row sees all committed rows, its ancestors and itself. One UT transform over the tile gives the outputs of the new rows,
and what the committed rows add to the state. Products have float32 precision, so the state is that of the
recurrence."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.delta_rule.formulas_triton import (
    PRECISION,
    dot,
    exact_product,
    gate,
    inverse_of_unit_triangle,
    keep_history,
    log_decay,
    norm_factors,
    place,
    prefetch,
    product_with_rows,
    settled,
    sigmoid,
    silu,
    three_before,
)
from aerie.kernels.delta_rule.tables import DeltaRows, DeltaState, DeltaWeights, LayerState, RoundTables
from aerie.kernels.pdl import pdl_wait


@triton.jit
def convolved_tile(column, own, oldest, older, newest, live, writes, weight_ptr, pending_ptr, C: tl.constexpr):
    """Return the convolved channels [n, d] of the tile, in the rows' dtype.

    column: [d].
    own, oldest, older, newest: [n] addresses of the channels of each row and its three nearest ancestors.
    live: [n], other rows are zeros.
    weight_ptr: [4, C] taps, the oldest first.
    pending_ptr: [n] addresses to which the unconvolved channels of the rows in `writes` [n] are stored.
    """
    raw = tl.load(own[:, None] + column[None, :], mask=live[:, None], other=0.0)
    tl.store(pending_ptr[:, None] + column[None, :], raw, mask=writes[:, None])
    taps = weight_ptr + column
    x = raw.to(tl.float32) * tl.load(taps + 3 * C).to(tl.float32)[None, :]
    raw = tl.load(newest[:, None] + column[None, :], mask=live[:, None], other=0.0)
    x += raw.to(tl.float32) * tl.load(taps + 2 * C).to(tl.float32)[None, :]
    raw = tl.load(older[:, None] + column[None, :], mask=live[:, None], other=0.0)
    x += raw.to(tl.float32) * tl.load(taps + C).to(tl.float32)[None, :]
    raw = tl.load(oldest[:, None] + column[None, :], mask=live[:, None], other=0.0)
    x += raw.to(tl.float32) * tl.load(taps).to(tl.float32)[None, :]
    return settled(silu(x)).to(raw.dtype)


@triton.jit
def row_system(q, k, g, beta, sees, above, ROWS: tl.constexpr, USED: tl.constexpr):
    """Return what the rows' outputs need beside the state: factors of k's norms [n], decays since the tile's start [n],
    keys [DK, n], scores [n, n], inverse of the rows' triangular system [n, n], and decay of the state [n, 1].

    q, k: [n, DK]. g, beta: [n] log decays and write strengths.
    sees, above: [n, n], columns that a row attends to, with and without itself.
    USED: rows in use.
    """
    k_scale = norm_factors(k)
    decay = tl.sum(tl.where(sees, g[None, :], 0.0), 1)
    since = tl.minimum(decay[:, None] - decay[None, :], 0.0)  # as in `formulas.block`
    between = tl.exp(tl.where(sees, since, -float("inf"))) * k_scale[None, :]
    keys = tl.trans(k)
    system = tl.where(above, dot(k, keys) * between * (beta * k_scale)[:, None], 0.0)
    scores = dot(q, keys) * between
    inverse = inverse_of_unit_triangle(system, ROWS, USED, PRECISION)
    return k_scale, decay, keys, scores, inverse, tl.exp(decay)[:, None]


@triton.jit
def outputs(q, k, v, state, inverse, scores, of_state, beta, k_scale):
    """Return the rows' outputs [n, columns] of some columns of the state, but for the scale of q, and what the rows add
    to these columns [n, columns], but for the decay until the tile's end.

    q, k, v: [n, DK], [n, DK], [n, columns].
    state: [DK, columns] before the tile.
    scores, inverse: [n, n], of_state: [n, 1], k_scale: [n], from `row_system`.
    beta: [n] write strengths.
    """
    of_k, of_q = product_with_rows(k, q, state)
    wanted = beta[:, None] * (v.to(tl.float32) - of_state * k_scale[:, None] * of_k)
    added = dot(inverse, wanted)
    return of_state * of_q + dot(scores, added), added


@triton.jit
def gated_norm(o, z_ptr, norm_ptr, out_ptr, row, z_stride, out_stride, h, writes, scale_eps, DV: tl.constexpr,
               SIGMOID: tl.constexpr):  # fmt: skip
    """Store the gated norm of a head's outputs o [rows, DV].

    z_ptr, out_ptr: [.., HV * DV], z_stride and out_stride between rows: input of the gate, and the result.
    norm_ptr: [DV] weights of the norm.
    row, writes: [rows] row of each output in z and out, and whether it is stored.
    h: the head.
    scale_eps: epsilon of the norm.
    SIGMOID: the gate is a sigmoid; else SiLU.
    """
    column = tl.arange(0, DV)
    at = h * DV + column[None, :]
    z = tl.load(z_ptr + row[:, None] * z_stride + at, mask=writes[:, None], other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + column).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + scale_eps)[:, None] * norm[None, :] * gate(z, SIGMOID)
    tl.store(out_ptr + row[:, None] * out_stride + at, o.to(out_ptr.dtype.element_ty), mask=writes[:, None])


@triton.jit(do_not_specialize=["mask_stride"])
def _delta_round(
    qkv_ptr, z_ptr, b_ptr, a_ptr, out_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr,
    state_ptr, conv_ptr, pending_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, count_ptr,
    slots_ptr, prefix_ptr, mask_ptr, snapshot_at_ptr, snapshot_entry_ptr, mask_stride,
    qkv_stride, z_stride, b_stride, a_stride, out_stride, scale_eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PENDING: tl.constexpr, PATH: tl.constexpr, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr, R: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one value head of one request.

    A row is q and k of HK heads, v of HV heads (C numbers together), then b and a of HV heads.
    qkv_ptr: [requests * WIDTH, C], the new rows' inputs of the convolution. z_ptr: [.., HV * DV], of the output gate.
        b_ptr, a_ptr: [.., HV], of the gates beta and decay. out_ptr: [.., HV * DV], written.
    qkv_stride, z_stride, b_stride, a_stride, out_stride: numbers between rows.
    weight_ptr: weights of the convolution. a_log_ptr, dt_bias_ptr: [HV], of the decay. norm_ptr: [DV].
    state_ptr: [slots, HV, DK, DV] float32, written.
    conv_ptr: [slots, 3, C], the last three tokens before the committed rows.
    slots_ptr, prefix_ptr: [requests] slot, and tokens before the new rows.
    mask_ptr: [requests, WIDTH] tree masks, mask_stride between requests.
    scale_eps: epsilon of the norm.
    pending_ptr: [slots, PENDING, R]: rows of the newest round.
    committed_ptr: [slots, PATH, R]: rows to replay, of which a slot has count_ptr.
    snapshot_at_ptr: [slots] position at which a slot's state is saved.
    snapshot_entry_ptr: [slots] its index in saved_state_ptr and saved_conv_ptr.
    WIDTH: new rows of a request.
    ROWS: rows of the tile.
    R: numbers of a row.
    HK, HV, DK, DV: heads and numbers of keys and values.
    PART: columns of the state at a time.
    SIGMOID: the gate of the output is a sigmoid; else SiLU.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    KEYS: tl.constexpr = HK * DK
    USED: tl.constexpr = PATH + WIDTH
    C: tl.constexpr = 2 * KEYS + HV * DV
    h, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + request)
    count = tl.load(count_ptr + slot)
    d, e = tl.arange(0, DK), tl.arange(0, PART)
    of_part = (h * DK + d)[:, None] * DV + e[None, :]
    own_state_ptr = state_ptr + slot * (HV * DK * DV)
    prefetch(own_state_ptr + h * (DK * DV) + tl.arange(0, DK * DV // 32) * 32)

    # 1. Which rows each row sees.
    r, c = tl.arange(0, ROWS), tl.arange(0, ROWS)[None, :]
    is_new = (r >= PATH) & (r < USED)
    live = is_new | (r < count)
    mask = tl.load(mask_ptr + request * mask_stride + r - PATH, mask=is_new, other=0)
    among_new = (c >= PATH) & (((mask[:, None] >> tl.maximum(c - PATH, 0)) & 1) == 1)
    sees = live[:, None] & ((c <= r[:, None]) & (c < count) | among_new)
    above = sees & (c < r[:, None])
    newest, older, oldest = three_before(above, c)
    # committed rows before the snapshot
    snapshot = tl.load(snapshot_at_ptr + slot) - (tl.load(prefix_ptr + request) - count)
    saves = (snapshot >= 0) & (snapshot <= count)
    entry = tl.load(snapshot_entry_ptr + slot)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. The tile's rows, and their products with each other.
    conv_ptr_of_slot, committed_ptr = conv_ptr + slot * (3 * C), committed_ptr + slot * (PATH * R)
    rows_ptr = qkv_ptr + request * WIDTH * qkv_stride
    own = place(3 + r, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    newest = place(newest, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    older = place(older, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    oldest = place(oldest, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    row = request * WIDTH + r - PATH
    pending = pending_ptr + slot * (PENDING * R) + (r - PATH) * R
    committed_gate = committed_ptr + r * R + C + h
    b = tl.load(tl.where(is_new, b_ptr + row * b_stride + h, committed_gate), mask=live, other=0.0)
    a = tl.load(tl.where(is_new, a_ptr + row * a_stride + h, committed_gate + HV), mask=live, other=0.0)
    tl.store(pending + C + h, b, mask=is_new)
    tl.store(pending + C + HV + h, a, mask=is_new)
    g, beta = log_decay(a.to(tl.float32), a_log, dt_bias), sigmoid(b.to(tl.float32))
    key_head = h // (HV // HK)
    leads = is_new & (h == key_head * (HV // HK))  # one value head per key head stores the key head's channels
    q = convolved_tile(key_head * DK + d, own, oldest, older, newest, live, leads, weight_ptr, pending, C)
    k = convolved_tile(KEYS + key_head * DK + d, own, oldest, older, newest, live, leads, weight_ptr, pending, C)
    k_scale, decay, keys, scores, inverse, of_state = row_system(q, k, g, beta, sees, above, ROWS, USED)
    all_decay = tl.sum(tl.where(r < count, g, 0.0), 0)
    adds = tl.where(r < count, tl.exp(all_decay - decay) * k_scale, 0.0)[:, None]

    # 3. The state, some of its columns at a time.
    PARTS: tl.constexpr = DV // PART
    o = tl.zeros((ROWS, PARTS, PART), tl.float32)
    for part in range(PARTS):
        v_column = 2 * KEYS + h * DV + part * PART + e
        v = convolved_tile(v_column, own, oldest, older, newest, live, is_new, weight_ptr, pending, C)
        state = tl.load(own_state_ptr + of_part + part * PART)
        of_q, added = outputs(q, k, v, state, inverse, scores, of_state, beta, k_scale)
        o = tl.where(tl.arange(0, PARTS)[None, :, None] == part, of_q[:, None, :], o)
        if saves:
            until = tl.sum(tl.where(r < snapshot, g, 0.0), 0)
            some = tl.where(r < snapshot, tl.exp(until - decay) * k_scale, 0.0)[:, None]
            kept = tl.exp(until) * state + exact_product(keys, some * added)
            tl.store(saved_state_ptr + entry * (HV * DK * DV) + of_part + part * PART, kept)
            keep_history(saved_conv_ptr + entry * (3 * C), snapshot, v_column, conv_ptr_of_slot, committed_ptr, C, R)
        if count > 0:
            state = tl.exp(all_decay) * state + exact_product(keys, adds * added)
            tl.store(own_state_ptr + of_part + part * PART, state)
    if saves & (h == key_head * (HV // HK)):
        for i in tl.static_range(2):
            column = i * KEYS + key_head * DK + d
            keep_history(saved_conv_ptr + entry * (3 * C), snapshot, column, conv_ptr_of_slot, committed_ptr, C, R)

    # 4. The gated norm.
    o = tl.reshape(o, (ROWS, DV)) * norm_factors(q)[:, None] * DK**-0.5
    gated_norm(o, z_ptr, norm_ptr, out_ptr, row, z_stride, out_stride, h, is_new, scale_eps, DV, SIGMOID)


FEW_PROGRAMS = 512  # about four per multiprocessor


def round_rows(width: int, path: int) -> int:
    """Return the rows of a tile that has `width` new and `path` committed rows."""
    return max(16, int(triton.next_power_of_2(path + width)))


def round_tiles(rows: int, value_dim: int, programs: int) -> tuple[int, int]:
    """Return the columns of the state computed at a time, and the warps per program: eight if each program has a
    multiprocessor, four if two share one. H200, rounds of 4 rows of one layer of Qwen3.5-27B, batch 1, 8 and 32: eight
    warps take 16, 53 and 203 us, four take 24, 54 and 164."""
    if rows > 32 or value_dim < 64:
        return min(value_dim, 32), 8 if value_dim >= 64 else 4
    return (64, 8) if programs <= FEW_PROGRAMS else (32, 4)


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds`: compute the outputs of B requests of R rows each,
    and advance their states by the committed rows only."""
    heads, (batch, width) = layer.heads, tables.mask.shape
    path = layer.committed.shape[1]
    tile = round_rows(width, path)
    part, warps = round_tiles(tile, heads.value_dim, heads.value_heads * batch)
    _delta_round[(heads.value_heads, batch)](
        rows.qkv, rows.z, rows.b, rows.a, out, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        layer.state, layer.conv, layer.pending, layer.committed, layer.saved_state, layer.saved_conv, layer.count,
        tables.slots, tables.prefix_len, tables.mask, tables.snapshot_at, tables.snapshot_entry, tables.mask.stride(0),
        rows.qkv.stride(0), rows.z.stride(0), rows.b.stride(0), rows.a.stride(0), out.stride(0), weights.eps,
        WIDTH=width, ROWS=tile, PENDING=layer.pending.shape[1], PATH=path, HK=heads.key_heads,
        HV=heads.value_heads, DK=heads.key_dim, DV=heads.value_dim, PART=part, R=heads.row_size,
        SIGMOID=weights.sigmoid, num_warps=warps, num_stages=1, **pdl_wait(out.device),
    )  # fmt: skip


BLOCK = 512  # numbers of a row per program


@triton.jit
def _commit_rows(
    conv_ptr, pending_ptr, committed_ptr, count_ptr, slots_ptr, path_ptr, counts_ptr,
    padding_slot, conv_stride, pending_stride, committed_stride, path_stride,
    DEPTH: tl.constexpr, DEPTH_PADDED: tl.constexpr, PENDING: tl.constexpr, PATH: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one layer's accepted rows of a request from the pending to the committed rows. The last three tokens before
    them become the convolution's history. A program moves BLOCK numbers of each row.

    conv_ptr, pending_ptr, committed_ptr: [layers, slots, 3, C], [.., PENDING, R] and [.., PATH, R], see `DeltaState`.
    conv_stride, pending_stride, committed_stride: numbers between layers.
    count_ptr: by slot, earlier committed rows, which the state includes by now.
    slots_ptr, counts_ptr: [requests] slot, and number of accepted rows. padding_slot: skipped.
    path_ptr: [requests, DEPTH], indices of the accepted rows, path_stride between requests.
    DEPTH_PADDED: DEPTH, padded.
    C, R: channels of a token, and numbers of a row.
    """
    block, layer, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots_ptr + request)
    if slot != padding_slot:
        column = block * BLOCK + tl.arange(0, BLOCK)
        i, j = tl.arange(0, 4), tl.arange(0, DEPTH_PADDED)
        conv_ptr += layer * conv_stride + slot * (3 * C)
        pending_ptr += layer * pending_stride + slot * (PENDING * R)
        committed_ptr += layer * committed_stride + slot * (PATH * R)
        index = tl.load(count_ptr + slot) + i
        old, folded = (i < 3) & (index < 3), (i < 3) & (index >= 3)
        place = conv_ptr + index[:, None] * C + column[None, :]
        history = tl.load(place, mask=old[:, None] & (column < C)[None, :], other=0.0)
        place = committed_ptr + (index - 3)[:, None] * R + column[None, :]
        newer = tl.load(place, mask=folded[:, None] & (column < C)[None, :], other=0.0)
        history = tl.where(old[:, None], history, newer)
        moves = j < tl.load(counts_ptr + request)
        node = tl.load(path_ptr + request * path_stride + j, mask=moves & (j < DEPTH), other=0)
        moved = moves[:, None] & (column < R)[None, :]
        rows = tl.load(pending_ptr + node[:, None] * R + column[None, :], mask=moved, other=0.0)
        # read the old committed rows before new ones overwrite them
        tl.debug_barrier()
        tl.store(conv_ptr + i[:, None] * C + column[None, :], history, mask=(i < 3)[:, None] & (column < C)[None, :])
        tl.store(committed_ptr + j[:, None] * R + column[None, :], rows, mask=moved)


@triton.jit(do_not_specialize=["batch"])
def _set_counts(count_ptr, slots_ptr, counts_ptr, batch, padding_slot, BLOCK: tl.constexpr):
    """Store counts_ptr [batch], the numbers of accepted rows, to count_ptr by slot, except in padding_slot."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + request, mask=request < batch, other=padding_slot)
    counts = tl.load(counts_ptr + request, mask=request < batch, other=0)
    tl.store(count_ptr + slot, counts.to(tl.int32), mask=slot != padding_slot)


def commit_rows(states: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.commit_rows`: make the accepted path of a round the committed rows of
    its slots, in all layers."""
    heads, (batch, depth) = states.heads, path.shape
    layers = states.conv.shape[0]
    _commit_rows[(triton.cdiv(heads.row_size, BLOCK), layers, batch)](
        states.conv, states.pending, states.committed, states.count, slots, path, counts, states.padding_slot,
        states.conv.stride(0), states.pending.stride(0), states.committed.stride(0), path.stride(0),
        DEPTH=depth, DEPTH_PADDED=triton.next_power_of_2(depth), PENDING=states.pending.shape[2],
        PATH=states.committed.shape[2], C=heads.channels, R=heads.row_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _set_counts[(triton.cdiv(batch, 128),)](
        states.count, slots, counts, batch, states.padding_slot, BLOCK=128, num_warps=4
    )
