"""PageAllocator: what is free, held, cached, and that the counts say so."""

import random

import pytest

from aerie.attention.kv_cache.page_allocator import DUMMY_PAGE, PageAllocator
from tests.support.simulation.integrity import check_pages


def test_hands_out_every_page_but_the_dummy_once():
    allocator = PageAllocator(5)
    pages = allocator.allocate(2) + allocator.allocate(3) + allocator.allocate(0)
    assert sorted(pages) == [1, 2, 3, 4, 5] and DUMMY_PAGE not in pages
    assert allocator.num_free == 0 and allocator.num_held == 5
    with pytest.raises(AssertionError, match="allocate\\(1\\) with 0 free pages"):
        allocator.allocate(1)


def test_shared_page_is_free_only_after_its_last_holder():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.acquire(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 3
    with pytest.raises(AssertionError, match="which has no holder"):
        allocator.release(pages[:1])


def test_cached_page_is_available_but_not_free():
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    allocator.cache(pages[:2])
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_evictable, allocator.num_available) == (2, 2, 4)
    allocator.acquire(pages[:1])
    assert (allocator.num_evictable, allocator.num_available) == (1, 3)
    allocator.uncache(pages[:2])
    assert (allocator.num_free, allocator.num_held) == (3, 1)


def test_a_free_page_cannot_be_acquired_or_cached():
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="acquire of free page 1"):
        allocator.acquire([1])
    with pytest.raises(AssertionError, match="cache of page 1"):
        allocator.cache([1])


def test_an_empty_pool_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="num_pages=0: must be at least 1; give the KV cache more memory"):
        PageAllocator(0)


def test_integrity_check_finds_a_lost_and_a_doubly_held_page():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    check_pages(allocator, [pages], [])
    with pytest.raises(AssertionError, match="reference counts differ"):
        check_pages(allocator, [pages[:1]], [])
    with pytest.raises(AssertionError, match="reference counts differ"):
        check_pages(allocator, [pages, pages[1:]], [])
    with pytest.raises(AssertionError, match="cached flags differ"):
        check_pages(allocator, [pages], pages[:1])


@pytest.mark.parametrize("seed", range(5))
def test_counts_stay_right_under_random_use(seed):
    rng = random.Random(seed)
    allocator = PageAllocator(23)
    held: list[list[int]] = []
    cached: set[int] = set()
    for _ in range(500):
        kind = rng.randrange(5)
        if kind == 0:
            held.append(allocator.allocate(rng.randint(0, allocator.num_free)))
        elif kind == 1 and held:
            allocator.release(held.pop(rng.randrange(len(held))))
        elif kind == 2 and held:
            shared = rng.choice(held)
            allocator.acquire(shared)
            held.append(list(shared))
        elif kind == 3 and held:
            new = {page for page in rng.choice(held) if page not in cached}
            allocator.cache(new)
            cached |= new
        elif kind == 4 and cached:
            gone = rng.sample(sorted(cached), rng.randint(1, len(cached)))
            allocator.uncache(gone)
            cached -= set(gone)
        check_pages(allocator, held, cached)
        assert allocator.num_available == allocator.num_free + allocator.num_evictable
