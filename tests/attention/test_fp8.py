"""FP8 in the KV cache: what is stored, and that it is read back exactly."""

import pytest
import torch

from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.attention.kv_cache.pool import KVPool, bytes_per_page
from aerie.kernels.kv.stored_values import FP8, KVScales, read_pages, stored, write_rows

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_is_read_exactly_and_stored_again_as_it_was(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pages = codes.view(FP8).view(4, 8, 8)
    values = read_pages(pages, torch.tensor([2, 0]), dtype)
    assert values.dtype == dtype
    expected = pages[[2, 0]] if dtype == FP8 else torch.stack((pages[2].float(), pages[0].float()))
    torch.testing.assert_close(values.float(), expected, rtol=0, atol=0, equal_nan=True)
    numbers = codes.view(FP8).float()
    again = stored(numbers.to(dtype), FP8, 1.0).view(torch.uint8)
    assert torch.equal(again[~numbers.isnan()], codes[~numbers.isnan()])


def test_numbers_beyond_448_saturate_and_nan_stays() -> None:
    rows = torch.tensor([449.0, 464.1, 1e9, float("inf"), -1e9, NAN, 447.0])
    kept = stored(rows, FP8, 1.0).float()
    expected = torch.tensor([448.0, 448, 448, 448, -448, NAN, 448])
    torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)
    assert stored(rows, FP8, 1e9).float()[2] == 1.0


def test_rows_are_written_to_their_slots_only() -> None:
    pages = torch.zeros((3, 4, 2, 8), dtype=FP8)
    rows = torch.randn((3, 2, 8), generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.tensor([11, 4, 6])
    write_rows(pages, slots, rows, 0.5)
    flat = pages.float().view(12, 2, 8)
    assert torch.equal(flat[slots], (rows.float() * 2).to(FP8).float())
    assert not flat[[0, 1, 2, 3, 5, 7, 8, 9, 10]].any()


def test_a_pool_in_fp8_has_half_the_bytes_and_its_layers_scales() -> None:
    groups = [LayerGroup((0, 3), HeadsLayout(2, 16, dtype)) for dtype in (torch.bfloat16, FP8)]
    assert bytes_per_page(groups[1:], 16) * 2 == bytes_per_page(groups[:1], 16)
    pool = KVPool(groups[1:], 2, 4, CPU, {3: KVScales(0.5, 2.0)})
    pool.allocate(5)
    assert (pool.layer(3).k_scale, pool.layer(3).v_scale, pool.layer(0).k_scale) == (0.5, 2.0, 1.0)
    assert KVPool(groups[:1], 2, 4, CPU, {3: KVScales(0.5, 2.0)}).layer(3).k_scale == 1.0


def test_pages_are_cleared_of_nan() -> None:
    pool = KVPool([LayerGroup((0,), HeadsLayout(1, 8, FP8))], 2, 4, CPU)
    pool.layer(0).k.view(torch.uint8)[1:] = 0x7F
    pool.clear(torch.tensor([1]))
    assert not pool.layer(0).k[1].float().any() and pool.layer(0).k[2].float().isnan().all()
