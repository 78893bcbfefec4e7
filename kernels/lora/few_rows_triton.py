# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Adapters within the launch of a product of few rows: device functions of `aerie.kernels.gemm.skinny_triton`.

The first programs of the launch compute A x, while the others read W. A program that has its tile of x W^T waits for
all of the first programs, which has a cost only if they are slower than a tile, and adds B (A x). It cannot wait for
ever: programs start in order of their index, and the first ones wait for no other.
"""

import triton
import triton.language as tl

from aerie.kernels.lora.product_triton import _NONE, _next_place

SLICES = tl.constexpr(4)  # of the inputs, whose sums are added in order
GATHERED_ROWS = tl.constexpr(32)  # up to here each row reads its adapter's B; more rows multiply by place


@triton.jit
def add_down(
    program,
    x_ptr,
    x_row_stride,
    down_ptr,
    place_ptr,
    inner_ptr,
    counter_ptr,
    rows,
    IN: tl.constexpr,
    INNER: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute this program's share of A x, and count the program. The units of a place are a slice of the inputs and
    16 rows of A each; program i has the i-th unit and every PROGRAMS-th after it."""
    CHUNKS: tl.constexpr = INNER // 16
    SPAN: tl.constexpr = (IN + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K) * BLOCK_K
    m = tl.arange(0, BLOCK_M)
    places = tl.load(place_ptr + m, mask=m < rows, other=-1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    unit, end = program, CHUNKS * SLICES
    place = _next_place(places, -1)
    while place < _NONE:
        ours = (places == place)[None, :]
        matrix = down_ptr + place.to(tl.int64) * (INNER * IN)
        while unit < end:
            local = unit - (end - CHUNKS * SLICES)
            r, piece = local % CHUNKS * 16 + tl.arange(0, 16), local // CHUNKS
            acc = tl.zeros([16, BLOCK_M], tl.float32)
            for start in range(0, SPAN, BLOCK_K):
                k = piece * SPAN + start + tl.arange(0, BLOCK_K)
                weights = tl.load(matrix + r[:, None] * IN + k[None, :], mask=(k < IN)[None, :], other=0.0)
                inputs = tl.load(
                    x_ptr + m.to(tl.int64)[None, :] * x_row_stride + k[:, None],
                    mask=ours & (k < IN)[:, None],
                    other=0.0,
                )
                if UPCAST:
                    weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
                acc = tl.dot(weights, inputs, acc)
            tl.store(inner_ptr + (piece * rows + m)[None, :] * INNER + r[:, None], acc, mask=ours)
            unit += PROGRAMS
        end += CHUNKS * SLICES
        place = _next_place(places, place)
    tl.debug_barrier()  # orders the stores of all threads before the release
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def await_down(counter_ptr, PROGRAMS: tl.constexpr):
    """Wait for the programs of `add_down`."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < PROGRAMS:
        pass


@triton.jit
def up_of_rows(up_ptr, places, n, first, N: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Read columns `first` and on of B's rows n, of each row's adapter: [n, rows, CHUNK]. Zero without an adapter."""
    r = first + tl.arange(0, CHUNK)
    matrices = up_ptr + places.to(tl.int64)[None, :, None] * (N * RANK)
    there = (places >= 0)[None, :, None] & (n < N)[:, None, None]
    return tl.load(matrices + n[:, None, None] * RANK + r[None, None, :], mask=there, other=0.0)


@triton.jit
def inner_of_rows(inner_ptr, places, column, rows, INNER: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """Add the slices of A x, columns `column` and on: [rows, CHUNK]. Reads from L2, because L1 is not coherent."""
    m = tl.arange(0, BLOCK_M)
    cells = inner_ptr + m[:, None] * INNER + (column + tl.arange(0, CHUNK))[None, :]
    inner = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    for piece in tl.static_range(SLICES):
        inner += tl.load(cells + piece * rows * INNER, mask=(places >= 0)[:, None], other=0.0, cache_modifier=".cg")
    return inner


@triton.jit
def with_up(
    acc,
    up,
    up_ptr,
    inner_ptr,
    places,
    n,
    column,
    rows,
    N: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc [n, rows] + B (A x). up: `up_of_rows` of the first columns, if read. column: of A x, the part's
    first."""
    if BLOCK_M > GATHERED_ROWS:
        place = _next_place(places, -1)
        while place < _NONE:
            ours = tl.where(places == place, place, -1)
            matrix = up_ptr + place.to(tl.int64) * (N * RANK) + n[:, None] * RANK + tl.arange(0, CHUNK)[None, :]
            for first in range(0, RANK, CHUNK):
                weights = tl.load(matrix + first, mask=(n < N)[:, None], other=0.0)
                inner = inner_of_rows(inner_ptr, ours, column + first, rows, INNER, BLOCK_M, CHUNK)
                inner = inner.to(up_ptr.dtype.element_ty)
                if UPCAST:
                    weights, inner = weights.to(tl.float32), inner.to(tl.float32)
                acc = tl.dot(weights, tl.trans(inner), acc)
            place = _next_place(places, place)
    else:
        part = tl.zeros_like(acc)
        for first in tl.range(0, RANK, CHUNK, num_stages=1):
            read = up_of_rows(up_ptr, places, n, first, N, RANK, CHUNK) if RANK > CHUNK else up
            inner = inner_of_rows(inner_ptr, places, column + first, rows, INNER, BLOCK_M, CHUNK)
            part += tl.sum(read.to(tl.float32) * inner[None, :, :], 2)
        acc = tl.where((places >= 0)[None, :], acc + part, acc)
    return acc
