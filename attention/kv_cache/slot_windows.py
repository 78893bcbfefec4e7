"""The window pages that each running request holds. Used by `aerie.workers.scheduling.slot_pages` for models with
layers that attend over a window. Needs only a slot's number and pages.

Layers with a window have a pool of their own (`aerie.attention.kv_cache.window_pages`). A *page* is one of the other
layers'; a *window page* holds the KV of the same tokens for the layers with a window, and is attached to that page. A
slot's page table lists the pages of all its tokens, but only those in its window need a window page.

A slot's window starts at the first page that its next row may see, and ends with its table. The start is computed from
the last known committed length, which is a lower bound, because the host's lengths are one step old. While steps are in
flight, a window page may be detached from one page and attached to another, because plans run in order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.nan_pages import NaNPages
from aerie.attention.kv_cache.window_pages import WindowPages

Int64s = npt.NDArray[np.int64]


class SlotWindows:
    """The windows of all slots, as arrays by slot.

    first: index in the slot's table of the first page in its window.
    """

    def __init__(self, windows: WindowPages, num_slots: int, page_size: int, round_tokens: int) -> None:
        """windows: attaches window pages to pages.
        round_tokens: positions after the known committed length that rounds in flight and the next one may write.
        """
        self.pages = windows
        self._shift = page_size.bit_length() - 1
        self.first = np.zeros(num_slots, np.int64)
        self._entered = np.zeros(num_slots, np.int64)  # number of known tokens at admission
        self.max_per_slot = pages_per_request(windows.window, page_size, round_tokens)
        self.nan_pages = NaNPages()

    def reset(self) -> None:
        """Forget all windows; the allocator has freed the pages."""
        self.first[:] = 0
        self.nan_pages.reset()

    def enter(self, slot: int, pages: Sequence[int], num_saved: int, num_tokens: int) -> None:
        """Start a request with `num_tokens` known tokens in a slot. It resumes after `num_saved` of them, on
        `pages`."""
        self.first[slot] = max(num_saved - self.pages.window + 1, 0) >> self._shift
        self._entered[slot] = num_tokens
        self.pages.acquire(pages[self.first[slot] :])

    def slide(self, tables: Sequence[Sequence[int]], committed: Int64s, num_tokens: Int64s) -> None:
        """Release the window pages that the slots' windows have passed. Called before a plan takes pages.

        Until a prompt's first token is known, its KV may hold NaN, so its window pages are zeroed before their next
        owner. The last window of a prompt is released as reusable, because prompts with this prefix may resume there.
        """
        first = np.maximum(committed - (self.pages.window - 1), 0) >> self._shift
        for slot in np.flatnonzero(first > self.first).tolist():
            begin, end = int(self.first[slot]), int(first[slot])
            table = tables[slot]
            last = (int(self._entered[slot]) - 1) >> self._shift  # pages that an equal prompt would match
            before = min(max(begin, last - self.pages.num_seen), end)
            inside = min(max(before, last), end)
            if num_tokens[slot] == self._entered[slot]:
                self.nan_pages.pages.update(self.pages.of[page] for page in table[begin:end])
            self.pages.release(table[begin:before], passed=True)
            self.pages.release(table[before:inside])
            self.pages.release(table[inside:end], passed=True)
            self.first[slot] = end

    def take(self, pages: Sequence[int]) -> None:
        """Attach window pages to newly allocated `pages`."""
        self.nan_pages.record_allocation(self.pages.allocate(pages))

    def shrink(self, pages: Sequence[int]) -> None:
        """Remove `pages` from the end of a table, before they are released."""
        self.pages.release(pages)

    def replace(self, slot: int, index: int, own: int, cached: int) -> None:
        """Use page `cached` of the prefix cache instead of the slot's own one with the same tokens."""
        windows = self.pages
        if windows.of[own] and not windows.of[cached]:
            windows.move(own, cached)
        elif index >= self.first[slot]:
            windows.acquire((cached,))
            windows.release((own,))

    def give(self, table: Sequence[int], cached: Sequence[int]) -> None:
        """Attach window pages of an ended request to pages of the prefix cache with the same tokens and no window page.
        table: its pages, not released yet."""
        for own, page in zip(table, cached, strict=False):
            if own != page and self.pages.of[own] and not self.pages.of[page]:
                self.pages.move(own, page)

    def leave(self, slot: int, table: Sequence[int]) -> None:
        """End the slot's request, before its pages are released."""
        self.pages.release(table[self.first[slot] :])
        self.first[slot] = 0

    def record_nan_pages(self, pages: Sequence[int], num_free: int) -> None:
        """Record that `pages`, and their window pages, may hold NaN. num_free: free window pages before some of these
        were freed."""
        attached = [self.pages.of[page] for page in pages]
        self.nan_pages.add([page for page in attached if page] + self.pages.last_freed(num_free))

    def room(self, in_use: npt.NDArray[np.bool_], num_pages: Int64s, wanted: Int64s) -> int:
        """Return the number of window pages left for further requests, after those that running ones hold and will
        need.

        in_use: [slots].
        num_pages, wanted: [slots], current pages of the table, and pages needed soon.
        """
        needed = np.minimum(wanted, self.max_per_slot) - (num_pages - self.first)
        return self.pages.num_available - int(np.maximum(needed, 0)[in_use].sum())


def pages_per_request(window: int, page_size: int, round_tokens: int) -> int:
    """Return the maximum window pages of a decoding request: its window, which may start within a page, the positions
    that rounds in flight may write (`round_tokens`), and one more."""
    return -(-(window - 1 + round_tokens) // page_size) + 2
