"""Multi-head latent attention: odd sizes, padding rows, parts of a product, rows in FP8, and DeepSeek-V3's sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.experts.router_gemm import router_gemm
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows, dequantized_rows
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.kv.batches import LatentKV
from aerie.kernels.kv.stored_values import FP8, stored
from aerie.kernels.latent.head_products import head_products, latent_values
from aerie.kernels.latent.latents import expand_latents, normed_latents
from aerie.kernels.rope.rope_store import Angles
from tests.kernels.ops.case import TYPES, Case
from tests.kernels.ops.norm_cases import rows

Arguments = Callable[[torch.device], tuple[Any, ...]]
F32, BF16 = TYPES
EIGHT_BITS = 0.072  # a number's nearest neighbour of eight bits may change: at most 32 of 448


def _angles(count: int, rotated: int, device: torch.device) -> Angles:
    turns = torch.rand((40, rotated // 2), generator=torch.Generator().manual_seed(count)) * 6
    index = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(count))
    return Angles(turns.cos().to(device), turns.sin().to(device), index.to(device))


def _normed(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    normed: bool,
    parts: int,
    wanted: Fp8Inputs | None,
    kv_dtype: torch.dtype | None = None,
) -> Arguments:
    """The last row is padding."""
    count, q, latent, rotated = sizes

    def arguments(device: torch.device) -> tuple[Any, ...]:
        width = q + latent + rotated
        if parts:
            both = rows(parts, count, width, dtype=F32, device=device)
        else:
            both = rows(count, width + 8, dtype=dtype, device=device)[:, :width]
        pages = torch.zeros((5, 16, latent + rotated), dtype=kv_dtype or dtype, device=device)
        kv = LatentKV(pages, latent, 0.4 if kv_dtype else 1.0)
        if kv_dtype is None or device.type == "cuda":  # Triton's interpreter (3.6) has no NaN in FP8
            both[..., 0, q] = float("nan")
        slots = torch.arange(16, 16 + count, device=device)
        slots[-1] = 0
        weight = rows(q, dtype=dtype, device=device) if normed else None
        row_weight = rows(latent, dtype=dtype, device=device, seed=1)
        return both, weight, row_weight, 1e-6, _angles(count, rotated, device), kv, slots, wanted, parts == 0

    return arguments


def _plainly(arguments: tuple[Any, ...], result: Any) -> Any:
    if isinstance(result, Fp8Rows):
        return dequantized_rows(result), result.scales, arguments[5]
    return result, arguments[5]


def _products(count: int, heads: int, k: int, n: int, rotated: int, dtype: torch.dtype, fp8: bool) -> Arguments:
    def arguments(device: torch.device) -> tuple[Any, ...]:
        x = rows(count, heads, k + rotated, dtype=dtype, device=device)
        both = rows(heads, k + n, n if rotated else k, dtype=dtype, device=device)  # keys, then values
        weight = both[:, :k] if rotated else both[:, k:].transpose(1, 2)
        out = Fp8Rows.empty(count, heads * n, True, True, device) if fp8 else x.new_zeros(count, heads, n + rotated)
        return x, weight, out, _angles(count, rotated, device) if rotated else None, count == 21

    return arguments


def _out(arguments: tuple[Any, ...], result: None) -> Tensor:
    out = arguments[2]
    return dequantized_rows(out) if isinstance(out, Fp8Rows) else out


def _values(count: int, heads: int, latent: int, dtype: torch.dtype, together: bool, device: torch.device) -> Any:
    x = rows(count, heads, latent, dtype=dtype, device=device)
    return x, rows(heads * (16 + 128), latent, dtype=dtype, device=device) * 0.1, 16, together, False


def _expansion(latent: int, rotated: int, dtype: torch.dtype, fp8: bool, device: torch.device) -> tuple[Any, ...]:
    """Two chunks that look at 37 tokens and at one, and room for four more."""
    pool = rows(6, 16, latent + rotated, dtype=dtype, device=device)
    pool = stored(pool, FP8, 0.4) if fp8 else pool
    tokens = torch.randperm(96, generator=torch.Generator().manual_seed(latent))[:42].to(device)
    ends = torch.tensor([0, 37, 38], dtype=torch.int32, device=device)
    return pool, tokens, ends, rows(72, latent, dtype=dtype, device=device), 0.4 if fp8 else 1.0


def _routed(count: int, experts: int, size: int, fixed: bool, biased: bool, device: torch.device) -> tuple[Any, ...]:
    x, weight = (rows(each, size, dtype=torch.float16, device=device) for each in (count, experts))
    bias = rows(experts, dtype=torch.float16, device=device) if biased else None
    return x, weight, bias, Workspace.allocate(1, 1, device), fixed


def _logits(arguments: tuple[Any, ...], result: Tensor) -> Tensor:
    return result if result.dim() == 2 else result.sum(0)


CASES = (
    *(
        Case(
            normed_latents,
            f"{count}-{q}-{latent}-{rotated}-{dtype}-{normed}-{parts}-{wanted}",
            _normed((count, q, latent, rotated), dtype, normed, parts, wanted),
            seen=_plainly,
            tolerance=EIGHT_BITS if wanted is not None else None,
            slow=latent > 32,
        )
        for count, q, latent, rotated in ((6, 24, 32, 16), (5, 1536, 512, 64))
        for dtype in TYPES
        for normed, parts, wanted in (
            (True, 0, None),
            (False, 0, None),
            (True, 3, None),
            *([(True, 0, Fp8Inputs(False, 128)), (True, 2, Fp8Inputs(True, 128))] if q % 128 == 0 else []),
        )
    ),
    *(
        Case(
            normed_latents,
            f"fp8-pages-{count}-{q}-{latent}-{rotated}-{dtype}-{normed}-{parts}",
            _normed((count, q, latent, rotated), dtype, normed, parts, None, FP8),
            seen=_plainly,
            tolerance=1 / 8,  # of the largest number, which a scale of the pool's makes any
            slow=latent > 32,
        )
        for count, q, latent, rotated in ((6, 24, 32, 16), (5, 1536, 512, 64))
        for dtype in TYPES
        for normed, parts in ((True, 0), (False, 0), (True, 3))
    ),
    *(
        Case(
            head_products,
            f"{count}-{heads}-{k}-{n}-{rotated}-{dtype}-{fp8}",
            _products(count, heads, k, n, rotated, dtype, fp8),
            seen=_out,
            tolerance=EIGHT_BITS if fp8 else 2.0**-6 if dtype == BF16 else None,
            slow=heads > 3 or count > 21 or dtype == BF16,
        )
        for heads, k, n, rotated, fp8 in (
            (3, 24, 160, 16, False),
            (3, 160, 40, 0, False),
            (3, 160, 128, 0, True),
            (16, 128, 512, 64, False),
            (16, 512, 128, 0, True),
        )
        for count in (1, 21, 70, 600)
        for dtype in TYPES
    ),
    *(
        Case(
            latent_values,
            f"{count}-{heads}-{latent}-{dtype}-{together}",
            lambda device, given=(count, heads, latent, dtype, together): _values(*given, device),
            seen=lambda arguments, result: (dequantized_rows(result), result.scales),
            tolerance=EIGHT_BITS,
            slow=latent > 64 or count > 5,
        )
        for heads, latent in ((3, 64), (16, 512))
        for count, together in ((1, False), (5, False), (16, False), (17, True))
        for dtype in (BF16, F32)
    ),
    *(
        Case(
            expand_latents,
            f"{latent}-{rotated}-{dtype}{'-fp8' if fp8 else ''}",
            lambda device, given=(latent, rotated, dtype, fp8): _expansion(*given, device),
            seen=lambda arguments, result: tuple(each[:38] for each in result),
            slow=latent > 48,
        )
        for latent, rotated in ((32, 16), (48, 32), (512, 64))
        for dtype in TYPES
        for fp8 in (False, True)
    ),
    *(
        Case(
            router_gemm,
            f"{count}-{experts}-{size}-{fixed}{'-bias' if biased else ''}",
            lambda device, given=(count, experts, size, fixed, biased): _routed(*given, device),
            seen=_logits,
            slow=size > 512,
        )
        for experts, size in ((20, 256), (256, 7168))
        for count in (1, 17, 130)
        for fixed in (False, True)
        for biased in (False, True)
    ),
)
