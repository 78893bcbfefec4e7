"""Names for beginnings of prompts: one digest a page, chained, so that a page's names all tokens up to its end.

The prefix cache names its pages by them, and whoever chooses between engines asks which of a prompt's an engine has
(`cluster.ingress.routing`). Two that are equal by chance (64 bits) cost a detour and no wrong token: what is reused is
decided by tokens (`attention.kv_cache.prefix_cache`).
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 8


def first_digest(salt: bytes) -> bytes:
    """What the first page's digest is chained to."""
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


def next_digests(
    before: bytes, tokens: npt.NDArray[np.int32], count: int, page_size: int, lookahead: int
) -> list[bytes]:
    """Digests of `count` pages that follow the one of digest `before`. tokens: int32, theirs and `lookahead` more."""
    assert len(tokens) >= count * page_size + (lookahead if count else 0), "a page's tokens are missing"
    raw, step, span = tokens.tobytes(), page_size * tokens.itemsize, (page_size + lookahead) * tokens.itemsize
    out = []
    for start in range(0, count * step, step):
        before = blake2b(before + raw[start : start + span], digest_size=DIGEST_BYTES).digest()
        out.append(before)
    return out


def prompt_digests(tokens: npt.NDArray[np.int32], page_size: int, lookahead: int, salt: bytes = b"") -> list[bytes]:
    """Of all pages of a prompt (int32 [n]) that could be found in a prefix cache: (n - 1) // page_size of them."""
    count = (len(tokens) - 1) // page_size
    return next_digests(first_digest(salt), tokens, count, page_size, lookahead)


def split_digests(packed: bytes) -> list[bytes]:
    """Digests that were joined."""
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
