"""Hides API keys on the command line, which every user of a machine can read (/proc/PID/cmdline): the command first
restarts itself with digests in their place. Used by `aerie.deploy.cli`.
"""

import os
import sys
from collections.abc import Sequence

from aerie.cluster.http.keys import digest

_OPTION = "--api-key"


def hide_keys() -> None:
    """Replace this process by the same command with digests, if it has keys. An invalid key stays, and the command ends
    with its error."""
    words = with_digests(sys.orig_argv)
    if words != sys.orig_argv:
        sys.stdout.flush()
        os.execv(sys.executable, words)


def with_digests(words: Sequence[str]) -> list[str]:
    """Return a command line with the digest of each key that follows `--api-key`."""
    found, is_key = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == _OPTION:
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
