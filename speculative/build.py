"""From configuration to one rank that executes plans, with or without a draft. `cluster.assembly` calls this; so do
benchmarks and tests, so that all run the same engine."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attention.config import DraftAttention
from speculative.backends import Backends, ModelShape, draft_backends, needs_cpu_seq_lens, target_backends
from speculative.config import SpeculativeConfig
from speculative.decoding import EagleDecoding, round_shape
from speculative.draft_models.config import DraftConfig, read_draft_config
from speculative.draft_models.loading import load_draft
from speculative.drafter import DraftRunner
from workers.config import PLAIN, RoundShape, WorkerConfig
from workers.distributed.tp_group import SOLO, TPGroup, join_tp_group
from workers.models.config import ModelConfig
from workers.models.loading import PoolSize, load_target, pages_that_fit, read_target_config
from workers.runner.decoding import Autoregressive, DecodingStrategy
from workers.runner.deterministic import checked_deterministic
from workers.runner.model_runner import TargetRunner, resolve_device, resolve_dtype
from workers.runner.slot_table import SlotTable
from workers.runner.worker import Worker
from workers.sampling.sampler import Sampler
from workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32

if TYPE_CHECKING:
    from workers.runner.cuda_graph import GraphedDecoding

WARM_UP_TOKENS = 16

logger = logging.getLogger(__name__)

PhaseReport = Callable[[str, float], None]


@dataclass(frozen=True)
class EngineSpec:
    """One engine replica: the target's ranks, and the draft if it speculates."""

    worker: WorkerConfig
    speculative: SpeculativeConfig | None = None
    draft_attention: DraftAttention = field(default_factory=DraftAttention)


@dataclass(frozen=True)
class EngineLayout:
    """What follows from a spec and the checkpoints' config.json, the same on every rank and in the scheduler.

    shapes: kinds of round, index 0 plain. num_pages, slot_bytes: per rank, of the KV and of running requests' tables.
    max_model_len: prompt and answer tokens. max_position: positions that a step may touch. lookahead: tokens beyond a
    page that its KV depends on (the prefix cache's keys): 1 with a draft.
    """

    target: ModelConfig
    draft: DraftConfig | None
    shapes: tuple[RoundShape, ...]
    num_pages: int
    slot_bytes: int
    max_model_len: int
    max_position: int
    lookahead: int
    dtype: torch.dtype
    draft_tp: int


def plan_layout(spec: EngineSpec) -> EngineLayout:
    """Read and check the checkpoints' configurations; raises ValueError that names value, rule and remedy."""
    worker, speculative = spec.worker, spec.speculative
    target = read_target_config(worker.model, worker.tensor_parallel)
    dtype = resolve_dtype(worker.model.dtype, target.dtype, resolve_device(worker.model.device, 0))
    pools = [PoolSize.of(target, worker.tensor_parallel, dtype)]
    draft, draft_tp = None, 1
    shapes: tuple[RoundShape, ...] = (PLAIN,)
    if speculative is not None:
        draft = read_draft_config(speculative, target)
        draft_tp = _draft_tp(speculative, worker.tensor_parallel)
        shapes = (PLAIN, round_shape(speculative))
        pools.append(PoolSize.of(draft.model, draft_tp, dtype))
    max_model_len = worker.model.max_model_len or target.max_position
    # two rounds in flight past the last token
    max_position = max_model_len + 3 * max(shape.tail_tokens + shape.max_new_tokens for shape in shapes)
    slot_bytes = _slot_table(worker, max_position, target.vocab_size, torch.device("meta")).num_bytes
    return EngineLayout(
        target=target,
        draft=draft,
        shapes=shapes,
        num_pages=pages_that_fit(worker.cache, pools, slot_bytes),
        slot_bytes=slot_bytes,
        max_model_len=max_model_len,
        max_position=max_position,
        lookahead=0 if draft is None else 1,
        dtype=dtype,
        draft_tp=draft_tp,
    )


def _draft_tp(speculative: SpeculativeConfig, tensor_parallel: int) -> int:
    draft_tp = speculative.draft_tp or tensor_parallel
    if draft_tp not in (1, tensor_parallel):
        raise ValueError(
            f"speculative.draft_tp={draft_tp}: must be 1 (every rank holds the whole draft) or "
            f"tensor_parallel={tensor_parallel}"
        )
    return draft_tp


def build_worker(
    spec: EngineSpec, layout: EngineLayout, rank: int, address: str, report: PhaseReport = lambda phase, seconds: None
) -> Worker:
    """One rank, ready for plans. address: where the ranks meet ("tcp://host:port"); report hears each phase and its
    seconds. Raises ValueError where a checkpoint or backend does not fit."""
    device = resolve_device(spec.worker.model.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deterministic = checked_deterministic(spec.worker, layout.target, layout.dtype, device)
    backends, backends_of_draft = _backends(spec, layout, device, deterministic)
    clock = _Phases(report)
    # sums over peer memory are normed by one of two kernels, whichever suits the number of rows
    group = join_tp_group(rank, spec.worker.tensor_parallel, address, device, custom_all_reduce=not deterministic)
    clock.done("process group joined")
    slots = _slot_table(spec.worker, layout.max_position, layout.target.vocab_size, device)
    capture = layout.draft.capture if layout.draft else ()
    model = load_target(spec.worker.model, layout.target, group, device, layout.max_position, capture, deterministic)
    clock.done("target loaded")
    page_size = spec.worker.cache.page_size
    pool = PoolSize.of(layout.target, group.size, layout.dtype).make(layout.num_pages, page_size, device)
    target = TargetRunner(model, pool, backends)
    sampler = Sampler(slots, model.lm_head.shard)
    strategy: DecodingStrategy = Autoregressive(target, slots, sampler)
    if spec.speculative is not None and layout.draft is not None:
        draft = _draft_runner(spec, layout, target, group, backends_of_draft)
        clock.done("draft loaded")
        strategy = EagleDecoding(spec.speculative, target, draft, slots, sampler)
    clock.done("KV cache allocated")
    if _captures(spec, device, needs_cpu_seq_lens(backends, backends_of_draft), rank):
        strategy = graphed = _captured(strategy, slots, spec.worker, layout, group)
        clock.done(f"{len(graphed.captured)} graphs, {graphed.report.whole.num_bytes / 1e9:.1f} GB")
    worker = Worker(strategy, slots, group, spec.worker.debug)
    _warm_up(worker, layout)
    clock.done("warmed up")
    return worker


def _backends(
    spec: EngineSpec, layout: EngineLayout, device: torch.device, deterministic: bool
) -> tuple[Backends, Backends]:
    """Of the target and of the draft (none without one); raises ValueError where one cannot do what it is named for."""
    page_size = spec.worker.cache.page_size
    shape = ModelShape(layout.target, spec.worker.tensor_parallel, layout.dtype, page_size, device)
    span = None
    if deterministic:
        from attention.backends.triton_backend import fixed_span

        span = fixed_span(layout.max_model_len)
    target = target_backends(spec.worker.attention, shape, spec.speculative, span)
    if spec.speculative is None or layout.draft is None:
        return target, {}
    shape = ModelShape(layout.draft.model, layout.draft_tp, layout.dtype, page_size, device)
    return target, draft_backends(spec.draft_attention, shape, spec.speculative)


def _captures(spec: EngineSpec, device: torch.device, host_readers: str | None, rank: int) -> bool:
    """Whether rounds become CUDA graphs; a fallback is logged once, by rank 0."""
    wanted = device.type == "cuda" and spec.worker.cuda_graphs
    if wanted and host_readers is not None and rank == 0:
        logger.warning(
            "rounds run eagerly, without CUDA graphs, and wait for lengths on the host: attention backend "
            "%s reads them (needs_cpu_seq_lens); triton does not",
            host_readers,
        )
    return wanted and host_readers is None


def _warm_up(worker: Worker, layout: EngineLayout) -> None:
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
        plans = [StepPlan(0, number, b"", 0, layout.max_position, inits=(init,), chunks=(chunk,)) for chunk in chunks]
        if sampling is not rest:  # its rounds run the same kernels
            shapes = range(len(layout.shapes))
            plans += [StepPlan(0, number, pack_i32([0]), shape, layout.max_position) for shape in shapes]
        for plan in plans:
            worker.submit(plan)
            worker.take()


def _captured(
    strategy: DecodingStrategy, slots: SlotTable, worker: WorkerConfig, layout: EngineLayout, group: TPGroup
) -> "GraphedDecoding":
    """The strategy with its graphs; what is left out is logged once, by rank 0."""
    from workers.runner.cuda_graph import CudaRecorder, GraphedDecoding, bucket_sizes

    buckets = bucket_sizes(worker.scheduler.max_running)
    graphed = GraphedDecoding(strategy, slots, buckets, layout.max_position, CudaRecorder(), worker.graph_scope)
    with torch.inference_mode():
        report = graphed.capture(worker.graph_capture, group)
    if report.num_left_out and group.rank == 0:
        limits = worker.graph_capture
        logger.warning(
            "graph_capture: limit_s=%g or limit_gb=%g was used up, so that %d rounds with filters, penalties or "
            "log-probabilities run without a CUDA graph; raise them, or lower scheduler.max_running",
            limits.limit_s,
            limits.limit_gb,
            report.num_left_out,
        )
    return graphed


def _slot_table(worker: WorkerConfig, max_position: int, vocab_size: int, device: torch.device) -> SlotTable:
    max_pages = -(-max_position // worker.cache.page_size)
    return SlotTable(worker.scheduler.max_running, max_pages, vocab_size, device)


def _draft_runner(
    spec: EngineSpec, layout: EngineLayout, target: TargetRunner, group: TPGroup, backends: Backends
) -> DraftRunner:
    assert spec.speculative is not None and layout.draft is not None
    draft_group = group if layout.draft_tp == group.size else SOLO
    device = target.pool.k.device
    head = load_draft(
        spec.speculative, layout.draft, spec.worker.model, target.model, draft_group, device, layout.max_position
    )
    size = PoolSize.of(layout.draft.model, draft_group.size, layout.dtype)
    return DraftRunner(head, size.make(layout.num_pages, spec.worker.cache.page_size, device), backends)


class _Phases:
    """Seconds between phases."""

    def __init__(self, report: PhaseReport) -> None:
        self._report = report
        self._since = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        self._report(phase, now - self._since)
        self._since = now
