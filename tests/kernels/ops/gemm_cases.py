"""Cases of `aerie.kernels.gemm.choice`: what is compared are products of one, few and many rows (tests/kernels/products
and tests/kernels/gemm have their shapes)."""

import torch

from aerie.kernels.gemm.choice import TorchGEMM, choose_gemm
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from tests.kernels.ops.case import Case


def arguments(n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, GEMMOptions]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * k**-0.5
    options = GEMMOptions(Workspace.create([(n, k)], device))
    return weight.to(device, dtype), options


def products(given: tuple[torch.Tensor, GEMMOptions], gemm: TorchGEMM) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in (1, 5, 256):
        x = torch.randn(rows, given[0].shape[1], generator=generator).to(given[0])
        found += [gemm.multiply(x, None, None), gemm.multiply_gated(x)]
    return found


CASES = tuple(
    Case(
        choose_gemm,
        f"{n}x{k}-{dtype}",
        lambda device, given=(n, k, dtype): arguments(*given, device),
        seen=products,
        tolerance=2.0 ** (-5 if dtype == torch.bfloat16 else -8),  # a gated product is rounded four times
        slow=n * k > 1 << 16,
    )
    for n, k in ((64, 256), (5120, 2880), (14336, 2048), (2048, 7168))
    for dtype in (torch.float16, torch.bfloat16)
)
