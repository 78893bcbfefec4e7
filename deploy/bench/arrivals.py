"""Requests of an open loop: the due time, prompt and answer length of each. Pure; used by
`aerie.deploy.bench.load`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Lognormal numbers of tokens. mean: mean of the distribution before it is capped at `cap`; sigma: standard
    deviation of the logarithm."""

    mean: float
    sigma: float
    cap: int

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = generator.lognormal(location, self.sigma, count)
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.cap)]


@dataclass(frozen=True)
class UniformLengths:
    """Numbers of tokens from `cap` times `ratio` to `cap`, equally likely: SGLang's `--random-range-ratio`."""

    ratio: float
    cap: int

    @property
    def mean(self) -> float:
        return (1 + self.ratio) / 2 * self.cap

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        drawn: list[int] = generator.integers(max(1, round(self.cap * self.ratio)), self.cap + 1, count).tolist()
        return drawn


AnyLengths = Lengths | UniformLengths


@dataclass(frozen=True)
class Prefixes:
    """Shared prefixes of prompts. count: number of prefixes. tokens: length of each. share: fraction of prompts that
    start with one."""

    count: int
    tokens: int
    share: float


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and answers, and shared prefixes."""

    prompts: AnyLengths
    answers: AnyLengths
    prefixes: Prefixes | None = None

    def scaled(self, prompt_cap: int, answer_cap: int) -> "Mix":
        """Return the mix for a shorter or longer model: means and prefixes in proportion to the caps."""

        def lengths(of: AnyLengths, cap: int) -> AnyLengths:
            if isinstance(of, UniformLengths):
                return replace(of, cap=cap)
            return replace(of, mean=max(1.0, of.mean * cap / of.cap), cap=cap)

        prefixes = self.prefixes and replace(
            self.prefixes, tokens=max(1, self.prefixes.tokens * prompt_cap // self.prompts.cap)
        )
        return Mix(lengths(self.prompts, prompt_cap), lengths(self.answers, answer_cap), prefixes)


SIGMA = 0.8  # standard deviation of the logarithm of lengths, by default
MIXES = {
    "plain": Mix(Lengths(1024, SIGMA, 4096), Lengths(256, SIGMA, 1024)),
    "prompt-heavy": Mix(Lengths(3000, SIGMA, 7000), Lengths(150, SIGMA, 1024), Prefixes(8, 2048, 0.4)),
    # What SGLang and vLLM measure throughput with: 1,024 tokens in and out, ratio 0.7.
    "throughput": Mix(UniformLengths(0.7, 1024), UniformLengths(0.7, 1024)),
}
OWN_TOKENS = 16  # minimum tokens of a prompt after its prefix


@dataclass(frozen=True)
class Arrival:
    """A request of an open loop.

    due_s: seconds since the start.
    """

    due_s: float
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Traffic:
    """Traffic, regardless of its rate.

    mix: lengths and shared prefixes.
    seconds: duration.
    max_requests: maximum number of requests.
    first_id, vocab: prompt ids are drawn from first_id .. vocab - 1.
    """

    mix: Mix
    seconds: float
    max_requests: int
    first_id: int
    vocab: int
    seed: int = 0

    def arrivals(self, rate: float) -> list[Arrival]:
        """Poisson arrivals at `rate` per second; an infinite rate is a burst of `max_requests` at once. They depend
        only on seed and rate, so every server gets the same."""
        seeds = (self.seed, 0 if math.isinf(rate) else round(rate * 1000))
        generator = np.random.default_rng(seeds)
        due_s = self._due_s(generator, rate)
        lengths = self.mix.prompts.draw(generator, len(due_s))
        answers = self.mix.answers.draw(generator, len(due_s))
        prompts = [self._tokens(generator, length) for length in lengths]
        if self.mix.prefixes is not None:
            self._add_prefixes(np.random.default_rng((*seeds, 1)), self.mix.prefixes, prompts)
        return [
            Arrival(due, tuple(prompt), num_tokens)
            for due, prompt, num_tokens in zip(due_s, prompts, answers, strict=True)
        ]

    def _due_s(self, generator: np.random.Generator, rate: float) -> list[float]:
        """Return the arrival times of a Poisson process in seconds; all 0 for an infinite rate."""
        if math.isinf(rate):
            return [0.0] * self.max_requests
        due_s: list[float] = []
        now_s = generator.exponential(1 / rate)
        while now_s <= self.seconds and len(due_s) < self.max_requests:
            due_s.append(now_s)
            now_s += generator.exponential(1 / rate)
        return due_s

    def _add_prefixes(self, generator: np.random.Generator, prefixes: Prefixes, prompts: list[list[int]]) -> None:
        """Make a share of `prompts` start with one of the prefixes, which are new for each rate. Such a prompt keeps
        its length, but has at least OWN_TOKENS after the prefix."""
        texts = [self._tokens(generator, prefixes.tokens) for _ in range(prefixes.count)]
        for prompt in prompts:
            if generator.random() < prefixes.share:
                own = prompt[prefixes.tokens :]
                if len(own) < OWN_TOKENS:
                    own = self._tokens(generator, OWN_TOKENS)
                prompt[:] = [*texts[generator.integers(prefixes.count)], *own]

    def _tokens(self, generator: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = generator.integers(self.first_id, self.vocab, count).tolist()
        return ids


def repeated_tokens(prompts: Sequence[Sequence[int]], block: int = 16) -> int:
    """Return the number of tokens that an unlimited prefix cache would find: for each prompt, the longest prefix of
    whole blocks shared with an earlier prompt. block: tokens per block."""
    seen: set[int] = set()
    repeated = 0
    for prompt in prompts:
        prefix, longest = 0, 0
        for end in range(block, len(prompt) + 1, block):
            prefix = hash((prefix, tuple(prompt[end - block : end])))
            longest = end if prefix in seen else longest
            seen.add(prefix)
        repeated += longest
    return repeated
