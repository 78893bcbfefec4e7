"""`EngineLayout`: every size of an engine, in one frozen value. Imports no torch.

plan_engine (workers.runner.layout)   computes it from configuration and checkpoints
RankMemory (workers.runner.memory)    adds, while ranks are built, the numbers that "auto" leaves open: slots, KV
                                      pages, and where the memory went
ranks                                 allocate tables and pools by it; a rank that replaces another gets its layout
the scheduler                         `Scheduler.of` takes slots, pages, shapes and limits from it
aerie plan, and the table of ranks    print it
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from attention.config import CacheConfig
from attention.kv_cache.slot_windows import pages_per_request
from attention.kv_cache.window_pages import WindowSizes
from attention.recurrent.sizes import StateSizes
from workers.config import GraphCapture, RoundShapes, SchedulerConfig
from workers.memory_use import MemoryUse

TYPICAL_TOKENS = 2048  # KV tokens of a typical request, for `max_running: auto`
MAX_CACHED_WINDOWS = 0.15  # share of the memory for KV that windows of the prefix cache take at most
TOKENS_PER_SNAPSHOT = 8192  # KV tokens per saved state of `auto`: Qwen3.6-27B keeps 700,000 on an H200
MIN_SNAPSHOT_SHARE, MAX_SNAPSHOT_SHARE = 0.2, 0.5  # of the memory for pages and saved states, that `auto` gives states
MAX_SNAPSHOTS = 1024  # the scheduler looks through all of them when none is free


class PageCounts(NamedTuple):
    """KV pages of a rank, without dummy pages.

    pages: of the layers that keep all tokens, and of a draft.
    windows: window pages; 0 in a model without layers that keep only a window.
    """

    pages: int
    windows: int = 0


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of one engine, equal on every rank and in the scheduler, except `memory`.

    shapes: kinds of round, plain decoding first.
    scheduler: as configured, with numbers in place of "auto"; `max_running` has one once a rank is built.
    cache, graph_capture: as configured.
    max_model_len: prompt and answer tokens.
    max_position: positions that a step may touch.
    lookahead: number of tokens after a page that its KV depends on.
    bytes_per_page: bytes of a KV page in target and draft, on each rank, without layers that keep only a window.
    window: tokens that these layers keep at most of a request that decodes, beside rows of rounds; None without any.
    bytes_per_window_page: bytes of their page, on each rank.
    kv_in_fp8: whether the target's KV is FP8.
    bytes_per_slot: bytes of a slot in all tables and recurrent states, on each rank.
    bytes_per_state: bytes of a slot's recurrent states; 0 for models without recurrent layers.
    bytes_per_snapshot: bytes of a copy of these states, on each rank.
    chunk_bytes: scratch of a recurrent layer's GPU kernels for the longest prompt chunk: a part of the largest step.
    num_snapshots: number of copies in a rank's memory; known with the pages.
    has_latent_rows: whether the target's layers cache latent rows (MLA).
    served_by: see `workers.models.config.ModelConfig.served_by`.
    known_pages, known_window_pages: KV pages of a rank that is built; before that the configured number, if there is
        one.
    memory: use of this rank's memory; None before it is built.
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
    graph_capture: GraphCapture = GraphCapture()  # noqa: RUF009 - frozen
    known_pages: int | None = None
    known_window_pages: int = 0
    window: int | None = None
    bytes_per_window_page: int = 0
    memory: MemoryUse | None = None

    @property
    def num_pages(self) -> int:
        """KV pages of each rank, the dummy page excluded."""
        assert self.known_pages is not None, "only a rank that is built knows how many pages fit"
        return self.known_pages

    @property
    def page_counts(self) -> PageCounts:
        """KV pages of each rank, dummy pages excluded."""
        return PageCounts(self.num_pages, self.known_window_pages)

    @property
    def window_sizes(self) -> WindowSizes | None:
        """Sizes of the windows' pages; None without layers that keep only a window."""
        return None if self.window is None else WindowSizes(self.window, self.known_window_pages)

    @property
    def slot_bytes(self) -> int:
        """Memory of the tables of running requests on each rank."""
        return table_bytes(self.bytes_per_slot, self.scheduler.num_slots)

    @property
    def saved_bytes(self) -> int:
        """Memory of saved states on each rank."""
        return self.bytes_per_snapshot * self.num_snapshots

    @property
    def snapshot_share(self) -> float:
        """Share of the memory for pages and saved states that `cache.state_snapshots: auto` gives states."""
        return snapshot_share(self.bytes_per_snapshot, self.bytes_per_page, self.cache.page_size)

    @property
    def mask_width(self) -> int:
        """Rows of a request in a step, each of which a grammar may mask."""
        return max(shape.width for shape in self.shapes.shapes)

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the pool of recurrent states."""
        return StateSizes(rows=self.mask_width, path=self.shapes.max_new_tokens)

    def with_slots(self, num_slots: int) -> "EngineLayout":
        """Return it with a number for `max_running`."""
        return replace(self, scheduler=self.scheduler.with_slots(num_slots))

    def with_pages(self, pages: int, windows: int = 0) -> "EngineLayout":
        """Return it with these numbers of KV pages and window pages."""
        return replace(self, known_pages=pages, known_window_pages=windows)

    def with_snapshots(self, kv_bytes: int) -> "EngineLayout":
        """Return it with the number of saved states that `cache.state_snapshots` asks for. kv_bytes: of pages and saved
        states together."""
        if not self.bytes_per_snapshot or not self.cache.prefix_cache:
            return self
        asked = self.cache.state_snapshots
        fitting = max(0, int(self.snapshot_share * kv_bytes)) // self.bytes_per_snapshot
        return replace(self, num_snapshots=min(MAX_SNAPSHOTS, fitting) if asked == "auto" else asked)

    def kv_bytes(self, counts: PageCounts) -> int:
        """Memory of so many KV pages on each rank, with the dummy pages."""
        windows = (counts.windows + 1) * self.bytes_per_window_page if self.window is not None else 0
        return (counts.pages + 1) * self.bytes_per_page + windows

    def pages_in(self, kv_bytes: int) -> PageCounts:
        """Return the KV pages that `kv_bytes` hold. Window pages: those of `counts_of`, unless that leaves fewer pages
        than window pages; then each page has one."""
        per_page, per_window = self.bytes_per_page, self.bytes_per_window_page
        if self.window is None:
            return PageCounts(kv_bytes // per_page - 1)
        kv_bytes = max(0, kv_bytes - per_page - per_window)
        if per_page == 0:  # every layer keeps a window: pages are numbers, and each slot has enough of them
            windows, per_slot = kv_bytes // per_window, -(-self.max_position // self.cache.page_size)
            return PageCounts(max(windows, self.scheduler.num_slots * per_slot), windows)
        running, least = self._windows_of_requests(), self._cached_windows(0) * per_window
        cached = self._cached_windows(kv_bytes // per_page) * per_window  # of all texts, if only they took memory
        cached = max(least, kv_bytes * cached // max(1, kv_bytes + cached))
        kept = min(cached, int(MAX_CACHED_WINDOWS * kv_bytes)) // per_window
        pages = (kv_bytes - (running + kept) * per_window) // per_page
        if pages > running + kept:
            return PageCounts(pages, running + kept)
        both = kv_bytes // (per_page + per_window)
        return PageCounts(both, both)

    def counts_of(self, num_pages: int) -> PageCounts:
        """Return `num_pages` KV pages with window pages for all running requests, for a step's prompt chunks, and for
        windows that the prefix cache keeps."""
        if self.window is None:
            return PageCounts(num_pages)
        return PageCounts(num_pages, min(num_pages, self._windows_of_requests() + self._cached_windows(num_pages)))

    def window_pages(self, window: int) -> int:
        """Window pages of a request that decodes over a window of so many tokens."""
        return pages_per_request(window, self.cache.page_size, self.shapes.max_ahead_tokens)

    def _windows_of_requests(self) -> int:
        """Window pages of running requests of typical length, at least of one request, and of prompt chunks."""
        assert self.window is not None
        each = self.window_pages(min(self.window, TYPICAL_TOKENS))
        chunks = -(-self.scheduler.step_token_limit // self.cache.page_size)
        return max(self.scheduler.num_slots * each, self.window_pages(self.window)) + chunks

    def _cached_windows(self, num_pages: int) -> int:
        """Window pages that the prefix cache keeps beside running requests: a window for each typical text that
        `num_pages` hold, and at least one per slot."""
        assert self.window is not None
        size = self.cache.page_size
        texts = max(self.scheduler.num_slots, num_pages * size // TYPICAL_TOKENS)
        return texts * -(-self.window // size) if self.cache.prefix_cache else 0


def table_bytes(bytes_per_slot: int, num_slots: int) -> int:
    """Return the bytes of the tables of `num_slots` slots and the padding slot."""
    return bytes_per_slot * (num_slots + 1)


def snapshot_share(per_snapshot: int, per_page: int, page_size: int) -> float:
    """Return the share of saved states in the memory for pages and states: one state of `per_snapshot` bytes for each
    TOKENS_PER_SNAPSHOT tokens of KV, within limits. A conversation that continues needs both."""
    pages = per_page * TOKENS_PER_SNAPSHOT // page_size
    return min(MAX_SNAPSHOT_SHARE, max(MIN_SNAPSHOT_SHARE, per_snapshot / max(1, per_snapshot + pages)))


def kv_bytes_asked(cache: CacheConfig, per_page: int, slot_bytes: int, per_snapshot: int = 0) -> int | None:
    """Bytes of pages and saved states together that a configuration asks for; None: what is left."""
    if cache.num_pages is not None:
        return int(cache.num_pages * per_page / (1 - snapshot_share(per_snapshot, per_page, cache.page_size)))
    return None if cache.memory_gb == "auto" else int(cache.memory_gb * 1e9) - slot_bytes


def pages_asked(layout: EngineLayout, slot_bytes: int) -> PageCounts | None:
    """Return the pages of each rank that a configuration asks for, None for what is left: cache.num_pages, or what
    memory_gb holds beside the slot_bytes that running requests' tables take. Raises ValueError if it holds none."""
    cache, per_page = layout.cache, layout.bytes_per_page + layout.bytes_per_window_page
    if cache.num_pages is not None:
        return layout.counts_of(cache.num_pages)
    if cache.memory_gb == "auto":
        return None
    counts = layout.pages_in(int(cache.memory_gb * 1e9) - slot_bytes)
    pages = min(counts.pages, counts.windows) if layout.window is not None else counts.pages
    if pages < 2:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb}: holds {max(0, pages)} pages of {per_page} bytes beside {slot_bytes} "
            f"of tables for scheduler.max_running; give at least {(3 * per_page + slot_bytes) / 1e9:.4f}, or auto"
        )
    return counts
