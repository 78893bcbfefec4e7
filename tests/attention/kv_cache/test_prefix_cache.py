"""PrefixCache against what a plain dictionary of prefixes would say."""

import random

import numpy as np
import pytest

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from aerie.attention.kv_cache.radix_node import prompt_digests
from tests.support.simulation.integrity import check_pages


def tokens_of(*values):
    return np.array(values, np.int32)


def insert(cache, allocator, tokens):
    """Computes and inserts all pages of `tokens` as a request that matched nothing would; nobody holds them after."""
    pages = allocator.allocate(len(tokens) // cache.page_size)
    kept = cache.insert(tokens, pages)
    allocator.release(pages)
    return pages, kept


def test_finds_full_pages_and_leaves_one_token_to_compute():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, 4)
    pages, _ = insert(cache, allocator, tokens_of(*range(12)))
    assert cache.match(tokens_of(*range(12))).pages == pages[:2]
    assert cache.match(tokens_of(*range(13))).pages == pages
    assert cache.match(tokens_of(*range(8), 99, 99, 99)).pages == pages[:2]
    assert cache.match(tokens_of(99, *range(11))).pages == []
    assert cache.match(tokens_of(0)).pages == []


def test_with_lookahead_a_page_counts_only_with_the_token_after_it():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, 4, lookahead=1)
    pages = allocator.allocate(2)
    assert cache.insert(tokens_of(*range(8)), pages) == pages[:1]  # the token after the second page is unknown
    assert cache.insert(tokens_of(*range(9)), pages) == pages
    assert cache.match(tokens_of(0, 1, 2, 3, 4)).pages == pages[:1]
    assert cache.match(tokens_of(0, 1, 2, 3, 9, 5)).pages == []
    assert cache.match(tokens_of(*range(9))).pages == pages
    assert cache.match(tokens_of(*range(8), 77)).pages == pages[:1]


def test_pages_that_differ_only_in_the_token_after_are_kept_side_by_side():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, 2, lookahead=1)
    first, _ = insert(cache, allocator, tokens_of(1, 2, 3))
    second, _ = insert(cache, allocator, tokens_of(1, 2, 4))
    assert cache.match(tokens_of(1, 2, 3)).pages == first
    assert cache.match(tokens_of(1, 2, 4)).pages == second


def test_duplicates_are_named_and_stay_the_callers():
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, 2)
    first, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4))
    second = allocator.allocate(3)
    kept = cache.insert(tokens_of(1, 2, 3, 4, 5, 6), second)
    assert kept == [*first, second[2]]
    allocator.release(second)
    assert allocator.num_free == 10 - 3
    check_pages(allocator, [], cache.pages())


def test_oldest_leaf_goes_first_and_held_pages_never():
    allocator = PageAllocator(6)
    cache = PrefixCache(allocator, 1)
    insert(cache, allocator, tokens_of(1, 2))
    insert(cache, allocator, tokens_of(1, 3))
    insert(cache, allocator, tokens_of(7))
    held = cache.match(tokens_of(1, 2, 0)).pages
    allocator.release(cache.match(tokens_of(7, 0)).pages)
    assert cache.evict(1) == 1
    assert cache.match(tokens_of(1, 3, 0)).pages == held[:1], "the least recently used leaf was 1, 3"
    allocator.release(held[:1])
    assert cache.evict(5) == 1, "only 7 is a leaf that nobody holds"
    assert cache.match(tokens_of(7, 0)).pages == []
    allocator.release(held)
    assert cache.evict(5) == 2
    assert allocator.num_free == 6


def test_a_leaf_used_again_outlives_one_inserted_after_it():
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, 1)
    insert(cache, allocator, tokens_of(1))
    insert(cache, allocator, tokens_of(2))
    allocator.release(cache.match(tokens_of(1, 0)).pages)
    assert cache.evict(1) == 1
    assert cache.match(tokens_of(2, 0)).pages == [] and len(cache.match(tokens_of(1, 0)).pages) == 1


def test_eviction_takes_only_as_many_pages_as_asked_from_the_end():
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, 2)
    pages, _ = insert(cache, allocator, tokens_of(*range(16)))
    assert cache.evict(3) == 3
    assert cache.match(tokens_of(*range(17))).pages == pages[:5]
    again, kept = insert(cache, allocator, tokens_of(*range(6)))
    assert kept == pages[:3]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_matches_what_a_dictionary_of_prefixes_says(page_size, lookahead):
    rng = random.Random(page_size * 2 + lookahead)
    num_pages = 40
    allocator = PageAllocator(num_pages)
    cache = PrefixCache(allocator, page_size, lookahead)
    inserted: dict[bytes, int] = {}  # key tokens from the start -> page
    for _ in range(300):
        length = rng.randint(1, 8 * page_size)
        cuts = rng.randint(0, length)
        tokens = np.array([5] * cuts + [rng.randrange(2) for _ in range(length - cuts)], np.int32)
        found = cache.match(tokens).pages
        limit = (length - 1) // page_size
        expected = []
        for i in range(1, limit + 1):
            page = inserted.get(tokens[: i * page_size + lookahead].tobytes())
            if page is None:
                break
            expected.append(page)
        assert found == expected
        want = length // page_size - len(found)
        cache.evict(want - allocator.num_free)
        alive = set(cache.pages())
        inserted = {key: page for key, page in inserted.items() if page in alive}
        own = found + allocator.allocate(min(want, allocator.num_free))
        kept = cache.insert(tokens, own)
        for i, page in enumerate(kept, 1):
            inserted[tokens[: i * page_size + lookahead].tobytes()] = page
        check_pages(allocator, [own], cache.pages())
        allocator.release(own)
    assert cache.evict(num_pages) == num_pages - allocator.num_free or allocator.num_free == num_pages
    assert allocator.num_free == num_pages


def test_reset_forgets_everything():
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, 2)
    insert(cache, allocator, tokens_of(*range(16)))
    allocator.reset()
    cache.reset()
    assert cache.match(tokens_of(*range(16))).pages == []
    assert cache.evict(1) == 0
    check_pages(allocator, [], cache.pages())


def test_pages_are_shared_between_requests_of_one_salt_only() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator, page_size=4)
    plain, salted = allocator.allocate(2), allocator.allocate(3)
    tokens = tokens_of(*range(13))
    assert cache.insert(tokens, plain) == plain
    assert cache.insert(tokens, salted, b"a") == salted
    assert (
        cache.match(tokens).pages == plain
        and cache.match(tokens, b"a").pages == salted
        and cache.match(tokens, b"b").pages == []
    )
    assert cache.num_cached(tokens, b"a") == 12
    other = tokens_of(*range(8), 50, 51, 52, 53, 54)
    assert cache.match(other, b"a").pages == salted[:2], "a split keeps the salt"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("stride", [1, 3])
def test_changes_add_up_to_the_digests_of_what_is_cached(lookahead, stride):
    """And those are what a prompt's own digests say, through splits, evictions and duplicates."""
    rng = random.Random(5)
    allocator = PageAllocator(40)
    cache = PrefixCache(allocator, 4, lookahead)
    cache.watch(stride)
    known, seen = set(), []
    for _ in range(300):
        tokens = tokens_of(*(rng.randrange(2) for _ in range(rng.randrange(1, 50))))
        salt = rng.choice((b"", b"salt"))
        count = len(tokens) // 4
        cache.evict(count - allocator.num_free)
        pages = allocator.allocate(count)
        cache.insert(tokens, pages, salt)
        allocator.release(pages)
        if rng.random() < 0.02:
            cache.clear()
        for digest, here in cache.take_changes().items():
            (known.add if here else known.discard)(digest)
        assert known == set(cache.digests())
        seen.append((tokens, salt))
    for tokens, salt in seen:
        num = cache.num_cached(tokens, salt) // 4
        told = prompt_digests(tokens, 4, lookahead, salt)[stride - 1 :: stride]
        assert [digest in known for digest in told] == [True] * (num // stride) + [False] * (len(told) - num // stride)
    cache.reset()
    assert not any(cache.take_changes().values())
