"""Pages of the layers with a window. Called by the scheduler, `page_allocator` and `prefix_cache`; without tensors and
requests.

Layers with a window have a pool of their own. One of its pages, a *window page*, holds their KV of the tokens of one
page of the other layers, to which it is attached. Only pages in the window of a request need one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DUMMY_WINDOW_PAGE = 0  # window page of pages without one; receives the writes of padding rows; never allocated
PASSED_SHARE = 4  # pages that a window has passed are taken first while they are more than 1/4 of the unheld ones


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of a pool of window pages.

    window: maximum tokens that a row sees, including itself.
    num_pages: window pages, without page 0.
    """

    window: int
    num_pages: int


class WindowPages:
    """Attaches window pages 1 .. num_window_pages to pages 1 .. num_pages.

    A window page is free, or attached to a page. Then it is held (counted, by requests whose window includes it) or
    unheld. A held or cached page keeps its unheld window page until another page needs it, so a later prompt can resume
    there. A page that becomes free loses its window page at once.

    Unheld window pages are taken from two first-in-first-out queues: pages that a window has passed, and pages at the
    end of a request or of a reused prefix. The first queue is used while it is long (`PASSED_SHARE`); otherwise one
    long prompt would take the window pages of all other texts.

    of: window page of each page; 0, the dummy page, without one.
    """

    def __init__(self, sizes: WindowSizes, num_pages: int, page_size: int, keeps: bool = True) -> None:
        """num_pages, page_size: number and size of the pages that window pages are attached to.
        keeps: keep unheld window pages, for a prefix cache.
        """
        assert sizes.num_pages >= 1 and sizes.window >= 1
        self.num_window_pages = sizes.num_pages
        self.window = sizes.window
        self.num_seen = -(-(self.window - 1) // page_size)  # pages that a row at a page boundary sees before it
        self._num_pages = num_pages
        self._keeps = keeps
        self.reset()

    def reset(self) -> None:
        """Free every window page, with the pages."""
        self._free = list(range(self.num_window_pages, 0, -1))
        self.of = [DUMMY_WINDOW_PAGE] * (self._num_pages + 1)
        self._holders = [0] * (self._num_pages + 1)
        self._was_reused = bytearray(self._num_pages + 1)
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._useful: OrderedDict[int, None] = OrderedDict()
        self._updates: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free window pages."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Window pages that could be attached to new pages."""
        return len(self._free) + len(self._passed) + len(self._useful)

    @property
    def usage(self) -> float:
        """Share of window pages that requests hold, 0 to 1."""
        return 1 - self.num_available / self.num_window_pages

    def allocate(self, pages: Sequence[int]) -> list[int]:
        """Attach a window page to each of `pages`, held once. The caller has checked `num_available`, and allocated
        the pages. Return the window pages."""
        of, holders, free = self.of, self._holders, self._free
        attached = []
        for page in pages:
            assert of[page] == DUMMY_WINDOW_PAGE and holders[page] == 0, f"page {page} has a window page already"
            if not free:
                self._take_one()
            of[page] = self._updates[page] = free.pop()
            holders[page] = 1
            attached.append(of[page])
        return attached

    def acquire(self, pages: Iterable[int]) -> None:
        """Add one holder to the window page of each of `pages`, all of which have one."""
        for page in pages:
            assert self.of[page], f"page {page} has no window page"
            if self._holders[page] == 0:
                self._queue_of(page).pop(page)
            self._was_reused[page] = 1
            self._holders[page] += 1

    def release(self, pages: Iterable[int], passed: bool = False) -> None:
        """Remove one holder from the window page of each of `pages`. passed: whether the holder's window has passed
        them; false if the request has ended."""
        for page in pages:
            assert self._holders[page] > 0, f"release of the window page of page {page}, which has no holder"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if not self._keeps:
                    self._detach(page)
                elif passed and not self._was_reused[page]:
                    self._passed[page] = None
                else:
                    self._was_reused[page] = 1
                    self._useful[page] = None

    def free_attached(self, page: int) -> None:
        """Free the window page of a freed page."""
        if self.of[page]:
            assert self._holders[page] == 0, f"page {page} is free, and its window page is held"
            if self._keeps:
                self._queue_of(page).pop(page)
            self._detach(page)
            self._updates.pop(page, None)  # the page's next owner attaches another one

    def move(self, source: int, target: int) -> None:
        """Attach the window page of `source`, with its holders, to `target`, which has the same tokens and no window
        page."""
        assert self.of[source] and not self.of[target] and self._holders[target] == 0
        if self._holders[source] == 0:
            queue = self._queue_of(source)
            queue.pop(source)
            queue[target] = None
        self._was_reused[target], self._was_reused[source] = self._was_reused[source], 0
        self.of[target] = self._updates[target] = self.of[source]
        self.of[source] = self._updates[source] = DUMMY_WINDOW_PAGE
        self._holders[target], self._holders[source] = self._holders[source], 0

    def num_resumable(self, pages: Sequence[int]) -> int:
        """Return the number of leading `pages` of a text after which a prompt can resume, because all window pages that
        a row sees there are present."""
        of, num_seen, end = self.of, self.num_seen, len(pages)
        index = end
        while end > 0 and index > max(0, end - num_seen):
            index -= 1
            if of[pages[index]] == DUMMY_WINDOW_PAGE:
                end = index
        return end

    def last_freed(self, num_free: int) -> list[int]:
        """Return the window pages freed since `num_free` were free. None may have been attached since."""
        return self._free[num_free:]

    def take_updates(self) -> list[int]:
        """Return pairs (page, window page or 0) that changed since the last call, flat."""
        flat = [value for pair in self._updates.items() for value in pair]
        self._updates.clear()
        return flat

    def _queue_of(self, page: int) -> OrderedDict[int, None]:
        return self._passed if page in self._passed else self._useful

    def _take_one(self) -> None:
        """Free the unheld window page with the latest expected use."""
        from_passed = len(self._passed) * PASSED_SHARE > len(self._passed) + len(self._useful)
        queue = self._passed if from_passed or not self._useful else self._useful
        page, _ = queue.popitem(last=False)
        self._detach(page)

    def _detach(self, page: int) -> None:
        self._free.append(self.of[page])
        self.of[page] = self._updates[page] = DUMMY_WINDOW_PAGE
        self._was_reused[page] = 0
