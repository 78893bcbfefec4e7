# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""y = x W^T, or silu(x G^T) * (x U^T), for 33 to some hundred rows and a weight of 4 or 8 bits: blocks of 64 outputs by
up to 128 rows.

As in `stream_triton`, each lane loads the codes of its own part of a tensor core's first operand. Here the operand is
wgmma's, 64 outputs of four warps, and rows come through tensor maps to shared memory, so that all warps share them.
Weights are rounded to the rows' type with their scale, as dequantised ones are.

The order of inputs in an operand is not that of a row (`workers.ops.packed.weight`): `order_rows` writes rows in the
operand's order before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.ops.interpreter_triton import INTERPRETED
from attention.ops.pdl import pdl_wait
from workers.ops.gemm.splits_triton import comes_last, sum_of_splits
from workers.ops.gemm.workspace import Workspace
from workers.ops.packed.fragments_triton import decode
from workers.ops.packed.stream_triton import TL_TYPES
from workers.ops.packed.tiles import BlockTiles
from workers.ops.packed.weight import PackedWeight


@triton.jit
def _weights(
    codes_base,
    scales_base,
    zeros_base,
    chunk,
    t,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return 64 outputs by the 64 inputs of a chunk, in the order of operands."""
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    words = ()
    for s in tl.static_range(PIECES):
        words = words + (tl.load(codes_base + chunk * (512 * PIECES) + s * 128),)
    halves = ()
    for s in tl.static_range(2):
        start = chunk * 64 + (0 if GROUP % 64 == 0 or GROUP == K else 32 * s)
        if GROUP == 16:
            start += t // 2 * 16
        start = tl.minimum(start, K - 1)
        scale = tl.load(scales_base + start // GROUP * 32)
        zero = scale
        if HAS_ZEROS:
            zero = tl.load(zeros_base + start // GROUP * 32)
        low, high = decode(words[s * (PIECES - 1)], zero, scale, 0, s, CODE, HAS_ZEROS, SCALE_TYPE, TYPE, INTERPRETED)
        halves = halves + (tl.join(low, high),)
    pairs = tl.join(halves[0], halves[1])
    low = (pairs & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True)
    # i g t u h r s p to i h g, s r u t p
    numbers = tl.reshape(tl.join(low, high), [4, 8, 4, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 4, 1, 6, 5, 3, 2, 7]), [64, 64])


@triton.jit(do_not_specialize=["rows"])
def _packed_blocks(
    x_desc,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    # N: outputs of W; gated: half of them. PAIRED: a program has 64 outputs and another 64.
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    CHUNKS: tl.constexpr = (K + 63) // 64
    GROUPS: tl.constexpr = (CHUNKS * 64 + GROUP - 1) // GROUP
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    row_block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = row_block * BLOCK_M
    index = tl.arange(0, 512)
    i, t, g = index // 128, index // 4 % 4, index // 16 % 8
    block = tile * (2 if PAIRED and not GATED else 1)
    codes_base = codes_ptr + block * (CHUNKS * 512 * PIECES) + i * (128 * PIECES) + index % 128
    scale_words = block * (GROUPS * 32) + g * 4 + i
    # from a block to the other; the last one of an odd number is its own other
    other = N // 64 if GATED else tl.minimum(block + 1, (N + 63) // 64 - 1) - block
    scales_base = scales_ptr.to(tl.pointer_type(tl.int32)) + scale_words
    zeros_base = scales_base
    if HAS_ZEROS:
        zeros_base = zeros_ptr.to(tl.pointer_type(tl.int32)) + scale_words
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([64, BLOCK_M], tl.float32)
    if PAIRED:
        acc_up = tl.zeros([64, BLOCK_M], tl.float32)
    for chunk in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, CHUNKS), num_stages=STAGES):
        inputs = tl.trans(x_desc.load([first_row, chunk * 64]))
        if INTERPRETED:
            inputs = inputs.to(tl.float32)
        weights = _weights(
            codes_base, scales_base, zeros_base, chunk, t, K, CODE, GROUP, HAS_ZEROS, TYPE, SCALE_TYPE, INTERPRETED
        )
        acc = tl.dot(weights.to(tl.float32) if INTERPRETED else weights, inputs, acc)
        if PAIRED:
            weights = _weights(
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
                SCALE_TYPE,
                INTERPRETED,
            )
            acc_up = tl.dot(weights.to(tl.float32) if INTERPRETED else weights, inputs, acc_up)
    n, m = block * 64 + tl.arange(0, 64), first_row + tl.arange(0, BLOCK_M)
    if SPLITS > 1:
        SIZE: tl.constexpr = (128 if PAIRED else 64) * BLOCK_M
        ticket = tile * tl.num_programs(0) + row_block
        cells = part_ptr + ticket * (SPLITS * SIZE)
        cells += tl.arange(0, 64)[:, None] + tl.arange(0, BLOCK_M)[None, :] * 64
        there = (m < rows)[None, :]
        tl.store(cells + split * SIZE, acc, mask=there)
        if PAIRED:
            tl.store(cells + split * SIZE + 64 * BLOCK_M, acc_up, mask=there)
        if not comes_last(ticket_ptr + ticket, SPLITS):
            return
        acc = sum_of_splits(cells, there, SIZE, SPLITS)
        if PAIRED:
            acc_up = sum_of_splits(cells + 64 * BLOCK_M, there, SIZE, SPLITS)
    if GATED:
        if row_scale_ptr is not None:
            acc *= tl.load(row_scale_ptr + n)[:, None]
            acc_up *= tl.load(row_scale_ptr + N + n)[:, None]
        # rounded as the plain product and `silu_mul` round
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(out_ptr.dtype.element_ty).to(tl.float32)
        acc *= acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
        _store(acc, out_ptr, None, None, n, m, rows, N)
    else:
        _store(acc, out_ptr, row_scale_ptr, bias_ptr, n, m, rows, N)
        if PAIRED:
            _store(acc_up, out_ptr, row_scale_ptr, bias_ptr, n + 64, m, rows, N)


@triton.jit
def _store(acc, out_ptr, row_scale_ptr, bias_ptr, n, m, rows, N: tl.constexpr):
    if row_scale_ptr is not None:
        acc *= tl.load(row_scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


@triton.jit
def _order_rows(
    x_ptr, out_ptr, row_stride, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A word of two inputs at r, u, t of a half from t, r, u."""
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = word // 16 * 16 + word % 4 * 4 + word // 4 % 4
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row * row_stride + place, mask=2 * place < K, other=0)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + row * (COLUMNS // 2) + word, pairs, mask=2 * word < COLUMNS)


def order_rows(x: Tensor) -> Tensor:
    """Return rows in the order of operands, padded with zeros to whole chunks: [rows, K'].

    x: [rows, K] of 16 bits, last stride 1, rows at multiples of 16 bytes, K a multiple of 8.
    """
    rows, k = x.shape
    columns = triton.cdiv(k, 64) * 64
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = 1024
    _order_rows[(rows, triton.cdiv(columns // 2, block))](
        x, out, x.stride(0) // 2, K=k, COLUMNS=columns, BLOCK=block, num_warps=4, **pdl_wait(x.device)
    )
    return out


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

    x: rows of `order_rows`.
    weight, out: as for `workers.ops.packed.stream_triton.packed_stream`.
    tiles: from `block_tiles` for these rows; paired if gated.

    Reference: `workers.ops.packed.product.packed_product`.
    """
    (rows, n), k = out.shape, weight.in_features
    assert x.shape == (rows, triton.cdiv(k, 64) * 64) and x.is_contiguous() and out.is_contiguous()
    assert weight.out_features == n * (1 + gated) and not (gated and (n % 64 or bias is not None or not tiles.paired))
    if rows == 0:
        return out
    outputs = 128 if tiles.paired and not gated else 64
    grid = (triton.cdiv(rows, tiles.block_m), triton.cdiv(n, outputs), tiles.splits)
    _packed_blocks[grid](
        TensorDescriptor.from_tensor(x, [tiles.block_m, 64]),
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scale,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        N=n,
        K=k,
        CODE=weight.code,
        GROUP=weight.group,
        BLOCK_M=tiles.block_m,
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
