"""Requests of all kinds that come while others run, some of which are aborted. For tests that compare what ends with
plain decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.simulation.integrity import check_queues

Key = tuple[int, int]  # the numbers of a prompt and of a sampling


@dataclass
class Seen:
    """What runs have shown; requests, but for `accepted` drafts."""

    finished: int = 0
    accepted: int = 0
    preempted: int = 0
    aborted: int = 0


def serve_fuzzed(
    engine: LocalEngine,
    prompts: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    rng: Random,
    seen: Seen,
    count: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[tuple[Request, Key]]:
    """Run `count` requests with random prompts and samplings; returns those that were not aborted."""
    scheduler, concurrency = engine.scheduler, engine.scheduler.num_slots
    submitted: list[tuple[Request, Key]] = []
    aborted: set[str] = set()
    while len(submitted) < count or scheduler.num_running or scheduler.num_waiting:
        while len(submitted) < count and scheduler.num_waiting < 2:
            key = rng.randrange(len(prompts)), rng.randrange(len(samplings))
            request = Request(str(len(submitted)), prompts[key[0]], samplings[key[1]])
            submitted.append((request, key))
            scheduler.submit(request)
        victim = rng.choice(submitted[-concurrency:])[0].request_id
        if rng.random() < 0.04 and scheduler.abort(victim) is not None:
            aborted.add(victim)
            continue
        engine.step()
        after_step()
    check_queues(scheduler.queues)
    ended = [(request, key) for request, key in submitted if request.request_id not in aborted]
    for request, _ in ended:
        seen.accepted += sum(k * n for k, n in enumerate(request.acceptance_histogram))
        seen.preempted += request.num_preemptions
    seen.finished += len(ended)
    seen.aborted += len(aborted)
    return ended
