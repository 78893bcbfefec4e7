# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
"""Dequantises some outputs of a low-bit weight to 16 bits, for large-batch GEMMs with cuBLAS.

A lane decodes its parts of operands (`aerie.kernels.packed.fragments_triton`), 8 adjacent inputs of two outputs,
and stores 16 bytes of each. A number is rounded once; with `row_scale` twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.packed.fragments_triton import decode
from aerie.kernels.packed.stream_triton import TL_TYPES
from aerie.kernels.packed.weight import TILE, PackedWeight
from aerie.kernels.pdl import pdl_wait

WARPS = 4


@triton.jit(do_not_specialize=["first"])
def _dequantize(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first,
    end,
    K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    CHUNKS: tl.constexpr = (K + 63) // 64
    GROUPS: tl.constexpr = (CHUNKS * 64 + GROUP - 1) // GROUP
    index = tl.arange(0, WARPS * 128)
    word, r, t, g = index % 128, index % 4, index // 4 % 4, index // 16 % 8
    block = first // 64 + tl.program_id(0)
    chunk = tl.program_id(1) * WARPS + index // 128
    has = chunk < CHUNKS
    codes = ()
    for piece in tl.static_range(4 * PIECES):
        cells = codes_ptr + (block.to(tl.int64) * CHUNKS + chunk) * (512 * PIECES) + piece * 128 + word
        codes = codes + (tl.load(cells, mask=has, other=0, cache_modifier=".cg"),)
    scales_base = scales_ptr.to(tl.pointer_type(tl.int32)) + block * (GROUPS * 32) + g * 4 + r
    if zeros_ptr is not None:
        zeros_base = zeros_ptr.to(tl.pointer_type(tl.int32)) + block * (GROUPS * 32) + g * 4 + r
    scales, zeros = (), ()
    for s in tl.static_range(2):
        start = chunk * 64 + 32 * s
        if GROUP == 16:
            start += t // 2 * 16
        scales = scales + (tl.load(scales_base + start // GROUP * 32, mask=start < K, other=0),)
        if zeros_ptr is not None:
            zeros = zeros + (tl.load(zeros_base + start // GROUP * 32, mask=start < K, other=0),)
        else:
            zeros = zeros + (scales[s],)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    out = out_ptr.to(tl.pointer_type(tl.int32))
    for i in tl.static_range(4):
        for s in tl.static_range(2):
            words = codes[i * PIECES + s * (PIECES - 1)]
            low, high = decode(
                words, zeros[s], scales[s], i, s, CODE, zeros_ptr is not None, SCALE_TYPE, TYPE, INTERPRETED
            )
            # g, t, u, h, operand: to h, and operand and u
            both = tl.reshape(tl.join(low, high), [WARPS, 32, 2, 2, 2])
            pair = tl.split(tl.permute(both, [0, 1, 4, 2, 3]))
            column = chunk * 64 + 32 * s + 8 * t
            for h in tl.static_range(2):
                n = block * 64 + 16 * i + 8 * h + g
                cells = out + (n - first).to(tl.int64) * (K // 2) + column // 2 + r
                tl.store(cells, tl.reshape(pair[h], [WARPS * 128]), mask=(column < K) & (n < end))


def dequantize_rows(weight: PackedWeight, first: int, out: Tensor) -> Tensor:
    """Write the weight's rows from output `first` on to `out` and return it.

    weight: weight of a linear layer; 16-bit scales; in_features a multiple of 8.
    first: a multiple of 64.
    out: [outputs, in_features] bfloat16 or float16, contiguous.

    Reference: rows of `aerie.kernels.packed.weight.dequantize`.
    """
    n, k = out.shape
    assert k == weight.in_features and k % 8 == 0 and first % TILE == 0 and out.is_contiguous()
    assert first + n <= weight.out_features
    _dequantize[(triton.cdiv(n, TILE), triton.cdiv(triton.cdiv(k, TILE), WARPS))](
        weight.codes,
        weight.scales,
        weight.zeros,
        out,
        first,
        first + n,
        K=k,
        CODE=weight.code,
        GROUP=weight.group,
        TYPE=TL_TYPES[out.dtype],
        SCALE_TYPE=TL_TYPES[weight.scales.dtype],
        WARPS=WARPS,
        INTERPRETED=INTERPRETED,
        num_warps=WARPS,
        **pdl_wait(out.device),
    )
    return out if weight.row_scale is None else out.mul_(weight.row_scale[first : first + n, None])
