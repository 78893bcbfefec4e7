"""API keys. The server stores only SHA-256 digests: Ray Serve writes a deployment's arguments to its logs and sends
them to every process. Used by `cluster.http.config`, `cluster.http.middleware` and `deploy.config.files`."""

import hashlib
import hmac
import re
from collections.abc import Sequence

PREFIX = "sha256:"
_DIGEST = re.compile(rf"{PREFIX}[0-9a-f]{{64}}")


def digest(entry: str) -> str:
    """Return the digest of a configured key, "sha256:" and 64 hexadecimal digits. An entry may be a digest.

    Raises ValueError, whose text does not quote the key."""
    if entry.lower().startswith(PREFIX):
        if _DIGEST.fullmatch(entry.lower()):
            return entry.lower()
        raise ValueError(f"api_keys: after {PREFIX} there must be 64 hexadecimal digits, as `sha256sum` prints them")
    if len(entry) < 8 or not entry.isascii() or not entry.isprintable() or " " in entry:
        raise ValueError("api_keys: each key must have at least 8 printable ASCII characters and no space")
    return _digest(entry)


def is_known(key: str, digests: Sequence[str]) -> bool:
    """Whether a client's key has one of the `digests`. A digest itself is not a key. Takes the same time for every
    key."""
    given = _digest(key)
    matches = [hmac.compare_digest(given, own) for own in digests]
    return any(matches)


def _digest(key: str) -> str:
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()
