"""Experts for up to 16 rows, in two launches: gate and up projections; down projections and the weighted sum. Most of
the time is spent reading the weights of the used experts.

Every row goes through every used expert. That costs little, because a tile of the tensor core has 16 rows anyway. It
saves gathering and sorting rows (at 256 rows sorting takes 9 us, H200, `f4507f22`), and tensor maps load all tiles. A
row's inner activations are zero in experts that it does not use. A down-projection program computes some output columns
and loops over the experts; the sum over experts stays in float32 registers.

Results are reproducible, but a row's last bits depend on the other rows, because the set of used experts determines how
sums are split. `aerie.kernels.experts.ordered` avoids that. FP8 activations have one scale per row and program.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.experts.few_row_products_triton import down_of_few_rows, down_of_one_row, gate_up_of_few_rows
from aerie.kernels.experts.route import Routed
from aerie.kernels.experts.weights import ExpertTiles, ExpertWeights, InnerRows
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.pdl import pdl_wait


def few_row_experts(
    x: Tensor | Fp8Rows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    """Write the weighted sum of each row's experts to `out`; zeros for padding rows.

    x: [rows, size] in the weights' dtype; for FP8 from `quantize_rows`, with scales of groups if the weights have them.
    routed: from `route`, for at most MAX_FEW_ROWS rows.
    workspace: at least `workspace_size`.
    tiles: from `few_row_tiles` for at least as many rows.
    out: [rows, size] of a 16- or 32-bit dtype, contiguous.

    Reference: `aerie.kernels.experts.grouped.experts_one_by_one`.
    """
    if routed.chosen.shape[0] == 0:
        return out
    return down_projected(inner_rows(x, routed, weights, workspace, tiles), routed, weights, workspace, tiles, out)


def inner_rows(
    x: Tensor | Fp8Rows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace | None,
    tiles: ExpertTiles,
    pairs: Tensor | None = None,
) -> InnerRows:
    """Return the inner activations of all rows in each used expert; zeros for rows that do not use it.

    workspace: None if a program computes its sums alone (`ProductTiles.splits` is 1).
    pairs: `pair_ptr` of `gate_up_of_few_rows`; None: not wanted.
    """
    assert routed.used is not None and routed.num_used is not None
    assert workspace is not None or tiles.gate_up.splits == 1
    rows, slots = routed.chosen.shape
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    assert rows <= tiles.block_m and values.shape == (rows, weights.size) and values.dtype == weights.gate_up.dtype
    assert x_scales is None or x_scales.is_contiguous()
    size, width, step, block_m, gate_up = weights.size, weights.width, weights.step, tiles.block_m, tiles.gate_up
    max_used, blocks, device = routed.used.shape[0], width // gate_up.block_n, values.device
    hidden = torch.empty((max_used * block_m, width), dtype=values.dtype, device=device)
    has_factors = weights.in_fp8 or pairs is not None  # the kernels that take pairs have the argument in all types
    factors = torch.empty((max_used, blocks, block_m), dtype=torch.float32, device=device) if has_factors else None
    part, tickets = (None, None) if workspace is None else (workspace.part, workspace.tickets)
    gate_up_of_few_rows[(blocks * gate_up.splits, max_used)](
        TensorDescriptor.from_tensor(values, [block_m, step]),
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, step]),
        x_scales,
        weights.gate_up_scales,
        hidden,
        factors,
        routed.chosen,
        routed.weight,
        routed.used,
        part,
        tickets,
        pairs,
        rows,
        WIDTH=width,
        SIZE=size,
        SLOTS=slots,
        SLOTS_PADDED=triton.next_power_of_2(slots),
        BLOCK_M=block_m,
        BLOCK_N=gate_up.block_n,
        STEP=step,
        SPLITS=gate_up.splits,
        SPAN=size // step // gate_up.splits,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **pdl_wait(device),
    )
    return InnerRows(hidden, factors)


def down_projected(
    inner: InnerRows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    """Write the weighted sum of the down projections to out [rows, size]."""
    assert routed.used is not None and routed.num_used is not None and out.is_contiguous()
    rows, max_used, down, matrix = routed.chosen.shape[0], routed.used.shape[0], tiles.down, weights.down.flatten(0, 1)
    assert out.shape == (rows, weights.size)
    grid = (weights.size // down.block_n, down.splits)
    tensors = (inner.factors, weights.down_scales, out, routed.used, routed.num_used, workspace.part, workspace.tickets)
    constants = {
        "WIDTH": weights.width,
        "SIZE": weights.size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": down.block_n,
        "SPLITS": down.splits,
        "IN_FP8": weights.in_fp8,
        "BY_GROUP": weights.by_group,
        "INTERPRETED": INTERPRETED,
        "num_warps": down.warps,
        "num_stages": down.stages,
        **pdl_wait(out.device),
    }
    if down.ahead:
        assert rows == 1 and max_used == down.splits and (tiles.gate_up.block_n == 128 or not weights.in_fp8)
        map_of_weights = TensorDescriptor.from_tensor(matrix, [down.block_n, weights.width])
        down_of_one_row[grid](map_of_weights, inner.values, *tensors, **constants)
        return out
    step = tiles.inner_step(weights.in_fp8)
    down_of_few_rows[grid](
        TensorDescriptor.from_tensor(inner.values, [tiles.block_m, step]),
        TensorDescriptor.from_tensor(matrix, [down.block_n, step]),
        *tensors,
        rows,
        max_used,
        STEP=step,
        **constants,
    )
    return out
