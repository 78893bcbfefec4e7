# mypy: disable-error-code="assignment, no-untyped-call, no-untyped-def, untyped-decorator, var-annotated"
"""The Triton implementation of `aerie.kernels.packed.product`: chooses kernels by the number of rows.

Two kernels are here. `order_rows` reorders rows for `blocks_triton`, which loads wgmma's operands with tensor maps.
`dequantize_rows` dequantises some outputs of a weight to 16 bits, for large-batch GEMMs with cuBLAS: a lane decodes its
parts of operands (`aerie.kernels.packed.fragments_triton`), 8 adjacent inputs of two outputs, and stores 16 bytes of
each. A number is rounded once; with `row_scale` twice."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.packed.blocks_triton import packed_blocks
from aerie.kernels.packed.fragments_triton import decode
from aerie.kernels.packed.product import PackedProduct
from aerie.kernels.packed.stream_triton import TL_TYPES, packed_stream
from aerie.kernels.packed.tiles import (
    FIXED_BLOCKS,
    FIXED_ROWS,
    BlockTiles,
    StreamTiles,
    fixed_tiles,
    outputs_at_once,
    product_tiles,
)
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
    """Dequantise 64 outputs by WARPS chunks of 64 inputs. first, end: outputs to dequantise; out_ptr begins at `first`.

    CODE: kind of the codes.
    GROUP: inputs that share a scale.
    TYPE, SCALE_TYPE: dtypes of results and of scales.
    """
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


@triton.jit
def _order_rows(
    x_ptr, out_ptr, row_stride, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Move words of two inputs: index (r, u, t) of a half reads index (t, r, u)."""
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


@dataclass(frozen=True)
class TritonPackedProduct(PackedProduct):
    """The product of a packed weight in Triton.

    workspace: at least `packed_workspace_size` for the weight's shape.
    deterministic: whether a row's bits must depend on that row alone.
    """

    workspace: Workspace
    deterministic: bool

    @classmethod
    def of(cls, weight: PackedWeight, options: GEMMOptions) -> "TritonPackedProduct":
        """Implement `aerie.kernels.packed.product.choose_product`: return the product of rows with a final weight."""
        assert options.workspace is not None, "served"
        return cls(weight, options.workspace, options.deterministic)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        rows, n, k = x.shape[0], self.weight.out_features, self.weight.in_features
        if out is None:
            out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        if self.deterministic:
            return self._in_blocks(x, bias, out)
        tiles = product_tiles(rows, n, k, False, self.weight.code, self.weight.group)
        return self._dequantized(x, bias, out) if tiles is None else self._in_tiles(x, bias, out, tiles, False)

    def multiply_gated(self, x: Tensor) -> Tensor:
        rows, n, k = x.shape[0], self.weight.out_features, self.weight.in_features
        if self.deterministic:
            return silu_mul(self.multiply(x, None))
        tiles = product_tiles(rows, n, k, True, self.weight.code, self.weight.group)
        if tiles is None:
            return silu_mul(self.multiply(x, None))
        out = torch.empty((rows, n // 2), dtype=x.dtype, device=x.device)
        return self._in_tiles(x, None, out, tiles, True)

    def _in_tiles(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tiles: StreamTiles | BlockTiles, gated: bool
    ) -> Tensor:
        x = aligned(x)
        if isinstance(tiles, StreamTiles):
            return packed_stream(x, self.weight, bias, self.workspace, tiles, out, gated)
        ordered = x if tiles.direct else order_rows(x)
        return packed_blocks(ordered, self.weight, bias, self.workspace, tiles, out, gated)

    def _in_blocks(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Multiply any number of rows in one order of additions: as many blocks of FIXED_ROWS per launch as fit in the
        workspace."""
        tiles = fixed_tiles(x.shape[0], *self._shape)
        cells, blocks = tiles.part_cells(self._shape[0]), FIXED_BLOCKS
        if cells:
            blocks = min(blocks, self.workspace.part.numel() // cells)
        step = max(1, blocks) * FIXED_ROWS
        for first in range(0, x.shape[0], step):
            rows = slice(first, first + step)
            packed_stream(aligned(x[rows]), self.weight, bias, self.workspace, tiles, out[rows])
        return out

    def _dequantized(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Multiply many rows: dequantise some outputs at a time, and multiply them with cuBLAS while they are in L2."""
        n, k = self._shape
        step = outputs_at_once(n, k)
        scratch = self.workspace.part.view(x.dtype)
        for first in range(0, n, step):
            end = min(n, first + step)
            some = dequantize_rows(self.weight, first, scratch[: (end - first) * k].view(end - first, k))
            if bias is None:
                torch.mm(x, some.t(), out=out[:, first:end])
            else:
                torch.addmm(bias[first:end], x, some.t(), out=out[:, first:end])
        return out

    @property
    def _shape(self) -> tuple[int, int]:
        return self.weight.out_features, self.weight.in_features


def aligned(x: Tensor) -> Tensor:
    """Return x, copied unless its rows are aligned to 16 bytes."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
