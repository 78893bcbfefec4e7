"""Gated MLPs of few rows with int4 weights, in one launch, against float64. They need a Hopper GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.capability import num_multiprocessors  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.packed.cuda.gated_mlp_cuda import gated_mlp_of  # noqa: E402
from aerie.kernels.packed.cuda.gated_mlp_tiles import MAX_ROWS, gated_mlp_tiles, gated_mlp_words  # noqa: E402
from aerie.kernels.packed.weight import PackedWeight, dequantize  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE  # noqa: E402
from tests.kernels.products.test_packed_product import error, weight_of  # noqa: E402

DEVICE = torch.device("cuda")

pytestmark = HOPPER_HERE

# Llama-3.1-8B; warps and ranges that are no powers of two; ranges with other numbers of items; fewer slices than blocks
SHAPES = [(4096, 14336), (3584, 18944), (2048, 2304), (2048, 512)]


class MLP:
    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self.gate_up, self.down = (
            weight_of(n, k, "int4", 128, False, torch.bfloat16, DEVICE) for n, k in ((2 * width, size), (size, width))
        )
        self.workspace = Workspace.allocate(1, gated_mlp_words(size, width), DEVICE)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        tiles = gated_mlp_tiles(self.size, self.width, x.shape[0], num_multiprocessors(DEVICE))
        assert tiles is not None, "served"
        out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=DEVICE) if out is None else out
        return gated_mlp_of(x, self.gate_up, self.down, self.workspace, tiles, out)

    def meant(self, x: Tensor) -> Tensor:
        def product(rows: Tensor, weight: PackedWeight) -> Tensor:
            return rows @ dequantize(weight, torch.float32).double().T

        gate, up = product(x.double(), self.gate_up).chunk(2, -1)
        return product(torch.nn.functional.silu(gate) * up, self.down)


@pytest.mark.parametrize("size,width", SHAPES)
def test_rows_are_those_of_float64(size: int, width: int) -> None:
    """Rows lie apart in memory, and the last one has a number far larger than its others."""
    mlp = MLP(size, width)
    for rows in (1, 2, 3, MAX_ROWS):
        x = torch.randn(rows, 2 * size, device=DEVICE).bfloat16()[:, :size]
        x[-1, size // 2 + 1] = 500.0
        found = mlp(x)
        for mine, meant in zip(found, mlp.meant(x), strict=True):
            # gates, ups, inner activations and the result are rounded to bfloat16
            assert error(mine, meant) < 6e-3, rows
        assert not mlp.workspace.tickets.any(), "mail is read"


def test_equal_rows_give_equal_bits_in_a_graph() -> None:
    """Many launches after one another, each of which begins before the one before has ended."""
    mlp = MLP(2048, 2304)
    rows = [torch.randn(1 + i % 3, 2048, device=DEVICE).bfloat16() for i in range(20)]
    expected = [mlp(x) for x in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [mlp(x) for x in rows]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_rows_of_zeros_arrive() -> None:
    """Zeros in mail mean that it has not arrived."""
    mlp = MLP(2048, 512)
    assert not mlp(torch.zeros(2, 2048, dtype=torch.bfloat16, device=DEVICE)).any()
    assert not mlp.workspace.tickets.any()


def test_what_is_no_number_stays_none() -> None:
    """In its row."""
    mlp = MLP(2048, 512)
    x = torch.randn(2, 2048, device=DEVICE).bfloat16()
    x[1, 7] = float("nan")
    found = mlp(x)
    assert bool(found[0].isfinite().all()) and bool(found[1].isnan().all())
    assert not mlp.workspace.tickets.any()
