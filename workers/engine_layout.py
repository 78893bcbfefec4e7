"""`EngineLayout`: all sizes of an engine, in one frozen value. Imports no torch.

plan_engine (aerie.workers.runner.layout)   computes the layout from configuration and checkpoints
RankMemory (aerie.workers.runner.memory)    fills in the "auto" values while ranks are built: slots, KV pages, memory
use
ranks                                 allocate tables and pools; a replaced rank passes its layout on
the scheduler                         reads slots, pages, shapes and limits (`Scheduler.of`)
aerie plan, and the table of ranks    print it
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.slot_windows import pages_per_request
from aerie.attention.kv_cache.window_pages import WindowSizes
from aerie.attention.recurrent.sizes import StateSizes
from aerie.workers.config import GraphCapture, LoraConfig, RoundShapes, SchedulerConfig
from aerie.workers.memory_use import MemoryUse
from aerie.workers.prompt_inputs import ImageSizes

TYPICAL_TOKENS = 2048  # KV tokens of a typical request, for `max_running: auto`
MAX_CACHED_WINDOWS = 0.15  # maximum share of KV memory for the prefix cache's window pages
TOKENS_PER_SNAPSHOT = 8192  # KV tokens per saved state with `auto`; Qwen3.6-27B has room for 700,000 on an H200
MIN_SNAPSHOT_SHARE, MAX_SNAPSHOT_SHARE = 0.2, 0.5  # of the memory for pages and saved states, that `auto` gives states
MAX_SNAPSHOTS = 1024  # the scheduler searches all of them when none is free


class PageCounts(NamedTuple):
    """KV pages of a rank, without dummy pages.

    pages: pages of layers without a window, and of a draft.
    windows: window pages; 0 in a model without windowed layers.
    """

    pages: int
    windows: int = 0


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of one engine, equal on every rank and in the scheduler, except `memory`.

    shapes: tree shapes, non-speculative decoding first.
    scheduler: as configured, with "auto" replaced by numbers; `max_running` is replaced after a rank is built.
    cache, graph_capture: as configured.
    max_model_len: maximum tokens of prompt and answer.
    max_position: exclusive bound on the positions of a step.
    lookahead: number of tokens after a page that its KV depends on.
    bytes_per_page: bytes of a KV page in target and draft, on each rank, without windowed layers.
    window: window of these layers in tokens; None without windowed layers.
    bytes_per_window_page: bytes of a window page, on each rank.
    kv_in_fp8: whether the target's KV is FP8.
    bytes_per_slot: bytes of a slot in all tables and recurrent states, on each rank.
    bytes_per_state: bytes of a slot's recurrent states; 0 without recurrent layers.
    bytes_per_snapshot: bytes of a copy of these states, on each rank.
    chunk_bytes: scratch of a recurrent layer's GPU kernels for the longest prompt chunk.
    num_snapshots: number of these copies per rank; known with the number of pages.
    has_latent_rows: whether the target's layers cache latent rows (MLA).
    hidden_size: the target's.
    images: sizes of the images in prompts; None for an engine that takes none.
    served_by: see `aerie.workers.models.config.ModelConfig.served_by`.
    known_pages, known_window_pages: KV pages of a built rank; before that the configured number, if any.
    memory: memory use of this rank; None before it is built.
    lora: as configured; None: no adapters.
    """

    shapes: RoundShapes
    scheduler: SchedulerConfig
    cache: CacheConfig
    max_model_len: int
    max_position: int
    lookahead: int
    bytes_per_page: int = 0
    kv_in_fp8: bool = False
    bytes_per_slot: int = 0
    bytes_per_state: int = 0
    bytes_per_snapshot: int = 0
    chunk_bytes: int = 0
    num_snapshots: int = 0
    has_latent_rows: bool = False
    served_by: str | None = None
    hidden_size: int = 0
    images: ImageSizes | None = None
    graph_capture: GraphCapture = GraphCapture()  # noqa: RUF009 - frozen
    known_pages: int | None = None
    known_window_pages: int = 0
    window: int | None = None
    bytes_per_window_page: int = 0
    memory: MemoryUse | None = None
    lora: LoraConfig | None = None

    @property
    def num_pages(self) -> int:
        """KV pages of each rank, without the dummy page."""
        assert self.known_pages is not None, "only a rank that is built knows how many pages fit"
        return self.known_pages

    @property
    def page_counts(self) -> PageCounts:
        """KV pages of each rank, without dummy pages."""
        return PageCounts(self.num_pages, self.known_window_pages)

    @property
    def window_sizes(self) -> WindowSizes | None:
        """Sizes of window pages; None without windowed layers."""
        return None if self.window is None else WindowSizes(self.window, self.known_window_pages)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the tables of running requests, on each rank."""
        return table_bytes(self.bytes_per_slot, self.scheduler.num_slots)

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved states, on each rank."""
        return self.bytes_per_snapshot * self.num_snapshots

    @property
    def snapshot_share(self) -> float:
        """Share of saved states in the memory for pages and states, with `cache.state_snapshots: auto`."""
        return snapshot_share(self.bytes_per_snapshot, self.bytes_per_page, self.cache.page_size)

    @property
    def mask_width(self) -> int:
        """Maximum rows of a request in a step, each of which a grammar may mask."""
        return max(shape.width for shape in self.shapes.shapes)

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the pool of recurrent states."""
        return StateSizes(rows=self.mask_width, path=self.shapes.max_new_tokens)

    def with_slots(self, num_slots: int) -> "EngineLayout":
        """Return the layout with a number for `max_running`."""
        return replace(self, scheduler=self.scheduler.with_slots(num_slots))

    def with_pages(self, pages: int, windows: int = 0) -> "EngineLayout":
        """Return the layout with these numbers of KV pages and window pages."""
        return replace(self, known_pages=pages, known_window_pages=windows)

    def with_snapshots(self, kv_bytes: int) -> "EngineLayout":
        """Return the layout with the number of saved states for `cache.state_snapshots`. kv_bytes: bytes of pages and
        saved states together."""
        if not self.bytes_per_snapshot or not self.cache.prefix_cache:
            return self
        asked = self.cache.state_snapshots
        fitting = max(0, int(self.snapshot_share * kv_bytes)) // self.bytes_per_snapshot
        return replace(self, num_snapshots=min(MAX_SNAPSHOTS, fitting) if asked == "auto" else asked)

    def kv_bytes(self, counts: PageCounts) -> int:
        """Return the bytes of these KV pages on each rank, including dummy pages."""
        windows = (counts.windows + 1) * self.bytes_per_window_page if self.window is not None else 0
        return (counts.pages + 1) * self.bytes_per_page + windows

    def pages_in(self, kv_bytes: int) -> PageCounts:
        """Return the KV pages that fit in `kv_bytes`. Window pages are those of `counts_of`, unless that leaves fewer
        pages than window pages; then each page has one."""
        per_page, per_window = self.bytes_per_page, self.bytes_per_window_page
        if self.window is None:
            return PageCounts(kv_bytes // per_page - 1)
        kv_bytes = max(0, kv_bytes - per_page - per_window)
        if per_page == 0:  # every layer has a window: other pages take no memory, and each slot has enough of them
            windows, per_slot = kv_bytes // per_window, -(-self.max_position // self.cache.page_size)
            return PageCounts(max(windows, self.scheduler.num_slots * per_slot), windows)
        running, least = self._windows_of_requests(), self._cached_windows(0) * per_window
        cached = self._cached_windows(kv_bytes // per_page) * per_window  # if texts took no other memory
        cached = max(least, kv_bytes * cached // max(1, kv_bytes + cached))
        cached_windows = min(cached, int(MAX_CACHED_WINDOWS * kv_bytes)) // per_window
        pages = (kv_bytes - (running + cached_windows) * per_window) // per_page
        if pages > running + cached_windows:
            return PageCounts(pages, running + cached_windows)
        both = kv_bytes // (per_page + per_window)
        return PageCounts(both, both)

    def counts_of(self, num_pages: int) -> PageCounts:
        """Return `num_pages` KV pages with window pages for all running requests, for a step's prompt chunks, and for
        windows that the prefix cache keeps."""
        if self.window is None:
            return PageCounts(num_pages)
        return PageCounts(num_pages, min(num_pages, self._windows_of_requests() + self._cached_windows(num_pages)))

    def window_pages(self, window: int) -> int:
        """Return the window pages of a decoding request with a window of `window` tokens."""
        return pages_per_request(window, self.cache.page_size, self.shapes.max_ahead_tokens)

    def _windows_of_requests(self) -> int:
        """Return the window pages of running requests of typical length (at least of one request) and of prompt
        chunks."""
        assert self.window is not None
        per_request = self.window_pages(min(self.window, TYPICAL_TOKENS))
        chunks = -(-self.scheduler.step_token_limit // self.cache.page_size)
        return max(self.scheduler.num_slots * per_request, self.window_pages(self.window)) + chunks

    def _cached_windows(self, num_pages: int) -> int:
        """Return the window pages for the prefix cache, besides those of running requests: a window for each typical
        text that fits in `num_pages`, and at least one per slot."""
        assert self.window is not None
        size = self.cache.page_size
        texts = max(self.scheduler.num_slots, num_pages * size // TYPICAL_TOKENS)
        return texts * -(-self.window // size) if self.cache.prefix_cache else 0


def table_bytes(bytes_per_slot: int, num_slots: int) -> int:
    """Return the bytes of the tables of `num_slots` slots and the padding slot."""
    return bytes_per_slot * (num_slots + 1)


def snapshot_share(per_snapshot: int, per_page: int, page_size: int) -> float:
    """Return the share of saved states in the memory for pages and states: one state of `per_snapshot` bytes for each
    TOKENS_PER_SNAPSHOT tokens of KV, within limits."""
    pages = per_page * TOKENS_PER_SNAPSHOT // page_size
    return min(MAX_SNAPSHOT_SHARE, max(MIN_SNAPSHOT_SHARE, per_snapshot / max(1, per_snapshot + pages)))


def kv_bytes_asked(cache: CacheConfig, per_page: int, slot_bytes: int, per_snapshot: int = 0) -> int | None:
    """Return the configured bytes of pages and saved states together; None: all remaining memory."""
    if cache.num_pages is not None:
        return int(cache.num_pages * per_page / (1 - snapshot_share(per_snapshot, per_page, cache.page_size)))
    return None if cache.memory_gb == "auto" else int(cache.memory_gb * 1e9) - slot_bytes


def pages_asked(layout: EngineLayout, slot_bytes: int) -> PageCounts | None:
    """Return the configured pages of each rank: cache.num_pages, or what fits in memory_gb after slot_bytes for running
    requests' tables. None: all that fit in the remaining memory. Raises ValueError if none fit."""
    cache, per_page = layout.cache, layout.bytes_per_page + layout.bytes_per_window_page
    if cache.num_pages is not None:
        return layout.counts_of(cache.num_pages)
    if cache.memory_gb == "auto":
        return None
    counts = layout.pages_in(int(cache.memory_gb * 1e9) - slot_bytes)
    pages = min(counts.pages, counts.windows) if layout.window is not None else counts.pages
    if pages < 2:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb}: holds {max(0, pages)} pages of {per_page} bytes and {slot_bytes} "
            f"bytes of tables for scheduler.max_running; give at least {(3 * per_page + slot_bytes) / 1e9:.4f}, or auto"
        )
    return counts
