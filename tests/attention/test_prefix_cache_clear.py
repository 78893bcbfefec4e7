"""Emptying the prefix cache: what it frees, and that whoever holds its pages does not notice."""

import numpy as np

from attention.kv_cache.page_allocator import PageAllocator
from attention.kv_cache.prefix_cache import PrefixCache


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
    assert cache.match(_tokens(1, 2, 3, 4, 5)) == []
    allocator.check_integrity([], cache.pages())


def test_held_pages_stay_their_holders_and_may_be_inserted_again() -> None:
    allocator = PageAllocator(7)
    cache = PrefixCache(allocator, 2)
    pages = allocator.allocate(3)
    cache.insert(_tokens(*range(6)), pages)
    shared = cache.match(_tokens(*range(5)))  # a second holder of two of them
    assert cache.clear() == 3
    allocator.check_integrity([pages, shared], [])
    assert allocator.num_held == 3 and allocator.num_free == 4
    assert cache.insert(_tokens(*range(6)), pages) == pages
    allocator.release(pages)
    allocator.release(shared)
    assert allocator.num_evictable == 3 and cache.evict(9) == 3
    allocator.check_integrity([], cache.pages())
