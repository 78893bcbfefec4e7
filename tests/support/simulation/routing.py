"""Many engines and the choice between them, without processes: what a routing policy makes of tokens per second and of
first tokens.

    python -m tests.support.simulation.routing --replicas 2 4 16 64 256

Choice (`aerie.cluster.ingress.routing`), what engines tell of themselves (`aerie.cluster.coordinator.state_publisher`)
and their prefix caches are the real ones. Time is simulated, and an engine is a loop of steps whose costs are those of
`Engine`. Clients are closed loops: each sends its next request when the last one has ended. All figures are simulated.
"""

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.page_allocator import PageAllocator
from aerie.attention.kv_cache.prefix_cache import PrefixCache
from aerie.cluster.coordinator.state_publisher import PERIOD_S, StatePublisher
from aerie.cluster.ingress.routing import EngineView, Prompt, choose
from aerie.cluster.transport.channel import IngressLink
from aerie.cluster.transport.messages import EngineState
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.scheduler import Clock

Tokens = npt.NDArray[np.int32]
Policy = Callable[[dict[str, EngineView], Prompt, float, random.Random], str]

TOKENS_PER_ROUND = 3


@dataclass(frozen=True)
class Engine:
    """Dimensions and speed of each simulated engine. chunk_tokens: prompt tokens of a step at most."""

    num_slots: int = 32
    page_size: int = 64
    num_pages: int = 512
    chunk_tokens: int = 512
    step_ms: float = 5.0
    request_ms: float = 0.05
    prompt_token_ms: float = 0.1

    def cost_s(self, num_rounds: int, num_prompt_tokens: int) -> float:
        """Return the seconds of one step."""
        return (self.step_ms + self.request_ms * num_rounds + self.prompt_token_ms * num_prompt_tokens) / 1e3


@dataclass(frozen=True)
class Trace:
    """What clients ask for. num_prefixes: each request's prompt begins with one of so many, of `prefix_tokens` tokens;
    0: prompts have nothing in common. own_tokens, answer_tokens: means; lengths are uniform from half to one and a
    half."""

    num_prefixes: int
    prefix_tokens: int = 2048
    own_tokens: int = 96
    answer_tokens: int = 48

    def requests(self, seed: int) -> Iterator[tuple[Tokens, int]]:
        """Prompts and lengths of answers, endlessly."""
        rng = np.random.default_rng(seed)
        prefixes = [rng.integers(0, 2**31, self.prefix_tokens, np.int32) for _ in range(self.num_prefixes)]
        while True:
            own = rng.integers(0, 2**31, rng.integers(self.own_tokens // 2, self.own_tokens * 3 // 2), np.int32)
            answer = int(rng.integers(self.answer_tokens // 2, self.answer_tokens * 3 // 2))
            yield (np.concatenate((prefixes[rng.integers(self.num_prefixes)], own)) if prefixes else own), answer


@dataclass
class Request:
    """One, and where it stands. client: whose it is."""

    client: int
    tokens: Tokens
    num_answer: int
    sent_s: float
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    num_out: int = 0


class SimulatedEngine:
    """One engine, as `StatePublisher` sees a scheduler."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.allocator = PageAllocator(engine.num_pages)
        self.prefix_cache = PrefixCache(self.allocator, engine.page_size)
        self.weights, self.adapters = SimpleNamespace(epoch=0), SimpleNamespace(loaded=[], changes={})
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.is_stepping = False
        self.num_slots = engine.num_slots
        self.num_computed = 0  # prompt tokens
        self._chunk: list[tuple[Request, int]] = []
        self._rounds: list[Request] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def backlog_tokens(self) -> int:
        return sum(len(r.tokens) - r.computed for r in self.prefilling) + sum(
            len(r.tokens) - self.prefix_cache.num_cached(r.tokens) for r in self.waiting
        )

    def prefill_tokens_per_s(self) -> float:
        chunk = self.engine.chunk_tokens
        return chunk / self.engine.cost_s(len(self.decoding), chunk)

    def begin_step(self) -> float | None:
        """Plan a step; the seconds that it takes, or None if there is nothing to do."""
        self._admit()
        budget, self._chunk = self.engine.chunk_tokens, []
        for request in self.prefilling:
            count = min(budget, len(request.tokens) - request.computed)
            if count == 0:
                break
            self._chunk.append((request, count))
            budget -= count
        self._rounds = list(self.decoding)
        num_tokens = self.engine.chunk_tokens - budget
        self.num_computed += num_tokens
        self.is_stepping = bool(num_tokens or self._rounds)
        return self.engine.cost_s(len(self._rounds), num_tokens) if self.is_stepping else None

    def end_step(self) -> tuple[list[Request], list[Request]]:
        """Return what got its first token, and what has ended."""
        first, ended = [], []
        for request in self._rounds:
            request.num_out += TOKENS_PER_ROUND
            if request.num_out >= request.num_answer:
                self.decoding.remove(request)
                self.allocator.release(request.pages)
                ended.append(request)
        for request, count in self._chunk:
            request.computed += count
            if request.computed == len(request.tokens):
                self.prefilling.remove(request)
                self.decoding.append(request)
                self._share(request)
                request.num_out = 1
                first.append(request)
        return first, ended

    def _share(self, request: Request) -> None:
        """As `aerie.workers.scheduling.slot_pages` does it: who holds a page of the tree holds those before it."""
        for index, page in enumerate(self.prefix_cache.insert(request.tokens, request.pages)):
            if request.pages[index] != page:
                self.allocator.acquire((page,))
                self.allocator.release((request.pages[index],))
                request.pages[index] = page

    def _admit(self) -> None:
        size = self.engine.page_size
        while self.waiting and self.num_running < self.num_slots:
            request = self.waiting[0]
            cached = self.prefix_cache.match(request.tokens).pages
            need = -(-(len(request.tokens) + request.num_answer) // size) - len(cached)
            if need > self.allocator.num_available:
                self.allocator.release(cached)
                return
            self.prefix_cache.evict(need - self.allocator.num_free)
            request.pages = cached + self.allocator.allocate(need)
            request.computed = len(cached) * size
            self.prefilling.append(self.waiting.popleft())


def by_first_token(views: dict[str, EngineView], prompt: Prompt, now: float, chance: random.Random) -> str:
    """The product's choice."""
    name = choose(views, prompt, now, chance)
    assert name is not None
    return name


def by_load(views: dict[str, EngineView], prompt: Prompt, now: float, chance: random.Random) -> str:
    """The engine with the fewest requests, by the same knowledge."""
    name = choose(views, prompt, now, chance, routing="least_loaded")
    assert name is not None
    return name


@dataclass(frozen=True)
class Outcome:
    """Figures of the measured part. first_s: sorted times to the first token. computed: computed prompt tokens."""

    tokens_per_s: float
    first_s: tuple[float, ...]
    computed: int

    def first_percentile_s(self, share: float) -> float:
        return self.first_s[int((len(self.first_s) - 1) * share)]


class Simulation:
    """clients: of each engine, on average. num_ingresses: which know of each other's requests from the engines only."""

    def __init__(
        self,
        policy: Policy,
        trace: Trace,
        num_engines: int,
        clients: int,
        seed: int,
        engine: Engine,
        num_ingresses: int = 2,
    ) -> None:
        self._clock = Clock()
        self._policy = policy
        self._chance = random.Random(seed)
        self._requests = trace.requests(seed)
        self._engines = [SimulatedEngine(engine, self._clock) for _ in range(num_engines)]
        self._views: list[dict[str, EngineView]] = [
            {str(index): EngineView() for index in range(num_engines)} for _ in range(num_ingresses)
        ]
        self._publishers = [
            StatePublisher(str(index), cast(Scheduler, simulated), self._clock, self._teller(str(index)))
            for index, simulated in enumerate(self._engines)
        ]
        self._ingresses = [IngressLink(bytes([ingress])) for ingress in range(num_ingresses)]
        for publisher, ingress in itertools.product(self._publishers, self._ingresses):
            publisher.subscribe(ingress)
        for publisher in self._publishers:
            publisher.publish("ready", "", False, 0.0)
        self._num_clients = clients * num_engines
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._first_s: list[float] = []
        self._num_tokens = 0

    def run(self, warm_up_s: float, measured_s: float) -> Outcome:
        """Tokens and first tokens of `measured_s` seconds after `warm_up_s`."""
        for client in range(self._num_clients):
            self._at(self._chance.random(), lambda client=client: self._send(client))  # type: ignore[misc]
        for index in range(len(self._engines)):
            self._at(self._chance.random() * PERIOD_S, lambda index=index: self._tell(index))  # type: ignore[misc]
        self._until(warm_up_s)
        self._first_s, self._num_tokens = [], 0
        before = sum(engine.num_computed for engine in self._engines)
        self._until(warm_up_s + measured_s)
        computed = sum(engine.num_computed for engine in self._engines) - before
        return Outcome(self._num_tokens / measured_s, tuple(sorted(self._first_s)), computed)

    def _until(self, end_s: float) -> None:
        while self._events[0][0] < end_s:
            self._clock.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._counter), event))

    def _teller(self, name: str) -> Callable[[IngressLink, EngineState], None]:
        return lambda ingress, state: self._views[ingress.name[0]][name].update(state, self._clock.now)

    def _tell(self, index: int) -> None:
        publisher = self._publishers[index]
        publisher.publish_soon()
        publisher.publish("ready", "", False, 0.0)
        self._at(self._clock.now + PERIOD_S, lambda: self._tell(index))

    def _send(self, client: int) -> None:
        ingress = client % len(self._views)
        views, now = self._views[ingress], self._clock.now
        tokens, num_answer = next(self._requests)
        prompt = Prompt(cast(Any, tokens), b"")
        name = self._policy(views, prompt, now, self._chance)
        views[name].record_request(prompt, now)
        index = int(name)
        self._publishers[index].count_request(self._ingresses[ingress])
        self._engines[index].waiting.append(Request(client, tokens, num_answer, now))
        if not self._engines[index].is_stepping:
            self._begin_step(index)

    def _begin_step(self, index: int) -> None:
        step_s = self._engines[index].begin_step()
        if step_s is not None:
            self._at(self._clock.now + step_s, lambda: self._end_step(index))

    def _end_step(self, index: int) -> None:
        first, ended = self._engines[index].end_step()
        now = self._clock.now
        self._first_s += [now - request.sent_s for request in first]
        for request in ended:
            self._num_tokens += request.num_answer
        self._engines[index].is_stepping = False
        self._begin_step(index)
        for request in ended:
            self._send(request.client)


SHARED = Trace(num_prefixes=4)  # per engine: see `compare`
RANDOM = Trace(num_prefixes=0, own_tokens=512)


def simulate(
    policy: Policy,
    trace: Trace,
    num_engines: int,
    clients: int = 12,
    seed: int = 1,
    warm_up_s: float = 4.0,
    measured_s: float = 6.0,
    engine: Engine = Engine(),  # noqa: B008 - frozen
) -> Outcome:
    """One policy under one trace."""
    return Simulation(policy, trace, num_engines, clients, seed, engine).run(warm_up_s, measured_s)


def shared(num_engines: int) -> Trace:
    """Prefixes that one engine's cache cannot hold, and all engines' together can."""
    return Trace(num_prefixes=max(16, 4 * num_engines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| trace | replicas | policy | tokens/s | TTFT p50 ms | p90 ms | prompt tokens computed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num in args.replicas:
        for title, trace in (("shared", shared(num)), ("random", RANDOM)):
            for policy in (by_load, by_first_token):
                out = simulate(policy, trace, num, args.clients, args.seed, measured_s=args.seconds)
                p50, p90 = (out.first_percentile_s(share) * 1e3 for share in (0.5, 0.9))
                print(
                    f"| {title} | {num} | {policy.__name__} | {out.tokens_per_s:,.0f} | {p50:,.0f} | {p90:,.0f} "
                    f"| {out.computed:,} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
