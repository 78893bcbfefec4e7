# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernel of `aerie.kernels.latent.expand_latents`.

Only the device knows the number of tokens. A grid that fills the device loops over the tiles, so the time of a captured
step depends on its actual number of tokens, not on the maximum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.kv.fp8_triton import widened


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
    """`aerie.kernels.latent.expand_latents.expand_latents`."""
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
