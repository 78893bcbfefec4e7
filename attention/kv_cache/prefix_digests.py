"""Digests of prompt prefixes: one per page, chained, so that a page's digest covers all tokens up to its end.

The prefix cache advertises the digests of its pages, and `aerie.cluster.ingress.routing` uses them to find an engine
that has a prompt's pages. A collision (64 bits) may cause a worse choice but no wrong token, because reuse compares
tokens (`aerie.attention.kv_cache.prefix_cache`).
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 8


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
