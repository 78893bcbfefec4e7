"""Fuzzes streams of speculative rounds: `python -m tests.fuzz_streams --minutes 10 [--seed N]`.

Answers of `tests.fuzz_calls`, well-formed and malformed calls of every family, in rounds of random lengths over the
HTTP application. On chats (also with n = 3), responses and messages, what a strict client joins of the stream must be
the whole answer; openai-python's own streams join the well-formed ones.
"""

import argparse
import asyncio
import random
import sys
import time
import traceback

from tests.cluster.http.replies.test_streams_of_rounds import (
    CALLING,
    test_chats,
    test_openais_own_streams,
    test_responses_and_messages,
)
from tests.fuzz_calls import case

_OWN_STREAMS = 16  # seeds for each that goes through openai-python, which takes longer


async def check(seed: int) -> None:
    """Raise AssertionError if a stream and the whole answer differ."""
    rng = random.Random(seed)
    if seed % _OWN_STREAMS == 0:
        await test_openais_own_streams(*rng.choice(CALLING), seed)
        return
    found = case(rng)
    try:
        await test_chats(found.name, found.text, seed)
        await test_responses_and_messages(found.name, found.text, seed)
    except Exception:
        print(f"seed {seed}: {found}", flush=True)
        raise


def main() -> int:
    options = argparse.ArgumentParser(description="Fuzz streams of speculative rounds.")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0, help="of the first answer; the others count up")
    given = options.parse_args()
    end, seed, num_failed = time.monotonic() + 60 * given.minutes, given.seed, 0
    while time.monotonic() < end:
        try:
            asyncio.run(check(seed))
        except Exception:
            num_failed += 1
            traceback.print_exc(limit=-2)
        seed += 1
    print(f"{seed - given.seed} answers, {num_failed} failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
