"""Adapters' parts in deterministic engines: a row's has the same bits whatever rows are beside it. On a GPU, or under
Triton's interpreter, which `tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.lora.product import LoraTables  # noqa: E402
from aerie.kernels.lora.product_triton import add_lora  # noqa: E402
from tests.kernels.ops.lora_cases import lora_tables  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
STEP = 128  # inputs of which one product has one term, so that numpy's own order inside a product has no effect
ROWS = (1, 16, 65) if INTERPRETED else (1, 2, 5, 8, 16, 17, 31, 64, 65, 127, 512, 513)
MOST_ROWS = 513 if INTERPRETED else 2048
SERVED = (  # Llama-3.1-8B's q, k and v, gates, and down projection; odd ones
    (4096, (0, 4096, 5120, 6144), 16),
    (4096, (0, 14336, 28672), 64),
    (14336, (0, 4096), 16),
    (136, (0, 72), 48),
)
SMALL = ((1400, (0, 40, 72), 16),)


def order_matters(rows: int, inputs: int, parts: tuple[int, ...], rank: int) -> tuple[Tensor, LoraTables]:
    """Return x and tables of two adapters in which A x has a term in every STEP inputs: 2^12, 2^-12, -2^12 and
    neighbours in turn."""
    terms, place = torch.zeros(inputs), torch.arange(0, inputs // STEP // 5 * 5 * STEP, STEP)
    terms[1] = 2.0**-11
    terms[place] = torch.tensor([2.0**12, 2.0**-12, -(2.0**12), 2.0**-11, 2.0**-12])[place // STEP % 5]
    tables = lora_tables(2, rank, inputs, parts, parts[-1], DTYPE, DEVICE)
    down = torch.full_like(tables.down, 2.0**10) * torch.tensor([1.0, 3.0], device=DEVICE).to(DTYPE)[:, None, None]
    x = terms.repeat(rows, 1) * (1 + torch.arange(rows) % 3)[:, None]
    return x.to(DEVICE, DTYPE), LoraTables(down, tables.up, parts)


def differing(x: Tensor, y: Tensor, tables: LoraTables, all_rows: tuple[int, ...]) -> list[int]:
    """Return the numbers of rows for which some row differs from the same row among all."""
    chosen = (torch.arange(x.shape[0]) % 3 - 1).int().to(DEVICE)
    whole = add_lora(y.clone(), x, tables, chosen)
    assert whole[chosen < 0].equal(y[chosen < 0]) and not whole[chosen >= 0].equal(y[chosen >= 0])
    return [
        rows
        for rows in all_rows
        if not add_lora(y[-rows:].clone(), x[-rows:].contiguous(), tables, chosen[-rows:].clone()).equal(whole[-rows:])
    ]


@pytest.mark.parametrize("inputs,parts,rank", SMALL if INTERPRETED else SERVED)
def test_a_row_has_the_same_bits_for_every_number_of_rows(inputs: int, parts: tuple[int, ...], rank: int) -> None:
    x, tables = order_matters(MOST_ROWS, inputs, parts, rank)
    y = torch.arange(MOST_ROWS * parts[-1]).remainder(7).reshape(MOST_ROWS, -1).to(DEVICE, DTYPE)
    assert differing(x, y, replace(tables, fixed=True), ROWS) == []
    if not INTERPRETED:
        x = (torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) / inputs**0.5).to(DEVICE, DTYPE)
        random = lora_tables(2, rank, inputs, parts, parts[-1], DTYPE, DEVICE)
        assert differing(x, y, replace(random, fixed=True), ROWS) == []


def test_sums_whose_order_follows_the_number_of_rows_are_found() -> None:
    """As those of free engines."""
    inputs, parts, rank = SMALL[0]
    x, tables = order_matters(130, inputs, parts, rank)
    y = torch.zeros(130, parts[-1], device=DEVICE, dtype=DTYPE)
    assert differing(x, y, tables, (2, 16, 65)) == [2, 16]
