# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""y = x W^T for the few rows of a round, where reading W is all the work. Called by `workers.layers.product` on GPUs.

Between two products of a library memory rests: the next one starts its reads when the kernel in front of it has ended,
and waits a microsecond for the first of them. Here a program is launched while the kernels in front still run
(programmatic dependent launch), brings the first columns of its rows of W into shared memory at once, since weights
depend on nothing, and only then waits for x.

The tile is W's, [BLOCK_N, BLOCK_K] times x^T of at least 16 rows, so that the matrix unit's 64 rows are W's. K is cut
into splits that together fill the device; the program that finishes a tile last adds its splits in their order, so that
equal inputs give equal bits. A row's result depends on neither the other rows nor, up to 16, their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.early_launch import launches_early
from attention.kernels.online_softmax import INTERPRETED

MAX_ROWS = 16  # beyond them the library's products are faster, see tests/bench/RESULTS.md
MAX_PROGRAMS = 400  # three for each multiprocessor of an H200
BLOCK_N, BLOCK_K = 64, 128


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
class Workspace:
    """part: float32 partial sums. tickets: int32, zero between launches. Serves any number of products that run one
    after another on one stream."""

    part: Tensor
    tickets: Tensor

    @staticmethod
    def create(shapes: Sequence[tuple[int, int]], device: torch.device) -> "Workspace":
        """For weights of these shapes [N, K]."""
        tiles = max((triton.cdiv(n, BLOCK_N) for n, _ in shapes), default=0)
        return Workspace(
            torch.empty(max(MAX_PROGRAMS, tiles) * BLOCK_N * MAX_ROWS, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )


def num_splits(n: int, k: int) -> int:
    """Into how many spans K is cut for a weight [n, k]; 0 if its shape does not fit the tiles."""
    if k % BLOCK_K:
        return 0
    splits, tiles = 1, triton.cdiv(n, BLOCK_N)
    while 2 * splits * tiles <= MAX_PROGRAMS and k % (2 * splits * BLOCK_K) == 0 and splits < 16:
        splits *= 2
    return splits


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace) -> Tensor:
    """[rows, N] x W^T + b in x's dtype, for x [rows, K] of at most MAX_ROWS rows, last stride 1, and W [N, K]
    contiguous, both of a 16-bit type; `num_splits(N, K)` must not be 0.

    Tiles from a table, measured on an H200 (tests/bench/RESULTS.md). Reference: `torch.nn.functional.linear`.
    """
    rows, (n, k) = x.shape[0], weight.shape
    splits, pdl = num_splits(n, k), launches_early(x.device)
    assert splits > 0 and rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    span = k // splits
    # A long span hides the wait for its first columns by itself, and the head's shared memory costs it a stage.
    head = 2 * BLOCK_K if splits > 1 and span > 2 * BLOCK_K else 0
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    _few_rows[(triton.cdiv(n, BLOCK_N), splits)](
        x, weight, bias, out, workspace.part, workspace.tickets, rows, x.stride(0), N=n, K=k, BLOCK_M=MAX_ROWS,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, SPLITS=splits, SPAN=span, HEAD=head, HAS_BIAS=bias is not None, PDL=pdl,
        UPCAST=INTERPRETED, num_warps=4, num_stages=3 if head else 4, **({"launch_pdl": True} if pdl else {}),
    )
    return out
