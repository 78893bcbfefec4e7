"""Configuration -> the parts of one engine, without Ray and without HTTP. Used by `cluster.replica` and `deploy`.

torch is imported only by whoever builds a rank or reads a checkpoint's configuration.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import AerieConfig
from workers.config import RoundShapes, SchedulerConfig
from workers.runner.executor import StepExecutor
from workers.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from speculative.build import EngineSpec

PhaseReport = Callable[[str, float], None]


@dataclass(frozen=True)
class Layout:
    """What follows from the configuration and the checkpoints, the same for the scheduler and on every rank.

    shapes: kinds of round, plain first.
    num_pages: KV pages per rank.
    max_model_len: prompt and answer tokens.
    lookahead: tokens beyond a page that its KV depends on.
    scheduler: the configuration's, with numbers in place of "auto".
    """

    shapes: RoundShapes
    num_pages: int
    max_model_len: int
    lookahead: int
    scheduler: SchedulerConfig


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
    )


def engine_spec(config: AerieConfig) -> "EngineSpec":
    """One engine, as the layers below read it."""
    from speculative.build import EngineSpec

    return EngineSpec(config.worker, config.speculative, config.draft_attention)


class RankBuilder:
    """One rank before it is built: target, draft, KV pools and decoding on one device.

    device_name: what it computes on, for the operator.
    """

    def __init__(self, config: AerieConfig, rank: int) -> None:
        import torch

        from speculative.build import plan_layout

        self._rank = rank
        self._spec = engine_spec(config)
        self._layout = plan_layout(self._spec)
        self._num_threads = config.engine.threads_per_worker
        cuda = config.model.device == "cuda"
        self.device_name = torch.cuda.get_device_name(0) if cuda else f"cpu, {self._num_threads} thread(s)"

    def layout(self) -> Layout:
        """What the scheduler must know of all ranks."""
        layout = self._layout
        return Layout(
            shapes=layout.shapes,
            num_pages=layout.num_pages,
            max_model_len=layout.max_model_len,
            lookahead=layout.lookahead,
            scheduler=layout.scheduler,
        )

    def build(self, rendezvous: str, report: PhaseReport) -> StepExecutor:
        """Joins the other ranks at `rendezvous` ("tcp://host:port" on rank 0's node), loads, allocates and warms up;
        `report` hears each phase and its seconds."""
        import torch

        from speculative.build import build_worker

        torch.set_num_threads(self._num_threads)
        return build_worker(self._spec, self._layout, self._rank, rendezvous, report)
