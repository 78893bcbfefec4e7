# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GEMMs of `aerie.kernels.experts.many_rows_triton` with BLOCK_M of at least 64 (prompts). Rows are the tensor
core's first operand, so a thread has few rows and few scales.

A down-projection program computes several blocks of columns for the same rows; the weights of the next block load while
one block is multiplied and written.
"""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import activated
from aerie.kernels.experts.order_triton import block_of_program, clear_counts
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.kv.stored_values_triton import to_fp8

MIN_ROWS = 64  # per block


@triton.jit(do_not_specialize=["shared", "stride"])
def gate_up_of_tall_blocks(
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
    """Write the activated gate and up products of BLOCK_N columns for one block of rows sorted by expert.

    hidden_ptr: [blocks * BLOCK_M, WIDTH]. hidden_scales_ptr: [blocks, WIDTH / BLOCK_N, BLOCK_M] with FP8 rows.
    pair_ptr, expert_ptr, count_ptr, shared, stride: of `ExpertOrder`; count_ptr has EXPERTS counts, padded to BINS,
        which are zeroed here.
    row_step, group_step: strides of x's scales.
    alpha, limit, shift, cubic: of `GatedActivation`. PLAIN: SwiGLU. CLAMPED, CUBED: limit and cubic are used.
    SIZE, WIDTH: numbers of x, and of the activation. STEP: columns of x per product.
    SLOTS: experts of a row, shared ones included.
    IN_FP8: x and weights are FP8; BY_GROUP: with scales per group; else per row and per output.
    """
    groups: tl.constexpr = SIZE // 128
    steps: tl.constexpr = SIZE // STEP
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
    inside, row = pair >= 0, tl.maximum(pair, 0) // SLOTS  # unused rows take row 0's scales and are not stored
    x = x_ptr + row.to(tl.int64)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    gate_row = expert * (2 * WIDTH) + block * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BY_GROUP:
        # one scale per 64 rows and 128 columns, read one step ahead
        x_scales = x_scales_ptr + row * row_step
        if BLOCK_N == 64:
            gate_scales = w_scales_ptr + gate_row // 64 * groups
        else:
            gate_scales = w_scales_ptr + (gate_row // 64 + tl.arange(0, BLOCK_N) // 64) * groups
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
        row_scale = tl.load(x_scales_ptr + row * row_step)
        scales = w_scales_ptr + expert * (2 * WIDTH) + n
        gate *= row_scale[:, None] * tl.load(scales)[None, :]
        up *= row_scale[:, None] * tl.load(scales + WIDTH)[None, :]
    there = n < WIDTH
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(biases, mask=there, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + WIDTH, mask=there, other=0.0).to(tl.float32)[None, :]
    hidden = activated(gate, up, alpha, limit, shift, cubic, PLAIN, CLAMPED, CUBED)
    to = hidden_ptr + (tile * BLOCK_M + m).to(tl.int64)[:, None] * WIDTH + n[None, :]
    if IN_FP8:
        scale = scale_of(hidden, 1)
        tl.store(hidden_scales_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(to, to_fp8(hidden / scale[:, None], INTERPRETED))
    elif WIDTH % BLOCK_N == 0:
        tl.store(to, hidden.to(hidden_ptr.dtype.element_ty))
    else:
        tl.store(to, hidden.to(hidden_ptr.dtype.element_ty), mask=there[None, :])


@triton.jit(do_not_specialize=["first", "shared", "stride"])
def down_of_tall_blocks(
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
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside = pair >= 0
    share = tl.load(weight_ptr + pair, mask=inside, other=0.0)
    out = part_ptr + pair.to(tl.int64)[:, None] * SPAN + (start + tl.arange(0, BLOCK_N))[None, :]
    factors = hidden_scales_ptr + tile * steps * BLOCK_M + m
    held_inputs, held_factors = (), ()
    if HOLDS:  # all inner activations of these rows
        for step in tl.static_range(steps):
            held_inputs += (hidden_desc.load([tile * BLOCK_M, step * STEP]),)  # type: ignore[assignment]
            held_factors += (tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share,)  # type: ignore[assignment]
    for block in range(BLOCKS):
        row = expert * SIZE + first + start + block * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if HOLDS:
            for step in tl.static_range(steps):
                acc = _add_product(
                    acc, held_inputs[step], w_desc, w_scales_ptr, held_factors[step], row, step,
                    WIDTH, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
                )  # fmt: skip
        else:
            for step in range(steps):
                inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
                factor = tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share
                acc = _add_product(
                    acc, inputs, w_desc, w_scales_ptr, factor, row, step,
                    WIDTH, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
                )  # fmt: skip
        if IN_FP8 and not BY_GROUP:
            acc *= tl.load(w_scales_ptr + row + tl.arange(0, BLOCK_N))[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + row + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        if not IN_FP8:
            acc *= share[:, None]
        tl.store(out + block * BLOCK_N, acc.to(part_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _add_product(
    acc,
    inputs,
    w_desc,
    w_scales_ptr,
    factor,
    row,
    step,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the product of one step to acc [rows, outputs]. In FP8 it is multiplied by the rows' `factor` and, with
    BY_GROUP, by the weights' scale."""
    groups: tl.constexpr = WIDTH // 128
    weights = w_desc.load([row, step * STEP])
    if IN_FP8:
        part = tl.dot(inputs, tl.trans(weights))
        if BY_GROUP and BLOCK_N == 64:
            acc += part * (factor * tl.load(w_scales_ptr + row // 64 * groups + step * STEP // 128))[:, None]
        elif BY_GROUP:
            rows_of_scales = row // 64 + tl.arange(0, BLOCK_N) // 64
            scale = tl.load(w_scales_ptr + rows_of_scales * groups + step * STEP // 128)
            acc += part * (factor[:, None] * scale[None, :])
        else:
            acc += part * factor[:, None]
    else:
        if INTERPRETED:
            inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
        acc = tl.dot(inputs, tl.trans(weights), acc)
    return acc
