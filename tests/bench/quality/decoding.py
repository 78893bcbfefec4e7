"""What a local engine takes to decode some answers, without their prompts."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request


def accepted_tokens(requests: Iterable[Request]) -> int:
    """Return the drafted tokens that were accepted."""
    return sum(k * n for request in requests for k, n in enumerate(request.acceptance_histogram))


@dataclass
class Decoding:
    """Answers, and what they took without their prompts and first tokens.

    cpu_s: of this process.
    steps, reasons: number of steps by shape, and by why they had it.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Tokens after the first one of each answer."""
        return sum(len(request.output) - 1 for request in self.requests)

    @property
    def tokens_per_round(self) -> float:
        rounds = sum(request.num_rounds for request in self.requests)
        return 1 + accepted_tokens(self.requests) / max(1, rounds)

    def add(self, engine: LocalEngine, prompts: list[list[int]], sampling: SamplingParams, batch: int) -> None:
        """Answer `prompts`, `batch` at a time. The prompts alone are run before, and their time is subtracted."""
        stats = engine.scheduler.stats
        clocks = [(time.process_time(), time.perf_counter())]
        engine.generate(prompts, SamplingParams(1, 0.0), batch)
        clocks.append((time.process_time(), time.perf_counter()))
        steps, reasons = Counter(stats.steps_by_shape), Counter(stats.steps_by_reason)
        self.requests += engine.generate(prompts, sampling, batch)
        clocks.append((time.process_time(), time.perf_counter()))
        cpu_s, wall_s = (clocks[2][i] - 2 * clocks[1][i] + clocks[0][i] for i in range(2))
        self.cpu_s += cpu_s
        self.wall_s += wall_s
        self.steps += Counter(stats.steps_by_shape) - steps
        self.reasons += Counter(stats.steps_by_reason) - reasons
