"""Pages that may hold NaN, and must be zeroed before another request gets them. Used by the scheduler.

Masked attention multiplies unread positions by 0, and 0 times NaN or infinity is NaN: such a page would spoil what its
next owner computes. Values are stored without NaN (`aerie.kernels.kv.stored_values`), but may be infinite."""

from collections.abc import Iterable, Sequence

from aerie.attention.kv_cache.page_allocator import DUMMY_PAGE


class NaNPages:
    """Pages to zero once they are allocated again, and those that the next plan zeroes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all; the ranks' memory is new."""
        self.pages: set[int] = set()
        self._to_clear: list[int] = []

    def add(self, pages: Iterable[int]) -> None:
        """Add the pages of a request that computed NaN. It may also have written NaN to the dummy page, with its
        drafts' KV."""
        self.pages.update(pages)
        self._to_clear.append(DUMMY_PAGE)

    def record_allocation(self, pages: Sequence[int]) -> None:
        """Record that `pages` get another owner in the next plan, which zeroes those that may hold NaN."""
        if self.pages:
            reused = self.pages.intersection(pages)
            self._to_clear += sorted(reused)
            self.pages -= reused

    def take(self) -> list[int]:
        """Return the pages that the next plan zeroes, and forget them."""
        cleared, self._to_clear = self._to_clear, []
        return cleared
