# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The kernel of `delta_rule_rounds` for a few rows per request: one launch per layer. A program computes one value head
of one request, and reads and writes its state once. Programs are independent.

A program's tile has the keys of the slot's committed rows, then the keys of the new rows, then their queries. A key
sees the keys of earlier committed rows and of its ancestors; a query sees these and its own row's key. So one unit
lower triangular system (the UT transform) gives the outputs and the additions to the state. Products have float32
precision, so the state is that of the recurrence.

The kernel needs keys and values of 128 dimensions. For 16 and 32, Triton 3.6 miscompiles it for an unknown reason; the
interpreted kernel is right.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.delta_rule.formulas_triton import (
    NORM_EPS,
    PRECISION,
    dot,
    exact_product,
    gate,
    inverse_of_unit_triangle,
    keep_history,
    log_decay,
    place,
    prefetch,
    settled,
    sigmoid,
    silu,
    three_before,
)
from aerie.kernels.delta_rule.tables import FEW_ROWS, DeltaRows, DeltaWeights, LayerState, RoundTables
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _convolved(column, own, newest, older, oldest, live, writes, weight_ptr, pending_ptr, C: tl.constexpr):
    """Return the convolved channels [n, d] of rows, in the rows' dtype.

    column: [1, d] or [n, d].
    own, newest, older, oldest: [n] addresses of the channels of each row and its three nearest ancestors.
    live: [n], other rows are zeros.
    weight_ptr: [4, C] taps, the oldest first.
    pending_ptr: [n] addresses to which the unconvolved channels of the rows in `writes` [n] are stored.
    """
    live = live[:, None]
    raw = tl.load(own[:, None] + column, mask=live, other=0.0)
    before_1 = tl.load(newest[:, None] + column, mask=live, other=0.0)
    before_2 = tl.load(older[:, None] + column, mask=live, other=0.0)
    before_3 = tl.load(oldest[:, None] + column, mask=live, other=0.0)
    taps = weight_ptr + column
    x = raw.to(tl.float32) * tl.load(taps + 3 * C).to(tl.float32)
    x += before_1.to(tl.float32) * tl.load(taps + 2 * C).to(tl.float32)
    x += before_2.to(tl.float32) * tl.load(taps + C).to(tl.float32)
    x += before_3.to(tl.float32) * tl.load(taps).to(tl.float32)
    tl.store(pending_ptr[:, None] + column, raw, mask=writes[:, None])
    return settled(silu(x)).to(raw.dtype)


@triton.jit(do_not_specialize=["mask_stride"])
def _delta_few_rows(
    qkv_ptr, z_ptr, b_ptr, a_ptr, out_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr,
    state_ptr, conv_ptr, pending_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, count_ptr,
    slots_ptr, prefix_ptr, mask_ptr, snapshot_at_ptr, snapshot_entry_ptr, mask_stride,
    qkv_stride, z_stride, b_stride, a_stride, out_stride, scale_eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PENDING: tl.constexpr, PATH: tl.constexpr, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr, R: tl.constexpr, SIGMOID: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one value head of one request. The tile's ROWS have the PATH committed rows, then WIDTH keys of the new
    rows, then their queries.

    qkv_ptr: [requests * WIDTH, C], the new rows' q, k and v before the convolution.
    z_ptr: [.., HV * DV], inputs of the output gate. b_ptr, a_ptr: [.., HV], inputs of beta and of the decay.
    out_ptr: [.., HV * DV], written. qkv_stride, z_stride, b_stride, a_stride, out_stride: between rows.
    weight_ptr: [4, C] taps of the convolution. a_log_ptr, dt_bias_ptr: [HV], of the decay. norm_ptr: [DV].
    state_ptr: [slots, HV, DK, DV] float32 before the committed rows; written: after them.
    conv_ptr: [slots, 3, C], the three tokens before the committed rows.
    committed_ptr: [slots, PATH, R], accepted rows that the state lacks. count_ptr: [slots], their number.
    pending_ptr: [slots, PENDING, R], the new rows, written.
    slots_ptr, prefix_ptr: [requests] slot, and tokens before the new rows.
    mask_ptr: [requests, WIDTH] tree masks, mask_stride between requests.
    snapshot_at_ptr, snapshot_entry_ptr: [slots] position at which a slot's state is saved, and its index in
        saved_state_ptr [.., HV, DK, DV] and saved_conv_ptr [.., 3, C].
    scale_eps: epsilon of the norm.
    HK, HV, DK, DV: heads and dimensions of keys and values. R: numbers of a row.
    PART: columns of the state at a time.
    SIGMOID: the output gate is a sigmoid; else SiLU.
    EARLY: load the state before the wait; else prefetch it.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    PARTS: tl.constexpr = DV // PART
    h, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + request)
    count = tl.load(count_ptr + slot)
    d, e = tl.arange(0, DK), tl.arange(0, PART)
    of_part = (h * DK + d)[:, None] * DV + e[None, :]
    own_state_ptr = state_ptr + slot * (HV * DK * DV)
    lines = tl.arange(0, DK * DV // 32) * 32
    states = ()
    if EARLY:
        for part in tl.static_range(PARTS):
            states = states + (tl.load(own_state_ptr + of_part + part * PART),)
    else:
        prefetch(own_state_ptr + h * (DK * DV) + lines)

    # 1. Which columns each row sees.
    r, c = tl.arange(0, ROWS), tl.arange(0, ROWS)[None, :]
    is_key = r < PATH + WIDTH
    is_new = (r >= PATH) & (r < PATH + 2 * WIDTH)
    live = is_new | (r < count)
    live_key = live & is_key
    token = tl.where(is_key, r, r - WIDTH)
    node = token - PATH
    mask = tl.load(mask_ptr + request * mask_stride + node, mask=is_new, other=0)
    among_new = (c >= PATH) & (c < PATH + WIDTH) & (((mask[:, None] >> tl.maximum(c - PATH, 0)) & 1) == 1)
    sees = live[:, None] & ((c <= r[:, None]) & (c < count) | among_new)
    above = sees & (c < token[:, None])
    newest, older, oldest = three_before(above, c)
    # committed rows before the snapshot
    snapshot = tl.load(snapshot_at_ptr + slot) - (tl.load(prefix_ptr + request) - count)
    saves = (snapshot >= 0) & (snapshot <= count)
    entry = tl.load(snapshot_entry_ptr + slot)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. The tile's rows.
    conv_ptr_of_slot, committed_ptr = conv_ptr + slot * (3 * C), committed_ptr + slot * (PATH * R)
    rows_ptr = qkv_ptr + request * WIDTH * qkv_stride
    own = place(3 + token, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    newest = place(newest, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    older = place(older, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    oldest = place(oldest, conv_ptr_of_slot, committed_ptr, rows_ptr, qkv_stride, C, R, PATH)
    row = request * WIDTH + node
    pending = pending_ptr + slot * (PENDING * R) + node * R
    gates = committed_ptr + r * R + C + h
    b = tl.load(tl.where(is_new, b_ptr + row * b_stride + h, gates), mask=live_key, other=0.0)
    a = tl.load(tl.where(is_new, a_ptr + row * a_stride + h, gates + HV), mask=live_key, other=0.0)
    key_head = h // (HV // HK)
    leads = h == key_head * (HV // HK)  # one value head per key head stores the key head's channels
    column = tl.where(is_key, KEYS, 0)[:, None] + (key_head * DK + d)[None, :]
    kq = _convolved(column, own, newest, older, oldest, live, is_new & leads, weight_ptr, pending, C)
    values = ()
    for part in tl.static_range(PARTS):
        v_column = 2 * KEYS + h * DV + part * PART + e
        v = _convolved(v_column[None, :], own, newest, older, oldest, live_key, is_new & is_key, weight_ptr, pending, C)
        values = values + (v,)
    tl.store(pending + C + h, b, mask=is_new & is_key)
    tl.store(pending + C + HV + h, a, mask=is_new & is_key)

    # 3. Products of the rows with each other.
    g, beta = log_decay(a.to(tl.float32), a_log, dt_bias), sigmoid(b.to(tl.float32))
    columns = tl.trans(kq)
    products = dot(kq, columns)
    scale = tl.rsqrt(tl.sum(tl.where(r[:, None] == c, products, 0.0), 1) + NORM_EPS)
    decay = tl.sum(tl.where(sees, g[None, :], 0.0), 1)
    since = tl.minimum(decay[:, None] - decay[None, :], 0.0)  # as in `formulas.block`
    between = tl.exp(tl.where(sees, since, -float("inf"))) * scale[None, :]
    of_row = tl.where(is_key, beta * scale, -(scale * DK**-0.5))
    system = tl.where(sees & (c != r[:, None]), products * between * of_row[:, None], 0.0)
    inverse = inverse_of_unit_triangle(system, ROWS, PATH + 2 * WIDTH, PRECISION)
    of_state = -of_row * tl.exp(decay)
    all_decay = tl.sum(tl.where(live & (r < PATH), g, 0.0), 0)
    adds = tl.where(r < count, tl.exp(all_decay - decay) * scale, 0.0)

    # 4. The state, some of its columns at a time.
    outs, squares = (), tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(PARTS):
        state = states[part] if EARLY else tl.load(own_state_ptr + of_part + part * PART)
        v = values[part]
        wanted = beta[:, None] * v.to(tl.float32) + of_state[:, None] * exact_product(kq, state)
        solved = dot(inverse, wanted)
        if saves:
            until = tl.sum(tl.where(r < snapshot, g, 0.0), 0)
            some = tl.where(r < snapshot, tl.exp(until - decay) * scale, 0.0)
            added = tl.where(r[:, None] < snapshot, some[:, None] * solved, 0.0)
            kept = tl.exp(until) * state + exact_product(columns, added)
            tl.store(saved_state_ptr + entry * (HV * DK * DV) + of_part + part * PART, kept)
            v_column = 2 * KEYS + h * DV + part * PART + e
            keep_history(saved_conv_ptr + entry * (3 * C), snapshot, v_column, conv_ptr_of_slot, committed_ptr, C, R)
        if count > 0:
            added = tl.where(r[:, None] < count, adds[:, None] * solved, 0.0)
            state = tl.exp(all_decay) * state + exact_product(columns, added)
            tl.store(own_state_ptr + of_part + part * PART, state)
        squares += tl.sum(solved * solved, 1)
        outs = outs + (solved,)
    if saves & leads:
        for i in tl.static_range(2):
            k_column = i * KEYS + key_head * DK + d
            keep_history(saved_conv_ptr + entry * (3 * C), snapshot, k_column, conv_ptr_of_slot, committed_ptr, C, R)

    # 5. The gated norm.
    writes = (is_new & (is_key == 0))[:, None]
    factor = tl.rsqrt(squares / DV + scale_eps)[:, None]
    for part in tl.static_range(PARTS):
        f = part * PART + e
        z = tl.load(z_ptr + row[:, None] * z_stride + (h * DV + f)[None, :], mask=writes, other=0.0)
        norm = tl.load(norm_ptr + f).to(tl.float32)[None, :]
        o = outs[part] * factor * norm * gate(z.to(tl.float32), SIGMOID)
        at = out_ptr + row[:, None] * out_stride + (h * DV + f)[None, :]
        tl.store(at, o.to(out_ptr.dtype.element_ty), mask=writes)


@dataclass(frozen=True)
class FewRowTiles:
    """Tiles of the kernel.

    part: columns of the state computed at a time.
    early: load all columns first.
    registers: limit per thread; None: the compiler's choice.
    """

    part: int
    warps: int
    early: bool
    registers: int | None


def few_row_tiles(value_dim: int, programs: int) -> FewRowTiles:
    """Return the tiles. With one program per multiprocessor, eight warps hold the whole state; else programs have four
    warps, and three share one. H100, rounds of 4 rows of one layer of Qwen3.5-27B, batch 1 and 8: 13 and 49 us with
    eight warps, 22 and 42 with four."""
    if programs <= MULTIPROCESSORS:
        return FewRowTiles(value_dim, warps=8, early=True, registers=None)
    return FewRowTiles(min(value_dim, 32), warps=4, early=False, registers=168)


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds` for a few rows per request: write the gated outputs
    of new rows to `out`, and advance the states by the committed rows only."""
    heads, (batch, width) = layer.heads, tables.mask.shape
    tiles = few_row_tiles(heads.value_dim, heads.value_heads * batch)
    _delta_few_rows[(heads.value_heads, batch)](
        rows.qkv, rows.z, rows.b, rows.a, out, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        layer.state, layer.conv, layer.pending, layer.committed, layer.saved_state, layer.saved_conv, layer.count,
        tables.slots, tables.prefix_len, tables.mask, tables.snapshot_at, tables.snapshot_entry, tables.mask.stride(0),
        rows.qkv.stride(0), rows.z.stride(0), rows.b.stride(0), rows.a.stride(0), out.stride(0), weights.eps,
        WIDTH=width, ROWS=FEW_ROWS, PENDING=layer.pending.shape[1], PATH=layer.committed.shape[1], HK=heads.key_heads,
        HV=heads.value_heads, DK=heads.key_dim, DV=heads.value_dim, PART=tiles.part,
        R=heads.row_size, SIGMOID=weights.sigmoid, EARLY=tiles.early, num_warps=tiles.warps, num_stages=1,
        maxnreg=tiles.registers, **pdl_wait(out.device),
    )  # fmt: skip
