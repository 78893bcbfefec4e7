"""Predicts the milliseconds of a step: the table measured at the start, corrected by every step that ran.
`aerie.workers.scheduling.step_results` reports steps to `observe`; the scheduler and `PlanTiming` read predictions.
Pure: its clock is the sum of the reported milliseconds.

The correction is a Kalman filter over the terms ("parts") whose sum is log(time / table):

- the pace, which all steps share;
- a part of the tree shape, and a part of the shape and batch size (rounded up to a power of two);
- for a step with prompt tokens, instead of these two, a part of the number of prompt tokens (in powers of two) and of
  whether it has rounds.
"""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aerie.workers.scheduling.cost_table import CostTable, default_itl_target_ms, largest_within


class Step(NamedTuple):
    """The work of a step.

    shape: index of the shape that its rounds verify and draft.
    num_requests: requests that run a round.
    kv_tokens: total committed tokens of these requests.
    chunk_tokens: prompt tokens in the step.
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


PACE = 0  # index of the pace
# prior standard deviations
PACE_ERROR = 0.7  # load and temperature may differ from the start
SHAPE_ERROR = 0.4  # for one shape, relative to the pace; a start under load measured 24 to 75 ms for the same rounds
BATCH_ERROR = 0.4  # for one shape at one batch size, relative to the shape: tables interpolate between a few sizes
CHUNK_ERROR = 0.3  # for one number of prompt tokens, relative to the pace


class StepParts:
    """Assigns an index to each part.

    prior: [parts] float64 variances before any step is observed.
    """

    def __init__(self, num_shapes: int, max_requests: int, max_chunk_tokens: int) -> None:
        self._num_batches = max(1, max_requests).bit_length() + 1
        num_chunks = max_chunk_tokens.bit_length() + 2
        self._first_batch = 1 + num_shapes
        self._first_chunk = self._first_batch + num_shapes * self._num_batches
        self._last_chunk = num_chunks - 1
        errors = np.full(self._first_chunk + 2 * num_chunks, CHUNK_ERROR)
        errors[PACE], errors[1 : self._first_batch] = PACE_ERROR, SHAPE_ERROR
        errors[self._first_batch : self._first_chunk] = BATCH_ERROR
        self.prior: NDArray[np.float64] = errors**2

    def of(self, step: Step) -> list[int]:
        """Return the indices of the parts that a step's time is the sum of. The last index identifies the kind of
        step."""
        if step.chunk_tokens:
            at = min(step.chunk_tokens.bit_length(), self._last_chunk)
            return [PACE, self._first_chunk + 2 * at + (step.num_requests > 0)]
        batch = min(max(step.num_requests - 1, 0).bit_length(), self._num_batches - 1)
        return [PACE, 1 + step.shape, self._first_batch + step.shape * self._num_batches + batch]


# variance added per second of steps, so that a kind of step that no longer runs becomes uncertain again
MIN_PACE_DRIFT, MAX_PACE_DRIFT = 0.0003, 0.05  # for gradual changes; `StepTime` detects sudden ones
PART_DRIFT = 0.0001  # for all other parts
# Each step changes the logarithm of the pace's drift by DRIFT_GAIN times (the product of its error and the last one's,
# in standard deviations, minus DRIFT_DECAY). Successive errors of equal sign show that the pace drifts faster; with
# independent errors the estimate decays.
DRIFT_GAIN = 1 / 8
DRIFT_DECAY = 0.1
MAX_DRIFT_S = 1.0  # bound on the seconds that one step adds
MIN_NOISE = 0.02  # minimum standard deviation of one step's relative time around its mean
NOISE_WEIGHT = 1 / 32  # weight of the newest step in the estimated noise
CHANGED_PACE_ERROR = 0.3  # error of the pace after a change, so that about ten steps track it
CHANGED_PART_ERROR = 0.15  # error added then to kinds of steps that do not run
MAX_LOG = 7.0  # bound on log(time / table); a step a thousand times slower is not a measurement


class PartFilter:
    """Mean and covariance of the parts.

    The covariance attributes a difference to parts: while one shape runs, its times update the pace; the first round of
    another shape then updates that shape's part.

    prior: [parts] variances before any step is observed.
    noise: variance of the logarithm of one step's time around its mean.
    mean: [parts].
    covariance: [parts, parts].
    """

    def __init__(self, prior: NDArray[np.float64], noise: float) -> None:
        self.noise = noise
        self._prior = prior
        self._drift = np.full(len(prior), PART_DRIFT)
        self._drift[PACE] = MIN_PACE_DRIFT
        self._last_error = 0.0  # difference of the last step of a known kind, in standard deviations
        self.mean = np.zeros(len(prior))
        self.covariance = np.diag(prior)
        self._variances = self.covariance.reshape(-1)[:: len(prior) + 1]  # a view of the diagonal

    def log_factor(self, parts: list[int]) -> float:
        """Return the mean of log(time / table) of steps with these parts, within MAX_LOG."""
        return bounded(sum(map(self.mean.item, parts)))

    def covariance_of(self, parts: list[int], others: list[int]) -> float:
        """Return the covariance of two sums of parts."""
        item = self.covariance.item
        return float(sum(item(part, other) for part in parts for other in others))

    def drift(self, seconds: float) -> None:
        """Add the drift of `seconds` to the parts' variances, up to the prior ones."""
        added = self._drift * min(seconds, MAX_DRIFT_S)
        self._variances += np.minimum(added, np.maximum(self._prior - self._variances, 0.0))

    def adapt_drift(self, error: float) -> None:
        """Estimate the pace's drift from the error of a step of a known kind: observed minus predicted logarithm, in
        standard deviations. With the right drift, successive errors are independent (Mehra, 1970)."""
        change = DRIFT_GAIN * (error * self._last_error - DRIFT_DECAY)
        self._drift[PACE] = min(max(self._drift[PACE] * math.exp(change), MIN_PACE_DRIFT), MAX_PACE_DRIFT)
        self._last_error = error

    def widen(self, part: int, variance: float) -> None:
        """Add to a part's variance."""
        self._variances[part] += variance

    def learn(self, parts: list[int], difference: float) -> None:
        """Update the parts by one step. difference: observed minus predicted log(time / table)."""
        shared = functools.reduce(np.add, [self.covariance[part] for part in parts])
        total = sum(shared.item(part) for part in parts) + self.noise
        self.mean += shared * (difference / total)
        self.covariance -= np.outer(shared, shared / total)
        weight = (self.noise / total) ** 2  # a difference that uncertain parts explain says little about the noise
        self.noise = max(self.noise + NOISE_WEIGHT * weight * (difference**2 - total), MIN_NOISE**2)

    def change_pace(self, parts: list[int]) -> None:
        """Attribute a lasting difference of steps with these parts to the pace. Kinds of steps that do not run become
        less certain, because their factor may differ."""
        own = self._variances[parts].copy()
        self._variances += np.minimum(CHANGED_PART_ERROR**2, np.maximum(self._prior - self._variances, 0.0))
        self._variances[parts] = own
        self._variances[PACE] += CHANGED_PACE_ERROR**2


def bounded(logarithm: float) -> float:
    return min(max(logarithm, -MAX_LOG), MAX_LOG)


def deviation(variance: float) -> float:
    """Return the standard deviation; rounding may leave a variance just below zero."""
    return math.sqrt(max(variance, 0.0))


FIRST_NOISE = 0.1  # initial standard deviation of one step's relative time around its mean
FIRST_LAUNCH = 1.3  # ignore the first rounds of a shape and batch size if slower than this times the prediction
SURE_AFTER = 8  # observed steps of a kind after which its time counts as known
OUTLIER = 3.0  # standard deviations to which the difference of a step of a known kind is clipped
# Share of a larger difference that counts as error while the kind is not known, because the step may be an outlier.
UNSURE_SHARE = 0.25
ABSENT_STEPS = 128  # a kind that has not run for this many steps counts as observed at most FEW_AFTER_ABSENCE times,
FEW_AFTER_ABSENCE = 4  # because the machine may have been busy when it was observed
FEW_ERROR = 0.8  # error of few observed steps, divided by their number; all of them may have been disturbed
SURPRISE = 1.6  # the pace has changed when the running mean of differences exceeds this, in standard deviations
SURPRISE_WEIGHT = 0.25  # weight of the newest step in that mean, whose standard deviation is a quarter of SURPRISE
MAX_SURPRISE = 2.0  # bound on one step in that mean, so that a single slow step is not a change of pace
SETTLING_STEPS = 8  # steps after a change until the pace counts as known
LEARN_EVERY_MS = 4.0  # milliseconds between updates by one well-known kind of step: each takes 50 us of the host


_DIFFERENCE = np.array((1.0, 1.0, 1.0, -1.0, -1.0, -1.0))  # signs of the parts of two steps without prompt tokens


class StepTime:
    """Predicts steps, and updates `PartFilter` by each finished step.

    costs: the measured table.
    noise: initial standard deviation of one step's relative time.
    slowdown: time of the last step with rounds, divided by its prediction.
    """

    def __init__(self, costs: CostTable, max_requests: int, noise: float = FIRST_NOISE) -> None:
        self.costs = costs
        self._parts = StepParts(len(costs.rounds), max_requests, costs.chunk_tokens[-1])
        self._filter = PartFilter(self._parts.prior, noise**2)
        num_parts = len(self._parts.prior)
        self._surprise, self.slowdown = 0.0, 1.0
        self._unlearnt_ms = 0.0  # time of steps since the last update
        # a kind of step is identified by the last of its parts
        self._few_ratios: dict[int, list[float]] = {}  # by kind; see `_median_ratio`
        self._num_steps = 0
        self._launched: set[tuple[int, int]] = set()  # (shape, number of requests) of rounds so far
        self._last_ran = [0] * num_parts  # number of the last step, by kind
        self._settling = 0  # steps until the pace counts as known
        self.num_pace_changes = 0  # number of sudden changes, caused by the machine's load
        self._num_observed = np.zeros(num_parts, np.int64)  # steps, by kind
        # last argument and result of `_chunk_points`
        self._last_points: tuple[Step, tuple[list[float], list[float]]] | None = None

    def predict(self, step: Step) -> Prediction:
        """Predict the time of a step, with its error."""
        parts = self._parts.of(step)
        error = deviation(self._filter.covariance_of(parts, parts))
        return Prediction(self.ms(step), error, math.sqrt(self._filter.noise))

    def ms(self, step: Step) -> float:
        """Return the mean milliseconds of a step."""
        return self.costs.step_ms(*step) * self.correction(step)

    def chunk_tokens_within(
        self, limit_ms: float, rounds: Step, max_tokens: int, context_tokens: float = 0.0, more_pairs: float = 0.0
    ) -> int:
        """Return the largest number of prompt tokens, at most `max_tokens`, that keeps a step with `rounds` within
        `limit_ms`; 0 if one token exceeds it.

        context_tokens: tokens before the chunk.
        more_pairs: number of (token, context token) to add to those implied by `context_tokens`; may be negative.
        """
        sizes, (without, per_pair) = self.costs.chunk_tokens, self._chunk_points(rounds)
        points = [
            ms + pair_ms * (more_pairs + tokens * context_tokens)
            for ms, pair_ms, tokens in zip(without, per_pair, sizes, strict=True)
        ]
        # a chunk below the smallest measured one costs as much as that one, except for its context
        points = [without[0] + per_pair[0] * more_pairs, *accumulate(points, max)]
        return largest_within(limit_ms, (0, *sizes), points, max_tokens)

    def row_ms(self) -> float:
        """Return the mean milliseconds that one more prompt token adds to a step without rounds."""
        sizes = self.costs.chunk_tokens
        first, last = (self.ms(Step(chunk_tokens=tokens)) for tokens in (sizes[0], sizes[-1]))
        return max(0.0, last - first) / max(1, sizes[-1] - sizes[0])

    def itl_target_ms(self) -> float:
        """Return the milliseconds to which prompt chunks may extend a step (`default_itl_target_ms`)."""
        return default_itl_target_ms(self.costs, lambda *step: self.ms(Step(*step)))

    def errors_between(self, rounds: Sequence[Step], other: Step) -> list[float]:
        """Return, for each of `rounds`, the standard error of log(its time / the time of `other`), in which common
        parts cancel. All must be steps without prompt tokens."""
        other_parts = self._parts.of(other)
        parts = np.array([self._parts.of(step) + other_parts for step in rounds])
        covariance = self._filter.covariance[parts[:, :, None], parts[:, None, :]]
        variances = _DIFFERENCE @ covariance @ _DIFFERENCE
        counts = self._num_observed[parts[:, 2]]
        few = np.where((counts > 0) & (counts < SURE_AFTER), FEW_ERROR / np.maximum(counts, 1), 0.0)
        few[[step.shape == other.shape for step in rounds]] = 0.0
        errors: list[float] = np.hypot(np.sqrt(np.maximum(variances, 0.0)), few).tolist()
        return errors

    def correction(self, step: Step) -> float:
        """Return the ratio of a step's predicted milliseconds to the table's."""
        return math.exp(self._filter.log_factor(self._parts.of(step))) * math.exp(self._filter.noise / 2.0)

    @property
    def is_settled(self) -> bool:
        """Return whether the pace is known, so that the time of a new kind of step can be distinguished from a change
        of pace."""
        return self._settling == 0

    def has_run(self, step: Step) -> bool:
        """Return whether a step of this kind has been observed: with this shape and batch size, or this number of
        prompt tokens (both in powers of two)."""
        return bool(self._num_observed[self._parts.of(step)[-1]])

    def observe(self, step: Step, ms: float, expected_ms: float = 0.0) -> None:
        """Learn from a finished step.

        ms: milliseconds from its start, or from the end of the previous step if that is later.
        expected_ms: predicted when it was planned; 0 if unknown, or without rounds.
        """
        if expected_ms > 0.0:
            self.slowdown = ms / expected_ms
        parts = self._parts.of(step)
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
        self._filter.drift(passed_s)
        is_sure = self._num_observed[own] >= SURE_AFTER
        ratio = math.log(ms / table_ms) if is_sure else self._median_ratio(own, math.log(ms / table_ms))
        difference = bounded(ratio - self._filter.log_factor(parts))
        variance, noise = self._filter.covariance_of(parts, parts), self._filter.noise
        error = math.sqrt(variance + noise)
        if not is_sure:
            is_far = abs(difference) > OUTLIER * error
            if is_far or self._num_observed[own]:
                self._filter.widen(own, difference**2)  # the table or earlier steps of this kind are wrong,
            if is_far:
                unsure = (UNSURE_SHARE * difference) ** 2  # or this step is the outlier
        else:
            difference = min(max(difference, -OUTLIER * error), OUTLIER * error)
            self._filter.adapt_drift(min(max(difference / error, -MAX_SURPRISE), MAX_SURPRISE))
            if variance < noise:  # else the difference may come from the other parts
                surprise = min(max(difference / error, -MAX_SURPRISE), MAX_SURPRISE)
                self._surprise += SURPRISE_WEIGHT * (surprise - self._surprise)
            if abs(self._surprise) > SURPRISE:
                self._change_pace(parts)
        self._settling = max(0, self._settling - 1)
        self._last_points = None
        self._filter.learn(parts, difference)
        self._filter.widen(own, unsure)
        self._num_observed[own] += 1

    def _is_first_launch(self, step: Step, ms: float) -> bool:
        """Return whether the rounds were slow because a CUDA graph is uploaded to the device at its first launch."""
        kind = step.shape, step.num_requests
        if step.chunk_tokens or kind in self._launched:
            return False
        self._launched.add(kind)
        return ms > FIRST_LAUNCH * self.ms(step)

    def _median_ratio(self, own: int, ratio: float) -> float:
        """Return the lower median of log(time / table) over the last three steps of a kind with few steps. A pause of
        the host may have delayed one of these."""
        last = self._few_ratios[own] = [*self._few_ratios.get(own, ()), ratio][-3:]
        return float(sorted(last)[(len(last) - 1) // 2])

    def _change_pace(self, parts: list[int]) -> None:
        """Attribute a lasting difference of steps with these parts to the pace."""
        self._surprise, self._settling = 0.0, SETTLING_STEPS
        self.num_pace_changes += 1
        self._filter.change_pace(parts)
        num_observed = self._num_observed[parts[-1]]
        np.minimum(self._num_observed, 1, out=self._num_observed)
        self._few_ratios.clear()
        self._num_observed[parts[-1]] = num_observed

    def _chunk_points(self, rounds: Step) -> tuple[list[float], list[float]]:
        """Return milliseconds of steps with `rounds` and a chunk, by `CostTable.chunk_tokens`: without context, and
        added per (token, context token). Cached, because a plan needs them for every prompt."""
        if self._last_points is None or self._last_points[0] != rounds:
            costs, sizes = self.costs, self.costs.chunk_tokens
            factors = [self.correction(rounds._replace(chunk_tokens=tokens)) for tokens in sizes]
            rounds_ms = costs.round_ms(rounds.shape, rounds.num_requests, rounds.kv_tokens)
            added = costs.chunk_added_ms(rounds.shape, rounds.num_requests)
            without = [factor * (rounds_ms + ms) for factor, ms in zip(factors, added, strict=True)]
            self._last_points = rounds, (without, [factor * costs.ms_per_chunk_kv for factor in factors])
        return self._last_points[1]
