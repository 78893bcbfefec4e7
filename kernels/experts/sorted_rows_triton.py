# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""GEMMs of `aerie.kernels.experts.many_rows_triton`, over blocks of rows sorted by expert.

WEIGHTS_FIRST: BLOCK_M below 64 (verified batches), and up to 64 in deterministic engines. Weights are the tensor core's
first operand, which has at least 64 rows; products are [outputs, rows].
Otherwise: BLOCK_M of at least 64 (prompts). Rows are the first operand, so a thread has few rows and few scales;
products are [rows, outputs].

A down-projection program computes several blocks of columns for the same rows; the weights of the next block load while
one block is multiplied and written.
"""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import activated, gates_of_pairs
from aerie.kernels.experts.order_triton import block_of_program, clear_counts
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.kv.stored_values_triton import to_fp8


@triton.jit
def _by_output(x, WEIGHTS_FIRST: tl.constexpr):
    """Return x [outputs], to be broadcast to a product."""
    return x[:, None] if WEIGHTS_FIRST else x[None, :]


@triton.jit
def _by_row(x, WEIGHTS_FIRST: tl.constexpr):
    """Return x [rows], to be broadcast to a product."""
    return x[None, :] if WEIGHTS_FIRST else x[:, None]


@triton.jit(do_not_specialize=["shared", "stride"])
def gate_up_of_sorted_rows(
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
    WEIGHTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the activated gate and up products of BLOCK_N columns for one block of rows sorted by expert.

    x_ptr: [rows, SIZE].
    w_desc: tensor map of the weights [experts * 2 * WIDTH, SIZE]. x_scales_ptr, w_scales_ptr: scales, with IN_FP8.
    bias_ptr: [experts, 2 * WIDTH], or None.
    hidden_ptr: [blocks * BLOCK_M, WIDTH], written.
    hidden_scales_ptr: [blocks, WIDTH / BLOCK_N, BLOCK_M] with FP8 rows.
    pair_ptr, expert_ptr, count_ptr, shared, stride: fields of `ExpertOrder`; count_ptr has EXPERTS counts, padded to
        BINS, which are zeroed here.
    row_step, group_step: strides of x's scales.
    alpha, limit, shift, cubic: fields of `GatedActivation`. PLAIN: SwiGLU. CLAMPED, CUBED: limit and cubic are used.
    SIZE, WIDTH: numbers of x, and of the activation.
    STEP: columns of x per product.
    SLOTS: experts of a row, shared ones included.
    IN_FP8: x and weights are FP8; BY_GROUP: with scales per group; else per row and per output.
    """
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
    gate, up = gates_of_pairs(
        x_ptr, w_desc, x_scales_ptr, w_scales_ptr, pair, expert, block, row_step, group_step,
        SIZE, WIDTH, SLOTS, BLOCK_M, BLOCK_N, STEP, IN_FP8, BY_GROUP, WEIGHTS_FIRST, INTERPRETED,
    )  # fmt: skip
    there = n < WIDTH
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * WIDTH) + n
        gate += _by_output(tl.load(biases, mask=there, other=0.0).to(tl.float32), WEIGHTS_FIRST)
        up += _by_output(tl.load(biases + WIDTH, mask=there, other=0.0).to(tl.float32), WEIGHTS_FIRST)
    hidden = activated(gate, up, alpha, limit, shift, cubic, PLAIN, CLAMPED, CUBED)
    at = _by_row((tile * BLOCK_M + m).to(tl.int64), WEIGHTS_FIRST)
    to = hidden_ptr + at * WIDTH + _by_output(n, WEIGHTS_FIRST)
    if IN_FP8:
        scale = scale_of(hidden, 0 if WEIGHTS_FIRST else 1)
        tl.store(hidden_scales_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(to, to_fp8(hidden / _by_row(scale, WEIGHTS_FIRST), INTERPRETED))
    elif WIDTH % BLOCK_N == 0:
        tl.store(to, hidden.to(hidden_ptr.dtype.element_ty))
    else:
        tl.store(to, hidden.to(hidden_ptr.dtype.element_ty), mask=_by_output(there, WEIGHTS_FIRST))


@triton.jit(do_not_specialize=["first", "shared", "stride"])
def down_of_sorted_rows(
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
    WEIGHTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write columns first .. first + SPAN - 1 of a block's weighted down projections; BLOCKS * BLOCK_N per program.

    hidden_desc, w_desc: tensor maps of hidden [blocks * BLOCK_M, WIDTH] and of the weights [experts * SIZE, WIDTH].
    bias_ptr: [experts, SIZE], or None. weight_ptr: [pairs] routing weights. part_ptr: [pairs, SPAN], written.
    HOLDS: keep all inputs of the block in registers; else read them again for each block of columns.
    STEP: columns of hidden per product. Other arguments: `gate_up_of_sorted_rows`.
    """
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
    out = part_ptr + _by_row(pair.to(tl.int64), WEIGHTS_FIRST) * SPAN + _by_output(start + n, WEIGHTS_FIRST)
    factors = hidden_scales_ptr + tile * steps * BLOCK_M + m
    held_inputs, held_factors = (), ()
    if HOLDS:  # all inner activations of these rows
        for step in tl.static_range(steps):
            held_inputs += (hidden_desc.load([tile * BLOCK_M, step * STEP]),)  # type: ignore[assignment]
            held_factors += (tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share,)  # type: ignore[assignment]
    scales = ()  # of the next block's weights, read one block ahead
    if HOLDS and WEIGHTS_FIRST:
        row = expert * SIZE + first + start
        scales = _scales_of_outputs(w_scales_ptr, row, WIDTH, BLOCK_N, STEP, IN_FP8 and BY_GROUP)
    for block in range(BLOCKS):
        row = expert * SIZE + first + start + block * BLOCK_N
        acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHTS_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
        if HOLDS and WEIGHTS_FIRST:
            following = expert * SIZE + first + start + tl.minimum(block + 1, BLOCKS - 1) * BLOCK_N
            next_scales = _scales_of_outputs(w_scales_ptr, following, WIDTH, BLOCK_N, STEP, IN_FP8 and BY_GROUP)
            for step in tl.static_range(steps):
                acc = _add_weights_first(
                    acc, held_inputs[step], w_desc, row, step * STEP, held_factors[step], scales[step],
                    IN_FP8, BY_GROUP, INTERPRETED,
                )  # fmt: skip
            scales = next_scales
        elif HOLDS:
            for step in tl.static_range(steps):
                acc = _add_rows_first(
                    acc, held_inputs[step], w_desc, w_scales_ptr, held_factors[step], row, step,
                    WIDTH, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
                )  # fmt: skip
        else:
            for step in range(steps):
                inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
                factor = tl.load(factors + step * BLOCK_M) * share if IN_FP8 else share
                if WEIGHTS_FIRST:
                    scale = _scale_of_outputs(w_scales_ptr, row, step * STEP, WIDTH, BLOCK_N, IN_FP8 and BY_GROUP)
                    acc = _add_weights_first(
                        acc, inputs, w_desc, row, step * STEP, factor, scale, IN_FP8, BY_GROUP, INTERPRETED
                    )
                else:
                    acc = _add_rows_first(
                        acc, inputs, w_desc, w_scales_ptr, factor, row, step,
                        WIDTH, BLOCK_N, STEP, IN_FP8, BY_GROUP, INTERPRETED,
                    )  # fmt: skip
        if IN_FP8 and not BY_GROUP:
            acc *= _by_output(tl.load(w_scales_ptr + row + n), WEIGHTS_FIRST)
        if bias_ptr is not None:
            acc += _by_output(tl.load(bias_ptr + row + n).to(tl.float32), WEIGHTS_FIRST)
        if not IN_FP8:
            acc *= _by_row(share, WEIGHTS_FIRST)
        tl.store(out + block * BLOCK_N, acc.to(part_ptr.dtype.element_ty), mask=_by_row(inside, WEIGHTS_FIRST))


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
def _add_weights_first(
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


@triton.jit
def _add_rows_first(
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
