"""The gated delta rule over prompt chunks."""

from itertools import pairwise

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.delta_rule.formulas import block, convolved, gated_norm, gates, heads_of
from aerie.kernels.delta_rule.tables import (
    HISTORY,
    KERNEL_LIMITS,
    TAPS,
    ChunkTables,
    DeltaHeads,
    DeltaRows,
    DeltaWeights,
    LayerState,
    check_layer,
    fits_kernels,
)
from aerie.kernels.operation import Implementation, on_gpu, operation

BLOCK = 64  # maximum rows of a block


def max_blocks(num_rows: int, num_chunks: int) -> int:
    """Return the maximum number of blocks of `num_chunks` chunks: at most two per chunk are not full."""
    return num_rows // BLOCK + 2 * num_chunks


def scratch_dtype(heads: DeltaHeads, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scratch between the kernels, and of operands of their products, for rows of `dtype`.

    The rows' dtype is used only for keys and values of 128 dimensions. With fewer, which no published model has,
    kernels compiled by Triton 3.6 are wrong on an H200 (`python -m tests.bench delta_chunks`); with float32 operands
    they are right.
    """
    return dtype if heads.key_dim == heads.value_dim == 128 else torch.float32


def scratch_bytes(heads: DeltaHeads, dtype: torch.dtype, num_rows: int, num_chunks: int) -> int:
    """Return the bytes of scratch between the kernels, for rows of `dtype`: q, k and v; w, u and the decay of each
    value head; and the initial state of each block."""
    values = heads.value_heads * (heads.key_dim + heads.value_dim)
    states = max_blocks(num_rows, num_chunks) * heads.value_heads * heads.key_dim * heads.value_dim
    numbers = num_rows * (heads.channels + values) + states
    return scratch_dtype(heads, dtype).itemsize * numbers + 4 * num_rows * heads.value_heads


def _fits(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, *_: object) -> bool:
    return fits_kernels(layer)


def _is_fixed(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: ChunkTables, *_: object) -> bool:
    return tables.fixed and fits_kernels(layer)


def _check(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: ChunkTables, out: Tensor) -> None:
    check_layer(rows, weights, layer, out)
    chunks = tables.slots.shape[0]
    check_slots(tables.slots)
    assert tables.qo_indptr.shape == (chunks + 1,) and tables.snapshot_entry.dtype == torch.int64
    for each in (tables.qo_indptr, tables.starts, tables.snapshot_at):
        assert each.dtype == torch.int32 and each.is_contiguous()
    assert tables.snapshot_entry.is_contiguous()


@operation(
    Implementation(
        "triton, token by token",
        "aerie.kernels.delta_rule.recurrence_triton:delta_rule_chunks",
        on_gpu,
        _is_fixed,
        f"fixed; {KERNEL_LIMITS}",
    ),
    Implementation("triton", "aerie.kernels.delta_rule.chunks_triton:delta_rule_chunks", on_gpu, _fits, KERNEL_LIMITS),
    contract=_check,
)
def delta_rule_chunks(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: ChunkTables, out: Tensor
) -> None:
    """Compute the outputs of prompt chunks, and advance the states of their slots by all rows.

    A chunk at position 0 starts from a state and history of zeros, other chunks from those of their slot. The slot must
    not have committed rows (count is 0, and is not read). A chunk without rows changes nothing.

    rows     [N] rows, N >= qo_indptr[-1]
    layer    state and conv of the chunks' slots, and snapshots, are written
    out      [N, Hv * dv] of the model's dtype, last stride 1, written: the gated norm of the outputs; zeros for padding
    """
    heads, full = layer.heads, layer.state.dtype
    borders = tables.qo_indptr.tolist()
    fields = (tables.slots, tables.starts, tables.snapshot_at, tables.snapshot_entry)
    described = zip(*(each.tolist() for each in fields), pairwise(borders), strict=True)
    for slot, start, snapshot_at, entry, (first, end) in described:
        if first == end:
            continue
        history, state = layer.conv[slot], layer.state[slot]
        if start == 0:
            history, state = torch.zeros_like(history), torch.zeros_like(state)
        qkv = torch.cat((history, rows.qkv[first:end]))
        taps = torch.stack([qkv[i : i + end - first] for i in range(TAPS)], 1)
        q, k, v = (each.transpose(0, 1) for each in heads_of(convolved(taps, weights, full), heads, full))
        g, beta = (each.t() for each in gates(rows.b[first:end], rows.a[first:end], weights, full))
        outputs, done = [], 0
        for stop in stops(end - first, snapshot_at - start):
            one = slice(done, stop)
            state, o = _advance(state, q[:, one], k[:, one], v[:, one], g[:, one], beta[:, one])
            outputs.append(o)
            done = stop
            if stop == snapshot_at - start:
                layer.saved_state[entry], layer.saved_conv[entry] = state, qkv[stop : stop + HISTORY]
        layer.state[slot], layer.conv[slot] = state, qkv[-HISTORY:]
        out[first:end] = gated_norm(torch.cat(outputs, 1).transpose(0, 1), rows.z[first:end], weights)
    out[borders[-1] :] = 0


def stops(count: int, border: int) -> list[int]:
    """Return the ends of the blocks of `count` rows: every BLOCK rows, at `border`, and every BLOCK rows after it.
    border: ignored unless 0 < border < count."""
    if not 0 < border < count:
        return [*range(BLOCK, count, BLOCK), count]
    return [*range(BLOCK, border, BLOCK), border, *range(border + BLOCK, count, BLOCK), count]


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after one block, and the block's outputs [Hv, n, dv]."""
    triangle = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    o, added, decay = block(state, q, k, v, g, beta, triangle)
    last = decay[..., -1:]
    return last.exp().unsqueeze(-1) * state + (k * (last - decay).exp().unsqueeze(-1)).mT @ added, o
