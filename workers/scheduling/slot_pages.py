"""Slots, their page tables, and the pages that steps in flight may write. Owned by the scheduler; no policy."""

import heapq

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.nan_pages import NaNPages
from aerie.attention.kv_cache.page_allocator import DUMMY_PAGE, PageAllocator
from aerie.attention.kv_cache.prefix_cache import Match, PrefixCache
from aerie.attention.kv_cache.radix_node import salt_of_weights
from aerie.attention.kv_cache.slot_windows import SlotWindows
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.scheduling.slot_lengths import Int64s, SlotLengths, Slots
from aerie.workers.scheduling.state_saves import StateSaves


class SlotPages(SlotLengths):
    """The lengths and page list of each slot.

    pages: pages by slot.
    cache_salt: salt of cached pages by slot (`salt`), fixed when the slot is taken.
    weight_epoch: number of the ranks' weights; requests that get a slot from now on use pages of these weights only.
    saves: saved states of recurrent layers; None without such layers, or without a prefix cache.
    windows: windows of the slots; None without windowed layers.
    nan_pages: pages that may hold NaN, which the ranks zero before their next use.

    A page may be freed while steps in flight still write to it, because ranks execute plans in order, and its next
    owner is in a later plan. Cached pages are below the committed length, where no step writes.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        cache: PrefixCache | None,
        num_slots: int,
        page_size: int,
        state_interval: int = 0,
        round_tokens: int = 1,
    ) -> None:
        """state_interval: tokens between saved states of recurrent layers (`StateSaves.interval`); used only if the
            cache has snapshots.
        round_tokens: positions after the committed length that rounds in flight and the next one may write; used only
            if the allocator has window pages.
        """
        super().__init__(num_slots)
        has_states = cache is not None and cache.snapshots is not None
        self.saves = StateSaves(cache, num_slots, state_interval) if cache is not None and has_states else None
        windows = allocator.windows
        self.windows = SlotWindows(windows, num_slots, page_size, round_tokens) if windows is not None else None
        self.allocator = allocator
        self.cache = cache
        self.page_size = page_size
        self._shift = page_size.bit_length() - 1
        assert 1 << self._shift == page_size, f"page_size={page_size}"
        self.cache_salt = [b""] * num_slots
        self.weight_epoch = 0
        self.pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._free_slots = list(range(num_slots))  # heap: the lowest slot first
        # changes of the page tables that the next plan sends to the ranks: (slot, index in its table) -> page
        self._updates: dict[tuple[int, int], int] = {}
        self.nan_pages = NaNPages()

    def reset(self) -> None:
        """Free all slots and pages and empty the prefix cache, because the ranks' memory is gone."""
        for slot in np.flatnonzero(self.number >= 0).tolist():
            self._clear(slot)
        self._updates.clear()
        self.nan_pages.reset()
        self.allocator.reset()
        if self.cache is not None:
            self.cache.reset()
        if self.saves is not None:
            self.saves.reset()
        if self.windows is not None:
            self.windows.reset()

    @property
    def num_free_slots(self) -> int:
        """Free slots."""
        return len(self._free_slots)

    def take_slot(self, number: int, num_tokens: int, max_len: int, speculative: bool, match: Match) -> int:
        """Give request `number` a slot, and return it. Its table starts with the pages of `match`, whose references
        pass from the caller to the slot."""
        slot = heapq.heappop(self._free_slots)
        self.num_changes += 1
        self.number[slot] = number
        self.num_tokens[slot] = num_tokens
        self.max_len[slot] = max_len
        self.speculative[slot] = speculative
        self.committed[slot] = match.num_saved
        self._extend(slot, match.pages)
        self.num_pages[slot] = len(match.pages)
        if self.saves is not None:
            self.saves.enter(slot, match, num_tokens)
        if self.windows is not None:
            self.windows.enter(slot, match.pages, match.num_saved, num_tokens)
        return slot

    def slide(self) -> None:
        """Release window pages that the slots' windows have passed. Called before a plan takes pages."""
        if self.windows is not None:
            self.windows.slide(self.pages, self.committed, self.num_tokens)

    def fit_rounds(self, slots: Slots, ends: Int64s) -> int:
        """Give each slot pages for the positions below its end, and take away pages after it. Evicts cached pages if
        needed.

        Return the number of missing pages; if it is not 0, no slot got any.
        """
        change = ((ends + (self.page_size - 1)) >> self._shift) - self.num_pages[slots]
        if not change.any():
            return 0
        for i in np.flatnonzero(change < 0).tolist():
            slot, surplus = int(slots[i]), -int(change[i])
            table = self.pages[slot]
            if self.windows is not None:
                self.windows.shrink(table[-surplus:])
            self.allocator.release(table[-surplus:])
            del table[-surplus:]
            self.num_pages[slot] -= surplus
            for index in range(len(table), len(table) + surplus):
                self._updates[slot, index] = DUMMY_PAGE
        growing = np.flatnonzero(change > 0)
        counts = change[growing]
        need = int(counts.sum())
        missing = self._make_room(need)
        if missing:
            return missing
        fresh = self._allocate(need)
        grown = slots[growing]
        self.num_pages[grown] += counts
        start, updates = 0, self._updates
        for slot, count in zip(grown.tolist(), counts.tolist(), strict=True):
            table = self.pages[slot]
            for page in fresh[start : start + count]:
                updates[slot, len(table)] = page
                table.append(page)
            start += count
        return 0

    def pages_for(self, num_positions: int) -> int:
        """Return the number of pages for `num_positions` positions."""
        return (num_positions + self.page_size - 1) >> self._shift

    def prompt_pages_missing(self, more_tokens: int) -> int:
        """Return the pages that requests in prefill still lack for their prompts and `more_tokens` more tokens each."""
        slots = np.flatnonzero((self.number >= 0) & ~self.decoding)
        needed = (self.num_tokens[slots] + (more_tokens + self.page_size - 1)) >> self._shift
        return int((needed - self.num_pages[slots]).sum())

    def windows_fit(self, num_tokens: int, more_tokens: int) -> bool:
        """Whether the pool of window pages has room for a new request of `num_tokens`, with `more_tokens` more for each
        request."""
        if self.windows is None:
            return True
        wanted = (self.num_tokens + (more_tokens + self.page_size - 1)) >> self._shift
        room = self.windows.room(self.number >= 0, self.num_pages, wanted)
        return min(self.pages_for(num_tokens + more_tokens), self.windows.max_per_slot) <= room

    def room(self, slot: int) -> int:
        """Return the number of positions for which the slot has pages or could get them."""
        available = self.allocator.num_available
        if self.windows is not None:
            available = min(available, self.windows.pages.num_available)
        return (len(self.pages[slot]) + available) * self.page_size

    def fit_slot(self, slot: int, num_positions: int) -> int:
        """Give one slot pages for `num_positions` positions. Return the number of missing pages; 0 on success."""
        need = self.pages_for(num_positions) - len(self.pages[slot])
        if need <= 0:
            return 0
        missing = self._make_room(need)
        if missing == 0:
            self._extend(slot, self._allocate(need))
            self.num_pages[slot] += need
        return missing

    def share(self, slot: int, tokens: npt.NDArray[np.int32], num_pages: int | None = None) -> None:
        """Insert a running slot's committed pages into the prefix cache. If the cache already has a page, the slot uses
        that one from the next plan on, and its own is freed.

        tokens: all known tokens of the slot's request.
        num_pages: insert only the first `num_pages` pages; None: all. They must not include pages that the plan under
            construction writes.
        """
        if self.cache is None:
            return
        table = self.pages[slot]
        num_pages = int(self.committed[slot]) >> self._shift if num_pages is None else num_pages
        cached = self.cache.insert(tokens, table[:num_pages], self.cache_salt[slot])
        for index, page in enumerate(cached):
            if table[index] != page:
                if self.windows is not None:
                    self.windows.replace(slot, index, table[index], page)
                self.allocator.acquire((page,))
                self.allocator.release((table[index],))
                table[index] = page
                self._updates[slot, index] = page
        if self.saves is not None:
            self.saves.attach_states(slot, tokens, len(cached), self.cache_salt[slot])

    def release(self, slot: int, tokens: npt.NDArray[np.int32], num_committed: int, has_ended: bool = False) -> None:
        """Free the slot and its pages. Full pages below `num_committed` go to the prefix cache, with the states saved
        at their ends. has_ended: whether the ranks have ended the request, so that steps in flight commit nothing
        more."""
        table = self.pages[slot]
        if self.windows is not None:
            self.windows.leave(slot, table)
        if self.cache is not None:
            cached = self.cache.insert(tokens, table[: num_committed >> self._shift], self.cache_salt[slot])
            if self.windows is not None:
                self.windows.give(table, cached)
            if self.saves is not None:
                next_start, in_flight = int(self.committed[slot]), int(self.min_pending[slot])
                max_start = next_start if has_ended or in_flight <= 1 else next_start + int(self.max_pending[slot])
                starts = (next_start, max_start) if in_flight else None
                self.saves.leave(slot, tokens, len(cached), starts, self.cache_salt[slot])
        self.allocator.release(table)
        self._clear(slot)
        # Its table is no longer read, and is emptied when the slot gets a new request, perhaps in the same plan.
        self._updates = {entry: page for entry, page in self._updates.items() if entry[0] != slot}

    def salt(self, slot: int, own: bytes) -> bytes:
        """Return the salt of a request's cached pages. slot: its slot; -1: it would get one now. own: see
        `SamplingParams.cache_salt`."""
        return self.cache_salt[slot] if slot >= 0 else salt_of_weights(own, self.weight_epoch)

    def drop_nan_pages(self, slot: int, tokens: npt.NDArray[np.int32], salt: bytes) -> None:
        """Drop the KV of `tokens`, which may hold NaN, from the prefix cache, and zero its pages before they get
        another owner (`NaNPages`).

        slot: the request's slot; -1 if it has none.
        """
        num_free = self.windows.pages.num_free if self.windows is not None else 0
        cached = self.cache.forget(tokens, salt) if self.cache is not None else []
        pages = cached + (self.pages[slot] if slot >= 0 else [])
        self.nan_pages.add(pages)
        if self.windows is not None:
            self.windows.record_nan_pages(pages, num_free)

    def save_states(self, slots: Slots, margin: int) -> bytes:
        """Return the states that the plan saves, as `StepPlan.saved_states`.

        slots: [n] slots that run a round in the plan, not passed to `plan_round` yet.
        margin: see `StateSaves.plan_rounds`.
        """
        if self.saves is None:
            return b""
        self.saves.plan_rounds(slots, self.committed[slots] + self.max_pending[slots], margin)
        return self.saves.take()

    def take_cleared(self) -> bytes:
        """Return the pages that the next plan zeroes, as `StepPlan.cleared_pages`."""
        cleared = self.nan_pages.take()
        return pack_i32(cleared) if cleared else b""

    def take_updates(self) -> bytes:
        """Return page-table changes since the last plan, as `StepPlan.page_updates`."""
        packed = pack_i32([value for (slot, index), page in self._updates.items() for value in (slot, index, page)])
        self._updates.clear()
        return packed

    def take_window_changes(self) -> tuple[bytes, bytes]:
        """Return `StepPlan.window_updates` and `StepPlan.cleared_window_pages` since the last plan."""
        if self.windows is None:
            return b"", b""
        return pack_i32(self.windows.pages.take_updates()), pack_i32(self.windows.nan_pages.take())

    def _make_room(self, need: int) -> int:
        """Evict until `need` pages are free. Return the number of missing pages; evict nothing if it would not
        suffice."""
        missing = need - self.allocator.num_available
        if self.windows is not None:
            missing = max(missing, need - self.windows.pages.num_available)
        if missing > 0:
            return missing
        short = need - self.allocator.num_free
        if short > 0:
            assert self.cache is not None
            freed = self.cache.evict(short)
            assert freed == short, f"{freed} of {short} evictable pages were evicted"
        return 0

    def _allocate(self, count: int) -> list[int]:
        pages = self.allocator.allocate(count)
        self.nan_pages.record_allocation(pages)
        if self.windows is not None:
            self.windows.take(pages)
        return pages

    def _extend(self, slot: int, pages: list[int]) -> None:
        table = self.pages[slot]
        first = len(table)
        table += pages
        for index, page in enumerate(pages, first):
            self._updates[slot, index] = page

    def _clear(self, slot: int) -> None:
        self.clear_lengths(slot)
        self.pages[slot] = []
        heapq.heappush(self._free_slots, slot)
