"""Products of FP8 rows and weights against torch's of what both mean. On a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.capability import MULTIPROCESSORS  # noqa: E402
from aerie.kernels.fp8.gemm_ahead_triton import fp8_gemm_ahead  # noqa: E402
from aerie.kernels.fp8.gemm_triton import fp8_gemm  # noqa: E402
from aerie.kernels.fp8.product_triton import TritonFp8Product, fp8_gemm_wide  # noqa: E402
from aerie.kernels.fp8.rows import GROUP, dequantized_rows  # noqa: E402
from aerie.kernels.fp8.rows_triton import quantize_rows  # noqa: E402
from aerie.kernels.fp8.tiles import (  # noqa: E402
    MAX_AHEAD_ROWS,
    MAX_ROWS,
    SCALE_ROWS,
    Fp8Matrix,
    Fp8WideTiles,
    fp8_ahead_tiles,
    fp8_gated_tiles,
    fp8_gemm_tiles,
    fp8_ordered_ahead_tiles,
    fp8_ordered_gated_tiles,
    fp8_ordered_tiles,
    fp8_ordered_wide_tiles,
    fp8_sum_order,
    fp8_wide_tiles,
    fp8_workspace_size,
)
from aerie.kernels.gemm.tiles import SHARED_BYTES  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.kv.stored_values import FP8  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS
OUT = torch.float32 if INTERPRETED else torch.bfloat16
SHAPES = [(96, 512), (70, 384)] if INTERPRETED else [(6144, 4096), (4096, 14336), (2112, 7168), (28672, 4096)]


def weight_of(n: int, k: int, by_group: bool, generator: torch.Generator) -> tuple[Fp8Matrix, Tensor]:
    """And what it means, float64."""
    values = torch.randn(n, k, generator=generator).mul(30).to(FP8)
    shape = (-(-n // SCALE_ROWS), k // GROUP) if by_group else (n, 1)
    scales = torch.rand(shape, generator=generator) * 1e-2 + 1e-3
    full = scales.repeat_interleave(SCALE_ROWS, 0)[:n].repeat_interleave(GROUP, 1) if by_group else scales
    return Fp8Matrix(values.to(DEVICE), scales.to(DEVICE)), (values.double() * full.double()).to(DEVICE)


def rows_of(rows: int, k: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator) * 9).to(DEVICE, OUT)


def workspace_of(shapes: list[tuple[int, int]]) -> Workspace:
    return Workspace.allocate(*fp8_workspace_size(shapes), DEVICE)


def difference(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("by_group", [True, False], ids=["block", "channel"])
def test_a_product_is_that_of_what_is_meant(by_group: bool) -> None:
    """Products of eight bits are exact, and sums of 128 nearly; what is left is the result's own rounding."""
    generator = torch.Generator().manual_seed(2)
    limit = 1e-4 if INTERPRETED else 3e-3
    workspace = workspace_of(SHAPES)
    for n, k in SHAPES:
        weight, meant = weight_of(n, k, by_group, generator)
        bias = torch.randn(n, generator=generator).to(DEVICE, OUT)
        for rows in (1, 64, MAX_ROWS + 1) if INTERPRETED else (1, 17, 64, MAX_ROWS, 200, 256, 512, 1000):
            x = rows_of(rows, k, generator)
            quantised = quantize_rows(x, by_group, rows_together=rows > MAX_ROWS)
            expected = dequantized_rows(quantised).double() @ meant.T
            few, wide = fp8_gemm_tiles(rows, n, k), fp8_wide_tiles(rows, n, k)
            for b in (None, bias):
                meant_with_bias = expected if b is None else expected + b.double()
                if few is not None:
                    out = torch.full((rows, n), float("nan"), dtype=OUT, device=DEVICE)
                    fp8_gemm(quantised, weight, b, workspace, few, out)
                    assert difference(out, meant_with_bias) < limit, (n, k, rows)
                out = torch.full((rows, n), float("nan"), dtype=OUT, device=DEVICE)
                fp8_gemm_wide(quantised, weight, b, workspace, wide, out)
                assert difference(out, meant_with_bias) < limit, (n, k, rows, wide)
    assert not workspace.tickets.any()


def test_a_product_whose_weight_is_read_ahead_is_that_of_what_is_meant() -> None:
    """For every way in which groups stand beside each other, and splits of a row of tiles that W does not fill."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(70, 384), (130, 1792), (64, 4096)] if INTERPRETED else [(2112, 7168), (3072, 1536), (7168, 2048)]
    workspace = workspace_of(shapes)
    for n, k in shapes:
        weight, meant = weight_of(n, k, True, generator)
        bias = torch.randn(n, generator=generator).to(DEVICE, OUT)
        for rows in (1, 3, MAX_AHEAD_ROWS) if INTERPRETED else (1, 2, 3, 4, 7, MAX_AHEAD_ROWS):
            x, tiles = quantize_rows(rows_of(rows, k, generator), True), fp8_ahead_tiles(rows, n, k)
            assert tiles is not None
            for b in (None, bias):
                out = torch.full((rows, n), float("nan"), dtype=OUT, device=DEVICE)
                fp8_gemm_ahead(x, weight, b, workspace, tiles, out)
                expected = dequantized_rows(x).double() @ meant.T + (0.0 if b is None else b.double())
                assert difference(out, expected) < (1e-4 if INTERPRETED else 3e-3), (n, k, rows)
            parts = torch.full((tiles.splits, rows, n), float("nan"), dtype=torch.float32, device=DEVICE)
            fp8_gemm_ahead(x, weight, None, workspace, tiles, parts)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            fp8_gemm_ahead(x, weight, None, workspace, tiles, out)
            assert torch.equal(total.to(OUT), out)
    assert not workspace.tickets.any()


@pytest.mark.parametrize("n,k", [(2112, 7168), (3072, 1536), (7168, 2048), (7168, 2304), (4096, 4096), (70, 384)])
def test_a_weight_that_is_read_ahead_fits_the_device_and_the_workspace(n: int, k: int) -> None:
    cells, tickets = fp8_workspace_size([(n, k)])
    for rows in range(1, MAX_AHEAD_ROWS + 1):
        tiles = fp8_ahead_tiles(rows, n, k)
        assert tiles is not None and rows <= tiles.rows and k // GROUP % tiles.splits == 0
        assert tiles.span(k) % tiles.together == 0 and 16 <= tiles.rows * tiles.together <= 32
        count = -(-n // SCALE_ROWS)
        assert count * tiles.splits <= MULTIPROCESSORS * (SHARED_BYTES // tiles.shared_bytes(k))
        assert count <= tickets and count * tiles.splits * SCALE_ROWS * tiles.rows <= cells
    assert fp8_ahead_tiles(MAX_AHEAD_ROWS + 1, n, k) is None


def test_a_weight_that_is_too_large_to_be_read_ahead_is_not() -> None:
    assert fp8_ahead_tiles(1, 28672, 4096) is None and fp8_ahead_tiles(1, 4096, 14336) is None
    assert fp8_ahead_tiles(1, 64, 100) is None


@pytest.mark.parametrize("by_group", [True, False], ids=["block", "channel"])
@pytest.mark.parametrize("block_m,block_n", [(64, 64), (128, 64), (128, 128)])
def test_programs_that_share_columns_of_many_rows_add_them_all(block_m: int, block_n: int, by_group: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    n, k, rows = 200, 768, 130
    weight, meant = weight_of(n, k, by_group, generator)
    workspace = Workspace.allocate(1 << 20, 64, DEVICE)
    x = quantize_rows(rows_of(rows, k, generator), by_group)
    expected = dequantized_rows(x).double() @ meant.T
    for splits in (2, 3):
        out = torch.full((rows, n), float("nan"), dtype=OUT, device=DEVICE)
        tiles = Fp8WideTiles(block_m, block_n, splits, stages=3, warps=8 if block_n == 128 else 4)
        fp8_gemm_wide(x, weight, None, workspace, tiles, out)
        assert difference(out, expected) < (1e-4 if INTERPRETED else 3e-3)
        assert not workspace.tickets.any()


@pytest.mark.parametrize("n,k", [(2112, 7168), (3072, 1536), (7168, 2048), (4096, 4096), (28672, 4096), (64, 128)])
def test_tiles_of_many_rows_fit_the_workspace(n: int, k: int) -> None:
    cells, tickets = fp8_workspace_size([(n, k)])
    for rows in (1, 65, 100, 128, 129, 256, 300, 512, 1000, 8192):
        tiles = fp8_wide_tiles(rows, n, k)
        assert k // GROUP % tiles.splits == 0
        if tiles.splits > 1:
            count = tiles.count(rows, n)
            assert count <= tickets and count * tiles.splits * tiles.block_m * tiles.block_n <= cells
        at_once = SHARED_BYTES // (tiles.stages * (tiles.block_m + tiles.block_n) * GROUP)
        assert at_once == 1 or tiles.count(rows, n) * tiles.splits > MULTIPROCESSORS, "two on one, and none on another"


@pytest.mark.parametrize("by_group", [True, False], ids=["block", "channel"])
def test_a_gated_product_is_that_of_what_is_meant(by_group: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    n, k = (8576, 128) if INTERPRETED else (28672, 4096)
    workspace = workspace_of([(n, k)])
    weight, meant = weight_of(n, k, by_group, generator)
    for rows in (2,) if INTERPRETED else (2, 40, MAX_ROWS):
        x = quantize_rows(rows_of(rows, k, generator) / 50, by_group)
        tiles, out = fp8_gated_tiles(rows, n, k), torch.empty(rows, n // 2, dtype=OUT, device=DEVICE)
        assert tiles is not None
        fp8_gemm(x, weight, None, workspace, tiles, out, gated=True)
        expected = silu_mul.reference(dequantized_rows(x).double() @ meant.T)
        assert difference(out, expected) < (1e-4 if INTERPRETED else 6e-3)
    assert fp8_gated_tiles(1, 6144, 4096) is None and fp8_gated_tiles(1, 28672 + 64, 4096) is None


# Two slices, of which groups are multiplied last; one slice; and on a GPU matrices of DeepSeek-V3 and Llama-3.1-8B
ORDERED = (
    [(96, 768), (70, 384)] if INTERPRETED else [(2112, 7168), (3072, 1536), (4096, 4096), (28672, 4096), (96, 768)]
)


@pytest.mark.parametrize("by_group", [True, False], ids=["block", "channel"])
@pytest.mark.parametrize("n,k", ORDERED)
def test_a_deterministic_row_has_the_same_bits_for_every_number_of_rows(n: int, k: int, by_group: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, meant = weight_of(n, k, by_group, generator)
    product = TritonFp8Product(weight, workspace_of([(n, k)]), True, OUT)
    x = rows_of(300 if INTERPRETED else 2048, k, generator)
    whole = product.multiply(x, None)
    assert difference(whole, dequantized_rows(quantize_rows(x, by_group)).double() @ meant.T) < 3e-3
    for rows in (1, 2, 3, 8, 16, 31, 64, 65, 127, 128, 129, 257):
        assert torch.equal(product.multiply(x[:rows], None), whole[:rows]), rows
    if n % 256 == 0:
        gated = product.multiply_gated(x)
        assert isinstance(gated, Tensor)
        for rows in (1, 16, 31, 64, 65, 127, 129):
            found = product.multiply_gated(x[:rows])
            assert isinstance(found, Tensor) and torch.equal(found, gated[:rows]), rows
        wanted = product.inputs
        if by_group:
            rounded = product._rounded(product.multiply_gated(x, wanted))
            for rows in (1, 16, 31, 65, 129):
                found = product._rounded(product.multiply_gated(x[:rows], wanted))
                assert torch.equal(found.values.view(torch.uint8), rounded.values[:rows].view(torch.uint8)), rows
                assert torch.equal(found.scales, rounded.scales[:rows]), rows


@pytest.mark.parametrize("by_group", [True, False], ids=["block", "channel"])
def test_tiles_for_every_number_of_rows_add_in_one_order(by_group: bool) -> None:
    for n, k in (*ORDERED, (7168, 2048), (2112, 7168), (28672, 4096), (4096, 14336), (16384, 1536)):
        order = fp8_sum_order(n, k, by_group)
        for rows in (1, 16, 17, 32, 64, 65, 128):
            tiles = fp8_ordered_tiles(rows, n, k, by_group)
            assert tiles is not None and (tiles.splits, tiles.last or tiles.ahead) == (order.splits, order.last)
            gated = fp8_ordered_gated_tiles(rows, n, k, rows % 2 == 0, by_group)
            assert gated is None or (gated.splits, gated.last or gated.ahead) == (order.splits, order.last)
        for rows in (1, 2, 4, 8):
            ahead = fp8_ordered_ahead_tiles(rows, n, k)
            assert ahead is None or ahead.splits == fp8_sum_order(n, k, True).splits
        for rows in (65, 129, 512, 8192):
            wide = fp8_ordered_wide_tiles(rows, n, k, by_group)
            assert (wide.splits * wide.slices, wide.last) == (order.splits, order.last)
            cells, tickets = fp8_workspace_size([(n, k)])
            count = wide.count(rows, n)
            assert wide.splits == 1 or (count <= tickets and count * wide.splits * wide.block_m * wide.block_n <= cells)


def test_deterministic_engines_read_weights_ahead_that_others_read_ahead() -> None:
    """Matrices of DeepSeek-V3 on one of eight ranks."""
    for n, k in ((2112, 7168), (3072, 1536), (7168, 2048)):
        for rows in (1, 2, 4, 8):
            assert fp8_ordered_ahead_tiles(rows, n, k) == fp8_ahead_tiles(rows, n, k) is not None


@pytest.mark.parametrize("n,k", [(2112, 7168), (130, 1792)])
def test_parts_read_ahead_add_to_the_bits_of_many_rows(n: int, k: int) -> None:
    if INTERPRETED and n > 200:
        pytest.skip("too large for the interpreter")
    weight, _ = weight_of(n, k, True, torch.Generator().manual_seed(8))
    product = TritonFp8Product(weight, workspace_of([(n, k)]), True, OUT)
    x = rows_of(200, k, torch.Generator().manual_seed(9))
    whole = product.multiply(x, None)
    for rows in (1, 2, 5, 8):
        parts = product.multiply_apart(x[:rows])
        assert parts is not None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(total.to(OUT), whole[:rows]), rows
        rounded = quantize_rows(x[:rows], True)
        assert torch.equal(product.multiply(rounded, None), whole[:rows]), rows


def test_a_rows_scale_is_its_own() -> None:
    """Whatever a checkpoint intends for a tensor: so the rounding of a row does not depend on the other rows."""
    generator = torch.Generator().manual_seed(5)
    x = rows_of(9, 256, generator) * torch.logspace(-3, 3, 9, device=DEVICE)[:, None]
    for by_group in (True, False):
        whole = quantize_rows(x, by_group)
        for row in range(9):
            alone = quantize_rows(x[row : row + 1], by_group)
            assert torch.equal(alone.values.view(torch.uint8), whole.values[row : row + 1].view(torch.uint8))
            assert torch.equal(alone.scales, whole.scales[row : row + 1])


def test_splits_divide_the_groups_and_no_rows_give_none() -> None:
    for n, k in ((7168, 2048), (2112, 7168), (4096, 4096), (64, 128), (7168, 2304)):
        for rows in (1, 33, 128):
            tiles = fp8_gemm_tiles(rows, n, k)
            assert tiles is not None and k // GROUP % tiles.splits == 0
    assert fp8_gemm_tiles(1, 64, 100) is None and fp8_gemm_tiles(129, 64, 128) is None
    weight, _ = weight_of(96, 512, True, torch.Generator().manual_seed(0))
    x = quantize_rows(torch.empty(0, 512, device=DEVICE), True)
    workspace, out = workspace_of([(96, 512)]), torch.empty(0, 96, device=DEVICE)
    assert TritonFp8Product(weight, workspace, True, OUT).multiply(x, None).shape == (0, 96)
    assert fp8_gemm_wide(x, weight, None, workspace, fp8_wide_tiles(0, 96, 512), out).shape == (0, 96)
