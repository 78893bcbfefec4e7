"""Finds the KV pages of an earlier prompt with the same beginning: a radix tree over full pages.

The scheduler looks prompts up when it admits them and inserts what was computed. Knows tokens and pages, no requests.
"""

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from attention.kv_cache.page_allocator import PageAllocator
from attention.kv_cache.prefix_digests import first_digest, next_digests

Tokens = npt.NDArray[np.int32]


class _Node:
    """A run of pages. tokens: their len(pages) * page_size tokens, and `lookahead` more. digests: one of each page.
    depth: pages before it. key: the first page's tokens, under which the parent knows it, behind the salt for the
    tree's first pages. stamp: when it was last matched or inserted."""

    __slots__ = ("tokens", "pages", "digests", "depth", "children", "parent", "key", "stamp", "queued")

    def __init__(
        self,
        tokens: Tokens,
        pages: list[int],
        digests: list[bytes],
        depth: int,
        parent: "_Node | None",
        key: bytes,
        stamp: int,
    ) -> None:
        self.tokens = tokens
        self.pages = pages
        self.digests = digests
        self.depth = depth
        self.children: dict[bytes, _Node] = {}
        self.parent = parent
        self.key = key
        self.stamp = stamp
        self.queued = False


class PrefixCache:
    """Radix tree from tokens to pages, least recently used leaves evicted first.

    lookahead: tokens after a page that its content depends on. A target's KV at position i depends on tokens 0..i: 0.
    An EAGLE draft's KV at i is made of the target's features at i and of token i + 1 (EAGLE, arXiv 2401.15077, section
    4.1), so a page shared by target and draft at [s, s + page_size) is keyed by tokens s .. s + page_size: 1.

    Whoever holds a page of the tree holds the pages before it too, so `PageAllocator.num_evictable` is exact: leaves go
    first, and no unheld page has a held one below it.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, lookahead: int = 0) -> None:
        assert lookahead in (0, 1), f"lookahead={lookahead}"
        self.page_size = page_size
        self.lookahead = lookahead
        self._allocator = allocator
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_insertions = 0
        self._root = _Node(np.empty(0, np.int32), [], [], 0, None, b"", 0)
        self._changes: dict[bytes, bool] | None = None  # by digest whether it is here now, since `take_changes`
        self._stride = 1
        self.reset()

    def reset(self) -> None:
        """Forget all pages. The caller resets the allocator with it; counters stay."""
        if self._changes is not None:
            self._changes.update(dict.fromkeys(self.digests(), False))
        self._root = _Node(np.empty(0, np.int32), [], [], 0, None, b"", 0)
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # heap; entries may be stale, see `evict`
        self._num_pushed = 0

    def clear(self) -> int:
        """Forget all pages; those that no request holds become free, the others when they are released. Returns how
        many were forgotten; counters stay."""
        gone = list(self.pages())
        self._allocator.uncache(gone)
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

    def match(self, tokens: Tokens, salt: bytes = b"") -> list[int]:
        """Pages of the longest known beginning of `tokens` (int32 [n]); each gets one more holder, the caller. salt:
        only what was inserted with the same one is known.

        At most (n - 1) // page_size pages: at least one token is left to compute, and with lookahead 1 a page's last
        key token must be part of `tokens`.
        """
        _, _, pages = self._walk(tokens, (len(tokens) - 1) // self.page_size, salt)
        self._allocator.acquire(pages)
        return pages

    def num_cached(self, tokens: Tokens, salt: bytes = b"") -> int:
        """How many of `tokens` (int32 [n]) the pages hold that `match` would give; nobody gets them."""
        return len(self._walk(tokens, (len(tokens) - 1) // self.page_size, salt)[2]) * self.page_size

    def record_query(self, num_tokens: int, num_hits: int) -> None:
        """Count one admitted prompt of `num_tokens`, `num_hits` of them found."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits

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
            node = self._split(node, kept)
        new = pages[known:count]
        start = known * size
        key = (b"" if known else salt) + tokens[start : start + size + self.lookahead].tobytes()
        own = tokens[start : count * size + self.lookahead].copy()
        before = node.digests[-1] if node.digests else first_digest(salt)
        digests = next_digests(before, own, len(new), size, self.lookahead)
        self._note(digests, known, True)
        child = _Node(own, new, digests, known, node, key, self._clock)
        node.children[key] = child
        self._queue(child)
        self._allocator.cache(new)
        self.num_insertions += 1
        return present + new

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no request holds, oldest leaves first, each from its end. Returns how many."""
        freed = 0
        held: list[_Node] = []
        while freed < count and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children or not node.pages:
                continue
            if stamp != node.stamp:  # used since it was queued
                self._queue(node)
                continue
            num = self._allocator.num_unheld_at_end(node.pages, count - freed)
            if num == 0:
                held.append(node)
                continue
            freed += num
            self._cut(node, num)
        for node in held:
            self._queue(node)
        return freed

    def pages(self) -> Iterator[int]:
        """Every page in the tree."""
        return (page for node in self._nodes() for page in node.pages)

    def _nodes(self, top: _Node | None = None) -> Iterator[_Node]:
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

    def _walk(self, tokens: Tokens, limit: int, salt: bytes) -> tuple[_Node, int, list[int]]:
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

    def _split(self, node: _Node, kept: int) -> _Node:
        """The node's first `kept` pages become its new parent, which is returned."""
        size, lookahead = self.page_size, self.lookahead
        assert node.parent is not None and 0 < kept < len(node.pages)
        tokens = node.tokens[: kept * size + lookahead].copy()
        upper = _Node(tokens, node.pages[:kept], node.digests[:kept], node.depth, node.parent, node.key, node.stamp)
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[kept * size :].copy()
        node.pages = node.pages[kept:]
        node.digests = node.digests[kept:]
        node.depth += kept
        node.key = node.tokens[: size + lookahead].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def _cut(self, node: _Node, count: int) -> None:
        """Drops the last `count` pages of a leaf; an emptied leaf leaves the tree, and its parent may become one."""
        gone = node.pages[-count:]
        self._note(node.digests[-count:], node.depth + len(node.pages) - count, False)
        del node.pages[-count:]
        del node.digests[-count:]
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

    def _queue(self, leaf: _Node) -> None:
        """One heap entry per leaf; the stamp of a leaf used later is corrected when the entry comes up."""
        if not leaf.queued:
            leaf.queued = True
            self._num_pushed += 1
            heapq.heappush(self._leaves, (leaf.stamp, self._num_pushed, leaf))
