"""The oracle of drafts and draft KV, whatever the scheduler did: those of the same text computed alone.

A draft is a function of the text and the sampling parameters, and so is the KV of every committed position. `Oracle`
computes both for a text as one prompt of one request, in pages that nobody else has. `WatchedRank` stands between a
local engine and its rank, and compares what the rank holds after every step. Neither asks the scheduler what it
reserved, or the plan what may be written.

    python -m tests.support.drafts.oracle --seconds 600

runs random schedules for as long and prints what was compared.
"""

import argparse
import dataclasses
import random
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.kernels.kv.batches import token_indices
from aerie.speculative.build import DraftSpeculation, EngineSpec, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.decoding import SpeculativeDecoding
from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import PLAIN, Device, GraphCapture, ModelSource, RoundShapes, SchedulerConfig, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.warm_up import graphed_strategy
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.engine_plans import build_worker
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.tiny_models import VOCAB, make_eagle, make_target

NO_DRAFT = -1
KV_TOLERANCE = 1e-3  # of values of about 1: float32 sums in another order; another request's KV differs by about 1
ORACLE_PAGE, ORACLE_PAGES = 64, 4


@dataclasses.dataclass(frozen=True)
class Drafted:
    """tokens: of the tree, its root first. parents: of its nodes. k, v: [length, layers, kv_heads, head_dim], the
    draft's KV."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    k: Tensor
    v: Tensor


def observe(worker: Worker, slot: int) -> Drafted:
    """The tree that `slot` will verify next, and the draft's KV of its committed positions."""
    strategy = worker._strategy._inner if isinstance(worker._strategy, GraphedDecoding) else worker._strategy
    assert isinstance(strategy, SpeculativeDecoding)
    tokens, parents = strategy._trees.drafted(torch.tensor([slot]))[0].tolist()
    pool, slots = strategy._draft.pool, worker._slots
    positions = torch.arange(int(slots.seq_len[slot]), device=slots.device).unsqueeze(0)
    where = token_indices(slots.page_table[slot : slot + 1], positions, pool.page_size).flatten()
    layers = [pool.layer(i) for i in range(strategy._draft.model.num_layers)]
    k = torch.stack([layer.k.flatten(0, 1)[where] for layer in layers], dim=1)
    v = torch.stack([layer.v.flatten(0, 1)[where] for layer in layers], dim=1)
    return Drafted(tuple(tokens), tuple(parents), k, v)


def engine_with(spec: EngineSpec, shapes: RoundShapes, captured: bool = False) -> EnginePlan:
    """An engine that may draft `shapes`."""
    engine = plan_engine(spec)
    assert isinstance(engine.speculation, DraftSpeculation)
    layout = dataclasses.replace(engine.layout, shapes=dataclasses.replace(shapes, eager=not captured))
    speculation = dataclasses.replace(engine.speculation, shapes=shapes)
    return dataclasses.replace(engine, speculation=speculation, layout=layout)


class Oracle:
    """One request at a time, its whole text as one chunk. shapes: of the trees that it can draft."""

    def __init__(self, spec: EngineSpec, shapes: RoundShapes) -> None:
        alone = dataclasses.replace(
            spec.worker,
            cache=CacheConfig(page_size=ORACLE_PAGE, num_pages=ORACLE_PAGES, prefix_cache=False),
            scheduler=SchedulerConfig(max_running=1, max_step_tokens=ORACLE_PAGE * ORACLE_PAGES),
        )
        spec = dataclasses.replace(spec, worker=alone)
        self._worker = build_worker(spec, engine_with(spec, shapes))
        self._known: dict[tuple[tuple[int, ...], int, bytes], Drafted] = {}
        self._step = 0

    def drafted(self, text: tuple[int, ...], shape: int, sampling: SamplingParams) -> Drafted:
        """Return what a request drafts in `shape` that has this text so far, the last token being its bonus token."""
        sampling = SamplingParams(
            100, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
        )
        key = (text, shape, msgspec.msgpack.encode(sampling))
        if key not in self._known:
            prompt = text[:-1]
            init = SlotInit(0, 0, len(prompt), len(prompt) + 100, sampling)
            plan = StepPlan(
                epoch=0,
                step=self._step,
                slots=b"",
                shape=0,
                max_kv_len=ORACLE_PAGE * ORACLE_PAGES,
                next_shape=shape,
                drafting=b"\1",
                page_updates=pack_i32([x for i in range(ORACLE_PAGES) for x in (0, i, i + 1)]),
                inits=(init,),
                chunks=(Chunk(0, 0, pack_i32(prompt), -1),),
            )
            self._step += 1
            self._worker.submit(plan)
            tokens = unpack_i32(self._worker.take().tokens).tolist()
            assert tokens == [text[-1]], f"alone the text goes on with {tokens}, not {text[-1]}"
            self._known[key] = observe(self._worker, 0)
        return self._known[key]


class WatchedRank:
    """A `StepExecutor` that compares its rank with the oracle after every step."""

    def __init__(self, worker: Worker, oracle: Oracle, scheduler: Scheduler, shapes: RoundShapes) -> None:
        self.costs = worker.costs
        self.graphs = worker.graphs
        self._worker = worker
        self._oracle = oracle
        self._scheduler = scheduler
        self._shapes = shapes
        self._texts: dict[int, list[int]] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self.num_drafts = self.num_kv = 0
        self.faults: list[str] = []

    @property
    def num_pending(self) -> int:
        return self._worker.num_pending

    def ready(self) -> bool:
        return self._worker.ready()

    def take(self) -> StepResult:
        return self._worker.take()

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        return self._worker.carry_out(command)

    def submit(self, plan: StepPlan) -> None:
        for init in plan.inits:
            self._texts[init.slot] = self._scheduler.queues.by_slot[init.slot].tokens.tolist()
            self._sampling[init.slot] = init.sampling
        self._worker.submit(plan)
        finals = [chunk.slot for chunk in plan.chunks if chunk.next_token < 0]
        emitted = self._worker._pending[-1].emitted
        emitted.wait()
        rows = emitted.rows.tolist()
        drafting = plan.drafting or bytes(len(rows))
        for slot, row, drafts in zip([*unpack_i32(plan.slots).tolist(), *finals], rows, drafting, strict=True):
            count, finish = row[emitted.num_tokens : emitted.num_tokens + 2]
            self._texts[slot] += row[:count]
            if count and not finish:
                self._compare(slot, plan.next_shape if drafts else 0, plan)

    def _compare(self, slot: int, shape: int, plan: StepPlan) -> None:
        seen, text, sampling = observe(self._worker, slot), tuple(self._texts[slot]), self._sampling[slot]
        step = plan.step
        assert bool(shape) == (sampling.speculative and plan.next_shape > 0), "not who speculates drafts"
        wanted = self._oracle.drafted(text, shape or self._shapes.default, sampling)
        assert len(seen.k) == len(text) - 1, "the slot's committed length differs from its text's"
        self.num_kv += 1
        num_written = len(seen.k) - _num_waiting(self._worker, slot)
        for name, ours, theirs in (("K", seen.k, wanted.k), ("V", seen.v, wanted.v)):
            wrong = ((ours - theirs)[:num_written].abs() > KV_TOLERANCE).flatten(1).any(1)
            if bool(wrong.any()):
                self.faults.append(
                    f"step {step}, slot {slot}: the draft's {name} differs at {wrong.nonzero().flatten().tolist()}"
                )
        if shape == 0:
            assert seen.tokens[:2] == (text[-1], NO_DRAFT), "a request without drafts has some"
            return
        self.num_drafts += 1
        nodes = slice(self._shapes[shape].width)
        if (seen.tokens[nodes], seen.parents[nodes]) != (wanted.tokens[nodes], wanted.parents[nodes]):
            self.faults.append(
                f"step {step}, slot {slot}, {len(text)} tokens: drafted {seen.tokens[nodes]}, alone "
                f"{wanted.tokens[nodes]}"
            )


def _num_waiting(worker: Worker, slot: int) -> int:
    """Rows of the draft's KV that plain rounds have not written yet (`aerie.speculative.step_parts`)."""
    strategy = worker._strategy
    backlog = strategy._backlog if isinstance(strategy, SpeculativeDecoding) else None
    if backlog is None or backlog._slots is None or slot not in backlog._slots.tolist():
        return 0
    return len(backlog._rounds)


@dataclasses.dataclass(frozen=True)
class Case:
    """One random schedule."""

    page_size: int
    num_pages: int
    max_step_tokens: int
    speculating: float  # share of requests that speculate
    prefix_cache: bool
    num_requests: int = 20
    captured: bool = False  # steps are replayed where production replays them
    longer: int = 0  # tokens more in every prompt


def run_case(spec: EngineSpec, oracle: Oracle, case: Case, shapes: RoundShapes, seed: int) -> WatchedRank:
    """Random arrivals and aborts of requests that share prefixes, two steps in flight; everything compared. With
    several shapes, which one is drafted changes at random."""
    rng = random.Random(seed)
    worker_config = dataclasses.replace(
        spec.worker,
        cache=CacheConfig(case.page_size, num_pages=case.num_pages, prefix_cache=case.prefix_cache),
        scheduler=SchedulerConfig(max_running=5, max_step_tokens=case.max_step_tokens),
    )
    spec = dataclasses.replace(spec, worker=worker_config)
    built = build_rank(spec.worker, engine_with(spec, shapes, case.captured), 0, "")
    worker, layout = built.worker, built.layout
    scheduler = Scheduler(
        worker_config.scheduler,
        worker_config.cache,
        layout.num_pages,
        layout.max_model_len,
        time.monotonic,
        layout.shapes,
        layout.lookahead,
        choose_shape=lambda shapes: rng.randrange(len(shapes)) if len(shapes) > 2 else shapes.default,
        num_snapshots=layout.num_snapshots if layout.bytes_per_snapshot else None,
        window=layout.window_sizes,
    )
    if case.captured and spec.worker.model.device == "cpu":  # on a GPU they are graphs anyway
        capture(worker, layout)
    rank = WatchedRank(worker, oracle, scheduler, shapes)
    engine = LocalEngine(scheduler, rank)
    waiting = [_request(rng, number, case.speculating, case.longer) for number in range(case.num_requests)]
    running: list[Request] = []
    while waiting or running:
        while waiting and rng.random() < 0.3:
            running.append(waiting.pop())
            scheduler.submit(running[-1])
        if running and rng.random() < 0.01:
            scheduler.abort(running.pop(rng.randrange(len(running))).request_id)
        engine.step()
        running = [request for request in running if request.state.value != "finished"]
    while rank.num_pending:
        scheduler.apply(rank.take())
    return rank


def capture(worker: Worker, layout: EngineLayout) -> None:
    """Record the worker's steps, and replay them from now on, as `aerie.workers.runner.build` has it on a GPU."""
    graphed = graphed_strategy(worker._strategy, worker._slots, layout, LazyRecorder())
    with torch.inference_mode():
        graphed.capture(GraphCapture(limit_s=1e9), SOLO)
    worker._strategy = graphed


def _request(rng: random.Random, number: int, speculating: float, longer: int) -> Request:
    family = random.Random(rng.randrange(3))
    shared = [family.randrange(2, VOCAB) for _ in range(40)][: rng.randint(0, 40)]
    prompt = shared + [rng.randrange(2, VOCAB) for _ in range(longer + rng.randint(1, 20))]
    temperature = rng.choice((0.0, 0.0, 0.8))
    sampling = SamplingParams(
        rng.randint(1, 40), temperature, seed=rng.randrange(1 << 30), speculative=rng.random() < speculating
    )
    return Request(f"r{number}", prompt, sampling)


def random_case(rng: random.Random) -> Case:
    """Few pages, so that requests are preempted, in most of them."""
    page_size = rng.choice((1, 2, 4, 8, 16))
    tokens = rng.choice((130, 180, 260, 1200))
    return Case(
        page_size=page_size,
        num_pages=max(tokens // page_size, 130 // page_size + 2),
        max_step_tokens=rng.choice((5, 16, 64)),
        speculating=rng.choice((0.2, 0.5, 0.8, 1.0)),
        prefix_cache=rng.random() < 0.7,
        captured=rng.random() < 0.5,
    )


CHAIN, TREE = TreeShape.of(3, 1, 4), TreeShape.of(4, 3, 10)
SHAPES = {
    "chain": RoundShapes((PLAIN, CHAIN), default=1),
    "tree": RoundShapes((PLAIN, TREE), default=1),
    "changing": RoundShapes(
        (PLAIN, CHAIN, TREE, TreeShape.of(1, 1, 2), TreeShape.of(6, 1, 7)), default=2, adaptive=True
    ),
}


def tiny_spec(folder: Path, device: Device = "cpu", **settings: int) -> EngineSpec:
    """A tiny pair in float32 whose draft is right about half the time. settings: of the target's configuration."""
    target = make_target(folder / "target", calm=0.01, **settings)
    eagle = str(make_eagle(folder / "eagle", target, copying=True))
    worker = WorkerConfig(ModelSource(path=str(target), dtype="float32", device=device), measure_costs=False)
    return EngineSpec(worker, SpeculativeConfig(eagle, "eagle", 3, 1, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        spec = tiny_spec(Path(folder), args.device)
        oracles = {name: Oracle(spec, shapes) for name, shapes in SHAPES.items()}
        end, seed, drafts, kv, faults, preempted = time.monotonic() + args.seconds, args.seed, 0, 0, 0, 0
        while time.monotonic() < end:
            name = list(SHAPES)[seed % len(SHAPES)]
            case = random_case(random.Random(seed))
            rank = run_case(spec, oracles[name], case, SHAPES[name], seed)
            drafts, kv, faults = drafts + rank.num_drafts, kv + rank.num_kv, faults + len(rank.faults)
            preempted += rank._scheduler.stats.num_preemptions
            for fault in rank.faults[:3]:
                print(f"seed {seed}, {name}, {case}: {fault}", flush=True)
            seed += 1
    print(f"{seed - args.seed} schedules, {preempted} preemptions: {drafts} drafts and the draft KV of {kv} texts "
          f"compared, {faults} differ")  # fmt: skip
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
