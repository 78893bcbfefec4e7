# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T, or silu(x G^T) * (x U^T), for rows and a weight W in FP8; called on GPUs by
`workers.layers.quantization.fp8_linear`.

For few rows this is `skinny_gemm` with half the bytes: W's tile is the matrix unit's first operand, both tiles come
through tensor maps, K is cut into splits whose last program adds them in their order. Every 128 columns the matrix unit
gives a sum that is scaled and added to the others in float32, since it adds eight-bit products with less precision
(arXiv 2412.19437, section 3.3.2), and since W has a scale for each 128 columns.

A row's result depends on the other rows only by which of the table's sizes they fill; `fp8_fixed_rows` computes any
number of rows by one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.pdl import pdl_wait, supports_pdl
from workers.layers.kernels.fp8_rows import GROUP, Fp8Rows
from workers.layers.kernels.skinny_gemm import FIXED_ROWS, MAX_SPLITS, MULTIPROCESSORS, Workspace

MAX_ROWS = 128  # beyond them rows are the matrix unit's first operand: `workers.layers.kernels.fp8_gemm_wide`
SCALE_ROWS = 64  # of W, that share a scale; the checkpoint's blocks of 128 have two


@triton.jit(do_not_specialize=["rows"])
def _fp8_gemm(
    x_desc,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    GATED: tl.constexpr,
    BY_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * SPAN
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales = x_scales_ptr + m * GROUPS + first
    w_scales = w_scales_ptr + tl.minimum(n, N - 1) // 64 * GROUPS + first
    up_scales = w_scales_ptr + (N + tl.minimum(n, N - 1)) // 64 * GROUPS + first
    if BY_GROUP:
        # read one step ahead of their use
        x_scale = tl.load(x_scales, mask=m < rows, other=0.0)
        w_scale = tl.load(w_scales)
        if GATED:
            up_scale = tl.load(up_scales)
    for step in range(SPAN):
        weights = w_desc.load([tile * BLOCK_N, (first + step) * 128])
        inputs = x_desc.load([0, (first + step) * 128])
        if GATED:
            weights_up = w_desc.load([N + tile * BLOCK_N, (first + step) * 128])
        part = tl.dot(weights, tl.trans(inputs))
        if GATED:
            part_up = tl.dot(weights_up, tl.trans(inputs))
        if BY_GROUP:
            more = step + 1 < SPAN
            next_x_scale = tl.load(x_scales + step + 1, mask=(m < rows) & more, other=0.0)
            next_w_scale = tl.load(w_scales + step + 1, mask=more, other=0.0)
            acc += part * (w_scale[:, None] * x_scale[None, :])
            if GATED:
                acc_up += part_up * (up_scale[:, None] * x_scale[None, :])
                up_scale = tl.load(up_scales + step + 1, mask=more, other=0.0)
            x_scale, w_scale = next_x_scale, next_w_scale
        else:
            acc += part
            if GATED:
                acc_up += part_up
    if SPLITS > 1:
        cells = part_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(cells + split * (BLOCK_N * BLOCK_M), acc)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(ticket_ptr + tile, 0)
        # L1 is not coherent: what other programs wrote is read from L2.
        acc = tl.load(cells, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(cells + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)
        acc *= tl.load(w_scales_ptr + n, mask=n < N, other=0.0)[:, None] * x_scale[None, :]
        if GATED:
            acc_up *= tl.load(w_scales_ptr + N + n, mask=n < N, other=0.0)[:, None] * x_scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        # each rounded where the product alone and `silu_mul` round
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (acc / (1.0 + tl.exp(-acc))).to(out_ptr.dtype.element_ty).to(tl.float32)
        acc *= acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < rows)[None, :])


@dataclass(frozen=True)
class Fp8GemmTiles:
    """How up to block_m rows are multiplied.

    block_n: rows of W of a program; of a gated product rows of gates, and as many that they gate.
    splits: programs that share the columns of a tile.
    stages, warps: Triton's.
    """

    block_m: int
    block_n: int
    splits: int
    stages: int
    warps: int


def fp8_gemm_tiles(rows: int, n: int, k: int) -> Fp8GemmTiles | None:
    """For a weight [n, k]; None if it does not fit. As many bytes are on their way to a multiprocessor as with the
    table of `skinny_gemm`, which was measured: tiles of half the bytes, twice as many stages."""
    if rows > MAX_ROWS or k % GROUP:
        return None
    block_m = max(16, triton.next_power_of_2(rows))
    tiles, groups = triton.cdiv(n, 64), k // GROUP
    if tiles > MULTIPROCESSORS:
        return Fp8GemmTiles(block_m, 128, 1, stages=5 if block_m <= 32 else 4, warps=4 if block_m <= 32 else 8)
    splits = 1
    while 2 * splits * tiles <= MULTIPROCESSORS and groups % (2 * splits) == 0 and splits < MAX_SPLITS:
        splits *= 2
    return Fp8GemmTiles(block_m, 64, splits, stages={16: 10, 32: 8}.get(block_m, 6), warps=4)


def fp8_gated_tiles(rows: int, n: int, k: int) -> Fp8GemmTiles | None:
    """The same for gates and what they gate in one weight [n, k]: a program has 64 rows of each; None where there are
    so few that the columns would have to be split."""
    tiles = fp8_gemm_tiles(rows, n, k)
    if tiles is None or tiles.block_n < 128 or n // 2 % SCALE_ROWS:
        return None
    return Fp8GemmTiles(tiles.block_m, 64, 1, tiles.stages, warps=4 if tiles.block_m <= 64 else 8)


def fp8_workspace_size(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Cells and tickets of a `Workspace` for weights of these shapes [N, K]."""
    cells = num_tiles = 0
    for n, k in shapes:
        for tiles in (fp8_gemm_tiles(rows, n, k) for rows in (16, 32, 64, MAX_ROWS)):
            if tiles is not None and tiles.splits > 1:
                tiles_of_w = triton.cdiv(n, tiles.block_n)
                num_tiles = max(num_tiles, tiles_of_w)
                cells = max(cells, tiles_of_w * tiles.splits * tiles.block_n * tiles.block_m)
    return cells, num_tiles


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight as the kernels read it.

    values: [N, K] float8_e4m3fn, contiguous, K a multiple of GROUP.
    scales: float32 [ceil(N / SCALE_ROWS), K / GROUP], or [N, 1] with one for each output; contiguous.
    """

    values: Tensor
    scales: Tensor

    @property
    def by_group(self) -> bool:
        return self.scales.shape[0] != self.values.shape[0]


def fp8_gemm(
    x: Fp8Rows,
    weight: Fp8Matrix,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: Fp8GemmTiles,
    out: Tensor,
    gated: bool = False,
) -> Tensor:
    """out [rows, N] = x W^T + b, in out's type of 16 or 32 bits, contiguous. gated: W is gates above what they gate
    [2 N, K], and out is silu(x G^T) * (x U^T).

    x: of `quantize_rows`, with scales of groups if W has such, else of whole rows.
    tiles: of `fp8_gemm_tiles`, or of `fp8_gated_tiles`, for at least as many rows.
    workspace: as large as `fp8_workspace_size` says for this shape.

    Reference: `torch.nn.functional.linear` of what both mean.
    """
    (rows, n), k = out.shape, weight.values.shape[1]
    assert rows <= tiles.block_m and x.values.shape == (rows, k) and out.is_contiguous()
    assert weight.values.shape[0] == (2 * n if gated else n) and x.scales.is_contiguous()
    assert weight.by_group == (x.scales.shape[1] == k // GROUP) or k == GROUP
    if rows == 0:
        return out
    _fp8_gemm[(triton.cdiv(n, tiles.block_n), tiles.splits)](
        TensorDescriptor.from_tensor(x.values, [tiles.block_m, GROUP]),
        TensorDescriptor.from_tensor(weight.values, [tiles.block_n, GROUP]),
        x.scales,
        weight.scales,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        N=n,
        GROUPS=k // GROUP,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLITS=tiles.splits,
        SPAN=k // GROUP // tiles.splits,
        GATED=gated,
        BY_GROUP=weight.by_group,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl_wait(supports_pdl(x.values.device)),
    )
    return out


def fp8_fixed_rows(x: Fp8Rows, weight: Fp8Matrix, bias: Tensor | None, workspace: Workspace, out: Tensor) -> Tensor:
    """The same for any number of rows, FIXED_ROWS in a launch and always in the tiles of so many: a row's bits are a
    function of that row."""
    tiles = fp8_gemm_tiles(FIXED_ROWS, *weight.values.shape)
    assert tiles is not None
    for first in range(0, out.shape[0], FIXED_ROWS):
        rows = slice(first, first + FIXED_ROWS)
        fp8_gemm(Fp8Rows(x.values[rows], x.scales[rows]), weight, bias, workspace, tiles, out[rows])
    return out
