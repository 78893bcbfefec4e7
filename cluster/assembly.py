"""Builds the parts of one engine from the configuration, without Ray and HTTP. Used by `aerie.cluster.replica` and
`deploy`.

The import takes seconds, because it imports torch and all modules of a rank; it touches no device. A spare worker
imports it ahead of time. Processes that build no rank must not import it.
"""

import dataclasses

import torch

import aerie.workers.models.llama  # noqa: F401 - with it what all families share
import aerie.workers.runner.graphs.cuda_graph  # noqa: F401
from aerie.cluster.config import AerieConfig
from aerie.cluster.plan import RankPlan
from aerie.speculative.build import EngineSpec, plan_engine
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.build import PhaseAdvance, PhaseReport, build_rank
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.runner.graphs.compile_jobs import CompileProcesses
from aerie.workers.runner.graphs.kernel_compilation import compile_processes, hash_compiler


def engine_spec(config: AerieConfig | RankPlan) -> EngineSpec:
    """Return one engine's specification, as `workers` and `speculative` take it."""
    return EngineSpec(config.worker, config.speculative, config.draft_attention)


class RankBuilder:
    """One rank, with target, draft, KV pools and decoding on one device. `build` builds it.

    device_name: name of its device, for reports.
    """

    def __init__(self, plan: RankPlan, rank: int, compilers: CompileProcesses | None = None) -> None:
        """compilers: see `aerie.workers.runner.build.build_rank`; None: started when needed."""
        self._compilers = compilers
        self._rank = rank
        self._spec = engine_spec(plan)
        self._engine = plan_engine(self._spec)
        self._num_threads = plan.threads
        self._uses_gpu = plan.uses_gpus
        if self._uses_gpu:
            hash_compiler()
        self.device_name = torch.cuda.get_device_name(0) if self._uses_gpu else f"cpu, {self._num_threads} thread(s)"

    def build(
        self,
        rendezvous: str,
        report: PhaseReport,
        former: EngineLayout | None = None,
        advance: PhaseAdvance = lambda phase, done, total, unit: None,
    ) -> StepExecutor:
        """Join the other ranks, load, allocate and warm up.

        rendezvous: "tcp://host:port" on rank 0's node.
        report: called with each phase and its seconds.
        advance: called with the progress of long phases.
        former: facts of the ranks that these replace. Their measurements are not repeated."""
        torch.set_num_threads(self._num_threads)
        spec, engine = self._spec, self._engine
        if former is not None:
            engine = dataclasses.replace(engine, layout=former)
            spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=False))
        compilers = self._compilers
        if compilers is None and self._uses_gpu and former is None:  # a replacement finds all kernels in the cache
            compilers = compile_processes(spec.worker.tensor_parallel)
        self._built = build_rank(spec.worker, engine, self._rank, rendezvous, report, compilers, advance)
        self._built.worker.begin_grammars()
        return self._built.worker

    def layout(self) -> EngineLayout:
        """Return the layout of the built ranks, for the scheduler."""
        return self._built.layout
