"""Turns of conversations that repeat earlier ones in the ways that a prefix cache meets: whole, continued, forked."""

import random

from aerie.workers.scheduling.request import Request


class Conversations:
    """Prompts over tokens first_token .. vocab_size - 1, of at most max_len tokens.

    A third repeats an earlier prompt (A, B, A), a third goes on after its answer, the rest leaves an earlier text
    somewhere or is new.
    """

    def __init__(self, seed: int, vocab_size: int, max_len: int, first_token: int = 2, num_kept: int = 40) -> None:
        self._rng = random.Random(seed)
        self._vocab = range(first_token, vocab_size)
        self._max_len = max_len
        self._num_kept = num_kept
        self._ended: list[tuple[list[int], list[int]]] = []  # prompts and answers

    def turn(self) -> list[int]:
        """The next prompt."""
        rng, kind = self._rng, self._rng.random()
        if not self._ended or kind < 0.1:
            return self._fresh(rng.randint(1, self._max_len // 2))
        prompt, answer = rng.choice(self._ended)
        if kind < 0.4:
            return list(prompt)
        text = [*prompt, *answer] if kind < 0.75 else [*prompt, *answer][: rng.randint(1, len(prompt))]
        text = text[: self._max_len - 12] + self._fresh(rng.randint(1, 12))
        return text

    def ended(self, request: Request) -> None:
        """A turn has its answer."""
        self._ended.append((list(request.prompt), list(request.output)))
        if len(self._ended) > self._num_kept:
            del self._ended[self._rng.randrange(self._num_kept)]

    def _fresh(self, count: int) -> list[int]:
        return [self._rng.choice(self._vocab) for _ in range(count)]
