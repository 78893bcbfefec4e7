# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `delta_rule_rounds` for one row per request (non-speculative decoding): one launch per layer, which
takes little longer than reading and writing the states.

A program computes one value head of one request. It holds the state in registers, replays the committed rows by the
recurrence before it waits for the projections, and writes the state once. Programs are independent.
"""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.delta_rule.formulas_triton import (
    NORM_EPS,
    before,
    gate,
    log_decay,
    sigmoid,
    silu,
)
from aerie.kernels.delta_rule.tables import DeltaRows, DeltaWeights, LayerState, RoundTables
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _convolved(oldest, older, newest, own, live, weight_ptr, C: tl.constexpr):
    """Return a token's raw and convolved channels, in the rows' dtype.

    oldest, older, newest, own: addresses of the channels of the three tokens before the token, and of its own.
    weight_ptr: first taps of these channels.
    """
    raw = tl.load(own, mask=live, other=0.0)
    x = raw.to(tl.float32) * tl.load(weight_ptr + 3 * C).to(tl.float32)
    x += tl.load(newest, mask=live, other=0.0).to(tl.float32) * tl.load(weight_ptr + 2 * C).to(tl.float32)
    x += tl.load(older, mask=live, other=0.0).to(tl.float32) * tl.load(weight_ptr + C).to(tl.float32)
    x += tl.load(oldest, mask=live, other=0.0).to(tl.float32) * tl.load(weight_ptr).to(tl.float32)
    return raw, silu(x).to(raw.dtype)


@triton.jit
def _normed(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)


@triton.jit
def _replayed(
    state, first, end, h, k_column, v_column, a_log, dt_bias, conv_ptr, committed_ptr, weight_ptr,
    C: tl.constexpr, R: tl.constexpr, HV: tl.constexpr,
):  # fmt: skip
    """Return the state [DK, DV] of value head h after committed rows first .. end - 1, by the recurrence.

    state: [DK, DV] before row `first`.
    k_column, v_column: [DK], [DV] indices of the head's channels in a row.
    a_log, dt_bias: the head's weights of the decay.
    conv_ptr: [3, C], the slot's last three tokens before the committed rows.
    committed_ptr: [rows, R], the slot's committed rows.
    weight_ptr: [4, C] taps of the convolution, the oldest first.
    """
    for j in range(first, end):
        oldest, older = before(j, conv_ptr, committed_ptr, C, R), before(j + 1, conv_ptr, committed_ptr, C, R)
        newest, own = before(j + 2, conv_ptr, committed_ptr, C, R), committed_ptr + j * R
        _, k = _convolved(
            oldest + k_column, older + k_column, newest + k_column, own + k_column, True, weight_ptr + k_column, C
        )
        _, v = _convolved(
            oldest + v_column, older + v_column, newest + v_column, own + v_column, True, weight_ptr + v_column, C
        )
        k = _normed(k)
        beta = sigmoid(tl.load(own + C + h).to(tl.float32))
        decay = tl.exp(log_decay(tl.load(own + C + HV + h).to(tl.float32), a_log, dt_bias))
        added = beta * (v.to(tl.float32) - decay * tl.sum(state * k[:, None], 0))
        state = decay * state + k[:, None] * added[None, :]
    return state


@triton.jit
def _advanced(
    slot, count, h, request, state_ptr, conv_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, weight_ptr,
    a_log, dt_bias, prefix_ptr, snapshot_at_ptr, snapshot_entry_ptr,
    KEYS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PATH: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return the state [DK, DV] of a slot's value head h after its committed rows. After the PDL wait, write it, and a
    snapshot if one is due.

    count: committed rows of the slot.
    state_ptr, conv_ptr, committed_ptr: states and rows of all slots, as in `_delta_step`; so are the next arguments.
    a_log, dt_bias: the head's weights of the decay.
    KEYS, C: channels of all keys, and of a token.
    EARLY: launched early: wait before the first write.
    """
    d, f = tl.arange(0, DK), tl.arange(0, DV)
    place = (h * DK + d)[:, None] * DV + f[None, :]
    own_state_ptr = state_ptr + slot * (HV * DK * DV)
    state = tl.load(own_state_ptr + place)
    # committed rows before the snapshot
    snapshot = tl.load(snapshot_at_ptr + slot) - (tl.load(prefix_ptr + request) - count)
    saves = (snapshot >= 0) & (snapshot <= count)
    key_head = h // (HV // HK)
    q_column, k_column, v_column = key_head * DK + d, KEYS + key_head * DK + d, 2 * KEYS + h * DV + f
    history_ptr, committed_ptr = conv_ptr + slot * (3 * C), committed_ptr + slot * (PATH * R)
    border = tl.where(saves, snapshot, count)
    state = _replayed(
        state, 0, border, h, k_column, v_column, a_log, dt_bias, history_ptr, committed_ptr, weight_ptr, C, R, HV
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if saves:
        entry = tl.load(snapshot_entry_ptr + slot)
        tl.store(saved_state_ptr + entry * (HV * DK * DV) + place, state)
        for i in tl.static_range(3):
            source = before(snapshot + i, history_ptr, committed_ptr, C, R)
            target = saved_conv_ptr + entry * (3 * C) + i * C
            tl.store(target + v_column, tl.load(source + v_column))
            if h == key_head * (HV // HK):
                tl.store(target + q_column, tl.load(source + q_column))
                tl.store(target + k_column, tl.load(source + k_column))
        state = _replayed(
            state, snapshot, count, h, k_column, v_column, a_log, dt_bias, history_ptr, committed_ptr, weight_ptr,
            C, R, HV,
        )  # fmt: skip
    if count > 0:
        tl.store(own_state_ptr + place, state)
    return state


@triton.jit
def _delta_step(
    qkv_ptr, z_ptr, b_ptr, a_ptr, out_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr,
    state_ptr, conv_ptr, pending_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, count_ptr,
    slots_ptr, prefix_ptr, snapshot_at_ptr, snapshot_entry_ptr,
    qkv_stride, z_stride, b_stride, a_stride, out_stride, scale_eps,
    PENDING: tl.constexpr, PATH: tl.constexpr, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one value head of one request with one new row.

    qkv_ptr: [requests, C], the new rows' q, k and v before the convolution; qkv_stride between rows.
    z_ptr: [requests, HV * DV], inputs of the output gate, z_stride between rows.
    b_ptr, a_ptr: [requests, HV], inputs of beta and of the decay, b_stride and a_stride between rows.
    out_ptr: [requests, HV * DV], written, out_stride between rows.
    weight_ptr: [4, C] taps of the convolution. a_log_ptr, dt_bias_ptr: [HV], of the decay. norm_ptr: [DV].
    state_ptr: [slots, HV, DK, DV] float32 before the committed rows; written: after them.
    conv_ptr: [slots, 3, C], the three tokens before the committed rows.
    committed_ptr: [slots, PATH, R], accepted rows that the state lacks. count_ptr: [slots], their number.
    pending_ptr: [slots, PENDING, R], the new row is written to the first.
    slots_ptr, prefix_ptr: [requests] slot, and tokens before the new row.
    snapshot_at_ptr, snapshot_entry_ptr: [slots] position at which a slot's state is saved, and its index in
        saved_state_ptr [.., HV, DK, DV] and saved_conv_ptr [.., 3, C].
    scale_eps: epsilon of the norm.
    HK, HV, DK, DV: heads and dimensions of keys and values. R: numbers of a row.
    SIGMOID: the output gate is a sigmoid; else SiLU.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    h, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + request)
    count = tl.load(count_ptr + slot)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
    state = _advanced(
        slot, count, h, request, state_ptr, conv_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, weight_ptr,
        a_log, dt_bias, prefix_ptr, snapshot_at_ptr, snapshot_entry_ptr, KEYS, C, R, PATH, HK, HV, DK, DV, PDL,
    )  # fmt: skip

    key_head = h // (HV // HK)
    d, f = tl.arange(0, DK), tl.arange(0, DV)
    q_column, k_column, v_column = key_head * DK + d, KEYS + key_head * DK + d, 2 * KEYS + h * DV + f
    history_ptr, committed_ptr = conv_ptr + slot * (3 * C), committed_ptr + slot * (PATH * R)
    oldest = before(count, history_ptr, committed_ptr, C, R)
    older = before(count + 1, history_ptr, committed_ptr, C, R)
    newest = before(count + 2, history_ptr, committed_ptr, C, R)
    own = qkv_ptr + request * qkv_stride
    q_raw, q = _convolved(
        oldest + q_column, older + q_column, newest + q_column, own + q_column, True, weight_ptr + q_column, C
    )
    k_raw, k = _convolved(
        oldest + k_column, older + k_column, newest + k_column, own + k_column, True, weight_ptr + k_column, C
    )
    v_raw, v = _convolved(
        oldest + v_column, older + v_column, newest + v_column, own + v_column, True, weight_ptr + v_column, C
    )
    q, k = _normed(q) * DK**-0.5, _normed(k)
    b, a = tl.load(b_ptr + request * b_stride + h), tl.load(a_ptr + request * a_stride + h)
    decay = tl.exp(log_decay(a.to(tl.float32), a_log, dt_bias))
    u = sigmoid(b.to(tl.float32)) * (v.to(tl.float32) - decay * tl.sum(state * k[:, None], 0))
    o = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * u
    z = tl.load(z_ptr + request * z_stride + h * DV + f).to(tl.float32)
    norm = tl.load(norm_ptr + f).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 0) / DV + scale_eps) * norm * gate(z, SIGMOID)
    tl.store(out_ptr + request * out_stride + h * DV + f, o.to(out_ptr.dtype.element_ty))
    pending = pending_ptr + slot * (PENDING * R)
    tl.store(pending + v_column, v_raw)
    tl.store(pending + C + h, b)
    tl.store(pending + C + HV + h, a)
    if h == key_head * (HV // HK):  # one value head per key head stores the key head's channels
        tl.store(pending + q_column, q_raw)
        tl.store(pending + k_column, k_raw)


WARPS = 4  # per program


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds` for one row per request: write the gated outputs of
    new rows to `out`, and advance the states by the committed rows only."""
    heads, batch = layer.heads, tables.mask.shape[0]
    _delta_step[(heads.value_heads, batch)](
        rows.qkv, rows.z, rows.b, rows.a, out, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        layer.state, layer.conv, layer.pending, layer.committed, layer.saved_state, layer.saved_conv, layer.count,
        tables.slots, tables.prefix_len, tables.snapshot_at, tables.snapshot_entry,
        rows.qkv.stride(0), rows.z.stride(0), rows.b.stride(0), rows.a.stride(0), out.stride(0), weights.eps,
        PENDING=layer.pending.shape[1], PATH=layer.committed.shape[1], HK=heads.key_heads, HV=heads.value_heads,
        DK=heads.key_dim, DV=heads.value_dim, R=heads.row_size, SIGMOID=weights.sigmoid, num_warps=WARPS, num_stages=1,
        **pdl_wait(out.device),
    )  # fmt: skip
