"""What a depth of its own for each request would gain over one shape for the whole batch.

    python -m tests.support.simulation.depths

Half of a batch is prose, half is code or mathematics. A round's time follows the rows of all requests together, as if
requests of different depths cost nothing beside their rows. Two sources of acceptance:

- recorded answers of the embedded pair (`record_texts`), with shapes chosen by the kind of text, and again by the
  target's min-entropy in every round, which both choices then know;
- published accept lengths, with one probability for every token of a chain.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from tests.support.simulation.texts import DRAFTS, recorded, recorded_shapes

# Requests -> verified rows and ms of a round with a block draft, and ms of a plain round: Qwen3-8B's blocks of 8 and 16
# rows and Llama-3.1-8B's plain rounds on an H100 (tests/bench/RESULTS.md); a draft's weights take 1.2 ms.
ROUNDS = {8: ((8, 64, 128), (7.14, 8.07, 8.94), 5.94), 32: ((32, 256, 512), (8.0, 11.78, 17.42), 6.77)}
# Qwen3-8B, greedy: DeepSpec's heads (blocks of 7), z-lab's (of 16), whose length on chat is an assumption.
LENGTHS = {
    "DSpark, block of 7": (7, 3.72, 6.15),
    "DFlash, block of 7": (7, 3.11, 5.34),
    "DFlash, block of 16": (15, 3.0, 6.34),
    "DFlash, block of 16, math500": (15, 3.0, 7.91),
}
ENTROPIES = (0.2, 0.5, 1.0, 1.6, 2.4)  # nats between bins
PRICES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)  # tokens that a row must bring
BATCHES = 2000

Tokens = Sequence[float]  # a round's, by shape


def round_ms(batch: int, rows: float, is_drafted: bool) -> float:
    at, ms, plain = ROUNDS[batch]
    return float(np.interp(rows, at, ms)) if is_drafted else plain


def best(batch: int, kinds: Sequence[Tokens], rows: Sequence[int]) -> tuple[float, float]:
    """Return the best tokens per ms with one shape, and with one for each kind, which have equal shares."""

    def rate(shapes: Sequence[int]) -> float:
        tokens = sum(kind[shape] for kind, shape in zip(kinds, shapes, strict=True))
        verified = sum(rows[shape] for shape in shapes)
        return tokens * batch / len(kinds) / round_ms(batch, verified * batch / len(kinds), any(shapes))

    each = itertools.product(range(len(rows)), repeat=len(kinds))
    return max(rate((shape,) * len(kinds)) for shape in range(len(rows))), max(map(rate, each))


def chain_tokens(probability: float, depth: int) -> float:
    return sum(probability**k for k in range(depth + 1))


def probability_of(length: float, depth: int) -> float:
    """Return the probability of a token that gives a chain of `depth` this accept length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, depth) < length else (low, middle)
    return low


def rounds_of(draft: str, kind: str) -> list[tuple[int, Tokens]]:
    """Return the bin of the min-entropy and the tokens by shape of a round at every recorded token."""
    return [
        (sum(nats >= edge for edge in ENTROPIES), (1, *(1 + accepted[i] for accepted in answer.accepted)))
        for answer in recorded(draft)[kind]
        for i, nats in enumerate(answer.min_entropies)
    ]


def by_entropy(
    batch: int, rounds: Mapping[str, list[tuple[int, Tokens]]], rows: Sequence[int], seed: int = 0
) -> tuple[float, float]:
    """Return the tokens per ms with one shape and with one for each request, chosen in every round by expected tokens
    given kind and min-entropy."""
    rng = random.Random(seed)
    expected = {
        (kind, nats): np.mean([tokens for seen, tokens in some if seen == nats], axis=0)
        for kind, some in rounds.items()
        for nats in {seen for seen, _ in some}
    }
    tokens, ms = np.zeros(2), np.zeros(2)
    for _ in range(BATCHES):
        drawn = [(kind, *rng.choice(some)) for kind, some in rounds.items() for _ in range(batch // len(rounds))]
        means = np.array([expected[kind, nats] for kind, nats, _ in drawn])
        one = max(range(len(rows)), key=lambda s: means[:, s].sum() / round_ms(batch, batch * rows[s], s > 0))
        chosen = [np.argmax(means - price * np.array(rows), axis=1) for price in PRICES]
        each = max(chosen, key=lambda c: _rate(batch, means, c, rows))
        for i, shapes in enumerate(([one] * len(drawn), each)):
            tokens[i] += sum(made[shape] for (_, _, made), shape in zip(drawn, shapes, strict=True))
            ms[i] += round_ms(batch, sum(rows[shape] for shape in shapes), any(shapes))
    one_rate, each_rate = tokens / ms
    return float(one_rate), float(each_rate)


def _rate(batch: int, means: np.ndarray, shapes: np.ndarray, rows: Sequence[int]) -> float:
    tokens = means[np.arange(len(shapes)), shapes].sum()
    return float(tokens / round_ms(batch, sum(rows[shape] for shape in shapes), bool(shapes.any())))


def main() -> None:
    for batch, draft, code in itertools.product(ROUNDS, DRAFTS, ("humaneval", "gsm8k")):
        rows = [shape.width for shape in recorded_shapes(draft).shapes]
        rounds = {kind: rounds_of(draft, kind) for kind in ("mt_bench", code)}
        one, each = best(batch, [np.mean([made for _, made in some], axis=0) for some in rounds.values()], rows)
        one_told, each_told = by_entropy(batch, rounds, rows)
        print(f"batch {batch}, {draft}, chat and {code}: {each / one:.3f} by kind, {each_told / one_told:.3f} by round")
    for batch, (name, (depth, prose, code)) in itertools.product(ROUNDS, LENGTHS.items()):
        depths = range(depth + 1)
        kinds = [[chain_tokens(probability_of(length, depth), d) for d in depths] for length in (prose, code)]
        one, each = best(batch, kinds, [d + 1 for d in depths])
        print(f"batch {batch}, {name}: {each / one:.3f}")


if __name__ == "__main__":
    main()
