"""The triton backend against float64: on a GPU, or small cases under Triton's interpreter (TRITON_INTERPRET=1), which
`test_triton_interpreter` starts in a process of its own. Prompt chunks: `test_triton_prefill`. Tolerances:
`tests.support.kernels.triton_cases`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.backends.triton_backend import TritonBackend  # noqa: E402
from aerie.attention.registry import build_backend  # noqa: E402
from aerie.kernels.attend import decode_plan_triton, decode_triton, references, split_kv_triton  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask  # noqa: E402
from aerie.kernels.kv.tree_masks import span_masks  # noqa: E402
from tests.support.kernels.triton_cases import (  # noqa: E402
    HALF_TYPES,
    assert_close,
    random_decode,
    random_pool,
    random_rows,
    random_table,
)
from tests.support.kernels.triton_interpreter import DEVICE, MARKS  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS

production = pytest.mark.gpu  # sizes that the interpreter would take minutes for


def check_decode(
    mode: Mode,
    rows: int,
    suffix_len: int,
    prefixes: list[int],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> None:
    torch.manual_seed(rows * 100 + suffix_len)
    num_pages = sum(-(-(n + suffix_len) // page_size) for n in prefixes) + 3
    pool = random_pool(num_pages, page_size, num_kv_heads, head_dim, dtype)
    batch = random_decode(mode, rows, suffix_len, prefixes, page_size, num_pages, window)
    q = random_rows(batch.num_rows, group * num_kv_heads, head_dim, dtype)
    prepared = build_backend("triton", mode).prepare(batch)
    expected = references.decode(q, pool.layer(0), batch, ScoreRule(head_dim**-0.5))
    for _ in range(2):  # the second call finds what the first left in the workspace
        out = prepared.forward(q, pool.layer(0), ScoreRule(head_dim**-0.5))
        assert out.dtype == q.dtype and out.is_contiguous()
        assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    "page_size,group,rows,suffix_len",
    [
        (1, 1, 1, 1),
        (16, 4, 3, 63),
        *slow((4, 3, 2, 5), (64, 8, 8, 8), (16, 4, 4, 4), (4, 8, 5, 9), (64, 1, 7, 20)),
    ],
)
def test_small_ragged_batches(page_size: int, group: int, rows: int, suffix_len: int) -> None:
    check_decode(Mode.VERIFY, rows, suffix_len, [0, 1, 77, 200], group, 2, 16, page_size, torch.float32)


@pytest.mark.parametrize(
    "mode,rows,suffix_len", [(Mode.DECODE, 1, 1), (Mode.DRAFT_DECODE, 4, 12), *slow((Mode.DRAFT_EXTEND, 4, 4))]
)
@pytest.mark.parametrize("dtype", [HALF_TYPES[0], *slow(HALF_TYPES[1])])
def test_small_batches_in_half_types(mode: Mode, rows: int, suffix_len: int, dtype: torch.dtype) -> None:
    check_decode(mode, rows, suffix_len, [130, 0, 64], 4, 1, 32, 16, dtype)


@pytest.mark.parametrize("page_size,rows,suffix_len,window", [(64, 3, 63, 64), *slow((1, 1, 1, 64), (16, 4, 4, 65))])
def test_small_batches_in_a_window(page_size: int, rows: int, suffix_len: int, window: int) -> None:
    check_decode(Mode.VERIFY, rows, suffix_len, [0, 63, 64, 300], 4, 1, 16, page_size, torch.float32, window)


def test_what_is_before_a_window_is_not_read() -> None:
    """It is no number here. Rows that share a tile have windows that begin at different places."""
    torch.manual_seed(5)
    prefix, page_size, window = 200, 4, 64
    pool = random_pool(60, page_size, 2, 16, torch.float32)
    batch = random_decode(Mode.DRAFT_DECODE, 2, 2, [prefix], page_size, 60, window)
    batch.mask.fill_(1).mul_(torch.tensor([1, 3], device=DEVICE))
    before = (prefix - window) // decode_plan_triton.decode_tiles(4, 16, 4, 0.5).block_n * 32 // page_size
    pool.layer(0).k[batch.page_table[0, :before].long()] = float("nan")
    q = random_rows(2, 4, 16, torch.float32)
    out = build_backend("triton", Mode.DRAFT_DECODE).prepare(batch).forward(q, pool.layer(0), ScoreRule(0.25))
    assert out.isfinite().all()


def test_more_rows_than_a_program_takes() -> None:
    check_decode(Mode.VERIFY, 21, 21, [5, 100], 4, 1, 16, 16, torch.float32)


@pytest.mark.parametrize(
    ("longest", "separately"),
    [
        (300, True),
        *slow((1400, False), (300, False), (1400, True)),
    ],
)
def test_both_ways_to_merge(longest: int, separately: bool) -> None:
    torch.manual_seed(longest)
    pool = random_pool(330, 16, 2, 16, torch.float32)
    batch = random_decode(Mode.VERIFY, 3, 3, [longest, 100, 1500], 16, 320)
    q = random_rows(9, 4, 16, torch.float32)
    tiles = decode_plan_triton.DecodeTiles(16, 32, 4, 2, 1, 64)
    items = split_kv_triton.plan_items(batch.prefix_len, 3, 60, 100, 32, decode_plan_triton.MAX_SPLITS)
    assert (items.requests[0, 1] > decode_plan_triton.FAN) == (longest > 1000)  # then two levels, or several rounds
    workspace = decode_plan_triton.DecodeWorkspace.create(tiles, 16, 120, DEVICE)
    plan = decode_plan_triton.DecodePlan(tiles, items, workspace, separately, 8)
    expected = references.decode(q, pool.layer(0), batch, ScoreRule(0.25))
    for _ in range(2):
        assert_close(
            decode_triton.attend_decode(q, pool.layer(0), batch, plan, ScoreRule(0.25)), expected, torch.float32
        )
    assert not workspace.tickets.any()


@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (75, 1)])
def test_trees_of_more_nodes_than_a_mask_has_bits(window: int | None, page_size: int) -> None:
    torch.manual_seed(5)
    width, prefixes = 70, [90, 17, 0]
    parents = torch.stack([(torch.rand(width) * torch.arange(width)).long() for _ in prefixes])
    num_pages = sum(-(-(prefix + width) // page_size) for prefix in prefixes) + 3
    pool = random_pool(num_pages, page_size, 2, 16, torch.float32)
    batch = random_decode(Mode.VERIFY, width, width, prefixes, page_size, num_pages)
    batch = replace(batch, mask=span_masks(parents, width).to(DEVICE))
    q = random_rows(batch.num_rows, 4, 16, torch.float32)
    rule = ScoreRule(0.25, window=window)
    out = build_backend("triton", Mode.VERIFY).prepare(batch).forward(q, pool.layer(0), rule)
    assert_close(out, references.decode(q, pool.layer(0), batch, rule), torch.float32)


def test_padding_requests_are_harmless() -> None:
    torch.manual_seed(3)
    pool = random_pool(20, 16, 2, 16, torch.float32)
    real = random_decode(Mode.VERIFY, 3, 3, [90, 17], 16, 20)
    lengths, table = real.prefix_len.new_zeros(4), real.page_table.new_zeros((4, real.page_table.shape[1]))
    mask = real.mask.new_zeros((4, 3))  # padding rows see nothing at all
    lengths[1:3], table[1:3], mask[1:3] = real.prefix_len, real.page_table, real.mask
    batch = DecodeBatch(Mode.VERIFY, 3, 3, lengths, mask, table, 93)
    q = random_rows(12, 4, 16, torch.float32)
    out = build_backend("triton", Mode.VERIFY).prepare(batch).forward(q, pool.layer(0), ScoreRule(0.25))
    assert out.isfinite().all()
    assert_close(out[3:9], references.decode(q[3:9], pool.layer(0), real, ScoreRule(0.25)), torch.float32)


def test_a_head_dimension_that_tiles_cannot_have_is_refused() -> None:
    pool = random_pool(4, 16, 1, 24, torch.float32)
    batch = random_decode(Mode.DECODE, 1, 1, [3], 16, 4)
    prepared = build_backend("triton", Mode.DECODE).prepare(batch)
    with pytest.raises(ValueError, match="head_dim=24: must be a power of two"):
        prepared.forward(random_rows(1, 2, 24, torch.float32), pool.layer(0), ScoreRule(1.0))


def test_a_causal_mask_without_memory_per_request() -> None:
    torch.manual_seed(4)
    pool = random_pool(20, 16, 2, 16, torch.float32)
    table = random_table([94, 40], 16, 20)
    lengths = torch.tensor([90, 36], dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(Mode.DRAFT_EXTEND, 4, 4, lengths, causal_mask(2, 4, DEVICE), table, 94)
    q = random_rows(8, 4, 16, torch.float32)
    out = build_backend("triton", Mode.DRAFT_EXTEND).prepare(batch).forward(q, pool.layer(0), ScoreRule(0.25))
    assert_close(out, references.decode(q, pool.layer(0), batch, ScoreRule(0.25)), torch.float32)


@pytest.mark.parametrize(
    "lengths,budget,window",
    [
        ([5], 0, None),
        ([700], 16, None),
        ([640, 640, 640], 9, None),
        ([4, 4000, 65, 64, 1], 7, None),
        ([33] * 50, 12, None),
        ([640 + 7 * i % 23 for i in range(32)], 66, None),
        ([8192], 64, None),
        ([4, 4000, 65, 64, 1, 129], 7, 64),
        ([8192, 1000], 64, 900),
        ([4000, 63], 0, 100),
    ],
)
def test_the_device_plans_the_items_that_the_host_would(lengths: list[int], budget: int, window: int | None) -> None:
    prefix = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    items = split_kv_triton.plan_items(prefix, 1, budget, 50, tile=32, max_splits=64, window=window).items.tolist()
    expected = split_kv_triton.reference(prefix.tolist(), 1, budget, 50, 32, 64, window)
    if window is not None:
        assert sum(high - low for _, low, high, *_ in expected) <= len(lengths) * (window + 32)
    assert [row[:6] for row in items[: len(expected)]] == expected
    assert all(row[0] == split_kv_triton.IDLE.value for row in items[len(expected) :])
    assert len(expected) <= len(items) == len(lengths) + budget
    assert max(first + count for _, _, _, _, first, count in expected) <= 2 * budget + 1


def num_items(lengths: list[int], budget: int) -> list[int]:
    """Return the number of work items of each request."""
    found = split_kv_triton.reference([n - 1 for n in lengths], 1, budget, 64, 64, 64)
    return [sum(row[0] == request for row in found) for request in range(len(lengths))]


def test_requests_of_about_equal_lengths_fill_the_device_once() -> None:
    assert num_items([4096] * 8, 66) == [8] * 8
    assert num_items([512 + 11 * i % 140 for i in range(64)], 132) == [2] * 64
    assert num_items([32768 - 50 * i for i in range(5)], 33) == [6] * 5
    assert num_items([600 + i for i in range(100)], 66) == [1] * 100  # cannot all be cut


def test_a_long_request_among_short_ones_is_cut_into_more() -> None:
    counts = num_items([32000] + [500] * 129, 132)
    assert counts[0] > 30 and counts[1:] == [1] * 129


@production
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("rows,suffix_len", [(1, 1), (4, 4), (8, 8), (16, 16), (5, 23), (10, 60), (63, 63)])
def test_ragged_production_batches(rows: int, suffix_len: int, dtype: torch.dtype) -> None:
    check_decode(Mode.VERIFY, rows, suffix_len, [0, 1, 63, 640, 1023, 5000, 12345], 4, 8, 128, 16, dtype)


@production
@pytest.mark.parametrize("num_kv_heads,group", [(1, 4), (2, 5), (8, 8), (4, 7), (32, 1), (1, 16)])
@pytest.mark.parametrize("page_size", [1, 32, 64])
def test_production_heads_and_pages(num_kv_heads: int, group: int, page_size: int) -> None:
    check_decode(Mode.VERIFY, 4, 4, [700, 31, 0, 2222], group, num_kv_heads, 64, page_size, torch.bfloat16)
    check_decode(Mode.DECODE, 1, 1, [700, 31, 0, 2222], group, num_kv_heads, 128, page_size, torch.bfloat16)


@production
def test_large_batches_in_which_one_request_is_long() -> None:
    check_decode(Mode.VERIFY, 4, 4, [30000] + [100 + 7 * i for i in range(150)], 4, 8, 128, 16, torch.bfloat16)
    check_decode(Mode.DECODE, 1, 1, [20000] + [3 * i for i in range(30)], 4, 2, 64, 16, torch.float32)


@production
@pytest.mark.parametrize("rows,suffix_len", [(1, 1), (4, 4), (4, 12), (16, 16)])
def test_a_captured_graph_follows_lengths_pages_and_masks(rows: int, suffix_len: int) -> None:
    torch.manual_seed(6)
    num_pages, requests, scale = 3000, 6, 128**-0.5
    pool = random_pool(num_pages, 16, 8, 128, torch.bfloat16)
    q = random_rows(requests * rows, 32, 128, torch.bfloat16)
    static = random_decode(Mode.VERIFY, rows, suffix_len, [40] * requests, 16, num_pages)
    static = DecodeBatch(
        static.mode,
        rows,
        suffix_len,
        static.prefix_len,
        static.mask,
        torch.zeros((requests, 2000), dtype=torch.int32, device=DEVICE),
        32000,
    )
    backend = TritonBackend()

    def layers() -> list[Tensor]:
        prepared = backend.prepare(static)
        return [prepared.forward(q, pool.layer(0), ScoreRule(scale)) for _ in range(3)]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for prefixes in ([40] * 6, [0, 0, 9000, 3, 700, 15], [31000, 0, 0, 0, 0, 0], [5000, 4999, 5001, 1, 2, 16]):
        batch = random_decode(Mode.VERIFY, rows, suffix_len, prefixes, 16, num_pages)
        static.prefix_len.copy_(batch.prefix_len)
        static.mask.copy_(batch.mask)
        static.page_table.zero_()
        static.page_table[:, : batch.page_table.shape[1]] = batch.page_table
        expected = references.decode(q, pool.layer(0), batch, ScoreRule(scale))
        for _ in range(2):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for out in outs:
                assert_close(out, expected, torch.bfloat16)
                assert torch.equal(out, outs[0])


@production
def test_a_new_shape_under_capture_is_refused() -> None:
    pool = random_pool(8, 16, 8, 128, torch.bfloat16)
    batch = random_decode(Mode.VERIFY, 2, 2, [40, 41], 16, 8)
    q = random_rows(4, 32, 128, torch.bfloat16)
    TritonBackend().prepare(batch).forward(q, pool.layer(0), ScoreRule(1.0))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run it once before"), torch.cuda.graph(graph):
        q.zero_()  # torch warns of empty graphs
        TritonBackend().prepare(batch).forward(q, pool.layer(0), ScoreRule(1.0))
