"""API keys on the command line, which every user of a machine may read (/proc/PID/cmdline): the command starts itself
again with their digests, before it does anything else. Used by `deploy.cli`.
"""

import os
import sys
from collections.abc import Sequence

from cluster.http.keys import digest

_OPTION = "--api-key"


def hide_keys() -> None:
    """Become the same command with digests, if there are keys on its line. A key that is refused stays: the command
    ends with its error."""
    words = with_digests(sys.orig_argv)
    if words != sys.orig_argv:
        sys.stdout.flush()
        os.execv(sys.executable, words)


def with_digests(words: Sequence[str]) -> list[str]:
    """A command line with the digest of each key that follows `--api-key`."""
    found, is_key = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if name == _OPTION:
            found.append(f"{name}={_digest(value)}" if equals else word)
            is_key = True
        elif is_key and not word.startswith("-"):
            found.append(_digest(word))
        else:
            is_key = False
            found.append(word)
    return found


def _digest(word: str) -> str:
    try:
        return digest(word)
    except ValueError:
        return word
