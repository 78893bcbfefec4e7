"""What steps cost, as measured by replay: a plain value that travels from the ranks to the scheduler.

How many prompt tokens a step takes, and which shape is drafted, are decided by it; so such decisions can be tested
without a GPU. `workers.runner.costs.cost_probe` measures it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

TARGET_CHUNK_TOKENS = 768
TARGET_ROUNDS = 2.0


class RoundCosts(msgspec.Struct, frozen=True, array_like=True):
    """Rounds of one shape, which verify it and draft it again, without prompt chunks.

    num_requests: batch sizes that were measured, ascending.
    ms: milliseconds of a round of that many requests that have hardly any KV.
    ms_per_kv_token: what each KV token that the batch's requests have together adds, per batch size.
    """

    num_requests: tuple[int, ...]
    ms: tuple[float, ...]
    ms_per_kv_token: tuple[float, ...]

    def round_ms(self, num_requests: int, kv_tokens: int = 0) -> float:
        """Milliseconds of one round. kv_tokens: committed by all of its requests together."""
        if num_requests == 0:
            return 0.0
        per_token = _interpolated(self.num_requests, self.ms_per_kv_token, num_requests)
        return _interpolated(self.num_requests, self.ms, num_requests) + per_token * kv_tokens


class CostTable(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of every kind of step.

    rounds: by index of the shape, plain decoding first.
    chunk_requests: numbers of requests that ran a round beside a chunk, ascending from 0.
    chunk_tokens: prompt tokens of the chunk, ascending.
    chunk_ms: [chunk_requests][chunk_tokens], the whole step.
    default: index of the shape that is drafted unless others are chosen.
    ms_per_chunk_kv: what each pair of a chunk's token and a token of its request before the chunk adds, by attention.
    beside: by chunk_requests, indices of the shapes of the rounds in `chunk_ms`; empty if all are the default.
    """

    rounds: tuple[RoundCosts, ...]
    chunk_requests: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    chunk_ms: tuple[tuple[float, ...], ...]
    default: int = 0
    ms_per_chunk_kv: float = 0.0
    beside: tuple[int, ...] = ()

    def shape_beside(self, index: int) -> int:
        """The shape of the rounds in `chunk_ms[index]`."""
        return self.beside[index] if self.beside else self.default

    def round_ms(self, shape: int, num_requests: int, kv_tokens: int = 0) -> float:
        """A step without chunks: milliseconds of a round of `shape`. kv_tokens: of all its requests together."""
        return self.rounds[shape].round_ms(num_requests, kv_tokens)

    def step_ms(
        self, shape: int, num_requests: int, kv_tokens: int, chunk_tokens: int, context_tokens: float = 0.0
    ) -> float:
        """A round of `shape` and `chunk_tokens` prompt tokens beside it. context_tokens: of their requests before the
        chunks, a mean over `chunk_tokens`."""
        alone = self.round_ms(shape, num_requests, kv_tokens)
        if chunk_tokens == 0:
            return alone
        added = _interpolated(self.chunk_tokens, self.chunk_added_ms(shape, num_requests), chunk_tokens)
        return alone + added + self.chunk_kv_ms(chunk_tokens, context_tokens)

    def chunk_kv_ms(self, chunk_tokens: int, context_tokens: float) -> float:
        """What attention over `context_tokens` before the chunk adds to a step."""
        return self.ms_per_chunk_kv * chunk_tokens * context_tokens

    def chunk_added_ms(self, shape: int, num_requests: int) -> list[float]:
        """By `chunk_tokens`: milliseconds that a chunk adds to a round of `shape` of so many requests.

        Between numbers of requests that were measured, whole steps are interpolated, if they are of this shape, or what
        chunks add to rounds, whichever is less: a large mixture of experts reads nearly all experts for a chunk, and a
        few requests' round beside it adds far less than the round takes alone.
        """
        at = self.chunk_requests
        right = min(bisect_left(at, num_requests), len(at) - 1)
        left = max(right - 1, 0) if num_requests < at[right] else right
        share = 0.0 if left == right else (num_requests - at[left]) / (at[right] - at[left])
        low_ms, high_ms = (self.round_ms(self.shape_beside(index), at[index]) for index in (left, right))
        rounds_ms = low_ms + share * (high_ms - low_ms)
        if left != right and shape == self.shape_beside(right):
            rounds_ms = max(rounds_ms, self.round_ms(shape, num_requests))
        return [
            max(0.0, low + share * (high - low) - rounds_ms)
            for low, high in zip(self.chunk_ms[left], self.chunk_ms[right], strict=True)
        ]


def default_itl_target_ms(costs: CostTable, step_ms: Callable[[int, int, int, int], float] | None = None) -> float:
    """Milliseconds to which prompt chunks may stretch a step unless `SchedulerConfig.itl_target_ms` says otherwise.

    step_ms: what a step of (shape, requests, KV tokens, prompt tokens) takes by now, if that is not `costs.step_ms`.

    What `TARGET_CHUNK_TOKENS` prompt tokens, or the most that a step may have, take beside half of the requests that
    may run, or beside fewer that run a larger shape: so many tokens keep a GPU's products busy, so that smaller chunks
    would cost prompts more than they save running requests. And at least `TARGET_ROUNDS` times the slowest round that
    runs beside prompts, that of all requests or the larger shape of a few, so that any engine still has half of a step
    for prompts: with less, prompts of a large mixture of experts, whose rounds are slow from eight requests on, keep
    more requests waiting than run, rounds grow with them, and gaps too. An H200 with Llama-3.1-8B's dimensions, chain
    3/1/4: 26 ms with 128 slots; with one of eight ranks of DeepSeek-V3, MTP 3/1/4: 51 ms with 64.
    """
    step_ms = costs.step_ms if step_ms is None else step_ms
    shape = costs.shape_beside(len(costs.chunk_requests) - 1)
    rounds = costs.rounds[shape]
    half, tokens = rounds.num_requests[-1] // 2, min(TARGET_CHUNK_TOKENS, costs.chunk_tokens[-1])
    measured = [(costs.shape_beside(index), count) for index, count in enumerate(costs.chunk_requests)]
    steps = [step_ms(of, count, 0, tokens) for of, count in [*measured, (shape, half)] if count <= half]
    alone = {(shape, count) for count in rounds.num_requests} | {of for of in measured if of[1]}
    return max(*steps, TARGET_ROUNDS * max(step_ms(of, count, 0, 0) for of, count in alone))


def _interpolated(at: Sequence[int], values: Sequence[float], x: float) -> float:
    """`values` at ascending points `at`, linear between them and, after the last, as between the last two; before the
    first as at the first."""
    if x <= at[0] or len(at) == 1:
        return values[0]
    right = min(bisect_left(at, x), len(at) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (x - at[left]) / (at[right] - at[left])
