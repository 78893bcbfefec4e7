# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of wide rounds, whose committed and new rows exceed a tile of shared memory.

replay_rows        the committed rows of all layers in one launch before the layers, at the rate of memory
delta_rule_rounds  the new rows of a layer, from the replayed state. A program computes one value head of one request.
                   With few heads and requests, two programs share a head, each with half of the state's columns; the
                   last to finish computes the gated norm, which needs all columns
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.delta_rule.formulas_triton import (
    NORM_EPS,
    keep_history,
    log_decay,
    norm_factors,
    place,
    prefetch,
    sigmoid,
    silu,
    three_before,
)
from aerie.kernels.delta_rule.rounds_triton import convolved_tile, gated_norm, outputs, round_rows, row_system
from aerie.kernels.delta_rule.tables import AllWeights, DeltaRows, DeltaState, DeltaWeights, LayerState, RoundTables
from aerie.kernels.gemm.splits_triton import comes_last
from aerie.kernels.pdl import pdl_wait

# Columns of a state and warps per program of `_replay`. H200, seven rows of a layer of Qwen3.5-27B, batch 1 and 8: 4.4
# and 31.5 us; with 32 columns 4.7 and 33.4, with 128 columns and eight warps 10.1 and 77.5.
REPLAY_PART, REPLAY_WARPS = 64, 4


@triton.jit
def _convolved(oldest, older, newest, own, taps, C: tl.constexpr):
    """Return a token's convolved channels, rounded to the rows' dtype, in float32.

    oldest, older, newest, own: channels of the three tokens before the token, and its own.
    taps: address of the channels' first tap in [4, C].
    """
    x = own.to(tl.float32) * tl.load(taps + 3 * C).to(tl.float32)
    x += newest.to(tl.float32) * tl.load(taps + 2 * C).to(tl.float32)
    x += older.to(tl.float32) * tl.load(taps + C).to(tl.float32)
    x += oldest.to(tl.float32) * tl.load(taps).to(tl.float32)
    return silu(x).to(own.dtype).to(tl.float32)


@triton.jit
def _replay(
    addresses_ptr, weight_ptr, a_log_ptr, dt_bias_ptr,
    state_ptr, conv_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, count_ptr,
    slots_ptr, prefix_ptr, snapshot_at_ptr, snapshot_entry_ptr,
    state_stride, conv_stride, committed_stride, saved_state_stride, saved_conv_stride,
    PATH: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Replay one request's committed rows in PART columns of a value head's state, by the recurrence.

    addresses_ptr: `AllWeights.addresses`, or None if the next three are of the only layer.
    weight_ptr, a_log_ptr, dt_bias_ptr: [4, C] taps of the convolution, and [HV] weights of the decay.
    state_ptr: [layers, slots, HV, DK, DV] float32 before the committed rows; written: after them.
    conv_ptr: [layers, slots, 3, C], the three tokens before the committed rows.
    committed_ptr: [layers, slots, PATH, R], rows to replay. count_ptr: [slots], their number.
    slots_ptr, prefix_ptr: [requests] slot, and tokens before the new rows.
    snapshot_at_ptr, snapshot_entry_ptr: [slots] position at which a slot's state is saved, and its index in
        saved_state_ptr [layers, .., HV, DK, DV] and saved_conv_ptr [layers, .., 3, C].
    state_stride, conv_stride, committed_stride, saved_state_stride, saved_conv_stride: from a layer to the next one.
    HK, HV, DK, DV: heads and dimensions of keys and values. R: numbers of a row.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    PARTS: tl.constexpr = DV // PART
    h, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    layer, request = tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots_ptr + request)
    count = tl.load(count_ptr + slot)
    # committed rows before the snapshot
    snapshot = tl.load(snapshot_at_ptr + slot) - (tl.load(prefix_ptr + request) - count)
    saves = (snapshot >= 0) & (snapshot <= count)
    if addresses_ptr is not None:
        addresses = addresses_ptr + layer * 3
        weight_ptr = tl.load(addresses).to(tl.pointer_type(conv_ptr.dtype.element_ty))
        a_log_ptr = tl.load(addresses + 1).to(tl.pointer_type(tl.float32))
        dt_bias_ptr = tl.load(addresses + 2).to(tl.pointer_type(tl.float32))
    if (count > 0) | saves:
        entry = tl.load(snapshot_entry_ptr + slot)
        d, e = tl.arange(0, DK), part * PART + tl.arange(0, PART)
        key_head = h // (HV // HK)
        k_column, v_column = KEYS + key_head * DK + d, 2 * KEYS + h * DV + e
        of_part = (h * DK + d)[:, None] * DV + e[None, :]
        state_ptr += layer * state_stride + slot * (HV * DK * DV)
        saved_state_ptr += layer * saved_state_stride + entry * (HV * DK * DV)
        conv_ptr += layer * conv_stride + slot * (3 * C)
        committed_ptr += layer * committed_stride + slot * (PATH * R)
        state = tl.load(state_ptr + of_part)
        a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
        k_oldest, v_oldest = tl.load(conv_ptr + k_column), tl.load(conv_ptr + v_column)
        k_older, v_older = tl.load(conv_ptr + C + k_column), tl.load(conv_ptr + C + v_column)
        k_newest, v_newest = tl.load(conv_ptr + 2 * C + k_column), tl.load(conv_ptr + 2 * C + v_column)
        next_ptr, there = committed_ptr, count > 0
        k_next = tl.load(next_ptr + k_column, mask=there, other=0.0)
        v_next = tl.load(next_ptr + v_column, mask=there, other=0.0)
        b_next = tl.load(next_ptr + C + h, mask=there, other=0.0)
        a_next = tl.load(next_ptr + C + HV + h, mask=there, other=0.0)
        for i in range(count):
            if i == snapshot:
                tl.store(saved_state_ptr + of_part, state)
            k_own, v_own, b, a = k_next, v_next, b_next, a_next
            next_ptr += R
            there = i + 1 < count
            k_next = tl.load(next_ptr + k_column, mask=there, other=0.0)
            v_next = tl.load(next_ptr + v_column, mask=there, other=0.0)
            b_next = tl.load(next_ptr + C + h, mask=there, other=0.0)
            a_next = tl.load(next_ptr + C + HV + h, mask=there, other=0.0)
            k = _convolved(k_oldest, k_older, k_newest, k_own, weight_ptr + k_column, C)
            v = _convolved(v_oldest, v_older, v_newest, v_own, weight_ptr + v_column, C)
            k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
            decay = tl.exp(log_decay(a.to(tl.float32), a_log, dt_bias))
            added = sigmoid(b.to(tl.float32)) * (v - decay * tl.sum(state * k[:, None], 0))
            state = decay * state + k[:, None] * added[None, :]
            k_oldest, k_older, k_newest = k_older, k_newest, k_own
            v_oldest, v_older, v_newest = v_older, v_newest, v_own
        if count > 0:
            tl.store(state_ptr + of_part, state)
        if saves:
            if snapshot == count:
                tl.store(saved_state_ptr + of_part, state)
            target_ptr = saved_conv_ptr + layer * saved_conv_stride + entry * (3 * C)
            keep_history(target_ptr, snapshot, v_column, conv_ptr, committed_ptr, C, R)
            if (part == 0) & (h == key_head * (HV // HK)):  # one program per key head
                keep_history(target_ptr, snapshot, key_head * DK + d, conv_ptr, committed_ptr, C, R)
                keep_history(target_ptr, snapshot, k_column, conv_ptr, committed_ptr, C, R)


@triton.jit(do_not_specialize=["mask_stride"])
def _delta_wide(
    qkv_ptr, z_ptr, b_ptr, a_ptr, out_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr,
    state_ptr, conv_ptr, pending_ptr, committed_ptr, count_ptr, slots_ptr, mask_ptr, o_ptr, tickets_ptr, mask_stride,
    qkv_stride, z_stride, b_stride, a_stride, out_stride, scale_eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PENDING: tl.constexpr, PATH: tl.constexpr, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, R: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the new rows of one request in DV // SPLITS columns of a value head, PART at a time. The state includes
    the committed rows; launched early, a kernel before the pass wrote it.

    qkv_ptr: [requests * WIDTH, C], the new rows' q, k and v before the convolution.
    z_ptr: [.., HV * DV], inputs of the output gate. b_ptr, a_ptr: [.., HV], inputs of beta and of the decay.
    out_ptr: [.., HV * DV], written. qkv_stride, z_stride, b_stride, a_stride, out_stride: between rows.
    weight_ptr: [4, C] taps of the convolution. a_log_ptr, dt_bias_ptr: [HV], of the decay. norm_ptr: [DV].
    state_ptr: [slots, HV, DK, DV] float32, after the committed rows.
    conv_ptr, committed_ptr: [slots, 3, C], [slots, PATH, R], tokens before the new rows, of which `count_ptr` [slots]
        are committed rows.
    pending_ptr: [slots, PENDING, R], the new rows, written.
    slots_ptr, mask_ptr: [requests] slot; [requests, WIDTH] tree masks, mask_stride between requests.
    o_ptr: [B, HV, WIDTH, DV] float32 scratch.
    tickets_ptr: `DeltaState.tickets`. Both None if SPLITS is 1.
    scale_eps: epsilon of the norm.
    ROWS: rows of the tile, at least WIDTH.
    HK, HV, DK, DV: heads and dimensions of keys and values. R: numbers of a row.
    SIGMOID: the output gate is a sigmoid; else SiLU.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    COLUMNS: tl.constexpr = DV // SPLITS
    PARTS: tl.constexpr = COLUMNS // PART
    h, split, request = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + request)
    count = tl.load(count_ptr + slot)
    d, e = tl.arange(0, DK), split * COLUMNS + tl.arange(0, PART)
    own_state_ptr = state_ptr + slot * (HV * DK * DV) + (h * DK + d)[:, None] * DV + e[None, :]
    if PARTS == 1:
        state = tl.load(own_state_ptr)
    else:
        prefetch(state_ptr + (slot * HV + h) * (DK * DV) + tl.arange(0, DK * DV // 32) * 32)

    # 1. Which rows each row sees.
    r, c = tl.arange(0, ROWS), tl.arange(0, ROWS)[None, :]
    live = r < WIDTH
    mask = tl.load(mask_ptr + request * mask_stride + r, mask=live, other=0)
    sees = ((mask[:, None] >> c) & 1) == 1
    above = sees & (c < r[:, None])
    newest, older, oldest = three_before(above, c)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. The rows, and their products with each other.
    conv_ptr += slot * (3 * C)
    committed_ptr += slot * (PATH * R)
    rows_ptr = qkv_ptr + request * WIDTH * qkv_stride
    own = place(3 + r, conv_ptr, committed_ptr, rows_ptr, qkv_stride, C, R, 0, count)
    newest = place(newest, conv_ptr, committed_ptr, rows_ptr, qkv_stride, C, R, 0, count)
    older = place(older, conv_ptr, committed_ptr, rows_ptr, qkv_stride, C, R, 0, count)
    oldest = place(oldest, conv_ptr, committed_ptr, rows_ptr, qkv_stride, C, R, 0, count)
    row = request * WIDTH + r
    pending = pending_ptr + slot * (PENDING * R) + r * R
    stores = live & (split == 0)
    b = tl.load(b_ptr + row * b_stride + h, mask=live, other=0.0)
    a = tl.load(a_ptr + row * a_stride + h, mask=live, other=0.0)
    tl.store(pending + C + h, b, mask=stores)
    tl.store(pending + C + HV + h, a, mask=stores)
    g, beta = log_decay(a.to(tl.float32), a_log, dt_bias), sigmoid(b.to(tl.float32))
    key_head = h // (HV // HK)
    leads = stores & (h == key_head * (HV // HK))  # one program per key head stores the key head's channels
    q = convolved_tile(key_head * DK + d, own, oldest, older, newest, live, leads, weight_ptr, pending, C)
    k = convolved_tile(KEYS + key_head * DK + d, own, oldest, older, newest, live, leads, weight_ptr, pending, C)
    if ROWS > 32:  # Triton's products of 64 bfloat16 rows are wrong on an H200
        q, k = q.to(tl.float32), k.to(tl.float32)
    k_scale, _decay, _keys, scores, inverse, of_state = row_system(q, k, g, beta, sees, above, ROWS, WIDTH)
    q_scale = norm_factors(q)[:, None] * DK**-0.5

    # 3. The state, some of its columns at a time.
    v_column = 2 * KEYS + h * DV + e
    if PARTS == 1:
        v = convolved_tile(v_column, own, oldest, older, newest, live, live, weight_ptr, pending, C)
        o, _added = outputs(q, k, v, state, inverse, scores, of_state, beta, k_scale)
        o *= q_scale
    else:
        o = tl.zeros((ROWS, PARTS, PART), tl.float32)
        for part in range(PARTS):
            column = v_column + part * PART
            v = convolved_tile(column, own, oldest, older, newest, live, live, weight_ptr, pending, C)
            state = tl.load(own_state_ptr + part * PART)
            of_part, _added = outputs(q, k, v, state, inverse, scores, of_state, beta, k_scale)
            o = tl.where(tl.arange(0, PARTS)[None, :, None] == part, of_part[:, None, :], o)
        o = tl.reshape(o, (ROWS, COLUMNS)) * q_scale

    # 4. The gated norm.
    if SPLITS == 1:
        gated_norm(o, z_ptr, norm_ptr, out_ptr, row, z_stride, out_stride, h, live, scale_eps, DV, SIGMOID)
    else:
        head = request * HV + h
        o_ptr += head * (WIDTH * DV) + r[:, None] * DV
        tl.store(o_ptr + split * COLUMNS + tl.arange(0, COLUMNS)[None, :], o, mask=live[:, None])
        if comes_last(tickets_ptr + head, SPLITS):
            # from L2, because L1 is not coherent
            whole = tl.load(o_ptr + tl.arange(0, DV)[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg")
            gated_norm(whole, z_ptr, norm_ptr, out_ptr, row, z_stride, out_stride, h, live, scale_eps, DV, SIGMOID)


def wide_tiles(width: int, value_dim: int, programs: int) -> tuple[int, int, int]:
    """Return the programs per head, the columns of the state computed at a time, and the warps per program. programs:
    heads of all requests. Two programs share a head if each has a multiprocessor. H200, rounds of 32 rows of one layer
    of Qwen3.5-27B: at batch 1, two programs take 16.7 us, one takes 23.2; at batch 8, 64 columns and eight warps take
    105 us, 32 columns and four warps 190."""
    rows = round_rows(width, 0)
    if rows <= 32 and 2 * programs <= MULTIPROCESSORS and value_dim >= 32:
        return 2, value_dim // 2, 8 if value_dim >= 64 else 4
    return 1, min(value_dim, 64 if rows <= 32 else 32), 8 if value_dim >= 64 else 4


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds`: compute the outputs of B requests of R rows each,
    and advance their states by the committed rows only."""
    heads, (batch, width) = layer.heads, tables.mask.shape
    if not tables.replayed:
        _launch_replay(layer, (None, weights.conv, weights.a_log, weights.dt_bias), 1, tables)
    splits, part, warps = wide_tiles(width, heads.value_dim, heads.value_heads * batch)
    o = tickets = None
    if splits > 1:
        o, tickets = torch.empty((batch * width, out.shape[1]), dtype=torch.float32, device=out.device), layer.tickets
    # launched early it would read the state before a replay just before it has ended
    _delta_wide[(heads.value_heads * splits, batch)](
        rows.qkv, rows.z, rows.b, rows.a, out, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        layer.state, layer.conv, layer.pending, layer.committed, layer.count, tables.slots, tables.mask, o, tickets,
        tables.mask.stride(0), rows.qkv.stride(0), rows.z.stride(0), rows.b.stride(0), rows.a.stride(0),
        out.stride(0), weights.eps, WIDTH=width, ROWS=round_rows(width, 0), PENDING=layer.pending.shape[1],
        PATH=layer.committed.shape[1], HK=heads.key_heads, HV=heads.value_heads, DK=heads.key_dim,
        DV=heads.value_dim, SPLITS=splits, PART=part, R=heads.row_size, SIGMOID=weights.sigmoid, num_warps=warps,
        num_stages=1, **pdl_wait(out.device, early=tables.replayed),
    )  # fmt: skip


def replay_rows(states: DeltaState, weights: AllWeights, tables: RoundTables) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.replay_rows`: advance the states of all layers by the committed rows
    of the slots of a wide round, before the layers run."""
    _launch_replay(states, (weights.addresses, None, None, None), states.state.shape[0], tables)


def _launch_replay(
    states: DeltaState | LayerState, weights: tuple[Tensor | None, ...], layers: int, tables: RoundTables
) -> None:
    """Launch `_replay`. weights: its first four arguments. layers: number of layers in `states`."""
    heads, part = states.heads, min(states.heads.value_dim, REPLAY_PART)
    tensors = states.state, states.conv, states.committed, states.saved_state, states.saved_conv
    _replay[(heads.value_heads * (heads.value_dim // part), layers, len(tables.slots))](
        *weights, *tensors, states.count, tables.slots, tables.prefix_len, tables.snapshot_at, tables.snapshot_entry,
        *(each.stride(0) if layers > 1 else 0 for each in tensors),
        PATH=states.committed.shape[-2], HK=heads.key_heads, HV=heads.value_heads, DK=heads.key_dim, DV=heads.value_dim,
        PART=part, R=heads.row_size, num_warps=REPLAY_WARPS, num_stages=1,
    )  # fmt: skip
