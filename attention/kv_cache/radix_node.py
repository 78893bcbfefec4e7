"""A node of the prefix cache's radix tree, the snapshots at its pages, and the digests that name a prefix.

There is one digest per page. Digests are chained, so that a page's digest covers all tokens up to its end. The prefix
cache advertises them, and `aerie.cluster.ingress.routing` uses them to find an engine that has a prompt's pages. A
collision (64 bits) may cause a worse choice but no wrong token, because reuse compares tokens
(`aerie.attention.kv_cache.prefix_cache`)."""

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
EvictionKey = tuple[bool, int]


@dataclass(slots=True, eq=False)
class Node:
    """A node of the radix tree: consecutive pages.

    tokens: int32, the tokens of its pages and the `lookahead` after them.
    pages: page ids.
    digests: one per page.
    depth: number of pages before it.
    key: its key in the parent: the tokens of its first page, preceded by the salt at the root.
    stamp: time of the last match or insertion.
    snapshots: states saved at the ends of its pages, in the order of their positions.
    queued: its key in the eviction queue; None outside of it.
    """

    tokens: Tokens
    pages: list[int]
    digests: list[bytes]
    depth: int
    parent: "Node | None"
    key: bytes
    stamp: int
    children: "dict[bytes, Node]" = field(default_factory=dict)
    snapshots: "list[Snapshot]" = field(default_factory=list)
    queued: EvictionKey | None = None

    @staticmethod
    def root() -> "Node":
        """Return a tree without pages."""
        return Node(np.empty(0, np.int32), [], digests=[], depth=0, parent=None, key=b"", stamp=0)

    @property
    def end(self) -> int:
        """Number of pages up to its last one."""
        return self.depth + len(self.pages)

    def deepest(self, end: int) -> "Snapshot | None":
        """Return the last snapshot within the path's first `end` pages, here or in an earlier node."""
        node: Node | None = self
        while node is not None:
            for snapshot in reversed(node.snapshots):
                if snapshot.end <= end:
                    return snapshot
            node = node.parent
        return None

    def is_below(self, other: "Node") -> bool:
        """Return whether `other` is this node or an ancestor."""
        node: Node | None = self
        while node is not None and node.depth > other.depth:
            node = node.parent
        return node is other

    def split(self, count: int, page_size: int, lookahead: int) -> "Node":
        """Move the node's first `count` pages, with their snapshots, to a new parent, and return it."""
        assert self.parent is not None and 0 < count < len(self.pages)
        tokens = self.tokens[: count * page_size + lookahead].copy()
        upper = Node(
            tokens,
            self.pages[:count],
            digests=self.digests[:count],
            depth=self.depth,
            parent=self.parent,
            key=self.key,
            stamp=self.stamp,
        )
        self.parent.children[self.key] = upper
        self.tokens = self.tokens[count * page_size :].copy()
        self.pages = self.pages[count:]
        self.digests = self.digests[count:]
        self.depth += count
        self.key = self.tokens[: page_size + lookahead].tobytes()
        self.parent = upper
        upper.children[self.key] = self
        upper.snapshots = [snapshot for snapshot in self.snapshots if snapshot.end <= self.depth]
        self.snapshots = self.snapshots[len(upper.snapshots) :]
        for snapshot in upper.snapshots:
            snapshot.node = upper
        return upper


class SnapshotKind(Enum):
    """Why a state was saved."""

    PROMPT = "the last page border of a prompt"
    FORK = "where two texts part"
    CHUNK = "on the way through a long prompt"
    ANSWER = "along an answer"


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of all recurrent layers after a text's first `end` pages, in one row of every rank's state pool.

    node: where its last page is.
    kind: why it was saved.
    before: the previous snapshot of its path.
    after: the next snapshots below it.
    since: tick of `aerie.attention.kv_cache.snapshots.Snapshots` at which it was added or last used.
    recorded: tick up to which the estimates of `Snapshots` include its time.
    """

    row: int
    end: int
    node: Node
    kind: SnapshotKind
    since: int
    recorded: int
    before: "Snapshot | None" = None
    after: "set[Snapshot]" = field(default_factory=set)

    @property
    def cost(self) -> int:
        """Number of pages to recompute without it: those since the previous snapshot."""
        return self.end - (self.before.end if self.before is not None else 0)


DIGEST_BYTES = 8  # bytes of an advertised page's digest


def salt_of_weights(salt: bytes, epoch: int) -> bytes:
    """Return the salt of cached pages whose KV the weights number `epoch` have computed, so that pages of other weights
    are never found. salt: the request's own."""
    if epoch == 0:
        return salt
    return blake2b(epoch.to_bytes(8, "little") + salt, digest_size=32, person=b"weight epoch").digest()


def salt_of_adapter(salt: bytes, number: int) -> bytes:
    """Return the salt of cached pages whose KV the adapter with this load number has changed, so that no other
    request finds them. salt: the request's own."""
    return blake2b(number.to_bytes(8, "little") + salt, digest_size=32, person=b"adapter").digest()


def first_digest(salt: bytes) -> bytes:
    """Return the initial digest of a chain, before the first page."""
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


def next_digests(
    before: bytes, tokens: npt.NDArray[np.int32], count: int, page_size: int, lookahead: int
) -> list[bytes]:
    """Return the digests of `count` pages after the one with digest `before`. tokens: int32, the tokens of these pages
    and the `lookahead` after them."""
    assert len(tokens) >= count * page_size + (lookahead if count else 0), "a page's tokens are missing"
    raw, step, span = tokens.tobytes(), page_size * tokens.itemsize, (page_size + lookahead) * tokens.itemsize
    out = []
    for start in range(0, count * step, step):
        before = blake2b(before + raw[start : start + span], digest_size=DIGEST_BYTES).digest()
        out.append(before)
    return out


def prompt_digests(tokens: npt.NDArray[np.int32], page_size: int, lookahead: int, salt: bytes = b"") -> list[bytes]:
    """Return the digests of all pages of a prompt (int32 [n]) that a prefix cache could hold: (n - 1) // page_size."""
    count = (len(tokens) - 1) // page_size
    return next_digests(first_digest(salt), tokens, count, page_size, lookahead)


def split_digests(packed: bytes) -> list[bytes]:
    """Split joined digests."""
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
