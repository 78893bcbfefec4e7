"""Drives a scheduler and a scripted rank with KV model, checking the scheduler's invariants at every step."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.window_pages import WindowSizes
from aerie.workers.config import PLAIN, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, unpack_i32
from aerie.workers.scheduling.request import (
    FinishReason,
    Owner,
    QueueFullError,
    Request,
    RequestOutput,
    RequestState,
    RequestTooLargeError,
)
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.scripted import KvModel, ScriptedExecutor, StateModel, scripted_output
from tests.support.simulation.integrity import check_queues

TREE = RoundShape(name="tree", width=6, max_new_tokens=4, draft_tokens=5)


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """max_in_flight plans are made before the first result is read. Everything a request emits is collected."""

    def __init__(
        self,
        page_size: int = 4,
        num_pages: int = 60,
        max_running: int = 4,
        max_step_tokens: int = 16,
        max_model_len: int = 100,
        max_waiting: int | None = 100,
        lookahead: int = 1,
        speculative: bool = True,
        prefix_cache: bool = True,
        max_in_flight: int = 2,
        costs: CostTable | None = None,
        itl_target_ms: float | Literal["auto"] = "auto",
        num_snapshots: int | None = None,
        state_interval: int = 0,
        window: WindowSizes | None = None,
    ) -> None:
        """num_snapshots: of a model with recurrent layers. window: of a model whose layers keep only a window."""
        self.shapes = RoundShapes((PLAIN, TREE), default=1) if speculative else RoundShapes()
        self.clock = Clock()
        self.page_size, self.lookahead, self.num_pages = page_size, lookahead, num_pages
        self.max_running, self.max_in_flight = max_running, max_in_flight
        self.max_step_tokens = max_step_tokens
        self.width = -(-(max_model_len - 1 + self.shapes.max_kv_tokens) // page_size)
        self.scheduler = Scheduler(
            SchedulerConfig(max_running, max_step_tokens, max_waiting, itl_target_ms),
            CacheConfig(page_size=page_size, prefix_cache=prefix_cache, state_interval=state_interval or page_size * 4),
            num_pages,
            max_model_len,
            self.clock,
            self.shapes,
            lookahead,
            num_snapshots=num_snapshots,
            window=window,
        )
        self.window = window
        self.has_states = num_snapshots is not None
        if costs is not None:
            self.scheduler.use_costs(costs)
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.plans: list[StepPlan] = []
        self.peak_running = 0
        self.new_worker_group(0)

    def new_worker_group(self, epoch: int) -> None:
        """A fresh rank with empty memory."""
        kv = KvModel(self.num_pages, self.page_size, self.lookahead, self.window)
        states = StateModel(self.max_running) if self.has_states else None
        self.executor = ScriptedExecutor(self.shapes, self.max_running, self.width, kv, self.prompts, states=states)
        self.backlog: deque[StepPlan] = deque()  # the rank takes two at most
        if epoch:
            self.scheduler.requeue_all(epoch)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 10,
        output: list[int] | None = None,
        seed_of: Request | None = None,
        owner: Owner = Owner(),  # noqa: B008 - immutable
        **sampling: object,
    ) -> Request:
        """Queue a request; its seed is its number, or that of another request with the same prompt."""
        number = len(self.outputs)
        seed = number if seed_of is None else seed_of.sampling.seed
        request = Request(
            f"r{number}",
            prompt,
            SamplingParams(max_tokens=max_tokens, seed=seed, **sampling),  # type: ignore[arg-type]
            output=list(output or []),
            owner=owner,
        )
        self.scheduler.submit(request)
        self.prompts[seed] = prompt
        self.outputs[request.request_id] = list(output or [])
        return request

    def schedule(self) -> StepPlan | None:
        """One plan, checked and sent."""
        plan = self.scheduler.schedule()
        check_queues(self.scheduler.queues)
        if plan is not None:
            self.plans.append(plan)
            self.peak_running = max(self.peak_running, len(unpack_i32(plan.slots)))
            assert sum(len(chunk.tokens) // 4 for chunk in plan.chunks) <= self.max_step_tokens
            started = {init.slot for init in plan.inits}
            assert started <= {chunk.slot for chunk in plan.chunks}, "a slot begins without a chunk"
            self.backlog.append(plan)
        return plan

    def read(self) -> list[RequestOutput]:
        """The oldest result."""
        self.executor.submit(self.backlog.popleft())
        outputs = self.scheduler.apply(self.executor.take())
        check_queues(self.scheduler.queues)
        for output in outputs:
            request_id = output.request.request_id
            assert request_id not in self.finished, "tokens after the end"
            assert output.tokens, "an output without tokens"
            self.outputs[request_id] += output.tokens
            assert self.outputs[request_id] == output.request.output
            if output.finish_reason is not None:
                self.finished[request_id] = output.finish_reason
        return outputs

    def step(self) -> bool:
        """Plan ahead as far as allowed, then read one result; False if there was nothing to do."""
        self.clock.now += 0.01
        while self.scheduler.num_in_flight < self.max_in_flight and self.schedule() is not None:
            pass
        if not self.backlog:
            assert self.scheduler.num_running == 0 and self.scheduler.num_waiting == 0, "requests wait for nothing"
            return False
        self.read()
        return True

    def finish(self, max_steps: int = 5000) -> None:
        """All requests to their end."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def run(self) -> None:
        """All requests to their end; then, with the prefix cache emptied, every page must have come home."""
        self.finish()
        allocator = self.scheduler.allocator
        assert allocator.num_held == 0, "pages are held by nobody's request"
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.evict(allocator.num_pages)
        assert allocator.num_free == allocator.num_pages
        assert allocator.windows is None or allocator.windows.num_free == allocator.windows.num_window_pages

    def check_output(self, request: Request) -> None:
        """A finished request emitted exactly its script."""
        assert request.state is RequestState.FINISHED
        assert request.output == scripted_output(len(request.prompt), request.sampling)
        assert request.output == self.outputs[request.request_id]


def random_history(
    sim: Simulation,
    rng: random.Random,
    num_requests: int,
    submit: Callable[[Sequence[Request]], Request],
    abort_chance: float = 0.03,
) -> int:
    """Submit requests at random times, abort some, and lose the worker group now and then, until all have ended.
    Check what each that was not aborted emits. Return how many were aborted.

    submit: submits a request, given the former ones. It may be refused.
    abort_chance: of each step.
    """
    requests: list[Request] = []
    aborted: set[str] = set()
    while len(requests) < num_requests:
        if rng.random() < 0.3:
            try:
                requests.append(submit(requests))
            except (QueueFullError, RequestTooLargeError):
                continue
        if rng.random() < abort_chance and requests:
            victim = rng.choice(requests)
            if sim.scheduler.abort(victim.request_id) is not None:
                aborted.add(victim.request_id)
                assert victim.state is RequestState.FINISHED
            check_queues(sim.scheduler.queues)
        if rng.random() < 0.01:
            sim.new_worker_group(sim.scheduler.epoch + 1)
        sim.step()
    sim.run()
    for request in requests:
        if request.request_id in aborted:
            assert request.request_id not in sim.finished
        else:
            sim.check_output(request)
    assert len(sim.finished) + len(aborted) == len(requests)
    return len(aborted)


def random_prompt(rng: random.Random, max_len: int) -> list[int]:
    """A prompt that often begins like others do."""
    family = rng.randrange(4)
    length = rng.randint(1, max_len)
    own = rng.randint(0, length)
    return [family * 10 + i % 7 for i in range(length - own)] + [rng.randrange(50) for _ in range(own)]
