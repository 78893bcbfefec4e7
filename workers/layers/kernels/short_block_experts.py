# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The products of `workers.layers.kernels.many_row_experts` for blocks of fewer than 64 rows, those of batches that
verify: there the weights are the tall side of the matrix unit, which has 64 rows at least."""

import triton
import triton.language as tl

from workers.layers.kernels.fp8_rows import scale_of, to_fp8
from workers.layers.kernels.gate_products import add_gates, scales_of_gates, times_channels


@triton.jit
def gate_up_of_short_blocks(
    x_ptr,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    hidden_ptr,
    hidden_scales_ptr,
    pair_ptr,
    expert_ptr,
    row_step,
    group_step,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    groups: tl.constexpr = SIZE // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside, row = pair >= 0, tl.maximum(pair, 0) // SLOTS
    x = x_ptr + row.to(tl.int64)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    gate_row = expert * (2 * WIDTH) + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales, gate_scales, up_scales = x_scales_ptr, w_scales_ptr, w_scales_ptr
    x_scale, gate_scale, up_scale = 0.0, 0.0, 0.0
    if BY_GROUP:
        x_scales = x_scales_ptr + row * row_step
        gate_scales, up_scales = scales_of_gates(w_scales_ptr, gate_row, 0, BLOCK_N, WIDTH, groups)
        x_scale = tl.load(x_scales, mask=inside, other=0.0)
        gate_scale, up_scale = tl.load(gate_scales), tl.load(up_scales)
    for step in range(SIZE // STEP):
        inputs = tl.load(x + step * STEP, mask=inside[:, None], other=0.0)
        gate, up, x_scale, gate_scale, up_scale = add_gates(
            gate, up, x_scale, gate_scale, up_scale, inputs, w_desc, gate_row, step * STEP,
            x_scales, gate_scales, up_scales, group_step, inside, step, SIZE // STEP, WIDTH, IN_FP8, BY_GROUP,
            INTERPRETED,
        )  # fmt: skip
    if IN_FP8 and not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + row * row_step, mask=inside, other=0.0)
        gate, up = times_channels(gate, up, x_scale, w_scales_ptr + expert * (2 * WIDTH) + n, WIDTH)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    at = (tile * BLOCK_M + m).to(tl.int64)
    if IN_FP8:
        scale = scale_of(hidden, 0)
        tl.store(hidden_scales_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], to_fp8(hidden / scale[None, :], INTERPRETED))
    else:
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], hidden.to(hidden_ptr.dtype.element_ty))


@triton.jit
def down_of_short_blocks(
    hidden_desc,
    w_desc,
    hidden_scales_ptr,
    w_scales_ptr,
    part_ptr,
    weight_ptr,
    pair_ptr,
    expert_ptr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    steps: tl.constexpr = WIDTH // STEP
    groups: tl.constexpr = WIDTH // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside = pair >= 0
    share = tl.load(weight_ptr + pair, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(steps):
        weights = w_desc.load([expert * SIZE + block * BLOCK_N, step * STEP])
        inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
        if IN_FP8:
            factor = tl.load(hidden_scales_ptr + (tile * steps + step) * BLOCK_M + m)
            part = tl.dot(weights, tl.trans(inputs))
            if BY_GROUP:
                rows_of_scales = expert * (SIZE // 64) + n // 64
                scale = tl.load(w_scales_ptr + rows_of_scales * groups + step * STEP // 128)
                acc += part * (scale[:, None] * factor[None, :])
            else:
                acc += part * factor[None, :]
        else:
            if INTERPRETED:
                weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
            acc = tl.dot(weights, tl.trans(inputs), acc)
    if IN_FP8 and not BY_GROUP:
        acc *= tl.load(w_scales_ptr + expert * SIZE + n)[:, None]
    acc *= share[None, :]
    out = part_ptr + pair.to(tl.int64)[None, :] * SIZE + n[:, None]
    tl.store(out, acc.to(part_ptr.dtype.element_ty), mask=inside[None, :])
