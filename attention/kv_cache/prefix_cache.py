"""Finds the KV pages of an earlier prompt with the same beginning: a radix tree over full pages.

The scheduler looks prompts up when it admits them and inserts what was computed. Knows tokens and pages, no requests.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from attention.kv_cache.page_allocator import PageAllocator
from attention.kv_cache.prefix_digests import first_digest, next_digests
from attention.kv_cache.radix_node import EvictionKey, Node, SnapshotKind, Tokens
from attention.kv_cache.snapshots import Snapshots


@dataclass(frozen=True)
class Match:
    """What the cache has of a prompt.

    pages: of its longest known beginning.
    num_saved: tokens that need not be computed: those of the pages, or with recurrent layers those up to the deepest
        snapshot among them.
    row: of that snapshot; -1 for none.
    is_fork: whether another text goes on after the pages.
    """

    pages: list[int]
    num_saved: int
    row: int = -1
    is_fork: bool = False


class PrefixCache:
    """Radix tree from tokens to pages, least recently used leaves evicted first.

    lookahead: tokens after a page that its content depends on. A target's KV at position i depends on tokens 0..i: 0.
    An EAGLE draft's KV at i is made of the target's features at i and of token i + 1 (EAGLE, arXiv 2401.15077, section
    4.1), so a page shared by target and draft at [s, s + page_size) is keyed by tokens s .. s + page_size: 1.

    Whoever holds a page of the tree holds the pages before it too, so `PageAllocator.num_evictable` is exact: leaves go
    first, and no unheld page has a held one below it.

    snapshots: states of recurrent layers at ends of pages; None for a model without such layers. A request resumes at
    the deepest one among its pages, and computes the tokens after it again. So pages after a path's last snapshot save
    no computation: they are evicted before all others. A page that goes takes its snapshot along; a snapshot may go
    alone (`Snapshots`).
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, lookahead: int = 0, snapshots: Snapshots | None = None
    ) -> None:
        assert lookahead in (0, 1), f"lookahead={lookahead}"
        self.snapshots = snapshots
        self.page_size = page_size
        self.lookahead = lookahead
        self._allocator = allocator
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_insertions = 0
        self._root = Node.root()
        self._changes: dict[bytes, bool] | None = None  # by digest whether it is here now, since `take_changes`
        self._stride = 1
        self.reset()

    def reset(self) -> None:
        """Forget all pages and snapshots, and what rows are lent. The caller resets the allocator with it; counters
        stay."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(self.digests(), False))
        self._root = Node.root()
        self._clock = 0
        self._leaves: list[tuple[EvictionKey, int, Node]] = []  # heap; entries may be stale, see `evict`
        self._num_pushed = 0
        if self.snapshots is not None:
            self.snapshots.reset()

    def clear(self) -> int:
        """Forget all pages; those that no request holds become free, the others when they are released. Returns how
        many were forgotten; counters stay."""
        gone = list(self.pages())
        self._allocator.uncache(gone)
        assert self.snapshots is None or self.snapshots.num_lent == 0, "a request still writes states"
        self.reset()
        return len(gone)

    def forget(self, tokens: Tokens, salt: bytes = b"") -> list[int]:
        """Let go of the pages of all texts that have the first page of `tokens` (int32 [n]); returns them."""
        first = tokens[: self.page_size + self.lookahead].tobytes()
        node = self._root.children.pop(salt + first, None)
        forgotten: list[int] = []
        for each in [] if node is None else list(self._nodes(node)):
            self._note(each.digests, each.depth, False)
            self._allocator.uncache(each.pages)
            self._drop_snapshots(each, after=0)
            forgotten += each.pages
            each.pages, each.digests = [], []  # so that `evict` skips its entry among the leaves
        return forgotten

    def watch(self, stride: int) -> None:
        """From now on `digests` and `take_changes` tell of each prompt's pages number `stride`, 2 * `stride` and so on;
        0: nobody asks any more."""
        self._changes = {} if stride else None
        self._stride = stride or 1

    def take_changes(self) -> dict[bytes, bool]:
        """Digests of pages (`attention.kv_cache.prefix_digests`) that came (True) or went since `watch` or the last
        call; of one that did both, what holds now."""
        assert self._changes is not None, "nobody watches"
        changes, self._changes = self._changes, {}
        return changes

    def digests(self) -> Iterator[bytes]:
        """Of the pages in the tree that are told of."""
        return (digest for node in self._nodes() for digest in self._told(node.digests, node.depth))

    def match(self, tokens: Tokens, salt: bytes = b"") -> Match:
        """The longest known beginning of `tokens` (int32 [n]), whose pages get one more holder, the caller. salt: only
        what was inserted with the same one is known.

        At most (n - 1) // page_size pages: at least one token is left to compute, and with lookahead 1 a page's last
        key token must be part of `tokens`.
        """
        match = self._look_up(tokens, salt, resumes=True)
        self._allocator.acquire(match.pages)
        return match

    def num_cached(self, tokens: Tokens, salt: bytes = b"") -> int:
        """How many of `tokens` (int32 [n]) need not be computed after a `match`; the pages get no holder."""
        return self._look_up(tokens, salt).num_saved

    def _look_up(self, tokens: Tokens, salt: bytes, resumes: bool = False) -> Match:
        node, kept, pages = self._walk(tokens, (len(tokens) - 1) // self.page_size, salt)
        snapshots = self.snapshots
        if snapshots is None:
            return Match(pages, len(pages) * self.page_size)
        is_fork = kept < len(node.pages) or bool(node.children)
        snapshot = node.deepest(len(pages))
        if snapshot is None:
            return Match(pages, 0, -1, is_fork)
        if resumes:
            snapshots.use(snapshot)
        return Match(pages, snapshot.end * self.page_size, snapshot.row, is_fork)

    def record_query(self, num_tokens: int, match: Match) -> None:
        """Count one admitted prompt of `num_tokens`."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += match.num_saved
        self.num_recomputed_tokens += len(match.pages) * self.page_size - match.num_saved

    def lend_row(self, num_tokens: int, kind: SnapshotKind) -> int | None:
        """A row for the state of a running request, without which `num_tokens` would be computed again; a cheaper
        snapshot goes for it. None if there is none, or no snapshots."""
        if self.snapshots is None:
            return None
        row, bared = self.snapshots.lend(num_tokens // self.page_size, kind)
        if bared is not None:
            self._requeue(bared)
        return row

    def attach(self, tokens: Tokens, position: int, row: int, kind: SnapshotKind, salt: bytes = b"") -> None:
        """A lent row holds the state after the first `position` of `tokens`, the end of a page: keep it, or give the
        row back where the tree has no such page or has its state already."""
        snapshots, size = self.snapshots, self.page_size
        assert snapshots is not None and position % size == 0, f"a state after {position} tokens, not at a page's end"
        end = position // size
        node, kept, pages = self._walk(tokens, min(end, (len(tokens) - self.lookahead) // size), salt)
        if len(pages) < end or any(snapshot.end == end for snapshot in node.snapshots):
            snapshots.give_back(row)
            return
        snapshots.add(row, end, node, kind)

    def insert(self, tokens: Tokens, pages: list[int], salt: bytes = b"") -> list[int]:
        """Keep the caller's `pages` (held by it), which hold the KV of the beginning of `tokens`.

        Returns the tree's page for each of the first min(len(pages), (n - lookahead) // page_size) pages. Where that is
        not the caller's own, the tree had one already and the caller's is a duplicate, which stays the caller's alone.
        """
        size = self.page_size
        count = min(len(pages), (len(tokens) - self.lookahead) // size)
        node, kept, present = self._walk(tokens, count, salt)
        known = len(present)
        if known >= count:
            return present
        if kept < len(node.pages):
            node = node.split(kept, size, self.lookahead)
        new = pages[known:count]
        start = known * size
        key = (b"" if known else salt) + tokens[start : start + size + self.lookahead].tobytes()
        own = tokens[start : count * size + self.lookahead].copy()
        before = node.digests[-1] if node.digests else first_digest(salt)
        digests = next_digests(before, own, len(new), size, self.lookahead)
        self._note(digests, known, True)
        child = Node(own, new, digests, known, node, key, self._clock)
        node.children[key] = child
        self._queue(child)
        self._allocator.cache(new)
        self.num_insertions += 1
        return present + new

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no request holds: first those after a path's last snapshot, then oldest leaves
        first, each from its end. Returns how many."""
        freed = 0
        held: list[Node] = []
        while freed < count and self._leaves:
            key, _, node = heapq.heappop(self._leaves)
            if key != node.queued:  # another entry has taken its place
                continue
            node.queued = None
            if node.children or not node.pages:
                continue
            if key != self._key(node):  # used since it was queued
                self._queue(node)
                continue
            limit = self._num_bare(node) or len(node.pages)
            num = self._allocator.num_unheld_at_end(node.pages, min(limit, count - freed))
            if num == 0:
                held.append(node)
                continue
            freed += num
            self._cut(node, num)
        for node in held:
            self._queue(node)
        return freed

    def check_snapshots(self, lent: list[int]) -> None:
        """Assert that every row is free, in the tree, or one of `lent`."""
        assert self.snapshots is not None
        self.snapshots.check_integrity(list(self._nodes()), lent)

    def pages(self) -> Iterator[int]:
        """Every page in the tree."""
        return (page for node in self._nodes() for page in node.pages)

    def _nodes(self, top: Node | None = None) -> Iterator[Node]:
        """All of the tree, or of it from `top` down, each after its parent."""
        stack = [top or self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _note(self, digests: list[bytes], depth: int, here: bool) -> None:
        """Pages that `depth` others are before came or went."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(self._told(digests, depth), here))

    def _told(self, digests: list[bytes], depth: int) -> list[bytes]:
        return digests[(-depth - 1) % self._stride :: self._stride]

    def _walk(self, tokens: Tokens, limit: int, salt: bytes) -> tuple[Node, int, list[int]]:
        """Follows `tokens` for up to `limit` pages: the last node touched, its pages matched, all pages matched."""
        size, lookahead = self.page_size, self.lookahead
        self._clock += 1
        node, kept = self._root, 0
        pages: list[int] = []
        while len(pages) < limit:
            start = len(pages) * size
            first = tokens[start : start + size + lookahead].tobytes()
            child = node.children.get(first if pages else salt + first)
            if child is None:
                break
            child.stamp = self._clock
            count = min(len(child.pages), limit - len(pages))
            span = count * size + lookahead
            same = child.tokens[:span] == tokens[start : start + span]
            if not same.all():
                count = (int(same.argmin()) - lookahead) // size
            pages += child.pages[:count]
            node, kept = child, count
            if count < len(child.pages):
                break
        return node, kept, pages

    def _cut(self, node: Node, count: int) -> None:
        """Drops the last `count` pages of a leaf; an emptied leaf leaves the tree, and its parent may become one."""
        gone = node.pages[-count:]
        self._note(node.digests[-count:], node.depth + len(node.pages) - count, False)
        del node.pages[-count:]
        del node.digests[-count:]
        self._drop_snapshots(node, after=node.end)
        self._allocator.uncache(gone)
        if node.pages:
            node.tokens = node.tokens[: len(node.pages) * self.page_size + self.lookahead].copy()
            self._queue(node)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent is not self._root and not parent.children:
            self._queue(parent)

    def _drop_snapshots(self, node: Node, after: int) -> None:
        """Those of a node after page number `after` of its path."""
        for snapshot in [snapshot for snapshot in node.snapshots if snapshot.end > after]:
            assert self.snapshots is not None
            self.snapshots.drop(snapshot)

    def _num_bare(self, leaf: Node) -> int:
        """Pages of a leaf after its last snapshot, which save no computation; 0 without recurrent layers."""
        if self.snapshots is None:
            return 0
        return leaf.end - leaf.snapshots[-1].end if leaf.snapshots else len(leaf.pages)

    def _key(self, leaf: Node) -> EvictionKey:
        """The leaf with the least key goes first."""
        return self._num_bare(leaf) == 0, leaf.stamp

    def _requeue(self, node: Node) -> None:
        """A node has lost a snapshot: if it is a leaf, it may go earlier."""
        if node.pages and not node.children:
            self._queue(node)

    def _queue(self, leaf: Node) -> None:
        """One valid heap entry per leaf; the key of a leaf used later is corrected when the entry comes up."""
        key = self._key(leaf)
        if leaf.queued is None or key < leaf.queued:
            leaf.queued = key
            self._num_pushed += 1
            heapq.heappush(self._leaves, (key, self._num_pushed, leaf))
