"""The CUDA kernel of gated products with 129 to 256 rows against float64. It needs a Hopper GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.choice import choose_gemm  # noqa: E402
from aerie.kernels.gemm.gated_rows_cuda import GatedRowsGEMM, gated_rows  # noqa: E402
from aerie.kernels.gemm.tiles import gated_width  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE  # noqa: E402

DEVICE = torch.device("cuda")

pytestmark = HOPPER_HERE

DTYPES = [torch.bfloat16, torch.float16]


def weight_of(n: int, k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return (torch.randn(2 * n, k, generator=generator) / k**0.5).to(DEVICE, dtype)


def check(x: Tensor, weight: Tensor, found: Tensor) -> None:
    expected = silu_mul.reference(x.double() @ weight.double().T)
    # four roundings: of the gate, its silu, what is gated, and the whole
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < (6e-3 if x.dtype == torch.bfloat16 else 8e-4), error


@pytest.mark.parametrize("n,k", [(12288, 4096), (14336, 4096), (9728, 2560), (6144, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_products_of_models_are_those_of_float64(n: int, k: int, dtype: torch.dtype) -> None:
    weight, width = weight_of(n, k, dtype), gated_width(n)
    assert width is not None
    for rows in (129, 255, 256):
        x = torch.randn(rows, k, device=DEVICE).to(dtype)
        out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
        check(x, weight, gated_rows(x, weight, width, out))
        assert torch.equal(out, gated_rows(x, weight, width, torch.empty_like(out))), "equal inputs, other bits"


@pytest.mark.parametrize("width", range(96, 193, 16))
@pytest.mark.parametrize("n,k", [(200, 64), (1000, 320), (7208, 448)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_are_not_full_store_only_their_part(width: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Fewer steps than stages, odd numbers of tiles, several tiles per program; x is a part of wider rows."""
    weight = weight_of(n, k, dtype)
    for rows in (1, 129, 200, 255):
        x = torch.randn(rows, 2 * k, device=DEVICE).to(dtype)[:, :k]
        memory = torch.full((rows + 1, n), 7.0, dtype=dtype, device=DEVICE)
        check(x, weight, gated_rows(x, weight, width, memory[:rows]))
        assert bool((memory[rows] == 7.0).all()), "written past the last row"


def test_launches_in_a_graph_wait_for_one_another() -> None:
    """Each begins before the one before has ended, and multiplies what that one stored."""
    n = k = 4608
    width, x = 96, torch.randn(256, k, device=DEVICE).bfloat16()
    weights = [1.5 * weight_of(n, k, torch.bfloat16).roll(shift, 0) for shift in range(4)]

    def products() -> list[Tensor]:
        found = [x]
        for weight in weights:
            found.append(gated_rows(found[-1], weight, width, torch.empty_like(x)))
        return found

    expected = products()
    for before, weight, found in zip(expected, weights, expected[1:], strict=False):
        check(before, weight, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


@pytest.mark.parametrize("n", [12288, 14336])
def test_only_its_rows_are_multiplied_by_the_kernel(n: int) -> None:
    k = 1024
    weight = weight_of(n, k, torch.bfloat16)
    gemm = choose_gemm(weight, GEMMOptions(Workspace.create([(2 * n, k)], DEVICE)))
    assert isinstance(gemm, GatedRowsGEMM)
    for rows in (1, 72, 128, 129, 193, 240, 241, 256, 257):
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        check(x, weight, gemm.multiply_gated(x))
