"""The default pair speculates for a single stream after every start, whatever else the machine does meanwhile.

Real starts, which measure step costs; `tests/workers/scheduling/shapes/test_wrong_costs.py` simulates wrongly measured
costs.
"""

import dataclasses
import multiprocessing
import time

import pytest

from speculative.local import local_engine
from tests.support.embedded import CHAIN, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized
from workers.scheduling.plan import SamplingParams

LEARNING = 3  # questions, of some 60 steps each


def _spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "loaded"])
def test_a_single_stream_speculates_after_every_start(is_loaded: bool, number: int) -> None:
    """Three processes of others while the ranks start and for the first answers."""
    spec = embedded_spec(dataclasses.replace(CHAIN, adaptive=True, draft_tp=1), tensor_parallel=2, debug=False)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=True))
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_spin, args=(time.monotonic() + 60,), daemon=True) for _ in range(3 if is_loaded else 0)
    ]
    for other in others:
        other.start()
    try:
        prompts = tokenized(held_out_prompts(LEARNING + 5, seed=100 + number))
        sampling = SamplingParams(96, 0.0, stop_token_ids=eos_token_ids())
        with local_engine(spec) as engine:
            stats = engine.scheduler.stats
            engine.generate(prompts[:LEARNING], sampling, 1)
            before = dict(stats.steps_by_shape)
            for other in others:
                other.kill()
            requests = engine.generate(prompts[LEARNING:], sampling, 1)
            steps = {name: count - before.get(name, 0) for name, count in stats.steps_by_shape.items()}
    finally:
        for other in others:
            other.kill()
            other.join()
    tokens = sum(len(request.output) for request in requests)
    assert steps.get("3/1/4", 0) > 0.6 * sum(steps.values()), steps
    assert tokens > 1.5 * sum(steps.values()), (tokens, steps)
