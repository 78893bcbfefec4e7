# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""y = x W^T, or silu(x G^T) * (x U^T), for 9 to 512 rows and a weight of 4 or 8 bits: blocks of 64 outputs by up to 128
rows. `aerie.kernels.packed.tiles` chooses between this kernel and `stream_triton`.

As in `stream_triton`, each lane loads the codes of its own part of a tensor core's first operand, here wgmma's: 64
outputs over four warps. Tensor maps load rows to shared memory for all warps. Weights are multiplied by their scale and
rounded to the rows' dtype, as in dequantisation, unless `BlockTiles.scaled_sums` is set.

The order of inputs in an operand differs from that in a row (`aerie.kernels.packed.weight`). Either `order_rows` first
reorders the rows, or the kernel reads them in the operand's order, 4 bytes at a time (`BlockTiles.direct`)."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.packed.fragments_triton import decode
from aerie.kernels.packed.stream_triton import TL_TYPES
from aerie.kernels.packed.tiles import BlockTiles
from aerie.kernels.packed.weight import PackedWeight
from aerie.kernels.pdl import pdl_wait


@triton.jit
def _joined(operands):
    """Join the first half of a tuple with the second: half as many tensors, with one more dimension."""
    half: tl.constexpr = len(operands) // 2
    joined = ()
    for each in tl.static_range(half):
        joined = joined + (tl.join(operands[each], operands[half + each]),)
    return joined


@triton.jit
def block_weights(
    codes_base,
    scales_base,
    zeros_base,
    first_chunk,
    t,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    COUNT: tl.constexpr,
    ROUNDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the weights of 64 outputs by COUNT chunks (1 or 2) of inputs, in the order of operands.

    SCALE_TYPE: dtype of scales; None: weights are not scaled.
    ROUNDED: steps may reach beyond the last chunk.
    """
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    CHUNKS: tl.constexpr = (K + 63) // 64
    operands = ()
    for c in tl.static_range(COUNT):
        # rows are zero beyond the last chunk
        chunk = tl.minimum(first_chunk + c, CHUNKS - 1) if ROUNDED else first_chunk + c
        words = ()
        for s in tl.static_range(PIECES):
            words = words + (tl.load(codes_base + chunk * (512 * PIECES) + s * 128),)
        for s in tl.static_range(2):
            start = chunk * 64 + (0 if GROUP % 64 == 0 or GROUP == K else 32 * s)
            if GROUP == 16:
                start += t // 2 * 16
            start = tl.minimum(start, K - 1)
            scale = words[s * (PIECES - 1)]
            if SCALE_TYPE is not None:
                scale = tl.load(scales_base + start // GROUP * 32)
            zero = scale
            if HAS_ZEROS:
                zero = tl.load(zeros_base + start // GROUP * 32)
            word = words[s * (PIECES - 1)]
            operands = operands + decode(word, zero, scale, 0, s, CODE, HAS_ZEROS, SCALE_TYPE, TYPE, INTERPRETED)
    operands = _joined(_joined(operands))
    if COUNT == 2:
        operands = _joined(operands)
    low = (operands[0] & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
    high = (operands[0] >> 16).to(tl.int16).to(TYPE, bitcast=True)
    # i g t u h c s r p to i h g, c s r u t p
    numbers = tl.reshape(tl.join(low, high), [4, 8, 4, 2, 2, COUNT, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 4, 1, 5, 6, 7, 3, 2, 8]), [64, 64 * COUNT])


@triton.jit
def _add_product(acc, weights, inputs, scales, SUMS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return acc + weights @ inputs, or acc + scales * (weights @ inputs)."""
    if INTERPRETED:
        weights = weights.to(tl.float32)
    if SUMS:
        return acc + tl.dot(weights, inputs) * scales[:, None]
    else:
        return tl.dot(weights, inputs, acc)


@triton.jit(do_not_specialize=["rows"])
def _packed_blocks(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COUNT: tl.constexpr,
    SUMS: tl.constexpr,
    DIRECT: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    GATED: tl.constexpr,
    PAIRED: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiply BLOCK_M rows with 64 outputs (PAIRED: 128; GATED: 64 of gate and up each) in one of SPLITS parts of K.

    x_ptr: a tensor map of rows from `order_rows`; DIRECT: a pointer to rows in their own order.
    part_ptr: sums of the splits, which the last program of a tile adds.
    N: outputs, in a gated product half of the weight's.
    SPAN: chunks of 64 inputs of a program.
    CODE: kind of the codes.
    GROUP: inputs that share a scale.
    COUNT: chunks multiplied at once: 1 or 2.
    SUMS: multiply sums by scales; else round weights with their scale.
    TYPE, SCALE_TYPE: dtypes of rows and of scales.
    STAGES: stages of the load pipeline.
    INTERPRETED: multiply in float32, for the interpreter.
    """
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    CHUNKS: tl.constexpr = (K + 63) // 64
    GROUPS: tl.constexpr = (CHUNKS * 64 + GROUP - 1) // GROUP
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    BLOCKS: tl.constexpr = (N + 63) // 64
    ROUNDED: tl.constexpr = CHUNKS % COUNT != 0
    OPERAND_SCALE: tl.constexpr = None if SUMS else SCALE_TYPE
    row_block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = row_block * BLOCK_M
    index = tl.arange(0, 512)
    i, t, g = index // 128 % 4, index // 4 % 4, index // 16 % 8
    block = tile * (2 if PAIRED and not GATED else 1)
    codes_base = codes_ptr + block * (CHUNKS * 512 * PIECES) + i * (128 * PIECES) + index % 128
    scale_words = block * (GROUPS * 32) + g * 4 + i
    # a block after the last repeats the last one, and is not stored
    other = BLOCKS if GATED else tl.minimum(block + 1, BLOCKS - 1) - block
    scales_base = scales_ptr.to(tl.pointer_type(tl.int32)) + scale_words
    zeros_base = scales_base
    if HAS_ZEROS:
        zeros_base = zeros_ptr.to(tl.pointer_type(tl.int32)) + scale_words
    if DIRECT:
        # column of a row at each index of operands: from r, u, t, p to t, r, u, p
        place = tl.arange(0, 64 * COUNT)
        ordered = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
        ordered = tl.max_contiguous(tl.multiple_of(ordered, [2]), [2])
        x_rows = x_ptr + tl.minimum(first_row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)[:, None] * row_stride
    lane = tl.arange(0, 64)
    in_block = lane % 8 * 8 + lane // 16 % 4 * 2 + lane // 8 % 2
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([64, BLOCK_M], tl.float32)
    if PAIRED:
        acc_up = tl.zeros([64, BLOCK_M], tl.float32)
    for chunk in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, CHUNKS), COUNT, num_stages=STAGES):
        if DIRECT:
            column = (chunk * 64 + ordered)[None, :]
            if ROUNDED or K % 64 != 0:
                inputs = tl.trans(tl.load(x_rows + column, mask=column < K, other=0.0))
            else:
                inputs = tl.trans(tl.load(x_rows + column))
        else:
            inputs = tl.trans(x_ptr.load([first_row, chunk * 64]))
        if INTERPRETED:
            inputs = inputs.to(tl.float32)
        group = 0 if GROUP == K else tl.minimum(chunk * 64, K - 1) // GROUP
        scales = lane
        if SUMS:
            scales = tl.load(scales_ptr + (block * GROUPS + group) * 64 + in_block).to(tl.float32)
        weights = block_weights(
            codes_base,
            scales_base,
            zeros_base,
            chunk,
            t,
            K,
            CODE,
            GROUP,
            HAS_ZEROS,
            TYPE,
            OPERAND_SCALE,
            COUNT,
            ROUNDED,
            INTERPRETED,
        )
        acc = _add_product(acc, weights, inputs, scales, SUMS, INTERPRETED)
        if PAIRED:
            if SUMS:
                scales = tl.load(scales_ptr + ((block + other) * GROUPS + group) * 64 + in_block).to(tl.float32)
            weights = block_weights(
                codes_base + other * (CHUNKS * 512 * PIECES),
                scales_base + other * (GROUPS * 32),
                zeros_base + other * (GROUPS * 32),
                chunk,
                t,
                K,
                CODE,
                GROUP,
                HAS_ZEROS,
                TYPE,
                OPERAND_SCALE,
                COUNT,
                ROUNDED,
                INTERPRETED,
            )
            acc_up = _add_product(acc_up, weights, inputs, scales, SUMS, INTERPRETED)
    n, m = block * 64 + lane, first_row + tl.arange(0, BLOCK_M)
    if SPLITS > 1:
        SIZE: tl.constexpr = (2 if PAIRED else 1) * 64 * BLOCK_M
        ticket = tile * tl.num_programs(0) + row_block
        cells = part_ptr + ticket * (SPLITS * SIZE)
        cells += lane[:, None] + tl.arange(0, BLOCK_M)[None, :] * 64
        there = (m < rows)[None, :]
        tl.store(cells + split * SIZE, acc, mask=there)
        if PAIRED:
            tl.store(cells + split * SIZE + 64 * BLOCK_M, acc_up, mask=there)
        if not comes_last(ticket_ptr + ticket, SPLITS):
            return
        acc = _sum_of_splits(cells, there, SIZE, SPLITS)
        if PAIRED:
            acc_up = _sum_of_splits(cells + 64 * BLOCK_M, there, SIZE, SPLITS)
    if GATED:
        if row_scale_ptr is not None:
            acc *= tl.load(row_scale_ptr + n, mask=n < N, other=0.0)[:, None]
            acc_up *= tl.load(row_scale_ptr + N + n, mask=n < N, other=0.0)[:, None]
        # rounded like a product followed by `silu_mul`
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(out_ptr.dtype.element_ty).to(tl.float32)
        acc *= acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
        _store(acc, out_ptr, None, None, n, m, rows, N)
    else:
        _store(acc, out_ptr, row_scale_ptr, bias_ptr, n, m, rows, N)
        if PAIRED:
            _store(acc_up, out_ptr, row_scale_ptr, bias_ptr, n + 64, m, rows, N)


@triton.jit
def _sum_of_splits(cells, there, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """`sum_of_splits`, but many parts are loaded one after another, because more registers would allow fewer programs
    per multiprocessor."""
    if SPLITS <= 4:
        acc = sum_of_splits(cells, there, SIZE, SPLITS)
    else:
        acc = sum_of_splits(cells, there, SIZE, 2)
        for split in range(2, SPLITS, 2):
            acc += sum_of_splits(cells + split * SIZE, there, SIZE, 2)
    return acc


@triton.jit
def _store(acc, out_ptr, row_scale_ptr, bias_ptr, n, m, rows, N: tl.constexpr):
    """Store acc [outputs, rows], times the outputs' scales and plus the bias.

    n, m: [outputs], [rows] indices, of which those below N and `rows` exist.
    """
    if row_scale_ptr is not None:
        acc *= tl.load(row_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


def packed_blocks(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: BlockTiles,
    out: Tensor,
    gated: bool = False,
) -> Tensor:
    """Write x W^T + b to `out`; gated: silu(x G^T) * (x U^T), where W is G above U.

    x: rows of `order_rows`; if `tiles.direct`, rows in their own order, last stride 1, aligned to 16 bytes.
    weight, out: as for `aerie.kernels.packed.stream_triton.packed_stream`.
    tiles: from `block_tiles` for this number of rows; paired if gated.

    Reference: `aerie.kernels.packed.product.packed_product`.
    """
    (rows, n), k = out.shape, weight.in_features
    columns = k if tiles.direct else triton.cdiv(k, 64) * 64
    assert x.shape == (rows, columns) and (x.stride(1) == 1 if tiles.direct else x.is_contiguous())
    assert out.is_contiguous() and k % 8 == 0
    assert weight.out_features == n * (1 + gated) and not (gated and (n % 64 or bias is not None or not tiles.paired))
    if rows == 0:
        return out
    outputs = 64 * (2 if tiles.paired and not gated else 1)
    grid = (triton.cdiv(rows, tiles.block_m), triton.cdiv(n, outputs), tiles.splits)
    _packed_blocks[grid](
        x if tiles.direct else TensorDescriptor.from_tensor(x, [tiles.block_m, 64 * tiles.chunks]),
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scale,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        x.stride(0),
        N=n,
        K=k,
        CODE=weight.code,
        GROUP=weight.group,
        BLOCK_M=tiles.block_m,
        COUNT=tiles.chunks,
        SUMS=tiles.scales_sums(k, weight.group),
        DIRECT=tiles.direct,
        SPLITS=tiles.splits,
        SPAN=tiles.span(k),
        GATED=gated,
        PAIRED=tiles.paired,
        TYPE=TL_TYPES[x.dtype],
        SCALE_TYPE=TL_TYPES[weight.scales.dtype],
        STAGES=tiles.stages,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        **pdl_wait(x.device),
    )
    return out
