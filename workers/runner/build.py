"""From configuration to one rank that executes plans. A plain target needs nothing else; an engine with a draft hands
in its `workers.runner.layout.Speculation` (`speculative.build`). Serve, benchmarks and tests build the same."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attention.kv_cache.pool import KVPool
from workers.config import WorkerConfig
from workers.device import resolve_device
from workers.distributed.tp_group import TPGroup, join_tp_group
from workers.models.loading import load_target
from workers.runner.backends import Backends, ModelShape, chunks_on_device, needs_cpu_seq_lens, target_backends
from workers.runner.cost_probe import probe_costs
from workers.runner.decoding import DecodingStrategy
from workers.runner.deterministic import checked_deterministic
from workers.runner.layout import EngineLayout, EngineParts, PhaseDone, slot_table
from workers.runner.model_runner import TargetRunner
from workers.runner.warm_up import warm_up
from workers.runner.worker import Worker
from workers.sampling.sampler import Sampler

if TYPE_CHECKING:
    from workers.runner.cuda_graph import GraphedDecoding

logger = logging.getLogger(__name__)

PhaseReport = Callable[[str, float], None]


def build_worker(
    worker: WorkerConfig,
    layout: EngineLayout,
    rank: int,
    address: str,
    report: PhaseReport = lambda phase, seconds: None,
) -> Worker:
    """One rank, ready for plans. address: where the ranks meet ("tcp://host:port"). report: hears each phase and its
    seconds. Raises ValueError where a checkpoint or backend does not fit."""
    device = resolve_device(worker.model.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deterministic = checked_deterministic(worker, layout.target, layout.dtype, device)
    backends = _backends_of_target(worker, layout, device, deterministic)
    others = layout.speculation.backends(worker.cache.page_size, layout.dtype, device)
    phases = _Phases(report)
    # sums over peer memory are normed by one of two kernels, whichever suits the number of rows
    group = join_tp_group(rank, worker.tensor_parallel, address, device, custom_all_reduce=not deterministic)
    phases.done("process group joined")
    parts = load_parts(worker, layout, group, device, backends, deterministic, phases.done)
    strategy, tokens = layout.speculation.strategy(parts, others, phases.done), tuple[int, ...]()
    if rounds_are_graphs(worker, device, needs_cpu_seq_lens(backends, others), rank):
        with_chunks = not deterministic and chunks_on_device(backends, others)
        strategy = graphed = _captured(strategy, parts, with_chunks)
        tokens = graphed.token_buckets
        phases.done(f"{len(graphed.captured)} graphs, {graphed.report.whole.num_bytes / 1e9:.1f} GB")
    built = Worker(strategy, parts.slots, group, worker.debug)
    warm_up(built, layout)
    phases.done("warmed up")
    if worker.measure_costs:
        built.costs = probe_costs(strategy, parts.slots, group, layout, worker.cache.page_size, tokens)
        phases.done("costs measured")
    return built


def load_parts(
    worker: WorkerConfig,
    layout: EngineLayout,
    group: TPGroup,
    device: torch.device,
    backends: Backends,
    deterministic: bool = False,
    done: PhaseDone = lambda phase: None,
) -> EngineParts:
    """This rank's shard of the target with its KV pool and slots. backends: of the target. done: hears each phase."""
    slots = slot_table(worker, layout.max_position, layout.target.vocab_size, device)
    model = load_target(
        worker.model,
        layout.target,
        group,
        device,
        layout.max_position,
        layout.speculation.captured_layers,
        deterministic,
    )
    done("target loaded")
    groups = layout.target.kv_groups(group.size, layout.dtype)
    pool = KVPool(groups, layout.num_pages, worker.cache.page_size, device)
    done("KV cache allocated")
    target = TargetRunner(model, pool, backends)
    return EngineParts(worker, layout, group, target, slots, Sampler(slots, model.lm_head.shard))


def rounds_are_graphs(worker: WorkerConfig, device: torch.device, host_readers: str | None, rank: int) -> bool:
    """Whether rounds become CUDA graphs; a fallback is logged once, by rank 0. host_readers: what `needs_cpu_seq_lens`
    found."""
    wanted = device.type == "cuda" and worker.cuda_graphs
    if wanted and host_readers is not None and rank == 0:
        logger.warning(
            "rounds run eagerly, without CUDA graphs, and wait for lengths on the host: attention backend "
            "%s reads them (needs_cpu_seq_lens); triton does not",
            host_readers,
        )
    return wanted and host_readers is None


def _backends_of_target(
    worker: WorkerConfig, layout: EngineLayout, device: torch.device, deterministic: bool
) -> Backends:
    """Raises ValueError where one cannot do what it is named for."""
    shape = ModelShape(layout.target, worker.tensor_parallel, layout.dtype, worker.cache.page_size, device)
    span = None
    if deterministic:
        from attention.backends.triton_backend import fixed_span

        span = fixed_span(layout.max_model_len)
    return target_backends(worker.attention, shape, layout.speculation.verified_modes, span)


def _captured(strategy: DecodingStrategy, parts: EngineParts, with_chunks: bool) -> "GraphedDecoding":
    """The strategy with its graphs; what is left out is logged once, by rank 0."""
    from workers.runner.cuda_graph import GraphedDecoding, bucket_sizes, token_buckets
    from workers.runner.recorder import CudaRecorder

    buckets, limits = bucket_sizes(parts.worker.scheduler.max_running), parts.worker.graph_capture
    tokens = token_buckets(parts.layout.scheduler.step_token_limit) if with_chunks else ()
    graphed = GraphedDecoding(strategy, parts.slots, buckets, parts.layout.max_position, CudaRecorder(), tokens)
    with torch.inference_mode():
        report = graphed.capture(limits, parts.group)
    if report.num_left_out and parts.group.rank == 0:
        logger.warning(
            "graph_capture: limit_s=%g or limit_gb=%g was used up, so that %d kinds of steps (with prompt chunks, "
            "filters, penalties or log-probabilities) run without a CUDA graph; raise them, or lower "
            "scheduler.max_running",
            limits.limit_s,
            limits.limit_gb,
            report.num_left_out,
        )
    return graphed


class _Phases:
    """Reports the seconds since the phase before."""

    def __init__(self, report: PhaseReport) -> None:
        self._report = report
        self._since = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        self._report(phase, now - self._since)
        self._since = now
