"""What an engine counts while it runs. Filled by the scheduler, read by the coordinator and by benchmarks.

Times are of the scheduler's clock, from `submit` on; the HTTP edge measures its own.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
_FIRST_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = tuple(float(step * 10**power) for power in range(5) for step in (1, 2, 5))


class HistogramCounts:
    """Observations per bucket: counts[i] of those <= bounds[i] and above the bound before; the last of all others."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._bounds = np.asarray(bounds)

    @property
    def counts(self) -> list[int]:
        """One per bucket."""
        counts: list[int] = self._counts.tolist()
        return counts

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Counts every one of `values`; about 6 us for 128 of them."""
        self._counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
        self.total += float(values.sum())


@dataclass
class SchedulerStats:
    """Totals since the start. The names are those of `cluster.transport.messages.EngineStats`, but

    accepted_histogram[k]: rounds that accepted k draft tokens. num_stale_results: results of an older worker group,
    dropped. inter_token_s: time between two steps that brought tokens, one observation per request and step (a round
    may bring several tokens at once). time_per_output_token_s: the mean over a finished request, first token excluded.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_stale_results: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    accepted_histogram: list[int] = field(default_factory=list)
    time_to_first_token_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_FIRST_S))
    inter_token_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_SHORT_S))
    time_per_output_token_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_SHORT_S))
    e2e_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_LONG_S))
    queue_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_LONG_S))
    request_prompt_tokens: HistogramCounts = field(default_factory=lambda: HistogramCounts(_TOKENS))
    request_generation_tokens: HistogramCounts = field(default_factory=lambda: HistogramCounts(_TOKENS))
    step_s: HistogramCounts = field(default_factory=lambda: HistogramCounts(_SHORT_S))

    @property
    def num_drafts(self) -> int:
        """Rounds that verified drafts."""
        return sum(self.accepted_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted in all rounds."""
        return sum(k * count for k, count in enumerate(self.accepted_histogram))

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[k]: rounds that accepted at least k + 1 draft tokens."""
        return tuple(sum(self.accepted_histogram[k + 1 :]) for k in range(len(self.accepted_histogram) - 1))

    def count_finished(self, reason: str) -> None:
        """One request more ended for `reason`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
