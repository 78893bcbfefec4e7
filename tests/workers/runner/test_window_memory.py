"""How memory is divided between pages of all tokens and window pages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.attention.config import CacheConfig
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout, PageCounts

GPT_OSS_20B = (24576, 24576, 128)  # bytes of a token in full layers and in windows, tokens of a window; 16 bits
GEMMA_3_27B = (81920, 425984, 1024)


def layout_of(
    per_token: int, in_windows: int, window: int, slots: int = 64, page_size: int = 16, prefix_cache: bool = True
) -> EngineLayout:
    cache = CacheConfig(page_size, prefix_cache=prefix_cache)
    layout = EngineLayout(RoundShapes(), SchedulerConfig(slots, 8192), cache, 131072, 131078, 0, per_token * page_size)
    return EngineLayout(**vars(layout) | {"window": window, "bytes_per_window_page": in_windows * page_size})


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 20),
    st.integers(1, 70000),
    st.integers(1, 512),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
    st.integers(0, 1 << 38),
)
def test_pages_never_take_more_than_they_may(
    per_token: int, in_windows: int, window: int, slots: int, page_size: int, prefix_cache: bool, kv_bytes: int
) -> None:
    layout = layout_of(per_token, in_windows, window, slots, page_size, prefix_cache)
    counts = layout.pages_in(kv_bytes)
    assert counts == (0, 0) or layout.kv_bytes(counts) <= kv_bytes
    assert 0 <= counts.windows <= counts.pages
    # one request can always go on: it has its window, or every page has a window page
    assert counts.windows == counts.pages or counts.windows >= layout.window_pages(window) + 8192 // page_size
    apart = kv_bytes // ((per_token + in_windows) * page_size)
    assert counts.pages >= apart - 2, "fewer pages than if every page had a window page"
    asked = layout.counts_of(counts.pages)
    assert asked.pages == counts.pages and asked.windows <= counts.pages


def test_a_model_whose_layers_all_keep_a_window_has_pages_for_all_slots() -> None:
    """Mistral 7B with windows of 4,096 of texts of 131,078: pages are numbers, window pages take the memory."""
    counts = layout_of(0, 131072, 4096).pages_in(10**11)
    assert counts == PageCounts(64 * 8193, 10**11 // (16 * 131072) - 1)


@pytest.mark.parametrize(
    "model,memory_gb,times,gb,gb_before", [(GPT_OSS_20B, 100, 1.87, 26.0, 51.5), (GEMMA_3_27B, 70, 2.37, 115.1, 532.6)]
)
def test_published_models_hold_more_tokens(
    model: tuple[int, int, int], memory_gb: int, times: float, gb: float, gb_before: float
) -> None:
    """In so many GB for KV; and what 64 requests of 16,384 tokens take."""
    per_token, in_windows, window = model
    layout, whole = layout_of(*model), per_token + in_windows
    assert layout.pages_in(memory_gb * 10**9).pages * 16 * whole == pytest.approx(times * memory_gb * 1e9, rel=0.01)
    kept = 64 * (16384 * per_token + layout.window_pages(window) * layout.bytes_per_window_page)
    assert (kept / 1e9, 64 * 16384 * whole / 1e9) == pytest.approx((gb, gb_before), rel=0.01)
