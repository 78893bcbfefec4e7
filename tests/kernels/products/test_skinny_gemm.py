"""The product of few rows against torch's: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1), which
`tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.skinny_triton import skinny_gemm, skinny_gemm_gated  # noqa: E402
from aerie.kernels.gemm.tiles import MAX_ROWS, fills_tile, gated_tiles, skinny_gemm_tiles  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

WIDE = [(8466, 128)] if INTERPRETED else [(28672, 4096), (14336, 8192), (32002, 4096), (8466, 384)]
SHAPES = (
    [(96, 512), (70, 384), (64, 128), *WIDE]
    if INTERPRETED
    else [(6144, 4096), (4096, 14336), (70, 384), (64, 128), (4096, 12288), *WIDE]
)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, workspace: Workspace) -> torch.Tensor:
    """In the tiles of x's own rows."""
    tiles = skinny_gemm_tiles(x.shape[0], *weight.shape)
    assert tiles is not None
    return skinny_gemm(x, weight, bias, workspace, tiles)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_product_of_few_rows_is_torchs(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    workspace = Workspace.create(SHAPES, DEVICE)
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=generator).to(DEVICE, dtype)
        b = torch.randn(n, generator=generator).to(DEVICE, dtype) if bias else None
        for rows in (1, 16, 17, 64, 65, MAX_ROWS):
            if skinny_gemm_tiles(rows, n, k) is None:
                assert rows > 64 and (n, k) not in WIDE
                continue
            # rows of a wider tensor, as the heads of a packed product are
            x = torch.randn(rows, 2 * k, generator=generator).to(DEVICE, dtype)[:, :k]
            out = product(x, weight, b, workspace)
            expected = x.double() @ weight.double().T + (b.double() if b is not None else 0.0)
            # one rounding to 8 (bfloat16) or 11 bits: 2^-9 and 2^-12 of a value at most, less on average
            error = float((out.double() - expected).norm() / expected.norm())
            assert error < (2e-3 if dtype == torch.bfloat16 else 3e-4), (n, k, rows, error)
        assert int(workspace.tickets.abs().sum()) == 0


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(4)
    n, k = WIDE[0]
    workspace = Workspace.create([(n, k)], DEVICE)
    weight = torch.randn(n, k, generator=generator).to(DEVICE, torch.float16)
    x = torch.randn(MAX_ROWS, k, generator=generator).to(DEVICE, torch.float16)
    whole = product(x, weight, None, workspace)
    for rows in (65, 90):
        assert torch.equal(product(x[:rows], weight, None, workspace), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16])
def test_a_gated_product_is_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    workspace = Workspace.create(WIDE, DEVICE)
    for n, k in WIDE:
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(DEVICE, dtype)
        for rows in (1, 17, 64, 65, MAX_ROWS):
            x = torch.randn(rows, k, generator=generator).to(DEVICE, dtype)
            tiles = gated_tiles(rows, n, k)
            assert tiles is not None
            out = skinny_gemm_gated(x, weight, workspace, tiles)
            expected = silu_mul.reference(x.double() @ weight.double().T)
            # four roundings: of the gate, its silu, what is gated, and the whole
            error = float((out.double() - expected).norm() / expected.norm())
            assert error < (6e-3 if dtype == torch.bfloat16 else 8e-4), (n, k, rows, error)


def test_no_rows_give_none() -> None:
    n, k = WIDE[0]
    workspace = Workspace.create([(n, k)], DEVICE)
    weight = torch.randn(n, k).to(DEVICE, torch.float16)
    x = weight[:0]
    assert product(x, weight, None, workspace).shape == (0, n)
    tiles = gated_tiles(0, n, k)
    assert tiles is not None and skinny_gemm_gated(x, weight, workspace, tiles).shape == (0, n // 2)


def test_few_gates_are_left_to_a_kernel_of_their_own() -> None:
    assert gated_tiles(4, 6144, 4096) is None and skinny_gemm_tiles(4, 6144, 4096) is not None
    assert gated_tiles(MAX_ROWS + 1, 28672, 4096) is None


def test_rows_that_leave_much_of_a_tile_empty_are_left_to_the_library() -> None:
    """The ranges measured on an H200: from one row up to 32, then tiles of 64 and 128 that are nearly full."""
    spans = {rows for rows in range(1, MAX_ROWS + 1) if fills_tile(rows)}
    assert spans == {*range(1, 33), *range(48, 65), *range(112, MAX_ROWS + 1)}


@pytest.mark.parametrize(
    "rows,n,k,splits",
    [
        (1, 6144, 4096, 1),
        (17, 6144, 4096, 1),
        (64, 4096, 4096, 2),
        (128, 4096, 14336, 2),
        (64, 8192, 14336, 1),
        (4, 2560, 8192, 2),
        (4, 28672, 4096, 1),
        (4, 64, 4096, 16),
        (1, 64, 128, 1),
        (1, 64, 384, 1),
        (128, 8466, 384, 1),
    ],
)
def test_splits_fill_the_device_and_divide_k(rows: int, n: int, k: int, splits: int) -> None:
    tiles = skinny_gemm_tiles(rows, n, k)
    assert tiles is not None and tiles.splits == splits
    assert k % splits == 0 and (tiles.span(k) - tiles.columns_ahead) % tiles.block_k == 0


@pytest.mark.parametrize("rows,n,k", [(129, 8466, 128), (1, 64, 100), (128, 5120, 8192)])
def test_what_does_not_fit_the_tiles_is_left_to_the_library(rows: int, n: int, k: int) -> None:
    assert skinny_gemm_tiles(rows, n, k) is None


@pytest.mark.skipif(INTERPRETED, reason="a graph needs a GPU")
def test_replays_of_a_chain_of_products_are_the_same_bits() -> None:
    """Programs launched early must not read what the kernel in front has not written: 300 replays with new inputs."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    k = 4096
    weights = [torch.randn(k, k, generator=generator, device=DEVICE).div(64).bfloat16() for _ in range(6)]
    workspace = Workspace.create([(k, k)], DEVICE)
    x = torch.empty(4, k, dtype=torch.bfloat16, device=DEVICE)

    def chain() -> torch.Tensor:
        y = x
        for weight in weights:
            y = product(y, weight, None, workspace)
        return y

    x.normal_(generator=generator)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(300):
        x.normal_(generator=generator)
        graph.replay()
        y = x
        for weight in weights:
            y = product(y, weight, None, workspace)
            torch.cuda.synchronize()
        assert torch.equal(out, y)
