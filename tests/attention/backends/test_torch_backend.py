"""The oracle backend against attention written out position by position."""

import dataclasses

import pytest
import torch
from torch import Tensor

from aerie.attention.kv_cache.layout import HeadsLayout
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.registry import build_backend
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.kernels.kv.slot_mapping import map_decode_rows, map_prefill_rows
from tests.support.kernels.attention_cases import uniform_pool, write_tokens

HEADS, KV_HEADS, DIM = 6, 2, 8
CPU = torch.device("cpu")


def naive(q: Tensor, keys: Tensor, values: Tensor, visible: list[int]) -> Tensor:
    """One row q [heads, dim] over the visible positions of keys and values [length, kv_heads, dim], in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    for head in range(HEADS):
        kv = head * KV_HEADS // HEADS
        k, v = keys[visible, kv].double(), values[visible, kv].double()
        out[head] = torch.softmax(k @ q[head].double() * DIM**-0.5, 0) @ v
    return out


def paged(lengths: list[int], page_size: int, seed: int) -> tuple[KVPool, Tensor, list[Tensor], list[Tensor]]:
    """A pool with random KV for requests of these lengths on scattered pages, its table, and the KV per request."""
    generator = torch.Generator().manual_seed(seed)
    per_request = [-(-n // page_size) for n in lengths]
    pool = uniform_pool(1, sum(per_request), page_size, HeadsLayout(KV_HEADS, DIM, torch.float32), CPU)
    pages = (torch.randperm(sum(per_request), generator=generator) + 1).tolist()
    table = torch.zeros((len(lengths), max(per_request) + 2), dtype=torch.int32)
    keys, values = [], []
    for i, n in enumerate(lengths):
        mine = [pages.pop() for _ in range(per_request[i])]
        table[i, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        k, v = torch.randn((2, n, KV_HEADS, DIM), generator=generator)
        slots = torch.tensor([mine[p // page_size] * page_size + p % page_size for p in range(n)])
        write_tokens(pool.layer(0), slots, k, v)
        keys.append(k)
        values.append(v)
    return pool, table, keys, values


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    "rows,suffix_len,window", [(1, 1, None), (4, 4, None), (3, 9, None), (7, 7, None), (4, 4, 64), (3, 9, 65)]
)
def test_decode_rows_see_their_prefix_and_their_mask(
    page_size: int, rows: int, suffix_len: int, window: int | None
) -> None:
    """Through a window the newest of them, as many as it is wide, whatever columns of others lie between."""
    prefixes = [0, 1, 17, 54] if window is None else [0, 60, 64, 200]
    pool, table, keys, values = paged([n + suffix_len for n in prefixes], page_size, seed=rows)
    generator = torch.Generator().manual_seed(suffix_len)
    mask = torch.randint(0, 1 << suffix_len, (len(prefixes), rows), generator=generator)
    mask |= 1 << torch.arange(suffix_len - rows, suffix_len)  # every row sees itself
    q = torch.randn(len(prefixes) * rows, HEADS, DIM, generator=generator)
    batch = DecodeBatch(
        Mode.VERIFY,
        rows,
        suffix_len,
        torch.tensor(prefixes, dtype=torch.int32),
        mask,
        table,
        prefixes[-1] + suffix_len,
        window=window,
    )
    out = build_backend("torch", Mode.VERIFY).prepare(batch).forward(q, pool.layer(0), ScoreRule(DIM**-0.5))
    for b, prefix in enumerate(prefixes):
        for r in range(rows):
            seen = list(range(prefix)) + [prefix + j for j in range(suffix_len) if int(mask[b, r]) >> j & 1]
            expected = naive(q[b * rows + r], keys[b], values[b], seen[-window:] if window else seen)
            # float32 sums of up to 74 terms: 74 * 2^-24 relative, values below 4
            torch.testing.assert_close(out[b * rows + r].double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 64])
def test_chunk_rows_see_all_before_them(page_size: int, window: int | None) -> None:
    starts, counts = ([0, 5, 33], [7, 1, 20]) if window is None else ([0, 63, 133], [70, 3, 20])
    pool, table, keys, values = paged([s + n for s, n in zip(starts, counts, strict=True)], page_size, seed=3)
    q = torch.randn(sum(counts), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    batch = dataclasses.replace(PrefillBatch.from_lists(starts, counts, table), window=window)
    out = build_backend("torch", Mode.PREFILL).prepare(batch).forward(q, pool.layer(0), ScoreRule(DIM**-0.5))
    row = 0
    for c, start in enumerate(starts):
        for i in range(counts[c]):
            seen = list(range(start + i + 1))
            expected = naive(q[row], keys[c], values[c], seen[-window:] if window else seen)
            torch.testing.assert_close(out[row].double(), expected, atol=2e-6, rtol=1e-5)
            row += 1


def decoded(pool: KVPool, q: Tensor, lengths: list[int], table: Tensor, max_kv_len: int) -> Tensor:
    """One row for each request, which writes at its length."""
    prefix, mask = torch.tensor(lengths, dtype=torch.int32), causal_mask(len(lengths), 1, CPU)
    batch = DecodeBatch(Mode.DECODE, 1, 1, prefix, mask, table, max_kv_len)
    return build_backend("torch", Mode.DECODE).prepare(batch).forward(q, pool.layer(0), ScoreRule(1.0))


def test_a_row_does_not_depend_on_what_its_neighbours_hold() -> None:
    """To the bit, in batches of one size and one bound of lengths, whose matrix products are the same calls."""
    pool, table, _, _ = paged([9, 60], 4, seed=5)
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    expected = decoded(pool, q, [8, 59], table, 60)[0]
    others = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    for length, neighbour in ((59, others), (30, others), (0, others), (0, torch.zeros_like(others))):
        out = decoded(pool, torch.cat((q[:1], neighbour)), [8, length], table, 60)[0]
        assert torch.equal(out, expected), length
    pool.layer(0).k[table[1].long()] = 7.0  # its pages, and page 0, which both have after their ends
    assert torch.equal(decoded(pool, q, [8, 59], table, 60)[0], expected)


def test_a_row_alone_is_close_to_what_it_is_beside_others() -> None:
    """A library of matrix products may choose its kernel by the size of a batch, and so the order of its sums."""
    pool, table, _, _ = paged([9, 60], 4, seed=5)
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    beside = decoded(pool, q, [8, 59], table, 60)[:1]
    for bound in (60, 9):
        alone = decoded(pool, q[:1], [8], table[:1], bound)
        # float32 sums of up to 60 terms: 60 * 2^-24 relative, values below 4
        torch.testing.assert_close(alone, beside, atol=2e-6, rtol=1e-5)


def test_token_indices_follow_the_page_table() -> None:
    table = torch.tensor([[3, 1, 7], [2, 9, 0]], dtype=torch.int32)
    batch = DecodeBatch(Mode.VERIFY, 2, 3, torch.tensor([3, 4], dtype=torch.int32), causal_mask(2, 2, CPU), table, 8)
    # columns 1 and 2 of the suffix: positions 4, 5 and 5, 6 on pages of 4
    assert map_decode_rows(batch, 4)[1].tolist() == [4, 5, 37, 38]
    chunks = PrefillBatch.from_lists([3, 0], [2, 3], table)
    assert map_prefill_rows(chunks, 4)[1].tolist() == [15, 4, 8, 9, 10]
    store_from = torch.tensor([4, 1], dtype=torch.int32)
    assert map_prefill_rows(dataclasses.replace(chunks, store_from=store_from), 4)[1].tolist() == [3, 4, 0, 9, 10]


def test_an_unknown_backend_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match="'fa9': does not exist; choose one of .*torch"):
        build_backend("fa9", Mode.DECODE)


@pytest.mark.parametrize("argument", ["q", "k"])
def test_strides_that_kernels_do_not_read_are_refused(argument: str) -> None:
    """On a CPU, too, though torch takes any."""
    pool, table, _, _ = paged([5, 9], 4, seed=0)
    prefix = torch.tensor([4, 8], dtype=torch.int32)
    batch = DecodeBatch(Mode.DECODE, 1, 1, prefix, causal_mask(2, 1, CPU), table, 9)
    prepared, kv, q = build_backend("torch", Mode.DECODE).prepare(batch), pool.layer(0), torch.zeros(2, HEADS, DIM)
    prepared.forward(q, kv, ScoreRule(1.0))
    if argument == "q":
        q = torch.zeros(2, HEADS, 2 * DIM)[..., ::2]
    else:
        kv = dataclasses.replace(kv, k=kv.k.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(AssertionError):
        prepared.forward(q, kv, ScoreRule(1.0))
