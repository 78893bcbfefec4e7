# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Adds a tree's suffix to attention over the prefix, for latent rows, in place. All rows see the prefix, so a faster
kernel without masks computes it; this kernel adds the few masked columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.attend.latent_tile_triton import load_latent_rows, load_queries, score_latent_tile
from aerie.kernels.attend.scores import LOG2_E
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import DecodeBatch, LatentKV
from aerie.kernels.pdl import pdl_wait

BLOCK_M = 16  # query rows x heads per program
_WARPS = 4


@triton.jit(do_not_specialize=["mask_request_stride", "mask_row_stride", "table_stride", "suffix_len"])
def _add_suffix(
    q_ptr,
    rows_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    prefix_ptr,
    table_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    mask_request_stride,
    mask_row_stride,
    table_stride,
    suffix_len,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the suffix of one request to the attention of BLOCK_M of its rows x heads.

    out_ptr: [rows, HEADS, D], attention over the prefix, replaced.
    lse_ptr: [rows, HEADS], log2 of its sums of weights.
    mask_ptr: bits of the suffix's columns.
    BLOCK_N: suffix_len, padded.
    D, ROTATED: numbers of a latent row that are key and value, and that belong to the key alone.
    UPCAST: multiply in float32, for the interpreter.
    q_ptr: [requests * ROWS, HEADS, D + ROTATED].
    rows_ptr: [pages, PAGE, D + ROTATED], the latent rows of the pool.
    prefix_ptr: [requests] int32 KV tokens before the suffix of suffix_len tokens.
    table_ptr: [requests, table_stride] int32 page table.
    scale_log2: factor on scores, including log2(e).
    """
    request = tl.program_id(1)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    packed = tl.program_id(0) * BLOCK_M + m
    live = packed < ROWS * HEADS
    row, head = packed // HEADS, packed % HEADS
    bits = tl.load(mask_ptr + request * mask_request_stride + row * mask_row_stride, mask=live, other=0)
    prefix = tl.load(prefix_ptr + request)
    column = prefix + tl.minimum(n, suffix_len - 1)
    page = tl.load(table_ptr + request * table_stride + column // PAGE)
    token = page.to(tl.int64) * PAGE + column % PAGE
    row += request * ROWS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q, q_rotated = load_queries(q_ptr, row, head, live, q_row_stride, q_head_stride, D, ROTATED, UPCAST)
    latent, rotated = load_latent_rows(rows_ptr, token, D, ROTATED)
    scores, latent = score_latent_tile(q, q_rotated, latent, rotated, scale_log2, 1)
    seen = ((bits[:, None] >> n[None, :].to(tl.int64)) & 1) != 0
    scores = tl.where(seen & (n < suffix_len)[None, :], scores, float("-inf"))
    before = tl.load(lse_ptr + row * HEADS + head, mask=live, other=float("-inf"))
    top = tl.maximum(tl.max(scores, 1), before)
    origin = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - origin[:, None])
    share = tl.exp2(before - origin)
    total = share + tl.sum(weights, 1)
    out = out_ptr + ((row * HEADS + head).to(tl.int64) * D)[:, None] + tl.arange(0, D)[None, :]
    # Without a prefix, `out` is uninitialised and may hold NaN.
    acc = tl.load(out, mask=(live & (share > 0.0))[:, None], other=0.0).to(tl.float32) * share[:, None]
    acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


def add_suffix(out: Tensor, lse: Tensor, q: Tensor, kv: LatentKV, batch: DecodeBatch, scale: float) -> None:
    """Convert `out` in place from attention over the prefix to attention over prefix and suffix.

    out: [B * R, heads, latent], contiguous; not read where lse is minus infinity.
    lse: [B * R, heads] float32, log-sum-exp of the prefix's scaled scores, base 2.
    q: [B * R, heads, latent + rotated].

    Reference: `aerie.kernels.attend.references.latent_decode`.
    """
    heads, packed_rows = q.shape[1], batch.rows * q.shape[1]
    assert q.stride(2) == 1 and q.dtype == kv.rows.dtype and kv.rows.is_contiguous() and scale > 0
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    block_n = max(16, triton.next_power_of_2(batch.suffix_len))
    _add_suffix[(-(-packed_rows // BLOCK_M), batch.num_requests)](
        q,
        kv.rows,
        out,
        lse,
        batch.mask,
        batch.prefix_len,
        batch.page_table,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        batch.mask.stride(0),
        batch.mask.stride(1),
        batch.page_table.stride(0),
        batch.suffix_len,
        ROWS=batch.rows,
        HEADS=heads,
        D=kv.latent,
        ROTATED=q.shape[2] - kv.latent,
        PAGE=kv.rows.shape[1],
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        UPCAST=INTERPRETED,
        num_warps=_WARPS,
        **pdl_wait(q.device),
    )
