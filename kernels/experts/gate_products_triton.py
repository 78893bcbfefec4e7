# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Gate and up projections, shared by `few_row_products_triton`, `sorted_rows_triton` and `adapted.sorted_rows_triton`,
and their activation, also of `aerie.kernels.packed.expert_gate_up_triton`."""

import triton
import triton.language as tl


@triton.jit
def scales_of_gates(w_scales_ptr, gate_row, first, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return pointers to the first scales of gate and up, for BLOCK_N rows from `gate_row` and columns from group
    `first`. A block of 64 rows has one scale per 128 columns."""
    gate_scales = w_scales_ptr + (gate_row // 64 + tl.arange(0, BLOCK_N) // 64) * GROUPS + first
    return gate_scales, gate_scales + WIDTH // 64 * GROUPS


@triton.jit
def add_gates(
    gate,
    up,
    x_scale,
    gate_scale,
    up_scale,
    inputs,
    w_desc,
    gate_row,
    column,
    x_scales,
    gate_scales,
    up_scales,
    group_step,
    live,
    step,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the products of one of STEPS steps to gate and up [outputs, rows]. Return them and the scales of the next
    step, which BY_GROUP loads one step ahead; row scales only where `live`.

    x_scale, gate_scale, up_scale: [rows], [outputs], [outputs] scales of this step.
    inputs: [rows, columns] of this step, from `column` on.
    w_desc: tensor map of the weights; gate_row: the gate's first row; up's is WIDTH rows below.
    x_scales, gate_scales, up_scales: addresses of the first scales; group_step: between x's scales.
    IN_FP8: inputs and weights are FP8.
    """
    gate_weights = w_desc.load([gate_row, column])
    up_weights = w_desc.load([gate_row + WIDTH, column])
    if IN_FP8:
        gate_part = tl.dot(gate_weights, tl.trans(inputs))
        up_part = tl.dot(up_weights, tl.trans(inputs))
        if BY_GROUP:
            more = step + 1 < STEPS
            next_x_scale = tl.load(x_scales + (step + 1) * group_step, mask=live & more, other=0.0)
            next_gate_scale = tl.load(gate_scales + step + 1, mask=more, other=0.0)
            next_up_scale = tl.load(up_scales + step + 1, mask=more, other=0.0)
            gate += gate_part * (gate_scale[:, None] * x_scale[None, :])
            up += up_part * (up_scale[:, None] * x_scale[None, :])
            x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
        else:
            gate += gate_part
            up += up_part
    else:
        if INTERPRETED:
            inputs, gate_weights = inputs.to(tl.float32), gate_weights.to(tl.float32)
            up_weights = up_weights.to(tl.float32)
        gate = tl.dot(gate_weights, tl.trans(inputs), gate)
        up = tl.dot(up_weights, tl.trans(inputs), up)
    return gate, up, x_scale, gate_scale, up_scale


@triton.jit
def times_channels(gate, up, x_scale, scales, WIDTH: tl.constexpr):
    """Multiply gate and up by the scales of rows and of outputs; up's scales are WIDTH after gate's."""
    gate *= tl.load(scales)[:, None] * x_scale[None, :]
    up *= tl.load(scales + WIDTH)[:, None] * x_scale[None, :]
    return gate, up


@triton.jit
def gates_weights_first(
    x, inside, w_desc, gate_row, x_scales, w_scales, group_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    IN_FP8: tl.constexpr, BY_GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return gate and up [outputs, rows] of the rows at `x`, of which those `inside` are used.

    gate_row: the gate's first row in `w_desc`. x_scales: [rows] addresses of the first scales, group_step apart.
    w_scales: of the weights; without BY_GROUP, of the gate's outputs.
    """
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate_scales, up_scales = w_scales, w_scales
    x_scale, gate_scale, up_scale = 0.0, 0.0, 0.0
    if BY_GROUP:
        gate_scales, up_scales = scales_of_gates(w_scales, gate_row, 0, BLOCK_N, WIDTH, SIZE // 128)
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
        x_scale = tl.load(x_scales, mask=inside, other=0.0)
        gate, up = times_channels(gate, up, x_scale, w_scales, WIDTH)
    return gate, up


@triton.jit
def gates_rows_first(
    x, inside, w_desc, gate_row, x_scales, w_scales, group_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    IN_FP8: tl.constexpr, BY_GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return gate and up [rows, outputs]. Arguments are those of `gates_weights_first`. Unused rows take row 0's
    scales and are not stored."""
    groups: tl.constexpr = SIZE // 128
    steps: tl.constexpr = SIZE // STEP
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BY_GROUP:
        # one scale per 64 rows and 128 columns, read one step ahead
        if BLOCK_N == 64:
            gate_scales = w_scales + gate_row // 64 * groups
        else:
            gate_scales = w_scales + (gate_row // 64 + tl.arange(0, BLOCK_N) // 64) * groups
        up_scales = gate_scales + WIDTH // 64 * groups
        x_scale, gate_scale, up_scale = tl.load(x_scales), tl.load(gate_scales), tl.load(up_scales)
    for step in range(steps):
        inputs = tl.load(x + step * STEP, mask=inside[:, None], other=0.0)
        gate_weights = w_desc.load([gate_row, step * STEP])
        up_weights = w_desc.load([gate_row + WIDTH, step * STEP])
        if IN_FP8:
            gate_part = tl.dot(inputs, tl.trans(gate_weights))
            up_part = tl.dot(inputs, tl.trans(up_weights))
            if BY_GROUP:
                following = tl.minimum(step + 1, steps - 1)
                next_x_scale = tl.load(x_scales + following * group_step)
                next_gate_scale, next_up_scale = tl.load(gate_scales + following), tl.load(up_scales + following)
                if BLOCK_N == 64:
                    gate += gate_part * (x_scale * gate_scale)[:, None]
                    up += up_part * (x_scale * up_scale)[:, None]
                else:
                    gate += gate_part * (x_scale[:, None] * gate_scale[None, :])
                    up += up_part * (x_scale[:, None] * up_scale[None, :])
                x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
            else:
                gate += gate_part
                up += up_part
        else:
            if INTERPRETED:
                inputs, gate_weights = inputs.to(tl.float32), gate_weights.to(tl.float32)
                up_weights = up_weights.to(tl.float32)
            gate = tl.dot(inputs, tl.trans(gate_weights), gate)
            up = tl.dot(inputs, tl.trans(up_weights), up)
    if IN_FP8 and not BY_GROUP:
        row_scale = tl.load(x_scales)
        gate *= row_scale[:, None] * tl.load(w_scales)[None, :]
        up *= row_scale[:, None] * tl.load(w_scales + WIDTH)[None, :]
    return gate, up


@triton.jit
def gates_of_pairs(
    x_ptr, w_desc, x_scales_ptr, w_scales_ptr, pair, expert, block, row_step, group_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, IN_FP8: tl.constexpr, BY_GROUP: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return gate and up of BLOCK_N outputs of one expert, from output block * BLOCK_N on: [rows, outputs]; with
    WEIGHTS_FIRST [outputs, rows].

    x_ptr: [rows, SIZE]. x_scales_ptr, w_scales_ptr: scales, with IN_FP8; row_step, group_step: strides of x's.
    pair: [BLOCK_M] (row, slot) pairs, SLOTS of a row; -1 for unused ones.
    Other arguments: `gates_weights_first`.
    """
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, row = pair >= 0, tl.maximum(pair, 0) // SLOTS
    x = x_ptr + row.to(tl.int64)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    gate_row = expert * (2 * WIDTH) + block * BLOCK_N
    x_scales = x_scales_ptr + row * row_step if IN_FP8 else None
    scales = w_scales_ptr + expert * (2 * WIDTH) + n if IN_FP8 and not BY_GROUP else w_scales_ptr
    if WEIGHTS_FIRST:
        gate, up = gates_weights_first(
            x, inside, w_desc, gate_row, x_scales, scales, group_step,
            SIZE, WIDTH, BLOCK_M, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
        )  # fmt: skip
    else:
        gate, up = gates_rows_first(
            x, inside, w_desc, gate_row, x_scales, scales, group_step,
            SIZE, WIDTH, BLOCK_M, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
        )  # fmt: skip
    return gate, up


@triton.jit
def activated(gate, up, alpha, limit, shift, cubic, PLAIN: tl.constexpr, CLAMPED: tl.constexpr, CUBED: tl.constexpr):
    """Return the activation of gate and up, see `aerie.kernels.experts.gated.GatedActivation`.

    alpha, limit, shift, cubic: its fields.
    PLAIN: SwiGLU, which needs no fields.
    CLAMPED, CUBED: limit and cubic are used.
    """
    if PLAIN:
        return gate / (1.0 + tl.exp(-gate)) * up
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    inner = gate * (1.0 + cubic * gate * gate) if CUBED else gate
    return gate / (1.0 + tl.exp(-alpha * inner)) * (up + shift)
