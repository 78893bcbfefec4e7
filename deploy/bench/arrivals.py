"""Requests of an open loop: when each is due, its prompt, how long its answer is. Pure; used by
`deploy.bench.load`."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Lognormal numbers of tokens. mean: of the distribution before it is cut off at `cap`; sigma: of the logarithm."""

    mean: float
    sigma: float
    cap: int

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = generator.lognormal(location, self.sigma, count)
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.cap)]


@dataclass(frozen=True)
class Arrival:
    """due_s: since the beginning."""

    due_s: float
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Traffic:
    """What comes, whatever its rate.

    seconds: no request is due later. max_requests: nor are there more.
    first_id, vocab: prompt ids are drawn from first_id .. vocab - 1.
    """

    prompts: Lengths
    answers: Lengths
    seconds: float
    max_requests: int
    first_id: int
    vocab: int
    seed: int = 0

    def arrivals(self, rate: float) -> list[Arrival]:
        """Poisson arrivals at `rate` per second. Seed and rate decide them, so that every server gets the same."""
        generator = np.random.default_rng((self.seed, round(rate * 1000)))
        due_s: list[float] = []
        now_s = generator.exponential(1 / rate)
        while now_s <= self.seconds and len(due_s) < self.max_requests:
            due_s.append(now_s)
            now_s += generator.exponential(1 / rate)
        prompts = self.prompts.draw(generator, len(due_s))
        answers = self.answers.draw(generator, len(due_s))
        return [
            Arrival(due, tuple(generator.integers(self.first_id, self.vocab, length).tolist()), num_tokens)
            for due, length, num_tokens in zip(due_s, prompts, answers, strict=True)
        ]
