"""Allocates the pages of the KV pools: free list and reference counts. Called by the scheduler and the prefix cache;
knows no tensor and no request.

A page is free, held (by requests; counted), cached (by the prefix cache; a flag), or held and cached."""

from collections.abc import Iterable, Sequence

from aerie.attention.kv_cache.window_pages import WindowPages

DUMMY_PAGE = 0  # receives the writes of padding rows; never allocated


class PageAllocator:
    """Free list and reference counts over pages 1 .. num_pages.

    A page may be freed and allocated again while a step in flight still writes it. That is safe because ranks execute
    plans in order: the new owner's first write is in a later plan than the old owner's last one.
    """

    def __init__(self, num_pages: int, windows: WindowPages | None = None) -> None:
        """windows: window pages attached to these pages, freed with them; None for a model without windows."""
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: must be at least 1; give the KV cache more memory")
        self.num_pages = num_pages
        self.windows = windows
        self.reset()

    def reset(self) -> None:
        """Free every page."""
        self._free = list(range(self.num_pages, 0, -1))
        self._holders = [0] * (self.num_pages + 1)
        self._cached = bytearray(self.num_pages + 1)
        self._num_held = 0
        if self.windows is not None:
            self.windows.reset()

    @property
    def num_free(self) -> int:
        """Pages that are neither held nor cached."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that at least one request holds."""
        return self._num_held

    @property
    def num_evictable(self) -> int:
        """Pages that are cached and not held."""
        return self.num_pages - len(self._free) - self._num_held

    @property
    def num_available(self) -> int:
        """Pages that could be allocated after evictions."""
        return self.num_pages - self._num_held

    @property
    def usage(self) -> float:
        """Share of pages, or of window pages if it is larger, that requests hold, 0 to 1."""
        held = self._num_held / self.num_pages
        return held if self.windows is None else max(held, self.windows.usage)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free pages, each held once. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"allocate({count}) with {len(self._free)} free pages"
        if count == 0:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        holders = self._holders
        for page in pages:
            holders[page] = 1
        self._num_held += count
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add one holder to each of `pages`, which are held or cached."""
        holders = self._holders
        for page in pages:
            assert holders[page] or self._cached[page], f"acquire of free page {page}"
            if holders[page] == 0:
                self._num_held += 1
            holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder from each of `pages`. Pages without holders that are not cached become free."""
        holders, cached, free, windows = self._holders, self._cached, self._free, self.windows
        for page in pages:
            count = holders[page] - 1
            assert count >= 0, f"release of page {page}, which has no holder"
            holders[page] = count
            if count == 0:
                self._num_held -= 1
                if not cached[page]:
                    free.append(page)
                    if windows is not None:
                        windows.free_attached(page)

    def cache(self, pages: Iterable[int]) -> None:
        """Mark `pages`, which are held, as cached."""
        for page in pages:
            assert self._holders[page] and not self._cached[page], f"cache of page {page}: free or cached already"
            self._cached[page] = 1

    def uncache(self, pages: Iterable[int]) -> None:
        """Mark `pages` as not cached. Those without holders become free."""
        for page in pages:
            assert self._cached[page], f"uncache of page {page}, which is not cached"
            self._cached[page] = 0
            if self._holders[page] == 0:
                self._free.append(page)
                if self.windows is not None:
                    self.windows.free_attached(page)

    def num_unheld_at_end(self, pages: Sequence[int], limit: int) -> int:
        """Count pages without holders from the end of `pages`, up to the first held one and at most `limit`."""
        count = 0
        for page in reversed(pages):
            if count == limit or self._holders[page]:
                break
            count += 1
        return count
