"""Configuration -> the parts of one engine, without Ray and without HTTP. Used by `cluster.replica` and `deploy`.

torch is imported only by whoever builds a rank or reads a checkpoint's configuration.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import AerieConfig
from workers.config import RoundShapes, SchedulerConfig
from workers.memory_use import MemoryUse
from workers.runner.executor import StepExecutor
from workers.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from speculative.build import EngineSpec
    from workers.runner.graphs.compile_processes import CompileProcesses

PhaseReport = Callable[[str, float], None]
PhaseAdvance = Callable[[str, float, float, str], None]


@dataclass(frozen=True)
class Layout:
    """What follows from the configuration, the checkpoints and the memory there is, the same for the scheduler and on
    every rank. A rank that takes the place of another is built to the same.

    shapes: kinds of round, plain first.
    num_pages: KV pages per rank.
    max_model_len: prompt and answer tokens.
    lookahead: tokens beyond a page that its KV depends on.
    scheduler: the configuration's, with numbers in place of "auto".
    memory: where that of rank 0 went.
    """

    shapes: RoundShapes
    num_pages: int
    max_model_len: int
    lookahead: int
    scheduler: SchedulerConfig
    memory: MemoryUse | None = None


def build_scheduler(config: AerieConfig, layout: Layout) -> Scheduler:
    """The scheduler of one engine."""
    return Scheduler(
        layout.scheduler,
        config.cache,
        layout.num_pages,
        layout.max_model_len,
        time.monotonic,
        layout.shapes,
        layout.lookahead,
        graph_capture=config.graph_capture,
    )


def engine_spec(config: AerieConfig) -> "EngineSpec":
    """One engine, as the layers below read it."""
    from speculative.build import EngineSpec

    return EngineSpec(config.worker, config.speculative, config.draft_attention)


def import_rank(device: str) -> None:
    """Import what a rank on a device of this type is made of: seconds that a spare worker has behind it. Uses none."""
    import speculative.build  # noqa: F401
    import workers.models.llama  # noqa: F401

    if device == "cuda":
        import workers.runner.graphs.cuda_graph  # noqa: F401


class RankBuilder:
    """One rank, before it is built and after: target, draft, KV pools and decoding on one device.

    device_name: what it computes on, for the operator.
    """

    def __init__(self, config: AerieConfig, rank: int, compilers: "CompileProcesses | None" = None) -> None:
        """compilers: see `workers.runner.build.build_rank`; None: begun when they are needed."""
        import torch

        from speculative.build import plan_layout

        self._compilers = compilers
        self._rank = rank
        self._spec = engine_spec(config)
        self._layout = plan_layout(self._spec)
        self._num_threads = config.engine.threads_per_worker
        self._is_cuda = config.model.device == "cuda"
        if self._is_cuda:
            from workers.runner.graphs.kernel_compilation import read_compiler

            read_compiler()
        self.device_name = torch.cuda.get_device_name(0) if self._is_cuda else f"cpu, {self._num_threads} thread(s)"

    def build(
        self,
        rendezvous: str,
        report: PhaseReport,
        former: Layout | None = None,
        advance: PhaseAdvance = lambda phase, done, total, unit: None,
    ) -> StepExecutor:
        """Joins the other ranks at `rendezvous` ("tcp://host:port" on rank 0's node), loads, allocates and warms up;
        `report` hears each phase and its seconds, `advance` how far a long one is. former: of the ranks that these take
        the place of; what those have measured is not measured again, so that there are no `costs`."""
        import torch

        from speculative.build import build_rank

        torch.set_num_threads(self._num_threads)
        spec, layout = self._spec, self._layout
        if former is not None:
            rank_bytes = former.memory.of_rank if former.memory is not None else 0
            layout = layout.as_built(former.num_pages, former.scheduler.num_slots, rank_bytes)
            spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=False))
        compilers = self._compilers
        if compilers is None and self._is_cuda and former is None:  # a later rank finds all kernels in the cache
            from workers.runner.graphs.kernel_compilation import compile_processes

            compilers = compile_processes(spec.worker.tensor_parallel)
        self._built = build_rank(spec, layout, self._rank, rendezvous, report, compilers, advance)
        self._built.worker.begin_grammars()
        return self._built.worker

    def layout(self) -> Layout:
        """What the scheduler must know of all ranks, once they are built."""
        layout = self._built.layout
        return Layout(
            shapes=layout.shapes,
            num_pages=layout.num_pages,
            max_model_len=layout.max_model_len,
            lookahead=layout.lookahead,
            scheduler=layout.scheduler,
            memory=self._built.memory,
        )
