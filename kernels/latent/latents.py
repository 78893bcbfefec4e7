"""Norms of both latents, RoPE of keys and the write of latent rows: the operations of MLA between the projections and
`head_products`; and the expansion of cached latent rows to keys and values per head, for prompt chunks
(`aerie.attention.expansion`).

RoPE rotates adjacent dimensions, as in DeepSeek's checkpoints (`aerie.kernels.rope.rope_store.rotate_pairs`)."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows, quantize_rows
from aerie.kernels.kv.batches import LatentKV
from aerie.kernels.kv.stored_values import FP8, without_nan, write_rows
from aerie.kernels.norm.norm import rms_norm
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.rope.rope_store import Angles, rotate_pairs


def _check(
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
) -> None:
    rows, width = both.shape[-2], kv.rows.shape[2]
    if both.dim() == 2:
        assert both.stride(1) == 1 and both.dtype == row_weight.dtype
    else:
        assert both.dim() == 3 and both.is_contiguous() and both.dtype == torch.float32 and q_weight is not None
    assert row_weight.shape == (kv.latent,) and row_weight.is_contiguous()
    assert q_weight is None or (q_weight.shape == (both.shape[-1] - width,) and q_weight.is_contiguous())
    assert kv.rows.is_contiguous() and slot_mapping.is_contiguous() and angles.index.is_contiguous()
    assert slot_mapping.shape == angles.index.shape == (rows,) and slot_mapping.dtype == torch.int64
    assert angles.cos.dtype == angles.sin.dtype == torch.float32 and angles.cos.shape[-1] == (width - kv.latent) // 2
    assert angles.cos.is_contiguous() and angles.sin.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.latent.latents_triton:normed_latents", on_gpu), contract=_check)
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
    """Write the latent rows of a pass: the latent part after its norm, the rest after RoPE. Return q's part of `both`,
    after its norm if it has one.

    both          [rows, q + latent + rotated], last stride 1; or, if q has a norm, partial sums, float32 [parts, rows,
                  q + latent + rotated], contiguous (`LinearMethod.multiply_apart`)
    q_weight      [q]; None if q has no norm
    row_weight    [latent], in the model's dtype
    angles        of the rows
    kv            written as `aerie.kernels.kv.stored_values.stored`, after rounding to the model's dtype; zeros instead
                  of NaN in the latent part, and NaN in that row's rotated part (`aerie.kernels.kv.stored_values`)
    slot_mapping  [rows] int64 token indices; if rows share an index (padding), any of them is stored
    wanted        FP8 format of the returned q; None: the model's dtype
    fence         see `Prepared.plan`; if false, the next GEMM reads its weight earlier
    fixed         results have the same bits from partial sums as from their sum
    ->            [rows, q]
    """
    width = kv.rows.shape[2]
    both = both if both.dim() == 2 else both.sum(0).to(row_weight.dtype)
    q, row = both[:, :-width], both[:, -width:]
    rotated = rotate_pairs(row[:, kv.latent :].unsqueeze(1), *angles.by_row())
    keys, latents = without_nan(rotated.squeeze(1), rms_norm.reference(row[:, : kv.latent], row_weight, eps))
    write_rows(kv.rows, slot_mapping, torch.cat((latents, keys), dim=-1), kv.scale)
    if q_weight is None:
        return q
    q = rms_norm.reference(q, q_weight, eps)
    return q if wanted is None else quantize_rows.reference(q, wanted.by_group, q.shape[0] > wanted.many)


def _check_expand_latents(rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    assert rows.dim() == 3 and rows.is_contiguous() and weight.is_contiguous() and rows.dtype in (weight.dtype, FP8)
    assert weight.shape[1] % 16 == 0 and (rows.shape[2] - weight.shape[1]).bit_count() == 1
    assert tokens.dtype == torch.int64 and tokens.is_contiguous()
    assert ends.dtype == torch.int32 and ends.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.latent.latents_triton:expand_latents", on_gpu),
    contract=_check_expand_latents,
)
def expand_latents(
    rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return latent rows times `weight`, and their RoPE parts, in weight's dtype.

    rows    [pages, page_size, latent + rotated], contiguous; rotated a power of two, latent a multiple of 16
    tokens  [T] int64, token indices into all pages
    ends    [chunks + 1] int32: start of each chunk's tokens, and the last chunk's end, after which results are
            undefined
    weight  [N, latent], contiguous; of rows' dtype, unless that is FP8
    scale   factor on rows (`LatentKV.scale`)
    ->      [T, N]; [T, rotated]
    """
    chosen, latent = _rows_of(rows, tokens, weight.dtype), weight.shape[1]
    if rows.dtype != FP8:
        return linear(chosen[:, :latent], weight), chosen[:, latent:]
    return linear(chosen[:, :latent], weight) * scale, chosen[:, latent:] * scale


def cached_latents(kv: LatentKV, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cached latents without their rotated parts, times the KV's scale: [T, latent] of dtype. tokens: as for
    `expand_latents`."""
    latents = _rows_of(kv.rows, tokens, dtype)[:, : kv.latent]
    return latents if kv.scale == 1.0 else latents * kv.scale


def _rows_of(rows: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latent rows [T, latent + rotated] of dtype, without the scale."""
    flat = rows.view(-1, rows.shape[2])
    if rows.dtype != FP8:
        return flat[tokens]
    return flat.view(torch.uint8)[tokens].view(FP8).to(dtype)
