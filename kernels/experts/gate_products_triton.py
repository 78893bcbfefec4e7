# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One step of the gate and up projections with weights as the tensor core's first operand, and its epilogue. Shared by
`few_row_products_triton` and `sorted_rows_triton`; the activation also by
`aerie.kernels.packed.expert_gate_up_triton`."""

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
