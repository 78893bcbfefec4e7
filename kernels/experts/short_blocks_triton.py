# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GEMMs of `aerie.kernels.experts.many_rows_triton` with BLOCK_M below 64 (verified batches), and of up to 64 in
deterministic engines. Weights are the tensor core's first operand, which has at least 64 rows."""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import activated, add_gates, scales_of_gates, times_channels
from aerie.kernels.experts.order_triton import block_of_program, clear_counts
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.kv.stored_values_triton import to_fp8


@triton.jit(do_not_specialize=["shared", "stride"])
def gate_up_of_short_blocks(
    x_ptr,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    hidden_ptr,
    hidden_scales_ptr,
    pair_ptr,
    expert_ptr,
    count_ptr,
    shared,
    stride,
    row_step,
    group_step,
    alpha,
    limit,
    shift,
    cubic,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    CUBED: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the activated gate and up products of BLOCK_N columns for one block of rows sorted by expert. Arguments are
    those of `gate_up_of_tall_blocks`.
    """
    groups: tl.constexpr = SIZE // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    clear_counts(count_ptr, BINS, EXPERTS)
    block, tile = tl.program_id(0), block_of_program(tl.program_id(1), shared, stride)
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
    there = n < WIDTH
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(biases, mask=there, other=0.0).to(tl.float32)[:, None]
        up += tl.load(biases + WIDTH, mask=there, other=0.0).to(tl.float32)[:, None]
    hidden = activated(gate, up, alpha, limit, shift, cubic, PLAIN, CLAMPED, CUBED)
    at = (tile * BLOCK_M + m).to(tl.int64)
    if IN_FP8:
        scale = scale_of(hidden, 0)
        tl.store(hidden_scales_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], to_fp8(hidden / scale[None, :], INTERPRETED))
    elif WIDTH % BLOCK_N == 0:
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], hidden.to(hidden_ptr.dtype.element_ty))
    else:
        to = hidden_ptr + at[None, :] * WIDTH + n[:, None]
        tl.store(to, hidden.to(hidden_ptr.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["first", "shared", "stride"])
def down_of_short_blocks(
    hidden_desc,
    w_desc,
    hidden_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    part_ptr,
    weight_ptr,
    pair_ptr,
    expert_ptr,
    shared,
    stride,
    first,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    HOLDS: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute columns first .. first + SPAN - 1 of the results. part_ptr: [pairs, SPAN]."""
    steps: tl.constexpr = (WIDTH + STEP - 1) // STEP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.program_id(0) * (BLOCKS * BLOCK_N)
    tile = block_of_program(tl.program_id(1), shared, stride)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside = pair >= 0
    share = tl.load(weight_ptr + pair, mask=inside, other=0.0)
    out = part_ptr + pair.to(tl.int64)[None, :] * SPAN + (start + n)[:, None]
    factors = hidden_scales_ptr + tile * steps * BLOCK_M + m
    held_inputs, held_factors = (), ()
    if HOLDS:  # all inner activations of these rows
        for step in tl.static_range(steps):
            held_inputs += (hidden_desc.load([tile * BLOCK_M, step * STEP]),)  # type: ignore[assignment]
            held_factors += (tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share,)  # type: ignore[assignment]
    row = expert * SIZE + first + start
    scales = ()  # of the next block's weights, read one block ahead
    if HOLDS:
        scales = _scales_of_outputs(w_scales_ptr, row, WIDTH, BLOCK_N, STEP, IN_FP8 and BY_GROUP)
    for block in range(BLOCKS):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if HOLDS:
            following = expert * SIZE + first + start + tl.minimum(block + 1, BLOCKS - 1) * BLOCK_N
            next_scales = _scales_of_outputs(w_scales_ptr, following, WIDTH, BLOCK_N, STEP, IN_FP8 and BY_GROUP)
            for step in tl.static_range(steps):
                acc = _add_product(
                    acc, held_inputs[step], w_desc, row, step * STEP, held_factors[step], scales[step],
                    IN_FP8, BY_GROUP, INTERPRETED,
                )  # fmt: skip
            scales = next_scales
        else:
            for step in range(steps):
                inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
                factor = tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share
                scale = _scale_of_outputs(w_scales_ptr, row, step * STEP, WIDTH, BLOCK_N, IN_FP8 and BY_GROUP)
                acc = _add_product(
                    acc, inputs, w_desc, row, step * STEP, factor, scale, IN_FP8, BY_GROUP, INTERPRETED
                )  # fmt: skip
        if IN_FP8 and not BY_GROUP:
            acc *= tl.load(w_scales_ptr + row + n)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + row + n).to(tl.float32)[:, None]
        if not IN_FP8:
            acc *= share[None, :]
        tl.store(out + block * BLOCK_N, acc.to(part_ptr.dtype.element_ty), mask=inside[None, :])
        row += BLOCK_N


@triton.jit
def _scale_of_outputs(w_scales_ptr, row, column, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BY_GROUP: tl.constexpr):
    """Return [BLOCK_N] scales of weights from `row` and `column`; zeros without BY_GROUP."""
    scale = tl.zeros([BLOCK_N], tl.float32)
    if BY_GROUP:
        scale = tl.load(w_scales_ptr + (row // 64 + tl.arange(0, BLOCK_N) // 64) * (WIDTH // 128) + column // 128)
    return scale


@triton.jit
def _scales_of_outputs(
    w_scales_ptr, row, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, BY_GROUP: tl.constexpr
):
    """Return `_scale_of_outputs` of every step."""
    scales = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        scales += (_scale_of_outputs(w_scales_ptr, row, step * STEP, WIDTH, BLOCK_N, BY_GROUP),)  # type: ignore[assignment]
    return scales


@triton.jit
def _add_product(
    acc,
    inputs,
    w_desc,
    row,
    column,
    factor,
    scale,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the product of one step to acc [outputs, rows]. In FP8 it is multiplied by the rows' `factor` and, with
    BY_GROUP, by the outputs' `scale`."""
    weights = w_desc.load([row, column])
    if IN_FP8:
        part = tl.dot(weights, tl.trans(inputs))
        if BY_GROUP:
            acc += part * (scale[:, None] * factor[None, :])
        else:
            acc += part * factor[None, :]
    else:
        if INTERPRETED:
            weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(weights, tl.trans(inputs), acc)
    return acc
