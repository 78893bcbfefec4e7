"""Builds one rank from a configuration. `aerie.speculative.build` passes the `aerie.workers.runner.layout.Speculation`
of an engine with a draft. Used by Serve, benchmarks and tests."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.recurrent.layout import saved_dtype
from aerie.attention.recurrent.pool import StatePool
from aerie.attention.registry import Choice, choose_backends, deterministic_backend
from aerie.kernels import contracts
from aerie.kernels.capability import Capability
from aerie.kernels.kv.stored_values import FP8, KVScales
from aerie.workers.config import WorkerConfig
from aerie.workers.device import make_current, resolve_device
from aerie.workers.distributed.tp_group import TPGroup, join_tp_group
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.layers.attention import kv_scales, warn_of_missing
from aerie.workers.layers.gated_delta_net import recurrent_weights
from aerie.workers.lora.base_copies import BaseCheckpoint
from aerie.workers.models.decoder import TargetModel
from aerie.workers.models.loading import allocate_target, load_target, weight_names
from aerie.workers.quantization.kv_scheme import kv_dtype
from aerie.workers.runner.backends import (
    Backends,
    ModelShape,
    chunks_on_device,
    cpu_length_readers,
    target_backends,
    target_choices,
)
from aerie.workers.runner.costs.cost_probe import probe_costs
from aerie.workers.runner.decoding import DecodingStrategy
from aerie.workers.runner.deterministic import checked_deterministic
from aerie.workers.runner.graphs.compile_jobs import CompileProcesses
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import GraphKey
from aerie.workers.runner.graphs.kernel_compilation import report_compilations
from aerie.workers.runner.graphs.step_capture import CudaRecorder
from aerie.workers.runner.graphs.warm_up import (
    compile_ahead,
    first_graphs,
    graphed_strategy,
    largest_steps,
    rounds_are_graphs,
    run,
    warm_up,
)
from aerie.workers.runner.layout import EngineParts, EnginePlan, PhaseDone, slot_table
from aerie.workers.runner.memory import RankMemory, StepPeaks, device_memory, must_fit
from aerie.workers.runner.model_runner import TargetRunner
from aerie.workers.runner.rank_adapters import RankAdapters
from aerie.workers.runner.routed_experts import ExpertRecord
from aerie.workers.runner.transfer.checksums import WeightChecker
from aerie.workers.runner.transfer.session import WeightTransfer
from aerie.workers.runner.weight_update import META, RunningModel, WeightUpdate
from aerie.workers.runner.worker import Worker
from aerie.workers.sampling import Sampler, ranked_rows
from aerie.workers.scheduling.commands.command import LoadWeights, SumWeights
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.structured_output.mask_table import MaskTable
from aerie.workers.structured_output.slot_grammars import SlotGrammars
from aerie.workers.timer import Timer
from aerie.workers.vision.tower import VisionTower

logger = logging.getLogger(__name__)

PhaseReport = Callable[[str, float], None]
PhaseAdvance = Callable[[str, float, float, str], None]  # phase, amount done, total amount, unit


@dataclass(frozen=True)
class BuiltRank:
    """A rank that is ready for plans. layout: complete, with numbers for "auto"."""

    worker: Worker
    layout: EngineLayout


def build_rank(
    worker: WorkerConfig,
    engine: EnginePlan,
    rank: int,
    address: str,
    report: PhaseReport = lambda phase, seconds: None,
    compilers: CompileProcesses | None = None,
    advance: PhaseAdvance = lambda phase, done, total, unit: None,
) -> BuiltRank:
    """Build one rank.

    address: rendezvous of the ranks ("tcp://host:port").
    report: called after each phase with its name and seconds.
    compilers: processes that compile kernels; closed afterwards. None: threads compile.
    advance: called with the progress of long phases.
    Raises ValueError if a checkpoint or backend does not fit, or if memory does not suffice.
    """
    if worker.debug:
        contracts.check_every_call()
    device = resolve_device(worker.model.device, rank)
    make_current(device)
    capability = Capability.of(device)
    deterministic = checked_deterministic(worker, engine.target, engine.dtype, capability)
    backends = _backends_of_target(worker, engine, device, deterministic)
    others = choose_backends(engine.speculation.attention(worker.cache.page_size, engine.dtype, capability))
    phases = _Phases(report)
    memory = RankMemory(device_memory(device), worker, engine.layout, device)
    group = join_tp_group(rank, worker.tensor_parallel, address, device, ordered=deterministic)
    phases.done("process group joined")
    parts = load_parts(worker, engine, group, backends, memory, deterministic, phases.done, advance)
    with memory.counting_weights(), must_fit("the draft", "raise parallel.tensor_parallel"):
        strategy = engine.speculation.strategy(parts, others, phases.done)
    eager = parts.worker_of(strategy)
    graphed, first = None, frozenset[GraphKey]()
    if rounds_are_graphs(worker, capability, cpu_length_readers(backends, others), rank):
        with_chunks = chunks_on_device(backends, others)
        graphed = graphed_strategy(strategy, parts.slots, parts.layout, CudaRecorder(), with_chunks, parts.tower)
        first = first_graphs(graphed, parts.layout, worker.cache.page_size, device)
        launch = () if parts.adapters is None else (parts.adapters.launch_kernels,)
        phases.done(compile_ahead(graphed, first, group, compilers, *launch))
    parts = _with_pages(parts, memory, eager, 0 if graphed is None else graphed.num_always_captured, phases.done)
    phases.done("KV cache allocated")
    built = eager
    if graphed is not None:
        _capture_first(graphed, first, parts, memory, advance)
        phases.done(f"{graphed.graphs.num_captured} graphs, {graphed.graphs.num_waiting} follow")
        built = parts.worker_of(graphed, graphed)
    _register_commands(built, parts, device)
    _warm_up(built, parts, deterministic)
    phases.done("warmed up")
    layout = replace(parts.layout, memory=memory.use(parts.layout, built.graphs, group))
    if memory.runs_steps:
        _run_largest_steps(eager, parts, phases.done)
    if worker.measure_costs:
        tokens = () if graphed is None else graphed.token_buckets
        built.costs = _measured_costs(graphed or strategy, parts, tokens, device)
        phases.done("costs measured")
    if graphed is not None:
        report_compilations(True)
    return BuiltRank(built, layout)


def _warm_up(built: Worker, parts: EngineParts, deterministic: bool) -> None:
    tower = parts.tower
    warm_up(built, parts.layout, None if tower is None else tower.small(), deterministic)
    if tower is not None:
        tower.clear()  # the scheduler knows nothing of that image


def _run_largest_steps(eager: Worker, parts: EngineParts, done: PhaseDone) -> None:
    """Run the largest steps, whose memory torch's allocator caches."""
    with must_fit("the largest step", "lower cache.memory_share, or stop what else allocates on this GPU"):
        for _, plan in largest_steps(parts.layout):
            run(eager, plan)
    done("largest steps again")


def _capture_first(
    graphed: GraphedDecoding,
    first: frozenset[GraphKey],
    parts: EngineParts,
    memory: RankMemory,
    advance: PhaseAdvance,
) -> None:
    """Capture the graphs of a start: `first`, and those that are always captured."""
    remedy = "lower graph_capture.limit_gb, scheduler.max_running or cache.memory_share"
    with torch.inference_mode(), must_fit("CUDA graphs", remedy):
        graphed.capture(
            memory.capture_limits(parts.group, parts.layout.scheduler.num_slots),
            parts.group,
            first,
            advance=lambda done, total: advance("capturing graphs", done, total, "graphs"),
        )


def _register_commands(built: Worker, parts: EngineParts, device: torch.device) -> None:
    """Let the rank carry out commands: about weights, adapters and the experts that ran."""
    transfer = WeightTransfer(parts.models, parts.group, device)
    transfer.register(built.handlers)
    built.handlers.add(SumWeights, WeightChecker(parts.models))
    built.handlers.add(LoadWeights, WeightUpdate(parts.models, parts.group, device, transfer))
    if parts.adapters is not None:
        parts.adapters.register(built.handlers)
        parts.adapters.launch_kernels()
    if parts.experts is not None:
        parts.experts.register(built.handlers)


def _measured_costs(
    strategy: DecodingStrategy, parts: EngineParts, token_buckets: Sequence[int], device: torch.device
) -> CostTable:
    """Measure step times, and those of images."""
    page_size = parts.worker.cache.page_size
    costs = probe_costs(strategy, parts.slots, parts.group, parts.layout, page_size, token_buckets, parts.states)
    if parts.tower is None:
        return costs
    patches, image_ms = parts.tower.costs(Timer(device), parts.group)
    return msgspec.structs.replace(costs, image_patches=patches, image_ms=image_ms)


def load_parts(
    worker: WorkerConfig,
    engine: EnginePlan,
    group: TPGroup,
    backends: Backends,
    memory: RankMemory,
    deterministic: bool = False,
    done: PhaseDone = lambda phase: None,
    advance: PhaseAdvance = lambda phase, done, total, unit: None,
) -> EngineParts:
    """Load this rank's shard of the target. Decide the number of slots and allocate them, and a KV pool of one page.

    backends: the target's.
    done: called after each phase.
    advance: called with the progress of loading.
    """
    device, name = memory.device, f"model {worker.model.path}"
    model, tower = _load_models(worker, engine, group, memory, deterministic, advance)
    done("target loaded")
    layout = memory.settle_slots(engine.layout, group)
    with must_fit(f"the tables of {layout.scheduler.num_slots} requests", "lower scheduler.max_running"):
        slots = slot_table(layout, engine.target.vocab_size, device)
        masks = MaskTable(layout.scheduler.num_slots, layout.mask_width, engine.target.vocab_size, device)
    groups = engine.target_groups(group.size), engine.speculation.kv_groups(engine.dtype)
    scales: tuple[dict[int, KVScales], ...] = (kv_scales(model), {})
    if engine.kv_dtype == FP8 and group.rank == 0:
        warn_of_missing(model, name)
    pool, draft_pool = (
        KVPool(layers, 1, worker.cache.page_size, device, of, worker.cache.releasable)
        for layers, of in zip(groups, scales, strict=True)
    )
    recurrent = engine.target.state_groups(group.size, engine.dtype)
    with must_fit(f"the states of {layout.scheduler.num_slots} requests", "lower scheduler.max_running"):
        sizes = layout.state_sizes, layout.scheduler.num_slots, device, recurrent_weights(model)
        states = StatePool(recurrent, *sizes, saved_dtype(layout.cache), deterministic) if recurrent else None
    names = weight_names(engine.target, name)
    adapters = None
    if worker.lora is not None:
        remedy = "lower lora.max_loras or lora.max_lora_rank"
        with memory.counting_weights(), must_fit("the tables of adapters", remedy):
            base, indices = BaseCheckpoint.of(worker.model, names), slots.values["adapter"]
            rows = _max_head_rows(layout, model)
            adapters = RankAdapters(model, base, worker.lora, indices, rows, name, deterministic)
        done(f"{len(worker.lora.modules)} adapters loaded")
    row_index = None if adapters is None else adapters.row_index
    target = TargetRunner(model, pool, backends, states, row_index, worker.cache.routed_experts)
    experts = ExpertRecord(model, pool, group.rank) if worker.cache.routed_experts else None
    sampler = Sampler(slots, model.lm_head.shard, masks)
    tolerates_violations = engine.speculation.has_synthetic_acceptance
    grammars = SlotGrammars(worker.model.path, engine.target.vocab_size, masks, tolerates_violations)
    own = layout.max_position, engine.speculation.captured_layers, engine.dtype, name
    running = RunningModel(name, model, names, lambda: allocate_target(engine.target, group, META, *own))
    models = {"target": running}
    return EngineParts(
        worker,
        layout,
        group=group,
        target=target,
        draft_pool=draft_pool,
        slots=slots,
        sampler=sampler,
        grammars=grammars,
        models=models,
        tower=tower,
        adapters=adapters,
        experts=experts,
    )


def _max_head_rows(layout: EngineLayout, model: TargetModel) -> int:
    """Return the maximum rows of the vocabulary head, in rounds and at ends of prompts, or for log-probabilities."""
    widest = max(shape.width for shape in layout.shapes.shapes)
    return max(layout.scheduler.num_slots * widest, ranked_rows(model.lm_head.shard))


def _load_models(
    worker: WorkerConfig,
    engine: EnginePlan,
    group: TPGroup,
    memory: RankMemory,
    deterministic: bool,
    advance: PhaseAdvance,
) -> tuple[TargetModel, VisionTower | None]:
    """Load this rank's shard of the target, and its vision tower. Arguments as for `load_parts`."""
    with memory.counting_weights(), must_fit("the weights", "raise parallel.tensor_parallel, or take a smaller dtype"):
        model = load_target(
            worker.model,
            engine.target,
            group,
            memory.device,
            engine.layout.max_position,
            engine.speculation.captured_layers,
            deterministic,
            lambda loaded, total: advance("loading the target", loaded / 1e9, total / 1e9, "GB"),
            adapted=worker.lora is not None,
        )
    if engine.vision is None or engine.layout.images is None:
        return model, None
    with memory.counting_weights(), must_fit("the vision tower", "set model.images=off, or raise tensor_parallel"):
        images, device = engine.layout.images, memory.device
        return model, VisionTower(engine.vision, worker.model, images, engine.dtype, device, worker.cuda_graphs)


def _with_pages(parts: EngineParts, memory: RankMemory, eager: Worker, num_graphs: int, done: PhaseDone) -> EngineParts:
    """Decide the number of KV pages, allocate them, and return the parts with the new layout.

    eager: whether steps run without graphs.
    num_graphs: graphs that are always captured.
    done: called after each phase.
    """
    layout = parts.layout
    if layout.memory is None:
        peaks = StepPeaks()
        if memory.runs_steps:
            with must_fit("the largest step", "lower scheduler.max_step_tokens or scheduler.max_running"):
                peaks = memory.step_peaks(eager, layout)
                if parts.tower is not None and layout.images is not None:
                    peaks = memory.with_images(peaks, parts.tower.encode_largest, layout.images)
            done("largest steps run")
        layout = memory.settle_pages(layout, parts.group, peaks, num_graphs)
    with must_fit("the KV cache", "lower cache.memory_share, or stop what else allocates on this GPU"):
        parts.allocate(layout)
    memory.kv_allocated()
    return replace(parts, layout=layout)


def attention_choices(worker: WorkerConfig, engine: EnginePlan, dtype: torch.dtype, device: Capability) -> list[Choice]:
    """Return the configured backends of all models. dtype: dtype of the models on `device`."""
    kv_type = kv_dtype(worker.cache.dtype, engine.target.kv_scheme, dtype)
    shape = ModelShape(engine.target, worker.tensor_parallel, dtype, worker.cache.page_size, device, kv_type)
    return [
        *target_choices(worker.attention, shape, engine.speculation.verified_modes),
        *engine.speculation.attention(worker.cache.page_size, dtype, device),
    ]


def _backends_of_target(
    worker: WorkerConfig, engine: EnginePlan, device: torch.device, deterministic: bool
) -> Backends:
    """Return the target's backends. Raises ValueError if a configured one does not support its mode."""
    kind = Capability.of(device)
    tensor_parallel, page_size = worker.tensor_parallel, worker.cache.page_size
    shape = ModelShape(engine.target, tensor_parallel, engine.dtype, page_size, kind, engine.kv_dtype)
    backend = deterministic_backend() if deterministic else None
    return target_backends(worker.attention, shape, engine.speculation.verified_modes, backend)


class _Phases:
    """Reports the seconds since the previous phase."""

    def __init__(self, report: PhaseReport) -> None:
        self._report = report
        self._since = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        self._report(phase, now - self._since)
        self._since = now
