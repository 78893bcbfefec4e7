"""The default pair speculates for a single stream after every start, whatever else the machine does meanwhile.

Real starts, which measure step costs; `tests/workers/scheduling/shapes/test_wrong_costs.py` simulates wrongly measured
costs. `pytest -s -m slow tests/speculative/test_starts.py`, some 30 s a start
"""

import dataclasses
import multiprocessing
import time

import msgspec
import pytest
import yaml

from aerie.deploy.config.files import starting_point
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.embedded import embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized

LEARNING = 3  # questions, of some 60 steps each


def _default_spec() -> EngineSpec:
    """The engine that `aerie serve` starts: its draft, whatever it is, and its ranks."""
    arguments = yaml.safe_load(starting_point("eagle"))["applications"][0]["args"]
    draft = SpeculativeConfig(**arguments["speculative"])
    spec = embedded_spec(draft, tensor_parallel=arguments["parallel"]["tensor_parallel"], debug=False)
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=True))


def _spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "loaded"])
def test_a_single_stream_speculates_after_every_start(is_loaded: bool, number: int) -> None:
    """Three processes of others while the ranks start and for the first answers."""
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_spin, args=(time.monotonic() + 60,), daemon=True) for _ in range(3 if is_loaded else 0)
    ]
    for other in others:
        other.start()
    try:
        prompts = tokenized(held_out_prompts(LEARNING + 5, seed=100 + number))
        drafting = SamplingParams(96, 0.0, stop_token_ids=eos_token_ids())
        plain = msgspec.structs.replace(drafting, speculative=False)
        with local_engine(_default_spec()) as engine:
            stats = engine.scheduler.stats
            engine.generate(prompts[:LEARNING], drafting, 1)
            for other in others:
                other.kill()
            num_steps, num_plain, num_tokens, took_s = 0, 0, 0, [0.0, 0.0]
            for prompt in prompts[LEARNING:]:
                for kind, sampling in enumerate((drafting, plain)):
                    before, began_s = dict(stats.steps_by_shape), time.monotonic()
                    [request] = engine.generate([prompt], sampling, 1)
                    took_s[kind] += time.monotonic() - began_s
                    if sampling is drafting:
                        steps = {name: count - before.get(name, 0) for name, count in stats.steps_by_shape.items()}
                        num_steps += sum(steps.values())
                        num_plain += steps.get("plain", 0)
                        num_tokens += len(request.output)
    finally:
        for other in others:
            other.kill()
            other.join()
    ratio = took_s[1] / took_s[0]
    print(
        f"{ratio:.2f} of plain decoding; {num_tokens / num_steps:.2f} tokens a step, {num_plain} of {num_steps} plain"
    )
    assert num_tokens > 1.5 * num_steps
    assert ratio > 0.97
