"""Measured times of steps: a plain value that `aerie.workers.runner.costs.cost_probe` measures and ranks send to the
scheduler. The choice of prompt tokens per step and of tree shapes depends only on it, so it can be tested without a
GPU."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import msgspec

TARGET_CHUNK_TOKENS = 768  # both: see `default_itl_target_ms`
TARGET_ROUNDS = 2.0  # see `default_itl_target_ms`


class RoundCosts(msgspec.Struct, frozen=True, array_like=True):
    """Times of rounds that verify and draft one shape, without prompt chunks.

    num_requests: measured batch sizes, ascending.
    ms: milliseconds of a round with each batch size and almost no KV.
    ms_per_kv_token: additional milliseconds per KV token of the whole batch, by batch size.
    """

    num_requests: tuple[int, ...]
    ms: tuple[float, ...]
    ms_per_kv_token: tuple[float, ...]

    def round_ms(self, num_requests: int, kv_tokens: int = 0) -> float:
        """Milliseconds of a round. kv_tokens: committed tokens of all its requests."""
        if num_requests == 0:
            return 0.0
        per_token = _interpolated(self.num_requests, self.ms_per_kv_token, num_requests)
        return _interpolated(self.num_requests, self.ms, num_requests) + per_token * kv_tokens


class CostTable(msgspec.Struct, frozen=True, array_like=True):
    """Times of all kinds of steps.

    rounds: costs of each shape, by its index; index 0 is non-speculative decoding.
    chunk_requests: measured numbers of requests in mixed batches, ascending from 0.
    chunk_tokens: measured prompt tokens of the chunk, ascending.
    chunk_ms: [chunk_requests][chunk_tokens] milliseconds of the whole step.
    mixed_shapes: shape of the rounds in `chunk_ms`, one per entry of chunk_requests.
    ms_per_chunk_kv: attention time per (token of a chunk, token before the chunk).
    image_patches: patches of measured images, ascending; empty: none was measured.
    image_ms: milliseconds to encode each.
    """

    rounds: tuple[RoundCosts, ...]
    chunk_requests: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    chunk_ms: tuple[tuple[float, ...], ...]
    mixed_shapes: tuple[int, ...]
    ms_per_chunk_kv: float = 0.0
    image_patches: tuple[int, ...] = ()
    image_ms: tuple[float, ...] = ()

    def encode_ms(self, num_patches: int) -> float:
        """Milliseconds to encode an image; 0 if none was measured."""
        if not self.image_patches:
            return 0.0
        largest = self.image_patches[-1]
        return _interpolated(self.image_patches, self.image_ms, min(num_patches, largest)) * max(
            1.0, num_patches / largest
        )

    def round_ms(self, shape: int, num_requests: int, kv_tokens: int = 0) -> float:
        """Milliseconds of a round of `shape`. kv_tokens: committed tokens of all its requests."""
        return self.rounds[shape].round_ms(num_requests, kv_tokens)

    def step_ms(
        self, shape: int, num_requests: int, kv_tokens: int, chunk_tokens: int, context_tokens: float = 0.0
    ) -> float:
        """Milliseconds of a round of `shape` with `chunk_tokens` prompt tokens. context_tokens: tokens before the
        chunks, averaged over `chunk_tokens`."""
        alone = self.round_ms(shape, num_requests, kv_tokens)
        if chunk_tokens == 0:
            return alone
        added = _interpolated(self.chunk_tokens, self.chunk_added_ms(shape, num_requests), chunk_tokens)
        return alone + added + self.chunk_kv_ms(chunk_tokens, context_tokens)

    def chunk_kv_ms(self, chunk_tokens: int, context_tokens: float) -> float:
        """Milliseconds of attention to `context_tokens` before the chunk."""
        return self.ms_per_chunk_kv * chunk_tokens * context_tokens

    def chunk_added_ms(self, shape: int, num_requests: int) -> list[float]:
        """Milliseconds that a chunk adds to a round of `shape` with `num_requests` requests, by `chunk_tokens`.

        It is the mixed step minus a round, each interpolated between the two nearest measured numbers of requests:

            added = interpolated(chunk_ms) - interpolated(round_ms of mixed_shapes)

        If the larger of both numbers was measured with `shape`, there is a second estimate, and the smaller one counts:

            added = interpolated(chunk_ms) - round_ms(shape, num_requests)

        In a large mixture of experts a chunk reads nearly all experts, so a small round costs far less in a mixed batch
        than alone. Only the second estimate takes this into account.
        """
        at = self.chunk_requests
        right = min(bisect_left(at, num_requests), len(at) - 1)
        left = max(right - 1, 0) if num_requests < at[right] else right
        share = 0.0 if left == right else (num_requests - at[left]) / (at[right] - at[left])
        low_ms, high_ms = (self.round_ms(self.mixed_shapes[index], at[index]) for index in (left, right))
        rounds_ms = low_ms + share * (high_ms - low_ms)
        if left != right and shape == self.mixed_shapes[right]:
            # the larger time of the rounds leaves the smaller addition
            rounds_ms = max(rounds_ms, self.round_ms(shape, num_requests))
        return [
            max(0.0, low + share * (high - low) - rounds_ms)
            for low, high in zip(self.chunk_ms[left], self.chunk_ms[right], strict=True)
        ]


def default_itl_target_ms(costs: CostTable, step_ms: Callable[[int, int, int, int], float] | None = None) -> float:
    """Return the "auto" value of `SchedulerConfig.itl_target_ms`: the milliseconds to which prompt chunks may extend a
    step.

    step_ms: current time of a step with (shape, requests, KV tokens, prompt tokens); None: `costs.step_ms`.

    The larger of two times:
    - the slowest mixed batch with `TARGET_CHUNK_TOKENS` prompt tokens (or the maximum) and up to half of all requests.
      That many tokens keep a GPU busy; smaller chunks would delay prompts more than they help running requests.
    - `TARGET_ROUNDS` times the slowest round of mixed batches, so that prompts get half of each step. With less,
      prompts of a large mixture of experts would queue up, because its rounds are slow from eight requests on.

    H200, chain of 3: 26 ms for Llama-3.1-8B with 128 slots; 51 ms for one of eight ranks of DeepSeek-V3 with 64.
    """
    step_ms = costs.step_ms if step_ms is None else step_ms
    shape = costs.mixed_shapes[-1]
    rounds = costs.rounds[shape]
    half, tokens = rounds.num_requests[-1] // 2, min(TARGET_CHUNK_TOKENS, costs.chunk_tokens[-1])
    measured = list(zip(costs.mixed_shapes, costs.chunk_requests, strict=True))
    steps = [step_ms(of, count, 0, tokens) for of, count in [*measured, (shape, half)] if count <= half]
    alone = {(shape, count) for count in rounds.num_requests} | {of for of in measured if of[1]}
    return max(*steps, TARGET_ROUNDS * max(step_ms(of, count, 0, 0) for of, count in alone))


def _interpolated(at: Sequence[int], values: Sequence[float], x: float) -> float:
    """Interpolate `values` at ascending points `at` linearly; constant before the first point, extrapolated after the
    last."""
    if x <= at[0] or len(at) == 1:
        return values[0]
    right = min(bisect_left(at, x), len(at) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (x - at[left]) / (at[right] - at[left])


def largest_within(limit_ms: float, sizes: Sequence[int], ms: Sequence[float], max_size: int) -> int:
    """Return the largest size, at most `max_size`, whose milliseconds are within the limit; 0 if the first of `sizes`
    is not.

    sizes, ms: ascending sizes and their ascending milliseconds, interpolated and extrapolated linearly.
    """
    num_fitting = bisect_right(ms, limit_ms)
    if num_fitting == 0:
        return 0
    left = min(num_fitting, len(ms) - 1) - 1
    rise = (ms[left + 1] - ms[left]) / (sizes[left + 1] - sizes[left])
    fitting = math.inf if rise == 0.0 else sizes[left] + (limit_ms - ms[left]) / rise
    return int(fitting) if fitting < max_size else max_size
