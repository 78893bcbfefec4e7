"""Pools, tables, rows and batches for tests of Triton kernels, on a GPU or for the interpreter, and how close a result
must be.

Tolerances bound ||out - expected|| / ||expected|| of one row and head. Weights and results are rounded to the cache's
type, each by at most half a unit in the last place: twice that is bound enough; for float32, sums of up to 10^4 terms.
"""

import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import HeadsLayout
from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.kv.batches import DecodeBatch, Mode
from tests.support.kernels.attention_cases import fill_randomly, uniform_pool
from tests.support.kernels.triton_interpreter import DEVICE

HALF_TYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random_pool(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPool:
    """All pages filled, those of nobody and page 0 too: what a kernel must not read would be seen."""
    pool = uniform_pool(1, num_pages, page_size, HeadsLayout(num_kv_heads, head_dim, dtype), DEVICE)
    fill_randomly(pool)
    return pool


def random_table(lengths: list[int], page_size: int, num_pages: int, width: int | None = None) -> Tensor:
    """[len(lengths), width] int32 of distinct random pages; zeros after a request's end."""
    counts = [-(-n // page_size) for n in lengths]
    table = torch.zeros((len(lengths), width or max(counts) + 1), dtype=torch.int32)
    pages = (torch.randperm(num_pages)[: sum(counts)] + 1).int().split(counts)
    for row, mine in zip(table, pages, strict=True):
        row[: len(mine)] = mine
    return table.to(DEVICE)


def random_rows(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[rows, heads, head_dim] as a model has them: a view of a packed product."""
    return torch.randn((rows, heads + 4, head_dim), device=DEVICE).to(dtype)[:, :heads]


def random_decode(
    mode: Mode,
    rows: int,
    suffix_len: int,
    prefixes: list[int],
    page_size: int,
    num_pages: int,
    window: int | None = None,
) -> DecodeBatch:
    """Random masks in which every row sees itself."""
    mask = torch.randint(0, 1 << min(suffix_len, 62), (len(prefixes), rows), dtype=torch.int64)
    mask |= 1 << torch.arange(suffix_len - rows, suffix_len)
    table = random_table([n + suffix_len for n in prefixes], page_size, num_pages)
    lengths = torch.tensor(prefixes, dtype=torch.int32, device=DEVICE)
    longest = max(prefixes) + suffix_len
    return DecodeBatch(mode, rows, suffix_len, lengths, mask.to(DEVICE), table, longest, window=window)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < TOLERANCE[dtype], f"relative error {error.max():.2e} at {error.argmax()} of {error.shape}"
