"""Chooses the graphs that a start captures, and compiles their kernels ahead. Used by `aerie.workers.runner.build`."""

import logging

import torch

from aerie.kernels.capability import Capability
from aerie.workers.config import WorkerConfig
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.costs.cost_points import measured_steps
from aerie.workers.runner.costs.cost_probe import probe_extent
from aerie.workers.runner.decoding import CuttableStrategy
from aerie.workers.runner.graphs.compile_processes import CompileProcesses
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import GraphKey, bucket_sizes, token_buckets
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead, report_compilations
from aerie.workers.runner.graphs.recorder import Recorder
from aerie.workers.slots.slot_table import SlotTable

logger = logging.getLogger(__name__)


def rounds_are_graphs(worker: WorkerConfig, device: Capability, host_readers: str | None, rank: int) -> bool:
    """Whether rounds are captured as CUDA graphs. Rank 0 warns if an attention backend prevents it.

    host_readers: the result of `cpu_length_readers`.
    """
    wanted = device.captures_graphs and worker.cuda_graphs
    if wanted and host_readers is not None and rank == 0:
        logger.warning(
            "rounds run eagerly, without CUDA graphs, because attention backend %s reads lengths on the host "
            "(needs_cpu_seq_lens); triton does not",
            host_readers,
        )
    return wanted and host_readers is None


def graphed_strategy(
    strategy: CuttableStrategy, slots: SlotTable, layout: EngineLayout, recorder: Recorder, with_chunks: bool = True
) -> GraphedDecoding:
    """Wrap the strategy in graphs, without capturing any. with_chunks: also capture steps with prompt tokens."""
    buckets = bucket_sizes(layout.scheduler.num_slots)
    tokens = token_buckets(layout.scheduler.step_token_limit) if with_chunks else ()
    return GraphedDecoding(
        strategy,
        slots,
        buckets,
        layout.max_position,
        recorder,
        tokens,
        layout.has_latent_rows,
        bool(layout.bytes_per_state),
        layout.lora is not None,
    )


def first_graphs(
    graphed: GraphedDecoding, layout: EngineLayout, page_size: int, device: torch.device
) -> frozenset[GraphKey]:
    """Return the graphs that a start waits for (`GraphKeys.first`). They do not depend on the number of KV pages."""
    extent = probe_extent(layout.with_pages(0), page_size, graphed.wanted_token_buckets, device)
    return graphed.first_graphs(measured_steps(extent))


def compile_ahead(
    graphed: GraphedDecoding, first: frozenset[GraphKey], group: TPGroup, compilers: CompileProcesses | None
) -> str:
    """Compile the kernels of the graphs `first` in parallel, instead of one by one at their launch. Return a line for
    the log."""
    report_compilations(False)  # a previous engine in this process may have turned it on
    ahead = CompileAhead(processes=compilers)
    try:
        graphed.dry_run(first, ahead, group)
    except Exception as error:  # a compiler may raise any exception; Triton's are not RuntimeErrors
        logger.warning("could not compile kernels ahead; they are compiled at their first launch: %s", error)
    finally:
        ahead.close()
    torch.cuda.empty_cache()  # frees the memory of the dry runs before memory is measured
    return f"{ahead.num_kernels} kernels ready"
