"""SlotPages by itself: what the ranks are told of page tables, and whose pages are whose after `share` and `spoil`."""

import numpy as np
import pytest

from attention.kv_cache.page_allocator import DUMMY_PAGE, PageAllocator
from attention.kv_cache.prefix_cache import Match, PrefixCache
from workers.scheduling.plan import unpack_i32
from workers.scheduling.slot_pages import SlotPages

PAGE = 4
TOKENS = np.arange(100, 100 + 3 * PAGE, dtype=np.int32)


def updates(pages: SlotPages) -> dict[tuple[int, int], int]:
    """Slot and index of each page-table change, and the page."""
    flat = unpack_i32(pages.take_updates())
    return {(flat[i], flat[i + 1]): flat[i + 2] for i in range(0, len(flat), 3)}


@pytest.fixture
def pages() -> SlotPages:
    allocator = PageAllocator(20)
    return SlotPages(allocator, PrefixCache(allocator, PAGE), 3, PAGE)


def enter(pages: SlotPages, user: int, num_committed: int = 3 * PAGE) -> int:
    slot = pages.take_slot(user, num_committed + 1, 40, True, Match([], 0))
    assert pages.fit_slot(slot, num_committed) == 0
    pages.committed[slot] = num_committed
    return slot


def test_a_released_slots_changes_are_dropped_and_those_of_others_are_sent(pages: SlotPages) -> None:
    first, second = enter(pages, 0), enter(pages, 1)
    held = list(pages.pages[second])
    pages.release(first, TOKENS, 0)
    assert updates(pages) == {(second, index): page for index, page in enumerate(held)}
    assert updates(pages) == {}
    pages.check_integrity()
    assert not pages.speculative[first] and pages.speculative[second]


def test_equal_pages_are_shared_as_far_as_is_asked(pages: SlotPages) -> None:
    """The second slot takes the first one's pages over, tells the ranks, and frees its own."""
    first, second = enter(pages, 0), enter(pages, 1)
    pages.share(first, TOKENS)
    updates(pages)
    free = pages.allocator.num_free
    pages.share(second, TOKENS, 2)
    assert updates(pages) == {(second, index): pages.pages[first][index] for index in range(2)}
    assert pages.allocator.num_free == free + 2
    pages.share(second, TOKENS)
    assert pages.pages[second] == pages.pages[first] and list(updates(pages)) == [(second, 2)]
    pages.check_integrity()


def test_pages_that_may_hold_nan_are_zeroed_before_their_next_owner(pages: SlotPages) -> None:
    slot = enter(pages, 0)
    pages.share(slot, TOKENS)
    held = sorted(pages.pages[slot])
    assert pages.take_cleared() == b""
    pages.spoil(slot, TOKENS, b"")
    assert unpack_i32(pages.take_cleared()).tolist() == [DUMMY_PAGE]
    pages.release(slot, TOKENS, 0)
    assert pages.take_cleared() == b"" and pages.num_free_slots == 3
    assert pages.fit_slot(enter(pages, 1, 0), 19 * PAGE) == 0  # every page that there is
    assert unpack_i32(pages.take_cleared()).tolist() == held
    assert pages.take_cleared() == b""


def test_pages_of_a_request_without_a_slot_are_those_that_the_cache_has(pages: SlotPages) -> None:
    slot = enter(pages, 0)
    held = sorted(pages.pages[slot])
    pages.release(slot, TOKENS, 3 * PAGE)
    pages.spoil(-1, TOKENS, b"")
    assert unpack_i32(pages.take_cleared()).tolist() == [DUMMY_PAGE]
    assert pages.fit_slot(enter(pages, 1, 0), 19 * PAGE) == 0
    assert unpack_i32(pages.take_cleared()).tolist() == held
