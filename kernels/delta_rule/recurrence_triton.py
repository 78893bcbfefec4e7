# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `delta_rule_rounds` and `delta_rule_chunks` for deterministic engines: the recurrence, token by token,
for prompts, single rows, chains and trees. Three launches:

prepare  q, k, v and gates of every row
walk     the state along each sequence, and the rows' outputs before the norm
finish   the gated norm

A row's result depends on its path only, because all passes run the same compiled kernels with the same operations in
one loop: what differs between passes is an argument that Triton does not specialise on. A sequence is a request of a
round or a prompt chunk. Rows of a chunk are a chain; nodes of a tree are walked one after another. A node that does not
continue the previous node's path starts again at the committed state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.delta_rule.chunks_triton import move_history
from aerie.kernels.delta_rule.formulas_triton import (
    NORM_EPS,
    before,
    gate,
    keep_history,
    log_decay,
    sigmoid,
    silu,
)
from aerie.kernels.delta_rule.tables import MAX_ROWS, ChunkTables, DeltaRows, DeltaWeights, LayerState, RoundTables

PART = 8  # columns of a state per program of `_walk`, which has one warp
ROWS = 16  # rows per program of `_finish`


def _one_kernel(numbers: str, addresses: str) -> dict[str, list[str]]:
    """Return options with which neither whether a number is 1 or divisible, nor how an address is aligned, selects
    another compiled kernel."""
    return {"do_not_specialize": numbers.split(), "do_not_specialize_on_alignment": addresses.split()}


@triton.jit
def _convolved(own, newest, older, oldest, has_newest, has_older, has_oldest, taps, C: tl.constexpr):
    """Return raw and convolved channels of a token, in the rows' dtype.

    own, newest, older, oldest: addresses of the channels of the token and the three before it, which are zeros unless
        has_newest, has_older, has_oldest.
    taps: addresses of the channels' oldest taps in [4, C].
    """
    raw = tl.load(own)
    x = raw.to(tl.float32) * tl.load(taps + 3 * C).to(tl.float32)
    x += tl.load(newest, mask=has_newest, other=0.0).to(tl.float32) * tl.load(taps + 2 * C).to(tl.float32)
    x += tl.load(older, mask=has_older, other=0.0).to(tl.float32) * tl.load(taps + C).to(tl.float32)
    x += tl.load(oldest, mask=has_oldest, other=0.0).to(tl.float32) * tl.load(taps).to(tl.float32)
    return raw, silu(x).to(raw.dtype)


@triton.jit
def _normed(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)


@triton.jit(
    **_one_kernel(
        "num_chunks width path mask_stride qkv_stride b_stride a_stride pending_rows",
        "qkv_ptr b_ptr a_ptr slots_ptr mask_ptr qo_ptr starts_ptr",
    )
)
def _prepare(
    qkv_ptr, b_ptr, a_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, q_ptr, k_ptr, v_ptr, gates_ptr,
    conv_ptr, pending_ptr, committed_ptr, count_ptr, slots_ptr, mask_ptr, qo_ptr, starts_ptr,
    num_chunks, width, path, mask_stride, qkv_stride, b_stride, a_stride, pending_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write q, k, v and gates of a row. A program computes one key head of one row, and its value heads.

    qkv_ptr: [rows, C] before the convolution. b_ptr, a_ptr: [rows, HV] inputs of beta and of the decay. Each has its
        row stride. weight_ptr: [4, C] taps. a_log_ptr, dt_bias_ptr: [HV] weights of the decay.
    q_ptr, k_ptr, v_ptr, gates_ptr: float32 scratch by row, written.
    conv_ptr: [slots, 3, C], the three tokens before the committed rows.
    pending_ptr: [slots, pending_rows, R], the new rows of rounds, written.
    committed_ptr: [slots, path, R], accepted rows that the state lacks. count_ptr: [slots], their number.
    slots_ptr: slot of each request or chunk. mask_ptr: [requests, width] tree masks of rounds, mask_stride apart.
    qo_ptr, starts_ptr: first row of each chunk, and position of that row; not read in rounds.
    num_chunks: 0 for rounds, whose rows are `path` committed ones, then `width` new ones, of each request.
    HK, HV, DK, DV: heads and dimensions of keys and values. R: numbers of a row.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    row, key_head = tl.program_id(0), tl.program_id(1)
    sequence, count = row * 0, row * 0
    if num_chunks > 0:
        while (sequence < num_chunks) & (tl.load(qo_ptr + tl.minimum(sequence + 1, num_chunks)) <= row):
            sequence += 1
        live = sequence < num_chunks
        sequence = tl.minimum(sequence, num_chunks - 1)
        base = tl.load(qo_ptr + sequence)
        i = row - base
        slot = tl.load(slots_ptr + sequence)
        has_history = tl.load(starts_ptr + sequence) > 0
    else:
        sequence = row // (path + width)
        base = sequence * width
        i = row % (path + width) - path
        slot = tl.load(slots_ptr + sequence)
        count = tl.load(count_ptr + slot)
        live = (i >= 0) | (path + i < count)
        has_history = row >= 0
    if live:
        # Ancestors among the new rows, the newest first; -1 if there is none.
        is_new = i >= 0
        if num_chunks > 0:
            newest, older, oldest = tl.maximum(i - 1, -1), tl.maximum(i - 2, -1), tl.maximum(i - 3, -1)
        else:
            mask = tl.load(mask_ptr + sequence.to(tl.int64) * mask_stride + tl.maximum(i, 0))
            c = tl.arange(0, 64)
            seen = ((mask >> c.to(tl.int64)) & 1) == 1
            newest = tl.max(tl.where(seen & (c < i), c, -1), 0)
            older = tl.max(tl.where(seen & (c < newest), c, -1), 0)
            oldest = tl.max(tl.where(seen & (c < older), c, -1), 0)
        missing = (newest < 0).to(tl.int32) + (older < 0).to(tl.int32) + (oldest < 0).to(tl.int32)
        conv_ptr += slot * (3 * C)
        committed_ptr += slot * (path * R)
        pending_ptr += slot * (pending_rows * R) + i * R
        # Tokens before the root are numbered as in `formulas_triton.before`; `end` is that of the root.
        end = 3 + tl.where(is_new, count, path + i)
        rows_ptr = qkv_ptr + base.to(tl.int64) * qkv_stride
        before_newest = before(end - 1, conv_ptr, committed_ptr, C, R)
        before_older = before(end - tl.where(missing == 3, 2, 1), conv_ptr, committed_ptr, C, R)
        before_oldest = before(end - tl.maximum(missing, 1), conv_ptr, committed_ptr, C, R)
        own_at = tl.where(is_new, rows_ptr + i * qkv_stride, committed_ptr + (path + i) * R)
        newest_at = tl.where(newest < 0, before_newest, rows_ptr + newest * qkv_stride)
        older_at = tl.where(older < 0, before_older, rows_ptr + older * qkv_stride)
        oldest_at = tl.where(oldest < 0, before_oldest, rows_ptr + oldest * qkv_stride)
        has_newest, has_older = has_history | (newest >= 0), has_history | (older >= 0)
        has_oldest = has_history | (oldest >= 0)
        stores = is_new & (num_chunks == 0)
        d, e = tl.arange(0, DK), tl.arange(0, DV)
        at = row.to(tl.int64) * HK + key_head
        q_raw, q = _convolved(
            own_at + key_head * DK + d, newest_at + key_head * DK + d, older_at + key_head * DK + d,
            oldest_at + key_head * DK + d, has_newest, has_older, has_oldest, weight_ptr + key_head * DK + d, C,
        )  # fmt: skip
        tl.store(q_ptr + at * DK + d, _normed(q) * DK**-0.5)
        column = KEYS + key_head * DK + d
        k_raw, k = _convolved(
            own_at + column, newest_at + column, older_at + column, oldest_at + column,
            has_newest, has_older, has_oldest, weight_ptr + column, C,
        )  # fmt: skip
        tl.store(k_ptr + at * DK + d, _normed(k))
        if stores:
            tl.store(pending_ptr + key_head * DK + d, q_raw)
            tl.store(pending_ptr + column, k_raw)
        for of_group in range(HV // HK):
            h = key_head * (HV // HK) + of_group
            own_v = 2 * KEYS + h * DV + e
            v_raw, v = _convolved(
                own_at + own_v, newest_at + own_v, older_at + own_v, oldest_at + own_v,
                has_newest, has_older, has_oldest, weight_ptr + own_v, C,
            )  # fmt: skip
            at = row.to(tl.int64) * HV + h
            tl.store(v_ptr + at * DV + e, v)
            b = tl.load(tl.where(is_new, b_ptr + (base + i).to(tl.int64) * b_stride + h, own_at + C + h))
            a = tl.load(tl.where(is_new, a_ptr + (base + i).to(tl.int64) * a_stride + h, own_at + C + HV + h))
            a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_bias_ptr + h).to(tl.float32)
            tl.store(gates_ptr + at * 2, tl.exp(log_decay(a.to(tl.float32), a_log, dt_bias)))
            tl.store(gates_ptr + at * 2 + 1, sigmoid(b.to(tl.float32)))
            if stores:
                tl.store(pending_ptr + own_v, v_raw)
                tl.store(pending_ptr + C + h, b)
                tl.store(pending_ptr + C + HV + h, a)


@triton.jit
def _load_row(row, h, e, q_ptr, k_ptr, v_ptr, gates_ptr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
              DV: tl.constexpr):  # fmt: skip
    """Return q, k [DK], some of v [PART], decay and beta of a prepared row.

    row, h, e: the row, value head, and [PART] columns of v.
    q_ptr, k_ptr, v_ptr, gates_ptr, HK, HV, DV: as in `_prepare`.
    """
    d, at = tl.arange(0, DK), row.to(tl.int64) * HV + h
    of_key = (row.to(tl.int64) * HK + h // (HV // HK)) * DK + d
    v = tl.load(v_ptr + at * DV + e).to(tl.float32)
    decay, beta = tl.load(gates_ptr + 2 * at), tl.load(gates_ptr + 2 * at + 1)
    return tl.load(q_ptr + of_key), tl.load(k_ptr + of_key), v, decay, beta


@triton.jit(
    **_one_kernel(
        "num_chunks width path mask_stride qkv_stride",
        "qkv_ptr slots_ptr mask_ptr prefix_ptr qo_ptr starts_ptr snapshot_at_ptr snapshot_entry_ptr",
    )
)
def _walk(
    qkv_ptr, q_ptr, k_ptr, v_ptr, gates_ptr, o_ptr,
    state_ptr, conv_ptr, committed_ptr, saved_state_ptr, saved_conv_ptr, count_ptr,
    slots_ptr, mask_ptr, prefix_ptr, qo_ptr, starts_ptr, snapshot_at_ptr, snapshot_entry_ptr,
    num_chunks, width, path, mask_stride, qkv_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Run the recurrence along one sequence in PART columns of a value head's state.

    qkv_ptr: [rows, C] before the convolution, qkv_stride between rows.
    q_ptr, k_ptr, v_ptr, gates_ptr: from `_prepare`.
    o_ptr: [rows, HV, DV] float32 scratch, written: outputs before the norm.
    state_ptr: [slots, HV, DK, DV] float32, written: after the committed rows, or after the chunk.
    conv_ptr, committed_ptr, count_ptr, slots_ptr, mask_ptr, mask_stride: as in `_prepare`.
    prefix_ptr: [requests] tokens before the new rows; not read for chunks.
    snapshot_at_ptr, snapshot_entry_ptr: by slot or chunk, position at which the state is saved, and its index in
        saved_state_ptr [.., HV, DK, DV] and saved_conv_ptr [.., 3, C].
    num_chunks, path, width, qo_ptr, starts_ptr, HK, HV, DK, DV, R: as in `_prepare`.
    """
    KEYS: tl.constexpr = HK * DK
    C: tl.constexpr = 2 * KEYS + HV * DV
    PARTS: tl.constexpr = DV // PART
    h, part, sequence = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    key_head = h // (HV // HK)
    is_chunk = num_chunks > 0
    slot = tl.load(slots_ptr + sequence)
    count = sequence * 0
    if is_chunk:
        base = tl.load(qo_ptr + sequence)
        num_new, first_row = tl.load(qo_ptr + sequence + 1) - base, base
        start = tl.load(starts_ptr + sequence)
        entry, snapshot = tl.load(snapshot_entry_ptr + sequence), tl.load(snapshot_at_ptr + sequence) - start
        snapshot = tl.where(snapshot <= num_new, tl.maximum(snapshot, -1), -1)
        snapshot = tl.where(snapshot == 0, -1, snapshot)
    else:
        count, start = tl.load(count_ptr + slot), sequence * 0 + 1
        base, num_new, first_row = sequence * width, sequence * 0 + width, sequence * (path + width)
        entry = tl.load(snapshot_entry_ptr + slot)
        snapshot = tl.load(snapshot_at_ptr + slot) - (tl.load(prefix_ptr + sequence) - count)
        snapshot = tl.where((snapshot >= 0) & (snapshot <= count), snapshot, -1)
    if num_new > 0:
        d, e = tl.arange(0, DK), part * PART + tl.arange(0, PART)
        own_ptr = state_ptr + slot * (HV * DK * DV) + h * (DK * DV) + d[:, None] * DV + e[None, :]
        saved_ptr = saved_state_ptr + entry * (HV * DK * DV) + h * (DK * DV) + d[:, None] * DV + e[None, :]
        state = tl.load(own_ptr, mask=(start + d[:, None] * 0) > 0, other=0.0)
        if snapshot == 0:
            tl.store(saved_ptr, state)
        end_of_trunk = tl.where(is_chunk, num_new, count)  # rows after which the state is kept
        one = tl.full([], 1, tl.int64)
        bits = one  # the path of `node`
        replayed, node, column = count * 0, count * 0, count * 0
        row = first_row + tl.where(count > 0, 0, path)
        q, k, v, decay, beta = _load_row(row, h, e, q_ptr, k_ptr, v_ptr, gates_ptr, HK, HV, DK, DV)
        ahead = row
        while node < num_new:
            row = first_row + tl.where(replayed < count, replayed, path + tl.where(is_chunk, node, column))
            if row != ahead:
                q, k, v, decay, beta = _load_row(row, h, e, q_ptr, k_ptr, v_ptr, gates_ptr, HK, HV, DK, DV)
            # Mostly the next row; loaded before it is needed. The last row of all is loaded again.
            ahead = tl.minimum(row + 1, first_row + path + num_new - 1)
            ahead = tl.where(replayed == count - 1, first_row + path, ahead)
            q_next, k_next, v_next, decay_next, beta_next = _load_row(
                ahead, h, e, q_ptr, k_ptr, v_ptr, gates_ptr, HK, HV, DK, DV
            )
            added = beta * (v - decay * tl.sum(state * k[:, None], 0))
            state = decay * state + k[:, None] * added[None, :]
            replays, is_node = replayed < count, (replayed >= count) & (num_chunks == 0)
            answers = (replayed >= count) & (is_chunk | (column == node))
            if answers:
                o = tl.sum(state * q[:, None], 0)
                tl.store(o_ptr + ((base + node).to(tl.int64) * HV + h) * DV + e, o)
                node += 1
            replayed += replays.to(tl.int32)
            in_trunk = replayed + tl.where(is_chunk, node, 0)
            if (replays | is_chunk) & (in_trunk == snapshot):
                tl.store(saved_ptr, state)
            if (replays | is_chunk) & (in_trunk == end_of_trunk):
                tl.store(own_ptr, state)
            if is_node:
                column += 1
                if answers:
                    if node < num_new:
                        above = bits
                        bits = tl.load(mask_ptr + sequence.to(tl.int64) * mask_stride + node)
                        if bits - (one << node.to(tl.int64)) != above:
                            column = node * 0
                            tl.debug_barrier()
                            state = tl.load(own_ptr)
                else:
                    while ((bits >> column.to(tl.int64)) & 1) == 0:
                        column += 1
            q, k, v, decay, beta = q_next, k_next, v_next, decay_next, beta_next
        leads = (part == 0) & (h == key_head * (HV // HK))  # one value head per key head
        if is_chunk:
            saved_at = tl.maximum(snapshot, 0)
            move_history(
                qkv_ptr, conv_ptr, saved_conv_ptr, slot, entry, base, num_new, saved_at, 2 * KEYS + h * DV + e,
                qkv_stride, start > 0, C,
            )  # fmt: skip
            if leads:
                for keys in tl.static_range(2):
                    move_history(
                        qkv_ptr, conv_ptr, saved_conv_ptr, slot, entry, base, num_new, saved_at,
                        keys * KEYS + key_head * DK + d, qkv_stride, start > 0, C,
                    )  # fmt: skip
        elif snapshot >= 0:
            history_ptr, rows_ptr = conv_ptr + slot * (3 * C), committed_ptr + slot * (path * R)
            target_ptr = saved_conv_ptr + entry * (3 * C)
            keep_history(target_ptr, snapshot, 2 * KEYS + h * DV + e, history_ptr, rows_ptr, C, R)
            if leads:
                for keys in tl.static_range(2):
                    keep_history(target_ptr, snapshot, keys * KEYS + key_head * DK + d, history_ptr, rows_ptr, C, R)


@triton.jit(
    **_one_kernel(
        "num_chunks num_rows z_stride out_stride",
        "z_ptr out_ptr qo_ptr",
    )
)
def _finish(
    o_ptr, z_ptr, out_ptr, norm_ptr, qo_ptr,
    num_chunks, num_rows, z_stride, out_stride, scale_eps,
    HV: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Write the gated norm of the outputs. A program computes one value head of ROWS rows, and writes zeros to padding
    rows of chunks.

    o_ptr: [num_rows, HV, DV] float32, from `_walk`.
    z_ptr: [num_rows, HV * DV] inputs of the gate, z_stride between rows.
    out_ptr: [num_rows, HV * DV], written, out_stride between rows.
    norm_ptr, scale_eps: [DV] weights and epsilon of the norm. SIGMOID: the gate is a sigmoid; else SiLU.
    qo_ptr: [chunks + 1], whose last entry is the end of rows in use; not read in rounds, where num_chunks is 0.
    """
    h, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    used = num_rows
    if num_chunks > 0:
        used = tl.load(qo_ptr + num_chunks)
    live, column = (row < used)[:, None], h * DV + tl.arange(0, DV)[None, :]
    row = row.to(tl.int64)[:, None]
    o = tl.load(o_ptr + row * (HV * DV) + column, mask=live, other=0.0)
    z = tl.load(z_ptr + row * z_stride + column, mask=live, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + tl.arange(0, DV)).to(tl.float32)[None, :]
    o *= tl.rsqrt(tl.sum(o * o, 1) / DV + scale_eps)[:, None] * norm * gate(z, SIGMOID)
    tl.store(out_ptr + row * out_stride + column, o.to(out_ptr.dtype.element_ty), mask=row < num_rows)


def _run(
    rows: DeltaRows,
    weights: DeltaWeights,
    layer: LayerState,
    tables: RoundTables | ChunkTables,
    out: Tensor,
) -> None:
    """Launch the three kernels for rounds or for chunks. Arguments that only the other kind reads are placeholders."""
    heads, device, num_rows = layer.heads, out.device, out.shape[0]
    path, pending_rows = layer.committed.shape[1], layer.pending.shape[1]  # maximum nodes of a path, and of a tree
    if isinstance(tables, RoundTables):
        num_sequences, width = tables.mask.shape
        num_chunks, prepared = 0, num_sequences * (path + width)  # committed rows to replay, then new ones
        mask, mask_stride, prefix = tables.mask, tables.mask.stride(0), tables.prefix_len
        qo, starts = tables.prefix_len, tables.prefix_len  # not read
    else:
        num_sequences = num_chunks = tables.slots.shape[0]
        width, path, prepared = 0, 0, num_rows
        mask, mask_stride, prefix = tables.snapshot_entry, 0, tables.starts  # not read
        qo, starts = tables.qo_indptr, tables.starts
    q, k = (torch.empty((prepared, heads.key_heads, heads.key_dim), device=device) for _ in range(2))
    v = torch.empty((prepared, heads.value_heads, heads.value_dim), dtype=out.dtype, device=device)
    gates = torch.empty((prepared, heads.value_heads, 2), device=device)
    o = torch.empty((num_rows, heads.value_heads, heads.value_dim), device=device)
    sizes = {"HK": heads.key_heads, "HV": heads.value_heads, "DK": heads.key_dim, "DV": heads.value_dim}
    _prepare[(prepared, heads.key_heads)](
        rows.qkv, rows.b, rows.a, weights.conv, weights.a_log, weights.dt_bias, q, k, v, gates,
        layer.conv, layer.pending, layer.committed, layer.count, tables.slots, mask, qo, starts,
        num_chunks, width, path, mask_stride, rows.qkv.stride(0), rows.b.stride(0), rows.a.stride(0), pending_rows,
        **sizes, R=heads.row_size, num_warps=1, num_stages=1,
    )  # fmt: skip
    part = min(PART, heads.value_dim)
    _walk[(heads.value_heads * (heads.value_dim // part), num_sequences)](
        rows.qkv, q, k, v, gates, o,
        layer.state, layer.conv, layer.committed, layer.saved_state, layer.saved_conv, layer.count,
        tables.slots, mask, prefix, qo, starts, tables.snapshot_at, tables.snapshot_entry,
        num_chunks, width, path, mask_stride, rows.qkv.stride(0),
        **sizes, PART=part, R=heads.row_size, num_warps=1, num_stages=1,
    )  # fmt: skip
    _finish[(heads.value_heads, triton.cdiv(num_rows, ROWS))](
        o, rows.z, out, weights.norm, qo, num_chunks, num_rows, rows.z.stride(0), out.stride(0), weights.eps,
        HV=heads.value_heads, DV=heads.value_dim, ROWS=ROWS, SIGMOID=weights.sigmoid, num_warps=4, num_stages=1,
    )  # fmt: skip


def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.rounds.delta_rule_rounds` for deterministic engines."""
    assert tables.mask.shape[1] <= MAX_ROWS
    _run(rows, weights, layer, tables, out)


def delta_rule_chunks(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: ChunkTables, out: Tensor
) -> None:
    """Implement `aerie.kernels.delta_rule.chunks.delta_rule_chunks` for deterministic engines."""
    _run(rows, weights, layer, tables, out)
