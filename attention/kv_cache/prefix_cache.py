"""Finds KV pages of earlier prompts with the same beginning: a radix tree over full pages, and the order in which its
leaves are evicted. The scheduler looks up prompts when it admits them, and inserts computed pages. Knows tokens and
pages, no requests."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.radix_node import EvictionKey, Node, SnapshotKind, Tokens, first_digest, next_digests
from aerie.attention.kv_cache.snapshots import Snapshots


class EvictionQueue:
    """A heap of leaves: first those that end in pages after the path's last snapshot, then the least recently used.

    A use does not move a leaf: its key is corrected when it is popped. So `match` and `insert` cost nothing here, and
    the heap may have stale entries.
    """

    def __init__(self, has_snapshots: bool) -> None:
        """has_snapshots: whether there are recurrent layers; then pages after the last snapshot save no computation."""
        self._has_snapshots = has_snapshots
        self._heap: list[tuple[EvictionKey, int, Node]] = []
        self._num_pushed = 0

    def clear(self) -> None:
        """Forget all leaves."""
        self._heap.clear()
        self._num_pushed = 0

    def push(self, leaf: Node) -> None:
        """Add a leaf, or move it forward if it is now evicted earlier."""
        key = self._key(leaf)
        if leaf.queued is None or key < leaf.queued:
            leaf.queued = key
            self._num_pushed += 1
            heapq.heappush(self._heap, (key, self._num_pushed, leaf))

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict next; None if there is none."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if key != node.queued:  # another entry replaced this one
                continue
            node.queued = None
            if node.children or not node.pages:  # not a leaf any more
                continue
            if key == self._key(node):
                return node
            self.push(node)  # used since it was pushed
        return None

    def num_useless(self, leaf: Node) -> int:
        """Pages of a leaf after its last snapshot, which save no computation; 0 without recurrent layers."""
        if not self._has_snapshots:
            return 0
        return leaf.end - leaf.snapshots[-1].end if leaf.snapshots else len(leaf.pages)

    def _key(self, leaf: Node) -> EvictionKey:
        return self.num_useless(leaf) == 0, leaf.stamp


@dataclass(frozen=True)
class Match:
    """The cached part of a prompt.

    pages: pages of the longest cached prefix.
    num_saved: tokens that need not be computed: those of the pages; with recurrent layers, those up to the last
        snapshot among them.
    row: row of that snapshot; -1 for none.
    is_fork: whether another text in the cache continues after the pages.
    num_recomputed: cached tokens that are computed again, because states or window pages are missing.
    """

    pages: list[int]
    num_saved: int
    row: int = -1
    is_fork: bool = False
    num_recomputed: int = 0


class PrefixCache:
    """Radix tree from tokens to pages, least recently used leaves evicted first.

    lookahead: number of tokens after a page that its content depends on. It is 0 for a target, whose KV at position i
    depends on tokens 0..i. It is 1 with an EAGLE draft, whose KV at i depends on token i + 1 (arXiv 2401.15077, section
    4.1): a page at [s, s + page_size) then has the key tokens s .. s + page_size.

    A request that holds a page of the tree also holds the pages before it. So no unheld page has a held descendant, and
    evicting leaves first can free all of `PageAllocator.num_evictable`.

    snapshots: states of recurrent layers at ends of pages; None for a model without such layers. A request resumes at
    the last snapshot among its pages, and recomputes the tokens after it. So pages after a path's last snapshot save no
    computation, and are evicted first. A snapshot is evicted with its page, or alone (`Snapshots`).

    In a model with windows (`PageAllocator.windows`), a prompt resumes at the last position whose preceding window
    pages are present. It gets cached pages up to there, and recomputes later ones in pages of its own.
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
        self._leaves = EvictionQueue(has_snapshots=snapshots is not None)
        self._changes: dict[bytes, bool] | None = None  # whether a digest is cached now
        self._stride = 1
        self.reset()

    def reset(self) -> None:
        """Forget all pages and snapshots, and lent rows. The caller resets the allocator, too. Counters stay."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(self.digests(), False))
        self._root = Node.root()
        self._clock = 0
        self._leaves.clear()
        if self.snapshots is not None:
            self.snapshots.reset()

    def clear(self) -> int:
        """Forget all pages. Pages that requests hold become free when they are released. Return the number of pages.
        Counters stay."""
        gone = list(self.pages())
        self._allocator.uncache(gone)
        assert self.snapshots is None or self.snapshots.num_lent == 0, "a request still writes states"
        self.reset()
        return len(gone)

    def forget(self, tokens: Tokens, salt: bytes = b"") -> list[int]:
        """Forget, and return, the pages of all texts that start with the first page of `tokens` (int32 [n])."""
        first = tokens[: self.page_size + self.lookahead].tobytes()
        node = self._root.children.pop(salt + first, None)
        forgotten: list[int] = []
        for descendant in [] if node is None else list(self._nodes(node)):
            self._note(descendant.digests, descendant.depth, False)
            self._allocator.uncache(descendant.pages)
            self._drop_snapshots(descendant, after=0)
            forgotten += descendant.pages
            descendant.pages, descendant.digests = [], []  # so that it is not evicted
        return forgotten

    def watch(self, stride: int) -> None:
        """Start to record changes for `take_changes`. `digests` and `take_changes` then return every `stride`-th page
        of each prompt. 0: stop recording."""
        self._changes = {} if stride else None
        self._stride = stride or 1

    def take_changes(self) -> dict[bytes, bool]:
        """Return the digests of pages (`aerie.attention.kv_cache.radix_node`) changed since the last call, and
        whether each is cached now."""
        assert self._changes is not None, "`watch` was not called"
        changes, self._changes = self._changes, {}
        return changes

    def digests(self) -> Iterator[bytes]:
        """Digests of the advertised pages in the tree."""
        return (digest for node in self._nodes() for digest in self._advertised(node.digests, node.depth))

    def match(self, tokens: Tokens, salt: bytes = b"") -> Match:
        """Return the longest cached prefix of `tokens` (int32 [n]). The caller becomes a holder of its pages. salt:
        only entries inserted with the same salt match.

        It has at most (n - 1) // page_size pages: at least one token must be computed, and with lookahead 1 a page's
        last key token must be part of `tokens`.
        """
        match = self._look_up(tokens, salt, resumes=True)
        self._allocator.acquire(match.pages)
        return match

    def num_cached(self, tokens: Tokens, salt: bytes = b"") -> int:
        """Return how many of `tokens` (int32 [n]) a `match` would save, without holding pages."""
        return self._look_up(tokens, salt).num_saved

    def _look_up(self, tokens: Tokens, salt: bytes, resumes: bool = False) -> Match:
        """Return the longest cached prefix that a request can continue from: at a page, or with recurrent layers at a
        saved state. resumes: whether the request will use that state, which then counts as recently used."""
        node, matched, pages = self._walk(tokens, (len(tokens) - 1) // self.page_size, salt)
        snapshots, windows, size = self.snapshots, self._allocator.windows, self.page_size
        if windows is not None:
            assert snapshots is None, "a model with windows and recurrent layers"
            count = windows.num_resumable(pages)
            return Match(pages[:count], count * size, num_recomputed=(len(pages) - count) * size)
        if snapshots is None:
            return Match(pages, len(pages) * size)
        is_fork = matched < len(node.pages) or bool(node.children)
        snapshot = node.deepest(len(pages))
        if snapshot is None:
            return Match(pages, 0, -1, is_fork, len(pages) * size)
        if resumes:
            snapshots.use(snapshot)
        saved = snapshot.end * size
        return Match(pages, saved, snapshot.row, is_fork, len(pages) * size - saved)

    def record_query(self, num_tokens: int, match: Match) -> None:
        """Count one admitted prompt of `num_tokens`."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += match.num_saved
        self.num_recomputed_tokens += match.num_recomputed

    def lend_row(self, num_tokens: int, kind: SnapshotKind) -> int | None:
        """Return a row for a state of a running request, perhaps by evicting a snapshot of less value. None without
        recurrent layers, or if all rows have more value. num_tokens: tokens that would be recomputed without the
        state."""
        if self.snapshots is None:
            return None
        row, loser = self.snapshots.lend(num_tokens // self.page_size, kind)
        if loser is not None and loser.pages and not loser.children:
            self._leaves.push(loser)  # the node that lost its snapshot may now be evicted earlier
        return row

    def attach(self, tokens: Tokens, position: int, row: int, kind: SnapshotKind, salt: bytes = b"") -> None:
        """Store a lent row with the state after the first `position` of `tokens`, the end of a page. If the tree has no
        such page, or already has this state, the row becomes free."""
        snapshots, size = self.snapshots, self.page_size
        assert snapshots is not None and position % size == 0, f"a state after {position} tokens, not at a page's end"
        end = position // size
        node, matched, pages = self._walk(tokens, min(end, (len(tokens) - self.lookahead) // size), salt)
        if len(pages) < end or any(snapshot.end == end for snapshot in node.snapshots):
            snapshots.give_back(row)
            return
        snapshots.add(row, end, node, kind)

    def insert(self, tokens: Tokens, pages: list[int], salt: bytes = b"") -> list[int]:
        """Add `pages`, which the caller holds and which have the KV of a prefix of `tokens`.

        Return the tree's page for each of the first min(len(pages), (n - lookahead) // page_size) pages. If the tree
        already had a page, that page is returned, and the caller's page stays outside the tree.
        """
        size = self.page_size
        count = min(len(pages), (len(tokens) - self.lookahead) // size)
        node, matched, present = self._walk(tokens, count, salt)
        known = len(present)
        if known >= count:
            return present
        if matched < len(node.pages):
            node = node.split(matched, size, self.lookahead)
        new = pages[known:count]
        start = known * size
        key = (b"" if known else salt) + tokens[start : start + size + self.lookahead].tobytes()
        own = tokens[start : count * size + self.lookahead].copy()
        before = node.digests[-1] if node.digests else first_digest(salt)
        digests = next_digests(before, own, len(new), size, self.lookahead)
        self._note(digests, known, True)
        child = Node(own, new, digests=digests, depth=known, parent=node, key=key, stamp=self._clock)
        node.children[key] = child
        self._leaves.push(child)
        self._allocator.cache(new)
        self.num_insertions += 1
        return present + new

    def evict(self, count: int) -> int:
        """Free up to `count` unheld pages, and return their number. Pages after a path's last snapshot go first, then
        the least recently used leaves, each from its end."""
        freed = 0
        held: list[Node] = []
        while freed < count and (leaf := self._leaves.pop()) is not None:
            limit = self._leaves.num_useless(leaf) or len(leaf.pages)
            num = self._allocator.num_unheld_at_end(leaf.pages, min(limit, count - freed))
            if num == 0:
                held.append(leaf)
                continue
            freed += num
            self._cut(leaf, num)
        for leaf in held:
            self._leaves.push(leaf)
        return freed

    def pages(self) -> Iterator[int]:
        """Yield all pages in the tree."""
        return (page for node in self._nodes() for page in node.pages)

    def _nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Yield all nodes of the tree, or of the subtree at `top`, each after its parent."""
        stack = [top or self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _note(self, digests: list[bytes], depth: int, here: bool) -> None:
        """Record that pages after the first `depth` of a path were added or removed."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(self._advertised(digests, depth), here))

    def _advertised(self, digests: list[bytes], depth: int) -> list[bytes]:
        return digests[(-depth - 1) % self._stride :: self._stride]

    def _walk(self, tokens: Tokens, limit: int, salt: bytes) -> tuple[Node, int, list[int]]:
        """Follow `tokens` for up to `limit` pages. Return the last node reached, how many of its pages match, and all
        pages that match."""
        size, lookahead = self.page_size, self.lookahead
        self._clock += 1
        node, matched = self._root, 0
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
            node, matched = child, count
            if count < len(child.pages):
                break
        return node, matched, pages

    def _cut(self, node: Node, count: int) -> None:
        """Drop the last `count` pages of a leaf. An emptied leaf is removed from the tree, and its parent may become a
        leaf."""
        gone = node.pages[-count:]
        self._note(node.digests[-count:], node.depth + len(node.pages) - count, False)
        del node.pages[-count:]
        del node.digests[-count:]
        self._drop_snapshots(node, after=node.end)
        self._allocator.uncache(gone)
        if node.pages:
            node.tokens = node.tokens[: len(node.pages) * self.page_size + self.lookahead].copy()
            self._leaves.push(node)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent is not self._root and not parent.children:
            self._leaves.push(parent)

    def _drop_snapshots(self, node: Node, after: int) -> None:
        """Drop the snapshots of a node after page number `after` of its path."""
        for snapshot in [snapshot for snapshot in node.snapshots if snapshot.end > after]:
            assert self.snapshots is not None
            self.snapshots.drop(snapshot)
