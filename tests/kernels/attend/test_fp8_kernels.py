"""Our attention kernels over FP8 pages, in the dtype of their queries, against float64 over what the pages hold: on a
GPU, or small cases under Triton's interpreter. Tolerances: `tests.support.kernels.triton_cases`."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.backends.triton_backend import TritonBackend  # noqa: E402
from aerie.attention.kv_cache.layout import HeadsLayout, LatentLayout  # noqa: E402
from aerie.kernels.attend import references  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch  # noqa: E402
from aerie.kernels.kv.stored_values import FP8  # noqa: E402
from tests.support.kernels.attention_cases import fill_randomly, uniform_pool  # noqa: E402
from tests.support.kernels.triton_cases import assert_close, random_decode, random_table  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

LONG = 70 if INTERPRETED else 3000
BY_HEADS = {"d32": (2, 32), "d64": (1, 64)} | ({} if INTERPRETED else {"d128": (2, 128), "d256": (2, 256)})
LATENT = {"latent-32-32": (32, 32)} | ({} if INTERPRETED else {"latent-512-64": (512, 64)})
# What the interpreter is asked by default: rounds by their number of rows, chunks by their window.
QUICK = {("d32", 3), ("d64", 1), ("d64", 4), ("latent-32-32", 3), ("latent-32-32", 4)}
QUICK |= {("d32", 20), ("d64", None), ("latent-32-32", 20)}
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def layer_of(name: str, num_pages: int, page_size: int) -> Any:
    """A layer in FP8, with scales that are not 1."""
    layout = HeadsLayout(*BY_HEADS[name], FP8) if name in BY_HEADS else LatentLayout(*LATENT[name], FP8)
    pool = uniform_pool(1, num_pages, page_size, layout, DEVICE)
    fill_randomly(pool)
    return pool.layer(0)


def queries(name: str, rows: int, dtype: torch.dtype) -> Tensor:
    heads, dim = (3 * BY_HEADS[name][0], BY_HEADS[name][1]) if name in BY_HEADS else (5, sum(LATENT[name]))
    return torch.randn((rows, heads, dim), device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name,rows,suffix_len,window,span",
    [
        pytest.param(name, *shape, marks=() if (name, shape[0]) in QUICK else pytest.mark.slow)
        for name in (*BY_HEADS, *LATENT)
        for shape in ((1, 1, None, None), (3, 9, 40, None), (4, 4, None, 64))
    ],
)
def test_rounds_read_fp8_pages(
    name: str, dtype: torch.dtype, rows: int, suffix_len: int, window: int | None, span: int | None
) -> None:
    """span: of the backend whose results depend on a row's path only; its rows are a chain."""
    if span and dtype == torch.float32 and not INTERPRETED:
        pytest.skip("fixed tiles are for 16 bits")
    torch.manual_seed(rows)
    page_size, prefixes = 16 if name != "d64" else 4, [0, 5, LONG]
    num_pages = sum(-(-(n + suffix_len) // page_size) for n in prefixes) + 2
    layer = layer_of(name, num_pages, page_size)
    mode = Mode.DRAFT_EXTEND if span else Mode.DECODE if rows == 1 else Mode.VERIFY
    batch = random_decode(mode, rows, suffix_len, prefixes, page_size, num_pages, window)
    q = queries(name, batch.num_rows, dtype)
    out = TritonBackend(span and (span if INTERPRETED else 1024)).prepare(batch).forward(q, layer, ScoreRule(0.2))
    expected = (references.decode if name in BY_HEADS else references.latent_decode)(q, layer, batch, ScoreRule(0.2))
    assert out.dtype == dtype
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name,window",
    [
        pytest.param(name, window, marks=() if (name, window) in QUICK else pytest.mark.slow)
        for name in (*BY_HEADS, *LATENT)
        for window in (None, 20)
    ],
)
def test_prompt_chunks_read_fp8_pages(name: str, dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(3)
    starts, counts, page_size = [0, LONG, 7], [6, 5, 20], 8
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    num_pages = sum(-(-n // page_size) for n in lengths) + 2
    layer = layer_of(name, num_pages, page_size)
    table = random_table(lengths, page_size, num_pages)
    batch = dataclasses.replace(PrefillBatch.from_lists(starts, counts, table, sum(counts) + 3), window=window)
    q = queries(name, batch.num_rows, dtype)
    out = TritonBackend().prepare(batch).forward(q, layer, ScoreRule(0.2))
    expected = (references.prefill if name in BY_HEADS else references.latent_prefill)(q, layer, batch, ScoreRule(0.2))
    used = sum(counts)
    assert out.dtype == dtype and not out[used:].any()
    assert_close(out[:used], expected[:used], dtype)


def test_rules_of_scores_are_those_of_other_pages() -> None:
    """A window, a soft cap and sinks over FP8 pages: rounds of a tree, and chunks."""
    torch.manual_seed(4)
    rule, sinks = ScoreRule(0.4, window=20, soft_cap=1.5, has_sinks=True), torch.randn(6, device=DEVICE)
    layer = layer_of("d32", 12, 16)
    batch = random_decode(Mode.VERIFY, 3, 9, [0, 5, 70], 16, 12)
    q = queries("d32", batch.num_rows, DTYPES[0])
    out = TritonBackend().prepare(batch).forward(q, layer, rule, sinks)
    assert_close(out, references.decode(q, layer, batch, rule, sinks), DTYPES[0])
    table = random_table([41, 9], 16, 12)
    chunks = PrefillBatch.from_lists([33, 0], [8, 9], table)
    q = queries("d32", chunks.num_rows, DTYPES[0])
    out = TritonBackend().prepare(chunks).forward(q, layer, rule, sinks)
    assert_close(out, references.prefill(q, layer, chunks, rule, sinks), DTYPES[0])


@pytest.mark.gpu  # Triton's interpreter (3.6) has no NaN in FP8
@pytest.mark.parametrize("name", ["d32", "latent-32-32"])
def test_nan_in_a_page_reaches_the_rows_that_see_it(name: str) -> None:
    layer = layer_of(name, 12, 4)
    pages = layer.k if name in BY_HEADS else layer.rows
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=DEVICE)
    pages.view(torch.uint8)[2] = 0x7F
    lengths = torch.tensor([6, 6], dtype=torch.int32, device=DEVICE)
    mask = torch.ones((2, 1), dtype=torch.int64, device=DEVICE)
    batch = DecodeBatch(Mode.DECODE, 1, 1, lengths, mask, table, 8)
    out = TritonBackend().prepare(batch).forward(queries(name, 2, DTYPES[0]), layer, ScoreRule(0.2))
    assert out[0].isnan().any() and not out[1].isnan().any()
