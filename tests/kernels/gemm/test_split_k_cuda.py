"""The CUDA kernel that shares tiles by inputs, with up to 256 rows, against float64. It needs a Hopper GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.choice import choose_gemm  # noqa: E402
from aerie.kernels.gemm.split_k_cuda import SplitKGEMM, split_k  # noqa: E402
from aerie.kernels.gemm.tiles import split_width  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE  # noqa: E402

DEVICE = torch.device("cuda")

pytestmark = HOPPER_HERE

DTYPES = [torch.bfloat16, torch.float16]


def weight_of(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n)) / k**0.5).to(DEVICE, dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < (3e-3 if x.dtype == torch.bfloat16 else 4e-4), error


def workspace(n: int) -> Workspace:
    """For tiles of any width; the sums of others are not numbers."""
    made = Workspace.allocate((n + 256) * 256, 16 * n, DEVICE)
    made.part.fill_(float("nan"))
    return made


@pytest.mark.parametrize("n,k", [(4096, 12288), (4096, 20480), (5120, 25600), (3176, 8192), (6144, 8256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_models_are_those_of_float64(n: int, k: int, dtype: torch.dtype) -> None:
    weight, width = weight_of(n, k, dtype), split_width(n, k)
    assert width is not None
    space = Workspace.create([(n, k)], DEVICE)
    for rows in (193, 256):
        x = torch.randn(rows, k, device=DEVICE).to(dtype)
        out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
        check(x, weight, None, split_k(x, weight, None, space, width, out))
        assert torch.equal(out, split_k(x, weight, None, space, width, torch.empty_like(out))), "other bits"
    assert not bool(space.tickets.any()), "left for the next launch"


@pytest.mark.parametrize("width", range(96, 257, 32))
@pytest.mark.parametrize("n,k", [(200, 128), (1000, 320), (3208, 1472)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_are_not_full_store_only_their_part(width: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Fewer steps than stages, odd numbers of steps; a bias; x is a part of wider rows."""
    weight, bias = weight_of(n, k, dtype), torch.randn(n, device=DEVICE).to(dtype)
    for rows in (1, 129, 200, 255):
        x = torch.randn(rows, 2 * k, device=DEVICE).to(dtype)[:, :k]
        memory = torch.full((rows + 1, n), 7.0, dtype=dtype, device=DEVICE)
        check(x, weight, bias, split_k(x, weight, bias, workspace(n), width, memory[:rows]))
        assert bool((memory[rows] == 7.0).all()), "written past the last row"


def test_launches_in_a_graph_wait_for_one_another() -> None:
    """Each begins before the one before has ended, and multiplies what that one stored. All share a workspace."""
    n, space, width = 4096, workspace(4096), 128
    x = torch.randn(256, n, device=DEVICE).bfloat16()
    weights = [1.5 * weight_of(n, n, torch.bfloat16).roll(shift, 0) for shift in range(4)]

    def products() -> list[Tensor]:
        found = [x]
        for weight in weights:
            found.append(split_k(found[-1], weight, None, space, width, torch.empty_like(x)))
        return found

    expected = products()
    for before, weight, found in zip(expected, weights, expected[1:], strict=False):
        check(before, weight, None, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


def test_only_its_rows_are_multiplied_by_the_kernel() -> None:
    n, k = 4096, 8192
    weight, bias = weight_of(n, k, torch.bfloat16), torch.randn(n, device=DEVICE).bfloat16()
    gemm = choose_gemm(weight, GEMMOptions(Workspace.create([(n, k)], DEVICE)))
    assert isinstance(gemm, SplitKGEMM)
    for rows in (1, 128, 192, 193, 256, 257):
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        out = torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16)
        check(x, weight, bias, gemm.multiply(x, bias, None))
        check(x, weight, None, gemm.multiply(x, None, out))
