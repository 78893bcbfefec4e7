"""Assertions that the scheduler's queues, slots, pages, windows and snapshots agree. They look inside."""

from collections.abc import Iterable, Sequence

import numpy as np

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from aerie.attention.kv_cache.window_pages import WindowPages
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.queues.waiting_queue import WaitingQueue
from aerie.workers.scheduling.slot_pages import SlotPages
from aerie.workers.scheduling.state_saves import StateSaves


def check_queues(queues: RequestQueues) -> None:
    """Queue, slots and all that they hold."""
    check_waiting(queues.waiting)
    assert all(number == sequence.number for number, sequence in queues.active.items())
    assert queues.prefilling.items() <= queues.active.items()
    assert not {sequence.number for sequence in queues.waiting} & set(queues.active), "a running request waits, too"
    assert sorted(s.slot for s in queues.active.values()) == np.flatnonzero(queues.slot_pages.number >= 0).tolist()
    assert {s.slot: s for s in queues.active.values()} == queues.by_slot
    assert len(queues._by_id) == len(queues.active) + len(queues.waiting)
    check_slots(queues.slot_pages)


def check_waiting(waiting: WaitingQueue) -> None:
    """Order and totals."""
    for tenant, of_tenant in waiting.by_tenant().items():
        assert of_tenant == sorted(of_tenant, key=lambda each: each.order) != [], "the queue is out of order"
        assert {each.tenant for each in of_tenant} == {tenant}
    sequences = list(waiting)
    assert {*sequences} == {each for of_tenant in waiting.by_tenant().values() for each in of_tenant}
    assert waiting._backlog.keys() == {sequence.number for sequence in sequences}
    assert waiting.load == (
        len(sequences),
        sum(len(sequence.prompt) for sequence in sequences),
        sum(sequence.request.sampling.max_tokens for sequence in sequences),
        sum(waiting._backlog.values()),
        sum(sequence.request.num_input_bytes for sequence in sequences),
    )


def check_slots(slots: SlotPages) -> None:
    """Slots, their pages, windows and states, and the prefix cache."""
    allocator, cache, windows = slots.allocator, slots.cache, slots.windows
    check_pages(allocator, slots.pages, [] if cache is None else cache.pages())
    if windows is not None:
        held = [pages[first:] for pages, first in zip(slots.pages, windows.first.tolist(), strict=True)]
        check_windows(windows.pages, held, free_pages(allocator))
    assert [len(pages) for pages in slots.pages] == slots.num_pages.tolist(), "page counts differ from the page lists"
    assert sorted(slots._free_slots) == np.flatnonzero(slots.number < 0).tolist(), "free slots differ"
    assert (slots.max_pending >= 0).all() and (slots.min_pending >= 0).all(), "more results than plans"
    if cache is not None and slots.saves is not None:
        check_snapshots(cache, saved_rows(slots.saves))


def saved_rows(saves: StateSaves) -> list[int]:
    """The rows that requests hold."""
    of_prompts = [row for each in saves._slots.values() for row, _ in each.planned.values()]
    of_answers = [each.row for each in saves._slots.values()] + saves.former.tolist()
    return of_prompts + [row for row in of_answers if row >= 0]


def check_pages(allocator: PageAllocator, held: Iterable[Sequence[int]], cached: Iterable[int]) -> None:
    """Reference counts match the holders' page lists (`held`) and the cache's pages."""
    num_pages = allocator.num_pages
    holders = [0] * (num_pages + 1)
    for pages in held:
        for page in pages:
            assert 0 < page <= num_pages, f"page {page} is outside 1..{num_pages}"
            holders[page] += 1
    flags = bytearray(num_pages + 1)
    for page in cached:
        assert not flags[page], f"page {page} is cached twice"
        flags[page] = 1
    assert holders == allocator._holders, "reference counts differ from the holders' page lists"
    assert flags == allocator._cached, "cached flags differ from the prefix cache's pages"
    free = sorted(allocator._free)
    assert free == [p for p in range(1, num_pages + 1) if not holders[p] and not flags[p]], "free list differs"
    assert allocator._num_held == sum(count > 0 for count in holders), "number of held pages differs"


def free_pages(allocator: PageAllocator) -> list[bool]:
    """Whether each page is neither held nor cached."""
    free = set(allocator._free)
    return [page in free for page in range(allocator.num_pages + 1)]


def check_windows(windows: WindowPages, held: Iterable[Sequence[int]], is_free: Sequence[bool]) -> None:
    """Counts match the holders' pages (`held`), and free pages have no window page."""
    num_pages = windows._num_pages
    holders = [0] * (num_pages + 1)
    for pages in held:
        for page in pages:
            holders[page] += 1
    assert holders == windows._holders, "holders of window pages differ from the requests' windows"
    attached = [page for page in range(1, num_pages + 1) if windows.of[page]]
    assert not any(is_free[page] for page in attached), "a free page has a window page"
    assert all(windows.of[page] for page in range(1, num_pages + 1) if holders[page])
    unheld = {page for page in attached if not holders[page]}
    assert unheld == windows._passed.keys() | windows._useful.keys()
    assert not windows._passed.keys() & windows._useful.keys()
    assert not unheld or windows._keeps
    owned = [windows.of[page] for page in attached] + windows._free
    assert sorted(owned) == list(range(1, windows.num_window_pages + 1)), "a window page is lost, or has two owners"


def check_snapshots(cache: PrefixCache, lent: Sequence[int]) -> None:
    """Rows, links and the tree agree. lent: rows of running requests."""
    snapshots, nodes = cache.snapshots, list(cache._nodes())
    assert snapshots is not None
    hanging = [snapshot for node in nodes for snapshot in node.snapshots]
    saved = snapshots._saved
    assert {id(each) for each in hanging} == {id(each) for each in saved.values()}, "snapshots outside the tree"
    rows = [*snapshots._free, *snapshots._returned, *saved, *lent]
    assert sorted(rows) == list(snapshots.rows), f"rows {sorted(rows)} of {snapshots.rows}"
    for node in nodes:
        ends = [snapshot.end for snapshot in node.snapshots]
        assert ends == sorted(set(ends)) and all(node.depth < end <= node.end for end in ends), "misplaced"
        for snapshot in node.snapshots:
            assert snapshot.node is node and saved[snapshot.row] is snapshot
            assert snapshot.before is node.deepest(snapshot.end - 1), "another snapshot is before it"
            assert snapshot in (snapshots._first if snapshot.before is None else snapshot.before.after)
    assert sum(len(each.after) for each in hanging) + len(snapshots._first) == len(hanging), "linked twice"
