# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Adapters within the launch of a product of few rows: device functions of `aerie.kernels.gemm.skinny_triton`.

The first programs of the launch compute A x, while the others read W. A program that has its tile of x W^T waits for
all of the first programs, which has a cost only if they are slower than a tile, and adds B (A x). It cannot wait for
ever: programs start in order of their index, and the first ones wait for no other.
"""

import triton
import triton.language as tl

from aerie.kernels.lora.product_triton import NONE, next_index

SLICES = tl.constexpr(4)  # slices of the inputs, whose sums are added in order


@triton.jit
def four_indices(indices, index):
    """The four smallest indices after `index` that a row has; `NONE` from where on there is none."""
    first = next_index(indices, index)
    second = next_index(indices, first)
    third = next_index(indices, second)
    return first, second, third, next_index(indices, third)


@triton.jit
def _owners(first, second, third, fourth, RANKS: tl.constexpr):
    """[64]: each of the first 64 / RANKS indices RANKS times; and the last of these indices."""
    last = first if RANKS == 64 else second if RANKS == 32 else fourth
    number = tl.arange(0, 64) // RANKS
    owners = tl.where(number < 2, tl.where(number == 0, first, second), tl.where(number == 2, third, fourth))
    return owners, last


@triton.jit
def add_down(
    program,
    x_ptr,
    x_row_stride,
    down_ptr,
    index_ptr,
    inner_ptr,
    counter_ptr,
    rows,
    IN: tl.constexpr,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute this program's share of A x, and count the program. The tensor core's 64 rows are RANKS rows of A of each
    of up to four indices, so that enough of A is on its way. A unit of work is a slice of the inputs and RANKS
    rows; program i has the i-th unit and every PROGRAMS-th after it."""
    BLOCK_K: tl.constexpr = 256 if BLOCK_M <= 32 else 128  # all stages fit in the product's shared memory
    CHUNKS: tl.constexpr = INNER // RANKS
    SPAN: tl.constexpr = (IN + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K) * BLOCK_K
    m = tl.arange(0, BLOCK_M)
    indices = tl.load(index_ptr + m, mask=m < rows, other=-1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    unit, end = program, CHUNKS * SLICES
    first, second, third, fourth = four_indices(indices, -1)
    while first < NONE:
        owners, last = _owners(first, second, third, fourth, RANKS)
        matrices = down_ptr + owners.to(tl.int64)[:, None] * (INNER * IN)
        while unit < end:
            local = unit - (end - CHUNKS * SLICES)
            r, piece = local % CHUNKS * RANKS + tl.arange(0, 64) % RANKS, local // CHUNKS
            acc = tl.zeros([64, BLOCK_M], tl.float32)
            for start in range(0, SPAN, BLOCK_K):
                k = piece * SPAN + start + tl.arange(0, BLOCK_K)
                there = (owners < NONE)[:, None] & (k < IN)[None, :]
                weights = tl.load(matrices + r[:, None] * IN + k[None, :], mask=there, other=0.0)
                inputs = tl.load(
                    x_ptr + m.to(tl.int64)[None, :] * x_row_stride + k[:, None],
                    mask=(m < rows)[None, :] & (k < IN)[:, None],
                    other=0.0,
                )
                if UPCAST:
                    weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
                acc = tl.dot(weights, inputs, acc)
            cells = inner_ptr + (piece * rows + m)[None, :] * INNER + r[:, None]
            tl.store(cells, acc, mask=owners[:, None] == indices[None, :])
            unit += PROGRAMS
        end += CHUNKS * SLICES
        first, second, third, fourth = four_indices(indices, last)
    tl.debug_barrier()  # orders the stores of all threads before the release
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def await_down(counter_ptr, PROGRAMS: tl.constexpr):
    """Wait for the programs of `add_down`."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < PROGRAMS:
        pass


@triton.jit
def up_of_rows(up_ptr, indices, n, first, N: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Read columns `first` and on of B's rows n, of each row's adapter: [n, rows, CHUNK]. Zero without an adapter."""
    r = first + tl.arange(0, CHUNK)
    matrices = up_ptr + indices.to(tl.int64)[None, :, None] * (N * RANK)
    there = (indices >= 0)[None, :, None] & (n < N)[:, None, None]
    return tl.load(matrices + n[:, None, None] * RANK + r[None, None, :], mask=there, other=0.0)


@triton.jit
def inner_of_rows(inner_ptr, there, columns, rows, INNER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Add the slices of A x: [rows, columns], zero where not `there`. Reads from L2, because L1 is not coherent."""
    cells = inner_ptr + tl.arange(0, BLOCK_M)[:, None] * INNER + columns[None, :]
    inner = tl.load(cells, mask=there, other=0.0, cache_modifier=".cg")
    for piece in tl.static_range(1, SLICES):
        inner += tl.load(cells + piece * rows * INNER, mask=there, other=0.0, cache_modifier=".cg")
    return inner


@triton.jit
def up_of_adapters(
    up_ptr, first, second, third, fourth, n, begin, N: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Read RANKS columns, from `begin`, of B's rows n, of the adapters at up to four indices: [n, 64]. Zero without an
    adapter."""
    owners, _ = _owners(first, second, third, fourth, RANKS)
    r = begin + tl.arange(0, 64) % RANKS
    matrices = up_ptr + owners.to(tl.int64)[None, :] * (N * RANK) + n[:, None] * RANK + r[None, :]
    return tl.load(matrices, mask=(owners < NONE)[None, :] & (n < N)[:, None], other=0.0)


@triton.jit
def _add_up(
    part, up, inner_ptr, indices, first, second, third, fourth, column, rows,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, RANKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return part [n, rows] + B (A x) for `up` of `up_of_adapters`. column: the first of A x."""
    owners, _ = _owners(first, second, third, fourth, RANKS)
    is_own, columns = indices[:, None] == owners[None, :], column + tl.arange(0, 64) % RANKS
    inner = inner_of_rows(inner_ptr, is_own, columns, rows, INNER, BLOCK_M).to(up.dtype)
    if UPCAST:
        up, inner = up.to(tl.float32), inner.to(tl.float32)
    return tl.dot(up, tl.trans(inner), part)


@triton.jit
def with_up(
    acc,
    up,
    up_ptr,
    inner_ptr,
    indices,
    first,
    second,
    third,
    fourth,
    n,
    column,
    rows,
    N: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc [n, rows] + B (A x). CHUNK: columns of B that each row reads of its adapter; 0: the tensor core
    multiplies RANKS columns of up to four adapters; first .. fourth: the rows' smallest indices.

    up: the first columns of B: `up_of_adapters`; with a CHUNK `up_of_rows`, if these are all columns.
    column: of A x, the part's first.
    """
    part = acc
    if CHUNK == 0:
        if first < NONE:
            part = _add_up(
                part, up, inner_ptr, indices, first, second, third, fourth, column, rows, INNER, BLOCK_M, RANKS, UPCAST
            )
        begin = RANKS
        while first < NONE:
            for start in tl.range(begin, RANK, RANKS, num_stages=1):
                read = up_of_adapters(up_ptr, first, second, third, fourth, n, start, N, RANK, RANKS)
                part = _add_up(
                    part, read, inner_ptr, indices, first, second, third, fourth, column + start, rows, INNER, BLOCK_M,
                    RANKS, UPCAST,
                )  # fmt: skip
            _, last = _owners(first, second, third, fourth, RANKS)
            first, second, third, fourth = four_indices(indices, last)
            begin = 0
    else:
        there = (indices >= 0)[:, None]
        for begin in tl.range(0, RANK, CHUNK, num_stages=1):
            columns = column + begin + tl.arange(0, CHUNK)
            read = up_of_rows(up_ptr, indices, n, begin, N, RANK, CHUNK) if RANK > CHUNK else up
            inner = inner_of_rows(inner_ptr, there, columns, rows, INNER, BLOCK_M)
            part += tl.sum(read.to(tl.float32) * inner[None, :, :], 2)
    return tl.where((indices >= 0)[None, :], part, acc)
