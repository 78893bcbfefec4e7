# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T for the few rows of a round, where reading W is all the work. Called by `workers.layers.product` on GPUs.

Between two products of a library memory rests: the next one starts its reads when the kernel in front of it has ended,
and waits a microsecond for the first of them. Here a program is launched while the kernels in front still run
(programmatic dependent launch), brings the first columns of its rows of W into shared memory at once, since weights
depend on nothing, and only then waits for x.

The tile is W's, [BLOCK_N, BLOCK_K] times x^T of at least 16 rows, so that the matrix unit's 64 rows are W's. K is cut
into splits that together fill the device; the program that finishes a tile last adds its splits in their order, so that
equal inputs give equal bits. A row's result depends on the other rows only by which of the table's sizes they fill;
`fixed_rows` computes any number of rows by one size, so that it depends on none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.early_launch import early_launch, launches_early
from attention.kernels.online_softmax import INTERPRETED

MAX_ROWS = 64  # beyond them the library's products are as fast, see tests/bench/RESULTS.md
BLOCK_N = 64
MULTIPROCESSORS = 132  # of an H200: so many programs have one to themselves, and its shared memory
MAX_SPLITS = 16


@triton.jit(do_not_specialize=["rows"])
def _few_rows(x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, ticket_ptr, rows, x_stride, N: tl.constexpr, K: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
              SPAN: tl.constexpr, HEAD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr):
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    live = m < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # rows behind the last of W are read as its last, and not stored
    w = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + split * SPAN
    x = x_ptr + m.to(tl.int64)[:, None] * x_stride + split * SPAN
    if HEAD > 0:
        w_head = tl.load(w + tl.arange(0, HEAD)[None, :])
    if PDL:
        tl.extra.cuda.gdc_wait()
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(HEAD, SPAN, BLOCK_K):
        weights = tl.load(w + k + start)
        inputs = tl.load(x + k + start, mask=live[:, None], other=0.0)
        if UPCAST:
            weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(weights, tl.trans(inputs), acc)
    if HEAD > 0:
        # last, so that the loop's reads start first
        inputs = tl.load(x + tl.arange(0, HEAD)[None, :], mask=live[:, None], other=0.0)
        if UPCAST:
            w_head, inputs = w_head.to(tl.float32), inputs.to(tl.float32)
        acc = tl.dot(w_head, tl.trans(inputs), acc)
    if SPLITS > 1:
        part = part_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(part + split * (BLOCK_N * BLOCK_M), acc)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(ticket_ptr + tile, 0)
        # L1 is not coherent: what other programs wrote is read from L2.
        acc = tl.load(part, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(part + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & live[None, :])


@dataclass(frozen=True)
class FewRowsTiles:
    """How up to block_m rows are multiplied. block_k: columns of a step. head: columns of W read before the wait.
    stages: Triton's."""

    block_m: int
    block_k: int
    splits: int
    head: int
    stages: int


def few_rows_tiles(rows: int, n: int, k: int) -> FewRowsTiles | None:
    """The table, measured on an H200 (tests/bench/RESULTS.md), for a weight [n, k]; None if it does not fit."""
    if rows > MAX_ROWS or k % 128:
        return None
    block_m = max(16, triton.next_power_of_2(rows))
    most = {16: 400, 32: 256, 64: 160}[block_m]
    splits, tiles = 1, triton.cdiv(n, BLOCK_N)
    while 2 * splits * tiles <= most and k % (2 * splits * 128) == 0 and splits < MAX_SPLITS:
        splits *= 2
    span = k // splits
    if block_m == 64 and splits * tiles <= MULTIPROCESSORS and span > 128:
        return FewRowsTiles(block_m, 128, splits, head=128, stages=4)
    head = {16: 256, 32: 256, 64: 128}[block_m]
    if splits > 1 and span > head:
        return FewRowsTiles(block_m, 128, splits, head, stages=3)
    # A long span hides the wait for its first columns by itself, and a head costs it a stage's shared memory.
    return FewRowsTiles(block_m, *{16: (128, splits, 0, 4), 32: (64, splits, 128, 3), 64: (64, splits, 0, 3)}[block_m])


@dataclass(frozen=True)
class Workspace:
    """part: float32 partial sums. tickets: int32, zero between launches. Serves any number of products that run one
    after another on one stream."""

    part: Tensor
    tickets: Tensor

    @staticmethod
    def create(shapes: Sequence[tuple[int, int]], device: torch.device) -> "Workspace":
        """For weights of these shapes [N, K]."""
        cells = num_tiles = 0
        for n, k in shapes:
            for tiles in (few_rows_tiles(rows, n, k) for rows in (16, 32, 64)):
                if tiles is not None and tiles.splits > 1:
                    num_tiles = max(num_tiles, triton.cdiv(n, BLOCK_N))
                    cells = max(cells, triton.cdiv(n, BLOCK_N) * tiles.splits * BLOCK_N * tiles.block_m)
        return Workspace(
            torch.empty(cells, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, out: Tensor | None = None,
    tiles_of: int | None = None,
) -> Tensor:
    """[rows, N] x W^T + b in x's dtype, for x [rows, K] of at most MAX_ROWS rows, last stride 1, and W [N, K]
    contiguous, both of a 16-bit type; K must be a multiple of 128. workspace: made for this shape. out: contiguous, to
    write to instead of new memory. tiles_of: the number of rows whose tiles are used, x's own by default.

    Reference: `torch.nn.functional.linear`.
    """
    rows, (n, k) = x.shape[0], weight.shape
    tiles = few_rows_tiles(tiles_of or rows, n, k)
    assert tiles is not None and rows <= tiles.block_m
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (rows, n) and out.is_contiguous() and out.dtype == x.dtype
    _few_rows[(triton.cdiv(n, BLOCK_N), tiles.splits)](
        x, weight, bias, out, workspace.part, workspace.tickets, rows, x.stride(0), N=n, K=k, BLOCK_M=tiles.block_m,
        BLOCK_N=BLOCK_N, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, SPAN=k // tiles.splits, HEAD=tiles.head,
        HAS_BIAS=bias is not None, UPCAST=INTERPRETED, num_warps=4, num_stages=tiles.stages,
        **early_launch(launches_early(x.device)),
    )
    return out


def fixed_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, out: Tensor | None = None
) -> Tensor:
    """The same for any number of rows, MAX_ROWS in a launch and always in the tiles of so many: a row's bits are a
    function of that row. W is read once for each launch, so that many rows take longer than a library's product."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    for first in range(0, x.shape[0], MAX_ROWS):
        rows = slice(first, first + MAX_ROWS)
        few_rows(x[rows], weight, bias, workspace, out[rows], tiles_of=MAX_ROWS)
    return out
