"""Log-probabilities of one choice's prompt, as the engine sends them. Pure; stored by `cluster.http.answer`, formatted
by `cluster.http.replies.logprobs`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from workers.scheduling.plan import PromptLogprobs, unpack_i32


class TokenScore(NamedTuple):
    """A prompt token's log-probability in nats, and its rank; rank 1 is the most likely token."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptScores:
    """Scores of a prompt's tokens after the first, in order. A prompt that is computed again, after a preemption or a
    loss, sends the same scores again; they count once."""

    def __init__(self) -> None:
        self._parts: list[PromptLogprobs] = []
        self._end = 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the first one, which has no score, included."""
        return self._end

    def push(self, part: PromptLogprobs) -> None:
        """Add what is new in `part`."""
        assert part.start <= self._end, "log-probabilities of a prompt with a gap"
        if part.end > self._end:
            self._parts.append(_after(part, self._end - part.start))
            self._end = part.end

    def __iter__(self) -> Iterator[TokenScore]:
        for part in self._parts:
            count = part.end - part.start
            rows = zip(
                np.frombuffer(part.logprobs, "<f4").tolist(),
                unpack_i32(part.ranks).tolist(),
                unpack_i32(part.top_ids).reshape(count, -1).tolist(),
                np.frombuffer(part.top_logprobs, "<f4").reshape(count, -1).tolist(),
                strict=True,
            )
            for logprob, rank, ids, top in rows:
                yield TokenScore(logprob, rank, tuple(ids), tuple(top))


def _after(part: PromptLogprobs, count: int) -> PromptLogprobs:
    """Drop the first `count` tokens."""
    width = len(part.top_ids) // (part.end - part.start)
    return PromptLogprobs(
        part.start + count,
        part.logprobs[4 * count :],
        part.ranks[4 * count :],
        part.top_ids[width * count :],
        part.top_logprobs[width * count :],
    )
