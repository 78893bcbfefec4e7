"""SlotPages by itself: what ranks learn of page tables, and who has which pages after `share` and `drop_nan_pages`."""

import numpy as np
import pytest

from aerie.attention.kv_cache.page_allocator import DUMMY_PAGE, PageAllocator
from aerie.attention.kv_cache.prefix_cache import Match, PrefixCache
from aerie.workers.scheduling.plan import unpack_i32
from aerie.workers.scheduling.slot_lengths import MEAN_GAPS
from aerie.workers.scheduling.slot_pages import SlotPages
from tests.support.simulation.integrity import check_slots

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
    check_slots(pages)
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
    check_slots(pages)


def test_pages_that_may_hold_nan_are_zeroed_before_their_next_owner(pages: SlotPages) -> None:
    slot = enter(pages, 0)
    pages.share(slot, TOKENS)
    held = sorted(pages.pages[slot])
    assert pages.take_cleared() == b""
    pages.drop_nan_pages(slot, TOKENS, b"")
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
    pages.drop_nan_pages(-1, TOKENS, b"")
    assert unpack_i32(pages.take_cleared()).tolist() == [DUMMY_PAGE]
    assert pages.fit_slot(enter(pages, 1, 0), 19 * PAGE) == 0
    assert unpack_i32(pages.take_cleared()).tolist() == held


def test_the_mean_gap_forgets_an_old_pace_whether_it_is_asked_or_not(pages: SlotPages) -> None:
    """10 ms a token, then 30: a mean is over at most twice `MEAN_GAPS` gaps, and a question changes nothing."""
    slot, first = np.array([enter(pages, 0)]), np.array([], np.int64)
    pages.decoding[slot] = True
    pages.take_tokens(first, slot, now := 100.0)
    assert pages.mean_gap_ms() == 0.0
    for number in range(8 * MEAN_GAPS):
        pages.take_tokens(slot, first, now := now + (0.01 if number < 4 * MEAN_GAPS else 0.03))
        if number == 2 * MEAN_GAPS - 2:  # the last before the older half is forgotten
            means = [pages.mean_gap_ms() for _ in range(3)]
            assert means == pytest.approx([10.0] * 3)
    assert MEAN_GAPS <= pages.num_gaps[slot[0]] < 2 * MEAN_GAPS
    assert pages.mean_gap_ms() == pytest.approx(30.0 - 20.0 / 2**4)  # each `MEAN_GAPS` gaps halve what is left of it
