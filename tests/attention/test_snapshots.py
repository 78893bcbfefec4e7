"""Snapshots of recurrent layers in the prefix cache, against a dictionary of beginnings that knows no tree."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from aerie.attention.kv_cache.radix_node import SnapshotKind
from aerie.attention.kv_cache.snapshots import Group, Snapshots
from tests.support.simulation.integrity import check_pages, check_snapshots

SIZE, NUM_PAGES, ROWS = 2, 24, range(5, 9)
KIND = SnapshotKind.PROMPT


def tokens_of(*values):
    return np.array(values, np.int32)


def cache_of(num_pages=NUM_PAGES, rows=ROWS, lookahead=0):
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(allocator, SIZE, lookahead, Snapshots(rows))


def insert(allocator, cache, tokens):
    pages = allocator.allocate(len(tokens) // SIZE)
    cache.insert(tokens, pages)
    allocator.release(pages)


def save(cache, tokens, position):
    row = cache.lend_row(position, KIND)
    assert row is not None
    cache.attach(tokens, position, row, KIND)
    cache.snapshots.plan_ended()
    return row


def resumed(allocator, cache, tokens):
    """Pages matched, tokens saved, row; nothing is held after."""
    match = cache.match(tokens)
    allocator.release(match.pages)
    return len(match.pages), match.num_saved, match.row


def test_a_prompt_resumes_at_the_deepest_snapshot_among_its_pages():
    allocator, cache = cache_of()
    text = tokens_of(*range(12))
    insert(allocator, cache, text)
    assert resumed(allocator, cache, text) == (5, 0, -1)
    early, late = save(cache, text, 4), save(cache, text, 10)
    assert resumed(allocator, cache, text) == (5, 10, late)
    assert resumed(allocator, cache, text[:10]) == (4, 4, early)
    assert resumed(allocator, cache, tokens_of(*range(7), 99, 99)) == (3, 4, early)
    assert cache.match(tokens_of(*range(7), 99, 99)).is_fork and not cache.match(tokens_of(*range(13))).is_fork


def test_a_split_leaves_snapshots_at_their_pages():
    allocator, cache = cache_of()
    text = tokens_of(*range(12))
    insert(allocator, cache, text)
    rows = [save(cache, text, position) for position in (12, 2, 6)]
    insert(allocator, cache, tokens_of(*range(6), 70, 71, 72, 73))
    other = tokens_of(*range(6), 70, 71, 72, 73, 74)
    assert resumed(allocator, cache, other) == (5, 6, rows[2])
    assert resumed(allocator, cache, tokens_of(*range(13))) == (6, 12, rows[0])
    check_snapshots(cache, [])


def test_a_second_state_of_the_same_tokens_gives_its_row_back():
    allocator, cache = cache_of()
    text = tokens_of(*range(8))
    insert(allocator, cache, text)
    first = save(cache, text, 4)
    second = cache.lend_row(4, KIND)
    cache.attach(text, 4, second, KIND)
    assert resumed(allocator, cache, text[:6]) == (2, 4, first)
    third = cache.lend_row(4, KIND)
    assert third != second, "a step of the plan being built may still write it"
    cache.snapshots.give_back(third)
    cache.snapshots.plan_ended()
    check_snapshots(cache, [])


def test_a_state_whose_pages_are_gone_is_not_kept():
    allocator, cache = cache_of()
    text = tokens_of(*range(8))
    row = cache.lend_row(8, KIND)
    insert(allocator, cache, text)
    cache.evict(1)
    cache.attach(text, 8, row, KIND)
    assert cache.snapshots.num_saved == cache.snapshots.num_lent == 0
    assert resumed(allocator, cache, text) == (3, 0, -1)


def test_pages_go_with_their_snapshots_and_pages_after_the_last_one_first():
    allocator, cache = cache_of()
    old, new = tokens_of(*range(8)), tokens_of(*range(50, 58))
    insert(allocator, cache, old)
    insert(allocator, cache, new)
    save(cache, old, 8)
    save(cache, new, 4)
    assert cache.evict(3) == 3, "two pages of the newer text that save nothing, then the older text's last"
    assert resumed(allocator, cache, tokens_of(*range(50, 59))) == (2, 4, ROWS[1])
    assert resumed(allocator, cache, tokens_of(*range(9))) == (3, 0, -1)
    assert cache.snapshots.num_saved == 1


def test_a_leaf_that_loses_its_snapshot_is_evicted_first():
    allocator, cache = cache_of(rows=range(1))
    first, second = tokens_of(*range(4)), tokens_of(*range(50, 58))
    insert(allocator, cache, first)
    insert(allocator, cache, second)
    save(cache, first, 4)
    allocator.release(cache.match(tokens_of(*range(5))).pages)
    save(cache, second, 8)  # takes the only row
    assert cache.evict(2) == 2
    assert resumed(allocator, cache, tokens_of(*range(5))) == (0, 0, -1)
    assert resumed(allocator, cache, tokens_of(*range(50, 59)))[:2] == (4, 8)


def test_a_dear_snapshot_outlives_cheap_ones_but_not_for_ever():
    """10 pages against 3 each. The cheap ones are used once each, which the dear one never is."""
    allocator, cache = cache_of(num_pages=3000, rows=range(2))
    dear = tokens_of(*range(20))
    insert(allocator, cache, dear)
    save(cache, dear, 20)
    survived = 0
    while resumed_row(cache, dear) >= 0:
        survived += 1
        assert survived < 200
        cheap = tokens_of(*[100 + survived] * 7)
        insert(allocator, cache, cheap)
        save(cache, cheap, 6)
        assert resumed(allocator, cache, cheap)[1] == 6
    assert survived > 3


def resumed_row(cache, text):
    return next((each.row for node in cache._nodes() for each in node.snapshots if each.end == len(text) // SIZE), -1)


def test_a_cheap_state_takes_no_row_from_a_dear_one():
    _, cache = cache_of(rows=range(1))
    dear = tokens_of(*range(20))
    allocator = cache._allocator
    insert(allocator, cache, dear)
    save(cache, dear, 20)
    assert cache.lend_row(8, KIND) is None and cache.lend_row(0, KIND) is None
    assert cache.lend_row(22, KIND) == 0


def test_states_that_a_conversation_has_left_behind_go_first():
    """Each turn resumes at the end of the one before, so that the others of its states are hardly used."""
    allocator, cache = cache_of(num_pages=3000, rows=range(40))
    for talk in range(40):
        for turn in range(1, 6):
            text = tokens_of(*[1000 + talk] * (8 * turn), 7)
            resumed(allocator, cache, text)
            insert(allocator, cache, text)
            row = cache.lend_row(8, KIND)
            if row is not None:
                cache.attach(text, 8 * turn, row, KIND)
            cache.snapshots.plan_ended()
    old, new = (cache.snapshots._rates.rate(Group(KIND, is_last), 0) for is_last in (False, True))
    assert new > 3 * old
    num_last = sum(not each.after for each in cache.snapshots._saved.values())
    assert num_last > 25, "the least recently used would have left the 40 states of 8 conversations"


def test_a_kind_that_is_used_outlives_one_that_is_not():
    """Ends of prompts that never come again, against a shorter beginning of every tenth prompt, saved again when
    it is missed."""
    allocator, cache = cache_of(num_pages=1400, rows=range(4))
    shared, found = tokens_of(*range(8)), []
    insert(allocator, cache, shared)
    for i in range(120):
        if i % 10 == 0:
            found.append(resumed(allocator, cache, tokens_of(*range(8), 1))[1])
            if not found[-1] and (row := cache.lend_row(8, SnapshotKind.FORK)) is not None:
                cache.attach(shared, 8, row, SnapshotKind.FORK)
        once = tokens_of(*[100 + i] * 20)
        insert(allocator, cache, once)
        if (row := cache.lend_row(20, KIND)) is not None:
            cache.attach(once, 20, row, KIND)
        cache.snapshots.plan_ended()
    assert found[-4:] == [8] * 4


def test_a_kind_that_was_useless_is_tried_again():
    """After a thousand ends of prompts that never came again, while other snapshots, once used, fill all rows."""
    allocator, cache = cache_of(num_pages=1000, rows=range(2))
    for i in range(1000):
        row = cache.lend_row(8, KIND)
        if row is not None:
            insert(allocator, cache, tokens_of(*[100 + i] * 8))
            cache.attach(tokens_of(*[100 + i] * 8), 8, row, KIND)
        cache.snapshots.plan_ended()
        cache.evict(4)
    assert cache.snapshots._rates.rate(Group(KIND, True), 0) < 0.01
    for i in range(2):
        text = tokens_of(*[5 + i] * 40)
        insert(allocator, cache, text)
        cache.attach(text, 38, cache.lend_row(38, SnapshotKind.FORK), SnapshotKind.FORK)
        assert resumed(allocator, cache, text)[1] == 38
    tries = 0
    while cache.lend_row(8, KIND) is None:
        tries += 1
        assert tries < 1000


def test_rows_that_requests_write_are_never_taken_from_them():
    _, cache = cache_of(rows=range(2))
    assert {cache.lend_row(2, KIND), cache.lend_row(2, KIND)} == {0, 1}
    assert cache.lend_row(1000, KIND) is None
    assert cache.snapshots.num_lent == 2


KINDS = st.sampled_from(SnapshotKind)


class CacheMachine(RuleBasedStateMachine):
    """Texts over two tokens, so that they share beginnings; rows are lent, attached, given back; pages are held,
    evicted, forgotten."""

    @initialize(lookahead=st.integers(0, 1))
    def begin(self, lookahead):
        self.lookahead = lookahead
        self.allocator, self.cache = cache_of(lookahead=lookahead)
        self.snapshots = self.cache.snapshots
        self.held = []
        self.lent = []
        self.pages = {}  # by salt and all tokens up to it: page
        self.states = {}  # by the same key: row
        self.inserted = []

    def key(self, tokens, page, salt):
        return salt, tokens[: page * SIZE + self.lookahead].tobytes()

    def sync(self):
        """What is gone: pages that the tree has no more, and states without a snapshot."""
        alive = set(self.cache.pages())
        self.pages = {key: page for key, page in self.pages.items() if page in alive}
        rows = {each.row for node in self.cache._nodes() for each in node.snapshots}
        self.states = {key: row for key, row in self.states.items() if row in rows}

    def cost(self, key):
        """Pages since the next state up the path."""
        salt, raw = key
        page = (len(raw) // 4 - self.lookahead) // SIZE
        for before in range(page - 1, 0, -1):
            if (salt, raw[: (before * SIZE + self.lookahead) * 4]) in self.states:
                return page - before
        return page

    @rule(bits=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([b"", b"s"]))
    def insert(self, bits, salt):
        tokens = tokens_of(*bits)
        found = self.cache.match(tokens, salt)
        count = len(tokens) // SIZE - len(found.pages)
        self.cache.evict(count - self.allocator.num_free)
        self.sync()
        own = found.pages + self.allocator.allocate(min(count, self.allocator.num_free))
        for i, page in enumerate(self.cache.insert(tokens, own, salt), 1):
            self.pages[self.key(tokens, i, salt)] = page
        self.allocator.release(own)
        self.inserted.append((tokens, salt))

    @rule(
        bits=st.lists(st.integers(0, 1), min_size=1, max_size=16), salt=st.sampled_from([b"", b"s"]), hold=st.booleans()
    )
    def match(self, bits, salt, hold):
        tokens = tokens_of(*bits)
        expected, row, saved = [], -1, 0
        for i in range(1, (len(tokens) - 1) // SIZE + 1):
            key = self.key(tokens, i, salt)
            if key not in self.pages:
                break
            expected.append(self.pages[key])
            if key in self.states:
                row, saved = self.states[key], i * SIZE
        match = self.cache.match(tokens, salt)
        assert (match.pages, match.num_saved, match.row) == (expected, saved, row)
        assert self.cache.num_cached(tokens, salt) == saved
        if hold and match.pages:
            self.held.append(match.pages)
        else:
            self.allocator.release(match.pages)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        self.allocator.release(self.held.pop(pick % len(self.held)))

    @rule(cost=st.integers(0, 12), kind=KINDS)
    def lend(self, cost, kind):
        snapshots = [each for node in self.cache._nodes() for each in node.snapshots]
        for key, row in self.states.items():
            assert self.snapshots._saved[row].cost == self.cost(key)
        values = {each.row: self.snapshots.value(each) for each in snapshots}
        free, own = bool(self.snapshots._free), self.snapshots.value_of_new(cost, kind)
        row = self.cache.lend_row(cost * SIZE, kind)
        if row is not None:
            self.lent.append(row)
        if free:
            assert row not in values
        elif not values:
            assert row is None
        else:
            least = min(values.values())
            assert (row is not None) == (least <= own and cost > 0)
            assert row is None or values[row] == least
        self.sync()

    @precondition(lambda self: self.lent and self.inserted)
    @rule(pick=st.integers(0, 99), text=st.integers(0, 99), page=st.integers(1, 7), kind=KINDS)
    def attach(self, pick, text, page, kind):
        tokens, salt = self.inserted[text % len(self.inserted)]
        row = self.lent.pop(pick % len(self.lent))
        self.cache.attach(tokens, page * SIZE, row, kind, salt)
        key = self.key(tokens, page, salt)
        whole = len(key[1]) == (page * SIZE + self.lookahead) * 4
        if whole and key in self.pages and key not in self.states:
            self.states[key] = row

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self):
        self.snapshots.give_back(self.lent.pop())

    @rule()
    def plan_ended(self):
        self.snapshots.plan_ended()

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        """Pages with a state at them or below them are useful: none of those goes while one that nobody holds is
        useless."""
        self.sync()
        held = {page for pages in self.held for page in pages}
        useful = {
            page
            for (salt, raw), page in self.pages.items()
            if any(other == salt and more[: len(raw)] == raw for other, more in self.states)
        }
        before = set(self.pages.values())
        freed = self.cache.evict(count)
        self.sync()
        gone = before - set(self.pages.values())
        assert len(gone) == freed == min(count, len(before - held))
        assert not gone & useful or not (before - held - useful) - gone

    @precondition(lambda self: self.inserted)
    @rule(text=st.integers(0, 99))
    def forget(self, text):
        tokens, salt = self.inserted[text % len(self.inserted)]
        self.cache.forget(tokens, salt)
        self.sync()

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "cache"):
            return
        check_pages(self.allocator, self.held, self.cache.pages())
        check_snapshots(self.cache, self.lent)
        assert len(self.states) == self.snapshots.num_saved


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")(
    CacheMachine.TestCase
)
