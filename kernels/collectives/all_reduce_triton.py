# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""All-reduce of a few rows with residual addition and RMSNorm, in one launch. One program per row.

Every rank writes its row to an inbox on each rank, and sums the words in its own inbox. Each 64-bit word has two 16-bit
numbers and, in its upper half, the call number. The reader polls the words themselves, so there are no flags, fences or
barriers: the latency is one way over NVLink, at twice the bytes (as in NCCL's LL protocol: 8-byte writes arrive whole).

No word is read or overwritten too early, for these reasons. All calls are on one stream, in the same order on every
rank, and an inbox is used with one width:
- A program counts its calls from 1, equally on every rank. Call e uses half e % 2 of the inbox. A word there is from
  call e - 2, or zero, until the peer's word of call e replaces it.
- A rank writes words of call e after its call e - 1 ended. Call e - 1 had seen every peer's words of call e - 1, which
  each peer wrote after its call e - 2 had ended. So no rank still reads the half that is written.
- A program writes before it polls, and all programs of a launch fit on the GPU together (the caller ensures it), so no
  program waits for one that cannot start. Launched early, it waits for all earlier kernels before it writes
  (`aerie.kernels.pdl`).

If a rank never calls, the others poll forever, as with NCCL; the supervisor of the worker group kills them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait


@triton.jit(do_not_specialize=["rank"])  # one compiled kernel for all ranks: the same operations in the same order
def _one_shot_all_reduce(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    inbox_ptr,
    inboxes_ptr,
    epochs_ptr,
    row_stride,
    capacity,
    rank,
    scale_eps,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a row to every rank's inbox, wait for the rows of all ranks, and add them. Words have 16-bit pairs and the
    epoch, so a word that has arrived is recognised without a flag.

    x_ptr, residual_ptr, out_ptr: [rows, row_stride] words; the last two are written.
    weight_ptr: [row_stride] words of two weights of the norm; scale_eps: its epsilon.
    inbox_ptr, inboxes_ptr: this rank's inbox, and the addresses of all inboxes.
    epochs_ptr: [rows] number of all-reduces so far; its lowest bit chooses one of two buffers.
    capacity: rows of a buffer.
    row_stride: words per row. BLOCK: row_stride, padded.
    rank, WORLD: this rank, and the number of ranks.
    NORM: add the sum to the residual, and write its RMSNorm.
    HALF: dtype of the 16-bit numbers.
    PDL: launch before the previous kernel ends, see `aerie.kernels.pdl`.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < row_stride
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0)
    address = tl.load(inboxes_ptr + (rank + 1) % WORLD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch = tl.load(epochs_ptr + row) + 1
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0)
    stamp = epoch.to(tl.int64) << 32
    words = stamp | (x.to(tl.int64) & 0xFFFFFFFF)
    first = ((epoch & 1) * capacity + row) * WORLD * row_stride
    for step in tl.static_range(1, WORLD + 1):  # starts with the next rank, ends with itself
        inbox = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        address = tl.load(inboxes_ptr + (rank + step + 1) % WORLD)
        tl.store(inbox + first + rank * row_stride + column, words, mask=inside)
    if NORM:
        residual = tl.load(residual_ptr + row * row_stride + column, mask=inside, other=0)

    source = tl.arange(0, WORLD)[:, None]
    arrived_ptr = inbox_ptr + first + source * row_stride + column[None, :]
    awaited = inside[None, :] & (source < WORLD)
    arrived = tl.load(arrived_ptr, mask=awaited, other=stamp, volatile=True)
    while tl.min(tl.min(((arrived >> 32).to(tl.int32) == epoch).to(tl.int32), 1), 0) == 0:
        arrived = tl.load(arrived_ptr, mask=awaited, other=stamp, volatile=True)
    tl.debug_barrier()  # all threads have read the old epoch
    tl.store(epochs_ptr + row, epoch)

    arrived = arrived.to(tl.int32)
    even = _in_rank_order(_low(arrived, HALF), source, WORLD).to(HALF)
    odd = _in_rank_order(_high(arrived, HALF), source, WORLD).to(HALF)
    if NORM:
        # rounded like separate kernels, for the same residual stream
        even = (even.to(tl.float32) + _low(residual, HALF)).to(HALF)
        odd = (odd.to(tl.float32) + _high(residual, HALF)).to(HALF)
        tl.store(residual_ptr + row * row_stride + column, _pack(even, odd), mask=inside)
        squares = even.to(tl.float32) * even.to(tl.float32) + odd.to(tl.float32) * odd.to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, 0) / (2 * row_stride) + scale_eps)
        even, odd = even.to(tl.float32) * factor, odd.to(tl.float32) * factor
        if weight.dtype == tl.int64:  # two float32 numbers
            even *= weight.to(tl.int32).to(tl.float32, bitcast=True)
            odd *= (weight >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        else:
            even = even.to(HALF).to(tl.float32) * _low(weight, HALF)
            odd = odd.to(HALF).to(tl.float32) * _high(weight, HALF)
    tl.store(out_ptr + row * row_stride + column, _pack(even.to(HALF), odd.to(HALF)), mask=inside)


@triton.jit
def _in_rank_order(parts, source, WORLD: tl.constexpr):
    """Add the rows of parts [WORLD, BLOCK] one after another, as `aerie.kernels.collectives.all_reduce` does.

    `tl.sum` would add them in the order of the compiler's layout. source: [WORLD, 1] rank of each row.
    """
    total = tl.sum(tl.where(source == 0, parts, 0.0), 0)
    for rank in tl.static_range(1, WORLD):
        total += tl.sum(tl.where(source == rank, parts, 0.0), 0)
    return total


@triton.jit
def _low(pair, HALF: tl.constexpr):
    """Return the first of the two numbers in a 32-bit word, as float32."""
    return pair.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)


@triton.jit
def _high(pair, HALF: tl.constexpr):
    return (pair >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)


@triton.jit
def _pack(even, odd):
    low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)


def one_shot_all_reduce(
    x: Tensor,
    inbox: Tensor,
    inboxes: Tensor,
    epochs: Tensor,
    rank: int,
    out: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Implement `aerie.kernels.collectives.all_reduce.one_shot_all_reduce`: write the sum of x over the ranks to out.

    With norm = (residual, weight, eps): add the sum to residual, and write the RMSNorm of residual to out.

    x, out, residual: [rows, width] bfloat16 or float16, contiguous; residual is written.
    inbox: [2, capacity, ranks, width / 2] int64, words that other ranks write to this one; zero before the first call.
    inboxes: [ranks] int64, addresses of the inboxes of all ranks.
    epochs: [capacity] int32, number of calls so far by row, written.
    """
    rows, width = x.shape
    world, pairs, capacity = inboxes.shape[0], width // 2, inbox.shape[1]
    residual, weight, eps = norm if norm is not None else (x, x, 0.0)
    block = triton.next_power_of_2(pairs)
    weights = weight.view(torch.int64 if weight.dtype == torch.float32 else torch.int32)
    x_pairs, residual_pairs, out_pairs = (t.view(torch.int32) for t in (x, residual, out))
    _one_shot_all_reduce[(rows,)](
        x_pairs,
        residual_pairs,
        weights,
        out_pairs,
        inbox,
        inboxes,
        epochs,
        pairs,
        capacity,
        rank,
        eps,
        WORLD=world,
        NORM=norm is not None,
        HALF=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        BLOCK=block,
        num_warps=num_warps(world, block),
        **pdl_wait(x.device),
    )


def num_warps(world: int, block: int) -> int:
    """Return the warps of a program that holds `block` words from each of `world` ranks."""
    return max(1, min(16, world * block // 256))


_BLOCK = 2048  # numbers per program


@triton.jit(do_not_specialize=["n"])
def _sum_in_order(
    parts_ptr, out_ptr, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """Add the RANKS parts of each of n numbers, in rank order, in WIDE."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.load(parts_ptr + column, mask=inside, other=0.0).to(WIDE)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts_ptr + rank * n.to(tl.int64) + column, mask=inside, other=0.0).to(WIDE)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_in_order(parts: Tensor) -> Tensor:
    """Implement `aerie.kernels.collectives.all_reduce.sum_in_order`: return the sum of the parts, added one after
    another in float32 and rounded once; wider types in their own."""
    ranks, n = parts.shape
    out = torch.empty(n, dtype=parts.dtype, device=parts.device)
    if n:
        wide = tl.float64 if parts.dtype == torch.float64 else tl.float32
        _sum_in_order[(triton.cdiv(n, _BLOCK),)](
            parts, out, n, RANKS=ranks, BLOCK=_BLOCK, WIDE=wide, num_warps=8, **pdl_wait(parts.device)
        )
    return out
