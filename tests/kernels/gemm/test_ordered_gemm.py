"""Products of deterministic engines: a row has the same bits for every number of rows. On a GPU, or under Triton's
interpreter (TRITON_INTERPRET=1), which `tests/kernels/test_triton_interpreter.py` starts in a process of its own.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm import ordered_triton  # noqa: E402
from aerie.kernels.gemm.ordered_triton import OrderedGEMM, ordered_rows  # noqa: E402
from aerie.kernels.gemm.tiles import (  # noqa: E402
    INPUT_STEP,
    MAX_ROWS,
    SkinnyGemmTiles,
    SumOrder,
    many_ordered_tiles,
    ordered_tiles,
    ordered_workspace_size,
    sum_order,
)
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

MAX_STEP = 256  # columns of the largest step of a kernel
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 64, 65, 127, 512)
# Matrices of Llama-3.1-8B, Llama-3.1-70B on 8 ranks, Qwen3-8B, gpt-oss-20b, and shapes that fill no tile
SERVED = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1280, 8192), (8192, 1024), (4096, 12288)]
SERVED += [(5120, 2880), (2880, 4096), (70, 384)]
SMALL = [(70, 2560), (8466, 128), (64, 384), (96, 192)]  # two slices; one, of many outputs; three steps; K of 64
SHAPES = SMALL if INTERPRETED else SERVED


def workspace_of(*shapes: tuple[int, int]) -> Workspace:
    return Workspace.allocate(*ordered_workspace_size(shapes), DEVICE)


def order_matters(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return x and W whose products have one term per MAX_STEP columns: 2^24, 1, -2^24 and neighbours in turn, so that
    a sum depends on the order of additions, but not on how numpy adds inside a step."""
    terms, place = torch.zeros(k), torch.arange(0, k, MAX_STEP)
    terms[place] = torch.tensor([2.0**12, 2.0**-12, -(2.0**12), 2.0**-11, 2.0**-12])[place // MAX_STEP % 5]
    x = terms.repeat(rows, 1) * (1 + torch.arange(rows) % 3)[:, None]
    weight = torch.full((n, k), 2.0**12) * (1 + torch.arange(n) % 5)[:, None]
    return x.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE)


def in_order(x: Tensor, weight: Tensor, order: SumOrder) -> Tensor:
    """Return the sums [rows, N] float32, added term by term in `order`."""
    total = None
    for first in range(0, order.splits * order.span, order.span):
        columns = [*range(first + order.last, first + order.span), *range(first, first + order.last)]
        acc = torch.zeros(x.shape[0], weight.shape[0])
        for column in columns:
            if column % MAX_STEP == 0 and column < x.shape[1]:
                acc += x[:, column, None].float().cpu() * weight[None, :, column].float().cpu()
        total = acc if total is None else total + acc
    assert total is not None
    return total


@pytest.mark.parametrize("n,k", SMALL)
def test_sums_are_added_in_the_order_of_the_weight(n: int, k: int) -> None:
    space = workspace_of((n, k))
    x, weight = order_matters(5, n, k)
    order = sum_order(n, k)
    expected = in_order(x, weight, order)
    if order.splits > 1:
        assert order == SumOrder(2, 1280, 256)
        natural = in_order(x, weight, SumOrder(1, k, 0))
        assert not torch.equal(expected, natural), "the order does not matter, so nothing is shown"
    for rows in ROWS if n < 8000 else (1, 65, 130):
        wide = x[:1].expand(rows, k).contiguous()
        out = torch.empty((rows, n), dtype=torch.float32, device=DEVICE)
        ordered_rows(wide, weight, None, space, out)
        assert torch.equal(out.cpu(), expected[:1].expand(rows, n)), rows
    assert not bool(space.tickets.any())


def differing(rows_of: tuple[int, ...], x: Tensor, weight: Tensor, space: Workspace) -> list[int]:
    """Return the numbers of rows for which some row differs from the same row of all."""
    whole = ordered_rows(x, weight, None, space)
    return [
        rows
        for rows in rows_of
        if not torch.equal(ordered_rows(x[-rows:].contiguous(), weight, None, space), whole[-rows:])
    ]


@pytest.mark.parametrize("n,k", SHAPES)
def test_a_row_has_the_same_bits_for_every_number_of_rows(n: int, k: int) -> None:
    """Interpreted with whole numbers: numpy's products round a row by its position on some CPUs (AMD EPYC)."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator)
        return (numbers.round() if INTERPRETED else numbers / k**0.25).to(DEVICE, DTYPE)

    space = workspace_of((n, k))
    all_rows = ROWS if not INTERPRETED or n < 8000 else (1, 31, 65, 130)  # the last by tiles of many rows
    weight, x = random(n, k), random(all_rows[-1] if INTERPRETED else 2048, k)
    assert differing(all_rows, x, weight, space) == []
    expected = x.double() @ weight.double().T
    found = ordered_rows(x, weight, None, space)
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-3
    bias = random(n)
    assert torch.equal(ordered_rows(x[:3].contiguous(), weight, bias, space), ordered_rows(x, weight, bias, space)[:3])


def test_a_kernel_whose_slices_depend_on_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = SMALL[0]
    x, weight = order_matters(16, n, k)
    assert differing((1, 2, 8), x, weight, workspace_of((n, k))) == []

    def planted(rows: int, n: int, k: int) -> SkinnyGemmTiles | None:
        tiles = ordered_tiles(rows, n, k)
        return tiles if tiles is None or rows > 2 else replace(tiles, splits=4, ahead=False, last=0)

    monkeypatch.setattr(ordered_triton, "ordered_tiles", planted)
    assert differing((1, 2, 8), x, weight, Workspace.allocate(1 << 16, 64, DEVICE)) == [1, 2]


@pytest.mark.parametrize("n,k", [(2 * 4233, 128)] if INTERPRETED else [(28672, 4096), (24576, 4096), (2048, 2048)])
def test_a_gated_row_has_the_same_bits_for_every_number_of_rows(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(DEVICE, DTYPE)
    x = torch.randn(130 if INTERPRETED else 200, k, generator=generator).to(DEVICE, DTYPE)
    if INTERPRETED:
        weight, x = (4 * weight).round(), x.round()
    gemm = OrderedGEMM(weight, workspace_of((n, k)))
    whole = gemm.multiply_gated(x)
    assert torch.equal(whole, silu_mul(gemm.multiply(x, None, None))) or INTERPRETED, "torch's silu rounds otherwise"
    first = gemm.multiply_gated(x[:1])
    for rows in (2, 65) if INTERPRETED else (2, 17, 64, 65, 127):
        found = gemm.multiply_gated(x[:rows])
        assert torch.equal(found[:1], first), rows
        assert INTERPRETED or torch.equal(found, whole[:rows]), rows


def test_tiles_of_every_number_of_rows_have_the_order_of_the_weight() -> None:
    for n, k in (*SERVED, *SMALL, (152064, 8192), (8448, 7168)):
        order = sum_order(n, k)
        assert order.splits * order.span >= k and order.last % INPUT_STEP == order.span % INPUT_STEP == 0
        for rows in (*range(1, MAX_ROWS + 1), 129, 512, 8192):
            tiles = ordered_tiles(rows, n, k)
            if tiles is not None:
                assert tiles.splits == order.splits and (tiles.last or tiles.columns_ahead) == order.last
                assert order.splits == 1 or tiles.span(k) == order.span
            else:
                assert rows > MAX_ROWS and order.span % many_ordered_tiles(rows, n, k).block_k == 0


def test_no_rows_give_none() -> None:
    n, k = SMALL[0]
    weight = torch.randn(n, k).to(DEVICE, DTYPE)
    gemm = OrderedGEMM(weight, workspace_of((n, k)))
    assert gemm.multiply(weight[:0], None, None).shape == (0, n) and gemm.multiply_gated(weight[:0]).shape == (
        0,
        n // 2,
    )
