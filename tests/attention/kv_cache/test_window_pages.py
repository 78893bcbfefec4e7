"""Window pages by themselves: holders, order of eviction, and the pages after which a prompt can resume."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.window_pages import WindowPages, WindowSizes
from tests.support.simulation.integrity import check_windows, free_pages

PAGE = 4


def windows(num_window_pages: int, window: int = 9, num_pages: int = 30, keeps: bool = True) -> WindowPages:
    return WindowPages(WindowSizes(window, num_window_pages), num_pages, PAGE, keeps)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.lists(st.booleans(), max_size=12))
def test_a_prompt_resumes_where_its_window_is_whole(window: int, present: list[bool]) -> None:
    """The row at position end * PAGE sees the positions above its own less the window."""
    pages = windows(30, window)
    text = list(range(1, len(present) + 1))
    pages.allocate([page for page, here in zip(text, present, strict=True) if here])

    def whole(end: int) -> bool:
        return all(present[position // PAGE] for position in range(max(0, end * PAGE - window + 1), end * PAGE))

    assert pages.num_resumable(text) == max(end for end in range(len(text) + 1) if whole(end))


def test_pages_that_a_window_has_passed_go_first_while_they_are_many() -> None:
    pages = windows(8)
    pages.allocate(range(1, 9))
    pages.release([1, 2])  # the end of a request
    pages.release([3, 4, 5, 6, 7, 8], passed=True)
    pages.allocate(range(11, 17))
    assert [page for page in range(1, 9) if pages.of[page]] == [1, 2], "all that were passed"
    check_windows(pages, [range(11, 17)], [False] * 31)


def test_a_prefix_that_is_used_again_is_kept_as_an_end_is() -> None:
    pages = windows(4)
    pages.allocate([1, 2, 3, 4])
    pages.release([1, 2, 3, 4], passed=True)
    pages.acquire([1])
    pages.release([1], passed=True)
    pages.allocate([5, 6])
    assert [page for page in range(1, 5) if pages.of[page]] == [1, 4]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_free_page_has_no_window_page(keeps: bool) -> None:
    pages = windows(3, keeps=keeps)
    allocator = PageAllocator(30, pages)
    held = allocator.allocate(3)
    taken = pages.allocate(held)
    assert pages.take_updates() == [value for pair in zip(held, taken, strict=True) for value in pair]
    pages.release(held)
    assert pages.num_available == 3 and pages.num_free == (0 if keeps else 3)
    allocator.release(held)
    assert pages.num_free == 3 and not any(pages.of[page] for page in held)
    check_windows(pages, [], free_pages(allocator))


def test_the_same_tokens_in_another_page_inherit_its_window_page() -> None:
    """A request computed again what the cache had without its window page."""
    pages = windows(2)
    (taken,) = pages.allocate([3])
    pages.take_updates()
    pages.move(3, 9)
    assert pages.take_updates() == [9, taken, 3, 0]
    check_windows(pages, [[9]], [False] * 31)
    pages.release([9])
    pages.move(9, 4)
    assert pages.num_resumable([4]) == 1 and pages.num_available == 2
    check_windows(pages, [], [False] * 31)
