"""Prompt chunks of the triton backend, and where their rows write: on a GPU, or small cases under Triton's interpreter
(TRITON_INTERPRET=1), which `test_triton_interpreter` starts in a process of its own. Tolerances:
`tests.support.kernels.triton_cases`."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.registry import build_backend  # noqa: E402
from aerie.kernels.attend import prefill_plan_triton, references  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import Mode, PrefillBatch, RowInputs  # noqa: E402
from aerie.kernels.kv.slot_mapping import map_rows  # noqa: E402
from aerie.kernels.rope.rope_store import Angles  # noqa: E402
from tests.bench.kernels.gpu_time import captured  # noqa: E402
from tests.support.kernels.triton_cases import (  # noqa: E402
    HALF_TYPES,
    assert_close,
    random_pool,
    random_rows,
    random_table,
)
from tests.support.kernels.triton_interpreter import DEVICE, MARKS  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS

production = pytest.mark.gpu  # sizes that the interpreter would take minutes for


def check_prefill(
    starts: list[int],
    counts: list[int],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    images: Sequence[tuple[int, int]] = (),
) -> None:
    """images: first row and number of rows of each."""
    torch.manual_seed(len(starts))
    lengths = [start + n for start, n in zip(starts, counts, strict=True)]
    num_pages = sum(-(-n // page_size) for n in lengths) + 3
    pool = random_pool(num_pages, page_size, num_kv_heads, head_dim, dtype)
    batch = PrefillBatch.from_lists(starts, counts, random_table(lengths, page_size, num_pages))
    batch = dataclasses.replace(batch, window=window)
    rule = ScoreRule(head_dim**-0.5, within_images=bool(images))
    if images:
        reach = map_rows(batch, page_size)[0].int()
        for first, num_rows in images:
            reach[first : first + num_rows] = reach[first + num_rows - 1].item()
        batch = dataclasses.replace(batch, inputs=RowInputs(None, None, None, reach=reach))
    q = random_rows(batch.num_rows, group * num_kv_heads, head_dim, dtype)
    expected = references.prefill(q, pool.layer(0), batch, rule)
    for name in ("triton", *(("torch",) if dtype == torch.float32 else ())):
        out = build_backend(name, Mode.PREFILL).prepare(batch).forward(q, pool.layer(0), rule)
        assert_close(out, expected, dtype)
    if images:
        causal = references.prefill(q, pool.layer(0), batch, dataclasses.replace(rule, within_images=False))
        changed = (causal - expected).abs().amax((1, 2)) > 1e-3
        assert changed.nonzero().flatten().tolist() == [
            row for first, num_rows in images for row in range(first, first + num_rows - 1)
        ], "all rows of an image but its last one see more"


@pytest.mark.parametrize("page_size,group", [(64, 8), *slow((1, 1), (4, 3), (16, 4))])
def test_small_ragged_chunks(page_size: int, group: int) -> None:
    check_prefill([0, 5, 33, 0], [7, 1, 20, 30], group, 2, 16, page_size, torch.float32)


@pytest.mark.parametrize("page_size,group,window", [(16, 4, 65), *slow((1, 1, 64))])
def test_small_chunks_in_a_window(page_size: int, group: int, window: int) -> None:
    check_prefill([0, 62, 150], [70, 9, 1], group, 1, 16, page_size, torch.float32, window)


@pytest.mark.parametrize(("page_size", "group", "window"), [(16, 4, None), (16, 4, 21), *slow((1, 1, 40), (64, 8, 3))])
def test_rows_of_an_image_see_all_of_it(page_size: int, group: int, window: int | None) -> None:
    """Larger than a tile, from the first row on, to the last row on, and two adjacent ones."""
    images = [(3, 41), (44, 5), (70, 9), (90, 10)]
    check_prefill([0, 37, 150], [70, 20, 10], group, 1, 16, page_size, torch.float32, window, images)


@production
@pytest.mark.parametrize("window", [None, 1024])
def test_rows_of_an_image_see_all_of_it_in_production_sizes(window: int | None) -> None:
    """Gemma 3's images of 256 tokens, of 27B's heads."""
    check_prefill([700, 0], [1200, 600], 2, 16, 128, 64, torch.bfloat16, window, [(100, 256), (500, 256), (1300, 256)])
    check_prefill([700], [900], 2, 4, 256, 64, torch.bfloat16, window, [(100, 256), (500, 256)])


@pytest.mark.parametrize("dtype", [HALF_TYPES[0], *slow(HALF_TYPES[1])])
def test_small_chunks_in_half_types(dtype: torch.dtype) -> None:
    check_prefill([0, 40], [19, 2], 4, 1, 32, 16, dtype)


def padded(
    starts: list[int], counts: list[int], page_size: int, num_pages: int, chunks: int, rows: int, width: int
) -> PrefillBatch:
    """Known to the device only, with `chunks` chunks and `rows` rows of which some may be padding."""
    table = torch.zeros((chunks, width), dtype=torch.int32, device=DEVICE)
    lengths = [start + n for start, n in zip(starts, counts, strict=True)]
    table[: len(starts)] = random_table(lengths, page_size, num_pages, width)
    return dataclasses.replace(PrefillBatch.from_lists(starts, counts, table, rows), lists=None)


def test_chunks_that_only_the_device_knows_with_padding() -> None:
    torch.manual_seed(7)
    pool = random_pool(30, 4, 2, 16, torch.float32)
    batch = padded([0, 5, 20], [7, 1, 20], 4, 30, chunks=5, rows=40, width=12)
    q = random_rows(40, 6, 16, torch.float32)
    out = build_backend("triton", Mode.PREFILL).prepare(batch).forward(q, pool.layer(0), ScoreRule(0.25))
    expected = references.prefill(q, pool.layer(0), batch, ScoreRule(0.25))
    assert_close(out[:28], expected[:28], torch.float32)
    assert not out[28:].any()


def test_a_chunk_without_rows_between_others() -> None:
    torch.manual_seed(8)
    pool = random_pool(30, 4, 2, 16, torch.float32)
    batch = PrefillBatch.from_lists([3, 0, 9], [4, 0, 2], random_table([7, 0, 11], 4, 30))
    q = random_rows(6, 6, 16, torch.float32)
    out = build_backend("triton", Mode.PREFILL).prepare(batch).forward(q, pool.layer(0), ScoreRule(0.25))
    assert_close(out, references.prefill(q, pool.layer(0), batch, ScoreRule(0.25)), torch.float32)


CHUNKS = [
    ([0], [1]),
    ([0, 5, 33, 0], [7, 1, 20, 30]),
    ([64, 0, 64, 32], [100, 64, 0, 33]),  # equal positions: the earlier chunk comes first
    (list(range(0, 40 * 16, 16)), [n % 23 for n in range(40)]),  # more chunks than are looked at together
    pytest.param([4096, 0], [3000, 5], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rows", [1, 16, 42])
@pytest.mark.parametrize("starts,counts", CHUNKS)
def test_the_device_lists_the_tiles_that_the_host_would(starts: list[int], counts: list[int], rows: int) -> None:
    table = torch.zeros((len(starts), 1), dtype=torch.int32, device=DEVICE)
    batch = PrefillBatch.from_lists(starts, counts, table)
    assert batch.lists is not None
    expected = prefill_plan_triton.reference(batch.lists, rows)
    assert prefill_plan_triton.plan_tiles(batch, rows).tolist() == expected
    for more_rows in (0, 50):
        unknown = dataclasses.replace(batch, num_rows=batch.num_rows + more_rows, lists=None)
        tiles = prefill_plan_triton.plan_tiles(unknown, rows).tolist()
        assert tiles[: len(expected)] == expected
        assert all(tile[0] == prefill_plan_triton.IDLE.value for tile in tiles[len(expected) :])


@production
@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32])
@pytest.mark.parametrize("group,head_dim", [(4, 128), (7, 64), (1, 128)])
def test_production_chunks(group: int, head_dim: int, dtype: torch.dtype) -> None:
    check_prefill([0, 1000, 17, 4096], [1500, 513, 1, 77], group, 4, head_dim, 16, dtype)


@production
def test_a_captured_graph_follows_chunks_rows_and_pages() -> None:
    """A chunk step of fixed size: rows placed, KV stored, tiles planned and attended to, for other chunks each time."""
    torch.manual_seed(6)
    num_pages, chunks, rows, width = 900, 4, 1024, 512
    pool = random_pool(num_pages, 16, 8, 128, torch.bfloat16)
    static = padded([0], [rows], 16, num_pages, chunks, rows, width)
    q, k, v = (random_rows(rows, heads, 128, torch.bfloat16) for heads in (32, 8, 8))
    cos, sin = torch.ones((1, 64), device=DEVICE), torch.zeros((1, 64), device=DEVICE)  # turns nothing
    angles = Angles(cos, sin, torch.zeros(rows, dtype=torch.int64, device=DEVICE))
    backend = build_backend("triton", Mode.PREFILL)

    def step() -> Tensor:
        prepared, kv = backend.prepare(static), pool.layer(0)
        _, slots = map_rows(static, 16)
        prepared.plan(q, kv, ScoreRule(0.1))
        pool.store(0, q, (k, v), angles, slots)
        return prepared.forward(q, kv, ScoreRule(0.1))

    outs: list[Tensor] = []
    graph = captured(lambda: outs.append(step()))
    for starts, counts in (([0], [rows]), ([0, 7000, 33], [500, 100, 1]), ([5], [3]), ([64, 0, 64, 32], [256] * 4)):
        other = padded(starts, counts, 16, num_pages, chunks, rows, width)
        for name in ("qo_indptr", "starts", "page_table"):
            getattr(static, name).copy_(getattr(other, name))
        outs[-1].fill_(float("nan"))
        graph.replay()
        used = sum(counts)
        assert_close(
            outs[-1][:used], references.prefill(q, pool.layer(0), other, ScoreRule(0.1))[:used], torch.bfloat16
        )
        assert not outs[-1][used:].any()
