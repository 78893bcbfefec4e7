"""What the choice of shapes takes of the host, against the same engine with one shape.

Rounds of a small model take as long as the host's part of them: 0.45 ms on an H200. So what a choice takes of the host
is lost, whatever it chooses. `python -m tests.support.simulation.host_time` prints microseconds a step.
"""

import cProfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from aerie.workers.config import RoundShapes
from tests.support.simulation.answers import Answers, embedded_pair
from tests.support.simulation.shapes import CHAIN, TREE

BLOCK = 20  # answers of each request that runs to one arm before the other's turn, so that both see the same machine
ARMS = {"static": False, "adaptive": True}


def engines(shapes: RoundShapes, batch: int) -> dict[str, Answers]:
    """After 200 steps, whose best shape is the default."""
    found = {}
    for arm, adaptive in ARMS.items():
        of = embedded_pair(shapes, 3.5)
        found[arm] = Answers(replace(of, shapes=replace(shapes, adaptive=adaptive)))
        found[arm].warm_up(batch)
    return found


def around(answers: Answers, wrapped: Callable[[Callable[[], Any]], Any]) -> None:
    """Have `wrapped` call what the scheduler does in each step."""
    scheduler = answers.scheduler
    schedule, apply = scheduler.schedule, scheduler.apply
    scheduler.schedule = lambda: wrapped(schedule)  # type: ignore[method-assign]
    scheduler.apply = lambda result: wrapped(lambda: apply(result))  # type: ignore[method-assign]


def host_us(shapes: RoundShapes, batch: int, num_blocks: int) -> dict[str, float]:
    """Microseconds of the scheduler in a step, by arm: the mean without what other processes interrupted."""
    of, took_us = engines(shapes, batch), {arm: list[float]() for arm in ARMS}
    for arm, answers in of.items():

        def timed(call: Callable[[], Any], took_us: list[float] = took_us[arm]) -> Any:
            began_s = time.perf_counter()
            result = call()
            took_us.append((time.perf_counter() - began_s) * 1e6)
            return result

        around(answers, timed)
    for _ in range(num_blocks):
        for answers in of.values():
            answers.tokens_per_ms(batch, BLOCK * batch)
    # a plan and a result each step
    return {arm: 2 * float(np.mean([us for us in each if us < 2000])) for arm, each in took_us.items()}


def num_calls(shapes: RoundShapes, batch: int) -> dict[str, float]:
    """Function calls of the scheduler in a step, by arm."""
    found = {}
    for arm, answers in engines(shapes, batch).items():
        profile, before = cProfile.Profile(), answers.scheduler.stats.num_steps  # counts in C
        around(answers, profile.runcall)
        answers.tokens_per_ms(batch, 30 * batch)
        count = sum(entry.callcount for entry in profile.getstats())
        found[arm] = count / (answers.scheduler.stats.num_steps - before)
    return found


def main() -> None:
    for name, shapes in (("chain", CHAIN), ("tree", TREE)):
        for batch in (1, 8, 32):
            us = host_us(shapes, batch, max(3, 20 // batch))
            extra = us["adaptive"] - us["static"]
            print(f"{name}, batch {batch}: static {us['static']:.0f} us a step, the choice {extra:.1f} us more")


if __name__ == "__main__":
    main()
