"""Emptying the prefix cache: it frees unused pages, and requests keep the pages that they use."""

import numpy as np

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from tests.support.simulation.integrity import check_pages


def _tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_cleared_cache_finds_nothing_and_all_its_pages_are_free() -> None:
    allocator = PageAllocator(7)
    cache = PrefixCache(allocator, 2, lookahead=1)
    for last in (5, 6):  # a tree with a fork
        pages = allocator.allocate(2)
        cache.insert(_tokens(1, 2, 3, 4, last), pages)
        allocator.release(pages)
    num_cached = len(list(cache.pages()))
    assert num_cached == allocator.num_evictable == 3
    assert cache.clear() == 3
    assert allocator.num_free == 7 and cache.clear() == 0
    assert cache.match(_tokens(1, 2, 3, 4, 5)).pages == []
    check_pages(allocator, [], cache.pages())


def test_held_pages_stay_their_holders_and_may_be_inserted_again() -> None:
    allocator = PageAllocator(7)
    cache = PrefixCache(allocator, 2)
    pages = allocator.allocate(3)
    cache.insert(_tokens(*range(6)), pages)
    shared = cache.match(_tokens(*range(5))).pages  # a second holder of two of them
    assert cache.clear() == 3
    check_pages(allocator, [pages, shared], [])
    assert allocator.num_held == 3 and allocator.num_free == 4
    assert cache.insert(_tokens(*range(6)), pages) == pages
    allocator.release(pages)
    allocator.release(shared)
    assert allocator.num_evictable == 3 and cache.evict(9) == 3
    check_pages(allocator, [], cache.pages())


def test_a_forgotten_text_takes_those_with_its_first_page_along_and_no_other() -> None:
    allocator = PageAllocator(9)
    cache = PrefixCache(allocator, 2, lookahead=1)
    cache.watch(1)
    for first, last, salt in ((1, 5, b""), (1, 6, b""), (2, 5, b""), (1, 5, b"salt")):
        pages = allocator.allocate(2)
        cache.insert(_tokens(first, 2, 3, 4, last), pages, salt)
        allocator.release(pages)
    before = set(cache.digests())
    held = cache.match(_tokens(1, 2, 3, 4, 5, 9)).pages
    forgotten = cache.forget(_tokens(1, 2, 3, 4, 5, 9))
    assert len(forgotten) == 3 and set(held) < set(forgotten)
    check_pages(allocator, [held], cache.pages())
    assert cache.match(_tokens(1, 2, 3, 4, 6, 9)).pages == [] and cache.forget(_tokens(1, 2, 3)) == []
    assert cache.num_cached(_tokens(2, 2, 3, 4, 5, 9)) == cache.num_cached(_tokens(1, 2, 3, 4, 5, 9), b"salt") == 4
    assert {d for d, here in cache.take_changes().items() if here} == set(cache.digests()) < before
    allocator.release(held)
    assert allocator.num_free == 5 and cache.evict(9) == 4
    check_pages(allocator, [], cache.pages())
