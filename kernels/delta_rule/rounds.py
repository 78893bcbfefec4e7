"""The gated delta rule in a round: replays the committed rows, then computes each request's new rows
(`delta_rule_rounds`). In wide rounds `replay_rows` replays the committed rows of all layers at once, before the layers.
After the pass `commit_rows` makes the accepted rows of all layers the committed rows, which the next round replays."""

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.delta_rule.formulas import advanced, block, convolved, gated_norm, gates, heads_of
from aerie.kernels.delta_rule.tables import (
    FEW_CUDA_ROWS,
    FEW_ROWS,
    HISTORY,
    KERNEL_LIMITS,
    MAX_TILE_ROWS,
    TAPS,
    AllWeights,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    LayerState,
    RoundTables,
    check_layer,
    fits_kernels,
)
from aerie.kernels.operation import Implementation, on_gpu, operation


def _fits(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object) -> bool:
    return fits_kernels(layer) and layer.committed.shape[1] + tables.mask.shape[1] <= MAX_TILE_ROWS


def _is_fixed(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object) -> bool:
    return tables.fixed and fits_kernels(layer)


def _is_step(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object) -> bool:
    return fits_kernels(layer) and tables.mask.shape[1] == 1


def _is_wide(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object) -> bool:
    return fits_kernels(layer) and tables.is_wide(layer.committed.shape[1])


def _are_few(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object) -> bool:
    return _fit_a_tile(layer, tables, FEW_ROWS)


def _are_few_in_bfloat16(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, *_: object
) -> bool:
    return _fit_a_tile(layer, tables, FEW_CUDA_ROWS) and rows.qkv.dtype is torch.bfloat16


def _fit_a_tile(layer: LayerState, tables: RoundTables, max_rows: int) -> bool:
    """Return whether requests have several rows, and these and the committed ones fit in a tile of `most` rows."""
    width, heads = tables.mask.shape[1], layer.heads
    fits = width > 1 and layer.committed.shape[1] + 2 * width <= max_rows
    return fits and heads.key_dim == heads.value_dim == 128 and layer.state.dtype is torch.float32


def _check(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor) -> None:
    check_layer(rows, weights, layer, out)
    batch, width = tables.mask.shape
    assert width <= layer.pending.shape[1] and rows.qkv.shape[0] == out.shape[0] == batch * width
    check_slots(tables.slots)
    assert tables.mask.stride(1) == 1 and tables.mask.dtype == torch.int64
    assert tables.slots.shape == tables.prefix_len.shape == (batch,) and tables.prefix_len.dtype == torch.int32
    assert tables.prefix_len.is_contiguous()
    assert tables.snapshot_at.dtype == torch.int32 and tables.snapshot_entry.dtype == torch.int64
    assert layer.pending.is_contiguous() and layer.committed.is_contiguous() and layer.count.dtype == torch.int32
    assert not tables.replayed or tables.is_wide(layer.committed.shape[1])


@operation(
    Implementation(
        "triton, token by token",
        "aerie.kernels.delta_rule.recurrence_triton:delta_rule_rounds",
        on_gpu,
        _is_fixed,
        f"fixed; {KERNEL_LIMITS}",
    ),
    Implementation(
        "triton, one row",
        "aerie.kernels.delta_rule.step_triton:delta_rule_rounds",
        on_gpu,
        _is_step,
        f"R = 1; {KERNEL_LIMITS}",
    ),
    Implementation(
        "triton, wide",
        "aerie.kernels.delta_rule.wide_rounds_triton:delta_rule_rounds",
        on_gpu,
        _is_wide,
        f"P + R > {MAX_TILE_ROWS}; {KERNEL_LIMITS}",
    ),
    Implementation(
        "cuda, few rows",
        "aerie.kernels.delta_rule.few_rows_cuda:delta_rule_rounds",
        lambda device: device.compiles_cuda,
        _are_few_in_bfloat16,
        f"R > 1; P + 2 R <= {FEW_CUDA_ROWS}; dk = dv = 128; bfloat16 rows",
    ),
    Implementation(
        "triton, few rows",
        "aerie.kernels.delta_rule.few_rows_triton:delta_rule_rounds",
        on_gpu,
        _are_few,
        f"R > 1; P + 2 R <= {FEW_ROWS}; dk = dv = 128; rows not float64",
    ),
    Implementation(
        "triton",
        "aerie.kernels.delta_rule.rounds_triton:delta_rule_rounds",
        on_gpu,
        _fits,
        f"P + R <= {MAX_TILE_ROWS}; {KERNEL_LIMITS}",
    ),
    contract=_check,
)
def delta_rule_rounds(
    rows: DeltaRows, weights: DeltaWeights, layer: LayerState, tables: RoundTables, out: Tensor
) -> None:
    """Compute the outputs of B requests of R rows each, and advance their states by the committed rows only.

    1. Replay: run the recurrence over a slot's `count` committed rows in float32, and write the new state. If it passes
       `snapshot_at`, also write the state there to snapshot `snapshot_entry`, with the convolution's history. Not if
       `tables.replayed`.
    2. New rows: each sees the replayed state, its ancestors and itself, as if the recurrence ran along its path. They
       do not change the state, and become the slot's pending rows.

    rows     [B * R] rows, by request, then by node
    layer    state, pending and snapshots are written; `commit_rows` writes committed, conv and count after the pass
    out      [B * R, Hv * dv] of the model's dtype, last stride 1, written: the gated norm of the outputs
    """
    batch, width = tables.mask.shape
    full, heads = layer.state.dtype, layer.heads
    count = layer.count[tables.slots].long()
    committed = layer.committed[tables.slots]
    seen = torch.cat((layer.conv[tables.slots], committed[..., : heads.channels]), 1)

    state = layer.state[tables.slots] if tables.replayed else _replay(weights, layer, tables, seen, committed, count)

    request = torch.arange(batch, device=count.device).unsqueeze(1)
    before = seen[request, count.unsqueeze(1) + torch.arange(HISTORY, device=count.device)]
    qkv, b, a = (torch.unflatten(each, 0, (batch, width)) for each in (rows.qkv, rows.b, rows.a))
    ancestry = _ancestry(tables.mask)
    taps = torch.cat((before, qkv), 1)[request.unsqueeze(-1), nearest(ancestry)]
    q, k, v = (each.transpose(1, 2) for each in heads_of(convolved(taps, weights, full), heads, full))
    g, beta = (each.transpose(1, 2) for each in gates(b, a, weights, full))
    o, _, _ = block(state, q, k, v, g, beta, ancestry.unsqueeze(1))
    out.copy_(gated_norm(o.transpose(1, 2).flatten(0, 1), rows.z, weights))
    # the padding of rows and later rows of `pending` do not change
    layer.pending[tables.slots, :width, : qkv.shape[-1] + 2 * heads.value_heads] = torch.cat((qkv, b, a), -1)


def _replay(
    weights: DeltaWeights, layer: LayerState, tables: RoundTables, seen: Tensor, committed: Tensor, count: Tensor
) -> Tensor:
    """Write the states after the committed rows, and snapshots. Return the states, [B, Hv, dk, dv].

    seen: [B, 3 + P, C], channels of the three tokens before the committed rows, then of the committed rows.
    """
    full, heads, path = layer.state.dtype, layer.heads, committed.shape[1]
    taps = torch.stack([seen[:, i : i + TAPS] for i in range(path)], 1)
    _, k, v = heads_of(convolved(taps, weights, full), heads, full)
    b, a = torch.split(committed[..., heads.channels :], heads.value_heads, -1)[:2]
    g, beta = gates(b, a, weights, full)
    state = layer.state[tables.slots]
    passed = tables.snapshot_at[tables.slots] - (tables.prefix_len - count)
    for i in range(path + 1):
        # selected, not multiplied by 0: rows after the committed ones may hold NaN
        for j in ((passed == i) & (i <= count)).nonzero().flatten().tolist():
            entry = tables.snapshot_entry[tables.slots[j]]
            layer.saved_state[entry], layer.saved_conv[entry] = state[j], seen[j, i : i + HISTORY]
        if i < path:
            then = advanced(state, k[:, i], v[:, i], g[:, i], beta[:, i])
            state = torch.where((i < count)[:, None, None, None], then, state)
    layer.state[tables.slots] = state
    return state


def _ancestry(mask: Tensor) -> Tensor:
    """Return [B, R, R] bool: row i sees row j."""
    return (mask.unsqueeze(-1) >> torch.arange(mask.shape[1], device=mask.device) & 1).bool()


def nearest(ancestry: Tensor) -> Tensor:
    """Return [B, R, 4] int64: each row's three nearest ancestors, farthest first, then the row itself. Indices 0 to 2
    are the tokens before the root."""
    width = ancestry.shape[-1]
    column = torch.arange(width, device=ancestry.device)
    rows = torch.where(ancestry, HISTORY + column, -1)
    before = torch.arange(HISTORY, device=ancestry.device).expand(*rows.shape[:-1], HISTORY)
    return torch.cat((before, rows), -1).topk(TAPS, -1).values.flip(-1)


def _fit_layers(states: DeltaState, *_: object) -> bool:
    return fits_kernels(states.layer(0))


def _check_replay(states: DeltaState, weights: AllWeights, tables: RoundTables) -> None:
    check_slots(tables.slots)
    assert tables.slots.shape == tables.prefix_len.shape and tables.prefix_len.dtype == torch.int32
    assert tables.prefix_len.is_contiguous() and weights.addresses.is_contiguous()
    assert tables.snapshot_at.dtype == torch.int32 and tables.snapshot_entry.dtype == torch.int64
    assert weights.addresses.shape == (states.state.shape[0], 3) and weights.addresses.dtype == torch.int64
    assert len(weights.layers) == states.state.shape[0] and states.count.dtype == torch.int32
    assert states.state.is_contiguous() and states.conv.is_contiguous() and states.committed.is_contiguous()
    assert tables.is_wide(states.committed.shape[2]) and not tables.replayed


@operation(
    Implementation(
        "triton", "aerie.kernels.delta_rule.wide_rounds_triton:replay_rows", on_gpu, _fit_layers, KERNEL_LIMITS
    ),
    contract=_check_replay,
)
def replay_rows(states: DeltaState, weights: AllWeights, tables: RoundTables) -> None:
    """Carry out step 1 of `delta_rule_rounds` in all layers: replay the committed rows of the slots of a wide round.
    Called once, before the layers, whose rounds then have `tables.replayed`. Counts, committed rows and `conv` do not
    change until `commit_rows`.

    states   state and snapshots are written
    """
    count = states.count[tables.slots].long()
    for layer, own in enumerate(weights.layers):
        of_layer = states.layer(layer)
        committed = of_layer.committed[tables.slots]
        seen = torch.cat((of_layer.conv[tables.slots], committed[..., : states.heads.channels]), 1)
        _replay(own, of_layer, tables, seen, committed, count)


def _check_commit(states: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    check_slots(slots)
    assert path.dtype == torch.int64 and counts.dtype in (torch.int32, torch.int64)
    assert slots.shape == counts.shape and counts.is_contiguous()
    assert path.dim() == 2 and path.shape[0] == slots.shape[0] and path.stride(1) == 1
    assert path.shape[1] <= states.committed.shape[2]
    assert states.conv.is_contiguous() and states.pending.is_contiguous() and states.committed.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.delta_rule.rounds_triton:commit_rows", on_gpu), contract=_check_commit
)
def commit_rows(states: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Make the accepted path of a round the committed rows of its slots, in all layers. Called once, after the pass.

    The pass has replayed the previous committed rows into `state`. So `conv` advances over them, committed[j] becomes
    pending[path[j]] for j < counts, and `count` becomes counts. The padding slot does not change.

    states  conv, committed and count are written
    slots   [B] int64, distinct except for the padding slot of padding rows
    path    [B, D] int64, nodes by depth, D <= P; without speculation zeros [B, 1]
    counts  [B] int32 or int64, number of committed nodes of the path, at most D
    """
    heads, depth = states.heads, path.shape[1]
    slots, path, counts = (each[slots != states.padding_slot] for each in (slots, path, counts))
    seen = torch.cat((states.conv[:, slots], states.committed[:, slots, :, : heads.channels]), 2)
    newest = states.count[slots].long().unsqueeze(1) + torch.arange(HISTORY, device=slots.device)
    states.conv[:, slots] = seen[:, torch.arange(len(slots), device=slots.device).unsqueeze(1), newest]
    moves = (torch.arange(depth, device=slots.device) < counts.unsqueeze(1)).unsqueeze(-1)
    moved = torch.where(moves, states.pending[:, slots.unsqueeze(1), path], states.committed[:, slots, :depth])
    states.committed[:, slots, :depth] = moved
    states.count[slots] = counts.int()
