# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `aerie.kernels.latent.latents`. `_normed_latents`: one launch, one program per row and latent.
`_expand_latents`: only the device knows the number of tokens, so a grid that fills the device loops over the tiles, and
the time of a captured step depends on its actual number of tokens, not on the maximum."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.rows_triton import store_fp8
from aerie.kernels.gemm.splits_triton import sum_of_splits
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.batches import LatentKV
from aerie.kernels.kv.stored_values_triton import as_stored, nan_where, widened, without_nan
from aerie.kernels.norm.norm_triton import normed, num_warps
from aerie.kernels.pdl import pdl_wait
from aerie.kernels.rope.rope_store import Angles


@triton.jit
def _load(pointers, there, part_step, PARTS: tl.constexpr, KEPT: tl.constexpr):
    """Return the sum of all parts in float32, rounded to KEPT like a GEMM's result."""
    return sum_of_splits(pointers, there, part_step, PARTS).to(KEPT).to(tl.float32)


@triton.jit
def _normed_latents(
    both_ptr,
    q_weight_ptr,
    row_weight_ptr,
    q_ptr,
    pool_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    q_scales_ptr,
    inverse_scale,
    both_row_stride,
    part_step,
    q_row_step,
    q_group_step,
    eps,
    PARTS: tl.constexpr,
    Q: tl.constexpr,
    Q_NORMED: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BY_GROUP: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Norm one latent of one row: the key's (program 0), whose row is stored to the pool, or the query's.

    both_ptr: Q numbers of the query's latent, LATENT and ROTATED numbers of the key's; in PARTS parts to be added,
        part_step apart.
    Q_NORMED: write the query's latent to q_ptr; BY_GROUP: in FP8 with scales per group.
    FENCE: wait before triggering (`aerie.kernels.pdl`).
    The other pointers and strides are those of the tensors of `aerie.kernels.latent.latents.normed_latents`.
    """
    row, is_latent = tl.program_id(0).to(tl.int64), tl.program_id(1) == 0
    column, q_column = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_Q)
    inside, q_inside = column < LATENT, q_column < Q
    weight = tl.load(row_weight_ptr + column, mask=inside & is_latent, other=0.0)
    if Q_NORMED:
        q_weight = tl.load(q_weight_ptr + q_column, mask=q_inside & (not is_latent), other=0.0)
    if PDL:
        if not FENCE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if FENCE:  # a fence waits before it triggers: see `aerie.kernels.pdl`
            tl.extra.cuda.gdc_launch_dependents()
    both = both_ptr + row * both_row_stride
    kept = row_weight_ptr.dtype.element_ty
    if is_latent:
        latent = _load(both + Q + column, inside, part_step, PARTS, kept)
        pair = tl.arange(0, ROTATED // 2)
        angle = tl.load(position_ptr + row) * (ROTATED // 2) + pair
        cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
        x = _load(both + Q + LATENT + 2 * pair, None, part_step, PARTS, kept)
        y = _load(both + Q + LATENT + 2 * pair + 1, None, part_step, PARTS, kept)
        target = pool_ptr + tl.load(slot_ptr + row) * (LATENT + ROTATED)
        latent, spoilt = without_nan(normed(latent, weight, LATENT, eps, kept).to(kept), 0)
        first = nan_where(spoilt, x * cos - y * sin).to(kept)
        second = nan_where(spoilt, y * cos + x * sin).to(kept)
        tl.store(target + column, as_stored(latent, pool_ptr, inverse_scale, INTERPRETED), mask=inside)
        tl.store(target + LATENT + 2 * pair, as_stored(first, pool_ptr, inverse_scale, INTERPRETED))
        tl.store(target + LATENT + 2 * pair + 1, as_stored(second, pool_ptr, inverse_scale, INTERPRETED))
    elif Q_NORMED:
        q = _load(both + q_column, q_inside, part_step, PARTS, kept)
        q = normed(q, q_weight, Q, eps, kept).to(kept)
        if q_scales_ptr is None:
            tl.store(q_ptr + row * Q + q_column, q, mask=q_inside)
        else:
            scales = q_scales_ptr + row * q_row_step
            store_fp8(q.to(tl.float32), q_ptr + row * Q, scales, 0, q_group_step, Q, BLOCK_Q, BY_GROUP, INTERPRETED)


def normed_latents(
    both: Tensor,
    q_weight: Tensor | None,
    row_weight: Tensor,
    eps: float,
    angles: Angles,
    kv: LatentKV,
    slot_mapping: Tensor,
    wanted: Fp8Inputs | None = None,
    fence: bool = True,
    fixed: bool = False,
) -> Tensor | Fp8Rows:
    """Implement `aerie.kernels.latent.latents.normed_latents`: write the latent rows of a pass.

    both: outputs of the projections of q and of latent rows, or split-K partial sums of both.
    q_weight, row_weight: of the norms of q (None without one) and of latent rows.
    wanted: FP8 format of the returned q; None: the model's dtype.
    fence: the next kernel waits for this one; else its GEMM reads its weight earlier.
    fixed: partial sums give the same bits as their sum.
    """
    latent, width = kv.latent, kv.rows.shape[2]
    parts = both if both.dim() == 3 else both.unsqueeze(0)
    rows, q_size, rotated = parts.shape[1], parts.shape[2] - width, width - latent
    plain = parts[0, :, :q_size]
    q: Tensor | Fp8Rows = plain
    if q_weight is not None:
        q = plain.new_empty(plain.shape, dtype=row_weight.dtype) if wanted is None else wanted.empty(plain)
    scales = None if isinstance(q, Tensor) else q.scales
    block_q = 1 if q_weight is None else triton.next_power_of_2(q_size)
    block_latent = triton.next_power_of_2(latent)
    _normed_latents[(rows, 1 if q_weight is None else 2)](
        both,
        q_weight,
        row_weight,
        q if isinstance(q, Tensor) else q.values,
        kv.rows,
        angles.cos,
        angles.sin,
        angles.index,
        slot_mapping,
        scales,
        1.0 / kv.scale,
        parts.stride(1),
        parts.stride(0) if parts.shape[0] > 1 else 0,
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        eps,
        PARTS=parts.shape[0],
        Q=q_size,
        Q_NORMED=q_weight is not None,
        LATENT=latent,
        ROTATED=rotated,
        BLOCK_Q=block_q,
        BLOCK_LATENT=block_latent,
        BY_GROUP=wanted is not None and wanted.by_group,
        FENCE=fence,
        INTERPRETED=INTERPRETED,
        # With partial sums each thread reads several numbers in sequence, so more warps share them. The number of warps
        # and the fusion of multiplications and additions decide the bits of a norm.
        num_warps=16 if fixed or parts.shape[0] > 1 else num_warps(max(block_q, block_latent)),
        enable_fp_fusion=not fixed,
        **pdl_wait(both.device),
    )
    return q


@triton.jit(do_not_specialize=["num_chunks"])
def _expand_latents(
    rows_ptr,
    token_ptr,
    end_ptr,
    w_desc,
    kv_ptr,
    k_pe_ptr,
    num_chunks,
    scale,
    N: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Multiply the latent rows of tokens by w_desc [N, LATENT], and copy their RoPE parts. Each program does every
    num_programs-th tile.

    token_ptr: token indices in the pool.
    end_ptr: its element num_chunks is the number of tokens.
    kv_ptr: [tokens, N], written.
    k_pe_ptr: [tokens, ROTATED], written.
    scale: factor by which the pool's rows are multiplied.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tokens = tl.load(end_ptr + num_chunks)
    k, column = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, ROTATED)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M) * tiles_n, tl.num_programs(0)):
        first_n = tile % tiles_n * BLOCK_N
        m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        live = (m < num_tokens)[:, None]
        token = tl.load(token_ptr + m, mask=m < num_tokens, other=0)  # 0 is on the dummy page
        row = rows_ptr + token[:, None] * (LATENT + ROTATED)
        place = m.to(tl.int64)[:, None]
        if first_n == 0:
            k_pe = tl.load(row + LATENT + column)
            if rows_ptr.dtype.element_ty == tl.float8e4nv:
                k_pe = (k_pe.to(tl.float32) * scale).to(k_pe_ptr.dtype.element_ty)
            tl.store(k_pe_ptr + place * ROTATED + column, k_pe, mask=live)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, LATENT, BLOCK_K):
            weights = w_desc.load([first_n, start])
            latent = widened(tl.load(row + start + k), weights.dtype)
            if UPCAST:
                latent, weights = latent.to(tl.float32), weights.to(tl.float32)
            acc = tl.dot(latent, tl.trans(weights), acc, input_precision="ieee")
        n = first_n + tl.arange(0, BLOCK_N)[None, :]
        tl.store(kv_ptr + place * N + n, (acc * scale).to(kv_ptr.dtype.element_ty), mask=live & (n < N))


def expand_latents(
    rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.latent.latents.expand_latents`: return latent rows times `weight`, and their RoPE parts,
    in weight's dtype."""
    (n, latent), width = weight.shape, rows.shape[2]
    kv = torch.empty((tokens.shape[0], n), dtype=weight.dtype, device=rows.device)
    k_pe = torch.empty((tokens.shape[0], width - latent), dtype=weight.dtype, device=rows.device)
    block_m, block_n, warps = (128, 128, 8) if weight.itemsize == 2 else (32, 32, 4)
    block_k = min(64, latent & -latent)
    tiles = triton.cdiv(n, block_n) * triton.cdiv(tokens.shape[0], block_m)
    _expand_latents[(min(tiles, 2 * MULTIPROCESSORS),)](
        rows,
        tokens,
        ends,
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        kv,
        k_pe,
        ends.shape[0] - 1,
        scale,
        N=n,
        LATENT=latent,
        ROTATED=width - latent,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        UPCAST=INTERPRETED,
        num_warps=warps,
        num_stages=3,
    )
    return kv, k_pe
