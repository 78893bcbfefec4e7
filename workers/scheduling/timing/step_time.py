"""Predicts the milliseconds of a step: the table measured at the start, corrected by every step that ran.

The one owner of step times. `workers.scheduling.step_results` reports finished steps to `observe`; the rest of this
folder and `PlanTiming` read predictions. Pure: its clock is the sum of the reported milliseconds.
"""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from workers.scheduling.cost_table import CostTable, default_itl_target_ms, largest_within

# prior standard deviations of the parts of log(time / table)
PACE_ERROR = 0.7  # of all steps: the machine may be busier or cooler than at the start
SHAPE_ERROR = 0.4  # of one shape, relative to the pace; a loaded start measured 24 to 75 ms for the same rounds
BATCH_ERROR = 0.4  # of one shape at one batch size, relative to the shape: tables interpolate between a few sizes
CHUNK_ERROR = 0.3  # of steps with one number of prompt tokens, relative to the pace
# variance that a part gains per second of steps, so that a kind of step that no longer runs becomes uncertain again
PACE_DRIFT = 0.0003  # for gradual changes; SURPRISE detects sudden ones
SHAPE_DRIFT = 0.0001  # of all other parts
MAX_DRIFT_S = 1.0  # bound on the seconds that one step adds
FIRST_NOISE, MIN_NOISE = 0.1, 0.02  # standard deviation of one step's relative time around its mean: first, minimum
NOISE_WEIGHT = 1 / 32  # weight of the newest step in the estimated noise
FIRST_LAUNCH = 1.3  # ignore the first rounds of a shape and batch size if slower than this times the prediction
SURE_AFTER = 8  # observed steps of a kind from which on its time counts as known
OUTLIER = 3.0  # standard deviations that the difference of a step of a known kind is clipped to
# Share of a larger difference that counts as error while the kind is not known: the step may be an outlier.
UNSURE_SHARE = 0.25
ABSENT_STEPS = 128  # a kind that has not run for so many steps counts as observed at most FEW_AFTER_ABSENCE times,
FEW_AFTER_ABSENCE = 4  # because the machine may have been busy when it was observed
FEW_ERROR = 0.8  # error from few observed steps, divided by their number: all of them may have been disturbed
SURPRISE = 1.6  # the pace has changed when the running mean of differences exceeds this, in standard deviations
SURPRISE_WEIGHT = 0.25  # weight of the newest step in that mean, whose own standard deviation is a quarter of SURPRISE
MAX_SURPRISE = 2.0  # bound on one step in that mean, so that a single slow step is no change of pace
CHANGED_PACE_ERROR = 0.3  # error of the pace after a change, so that some ten steps follow it
CHANGED_PART_ERROR = 0.15  # error then added to kinds of steps that do not run
SETTLING_STEPS = 8  # steps after a change until the pace counts as known
MAX_LOG = 7.0  # bound on log(time / table): a step a thousand times slower measures something else
LEARN_EVERY_MS = 4.0  # milliseconds between updates by one well-known kind of step: each takes 50 us of the host


_DIFFERENCE = np.array((1.0, 1.0, 1.0, -1.0, -1.0, -1.0))  # signs of the parts of two steps without prompt tokens


class Step(NamedTuple):
    """The work of a step.

    shape: index of the shape that its rounds verify and draft.
    num_requests: requests that run a round.
    kv_tokens: committed tokens of these requests together.
    chunk_tokens: prompt tokens beside the rounds.
    context_tokens: tokens before a chunk in its request, averaged over the prompt tokens.
    """

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0
    chunk_tokens: int = 0
    context_tokens: float = 0.0


class Prediction(NamedTuple):
    """Predicted time of a step.

    ms: mean milliseconds.
    error: standard error of the logarithm of that mean.
    noise: standard deviation of the logarithm of one step's time around the mean.
    """

    ms: float
    error: float
    noise: float = 0.0

    @property
    def early_ms(self) -> float:
        """Milliseconds by which the step may end early: one standard deviation."""
        return self.ms * -math.expm1(-math.hypot(self.error, self.noise))


class StepTime:
    """A Kalman filter over log(time / table), where table is the time of the step in the measured table.

    The logarithm is a sum of parts:
    - the pace, which all steps share;
    - a part of the tree shape, and a part of the shape and batch size (rounded up to a power of two);
    - for a step with prompt tokens, instead of these two, a part of the number of prompt tokens (in powers of two) and
      of whether it has rounds.
    The covariance attributes a difference to parts: while one shape runs, its times teach about the pace; the first
    round of another shape then teaches about that shape.

    costs: the table as measured.
    noise: standard deviation of one step's relative time before any step is observed.
    slowdown: time of the last step with rounds, divided by its prediction.
    """

    def __init__(self, costs: CostTable, max_requests: int, noise: float = FIRST_NOISE) -> None:
        self.costs = costs
        self._num_batches = max(1, max_requests).bit_length() + 1
        num_shapes, num_chunks = len(costs.rounds), costs.chunk_tokens[-1].bit_length() + 2
        self._first_batch = 1 + num_shapes
        self._first_chunk = self._first_batch + num_shapes * self._num_batches
        self._last_chunk = num_chunks - 1
        errors = np.full(self._first_chunk + 2 * num_chunks, CHUNK_ERROR)
        errors[0], errors[1 : self._first_batch] = PACE_ERROR, SHAPE_ERROR
        errors[self._first_batch : self._first_chunk] = BATCH_ERROR
        self._prior = errors**2
        self._drift = np.full(len(errors), SHAPE_DRIFT)
        self._drift[0] = PACE_DRIFT
        self._mean = np.zeros(len(errors))
        self._covariance = np.diag(self._prior)
        self._variances = self._covariance.reshape(-1)[:: len(errors) + 1]  # a view of the diagonal
        self._noise = noise**2
        self._surprise, self.slowdown = 0.0, 1.0
        self._unlearnt_ms = 0.0  # of steps since the last update
        # a kind of step is identified by the last of its parts
        self._few_ratios: dict[int, list[float]] = {}  # by kind; see `_median_ratio`
        self._num_steps = 0
        self._launched: set[tuple[int, int]] = set()  # (shape, number of requests) of rounds so far
        self._last_ran = [0] * len(errors)  # number of the last step, by kind
        self._settling = 0  # steps until the pace counts as known
        self.num_pace_changes = 0  # sudden changes, by a change of the machine's load
        self._num_observed = np.zeros(len(errors), np.int64)  # steps, by kind
        # last argument and result of `_chunk_points`
        self._last_points: tuple[Step, tuple[list[float], list[float]]] | None = None

    def predict(self, step: Step) -> Prediction:
        """Predict the time of a step, with its error."""
        parts = self._parts(step)
        return Prediction(self.ms(step), math.sqrt(max(self._between(parts, parts), 0.0)), math.sqrt(self._noise))

    def ms(self, step: Step) -> float:
        """Return the mean milliseconds of a step."""
        return self.costs.step_ms(*step) * self.correction(step)

    def chunk_tokens_within(
        self, limit_ms: float, rounds: Step, max_tokens: int, context_tokens: float = 0.0, more_pairs: float = 0.0
    ) -> int:
        """Return the largest number of prompt tokens, at most `max_tokens`, that keeps a step with `rounds` within
        `limit_ms`; 0 if one token exceeds it.

        context_tokens: tokens before the chunk.
        more_pairs: pairs of a token and a context token to add to those that `context_tokens` implies; may be negative.
        """
        sizes, (without, per_pair) = self.costs.chunk_tokens, self._chunk_points(rounds)
        points = [
            ms + each * (more_pairs + tokens * context_tokens)
            for ms, each, tokens in zip(without, per_pair, sizes, strict=True)
        ]
        # below the smallest measured chunk, a chunk costs as much as that one, except for its context
        points = [without[0] + per_pair[0] * more_pairs, *accumulate(points, max)]
        return largest_within(limit_ms, (0, *sizes), points, max_tokens)

    def row_ms(self) -> float:
        """Return the mean milliseconds that one more prompt token adds to a step without rounds."""
        sizes = self.costs.chunk_tokens
        first, last = (self.ms(Step(self.costs.default, chunk_tokens=tokens)) for tokens in (sizes[0], sizes[-1]))
        return max(0.0, last - first) / max(1, sizes[-1] - sizes[0])

    def itl_target_ms(self) -> float:
        """See `default_itl_target_ms`."""
        return default_itl_target_ms(self.costs, lambda *step: self.ms(Step(*step)))

    def errors_between(self, rounds: Sequence[Step], other: Step) -> list[float]:
        """Return, for each of `rounds`, the standard error of log(its time / the time of `other`). Parts that both
        share cancel. All must be steps without prompt tokens."""
        theirs = self._parts(other)
        parts = np.array([self._parts(step) + theirs for step in rounds])
        covariance = self._covariance[parts[:, :, None], parts[:, None, :]]
        variances = _DIFFERENCE @ covariance @ _DIFFERENCE
        counts = self._num_observed[parts[:, 2]]
        few = np.where((counts > 0) & (counts < SURE_AFTER), FEW_ERROR / np.maximum(counts, 1), 0.0)
        few[[step.shape == other.shape for step in rounds]] = 0.0
        found: list[float] = np.hypot(np.sqrt(np.maximum(variances, 0.0)), few).tolist()
        return found

    def correction(self, step: Step) -> float:
        """Return the factor between the table's milliseconds of a step and the predicted ones."""
        return self._factor(self._parts(step)) * math.exp(self._noise / 2.0)

    @property
    def is_settled(self) -> bool:
        """Whether the pace is known, so that the time of an untried kind of step can be told from a change of pace."""
        return self._settling == 0

    def has_run(self, step: Step) -> bool:
        """Whether a step of this kind has been observed: with this shape and batch size, or this many prompt tokens
        (both in powers of two)."""
        return bool(self._num_observed[self._parts(step)[-1]])

    def observe(self, step: Step, ms: float, expected_ms: float = 0.0) -> None:
        """Learn from a finished step.

        ms: milliseconds from its start, or from the end of the step before it if that is later.
        expected_ms: predicted when it was planned; 0 if unknown, or without rounds.
        """
        if expected_ms > 0.0:
            self.slowdown = ms / expected_ms
        parts = self._parts(step)
        own = parts[-1]
        self._unlearnt_ms += ms
        self._num_steps += 1
        absent, self._last_ran[own] = self._num_steps - self._last_ran[own], self._num_steps
        if absent == 1 and self._unlearnt_ms < LEARN_EVERY_MS and self._num_observed[own] >= SURE_AFTER:
            return
        if absent > ABSENT_STEPS:
            self._num_observed[own] = min(self._num_observed[own], FEW_AFTER_ABSENCE)
            self._few_ratios.pop(own, None)
        passed_s, self._unlearnt_ms = self._unlearnt_ms / 1e3, 0.0
        table_ms, unsure = self.costs.step_ms(*step), 0.0
        if table_ms <= 0.0 or ms <= 0.0 or self._is_first_launch(step, ms):
            return
        self._grow(min(passed_s, MAX_DRIFT_S))
        is_sure = self._num_observed[own] >= SURE_AFTER
        ratio = math.log(ms / table_ms) if is_sure else self._median_ratio(own, math.log(ms / table_ms))
        difference = _bounded(ratio - _bounded(sum(map(self._mean.item, parts))))
        variance = self._between(parts, parts)
        deviation = math.sqrt(variance + self._noise)
        if not is_sure:
            is_far = abs(difference) > OUTLIER * deviation
            if is_far or self._num_observed[own]:
                self._variances[own] += difference**2  # the table or earlier steps of this kind are wrong,
            if is_far:
                unsure = (UNSURE_SHARE * difference) ** 2  # or this step is the outlier
        else:
            difference = min(max(difference, -OUTLIER * deviation), OUTLIER * deviation)
            if variance < self._noise:  # else the difference may come from the other parts
                surprise = min(max(difference / deviation, -MAX_SURPRISE), MAX_SURPRISE)
                self._surprise += SURPRISE_WEIGHT * (surprise - self._surprise)
            if abs(self._surprise) > SURPRISE:
                self._change_pace(parts)
        self._settling = max(0, self._settling - 1)
        self._learn(parts, difference)
        self._variances[own] += unsure
        self._num_observed[own] += 1

    def _is_first_launch(self, step: Step, ms: float) -> bool:
        """Whether the rounds were slow because a CUDA graph is uploaded to the device at its first launch."""
        kind = step.shape, step.num_requests
        if step.chunk_tokens or kind in self._launched:
            return False
        self._launched.add(kind)
        return ms > FIRST_LAUNCH * self.ms(step)

    def _median_ratio(self, own: int, ratio: float) -> float:
        """Return the lower median of log(time / table) over the last three steps of a kind with few steps. A pause of
        the host may have delayed one of them."""
        last = self._few_ratios[own] = [*self._few_ratios.get(own, ()), ratio][-3:]
        return float(sorted(last)[(len(last) - 1) // 2])

    def _learn(self, parts: list[int], difference: float) -> None:
        """Update the filter by one step. difference: observed minus predicted log(time / table)."""
        self._last_points = None
        shared = functools.reduce(np.add, [self._covariance[part] for part in parts])
        total = sum(shared.item(part) for part in parts) + self._noise
        self._mean += shared * (difference / total)
        self._covariance -= np.outer(shared, shared / total)
        weight = (self._noise / total) ** 2  # a difference that uncertain parts explain says little about the noise
        self._noise = max(self._noise + NOISE_WEIGHT * weight * (difference**2 - total), MIN_NOISE**2)

    def _change_pace(self, parts: list[int]) -> None:
        """Attribute a lasting difference of steps with these parts to the pace. Kinds of steps that do not run become
        less certain, because they may have changed by another factor."""
        self._surprise, self._settling = 0.0, SETTLING_STEPS
        self.num_pace_changes += 1
        own, num_observed = self._variances[parts].copy(), self._num_observed[parts[-1]]
        self._variances += np.minimum(CHANGED_PART_ERROR**2, np.maximum(self._prior - self._variances, 0.0))
        self._variances[parts] = own
        self._variances[0] += CHANGED_PACE_ERROR**2
        np.minimum(self._num_observed, 1, out=self._num_observed)
        self._few_ratios.clear()
        self._num_observed[parts[-1]] = num_observed

    def _grow(self, seconds: float) -> None:
        """Add the drift of `seconds` to the parts' variances, up to the prior ones."""
        self._variances += np.minimum(self._drift * seconds, np.maximum(self._prior - self._variances, 0.0))

    def _between(self, parts: list[int], others: list[int]) -> float:
        item = self._covariance.item
        return float(sum(item(part, other) for part in parts for other in others))

    def _chunk_points(self, rounds: Step) -> tuple[list[float], list[float]]:
        """Return milliseconds of steps with `rounds` and a chunk, by `CostTable.chunk_tokens`: without context, and
        added per pair of a token and a context token. Cached, because a plan needs them for every prompt."""
        if self._last_points is None or self._last_points[0] != rounds:
            costs, sizes = self.costs, self.costs.chunk_tokens
            factors = [self.correction(rounds._replace(chunk_tokens=tokens)) for tokens in sizes]
            rounds_ms = costs.round_ms(rounds.shape, rounds.num_requests, rounds.kv_tokens)
            added = costs.chunk_added_ms(rounds.shape, rounds.num_requests)
            without = [factor * (rounds_ms + ms) for factor, ms in zip(factors, added, strict=True)]
            self._last_points = rounds, (without, [factor * costs.ms_per_chunk_kv for factor in factors])
        return self._last_points[1]

    def _factor(self, parts: list[int]) -> float:
        return math.exp(_bounded(sum(map(self._mean.item, parts))))

    def _parts(self, step: Step) -> list[int]:
        """Return the indices of a step's parts. The last one identifies its kind."""
        if step.chunk_tokens:
            at = min(step.chunk_tokens.bit_length(), self._last_chunk)
            return [0, self._first_chunk + 2 * at + (step.num_requests > 0)]
        batch = min(max(step.num_requests - 1, 0).bit_length(), self._num_batches - 1)
        return [0, 1 + step.shape, self._first_batch + step.shape * self._num_batches + batch]


def _bounded(logarithm: float) -> float:
    return min(max(logarithm, -MAX_LOG), MAX_LOG)
