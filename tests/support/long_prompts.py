"""A load of long prompts, many of which begin alike, and what steps with them take on an H200.

The load is of the kind that `tests/bench/RESULTS.md` calls "prompt-heavy"; the table reproduces the steps
that were measured there, and first tokens within a tenth.
"""

import random

from tests.support.load_simulation import H200, Arrival, lognormal_length, replace_struct
from workers.runner.graphs.graph_keys import TOKEN_BUCKETS

LONG_H200 = replace_struct(
    H200,
    chunk_tokens=TOKEN_BUCKETS,
    chunk_ms=(
        (6.8, 7.0, 7.4, 8.4, 11.5, 15.3, 19.0, 20.0, 21.6, 23.0, 34.5, 45.5),
        (8.9, 9.5, 10.2, 11.5, 13.9, 18.9, 22.4, 23.4, 24.2, 25.0, 36.7, 47.8),
        (9.4, 9.9, 11.0, 12.1, 14.5, 20.0, 23.4, 24.6, 25.2, 25.9, 39.3, 51.5),
        (12.5, 13.0, 13.9, 16.2, 20.8, 23.7, 26.0, 28.1, 29.1, 33.3, 46.0, 59.3),
        (16.8, 17.5, 18.3, 20.5, 26.0, 30.2, 32.8, 34.8, 36.9, 40.6, 53.6, 66.6),
    ),
)


def prompt_heavy_load(rate: float, duration_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; lognormal lengths: prompts about 3,000 tokens, at most 7,000, answers about 150. Two of five
    begin with one of eight texts of 2,048 tokens."""
    rng = random.Random(f"{seed} {rate} long")
    prefixes = [[rng.randrange(300, 16000) for _ in range(2048)] for _ in range(8)]
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < duration_s:
        count, answer = lognormal_length(rng, 3000, 7000), lognormal_length(rng, 150, 1024)
        prefix = rng.choice(prefixes) if rng.random() < 0.4 else []
        own = max(16 if prefix else 1, count - len(prefix))
        prompt = (*prefix, *(rng.randrange(300, 16000) for _ in range(own)))
        arrivals.append(Arrival(now, len(prompt), answer, prompt))
    return arrivals
