"""CUDA products with int4 weights against float64: every form of tiles. Needs a Hopper GPU."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from aerie.kernels.packed.cuda.kernels_cuda import CudaPackedProduct, packed_cuda  # noqa: E402
from aerie.kernels.packed.cuda.tiles import SHARED_SUMS, FewRowsTiles, ManyRowsTiles, Tiles, WideTiles  # noqa: E402
from aerie.kernels.packed.product import choose_product  # noqa: E402
from aerie.kernels.packed.tiles import packed_workspace_size  # noqa: E402
from aerie.kernels.packed.weight import dequantize  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE  # noqa: E402
from tests.kernels.products.test_packed_product import BOUND, DENSE_BOUND, LARGE, error, weight_of  # noqa: E402

DEVICE = torch.device("cuda")

pytestmark = HOPPER_HERE

TILES: list[Tiles] = [
    FewRowsTiles(1, 1, 8, 2, 16),
    FewRowsTiles(1, 4, 4, 1, 4),
    FewRowsTiles(2, 2, 4, 3, 8, programs=2),
    FewRowsTiles(4, 4, 2, 8, 4),
    WideTiles(1),
    WideTiles(3),
    ManyRowsTiles(64, 8),
    ManyRowsTiles(96, 6),
    ManyRowsTiles(128, 5),
    ManyRowsTiles(192, 3),
    ManyRowsTiles(256, 3),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_float64(tiles: Tiles, dtype: torch.dtype) -> None:
    """Outputs that fill no tile, fewer steps than stages, zeros, scales of a row, and rows that fill no tile. Clusters
    of `many_rows.cu` share tiles, of which there are fewer or more than clusters."""
    if isinstance(tiles, FewRowsTiles):
        most, bound = 8 * tiles.row_tiles, BOUND[dtype]
    else:
        most, bound = 3 * tiles.block_m, DENSE_BOUND[dtype]
    shapes = [(70, 384), (640, 2048), *([(8960, 1024)] if isinstance(tiles, ManyRowsTiles) else [])]
    workspace = Workspace.allocate(*SHARED_SUMS, DEVICE)
    workspace.part.fill_(float("nan"))
    for (n, k), (group, zeros) in product(shapes, ((128, False), (0, True))):
        weight = weight_of(n, k, "int4", group, zeros, dtype, DEVICE)
        exact = dequantize(weight, torch.float32).double()
        bias = torch.randn(n, device=DEVICE).to(dtype)
        for rows in (1, most // 2 + 1, most):
            x = torch.randn(rows, 2 * k, device=DEVICE).to(dtype)[:, :k]
            expected = x.double() @ exact.T + bias.double()
            out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
            packed_cuda(x, weight, bias, workspace, tiles, out)
            assert error(out, expected) < bound, (n, k, group, rows)
            again = torch.empty_like(out)
            assert torch.equal(out, packed_cuda(x, weight, bias, workspace, tiles, again)), "equal inputs, other bits"
            assert not workspace.tickets.any()


@pytest.mark.parametrize("tiles", [tiles for tiles in TILES if tiles.outputs > 64], ids=str)
def test_gated_products_are_those_of_float64(tiles: Tiles) -> None:
    most = 8 * tiles.row_tiles if isinstance(tiles, FewRowsTiles) else tiles.block_m
    workspace = Workspace.allocate(*SHARED_SUMS, DEVICE)
    for n, k in ((384, 512), (1280, 1024)):
        weight = weight_of(n, k, "int4", 128, False, torch.bfloat16, DEVICE)
        exact = dequantize(weight, torch.float32).double()
        for rows in (1, most - 3, most):
            x = torch.randn(rows, k, device=DEVICE).bfloat16()
            expected = silu_mul((x.double() @ exact.T).float()).double()
            out = torch.full((rows, n // 2), float("nan"), dtype=x.dtype, device=DEVICE)
            packed_cuda(x, weight, None, workspace, tiles, out, gated=True)
            # two roundings before the product, one after
            assert error(out, expected) < 2 * DENSE_BOUND[torch.bfloat16], (n, k, rows)


@pytest.mark.parametrize("n,k", [shape for shape in LARGE if shape[1] % 128 == 0])
def test_products_of_known_models_are_those_of_float64(n: int, k: int) -> None:
    weight = weight_of(n, k, "int4", 128, False, torch.bfloat16, DEVICE)
    workspace = Workspace.allocate(*packed_workspace_size([(n, k)]), DEVICE)
    ours = choose_product(weight, GEMMOptions(workspace, packed=True))
    assert isinstance(ours, CudaPackedProduct)
    x, exact = torch.randn(400, k, device=DEVICE).bfloat16(), dequantize(weight, torch.float32).double()
    expected = x.double() @ exact.T
    for rows in (*range(1, 65, 3), 8, 16, 32, 65, 100, 128, 129, 256, 257, 400):
        bound = (BOUND if rows <= 16 else DENSE_BOUND)[torch.bfloat16]
        assert error(ours.multiply(x[:rows], None), expected[:rows]) < bound, rows
        gated = silu_mul(expected[:rows].float()).double()
        assert error(ours.multiply_gated(x[:rows]), gated) < 2 * bound, rows
