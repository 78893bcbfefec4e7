"""The steps that a rank runs before its first request. Called by `workers.runner.build`."""

from workers.runner.layout import EngineLayout
from workers.runner.worker import Worker
from workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32

WARM_UP_TOKENS = 16


def warm_up(worker: Worker, layout: EngineLayout) -> None:
    """Run each kind of step once, so that the first request compiles nothing and what cannot run fails the start: a
    chunk that ends no prompt, a prompt and a round of every shape, greedy and random, and a prompt's first token with
    filters, penalties and log-probabilities. Slot 0 has no pages: all KV lands on the dummy page."""
    tokens = pack_i32([1] * WARM_UP_TOKENS)
    greedy, random = SamplingParams(WARM_UP_TOKENS, 0.0), SamplingParams(WARM_UP_TOKENS, 1.0)
    rest = SamplingParams(WARM_UP_TOKENS, 1.0, top_p=0.9, frequency_penalty=0.1, logprobs=1)
    beginning, whole = (Chunk(0, 0, tokens, next_token) for next_token in (1, -1))
    for number, sampling in enumerate((greedy, random, rest)):
        init = SlotInit(0, 0, WARM_UP_TOKENS, 2 * WARM_UP_TOKENS, sampling)
        chunks = (beginning, whole) if sampling is greedy else (whole,)  # a beginning samples nothing
        plans = [_prompt(number, layout, init, chunk) for chunk in chunks]
        if sampling is not rest:  # its rounds run the same kernels, and would be captured
            plans += [_round(number, layout, shape) for shape in range(len(layout.shapes))]
        for plan in plans:
            worker.submit(plan)
            worker.take()


def _prompt(step: int, layout: EngineLayout, init: SlotInit, chunk: Chunk) -> StepPlan:
    next_shape = layout.shapes.default if chunk.next_token < 0 else 0
    drafting = b"\1" if next_shape else b""
    return StepPlan(0, step, b"", 0, layout.max_position, next_shape, drafting, inits=(init,), chunks=(chunk,))


def _round(step: int, layout: EngineLayout, shape: int) -> StepPlan:
    return StepPlan(0, step, pack_i32([0]), shape, layout.max_position, shape, b"\1" if shape else b"")
