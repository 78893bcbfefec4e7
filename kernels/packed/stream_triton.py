# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""y = x W^T, or silu(x G^T) * (x U^T), for up to 32 rows and a 4- or 8-bit weight, which is streamed. Deterministic
products of more rows are blocks of 32, in one launch.

A 4-bit weight has a quarter of the bytes of a 16-bit one, so work per byte matters four times as much. Here each lane
loads 16 bytes of codes, its own part of the tensor cores' operands (`aerie.kernels.packed.weight`), and 16 bytes of
rows. Warps use no shared memory and no barrier until the sums are complete. Tensors have the layout of
`fragments_triton`.

A tensor core multiplies 16 outputs with 8 rows (m16n8k16). A mask and an exponent turn codes into 16-bit numbers, and
an exact subtraction removes the zero. The sum of a group is multiplied by its scale in float32.

The warps of a program share the inputs, and so do several programs (split K). The last program adds the splits in
order, so equal inputs give equal bits. A row's result depends on the other rows only through the tiles that the table
chooses. The experts' kernels use the device functions of one step: a lane's loads, and its products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.packed.fragments_triton import add_scaled, decode, multiply
from aerie.kernels.packed.sums_triton import sums_of_warps
from aerie.kernels.packed.tiles import StreamTiles
from aerie.kernels.packed.weight import PackedWeight
from aerie.kernels.pdl import pdl_wait


@triton.jit
def load_codes(base, index, chunk, has, CHUNKS: tl.constexpr, COUNT: tl.constexpr, PIECES: tl.constexpr):
    """Load the codes of COUNT chunks from `chunk` on: per chunk and 16 outputs one tensor (int8: one per half)."""
    codes = ()
    for each in tl.static_range(COUNT):
        for piece in tl.static_range(4 * PIECES):
            cells = base + (chunk + each) * (512 * PIECES) + piece * 128 + index
            codes = codes + (tl.load(cells, mask=has & (chunk + each < CHUNKS), other=0, cache_modifier=".cg"),)
    return codes


@triton.jit
def load_scales(base, t, chunk, has, K: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """Load scales or zeros of COUNT chunks: one tensor per EACH half chunks."""
    scales = ()
    for half in tl.static_range(0, 2 * COUNT, EACH):
        start = chunk * 64 + 32 * half
        if GROUP == 16:
            start += t // 2 * 16
        scales = scales + (tl.load(base + start // GROUP * 32, mask=has & (start < K), other=0),)
    return scales


@triton.jit
def load_inputs(base, g, t, row_stride, rows, chunk, K: tl.constexpr, ROW_TILES: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT chunks of rows from `chunk` on: both halves of a chunk for each 8 rows."""
    inputs = ()
    for each in tl.static_range(COUNT):
        for j in tl.static_range(ROW_TILES):
            for half in tl.static_range(2):
                column = (chunk + each) * 64 + 32 * half
                there = (g + 8 * j < rows) & (column + 8 * t < K)
                inputs = inputs + (tl.load(base + 8 * j * row_stride + column // 2, mask=there, other=0),)
    return inputs


@triton.jit
def add_products(
    acc,
    codes,
    scales,
    zeros,
    inputs,
    each: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EACH: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return the accumulators plus the products of loaded chunk number `each`, of 64 inputs.

    acc: 4 * ROW_TILES accumulators, for 16 outputs and 8 rows each.
    codes, scales, zeros, inputs: from `load_codes`, `load_scales` and `load_inputs`.
    EACH: half chunks that share a scale, at most 2 in a chunk.
    """
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    # scales of groups of 16 differ between lanes of an operand, so weights are scaled; exact for e2m1
    OPERAND_SCALE: tl.constexpr = SCALE_TYPE if GROUP == 16 else None
    FIRST: tl.constexpr = 2 * each // EACH
    SECOND: tl.constexpr = (2 * each + 1) // EACH
    sums = ()
    for i in tl.static_range(4):
        words = codes[(4 * each + i) * PIECES], codes[(4 * each + i) * PIECES + PIECES - 1]
        scale, scale2 = scales[FIRST], scales[SECOND]
        zero, zero2 = scale, scale2
        if HAS_ZEROS:
            zero, zero2 = zeros[FIRST], zeros[SECOND]
        low, high = decode(words[0], zero, scale, i, 0, CODE, HAS_ZEROS, OPERAND_SCALE, TYPE, INTERPRETED)
        low2, high2 = decode(words[1], zero2, scale2, i, 1, CODE, HAS_ZEROS, OPERAND_SCALE, TYPE, INTERPRETED)
        for j in tl.static_range(ROW_TILES):
            part = acc[i * ROW_TILES + j]
            if GROUP == 16:
                part = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], part, TYPE, INTERPRETED)
                part = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], part, TYPE, INTERPRETED)
            elif EACH > 1:
                first = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], None, TYPE, INTERPRETED)
                first = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], first, TYPE, INTERPRETED)
                part = add_scaled(part, first, scale, i, SCALE_TYPE, INTERPRETED)
            else:
                first = multiply(low, high, inputs[2 * (each * ROW_TILES + j)], None, TYPE, INTERPRETED)
                part = add_scaled(part, first, scale, i, SCALE_TYPE, INTERPRETED)
                second = multiply(low2, high2, inputs[2 * (each * ROW_TILES + j) + 1], None, TYPE, INTERPRETED)
                part = add_scaled(part, second, scale2, i, SCALE_TYPE, INTERPRETED)
            sums = sums + (part,)
    return sums


@triton.jit(do_not_specialize=["rows"])
def _packed_stream(
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
    ROW_TILES: tl.constexpr,
    WARPS_N: tl.constexpr,
    WARPS_K: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiply up to 8 * ROW_TILES rows with 64 * WARPS_N outputs (GATED: 64 of gate and up each) in one of SPLITS
    parts of K.

    part_ptr: sums of the splits, which the last program of a tile adds.
    N: outputs, in a gated product half of the weight's.
    CODE: kind of the codes.
    GROUP: inputs that share a scale.
    WARPS_N, WARPS_K: warps with different outputs, and warps that share a sum.
    IN_BLOCKS: there are more rows than a program has, so the grid has blocks of rows.
    COUNT: chunks of 64 inputs that a warp loads at once.
    STEPS: loads of a warp, one after another.
    TYPE, SCALE_TYPE: dtypes of rows and of scales.
    INTERPRETED: multiply in float32, for the interpreter.
    """
    CHUNKS: tl.constexpr = (K + 63) // 64
    GROUPS: tl.constexpr = (CHUNKS * 64 + GROUP - 1) // GROUP
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    # halves of chunks that share a scale
    ONE: tl.constexpr = 2 if GROUP % 64 == 0 else 1
    EACH: tl.constexpr = 2 * COUNT if GROUP % (64 * COUNT) == 0 or GROUP == K else ONE
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    tile, split = tl.program_id(0), tl.program_id(1)
    sums_at = tile  # the sum that this program shares with others
    if IN_BLOCKS:
        first_row = tl.program_id(2) * (8 * ROW_TILES)
        sums_at += tl.program_id(2) * tl.num_programs(0)
        rows -= first_row
        x_ptr += first_row.to(tl.int64) * (2 * row_stride)
        out_ptr += first_row.to(tl.int64) * N
    index = tl.arange(0, WARPS_N * WARPS_K * 128)
    word, warp = index % 128, index // 128
    r, t, g = index % 4, index // 4 % 4, index // 16 % 8
    block = tile + warp % WARPS_N * (N // 64) if GATED else tile * WARPS_N + warp % WARPS_N
    HAS_TAIL: tl.constexpr = (N + 63) // 64 % WARPS_N != 0
    has = block < (N + 63) // 64 if HAS_TAIL and not GATED else block >= 0
    start_chunk = (split * STEPS * WARPS_K + warp // WARPS_N) * COUNT
    codes_base = codes_ptr + block * (CHUNKS * 512 * PIECES)
    scales_base = scales_ptr.to(tl.pointer_type(tl.int32)) + block * (GROUPS * 32) + g * 4 + r
    zeros_base = scales_base
    if HAS_ZEROS:
        zeros_base = zeros_ptr.to(tl.pointer_type(tl.int32)) + block * (GROUPS * 32) + g * 4 + r
    x_base = x_ptr.to(tl.pointer_type(tl.int32)) + g * row_stride + 4 * t + r
    acc = ()
    for _ in tl.static_range(4 * ROW_TILES):
        acc = acc + (tl.zeros([WARPS_N * WARPS_K * 128], tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    codes_ahead = load_codes(codes_base, word, start_chunk, has, CHUNKS, COUNT, PIECES)
    scales_ahead = load_scales(scales_base, t, start_chunk, has, K, GROUP, COUNT, EACH)
    zeros_ahead = ()
    if HAS_ZEROS:
        zeros_ahead = load_scales(zeros_base, t, start_chunk, has, K, GROUP, COUNT, EACH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inputs_ahead = load_inputs(x_base, g, t, row_stride, rows, start_chunk, K, ROW_TILES, COUNT)
    for step in range(STEPS):
        chunk = start_chunk + step * (WARPS_K * COUNT)
        codes, scales, zeros, inputs = codes_ahead, scales_ahead, zeros_ahead, inputs_ahead
        next_chunk, more = chunk + WARPS_K * COUNT, has & (step + 1 < STEPS)
        codes_ahead = load_codes(codes_base, word, next_chunk, more, CHUNKS, COUNT, PIECES)
        scales_ahead = load_scales(scales_base, t, next_chunk, more, K, GROUP, COUNT, EACH)
        if HAS_ZEROS:
            zeros_ahead = load_scales(zeros_base, t, next_chunk, more, K, GROUP, COUNT, EACH)
        inputs_ahead = load_inputs(x_base, g, t, row_stride, rows, next_chunk, K, ROW_TILES, COUNT)
        for each in tl.static_range(COUNT):
            acc = add_products(
                acc,
                codes,
                scales,
                zeros,
                inputs,
                each,
                CODE,
                GROUP,
                HAS_ZEROS,
                ROW_TILES,
                EACH,
                TYPE,
                SCALE_TYPE,
                INTERPRETED,
            )
    # accumulator ROW_TILES i + j, element 128 w + 4 l + r: output 16 i + 8 (r / 2) + g of row 8 j + 2 t + r % 2
    PARTS: tl.constexpr = 4 * ROW_TILES
    WARPS: tl.constexpr = WARPS_N * WARPS_K
    RESULTS: tl.constexpr = (PARTS + WARPS - 1) // WARPS if GATED else (PARTS + WARPS_K - 1) // WARPS_K
    sums = sums_of_warps(acc, PARTS, WARPS_N, WARPS_K, GATED and SPLITS == 1, INTERPRETED)
    if SPLITS > 1:
        cells = part_ptr + sums_at * (SPLITS * PARTS * WARPS_N * 128) + word
        for q in tl.static_range((PARTS + WARPS_K - 1) // WARPS_K):
            part = q * WARPS_K + warp // WARPS_N
            here = cells + ((split * PARTS + part) * WARPS_N + warp % WARPS_N) * 128
            tl.store(here, sums[q], mask=(part < PARTS) & (part % ROW_TILES * 8 + 2 * t < rows))
        if not comes_last(ticket_ptr + sums_at, SPLITS):
            return
        sums = ()
        for q in tl.static_range(RESULTS):
            part = q * WARPS + warp if GATED else q * WARPS_K + warp // WARPS_N
            live = (part < PARTS) & (part % ROW_TILES * 8 + 2 * t < rows)
            if GATED:
                here = cells + part * 256
                sums = sums + (sum_of_splits(here, live, PARTS * 256, SPLITS),)
                sums = sums + (sum_of_splits(here + 128, live, PARTS * 256, SPLITS),)
            else:
                here = cells + (part * WARPS_N + warp % WARPS_N) * 128
                sums = sums + (sum_of_splits(here, live, PARTS * WARPS_N * 128, SPLITS),)
    for q in tl.static_range(RESULTS):
        part = q * WARPS + warp if GATED else q * WARPS_K + warp // WARPS_N
        row = part % ROW_TILES * 8 + 2 * t + r % 2
        n = (tile if GATED else block) * 64 + part // ROW_TILES * 16 + r // 2 * 8 + g
        live = (part < PARTS) & (row < rows) & (n < N)
        if GATED:
            result, up = sums[2 * q], sums[2 * q + 1]
            if row_scale_ptr is not None:
                result *= tl.load(row_scale_ptr + n, mask=live, other=0.0)
                up *= tl.load(row_scale_ptr + N + n, mask=live, other=0.0)
            # rounded like a product followed by `silu_mul`
            result = result.to(out_ptr.dtype.element_ty).to(tl.float32)
            result = (result / (1.0 + tl.exp(-result))).to(out_ptr.dtype.element_ty).to(tl.float32)
            result *= up.to(out_ptr.dtype.element_ty).to(tl.float32)
        else:
            result = sums[q]
            if row_scale_ptr is not None:
                result *= tl.load(row_scale_ptr + n, mask=live, other=0.0)
            if bias_ptr is not None:
                result += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + row.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=live)


TL_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def packed_stream(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: StreamTiles,
    out: Tensor,
    gated: bool = False,
) -> Tensor:
    """Write x W^T + b to `out`; gated: silu(x G^T) * (x U^T), where W is G above U.

    x: [rows, in_features] bfloat16 or float16, last stride 1, rows at multiples of 16 bytes.
    weight: weight of a linear layer, with 16-bit scales; in_features a multiple of 8.
    tiles: from `stream_tiles` or `gated_tiles`. With more rows than `tiles` has, blocks of rows run side by side.
    workspace: at least `StreamTiles.workspace_size` for these blocks.
    out: [rows, N] or [rows, N / 2], contiguous, of 16 or 32 bits.

    Reference: `aerie.kernels.packed.product.packed_product`.
    """
    (rows, n), k = out.shape, weight.in_features
    assert x.shape == (rows, k) and x.stride(1) == 1 and x.stride(0) % 8 == 0 and k % 8 == 0
    blocks = triton.cdiv(rows, 8 * tiles.row_tiles)
    cells, tickets = tiles.workspace_size(n, blocks)
    assert out.is_contiguous() and workspace.part.numel() >= cells and workspace.tickets.numel() >= tickets
    assert weight.out_features == n * (1 + gated) and not (gated and (n % 64 or bias is not None or tiles.warps_n != 2))
    if rows == 0:
        return out
    grid = (n // 64 if gated else triton.cdiv(triton.cdiv(n, 64), tiles.warps_n), tiles.splits, blocks)
    _packed_stream[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scale,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        x.stride(0) // 2,
        N=n,
        K=k,
        CODE=weight.code,
        GROUP=weight.group,
        ROW_TILES=tiles.row_tiles,
        WARPS_N=tiles.warps_n,
        WARPS_K=tiles.warps_k,
        COUNT=tiles.chunks,
        STEPS=tiles.steps(k),
        SPLITS=tiles.splits,
        GATED=gated,
        IN_BLOCKS=blocks > 1,
        TYPE=TL_TYPES[x.dtype],
        SCALE_TYPE=TL_TYPES[weight.scales.dtype],
        INTERPRETED=INTERPRETED,
        num_warps=tiles.warps_n * tiles.warps_k,
        **pdl_wait(x.device),
    )
    return out
