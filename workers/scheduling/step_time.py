"""Milliseconds of a step: the table that a start measured, corrected by every step that ran.

The one owner of step times: `workers.scheduling.step_results` reports finished steps to `observe`; the rest of this
folder and `PlanTiming` ask for predictions. Pure: the sum of the reported milliseconds is its clock.
"""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from workers.scheduling.cost_table import CostTable, default_itl_target_ms, most_within

# standard deviations of the logarithm of a step's time over its table's, before any step has run
PACE_ERROR = 0.7  # common to all steps: the machine is busier or cooler than at the start
SHAPE_ERROR = 0.4  # one shape's rounds, relative to the pace; a loaded start measured 24 to 75 ms for the same rounds
BATCH_ERROR = 0.4  # one shape at one batch size, relative to the shape; tables interpolate between a few sizes
CHUNK_ERROR = 0.3  # steps with one number of prompt tokens, relative to the pace
# variances that they gain per second of steps, so that what no longer runs becomes uncertain again
PACE_DRIFT = 0.0003  # a sudden change of load is noticed by `SURPRISE`
SHAPE_DRIFT = 0.0001
FIRST_NOISE, LEAST_NOISE = 0.1, 0.02  # standard deviations of one step's relative time
NOISE_WEIGHT = 1 / 32
FIRST_LAUNCH = 1.3  # times the predicted time, from which the first rounds of a shape at a batch size tell nothing
OUTLIER = 3.0  # standard deviations that one step counts at most,
SURE_AFTER = 8  # unless fewer steps of its kind have been observed
ABSENT_STEPS = 128  # without a kind, after which what was observed of it
FEW_AFTER_ABSENCE = 4  # counts as so many steps: the machine may have been busy then
FEW_ERROR = 0.8  # of a kind's time, over its number of observed steps: hiccups may have met all of a few
DOUBT = 0.25  # share of such a step's difference that stays in doubt
SURPRISE = 1.6  # running mean of differences, in standard deviations, above which the pace has changed: 4 of its own
SURPRISE_WEIGHT = 0.25
MAX_SURPRISE = 2.0  # standard deviations of one step: a single slow step is no change of pace
CHANGED_PACE_ERROR = 0.3  # error of the pace then, so that it follows a change of load within some ten steps
SETTLING_STEPS = 8  # until it is known
CHANGED_PART_ERROR = 0.15  # error of times that are not measured meanwhile
MAX_DRIFT_S = 1.0  # limit of the time that one step counts
MAX_LOG = 7.0  # limit of log(time / table): a step a thousand times as long measures something else
LEARN_EVERY_MS = 4.0  # between known kinds of steps: learning takes 50 microseconds of the host, rounds may take 400


_OURS_LESS_THEIRS = np.array((1.0, 1.0, 1.0, -1.0, -1.0, -1.0))  # the parts of two steps without prompt tokens


class Step(NamedTuple):
    """The work of a step.

    shape: index of the shape that its rounds verify and draft.
    num_requests: requests that run a round.
    kv_tokens: committed tokens of these requests together.
    chunk_tokens: prompt tokens beside the rounds.
    context_tokens: tokens before the chunks in their requests; a mean over `chunk_tokens`.
    """

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0
    chunk_tokens: int = 0
    context_tokens: float = 0.0


class Prediction(NamedTuple):
    """Predicted time of a step.

    ms: mean milliseconds.
    error: standard deviation of that mean's logarithm.
    noise: standard deviation of the logarithm of one step's time around its mean.
    """

    ms: float
    error: float
    noise: float = 0.0

    @property
    def early_ms(self) -> float:
        """Milliseconds by which the step may end early: one standard deviation."""
        return self.ms * -math.expm1(-math.hypot(self.error, self.noise))


class StepTime:
    """A Kalman filter over the logarithm of a step's time over its table's time.

    The logarithm is a sum: the pace, which all steps share; a shape's own part; and its own at a batch size, up to the
    next power of two. Steps with prompt tokens have a part by their number of prompt tokens instead. The filter's
    covariance says which part a difference is due to: while one shape runs, its time tells of the pace; the first round
    of another one then tells of that shape. A single outlier counts as `OUTLIER` standard deviations at most.

    costs: the table, as measured.
    noise: standard deviation of one step's relative time, before any step is measured.
    slowdown: time of the last step with rounds, over its prediction.
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
        self._unlearnt_ms = 0.0  # of steps since the last that was learnt from
        self._few_ratios: dict[int, list[float]] = {}  # by the last of their parts; see `_middle_ratio`
        self._num_steps = 0
        self._launched: set[tuple[int, int]] = set()  # shapes and numbers of requests of rounds so far
        self._last_ran = [0] * len(errors)  # number of the last step, by the last of their parts
        self._settling = 0  # steps
        self.num_pace_changes = 0  # sudden ones: a change of load
        self._num_observed = np.zeros(len(errors), np.int64)  # steps, by the last of their parts
        self._last_points: tuple[Step, tuple[list[float], list[float]]] | None = None  # `_chunk_points`

    def predict(self, step: Step) -> Prediction:
        """Predict the time of a step, with its error."""
        parts = self._parts(step)
        return Prediction(self.ms(step), math.sqrt(max(self._between(parts, parts), 0.0)), math.sqrt(self._noise))

    def ms(self, step: Step) -> float:
        """Milliseconds that a step takes in the mean."""
        return self.costs.step_ms(*step) * self.correction(step)

    def chunk_tokens_within(
        self, limit_ms: float, rounds: Step, most: int, context_tokens: float = 0.0, more_pairs: float = 0.0
    ) -> int:
        """The most prompt tokens, at most `most`, that keep a step with `rounds` within `limit_ms`; 0 if not even one
        does. more_pairs: of a prompt's token and one before its chunk, beside those with `context_tokens`."""
        sizes, (without, per_pair) = self.costs.chunk_tokens, self._chunk_points(rounds)
        points = [
            ms + each * (more_pairs + tokens * context_tokens)
            for ms, each, tokens in zip(without, per_pair, sizes, strict=True)
        ]
        # a chunk smaller than the smallest costs as much, but for its context
        points = [without[0] + per_pair[0] * more_pairs, *accumulate(points, max)]
        return most_within(limit_ms, (0, *sizes), points, most)

    def row_ms(self) -> float:
        """Milliseconds that each further prompt token adds to a step of prompts alone, in the mean."""
        sizes = self.costs.chunk_tokens
        first, last = (self.ms(Step(self.costs.default, chunk_tokens=tokens)) for tokens in (sizes[0], sizes[-1]))
        return max(0.0, last - first) / max(1, sizes[-1] - sizes[0])

    def itl_target_ms(self) -> float:
        """See `default_itl_target_ms`."""
        return default_itl_target_ms(self.costs, lambda *step: self.ms(Step(*step)))

    def errors_between(self, rounds: Sequence[Step], other: Step) -> list[float]:
        """Standard deviations of the logarithm of the ratio of each step's time to the other's: what both share is in
        neither. All are steps without prompt tokens."""
        theirs = self._parts(other)
        parts = np.array([self._parts(step) + theirs for step in rounds])
        covariance = self._covariance[parts[:, :, None], parts[:, None, :]]
        variances = _OURS_LESS_THEIRS @ covariance @ _OURS_LESS_THEIRS
        counts = self._num_observed[parts[:, 2]]
        few = np.where((counts > 0) & (counts < SURE_AFTER), FEW_ERROR / np.maximum(counts, 1), 0.0)
        few[[step.shape == other.shape for step in rounds]] = 0.0
        found: list[float] = np.hypot(np.sqrt(np.maximum(variances, 0.0)), few).tolist()
        return found

    def correction(self, step: Step) -> float:
        """Return the factor that corrects the table's milliseconds of such a step."""
        return self._factor(self._parts(step)) * math.exp(self._noise / 2.0)

    @property
    def is_settled(self) -> bool:
        """Whether the machine's pace is known, so that a step that differs tells of its own kind."""
        return self._settling == 0

    def has_run(self, step: Step) -> bool:
        """Whether a step of this kind has been observed: of this shape at this batch size, or with this many prompt
        tokens."""
        return bool(self._num_observed[self._parts(step)[-1]])

    def observe(self, step: Step, ms: float, expected_ms: float = 0.0) -> None:
        """A step has taken so long, from the end of the step before it or its own start on, whichever is later.
        expected_ms: what was predicted when it was planned; 0: unknown, or without rounds."""
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
        table_ms, doubt = self.costs.step_ms(*step), 0.0
        if table_ms <= 0.0 or ms <= 0.0 or self._is_first_launch(step, ms):
            return
        self._grow(min(passed_s, MAX_DRIFT_S))
        is_sure = self._num_observed[own] >= SURE_AFTER
        ratio = math.log(ms / table_ms) if is_sure else self._middle_ratio(own, math.log(ms / table_ms))
        difference = _bounded(ratio - _bounded(sum(map(self._mean.item, parts))))
        variance = self._between(parts, parts)
        deviation = math.sqrt(variance + self._noise)
        if not is_sure:
            is_far = abs(difference) > OUTLIER * deviation
            if is_far or self._num_observed[own]:
                self._variances[own] += difference**2  # the table, or the steps of its kind before, were off
            if is_far:
                doubt = (DOUBT * difference) ** 2  # or this one is
        else:
            difference = min(max(difference, -OUTLIER * deviation), OUTLIER * deviation)
            if variance < self._noise:  # else a difference says little about the pace
                surprise = min(max(difference / deviation, -MAX_SURPRISE), MAX_SURPRISE)
                self._surprise += SURPRISE_WEIGHT * (surprise - self._surprise)
            if abs(self._surprise) > SURPRISE:
                self._change_pace(parts)
        self._settling = max(0, self._settling - 1)
        self._learn(parts, difference)
        self._variances[own] += doubt
        self._num_observed[own] += 1

    def _is_first_launch(self, step: Step, ms: float) -> bool:
        """Whether rounds took longer because they are the first of their kind: a graph goes to the device then."""
        kind = step.shape, step.num_requests
        if step.chunk_tokens or kind in self._launched:
            return False
        self._launched.add(kind)
        return ms > FIRST_LAUNCH * self.ms(step)

    def _middle_ratio(self, own: int, ratio: float) -> float:
        """The lower median of what the last three steps of a kind took over their table's time, while there are few:
        one may be a hiccup of the host, which delays the step that runs meanwhile."""
        last = self._few_ratios[own] = [*self._few_ratios.get(own, ()), ratio][-3:]
        return float(sorted(last)[(len(last) - 1) // 2])

    def _learn(self, parts: list[int], difference: float) -> None:
        """The filter's update by one step that was off by `difference`."""
        self._last_points = None
        shared = functools.reduce(np.add, [self._covariance[part] for part in parts])
        total = sum(shared.item(part) for part in parts) + self._noise
        self._mean += shared * (difference / total)
        self._covariance -= np.outer(shared, shared / total)
        told = (self._noise / total) ** 2  # a difference that the parts explain tells nothing of the noise
        self._noise = max(self._noise + NOISE_WEIGHT * told * (difference**2 - total), LEAST_NOISE**2)

    def _change_pace(self, parts: list[int]) -> None:
        """Steps of these parts have been slower or quicker for a while: that is first taken to be the pace. Whether
        what does not run has changed as much is to be seen."""
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
        """All parts become less certain, at most as uncertain as they were at first."""
        self._variances += np.minimum(self._drift * seconds, np.maximum(self._prior - self._variances, 0.0))

    def _between(self, parts: list[int], others: list[int]) -> float:
        item = self._covariance.item
        return float(sum(item(part, other) for part in parts for other in others))

    def _chunk_points(self, rounds: Step) -> tuple[list[float], list[float]]:
        """Milliseconds of steps with `rounds` and as many prompt tokens as the table has, by `CostTable.chunk_tokens`:
        without context, and what each pair of a prompt's token and one before its chunk adds. A plan asks often."""
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
        """Indices of the parts whose sum is a step's logarithm."""
        if step.chunk_tokens:
            at = min(step.chunk_tokens.bit_length(), self._last_chunk)
            return [0, self._first_chunk + 2 * at + (step.num_requests > 0)]
        batch = min(max(step.num_requests - 1, 0).bit_length(), self._num_batches - 1)
        return [0, 1 + step.shape, self._first_batch + step.shape * self._num_batches + batch]


def _bounded(logarithm: float) -> float:
    return min(max(logarithm, -MAX_LOG), MAX_LOG)
